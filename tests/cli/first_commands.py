"""First commands, as a new user gives them: twelve kinds of text folders through the real command line.

    python -m tests.cli.first_commands [--kinds NAME …] [--seed S] [--checkout FOLDER]

Each kind is written by this bench, so that it knows what must be read: every byte of the text, no more and no less, with
some of it held out. A command is right if it runs and the token data hold exactly that, or if it refuses what it should
in one line with the remedy; and if its output says what it used and what it left out. Two steps of a tiny recipe where
the command is ``pretrain``. Peak memory is the largest process of the command; of the text without lines, a quarter of it
is tokenised too, and the whole may take no more than a tenth above that.

--checkout tries the package of another folder, for example one of an older revision: a bench that cannot fail shows nothing.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import lzma
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
from pyarrow import parquet
from rich.table import Table

from stretto.base.track import progress, wide_console

RECIPE = """
[model]
vocab_size = 400
hidden_size = 16
num_layers = 4
num_heads = 2
num_kv_heads = 1
head_dim = 8
num_experts = 4
top_k = 2
expert_intermediate_size = 8
tie_embeddings = true
max_positions = 64

[optim]
lr = 1e-3

[train]
steps = 2
rows = 4
seq_len = 32
eval_rows = 4
"""
UNBROKEN_BYTES = 100_000_000
MEMORY_RATIO = 1.1
"""Of a text over a quarter of it: what allocators may round, where nothing is read whole."""
CHINESE = "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳云腾致雨露结为霜"

_letters = random.Random(0)
WORDS = ["".join(_letters.choices("etaoinshrdlu", k=_letters.randint(2, 9))) for _ in range(400)]


@dataclass(frozen=True, slots=True)
class Command:
    """A command on a kind of text, and what it must do. Written by the makers below."""

    arguments: tuple[str, ...]
    """Behind ``stretto``, without ``-o``."""
    says: tuple[str, ...]
    """Of its output; of its one line of error if it is to refuse."""
    num_bytes: int | None = None
    """UTF-8 bytes of all text that must be in the token data; None: it must refuse."""
    compared: tuple[str, ...] = ()
    """Another command, on less of the same text, that must take about as much memory."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command did."""

    problem: str
    """What was wrong; empty if nothing."""
    is_named: bool
    """The output says what was used."""
    peak_mb: float
    told: str
    """The line that says it, or the refusal."""


Maker = Callable[[Path, random.Random], list[Command]]


def prose(rng: random.Random, num_bytes: int) -> str:
    lines: list[str] = []
    num = 0
    while num < num_bytes:
        lines.append(" ".join(rng.choices(WORDS, k=12)) + ".\n")
        num += len(lines[-1])
    return "".join(lines)


