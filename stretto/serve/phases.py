"""Which Subnet a request gets: what it asks for, else the server's default, else what the load leaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from stretto.base.errors import UserError, nearest
from stretto.engine.request import Phases
from stretto.model.spec import Subnet, SubnetChoice, parse_subnet
from stretto.serve.bodies import Axes, Elastic
from stretto.serve.elastic import LoadControl, Rung, ladder
from stretto.serve.errors import ApiError, bad, overloaded
from stretto.serve.settings import ServedModel, ServeSettings

THINKING_END = "</think>"
"""Ends the thinking of every reasoning model whose template we know."""


@dataclass(frozen=True, slots=True)
class Given:
    """What a request got, and why. Written by `Chooser.choose`, read by ``usage.elastic`` and the metrics."""

    phases: Phases
    name: str
    """A preset's name, or the axes."""
    asked: str
    """``auto`` where the request left it open."""
    reason: Literal["asked", "default", "load"]


class Chooser:
    """Resolves the fields ``model`` and ``elastic``. Lives on the event loop; holds the ladder's state."""

    def __init__(
        self, model: ServedModel, settings: ServeSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises `UserError` where the default or the floor is none of this network."""
        self._model = model
        self._choices = model.choices()
        named = {name: choice.of(model.config) for name, choice in self._choices.items()}
        target = model.default.of(model.config)
        floor = target
        self._has_floor = settings.floor is not None
        if settings.floor is not None:
            floor = parse_subnet(settings.floor, model.config, self._choices, "--floor")
        self._named = named
        self.control = LoadControl(ladder(model.config, named, target, floor), settings.elastic, clock)
        tokenizer = model.tokenizer
        self._thinking_end = None if tokenizer is None else tokenizer.rust.token_to_id(THINKING_END)

    def rung(self, num_waiting: int) -> Rung:
        """What a request gets now that leaves its Subnet open.

        Raises:
            ApiError: 429 where the floor is reached and the queue is full.
        """
        rung = self.control.choose(num_waiting)
        if rung is None and not self._has_floor:
            return self.control.rungs[0]  # nothing was declared to give up; the engine's own queue is the limit
        if rung is None:
            floor = self.control.rungs[-1].name
            raise overloaded(
                f"the server is full: {num_waiting} requests wait and the floor ({floor}) is reached; come back later",
                self.control.retry_after_s(num_waiting),
            )
        return rung

    def preset_of(self, name: str | None) -> str | None:
        """The preset in ``model:preset``; None for the bare model.

        Raises:
            ApiError: 404 for any other model.
        """
        if name is None or name == self._model.name:
            return None
        own, _, preset = name.rpartition(":")
        if own == self._model.name and preset in self._choices:
            return preset
        known = [self._model.name, *(f"{self._model.name}:{preset}" for preset in self._choices)]
        raise ApiError(
            404,
            f"model: {name!r} is not served here{nearest(name, known)}; GET /v1/models lists what is",
            param="model",
            code="model_not_found",
        )

    def choose(self, model: str | None, elastic: Elastic | str | None, rung: Rung) -> Given:
        """Resolve both fields; ``rung`` is for a request that leaves its Subnet open.

        Raises:
            ApiError: an unknown model or preset, a Subnet outside the network, phases that do not nest.
        """
        preset = self.preset_of(model)
        base = self._model.default if preset is None else self._choices[preset]
        asked = Elastic(preset=elastic) if isinstance(elastic, str) else elastic or Elastic()
        whole, phased = Axes(**asked.model_dump(include=set(Axes.model_fields))), asked.answer
        if phased is not None and whole != Axes():
            raise bad("elastic.answer", "is given beside layers, experts, top_k or preset, which mean the same")
        wanted = whole if phased is None else phased
        is_open = preset is None and wanted == Axes()
        answer = rung.subnet if is_open else self._resolve(wanted, base, "elastic")
        prefill = None if asked.prefill is None else self._resolve(asked.prefill, base, "elastic.prefill")
        thinking = None if asked.thinking is None else self._resolve(asked.thinking, base, "elastic.thinking")
        _check_nesting(prefill, thinking, answer)
        if thinking is not None and self._thinking_end is None:
            raise bad("elastic.thinking", f"this model's tokenizer has no {THINKING_END} that would end it")
        phases = Phases(answer, prefill, thinking, None if thinking is None else self._thinking_end)
        if is_open:
            reason: Literal["default", "load"] = "default" if rung == self.control.rungs[0] else "load"
            return Given(phases, rung.name, "auto", reason)
        name = next((name for name, subnet in self._named.items() if subnet == answer), answer.label())
        return Given(phases, name, _spell(preset, wanted), "asked")

    def _resolve(self, wanted: Axes | str, base: SubnetChoice, param: str) -> Subnet:
        axes = Axes(preset=wanted) if isinstance(wanted, str) else wanted
        if axes.preset is not None:
            if axes.preset not in self._choices:
                known = ", ".join(self._choices)
                raise bad(
                    param, f"no preset {axes.preset!r}{nearest(axes.preset, self._choices)}; known: {known}", "subnet"
                )
            base = self._choices[axes.preset]
        own = axes.model_dump(exclude={"preset"}, exclude_none=True)
        try:
            # Not validated by SubnetChoice, so that an axis of 0 is told the range it should lie in.
            return self._model.config.subnet(
                *({**base.model_dump(), **own}[axis] for axis in SubnetChoice.model_fields)
            )
        except UserError as error:
            raise bad(param, str(error), "subnet") from None


def _spell(preset: str | None, wanted: Axes | str) -> str:
    axes = Axes(preset=wanted) if isinstance(wanted, str) else wanted
    base = axes.preset or preset
    own = [f"{axis}={value}" for axis, value in axes.model_dump(exclude={"preset"}, exclude_none=True).items()]
    return ",".join([*([base] if base else []), *own])


def _check_nesting(prefill: Subnet | None, thinking: Subnet | None, answer: Subnet) -> None:
    """A later phase reads the cache of the earlier ones, so its layers must be among theirs."""
    phases = [("prefill", prefill), ("thinking", thinking), ("answer", answer)]
    present = [(name, set(subnet.layers)) for name, subnet in phases if subnet is not None]
    for (earlier, outer), (later, inner) in pairwise(present):
        if not inner <= outer:
            raise bad(
                "elastic",
                f"the {later} runs {len(inner)} layers that the {earlier} ({len(outer)} layers) did not all compute; give the {earlier} at least as many",
                "subnet",
            )
