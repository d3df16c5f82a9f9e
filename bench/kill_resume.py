"""``kill -9`` at random moments of a command, then resume: work lost by time, and the result beside that of an unbroken run.

    python -m bench.kill_resume [--stages demo run sft elasticize] [--kills 20] [--seed 0] [--interval 6] [--limit SECONDS]

Each stage first runs to its end. Then it runs again, and is killed by its process id and resumed until it ends; a run that ends
before all kills were made is followed by another. A kill comes a random time after the process has begun to work.

Lost work is what the next life must repeat: the time from the newest snapshot or finished step of the command to the kill. The
start of a process before it trains is not work. A kill may lose the interval of the snapshots, and `STEP_S` for the training step
in progress. The demo's steps without training (tokenise, measure, search, export) write no snapshots; they are repeated whole, and
may take `UNTRAINED_S`. An ``--interval`` above ``--limit`` must fail.

``--while-saving`` waits after each random moment until a snapshot is being written, and kills then.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.common.measure import bench_parser, finish, table
from stretto.base.paths import RECIPES
from stretto.base.records import LINEAGE_FILE, read_lineage
from stretto.base.track import progress, say, wide_console
from stretto.data.demo_text import demo_documents
from stretto.text.chat import CHATML
from stretto.train.snapshot import META

TEXT_CHARS = 300_000
MOST_OF_A_RUN = 0.4
"""Longest work between two kills, as a share of the time that the unbroken run works."""
STEP_S = 2.0
"""Time for the training step in progress at the end of the interval, and for writing the snapshot."""
UNTRAINED_S = 180.0
"""Longest work without a snapshot: the interval of the recipes that are shipped."""
POLL_S = 0.05
SAVING_S = 0.03
"""Time after the start of a snapshot's writing within which it is interrupted."""
NO_SNAPSHOTS_BY_STEP = 1_000_000
SMALL = {"hidden_size": 48, "vocab_size": 512, "expert_intermediate_size": 16, "rows": 4, "seq_len": 64, "eval_rows": 4}
"""Keys of the shipped recipes that are made smaller."""
TRAINING = re.compile(r"resumes after step|^(pretrain|sft|elasticize|heal) …|^evaluate .* …")
"""Output with which work begins that may have to be repeated. That of an RL run begins with its journal."""
HEADING = re.compile(r"──+ (.+?) ──+")
"""Output with which a step of the demo or of a pipeline begins."""
RESUMED = re.compile(r"resumes after step ([\d,]+)")
DEMO = """
from pathlib import Path
from stretto.api import demo
demo.RECIPES, demo.MAX_CODE_CHARS, demo.MAX_EXERCISE_CHARS = Path("recipes"), 200_000, 100_000
demo.LIMITS, demo.SEARCH_HEAL_STEPS = demo.Limits(max_total=0.9, max_active=0.9), 2
demo.demo_command(Path("run"))
"""
"""The demo with the recipes in the current folder, on less text."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A command that is killed."""

    command: str
    """Arguments of ``stretto``, without output folder; empty for the demo."""
    interval: str = "train.snapshot_minutes"
    """Recipe key of the interval between snapshots."""
    results: tuple[str, ...] = ("checkpoint",)
    """Checkpoints that must equal those of the unbroken run; patterns below the output folder."""
    resumes_alone: bool = False
    """Whether the command resumes without ``--resume``."""


SMALL_ROWS = "--set train.rows=4 --set train.seq_len=64 --set train.micro_batches=1 --set train.eval_rows=4"
BY_TIME = f"--set train.snapshot_every={NO_SNAPSHOTS_BY_STEP}"
STAGES = {
    "pretrain": Stage("pretrain recipes/demo.toml --data text.txt"),
    "sft": Stage(f"sft sft --model start --data chats.jsonl --set train.steps=300 {SMALL_ROWS} {BY_TIME}"),
    "elasticize": Stage(
        f"elasticize start/checkpoint --data text.txt --set train.steps=150 {SMALL_ROWS} --set train.micro_batches=2 {BY_TIME}"
    ),
    "run": Stage(
        "run pipeline.toml",
        interval="common.train.snapshot_minutes",
        results=("sft/sft", "experts/*/checkpoint", "distill/checkpoint"),
        resumes_alone=True,
    ),
    "demo": Stage("", results=("checkpoint", "healed"), resumes_alone=True),
}
FINISHED = (
    f"**/{LINEAGE_FILE}",
    "data/00/data.json",
    "latency.json",
    "search.json",
    "model.gguf",
    "samples.json",
    "**/comparison.json",
)
"""Results of steps, which are not repeated; patterns below the output folder."""
SAVED = (f"**/snapshots/step-*/{META}", "**/samples.jsonl")
"""States from which a step resumes: snapshots, and the samples of an evaluation."""


