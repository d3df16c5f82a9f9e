"""Processes that are the ranks of one run, for tests that need several."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_ranks(world: int, command: Sequence[str]) -> list[subprocess.CompletedProcess[str]]:
    """Run ``command`` in ``world`` processes that know of each other as torchrun's do; returns what each has printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(world):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        processes.append(
            subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    done = []
    for process in processes:
        out, err = process.communicate(timeout=600)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done
