"""Limits by a delegated cgroup; without one, all tests but the first are skipped, with the reason."""

from __future__ import annotations

import pytest

from stretto.base.trajectory import Outcome
from stretto.sandbox import cgroup
from stretto.sandbox.isolate import Sandbox
from tests.sandbox.conftest import LIMITS


def test_the_isolation_says_who_limits_memory() -> None:
    with Sandbox(LIMITS) as sandbox:
        polled = sandbox.isolation.polled
        assert ("memory limited by a cgroup" in str(sandbox.isolation)) == (polled == "")
    if polled:
        with pytest.raises(cgroup.GroupError) as problem:
            cgroup.delegated()
        assert polled == str(problem.value) and f"memory polled: {polled}" in str(sandbox.isolation)


@pytest.fixture
def grouped(sandbox: Sandbox) -> Sandbox:
    if sandbox.isolation.polled:
        pytest.skip(f"memory is polled: {sandbox.isolation.polled}")
    return sandbox


def test_memory_of_a_tree_between_two_looks(grouped: Sandbox) -> None:
    """Each process stays below the limit; together they exceed it, and all are killed at once."""
    source = "import os, time\nfor _ in range(5):\n if not os.fork(): x = bytearray(b'x') * (80 << 20); os._exit(0)\nfor _ in range(5): os.wait()"
    finished = grouped.run(source)
    assert finished.outcome is Outcome.CRASH and finished.why == f"used more than {LIMITS.memory_bytes} bytes of memory"
    assert grouped.run("print(1)").stdout == b"1\n"


def test_processes_are_counted_by_the_kernel(grouped: Sandbox) -> None:
    source = (
        "import os, time\nnum = 0\n"
        "try:\n while num < 100:\n  if not os.fork(): time.sleep(60)\n  num += 1\nexcept OSError: print(num)"
    )
    assert int(grouped.run(source).stdout) == LIMITS.processes - 1


def test_processor_seconds_of_children_nobody_waits_for(grouped: Sandbox) -> None:
    finished = grouped.run(
        "import os, time\nfor _ in range(3):\n if not os.fork():\n  while True: pass\ntime.sleep(600)"
    )
    assert finished.outcome is Outcome.TIMEOUT and "processor seconds" in finished.why


def test_groups_go_with_their_keepers(grouped: Sandbox) -> None:
    assert grouped._groups is not None
    others = set(grouped._groups.glob("stretto-sandbox-*"))
    with Sandbox(LIMITS, level=grouped.isolation.level, python=grouped._room.python) as sandbox:
        (mine,) = set(grouped._groups.glob("stretto-sandbox-*")) - others
        left = grouped._groups / "stretto-sandbox-999999999-left"  # left by a driver that was killed
        left.mkdir()
        with Sandbox(LIMITS, level=grouped.isolation.level, python=grouped._room.python):
            assert mine.exists() and not left.exists()
        sandbox.run("import os\nfor _ in range(3): os.fork()")
        assert (mine / "cgroup.procs").read_text() == ""
    assert not mine.exists()
