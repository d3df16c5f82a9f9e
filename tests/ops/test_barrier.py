"""The barrier of the compiled kernels under stress: no wake-up is lost."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from stretto.ops.native import SOURCES

FENCE = "std::atomic_thread_fence(std::memory_order_seq_cst);"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++; make test-deps installs it"),
]


def stress(folder: Path, barrier: str, seconds: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """Compile the stress program with the text of a barrier.h and run it."""
    (folder / "barrier.h").write_text(barrier)
    source, program = Path(__file__).with_name("barrier_stress.cpp"), folder / "stress"
    command = ["g++", "-std=c++20", "-O3", "-march=native", "-pthread", f"-I{folder}", *flags]
    subprocess.run([*command, str(source), "-o", str(program)], check=True)
    return subprocess.run([str(program), str(seconds)], capture_output=True, text=True, check=False)


def test_threads_that_meet_in_the_barrier_never_stop(tmp_path: Path) -> None:
    done = stress(tmp_path, (SOURCES / "barrier.h").read_text(), 10)
    assert done.returncode == 0, done.stdout


def test_no_wake_up_is_lost_where_stores_are_late_and_one_is_without_the_fence(tmp_path: Path) -> None:
    barrier = (SOURCES / "barrier.h").read_text()
    assert barrier.count(FENCE) == 1
    done = stress(tmp_path, barrier, 5, "-DSTORE_BUFFER")
    assert done.returncode == 0, done.stdout
    done = stress(tmp_path, barrier.replace(FENCE, ""), 60, "-DSTORE_BUFFER")
    assert done.returncode == 1 and "stopped after" in done.stdout, done.stdout
