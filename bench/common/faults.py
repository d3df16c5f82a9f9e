"""Planted faults: updates that leave a server at an address with other weights than the trainer's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from stretto.base.errors import UserError
from stretto.base.trajectory import WeightVersion
from stretto.flow.rollout_remote import RemoteEngineRole
from stretto.learning.recipe import RlRecipe
from stretto.learning.trainer import TrainerRole
from stretto.learning.weights import fetch, publish

State = Mapping[str, torch.Tensor]
Row = tuple[str, str, str, bool]
"""Case, result, aim, and whether the aim is met."""


def plants(old: State, new: State) -> dict[str, tuple[State, bool]]:
    """States that a server may have in place of ``new``, and whether they must be caught in bf16 too."""
    one, other = "blocks.1.attention.out.weight", "blocks.2.attention.out.weight"
    made: dict[str, tuple[State, bool]] = {
        "the version before": (old, True),
        "a matrix of zeros": (dict(new) | {one: torch.zeros_like(new[one])}, True),
        "two matrices exchanged": (dict(new) | {one: new[other], other: new[one]}, True),
        "one layer not updated": ({name: (old if ".1." in name else new)[name] for name in new}, False),
        "one matrix not updated": (dict(new) | {one: old[one]}, False),
    }
    for name in [name for name in new if name == "blocks.1.mlp.gate_up" and new[name].dim() == 3]:
        made["one expert not updated"] = (
            dict(new) | {name: torch.cat([new[name][:3], old[name][3:4], new[name][4:]])},
            False,
        )
    return made


def faulty_rows(name: str, start: Path, chosen: RlRecipe, folder: Path) -> list[Row]:
    """Updates with other weights than the trainer's, on the server at the address of ``chosen``, which serves ``start``."""
    chosen, (url,) = chosen.on("fp32"), chosen.rollout.address
    rows = list[Row]()

    async def published() -> WeightVersion:
        trainer.copy_weights()
        version = await trainer.publish()
        assert version is not None
        return version

    async def work() -> None:
        role = RemoteEngineRole(chosen, url, start, folder / "engine")
        first = await published()
        old = {name: each.clone() for name, each in fetch(first).items()}
        with torch.no_grad():  # as large as a step of Adam at the bench's learning rate
            for parameter in trainer._model.parameters():
                parameter.add_(1e-3 * torch.randn_like(parameter).sign())
        second = replace(await published(), number=1)  # the engine ignores older versions
        await role.activate(first)
        for plant, (state, always) in plants(old, fetch(second)).items():
            wrong = publish(folder / plant.replace(" ", "-"), 1, state)
            try:
                await role.activate(replace(wrong, canary=second.canary, tolerance=second.tolerance))
                found = "not noticed"
                await role.close()
                role = RemoteEngineRole(chosen, url, start, folder / "engine")
                await role.activate(first)
            except UserError as error:
                found = str(error).partition("fixed tokens ")[2]
            is_caught, must = "version 0 is active again" in found, always or chosen.precision.engines == "fp32"
            rows.append(
                (f"{name}, planted: {plant}", found, "caught" if must else "none in bf16", is_caught or not must)
            )
        await role.activate(second)
        difference = float(np.abs(np.subtract(role._scores, second.canary)).mean())
        found = f"version {role.version}, by {difference:.2g} nats (tolerance {second.tolerance:.2g})"
        rows.append((f"{name}, then the right weights", found, "version 1", role.version == 1))
        await role.close()

    with closing(TrainerRole(chosen, folder / "trainer", start)) as trainer:
        torch.manual_seed(0)
        asyncio.run(work())
    return rows