def write(path: Path, text: str | bytes) -> int:
    """Write a file; returns its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = text.encode() if isinstance(text, str) else text
    path.write_bytes(raw)
    return len(raw)


def records(rng: random.Random, num: int, name: str = "text") -> tuple[str, int]:
    """JSON lines, and the bytes of their text."""
    texts = [f"{number}: {prose(rng, 80)}" for number in range(num)]
    return "".join(json.dumps({"id": n, name: text}) + "\n" for n, text in enumerate(texts)), sum(map(len, texts))


def pretrain(folder: Path, data: Path, says: Sequence[str], num_bytes: int | None, *more: str) -> Command:
    recipe = folder / "tiny.toml"
    recipe.write_text(RECIPE)
    return Command(("pretrain", str(recipe), "--data", str(data), *more), (str(data), *says), num_bytes)


def books(folder: Path, rng: random.Random) -> list[Command]:
    num = sum(write(folder / f"t/book {n}.txt", prose(rng, 60_000)) for n in range(3))
    return [pretrain(folder, folder / "t", ("3 files", "3 documents", "the last"), num)]


def one_file(folder: Path, rng: random.Random) -> list[Command]:
    num = write(folder / "notes.md", prose(rng, 30_000))
    return [pretrain(folder, folder / "notes.md", ("1 file", "the last"), num)]


def code(folder: Path, rng: random.Random) -> list[Command]:
    names = [
        "setup.py",
        "src/a.py",
        "src/b.rs",
        "src/c.h",
        "web/d.ts",
        "tests/test_a.py",
        "test_b.py",
        "train.py",
        "val.py",
        "Makefile",
    ]
    num = sum(write(folder / "t" / name, prose(rng, 3_000)) for name in names)
    for name in ("src/__init__.py", "tests/__init__.py"):
        write(folder / "t" / name, "")
    write(folder / "t/tests/fixture.jsonl", '{"name": "no text here"}\n')
    write(folder / "t/logo.png", b"\x89PNG\0")
    write(folder / "t/.git/HEAD", "ref: main")
    says = (f"{len(names)} files", "left out", "2 empty (src/__init__.py", "1 .png", "fixture.jsonl")
    return [pretrain(folder, folder / "t", says, num)]


def json_lines(folder: Path, rng: random.Random) -> list[Command]:
    (train, num_train), (val, num_val), (test, _) = (records(rng, num) for num in (300, 40, 40))
    for name, text in (("train-0.jsonl", train), ("validation.jsonl", val), ("test.jsonl", test)):
        write(folder / "t" / name, text)
    return [
        pretrain(
            folder,
            folder / "t",
            ("train 300 documents", "val 40 documents", "1 of a test split (test.jsonl)"),
            num_train + num_val,
        )
    ]


def other_field(folder: Path, rng: random.Random) -> list[Command]:
    text, num = records(rng, 300, "content")
    write(folder / "a.jsonl", text)
    refused = pretrain(
        folder, folder / "a.jsonl", ("line 1", "no field 'text'", "did you mean 'content'?", "--text-field"), None
    )
    return [refused, pretrain(folder, folder / "a.jsonl", ("1 file", "documents"), num, "--text-field", "content")]


def table(folder: Path, rng: random.Random) -> list[Command]:
    texts = [f'{number}: "so, they say";\n{prose(rng, 60)}' for number in range(300)]
    with (folder / "a.csv").open("w", newline="") as handle:
        csv.writer(handle).writerows([["id", "text"], *([n, text] for n, text in enumerate(texts))])
    return [pretrain(folder, folder / "a.csv", ("1 file", "documents"), sum(map(len, texts)))]


def nested(folder: Path, rng: random.Random) -> list[Command]:
    num = sum(write(folder / f"t/train/{n % 3}/deep/{n}.txt", prose(rng, 2_000)) for n in range(12))
    num += sum(write(folder / f"t/val/{n}.txt", prose(rng, 900)) for n in range(3))
    return [pretrain(folder, folder / "t", ("12 files", "train 12 documents", "val 3 documents"), num)]


def mixed(folder: Path, rng: random.Random) -> list[Command]:
    text, num = records(rng, 400)
    write(folder / "t/data/part-0.jsonl", text)
    write(folder / "t/data/copy.jsonl", text)
    write(folder / "t/README.md", "# About these data\n")
    write(folder / "t/LICENSE", "CC0\n")
    write(folder / "t/cover.jpg", b"\xff\xd8\0")
    says = (
        "1 file",
        "1 copied (data/part-0.jsonl is data/copy.jsonl)",
        "2 text files (LICENSE, …), 23 B: the folder has more bytes of JSONL",
        "1 .jpg",
    )
    return [pretrain(folder, folder / "t", says, num)]


def chinese(folder: Path, rng: random.Random) -> list[Command]:
    text = "".join("".join(rng.choices(CHINESE, k=rng.randint(5, 30))) + "。" for _ in range(2_000))
    num = write(folder / "utf8.txt", text)
    write(folder / "gb.txt", text.encode("gb18030"))
    right = pretrain(folder, folder / "utf8.txt", ("1 file", "the last"), num)
    return [right, pretrain(folder, folder / "gb.txt", ("line 1", "not UTF-8", "gb18030", "iconv -f gb18030"), None)]


def unbroken(folder: Path, rng: random.Random) -> list[Command]:
    piece = prose(rng, 1_000_000).replace("\n", " ")
    commands = []
    for name, size in (("quarter.txt", UNBROKEN_BYTES // 4), ("whole.txt", UNBROKEN_BYTES)):
        num = write(folder / name, (piece * (size // len(piece) + 1))[:size])
        arguments = ("tokenize", "--data", str(folder / name), "--vocab-size", "1000")
        commands.append(
            Command(
                arguments, (str(folder / name), "1 file", "the last"), num, commands[0].arguments if commands else ()
            )
        )
    return commands


def columns(folder: Path, rng: random.Random) -> list[Command]:
    texts = [f"{number}: {prose(rng, 80)}" for number in range(1500)]
    (folder / "t").mkdir()
    for split, part in (("train-00000-of-00001", texts[:1400]), ("validation-00000-of-00001", texts[1400:])):
        parquet.write_table(pyarrow.table({"text": part}), folder / f"t/{split}.parquet")
    return [pretrain(folder, folder / "t", ("train 1,400 documents", "val 100 documents"), sum(map(len, texts)))]


def compressed(folder: Path, rng: random.Random) -> list[Command]:
    (one, num_one), (two, num_two) = records(rng, 700), records(rng, 800)
    write(folder / "t/a.jsonl.xz", lzma.compress(one.encode()))
    write(folder / "t/b.jsonl.gz", gzip.compress(two.encode()))
    return [pretrain(folder, folder / "t", ("2 files", "chosen by hash"), num_one + num_two)]


KINDS: dict[str, Maker] = {
    "3 books": books, "one file": one_file, "code repository": code, "JSONL with splits": json_lines, "JSONL, another field": other_field,
    "CSV": table, "nested folders": nested, "mixed folder": mixed, "Chinese": chinese, "100 MB without a line": unbroken,
    "Parquet": columns, "compressed": compressed,
}  # fmt: skip


def run(command: Command, out: Path, checkout: Path) -> tuple[int, str, str, float]:
    """Exit code, output, errors, and the peak memory in MB of the largest process."""
    arguments = [sys.executable, "-m", "stretto", *command.arguments, "-o", str(out)]
    environment = os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    files = [out.with_name(f"{out.name}.{name}") for name in ("out", "err")]
    with files[0].open("w") as told, files[1].open("w") as errors:
        process = subprocess.Popen(arguments, stdout=told, stderr=errors, env=environment, cwd=out.parent)
        _, status, usage = os.wait4(process.pid, 0)  # of this process and those it waited for
        process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, files[0].read_text(), files[1].read_text(), usage.ru_maxrss * 1024 / 1e6


def judge(command: Command, code: int, told: str, errors: str, out: Path, peak_mb: float = 0.0) -> Outcome:
    """What a command did against what it must do."""
    lines = errors.strip().splitlines()
    if command.num_bytes is None:
        said = lines[-1] if lines else ""
        wrong = "" if code == 2 and len(lines) == 1 else f"exit code {code}, {len(lines)} lines of errors"
        return Outcome(wrong, all(word in said for word in command.says), peak_mb, said)
    said = next((line for line in told.splitlines() if line.startswith(command.says[0])), "")
    is_named = all(word in said for word in command.says)
    if code:
        return Outcome(f"exit code {code}: {lines[-1] if lines else ''}", is_named, peak_mb, said)
    data = next(iter(sorted(out.rglob("data.json"))), None)
    splits = json.loads(data.read_text())["splits"] if data else {}
    num_bytes = sum(shard["num_bytes"] for shards in splits.values() for shard in shards)
    wrong = "" if num_bytes == command.num_bytes else f"{num_bytes:,} bytes of text instead of {command.num_bytes:,}"
    return Outcome(wrong if {"train", "val"} <= splits.keys() else f"splits {list(splits)}", is_named, peak_mb, said)


def tried(name: str, folder: Path, seed: int, checkout: Path) -> Outcome:
    """All commands on one kind; the worst outcome, else the last."""
    folder.mkdir()
    peaks: dict[tuple[str, ...], float] = {}
    outcomes = []
    for number, command in enumerate(KINDS[name](folder, random.Random(seed))):
        out = folder / f"out{number}"
        code, told, errors, peak_mb = run(command, out, checkout)
        outcome = judge(command, code, told, errors, out, peak_mb)
        peaks[command.arguments] = peak_mb
        if not outcome.problem and command.compared and peak_mb > MEMORY_RATIO * peaks[command.compared]:
            problem = f"{peak_mb:.0f} MB, and {peaks[command.compared]:.0f} MB for a quarter of the text"
            outcome = Outcome(problem, outcome.is_named, peak_mb, outcome.told)
        outcomes.append(outcome)
    return next((each for each in outcomes if each.problem or not each.is_named), outcomes[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="NAME", help=", ".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).resolve().parents[2])
    options = parser.parse_args()
    shown = Table(title="First commands")
    for heading in ("kind", "right", "says what it used", "peak MB", "what it said, or what was wrong"):
        shown.add_column(heading, overflow="fold")
    right = named = 0
    with tempfile.TemporaryDirectory() as temporary, progress("first commands", len(options.kinds)) as advance:
        for name in options.kinds:
            folder = Path(temporary) / str(list(KINDS).index(name))
            outcome = tried(name, folder, options.seed, options.checkout.resolve())
            right, named = right + (not outcome.problem), named + outcome.is_named
            words = (outcome.problem or outcome.told).replace(f"{folder}/", "")
            marks = ["yes" if good else "NO" for good in (not outcome.problem, outcome.is_named)]
            shown.add_row(name, *marks, f"{outcome.peak_mb:.0f}", words)
            advance(1)
    console = wide_console()
    console.print(shown)
    num = len(options.kinds)
    console.print(f"{right} of {num} ran or refused rightly; {named} of {num} said what they used")
    if right < num or named < num:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
