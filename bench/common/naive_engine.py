"""Reference generation: the whole sequence through the model for every token, without cache or batch.

The engine must sample the same tokens. It shares only the sampler and the model's layers with this reference.

Shape letters: T tokens, D hidden, V vocabulary, N tokens of one Subnet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.engine.request import Phases, Sampling
from stretto.engine.sampling import Row, process, sample
from stretto.model.attention import Geometry
from stretto.model.spec import Subnet
from stretto.model.transformer import Block, SwiGlu, Transformer


class Generated(NamedTuple):
    """Completion of `generate_naive`."""

    tokens: tuple[int, ...]
    logprobs: np.ndarray
    """fp32 [T], processed, nats."""


@torch.inference_mode()
def generate_naive(
    model: Transformer,
    prompt: Sequence[int],
    sampling: Sampling,
    subnet: Subnet | Phases,
    *,
    end_ids: tuple[int, ...] = (),
) -> Generated:
    """Complete ``prompt`` by at most ``sampling.max_tokens``; ``end_ids`` are the tokenizer's end tokens.

    Ignores ``sampling.n``; refuses stop strings and grammars. A seed of None is 0.
    """
    assert prompt, "an empty prompt"
    assert sampling.grammar is None and not sampling.stop, f"{sampling}: needs a tokenizer"
    phases = subnet if isinstance(subnet, Phases) else Phases(subnet)
    row = sampling if sampling.seed is not None else sampling.replace(seed=0)
    ends = {*sampling.stop_ids, *(() if sampling.ignore_eos else end_ids)}
    tokens = list(prompt)
    logprobs: list[float] = []
    while len(logprobs) < sampling.max_tokens:
        subnets = subnets_by_position(tokens, len(prompt), phases)
        logits_1V = logits_naive(model, tokens, subnets)[-1:]
        logp_1V = process(logits_1V, [Row(row, tokens, len(prompt))], end_ids=end_ids)
        tokens.append(int(sample(logp_1V, [row], [len(tokens)])))
        logprobs.append(float(logp_1V[0, tokens[-1]]))
        if tokens[-1] in ends and len(logprobs) >= sampling.min_tokens:
            break
    return Generated(tuple(tokens[len(prompt) :]), np.array(logprobs, np.float32))


def subnets_by_position(tokens: Sequence[int], num_prompt: int, phases: Phases) -> list[Subnet]:
    """The Subnet that computes each token. The token that ends thinking is the last one of the thinking Subnet."""
    thinking = phases.thinking or phases.answer
    subnets = [phases.prefill or thinking] * num_prompt
    is_answer = phases.thinking is None
    for token in tokens[num_prompt:]:
        subnets.append(phases.answer if is_answer else thinking)
        is_answer = is_answer or token == phases.thinking_end
    return subnets


def logits_naive(model: Transformer, tokens: Sequence[int], subnets: Sequence[Subnet]) -> Tensor:
    """Logits [T, V] (fp32) where each token runs its own Subnet: a layer computes only the tokens whose Subnet has it."""
    assert len(tokens) == len(subnets), f"{len(tokens)} tokens, {len(subnets)} Subnets"
    device = model.embedding.weight.device
    if all(subnet == subnets[0] for subnet in subnets):
        return model.logits(torch.tensor([list(tokens)], device=device), subnets[0])[0]
    x_TD = model.embedding(torch.tensor(list(tokens), device=device))
    for layer in range(model.config.num_layers):
        present = [position for position, subnet in enumerate(subnets) if layer in subnet.layers]
        if present:
            own = [subnets[position] for position in present]
            x_TD[present] = _block(model, layer, x_TD[present], present, own)
    return F.linear(model.norm(x_TD), model.head_VD).float()


def _block(model: Transformer, layer: int, x_TD: Tensor, positions: list[int], subnets: list[Subnet]) -> Tensor:
    """One block over the tokens that run it; expert counts and top-k are those of each token's own Subnet."""
    config, block = model.config, model.blocks[layer]
    assert isinstance(block, Block)
    positions_1T = torch.tensor([positions], device=x_TD.device)
    geometry = Geometry.of(config, positions_1T)
    x_TD = x_TD + block.attention(block.attention_norm(x_TD[None]), geometry)[0]
    normed_TD = block.mlp_norm(x_TD)
    if isinstance(block.mlp, SwiGlu):
        return x_TD + block.mlp(normed_TD)
    for subnet in set(subnets):
        mine = [place for place, other in enumerate(subnets) if other == subnet]
        row = [each for each in subnet.layers if each not in config.dense_layers].index(layer)
        y_1ND, *_ = block.mlp(normed_TD[mine][None], subnet.experts[row], subnet.top_k[row], None)
        x_TD[mine] = x_TD[mine] + y_1ND[0]
    return x_TD
