"""The bench script's side of `bench.peers.protocol`: one long-living process for each engine."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from bench.peers.protocol import Options, arguments


class WorkerFailed(RuntimeError):  # noqa: N818 - it says what happened
    """A worker ended; the message is the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call cost. Written by a worker."""

    wall_s: float
    processor_s: float
    """Of all threads of the worker's process."""
    tokens: tuple[tuple[int, ...], ...]


class Worker:
    """An engine in a process of its own. Use it as a context manager."""

    def __init__(self, module: str, python: str, options: Options, environment: Mapping[str, str]):
        """Start ``bench.peers.<module>`` with the interpreter ``python``.

        Raises:
            WorkerFailed: it did not come up.
        """
        reading, writing = os.pipe()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [python, "-m", f"bench.peers.{module}", arguments(replace(options, answers=writing))],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            text=True,
            pass_fds=(writing,),
            env={**os.environ, **environment},
        )
        os.close(writing)
        self._answers = os.fdopen(reading)
        told = json.loads(self._line())
        self.version: str = told["version"]
        self.settings: tuple[str, ...] = tuple(told["settings"])

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int, setting: str) -> Answer:
        """Greedy continuations of ``num_tokens`` tokens each. Raises as the constructor does."""
        assert self._process.stdin is not None
        asked = {"prompts": [list(prompt) for prompt in prompts], "num_tokens": num_tokens, "setting": setting}
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None
        told = json.loads(self._line())
        return Answer(told["wall_s"], told["processor_s"], tuple(tuple(row) for row in told["tokens"]))

    def _line(self) -> str:
        line = self._answers.readline()
        if not line:
            raise self._failed()
        return line

    def _failed(self) -> WorkerFailed:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        return WorkerFailed(f"exit code {code}: {lines[-1] if lines else 'it printed nothing'}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None and self._process.poll() is None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._log.close()
