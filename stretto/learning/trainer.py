"""Trainer role: turns finished groups into a step of the policy and a new version of the weights.

One step loads and packs the groups; scores the samples with the current weights (the proximal policy, and the mismatch with the
engine's records), with other networks and with teachers; computes advantages with the algorithm; and makes one optimiser update
for each part of the groups. Every forward pass of a batch, recomputed activations included, uses the same routes.

Shape letters: B rows, T positions, N targets of a step over all ranks, L MoE layers, K route slots, W branches of
balance state, E experts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.base.config import completed
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder
from stretto.base.records import Meter, Receipt, new_run_id
from stretto.base.track import say
from stretto.base.trajectory import Group, GroupRef, WeightVersion
from stretto.data.pack import IGNORED, PADDING
from stretto.learning.algorithms import Streams, TokenCredit, give_credit, load_algorithm, unroll
from stretto.learning.batch import Batch, at_targets, by_sample, pack
from stretto.learning.canary import score_canary
from stretto.learning.channel import open_channel
from stretto.learning.distillation import (
    DistillObjective,
    Lesson,
    Progress,
    progressed,
    source_scalars,
    source_weights,
    taught_loss,
)
from stretto.learning.metrics import StepReport, mismatch, staleness
from stretto.learning.metrics import samples as sample_scalars
from stretto.learning.metrics import update as update_scalars
from stretto.learning.objective import PolicyObjective
from stretto.learning.passes import Pass, place, score
from stretto.learning.recipe import ADVANTAGES, SNAPSHOTS, STEERING, DistillConfig, LossConfig, RlRecipe
from stretto.learning.roles import TrainerConfig
from stretto.learning.samples import load_group, packed_bytes
from stretto.learning.teachers import give_lessons, open_teachers, target_logprobs
from stretto.learning.weights import is_quantised, pack_state
from stretto.model.checkpoint import known_hash, tokenizer_dir_of
from stretto.model.counts import count
from stretto.model.elastic import load_balance
from stretto.model.parallel import MeetingPoint, Ranks, device_name, full_state, join, join_gang, read_placed
from stretto.model.spec import Subnet
from stretto.model.transformer import Context, Recorder, Replay, Transformer
from stretto.ops.logprob import Teacher, chosen_logprobs
from stretto.ops.matmul import Arithmetic, default_precision
from stretto.ops.memory import freed_memory_kept, peak_bytes
from stretto.optim.build import build_optimizers, set_learning_rate
from stretto.optim.schedule import learning_rate
from stretto.runtime.runtime import Caller
from stretto.runtime.store import FolderStore, Store
from stretto.train.finish import write_trained
from stretto.train.recipe import FIXED_ROUTERS, fixed_routers_of
from stretto.train.snapshot import Change, SnapshotMeta, Snapshots, changes_between, read_meta
from stretto.train.step import MicroBatch, NonFiniteError, Objective, StepResult, optimisation_step

KEEP_VERSIONS = 4
"""Number of weight files kept, because engines may still load older versions."""
FLIPS_EVERY = 10
"""Steps between two measurements of route flips, if these need a forward pass of their own."""
_TRIED_TOKENS = 8
"""Number of tokens on which new weights are checked."""
_BEFORE = "before"
"""Name of the log-probabilities before the update, among the values per token of a step."""
_PROGRESS = "distill"
"""Key of the sources' `Progress` in a snapshot, beside the controller's cut."""


def recompute(model: Transformer, micro: Pass, temperature: float, replay: str) -> None:
    """Score the pass with the current policy, and count differences between its routes and the engine's.

    With R2 the update replays the policy's routes, which were also used for these scores.
    """
    recorder = Recorder(model.config, micro.mine["tokens_BT"], micro.ctx.routing)
    micro.scores["policy"] = score(model, micro, temperature, recorder)
    recorded_BTLK, own_BTLK = micro.mine.get("routes_BTLK"), recorder.own_BTLK
    if recorded_BTLK is not None:
        is_known_BTL = (recorded_BTLK[..., 0] >= 0) & (micro.mine["documents_BT"] != PADDING)[..., None]
        is_other_BTL = (own_BTLK.sort(-1).values != recorded_BTLK.sort(-1).values).any(-1)
        micro.num_flips, micro.num_recorded = int((is_other_BTL & is_known_BTL).sum()), int(is_known_BTL.sum())
    if replay == "r2":
        micro.ctx = replace(micro.ctx, routing=Replay(own_BTLK))


def give_pass_credit(micro: Pass, credits: Sequence[TokenCredit], ranks: Ranks) -> None:
    """Write the samples' advantages and weights into the pass; ``credits`` by the samples' numbers."""
    rows = ranks.rows(len(micro.batch.tokens_BT))
    for name in ("advantages", "weights"):
        value_BT = at_targets(micro.batch, [getattr(each, f"{name}_S") for each in credits])
        micro.mine[f"{name}_BT"] = torch.from_numpy(value_BT[rows]).to(ranks.device)


def micro_batch(
    micro: Pass, loss: LossConfig, temperature: float, subnet: Subnet, distill: DistillConfig | None = None
) -> MicroBatch:
    """The pass as input of the optimisation step."""
    mine, ctx = micro.mine, micro.ctx
    proximal_BT = micro.scores["policy"] if loss.proximal == "recompute" else mine["behaviour_BT"]
    policy = PolicyObjective(loss, temperature, mine, proximal_BT, micro.scores.get("reference"), ctx.operators)
    objective: Objective = policy
    if distill is not None:
        has_policy = distill.has_policy_loss or loss.kl_weight > 0
        objective = DistillObjective(distill, micro.lessons, policy, has_policy)
    tokens_BT, targets_BT, num_targets = mine["tokens_BT"], mine["targets_BT"], micro.batch.num_targets
    return MicroBatch("policy", tokens_BT, targets_BT, ctx, subnet, num_targets, objective=objective)


def open_trainer(opened: Callable[..., TrainerRole], device: str) -> TrainerRole:
    """The trainer of a run with one rank, on ``device``. ``opened``: returns the trainer of the ``ranks`` that it is given."""
    return opened(ranks=Ranks(0, 1, torch.device(device)))


class TrainerRank:
    """One rank of a trainer with several: `join` makes it a `TrainerRole`, whose methods it then has."""

    def __init__(
        self, opened: Callable[..., TrainerRole], config: TrainerConfig, rank: int, device: str, caller: Caller
    ) -> None:
        """``opened``: returns the trainer of the ``ranks`` that it is given."""
        self._opened = opened
        self._ranks = Ranks(rank, config.ranks, torch.device(device), config.ep)
        self._host = caller.host
        self._meeting: MeetingPoint | None = None
        self._trainer: TrainerRole | None = None

    def meet(self) -> tuple[str, int]:
        """Open the place where the ranks meet, and return its address. Called on the first rank."""
        self._meeting = MeetingPoint(self._host, self._ranks.world)
        return self._meeting.address

    def join(self, address: tuple[str, int]) -> None:
        """Join the other ranks, which are called at the same time. Raises UserError: as `TrainerRole`."""
        self._trainer = self._opened(ranks=join_gang(self._ranks, self._meeting or address, self._host))

    def __getattr__(self, name: str) -> Any:
        if self._trainer is None:
            raise AttributeError(f"{name}: this rank has not joined the others")
        return getattr(self._trainer, name)


@dataclass(frozen=True, slots=True, eq=False)
class _Update:
    """Samples and passes of one optimiser update."""

    samples: list[list[Streams]]
    passes: list[Pass]


def _of_targets(batches: Sequence[Batch], name: str) -> NDArray[Any]:
    """Array ``name`` of ``batches`` at the targets [N], in the order of the batches."""
    return np.concatenate([getattr(each, name)[each.targets_BT != IGNORED] for each in batches])


def _sources(update: _Update) -> NDArray[np.str_]:
    """Source of each target [N], in the order of the batches."""
    names = np.array([sample.source for group in update.samples for sample in group])
    return names[_of_targets([micro.batch for micro in update.passes], "samples_BT")]


class TrainerRole:
    """The policy, its optimiser, and the run's snapshots. With several ranks there is one role on each, called with the same
    arguments."""

    def __init__(
        self,
        recipe: RlRecipe,
        run: Path | str,
        start: Path | str,
        *,
        ranks: Ranks | None = None,
        stage: str = "rl",
        store: Store | None = None,
        host: str = "127.0.0.1",
    ):
        """Read the checkpoint ``start`` onto the device of ``ranks``; None: as torchrun's environment says. ``stage``: name of the
        stage in the lineage of the result. ``store``: has the groups and takes the weights; None: the run folder. ``host``: address of
        this machine, at which engines fetch weights with the channel gloo.
        Raises UserError: the checkpoint or a teacher cannot be read, or the ranks cannot share the rows."""
        self._ranks = ranks or join()
        self._recipe = recipe = recipe.on(default_precision(self._ranks.device))
        self._run, self._start, self._stage = Path(run), Path(start), stage
        self._store = store or FolderStore(self._run)
        self._channel = open_channel(recipe.channel, self._store, self._run, host)
        train = recipe.train
        if train.micro_rows % self._ranks.world:
            raise UserError(
                f"train.micro_rows: {train.micro_rows} rows cannot be shared by {self._ranks.world} ranks; use a multiple"
            )
        torch.set_num_threads(train.threads)
        self._arithmetic = Arithmetic(recipe.precision.trainer, recipe.precision.batch_invariant)
        self._origin = read_placed(self._start, self._ranks)
        self._model = self._origin.model
        is_fixed = self._model.config.only_ranks
        optim = fixed_routers_of(recipe.optim) if is_fixed else recipe.optim
        if optim != recipe.optim and self._ranks.is_first:
            say(f"{stage}: {FIXED_ROUTERS}")
        self._balance_rate = 0.0 if is_fixed else recipe.train.balance_rate
        self._optimizers = build_optimizers(optim, self._model)
        load_algorithm(recipe.loss.advantage)  # a missing function is refused before the first step
        folders = {"reference": self._start} if recipe.loss.kl_weight else {}
        folders |= {name: checkpoint_folder(folder) for name, folder in recipe.teachers.items()}
        self._teachers = {name: self._teacher(name, folder) for name, folder in folders.items()}
        self._snapshots = Snapshots(self._run / SNAPSHOTS, train.keep_snapshots)
        self._data_hash = known_hash(self._start)
        self._scorers = open_teachers(recipe, self._start, self._ranks, self._arithmetic)
        self._progress: dict[str, Progress] = {}
        """By source, for sources of past steps, if there are teachers."""
        self._run_id = new_run_id()
        self._changes: tuple[Change, ...] = ()
        self._meter = Meter(stage, device_name(self._ranks.device), self._ranks.world)
        self.version = self._num_tokens = 0
        """Version of the weights: number of completed steps."""
        self._copied: tuple[int, Mapping[str, Tensor]]
        """A version and its weights, between `copy_weights` and `publish`."""
        self._canary: tuple[tuple[float, ...], float] = (), 0.0
        """`score_canary` of the version in ``_copied``."""
        self._until_closed = ExitStack()
        self._until_closed.enter_context(freed_memory_kept(self._ranks.device))

    def step(self, refs: Sequence[GroupRef], step: int) -> StepReport:
        """Train on ``refs`` as step ``step`` (from 0). Groups are ordered by their ordinals.

        Raises:
            UserError: a group cannot be read, or its routes are not of this network.
            NonFiniteError: a loss, a gradient or the output of the new weights is not finite; the last snapshot is valid.
        """
        assert step == self.version, f"step {step} was asked for, {self.version} is next"
        started, config = time.perf_counter(), self._model.config
        with self._meter:
            refs = sorted(refs, key=lambda ref: ref.ordinal)
            shape = (config.num_moe_layers, max([config.top_k, *config.top_k_by_layer]))
            groups = self._ranks.first(lambda: [load_group(ref.location, *shape, self._store) for ref in refs])
            scores = self._scores_before(step, groups)
            updates = self._plan(groups)
            flat = [micro for update in updates for micro in update.passes]
            loaded = time.perf_counter()
            for update in updates:
                self._score(update, scores)
            scored = time.perf_counter()
            try:
                results = [self._update(update.passes) for update in updates]
                self._check_finite()
            except NonFiniteError as error:
                raise NonFiniteError(f"step {step + 1}: {error} in a new run, or try --resume") from None
            updated = time.perf_counter()
            shapes, counts = [micro.batch.tokens_BT.shape for micro in flat], count(config, config.full())
            # attention as if every row were one document, as in `stretto.train.step`
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

    def close(self) -> None:
        """Return freed memory to the system, which keeps it for the next step until then."""
        self._until_closed.close()

    @property
    def receipt(self) -> Receipt:
        """Cost of the run so far, without sampling."""
        return self._meter.receipt()

    def copy_weights(self) -> None:
        """Copy the current weights for `publish`."""
        state = {name: tensor.clone() for name, tensor in full_state(self._model).items()}
        self._copied = self.version, state
        if self._recipe.rollout.address:
            self._canary = score_canary(self._model, self._recipe, self._ranks.device)

    async def publish(self) -> WeightVersion | None:
        """Publish the weights of the last `copy_weights` on the run's channel, concurrently with the next step. Returns None on all
        ranks but the first. Raises UserError: the disk is full."""
        number, state = self._copied
        del self._copied  # else the copy would stay in memory
        return await asyncio.to_thread(self._write_version, number, state) if self._ranks.is_first else None

    def _write_version(self, number: int, state: Mapping[str, Tensor]) -> WeightVersion:
        if self._recipe.precision.engines == "bf16":
            # an engine in bf16 rounds these weights anyway; its router, norms and head stay in fp32
            state = {name: each.bfloat16() if is_quantised(name) else each for name, each in state.items()}
        elif self._recipe.precision.engines == "fp8":
            state = pack_state(state)  # quantising again in the engine gives the same bytes
        canary, tolerance = self._canary
        version = replace(self._channel.publish(number, state), canary=canary, tolerance=tolerance)
        self._channel.retire(KEEP_VERSIONS)
        return version

    def save(self, cut: Mapping[str, Any]) -> Path:
        """Write a snapshot that includes the controller's ``cut`` of the same step.
        Raises UserError, on all ranks: the disk is full; older snapshots are unchanged."""
        progress = {name: asdict(each) for name, each in self._progress.items()}
        meta = SnapshotMeta(
            step=self.version,
            loader=dict(cut) | ({_PROGRESS: progress} if progress else {}),
            receipt=self._meter.receipt(peak_bytes(self._ranks.device)),
            run_id=self._run_id,
            layer_order=self._model.config.layer_ranking,
            tokens_by_kind={"policy": self._num_tokens},
            recipe=self._recipe.model_dump(mode="json"),
            data_hash=self._data_hash,
            changes=self._changes,
        )
        self._snapshots.save(self._model, self._optimizers, meta, self._ranks)
        return self._snapshots.path(self.version)

    def resume(self) -> dict[str, Any] | None:
        """Restore the newest snapshot, bit for bit. Returns its cut; None if there is no snapshot.
        Raises UserError: the snapshot is damaged, of another start, or of a later step than the recipe's last."""
        path = self._snapshots.latest()
        if path is None:
            return None
        meta = read_meta(path)
        if meta.data_hash != self._data_hash:
            raise UserError(
                f"{self._start}: --model: not the checkpoint that {self._run} began with; name that one, or use a new run folder"
            )
        recipe = self._recipe.model_dump(mode="json")
        if meta.step > self._recipe.train.steps:
            raise UserError(
                f"{self._run}: train.steps: {self._recipe.train.steps} is less than the {meta.step} steps that are done; raise it"
            )
        self._changes = meta.changes + changes_between(completed(RlRecipe, meta.recipe), recipe, STEERING, meta.step)
        self._snapshots.load(path, self._model, self._optimizers, self._ranks)
        self.version, self._run_id, self._num_tokens = meta.step, meta.run_id, meta.tokens_by_kind["policy"]
        self._meter = Meter(self._stage, meta.receipt.device, self._ranks.world, spent=meta.receipt)
        cut = dict(meta.loader)
        self._progress = {name: Progress(**each) for name, each in cut.pop(_PROGRESS, {}).items()}
        return cut

    @torch.no_grad()
    def moved(self, groups: Sequence[Group]) -> float:
        """KL(policy ‖ start) at temperature 1, in nats per token, as the mean over the sampled tokens of ``groups``. Raises
        UserError: the start cannot be read any more."""
        start = self._teachers.get("reference") or self._teacher("reference", self._start)
        samples, train = unroll(groups), self._recipe.train
        total, num = torch.zeros((), device=self._ranks.device), 0
        for batch in pack(samples, train.seq_len, train.micro_rows, share=self._ranks.world, with_routes=False):
            micro = place(batch, self._ranks, self._arithmetic, replays=False)
            with micro.autocast:
                own_ND, start_ND = (
                    model(micro.mine["tokens_BT"], model.config.full(), micro.ctx).hidden_BTD.flatten(0, 1)
                    for model in (self._model, start)
                )
            targets_N = micro.mine["targets_BT"].flatten()
            at_M = (targets_N != IGNORED).nonzero()[:, 0]
            lesson = Lesson(at_M, Teacher(start_ND[at_M], start.head_VD))
            weights_N, head_VD = torch.ones_like(targets_N, dtype=torch.float32), self._model.head_VD
            with micro.autocast:
                kl, _ = taught_loss(
                    own_ND, head_VD, targets_N, weights_N, [lesson], DistillConfig(), micro.ctx.operators
                )
            total += kl
            num += batch.num_targets
        mean = float(self._ranks.sum(total)) / num
        # The form `full` sums over the vocabulary, so only rounding makes it negative. In this order, NaN stays NaN.
        return max(mean, 0.0)

    def write(self, folder: Path | str) -> None:
        """Write the policy as a checkpoint, with the start's tokenizer and a lineage.
        Raises UserError: the disk is full, or the folder holds other files."""
        origin = self._origin
        parents = [origin.lineage, *(each.lineage for each in self._scorers.values())]
        write_trained(
            Path(folder),
            self._model,
            self._meter,
            self._ranks,
            name=self._run.name,
            stage=self._stage,
            config=self._recipe.model_dump(mode="json")
            | {"changes": [change.model_dump() for change in self._changes]},
            tokenizer_dir=tokenizer_dir_of(self._start),
            parents=tuple(each for each in parents if each is not None),
            run_id=self._run_id,
            data_hash=self._data_hash,
            family=origin.family,
            presets=origin.presets,
        )

    def _scores_before(self, step: int, groups: Sequence[Group]) -> bool:
        """Whether ``step`` has a forward pass of the policy before its updates. A single update computes the same
        log-probabilities itself. The pass is needed for several updates, for a user's algorithm, which may read it, for the
        first step of a source with a teacher, and every `FLIPS_EVERY` steps for the route flips."""
        recipe = self._recipe
        may_be_read = recipe.loss.advantage not in ADVANTAGES
        taught = recipe.distill.teacher_of().keys() if recipe.distill is not None else set[str]()
        is_new = any(group.task.source in taught - self._progress.keys() for group in groups)
        return recipe.train.minibatches > 1 or may_be_read or is_new or step % FLIPS_EVERY == 0

    def _teacher(self, name: str, folder: Path) -> Transformer:
        """The frozen network in ``folder``. Raises UserError: there is no checkpoint, or it has another vocabulary."""
        model = read_placed(folder, self._ranks).model.requires_grad_(False)
        sizes = model.config.vocab_size, self._model.config.vocab_size
        if sizes[0] != sizes[1]:
            raise UserError(f"teachers.{name}: a vocabulary of {sizes[0]}, the policy's is {sizes[1]}; choose another")
        return model

    def _plan(self, groups: Sequence[Group]) -> list[_Update]:
        """Samples and passes of each update, without advantages."""
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
        """Score ``update`` by all networks (by the policy if ``scores``), and compute its advantages and weights."""
        temperature = self._recipe.rollout.temperature
        for micro in update.passes:
            if scores:
                recompute(self._model, micro, temperature, self._recipe.replay)
            for name, teacher in self._teachers.items():
                micro.scores[name] = score(teacher, micro, temperature)
        samples = [sample for group in update.samples for sample in group]
        lengths = [sample.num_inputs for sample in samples]
        scored = self._all_rows(update.passes, [micro.scores for micro in update.passes])
        for name in update.passes[0].scores:
            values = [each[name] for each in scored]
            streams = by_sample([micro.batch for micro in update.passes], values, lengths)
            for sample, stream_S in zip(samples, streams, strict=True):
                sample.scores[name] = stream_S
        credits = self._ranks.first(
            lambda: self._credits(update.samples)
        )  # an algorithm of a user's need not repeat itself
        if self._scorers:
            flops = give_lessons(update.samples, update.passes, self._scorers, self._distill, self._ranks)
            self._meter.add(flops=flops)
            if scores and self._distill.kl_floor and not self._distill.merge_scale:
                self._check_floor(update)
        for micro in update.passes:
            give_pass_credit(micro, credits, self._ranks)

    @property
    def _distill(self) -> DistillConfig:
        assert self._recipe.distill is not None, "there are no teachers"
        return self._recipe.distill

    def _credits(self, groups: Sequence[Sequence[Streams]]) -> list[TokenCredit]:
        """By the samples' numbers: advantages of rewards, and weights by the recipe's normaliser or its balance of sources."""
        loss, distill = self._recipe.loss, self._recipe.distill
        samples = [sample for group in groups for sample in group]
        advantages = [np.zeros(sample.num_inputs, np.float32) for sample in samples]
        masks = [sample.mask_S for sample in samples]
        if distill is None or distill.outcome_weight:
            max_tokens, may_weigh = self._recipe.rollout.max_tokens, distill is None
            credits = give_credit(
                groups, loss.advantage, loss.normaliser, max_tokens, loss.overlong_filter, may_weigh=may_weigh
            )
            if distill is None:
                return credits
            advantages = [each.advantages_S for each in credits]
            # the normaliser's weights are 0 only where nothing is trained
            masks = [each.weights_S > 0 for each in credits]
        weights = source_weights(
            [sample.source for sample in samples],
            [int(mask_S.sum()) for mask_S in masks],
            distill.balance,
            {name: source.weight for name, source in self._recipe.sources.items()},
            self._progress,
        )
        return [
            TokenCredit(distill.outcome_weight * advantages_S, (weight * mask_S).astype(np.float32))
            for advantages_S, mask_S, weight in zip(advantages, masks, weights, strict=True)
        ]

    @torch.no_grad()
    def _check_floor(self, update: _Update) -> None:
        """Raises UserError: at the first step of a source, the student and its teacher are too similar."""
        kls = []
        for micro in update.passes:
            kls.append(torch.zeros(micro.mine["tokens_BT"].numel(), device=self._ranks.device))
            for lesson in micro.lessons:
                own_M = micro.scores["policy"].flatten()[lesson.places_M]
                kls[-1][lesson.places_M] = lesson.estimate(target_logprobs(lesson, micro) - lesson.summed(own_M))
        kl_N, sources_N = self._gathered(update.passes, [{"kl": each} for each in kls])["kl"], _sources(update)
        for source, name in self._distill.teacher_of().items():
            here_N = sources_N == source
            if source in self._progress or not here_N.any() or kl_N[here_N].mean() >= self._distill.kl_floor:
                continue
            raise UserError(
                f"distill.teachers.{name}: differs from the student by {kl_N[here_N].mean():.1e} nats a token of source "
                f"{source!r}, less than distill.kl_floor {self._distill.kl_floor:g}: is it the student itself? If so, "
                "name another checkpoint and a new --out, or set distill.kl_floor = 0 and add --resume"
            )

    def _update(self, update: Sequence[Pass]) -> StepResult:
        recipe, model = self._recipe, self._model
        set_learning_rate(self._optimizers, learning_rate(recipe.optim, self.version, recipe.train.steps))
        subnet, temperature = model.config.full(), recipe.rollout.temperature
        batches = [micro_batch(micro, recipe.loss, temperature, subnet, recipe.distill) for micro in update]
        result = optimisation_step(
            model,
            self._optimizers,
            batches,
            self._ranks,
            clip_norm=recipe.optim.clip_norm,
            balance_rate=self._balance_rate,
            dtype=update[0].dtype,
        )
        self._meter.add(flops=result.flops, tokens=result.num_tokens)
        return result

    @torch.no_grad()
    def _check_finite(self) -> None:
        """Raises NonFiniteError: the output of the new weights is not finite. They are neither saved nor published."""
        ids_BT = torch.arange(_TRIED_TOKENS, device=self._ranks.device)[None] % self._model.config.vocab_size
        hidden_BTD = self._model(ids_BT, self._model.config.full(), Context.plain(ids_BT)).hidden_BTD
        logp_N, _ = chosen_logprobs(hidden_BTD.flatten(0, 1), self._model.head_VD, ids_BT.flatten())
        if not logp_N.isfinite().all():
            raise NonFiniteError("the output of the new weights is not finite; lower optim.lr")

    def _measure(
        self, groups: Sequence[Group], updates: Sequence[_Update], results: Sequence[StepResult]
    ) -> dict[str, float]:
        """All scalars of the step that just ended; the same on every rank."""
        version, recipe = self.version - 1, self._recipe
        passes = [micro for update in updates for micro in update.passes]
        by_pass = [dict(streams) for result in results for streams in result.streams_N]
        for each, micro in zip(by_pass, passes, strict=True):
            if "policy" in micro.scores:  # of all passes or of none
                each[_BEFORE] = micro.scores["policy"]
        streams = self._gathered(passes, by_pass)
        before_N = streams.pop(_BEFORE, streams["logp"])
        batches, num_samples = [micro.batch for micro in passes], sum(len(group.trajectories) for group in groups)
        behaviour_N = _of_targets(batches, "behaviour_BT").astype(np.float64)
        updates_N = np.repeat(
            range(len(updates)), [sum(micro.batch.num_targets for micro in update.passes) for update in updates]
        )
        samples_N = _of_targets(batches, "samples_BT") + num_samples * updates_N  # numbers are within the update
        scalars = mismatch(before_N, behaviour_N, version - _of_targets(batches, "versions_BT"), samples_N)
        scalars |= update_scalars(streams) | sample_scalars(groups) | staleness(groups, version)
        if recipe.distill is not None:
            sources_N, taught = np.concatenate([*map(_sources, updates)]), sorted(recipe.distill.teacher_of())
            self._progress = progressed(self._progress, streams, sources_N, taught)
            scalars |= source_scalars(streams, sources_N, taught)
        flips = torch.tensor(
            [[micro.num_flips, micro.num_recorded] for micro in passes], device=self._ranks.device
        ).sum(0)
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

    def _gathered(self, passes: Sequence[Pass], mine: Sequence[Mapping[str, Tensor]]) -> dict[str, np.ndarray]:
        """Values of all targets by name, from the rows of all ranks, in the order of the batches: fp64 [N]."""
        rows = self._all_rows(passes, mine)
        kept = [micro.batch.targets_BT != IGNORED for micro in passes]
        return {
            name: np.concatenate([each[name][kept_BT] for each, kept_BT in zip(rows, kept, strict=True)]).astype(
                np.float64
            )
            for name in mine[0]
        }

    def _all_rows(self, passes: Sequence[Pass], mine: Sequence[Mapping[str, Tensor]]) -> list[dict[str, np.ndarray]]:
        """Values [B, T] of the rows of all ranks by name, for each pass, from ``mine``, the values of this rank's rows. One
        collective call, however many passes and names there are."""
        names = list(mine[0])
        if not names:
            return [{} for _ in passes]
        flat = torch.cat([each[name].float().flatten() for each in mine for name in names])
        sizes = [each[name].numel() for each in mine for name in names]
        parts = [rank.split(sizes) for rank in self._ranks.gather(flat).cpu()]
        return [
            {
                name: torch.cat([rank[number * len(names) + place] for rank in parts]).view(shape).numpy()
                for place, name in enumerate(names)
            }
            for number, shape in enumerate(micro.batch.tokens_BT.shape for micro in passes)
        ]
