"""A run without staleness is the plain synchronous loop: the same groups in the same steps, the same weights to the bit."""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.common.plain_loop import run_synchronously
from bench.sync_equality import KILLED, Outcome, plain_run, start_of, variants, whole_run
from bench.sync_equality import recipe as recipe_of
from stretto.base.errors import UserError
from stretto.base.trajectory import GroupRef, Task, WeightVersion
from stretto.flow.controller import Controller, Dispatch, Limits
from stretto.flow.ledger import Ledger
from stretto.learning.metrics import StepReport
from tests.flow.policies import recipe
from tests.flow.refs import ref, task

PROMPTS, STEPS = 3, 6


class Answering:
    """Stands in for agent and engine; groups have equal rewards by ordinal."""

    def __init__(self, share: float, seed: int):
        self._share, self._seed = share, seed
        self.version = -1

    def ref(self, task: Task, attempt: int = 0) -> GroupRef:
        is_uniform = random.Random(f"{self._seed}/{task.ordinal}").random() < self._share
        return ref(task.ordinal, attempt, version=self.version, is_uniform=is_uniform)

    async def run_group(self, task: Task, attempt: int) -> GroupRef:
        return self.ref(task, attempt)

    async def activate(self, version: WeightVersion) -> None:
        self.version = version.number


class Counting:
    """Stands in for the trainer."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def step(self, refs: Sequence[GroupRef], step: int) -> StepReport:
        assert step == len(self.batches) and {each.oldest_version for each in refs} == {step}
        self.batches.append(sorted(each.ordinal for each in refs))
        return StepReport(step + 1, 0, 0, {})

    def copy_weights(self) -> None: ...

    async def publish(self) -> WeightVersion:
        return WeightVersion(len(self.batches), "", "", 0)


def plain_batches(share: float, seed: int, **changes: Any) -> list[list[int]]:
    agent, trainer = Answering(share, seed), Counting()
    chosen = recipe(train__steps=STEPS, train__prompts=PROMPTS, **changes)
    work: Any = run_synchronously(chosen, task, agent, [agent], trainer, lambda report: None)  # type: ignore[arg-type]
    asyncio.run(work)
    return trainer.batches


def asynchronous_batches(share: float, seed: int, folder: Path) -> list[list[int]]:
    """By the controller; groups end in any order, and attempts fail now and then."""
    limits = Limits(PROMPTS, 0, window=1, drop_uniform=True, lease_s=1e9, max_attempts=10**6, num_steps=STEPS)
    controller = Controller(limits, task, Ledger.start(folder / "journal.sqlite"))
    answering, rng, batches = Answering(share, seed), random.Random(seed), []
    in_flight: list[Dispatch] = []
    while True:
        answering.version = controller.version
        controller.engine_active("engine", controller.version)
        if controller.version == STEPS:
            controller.finish()
            return batches
        while (refs := controller.next_batch()) is None:
            in_flight += controller.admit()
            each = in_flight.pop(rng.randrange(len(in_flight)))
            if rng.random() < 0.2:
                controller.group_failed(each.task.ordinal, each.attempt, "it died")
            else:
                controller.group_ready(answering.ref(each.task, each.attempt))
        batches.append([each.ordinal for each in refs])
        controller.trained(controller.version)


@given(st.floats(0, 0.9), st.integers(0, 1000))
def test_both_loops_train_the_same_groups_in_the_same_steps(share: float, seed: int) -> None:
    expected = plain_batches(share, seed)
    assert len(expected) == STEPS and all(len(each) == PROMPTS for each in expected)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        assert asynchronous_batches(share, seed, Path(folder)) == expected


def test_the_plain_loop_gives_a_hopeless_task_up() -> None:
    with pytest.raises(UserError, match=r"^loss\.drop_uniform: .* groups of step 0 had rewards that were all equal"):
        plain_batches(1.1, 0)


def test_the_plain_loop_ends_after_the_step_that_its_time_is_over_in() -> None:
    assert len(plain_batches(0.0, 0, runtime__stop_s=1e-9)) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_final_weights_are_the_plain_loops_to_the_bit(tmp_path: Path) -> None:
    """Runs in threads, with two small engines, in processes, and in processes that are killed; but not with staleness."""
    options = argparse.Namespace(steps=5, threads=1, ray=False, gloo=True, precision="fp32", batch_invariant=False)
    runs = variants(options, "")
    *equal, last = runs
    start = start_of(runs[equal[0]], tmp_path / "sft")
    plain = plain_run(runs[equal[0]], tmp_path / "plain", start, lambda num, status: None)
    for number, name in enumerate(runs):
        kill_after = (1, 3) if name.endswith(KILLED) else ()
        found = whole_run(name, runs[name], tmp_path / f"{number}", start, lambda num, status: None, kill_after)
        assert (found.checksum == plain.checksum) == (name != last), name
        assert name == last or found.rewards == plain.rewards, name


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["decoupled", "gspo", "dapo"])
def test_any_loss_is_the_plain_loops_to_the_bit(tmp_path: Path, preset: str) -> None:
    tables: dict[str, Any] = {"train": {"minibatches": 2}, "loss": {"preset": preset}, "runtime": {"isolate": "none"}}
    chosen = recipe_of(3, **tables)
    start = start_of(chosen, tmp_path / "sft")
    plain = plain_run(chosen, tmp_path / "plain", start, lambda num, status: None)
    found = whole_run(preset, chosen, tmp_path / "run", start, lambda num, status: None)
    assert found.checksum == plain.checksum and found.rewards == plain.rewards


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_shared_operators_leave_no_mismatch(tmp_path: Path, precision: str) -> None:
    """From published weights to the trainer's own forward pass: nothing on the way rounds twice, or not at all."""

    def run(name: str, train: str, batch_invariant: bool) -> Outcome:
        arithmetic = {"rollout": precision, "train": train, "batch_invariant": batch_invariant}
        chosen = recipe_of(2, precision=arithmetic, loss={"drop_uniform": False})
        return plain_run(chosen, tmp_path / name, start, lambda num, status: None)

    start = start_of(recipe_of(start={"steps": 10}), tmp_path / "sft")
    # the control's trainer computes in another precision: with the engine's own, two kernels may agree by luck
    shared, apart = run("shared", precision, True), run("apart", "fp32", False)
    assert set(shared.mismatch) == {0.0} and min(apart.mismatch) > 0.0, (shared.mismatch, apart.mismatch)
