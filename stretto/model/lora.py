"""LoRA adapters: adding them to a network, merging them into its weights, reading and writing them in peft's format.

A `LowRank` is a parametrisation: the weight that operators read is W + scale·B·A, so that every operator, Subnet and dtype works
with adapters too. The cost is one addition of the weight's size per pass, as in peft for experts.

Folders have peft's format, with the module names of transformers: the projections of a fused matrix have an adapter each; all
experts of a layer have one adapter for gate and up and one for down. Outside attention, peft addresses the weights as parameters
(``target_parameters``), because as modules the names gate_proj and so on would also match experts.

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

from stretto.base.config import validate
from stretto.base.errors import UserError
from stretto.base.paths import read_json, replacing, write_json
from stretto.model.families import TABLES, Family, readable_tensors
from stretto.model.families.tensors import Stored
from stretto.model.spec import LoraConfig, LoraTarget, ModelConfig
from stretto.model.stored import paired
from stretto.model.transformer import Transformer
from stretto.model.weight_files import TensorFiles, write_file

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Prefix that peft adds to transformers' names."""
_INNER = ".base_layer"
"""Suffix that peft adds to the name of the inner one of two nested adapters."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One adapter: it belongs to the part of one of our weights that is a module or parameter in transformers."""

    ours: str
    """Name of the weight in our state dict."""
    rows: slice
    """Rows of the weight."""
    theirs: str
    """peft's name of the adapter, without ``.lora_A.weight``."""
    target: str
    """Name of the adapter in the targets of adapter_config.json."""
    kind: LoraTarget
    stored: Stored
    """Order of the rows on disk, which is also that of transformers."""


def pieces(config: ModelConfig, family: Family) -> Iterator[Piece]:
    """All adapters that a network of ``config`` can have, with the names of ``family``."""
    for stored in readable_tensors(config, family):
        if stored.ours is None or stored.is_copy or not stored.ours.startswith("blocks."):
            continue
        rows = next((part for part in stored.part if isinstance(part, slice)), slice(None))
        fused = next((alias for alias in stored.aliases if alias.part), None)
        if fused is not None:
            if stored.part[0] == 0 and rows.start in (None, 0):  # one adapter for all experts: that of the first one
                module, _, leaf = fused.name.rpartition(".")
                theirs = f"{module}{_INNER}" if leaf == "gate_up_proj" else module  # peft nests the two adapters
                yield Piece(stored.ours, slice(None), theirs, fused.name.split(".", 3)[3], "experts", stored)
            continue
        if stored.is_stacked or len(stored.shape) != 2 or not stored.name.endswith(".weight"):
            continue  # experts of gpt-oss, whose gate and up rows alternate in transformers, are not supported
        module = (stored.aliases[0].name if stored.aliases else stored.name).removesuffix(".weight")
        kind = _kind(stored.ours)
        within = module.split(".", 3)[3]
        yield Piece(stored.ours, rows, module, within if kind == "attention" else f"{within}.weight", kind, stored)


def _kind(ours: str) -> LoraTarget:
    if ".attention." in ours:
        return "attention"
    return "router" if ours.endswith(".gate") else "shared" if ".shared." in ours else "dense"


class LowRank(nn.Module):
    """W [(E,) O, I] plus scale·B·A in the rows of each piece. A is random and B zero, so the initial weight is W."""

    def __init__(self, weight: Tensor, rows: list[slice], config: LoraConfig, generator: torch.Generator):
        super().__init__()
        *experts, num_rows, num_inputs = weight.shape
        self.rows, self.scale = rows, config.alpha / config.rank
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        for part in rows:
            num_outputs = len(range(num_rows)[part])
            bound = num_inputs**-0.5  # as in peft: Kaiming initialisation with a = √5
            a_RI = torch.empty(*experts, config.rank, num_inputs).uniform_(-bound, bound, generator=generator)
            self.a.append(nn.Parameter(a_RI.to(weight.device)))
            self.b.append(nn.Parameter(torch.zeros(*experts, num_outputs, config.rank, device=weight.device)))

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):  # the same arithmetic as in merging
            parts, end = [], 0
            for rows, a_RI, b_OR in zip(self.rows, self.a, self.b, strict=True):
                start, stop, _ = rows.indices(weight.shape[-2])
                parts += [weight[..., end:start, :], weight[..., start:stop, :] + self.scale * (b_OR @ a_RI)]
                end = stop
            return torch.cat([*parts, weight[..., end:, :]], dim=-2)


def add_adapters(model: Transformer, family: Family, config: LoraConfig, seed: int) -> None:
    """Freeze ``model`` and add new adapters to it. Raises `UserError`: it has none of the targets."""
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
    """Add every adapter of ``model`` to its weight, in place; the result is an ordinary network."""
    for module in list(model.modules()):
        for name in list(getattr(module, "parametrizations", {})):
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)


