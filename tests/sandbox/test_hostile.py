from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from bench.sandbox import OF_DESCRIPTORS, descriptors_left_open, num_escapes
from stretto.base.trajectory import Outcome
from stretto.sandbox.inside import children
from stretto.sandbox.isolate import Sandbox
from tests.sandbox.conftest import LIMITS
from tests.sandbox.hostile import HOSTILE, PREAMBLE, Bait, bait

SHORT = replace(LIMITS, wall_s=0.4, cpu_s=1.0)


@pytest.fixture(scope="module")
def laid() -> Iterator[Bait]:
    with bait() as laid:
        yield laid


FIRST = ("fork bomb", "fork bomb that leaves its group", "ignores all signals", "kills everybody", "output flood")
"""Programs that must be ended and that also run in the fast set."""
LONG = ("deep folders",)
"""Programs that end by themselves and that do not: a disk may need seconds to remove what is left."""


def _is_fast(name: str) -> bool:
    return name in FIRST or (Outcome.OK in HOSTILE[name].ends and name not in LONG)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if _is_fast(name) else pytest.mark.slow) for name in HOSTILE],
)
def test_a_hostile_program_gets_nowhere(sandbox: Sandbox, laid: Bait, name: str) -> None:
    hostile = HOSTILE[name]
    finished = sandbox.run(PREAMBLE + hostile.source, stdin=laid.line(), limits=SHORT)
    assert laid.damage(finished.stdout + finished.stderr) == [], finished
    if (
        "the machine is too busy" not in finished.why
    ):  # otherwise the result is unknown, which is not the program's fault
        assert finished.outcome in (*hostile.ends, Outcome.TIMEOUT), finished
    assert not finished.stderr.startswith(b"Traceback") or b"SyntaxError" not in finished.stderr, finished.stderr
    (pid,) = sandbox.idle_pids
    assert children(pid) == []
    assert sandbox.run("print(1)").stdout == b"1\n"


@pytest.mark.parametrize(
    "name", ["reads the host", "dot dot", "symlink", "hard link", "network", "kills the bait", "memory files"]
)
def test_outside_the_same_program_does_get_there(name: str, tmp_path: object) -> None:
    """Without a sandbox the programs reach their targets."""
    with bait() as laid:
        source = PREAMBLE + HOSTILE[name].source
        done = subprocess.run(
            [sys.executable, "-c", source],
            input=laid.line(),
            cwd=str(tmp_path),
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert laid.damage(done.stdout), done


def test_without_the_call_that_closes_descriptors_they_are_found() -> None:
    """Without close_range, the programs that look for descriptors succeed, so the tests of them can fail."""
    with descriptors_left_open(), Sandbox(LIMITS) as sandbox:
        assert num_escapes(sandbox) == len(OF_DESCRIPTORS)
