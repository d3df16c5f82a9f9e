"""LoRA adapters: added to a network, merged into its weights, and read and written in peft's format.

A `LowRank` is a parametrisation: whoever reads the weight gets W + scale·B·A, so that every operator, Subnet and dtype
computes with adapters as without. What that costs is a sum of the weight's size in each pass (peft does the same for experts).

Folders are peft's, by the names of transformers' modules in memory: projections that are one matrix here have an adapter
each, all experts of a layer one for gate and up together and one for down. peft treats what is not attention as parameters
(``target_parameters``): it would take modules called gate_proj for experts'.

Shape letters: E experts, R rank, I inputs, O outputs (rows of a weight).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stretto.base.errors import UserError
from stretto.base.paths import read_json, replacing, write_json
from stretto.model.checkpoint import TensorFiles, paired, write_file
from stretto.model.families import Family, readable_tensors, stored_experts
from stretto.model.families.tensors import Stored
from stretto.model.spec import LoraConfig, LoraTarget, ModelConfig
from stretto.model.transformer import Transformer

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Of peft's names, before transformers' own."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One adapter: the part of one of our weights that is a module, or a parameter, elsewhere."""

    ours: str
    """Name of the weight in our state dict."""
    rows: slice
    """Of the weight."""
    theirs: str
    """peft's name of the adapter, less ``.lora_A.weight``."""
    target: str
    """What names it in adapter_config.json."""
    kind: LoraTarget
    stored: Stored
    """How its rows lie on disk, which is how they lie in transformers' memory."""


def pieces(config: ModelConfig, family: Family) -> Iterator[Piece]:
    """All adapters that a network of ``config`` can have, by the names of ``family``."""
    for stored in readable_tensors(config, family):
        if stored.ours is None or stored.is_copy or not stored.ours.startswith("blocks."):
            continue
        rows = next((part for part in stored.part if isinstance(part, slice)), slice(None))
        fused = next((alias for alias in stored.aliases if alias.part), None)
        if fused is not None:
            if stored.part[0] == 0 and rows.start in (None, 0):  # the first expert's stands for all
                module, _, leaf = fused.name.rpartition(".")
                theirs = f"{module}.base_layer" if leaf == "gate_up_proj" else module  # peft nests one in the other
                yield Piece(stored.ours, slice(None), theirs, fused.name.split(".", 3)[3], "experts", stored)
            continue
        if stored.is_stacked or len(stored.shape) != 2 or not stored.name.endswith(".weight"):
            continue  # of gpt-oss's experts gate and up rows alternate in transformers: they have no adapter here
        module = (stored.aliases[0].name if stored.aliases else stored.name).removesuffix(".weight")
        kind = _kind(stored.ours)
        within = module.split(".", 3)[3]
        yield Piece(stored.ours, rows, module, within if kind == "attention" else f"{within}.weight", kind, stored)


def _kind(ours: str) -> LoraTarget:
    if ".attention." in ours:
        return "attention"
    return "router" if ours.endswith(".gate") else "shared" if ".shared." in ours else "dense"


class LowRank(nn.Module):
    """W [(E,) O, I] plus scale·B·A in the rows of each piece. A is random and B zero, so that nothing is changed at first."""

    def __init__(self, weight: Tensor, rows: list[slice], config: LoraConfig, generator: torch.Generator):
        super().__init__()
        *experts, num_rows, num_inputs = weight.shape
        self.rows, self.scale = rows, config.alpha / config.rank
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        for part in rows:
            num_outputs = len(range(num_rows)[part])
            bound = num_inputs**-0.5  # peft's: Kaiming's with a = √5
            a_RI = torch.empty(*experts, config.rank, num_inputs).uniform_(-bound, bound, generator=generator)
            self.a.append(nn.Parameter(a_RI.to(weight.device)))
            self.b.append(nn.Parameter(torch.zeros(*experts, num_outputs, config.rank, device=weight.device)))

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):  # as merging computes it
            whole, done = [], 0
            for rows, a_RI, b_OR in zip(self.rows, self.a, self.b, strict=True):
                start, stop, _ = rows.indices(weight.shape[-2])
                whole += [weight[..., done:start, :], weight[..., start:stop, :] + self.scale * (b_OR @ a_RI)]
                done = stop
            return torch.cat([*whole, weight[..., done:, :]], dim=-2)