def write_adapters(folder: Path, model: Transformer, family: Family, config: LoraConfig, base: str) -> None:
    """Write the adapters of ``model`` as a folder in peft's format; ``base``: path of the checkpoint without adapters."""
    tensors: dict[str, Tensor] = {}
    chosen = _chosen(model.config, family, config)
    for piece, a_RI, b_OR in _adapters(model, chosen):
        a_RI, b_OR = a_RI.detach().cpu(), b_OR.detach().cpu()
        if piece.kind == "experts":  # stacked along the rank, which is the slower index; padding experts are zero
            missing = TABLES[family].stored_experts(model.config) - len(a_RI)
            a_RI, b_OR = (torch.cat((each, each.new_zeros(missing, *each.shape[1:]))) for each in (a_RI, b_OR))
            a_RI, b_OR = a_RI.flatten(0, 1), b_OR.permute(1, 2, 0).flatten(1)
        else:
            b_OR = paired(piece.stored, b_OR, on_disk=True)
            b_OR = torch.cat((b_OR, b_OR.new_zeros(piece.stored.shape[0] - len(b_OR), b_OR.shape[1])))
        tensors[f"{_PREFIX}{piece.theirs}.lora_A.weight"] = a_RI.contiguous()
        tensors[f"{_PREFIX}{piece.theirs}.lora_B.weight"] = b_OR.contiguous()
    modules = sorted({piece.target for piece in chosen if piece.kind == "attention"})
    # gate_up first, because its adapter is the inner one
    parameters = sorted({piece.target for piece in chosen if piece.kind != "attention"}, reverse=True)
    settings = {
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
        write_json(partial / CONFIG_FILE, settings)
        write_file(partial / WEIGHTS_FILE, tensors)


def read_adapter_config(folder: Path, model: ModelConfig, family: Family) -> LoraConfig:
    """Settings of the adapters in a folder of peft. Raises `UserError`: it is not such a folder, or has unsupported adapters."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; name a folder that peft or `stretto sft --keep-adapter` wrote")
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise UserError(f"{path}: not a JSON object; save the adapter again with peft")
    for name, kind, text in (("r", int, "a whole number"), ("lora_alpha", int | float, "a number")):
        value = settings.get(name)
        if not isinstance(value, kind) or value <= 0:
            raise UserError(f"{path}: {name}: must be {text} above 0, is {value!r}; save the adapter again with peft")
    for name, value in _SUPPORTED.items():
        if (settings.get(name) or value) != value:
            raise UserError(
                f"{path}: {name}: {settings[name]!r} is not supported; merge the adapter with peft and give the result"
            )
    with TensorFiles(folder, WEIGHTS_FILE) as files:
        known = {piece.theirs: piece.kind for piece in pieces(model, family)}
        found = {name.removeprefix(_PREFIX).rsplit(".lora_", 1)[0] for name in files.names}
        if unknown := sorted(found - known.keys()):
            way = "save it with transformers 5" if re.search(r"experts\.\d", unknown[0]) else "use one of this network"
            raise UserError(f"{folder / WEIGHTS_FILE}: {unknown[0]}: not an adapter of {family}; {way}")
        kinds = tuple(dict.fromkeys(known[name] for name in known if name in found))
        found_settings = {"rank": settings["r"], "alpha": settings["lora_alpha"], "targets": kinds}
        return validate(LoraConfig, found_settings, str(path))


_SUPPORTED: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "rank_pattern": None,
    "alpha_pattern": None,
    "modules_to_save": None,
    "layers_to_transform": None,
    "lora_bias": None,
    "layer_replication": None,
}
"""Fields of adapter_config.json that may have one value only; None: must be empty."""


def load_adapters(folder: Path, model: Transformer, family: Family, config: LoraConfig) -> None:
    """Load the adapters in ``folder`` into those that `add_adapters` added to ``model``; missing ones keep their initial values.

    Raises:
        UserError: a tensor has another shape, or a file is damaged.
    """
    experts = TABLES[family].stored_experts(model.config)
    parameters = read_json(folder / CONFIG_FILE).get("target_parameters") or ()
    with TensorFiles(folder, WEIGHTS_FILE) as files, torch.no_grad():
        is_nested = any(f"{_INNER}." in name for name in files.names)
        is_alone = not is_nested and any(str(name).endswith("gate_up_proj") for name in parameters)
        for piece, a_RI, b_OR in _adapters(model, _chosen(model.config, family, config)):
            theirs = piece.theirs
            if is_alone and piece.kind == "experts":
                if not theirs.endswith(_INNER):
                    continue  # of down, which was not adapted: peft gives its name to the adapter of gate and up
                theirs = theirs.removesuffix(_INNER)
            name, rank = f"{_PREFIX}{theirs}.lora_", a_RI.shape[-2]
            if f"{name}A.weight" not in files.names:
                continue
            if piece.kind == "experts":
                (own, _, num_inputs), num_outputs = a_RI.shape, b_OR.shape[1]
                stored_a = files.read(f"{name}A.weight", (experts * rank, num_inputs)).view(experts, rank, num_inputs)
                stored_b = files.read(f"{name}B.weight", (num_outputs, experts * rank)).view(num_outputs, rank, experts)
                a_RI.copy_(stored_a[:own])
                b_OR.copy_(stored_b.permute(2, 0, 1)[:own])
            else:
                a_RI.copy_(files.read(f"{name}A.weight", tuple(a_RI.shape)))
                stored_b = files.read(f"{name}B.weight", (piece.stored.shape[0], rank))
                b_OR.copy_(paired(piece.stored, stored_b[: len(b_OR)], on_disk=False))


def _adapters(model: Transformer, chosen: list[Piece]) -> Iterator[tuple[Piece, Tensor, Tensor]]:
    """Each piece of ``chosen`` with its matrices A and B in ``model``."""
    for piece in chosen:
        module, name = _place(model, piece.ours)
        low_rank: Any = module.parametrizations[name][0]  # type: ignore[index, union-attr]
        at = low_rank.rows.index(piece.rows)
        yield piece, low_rank.a[at], low_rank.b[at]


def _place(model: Transformer, ours: str) -> tuple[nn.Module, str]:
    module, _, name = ours.rpartition(".")
    return model.get_submodule(module), name
