"""Plans for splitting the feed-forward networks of a dense model into experts, from the activity of their neurons on text.

A plan divides the neurons of a layer into shared ones and clusters, and fits a linear router (`stretto.model.upcycle` applies it).

Shape letters: N tokens, D hidden, W neurons of a feed-forward network, F = 2·W, I neurons of a part, E routed parts (or clusters),
M members to be clustered, X features of a member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import cycle
from typing import TypeVar

import scipy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.base.errors import UserError
from stretto.evals.loss import EvalBatch
from stretto.evals.order import Hold, survey
from stretto.model.spec import interleaved_order
from stretto.model.transformer import SwiGlu, Transformer
from stretto.model.upcycle import ROUTER_SCALE, LayerPlan, Upcycling
from stretto.ops.operators import ORDINARY

T = TypeVar("T")

FEATURE_TOKENS = 4096
"""Largest number of tokens on which neurons are compared, or that are clustered themselves (our choice)."""
TOKENS_AT_ONCE = 1024
"""Number of tokens whose neuron activations are in memory at once."""
TIERS = 2
"""Number of tiers by output energy into which routed neurons are divided before clustering (our choice). Activations of SwiGLU networks are
hardly sparse, so clusters over all neurons would mix strong and weak ones; routers then performed worse than with an order by strength."""
ASSIGNED_AT_ONCE = 336
"""Number of members in one assignment problem (our choice); its cost is cubic."""
ROUNDS = 6
"""Number of k-means rounds (our choice); later rounds move about 1 % of the members."""
RIDGE = 0.01
"""Ridge penalty of the router's regression, as a share of the inputs' mean square (our choice)."""


@torch.no_grad()
def plan_network(
    model: Transformer,
    batches: Sequence[EvalBatch],
    how: Upcycling,
    *,
    hold: Hold = lambda part: nullcontext(),
    advance: Callable[[int], None] = lambda num: None,
) -> list[LayerPlan]:
    """The plan of every layer of the dense ``model``, from the inputs of its feed-forward networks on ``batches``.

    Activations are computed in the dtype of autocast, clusters and routers in fp32. ``hold`` and ``advance``: as of
    `stretto.evals.order.survey`. Raises `UserError`: fewer tokens than a router has inputs.
    """
    num_tokens = sum(int(batch.real_BT.sum()) for batch in batches)
    if num_tokens < model.config.hidden_size:
        raise UserError(
            f"--calibration: {num_tokens:,} tokens are fewer than the {model.config.hidden_size:,} inputs of a router; "
            "raise --calibration-tokens, or give more text"
        )

    def plan(layer: int, mlp: SwiGlu, x_ND: Tensor) -> LayerPlan:
        return plan_layer(layer, mlp.gate_up.weight, mlp.down.weight, x_ND, how)

    return each_layer(model, batches, plan, hold=hold, advance=advance)


def each_layer(
    model: Transformer,
    batches: Sequence[EvalBatch],
    find: Callable[[int, SwiGlu, Tensor], T],
    *,
    hold: Hold = lambda part: nullcontext(),
    advance: Callable[[int], None] = lambda num: None,
) -> list[T]:
    """Results of ``find`` for each layer of the dense ``model``. ``find`` gets the layer's index, its feed-forward network, and the inputs
    [N, D] of that network on ``batches`` without padding, while the layer's weights are in memory.
    """
    found: dict[int, T] = {}

    @contextmanager
    def watched(part: str) -> Iterator[None]:
        with hold(part):
            name, _, layer = part.partition(".")
            if name != "blocks":
                yield
                return
            mlp, inputs, masks = model.blocks[int(layer)].mlp, list[Tensor](), cycle(batch.real_BT for batch in batches)
            assert isinstance(mlp, SwiGlu), f"layer {layer} is not dense"

            def note(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
                inputs.append(arguments[0][next(masks)])

            hook = mlp.register_forward_pre_hook(note)
            try:
                yield
            finally:
                hook.remove()
            found[int(layer)] = find(int(layer), mlp, torch.cat(inputs))

    survey(model, batches, hold=watched, watched=False, advance=advance)
    return [found[layer] for layer in range(model.config.num_layers)]


def plan_layer(layer: int, gate_up_FD: Tensor, down_DW: Tensor, x_ND: Tensor | None, how: Upcycling) -> LayerPlan:
    """The plan of one layer from its weights and, if available, its inputs ``x_ND`` on text; any float dtype.

    Without inputs, neurons are divided by their weights and the router prefers the same experts for every token; the router of copies is
    random. Raises `UserError`: weights or inputs are not finite.
    """
    if not all(each.isfinite().all() for each in (gate_up_FD, down_DW, x_ND) if each is not None):
        raise UserError(
            f"layer {layer}: its feed-forward network or that network's inputs hold numbers that are not finite; download the checkpoint again"
        )
    generator = torch.Generator().manual_seed(how.seed * 65_537 + layer)
    gate_up_FD, down_DW = gate_up_FD.float(), down_DW.float()
    if how.method == "copy":
        return _plan_copies(len(gate_up_FD[0]), x_ND, how, generator)
    energy_W, features_WX = _of_weights(gate_up_FD, down_DW) if x_ND is None else activity(gate_up_FD, down_DW, x_ND)
    size = len(energy_W) // how.experts
    order_W = energy_W.argsort(descending=True, stable=True)
    shared, rest = order_W.split((how.num_shared * size, how.num_routed * size))
    parts: list[Tensor] = []
    for tier in rest.split(-(-how.num_routed // TIERS) * size):
        num = len(tier) // size
        cluster = balanced_clusters(features_WX[tier], num, generator)
        parts += [tier[cluster == number].sort().values for number in range(num)]
    parts.sort(key=lambda part: -float(energy_W[part].sum()))
    parts_EI = torch.stack([parts[rank] for rank in _ranks(how.num_routed)])
    neurons_W = torch.cat((shared.sort().values, parts_EI.flatten()))
    if x_ND is None:
        place_E = torch.tensor(_ranks(how.num_routed), dtype=torch.float32)
        return LayerPlan(neurons_W, torch.zeros(how.num_routed, len(gate_up_FD[0])), -ROUTER_SCALE * place_E)
    parts_ND = x_ND.split(TOKENS_AT_ONCE)
    shares_NE = torch.cat([_shares(gate_up_FD, down_DW, part_ND.float(), parts_EI) for part_ND in parts_ND])
    return LayerPlan(neurons_W, *fit_router(x_ND, shares_NE, ROUTER_SCALE))


def _ranks(num_experts: int) -> list[int]:
    """Rank of each expert in the network's nested order."""
    order = interleaved_order(num_experts)
    return sorted(range(num_experts), key=order.__getitem__)


