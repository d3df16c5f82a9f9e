"""The trainer as a role: finished groups in, a step of the policy, a new version of the weights out.

One step: load the groups, pack; score the samples with the weights as they are (the proximal policy, and the mismatch with
what the engine recorded) and with other networks; have the algorithm give credit for what is known by then; then one
optimiser update for each part of the groups. Every forward pass of a batch, recomputed activations included, takes the
same routes.

Shape letters: B rows, T positions, N targets of a step over all ranks, L MoE layers, K route slots, W branches of
balance state, E experts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder
from stretto.base.records import Meter, new_run_id
from stretto.base.trajectory import Group, WeightVersion
from stretto.data.pack import IGNORED, PADDING
from stretto.model.checkpoint import Checkpoint, read_checkpoint, weights_hash
from stretto.model.elastic import load_balance
from stretto.model.parallel import Ranks, device_name, full_state, join, spread
from stretto.model.spec import Subnet, count
from stretto.model.transformer import Context, Recorder, Replay, Routing, Transformer
from stretto.ops.logprob import chosen_logprobs
from stretto.ops.matmul import Arithmetic
from stretto.optim.build import build_optimizers, set_learning_rate
from stretto.optim.schedule import learning_rate
from stretto.rl.algorithms import Streams, TokenCredit, give_credit, load_algorithm, unroll
from stretto.rl.batch import Batch, by_sample, credited, pack
from stretto.rl.ledger import GroupRef
from stretto.rl.log import StepReport, mismatch, staleness
from stretto.rl.log import samples as sample_scalars
from stretto.rl.log import update as update_scalars
from stretto.rl.objective import PolicyObjective
from stretto.rl.recipe import ADVANTAGES, SNAPSHOTS, WEIGHTS, LossConfig, RlRecipe
from stretto.rl.samples import load_group, packed_bytes
from stretto.rl.weights import is_quantised, pack_state, publish, retire
from stretto.train.loop import peak_memory, write_trained
from stretto.train.snapshot import SnapshotMeta, Snapshots, read_meta
from stretto.train.step import MicroBatch, StepResult, optimisation_step

STAGE = "rl"
KEEP_VERSIONS = 4
"""Weight files kept: engines may lag behind while they fetch."""
FLIPS_EVERY = 10
"""Steps between two looks at route flips, where they cost a pass of their own."""


@dataclass(slots=True, eq=False)
class Pass:
    """One batch and what is found out about it before the update; made by `place`."""

    batch: Batch
    """All ranks' rows."""
    mine: dict[str, Tensor]
    """Streams of this rank's rows, on the device, by their names in `Batch`."""
    ctx: Context
    """Of every pass of the policy; its routes are what is replayed."""
    scores: dict[str, Tensor] = field(default_factory=dict)
    """Log-probabilities [B, T] of the targets, 0 elsewhere: by ``policy``, as it is before the update, and other networks."""
    num_flips: int = 0
    """Places, (token, MoE layer), where the policy's own choice of experts is not what the engine recorded."""
    num_recorded: int = 0


def place(batch: Batch, ranks: Ranks, arithmetic: Arithmetic, *, replays: bool) -> Pass:
    """This rank's rows of ``batch``, on its device. ``replays``: with the engine's routes (R3)."""
    part = batch.rows(ranks.rows(len(batch.tokens_BT)))
    mine = {
        name: torch.from_numpy(value).to(ranks.device)
        for name in Batch.__slots__
        if (value := getattr(part, name)) is not None
    }
    ctx = Context(
        mine["positions_BT"],
        mine["documents_BT"],
        shared_BT2=mine["shared_BT2"],
        operators=arithmetic.operators,
        routing=Replay(mine["routes_BTLK"]) if replays else None,
    )
    return Pass(batch, mine, ctx)


@torch.no_grad()
def score(model: Transformer, each: Pass, temperature: float, routing: Routing | None = None) -> Tensor:
    """Log-probabilities [B, T] of the targets under ``model``, 0 elsewhere; without ``routing`` by its own routes."""
    tokens_BT, ctx = each.mine["tokens_BT"], replace(each.ctx, routing=routing)
    output = model(tokens_BT, model.config.full(), ctx)
    logp_N, _ = chosen_logprobs(
        output.hidden_BTD.flatten(0, 1),
        model.head_VD,
        each.mine["targets_BT"].flatten(),
        temperature,
        operators=ctx.operators,
    )
    return logp_N.view_as(tokens_BT)


