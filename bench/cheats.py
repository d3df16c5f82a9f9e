"""Measure the rewards of scripted agents that skip the work against the trivial baseline, in every world and kind of task.

    python -m bench.cheats [--problems N] [--kinds KIND,KIND]

The trivial baseline of a kind is the best of: an empty answer, ``0``, the most frequent correct answer, the correct answer of another
problem, random words where the scripted judge rates, and the source's own baselines. A cheating agent may know the correct answer, but
skips the work: it acts before it reads, cites everything, or lists all answers. Exits with 1 if an agent exceeds the trivial baseline
by more than 2 points.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from bench.common.measure import bench_parser, finish, table
from stretto.base.errors import UserError
from stretto.base.track import wide_console
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.registry import KINDS, open_source
from stretto.tasks.session import calling, recorded
from stretto.tasks.task import Answer, Problem, TaskSource, find_answer, write_answer
from stretto.tasks.worlds.search import SearchSource
from stretto.tasks.worlds.service import LEVELS, ServiceSource
from stretto.tasks.worlds.sheets import SheetsSource
from stretto.tasks.worlds.workbook import cell_name

MARGIN = 0.02
Turns = Sequence[Mapping[str, Any]]
_STUFFED = "I saw the lantern copper thimble orchard ladder harbour velvet compass kettle ribbon gravel mirror. " * 3
"""All words that prompts of kind ``briefs`` ask for, in a text of medium length."""
_ENDS_EARLY = "```python\nimport os\nos._exit(0)\n```"
_EQUALS_ALL = "```python\nclass Any(int):\n    def __eq__(self, other): return True\ndef {}(*args): return Any()\n```"


def say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def arguments(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Settings of a kind, each measured by itself; files that it needs are written into ``folder``."""
    draw, path = random.Random(0), folder / f"{kind}.jsonl"
    if kind == "choice":
        options = [[f"{n}{letter}" for letter in "pqrs"] for n in range(80)]
        rows = [{"question": f"Which is {n}?", "options": options[n], "answer": draw.choice("ABCD")} for n in range(80)]
    elif kind == "math":
        answers = [f"\\frac{{{n}}}{{{n + 1}}}" if n % 2 else str(n + n * n) for n in range(80)]
        rows = [{"question": f"What is {n} + {n * n}?", "answer": answer} for n, answer in enumerate(answers)]
    else:
        strings = [{"operation": each, "graded": graded} for each in ("sort", "complement") for graded in (False, True)]
        return {
            "code": [{}, {"reward": "share"}],
            "gym": [{"dataset": "chain_sum"}],
            "judged": [{"judge": "scripted"}],
            "service": [{"level": level} for level in LEVELS],
            "sheets": [{"engine": "ironcalc"}, {"engine": "ironcalc", "reward": "share"}],
            "strings": strings,
            "verifiers": [{"id": "none"}],
        }.get(kind, [{}])
    path.write_text("\n".join(map(json.dumps, rows)))
    return [{"path": path}]


def trivial(source: TaskSource, problem: Problem, golds: Sequence[str], place: int) -> Iterator[tuple[str, Turns]]:
    """Policies that do not read the problem."""
    yield "empty answer", [say("")]
    yield "0", [say("0")]
    yield "most frequent answer", [say(Counter(golds).most_common(1)[0][0])]
    yield "another's answer", [say(golds[place - 1])]
    if not source.is_verifiable:
        known = sorted({word for gold in golds for word in gold.split()})
        yield "random words", [say(" ".join(random.Random(place).sample(known, min(200, len(known)))))]
    yield from source.baselines(problem).items()


