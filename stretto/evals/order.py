"""Rankings of experts and layers by measurements on text: the order in which they are dropped.

One walk through the layers takes all measurements. It carries the hidden states of all tokens from layer to layer, so each layer's
weights are needed once; `Hold` loads them from disk if the network does not fit in memory. The walk also carries the states of the
networks that lack one layer. This halves the cost of leave-one-out, because the layers before the missing one are shared.

Shape letters: B rows, T positions, N tokens, D hidden, V vocabulary, E experts, K chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn

from stretto.base.errors import UserError
from stretto.evals.loss import NO_TARGETS, EvalBatch, logit_gram, logit_size
from stretto.evals.routing import LayerRouting, Watch
from stretto.model.attention import Geometry
from stretto.model.counts import count
from stretto.model.parallel import ALONE, Ranks
from stretto.model.spec import ModelConfig, droppable_layers, fixed_layers
from stretto.model.transformer import Context, MoeLayer, RowWidths, Transformer
from stretto.ops.grouped import gated_outputs
from stretto.ops.logprob import IGNORED
from stretto.ops.operators import ORDINARY, Operators, Routes
from stretto.ops.shards import is_sharded

Hold = Callable[[str], AbstractContextManager[object]]
"""Context manager that keeps the weights of a part (``embedding``, ``blocks.3``, ``norm``, ``head``) in memory."""
ExpertRule = Literal["removal", "reap", "frequency"]
"""Criterion for ranking experts: order of `removal_order`, saliency (REAP), or load."""
SUPER_QUANTILE, SUPER_SHARE, SUPER_DEPTH, SUPER_TIMES = 0.995, 0.1, 0.75, 10.0
"""Definition of a super expert, without which a network fails (2507.23279; numbers as in REAP's published code). Its largest output
element exceeds the quantile ``SUPER_QUANTILE`` of all experts' peaks, the share ``SUPER_SHARE`` of the largest peak, and ``SUPER_TIMES``
times the median peak, and it is in the first ``SUPER_DEPTH`` of the layers. The median is our addition: among a hundred experts one
always exceeds the quantile, and keeping it for that reason increased the loss."""
CARRIED_BYTES = 1 << 30
"""Largest size of the hidden states carried for leave-one-out (our choice): a few thousand tokens of a large network."""
REMOVAL_TOKENS = 4096
"""Largest number of tokens per layer that `removal_order` uses, over all ranks (our choice)."""
RANKING_TOKENS = 4 * REMOVAL_TOKENS
"""Number of tokens that `rank_experts` carries through the layers at once, over all ranks (our choice)."""
REMOVAL_ELEMENTS = 1 << 26
"""Largest number of fp32 elements in the products [N, E, E] of `removal_order` (our choice)."""


@dataclass(frozen=True, slots=True)
class LayerRanking:
    """Importance of the layers, each measured by leaving it out of the full network."""

    order: tuple[int, ...]
    """Layers from most to least important, as in `ModelConfig.layer_order`."""
    logit_error: dict[int, float]
    """Normalised mean squared error of the final logits without the layer, by droppable layer."""
    flops: int
    """FLOPs of the measurement."""


@dataclass(frozen=True, slots=True)
class ExpertRanking:
    """Importance of the experts of every MoE layer."""

    orders: tuple[tuple[int, ...], ...]
    """Experts of each layer from most to least important, as in `ModelConfig.expert_order`."""
    flops: int
    """FLOPs of the measurement."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Measurements of one walk. Written by `survey`."""

    experts: tuple[LayerRouting, ...]
    """Statistics of every MoE layer; empty without ``watched``."""
    removal: tuple[tuple[int, ...], ...]
    """Result of `removal_order` for every MoE layer; empty without ``removal``."""
    influence: dict[int, float]
    """One minus the mean cosine of the residual stream before and after the layer, by layer (block influence of ShortGPT, 2403.03853)."""
    logit_error: dict[int, float]
    """As in `LayerRanking`; empty without ``left_out``."""
    flops: int
    """FLOPs of the forward passes, counted as in receipts, and of `removal_order`."""


def rank_layers(
    model: Transformer,
    batches: Sequence[EvalBatch],
    advance: Callable[[int], None] = lambda num: None,
    ranks: Ranks = ALONE,
) -> LayerRanking:
    """Rank layers by leave-one-out normalised MSE on the final logits (Nemotron Elastic, 2511.16664).

    ``advance`` and ``ranks``: as of `survey`. The first and last two layers come first, whatever their error.
    Raises `UserError`: the batches contain no target token.
    """
    cut = [piece for batch in batches for piece in pieces(batch, model.config)]
    found = survey(model, cut, left_out=len(cut), watched=False, side_by_side=1, advance=advance, ranks=ranks)
    return LayerRanking(layer_order(model.config, found.logit_error), found.logit_error, found.flops)


def rank_experts(
    model: Transformer,
    batches: Sequence[EvalBatch],
    advance: Callable[[int], None] = lambda num: None,
    ranks: Ranks = ALONE,
) -> ExpertRanking:
    """Rank experts by `removal_order` on evenly spaced ``batches`` of about `RANKING_TOKENS` tokens. ``advance`` and ``ranks``: as of
    `survey`.

    On the text that a network was trained on, the half of the experts that this keeps is better than the half by saliency (REAP); on
    text of another kind both are as good (docs/log/elastic.md).
    """
    num_tokens = ranks.world * sum(batch.ids_BT.numel() for batch in batches)
    found = survey(model, batches[:: max(1, num_tokens // RANKING_TOKENS)], removal=True, advance=advance, ranks=ranks)
    return ExpertRanking(expert_orders(model.config, found, "removal"), found.flops)


def layer_order(config: ModelConfig, worth: Mapping[int, float]) -> tuple[int, ...]:
    """Layers that are never dropped, then the others by decreasing ``worth``."""
    order = sorted(droppable_layers(config), key=lambda layer: (-worth[layer], layer))
    return *fixed_layers(config.num_layers), *order


def expert_orders(config: ModelConfig, found: Survey, rule: ExpertRule) -> tuple[tuple[int, ...], ...]:
    """Experts of each MoE layer from most to least important; super experts come first."""
    above_all = super_experts(config, found.experts)
    orders = []
    for layer in found.experts:
        worth: Sequence[float] = layer.saliency if rule == "reap" else layer.load
        if rule == "removal":
            worth = [-found.removal[layer.row].index(expert) for expert in range(len(layer.load))]
        orders.append(expert_order(worth, above_all[layer.row], config.expert_groups))
    return tuple(orders)


def expert_order(worth: Sequence[float], protected: Collection[int], groups: int = 1) -> tuple[int, ...]:
    """The ``protected`` experts, then the others by decreasing ``worth``.

    With ``groups`` the order takes one expert of each group in turn, so that every multiple of ``groups`` experts has groups of equal size,
    as group-limited routing requires.
    """
    ranking = sorted(range(len(worth)), key=lambda expert: (expert not in protected, -worth[expert], expert))
    size = len(worth) // groups
    members = [[expert for expert in ranking if expert // size == group] for group in range(groups)]
    place = {expert: place for place, expert in enumerate(ranking)}
    return tuple(chain.from_iterable(sorted(turn, key=place.__getitem__) for turn in zip(*members, strict=True)))


def super_experts(config: ModelConfig, layers: Iterable[LayerRouting]) -> dict[int, frozenset[int]]:
    """Super experts of each MoE layer, see `SUPER_QUANTILE`."""
    layers = tuple(layers)
    peaks = torch.tensor([peak for layer in layers for peak in layer.peak], dtype=torch.float64)
    if not len(peaks):
        return {}
    least = float(max(peaks.quantile(SUPER_QUANTILE), SUPER_SHARE * peaks.max(), SUPER_TIMES * peaks.median()))
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
    """State of one batch during the walk."""

    batch: EvalBatch
    geometry: Geometry
    x_BTD: Tensor
    measured: bool
    """Whether the networks without one layer are carried too."""
    without: dict[int, Tensor] = field(default_factory=dict)
    """Residual stream of the network without a layer, by layer."""


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
    ranks: Ranks = ALONE,
) -> Survey:
    """Walk ``batches`` through the full network, in the dtype of its weights or of autocast.

    Args:
        hold: loads the weights of one part at a time; outside of it ``model`` may have no weights.
        left_out: number of batches, from the first, on which every droppable layer is measured by leaving it out.
        watched: record statistics of the experts.
        removal: also compute `removal_order` for each layer.
        side_by_side: number of batches carried at once; None: all, so that every part is loaded once.
        advance: called with 1 after each layer and batch, ``num_layers * len(batches)`` times in total.
        ranks: ranks that measure together. Each calls this with its own rows of every batch, which may be padding, and gets the result
            over all rows. No rank has a part of the experts only (``ep`` is 1).

    Batches of padding alone give a result without meaning and no error.

    Raises:
        UserError: the ``left_out`` batches contain tokens, but no target token.
    """
    assert not removal or side_by_side is None, "removal_order needs all tokens of a layer at once"
    config, sums = model.config, _Sums()
    watch = Watch(config, batches[0].ids_BT.device) if watched and config.num_moe_layers else None
    if is_sharded(sharded := model):
        token = batches[0].ids_BT[:1, :1]
        # FSDP takes the module that runs first for the root, so a block must not run first
        model(token, config.full(), Context.plain(token))
        sharded.unshard()  # parameters outside the blocks; blocks gather their own
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
                block = model.blocks[layer]
                if watch is not None and watch.inputs and isinstance(mlp := block.mlp, MoeLayer):
                    inputs_ND = torch.cat(watch.inputs)
                    with _gathered(block):
                        num_all = int(ranks.sum(torch.tensor(len(inputs_ND), device=inputs_ND.device)))
                        used_ND = inputs_ND[:: _every(num_all, len(mlp.gate))]
                        order = removal_order(mlp, used_ND, ranks) if num_all else config.expert_orders[mlp.row]
                        removed[mlp.row] = order
                        sums.flops += removal_flops(mlp, len(used_ND))
        if left_out > first:
            with hold("norm"), hold("embedding" if model.head is None else "head"):
                _compare(model, [carried for carried in group if carried.measured], sums)
    sums.over(ranks)
    if watch is not None:
        watch.over_ranks(ranks)
    if left_out and sums.num_tokens and not sums.num_compared:
        raise UserError(NO_TARGETS)
    return Survey(
        experts=tuple(watch.noted(row) for row in range(config.num_moe_layers)) if watch is not None else (),
        removal=tuple(removed[row] for row in range(config.num_moe_layers)) if removal and watch is not None else (),
        influence={layer: 1.0 - total / max(1, sums.num_tokens) for layer, total in sums.cosine.items()},
        logit_error={layer: total / (sums.size or 1.0) for layer, total in sums.error.items()},
        flops=sums.flops,
    )


@contextmanager
def _gathered(block: nn.Module) -> Iterator[None]:
    """All weights of ``block`` on this rank, as in its forward pass."""
    if not is_sharded(block):
        yield
        return
    block.unshard()
    yield
    block.reshard()


@dataclass(slots=True)
class _Sums:
    """Sums over batches, and in the end over ranks."""

    num_tokens: int = 0
    num_compared: int = 0
    flops: int = 0
    cosine: dict[int, float] = field(default_factory=dict)
    error: dict[int, float] = field(default_factory=dict)
    size: float = 0.0

    def over(self, ranks: Ranks) -> None:
        """Replace the sums by those over all ranks, which have measured the same layers."""
        counts = torch.tensor([self.num_tokens, self.num_compared, self.flops], device=ranks.device)
        self.num_tokens, self.num_compared, self.flops = ranks.sum(counts).tolist()
        values = [self.size, *self.cosine.values(), *self.error.values()]
        self.size, *values = ranks.sum(torch.tensor(values, dtype=torch.float64, device=ranks.device)).tolist()
        self.cosine = dict(zip(self.cosine, values[: len(self.cosine)], strict=True))
        self.error = dict(zip(self.error, values[len(self.cosine) :], strict=True))


def _through(model: Transformer, layer: int, carried: _Carried, watch: Watch | None, sums: _Sums) -> None:
    """Carry a batch through ``layer``, in the full network and in the networks without an earlier layer."""
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
    """Forward FLOPs of one layer. Attention is counted as if every row were one document, as in training."""
    head = 2 * num_tokens * config.vocab_size * config.hidden_size
    return count(config, config.full([layer])).forward_flops(num_tokens, length) - head


def _compare(model: Transformer, group: Sequence[_Carried], sums: _Sums) -> None:
    """Compare the final logits of the networks without one layer with the full network's."""
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
    """``batch`` in groups of rows, at least one row each, for which leave-one-out stays within `CARRIED_BYTES`. The groups are the same
    on all ranks, because their batches have the same shape.
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
    """The ordinary operators with given router logits."""

    def __init__(self, logits_NE: Tensor) -> None:
        self._logits_NE = logits_NE

    def router_logits(self, x_ND: Tensor, gate_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
        return self._logits_NE


def _routes(layer: MoeLayer, logits_NE: Tensor, allowed_NE: Tensor) -> Routes:
    """Choices of the router of ``layer`` among the experts that each token may use."""
    num = len(logits_NE)
    branch_N = torch.zeros(num, dtype=torch.int64, device=logits_NE.device)
    widths = RowWidths(branch_N, allowed_NE[:, layer.rank_E.argsort()], torch.zeros_like(branch_N, dtype=torch.bool))
    top_k = layer.config.top_k_by_layer[layer.row]
    return layer.route(logits_NE.unsqueeze(1), logits_NE.shape[1], top_k, widths, _Scored(logits_NE))[0]


def _products(layer: MoeLayer, x_ND: Tensor) -> Tensor:
    """Scalar products of all experts' outputs for each token [N, E, E], fp32."""
    num_experts = len(layer.gate)
    chosen_E = torch.arange(num_experts, device=x_ND.device)
    products: list[Tensor] = []
    for part_ND in x_ND.split(max(1, REMOVAL_ELEMENTS // (8 * num_experts * x_ND.shape[1]))):
        num = len(part_ND)
        all_NE, ones_NE = chosen_E.expand(num, -1), torch.ones(num, num_experts, device=x_ND.device)
        y_NED = gated_outputs(part_ND, all_NE, ones_NE, layer.experts).float()
        products.append(y_NED @ y_NED.transpose(1, 2))
    return torch.cat(products)


def _every(num_tokens: int, num_experts: int) -> int:
    """Stride with which `removal_order` takes the tokens of a layer, so that `REMOVAL_TOKENS` and `REMOVAL_ELEMENTS` suffice."""
    return max(1, -(-num_tokens // max(1, min(REMOVAL_TOKENS, REMOVAL_ELEMENTS // num_experts**2))))


def removal_flops(layer: MoeLayer, num_tokens: int) -> int:
    """FLOPs of `removal_order` for ``num_tokens`` inputs: every expert's output for each, and their products."""
    num_experts, hidden = layer.gate.shape
    return 2 * num_tokens * (layer.gate_up.numel() + layer.down.numel() + num_experts**2 * hidden)


def removal_order(layer: MoeLayer, x_ND: Tensor, ranks: Ranks = ALONE) -> tuple[int, ...]:
    """Experts of ``layer`` in the reverse order of a greedy removal. Each step removes the expert whose absence changes the layer's output
    least (mean squared norm of the change), given the experts that were removed before.

    Unlike a score of each expert alone, this includes the reaction of the router: the next best expert is chosen, and gates are
    renormalised. Changes for tokens that did not choose the expert are ignored, although a softmax without renormalisation raises
    their gates, and another group may be chosen. Groups lose one expert each in turn.

    Args:
        x_ND: inputs of the layer.
        ranks: as of `survey`. Each has its own inputs, or none. The changes that a removal makes are summed over the ranks.
    """
    config, num_experts = layer.config, len(layer.gate)
    top_k = config.top_k_by_layer[layer.row]
    logits_NE, products_NEE = ORDINARY.router_logits(x_ND, layer.gate, layer.gate_bias), _products(layer, x_ND)
    kept_E = torch.ones(num_experts, dtype=torch.bool, device=x_ND.device)
    full = _routes(layer, logits_NE, kept_E.expand_as(logits_NE))

    def choose(rows_N: Tensor, allowed_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Choices [N, K] of the tokens ``rows_N``, and the squared change of their outputs."""
        routes = _routes(layer, logits_NE[rows_N], allowed_NE)
        ids_NS = torch.cat((routes.chosen_NK, full.chosen_NK[rows_N]), dim=1)  # the output now minus the full layer's
        signed_NS = torch.cat((routes.gates_NK, -full.gates_NK[rows_N]), dim=1)
        products_NSS = products_NEE[rows_N[:, None, None], ids_NS[:, :, None], ids_NS[:, None, :]]
        return routes.chosen_NK, torch.einsum("ns,nst,nt->n", signed_NS, products_NSS, signed_NS).double()

    chosen_NK = torch.zeros(len(x_ND), top_k, dtype=torch.int64, device=x_ND.device)
    rise_NK = torch.zeros(len(x_ND), top_k, dtype=torch.float64, device=x_ND.device)
    used_NKE = torch.zeros(len(x_ND), top_k, num_experts, dtype=torch.bool, device=x_ND.device)
    # with a shared sum or group scores, a removal may change tokens that did not choose the expert
    is_shared = (config.router == "softmax" and not config.normalize_gates) or config.expert_groups > 1
    stale_N, gone = torch.ones(len(x_ND), dtype=torch.bool, device=x_ND.device), list[int]()
    while num_experts - len(gone) > config.holding(0, top_k):
        rows_N = stale_N.nonzero().squeeze(1)  # tokens that the last removal affected
        allowed_NE = kept_E.expand(len(rows_N), -1)
        chosen_NK[rows_N], before_N = choose(rows_N, allowed_NE)
        for slot in range(top_k):
            own_N1 = chosen_NK[rows_N, slot : slot + 1]
            others_NK, after_N = choose(rows_N, allowed_NE.scatter(1, own_N1, False))
            rise_NK[rows_N, slot] = after_N - before_N
            used_NKE[rows_N, slot] = torch.zeros_like(allowed_NE).scatter(1, others_NK, True).scatter(1, own_N1, True)
        rise_E = torch.zeros(num_experts, dtype=torch.float64, device=x_ND.device)
        rise_E = ranks.sum(rise_E.index_add_(0, chosen_NK.flatten(), rise_NK.flatten()))
        left_M = kept_E.view(config.expert_groups, -1).sum(1)
        turn_E = (left_M == left_M.max()).repeat_interleave(num_experts // config.expert_groups)
        least = int(rise_E.masked_fill(~(kept_E & turn_E), torch.inf).argmin())
        gone.append(least)
        kept_E[least] = False
        stale_N = used_NKE[:, :, least].any(1) | is_shared
    load_E = ranks.sum(torch.bincount(chosen_NK.flatten(), minlength=num_experts))
    last = sorted(kept_E.nonzero().flatten().tolist(), key=lambda expert: (-int(load_E[expert]), expert))
    return (*last, *reversed(gone))