def recompute(model: Transformer, each: Pass, temperature: float, replay: str) -> None:
    """Score with the policy as it is, and compare its choice of experts with the engine's.

    With R2 that choice is what the update replays; what was scored here took it, as nothing else was told.
    """
    recorder = Recorder(model.config, each.mine["tokens_BT"], each.ctx.routing)
    each.scores["policy"] = score(model, each, temperature, recorder)
    recorded_BTLK, own_BTLK = each.mine.get("routes_BTLK"), recorder.own_BTLK
    if recorded_BTLK is not None:
        is_known_BTL = (recorded_BTLK[..., 0] >= 0) & (each.mine["documents_BT"] != PADDING)[..., None]
        is_other_BTL = (own_BTLK.sort(-1).values != recorded_BTLK.sort(-1).values).any(-1)
        each.num_flips, each.num_recorded = int((is_other_BTL & is_known_BTL).sum()), int(is_known_BTL.sum())
    if replay == "r2":
        each.ctx = replace(each.ctx, routing=Replay(own_BTLK))


def give_pass_credit(each: Pass, credits: Sequence[TokenCredit], ranks: Ranks) -> None:
    """What was said of the samples, by their numbers, to the pass."""
    each.batch = credited(each.batch, credits)
    rows = ranks.rows(len(each.batch.tokens_BT))
    for name in ("advantages_BT", "weights_BT"):
        each.mine[name] = torch.from_numpy(getattr(each.batch, name)[rows]).to(ranks.device)


def micro_batch(each: Pass, loss: LossConfig, temperature: float, subnet: Subnet) -> MicroBatch:
    """The pass as the optimisation step takes it."""
    mine, ctx = each.mine, each.ctx
    proximal_BT = each.scores["policy"] if loss.proximal == "recompute" else mine["behaviour_BT"]
    objective = PolicyObjective(loss, temperature, mine, proximal_BT, each.scores.get("reference"), ctx.operators)
    tokens_BT, targets_BT, num_targets = mine["tokens_BT"], mine["targets_BT"], each.batch.num_targets
    return MicroBatch("policy", tokens_BT, targets_BT, ctx, subnet, num_targets, objective=objective)


def open_trainer(recipe: RlRecipe, run: Path, start: Path, device: str) -> TrainerRole:
    """The only rank of a run, on ``device``."""
    return TrainerRole(recipe, run, start, ranks=Ranks(0, 1, torch.device(device)))


@dataclass(frozen=True, slots=True, eq=False)
class _Update:
    """What one optimiser update trains."""

    samples: list[list[Streams]]
    passes: list[Pass]


