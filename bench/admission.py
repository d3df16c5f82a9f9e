"""Figure 11: published admission rules and ours on the same trace of delays.

    python -m bench.admission [--staleness 1 2 4] [--prompts 16] [--capacity 48] [--seeds 5]

Each rule says whether one more group may be started and which finished groups make a batch; `bench.common.admission_rules`
describes them. They are written anew from their descriptions, for a simulation without models; none of the systems runs here.
The last row is ours with the bound set to what AReaL's rule really reached on these traces.

The trace gives the n-th group started the same duration under every rule: lognormal, with a share of Pareto stragglers.
Engines run ``--capacity`` groups at once, others wait in line; a group's version is that of its first token. Idle is the
trainer's share of the time after the first two steps. Bias is the mean duration of the groups trained relative to that of all
groups started: a rule that throws slow ones away trains on fast ones.

A rule that keeps the bound and trains all it starts must wait for a group that takes longer than η steps. A rule that gives
up either of the two need not.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean

from rich.console import Console
from rich.table import Table

from bench.common.admission_rules import RULES, Ours, Rule, State, Trace
from stretto.base.track import Advance, progress

WARM_UP = 2
"""Steps at the start, in which every rule fills its slots."""


def draw_trace(options: argparse.Namespace, staleness: int, capacity: int, seed: int) -> Trace:
    draw = random.Random(seed)

    def duration() -> float:
        if draw.random() < options.straggler_share:
            return options.group_s * min(3.0 * draw.paretovariate(1.5), 20.0)
        return options.group_s * draw.lognormvariate(0.0, options.spread)

    num = 4 * options.prompts * (options.steps + staleness + 1)
    durations = tuple(duration() for _ in range(num))
    steps = tuple(draw.uniform(0.9, 1.1) for _ in range(options.steps))
    return Trace(options.prompts, staleness, capacity, options.steps, options.activate_s, durations, steps)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the trainer saw under one rule."""

    staleness: list[int]
    idle: float
    discarded: int
    bias: float


class Simulation:
    """One rule on one trace."""

    def __init__(self, rule: Rule, trace: Trace) -> None:
        self.rule = rule
        self.state = State(trace)
        self.now = 0.0
        self._events: list[tuple[float, int, str, int, int]] = []
        self._line: deque[int] = deque()
        self._num_running = 0
        self._num_events = 0
        self._in_training: list[int] | None = None

    def run(self) -> Outcome:
        state, trace = self.state, self.state.trace
        staleness: list[int] = []
        trained_s: list[float] = []
        idle_s, free_since, start_s = 0.0, 0.0, 0.0
        while True:
            self._start_groups()
            if self._in_training is None and (batch := self._take()) is not None:
                staleness += [state.version - version for version in batch]
                trained_s += [trace.durations_s[ordinal] for ordinal in self._in_training or ()]
                if state.version >= WARM_UP:
                    idle_s += self.now - free_since
                else:
                    start_s = self.now + trace.steps_s[state.version]
                self._push(trace.steps_s[state.version], "trained")
            assert self._events, f"{type(self.rule).__name__} waits for ever at step {state.version}"
            self.now, _, kind, ordinal, version = heapq.heappop(self._events)
            if kind == "finished":
                self._num_running -= 1
                state.waiting[ordinal] = version
                state.finished.append(ordinal)
            elif kind == "active":
                state.engine_version = max(state.engine_version, version)
            else:
                self._in_training, free_since = None, self.now
                state.version += 1
                state.num_trained += trace.prompts
                self._push(trace.activate_s, "active", version=state.version)
                if state.version == trace.num_steps:
                    break
        wall_s = self.now - start_s
        bias = mean(trained_s) / mean(trace.durations_s[: state.num_started]) - 1.0
        return Outcome(staleness, idle_s / wall_s, state.num_discarded, bias)

    def _start_groups(self) -> None:
        state = self.state
        while self.rule.may_start(state):
            state.waiting[state.num_started] = None
            self._line.append(state.num_started)
            state.num_started += 1
        while self._line and self._num_running < state.trace.capacity:
            ordinal = self._line.popleft()
            self._num_running += 1
            self._push(state.trace.durations_s[ordinal], "finished", ordinal, state.engine_version)

    def _take(self) -> list[int] | None:
        """Versions of the batch that is trained from now on."""
        state = self.state
        for ordinal in self.rule.stale(state):
            state.finished.remove(ordinal)
            del state.waiting[ordinal]
            state.num_discarded += 1
        ordinals = self.rule.choose(state)
        if ordinals is None:
            return None
        self._in_training = ordinals
        versions = []
        for ordinal in ordinals:
            state.finished.remove(ordinal)
            version = state.waiting.pop(ordinal)
            assert version is not None
            versions.append(version)
        return versions

    def _push(self, seconds: float, kind: str, ordinal: int = -1, version: int = -1) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now + seconds, self._num_events, kind, ordinal, version))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument(
        "--capacity", type=int, nargs="+", default=[24, 1000], help="groups that the engines run at once"
    )
    parser.add_argument("--group-s", type=float, default=0.8, help="median of a group, in steps of the trainer")
    parser.add_argument("--spread", type=float, default=0.5, help="of the logarithm of a group's time")
    parser.add_argument("--straggler-share", type=float, default=0.03)
    parser.add_argument("--activate-s", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    cells = [(capacity, staleness) for capacity in options.capacity for staleness in options.staleness]
    with progress("traces", len(cells) * (len(RULES) + 1) * options.seeds) as advance:
        for capacity, staleness in cells:
            table = Table("rule", "max", "mean staleness", "over η", "discarded", "idle", "bias", title_justify="left")
            table.title = f"η {staleness}, {options.prompts} groups a step, {capacity} at once, {options.seeds} traces"
            traces = [draw_trace(options, staleness, capacity, seed) for seed in range(options.seeds)]
            worst = 0
            for name, make in RULES.items():
                outcomes = _play(make, traces, advance)
                table.add_row(name, *_cells(outcomes, staleness))
                if name == "AReaL":
                    worst = max(max(outcome.staleness) for outcome in outcomes)
            wider = [replace(trace, staleness=worst) for trace in traces]
            table.add_row(f"ours, η {worst}", *_cells(_play(Ours, wider, advance), staleness))
            Console(width=120).print(table)


def _play(make: Callable[[Trace], Rule], traces: list[Trace], advance: Advance) -> list[Outcome]:
    outcomes = []
    for trace in traces:
        outcomes.append(Simulation(make(trace), trace).run())
        advance(1)
    return outcomes


def _cells(outcomes: list[Outcome], staleness: int) -> list[str]:
    ages = [age for outcome in outcomes for age in outcome.staleness]
    return [
        f"{max(ages)}",
        f"{mean(ages):.2f}",
        f"{sum(age > staleness for age in ages) / len(ages):.2%}",
        f"{sum(outcome.discarded for outcome in outcomes) / len(ages):.2%}",
        f"{mean(outcome.idle for outcome in outcomes):.1%}",
        f"{mean(outcome.bias for outcome in outcomes):+.1%}",
    ]


if __name__ == "__main__":
    main()
