"""Requests of `stretto serve --rollout`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from stretto.base.errors import UserError
from stretto.base.trajectory import WeightVersion
from stretto.engine.request import EngineStats
from stretto.flow.servers.client import CONNECT_S, from_text
from stretto.flow.servers.dialect import Ask, Dialect, Reply, labels_of
from stretto.learning.weights import publish


class Stretto(Dialect):
    """`stretto serve --rollout` (`stretto.flow.rollout_server`). It reads published weights as they are."""

    def check(self) -> None:
        info, where = self._server.ask("/rollout/info", self._recipe.rollout.start_s), self._server.where
        shape = {
            name: getattr(self._config, name) for name in ("vocab_size", "num_layers", "hidden_size", "num_experts")
        }
        for name, value in shape.items():
            if info[name] != value:
                raise UserError(
                    f"{where}: serves a network with {name} {info[name]}, the run's has {value}; serve the run's start"
                )
        precision = self._recipe.precision
        if info["precision"] != precision.engines:
            problem = f"computes in {info['precision']}, and precision.rollout is {precision.engines}"
            raise UserError(f"{where}: {problem}; change one of them (--dtype)")
        if precision.batch_invariant and not info["is_batch_invariant"]:
            raise UserError(f"{where}: is not batch-invariant; leave precision.batch_invariant out")
        self._fits(info["max_len"], "--max-len")

    async def generate(self, ask: Ask) -> Reply:
        request = ask.request
        fields = ("max_tokens", "temperature", "seed", "stop_ids", "want_routes", "routes_from", "deadline_s")
        body = {"tokens": ask.tokens, **{name: getattr(request, name) for name in fields}}
        done = await self._server.post("/rollout/generate", body)
        return Reply(
            done["tokens"],
            done["logprobs"],
            labels_of(done["weight_versions"], len(done["tokens"])),
            None if done["routes"] is None else from_text(done["routes"]),
            *(done[name] for name in ("cached_tokens", "num_preemptions", "queued_s")),
        )

    async def score(self, tokens: Sequence[int]) -> list[float]:
        scores: list[float] = await self._server.post("/rollout/score", {"tokens": list(tokens)})
        return scores

    async def load(self, version: WeightVersion, label: str) -> Path | None:
        location, written = Path(version.location).resolve(), None
        if not location.is_file():  # it is in a store, which the server does not know
            sent = await asyncio.to_thread(lambda: publish(self._folder, version.number, self._fetch(version)))
            version, location = sent, Path(sent.location)
            written = location
        await self._server.post(
            "/rollout/load", {"label": label, "version": asdict(replace(version, location=str(location)))}
        )
        return written

    async def stats(self) -> EngineStats | None:
        return EngineStats(**await self._server.get("/rollout/stats", CONNECT_S))
