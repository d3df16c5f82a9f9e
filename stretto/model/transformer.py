"""The decoder: `model(ids, subnet, ctx)`. The Subnet and the operators are arguments of every forward pass, not state.

Shape letters: B rows, T positions, N = B·T tokens, D hidden, V vocabulary, I SwiGLU width, L MoE layers of the maximum network,
E experts, K chosen (or route slots), W branches of balance state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import register_dataclass
from torch.utils.checkpoint import checkpoint

from stretto.model.attention import Attention, Geometry, Mla
from stretto.model.spec import ModelConfig, Subnet
from stretto.ops.documents import Documents
from stretto.ops.grouped import Clamp, ExpertBiases, Experts, counted
from stretto.ops.operators import ORDINARY, Operators, Routes, route
from stretto.ops.shards import is_shard

Routing = Callable[[int, Tensor], Tensor]
"""Function from the MoE row (of the maximum network) and the router's choice [B, T, K] to the experts that are used; −1: no expert.
It is called again when a layer is recomputed, and must return the same result."""


@dataclass(frozen=True, slots=True)
class RowWidths:
    """Experts that each row of a batch may use, in every layer.

    Experts are identified by their rank in the layer's nested order, so that one mask applies to all layers.
    """

    branch_B: Tensor
    """Row of balance state of each batch row, int64."""
    allowed_BE: Tensor
    """Whether the expert of each rank may be chosen, bool."""
    counted_B: Tensor
    """Whether the row's choices are added to the balance counts, bool; False for random subsets, which would distort those of the full
    network."""


@dataclass(frozen=True, slots=True)
class Context:
    """Arguments of a forward pass beside the ids and the Subnet."""

    positions_BT: Tensor
    """Position of each token in its document, int64."""
    documents_BT: Tensor | None = None
    """Document number of each token within its row, −1 for padding; None: every row is one document."""
    widths: RowWidths | None = None
    """Restriction of single rows to fewer experts than the Subnet has (training only)."""
    recompute: bool = False
    """Whether each layer's activations are recomputed in the backward pass (activation checkpointing)."""
    shared_BT2: Tensor | None = None
    """First column, and the one after the last, of a prefix that documents of a row share; a position may attend to this prefix and to
    its own document. Equal columns: no prefix. int64."""
    operators: Operators = ORDINARY
    documents: Documents | None = None
    """Where the documents of ``documents_BT`` lie, if the host has counted them; a device that must tell makes the host wait."""
    routing: Routing | None = None
    """Observes and may change the chosen experts (`Replay`, `Recorder`); None: the routers' choice."""

    @property
    def is_real_BT(self) -> Tensor | None:
        """Mask of the tokens that belong to a document, bool; None: all do."""
        return None if self.documents_BT is None else self.documents_BT >= 0

    @staticmethod
    def plain(ids_BT: Tensor) -> Context:
        """Every row is one document that starts at position 0."""
        return Context(torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT))


@dataclass(frozen=True, slots=True)
class Output:
    """Result of a forward pass."""

    hidden_BTD: Tensor
    """Hidden states after the final norm; `Transformer.logits` computes logits from them."""
    counts: dict[int, Tensor]
    """Number of slots (choices) per branch and expert, by MoE row of the maximum network: [W, E] int64. Padding is not counted."""


# FSDP2 finds the tensors of a module's output only in registered classes.
register_dataclass(Output, field_names=["hidden_BTD", "counts"], drop_field_names=[])


