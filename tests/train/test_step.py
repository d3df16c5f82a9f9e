"""The optimisation step: the same gradient however it is split, and nothing applied when something is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.base.records import Meter
from stretto.model.counts import count
from stretto.model.elastic import load_balance
from stretto.model.parallel import full_state, join
from stretto.model.spec import ModelConfig, Subnet, executed
from stretto.model.transformer import Context, MoeLayer, RowWidths, Transformer, build
from stretto.ops.logprob import IGNORED, chosen_logprobs
from stretto.ops.native import training
from stretto.optim.build import build_optimizers
from stretto.optim.schedule import OptimConfig
from stretto.train.step import (
    Distil,
    Measured,
    MicroBatch,
    NonFiniteError,
    StepResult,
    TaughtRows,
    metered,
    optimisation_step,
)
from tests.learning.lessons import distance
from tests.ops.references import chosen_logprobs_reference

VOCAB, LENGTH = 41, 24
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
    "num_experts": 8, "top_k": 3, "expert_intermediate_size": 16, "num_shared_experts": 1, "widths": (8, 4),
}  # fmt: skip
SAME = 1e-6
"""Relative difference that another order of summation may make: a few dozen fp32 roundings of 6e-8."""
DOCUMENTS = [
    torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (24, 11, 13, 20, 4, 7, 8, 9)
]


class Catch(torch.optim.SGD):
    """Keeps the gradients that a step would have applied, and applies nothing."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.model = model
        self.caught: dict[str, Tensor] = {}

    def step(self, closure: Any = None) -> None:
        grads = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        self.caught = {name: grad.clone() for name, grad in grads.items() if grad is not None}


def network(seed: int = 0, **changes: Any) -> Transformer:
    return build(ModelConfig(**{**SHAPE, **changes}), seed)


def packed(rows: list[list[list[int]]], widths: RowWidths | None = None, recompute: bool = False) -> dict[str, Any]:
    """Ids, targets and context of rows of documents; a document's last token has no target."""
    shape = (len(rows), LENGTH)
    ids, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    targets, documents = torch.full(shape, IGNORED), torch.full(shape, -1)
    for row, contents in enumerate(rows):
        at = 0
        for number, tokens in enumerate(contents):
            place = slice(at, at + len(tokens))
            ids[row, place], positions[row, place] = torch.tensor(tokens), torch.arange(len(tokens))
            targets[row, at : at + len(tokens) - 1] = torch.tensor(tokens[1:])
            documents[row, place] = number
            at += len(tokens)
    return {"ids_BT": ids, "targets_BT": targets, "ctx": Context(positions, documents, widths, recompute)}


def micro(rows: list[list[list[int]]], subnet: Subnet, kind: str = "full", **extra: Any) -> MicroBatch:
    batch = packed(rows, extra.pop("widths", None), extra.pop("recompute", False))
    num = int((batch["targets_BT"] != IGNORED).sum())
    return MicroBatch(kind=kind, subnet=subnet, num_target_tokens=num, **batch, **extra)


