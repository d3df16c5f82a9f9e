"""The decoder: ``model(ids, subnet, ctx)``. The Subnet is an argument, never a mode.

Shape letters: B rows, T positions, D hidden, V vocabulary, L MoE layers, K route slots, W branches of balance state,
E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import register_dataclass
from torch.utils.checkpoint import checkpoint

from stretto.model.layers import Attention, Geometry, Norm, SwiGlu
from stretto.model.moe import MoeLayer, RowWidths
from stretto.model.spec import ModelConfig, Subnet
from stretto.ops import exact
from stretto.ops.attention import document_mask, rotary_tables
from stretto.ops.matmul import PLAIN, Arithmetic, linear, rounded


@dataclass(frozen=True, slots=True)
class Context:
    """What a forward pass must know beside the ids and the Subnet."""

    positions_BT: Tensor
    """Place of each token in its document, int64."""
    documents_BT: Tensor | None = None
    """Document number of each token within its row, −1 for padding; None: every row is one document."""
    widths: RowWidths | None = None
    """Rows that use fewer experts than the Subnet allows (training only)."""
    recompute: bool = False
    """Recompute each layer's activations in the backward pass instead of keeping them."""
    shared_BT2: Tensor | None = None
    """Columns, first and one past the last, of a beginning that documents of a row share: each position may look at
    them beside its own document. Equal: none. int64."""
    routes_BTLK: Tensor | None = None
    """Experts to take instead of the routers' own choice (replay, 2510.11370), int16 or int64, by MoE layer of the
    *maximum* network; −1: no record. A row of the Subnet's top-k slots that begins with −1 chooses freely."""
    want_routes: bool = False
    """Return the routers' own choices."""
    arithmetic: Arithmetic = PLAIN

    @staticmethod
    def plain(ids_BT: Tensor) -> Context:
        """Every row is one document that starts at position 0."""
        return Context(torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT))


@dataclass(frozen=True, slots=True)
class Output:
    """Result of a forward pass."""

    hidden_BTD: Tensor
    """Final normed hidden states; `Transformer.logits` turns them into logits."""
    counts: dict[int, Tensor]
    """Slots each expert got, by MoE row of the *maximum* network: [W, E] int64."""
    routes_BTLK: Tensor | None = None
    """What the routers chose, or would have chosen where others' choices were replayed, int16, as `Context.routes_BTLK`
    takes it; −1 for layers and slots that did not run. Only if the context wants them."""


class Block(nn.Module):
    """Pre-norm attention, then pre-norm feed-forward (MoE or dense)."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.attention_norm = Norm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = Norm(config.hidden_size, config.norm_eps)
        self.mlp: MoeLayer | SwiGlu
        if layer in config.dense_layers:
            self.mlp = SwiGlu(config.hidden_size, config.dense_intermediate_size)
        else:
            self.mlp = MoeLayer(config, config.moe_layers.index(layer))

    def forward(
        self,
        x_BTD: Tensor,
        geometry: Geometry,
        num_experts: int,
        top_k: int,
        widths: RowWidths | None,
        recorded_BTK: Tensor | None = None,
        arithmetic: Arithmetic = PLAIN,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The residual stream after this block, the expert counts and the routers' own choices (None for a dense block)."""
        attended_BTD = self.attention(self.attention_norm(x_BTD, arithmetic), geometry, arithmetic)
        x_BTD = rounded(x_BTD + attended_BTD, arithmetic)
        normed_BTD = self.mlp_norm(x_BTD, arithmetic)
        if isinstance(self.mlp, SwiGlu):
            return rounded(x_BTD + self.mlp(normed_BTD, arithmetic), arithmetic), None, None
        y_BTD, counts_WE, own_BTK = self.mlp(
            normed_BTD, num_experts, top_k, widths, recorded_BTK=recorded_BTK, arithmetic=arithmetic
        )
        return rounded(x_BTD + y_BTD, arithmetic), counts_WE, own_BTK


