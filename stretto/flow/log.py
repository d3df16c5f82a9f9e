"""Metrics of every step, execution trace, held-out rewards, and the status that `stretto top` shows.

Scalars come from the trainer's step reports, from the counters of engines, agents and verifiers, and from the controller.
Everything is written on the driver's loop. Imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.paths import read_json, write_json, write_text, writing
from stretto.base.track import METRICS_FILE, Tracker, read_metrics
from stretto.base.trajectory import Group, GroupRef
from stretto.flow.controller import Controller
from stretto.flow.launch import CALL_SLACK_S, Job, Roles
from stretto.flow.prompts import Prompts
from stretto.learning.metrics import StepReport
from stretto.learning.recipe import SPANS_FILE, STATUS_FILE, TRACE_FILE
from stretto.runtime.runtime import Handle, RoleError, RuntimeFailure, cancel_all

STATUS_EVERY_S = 1.0
_SHOWN_WAITS = 5
_EVALUATIONS, _PAUSE_S = 5, 0.2
"""Attempts at one held-out problem, and seconds between them: agents, engines and verifiers may die meanwhile."""
_LOADING_S = 0.02
"""Seconds between two checks whether the engines have loaded new weights."""

Advance = Callable[[int, str | None], None]
"""Advances a progress bar by steps and shows a short text beside it."""
Say = Callable[[str], None]
"""Prints a line."""
StatsByRole = Mapping[str, Any]


class Counts(dict[str, float]):
    """Last values of counters that only grow, except that a restarted role counts from 0 again."""

    def grown(self, name: str, value: float) -> float:
        """Growth since the last call; at the first call, the value."""
        before, self[name] = self.get(name, 0.0), value
        return value - before if value >= before else value


class RoleScalars:
    """Scalars of a step from the roles' counters. `update` is called once a second, `scalars` once a step. Times are those of
    a monotonic clock."""

    def __init__(self, started_s: float):
        self._counts = Counts()
        self._last_s = self._updated_s = started_s

    def update(self, at_s: float, engines: StatsByRole, agents: StatsByRole, rewards: StatsByRole) -> None:
        """Store the roles' counters at ``at_s``."""
        self._updated_s, self._engines, self._agents, self._rewards = at_s, engines, agents, rewards

    def scalars(self) -> dict[str, float]:
        """Scalars of the time between the updates before the last call and before this one; {} if there was none."""
        seconds, self._last_s = self._updated_s - self._last_s, self._updated_s
        if seconds <= 0:
            return {}
        engines, agents, rewards = self._engines, self._agents, self._rewards
        scalars = {
            f"bubble/{name}": _idle(self._counts.grown(f"{name}/busy_s", stats.busy_s), seconds)
            for name, stats in engines.items()
        }
        pages = _sum(engines, "num_pages")
        if pages:
            scalars |= {
                "queue/engine_running": _sum(engines, "num_running"),
                "queue/engine_waiting": _sum(engines, "num_waiting"),
                "engines/tokens_per_s": self._grown(engines, "output_tokens") / seconds,
                "engines/preemptions": self._grown(engines, "num_preemptions"),
                "engines/free_pages": _sum(engines, "num_free_pages") / pages,
            }
        if rewards:
            scalars["bubble/rewards"] = _idle(self._grown(rewards, "busy_s"), seconds * _sum(rewards, "num_slots"))
            scalars["queue/verifiers"] = _sum(rewards, "num_waiting")
            verdicts = self._grown_by(rewards, "outcomes")
            total = sum(verdicts.values())
            scalars |= {f"verdicts/{name}": num / total for name, num in verdicts.items() if total}
        scalars |= {
            "queue/samples": _sum(agents, "num_samples"),
            "failures/tokens_resumed": self._grown(agents, "tokens_resumed"),
            "failures/troubles": sum(self._grown_by(agents, "troubles").values()),
            **{f"failures/sessions_lost/{name}": num for name, num in self._grown_by(agents, "sessions_lost").items()},
        }
        engine_s, queued_s = self._grown(agents, "engine_s"), self._grown(agents, "queued_s")
        if engine_s > 0:
            scalars["wait/engine_queue_share"] = min(1.0, queued_s / engine_s)
        cached, computed = self._grown(agents, "cached_tokens"), self._grown(agents, "computed_tokens")
        if cached + computed > 0:
            scalars["engines/cached_share"] = cached / (cached + computed)
        return scalars

    def _grown(self, roles: StatsByRole, counter: str) -> float:
        """Growth of a counter, summed over roles."""
        return sum(self._counts.grown(f"{name}/{counter}", getattr(stats, counter)) for name, stats in roles.items())

    def _grown_by(self, roles: StatsByRole, counters: str) -> dict[str, float]:
        """Growth of a mapping of counters, by key, summed over roles."""
        grown: dict[str, float] = defaultdict(float)
        for name, stats in roles.items():
            for key, num in getattr(stats, counters).items():
                grown[key] += self._counts.grown(f"{name}/{counters}/{key}", num)
        return grown