def add_adapters(model: Transformer, family: Family, config: LoraConfig, seed: int) -> None:
    """Freeze ``model`` and put new adapters into it. Raises `UserError`: it has none of the targets."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    chosen = _chosen(model.config, family, config)
    for ours in dict.fromkeys(piece.ours for piece in chosen):
        module, name = _place(model, ours)
        rows = [piece.rows for piece in chosen if piece.ours == ours]
        parametrize.register_parametrization(module, name, LowRank(getattr(module, name), rows, config, generator))


def _chosen(model: ModelConfig, family: Family, config: LoraConfig) -> list[Piece]:
    chosen = [piece for piece in pieces(model, family) if piece.kind in config.targets]
    if not chosen:
        raise UserError(f"lora.targets: the network has no {' and no '.join(config.targets)}; name others")
    return chosen


def merge(model: Transformer) -> None:
    """Add every adapter of ``model`` to its weight, in place; the network is an ordinary one again."""
    for module in list(model.modules()):
        for name in list(getattr(module, "parametrizations", {})):
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)


def write_adapters(folder: Path, model: Transformer, family: Family, config: LoraConfig, base: str) -> None:
    """Write the adapters that are in ``model`` as peft's folder; ``base``: where the network without them lies."""
    tensors: dict[str, Tensor] = {}
    chosen = _chosen(model.config, family, config)
    for piece, a_RI, b_OR in _adapters(model, chosen):
        a_RI, b_OR = a_RI.detach().cpu(), b_OR.detach().cpu()
        if piece.kind == "experts":  # stacked along the rank, which comes first in B (padding experts: zeros)
            missing = stored_experts(model.config, family) - len(a_RI)
            a_RI, b_OR = (torch.cat((each, each.new_zeros(missing, *each.shape[1:]))) for each in (a_RI, b_OR))
            a_RI, b_OR = a_RI.flatten(0, 1), b_OR.permute(1, 2, 0).flatten(1)
        else:
            b_OR = paired(piece.stored, b_OR, on_disk=True)
            b_OR = torch.cat((b_OR, b_OR.new_zeros(piece.stored.shape[0] - len(b_OR), b_OR.shape[1])))
        tensors[f"{_PREFIX}{piece.theirs}.lora_A.weight"] = a_RI.contiguous()
        tensors[f"{_PREFIX}{piece.theirs}.lora_B.weight"] = b_OR.contiguous()
    modules = sorted({piece.target for piece in chosen if piece.kind == "attention"})
    # gate_up is the inner
    parameters = sorted({piece.target for piece in chosen if piece.kind != "attention"}, reverse=True)
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "target_parameters": parameters or None,
        "inference_mode": True,
    }
    with replacing(folder) as partial:
        partial.mkdir(parents=True)
        write_json(partial / CONFIG_FILE, told)
        write_file(partial / WEIGHTS_FILE, tensors)


def read_adapter_config(folder: Path, model: ModelConfig, family: Family) -> LoraConfig:
    """What adapters a folder of peft's holds. Raises `UserError`: it is none, or one that is not known here."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; name a folder that peft or `stretto sft --keep-adapter` wrote")
    told = read_json(path)
    plain = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False}
    empty = (
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "layers_to_transform",
        "lora_bias",
        "layer_replication",
    )
    for name, value in {**plain, **dict.fromkeys(empty)}.items():
        if (told.get(name) or value) != value:
            raise UserError(
                f"{path}: {name}: {told[name]!r} is not supported; merge the adapter with peft and give the result"
            )
    with TensorFiles(folder, WEIGHTS_FILE) as files:
        known = {piece.theirs: piece.kind for piece in pieces(model, family)}
        found = {name.removeprefix(_PREFIX).rsplit(".lora_", 1)[0] for name in files.names}
        if unknown := sorted(found - known.keys()):
            way = "save it with transformers 5" if re.search(r"experts\.\d", unknown[0]) else "use one of this network"
            raise UserError(f"{folder / WEIGHTS_FILE}: {unknown[0]}: no adapter of {family} as it is here; {way}")
        kinds = tuple(dict.fromkeys(known[name] for name in known if name in found))
        return LoraConfig(rank=told["r"], alpha=told["lora_alpha"], targets=kinds)


def load_adapters(folder: Path, model: Transformer, family: Family, config: LoraConfig) -> None:
    """Fill the adapters that `add_adapters` put into ``model``; those the folder lacks stay at nothing.

    Raises:
        UserError: a tensor of another shape, or a damaged file.
    """
    experts = stored_experts(model.config, family)
    with TensorFiles(folder, WEIGHTS_FILE) as files, torch.no_grad():
        for piece, a_RI, b_OR in _adapters(model, _chosen(model.config, family, config)):
            name, rank = f"{_PREFIX}{piece.theirs}.lora_", a_RI.shape[-2]
            if f"{name}A.weight" not in files.names:
                continue
            if piece.kind == "experts":
                (own, _, num_inputs), num_outputs = a_RI.shape, b_OR.shape[1]
                told_a = files.read(f"{name}A.weight", (experts * rank, num_inputs)).view(experts, rank, num_inputs)
                told_b = files.read(f"{name}B.weight", (num_outputs, experts * rank)).view(num_outputs, rank, experts)
                a_RI.copy_(told_a[:own])
                b_OR.copy_(told_b.permute(2, 0, 1)[:own])
            else:
                a_RI.copy_(files.read(f"{name}A.weight", tuple(a_RI.shape)))
                told_b = files.read(f"{name}B.weight", (piece.stored.shape[0], rank))
                b_OR.copy_(paired(piece.stored, told_b[: len(b_OR)], on_disk=False))


def _adapters(model: Transformer, chosen: list[Piece]) -> Iterator[tuple[Piece, Tensor, Tensor]]:
    """Each piece with its A and B."""
    for piece in chosen:
        module, name = _place(model, piece.ours)
        low_rank: Any = module.parametrizations[name][0]  # type: ignore[index, union-attr]
        at = low_rank.rows.index(piece.rows)
        yield piece, low_rank.a[at], low_rank.b[at]


def _place(model: Transformer, ours: str) -> tuple[nn.Module, str]:
    module, _, name = ours.rpartition(".")
    return model.get_submodule(module), name
