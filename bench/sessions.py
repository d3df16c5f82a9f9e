"""A thousand sessions at once under the agent loop: what one costs in memory, and how all come back after ``kill -9``.

    python -m bench.sessions [--sessions N] [--turns N] [--level LEVEL] [--seed S]

The real agent role with real token logs and real verifiers, on the world ``service``, in groups of eight as in a run. The engine is
a script: it says what the sample's own seed has it say, calls that read and change the data base, now and then a question to the
customer; so no figure here is about a network. A whole run first; all of its samples are held half-way, all at once, while memory is
read. Then the same run, killed at a moment that the seed chooses, and a successor that reaches every session again from the logs and
goes on to the end: every call's result and the state after it against the first run's. Last a mutant, a world whose tools say the
time: it must lose sessions, say so, and reward none.

Two minutes of processor time; ``--sessions 104`` half a one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.measure import table, wide_console
from stretto.base.track import progress
from stretto.base.trajectory import Segment, Task
from stretto.flow.agent import AgentRole, GroupFailed
from stretto.flow.clients import Clients, Generated, GenerateRequest
from stretto.flow.reward import RewardRole
from stretto.learning.dialogue import Dialogue
from stretto.learning.recipe import LOGS, RlRecipe
from stretto.learning.samples import Sample, log_path, read_logs
from stretto.tasks.task import Problem, Session
from stretto.tasks.worlds.service import ServiceArgs, ServiceSession, ServiceSource
from stretto.text.chat import CHATML
from stretto.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

GROUP, VOCAB, SEQ_LEN = 8, 2048, 1 << 15
ASKS = 0.15
"""Share of turns that are a question to the customer."""
LATENCY_S = 0.05
"""Of a turn of the engine, at most."""
MOST_BYTES = 1 << 20
"""A session."""


class Clock(ServiceSession):
    """The mutant: what its tools say is never the same again."""

    def _carry_out(self, request: Any) -> str:
        return f"{super()._carry_out(request)} at {time.time_ns()}"


class Clocks(ServiceSource):
    def open(self, problem: Problem, seed: int | None = None) -> Session:
        return Clock(self._case(problem.item))


class Scripted:
    """An engine that says what (item, sample, turn) has it say. Which turn it is it counts in the tokens, so that it knows as
    much as any engine after a kill."""

    name = "scripted"

    def __init__(
        self, source: ServiceSource, tokenizer: Tokenizer, turns: int, before: Callable[[int], Awaitable[None]]
    ):
        self._source, self._tokenizer, self._turns, self._before = source, tokenizer, turns, before
        self._end, self._start = Dialogue(tokenizer).end_id, tokenizer.encode_rendered("<|im_start|>assistant\n")
        self._places: dict[str, int] = {}

    async def generate(self, request: GenerateRequest) -> Generated:
        ordinal, number, _ = map(int, request.id.split("."))
        windows = np.lib.stride_tricks.sliding_window_view(request.tokens, len(self._start))
        begun = int((windows == self._start).all(1).sum())
        place = begun - 1 if request.num_kept == 0 else self._places[request.id] + begun
        self._places[request.id] = place
        await self._before(place)
        text = (
            "Done." if place + 1 >= self._turns else self._turn(ordinal, random.Random(f"{ordinal}/{number}/{place}"))
        )
        tokens = np.array([*self._tokenizer.encode(text), self._end], np.int32)
        num = len(tokens)
        segment = Segment(tokens, True, np.full(num, -1.0, np.float32), np.zeros(num, np.int32))
        return Generated(segment, None, "stop", 0, 0, 0, 0.0)

    def _turn(self, item: int, draw: random.Random) -> str:
        if draw.random() < ASKS:
            return "What else is there to know?"
        case = self._source._case(item)
        kind = draw.choice(case.kinds)
        operation = draw.choice(("get", *kind.rules))
        arguments = {"id": draw.choice([*case.rows[kind.name]])}
        if operation == "change":
            arguments |= {"field": draw.choice(kind.fields), "value": f"v{draw.randrange(1000)}"}
        elif operation == "create":
            arguments = {name: f"v{draw.randrange(1000)}" for name in (kind.state, *kind.fields)}
        call = {"name": f"{operation}_{kind.name}", "arguments": arguments}
        return f"<tool_call>{json.dumps(call)}</tool_call>"


# The process that holds the agent


def work(folder: Path, options: argparse.Namespace) -> None:
    """One life of an agent; what it has to tell it says in lines of JSON."""
    source = source_of(options)
    tokenizer = load_tokenizer(folder.parent / "tokenizer")
    asyncio.run(_live(folder, options, source, tokenizer))


def source_of(options: argparse.Namespace) -> ServiceSource:
    kind = Clocks if options.mutant else ServiceSource
    return kind("service", ServiceArgs(level=options.level))


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


async def _live(folder: Path, options: argparse.Namespace, source: ServiceSource, tokenizer: Tokenizer) -> None:
    num, attempt, halfway = options.sessions, options.attempt, options.turns // 2
    told = {
        "sources": {"service": {"kind": "service"}}, "replay": "off", "optim": {"lr": 1.0},
        "rollout": {"max_tokens": SEQ_LEN // 2, "chunk_tokens": SEQ_LEN, "max_turns": options.turns + 1},
        "train": {"steps": 1, "prompts": 1, "seq_len": SEQ_LEN}, "failures": {"lease_s": 3600.0},
    }  # fmt: skip
    goes_on, held, served = asyncio.Event(), 0, 0
    # a successor waits for all that write on; who has said his last word, or is judged, does not
    unfinished = sum(len(each.turns()) < options.turns for each in logged(folder, num, attempt - 1)) if attempt else num

    async def before(place: int) -> None:
        nonlocal held, served
        served += 1
        if served % 20 == 0:
            tell(served=served)
        if not goes_on.is_set() and options.hold and (attempt or place == halfway):
            held += 1
            if held == unfinished:
                all_held.set()
            await goes_on.wait()
        await asyncio.sleep(random.random() * LATENCY_S)

    all_held = asyncio.Event()
    if not unfinished:
        all_held.set()
    rewards = RewardRole(lambda: {"service": source_of(options)})
    engine = Scripted(source, tokenizer, options.turns, before)
    recipe = RlRecipe.model_validate(told)
    agent = AgentRole(recipe, folder, tokenizer, lambda: {"service": source}, lambda caller: Clients([engine], rewards))
    tasks = [Task(ordinal, "service", ordinal, GROUP, ordinal, SEQ_LEN // 2) for ordinal in range(num // GROUP)]
    base, started_s, started_cpu_s = memory_bytes(), time.perf_counter(), time.process_time()

    async def group(task: Task) -> int:
        with suppress(GroupFailed):
            return (await agent.run_group(task, attempt)).num_samples
        return 0

    runs = [asyncio.create_task(group(task)) for task in tasks]
    if options.hold:
        await all_held.wait()
        tell(held=held, bytes=memory_bytes() - base, session_bytes=_alone(source, num), unfinished=unfinished,
             seconds=time.perf_counter() - started_s, cpu_s=time.process_time() - started_cpu_s,
             resumed=(await agent.stats()).tokens_resumed)  # fmt: skip
        goes_on.set()
    ended = sum(await asyncio.gather(*runs))
    stats, verdicts = await agent.stats(), await rewards.stats()
    tell(ended=ended, lost=stats.sessions_lost.get("service", 0), outcomes=verdicts.outcomes, troubles=stats.troubles)
    await agent.close()


def memory_bytes() -> int:
    """Proportional set size of this process."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _alone(source: ServiceSource, num: int) -> float:
    """Of a session of the world itself."""
    problems = [source.problem(item) for item in range(num)]
    before = memory_bytes()
    sessions = [source.open(problem) for problem in problems]
    return (memory_bytes() - before) / len(sessions)


