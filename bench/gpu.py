"""Check a GPU against the CPU and the slow references, and measure training, decoding and single kernels on it.

    python -m bench.gpu [--part NAME ...] [--only TEXT ...] [--device cuda] [--size SHAPE] [--memory-gb N] [--profile] [--mutant tf32]

Each part is a module of bench/gpu_parts, which says what it checks or measures. Without ``--part`` all run. Every outcome is written to
``--out`` at once; the same command continues after an interruption, and after ``--minutes`` it starts no further case. A failed case is
repeated. Exits with 1 if a check fails or a case raises an error.

``--only``: cases whose names contain one of the texts.
``--size``: network of the measurements. ``--memory-gb``: stand in for a smaller card. ``--profile``: short for ``--part profile``.
``--mutant tf32`` drops 13 bits of each product in the checks, which must then fail.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bench.common.gpu_part import SHAPES, Case, Outcome, Setting
from bench.common.measure import bench_parser, finish, refusing, table
from stretto.base.errors import UserError
from stretto.base.paths import replacing
from stretto.base.track import say, wide_console
from stretto.model.parallel import device_name, join

PARTS = sorted(path.stem for path in Path(__file__).with_name("gpu_parts").glob("[a-z]*.py"))


@refusing()
def main(arguments: list[str] | None = None) -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="part to run; repeat for several; default: all")
    parser.add_argument(
        "--only", metavar="TEXT", action="append", default=[], help="cases with this in their names; repeat for several"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SHAPES, default="1.8b")
    parser.add_argument("--steps", type=int, default=8, help="timed training steps of each kind")
    parser.add_argument("--requests", type=int, default=60, help="greedy requests to compare")
    parser.add_argument("--memory-gb", type=float, help="use at most this much of the GPU's memory, in 10⁹ bytes")
    parser.add_argument("--minutes", type=float, default=7.5, help="start no case after this time")
    parser.add_argument("--mutant", choices=("tf32",), help="compute fp32 products in TF32, which must fail")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    # set before CUDA starts: `stretto.ops.tuning.deterministic` needs it for cuBLAS
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = join(options.device).device
    torch.backends.cuda.matmul.allow_tf32 = options.mutant == "tf32"
    if options.memory_gb is not None and device.type == "cuda":
        share = options.memory_gb * 1e9 / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    setting = Setting(device, options.size, options.steps, options.requests, options.mutant)
    if options.out.exists() and not options.out.is_dir():
        raise UserError(f"--out {options.out}: is a file; name a folder")
    failures, console, num_shown = [], wide_console(), 0
    parts = ["profile"] if options.profile else ["checks"] if options.mutant else options.part or PARTS
    for part in parts:
        stored = Stored(options.out / f"{part}{'-' + options.mutant if options.mutant else ''}.json", device)
        shown = table(f"{part}: {device_name(device)}, torch {torch.__version__}", "", "result", "holds")
        for name, outcome in outcomes(part, setting, stored, deadline, options.only):
            num_shown += 1
            holds = {None: "", True: "yes", False: "NO"}[outcome.holds]
            shown.add_row(name, "\n".join(shown_value(*each) for each in outcome.values.items()), holds)
            failures += [f"{part}: {name}"] if outcome.holds is False else []
        console.print(shown)
    if not num_shown:
        raise UserError(f"--only {' '.join(options.only)}: no case of {', '.join(parts)} has this in its name")
    finish(failures)


class Stored:
    """Outcomes of a part on disk. Raises UserError: they are of another machine."""

    def __init__(self, path: Path, device: torch.device):
        self._path, self._machine = path, f"{device_name(device)}, torch {torch.__version__}"
        self.outcomes: dict[str, Outcome] = {}
        if path.exists():
            read = json.loads(path.read_text(encoding="utf-8"))
            if read["machine"] != self._machine:
                raise UserError(f"{path}: results of {read['machine']}; choose another --out")
            self.outcomes = {name: Outcome(**each) for name, each in read["outcomes"].items()}

    def add(self, name: str, outcome: Outcome) -> None:
        self.outcomes[name] = outcome
        done: dict[str, Any] = {each: asdict(outcome) for each, outcome in self.outcomes.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._path) as path:
            path.write_text(json.dumps({"machine": self._machine, "outcomes": done}, indent=1), encoding="utf-8")


def outcomes(
    part: str, setting: Setting, stored: Stored, deadline: float, only: list[str]
) -> Iterator[tuple[str, Outcome]]:
    """Outcome of each case of ``part`` with one of the texts ``only`` in its name (none: every case), stored ones without running the
    case again."""
    for case in import_module(f"bench.gpu_parts.{part}").cases(setting):
        if only and not any(text in case.name for text in only):
            continue
        outcome = stored.outcomes.get(case.name)
        if outcome is None or outcome.holds is False:
            if time.monotonic() > deadline:
                yield case.name, Outcome({"left": "time is up; run the same command again"})
                continue
            say(f"{part}: {case.name}")
            outcome = outcome_of(case)
            stored.add(case.name, outcome)
        yield case.name, outcome


def outcome_of(case: Case) -> Outcome:
    """Run ``case``. An error, such as too little memory, is an outcome."""
    try:
        return case.run()
    except Exception as error:
        message = (str(error).splitlines() or [""])[0][:160]
        return Outcome({"error": f"{type(error).__name__}: {message}"}, holds=False)
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def shown_value(name: str, value: float | str) -> str:
    """``tokens/s 80,395``."""
    if isinstance(value, str):
        return f"{name} {value}".strip()
    return f"{name} {value:,.0f}" if abs(value) >= 1000 else f"{name} {value:.4g}"


if __name__ == "__main__":
    main()