def _plan_copies(hidden: int, x_ND: Tensor | None, how: Upcycling, generator: torch.Generator) -> LayerPlan:
    """Plan of a layer whose experts are equal copies: the router sends similar tokens to the same copy, equally many to each."""
    if x_ND is None:
        gate_ED = 0.5 / hidden**0.5 * torch.randn(how.experts, hidden, generator=generator)
        return LayerPlan(None, gate_ED, torch.zeros(how.experts))
    x_ND = _spaced(x_ND).float()
    x_ND = x_ND[: len(x_ND) // how.experts * how.experts]
    alike_ND = F.normalize(x_ND - x_ND.mean(0), dim=1)
    cluster_N = balanced_clusters(alike_ND, how.experts, generator)
    return LayerPlan(None, *fit_router(x_ND, F.one_hot(cluster_N, how.experts).float(), 1.0))


def _spaced(x_ND: Tensor) -> Tensor:
    """At most `FEATURE_TOKENS` rows, evenly spaced."""
    return x_ND[:: -(-len(x_ND) // FEATURE_TOKENS)]


def activity(gate_up_FD: Tensor, down_DW: Tensor, x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Energy of each neuron (mean squared share in the layer's output) [W], and unit vectors of its shares over tokens [W, N]."""
    length_D = down_DW.norm(dim=0)
    shares_WN = torch.cat(
        [
            F.normalize(ORDINARY.swiglu(part_ND.float() @ gate_up_FD.T).float().abs_() * length_D, dim=1).T
            for part_ND in _spaced(x_ND).split(TOKENS_AT_ONCE)
        ],
        dim=1,
    )
    return shares_WN.square().mean(1), F.normalize(shares_WN, dim=1)


def _of_weights(gate_up_FD: Tensor, down_DW: Tensor) -> tuple[Tensor, Tensor]:
    """As `activity`, estimated from weights: squared product of a neuron's norms [W], and its unit gate vectors [W, D] (2110.01786)."""
    gate_WD, up_WD = gate_up_FD.chunk(2)
    energy_W = (gate_WD.norm(dim=1) * up_WD.norm(dim=1) * down_DW.norm(dim=0)).square()
    return energy_W, F.normalize(gate_WD, dim=1)


def _shares(gate_up_FD: Tensor, down_DW: Tensor, x_ND: Tensor, parts_EI: Tensor) -> Tensor:
    """Norm of each part's output as a share of all parts' [N, E]; squares sum to 1."""
    inner_NW = ORDINARY.swiglu(x_ND @ gate_up_FD.T)
    norms = [(inner_NW[:, part] @ down_DW[:, part].T).float().norm(dim=1) for part in parts_EI]
    return F.normalize(torch.stack(norms, 1), dim=1)


@torch.autocast("cpu", enabled=False)
def balanced_clusters(features_MX: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """k-means with ``num`` clusters of equal size: cluster of each member [M], int64. ``num`` divides M.

    Members are assigned in random groups of a few hundred, equally many to every cluster, by a linear assignment that minimises the
    squared distances to the centres.
    """
    members = len(features_MX)
    assert members % num == 0, f"{members} members do not make {num} equal clusters"
    at_once = num * max(1, ASSIGNED_AT_ONCE // num)
    centres_EX = features_MX[torch.randperm(members, generator=generator)[:num]]
    cluster_M = torch.zeros(members, dtype=torch.int64)
    for _ in range(ROUNDS):
        for chosen in torch.randperm(members, generator=generator).split(at_once):
            cost = centres_EX.square().sum(1) - 2.0 * features_MX[chosen] @ centres_EX.T
            _, seats = scipy.optimize.linear_sum_assignment(cost.repeat_interleave(len(chosen) // num, dim=1).numpy())
            cluster_M[chosen] = torch.from_numpy(seats) // (len(chosen) // num)
        centres_EX = torch.stack([features_MX[cluster_M == number].mean(0) for number in range(num)])
    return cluster_M


@torch.autocast("cpu", enabled=False)
def fit_router(x_ND: Tensor, worth_NE: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Router rows [E, D] and selection bias [E], from a ridge regression of ``worth_NE`` on the inputs; logits have standard deviation
    ``scale``.

    The mean over experts does not affect the choice and is subtracted. The intercept, divided by 4, becomes the bias, because the slope
    of a sigmoid at 0 is one quarter.
    """
    worth_NE = worth_NE - worth_NE.mean(1, keepdim=True)
    mean_D, mean_E = x_ND.float().mean(0), worth_NE.mean(0)
    squares_DD = torch.zeros(len(mean_D), len(mean_D), dtype=torch.float64)
    products_DE = torch.zeros(len(mean_D), len(mean_E), dtype=torch.float64)
    for part_ND, part_NE in zip(x_ND.split(TOKENS_AT_ONCE), worth_NE.split(TOKENS_AT_ONCE), strict=True):
        centred_ND = part_ND.float() - mean_D
        squares_DD += (centred_ND.T @ centred_ND).double()
        products_DE += (centred_ND.T @ (part_NE - mean_E)).double()
    ridge = RIDGE * squares_DD.diagonal().mean()
    squares_DD.diagonal().add_(ridge.clamp_min(torch.finfo(torch.float32).tiny))  # 0 where all inputs are equal
    gate_ED = torch.linalg.solve(squares_DD, products_DE).T.float()
    bias_E = mean_E - gate_ED @ mean_D
    spread = torch.cat([part_ND.float() @ gate_ED.T + bias_E for part_ND in x_ND.split(TOKENS_AT_ONCE)]).std()
    factor = scale / spread.clamp_min(torch.finfo(torch.float32).tiny)
    return gate_ED * factor, bias_E * factor / 4
