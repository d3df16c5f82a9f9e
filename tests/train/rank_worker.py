"""What the tests of several ranks run in each process: pre-training runs, one after the other, as a user's would be.

RANK=0 WORLD_SIZE=2 … python rank_worker.py CASES.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from stretto.base.errors import UserError
from stretto.base.track import Tracker
from stretto.data.loader import Batch, Loader, eval_batches
from stretto.data.shards import TokenSet
from stretto.evals.loss import EvalBatch, evaluate_many
from stretto.model.checkpoint import write_checkpoint
from stretto.model.elastic import extract
from stretto.model.parallel import Ranks, full_state, join, stored
from stretto.model.spec import SubnetChoice, named_subnets
from stretto.model.transformer import Transformer, build
from stretto.model.weight_files import TensorFiles
from stretto.train import loop, stages
from stretto.train.recipe import HealRecipe, Recipe
from stretto.train.step import Distil


class Reordered(Ranks):
    """One rank that takes its rows in another order, which changes nothing but the order of summation."""

    order: np.ndarray

    def rows(self, num_rows: int) -> Any:
        return self.order[:num_rows]


@dataclass
class ReorderedLoader:
    """The batches of ``loader`` with their rows in another order."""

    loader: Loader
    order: np.ndarray

    def next(self) -> Batch:
        batch = self.loader.next()
        arrays = (batch.tokens_BT, batch.targets_BT, batch.documents_BT, batch.positions_BT, batch.parts_B)
        return Batch(*(array[self.order] for array in arrays), batch.num_target_tokens, batch.global_target_tokens)

    def state(self) -> dict[str, Any]:
        return self.loader.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.loader.restore(state)


def run_case(case: dict[str, Any]) -> None:
    """Train; leaves ``metrics.jsonl``, snapshots and, from rank 0, ``weights.pt`` in the run folder.

    A case that is to run ``alone`` is run by rank 0 as a world of one, while the others go on to the next.
    """
    recipe, run = Recipe.model_validate(case["recipe"]), Path(case["run"])
    ranks = join("cpu", recipe.train.ep)
    if case.get("alone"):
        if not ranks.is_first:
            return
        ranks = Ranks(0, 1, ranks.device)
    if ranks.rank == case.get("missing_on"):
        raise UserError("data: missing on this rank; this is what the test asked for")
    data = TokenSet(Path(case["data"]))
    micro_rows, length = recipe.train.micro_rows, recipe.train.seq_len
    loader: Any = Loader([data], [1.0], micro_rows, length, recipe.train.seed, ranks.rank, ranks.world)
    if "order_seed" in case:
        order = np.random.default_rng(case["order_seed"]).permutation(micro_rows)
        ranks, loader = Reordered(ranks.rank, ranks.world, ranks.device), ReorderedLoader(loader, order)
        object.__setattr__(ranks, "order", order)
    eval_rows = case.get("eval_rows", 4)
    batches = eval_batches(data, eval_rows, length, 2 * eval_rows, 1, ranks.rank, ranks.world)
    held_out = [EvalBatch.of(batch, ranks.device) for batch in batches]

    def losses(model: Transformer, presets: Mapping[str, SubnetChoice], *_: object) -> dict[str, float]:
        """Of `held_out_losses`, and the KL to the full network beside each."""
        subnets = named_subnets(model.config, presets)
        reports = evaluate_many(model, list(subnets.values()), held_out, against_full=True)
        sums = [
            [report.nll * report.num_tokens, report.kl * report.num_tokens, report.num_tokens] for report in reports
        ]
        total = ranks.sum(torch.tensor(sums, dtype=torch.float64))
        means = (total[:, :2] / total[:, 2:]).tolist()
        return {
            f"{name}{kind}": value
            for name, pair in zip(subnets, means, strict=True)
            for kind, value in zip(("", "/kl"), pair, strict=True)
        }

    with mock.patch.object(loop, "held_out_losses", losses):
        job = loop.Job(
            run,
            loader,
            held_out,
            data.manifest.data_hash,
            ranks,
            tracker=lambda step: Tracker(run, first_step=step, tensorboard=False),
            resume=case.get("resume", False),
        )
        trained = _heal(job, recipe) if case.get("heals") else stages.pretrain(recipe, job)
    weights = full_state(trained.model)
    assert bool(weights) == ranks.is_first
    if ranks.is_first:
        torch.save(weights, run / "weights.pt")


def _heal(job: loop.Job, recipe: Recipe) -> loop.Trained:
    """Heal the first half of a network under the whole, both from checkpoints; of the two, a rank reads and holds its part only."""
    parent = build(recipe.model, 7)
    student = extract(parent, recipe.model.subnet(3, 4, 2))
    folders = [job.run / "from" / name for name in ("student", "parent")]
    for folder, model in zip(folders, (student, parent), strict=True):
        job.ranks.first(partial(write_checkpoint, folder, model, model.config))
    healing = HealRecipe.model_validate({"optim": recipe.optim.model_dump(), "train": recipe.train.model_dump()})
    teachers = []

    def distil(model: Transformer, *arguments: Any) -> Distil:
        teachers.append(model)
        return Distil(model, *arguments)

    num_read, raw = 0, TensorFiles.raw

    def counted(self: TensorFiles, *arguments: Any) -> torch.Tensor:
        nonlocal num_read
        num_read += (tensor := raw(self, *arguments)).nbytes
        return tensor

    with mock.patch.object(stages, "Distil", distil), mock.patch.object(TensorFiles, "raw", counted):
        trained = stages.heal(healing, job, *map(stored, folders))
    whole_bytes = sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))
    share = num_read / whole_bytes
    assert share < (0.8 if job.ranks.world > 1 else 1.2), (share, job.ranks)
    (teacher,) = teachers
    whole = full_state(teacher)
    assert all(torch.equal(tensor, parent.state_dict()[name]) for name, tensor in whole.items())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    if job.ranks.world > 1:
        blocks = list(teacher.blocks.parameters())  # embedding and head stay gathered after a pass
        mine = sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in blocks)
        assert mine < 0.6 * sum(each.numel() for each in parent.blocks.parameters())
    return trained


if __name__ == "__main__":
    for each in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        run_case(each)
