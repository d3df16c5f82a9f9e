"""Rankings of experts and layers by measurements on text: the order in which they are dropped.

One walk through the layers measures all of it. The hidden states of all tokens are carried from layer to layer, so each
layer's weights are needed once: `Hold` brings them from disk where a network does not fit in memory. Carrying also the
states of the networks that lack one layer makes leave-one-out half as dear as a pass for every layer: what comes before
the missing layer is shared.

Shape letters: B rows, T positions, N tokens, D hidden, V vocabulary, E experts, K chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from stretto.base.errors import UserError
from stretto.evals.loss import EvalBatch, logit_gram, logit_size
from stretto.evals.routing import LayerRouting, Watch
from stretto.model.attention import Geometry
from stretto.model.spec import ModelConfig, count, droppable_layers, fixed_layers
from stretto.model.transformer import Context, MoeLayer, RowWidths, Transformer
from stretto.ops.grouped import Slots, experts
from stretto.ops.logprob import IGNORED
from stretto.ops.operators import ORDINARY, Operators, Routes

Hold = Callable[[str], AbstractContextManager[object]]
"""Holds the weights of a part (``embedding``, ``blocks.3``, ``norm``, ``head``) in memory while it is open."""
ExpertRule = Literal["removal", "reap", "frequency"]
"""How experts are compared: see `expert_order`."""
SUPER_QUANTILE, SUPER_SHARE, SUPER_DEPTH, SUPER_TIMES = 0.995, 0.1, 0.75, 10.0
"""A super expert writes an element above this quantile of all experts' largest and above this share of the largest of all, in
the leading share of the layers (2507.23279; numbers as in REAP's published code), and above so many times their median (ours: of
a hundred experts one is always above the quantile, and keeping it for that cost more than it saved). Losing one wrecks a network."""
CARRIED_BYTES = 1 << 30
"""Hidden states carried at once for leave-one-out (ours): with every layer's variant, a few thousand tokens of a large network."""
REMOVAL_TOKENS = 4096
"""That `removal_order` looks at in a layer, at most (ours)."""
REMOVAL_ELEMENTS = 1 << 26
"""Of the products of experts' outputs, [N, E, E], that `removal_order` holds in fp32 (ours)."""


@dataclass(frozen=True, slots=True)
class LayerRanking:
    """Importance of the layers, each measured by leaving it out of the full network."""

    order: tuple[int, ...]
    """Layers from first kept to first dropped: fits `ModelConfig.layer_order`."""
    logit_error: dict[int, float]
    """By layer that may be dropped: normalised mean squared error of the final logits without it."""
    flops: int
    """What measuring it cost."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What one walk found; written by `survey`."""

    experts: tuple[LayerRouting, ...]
    """By MoE row; empty where experts were not watched."""
    removal: tuple[tuple[int, ...], ...]
    """By MoE row, as `removal_order` gives it; empty where it was not asked for."""
    influence: dict[int, float]
    """By layer: one minus the mean cosine of the residual stream before and after it (ShortGPT's block influence, 2403.03853)."""
    logit_error: dict[int, float]
    """As in `LayerRanking`; empty where no batch was left for it."""
    flops: int
    """Of the forward passes, as a receipt counts them, and of `removal_order`."""


def rank_layers(model: Transformer, batches: Sequence[EvalBatch]) -> LayerRanking:
    """Rank layers by leave-one-out normalised MSE on the final logits (Nemotron Elastic, 2511.16664).

    The first and last two layers come first, whatever their error. Raises `UserError`: no token of the batches carries a loss.
    """
    cut = [piece for batch in batches for piece in pieces(batch, model.config)]
    found = survey(model, cut, left_out=len(cut), watched=False, side_by_side=1)
    return LayerRanking(layer_order(model.config, found.logit_error), found.logit_error, found.flops)


def rank_experts(model: Transformer, batches: Sequence[EvalBatch]) -> tuple[tuple[int, ...], ...]:
    """Per MoE layer, experts from the most to the least salient (REAP): fits `ModelConfig.expert_order`."""
    return expert_orders(model.config, survey(model, batches, side_by_side=1), "reap")


