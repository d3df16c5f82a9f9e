"""Networks of `bench.real_sizes`: a dense chat model in experts, and the same model pruned to the sizes of that network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stretto.api.adopt import AdoptOptions, adopt_command
from stretto.base.paths import CHECKPOINT
from stretto.evals.loss import EvalBatch
from stretto.evals.neurons import activity, each_layer
from stretto.model.checkpoint import read_checkpoint
from stretto.model.counts import count
from stretto.model.spec import ModelConfig, SubnetChoice, extracted_config
from stretto.model.transformer import SwiGlu, Transformer, load_state, skeleton
from stretto.model.upcycle import WIDTH_MULTIPLE, Upcycling, upcycled_presets

CONVERSION = Upcycling(experts=8, top_k=4)
"""One shared and seven routed experts, of which the sizes half and corner choose four."""
STRENGTHS = "strengths.pt"


@dataclass(frozen=True, slots=True)
class Parent:
    """The dense network, the same in experts, and how much each neuron contributes."""

    dense: Transformer
    moe: Transformer
    presets: Mapping[str, SubnetChoice]
    """Sizes of ``moe``."""
    strengths: Sequence[Tensor]
    """By layer: importance of each neuron [dense_intermediate_size]."""


def prepare(calibration: str, rows: Sequence[EvalBatch], seed: int, folder: Path) -> None:
    """Write the dense network in experts, fitted on the text ``calibration``, and the strengths of its neurons on ``rows``, to
    ``folder``. ``seed`` begins the clusters of neurons."""
    how = CONVERSION.replace(seed=seed)
    options = AdoptOptions(calibration=(calibration,), upcycling=how, dtype="float32")
    adopt_command(str(folder.parent / "dense"), folder / "moe", options)
    dense = dense_network(folder.parent)

    def find(layer: int, mlp: SwiGlu, x_ND: Tensor) -> Tensor:
        return activity(mlp.gate_up.weight, mlp.down.weight, x_ND)[0]

    with torch.no_grad():
        torch.save(each_layer(dense, rows, find), folder / STRENGTHS)


def adopt_dense(model: str, out: Path) -> Path:
    """The dense network ``model`` as a checkpoint in the study's folder ``out``; written once."""
    if not (out / "dense" / CHECKPOINT).is_dir():
        adopt_command(model, out / "dense", AdoptOptions(order="none", dtype="float32"))
    return out / "dense" / CHECKPOINT


def dense_network(out: Path) -> Transformer:
    return read_checkpoint(out / "dense" / CHECKPOINT, dtype=torch.float32).model


def read_parent(prepared: Path) -> Parent:
    """What `prepare` wrote to ``prepared``."""
    moe = read_checkpoint(prepared / "moe" / CHECKPOINT, dtype=torch.float32).model
    strengths = torch.load(prepared / STRENGTHS, weights_only=True)
    return Parent(dense_network(prepared.parent), moe, upcycled_presets(moe.config, CONVERSION), strengths)


def pruned(parent: Parent, size: str, way: str) -> Transformer:
    """The dense network with as many parameters per token as ``size``, without training.

    Args:
        way: ``both`` leaves out the layers that ``size`` leaves out, and keeps as many neurons as it uses for a token; ``layers`` leaves
            out layers only and ``neurons`` neurons only, until no more parameters are left than with ``both``.
    """
    config, subnet = parent.moe.config, parent.presets[size].of(parent.moe.config)
    width = (config.num_shared_experts + subnet.top_k[0]) * config.expert_intermediate_size
    every, neurons = range(config.num_layers), parent.dense.config.dense_intermediate_size
    if way == "both":
        return _cut(parent, subnet.layers, width)
    most = _num_params(parent.dense.config, subnet.layers, width)
    if way == "layers":
        assert config.layer_order is not None
        nested = [sorted(config.layer_order[:num]) for num in range(config.num_layers, 0, -1)]
        return _cut(
            parent, next(each for each in nested if _num_params(parent.dense.config, each, neurons) <= most), neurons
        )
    widths = range(neurons, 0, -WIDTH_MULTIPLE)
    return _cut(parent, every, next(each for each in widths if _num_params(parent.dense.config, every, each) <= most))


def _cut_config(dense: ModelConfig, layers: Sequence[int], width: int) -> ModelConfig:
    return extracted_config(dense, dense.full(layers)).replace(dense_intermediate_size=width)


def _num_params(dense: ModelConfig, layers: Sequence[int], width: int) -> int:
    config = _cut_config(dense, layers, width)
    return count(config, config.full()).total_params


def _cut(parent: Parent, layers: Sequence[int], width: int) -> Transformer:
    """The dense network with ``layers`` and the ``width`` strongest neurons of each."""
    state: dict[str, Tensor] = {}
    for name, tensor in parent.dense.state_dict().items():
        if not name.startswith("blocks."):
            state[name] = tensor.clone()
            continue
        _, number, rest = name.split(".", 2)
        layer = int(number)
        if layer not in layers:
            continue
        kept = parent.strengths[layer].topk(width).indices.sort().values
        if rest == "mlp.gate_up.weight":
            tensor = torch.cat([half[kept] for half in tensor.chunk(2)])
        elif rest == "mlp.down.weight":
            tensor = tensor[:, kept]
        state[f"blocks.{layers.index(layer)}.{rest}"] = tensor.clone()
    return load_state(skeleton(_cut_config(parent.dense.config, layers, width)), state.items())
