"""Needs inspect_ai, and a machine that gives full isolation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

pytest.importorskip("inspect_ai", reason="the package inspect_ai is not installed")

from inspect_ai.util import OutputLimitExceededError, SandboxUserUnsupportedError

from stretto.base.errors import UserError
from stretto.harness.inspect_sandbox import StrettoSandbox
from stretto.sandbox.isolate import Sandbox


@pytest.fixture(scope="module", autouse=True)
def _isolated() -> None:
    with Sandbox() as sandbox:
        if not sandbox.isolation.is_full:
            pytest.skip("no full isolation on this machine")


async def opened() -> Any:
    return (await StrettoSandbox.sample_init("task", None, {}))["default"]


def run(work: Awaitable[Any]) -> Any:
    return asyncio.run(work)  # type: ignore[arg-type]


def test_files_stay_from_command_to_command() -> None:
    async def work() -> None:
        box = await opened()
        await box.write_file("a/b.txt", "hello\r\n")
        first = await box.exec(["bash", "-c", "cat a/b.txt; echo more >> a/b.txt; mkdir d; echo bad >&2; exit 3"])
        assert (first.success, first.returncode, first.stdout, first.stderr) == (False, 3, "hello\r\n", "bad\n")
        assert await box.read_file("/box/a/b.txt") == "hello\r\nmore\n"
        assert await box.read_file("a/b.txt", text=False) == b"hello\r\nmore\n"
        listed = await box.exec(
            ["python3", "-"], input="import os; print(os.environ['X'], sorted(os.listdir()))", env={"X": "7"}
        )
        assert listed.stdout == "7 ['a', 'd']\n"
        assert (await box.exec(["pwd"], cwd="d")).stdout.strip() == "/box/d"
        other = await opened()
        assert (await other.exec(["bash", "-c", "ls -A"])).stdout == ""

    run(work())


def test_what_a_limit_ends_has_changed_nothing() -> None:
    async def work() -> None:
        box = await opened()
        await box.write_file("kept", "1")
        with pytest.raises(TimeoutError, match="longer than 1 s"):
            await box.exec(["bash", "-c", "echo 2 > kept; sleep 20"], timeout=1)
        with pytest.raises(OutputLimitExceededError):
            await box.exec(["bash", "-c", "head -c 11000000 /dev/zero"])
        killed = await box.exec(["bash", "-c", "echo 3 > kept; kill -9 $PPID"])  # those who would say how it ended
        assert not killed.success and "signal 9" in killed.stderr
        forged = await box.exec(["bash", "-c", "echo '[0,9,9]' > /proc/$PPID/fd/1; kill -9 $PPID"])
        assert not forged.success
        assert await box.read_file("kept") == "1"

    run(work())


def test_what_it_does_not_give_is_refused() -> None:
    async def work() -> None:
        box = await opened()
        assert (await box.exec(["no-such-program"])).returncode == 127
        with pytest.raises(FileNotFoundError):
            await box.read_file("gone")
        with pytest.raises(PermissionError, match="only the work folder"):
            await box.read_file("/etc/passwd")
        with pytest.raises(PermissionError, match="only the work folder"):
            await box.write_file("../x", "")
        with pytest.raises(SandboxUserUnsupportedError, match="one user"):
            await box.exec(["id"], user="root")
        await box.exec(["ln", "-s", "/etc/passwd", "link"])
        with pytest.raises(PermissionError, match="is a link"):
            await box.read_file("link")
        assert not (await box.exec(["bash", "-c", "echo x > /dev/tcp/127.0.0.1/9"])).success
        with pytest.raises(UserError, match=r"task wants compose\.yaml, .* use docker there"):
            await StrettoSandbox.sample_init("task", "compose.yaml", {})

    run(work())