class Transformer(nn.Module):
    """A decoder-only MoE language model and, at once, each of its Subnets."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_VD(self) -> Tensor:
        """The output matrix [V, D], whole on every rank: the embedding's own where they are tied.

        Sharded, a forward pass leaves it gathered, and its gradient is summed over the ranks in that pass's backward;
        before any forward pass all ranks must ask for it together, and it takes no gradient.
        """
        weight = self.embedding.weight if self.head is None else self.head.weight
        return weight.full_tensor().detach() if isinstance(weight, DTensor) else weight

    def forward(self, ids_BT: Tensor, subnet: Subnet, ctx: Context) -> Output:
        """Run ``subnet`` over ``ids_BT`` (int64)."""
        mask = None if ctx.documents_BT is None else document_mask(ctx.documents_BT, ctx.shared_BT2)
        geometry = Geometry(*self._rotary(ctx), mask)
        x_BTD = rounded(self.embedding(ids_BT), ctx.arithmetic)
        counts: dict[int, Tensor] = {}
        chosen: dict[int, Tensor] = {}
        _check_routes(ctx.routes_BTLK, ids_BT, self.config)
        moe_rows = {layer: row for row, layer in enumerate(self.config.moe_layers)}
        kept_moe = 0
        for layer in subnet.layers:
            num_experts = top_k = 0  # a dense block reads neither
            recorded_BTK = None
            if layer in moe_rows:
                num_experts, top_k = subnet.experts[kept_moe], subnet.top_k[kept_moe]
                kept_moe += 1
                if ctx.routes_BTLK is not None:
                    recorded_BTK = ctx.routes_BTLK[:, :, moe_rows[layer], :top_k]
            arguments = (x_BTD, geometry, num_experts, top_k, ctx.widths, recorded_BTK, ctx.arithmetic)
            if ctx.recompute and torch.is_grad_enabled():
                result = checkpoint(self.blocks[layer], *arguments, use_reentrant=False)
            else:
                result = self.blocks[layer](*arguments)
            x_BTD, counts_WE, own_BTK = result
            if counts_WE is not None:
                counts[moe_rows[layer]] = counts_WE
                chosen[moe_rows[layer]] = own_BTK
        routes_BTLK = _stack_routes(chosen, ids_BT, self.config) if ctx.want_routes else None
        return Output(self.norm(x_BTD, ctx.arithmetic), counts, routes_BTLK)

    def _rotary(self, ctx: Context) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions, [B, T, R]."""
        width, theta = self.config.rotary_dim, self.config.rope_theta
        if not ctx.arithmetic.batch_invariant:
            return rotary_tables(ctx.positions_BT, width, theta)
        tables = exact.rotary_tables(int(ctx.positions_BT.max()) + 1, width, theta)
        cos_PR, sin_PR = (table.to(ctx.positions_BT.device) for table in tables)
        return cos_PR[ctx.positions_BT], sin_PR[ctx.positions_BT]

    def logits(self, ids_BT: Tensor, subnet: Subnet | None = None, ctx: Context | None = None) -> Tensor:
        """Logits [B, T, V] in fp32; the full network over plain rows unless told otherwise."""
        ctx = ctx or Context.plain(ids_BT)
        output = self(ids_BT, subnet or self.config.full(), ctx)
        return linear(output.hidden_BTD, self.head_VD, None, ctx.arithmetic.inner).float()


# FSDP2 looks for the tensors of a module's output in pytrees, and would not find them in an unknown class.
register_dataclass(Output, field_names=["hidden_BTD", "counts", "routes_BTLK"], drop_field_names=[])


def _check_routes(routes_BTLK: Tensor | None, ids_BT: Tensor, config: ModelConfig) -> None:
    if routes_BTLK is not None:
        expected = (*ids_BT.shape, config.num_moe_layers, max((config.top_k, *config.top_k_by_layer)))
        assert routes_BTLK.shape == expected, f"routes are {tuple(routes_BTLK.shape)}, these ids need {expected}"


def _stack_routes(chosen: dict[int, Tensor], ids_BT: Tensor, config: ModelConfig) -> Tensor:
    """int16 [B, T, L, K] of each layer's [B, T, its top-k]."""
    num_slots = max((config.top_k, *config.top_k_by_layer))
    shape = (*ids_BT.shape, config.num_moe_layers, num_slots)
    routes_BTLK = torch.full(shape, -1, dtype=torch.int16, device=ids_BT.device)
    for row, chosen_BTK in chosen.items():
        routes_BTLK[:, :, row, : chosen_BTK.shape[-1]] = chosen_BTK
    return routes_BTLK


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Normal weights, the same for the same seed whatever the device or sharding of the run.

    Standard deviation 0.5/√hidden (0.02 at 640 hidden, the usual value there); what writes to the residual stream is
    scaled down by √(2·layers), as in GPT-2, so that depth does not change the stream's size at the start.
    """
    config = model.config
    std = 0.5 / math.sqrt(config.hidden_size)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "q_norm", "k_norm")):
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            writes = name.endswith(("out.weight", "down", "down.weight"))
            scale = std / math.sqrt(2 * config.num_layers) if writes else std
            value = torch.empty(parameter.shape).normal_(0.0, scale, generator=generator)
            parameter.copy_(value)


def build(config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> Transformer:
    """A freshly initialised model on ``device``."""
    model = Transformer(config)
    initialise(model, seed)
    return model.to(device)