def step(
    model: Transformer,
    batches: list[MicroBatch],
    clip: float = 1e9,
    rate: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[StepResult, dict[str, Tensor]]:
    catch = Catch(model)
    result = optimisation_step(model, [catch], batches, join("cpu"), clip_norm=clip, balance_rate=rate, dtype=dtype)
    return result, catch.caught


PACKINGS: dict[str, list[list[list[list[int]]]]] = {
    "one micro-batch": [[[DOCUMENTS[0]], [DOCUMENTS[1], DOCUMENTS[2]], [DOCUMENTS[3], DOCUMENTS[4]], [DOCUMENTS[5], DOCUMENTS[6], DOCUMENTS[7]]]],
    "one row each": [[[DOCUMENTS[0]]], [[DOCUMENTS[1], DOCUMENTS[2]]], [[DOCUMENTS[3], DOCUMENTS[4]]], [[DOCUMENTS[5], DOCUMENTS[6], DOCUMENTS[7]]]],
    "uneven": [[[DOCUMENTS[0]]], [[DOCUMENTS[1], DOCUMENTS[2]], [DOCUMENTS[3], DOCUMENTS[4]], [DOCUMENTS[5], DOCUMENTS[6], DOCUMENTS[7]]]],
    "a document a row": [[[document] for document in DOCUMENTS]],
    "other neighbours": [[[DOCUMENTS[7], DOCUMENTS[1]], [DOCUMENTS[4], DOCUMENTS[3]]], [[DOCUMENTS[6], DOCUMENTS[2]], [DOCUMENTS[5]], [DOCUMENTS[0]]]],
}  # fmt: skip


@pytest.mark.parametrize("packing", list(PACKINGS)[1:])
@pytest.mark.parametrize("distilled", [False, True])
def test_splitting_and_packing_change_nothing(packing: str, distilled: bool) -> None:
    model, parent = network(), network(1)
    lesson = Distil(parent, parent.config.full(), 0.4) if distilled else None

    def train(rows: list[list[list[list[int]]]]) -> tuple[StepResult, dict[str, Tensor]]:
        return step(model, [micro(each, model.config.full(), distil=lesson) for each in rows])

    result, grads = train(PACKINGS["one micro-batch"])
    other, others = train(PACKINGS[packing])
    assert other.num_tokens == result.num_tokens == sum(len(document) - 1 for document in DOCUMENTS)
    assert (other.nll, other.grad_norm) == pytest.approx((result.nll, result.grad_norm), rel=SAME)
    assert distance(grads, others) <= SAME
    assert all(torch.equal(counts, other.counts[row]) for row, counts in result.counts.items()), (
        "padding does not count"
    )


def test_the_gradient_is_that_of_the_mean_over_all_tokens() -> None:
    """Against autograd through the plain definition, over micro-batches with different Subnets."""
    model = network()
    config = model.config
    batches = [
        micro([[DOCUMENTS[0]]], config.full()),
        micro([[DOCUMENTS[4]], [DOCUMENTS[5]]], config.subnet(3, 4, 2), kind="corner"),
    ]
    result, grads = step(model, batches)
    model.zero_grad(set_to_none=True)
    sums = []
    for batch in batches:
        hidden_ND = model(batch.ids_BT, batch.subnet, batch.ctx).hidden_BTD.flatten(0, 1)
        sums.append(-chosen_logprobs_reference(hidden_ND, model.head_VD, batch.targets_BT.flatten())[0].sum())
    (sum(sums) / 32).backward()  # 23 + 3 + 6 targets
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert distance(expected, grads) <= SAME
    assert result.tokens_by_kind == {"full": 23, "corner": 9}
    assert result.nll_by_kind == {"full": pytest.approx(sums[0].item()), "corner": pytest.approx(sums[1].item())}
    assert result.nll == pytest.approx(sum(each.item() for each in sums) / 32)
    norm = sum(float(grad.square().sum()) for grad in expected.values()) ** 0.5
    assert result.grad_norm == pytest.approx(norm, rel=SAME)


def test_a_teacher_that_is_the_student_teaches_nothing() -> None:
    model = network()
    itself = Distil(model, model.config.full(), 0.0)
    result, grads = step(model, [micro([DOCUMENTS[:1]], model.config.full(), distil=itself)])
    assert result.grad_norm == 0.0
    assert all(torch.count_nonzero(grad) == 0 for grad in grads.values())
    half = Distil(model, model.config.full(), 0.5)
    _, plain = step(model, [micro([DOCUMENTS[:1]], model.config.full())])
    _, blend = step(model, [micro([DOCUMENTS[:1]], model.config.full(), distil=half)])
    assert distance({name: 0.5 * grad for name, grad in plain.items()}, blend) <= SAME


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_teachers_pass_does_not_cut_the_students_gradient(dtype: torch.dtype) -> None:
    """Autocast keeps converted weights; those of a pass without gradients must not serve the pass with them."""
    model = network()
    nearly_ce = Distil(model, model.config.full(), 1 - 1e-6)
    _, alone = step(model, [micro([DOCUMENTS[:1]], model.config.full())], dtype=dtype)
    _, taught = step(model, [micro([DOCUMENTS[:1]], model.config.full(), distil=nearly_ce)], dtype=dtype)
    assert distance(alone, taught) <= 1e-5


def test_an_anchor_feeds_its_own_branch_and_outer_experts_get_nothing() -> None:
    model = network()
    corner = model.config.subnet(4, 4, 2)
    anchor = micro([DOCUMENTS[:1]], corner, "corner", distil=Distil(model, model.config.full(), 0.5))
    result, grads = step(model, [anchor], rate=0.01)
    outer = list(model.config.expert_orders[0][4:])
    for name, grad in grads.items():
        if name.endswith((".mlp.gate", ".mlp.gate_up", ".mlp.down")):
            assert torch.count_nonzero(grad[outer]) == 0 and torch.isfinite(grad).all(), name
    for row, counts_WE in result.counts.items():
        assert counts_WE.sum(1).tolist() == [0, LENGTH * 2], "the teacher's pass is not counted"
        bias_WE = moe_layers(model)[row].bias_WE
        assert torch.count_nonzero(bias_WE[0]) == 0, "the full width saw no token"
        assert torch.count_nonzero(bias_WE[1][outer]) == 0 and torch.count_nonzero(bias_WE[1]) >= 2


@pytest.mark.parametrize("ce_weight", [0.5, 1.0])
def test_a_teacher_that_learns_adds_its_own_gradient(ce_weight: float) -> None:
    """The sandwich rule: the gradient of both passes is the sum of each pass's own."""
    model = network()
    full, corner = model.config.full(), model.config.subnet(4, 4, 2)

    def both(learns: bool) -> tuple[StepResult, dict[str, Tensor]]:
        lesson = Distil(model, full, ce_weight, learns)
        return step(model, [micro([DOCUMENTS[:1]], corner, "corner", distil=lesson)])

    alone, alone_grads = step(model, [micro([DOCUMENTS[:1]], full)])
    taught, taught_grads = both(False)
    joint, joint_grads = both(True)
    assert distance({name: grad + alone_grads[name] for name, grad in taught_grads.items()}, joint_grads) <= SAME
    assert joint.nll_by_kind == {"full": pytest.approx(alone.nll * 23), "corner": pytest.approx(taught.nll * 23)}
    assert (joint.tokens_by_kind, joint.num_tokens) == ({"full": 23, "corner": 23}, 23)
    only_taught = alone.flops // 3 if ce_weight < 1.0 else 0  # a forward pass of a teacher that does not learn
    assert joint.flops == alone.flops + taught.flops - only_taught
    for row, counts_WE in joint.counts.items():
        assert torch.equal(counts_WE, alone.counts[row] + taught.counts[row])


@pytest.mark.parametrize("ce_weight", [0.5, 1.0])
@pytest.mark.parametrize("narrow", [[True, False], [True, True], [False, False]])
def test_a_teacher_of_some_rows_teaches_and_learns_those(ce_weight: float, narrow: list[bool]) -> None:
    """Each narrowed row counts as if it came in a batch of its own, the others as plain ones."""
    model = network()
    full, is_narrow_B = model.config.full(), torch.tensor(narrow)

    def widths(narrow_B: Tensor) -> RowWidths:
        allowed_BE = torch.where(narrow_B[:, None], torch.arange(8) < 4, True)
        return RowWidths(narrow_B.long(), allowed_BE, torch.ones_like(narrow_B))

    documents = DOCUMENTS[:2]
    num = [len(document) - 1 for document in documents]
    num_taught = sum(each for each, is_narrow in zip(num, narrow, strict=True) if is_narrow)
    rows = TaughtRows(is_narrow_B, sum(narrow), num_taught)
    lesson = Distil(model, full, ce_weight, learns=True, rows=rows)
    whole = micro([[document] for document in documents], full, distil=lesson, widths=widths(is_narrow_B))
    found, found_grads = step(model, [whole])
    apart = []
    for document, is_narrow in zip(documents, narrow, strict=True):
        if is_narrow:
            apart.append(micro([[document]], full))
            taught = Distil(model, full, ce_weight)
            apart.append(micro([[document]], full, distil=taught, widths=widths(torch.tensor([True]))))
        else:
            apart.append(micro([[document]], full))
    expected, expected_grads = step(model, apart)
    scale = (sum(num) + num_taught) / sum(num)  # a step divides by the tokens it was given
    assert distance({name: grad * scale for name, grad in expected_grads.items()}, found_grads) <= 2 * SAME
    assert found.tokens_by_kind["full"] == expected.tokens_by_kind["full"] == sum(num) + num_taught
    assert found.nll == pytest.approx(expected.nll)
    assert found.num_tokens == sum(num)


def moe_layers(model: Transformer) -> list[MoeLayer]:
    return [block.mlp for block in model.blocks if isinstance(block.mlp, MoeLayer)]


def test_recomputation_counts_once_and_gives_the_same_gradient() -> None:
    model = network()
    plain, grads = step(model, [micro([DOCUMENTS[:1]], model.config.full())])
    again, others = step(model, [micro([DOCUMENTS[:1]], model.config.full(), recompute=True)])
    assert all(torch.equal(grad, others[name]) for name, grad in grads.items())
    assert all(torch.equal(counts, again.counts[row]) for row, counts in plain.counts.items())
    assert again.nll == plain.nll and again.flops > plain.flops


@pytest.mark.parametrize("clip", [0.01, 1e9])
def test_clipping_holds_the_global_norm(clip: float) -> None:
    model = network()
    result, grads = step(model, [micro([DOCUMENTS[:1]], model.config.full())], clip=clip)
    norm = sum(float(grad.square().sum()) for grad in grads.values()) ** 0.5
    assert norm == pytest.approx(min(clip, result.grad_norm), rel=1e-4)
    assert 0.01 < result.grad_norm < 1e9


def poison_a_weight(model: Transformer) -> Callable[[], None]:
    with torch.no_grad():
        model.embedding.weight[DOCUMENTS[0][3]] = torch.nan
    return lambda: None


def poison_a_gradient(model: Transformer) -> Callable[[], None]:
    handle = model.norm.weight.register_hook(lambda grad: grad * torch.inf)
    return handle.remove


@pytest.mark.parametrize(
    ("poison", "message"),
    [(poison_a_weight, "the loss of full is not finite"), (poison_a_gradient, "the gradient is not finite")],
)
def test_nothing_is_applied_when_something_is_not_finite(
    poison: Callable[[Transformer], Callable[[], None]], message: str
) -> None:
    model, ranks = network(), join("cpu")
    optimizers = build_optimizers(OptimConfig(lr=1e-3), model)
    batches = [micro([DOCUMENTS[:1]], model.config.full()), micro([DOCUMENTS[1:2]], model.config.full(), "other")]
    settings: dict[str, Any] = {"clip_norm": 1.0, "balance_rate": 0.01, "dtype": torch.float32}
    optimisation_step(model, optimizers, batches, ranks, **settings)
    poison(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moments = [value.clone() for state in optimizers[0].state.values() for value in state.values()]
    with pytest.raises(NonFiniteError, match=message) as caught:
        optimisation_step(model, optimizers, batches, ranks, **settings)
    assert "\n" not in str(caught.value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(7.0), weights[name].nan_to_num(7.0)), name
    after = [value for state in optimizers[0].state.values() for value in state.values()]
    assert all(torch.equal(*pair) for pair in zip(moments, after, strict=True))


@pytest.mark.slow
def test_training_brings_the_load_of_every_width_down() -> None:
    """Weights train too; half the rows are narrow. The same run without balancing is the control."""

    def overload(rate: float) -> tuple[float, float]:
        model = network(num_layers=2, num_shared_experts=0)
        with torch.no_grad():
            for layer in moe_layers(model):
                layer.gate.mul_(4.0)  # uneven from the start
        optimizers = build_optimizers(OptimConfig(lr=1e-3), model)
        allowed_BE = torch.ones(2, 8, dtype=torch.bool)
        allowed_BE[1, 4:] = False
        widths = RowWidths(torch.tensor([0, 1]), allowed_BE, torch.ones(2, dtype=torch.bool))
        rows = [[DOCUMENTS[0]], [DOCUMENTS[0]]]
        for _ in range(80):
            result = optimisation_step(
                model, optimizers, [micro(rows, model.config.full(), widths=widths)], join("cpu"),
                clip_norm=1.0, balance_rate=rate, dtype=torch.float32,
            )  # fmt: skip
        inner = list(model.config.expert_orders[0][:4])
        counts = list(result.counts.values())
        return max(load_balance(each[0]) for each in counts), max(load_balance(each[1][inner]) for each in counts)

    balanced, control = overload(0.01), overload(0.0)
    assert balanced[0] < 0.75 * control[0] and balanced[1] < control[1], (balanced, control)


def test_an_objective_brings_its_own_normaliser_and_streams() -> None:
    """The step divides nothing and knows nothing: cross-entropy handed in as an objective is cross-entropy."""
    model = network()
    plain, grads = step(model, [micro([[DOCUMENTS[0]], [DOCUMENTS[1]]], model.config.full())])

    def objective(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor) -> Measured:
        logp_N, entropy_N = chosen_logprobs(hidden_ND, head_VD, targets_N)
        return Measured(-logp_N.sum() / plain.num_tokens, -logp_N.detach(), {"entropy": entropy_N})

    result, others = step(model, [micro([[each]], model.config.full(), objective=objective) for each in DOCUMENTS[:2]])
    assert distance(grads, others) <= SAME
    assert (result.nll, result.num_tokens) == (pytest.approx(plain.nll, rel=SAME), plain.num_tokens)
    assert [each["entropy"].shape for each in result.streams_N] == [(LENGTH,), (LENGTH,)] and plain.streams_N == []


CONFIG = ModelConfig(
    vocab_size=64, hidden_size=16, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=8,
    num_experts=4, top_k=2, expert_intermediate_size=8,
)  # fmt: skip


def test_every_pass_in_the_block_counts_and_none_after_it() -> None:
    model = build(CONFIG, 0)
    ids_BT = torch.zeros(3, 10, dtype=torch.int64)
    small = CONFIG.subnet(depth=4, experts=2, top_k=1)
    meter = Meter("search", "cpu")
    with metered(model, meter):
        model(ids_BT, CONFIG.full(), Context.plain(ids_BT))
        model(ids_BT, small, Context.plain(ids_BT))
    model(ids_BT, small, Context.plain(ids_BT))

    passes = [count(CONFIG, CONFIG.full()), count(CONFIG, executed(CONFIG, small))]
    assert meter.receipt().flops == sum(each.forward_flops(30, 10) for each in passes)
    assert meter.receipt().tokens == 0, "nothing was trained on them"


def test_a_masked_pass_scores_all_experts() -> None:
    small = CONFIG.subnet(depth=4, experts=2, top_k=1)
    assert executed(CONFIG, small).experts == (4, 4, 4, 4)
    assert executed(CONFIG, small).top_k == small.top_k


def compact_step(model: Transformer, batches: list[MicroBatch], clip: float, **settings: Any) -> StepResult:
    """One step in bf16 with the optimiser of ``settings``."""
    optimizers = build_optimizers(OptimConfig(lr=1e-2, **settings), model)
    return optimisation_step(
        model, optimizers, batches, join("cpu"), clip_norm=clip, balance_rate=0.0, dtype=torch.bfloat16
    )


def test_a_step_on_split_weights_is_that_on_fp32_weights_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products read the same bf16 numbers, and a weight's gradient in fp32 is the widened bf16 one."""
    monkeypatch.setattr(
        training, "has_bf16_kernels", lambda: False
    )  # which gives a gradient in fp32 that is not rounded
    states = []
    for master in ("fp32", "split"):
        model = network()
        compact_step(model, [micro([[DOCUMENTS[0]], [DOCUMENTS[3]]], model.config.full())], 1e9, master=master)
        states.append(full_state(model))
        assert (model.blocks[0].attention.qkv.weight.dtype == torch.bfloat16) == (master == "split")
    one, other = states
    assert one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("joint", [False, True])
def test_a_step_in_the_backward_pass_is_an_ordinary_one(joint: bool) -> None:
    """Without clipping, of micro-batches whose last one drops a layer, and of a teacher that learns in a pass of its own. Each weight moves
    once, by the sum of its gradients, which are free afterwards; what no pass reached does not decay."""
    states, norms = [], []
    for in_backward in (False, True):
        model = network()
        full, small = model.config.full(), model.config.subnet(3, 4, 2)
        lesson = Distil(model, model.config.subnet(3, 8, 3), 0.5, learns=True)
        last = micro([[DOCUMENTS[4]], [DOCUMENTS[5]]], small, "corner", distil=lesson if joint else None)
        batches = [last] if joint else [micro([[DOCUMENTS[0]]], full), last]
        norms.append(compact_step(model, batches, 1e9, master="split", in_backward=in_backward).grad_norm)
        states.append(full_state(model))
        assert all(parameter.grad is None for parameter in model.parameters())
    one, other = states
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert norms[0] == pytest.approx(norms[1], rel=SAME)
    (layer,) = set(full.layers) - set(small.layers)
    left_out = f"blocks.{layer}.attention.qkv.weight"
    assert torch.equal(one[left_out], full_state(network())[left_out]) == joint


def test_a_step_in_the_backward_pass_clips_by_the_norm_before() -> None:
    model, ranks = network(), join("cpu")
    (optimizer,) = build_optimizers(OptimConfig(lr=1e-2, in_backward=True), model)
    batch = micro([[DOCUMENTS[0]]], model.config.full())
    for _ in range(2):
        result = optimisation_step(
            model, [optimizer], [batch], ranks, clip_norm=0.1, balance_rate=0.0, dtype=torch.float32
        )
    assert result.grad_norm > 0.1
    assert float(optimizer.begin(0.1)) == pytest.approx(0.1 / result.grad_norm, rel=1e-4)
    assert float(optimizer.begin(0.1)) == 1.0  # no gradient since