def cheats(source: TaskSource, problem: Problem, golds: Sequence[str]) -> Iterator[tuple[str, Turns]]:
    """Agents that skip the work."""
    answer = str(problem.payload.get("answer", problem.gold))
    form = getattr(source.args, "format", "plain")
    with closing(source.open(problem)) as session:
        tools = session.tools
        documents = list(session.reader.corpus.documents) if hasattr(session, "reader") else []
    yield "do nothing", [say("Done.")]
    yield "echo", [say(str(problem.messages[-1]["content"]))]
    yield "echo, marked", [say(write_answer(str(problem.messages[-1]["content"]), form))]
    everything = list(dict.fromkeys(find_answer(each, form).text for each in golds))
    yield "guess all", [say(write_answer(", ".join(everything), form))]
    yield "guess all, by lines", [say("\n".join(everything))]
    yield "guess all, each marked", [say(" ".join(golds))]
    if tools:
        yield "empty calls", [*(calling(tool.name, {}) for tool in tools), say(golds[0])]
        wild = {tool.name: dict.fromkeys(tool.parameters["properties"], "ZZZ999999") for tool in tools}
        yield "out-of-range calls", [*(calling(name, each) for name, each in wild.items()), say("Done.")]
    if source.name == "briefs":
        yield "all words", [say(_STUFFED)]
    if source.name == "code":
        yield "ends early", [say(_ENDS_EARLY)]
        names = {word.partition("(")[0].split()[-1] for word in problem.payload["tests"] if "(" in word}
        yield "equal to everything", [say(_EQUALS_ALL.format(next(iter(names))))]
    if isinstance(source, ServiceSource):
        turns = [turn for turn in source.obliging(problem) if turn["role"] != "tool"]
        calls = [turn for turn in turns if turn.get("tool_calls")]
        is_read = [turn["tool_calls"][0]["function"]["name"].startswith(("get_", "list_")) for turn in calls]
        reads = [turn for turn, reading in zip(calls, is_read, strict=True) if reading]
        if reads and len(reads) < len(calls):
            yield "act first, then read", [*(turn for turn in turns[:-1] if turn not in reads), *reads, turns[-1]]
            backwards = iter(calls[::-1])
            yield "wrong order", [next(backwards) if turn in calls else turn for turn in turns]
        if any("Shall I" in turn["content"] for turn in turns):
            yield "act unasked", [*calls, say("Done.")]
    if isinstance(source, SearchSource):
        marks = " ".join(f"[{each}]" for each in documents)
        opened = [calling("open", {"id": each}) for each in documents]
        cited = problem.gold if problem.gold.count("[") else write_answer(f"{answer} {marks}", form)
        yield "cite unread", [say(cited)]
        yield "open all, cite all", [*opened, say(write_answer(f"{answer} {marks}", form))]
        own = list(problem.payload["documents"])
        most = own + [each for each in documents if each not in own][: source.args.opens - len(own)]
        marks = " ".join(f"[{each}]" for each in most)
        opened = [calling("open", {"id": each}) for each in most]
        yield "open and cite up to the limit", [*opened, say(write_answer(f"{answer} {marks}", form))]
    if isinstance(source, SheetsSource):
        task = source.task(problem.item)
        assert task.solution is not None
        span, formula = task.solution
        values = {f"'{at[0]}'!{cell_name(at)}": value for at, value in task.answers[0].items() if value is not None}
        writes = [calling("write", {"range": at, "content": value}) for at, value in values.items()]
        yield "constants", [*writes, say("")]
        area = f"{span.rpartition('!')[0]}!A1:AD60".removeprefix("!")
        yield "write everywhere", [calling("write", {"range": area, "content": formula}), say("")]


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--problems", type=int, default=40, help="number of problems of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of task, separated by commas; default: all")
    options = parser.parse_args()
    console, failures = wide_console(), []
    shown = table(
        f"mean reward, %, {options.problems} problems", "kind", "trivial", "best cheat", "trivial baseline", "cheat"
    )
    with tempfile.TemporaryDirectory() as folder, Sandbox() as sandbox:
        settings = [(kind, args) for kind in options.kinds.split(",") for args in arguments(kind, Path(folder))]
        for kind, args in settings:
            label = " ".join([kind, *(f"{value}" for name, value in args.items() if name not in ("path", "engine"))])
            try:
                source = open_source(kind, SimpleNamespace(kind=kind, args=args), sandbox)
            except UserError as error:
                console.print(f"{label}: left out: {error}")
                continue
            with closing(source):
                means = {name: rewards(source, options.problems, name) for name in ("trivial", "cheats")}
            (base, base_reward), (cheat, reward) = (max(each.items(), key=itemgetter(1)) for each in means.values())
            shown.add_row(label, base, cheat, f"{100 * base_reward:.1f}", f"{100 * reward:.1f}")
            for name, value in means["cheats"].items():
                if value > base_reward + MARGIN:
                    failures.append(
                        f"above the trivial baseline: {label}: {name}: {100 * value:.1f} % over {100 * base_reward:.1f} %"
                    )
    console.print(shown)
    finish(failures)


def rewards(source: TaskSource, num: int, kind: str) -> dict[str, float]:
    """Mean reward of each agent over the problems that it applies to, or its share of correct answers if that is higher."""
    problems = [source.problem(item) for item in range(min(num, source.num_items or num))]
    golds = [problem.gold for problem in problems]
    scores: dict[str, list[tuple[float, float]]] = {}
    for place, problem in enumerate(problems):
        agents = trivial(source, problem, golds, place) if kind == "trivial" else cheats(source, problem, golds)
        for name, turns in agents:
            with closing(source.open(problem)) as session:
                transcript = recorded(session, turns)
            score = source.score(problem, Answer(str(transcript[-1].get("content") or ""), transcript))
            scores.setdefault(name, []).append((score.reward, float(score.ok and source.is_verifiable)))
    return {name: max(map(fmean, zip(*each, strict=True))) for name, each in scores.items()}


if __name__ == "__main__":
    main()