class TrainerRole:
    """The policy, its optimiser, and the run's snapshots. With several ranks there is a role on each, called alike."""

    def __init__(self, recipe: RlRecipe, run: Path | str, start: Path | str, *, ranks: Ranks | None = None):
        """Read the checkpoint ``start``, on the device of ``ranks``; None: torchrun's environment says.
        Raises UserError: the checkpoint cannot be read, or the ranks cannot share the rows."""
        self._recipe, self._run, self._start = recipe, Path(run), Path(start)
        self._ranks = ranks or join()
        train = recipe.train
        if train.micro_rows % self._ranks.world:
            raise UserError(
                f"train.micro_rows: {train.micro_rows} rows cannot be shared by {self._ranks.world} ranks; use a multiple"
            )
        torch.set_num_threads(train.threads)
        self._arithmetic = Arithmetic(recipe.precision.train, recipe.precision.batch_invariant)
        self._origin = self._read(self._start)
        self._model = self._origin.model
        self._optimizers = build_optimizers(recipe.optim, self._model)
        load_algorithm(recipe.loss.advantage)  # whoever has none is to hear of it now
        folders = {"reference": self._start} if recipe.loss.kl_weight else {}
        folders |= {name: checkpoint_folder(folder) for name, folder in recipe.teachers.items()}
        self._teachers = {name: self._teacher(name, folder) for name, folder in folders.items()}
        self._snapshots = Snapshots(self._run / SNAPSHOTS, train.keep_snapshots)
        self._data_hash = weights_hash(self._start)
        self._run_id = new_run_id()
        self._meter = Meter(STAGE, device_name(self._ranks.device), self._ranks.world)
        self.version = self._num_tokens = 0
        """Of the weights: steps completed."""
        self._copied: tuple[int, Mapping[str, Tensor]]
        """A version and its weights."""

    def step(self, refs: Sequence[GroupRef], step: int) -> StepReport:
        """Train on ``refs`` as step ``step`` (from 0); groups count in order of their ordinals.

        Raises:
            UserError: a group cannot be read, or its routes are not of this network.
            NonFiniteError: nothing was applied; the last snapshot is good.
        """
        assert step == self.version, f"step {step} was asked for, {self.version} is next"
        started, config = time.perf_counter(), self._model.config
        scores = self._scores_before(step)
        with self._meter:
            refs = sorted(refs, key=lambda ref: ref.ordinal)
            shape = (config.num_moe_layers, max(config.top_k, *config.top_k_by_layer))
            groups = [load_group(ref.location, *shape) for ref in refs]
            updates = self._plan(groups)
            flat = [each for update in updates for each in update.passes]
            loaded = time.perf_counter()
            for update in updates:
                self._score(update, scores)
            scored = time.perf_counter()
            results = [self._update(update.passes) for update in updates]
            updated = time.perf_counter()
            shapes, counts = [each.batch.tokens_BT.shape for each in flat], count(config, config.full())
            flops = sum(counts.forward_flops(rows * length, length) for rows, length in shapes)
            self._meter.add(flops=(scores + len(self._teachers)) * flops)
            num_samples, num_tokens = sum(ref.num_samples for ref in refs), sum(ref.num_tokens for ref in refs)
            self.version += 1
            self._num_tokens += num_tokens
        scalars = self._measure(groups, updates, results) | {
            "time/load_s": loaded - started,
            "time/recompute_s": scored - loaded,
            "time/update_s": updated - scored,
        }
        return StepReport(self.version, num_samples, num_tokens, scalars)

    def copy_weights(self) -> None:
        """Keep the weights as they are for `publish`."""
        state = {name: tensor.clone() for name, tensor in full_state(self._model).items()}
        self._copied = self.version, state

    async def publish(self) -> WeightVersion | None:
        """Write what `copy_weights` kept to the run's folder of weights, beside whatever step is made meanwhile; None on all
        ranks but the first. Raises UserError: the disk is full."""
        number, state = self._copied
        del self._copied  # or a second network would lie in memory for ever
        return await asyncio.to_thread(self._write_version, number, state) if self._ranks.is_first else None

    def _write_version(self, number: int, state: Mapping[str, Tensor]) -> WeightVersion:
        if self._recipe.precision.rollout == "bf16":
            # what an engine in bf16 rounds them to anyway: half the bytes. Router, norms and head stay in fp32 there.
            state = {name: each.bfloat16() if is_quantised(name) else each for name, each in state.items()}
        elif self._recipe.precision.rollout == "fp8":
            state = pack_state(state)  # quantised once, here: the engine makes the same bytes of them again
        version = publish(self._run / WEIGHTS, number, state)
        retire(self._run / WEIGHTS, KEEP_VERSIONS)
        return version

    def save(self, cut: Mapping[str, Any]) -> Path:
        """Write a snapshot, with the controller's ``cut`` at the same step in it.
        Raises UserError: on all ranks: the disk is full; older snapshots are untouched."""
        meta = SnapshotMeta(
            step=self.version,
            loader=dict(cut),
            receipt=self._meter.receipt(peak_memory(self._ranks)),
            run_id=self._run_id,
            layer_order=self._model.config.layer_ranking,
            tokens_by_kind={"policy": self._num_tokens},
            recipe=self._recipe.model_dump(mode="json"),
            data_hash=self._data_hash,
        )
        self._snapshots.save(self._model, self._optimizers, meta, self._ranks)
        return self._snapshots.path(self.version)

    def resume(self) -> dict[str, Any] | None:
        """Go on from the newest snapshot, bit for bit; returns the cut it was saved with. None: there is no snapshot.
        Raises UserError: the snapshot is damaged, or of another start."""
        path = self._snapshots.latest()
        if path is None:
            return None
        meta = read_meta(path)
        if meta.data_hash != self._data_hash:
            raise UserError(
                f"{self._start}: --model: not the checkpoint that {self._run} began with; name that one, or start a new run folder"
            )
        self._snapshots.load(path, self._model, self._optimizers, self._ranks)
        self.version, self._run_id, self._num_tokens = meta.step, meta.run_id, meta.tokens_by_kind["policy"]
        self._meter = Meter(STAGE, meta.receipt.device, self._ranks.world, spent=meta.receipt)
        return meta.loader

    def write(self, folder: Path | str) -> None:
        """Write the policy as a checkpoint, with the start's tokenizer and lineage.
        Raises UserError: the disk is full, or the folder holds other files."""
        origin = self._origin
        write_trained(
            Path(folder),
            self._model,
            self._meter,
            self._ranks,
            name=self._run.name,
            stage=STAGE,
            config=self._recipe.model_dump(mode="json"),
            tokenizer_dir=self._start if (self._start / "tokenizer.json").is_file() else None,
            parents=(origin.lineage,) if origin.lineage else (),
            run_id=self._run_id,
            data_hash=self._data_hash,
            family=origin.family,
            presets=origin.presets,
        )

    def _scores_before(self, step: int) -> bool:
        """Whether ``step`` has a pass of the policy before its updates. A single update finds the same log-probabilities by
        itself; so that pass is for several, for an algorithm that may look at it, and now and then for the flips."""
        recipe = self._recipe
        is_looked_at = recipe.loss.advantage not in ADVANTAGES
        return recipe.train.minibatches > 1 or is_looked_at or step % FLIPS_EVERY == 0

    def _read(self, folder: Path) -> Checkpoint:
        """A checkpoint, its network spread over the ranks. Raises UserError: it cannot be read."""
        found = read_checkpoint(folder, dtype=torch.float32)
        return replace(found, model=spread(found.model, self._ranks))

    def _teacher(self, name: str, folder: Path) -> Transformer:
        """Raises UserError: no checkpoint there, or of another vocabulary."""
        model = self._read(folder).model.requires_grad_(False)
        sizes = model.config.vocab_size, self._model.config.vocab_size
        if sizes[0] != sizes[1]:
            raise UserError(f"teachers.{name}: a vocabulary of {sizes[0]}, the policy's is {sizes[1]}; choose another")
        return model

    def _plan(self, groups: Sequence[Group]) -> list[_Update]:
        """What each update trains, without credit."""
        recipe, train, ranks = self._recipe, self._recipe.train, self._ranks
        assert len(groups) % train.minibatches == 0, f"{len(groups)} groups for {train.minibatches} updates"
        replays, size, updates = recipe.replay == "r3", len(groups) // train.minibatches, []
        has_routes = replays or all(each.routes is not None for group in groups for each in group.trajectories)
        for start in range(0, len(groups), size):
            samples = unroll(groups[start : start + size], recipe.loss.overlong_share)
            batches = pack(samples, train.seq_len, train.micro_rows, share=ranks.world, with_routes=has_routes)
            passes = [place(batch, ranks, self._arithmetic, replays=replays) for batch in batches]
            updates.append(_Update(samples, passes))
        return updates

    def _score(self, update: _Update, scores: bool) -> None:
        """Score ``update`` by all networks (by the policy if ``scores``), and give credit for it."""
        loss, rollout = self._recipe.loss, self._recipe.rollout
        for each in update.passes:
            if scores:
                recompute(self._model, each, rollout.temperature, self._recipe.replay)
            for name, teacher in self._teachers.items():
                each.scores[name] = score(teacher, each, rollout.temperature)
        samples = [sample for group in update.samples for sample in group]
        lengths = [sample.num_inputs for sample in samples]
        for name in update.passes[0].scores:
            wholes = [self._whole(each, each.scores[name]) for each in update.passes]
            streams = by_sample([each.batch for each in update.passes], wholes, lengths)
            for sample, stream_S in zip(samples, streams, strict=True):
                sample.scores[name] = stream_S
        credits = give_credit(update.samples, loss.advantage, loss.normaliser, rollout.max_tokens)
        for each in update.passes:
            give_pass_credit(each, credits, self._ranks)

    def _update(self, update: Sequence[Pass]) -> StepResult:
        recipe, model = self._recipe, self._model
        set_learning_rate(self._optimizers, learning_rate(recipe.optim, self.version, recipe.train.steps))
        result = optimisation_step(
            model,
            self._optimizers,
            [micro_batch(each, recipe.loss, recipe.rollout.temperature, model.config.full()) for each in update],
            self._ranks,
            clip_norm=recipe.optim.clip_norm,
            balance_rate=recipe.train.balance_rate,
            dtype=torch.float32,  # the arithmetic is the context's: the engine's operators, not autocast's
        )
        self._meter.add(flops=result.flops, tokens=result.num_tokens)
        return result

    def _measure(
        self, groups: Sequence[Group], updates: Sequence[_Update], results: Sequence[StepResult]
    ) -> dict[str, float]:
        """All scalars of a step that just ended; the same on every rank."""
        version, recipe = self.version - 1, self._recipe
        passes = [each for update in updates for each in update.passes]
        streams = [stream for result in results for stream in result.streams_N]
        found = {name: self._gathered(passes, [each[name] for each in streams]) for name in streams[0]}
        before = [each.scores["policy"] for each in passes if "policy" in each.scores]
        before_N = self._gathered(passes, before) if before else found["logp"]
        batches, most = [each.batch for each in passes], sum(len(group.trajectories) for group in groups)
        firsts = [number * most for number, update in enumerate(updates) for _ in update.passes]
        behaviour_N = np.concatenate([each.behaviour_BT[each.targets_BT != IGNORED] for each in batches])
        ages_N = np.concatenate([version - each.versions_BT[each.targets_BT != IGNORED] for each in batches])
        samples_N = np.concatenate(
            [first + each.samples_BT[each.targets_BT != IGNORED] for first, each in zip(firsts, batches, strict=True)]
        )
        scalars = mismatch(before_N, behaviour_N.astype(np.float64), ages_N, samples_N)
        scalars |= update_scalars(found) | sample_scalars(groups) | staleness(groups, version)
        flips = torch.tensor([[each.num_flips, each.num_recorded] for each in passes], device=self._ranks.device).sum(0)
        num_flips, num_recorded = self._ranks.sum(flips).tolist()
        if num_recorded:
            scalars["routes/flips"] = num_flips / num_recorded
        routes = [each.routes for group in groups for each in group.trajectories if each.routes is not None]
        if routes:
            scalars["routes/bytes_per_token"] = sum(map(packed_bytes, routes)) / sum(map(len, routes))
        loads = [load_balance(each_WE[0]) for result in results for each_WE in result.counts.values()]
        num_places, num_inputs = sum(each.tokens_BT.size for each in batches), sum(each.num_inputs for each in batches)
        num_copied = sum(each.num_tokens - 1 for group in groups for each in group.trajectories)
        scalars |= {
            "optim/grad_norm": np.mean([result.grad_norm for result in results]),
            "optim/lr": learning_rate(recipe.optim, version, recipe.train.steps),
            "experts/max_overload": max(loads, default=1.0),
            "batch/padding": 1.0 - num_inputs / num_places,
            "batch/positions": num_places,
            "batch/shared": 1.0 - num_inputs / num_copied,
        }
        return {name: float(value) for name, value in scalars.items()}

    def _gathered(self, passes: Sequence[Pass], mine: Sequence[Tensor]) -> np.ndarray:
        """What all ranks hold of the targets' values, in the order of the batches: fp64 [N]."""
        wholes = [self._whole(each, value) for each, value in zip(passes, mine, strict=True)]
        kept = [whole_BT[each.batch.targets_BT != IGNORED] for each, whole_BT in zip(passes, wholes, strict=True)]
        return np.concatenate(kept).astype(np.float64)

    def _whole(self, each: Pass, mine: Tensor) -> np.ndarray:
        """All ranks' rows [B, T] of what this one has for its own."""
        whole_BT = torch.zeros(each.batch.tokens_BT.shape, device=self._ranks.device)
        whole_BT[self._ranks.rows(len(whole_BT))] = mine.view(-1, whole_BT.shape[1])
        return self._ranks.sum(whole_BT).cpu().numpy()
