"""How bench scripts drive an engine in a process of its own. Only the standard library: peers live in other environments.

A worker is started as ``python -m bench.peers.NAME OPTIONS`` with `Options` as JSON. It answers each JSON line on its
standard input, ``{"prompts": …, "num_tokens": …, "setting": …}``, with ``{"wall_s": …, "processor_s": …, "tokens": …}``
on a pipe of its own, since libraries print what they like; its first line there names its version and its settings.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields

Generate = Callable[[Sequence[Sequence[int]], int, str], list[list[int]]]
"""Greedy continuations of the prompts (all of one length), exactly so many tokens each, under a setting."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a worker is started with. Written by the bench script."""

    folder: str
    """Checkpoint of the network, as transformers reads it."""
    gguf: str
    """The same network for llama.cpp; empty where no such worker runs."""
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``: of weights and cache."""
    max_batch: int
    """Most prompts a call brings."""
    max_len: int
    """Most tokens of a prompt and its continuation."""
    threads: tuple[int, ...]
    """Numbers of threads to offer as settings."""
    answers: int
    """File descriptor of the pipe to answer on."""
    device: str = "cpu"
    compile: bool = False
    """Offer settings that compile first, which takes minutes."""
    repack: bool = True
    """Let llama.cpp lay quantised weights out for this processor."""


def read_options() -> Options:
    """The options on the command line of a worker."""
    told = json.loads(sys.argv[1])
    return Options(**{field.name: told[field.name] for field in fields(Options)} | {"threads": tuple(told["threads"])})


def arguments(options: Options) -> str:
    """``options`` as `read_options` takes them."""
    return json.dumps(asdict(options))


def serve(options: Options, version: str, settings: Sequence[str], generate: Generate) -> None:
    """Answer requests until standard input ends."""
    with os.fdopen(options.answers, "w", buffering=1) as answers:
        answers.write(json.dumps({"version": version, "settings": list(settings)}) + "\n")
        for line in sys.stdin:
            asked = json.loads(line)
            wall, processor = time.perf_counter(), time.process_time()
            tokens = generate(asked["prompts"], asked["num_tokens"], asked["setting"])
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            assert all(len(row) == asked["num_tokens"] for row in tokens), [len(row) for row in tokens]
            answers.write(json.dumps({"wall_s": wall, "processor_s": processor, "tokens": tokens}) + "\n")