def _sum(roles: StatsByRole, field: str) -> float:
    return float(sum(getattr(stats, field) for stats in roles.values()))


def _idle(busy_s: float, seconds: float) -> float:
    return max(0.0, 1.0 - busy_s / seconds)  # ``busy_s`` may include time after ``seconds``


@dataclass(frozen=True, slots=True)
class Span:
    """Interval in which a role (``trainer``, ``agents``, an engine) was busy. Written by the driver, from its own clock."""

    role: str
    name: str
    started_s: float
    """Unix seconds."""
    finished_s: float
    """Unix seconds."""
    lane: int = 0
    """Overlapping spans of one role are in different lanes."""
    facts: dict[str, Any] | None = None

    @property
    def seconds(self) -> float:
        return self.finished_s - self.started_s


class Trace:
    """Execution trace: appends spans to the run folder as they end, one JSON list a line, and sums up the busy time of each
    role. A resumed run appends to the same file. `write_trace` converts the file for viewers."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / SPANS_FILE
        self._file = self._path.open("a", encoding="utf-8")
        self._file.write("\n")  # ends a line that a kill has torn
        self._lanes: dict[str, list[bool]] = {}
        self.busy_s: dict[str, float] = defaultdict(float)
        """By role and name, joined by a slash."""

    @contextmanager
    def span(self, role: str, name: str, **facts: Any) -> Iterator[None]:
        """Record the duration of the block, in a lane of the role that is free meanwhile."""
        lanes = self._lanes.setdefault(role, [])
        lane = lanes.index(False) if False in lanes else len(lanes)
        lanes[lane : lane + 1] = [True]
        started_s = time.time()
        try:
            yield
        finally:
            lanes[lane] = False
            self.add(Span(role, name, started_s, time.time(), lane, facts or None))

    def add(self, span: Span) -> None:
        self.busy_s[f"{span.role}/{span.name}"] += span.seconds
        row = [span.role, span.name, round(span.started_s, 6), round(span.finished_s, 6), span.lane, span.facts]
        with writing(self._path):
            self._file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # an earlier error is more useful than one of this file
        with suppress(*(() if error is None else (UserError,))), writing(self._path):
            self._file.close()


def read_spans(folder: Path) -> list[Span]:
    """The spans of a run; [] if there are none. Empty, torn and damaged lines are skipped."""
    path = folder / SPANS_FILE
    spans = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with suppress(ValueError, TypeError):
            spans.append(Span(*json.loads(line)))
    return spans


def write_trace(folder: Path) -> Path:
    """Write ``trace.json`` in Chrome's trace format, which Perfetto and chrome://tracing draw: one process a role, one
    thread a lane, microseconds since the first span."""
    spans = read_spans(folder)
    start_s = min((span.started_s for span in spans), default=0.0)
    roles = {role: number for number, role in enumerate(dict.fromkeys(span.role for span in spans), 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": role}} for role, number in roles.items()
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": roles[span.role],
            "tid": span.lane,
            "ts": round((span.started_s - start_s) * 1e6),
            "dur": round(span.seconds * 1e6),
            "args": span.facts or {},
        }
        for span in spans
    ]
    write_text(folder / TRACE_FILE, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return folder / TRACE_FILE


@dataclass(frozen=True)
class RoleRow:
    """One role or one pool in the status file."""

    name: str
    state: str
    """State of the runtime: ``alive``, ``restarting``…"""
    load: float
    """Number of samples of an agent, sequences of an engine, or verifications of a verifier in progress; 0 for the trainer."""
    waiting: float
    """Part of the load that waits in a queue."""
    restarts: int
    pid: int | None = None
    """Process id; None while there is no process."""
    note: str = ""
    node: str = ""
    """Address of the role's node in a cluster; empty on one machine."""


