"""What the tests of two trainer ranks run in each process: RANK=0 WORLD_SIZE=2 … python rank_worker.py START REFS OUT [STORE]"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from stretto.learning.remote_trainer import RemoteTrainer
from stretto.learning.trainer import TrainerRole
from stretto.model.parallel import full_state, join
from stretto.runtime.store import UrlStore
from tests.flow.policies import recipe

PLAN = recipe(
    loss__kl_weight=0.1,
    replay="r3",
    train__micro_rows=4,
    rollout__engine="vllm",
    rollout__address="http://127.0.0.1:9",
    precision={"train": "fp32", "rollout": "bf16"},
)


def main(start: Path, refs_file: Path, out: Path) -> None:
    ranks = join("cpu")
    refs = pickle.loads(refs_file.read_bytes())
    trainer = TrainerRole(PLAN, out / "run", start, ranks=ranks)
    reports = []
    for step, some in enumerate(refs):
        reports.append(trainer.step(some, step))
        trainer.copy_weights()
        head_VD = trainer._model.head_VD
        if ranks.is_first:  # the canary is scored with rounded weights, which the next step must not see
            assert torch.equal(head_VD, trainer._copied[1]["head.weight"])
    trainer.save({"step": 2})
    version = asyncio.run(trainer.publish())
    assert (version is not None) == ranks.is_first
    state, reference = full_state(trainer._model), trainer._teachers["reference"]
    if ranks.world > 1:  # of neither network a rank holds more than its part
        for network in (trainer._model, reference):
            matrices = [each for each in network.blocks.parameters() if each.dim() == 3]
            assert all(isinstance(each, DTensor) and 2 * each.to_local().numel() == each.numel() for each in matrices)
    torch.save({name: tensor.clone() for name, tensor in state.items()}, out / f"weights-{ranks.rank}.pt")
    scalars = [dict(report.scalars) for report in reports]
    if version is not None:
        (out / "canary.json").write_text(json.dumps([*version.canary, version.tolerance]), encoding="utf-8")
    (out / f"scalars-{ranks.rank}.json").write_text(json.dumps(scalars), encoding="utf-8")


def apart(start: Path, store: str, out: Path) -> None:
    """Save with a folder for each rank, as on two machines, and resume in others."""
    ranks = join("cpu")

    def trainer(machine: str) -> RemoteTrainer:
        (out / f"{machine}-{ranks.rank}").mkdir()
        return RemoteTrainer(PLAN, out / f"{machine}-{ranks.rank}", start, ranks=ranks, store=UrlStore(store, "run"))

    first = trainer("machine")
    for step in (1, 2, 4, 6):  # of which the three newest are kept
        with torch.no_grad():
            for parameter in first._model.parameters():
                parameter += 0.01
        first.version = step
        first.save({"step": step})
    again = trainer("other")
    assert again.resume() == {"step": 6} and again.version == 6
    left, right = full_state(first._model), full_state(again._model)
    assert all(torch.equal(left[name], right[name]) for name in left)
    torch.save({name: tensor.clone() for name, tensor in left.items()}, out / f"weights-{ranks.rank}.pt")


if __name__ == "__main__":
    start, refs, out, *store = sys.argv[1:]
    if store:
        apart(Path(start), store[0], Path(out))
    else:
        main(Path(start), Path(refs), Path(out))
