"""The decoder: ``model(ids, subnet, ctx)``. The Subnet is an argument, never a mode.

Shape letters: B rows, T positions, D hidden, V vocabulary, L kept MoE layers, W branches of balance state, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import register_dataclass
from torch.utils.checkpoint import checkpoint

from stretto.model.layers import Attention, Geometry, Norm, SwiGlu
from stretto.model.moe import MoeLayer, RowWidths
from stretto.model.spec import ModelConfig, Subnet
from stretto.ops.attention import document_mask, rotary_tables


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
        self, x_BTD: Tensor, geometry: Geometry, num_experts: int, top_k: int, widths: RowWidths | None
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream after this block, and the expert counts (None for a dense block)."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), geometry)
        normed_BTD = self.mlp_norm(x_BTD)
        if isinstance(self.mlp, SwiGlu):
            return x_BTD + self.mlp(normed_BTD), None
        y_BTD, counts_WE = self.mlp(normed_BTD, num_experts, top_k, widths)
        return x_BTD + y_BTD, counts_WE


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
        cos, sin = rotary_tables(ctx.positions_BT, self.config.rotary_dim, self.config.rope_theta)
        mask = None if ctx.documents_BT is None else document_mask(ctx.documents_BT)
        geometry = Geometry(cos, sin, mask)
        x_BTD = self.embedding(ids_BT)
        counts: dict[int, Tensor] = {}
        moe_rows = {layer: row for row, layer in enumerate(self.config.moe_layers)}
        kept_moe = 0
        for layer in subnet.layers:
            num_experts = top_k = 0  # a dense block reads neither
            if layer in moe_rows:
                num_experts, top_k = subnet.experts[kept_moe], subnet.top_k[kept_moe]
                kept_moe += 1
            block = self.blocks[layer]
            if ctx.recompute and torch.is_grad_enabled():
                x_BTD, counts_WE = checkpoint(
                    block, x_BTD, geometry, num_experts, top_k, ctx.widths, use_reentrant=False
                )
            else:
                x_BTD, counts_WE = block(x_BTD, geometry, num_experts, top_k, ctx.widths)
            if counts_WE is not None:
                counts[moe_rows[layer]] = counts_WE
        return Output(self.norm(x_BTD), counts)

    def logits(self, ids_BT: Tensor, subnet: Subnet | None = None, ctx: Context | None = None) -> Tensor:
        """Logits [B, T, V] in fp32; the full network over plain rows unless told otherwise."""
        output = self(ids_BT, subnet or self.config.full(), ctx or Context.plain(ids_BT))
        return F.linear(output.hidden_BTD, self.head_VD).float()


# FSDP2 looks for the tensors of a module's output in pytrees, and would not find them in an unknown class.
register_dataclass(Output, field_names=["hidden_BTD", "counts"], drop_field_names=[])


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
