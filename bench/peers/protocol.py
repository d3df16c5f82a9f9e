"""Protocol between a bench and an engine in a process of its own. Imports the standard library only: peers have other environments.

A worker starts as ``python -m bench.peers.NAME OPTIONS`` with `Options` as JSON. It answers each JSON line of its standard input,
``{"prompts": …, "num_tokens": …, "setting": …}``, with ``{"wall_s": …, "processor_s": …, "tokens": …}`` on a pipe of its own, because
libraries print to standard output. Its first line on the pipe has its version and its settings.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

Generate = Callable[[Sequence[Sequence[int]], int, str], list[list[int]]]
"""From prompts of one length, a number of tokens and a setting to greedy continuations of that number of tokens."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a worker. Written by the bench."""

    folder: str
    """Checkpoint of the network in transformers' format."""
    gguf: str
    """The same network as a GGUF file."""
    dtype: str
    """Data type of weights and cache: ``float32``, ``bfloat16`` or ``float16``."""
    max_batch: int
    """Largest number of prompts in a call."""
    max_len: int
    """Largest number of tokens of a prompt and its continuation."""
    threads: tuple[int, ...]
    """Numbers of threads, each a setting."""
    answers: int
    """File descriptor of the pipe for answers."""
    device: str = "cpu"


def read_options() -> Options:
    """The options on the command line of a worker."""
    values = json.loads(sys.argv[1])
    return Options(**values | {"threads": tuple(values["threads"])})


def arguments(options: Options) -> str:
    """``options`` as an argument for `read_options`."""
    return json.dumps(asdict(options))


def serve(options: Options, version: str, settings: Sequence[str], generate: Generate) -> None:
    """Answer requests until standard input ends."""
    with os.fdopen(options.answers, "w", buffering=1) as answers:
        answers.write(json.dumps({"version": version, "settings": list(settings)}) + "\n")
        for line in sys.stdin:
            call = json.loads(line)
            wall, processor = time.perf_counter(), time.process_time()
            tokens = generate(call["prompts"], call["num_tokens"], call["setting"])
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            assert all(len(row) == call["num_tokens"] for row in tokens), [len(row) for row in tokens]
            answers.write(json.dumps({"wall_s": wall, "processor_s": processor, "tokens": tokens}) + "\n")