class RunStatus(Config):
    """Status of the run: a small file, replaced every second by the driver, read by `stretto top`."""

    updated_s: float
    """Unix seconds."""
    step: int
    num_steps: int
    state: str
    """``training``, ``done``, ``interrupted``, or the error that stopped the run."""
    counts: dict[str, float]
    """Numbers of groups by state and by ending (`Controller.counts`)."""
    metrics: dict[str, float]
    """The last logged value of each scalar."""
    rewards: list[float]
    """Mean reward of each step so far."""
    roles: list[RoleRow]
    waits: list[str]
    """Lines that describe the longest waits of samples."""


def write_status(folder: Path, status: RunStatus) -> None:
    write_json(folder / STATUS_FILE, status.model_dump(mode="json"))


def read_status(folder: Path) -> RunStatus:
    """Raises UserError: the folder holds no such run."""
    path = folder / STATUS_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; {folder} is not a run of stretto rl")
    tree = read_json(path)
    if not isinstance(tree, Mapping):
        raise UserError(f"{path}: damaged; it is written anew while the run runs")
    return validate(RunStatus, tree, str(path))


def pool_rows(roles: Roles) -> list[RoleRow]:
    """Rows of the status file for the pools, without pools of fixed size."""
    rows = []
    for pool in roles.pools:
        stats, limits, load = pool.stats(), pool.limits, pool.stats().load
        if limits.max > limits.min:
            note = f"{stats.size} of {limits.min} to {limits.max} workers, waits of {load.p95_wait_s:.2f} s (p95), "
            note += f"{stats.worker_s:,.0f} worker-seconds"
            state, in_hand = "alive" if pool.error is None else "dead", stats.num_leased + load.num_waiting
            rows.append(RoleRow(f"{pool.name}s", state, in_hand, load.num_waiting, stats.num_replaced, note=note))
    return rows


def pool_scalars(roles: Roles) -> dict[str, float]:
    """Scalars of the log about the pools."""
    scalars: dict[str, float] = {}
    for pool in roles.pools:
        stats, at = pool.stats(), f"pool/{pool.name}"
        scalars |= {f"{at}/size": stats.size, f"{at}/replaced": stats.num_replaced, f"{at}/worker_s": stats.worker_s}
        scalars[f"{at}/queue"] = stats.load.num_waiting
        scalars |= {f"{at}/{name}": getattr(stats.load, name) for name in ("p95_wait_s", "mean_service_s")}
    return scalars


