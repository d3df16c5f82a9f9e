"""Wrong inputs to every command: one line that names the place, exit code 2, nothing half-written, within seconds.

    python -m bench.wrong_inputs [--only WORD] [--break]

Each command of `CASES` runs in a process of its own, in a folder with a tiny trained run. A case passes if the exit code is 2, stderr
has one line that begins with ``stretto:`` and contains the expected words, no file was added, changed or removed, and the process took
at most 5 s of processor time above that of importing the package with torch. Exits with 1 if a case fails. ``--break`` adds a right
command, which must fail.
"""

from __future__ import annotations

import argparse
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

from bench.common.measure import table, wide_console
from stretto.base.track import progress
from stretto.text.chat import CHATML

MAX_WORK_S, MAX_CASE_S = 5.0, 60
"""Limits in processor seconds: of a case above the import, and after which a case is ended."""
RECIPE = """
[model]
vocab_size = 320
hidden_size = 32
num_layers = 5
num_heads = 2
num_kv_heads = 1
head_dim = 16
num_experts = 4
top_k = 2
expert_intermediate_size = 16
tie_embeddings = true
max_positions = 64
[elastic]
min_depth = 4
[elastic.anchors.corner]
layers = 4
experts = 2
top_k = 1
[optim]
lr = 1e-2
[train]
steps = 2
rows = 4
seq_len = 32
micro_batches = 2
eval_rows = 4
"""
SETUP = (
    "pretrain tiny.toml --data text.txt -o run",
    "extract run --subnet corner -o corner",
    "extract run --subnet full -o chat",
)
"""Commands that make what the cases name."""
FILES = {
    "tiny.toml": RECIPE,
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
CASES = """
pretrain | missing argument
pretrain nosuch --data text.txt -o new | nosuch
pretrain broken.toml --data text.txt -o new | broken.toml: not valid TOML
pretrain tiny.toml -o new | --data
pretrain tiny.toml --data nosuch.txt -o new | nosuch.txt
pretrain tiny.toml --data empty.txt -o new | empty.txt
pretrain tiny.toml --data fields.jsonl -o new | text
pretrain tiny.toml --data text.txt@0 -o new | weight
pretrain tiny.toml --data text.txt -o new --set train.stepz=3 | steps
pretrain tiny.toml --data text.txt -o new --set train.steps=0 | train.steps
pretrain tiny.toml --data text.txt -o new --set optim.lr=inf | optim.lr
pretrain tiny.toml --data text.txt -o new --set model.top_k=9 | top_k
pretrain tiny.toml --data text.txt -o new --set nonsense | key
pretrain tiny.toml --data text.txt -o new --val-fraction 0.9 | val
pretrain tiny.toml --data text.txt -o new --device tpu | tpu
pretrain tiny.toml --data text.txt -o run | --resume
pretrain tiny.toml --data text.txt -o "" | -o
pretrain tiny.toml --data "" -o new | --data
pretrain "" --data text.txt -o new | empty
pretrain misspelt.toml --data text.txt -o new | model
pretrain sft --data text.txt -o new | stretto sft
pretrain tiny.toml --data text.txt -o new --resume | new
adopt nowhere -o new | nowhere
adopt foreign -o new | foreign/tokenizer.json
adopt corner -o new --order best | order
adopt corner -o new --top-k 2 | --experts
adopt corner -o run | run
adopt corner -o new --parent-flops 1e20 | --parent-flops
elasticize nosuch --data text.txt | nosuch
elasticize run --data text.txt | -o
elasticize run --data text.txt -o new --trainable heads | trainable
elasticize run --data text.txt -o new --teacher nosuch | nosuch
tokenize -o new | --data
tokenize --data nosuch -o new | nosuch
tokenize --data text.txt -o new --vocab-size 3 | vocab
latency nosuch | nosuch
latency text.txt | text.txt
search nosuch | nosuch
search run --max-total 34 | 0.34
search run --max-total 0.01 | the nearest is
search run --max-latency-ms 0 | milliseconds
search run --max-latency-ms 5 | latency
search corner | corner
extract run --subnet best -o new | stretto search
extract run --subnet nosuch -o new | nosuch
extract run --subnet layers=99 -o new | layers
extract run --subnet corner -o corner | --force
extract run --subnet corner -o run/checkpoint | another folder
heal corner --data nosuch.txt -o new --set train.seq_len=32 | nosuch.txt
heal nosuch --data text.txt -o new | nosuch
heal corner --data text.txt -o new --set train.seq_len=32 --set ce_weight=2 | ce_weight
heal corner --data text.txt -o corner | another folder
heal corner --data text.txt -o new --teacher text.txt | text.txt
export nosuch -o new | nosuch
export run -o new --family gpt2 | gpt2
export run -o new --dtype int3 | int3
export run -o new --family mixtral | mixtral
export run -o corner | --force
demo -o text.txt | text.txt
demo -o notes | notes
demo --smol --post -o new | --smol
report nosuch | nosuch
report notes | notes
cost nosuch | nosuch
cost notes | notes
run nosuch -o new | nosuch
run pipeline -o new --from third | third
run pipeline -o new --set domains.x=1 | domains
run sft -o new | stretto sft
sft sft --data half.jsonl --model run -o new --set train.seq_len=32 | chat template
sft sft --data half.jsonl --model chat -o new --set train.seq_len=32 | half.jsonl
sft sft --data number.jsonl --model chat -o new --set train.seq_len=32 | content
sft sft --data half.jsonl -o new | --model
sft sft --model nosuch --data half.jsonl -o new | nosuch
sft sft --model run -o new --keep-adapter | --keep-adapter
rl nosuch -o new | nosuch
rl rl_gym -o new --set sources.backward.kind=nosuch | kind
rl rl_gym -o new --set staleness=-1 | staleness
rl rl_gym -o new --set runtime.kind=slurm | runtime.kind
rl rl_gym -o new --set failures.lease_s=900 | stuck_s
rl rl_gym -o new --resume | new
rl rl_gym -o new --model nosuch | nosuch
distill distill -o new --model run --teacher nosuch | NAME=DIR
distill distill -o new --subnet corner | --teacher NAME=DIR
online rl_gym -o new --model run | judge
top nosuch | nosuch
top run | run
merge nosuch run corner -o new | task-arithmetic
merge average run corner -o new | corner
merge average run -o new | two or more
merge average run "" -o new | empty
eval nosuch --suite gym -o new | nosuch
eval run --suite nosuch -o new | nosuch
eval run --suite gym -o new --samples 0 | samples
eval run --suite gym -o new --temperature=-1 | temperature
compare run -o new | --suite
compare run nosuch --suite gym -o new | nosuch
serve nosuch | nosuch
serve run --subnet nosuch | nosuch
serve run --memory lots | --memory
serve run --port 99999 | port
serve run --cors notanorigin | notanorigin
chat run | chat_template
generate run --prompt x --temperature=-1 | temperature
generate run --prompt x --max-tokens 0 | max_tokens
agent question | --model
agent "" --model run | question
agent question --server ftp://x | ftp://x
bench-serve | --url
bench-serve --url http://127.0.0.1:1 | no server
enhance "a cat" --server http://127.0.0.1:1 | http://127.0.0.1:1
paint "ein rotes Haus am See" -o new.png | English
paint "a red circle" --backend nosuch -o new.png | nosuch
paint "a red circle" --size 12 -o new.png | size
judge train run --data nosuch -o new | nosuch
judge calibrate nosuch --data fields.jsonl | author
judge serve nosuch | nosuch
nosuchcommand | nosuchcommand
"""


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file; a lock file may be touched."""
    paths = [path for path in folder.rglob("*") if path.name != ".lock"]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.is_file()} | {
        str(path): (0, 0) for path in paths if path.is_dir()
    }


def stretto(folder: Path, arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a command in ``folder``; also the processor seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # the package of this checkout, whatever is installed
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "COLUMNS": "400"}
    command = [sys.executable, "-m", "stretto", *shlex.split(arguments)]
    # a wrong input that starts to work is ended by SIGXCPU, with a negative exit code
    limit = partial(resource.setrlimit, resource.RLIMIT_CPU, (MAX_CASE_S, MAX_CASE_S + 5))
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, preexec_fn=limit
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def problems(folder: Path, arguments: str, words: str, import_s: float) -> tuple[list[str], float]:
    """What is wrong with the answer to a wrong input, and the processor seconds above ``import_s``."""
    before = listing(folder)
    done, seconds = stretto(folder, arguments)
    lines, found = done.stderr.strip().splitlines(), []
    if done.returncode != 2:
        found.append(f"exit code {done.returncode}")
    if len(lines) != 1 or not lines[0].startswith("stretto: "):
        found.append(f"{len(lines)} lines on stderr")
    if words.lower() not in done.stderr.lower():
        found.append(f"no {words!r} in: {done.stderr.strip()[-200:]}")
    if changed := {path for path, _ in before.items() ^ listing(folder).items()}:
        found.append(f"changed {', '.join(sorted(path.removeprefix(str(folder)) for path in changed)[:3])}")
    if seconds - import_s > MAX_WORK_S:
        found.append(f"{seconds - import_s:.1f} s of work")
    return found, seconds - import_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Run wrong inputs through every command.")
    parser.add_argument("--only", default="", help="run the cases that contain this text")
    parser.add_argument("--break", dest="breaks", action="store_true", help="add a right command, which must fail")
    options = parser.parse_args()
    cases = [tuple(line.rsplit(" | ", 1)) for line in CASES.strip().splitlines() if options.only in line]
    cases += [("cost corner", "corner")] if options.breaks else []
    shown = table("wrong inputs that were not answered as they should", "command", "problem")
    work_s = []
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
            found, seconds = problems(folder, arguments, words, import_s)
            work_s.append(seconds)
            if found:
                shown.add_row(escape(arguments), escape("; ".join(found)))
                shutil.rmtree(folder / "new", ignore_errors=True)
            advance(1)
    console = wide_console()
    if shown.row_count:
        console.print(shown)
    console.print(
        f"{len(cases) - shown.row_count} of {len(cases)} wrong inputs: one line, exit code 2, nothing written; "
        f"at most {max(work_s):.1f} s of processor time above the import's {import_s:.1f} s"
    )
    sys.exit(bool(shown.row_count))


if __name__ == "__main__":
    main()
