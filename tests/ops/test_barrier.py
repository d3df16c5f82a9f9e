"""The barrier of the compiled kernels under stress: no wake-up is lost."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from stretto.ops.native import SOURCES

STRESS_S = 60


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++; make test-deps installs it")
def test_threads_that_meet_in_the_barrier_never_stop(tmp_path: Path) -> None:
    program = tmp_path / "stress"
    source = Path(__file__).with_name("barrier_stress.cpp")
    flags = ["-std=c++20", "-O3", "-march=native", "-pthread", f"-I{SOURCES}"]
    subprocess.run(["g++", *flags, str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program), str(STRESS_S)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