class Logbook:
    """Metrics, status file and console lines of one run, over all of its attempts."""

    _roles: Roles
    _controller: Controller
    _tracker: Tracker

    def __init__(self, job: Job, prompts: Prompts, trace: Trace, advance: Advance, say: Say):
        self._folder, self._recipe, self._wandb_project = job.folder, job.recipe, job.wandb_project
        self._prompts, self._trace, self._advance, self.say = prompts, trace, advance, say
        self._metrics: dict[str, float] = {}
        self._rewards: list[float] = []
        self._shown_steps = 0
        # these last for all attempts, as roles other than the trainer and the trace do
        self._busy, self._restarts, self._role_scalars = Counts(), Counts(), RoleScalars(time.perf_counter())
        self._num_new_roles = self._num_undone = 0
        self._evaluation: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def attempt(self, roles: Roles, controller: Controller, is_first: bool) -> AsyncIterator[None]:
        """Context of one attempt, which starts at the controller's step; metrics of later steps are dropped. Within the context
        the status file is replaced once a second; at its end the file shows how the attempt ended."""
        first_step = self._begin(roles, controller, is_first)
        config = self._recipe.model_dump(mode="json")
        tracker = Tracker(self._folder, first_step=first_step, wandb_project=self._wandb_project, config=config)
        with tracker as self._tracker:
            watch, state = asyncio.create_task(self._watch()), "done"
            try:
                yield
            except BaseException as error:
                is_cancelled = isinstance(error, asyncio.CancelledError)
                state = "interrupted" if is_cancelled else str(error) or type(error).__name__
                raise
            finally:
                tasks = [watch, *filter(None, [self._evaluation])]
                self._evaluation = None
                await cancel_all(tasks)
                # the error that ended the attempt is more useful than a full disk
                with suppress(*(() if state == "done" else (UserError,))):
                    await self._write_status(state)

    def _begin(self, roles: Roles, controller: Controller, is_first: bool) -> int:
        """Prepare for an attempt. Returns the first step to be logged."""
        self._roles, self._controller = roles, controller
        step = controller.version
        has_rows = not is_first and (self._folder / METRICS_FILE).is_file()
        rows = read_metrics(self._folder) if has_rows else []
        if not is_first:
            self._num_new_roles += 1  # the trainer at least
            self._num_undone += max(0, int(max((row["step"] for row in rows), default=0)) - step)
        self._rewards = [row["reward/mean"] for row in rows if "reward/mean" in row and row["step"] <= step]
        if not is_first:
            self.say(f"resumes after step {step:,} of {self._recipe.train.steps:,}")
        self._advance(step - self._shown_steps, None)
        self._shown_steps = step
        self._stepped_s = time.perf_counter()
        self._counts = Counts()
        for ending in ("filtered", "failed"):
            self._counts.grown(ending, controller.counts()[ending])
        return step + 1 if step else 0

    def stepped(self, report: StepReport, refs: tuple[GroupRef, ...]) -> None:
        """Log a completed step; every ``eval_every`` steps, start to measure the held-out reward beside the run."""
        now_s = time.perf_counter()
        wall_s, self._stepped_s = max(1e-9, now_s - self._stepped_s), now_s
        busy_s = {name: self._busy.grown(name, seconds) for name, seconds in sorted(self._trace.busy_s.items())}
        waited_s = busy_s.get("trainer/wait", 0.0)
        counts = self._controller.counts()
        scalars = {
            **report.scalars,
            **{f"groups/{name}": value for name, value in counts.items()},
            **pool_scalars(self._roles),
            **{f"busy/{name}_s": seconds for name, seconds in busy_s.items()},
            "wait/trainer_s": waited_s,
            "wait/trainer_share": waited_s / wall_s,
            "bubble/trainer": waited_s / wall_s,
            "time/activate_s": sum(seconds for name, seconds in busy_s.items() if name.endswith("/activate")),
            "time/wall_s": wall_s,
            "speed/tokens_per_s": report.num_tokens / wall_s,
            "speed/samples_per_s": report.num_samples / wall_s,
            **self._role_scalars.scalars(),
        }
        # losses since the last step: discarded groups, restarts, undone steps
        if num_failed := self._counts.grown("failed", counts["failed"]):
            last = self._controller.last_failed
            self.say(f"step {report.step:>5,}  {num_failed:.0f} groups failed, the last one {last}")
        filtered = self._counts.grown("filtered", counts["filtered"])
        uniform = scalars["reward/uniform_groups"] * len(refs)
        scalars["groups/uniform_share"] = (filtered + uniform) / (filtered + len(refs))
        scalars["failures/restarts"] = self._num_new_roles + self._restarts.grown("", self._roles.num_restarts())
        scalars["failures/steps_undone"] = self._num_undone
        self._num_new_roles = self._num_undone = 0
        for why, num in self._controller.discarded.items():
            scalars[f"discarded/{why}_tokens"] = self._counts.grown(f"discarded {why}", num)
        self._metrics |= scalars
        self._rewards.append(scalars["reward/mean"])
        self._tracker.log(report.step, scalars, line=False)
        self._advance(report.step - self._shown_steps, f"reward {scalars['reward/mean']:.3f}")
        self._shown_steps = report.step
        train = self._recipe.train
        if report.step % train.eval_every == 0 and report.step < train.steps:
            self._start_evaluation(report.step)

    def _start_evaluation(self, step: int) -> None:
        if self._evaluation is None or self._evaluation.done():
            self._evaluation = asyncio.create_task(self._evaluate_beside(step))
        else:
            why = "the last evaluation still runs; raise train.eval_every, or lower train.eval_prompts"
            self.say(f"step {step:>5,}  held-out reward not measured: {why}")

    async def evaluate(self, step: int) -> list[Group]:
        """Log the mean reward on held-out problems, one sample each at the run's temperature, and the oldest and newest version of their
        tokens; returns the samples."""
        if self._evaluation is not None:
            await self._evaluation
        return await self._evaluate(step)

    async def _evaluate_beside(self, step: int) -> None:
        """Evaluate while the run continues, once every engine has the weights of ``step`` or newer ones."""
        try:
            while self._controller.oldest_engine_version < step:
                await asyncio.sleep(_LOADING_S)
            await self._evaluate(step)
        except Exception as error:  # the run continues without this reward
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self.say(f"step {step:>5,}  held-out reward not measured: {why}")

    async def _evaluate(self, step: int) -> list[Group]:
        num = self._recipe.train.eval_prompts
        groups = await asyncio.gather(*map(self._held_out, range(num)))
        samples = [group.trajectories[0] for group in groups]
        reward = float(np.mean([sample.verdict.reward for sample in samples]))
        versions = np.concatenate([part.versions for each in samples for part in each.segments if part.is_sampled])
        oldest, newest = int(versions.min()), int(versions.max())
        self.log(step, {"eval/reward": reward, "eval/oldest_version": oldest, "eval/newest_version": newest})
        weights = "" if oldest == newest == step else f", weights of steps {oldest:,} to {newest:,}"
        self.say(f"step {step:>5,}  held-out reward {reward:.3f}  ({num} problems{weights})")
        return groups

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log scalars that are measured outside the steps."""
        self._metrics |= scalars
        self._tracker.log(step, scalars, line=False)

    async def _held_out(self, number: int) -> Group:
        task, deadline_s = self._prompts.held_out(number), self._recipe.failures.lease_s + CALL_SLACK_S
        why: object = ""
        for num_failed in range(_EVALUATIONS):
            await asyncio.sleep(_PAUSE_S * num_failed)
            try:
                group: Group = await self._roles.agents.call("evaluate", task, deadline_s=deadline_s)
                return group
            except RuntimeFailure as failure:
                why = failure.message if isinstance(failure, RoleError) else failure
        raise UserError(f"evaluation: {why} ({_EVALUATIONS} attempts); correct that, then continue with --resume")

    async def _watch(self) -> None:
        while True:
            try:
                await self._write_status("training")
            except Exception as error:  # the run continues without a status file
                problem = f"status file: {type(error).__name__}: {error}; stretto top shows nothing newer of this run"
                self.say(str(error) if isinstance(error, UserError) else problem)
                return
            await asyncio.sleep(STATUS_EVERY_S)

    async def _write_status(self, state: str) -> None:
        status = RunStatus(
            updated_s=time.time(),
            step=self._controller.version,
            num_steps=self._recipe.train.steps,
            state=state,
            counts=self._controller.counts(),
            metrics=self._metrics,
            rewards=self._rewards,
            roles=await self._rows(),
            waits=[str(wait) for wait in (await self._roles.waits())[:_SHOWN_WAITS]],
        )
        await asyncio.to_thread(write_status, self._folder, status)

    async def _rows(self) -> list[RoleRow]:
        roles = self._roles
        kinds = (roles.engines.values(), roles.agents.handles(), roles.verifiers)
        engines, agents, rewards = answers = await asyncio.gather(*(roles.ask_all(each, "stats") for each in kinds))
        by_name = ({handle.name: stats for handle, stats in each} for each in answers)
        self._role_scalars.update(time.perf_counter(), *by_name)

        def row(handle: Handle, load: float, waiting: float, note: str) -> RoleRow:
            status = roles.runtime.status(handle)
            return RoleRow(
                handle.name, status.state.value, load, waiting, status.restarts, status.pid, note, status.node
            )

        share = self._metrics.get("wait/trainer_share")
        note = "" if share is None else f"waited {share:.0%} of the last step"
        rows = [row(handle, 0, 0, note) for handle in roles.trainer.ranks]
        for handle, each in engines:
            note = f"version {each.weight_version}, {each.num_free_pages:,} of {each.num_pages:,} pages free"
            rows.append(row(handle, each.num_running, each.num_waiting, note))
        rows += [row(handle, each.num_samples, 0, f"{each.groups_finished:,} groups") for handle, each in agents]
        rows += pool_rows(roles)
        for handle, each in rewards:
            counts = ", ".join(f"{num:,} {name}" for name, num in sorted(each.outcomes.items()))
            rows.append(row(handle, each.num_waiting, each.num_waiting - each.num_judged, counts))
        return rows
