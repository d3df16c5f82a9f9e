"""The trainer as a role: finished groups in, a step of the policy, a new version of the weights out.

One step: load the groups, give credit, pack; recompute log-probabilities with the weights as they are (the proximal
policy, and the mismatch with what the engine recorded); then one optimiser update for each part of the groups. Every
forward pass of a batch, recomputed activations included, takes the same routes.

Shape letters: B rows, T positions, N targets of a step over all ranks, W branches of balance state, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stretto.base.errors import UserError
from stretto.base.receipt import Meter
from stretto.base.records import new_lineage, new_run_id
from stretto.base.trajectory import Group, WeightVersion
from stretto.data.pack import IGNORED
from stretto.model.count import count
from stretto.model.elastic import load_balance
from stretto.model.fp8_state import is_quantised, pack_state
from stretto.model.hub import Checkpoint, read_checkpoint, weights_hash, write_checkpoint
from stretto.model.parallel import Ranks, device_name, full_state, join, shard
from stretto.ops.matmul import Arithmetic
from stretto.optim.build import build_optimizers, set_learning_rate
from stretto.optim.schedule import learning_rate
from stretto.rl import log as measures
from stretto.rl.batches import pack
from stretto.rl.credit import assign
from stretto.rl.groups import check_routes, load_group
from stretto.rl.ledger import GroupRef
from stretto.rl.log import StepReport
from stretto.rl.passes import Pass, forward_flops, gather, micro_batch, place, recompute, score
from stretto.rl.recipe import LAYOUT, SNAPSHOTS, WEIGHTS, RlRecipe
from stretto.rl.weights import publish, retire
from stretto.text.tokenizer import load_tokenizer
from stretto.train.loop import peak_memory
from stretto.train.snapshot import SnapshotMeta, Snapshots, check_same_run, read_meta
from stretto.train.step import StepResult, optimisation_step

STAGE = "rl"
KEEP_VERSIONS = 4
"""Weight files kept: engines may lag behind while they fetch."""
FLIPS_EVERY = 10
"""Steps between two looks at route flips, where they cost a pass of their own."""


class TrainerRole:
    """The policy, its optimiser, and the run's snapshots. With several ranks there is a role on each, called alike."""

    def __init__(self, recipe: RlRecipe, run: Path | str, start: Path | str, *, ranks: Ranks | None = None):
        """Read the checkpoint ``start``, on the device of ``ranks``; None: torchrun's environment says.

        Raises:
            UserError: the checkpoint cannot be read, or the ranks cannot share the rows.
        """
        self._recipe, self._run, self._start = recipe, Path(run), Path(start)
        self._ranks = ranks or join()
        train = recipe.train
        if train.micro_rows % self._ranks.world:
            raise UserError(
                f"train.micro_rows: {train.micro_rows} rows cannot be shared by {self._ranks.world} ranks; use a multiple"
            )
        torch.set_num_threads(train.threads)
        self._arithmetic = Arithmetic(recipe.precision.train, recipe.precision.batch_invariant)
        self._origin = self._read()
        self._model = shard(self._origin.model, self._ranks)
        self._optimizers = build_optimizers(recipe.optim, self._model)
        self._reference = self._read().model.requires_grad_(False) if recipe.loss.kl_weight else None
        self._snapshots = Snapshots(self._run / SNAPSHOTS, train.keep_snapshots)
        self._data_hash = weights_hash(self._start)
        self._run_id = new_run_id()
        self._meter = Meter(STAGE, device_name(self._ranks.device), self._ranks.world)
        self._step = 0
        self._num_tokens = 0

    @property
    def version(self) -> int:
        """Of the weights: steps completed."""
        return self._step

    def step(self, refs: Sequence[GroupRef], step: int) -> StepReport:
        """Train on ``refs`` as step ``step`` (from 0); groups count in order of their ordinals.

        Raises:
            UserError: a group cannot be read, or its routes are not of this network.
            NonFiniteError: nothing was applied; the last snapshot is good.
        """
        assert step == self._step, f"step {step} was asked for, {self._step} is next"
        recipe, started = self._recipe, time.perf_counter()
        temperature = recipe.rollout.temperature
        with self._meter:
            refs = sorted(refs, key=lambda ref: ref.ordinal)
            groups = [self._load(ref) for ref in refs]
            updates = self._plan(groups)
            flat = [each for update in updates for each in update]
            loaded = time.perf_counter()
            for each in flat:
                if self._scores_before(step):
                    recompute(self._model, each, temperature, recipe.replay)
                elif recipe.loss.proximal == "recompute":
                    each.proximal_BT = None
            if self._reference is not None:
                for each in flat:
                    each.reference_BT = score(self._reference, each, temperature).logp_BT
            scored = time.perf_counter()
            results = [self._update(update) for update in updates]
            updated = time.perf_counter()
            num_scored = self._scores_before(step) + (self._reference is not None)
            self._meter.add(flops=num_scored * forward_flops(self._model.config, flat))
            self._step += 1
            self._num_tokens += sum(ref.num_tokens for ref in refs)
        scalars = self._measure(groups, flat, results) | {
            "time/load_s": loaded - started,
            "time/recompute_s": scored - loaded,
            "time/update_s": updated - scored,
        }
        num_samples, num_tokens = (sum(getattr(ref, name) for ref in refs) for name in ("num_samples", "num_tokens"))
        return StepReport(self._step, num_samples, num_tokens, time.perf_counter() - started, scalars)

    def publish(self, folder: Path | str | None = None) -> WeightVersion | None:
        """The weights as they are, in ``folder`` or the run's own; None on all ranks but the first.

        Raises:
            UserError: the disk is full.
        """
        state = full_state(self._model)
        if not self._ranks.is_first:
            return None
        if self._recipe.precision.rollout == "bf16":
            # what an engine in bf16 rounds them to anyway: half the bytes. Router, norms and head stay in fp32 there.
            state = {name: each.bfloat16() if is_quantised(name) else each for name, each in state.items()}
        elif self._recipe.precision.rollout == "fp8":
            state = pack_state(state)  # quantised once, here: the engine makes the same bytes of them again
        folder = Path(folder) if folder is not None else self._run / WEIGHTS
        version = publish(folder, self._step, state)
        retire(folder, KEEP_VERSIONS)
        return version

    def save(self, cut: Mapping[str, Any]) -> Path:
        """Write a snapshot, with the controller's ``cut`` at the same step in it.

        Raises:
            UserError: on all ranks: the disk is full; older snapshots are untouched.
        """
        meta = SnapshotMeta(
            step=self._step,
            loader=dict(cut),
            receipt=self._meter.receipt(peak_memory(self._ranks)),
            run_id=self._run_id,
            layer_order=self._model.config.layer_ranking,
            tokens_by_kind={"policy": self._num_tokens},
            recipe=self._recipe.model_dump(mode="json"),
            data_hash=self._data_hash,
        )
        self._snapshots.save(self._model, self._optimizers, meta, self._ranks)
        return self._snapshots.path(self._step)

    def resume(self) -> dict[str, Any] | None:
        """Go on from the newest snapshot, bit for bit; returns the cut it was saved with. None: there is no snapshot.

        Raises:
            UserError: the snapshot is damaged, or of another recipe or another start.
        """
        path = self._snapshots.latest()
        if path is None:
            return None
        meta = read_meta(path)
        if meta.data_hash != self._data_hash:
            raise UserError(
                f"{self._start}: --model: not the checkpoint that {self._run} began with; name that one, or start a new run folder"
            )
        check_same_run(meta, self._recipe.model_dump(mode="json"), self._data_hash, self._run, LAYOUT)
        self._snapshots.load(path, self._model, self._optimizers, self._ranks)
        self._step, self._run_id, self._num_tokens = meta.step, meta.run_id, meta.tokens_by_kind["policy"]
        self._meter = Meter(STAGE, meta.receipt.device, self._ranks.world, spent=meta.receipt)
        return meta.loader

    def write(self, folder: Path | str) -> None:
        """Write the policy as a checkpoint, with the start's tokenizer and lineage.

        Raises:
            UserError: the disk is full, or the folder holds other files.
        """
        state = full_state(self._model)
        if self._ranks.is_first:
            origin, config = self._origin, self._model.config
            counts = count(config, config.full())
            has_tokenizer = (self._start / "tokenizer.json").is_file()
            lineage = new_lineage(
                name=self._run.name,
                stage=STAGE,
                weights_hash="",
                total_params=counts.total_params,
                active_params=counts.active_params,
                receipt=self._meter.receipt(peak_memory(self._ranks)),
                parents=(origin.lineage,) if origin.lineage else (),
                run_id=self._run_id,
                data_hash=self._data_hash,
                tokenizer_hash=load_tokenizer(self._start).fingerprint() if has_tokenizer else None,
                config=self._recipe.model_dump(mode="json"),
            )
            write_checkpoint(
                folder,
                state,
                config,
                family=origin.family,
                tokenizer_dir=self._start if has_tokenizer else None,
                presets=origin.presets,
                lineage=lineage,
            )
        self._ranks.barrier()

    def _read(self) -> Checkpoint:
        return read_checkpoint(self._start, device=self._ranks.device, dtype=torch.float32)

    def _scores_before(self, step: int) -> bool:
        """Whether ``step`` has a pass before its updates; a single update finds the same log-probabilities by itself."""
        recipe = self._recipe
        is_needed = recipe.train.minibatches > 1 or recipe.replay == "r2" or step % FLIPS_EVERY == 0
        return recipe.loss.proximal == "recompute" and is_needed

    def _load(self, ref: GroupRef) -> Group:
        group, config = load_group(ref.location), self._model.config
        check_routes(group, ref.location, config.num_moe_layers, max(config.top_k, *config.top_k_by_layer))
        return group

    def _plan(self, groups: Sequence[Group]) -> list[list[Pass]]:
        """The passes of each update."""
        recipe, train = self._recipe, self._recipe.train
        assert len(groups) % train.minibatches == 0, f"{len(groups)} groups for {train.minibatches} updates"
        has_routes = all(each.routes is not None for group in groups for each in group.trajectories)
        size, updates = len(groups) // train.minibatches, []
        for start in range(0, len(groups), size):
            some = groups[start : start + size]
            batches = pack(
                some,
                assign(some, recipe.loss),
                train.seq_len,
                train.micro_rows,
                share=self._ranks.world,
                with_routes=recipe.replay == "r3" or has_routes,
            )
            updates.append(
                [place(batch, self._ranks, self._arithmetic, replays=recipe.replay == "r3") for batch in batches]
            )
        return updates

    def _update(self, update: Sequence[Pass]) -> StepResult:
        recipe, model = self._recipe, self._model
        set_learning_rate(self._optimizers, learning_rate(recipe.optim, self._step, recipe.train.steps))
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
        self, groups: Sequence[Group], passes: Sequence[Pass], results: Sequence[StepResult]
    ) -> dict[str, float]:
        """All scalars of a step that just ended; the same on every rank."""
        version, recipe = self._step - 1, self._recipe
        streams = [stream for result in results for stream in result.streams_N]
        found = {name: gather(passes, self._ranks, [each[name] for each in streams]) for name in streams[0]}
        centres = [each.proximal_BT for each in passes if each.proximal_BT is not None]
        before_N = gather(passes, self._ranks, centres) if self._scores_before(version) else found["logp"]
        references = [each.reference_BT for each in passes if each.reference_BT is not None]
        versions_N = np.concatenate([each.batch.versions_BT[each.batch.targets_BT != IGNORED] for each in passes])
        behaviour_N = np.concatenate([each.batch.behaviour_BT[each.batch.targets_BT != IGNORED] for each in passes])
        scalars = measures.mismatch(before_N, behaviour_N.astype(np.float64), versions_N == version)
        scalars |= measures.update(found, gather(passes, self._ranks, references) if references else None)
        scalars |= measures.samples(groups) | measures.staleness(groups, version)
        flips = torch.tensor([[each.num_flips, each.num_recorded] for each in passes], device=self._ranks.device).sum(0)
        num_flips, num_recorded = self._ranks.sum(flips).tolist()
        if num_recorded:
            scalars["routes/flips"] = num_flips / num_recorded
        loads = [load_balance(each_WE[0]) for result in results for each_WE in result.counts.values()]
        num_places = sum(each.batch.tokens_BT.size for each in passes)
        num_inputs = sum(each.batch.num_inputs for each in passes)
        num_copied = sum(each.num_tokens - 1 for group in groups for each in group.trajectories)
        return scalars | {
            "optim/grad_norm": float(np.mean([result.grad_norm for result in results])),
            "optim/lr": learning_rate(recipe.optim, version, recipe.train.steps),
            "experts/max_overload": max(loads, default=1.0),
            "batch/padding": 1.0 - num_inputs / num_places,
            "batch/positions": float(num_places),
            "batch/shared": 1.0 - num_inputs / num_copied,
        }
