"""Give wrong inputs to every command, and check that each is refused in one line that names the place of the mistake.

    python -m bench.wrong_inputs [--only WORD] [--break]

``bench/data/wrong_inputs.txt`` has a command and the words that its message must contain on each line. Each command runs in a process of
its own, in a folder with a tiny trained run. A case passes if the exit code is 2, stderr has one line that begins with ``stretto:`` and
contains the words, no file was added, changed or removed, and the process took at most 5 s of processor time above that of importing the
package with torch. Exits with 1 if a case fails. ``--break`` adds a correct command, which must fail.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from rich.markup import escape

from bench.common.measure import bench_parser, finish, table
from stretto.base.track import progress, wide_console
from stretto.text.chat import CHATML

MAX_WORK_S, MAX_CASE_S = 5.0, 60
"""Limits in processor seconds: for a case above the import, and for a process in total."""
DATA = Path(__file__).parent / "data"
SETUP = (
    "pretrain tiny.toml --data text.txt -o run",
    "extract run --subnet corner -o corner",
    "extract run --subnet full -o chat",
)
"""Commands that make the folders that the cases name."""
FILES = {
    "tiny.toml": (DATA / "wrong_inputs.toml").read_text(encoding="utf-8"),
    "text.txt": "\n".join(f"def function_{n}(x):\n    return x + {n}\n" for n in range(400)),
    "broken.toml": "[model\n",
    "misspelt.toml": "[modell]\n",
    "empty.txt": "",
    "fields.jsonl": '{"body": "a text"}\n',
    "half.jsonl": '{"messages": [{"role": "user", "content": "hi"}]}\n{"messages": \n',
    "number.jsonl": '{"messages": [{"role": "user", "content": 7}, {"role": "assistant", "content": "x"}]}\n',
    "notes/a.md": "# A note\n",
    "foreign/config.json": '{"model_type": "mamba2"}',
}


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of every file and folder, without lock files."""
    paths = [path for path in folder.rglob("*") if path.name != ".lock"]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.is_file()} | {
        str(path): (0, 0) for path in paths if path.is_dir()
    }


def stretto(folder: Path, arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a command in ``folder``; returns its result and its processor time in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # the package of this checkout, even if another one is installed
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "COLUMNS": "400"}
    command = [sys.executable, "-m", "stretto", *shlex.split(arguments)]
    # SIGXCPU ends a command that accepts the wrong input and starts to work; the exit code is then negative
    limit = partial(resource.setrlimit, resource.RLIMIT_CPU, (MAX_CASE_S, MAX_CASE_S + 5))
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, preexec_fn=limit
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def problems(folder: Path, arguments: str, words: str, import_s: float) -> tuple[list[str], float]:
    """Reasons why a case fails, and its processor seconds above ``import_s``."""
    before = listing(folder)
    done, seconds = stretto(folder, arguments)
    lines, failures = done.stderr.strip().splitlines(), []
    if done.returncode != 2:
        failures.append(f"exit code {done.returncode}")
    if len(lines) != 1 or not lines[0].startswith("stretto: "):
        failures.append(f"{len(lines)} lines on stderr")
    if words.lower() not in done.stderr.lower():
        failures.append(f"no {words!r} in: {done.stderr.strip()[-200:]}")
    if changed := {path for path, _ in before.items() ^ listing(folder).items()}:
        failures.append(f"changed {', '.join(sorted(path.removeprefix(str(folder)) for path in changed)[:3])}")
    if seconds - import_s > MAX_WORK_S:
        failures.append(f"{seconds - import_s:.1f} s of work")
    return failures, seconds - import_s


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--only", default="", help="run the cases that contain this text")
    parser.add_argument("--break", dest="breaks", action="store_true", help="add a correct command, which must fail")
    options = parser.parse_args()
    lines = (DATA / "wrong_inputs.txt").read_text(encoding="utf-8").splitlines()[1:]
    cases = [tuple(line.rsplit(" | ", 1)) for line in lines if options.only in line]
    cases += [("cost corner", "corner")] if options.breaks else []
    shown, work_s = table("wrong inputs with another answer than an error in one line", "command", "problem"), []
    with tempfile.TemporaryDirectory() as name, progress("wrong inputs", len(cases)) as advance:
        folder = Path(name)
        for path, text in FILES.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        for arguments in SETUP:
            done, _ = stretto(folder, arguments)
            assert done.returncode == 0, done.stderr
        (folder / "chat" / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
        import_s = stretto(folder, "search nosuch")[1]
        for arguments, words in cases:
            failures, seconds = problems(folder, arguments, words, import_s)
            work_s.append(seconds)
            if failures:
                shown.add_row(escape(arguments), escape("; ".join(failures)))
                shutil.rmtree(folder / "new", ignore_errors=True)
            advance(1)
    console = wide_console()
    if shown.row_count:
        console.print(shown)
    console.print(
        f"{len(cases) - shown.row_count} of {len(cases)} wrong inputs: one line, exit code 2, nothing written; "
        f"at most {max(work_s):.1f} s of processor time above the import's {import_s:.1f} s"
    )
    finish([f"{shown.row_count} wrong inputs"] if shown.row_count else [])


if __name__ == "__main__":
    main()
