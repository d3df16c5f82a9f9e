"""What every kind of server that samples must be able to do: a `Dialect` translates it into the server's requests.

Shape letters: R rows of routes, N layers of the server's routes, K route slots.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.paths import remove
from stretto.base.trajectory import WeightVersion
from stretto.engine.request import EngineStats
from stretto.flow.clients import GenerateRequest
from stretto.flow.servers.client import Server
from stretto.learning.recipe import RlRecipe
from stretto.model.checkpoint import describe, tokenizer_dir_of, write_checkpoint
from stretto.model.families import kept_family
from stretto.model.spec import ModelConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of a server to one request. Written by a dialect."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    labels: Sequence[str | None]
    """Label of the weights that sampled each token; None: unknown, but not older than the request."""
    routes: np.ndarray | None
    """[R, N, K], experts by layer."""
    cached_tokens: int = 0
    num_preemptions: int = 0
    queued_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to a server. Written by `RemoteEngineRole`."""

    tokens: list[int]
    """All tokens of the sample so far."""
    seed: int
    request: GenerateRequest


class Dialect(ABC):
    """Requests of one kind of server."""

    health: ClassVar[str] = "/health"
    """Path that answers while the server is alive."""

    def __init__(
        self,
        server: Server,
        recipe: RlRecipe,
        config: ModelConfig,
        start: Path,
        folder: Path,
        fetch: Callable[[WeightVersion], Mapping[str, Tensor]],
    ):
        """
        Args:
            config: shape of the run's network.
            start: the run's start, for the network's family and tokenizer; `check` does not need it.
            folder: folder for files that the server reads.
            fetch: returns the tensors of a version.
        """
        self._server, self._recipe = server, recipe
        self._start, self._folder, self._fetch = start, folder.resolve(), fetch
        self._config = config
        self._replays = recipe.replay == "r3" and self._config.num_moe_layers > 0

    @abstractmethod
    def check(self) -> None:
        """Check at the start that the server can do what the run needs. Called in a thread.
        Raises UserError: the server is too old, lacks an option, or serves another network."""

    @abstractmethod
    async def generate(self, ask: Ask) -> Reply:
        """Sample. Raises UserError: the server refuses the request. InfraError: it is busy or failed inside. Unavailable: gone."""

    @abstractmethod
    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of ``tokens`` after the first at temperature 1. Raises as `generate`."""

    @abstractmethod
    async def load(self, version: WeightVersion, label: str) -> Path | None:
        """Replace the weights, name them ``label``, and drop all keys and values of the old ones. Returns what was written for the
        server. Raises as `generate`, and as ``fetch``."""

    async def stats(self) -> EngineStats | None:
        """The server's own counters; None: `RemoteEngineRole` counts."""
        return None

    def settle(self, active: Path | None) -> None:
        """Delete all files that were written for the server, but ``active``."""
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path != active:
                remove(path)

    def _fits(self, max_len: int, option: str) -> None:
        if max_len < self._recipe.train.seq_len:
            problem = f"takes {max_len} tokens, and train.seq_len is {self._recipe.train.seq_len}"
            raise UserError(f"{self._server.where}: {problem}; start it with a larger {option}")

    def _records_routes(self, does: bool, option: str) -> None:
        if self._replays and not does:
            raise UserError(
                f"{self._server.where}: returns no routes, and replay is 'r3'; start it with {option}, or set replay = \"off\""
            )


class ByFolder(Dialect):
    """A server that reads versions of the weights as Hugging Face checkpoints."""

    async def load(self, version: WeightVersion, label: str) -> Path:
        path = self._folder / label
        if not path.is_dir():
            await asyncio.to_thread(self._write, version, path)
        await self._update(path, label)
        return path

    @abstractmethod
    async def _update(self, path: Path, label: str) -> None:
        """Have the server read ``path``."""

    def _write(self, version: WeightVersion, path: Path) -> None:
        tokenizer = tokenizer_dir_of(self._start)
        dtype = DTYPES[self._recipe.precision.engines]
        family = kept_family(self._config, describe(self._start).family)
        write_checkpoint(path, self._fetch(version), self._config, family=family, tokenizer_dir=tokenizer, dtype=dtype)

    def _check_paths(self, needed: Sequence[str], remedy: str) -> None:
        """Raises UserError: the server's own list of endpoints lacks one of ``needed``, or nothing answers."""
        paths = self._server.ask("/openapi.json", self._recipe.rollout.start_s).get("paths", {})
        if missing := [path for path in needed if path not in paths]:
            raise UserError(f"{self._server.where}: has no {missing[0]}: it is too old, or {remedy}")

    def _check_vocabulary(self, path: str, body: Callable[[list[int]], Any]) -> None:
        """The server takes the network's last token id and refuses the next one."""
        size, where = self._config.vocab_size, self._server.where
        self._server.ask(path, 2 * self._recipe.rollout.start_s, body([size - 1]))
        try:
            self._server.ask(path, 0.0, body([size]))
        except UserError as error:
            if "status 400" in str(error):
                return
            raise
        raise UserError(f"{where}: serves a vocabulary of more than {size} tokens, the run's; serve the run's start")


def labels_of(spans: Sequence[Mapping[str, Any]], num: int) -> list[str | None]:
    """Label of each of ``num`` tokens, from spans of them."""
    labels: list[str | None] = [None] * num
    for span in spans:
        labels[span["start"] : span["end"]] = [span["version"]] * (span["end"] - span["start"])
    return labels
