"""Roles of an RL run that sleep where a real one computes. Everything between them is real: processes, calls, leases, ledger, token
logs, groups, files of the weights, and the metrics from which `stretto top` names the limiting part."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stretto.flow.run
from stretto.base.config import Config
from stretto.base.trajectory import Group, GroupRef, Outcome, Segment, WeightVersion
from stretto.engine.request import EngineStats
from stretto.flow.clients import CallsInFlight, Generated, GenerateRequest
from stretto.flow.files import RunFiles
from stretto.flow.launch import Factories, Job, make_factories
from stretto.flow.prompts import SourceTables
from stretto.learning.channel import open_channel
from stretto.learning.metrics import StepReport
from stretto.learning.metrics import samples as sample_scalars
from stretto.learning.samples import load_group
from stretto.runtime.store import Store
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.task import Answer, Problem, Score, TaskSource
from stretto.text.tokenizer import Tokenizer

WEIGHT_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Times:
    """Simulated times of a model, in seconds."""

    step_s: float
    """A training step by one rank. N ranks take an Nth of it."""
    answer_s: float
    """An answer in an engine, whatever other answers are in its batch."""
    batch: int
    """Answers that an engine samples at once."""


class VerdictArgs(Config):
    """Arguments of `Sleepy`."""

    verdict_s: float


class Sleepy(TaskSource):
    """Problems whose verdict takes a fixed time of a verifier. Held-out answers are judged at once."""

    args_kind = VerdictArgs

    def __init__(self, name: str, args: VerdictArgs, sandbox: Sandbox | None = None) -> None:
        super().__init__(name, args, sandbox)
        self._verdict_s = args.verdict_s

    def problem(self, item: int) -> Problem:
        return Problem(item, ({"role": "user", "content": f"problem {item}"},), "gold", {})

    def score(self, problem: Problem, answer: Answer) -> Score:
        if answer.seed is not None:
            time.sleep(self._verdict_s)
        is_right = answer.text == problem.gold or bool((answer.seed or 0) % 2)
        return Score(float(is_right), Outcome.OK if is_right else Outcome.WRONG)


class SleepingTrainer:
    """One rank of a trainer."""

    def __init__(self, times: Times, num_ranks: int, files: RunFiles, channel: str) -> None:
        self._step_s, self._files = times.step_s / num_ranks, files
        self._store: Store = files.store
        self._channel = open_channel(channel, files.store, files.folder_here())  # type: ignore[arg-type]
        self._version = self._copied = 0

    def meet(self) -> tuple[str, int]:
        return "127.0.0.1", 0

    def join(self, address: tuple[str, int]) -> None:
        """Nothing is computed together."""

    def step(self, refs: Sequence[GroupRef], step: int) -> StepReport:
        started_s = time.perf_counter()
        groups = [load_group(ref.location, store=self._store) for ref in refs]
        time.sleep(max(0.0, self._step_s - (time.perf_counter() - started_s)))
        self._version = step + 1
        num_samples, num_tokens = sum(ref.num_samples for ref in refs), sum(ref.num_tokens for ref in refs)
        return StepReport(self._version, num_samples, num_tokens, sample_scalars(groups))

    def copy_weights(self) -> None:
        self._copied = self._version

    async def publish(self) -> WeightVersion:
        state = {"weights": torch.full((WEIGHT_BYTES // 4,), float(self._copied))}
        version = await asyncio.to_thread(self._channel.publish, self._copied, state)
        self._channel.retire(4)
        return version

    def save(self, cut: Mapping[str, Any]) -> None:
        """The state of nothing: a run that loses its trainer cannot go on."""

    def moved(self, groups: Sequence[Group]) -> float:
        return 0.0

    def write(self, folder: Path) -> None:
        if not folder.exists():  # each rank is asked
            shutil.copytree(self._files.start_here(), folder, dirs_exist_ok=True)


class SleepingEngine:
    """An engine with a number of places. A waiting request gets the next free one."""

    def __init__(self, times: Times, files: RunFiles, channel: str, name: str) -> None:
        self._times, self._fetch = times, open_channel(channel, files.store, files.run).fetch  # type: ignore[arg-type]
        self._places, self._calls = asyncio.Semaphore(times.batch), CallsInFlight(name)
        self._is_ready = asyncio.Event()
        self._stats = EngineStats(0, 0, times.batch, times.batch, 0, 4096, 0, True, -1)

    async def generate(self, request: GenerateRequest) -> Generated:
        arrived_s, stats = time.perf_counter(), self._stats
        async with self._calls.one():
            await self._is_ready.wait()
            stats.num_waiting += 1
            async with self._places:
                stats.num_waiting -= 1
                stats.num_running += 1
                started_s, version = time.perf_counter(), stats.weight_version
                await asyncio.sleep(self._times.answer_s)
                stats.num_running -= 1
                # the share of its places that were taken
                stats.busy_s += (time.perf_counter() - started_s) / self._times.batch
        num = request.max_tokens
        tokens = np.random.default_rng(request.seed).integers(ord("a"), ord("z"), num).astype(np.int32)
        stats.output_tokens += num
        logprobs, versions = np.full(num, -1.0, np.float32), np.full(num, version, np.int32)
        segment = Segment(tokens, True, logprobs, versions, finished_s=time.time())
        return Generated(segment, None, "length", 0, len(request.tokens), 0, started_s - arrived_s)

    async def activate(self, version: WeightVersion) -> None:
        await asyncio.to_thread(self._fetch, version)
        self._stats.weight_version = version.number
        self._is_ready.set()

    async def stats(self) -> EngineStats:
        return replace(self._stats, num_free_pages=self._times.batch - self._stats.num_running)

    async def failure(self) -> str:
        return ""


def put_to_sleep(times: Times) -> None:
    """Runs of this process get trainers and engines that sleep."""

    def made(job: Job, tables: SourceTables, tokenizer: Tokenizer, files: RunFiles) -> Factories:
        real, channel = make_factories(job, tables, tokenizer, files), job.recipe.channel
        ranks = job.recipe.trainer.ranks
        return replace(
            real,
            trainers=[partial(SleepingTrainer, times, ranks, files, channel)] * ranks,
            engines=[partial(SleepingEngine, times, files, channel, f"engine-{n}") for n in range(len(real.engines))],
        )

    stretto.flow.run.make_factories = made  # type: ignore[assignment]
