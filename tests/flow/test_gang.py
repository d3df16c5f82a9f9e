"""Ranks of the trainer that a runtime starts: they train what one rank does, die together, and go on from a snapshot."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.base.trajectory import GroupRef
from stretto.flow.launch import Gang, TrainerLost
from stretto.learning.trainer import TrainerRank, TrainerRole
from stretto.learning.weights import fetch
from stretto.model.parallel import Ranks
from stretto.runtime.local import open_runtime
from stretto.runtime.runtime import Placement, Runtime
from tests.flow.policies import checkpoint, recipe
from tests.learning.test_trainer import refs_of, weights

CALL_S = 300.0


async def started(runtime: Runtime[Any], ranks: int, ep: int, run: Path, start: Path) -> Gang:
    plan = recipe(train__micro_rows=4, trainer__ranks=ranks, trainer__ep=ep)
    opened = partial(TrainerRole, plan, run, start)
    handles = await asyncio.gather(
        *(
            runtime.spawn(
                partial(TrainerRank, opened, plan.trainer, rank, "cpu"),
                name=f"trainer-{rank}",
                placement=Placement.PROCESS,
                deadline_s=CALL_S,
            )
            for rank in range(ranks)
        )
    )
    return await Gang(runtime, tuple(handles)).join()


async def trained(kind: str, refs: list[list[GroupRef]], run: Path, start: Path) -> dict[str, torch.Tensor]:
    """Weights after two steps of two ranks. A rank is killed after the first, and two other ranks go on from the snapshot."""
    async with await open_runtime(kind, "local") as runtime:
        gang = await started(runtime, 2, 2, run, start)
        report = await gang.call("step", refs[0], 0, deadline_s=CALL_S)
        assert report.step == 1 and report.scalars["routes/flips"] >= 0
        await gang.call("save", {"step": 1}, deadline_s=CALL_S)
        pid = runtime.status(gang.ranks[1]).pid
        assert pid is not None and pid != runtime.status(gang.ranks[0]).pid
        step = asyncio.ensure_future(gang.call("step", refs[1], 1, deadline_s=CALL_S))
        await asyncio.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TrainerLost, match="trainer-1"):
            await step
        for handle in gang.ranks:
            await runtime.kill(handle, hard=True)
        gang = await started(runtime, 2, 2, run, start)
        assert await gang.call("resume", deadline_s=CALL_S) == {"step": 1}
        await gang.call("step", refs[1], 1, deadline_s=CALL_S)
        await gang.call("copy_weights", deadline_s=CALL_S)
        return fetch(await gang.call("publish", deadline_s=CALL_S))


@pytest.mark.slow
@pytest.mark.timeout(900)  # several processes on a shared machine
@pytest.mark.parametrize("kind", ["local", "ray"])
def test_a_gang_trains_as_one_rank_and_goes_on_from_its_snapshot(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "ray":
        ray = pytest.importorskip("ray")
        ray.init(address="local", num_cpus=2, object_store_memory=160 << 20, include_dashboard=False)
        request.addfinalizer(ray.shutdown)
    start = checkpoint(tmp_path / "start")
    refs = [refs_of(step, tmp_path) for step in range(2)]
    one = TrainerRole(recipe(train__micro_rows=4), tmp_path / "one", start, ranks=Ranks(0, 1, torch.device("cpu")))
    for step, some in enumerate(refs):
        one.step(some, step)
    expected, found = weights(one), asyncio.run(trained(kind, refs, tmp_path / "run", start))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():  # as `test_two_ranks_are_one`
        assert torch.allclose(found[name], tensor, atol=1e-4), name
