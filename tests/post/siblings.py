"""Checkpoints that began with the same one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stretto.base.records import new_lineage
from stretto.model.checkpoint import write_checkpoint
from stretto.model.spec import SubnetChoice
from stretto.text.tokenizer import train_tokenizer
from tests.model.checkpoints import NETWORKS, network


def checkpoints(folder: Path, name: str = "glm elastic", num: int = 3, **changes: Any) -> list[Path]:
    """The base, and so many networks that were trained from it, one might think."""
    family, shape = NETWORKS[name]
    base = network(**{**shape, **changes})
    train_tokenizer(iter(["the cat sat on the mat " * 9]), 280).save(folder / "tokenizer")
    stem, made = None, []
    for number in range(num + 1):
        rng = torch.Generator().manual_seed(number)
        state = {
            key: tensor + 0.1 * bool(number) * torch.randn(tensor.shape, generator=rng)
            for key, tensor in base.state_dict().items()
        }
        told = dict.fromkeys(("total_params", "active_params"), 1)
        receipt = {"stage": "sft", "device": "none", "flops": 10**number, "tokens": 1}
        parents = (stem,) if stem else ()
        lineage = new_lineage(name=str(number), stage="sft", parents=parents, receipt=receipt, **told)
        made.append(folder / ("base" if not number else "abc"[number - 1]))
        wrote = write_checkpoint(
            made[-1], state, base.config, family=family, tokenizer_dir=folder / "tokenizer", lineage=lineage,
            presets={"small": SubnetChoice(experts=2)},
        )  # fmt: skip
        stem = stem or wrote
    return made
