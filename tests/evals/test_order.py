from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from stretto.base.errors import UserError
from stretto.evals.loss import evaluate_many, without_layers
from stretto.evals.order import (
    LayerRouting,
    expert_order,
    expert_orders,
    layer_order,
    rank_experts,
    rank_layers,
    removal_order,
    super_experts,
    survey,
)
from stretto.evals.routing import Watch, routing
from stretto.model.parallel import Ranks
from stretto.model.spec import droppable_layers
from stretto.model.transformer import Context, build
from stretto.ops.logprob import IGNORED
from tests.ops.references import experts_reference


def test_leaving_out_equals_a_pass_for_every_layer(make_model, batches):
    model = make_model(num_layers=7)
    layers = droppable_layers(model.config)
    reports = evaluate_many(
        model, [without_layers(model.config, {layer}) for layer in layers], batches, against_full=True
    )
    errors = {layer: report.logit_error for layer, report in zip(layers, reports, strict=True)}
    ranking = rank_layers(model, batches)
    assert ranking.logit_error == errors  # to the bit: the same operations on the same rows
    assert ranking.order == (0, 1, 5, 6, *sorted(layers, key=lambda layer: -errors[layer]))


def test_rows_in_pieces_measure_the_same(make_model, batches, monkeypatch):
    model = make_model()
    whole = rank_layers(model, batches)
    monkeypatch.setattr("stretto.evals.order.CARRIED_BYTES", 1)
    pieces = rank_layers(model, batches)
    assert pieces.flops == whole.flops
    assert pieces.logit_error == pytest.approx(whole.logit_error, rel=1e-5)


def test_side_by_side_equals_one_after_the_other(make_model, batches):
    model = make_model()
    one, all_ = (survey(model, batches, left_out=1, side_by_side=num) for num in (1, None))
    assert one == all_
    assert set(one.logit_error) == set(droppable_layers(model.config))


def test_each_part_is_held_once_and_nothing_else_is_read(make_model, batches):
    model = make_model()
    expected = survey(model, batches, left_out=2)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held: list[str] = []

    @contextmanager
    def hold(part):
        """What is not held is NaN."""
        held.append(part)
        mine = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(f"{part}.")}
        for name, tensor in mine.items():
            tensor.copy_(state[name])
        yield
        for tensor in mine.values():
            tensor.fill_(torch.nan)

    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(torch.nan)
        assert survey(model, batches, left_out=2, hold=hold) == expected
    assert held == ["embedding", *(f"blocks.{layer}" for layer in range(6)), "norm", "head"]


def test_block_influence_is_the_angle_between_the_stream_before_and_after(make_model, batches):
    model = make_model()
    seen = []
    handle = model.blocks[3].register_forward_hook(lambda _, arguments, output: seen.append((arguments[0], output[0])))
    found = survey(model, batches).influence
    handle.remove()
    real = [batch.real_BT for batch in batches]
    before, after = (torch.cat([pair[side][r] for pair, r in zip(seen, real, strict=True)]) for side in (0, 1))
    cosine = (before * after).sum(-1) / (before.norm(dim=-1) * after.norm(dim=-1))
    assert found[3] == pytest.approx(1 - float(cosine.mean()), abs=1e-5)
    assert set(found) == set(range(6))


def test_a_layer_that_does_nothing_has_no_influence(make_model, batches):
    model = make_model()
    model.blocks[2].attention.out.weight.data.zero_()
    model.blocks[2].mlp.down.data.zero_()
    model.blocks[2].mlp.shared.down.weight.data.zero_()
    influence = survey(model, batches).influence
    assert influence[2] == pytest.approx(0, abs=1e-6)
    assert layer_order(model.config, influence)[-1] == 2


def test_watching_changes_no_bit(make_model, batches):
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(hidden_size=32).to(dtype)
        watch = Watch(model.config, "cpu")
        for batch in batches:
            watched = model.logits(batch.ids_BT, ctx=watch.over(batch))
            assert torch.equal(watched, model.logits(batch.ids_BT, ctx=batch.ctx))


@torch.no_grad()
def test_the_peak_is_the_largest_element_before_the_gate(make_model, batches):
    model = make_model()
    layer = model.blocks[2].mlp
    batch = replace(batches[0], ctx=Context.plain(batches[0].ids_BT))
    seen = []
    handle = layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments))
    found = next(one for one in routing(model, model.config.full(), [batch]) if one.row == 2)
    handle.remove()
    x_BTD, num_experts, top_k, widths, *_ = seen[0]
    chosen_NK = layer.route(x_BTD, num_experts, top_k, widths)[0].chosen_NK
    for expert in range(6):
        token = (chosen_NK == expert).any(1).nonzero().squeeze(1)
        alone = torch.full((len(token), 1), expert)
        y = experts_reference(
            x_BTD.flatten(0, 1)[token], alone, torch.ones_like(alone, dtype=torch.float32), layer.gate_up, layer.down
        )
        assert found.peak[expert] == pytest.approx(float(y.abs().max()), rel=1e-4)


