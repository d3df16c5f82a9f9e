"""The Makefile where it cannot make an environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOO_NEW = f"""#!/bin/sh
test "$1" = --version && echo Python 3.14.1 && exit
exec {sys.executable} -c 'import sys; sys.version_info = (3, 14, 1, "final", 0); exec(sys.argv[1])' "$2"
"""
"""A Python that reports another version than it is, to ``--version`` and to ``-c``."""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("found", ["Python 3.14.1", "none"])
def test_make_says_which_versions_of_python_work(tmp_path: Path, found: str) -> None:
    python = tmp_path / "python3.14"
    if found != "none":
        python.write_text(TOO_NEW)
        python.chmod(0o755)
    command = [
        "make",
        "-C",
        str(ROOT),
        "--no-print-directory",
        f"VENV={tmp_path / 'venv'}",
        f"PYTHON={python}",
        "environment",
    ]
    # as a user's shell has it: the make that runs the tests would count this one as its own
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    line, of_make = done.stderr.splitlines()
    assert line == (
        f"PYTHON: stretto works with Python 3.11, 3.12 or 3.13 with venv; found {found}; set PYTHON=/path/to/python"
    )
    assert of_make.startswith("make: ***") and not done.stdout
    assert not (tmp_path / "venv").exists()