def layer_order(config: ModelConfig, worth: Mapping[int, float]) -> tuple[int, ...]:
    """Layers by falling ``worth``, after those that are never dropped."""
    return (
        *fixed_layers(config.num_layers),
        *sorted(droppable_layers(config), key=lambda layer: (-worth[layer], layer)),
    )


def expert_orders(config: ModelConfig, found: Survey, rule: ExpertRule) -> tuple[tuple[int, ...], ...]:
    """Per MoE layer, experts from first kept to first dropped, super experts before all others."""
    above_all = super_experts(config, found.experts)
    return tuple(
        expert_order(_worth(found, layer, rule), above_all[layer.row], config.expert_groups) for layer in found.experts
    )


def _worth(found: Survey, layer: LayerRouting, rule: ExpertRule) -> Sequence[float]:
    """Of each expert.

    ``reap`` takes the saliency, ``removal`` `removal_order`, ``frequency`` the load.
    """
    if rule == "removal":
        order = found.removal[layer.row]
        return [-order.index(expert) for expert in range(len(order))]
    return layer.saliency if rule == "reap" else layer.load


def expert_order(worth: Sequence[float], protected: Collection[int], groups: int = 1) -> tuple[int, ...]:
    """Experts by falling ``worth``, those ``protected`` first.

    With ``groups`` the order takes one expert of every group in turn, so that each multiple of them is a network of equal
    groups, as group-routed networks must be.
    """
    ranking = sorted(range(len(worth)), key=lambda expert: (expert not in protected, -worth[expert], expert))
    size = len(worth) // groups
    members = [[expert for expert in ranking if expert // size == group] for group in range(groups)]
    place = {expert: place for place, expert in enumerate(ranking)}
    return tuple(chain.from_iterable(sorted(turn, key=place.__getitem__) for turn in zip(*members, strict=True)))


def super_experts(config: ModelConfig, layers: Iterable[LayerRouting]) -> dict[int, frozenset[int]]:
    """By MoE row, the experts that are kept before all others: see `SUPER_QUANTILE`."""
    layers = tuple(layers)
    peaks = torch.tensor([peak for layer in layers for peak in layer.peak], dtype=torch.float64)
    if not len(peaks):
        return {}
    least = max(
        float(peaks.quantile(SUPER_QUANTILE)), SUPER_SHARE * float(peaks.max()), SUPER_TIMES * float(peaks.median())
    )
    early = int(SUPER_DEPTH * config.num_layers)
    return {
        layer.row: frozenset(
            expert for expert, peak in enumerate(layer.peak) if peak > least and config.moe_layers[layer.row] < early
        )
        for layer in layers
    }


# --- the walk ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Carried:
    """One batch on its way through the layers."""

    batch: EvalBatch
    geometry: Geometry
    x_BTD: Tensor
    measured: bool
    """Whether the networks that lack one layer are carried too."""
    without: dict[int, Tensor] = field(default_factory=dict)
    """By layer left out: the residual stream of that network."""


@torch.no_grad()
def survey(
    model: Transformer,
    batches: Sequence[EvalBatch],
    *,
    hold: Hold = lambda part: nullcontext(),
    left_out: int = 0,
    watched: bool = True,
    removal: bool = False,
    side_by_side: int | None = None,
    advance: Callable[[int], None] = lambda num: None,
) -> Survey:
    """Walk ``batches`` through the full network, in the dtype of its weights or the one that autocast says.

    Args:
        hold: brings in the weights of one part at a time; ``model`` may have none otherwise.
        left_out: so many of the batches, from the first, measure every layer that may be dropped by leaving it out.
        watched: note what experts are given and write.
        removal: and compute `removal_order` for each layer, on as many of the tokens as its memory allows.
        side_by_side: batches carried at once; None: all, so that every part is held once.
        advance: called with 1 after each layer and batch, ``num_layers * len(batches)`` times in all.

    Raises:
        UserError: ``left_out`` batches of which no token carries a loss.
    """
    assert not removal or side_by_side is None, "experts are removed on all tokens at once"
    config, sums = model.config, _Sums()
    watch = Watch(config, batches[0].ids_BT.device) if watched and config.num_moe_layers else None
    if isinstance(model, FSDPModule):
        token = batches[0].ids_BT[:1, :1]
        # FSDP takes for the whole what runs first: it must not be a block
        model(token, config.full(), Context.plain(token))
        model.unshard()  # what lies outside the blocks; those gather their own
    step = side_by_side or len(batches)
    removed: dict[int, tuple[int, ...]] = {}
    for first in range(0, len(batches), step):
        with hold("embedding"):
            group = [
                _Carried(batch, model.geometry(batch.ctx), model.embedding(batch.ids_BT), first + place < left_out)
                for place, batch in enumerate(batches[first : first + step])
            ]
        for layer in range(config.num_layers):
            if watch is not None and removal:
                watch.inputs = []
            with hold(f"blocks.{layer}"):
                for carried in group:
                    _through(model, layer, carried, watch, sums)
                    advance(1)
                mlp = model.blocks[layer].mlp
                if watch is not None and watch.inputs and isinstance(mlp, MoeLayer):
                    inputs_ND = torch.cat(watch.inputs)
                    removed[mlp.row] = removal_order(mlp, inputs_ND)
                    sums.flops += removal_flops(mlp, len(inputs_ND))
        if left_out > first:
            with hold("norm"), hold("embedding" if model.head is None else "head"):
                _compare(model, [carried for carried in group if carried.measured], sums)
    if left_out and not sums.num_compared:
        raise UserError("held-out data: no token carries a loss; give longer documents or more of them")
    return Survey(
        experts=tuple(watch.noted(row) for row in range(config.num_moe_layers)) if watch is not None else (),
        removal=tuple(removed[row] for row in range(config.num_moe_layers)) if removal and watch is not None else (),
        influence={layer: 1.0 - total / sums.num_tokens for layer, total in sums.cosine.items()},
        logit_error={layer: total / sums.size for layer, total in sums.error.items()},
        flops=sums.flops,
    )


@dataclass(slots=True)
class _Sums:
    """What adds up over batches."""

    num_tokens: int = 0
    num_compared: int = 0
    flops: int = 0
    cosine: dict[int, float] = field(default_factory=dict)
    error: dict[int, float] = field(default_factory=dict)
    size: float = 0.0


def _through(model: Transformer, layer: int, carried: _Carried, watch: Watch | None, sums: _Sums) -> None:
    """Carry a batch, and the networks that lack an earlier layer, through ``layer``."""
    config, batch = model.config, carried.batch
    block, geometry = model.blocks[layer], carried.geometry
    alone = config.full([layer])
    sizes = (alone.experts[0], alone.top_k[0]) if alone.experts else (0, 0)
    for left, x_BTD in carried.without.items():
        carried.without[left] = block(x_BTD, geometry, *sizes, batch.ctx)[0]
    ctx = batch.ctx if watch is None else watch.over(batch)
    x_BTD, y_BTD = carried.x_BTD, block(carried.x_BTD, geometry, *sizes, ctx)[0]
    real_BT = batch.real_BT
    cosine_N = torch.cosine_similarity(x_BTD[real_BT].float(), y_BTD[real_BT].float(), dim=-1)
    sums.cosine[layer] = sums.cosine.get(layer, 0.0) + float(cosine_N.double().sum())
    sums.num_tokens += len(cosine_N) if layer == 0 else 0
    num_rows, length = batch.ids_BT.shape
    sums.flops += (1 + len(carried.without)) * _layer_flops(config, layer, num_rows * length, length)
    if carried.measured and layer in droppable_layers(config):
        carried.without[layer] = x_BTD
    carried.x_BTD = y_BTD


def _layer_flops(config: ModelConfig, layer: int, num_tokens: int, length: int) -> int:
    """Forward FLOPs of one layer by itself; like the trainer, masked attention computes every score."""
    head = 2 * num_tokens * config.vocab_size * config.hidden_size
    return count(config, config.full([layer])).forward_flops(num_tokens, length) - head


def _compare(model: Transformer, group: Sequence[_Carried], sums: _Sums) -> None:
    """Final logits of the networks that lack a layer against the full network's."""
    gram_DD = logit_gram(model.head_VD.detach())
    for carried in group:
        kept_BT = carried.batch.targets_BT != IGNORED
        full_ND = model.norm(carried.x_BTD)[kept_BT]
        sums.num_compared += len(full_ND)
        sums.size += logit_size(full_ND, gram_DD)
        for layer, x_BTD in carried.without.items():
            error = logit_size(model.norm(x_BTD)[kept_BT] - full_ND, gram_DD)
            sums.error[layer] = sums.error.get(layer, 0.0) + error


def pieces(batch: EvalBatch, config: ModelConfig) -> list[EvalBatch]:
    """``batch`` in groups of rows for which leave-one-out stays within `CARRIED_BYTES`, a row at least; the same for all ranks,
    whose batches have one shape.
    """
    num_rows, length = batch.ids_BT.shape
    variants = 1 + len(droppable_layers(config))
    rows = max(1, CARRIED_BYTES // (variants * length * config.hidden_size * torch.float32.itemsize))
    if rows >= num_rows:
        return [batch]

    def cut(tensor: Tensor | None, first: int) -> Tensor | None:
        return None if tensor is None else tensor[first : first + rows]

    cut_up = []
    for first in range(0, num_rows, rows):
        ctx = replace(
            batch.ctx,
            positions_BT=batch.ctx.positions_BT[first : first + rows],
            documents_BT=cut(batch.ctx.documents_BT, first),
            shared_BT2=cut(batch.ctx.shared_BT2, first),
        )
        cut_up.append(EvalBatch(batch.ids_BT[first : first + rows], batch.targets_BT[first : first + rows], ctx))
    return cut_up


# --- removal ----------------------------------------------------------------------------------------------------------


class _Scored(Operators):
    """The ordinary operators, for tokens whose router logits are known."""

    def __init__(self, logits_NE: Tensor) -> None:
        self._logits_NE = logits_NE

    def router_logits(self, x_ND: Tensor, gate_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
        return self._logits_NE


def _routes(layer: MoeLayer, logits_NE: Tensor, allowed_NE: Tensor) -> Routes:
    """What the router of ``layer`` chooses among the experts that each token may use."""
    num = len(logits_NE)
    branch_N = torch.zeros(num, dtype=torch.int64, device=logits_NE.device)
    widths = RowWidths(branch_N, allowed_NE[:, layer.rank_E.argsort()], torch.zeros_like(branch_N, dtype=torch.bool))
    top_k = layer.config.top_k_by_layer[layer.row]
    return layer.route(logits_NE.unsqueeze(1), logits_NE.shape[1], top_k, widths, _Scored(logits_NE))[0]


def _products(layer: MoeLayer, x_ND: Tensor) -> Tensor:
    """Scalar products of all experts' outputs for each token [N, E, E], fp32."""
    num_experts = len(layer.gate)
    chosen_E = torch.arange(num_experts, device=x_ND.device)
    made: list[Tensor] = []
    for part_ND in x_ND.split(max(1, REMOVAL_ELEMENTS // (8 * num_experts * x_ND.shape[1]))):
        num = len(part_ND)

        def note(slots: Slots, y_PD: Tensor, num: int = num) -> None:
            y_NED = y_PD.float()[slots.place_S].view(num, num_experts, -1)
            made.append(y_NED @ y_NED.transpose(1, 2))

        all_NE, ones_NE = chosen_E.expand(num, -1), torch.ones(num, num_experts, device=x_ND.device)
        experts(part_ND, all_NE, ones_NE, layer.experts, note)
    return torch.cat(made)


def _every(num_tokens: int, num_experts: int) -> int:
    """Of so many tokens, `removal_order` looks at one in this many."""
    most = max(1, min(REMOVAL_TOKENS, REMOVAL_ELEMENTS // num_experts**2))
    return -(-num_tokens // most)


def removal_flops(layer: MoeLayer, num_tokens: int) -> int:
    """Of `removal_order` for so many inputs: every expert's output for those it looks at, and their products."""
    num_experts, hidden = layer.gate.shape
    looked_at = -(-num_tokens // _every(num_tokens, num_experts))
    return 2 * looked_at * (layer.gate_up.numel() + layer.down.numel() + num_experts**2 * hidden)


def removal_order(layer: MoeLayer, x_ND: Tensor) -> tuple[int, ...]:
    """Experts of ``layer`` in the reverse of the order in which they are taken away, one at a time: always the one whose absence
    changes the layer's output least (squared length of the change, mean over tokens), given those that are gone.

    Unlike a score of each expert alone it sees what the router does then: the next best expert steps in, and gates are
    renormalised. What an absence changes for tokens that did not choose the expert is not weighed: under a softmax whose gates are
    not renormalised it raises theirs, and a group may be chosen for an expert that is not. Groups lose an expert each in turn.
    ``x_ND`` are inputs of the layer; of more than `REMOVAL_TOKENS`, or than `REMOVAL_ELEMENTS` allow, as many are taken, evenly
    spaced.
    """
    config, num_experts = layer.config, len(layer.gate)
    x_ND = x_ND[:: _every(len(x_ND), num_experts)]
    top_k = config.top_k_by_layer[layer.row]
    logits_NE, products_NEE = ORDINARY.router_logits(x_ND, layer.gate, layer.gate_bias), _products(layer, x_ND)
    kept_E = torch.ones(num_experts, dtype=torch.bool, device=x_ND.device)
    whole = _routes(layer, logits_NE, kept_E.expand_as(logits_NE))

    def choose(rows_N: Tensor, allowed_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Choices [N, K] of the tokens ``rows_N``, and the squared change of their outputs."""
        routes = _routes(layer, logits_NE[rows_N], allowed_NE)
        ids_NS = torch.cat((routes.chosen_NK, whole.chosen_NK[rows_N]), dim=1)  # what is written now, and what was
        signed_NS = torch.cat((routes.gates_NK, -whole.gates_NK[rows_N]), dim=1)
        products_NSS = products_NEE[rows_N[:, None, None], ids_NS[:, :, None], ids_NS[:, None, :]]
        return routes.chosen_NK, torch.einsum("ns,nst,nt->n", signed_NS, products_NSS, signed_NS).double()

    chosen_NK = torch.zeros(len(x_ND), top_k, dtype=torch.int64, device=x_ND.device)
    rise_NK = torch.zeros(len(x_ND), top_k, dtype=torch.float64, device=x_ND.device)
    used_NKE = torch.zeros(len(x_ND), top_k, num_experts, dtype=torch.bool, device=x_ND.device)
    # all kept experts share one sum, or lift their group's score: who is chosen does not tell whom an absence touches
    is_shared = (config.router == "softmax" and not config.normalize_gates) or config.expert_groups > 1
    stale_N, gone = torch.ones(len(x_ND), dtype=torch.bool, device=x_ND.device), list[int]()
    while num_experts - len(gone) > config.holding(0, top_k):
        rows_N = stale_N.nonzero().squeeze(1)  # tokens that the last removal changed anything for
        allowed_NE = kept_E.expand(len(rows_N), -1)
        chosen_NK[rows_N], before_N = choose(rows_N, allowed_NE)
        for slot in range(top_k):
            own_N1 = chosen_NK[rows_N, slot : slot + 1]
            others_NK, after_N = choose(rows_N, allowed_NE.scatter(1, own_N1, False))
            rise_NK[rows_N, slot] = after_N - before_N
            used_NKE[rows_N, slot] = torch.zeros_like(allowed_NE).scatter(1, others_NK, True).scatter(1, own_N1, True)
        rise_E = torch.zeros(num_experts, dtype=torch.float64, device=x_ND.device)
        rise_E.index_add_(0, chosen_NK.flatten(), rise_NK.flatten())
        left_M = kept_E.view(config.expert_groups, -1).sum(1)
        turn_E = (left_M == left_M.max()).repeat_interleave(num_experts // config.expert_groups)
        least = int(rise_E.masked_fill(~(kept_E & turn_E), torch.inf).argmin())
        gone.append(least)
        kept_E[least] = False
        stale_N = used_NKE[:, :, least].any(1) | is_shared
    load_E = torch.bincount(chosen_NK.flatten(), minlength=num_experts)
    last = sorted(kept_E.nonzero().flatten().tolist(), key=lambda expert: (-int(load_E[expert]), expert))
    return (*last, *reversed(gone))