@pytest.mark.parametrize(
    ("num", "changes"),
    [
        (7, {}),
        (7, {"router": "softmax"}),
        (7, {"router": "softmax", "normalize_gates": False}),
        (7, {"normalize_gates": False, "routed_scaling": 2.5}),
        (12, {"expert_groups": 3, "top_groups": 2}),
    ],
)
@torch.no_grad()
def test_removal_takes_what_changes_the_output_least(make_model, num, changes):
    """Against trying every removal by running the layer without it, on the tokens that chose the expert."""
    model = make_model(num_shared_experts=0, num_experts=num, top_k=2, widths=(num,), num_branches=1, **changes)
    layer, groups = model.blocks[2].mlp, model.config.expert_groups
    x_ND = torch.randn(64, 24, generator=torch.Generator().manual_seed(3))

    def run(kept):
        smaller = torch.zeros(num, dtype=torch.bool)
        smaller[list(kept)] = True
        layer.rank_E.copy_(torch.where(smaller, 0, num - 1))  # all that are kept share the first rank
        arguments = x_ND.unsqueeze(0), 1 if len(kept) < num else num, 2, None
        return layer.route(*arguments)[0].chosen_NK, layer(*arguments)[0][0]

    ranks_E = layer.rank_E.clone()
    kept, gone, whole_ND = set(range(num)), [], run(range(num))[1]
    while len(kept) > model.config.holding(0, 2):
        chosen_NK, now_ND = run(kept)
        sizes = [sum(expert * groups // num == group for expert in kept) for group in range(groups)]
        damage = {}
        for expert in kept:
            if sizes[expert * groups // num] == max(sizes):
                is_hit_N = (chosen_NK == expert).any(1)
                errors_N = ((without_ND - whole_ND).square().sum(1) for without_ND in (run(kept - {expert})[1], now_ND))
                damage[expert] = float((next(errors_N) - next(errors_N))[is_hit_N].sum())
        gone.append(min(damage, key=lambda expert: damage[expert]))
        kept.remove(gone[-1])
    layer.rank_E.copy_(ranks_E)
    order = removal_order(layer, x_ND)
    assert list(order[: len(kept) - 1 : -1]) == gone
    assert set(order[: len(kept)]) == kept


def test_rules_rank_differently_and_a_dead_expert_goes_first(make_model, batches):
    model = make_model()
    model.blocks[3].mlp.down.data[1] = 0.0
    found = survey(model, batches, removal=True)
    orders = {rule: expert_orders(model.config, found, rule) for rule in ("removal", "reap", "frequency")}
    assert len(set(orders.values())) == 3
    assert orders["removal"] == rank_experts(model, batches).orders
    assert orders["reap"][3][-1] == orders["removal"][3][-1] == 1
    assert orders["frequency"][0] == tuple(sorted(range(6), key=lambda expert: -found.experts[0].load[expert]))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"router": "softmax", "normalize_gates": False},
        {"num_experts": 12, "widths": (12, 6), "expert_groups": 3, "top_groups": 2, "routed_scaling": 2.5},
    ],
)
@pytest.mark.parametrize("rule", ["removal", "reap"])
def test_what_is_kept_is_worth_more_than_what_is_dropped(make_model, batches, rule, changes):
    model = make_model(**changes)
    order, lost = expert_orders(model.config, survey(model, batches, removal=True), rule), []
    for kept in (order, tuple(each[::-1] for each in order)):
        cut = build(model.config.replace(expert_order=kept), 0)  # refuses groups that do not take turns
        cut.load_state_dict(model.state_dict())
        lost.append(
            evaluate_many(cut, [cut.config.subnet(experts=model.config.num_experts // 2)], batches, against_full=True)[
                0
            ].kl
        )
    assert lost[0] < lost[1]


def test_an_order_of_groups_keeps_them_equal():
    worth = [9, 8, 7, 1, 2, 3, 4, 5, 6, 0, 0, 0]
    order = expert_order(worth, protected={3}, groups=3)
    assert sorted(order) == list(range(12))
    for num in range(0, 12, 3):
        assert [sum(expert // 4 == group for expert in order[: num + 3]) for group in range(3)] == [num // 3 + 1] * 3
    assert order[:3] == (3, 8, 7)  # the protected one, then the best of the other groups, by worth
    assert expert_order(worth, protected={3})[:3] == (3, 0, 1)


def test_a_super_expert_is_kept_before_all_others(make_model):
    config = make_model().config
    quiet = [LayerRouting(row, (9,) * 6, (1.0,) * 6, (1.0,) * 6) for row in range(6)]
    assert not any(super_experts(config, quiet).values())
    loud = [replace(layer, peak=(1.0, 1.0, 50.0, 1.0, 1.0, 1.0)) if layer.row in (1, 5) else layer for layer in quiet]
    found = super_experts(
        config, [replace(loud[1], peak=(1.0, 1.0, 60.0, 1.0, 1.0, 1.0)) if row == 1 else loud[row] for row in range(6)]
    )
    assert found[1] == {2}
    assert not found[5]  # the last quarter of the layers writes large values anyway


def test_the_largest_of_few_experts_is_not_super_for_that(make_model):
    layers = [LayerRouting(row, (9,) * 6, (1.0,) * 6, (1.0, 1.0, 9.0 - row, 1.0, 1.0, 1.0)) for row in range(6)]
    assert not any(super_experts(make_model().config, layers).values())


def test_rankings_tell_of_every_layer_and_batch(make_model, batches):
    model, steps = make_model(), []
    rank_layers(model, batches, steps.append)
    rank_experts(model, batches, steps.append)
    assert steps == [1] * (2 * model.config.num_layers * len(batches))


class ThreadRanks(Ranks):
    """A rank that is a thread of this process. ``values``: what each rank has brought to the ``meeting``."""

    meeting: threading.Barrier
    values: list[torch.Tensor | None]

    def gather(self, value):
        self.values[self.rank] = value.clone()
        self.meeting.wait(60.0)
        gathered = torch.stack(self.values)
        self.meeting.wait(60.0)
        return gathered

    def sum(self, value, group=None):
        return value.copy_(self.gather(value).sum(0))


def on_ranks(measure, shares):
    """``measure(batches, ranks)`` on as many ranks as there are ``shares`` of the batches."""
    world = len(shares)
    meeting, values = threading.Barrier(world), [None] * world
    ranks = [ThreadRanks(rank, world, torch.device("cpu")) for rank in range(world)]
    for each in ranks:
        object.__setattr__(each, "meeting", meeting)
        object.__setattr__(each, "values", values)
    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(measure, shares, ranks))


def padding_like(batch):
    ctx = replace(batch.ctx, documents_BT=torch.full_like(batch.ids_BT, -1))
    return replace(batch, targets_BT=torch.full_like(batch.targets_BT, IGNORED), ctx=ctx)


def test_ranks_measure_their_own_rows_and_rank_by_all(make_model, batches):
    """Rows of a batch are independent of each other, so three batches on three ranks are three batches on one. The last rank has padding."""
    model, shares = make_model(), [[batches[0]], [batches[1]], [padding_like(batches[0])]]
    together = [batch for share in shares for batch in share]
    expected = survey(model, together, left_out=3, removal=True)
    orders = rank_layers(model, together).order, rank_experts(model, together).orders
    half = rank_layers(model, batches[:1]), rank_experts(model, batches[:1])
    assert expected.logit_error != half[0].logit_error and orders[1] != half[1].orders
    for found in on_ranks(lambda own, ranks: survey(model, own, left_out=1, removal=True, ranks=ranks), shares):
        assert found.removal == expected.removal and found.flops == expected.flops
        for name in ("logit_error", "influence"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12)
        for layer, other in zip(found.experts, expected.experts, strict=True):
            assert (layer.load, layer.peak) == (other.load, other.peak)
            assert layer.saliency == pytest.approx(other.saliency, rel=1e-12)
    for layers in on_ranks(lambda own, ranks: rank_layers(model, own, ranks=ranks), shares):
        assert layers.order == orders[0]
    for experts in on_ranks(lambda own, ranks: rank_experts(model, own, ranks=ranks), shares):
        assert experts.orders == orders[1]


def test_ranks_share_the_tokens_of_a_removal(make_model, batches, monkeypatch):
    """Two ranks use as many tokens as one does, not twice as many."""
    model, used = make_model(), []
    monkeypatch.setattr("stretto.evals.order.REMOVAL_TOKENS", 16)
    monkeypatch.setattr(
        "stretto.evals.order.removal_flops", lambda layer, num_tokens: used.append(num_tokens) or num_tokens
    )
    rank_experts(model, batches[:1] * 2)
    alone, used[:] = sum(used), []
    on_ranks(lambda own, ranks: rank_experts(model, own, ranks=ranks), [batches[:1]] * 2)
    assert sum(used) == alone


def test_padding_alone_is_ranked_without_an_error(make_model, batches):
    model, padding = make_model(), padding_like(batches[0])
    assert sorted(rank_layers(model, [padding]).order) == list(range(6))
    found = rank_experts(model, [padding])
    assert [sorted(order) for order in found.orders] == [sorted(order) for order in model.config.expert_orders]


def test_no_target_and_no_expert(make_model, batches):
    blank = replace(batches[0], targets_BT=torch.full_like(batches[0].targets_BT, IGNORED))
    with pytest.raises(UserError, match="contains no target token"):
        rank_layers(make_model(), [blank])
    dense = make_model(dense_layers=(0, 1, 2, 3, 4, 5), dense_intermediate_size=16)
    found = survey(dense, batches, left_out=2)
    assert not found.experts and set(found.logit_error) == {2, 3}