class Norm(nn.Module):
    """RMSNorm with a weight."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_D: Tensor, operators: Operators = ORDINARY) -> Tensor:
        return operators.norm(x_D, self.weight, self.eps)


def clamp_of(config: ModelConfig) -> Clamp | None:
    """The clamp of the SwiGLUs of ``config``; None if they have none."""
    clamped = config.clamped_swiglu
    return None if clamped is None else Clamp(clamped.alpha, clamped.limit)


class SwiGlu(nn.Module):
    """Dense feed-forward network: silu(gate) · up (or its clamped form), then down. Gate and up are one matrix (gate rows first)."""

    def __init__(self, config: ModelConfig, intermediate_size: int):
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.clamp = clamp_of(config)

    def forward(self, x_BTD: Tensor, operators: Operators = ORDINARY) -> Tensor:
        hidden_BTI = operators.swiglu(operators.linear(x_BTD, self.gate_up.weight, self.gate_up.bias), self.clamp)
        return operators.linear(hidden_BTI, self.down.weight, self.down.bias)


class MoeLayer(nn.Module):
    """Router, routed experts and shared experts of one layer."""

    rank_E: Tensor
    bias_WE: Tensor

    def __init__(self, config: ModelConfig, row: int):
        """``row``: index of the layer among the MoE layers."""
        super().__init__()
        num_experts = config.experts_by_layer[row]
        hidden, width = config.hidden_size, config.expert_intermediate_size
        self.config, self.row = config, row
        self.gate = nn.Parameter(torch.empty(num_experts, hidden))
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.gate_bias = nn.Parameter(torch.zeros(num_experts)) if config.router_bias else None
        self.gate_up_bias = nn.Parameter(torch.zeros(num_experts, 2 * width)) if config.expert_bias else None
        self.down_bias = nn.Parameter(torch.zeros(num_experts, hidden)) if config.expert_bias else None
        self.clamp = clamp_of(config)
        self.shared = SwiGlu(config, config.num_shared_experts * width) if config.num_shared_experts else None
        self.register_buffer("rank_E", torch.empty(num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("bias_WE", torch.empty(config.num_branches, num_experts))
        self.reset_buffers()
        self.exchange: Callable[[Operators, Tensor, Routes, Experts], Tensor] | None = None
        """Replaces `stretto.ops.operators.Operators.experts` if the experts are on several ranks; set by
        `stretto.model.parallel.placed`."""

    @property
    def experts(self) -> Experts:
        """The routed experts' weights."""
        biases = None
        if self.gate_up_bias is not None and self.down_bias is not None:
            biases = ExpertBiases(self.gate_up_bias, self.down_bias)
        return Experts(self.gate_up, self.down, biases, self.clamp)

    def reset_buffers(self) -> None:
        """Set the nested order of the experts to that of the configuration, and the balance bias to zero."""
        self.set_order(self.config.expert_orders[self.row], self.rank_E.device)
        self.bias_WE.zero_()

    def set_order(self, order: Sequence[int], device: torch.device | str) -> None:
        """Set the nested order of the experts: their ids, from first kept to first dropped."""
        self.rank_E = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=device)

    def forward(
        self,
        x_BTD: Tensor,
        num_experts: int,
        top_k: int,
        widths: RowWidths | None,
        operators: Operators = ORDINARY,
        routing: Routing | None = None,
        is_real_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The layer's output, and the number of slots per branch and expert [W, E].

        ``num_experts`` and ``top_k`` apply to all rows; ``widths`` restricts single rows further. Tokens outside of ``is_real_BT`` are not
        counted; None: all are.
        """
        x_ND = x_BTD.flatten(0, 1)  # before the router's view: autograd adds the gradients of later views first
        routes, counts_WE = self.route(x_BTD, num_experts, top_k, widths, operators, routing, is_real_BT)
        if self.exchange is None:
            y_ND = operators.experts(x_ND, routes, self.experts)
        else:
            y_ND = self.exchange(operators, x_ND, routes, self.experts)
        y_BTD = y_ND.view(x_BTD.shape)
        if self.shared is not None:
            y_BTD = operators.rounded(y_BTD + self.shared(x_BTD, operators))
        return y_BTD, counts_WE

    def route(
        self,
        x_BTD: Tensor,
        num_experts: int,
        top_k: int,
        widths: RowWidths | None,
        operators: Operators = ORDINARY,
        routing: Routing | None = None,
        is_real_BT: Tensor | None = None,
    ) -> tuple[Routes, Tensor]:
        """Routes of all B·T tokens, and the number of slots per branch and expert [W, E] of those in ``is_real_BT``."""
        config, (B, T, _) = self.config, x_BTD.shape
        logits_NE = operators.router_logits(x_BTD.flatten(0, 1), self.gate, self.gate_bias)
        total, branch = logits_NE.shape[-1], config.branch(num_experts)
        if widths is None:
            bias_NE = self.bias_WE[branch]
            allowed_NE = None if num_experts == total else self.rank_E < num_experts
        else:
            # in a layer with fewer experts than others, a full row uses the branch that it would use alone
            branch_B = widths.branch_B.clamp_min(branch)
            bias_NE = self.bias_WE[branch_B].repeat_interleave(T, dim=0)
            allowed_BE = widths.allowed_BE[:, self.rank_E] & (self.rank_E < num_experts)
            allowed_NE = allowed_BE.repeat_interleave(T, dim=0)
        choose = None if routing is None else lambda own_NK: routing(self.row, own_NK.view(B, T, top_k)).flatten(0, 1)
        routes = route(
            logits_NE,
            bias_NE if config.selection_bias else None,
            allowed_NE,
            top_k,
            softmax=config.router == "softmax",
            normalize=config.normalize_gates,
            scaling=config.routed_scaling,
            groups=(config.expert_groups, config.top_groups),
            operators=operators,
            choose=choose,
        )
        # Tokens that are not counted go to an additional expert or branch, which is cut off. Padding is one token in one state, all of
        # which the same few experts would get.
        chosen_NK, num_branches = routes.chosen_NK, len(self.bias_WE)
        if widths is None:
            counts_WE = torch.zeros_like(self.bias_WE, dtype=torch.int64)
            if num_experts == min(config.widths[branch], total):
                if is_real_BT is not None:
                    chosen_NK = torch.where(is_real_BT.reshape(-1, 1), chosen_NK, total)
                counts_WE[branch] = counted(chosen_NK, total + 1)[:total]
            # a width without a branch of its own uses the bias of the next larger one but is not counted there: the experts
            # that are masked here would appear to be idle
        else:
            branch_BT = torch.where(widths.counted_B, branch_B, num_branches)[:, None].expand(B, T)
            if is_real_BT is not None:
                branch_BT = torch.where(is_real_BT, branch_BT, num_branches)
            key_NK = branch_BT.reshape(-1, 1) * total + chosen_NK
            counts_WE = counted(key_NK, (num_branches + 1) * total).view(num_branches + 1, total)[:num_branches]
        return routes, counts_WE


class Block(nn.Module):
    """Pre-norm attention, then pre-norm feed-forward (MoE or dense)."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.attention_norm = Norm(config.hidden_size, config.norm_eps)
        self.attention: Attention | Mla = Attention(config, layer) if config.latent is None else Mla(config)
        self.mlp_norm = Norm(config.hidden_size, config.norm_eps)
        self.mlp: MoeLayer | SwiGlu
        if layer in config.dense_layers:
            self.mlp = SwiGlu(config, config.dense_intermediate_size)
        else:
            self.mlp = MoeLayer(config, config.moe_layers.index(layer))

    def forward(
        self, x_BTD: Tensor, geometry: Geometry, num_experts: int, top_k: int, ctx: Context
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream after this block, and the expert counts; a dense block has no counts and ignores ``num_experts`` and
        ``top_k``."""
        operators = ctx.operators
        attended_BTD = self.attention(self.attention_norm(x_BTD, operators), geometry, operators)
        x_BTD = operators.rounded(x_BTD + attended_BTD)
        normed_BTD = self.mlp_norm(x_BTD, operators)
        if isinstance(self.mlp, SwiGlu):
            return operators.rounded(x_BTD + self.mlp(normed_BTD, operators)), None
        y_BTD, counts_WE = self.mlp(normed_BTD, num_experts, top_k, ctx.widths, operators, ctx.routing, ctx.is_real_BT)
        return operators.rounded(x_BTD + y_BTD), counts_WE


class Transformer(nn.Module):
    """A decoder-only language model, dense or MoE, that can run each of its Subnets."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_VD(self) -> Tensor:
        """The output matrix [V, D], unsharded on every rank; the embedding's matrix if they are tied.

        In a sharded model a forward pass leaves it gathered, and the backward pass sums its gradient over the ranks. Before any
        forward pass, all ranks must call this together, and the result has no gradient.
        """
        weight = self.embedding.weight if self.head is None else self.head.weight
        return weight.full_tensor().detach() if is_shard(weight) else weight

    def geometry(self, ctx: Context) -> Geometry:
        """Rotations and masks of a forward pass. Reads no weights."""
        packing = ctx.documents_BT, ctx.shared_BT2, ctx.operators, ctx.documents
        return Geometry.of(self.config, ctx.positions_BT, *packing)

    def forward(self, ids_BT: Tensor, subnet: Subnet, ctx: Context) -> Output:
        """Run ``subnet`` over ``ids_BT`` (int64)."""
        config, operators = self.config, ctx.operators
        geometry = self.geometry(ctx)
        x_BTD = operators.rounded(self.embedding(ids_BT))
        counts: dict[int, Tensor] = {}
        moe_rows = {layer: row for row, layer in enumerate(config.moe_layers)}
        sizes = iter(zip(subnet.experts, subnet.top_k, strict=True))
        for layer in subnet.layers:
            num_experts, top_k = next(sizes) if layer in moe_rows else (0, 0)  # a dense block ignores both
            arguments = (x_BTD, geometry, num_experts, top_k, ctx)
            if ctx.recompute and torch.is_grad_enabled():
                x_BTD, counts_WE = checkpoint(self.blocks[layer], *arguments, use_reentrant=False)
            else:
                x_BTD, counts_WE = self.blocks[layer](*arguments)
            if counts_WE is not None:
                counts[moe_rows[layer]] = counts_WE
        return Output(self.norm(x_BTD, operators), counts)

    def logits(self, ids_BT: Tensor, subnet: Subnet | None = None, ctx: Context | None = None) -> Tensor:
        """Logits [B, T, V] in fp32. Default: the full network, every row one document."""
        ctx = ctx or Context.plain(ids_BT)
        output = self(ids_BT, subnet or self.config.full(), ctx)
        return ctx.operators.head(self.head_VD)(output.hidden_BTD).float()


def build(config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> Transformer:
    """A new model on ``device`` with the weights of `initial_state`."""
    return load_state(skeleton(config), initial_state(config, seed), device)


def skeleton(config: ModelConfig) -> Transformer:
    """A model on the meta device, whose tensors have shapes but no memory; `load_state` allocates it."""
    with torch.device("meta"), _Uninitialised():
        return Transformer(config)


class _Uninitialised(TorchFunctionMode):
    """Leaves out `torch.nn.init`: on the meta device it changes nothing, and imports torch's compiler, which takes a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def initial_state(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Initial weights, one tensor at a time. They depend on the seed only, not on device or sharding.

    Normal with standard deviation 0.5/√hidden (0.02 at a hidden size of 640). Projections into the residual stream are divided by
    √(2·layers), as in GPT-2, so that the size of the stream does not depend on depth.
    """
    std = 0.5 / math.sqrt(config.hidden_size)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in skeleton(config).named_parameters():
        values = torch.empty(parameter.shape)
        if name.endswith(("norm.weight", "_norm")):
            values.fill_(1.0)
        elif name.endswith(("bias", "sinks")):
            values.zero_()
        else:
            writes = name.endswith(("out.weight", ".down", ".down.weight"))
            values.normal_(0.0, std / math.sqrt(2 * config.num_layers) if writes else std, generator=generator)
        yield name, values


@torch.no_grad()
def load_state(
    model: Transformer, state: Iterable[tuple[str, Tensor]], device: torch.device | str = "cpu"
) -> Transformer:
    """Allocate a `skeleton`, sharded or not, on ``device`` and copy ``state`` into it. A rank keeps its shard of each tensor only.

    ``state`` has all parameters; missing balance biases are zero.
    """
    model.to_empty(device=device)
    for layer in (module for module in model.modules() if isinstance(module, MoeLayer)):
        layer.reset_buffers()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    missing = {name for name, _ in model.named_parameters()}
    for name, values in state:
        tensor = tensors[name]
        if is_shard(tensor):
            from torch.distributed.tensor import distribute_tensor

            values = distribute_tensor(values.to(device), tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(values)
        missing.discard(name)
    assert not missing, f"no values for {sorted(missing)}"
    return model


class Replay:
    """Routing replay (2510.11370): a `Routing` that returns recorded experts in their recorded order."""

    def __init__(self, routes_BTLK: Tensor):
        """``routes_BTLK``: any integer dtype. A token whose first slot is −1 keeps the router's choice."""
        self.routes_BTLK = routes_BTLK

    def __call__(self, row: int, own_BTK: Tensor) -> Tensor:
        B, T, K = own_BTK.shape
        assert self.routes_BTLK.shape[:2] == (B, T) and self.routes_BTLK.shape[3] >= K, (
            f"recorded routes {tuple(self.routes_BTLK.shape)} do not fit choices {tuple(own_BTK.shape)}"
        )
        recorded_BTK = self.routes_BTLK[:, :, row, :K].long()
        return torch.where(recorded_BTK[:, :, :1] < 0, own_BTK, recorded_BTK)


class Recorder:
    """A `Routing` that records the routers' own choices, also where ``inner`` replaces them."""

    def __init__(self, config: ModelConfig, ids_BT: Tensor, inner: Routing | None = None):
        num_slots = max((config.top_k, *config.top_k_by_layer))
        shape = (*ids_BT.shape, config.num_moe_layers, num_slots)
        self.own_BTLK = torch.full(shape, -1, dtype=torch.int16, device=ids_BT.device)
        """Routes in the form of `Replay`; −1 for layers and slots that did not run."""
        self._inner = inner

    def __call__(self, row: int, own_BTK: Tensor) -> Tensor:
        self.own_BTLK[:, :, row, : own_BTK.shape[-1]] = own_BTK
        return own_BTK if self._inner is None else self._inner(row, own_BTK)
