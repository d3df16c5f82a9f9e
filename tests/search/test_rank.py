from __future__ import annotations

import pytest
import torch

from stretto.evals.loss import evaluate, rank_layers, without_layers
from stretto.search.rank import Sensitivities, measure_sensitivities, rank_experts, reordered


def test_a_dead_layer_ranks_last(make_model, batches):
    model = make_model()
    model.blocks[2].attention.out.weight.data.zero_()
    model.blocks[2].mlp.down.data.zero_()
    model.blocks[2].mlp.shared.down.weight.data.zero_()
    ranking = rank_layers(model, batches)
    assert ranking.order == (0, 1, 4, 5, 3, 2)
    assert ranking.logit_error[2] == 0.0 < ranking.logit_error[3]
    assert ranking.loss_increase[2] == 0.0 != ranking.loss_increase[3]


def test_first_and_last_two_layers_come_first_even_when_dead(make_model, batches):
    model = make_model()
    for layer in (0, 5):
        model.blocks[layer].attention.out.weight.data.zero_()
        model.blocks[layer].mlp.down.data.zero_()
        model.blocks[layer].mlp.shared.down.weight.data.zero_()
    assert set(rank_layers(model, batches).order[:4]) == {0, 1, 4, 5}


def test_a_dead_expert_ranks_last(make_model, batches):
    model = make_model()
    model.blocks[3].mlp.down.data[1] = 0.0
    orders = rank_experts(model, batches)
    assert [sorted(order) for order in orders] == [list(range(6))] * 6
    assert orders[3][-1] == 1


def test_reordered_keeps_the_full_network_and_changes_what_a_width_holds(make_model, batches):
    model = make_model()
    order = tuple(tuple(range(5, -1, -1)) for _ in range(6))
    copy = reordered(model, layer_order=(0, 1, 4, 5, 3, 2), expert_order=order)
    ids = batches[0].ids_BT
    assert torch.equal(copy.logits(ids), model.logits(ids))
    assert copy.config.subnet(depth=5).layers == (0, 1, 3, 4, 5)
    # masking in the copy keeps the last three experts, as masking all but those does by hand
    layer = copy.blocks[0].mlp
    chosen = layer.route(torch.randn(2, 30, 24), 3, 2, None)[0].chosen_NK
    assert set(chosen.unique().tolist()) == {3, 4, 5}
    assert model.config.expert_order is None and model.blocks[0].mlp.rank_E[0] == 0


def test_reordered_bias_follows_the_set_of_experts(make_model):
    model = make_model()
    same_set = (4, 0, 2, 1, 3, 5)  # interleaved_order(6) starts 0, 4, 2
    other_set = (1, 0, 2, 4, 3, 5)
    copy = reordered(model, expert_order=(same_set, *[other_set] * 5))
    old, new = model.blocks[0].mlp.bias_WE, copy.blocks[0].mlp.bias_WE
    assert torch.equal(new, old)
    assert torch.equal(copy.blocks[1].mlp.bias_WE[1], model.blocks[1].mlp.bias_WE[0])
    assert not torch.equal(model.blocks[1].mlp.bias_WE[1], model.blocks[1].mlp.bias_WE[0])


def test_reordered_refuses_what_is_no_permutation(make_model):
    with pytest.raises(ValueError, match="not a permutation"):
        reordered(make_model(), layer_order=(0, 1, 2, 3, 4, 4))


@pytest.mark.parametrize("each_layer", [False, True])
def test_axis_points_are_predicted_exactly(make_model, batches, each_layer):
    model = make_model()
    config = model.config
    found = measure_sensitivities(model, batches, [2, 4], [1, 2], each_layer=each_layer)
    points = [
        config.full(),
        config.subnet(depth=4),
        config.subnet(depth=5),
        config.subnet(experts=4),
        config.subnet(top_k=1),
    ]
    points.append(without_layers(config, {3}))
    if each_layer:
        assert set(found.experts_by_row) == set(range(6)) and set(found.top_k_by_row[0]) == {1, 2, 3}
    for subnet in points:
        assert found.predict(config, subnet) == pytest.approx(evaluate(model, subnet, batches).nll, abs=1e-9)


def test_counts_that_differ_by_layer_follow_the_single_layer_measurements(make_model):
    config = make_model().config
    by_row = {row: {6: 0.0, 3: 0.1 * (row + 1)} for row in range(6)}
    found = Sensitivities(
        full_nll=2.0, drop={}, depth={6: 0.0}, experts={6: 0.0, 3: 2.1}, top_k={3: 0.0}, experts_by_row=by_row
    )
    full = config.full()

    def narrow(row: int) -> float:
        counts = tuple(3 if at == row else 6 for at in range(6))
        return found.predict(config, full.replace(experts=counts))

    assert [narrow(row) for row in range(6)] == pytest.approx([2.1, 2.2, 2.3, 2.4, 2.5, 2.6])
    assert found.predict(config, config.subnet(experts=3)) == pytest.approx(4.1)


def test_prediction_lies_between_measured_counts(make_model):
    config = make_model().config
    found = Sensitivities(full_nll=1.0, drop={}, depth={6: 0.0}, experts={6: 0.0, 2: 0.4}, top_k={3: 0.0})
    assert found.predict(config, config.subnet(experts=4)) == pytest.approx(1.2)


def test_sensitivities_survive_json(make_model, batches):
    found = measure_sensitivities(make_model(), batches[:1], [3], [1], each_layer=True)
    assert Sensitivities.model_validate_json(found.model_dump_json()) == found
