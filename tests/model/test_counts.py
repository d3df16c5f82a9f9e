"""Sizes and FLOPs of Subnets beside what is built and what is executed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stretto.learning.distillation import DistillObjective, Lesson
from stretto.learning.objective import PolicyObjective
from stretto.learning.recipe import DistillConfig, LossConfig
from stretto.model.counts import count
from stretto.model.elastic import extract
from stretto.model.parallel import join
from stretto.model.spec import LatentAttention, ModelConfig, Subnet
from stretto.model.transformer import Context, RowWidths, Transformer, build
from stretto.ops.logprob import IGNORED, Teacher, head_loss
from stretto.ops.native import training
from stretto.train.step import Distil, MicroBatch, Objective, optimisation_step

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
    "biases": {
        "dense_layers": (0,), "dense_intermediate_size": 20, "num_shared_experts": 1, "attention_bias": True,
        "attention_out_bias": True, "mlp_bias": True, "expert_bias": True, "router_bias": True, "qk_norm_wide": True,
        "sliding_window": 5, "sliding_layers": (1, 2),
    },
    "latent": {
        "num_kv_heads": 4, "attention_bias": True, "attention_out_bias": True,
        "latent": LatentAttention(query_rank=10, kv_rank=8, rope_dim=2, value_dim=5),
    },
    "latent, wide values": {"num_kv_heads": 4, "latent": LatentAttention(kv_rank=8, rope_dim=4, value_dim=9)},
}  # fmt: skip


@pytest.fixture(autouse=True)
def operators_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts the FLOPs of its own operators only, not those of the compiled kernels."""
    monkeypatch.setattr(training, "library", lambda: None)


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
    one_expert += 2 * config.expert_intermediate_size + config.hidden_size if config.expert_bias else 0
    assert counts.total_params - counts.active_params == unused * one_expert
    assert counts == count(config, config.full()), "a Subnet counts as the network it becomes"


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("part", ["full", "cut"])
@pytest.mark.parametrize("documents", [False, True])
def test_rows_of_one_document_execute_what_is_counted(name: str, part: str, documents: bool) -> None:
    """With ``documents`` the one document of each row is numbered, and attention may be masked."""
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
    latent = network("latent").config
    assert count(latent, latent.full()).kv_elements == 5 * (8 + 2), "the short vector, and the rotated key of all heads"


def test_a_sink_is_a_key_and_a_channel_more() -> None:
    """Which no count states: the kernels get both as padding."""
    model = build(ModelConfig(**{**SHAPE, "attention_sinks": True}), seed=0)
    config = model.config
    counts = count(config, config.full())
    assert counts.total_params == sum(parameter.numel() for parameter in model.parameters())
    with counting() as forward, torch.no_grad():
        model.logits(ids())
    assert forward.linear == ROWS * LENGTH * counts.linear_flops
    assert forward.scores == ROWS * LENGTH * (LENGTH + 1) * counts.score_flops // 6 * 8


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_on_rows_of_one_document_states_what_it_executed(name: str) -> None:
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
def test_a_step_counts_no_gradient_of_a_frozen_matrix(name: str) -> None:
    model = network(name)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.dim() == 1 or parameter_name.endswith(("mlp.gate", "bias")))
    config, tokens = model.config, ROWS * LENGTH
    subnets = [config.full(), small(config)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    batches = [MicroBatch("any", ids(), ids(1), Context.plain(ids()), subnet, tokens) for subnet in subnets]
    with counting() as executed:
        result = optimisation_step(
            model,
            [torch.optim.AdamW(trained)],
            batches,
            join("cpu"),
            clip_norm=1.0,
            balance_rate=0.0,
            dtype=torch.float32,
        )
    scores = tokens * LENGTH * sum(count(config, subnet).score_flops for subnet in subnets)
    assert result.flops == executed.linear + 3 * scores


def test_a_step_counts_the_head_at_the_tokens_it_is_applied_to() -> None:
    """Where few tokens have a target: those alone, but all of them if a teacher's distribution is given for each."""
    model = network("plain")
    config, targets = model.config, ids(1)
    targets[:, 2:] = IGNORED
    num = int((targets != IGNORED).sum())
    batch = MicroBatch("full", ids(), targets, Context.plain(ids()), config.full(), num)
    teacher = Distil(model, config.full(), 0.5)
    flops = []
    for each in (batch, replace(batch, distil=teacher), replace(batch, distil=replace(teacher, learns=True))):
        adamw = torch.optim.AdamW(model.parameters())
        with counting() as executed:
            result = optimisation_step(
                model, [adamw], [each], join("cpu"), clip_norm=1.0, balance_rate=0.0, dtype=torch.float32
            )
        flops.append((result.flops, executed))
    tokens, counts = ROWS * LENGTH, count(config, config.full())
    scores = tokens * LENGTH * counts.score_flops
    assert [stated - done.linear for stated, done in flops[:2]] == [3 * scores, 4 * scores]
    # a teacher that learns computes its logits a second time, for the student, which is not counted
    stated, done = flops[2]
    assert stated - done.linear == 6 * scores - tokens * counts.head_flops


@pytest.mark.parametrize("form", [None, "full", "sampled", "full with rewards"])
def test_a_policy_loss_counts_the_head_at_its_targets(form: str | None) -> None:
    """RL computes the logits of the targets once more in the backward pass; a distillation loss of whole distributions does not."""
    model = network("plain")
    config, targets = model.config, ids(1)
    targets[:, 3:] = IGNORED
    places_M = (targets.flatten() != IGNORED).nonzero()[:, 0]
    num, zeros_BT = len(places_M), torch.zeros(ids().shape)
    streams = {"weights_BT": zeros_BT + 1 / num, "behaviour_BT": zeros_BT - 3, "advantages_BT": zeros_BT + 1}
    objective: Objective = PolicyObjective(LossConfig(), 1.0, streams | {"samples_BT": zeros_BT.long()}, zeros_BT - 3)
    head_flops, of_teacher = count(config, config.full()).head_flops, 0
    if form is not None:
        scores: torch.Tensor | Teacher = zeros_BT.flatten()[places_M]
        if form != "sampled":
            scores, of_teacher = (
                Teacher(torch.zeros(num, config.hidden_size), torch.zeros(config.vocab_size, config.hidden_size)),
                num,
            )
        lessons = (Lesson(places_M, scores),)
        distil = DistillConfig(form=form.split()[0])
        objective = DistillObjective(distil, lessons, objective, has_policy=form == "full with rewards")
    batch = MicroBatch("policy", ids(), targets, Context.plain(ids()), config.full(), num, objective=objective)
    adamw = torch.optim.AdamW(model.parameters())
    with counting() as executed:
        result = optimisation_step(
            model, [adamw], [batch], join("cpu"), clip_norm=1.0, balance_rate=0.0, dtype=torch.float32
        )
    scores_flops = ROWS * LENGTH * LENGTH * count(config, config.full()).score_flops
    assert result.flops == executed.linear - of_teacher * head_flops + 3 * scores_flops


@pytest.mark.parametrize("name", SHAPES)
def test_recomputation_is_stated_as_a_whole_forward_pass_without_the_head(name: str) -> None:
    """An upper bound: what nothing reads, a block's last product, is not recomputed."""
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
    last = max(config.dense_intermediate_size, config.num_shared_experts * config.expert_intermediate_size)
    spared = result.flops - (executed.linear + 4 * scores)
    assert 0 <= spared <= 2 * tokens * config.num_layers * config.hidden_size * last
