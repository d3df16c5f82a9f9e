from __future__ import annotations

import pytest

from stretto.evals.loss import evaluate, rank_layers, without_layers
from stretto.search.search import Sensitivities, measure_sensitivities


def test_a_dead_layer_ranks_last(make_model, batches):
    model = make_model()
    model.blocks[2].attention.out.weight.data.zero_()
    model.blocks[2].mlp.down.data.zero_()
    model.blocks[2].mlp.shared.down.weight.data.zero_()
    ranking = rank_layers(model, batches)
    assert ranking.order == (0, 1, 4, 5, 3, 2)
    assert ranking.logit_error[2] == 0.0 < ranking.logit_error[3]


def test_first_and_last_two_layers_come_first_even_when_dead(make_model, batches):
    model = make_model()
    for layer in (0, 5):
        model.blocks[layer].attention.out.weight.data.zero_()
        model.blocks[layer].mlp.down.data.zero_()
        model.blocks[layer].mlp.shared.down.weight.data.zero_()
    assert set(rank_layers(model, batches).order[:4]) == {0, 1, 4, 5}


def test_axis_points_are_predicted_exactly(make_model, batches):
    model = make_model()
    config = model.config
    found = measure_sensitivities(model, batches, [2, 4], [1, 2])
    points = [
        config.full(),
        config.subnet(depth=4),
        config.subnet(depth=5),
        config.subnet(experts=4),
        config.subnet(top_k=1),
    ]
    points.append(without_layers(config, {3}))
    for subnet in points:
        assert found.predict(config, subnet) == pytest.approx(evaluate(model, subnet, batches).nll, abs=1e-9)


def test_prediction_lies_between_measured_counts(make_model):
    config = make_model().config
    found = Sensitivities(full_nll=1.0, drop={}, depth={6: 0.0}, experts={6: 0.0, 2: 0.4}, top_k={3: 0.0})
    assert found.predict(config, config.subnet(experts=4)) == pytest.approx(1.2)


def test_sensitivities_survive_json(make_model, batches):
    found = measure_sensitivities(make_model(), batches[:1], [3], [1])
    assert Sensitivities.model_validate_json(found.model_dump_json()) == found
