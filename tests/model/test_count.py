"""Structural counts against a real model's tensors and against the operations of a real forward, backward and step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stretto.model.elastic import extract
from stretto.model.parallel import join
from stretto.model.spec import ModelConfig, Subnet, count
from stretto.model.transformer import Context, RowWidths, Transformer, build
from stretto.ops.logprob import head_loss
from stretto.train.step import Distil, MicroBatch, optimisation_step

ROWS, LENGTH = 2, 12
SHAPE: dict[str, Any] = {
    "vocab_size": 37, "hidden_size": 24, "num_layers": 5, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
    "num_experts": 8, "top_k": 3, "expert_intermediate_size": 8, "widths": (8, 4),
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "num_shared_experts": 2, "dense_layers": (0, 3), "dense_intermediate_size": 20, "qk_norm": True,
        "attention_bias": True,
    },
    "tied, softmax": {"tie_embeddings": True, "router": "softmax", "num_shared_experts": 1},
    "all dense": {"dense_layers": (0, 1, 2, 3, 4), "dense_intermediate_size": 20},
}  # fmt: skip


@dataclass
class Executed:
    """FLOPs of matrix products with weights, and of attention's forward passes."""

    linear: int = 0
    scores: int = 0


@contextmanager
def counting() -> Iterator[Executed]:
    """Count what runs inside the block.

    Attention is counted by its forward passes alone: the fused backward kernels compute the scores a second time,
    which torch counts (2.5 forwards) and a receipt does not (2 forwards, the work of the plain derivative).
    """

    def grouped(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 2 * a[0] * a[1] * b[-1]  # rows x inner x columns, whichever of the three the groups divide

    def in_place(into: Any, a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    def attention(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        rows, heads, queries, width = q
        return 2 * rows * heads * queries * k[-2] * (width + v[-1])

    def nothing(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 0

    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    formulas = {
        aten._grouped_mm: grouped,
        aten.addmm_: in_place,
        forward: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: nothing,
    }
    executed = Executed()
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        yield executed
    executed.scores = counter.get_flop_counts()["Global"].get(forward, 0)
    executed.linear = counter.get_total_flops() - executed.scores


def network(name: str) -> Transformer:
    return build(ModelConfig(**{**SHAPE, **SHAPES[name]}), seed=0)


def small(config: ModelConfig) -> Subnet:
    return config.subnet(depth=4, experts=4, top_k=2)


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 37, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("part", ["full", "cut"])
def test_parameters_are_those_of_the_model(name: str, part: str) -> None:
    model = network(name)
    subnet = model.config.full() if part == "full" else small(model.config)
    own = model if part == "full" else extract(model, subnet)
    counts = count(model.config, subnet)
    assert counts.total_params == sum(parameter.numel() for parameter in own.parameters())
    # what one token does not use: the experts beyond its top-k
    config = own.config
    unused = sum(experts - k for experts, k in zip(config.experts_by_layer, config.top_k_by_layer, strict=True))
    one_expert = 3 * config.hidden_size * config.expert_intermediate_size
    assert counts.total_params - counts.active_params == unused * one_expert
    assert counts == count(config, config.full()), "a Subnet counts as the network it becomes"


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("part", ["full", "cut"])
@pytest.mark.parametrize("documents", [False, True])
def test_forward_and_backward_execute_what_is_counted(name: str, part: str, documents: bool) -> None:
    model = network(name)
    own = model if part == "full" else extract(model, small(model.config))
    counts, tokens = count(own.config, own.config.full()), ROWS * LENGTH
    ctx = Context(Context.plain(ids()).positions_BT, torch.zeros_like(ids()) if documents else None)
    with counting() as forward, torch.no_grad():
        own.logits(ids(), ctx=ctx)
    assert forward.linear == tokens * counts.linear_flops
    assert forward.scores == tokens * LENGTH * counts.score_flops, "masked or causal, every score counts"
    assert forward.linear + forward.scores == counts.forward_flops(tokens, LENGTH)
    with counting() as both:
        hidden_BTD = own(ids(), own.config.full(), ctx).hidden_BTD
        loss, _ = head_loss(hidden_BTD.flatten(0, 1), own.head_VD, ids(1).flatten())
        loss.backward()
    # every product has two gradients; the embedding is trained, so the first layer's input gradient is wanted too
    assert both.linear == 3 * forward.linear
    assert both.scores == forward.scores


def test_the_cache_holds_keys_and_values_of_the_kept_layers() -> None:
    config = network("everything").config
    assert count(config, config.full()).kv_elements == 5 * 2 * (2 * 6)
    assert count(config, small(config)).kv_elements == 4 * 2 * (2 * 6)


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_states_what_it_executed(name: str) -> None:
    """Full and narrowed micro-batches, an anchor with its teacher, and another network as teacher."""
    model, parent = network(name), network("plain")
    config, ranks = model.config, join("cpu")
    allowed_BE = torch.ones(ROWS, 8, dtype=torch.bool)
    allowed_BE[0, 4:] = False
    widths = RowWidths(torch.tensor([1, 0]), allowed_BE, torch.ones(ROWS, dtype=torch.bool))
    plain = Context.plain(ids())
    narrow = Context(plain.positions_BT, None, widths)

    def micro(kind: str, subnet: Subnet, ctx: Context = plain, distil: Distil | None = None) -> MicroBatch:
        return MicroBatch(kind, ids(), ids(1), ctx, subnet, ROWS * LENGTH, distil)

    batches = [
        micro("full", config.full()),
        micro("full", config.full(), narrow),
        micro("anchor", small(config), distil=Distil(model, config.full(), 0.5)),
        micro("anchor", small(config), distil=Distil(model, config.full(), 1.0)),  # no teacher runs
        micro("healed", config.full(), distil=Distil(parent, small(parent.config), 0.25)),
    ]
    adamw = torch.optim.AdamW(model.parameters())
    with counting() as executed:
        result = optimisation_step(
            model, [adamw], batches, ranks, clip_norm=1.0, balance_rate=1e-3, dtype=torch.float32
        )
    tokens = ROWS * LENGTH
    score = [count(config, subnet).score_flops for subnet in (config.full(), small(config))]
    students = tokens * LENGTH * (3 * score[0] + 2 * score[1])
    teachers = tokens * LENGTH * (score[0] + count(parent.config, small(parent.config)).score_flops)
    assert executed.scores == students + teachers
    assert result.flops == executed.linear + 3 * students + teachers
    with counting() as lessons, torch.no_grad():
        model.logits(ids())
        parent.logits(ids(), small(parent.config))
    assert teachers == lessons.scores


@pytest.mark.parametrize("name", SHAPES)
def test_recomputation_is_stated_as_a_whole_forward_pass(name: str) -> None:
    """An upper bound: the head is not recomputed, nor is what nothing reads, a block's last product."""
    model = network(name)
    config, tokens = model.config, ROWS * LENGTH
    ctx = Context(Context.plain(ids()).positions_BT, None, None, recompute=True)
    batch = MicroBatch("full", ids(), ids(1), ctx, config.full(), tokens)
    adamw = torch.optim.AdamW(model.parameters())
    with counting() as executed:
        result = optimisation_step(
            model, [adamw], [batch], join("cpu"), clip_norm=1.0, balance_rate=0.0, dtype=torch.float32
        )
    counts = count(config, config.full())
    scores = tokens * LENGTH * counts.score_flops
    assert executed.scores == 2 * scores
    head = 2 * tokens * config.vocab_size * config.hidden_size
    last = max(config.dense_intermediate_size, config.num_shared_experts * config.expert_intermediate_size)
    spared = result.flops - (executed.linear + 4 * scores)
    assert head <= spared <= head + 2 * tokens * config.num_layers * config.hidden_size * last
