"""How threads wait: briefly, as the OpenMP that torch loads itself says, unless the user wants otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stretto.base.openmp import wait_briefly

COMMANDS = "import stretto.cli.main as cli; assert 'torch' not in sys.modules; cli.wait_briefly(cli.os.environ)"
API = "import stretto; assert 'torch' not in sys.modules; stretto.load"


@pytest.mark.slow
@pytest.mark.parametrize("code", [COMMANDS, API])
def test_threads_wait_briefly_by_the_time_torch_is_loaded(code: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    environment["OMP_DISPLAY_ENV"] = "verbose"
    command = [sys.executable, "-c", f"import sys; {code}; import torch"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    if "OPENMP DISPLAY ENVIRONMENT" not in done.stderr:
        pytest.skip("this build of torch has no OpenMP")
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr or "KMP_BLOCKTIME='1" in done.stderr, done.stderr


@pytest.mark.parametrize("told", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "5"}, {"KMP_BLOCKTIME": "200"}])
def test_how_a_user_wants_threads_to_wait_stands(told: dict[str, str]) -> None:
    environment = dict(told)
    wait_briefly(environment)
    assert environment == told
