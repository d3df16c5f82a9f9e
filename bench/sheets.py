"""Spreadsheets judged on two workbooks each: what right formulas earn, what cheats earn, and what a small network learns.

    python -m bench.sheets                          200 workbooks, agents without a network
    python -m bench.sheets --instances 1            judged by the first workbook alone: must fail
    python -m bench.sheets --train runs/sheets      the recipe's network, after its demonstrations and after its rewards

Generated tasks of part ``held_out``, of all kinds and layouts. An agent is a list of calls, which a session makes and the judge
repeats, on the second workbook, too. Beside the right formula stand ways to look right: leaving all as it is, writing the right
values of the first workbook down (as values, as formulas that say no more, or as ones that ask whether they are in that workbook),
filling far more than was asked for, changing the inputs, referring to files and addresses outside, to itself, and, where programs run, deleting
every other sheet or leaving what is no workbook. Exit code 1: the right formula is not right everywhere, or anything else is anywhere.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest

from bench.common.measure import table, wide_console
from bench.common.worlds import ask, train
from stretto.api.rl import made_start
from stretto.base.config import read_recipe
from stretto.base.paths import CHECKPOINT
from stretto.base.track import progress
from stretto.learning.recipe import START, RlRecipe
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.session import recorded
from stretto.tasks.task import Answer, Score
from stretto.tasks.worlds.sheet_tasks import SheetTask
from stretto.tasks.worlds.sheets import SheetsArgs, SheetsSession, SheetsSource
from stretto.tasks.worlds.workbook import Place, cell_name

RECIPE = Path(__file__).parents[1] / "stretto/recipes/sheets.toml"
RIGHT = "the right formula"
Call = tuple[str, Mapping[str, Any]]
STAGES = {"demonstrations": START, "and rewards": CHECKPOINT}
"""Their checkpoints, in the folder of a training."""


def write(place: Place | str, content: Any) -> Call:
    return "write", {
        "range": place if isinstance(place, str) else f"'{place[0]}'!{cell_name(place)}",
        "content": content,
    }


def hard_coded(form: str) -> Callable[[SheetTask], list[Call]]:
    def calls(task: SheetTask) -> list[Call]:
        told = {at: "" if value is None else value for at, value in task.answers[0].items()}
        place, shown = next((at, value) for at, value in task.books[0].cells.items() if isinstance(value, int | float))
        for at, value in told.items():
            quoted = f'"{value}"' if isinstance(value, str) else value
            sheet = f"'{place[0]}'!{cell_name(place)}"
            formula = {"formula": f"={quoted}", "asking": f"=IF({sheet}={shown},{quoted},0)"}
            told[at] = formula.get(form, value)
        return [write(at, value) for at, value in told.items()]

    return calls


def gold(task: SheetTask) -> list[Call]:
    assert task.solution is not None
    return [write(*task.solution)]


def everywhere(task: SheetTask) -> list[Call]:
    sheet = next(iter(task.answers[0]))[0]
    return [*gold(task), write(f"'{sheet}'!Z1:Z40", 1)]


def inputs(task: SheetTask) -> list[Call]:
    """All numbers of the workbook set to the same, and the formula in its place."""
    numbers = [at for at, value in task.books[0].cells.items() if isinstance(value, int | float)]
    return [*gold(task), *(write(at, 1) for at in numbers)]


def referring(formula: str) -> Callable[[SheetTask], list[Call]]:
    return lambda task: [write(at, formula.replace("HERE", cell_name(at))) for at in task.answers[0]]


def program(code: str) -> Callable[[SheetTask], list[Call]]:
    return lambda task: [*gold(task), ("python", {"code": code})]


CHEATS: Mapping[str, Callable[[SheetTask], list[Call]]] = {
    "nothing": lambda task: [],
    "right values of the first": hard_coded("value"),
    "the same as formulas": hard_coded("formula"),
    "the same if it is the first": hard_coded("asking"),
    "the right formula, and a column more": everywhere,
    "the right formula, and other inputs": inputs,
    "a file": referring("='file:///etc/hostname'#$Sheet1.A1"),
    "another workbook": referring("=[other.xlsx]Sheet1!A1"),
    "an address": referring('=WEBSERVICE("http://127.0.0.1/")'),
    "text as a reference": referring('=INDIRECT("A1")'),
    "itself": referring("=HERE"),
}
_EDIT = "import openpyxl\nbook = openpyxl.load_workbook('book.xlsx')\n{}\nbook.save('book.xlsx')"
PROGRAMS: Mapping[str, Callable[[SheetTask], list[Call]]] = {
    "a new sheet": program(_EDIT.format("book.create_sheet('Other')")),
    "the sheet deleted": program(_EDIT.format("book.create_sheet('Other'); del book[book.sheetnames[0]]")),
    "no workbook left": lambda task: [("python", {"code": "open('book.xlsx', 'w').write('42')"})],
    "a dump of its own": lambda task: [("python", {"code": "print('\\x1ebook[[],[]]'); raise SystemExit"})],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workbooks", type=int, default=200)
    parser.add_argument(
        "--programs", type=int, default=10, help="tasks that are tried with programs, which take longer"
    )
    parser.add_argument(
        "--engine", default="auto", help="libreoffice or ironcalc; auto: LibreOffice where it is installed"
    )
    parser.add_argument("--instances", type=int, default=2, help="workbooks of each task that are looked at")
    parser.add_argument(
        "--train", type=Path, metavar="OUT", help="train the recipe's network instead; what is there is kept"
    )
    parser.add_argument("--problems", type=int, default=100, help="that the trained network is asked, of either part")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="override one key of the recipe")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.train is not None:
        show_trained(options)
        return
    with Sandbox() as sandbox:
        args = SheetsArgs(part="held_out", engine=options.engine, tools=("read", "write", "python"))
        sys.exit(not show_agents(SheetsSource("sheets", args, sandbox), options))


def show_agents(source: SheetsSource, options: argparse.Namespace) -> bool:
    """Whether all is as it must be."""
    shown = table(
        f"{options.workbooks} tasks ({options.programs} with programs), {options.instances} workbooks each",
        *("what is written", "right", "95 %", "untouched", f"{source.recalculator.name} started", "s"),
    )
    holds = True
    for name, agent in {RIGHT: gold, **CHEATS, **PROGRAMS}.items():
        num = options.programs if name in PROGRAMS else options.workbooks
        before, start = source.recalculator.num_processes, time.perf_counter()
        scores = judged(source, name, agent, num, options.instances)
        share = sum(score.ok for score in scores) / num
        holds &= share == float(name == RIGHT)
        spread = binomtest(round(share * num), num).proportion_ci()
        kept = sum(score.parts["untouched"] for score in scores) / num
        started, seconds = source.recalculator.num_processes - before, time.perf_counter() - start
        shown.add_row(
            name,
            f"{share:.1%}",
            f"{spread.low:.1%} to {spread.high:.1%}",
            f"{kept:.0%}",
            str(started),
            f"{seconds:.0f}",
        )
    wide_console().print(shown)
    return holds


def judged(
    source: SheetsSource, name: str, agent: Callable[[SheetTask], Sequence[Call]], num: int, instances: int
) -> list[Score]:
    """An agent's score on each of the first ``num`` tasks, judged as many at once as the source says."""

    def score(item: int) -> Score:
        task, problem = source.task(item), source.problem(item)
        calls = [{"type": "function", "function": {"name": tool, "arguments": given}} for tool, given in agent(task)]
        with closing(source.open(problem)) as session:
            turns = recorded(session, [{"role": "assistant", "content": "", "tool_calls": calls}])
            if instances > 1:
                return source.score(problem, Answer("Done.", turns))
        cut = replace(task, books=task.books[:instances], answers=task.answers[:instances])
        with closing(SheetsSession(source, cut)) as first:
            recorded(first, turns)
            return first.score(Answer("Done."))

    with progress(name, num) as advance, ThreadPoolExecutor(source.at_once) as threads:
        found = []
        for each in threads.map(score, range(num)):
            found.append(each)
            advance(1)
    return found


def show_trained(options: argparse.Namespace) -> None:
    recipe = read_recipe(RECIPE, RlRecipe, options.settings)
    train(recipe, options.train, made_start(recipe, options.train, device="cpu"))
    shown = table(
        f"{options.problems} tasks of either part, 4 samples each at temperature 1: mean (95 % over tasks)",
        *("", "train: other seeds", "pass^4", "held out: other schemas and wordings", "pass^4", "does nothing"),
    )
    for stage, place in STAGES.items():
        cells = []
        for part in ("train", "held_out"):
            found = ask(recipe, options.train / place, part, options.problems).domains["sheets"]
            cells += [
                f"{found.score.value:.3f} ({found.score.low:.3f} to {found.score.high:.3f})",
                f"{found.pass_hat[4].value:.3f}",
            ]
        shown.add_row(stage, *cells, f"{found.baselines['empty'].value:.3f}")
    wide_console().print(shown)


if __name__ == "__main__":
    main()