def logged(folder: Path, num: int, attempt: int) -> Iterator[Sample]:
    """All samples, as the latest attempt up to this has written them."""
    for ordinal in range(num // GROUP):
        paths = (log_path(folder / LOGS, ordinal, each) for each in range(attempt, -1, -1))
        path = next((path for path in paths if path.exists()), None)
        samples = read_logs(path) if path else ()
        yield from samples or (
            Sample(Task(ordinal, "service", ordinal, GROUP, ordinal, SEQ_LEN // 2), at, 0) for at in range(GROUP)
        )


# The process that kills it


class Life:
    """A process with an agent, and what it tells."""

    def __init__(self, folder: Path, options: argparse.Namespace, *flags: str):
        numbers = ("sessions", "turns", "level")
        command = [sys.executable, "-m", "bench.sessions", "--worker", str(folder), *flags]
        command += [word for name in numbers for word in (f"--{name}", str(getattr(options, name)))]
        self.started_s = time.perf_counter()
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def told(self, advance: Callable[..., None]) -> Iterator[dict[str, Any]]:
        """Line by line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            advance(0, f"{said['served']:,} turns" if "served" in said else "")
            yield said | {"at_s": time.perf_counter() - self.started_s}
        if self.process.wait() not in (0, -signal.SIGKILL):
            raise SystemExit(f"the agent's process ended with {self.process.returncode}")


def run(folder: Path, options: argparse.Namespace, advance: Callable[..., None], *flags: str) -> dict[str, Any]:
    """A life that ends well: all that it told but for its progress."""
    found: dict[str, Any] = {}
    for said in Life(folder, options, *flags).told(advance):
        found |= {"held_at_s" if key == "at_s" and "held" in said else key: value for key, value in said.items()}
    advance(1)
    return found


def kill(folder: Path, options: argparse.Namespace, advance: Callable[..., None], *flags: str) -> None:
    """A life that is ended once so many turns were asked for."""
    share = random.Random(options.seed).uniform(0.4, 0.6)
    life = Life(folder, options, *flags)
    for said in life.told(advance):
        if said.get("served", 0) >= share * options.sessions * options.turns:
            life.process.send_signal(signal.SIGKILL)
    if life.process.returncode != -signal.SIGKILL:
        raise SystemExit("it ended before it was to be killed; give it more --turns")
    advance(1)


def calls_of(sample: Sample) -> list[tuple[str, str, str]]:
    """What tools and customer said, and the state after each call."""
    messages = [message for part in sample.parts for message in part.messages]
    return [(message["role"], message["content"], message.get("state", "")) for message in messages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000, help=f"a multiple of {GROUP}")
    parser.add_argument("--turns", type=int, default=8, help="of the model in a sample")
    parser.add_argument("--level", default="medium", help="of the world; long: a policy of 2,000 words")
    parser.add_argument("--seed", type=int, default=0, help="chooses the moment of the kill")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--attempt", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--mutant", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sessions < GROUP or options.sessions % GROUP:
        parser.error(f"--sessions {options.sessions}: give a multiple of {GROUP}")
    if options.worker:
        work(options.worker, options)
        return
    with tempfile.TemporaryDirectory() as temporary:
        raise SystemExit(0 if _compare(Path(temporary), options) else 1)


def _compare(folder: Path, options: argparse.Namespace) -> bool:
    _write_tokenizer(folder / "tokenizer", options)
    few = argparse.Namespace(**vars(options) | {"sessions": max(3 * GROUP, options.sessions // 10 // GROUP * GROUP)})
    with progress("agents", 5) as advance:
        whole = run(folder / "whole", options, advance, "--hold")
        kill(folder / "killed", options, advance)
        samples = list(logged(folder / "killed", options.sessions, 0))
        again = run(folder / "killed", options, advance, "--hold", "--attempt", "1")
        kill(folder / "mutant", few, advance, "--mutant")
        mutant = run(folder / "mutant", few, advance, "--hold", "--attempt", "1", "--mutant")
    pairs = zip(*(logged(folder / name, options.sessions, 1) for name in ("whole", "killed")), strict=True)
    same = [
        calls_of(one) == calls_of(other) and one.verdict is not None and other.verdict is not None
        and (one.verdict.reward, one.finish_reason) == (other.verdict.reward, other.finish_reason)
        for one, other in pairs
    ]  # fmt: skip
    calls = Counter(role for sample in samples for role, _, _ in calls_of(sample))
    states = {state for sample in samples for _, _, state in calls_of(sample)}
    bytes_each = whole["bytes"] / whole["held"]
    console = wide_console()
    shown = table(f"{options.sessions:,} sessions at once, one agent, one process", "", "measured", "aim")
    shown.add_row("held at once, half-way", f"{whole['held']:,}", f"{options.sessions:,}")
    shown.add_row("memory of a sample: session, tokens, log, task", f"{bytes_each / 1024:.0f} KiB", "≤ 1024 KiB")
    shown.add_row("of that the world's own session", f"{whole['session_bytes'] / 1024:.0f} KiB", "")
    shown.add_row("unfinished when it was killed", f"{again['unfinished']:,} of {options.sessions:,}", "")
    shown.add_row("calls and replies in their logs", f"{calls['tool']:,} and {calls['user']:,}", "")
    shown.add_row("different states that they had left", f"{len(states):,}", "")
    shown.add_row("until all are resumed", f"{again['seconds']:.1f} s", "")
    shown.add_row("of that processor time", f"{again['cpu_s']:.1f} s", "")
    shown.add_row("from the start of its process", f"{again['held_at_s']:.1f} s", "")
    shown.add_row("sessions lost", str(again["lost"]), "0")
    shown.add_row("samples that ended", f"{again['ended']:,}", f"{options.sessions:,}")
    shown.add_row("same results, states and verdict as unkilled", f"{sum(same):,}", f"{options.sessions:,}")
    shown.add_row(
        "verdicts", ", ".join(f"{num:,} {name}" for name, num in sorted(again["outcomes"].items())), "no infra"
    )
    console.print(shown)
    caught = table(f"a world whose tools say the time: {few.sessions} sessions", "", "measured", "aim")
    caught.add_row("unfinished when it was killed", f"{mutant['unfinished']:,}", "")
    caught.add_row("sessions lost", str(mutant["lost"]), "> 0")
    caught.add_row("samples that ended", f"{mutant['ended']:,}", f"< {few.sessions}")
    console.print(caught)
    is_whole = whole["held"] == again["ended"] == sum(same) == options.sessions and again["lost"] == 0
    is_caught = mutant["lost"] > 0 and mutant["ended"] < few.sessions
    return is_whole and is_caught and bytes_each <= MOST_BYTES and "infra" not in again["outcomes"]


def _write_tokenizer(folder: Path, options: argparse.Namespace) -> None:
    source = source_of(options)
    problems = [source.problem(10**6 + item) for item in range(200)]
    texts = (json.dumps([problem.messages, source.demonstration(problem)]) for problem in problems)
    train_tokenizer(texts, VOCAB, CHATML).save(folder)


if __name__ == "__main__":
    main()
