"""inspect_ai's sandbox ``stretto``: Linux namespaces in place of containers, without images.

    inspect eval TASK --sandbox stretto            # refuses a machine without full isolation
    inspect eval TASK --sandbox stretto:limits     # accepts weaker isolation

This process holds the files of a sample as a tar archive. Each command runs in a new, empty namespace (system programs read-only, no
network) where the archive is unpacked; the files that the command leaves are the archive for the next one. A command that a limit ends
therefore changes nothing, and no process continues between two commands. Images, networks and background processes are not supported.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from dataclasses import replace
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, Final

from anyio import to_thread
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
)

from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.sandbox.isolate import Sandbox
from stretto.sandbox.outcome import Limits
from stretto.sandbox.walls import WORK, base_python

LIMITS: Final = Limits(wall_s=120.0, cpu_s=120.0, memory_bytes=2 << 30, processes=64)
"""Limits of a command for which the task gives no timeout. Our own choice."""
_COMMANDS: Final = ("/bin", "/usr/bin", "/usr/local/bin", os.path.dirname(base_python()))
_WORKERS: Final = 4
# Runs in the namespace: unpacks the archive, runs the command, prints its exit code and output, and packs the files. The command's user
# can kill this script or write to its output, so `exec` checks what it prints.
_INSIDE: Final = """
import io, json, os, subprocess, sys, tarfile
job = json.loads(sys.stdin.buffer.readline())
stdin = sys.stdin.buffer.read(job["stdin"])
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
    archive.extractall(".", filter="tar")
os.makedirs(job["cwd"], exist_ok=True)
command = job["command"]
command[0] = sys.executable if command[0] in ("python", "python3") else command[0]
try:
    done = subprocess.run(command, input=stdin, capture_output=True, cwd=job["cwd"], env={**os.environ, **job["env"]})
    code, out, err = done.returncode, done.stdout, done.stderr
except (FileNotFoundError, PermissionError) as error:
    code, out, err = 127 if isinstance(error, FileNotFoundError) else 126, b"", f"{error.filename}: {error.strerror}".encode()
packed = io.BytesIO()
with tarfile.open(fileobj=packed, mode="w") as archive:
    archive.add(".", filter=lambda each: each if each.isreg() or each.isdir() or each.issym() else None)
sys.stdout.buffer.write(json.dumps([code, len(out), len(err)]).encode() + b"\\n" + out + err + packed.getvalue())
"""


class StrettoSandbox(SandboxEnvironment):
    """The files of one sample, and commands that run on them."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__()
        self._sandbox, self._archive = sandbox, _packed({})

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        if config not in (None, "limits"):
            raise UserError(
                f"sandbox stretto: {task_name} wants {config}, an image or services; it has none, use docker there"
            )
        return {"default": cls(await to_thread.run_sync(_shared, config is None))}

    @classmethod
    async def sample_cleanup(
        cls, task_name: str, config: Any, environments: dict[str, SandboxEnvironment], interrupted: bool
    ) -> None:
        """Nothing to do: a sample has no state outside of ``environments``."""

    @classmethod
    def default_concurrency(cls) -> int | None:
        return _WORKERS

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        if user is not None:
            raise SandboxUserUnsupportedError(f"sandbox stretto: user {user}: there is one user, which is nobody")
        stdin = input.encode() if isinstance(input, str) else input or b""
        path = os.pathsep.join((*_COMMANDS[-1:], *_COMMANDS[:-1]))
        job = {"command": cmd, "stdin": len(stdin), "cwd": _inside(cwd or "."), "env": {"PATH": path, **(env or {})}}
        most = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        limits = replace(LIMITS, output_bytes=LIMITS.file_bytes + 2 * most)
        if timeout is not None:
            limits = replace(limits, wall_s=timeout, cpu_s=LIMITS.processes * timeout)
        packed = json.dumps(job).encode() + b"\n" + stdin + self._archive
        done = await to_thread.run_sync(lambda: self._sandbox.run(_INSIDE, packed, limits=limits))
        if done.outcome is Outcome.INFRA:
            raise SandboxUnavailableError(f"sandbox stretto: {done.why}")
        if done.outcome is Outcome.TIMEOUT:
            raise TimeoutError(f"sandbox stretto: {done.why}")
        head, _, rest = done.stdout.partition(b"\n")
        try:
            code, num_out, num_err = json.loads(head)
            stdout, stderr, archive = rest[:num_out], rest[num_out : num_out + num_err], rest[num_out + num_err :]
            tarfile.open(fileobj=io.BytesIO(archive)).close()
        except (ValueError, TypeError, tarfile.TarError):
            return ExecResult(False, 137, "", f"ended: {done.why or 'its files could not be kept'}")
        self._archive = archive
        if max(num_out, num_err) > most:
            shown = (stdout if num_out > most else stderr)[:most].decode(errors="replace")
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, shown)
        return ExecResult(code == 0, code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))

    async def write_file(self, file: str, contents: str | bytes) -> None:
        name = _inside(file)
        known, data = self._members(), contents.encode() if isinstance(contents, str) else contents
        if name in known and known[name].isdir():
            raise IsADirectoryError(file)
        if len(self._archive) + len(data) > LIMITS.file_bytes:
            raise OSError(f"sandbox stretto: {file}: all files of a sample together may take {LIMITS.file_bytes} bytes")
        self._archive = _packed({name: data}, self._archive)

    async def read_file(self, file: str, text: bool = True) -> Any:
        known, name = self._members(), _inside(file)
        if name not in known:
            raise FileNotFoundError(file)
        if known[name].isdir():
            raise IsADirectoryError(file)
        if not known[name].isreg():
            raise PermissionError(f"sandbox stretto: {file} is a link; read what it names")
        if known[name].size > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        with tarfile.open(fileobj=io.BytesIO(self._archive)) as archive:
            member = archive.extractfile(known[name])
            assert member is not None, name
            data = member.read()
        return data.decode() if text else data

    def _members(self) -> dict[str, tarfile.TarInfo]:
        """Members of the archive by their path in the work folder. Of several with one path, the last one counts."""
        with tarfile.open(fileobj=io.BytesIO(self._archive)) as archive:
            return {os.path.normpath(member.name): member for member in archive.getmembers()}


@lru_cache
def _shared(is_strict: bool) -> Sandbox:
    """The process's sandbox. All samples share its workers; each command has its own namespace."""
    return Sandbox(LIMITS, strict=is_strict, workers=_WORKERS, shown=_COMMANDS)


def _inside(file: str) -> str:
    """A task's path relative to the work folder. Raises PermissionError for a path outside of it."""
    path = os.path.normpath(PurePosixPath(WORK) / file)
    if path != WORK and not path.startswith(f"{WORK}/"):
        raise PermissionError(f"sandbox stretto: {file}: only the work folder, {WORK}, can be read and written")
    return os.path.relpath(path, WORK)


def _packed(files: dict[str, bytes], archive: bytes = b"") -> bytes:
    """``archive`` with ``files`` added."""
    buffer = io.BytesIO(archive)
    with tarfile.open(fileobj=buffer, mode="a" if archive else "w") as packed:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o755
            packed.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
