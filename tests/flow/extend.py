"""A new advantage, a new reward, a new environment, as a user writes them: how many lines, and what of stretto they touch.

    python -m tests.flow.extend [--steps 4]

The files of recipes/examples are copied into a folder of their own and named from there by a recipe, as ``file.py:name``; each
is a whole run of ``stretto rl``, from its own supervised start. Beside it the same run without the new part, from
the same start: the new one must have acted, which is that its final weights differ. Exits with 1 where one has more lines than
the aim, a file of stretto has changed meanwhile, a number is not finite, or the part did nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stretto
from bench.common.measure import table
from bench.sync_equality import recipe, start_of, whole_run
from stretto.base.track import progress, read_metrics, wide_console
from stretto.learning.recipe import RlRecipe

EXAMPLES = Path(__file__).resolve().parents[2] / "stretto/recipes" / "examples"
AIM_LINES = 50
DIGITS = {"operation": "complement", "length": 3, "graded": True}
SEQ_LEN = 192
_TALKS = {"max_tokens": 30, "max_turns": 4}
_SLOPPY = {"start": {"steps": 60, "noise": 0.3}}
"""A start whose answers are now and then too long: after more steps, on some processors, none is."""
_ALL = {"loss": {"drop_uniform": False}}
"""Groups of equal rewards are kept: who learnt to guess digits may have no answer right that the control asks for."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something new, and the run that has it."""

    what: str
    file: str
    tables: Callable[[Path], Mapping[str, Any]]
    """Of the recipe with it; its file's folder is told."""
    control: Mapping[str, Any]
    """Of the recipe without."""
    acts: tuple[str, float] | None = None
    """A metric that the new part alone brings above so much; None: the weights alone tell."""


def _guessing(folder: Path) -> dict[str, Any]:
    return {"sources": {"digits": {"kind": f"{folder / 'guess.py'}:Guess", "args": {}}}, "rollout": _TALKS}


PARTS = (
    Part(
        "advantage", "turns.py",
        lambda folder: _guessing(folder) | {"loss": {"advantage": f"{folder / 'turns.py'}:by_turns"}},
        _guessing(EXAMPLES),
    ),
    Part(
        "reward", "brief.py",
        lambda folder: {"sources": {"digits": {"kind": f"{folder / 'brief.py'}:Brief", "args": DIGITS}}, **_SLOPPY},
        _SLOPPY, ("reward/part/penalty", 0.0),
    ),
    Part("environment", "guess.py", lambda folder: _guessing(folder) | _ALL, _ALL, ("samples/turns_mean", 1.0)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a part."""

    part: Part
    num_lines: int
    """That are not blank."""
    num_touched: int
    """Files of stretto that are not as they were before."""
    rewards: tuple[float, ...]
    """By step."""
    acted: bool
    turns: float

    @property
    def is_well(self) -> bool:
        is_sound = bool(self.rewards) and all(map(math.isfinite, self.rewards))
        return self.num_lines < AIM_LINES and not self.num_touched and is_sound and self.acted


def chosen(tables: Mapping[str, Any], steps: int) -> RlRecipe:
    """The small recipe of `bench.sync_equality` with room for a few turns, and ``tables``."""
    tree = {"start": {"steps": 120, "noise": 0.3}, "runtime": {"isolate": "none"}, **tables}
    made = recipe(steps, train={"steps": steps, "seq_len": SEQ_LEN, "eval_every": 100}, **tree)
    assert made.start is not None
    model = made.start.model.model_copy(update={"max_positions": SEQ_LEN})
    return made.model_copy(update={"start": made.start.model_copy(update={"model": model})})


def run(part: Part, steps: int, folder: Path, advance: Callable[[int, str | None], None]) -> Found:
    own, before = folder / "mine", _hashes()
    own.mkdir(parents=True)
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, own)
    tried, control = chosen(part.tables(own), steps), chosen(part.control, steps)
    start = start_of(tried, folder / "start")
    with_it = whole_run(part.what, tried, folder / "with", start, advance)
    without = whole_run(f"no new {part.what}", control, folder / "without", start, advance)
    rows = [row for row in read_metrics(folder / "with") if "reward/mean" in row]
    moved = part.acts is None or any(row[part.acts[0]] > part.acts[1] for row in rows)
    after = _hashes()
    return Found(
        part,
        num_lines=sum(bool(line.strip()) for line in (own / part.file).read_text(encoding="utf-8").splitlines()),
        num_touched=sum(after.get(path) != before.get(path) for path in before.keys() | after.keys()),
        rewards=with_it.rewards,
        acted=moved and with_it.checksum != without.checksum,
        turns=rows[-1]["samples/turns_mean"],
    )


def _hashes() -> dict[Path, str]:
    """Of all of stretto's own files."""
    files = [path for path in Path(stretto.__path__[0]).rglob("*") if path.suffix in (".py", ".toml", ".cpp")]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def show(found: list[Found]) -> bool:
    """Print them; whether one is not as it should be."""
    columns = ("new", "file", "lines", "aim", "files of stretto", "steps", "reward", "turns", "acted")
    made = table("As a new user would", *columns)
    for each in found:
        reward = f"{each.rewards[0]:.3f} → {each.rewards[-1]:.3f}"
        facts = (f"{each.num_lines}", f"< {AIM_LINES}", f"{each.num_touched}", f"{len(each.rewards)}", reward)
        made.add_row(each.part.what, each.part.file, *facts, f"{each.turns:.1f}", "yes" if each.acted else "no")
    wide_console().print(made)
    return not all([each.is_well for each in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, progress("runs", 2 * len(PARTS) * options.steps) as advance:
        found = [run(part, options.steps, Path(temporary) / part.what, advance) for part in PARTS]
    sys.exit(show(found))


if __name__ == "__main__":
    main()