@dataclass(slots=True)
class Life:
    """One process from its start to its kill or end. Written by `live`."""

    seconds: float = 0.0
    """Time since the process began to work."""
    work: str = ""
    """Heading of the step in progress, or the line with which training began."""
    first_s: float | None = None
    """Unix time at which the process began to work."""
    begun_s: float | None = None
    """Unix time at which the work in progress began; None: the process is starting."""
    is_training: bool = False
    resumed: list[int] = field(default_factory=list)
    """Steps after which training was resumed."""
    code: int | None = None
    """Exit code; None: killed."""

    def read(self, line: str, now_s: float, is_demo: bool) -> None:
        """Note a line of output that was printed at ``now_s``."""
        if found := HEADING.search(line):
            self.work, self.is_training = found[1], False
            self.begin(now_s if is_demo else None)
        elif TRAINING.search(line):
            self.work, self.is_training = self.work or line.strip(" …"), True
            self.begin(now_s)
        if found := RESUMED.search(line):
            self.resumed.append(int(found[1].replace(",", "")))

    def begin(self, now_s: float | None) -> None:
        """Work begins; None: another process has to start first."""
        self.begun_s = now_s
        self.first_s = self.first_s or now_s


@dataclass(frozen=True, slots=True)
class Kill:
    """What a kill cost."""

    stage: str
    life: Life
    snapshot: int | None
    """Step of the newest snapshot, from which the next life must resume; None: no step is unfinished."""
    lost_s: float
    limit_s: float


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=("demo", "run", "sft", "elasticize"))
    parser.add_argument("--kills", type=int, default=20, help="number of kills, divided between the stages")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument("--interval", type=float, default=6.0, help="seconds between snapshots")
    parser.add_argument("--limit", type=float, help="seconds that a kill may lose; default: the interval")
    parser.add_argument("--while-saving", action="store_true", help="kill while a snapshot is being written")
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: a temporary one")
    options = parser.parse_args()
    kills, wrong = list[Kill](), list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        prepare(folder, options.interval, needs_start=any(" start" in STAGES[name].command for name in options.stages))
        for number, name in enumerate(options.stages):
            num = len(range(number, options.kills, len(options.stages)))
            rng = random.Random(f"{options.seed} {name}")
            made, problems = kill_stage(folder / name, name, num, rng, options)
            kills += made
            wrong += problems
    print_kills(kills, options)
    finish(wrong)


def prepare(folder: Path, interval_s: float, needs_start: bool) -> None:
    """Write text, conversations, recipes and, if a stage needs it, a small checkpoint into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [document.text for document in demo_documents(TEXT_CHARS, 0)]
    (folder / "text.txt").write_text("\n\n".join(texts))
    chats = [
        {"messages": [{"role": "user", "content": f"Add {a} and {b}."}, {"role": "assistant", "content": f"{a + b}"}]}
        for a in range(60)
        for b in range(60)
    ]
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    shutil.copy(Path(__file__).with_suffix(".toml"), folder / "pipeline.toml")
    shutil.copytree(RECIPES, folder / "recipes", dirs_exist_ok=True)
    for name, steps in (("demo.toml", 150), ("heal.toml", 50)):
        path = folder / "recipes" / name
        text, values = path.read_text(), {**SMALL, "steps": steps, "snapshot_minutes": interval_s / 60}
        text = text.replace("snapshot_every", f"snapshot_every = {NO_SNAPSHOTS_BY_STEP}\nsnapshot_minutes", 1)
        for key, value in values.items():
            text = re.sub(rf"(?m)^{key} = .*", f"{key} = {value}", text)
        path.write_text(text)
    if needs_start:
        command = "pretrain recipes/demo.toml --data text.txt --set train.steps=5 --device cpu -o start"
        subprocess.run(stretto(command), cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (folder / "start" / "checkpoint" / "chat_template.jinja").write_text(CHATML)


def stretto(arguments: str) -> list[str]:
    return [sys.executable, "-m", "stretto", *arguments.split()]


def kill_stage(
    folder: Path, name: str, num_kills: int, rng: random.Random, options: argparse.Namespace
) -> tuple[list[Kill], list[str]]:
    """Kill the stage ``name`` ``num_kills`` times. Returns the kills, and a line for every aim that was missed."""
    stage, kills, wrong = STAGES[name], list[Kill](), list[str]()
    limit_s = options.interval if options.limit is None else options.limit
    whole = live(folder / "whole", stage, options.interval)
    expected = digests(folder / "whole" / "run", stage)
    assert expected and whole.code == 0, (name, whole)
    with progress(f"kills of {name}", num_kills) as advance:
        number, snapshot, is_killed = 1, None, False
        while len(kills) < num_kills or is_killed:
            run = folder / f"killed-{number}"
            length_s = rng.uniform(0.0, MOST_OF_A_RUN * whole.seconds) if len(kills) < num_kills else None
            life = live(run, stage, options.interval, length_s, options.while_saving)
            is_killed = life.code is None
            if snapshot is not None and life.seconds > 1.0 and life.resumed[:1] != [snapshot]:
                wrong.append(
                    f"{name}: resumed after step {life.resumed[:1]}, the newest snapshot was of step {snapshot}"
                )
            if not is_killed:
                found = digests(run / "run", stage)
                if differing := [path for path in expected if found.get(path) != expected[path]]:
                    wrong.append(f"{name}: differs from the unbroken run: {', '.join(differing)}")
                say(f"{name}: run {number} ended; {len(expected) - len(differing)} of {len(expected)} files are equal")
                number, snapshot = number + 1, None
                continue
            kills.append(kill(run / "run", name, life, limit_s))
            snapshot, lost_s = kills[-1].snapshot, kills[-1].lost_s
            if lost_s > kills[-1].limit_s + STEP_S:
                wrong.append(f"{name}: lost {lost_s:.1f} s in {life.work}, at most {kills[-1].limit_s:g} s")
            advance(1, f"lost {lost_s:.1f} s in {life.work}")
    return kills, wrong


def live(
    folder: Path, stage: Stage, interval_s: float, length_s: float | None = None, while_saving: bool = False
) -> Life:
    """Start or resume the stage in ``folder``, and kill it after ``length_s`` seconds of work; None: let it run to its end."""
    if not folder.exists():
        folder.mkdir(parents=True)
        for path in (path for path in folder.parent.parent.iterdir() if path != folder.parent):
            (folder / path.name).symlink_to(path)
    run = folder / "run"
    command = [sys.executable, "-c", DEMO]
    if stage.command:
        command = stretto(f"{stage.command} --set {stage.interval}={interval_s / 60} --device cpu -o run")
        if (run / "snapshots").is_dir() and not stage.resumes_alone:
            command.append("--resume")
    life, num_read = Life(), 0
    num_journals, partial = len(below(run, "groups.sqlite")), below(run, ".step-*.partial")
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        while life.code is None:
            time.sleep(POLL_S)
            life.code, now_s = process.poll(), time.time()
            *lines, _ = (folder / "output").read_text().split("\n")
            for line in lines[num_read:]:
                life.read(line, now_s, is_demo=not stage.command)
            num_read = len(lines)
            if len(journals := below(run, "groups.sqlite")) > num_journals:  # its roles have started
                num_journals = len(journals)
                life.begin(now_s)
            life.seconds = now_s - (life.first_s or now_s)
            is_saving = bool(below(run, ".step-*.partial") - partial)
            if length_s is not None and life.first_s and life.seconds >= length_s and (is_saving or not while_saving):
                time.sleep(random.uniform(0.0, SAVING_S) if while_saving else 0.0)
                process.kill()
                process.wait()
                break
    if life.code and "is running in it" in "".join(lines):  # processes of the killed life are still ending
        time.sleep(1.0)
        return live(folder, stage, interval_s, length_s, while_saving)
    if life.code:
        raise SystemExit("\n".join(["the command failed by itself:", *lines]))
    return life


def below(run: Path, pattern: str) -> set[Path]:
    """Paths below ``run`` that match, while its command adds and removes folders."""
    while True:
        with suppress(FileNotFoundError):  # a folder was renamed before it was read
            return set(run.rglob(pattern))


def kill(run: Path, name: str, life: Life, limit_s: float) -> Kill:
    """The work that the kill at the end of ``life`` has lost."""
    killed_s = time.time()
    finished, saved = newest(run, FINISHED), newest(run, SAVED)
    lost_s, snapshot = 0.0, None
    if life.begun_s is not None and finished[0] < life.begun_s:
        lost_s = killed_s - max(life.begun_s, saved[0])
    if saved[0] > finished[0] and saved[1].name == META:
        snapshot = int(saved[1].parent.name.removeprefix("step-"))
    return Kill(name, life, snapshot, lost_s, limit_s if life.is_training or name != "demo" else UNTRAINED_S)


def newest(run: Path, patterns: tuple[str, ...]) -> tuple[float, Path]:
    """The file below ``run`` that was written last, after its Unix time."""

    def written() -> Iterator[tuple[float, Path]]:
        yield 0.0, run
        for pattern in patterns:
            for path in run.glob(pattern):
                with suppress(FileNotFoundError):  # a process of the killed life has just deleted it
                    yield path.stat().st_mtime, path

    return max(written())


def digests(run: Path, stage: Stage) -> dict[str, str]:
    """SHA-256 of every file of the results; of the lineage, which has seconds, only tokens and FLOPs."""
    found = {}
    for folder in (folder for pattern in stage.results for folder in sorted(run.glob(pattern))):
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            content = path.read_bytes()
            if path.name == LINEAGE_FILE:
                receipt = read_lineage(folder).receipt
                content = f"{receipt.tokens} {receipt.flops}".encode()
            found[str(path.relative_to(run))] = hashlib.sha256(content).hexdigest()
    return found


def print_kills(kills: list[Kill], options: argparse.Namespace) -> None:
    shown = table(
        f"{len(kills)} times kill -9, seed {options.seed}, snapshots every {options.interval:g} s",
        *("stage", "seconds of work", "newest snapshot", "seconds lost", "limit", "work in progress"),
    )
    for each in kills:
        shown.add_row(
            each.stage,
            f"{each.life.seconds:.1f}",
            "–" if each.snapshot is None else str(each.snapshot),
            f"{each.lost_s:.1f}",
            f"{each.limit_s:g}",
            each.life.work or "start of the process",
        )
    wide_console().print(shown)


if __name__ == "__main__":
    main()
