from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.api import stages as api
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.records import Meter
from stretto.evals.loss import evaluate, without_layers
from stretto.evals.order import rank_experts, rank_layers
from stretto.model.parallel import join
from stretto.model.spec import ModelConfig, check_subnet, fixed_layers
from stretto.subnets.candidate import Limits, Scorer, pareto_front, require_feasible
from stretto.subnets.evolution import evolve, score_grids
from stretto.subnets.latency import DECODE, measure
from stretto.subnets.search import SearchOptions, SearchResult, search, spearman
from stretto.subnets.sensitivity import Sensitivities, measure_sensitivities, narrowed
from stretto.subnets.space import SearchSpace, reachable_limits
from stretto.train.pace import Pace
from stretto.train.recipe import HealRecipe

CONFIG = ModelConfig(
    vocab_size=41, hidden_size=24, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=6, num_experts=8, top_k=3,
    expert_intermediate_size=16, dense_layers=(0, 3), dense_intermediate_size=40, widths=(8, 6, 3),
)  # fmt: skip
SPACE = SearchSpace.of(CONFIG)
SIZES = Scorer(CONFIG, None, None)
GRID = [SIZES.sized(subnet, 0.0) for subnet in SPACE.grid(CONFIG)]


def test_the_default_space_holds_trained_widths_and_never_drops_the_ends():
    assert set(SPACE.experts) >= {3, 6, 8} and SPACE.top_k == (1, 2, 3)
    assert SPACE.droppable == (2, 3, 4, 5)
    assert [fixed_layers(num) for num in (1, 3, 4, 5)] == [(0,), (0, 1, 2), (0, 1, 2, 3), (0, 1, 3, 4)]


def test_the_grid_is_the_nested_subnets():
    assert GRID[0].subnet.layers == tuple(range(8))
    for candidate in GRID:
        depth = len(candidate.subnet.layers)
        experts, k = candidate.subnet.experts[0], candidate.subnet.top_k[0]
        assert candidate.subnet == CONFIG.subnet(depth, experts, k)
    assert len({candidate.subnet for candidate in GRID}) == len(GRID)


@given(
    st.sets(st.sampled_from(SPACE.droppable)),
    st.lists(st.sampled_from(SPACE.experts), min_size=6, max_size=6),
    st.sampled_from(SPACE.top_k),
)
def test_every_choice_is_a_legal_subnet_with_one_k_no_smaller_than_the_grids_smallest(dropped, experts, k):
    subnet = check_subnet(CONFIG, SPACE.subnet(CONFIG, sorted(dropped), experts, k))
    assert len(set(subnet.top_k)) == 1
    found = SIZES.sized(subnet, 0.0)
    assert found.total_params >= min(candidate.total_params for candidate in GRID)
    assert found.active_params >= min(candidate.active_params for candidate in GRID)


@given(st.sampled_from(GRID))
def test_a_limit_equal_to_the_size_fits_and_one_parameter_less_does_not(candidate):
    total = SIZES.sized(CONFIG.full()).total_params
    assert candidate.fits(Limits(max_total=candidate.total_share, max_active=candidate.active_share))
    assert not candidate.fits(Limits(max_total=(candidate.total_params - 1) / total))


def test_nothing_fits_says_the_nearest_and_what_to_raise():
    smallest = min(GRID, key=lambda candidate: candidate.total_params)
    share = f"{smallest.total_share:.3g}"
    with pytest.raises(UserError) as caught:
        require_feasible(GRID, Limits(max_total=0.05))
    assert str(caught.value) == (
        f"limits: nothing fits under total 0.05; the nearest is layers=4,experts=2,top_k=1 at total {share}; raise --max-total"
    )


def test_only_the_broken_limits_are_to_be_raised():
    slow = [candidate.replace(latency_ms=9.0) for candidate in GRID]
    with pytest.raises(UserError, match=r"under total 1 and latency 5 ms; .* latency 9 ms; raise --max-latency-ms$"):
        require_feasible(slow, Limits(max_total=1.0, max_latency_ms=5.0))


@pytest.mark.parametrize("experts", [(), (4, 2), (0, 1)])
def test_impossible_choices_are_refused(experts):
    with pytest.raises(ValueError, match="experts"):
        SPACE.replace(experts=experts)


FAST = SearchOptions(num_trials=60, population=12, num_evaluated=6, num_spread=4, num_healed=3)


def kill(model, *layers):
    for layer in layers:
        model.blocks[layer].attention.out.weight.data.zero_()
        model.blocks[layer].mlp.down.data.zero_()
        model.blocks[layer].mlp.shared.down.weight.data.zero_()


def best_within(scorer, limits):
    return min(candidate.predicted_nll for candidate in scorer.all() if candidate.fits(limits))


def planted(num_layers: int) -> Sensitivities:
    """Middle layers cost 1, 2, … in an order of their own; experts and k cost less the fewer are taken away."""
    middle = list(range(2, num_layers - 2))
    drop = {layer: 0.1 * (1 + (3 * index) % len(middle)) for index, layer in enumerate(middle)}
    depth = {num: 0.15 * (num_layers - num) for num in range(4, num_layers + 1)}
    return Sensitivities(
        full_nll=2.0,
        drop=drop,
        depth=depth,
        experts={6: 0.0, 5: 0.1, 4: 0.15, 3: 0.4, 2: 0.9},
        top_k={3: 0.0, 2: 0.05, 1: 0.5},
    )


def test_a_layer_with_all_its_experts_costs_nothing(make_model):
    """In a network whose layers differ, as one that was extracted from a search with --per-layer."""
    config = make_model(experts_per_layer=(2, 6, 4, 6, 6, 3), top_k_per_layer=(1, 3, 2, 3, 2, 3)).config
    costs = planted(6).replace(depth={6: 0.0})
    assert costs.predict(config, config.full()) == 2.0
    for experts in (3, 4, 5):
        narrow = narrowed(config, "experts", set(range(6)), experts)
        assert costs.predict(config, narrow) == pytest.approx(2.0 + costs.experts[experts])


def test_the_space_of_a_dense_network_is_its_layers(make_model):
    config = make_model(dense_layers=tuple(range(6)), dense_intermediate_size=16).config
    space = SearchSpace.of(config, widths="per_layer")
    assert (space.experts, space.top_k, space.widths) == ((config.num_experts,), (config.top_k,), "uniform")
    found = set(space.every(config))
    assert len(found) == 4 and {subnet.experts for subnet in found} == {()}


def test_groups_limit_nothing_in_a_dense_network(make_model):
    """As in the dense layers alone of a network whose experts have groups."""
    dense = {"dense_layers": tuple(range(6)), "dense_intermediate_size": 16}
    config = make_model(**dense, num_experts=1, top_k=1, expert_groups=4, top_groups=2, widths=(1,)).config
    space = SearchSpace.of(config)
    assert set(space.grid(config)) <= set(space.every(config))
    assert {len(subnet.layers) for subnet in space.grid(config)} == {4, 5, 6}


def test_the_space_of_grouped_experts_holds_equal_groups_alone(make_model):
    config = make_model(num_experts=16, top_k=6, expert_groups=4, top_groups=2, widths=(16,)).config
    space = SearchSpace.of(config)
    assert space.experts == (8, 12, 16)
    found = [check_subnet(config, subnet) for subnet in space.every(config)]
    assert {subnet.top_k[0] for subnet in found if subnet.experts[0] == 8} == {1, 2, 3, 4}
    assert check_subnet(config, narrowed(config, "experts", {0, 2}, 8)).top_k[:3] == (4, 6, 4)


def test_nsga_finds_the_planted_best_of_all_layer_choices(make_model):
    config = make_model(num_layers=11).config
    space = SearchSpace.of(config)
    limits = Limits(max_total=0.6, max_active=0.7)
    scorer = Scorer(config, None, None)
    scorer.sensitivities = planted(11)
    every = [
        scorer.sized(subnet, scorer.sensitivities.predict(config, subnet))
        for num in range(8)
        for dropped in combinations(space.droppable, num)
        for experts in space.experts
        for k in space.top_k
        for subnet in [space.subnet(config, dropped, (experts,) * 11, k)]
    ]
    best = min(candidate.predicted_nll for candidate in every if candidate.fits(limits))
    nested = min(
        scorer.sized(subnet, scorer.sensitivities.predict(config, subnet)).predicted_nll
        for subnet in space.grid(config)
        if scorer.sized(subnet).fits(limits)
    )
    score_grids(scorer, space)
    evolve(scorer, space, limits, "active", num_trials=100, population=30, seed=0)
    assert best_within(scorer, limits) == pytest.approx(best, abs=1e-9) and best < nested


def test_nsga_improves_on_equal_widths_where_layers_differ(make_model):
    config = make_model().config
    # three layers that need all their experts, three that need few
    by_row = {row: {6: 0.0, 4: 0.05, 2: 0.1} if row % 2 else {6: 0.0, 4: 1.0, 2: 2.0} for row in range(6)}
    scorer = Scorer(config, None, None)
    scorer.sensitivities = Sensitivities(
        full_nll=2.0,
        drop=dict.fromkeys((2, 3), 3.0),
        depth={4: 6.0, 5: 3.0, 6: 0.0},
        experts={6: 0.0, 4: 3.15, 2: 6.3},
        top_k={3: 0.0},
        experts_by_row=by_row,
    )
    space = SearchSpace.of(config, widths="per_layer").replace(experts=(2, 4, 6), top_k=(3,))
    limits = Limits(max_total=0.8)
    score_grids(scorer, space)
    equal = best_within(scorer, limits)
    evolve(scorer, space, limits, "active", num_trials=400, population=30, seed=0)
    assert equal == pytest.approx(5.15)
    assert best_within(scorer, limits) < 2.7


@pytest.mark.parametrize("layers", ["nested", "free"])
@pytest.mark.parametrize("widths", ["uniform", "per_layer"])
def test_the_same_seed_proposes_the_same_candidates(make_model, layers, widths):
    config = make_model().config
    space = SearchSpace.of(config, layers=layers, widths=widths)

    def run(seed: int) -> list:
        scorer = Scorer(config, None, None)
        scorer.sensitivities = planted(6)
        scorer.score(config.full())
        evolve(scorer, space, Limits(max_total=0.7), "active", num_trials=30, population=8, seed=seed)
        return scorer.all()

    assert run(1) == run(1) != run(2)


def test_search_drops_the_dead_layer_although_the_nested_order_would_drop_another(make_model, batches):
    model = make_model(num_layers=7)
    alive = model.config.layer_ranking[-1]
    dead = next(layer for layer in (2, 3, 4) if layer != alive)
    kill(model, dead)
    without_one = Limits(max_total=0.9)
    space = SearchSpace.of(model.config).replace(experts=(6,), top_k=(3,))
    found = search(model, batches, without_one, space=space, options=FAST)
    assert found.chosen.subnet.layers == tuple(layer for layer in range(7) if layer != dead)
    assert found.chosen.nll == pytest.approx(found.sensitivities.full_nll, abs=1e-9)
    assert found.summary()[0].startswith(f"chosen: 6 layers (without {dead}), 6 experts, top-3, total ")
    nested = found.replace(space=space.replace(layers="nested"))
    assert nested.summary()[0].startswith("chosen: 6 layers, 6 experts, top-3, total ")


def test_sizes_that_drop_different_layers_have_different_labels(make_model, batches):
    result = search(make_model(num_layers=7), batches, Limits(max_total=0.65), options=FAST)
    sizes = {
        (each.subnet.layers, each.subnet.experts[0], each.subnet.top_k[0]): result.label(each.subnet)
        for each in result.candidates
    }
    assert len(set(sizes.values())) == len(sizes) > len({candidate.subnet.label() for candidate in result.candidates})


def test_the_chosen_is_within_every_limit_and_best_of_those_evaluated(make_model, batches):
    model = make_model(num_layers=7)
    limits = Limits(max_total=0.65, max_active=0.7)
    presets = {"corner": model.config.subnet(5, 3, 2), "wide": model.config.subnet(depth=6)}
    result = search(model, batches, limits, options=FAST, presets=presets)
    within = [candidate for candidate in result.candidates if candidate.fits(limits)]
    assert result.chosen in within and len(within) >= FAST.num_evaluated
    assert result.chosen.nll == min(candidate.nll for candidate in within)
    assert result.chosen.total_share <= 0.65 and result.chosen.active_share <= 0.7
    for candidate in result.candidates:
        assert candidate.nll == pytest.approx(evaluate(model, candidate.subnet, batches).nll, abs=1e-9)
    # presets take part whether or not they are within the limits; the full network leads the list
    named = {candidate.name: candidate for candidate in result.candidates if candidate.name}
    assert set(named) == {"full", "corner", "wide"} and result.candidates[0] is named["full"]
    assert not named["wide"].fits(limits)
    assert result.num_tokens == 2 * 3 * 14
    assert -1 <= result.correlations.predicted_true <= 1
    assert any("rank correlation" in line for line in result.summary())
    assert SearchResult.model_validate_json(result.model_dump_json()) == result


def test_no_candidate_of_the_front_is_beaten(make_model, batches):
    result = search(make_model(), batches, Limits(max_total=0.8), options=FAST)
    points = [candidate.objectives("active") for candidate in result.candidates]
    assert 0 < len(result.front) <= len(points)
    for index in result.front:
        for other in points:
            assert any(a < b for a, b in zip(points[index], other, strict=True)) or points[index] == other


def test_healing_decides_among_the_best_few(make_model, batches):
    model = make_model()
    limits = Limits(max_total=0.8)
    plain = search(model, batches, limits, options=FAST)
    ranked = sorted((c for c in plain.candidates if c.fits(limits)), key=lambda candidate: candidate.nll)
    healed_loss = {candidate.subnet: 1.0 - 0.1 * place for place, candidate in enumerate(ranked[:3])}
    seen = []

    def heal(subnet):
        seen.append(subnet)
        return healed_loss[subnet]  # what was worst before becomes best

    result = search(model, batches, limits, options=FAST, heal=heal)
    assert seen == [candidate.subnet for candidate in ranked[:3]]
    assert result.chosen.subnet == ranked[2].subnet and result.chosen.healed_nll == pytest.approx(0.8)
    assert result.correlations.before_after_healing == pytest.approx(-1.0)
    assert plain.chosen.subnet == ranked[0].subnet and plain.correlations.before_after_healing is None


def test_latency_is_a_limit_and_the_third_objective(make_model, batches):
    def seconds(network, workload):
        return 1e-3 * (1.0 + sum(network.config.top_k_by_layer))

    model = make_model()
    table = measure(model, [2, 4, 6], [1, 2, 3], num_rounds=1, time_fn=seconds)
    result = search(model, batches, Limits(max_latency_ms=9.5), options=FAST, table=table)
    assert result.third == "latency" and result.workload == DECODE
    assert result.chosen.latency_ms <= 9.5
    assert result.candidates[0].latency_ms == pytest.approx(19.0)
    with pytest.raises(
        UserError, match=r"nothing fits under latency 2 ms; the nearest is layers=4,.*top_k=1 at latency 5 ms"
    ):
        search(model, batches, Limits(max_latency_ms=2.0), options=FAST, table=table)


def test_a_latency_limit_needs_a_table(make_model, batches):
    with pytest.raises(UserError, match="no latency table"):
        search(make_model(), batches, Limits(max_latency_ms=5.0))


def test_impossible_limits_are_refused_before_anything_is_evaluated(make_model):
    with pytest.raises(UserError, match=r"limits: nothing fits under total 0\.01"):
        search(make_model(), [], Limits(max_total=0.01))  # without batches an evaluation would complain of them


def test_per_layer_widths_are_proposed_and_measured(make_model, batches):
    model = make_model()
    space = SearchSpace.of(model.config, widths="per_layer")
    result = search(model, batches[:1], Limits(max_total=0.75), space=space, options=FAST)
    assert result.sensitivities.experts_by_row
    assert any(len(set(candidate.subnet.experts)) > 1 for candidate in result.candidates)


def test_spearman():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 99]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    # ties share a rank: ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(0.9486832980505138)
    assert spearman([1, 2], [1, 2]) is None and spearman([1, 1, 1], [1, 2, 3]) is None


def test_pareto_front_keeps_equals_and_drops_the_beaten():
    assert pareto_front([(1, 3), (2, 2), (3, 1), (3, 3), (2, 2)]) == (0, 1, 2, 4)
    assert pareto_front([]) == ()


@given(st.lists(st.tuples(*[st.integers(0, 6)] * 3), max_size=40))
def test_the_front_is_what_nothing_beats(points):
    beats = [
        [all(a <= b for a, b in zip(other, own, strict=True)) and other != own for other in points] for own in points
    ]
    assert pareto_front(points) == tuple(index for index, row in enumerate(beats) if not any(row))


@pytest.mark.parametrize("layers", ["nested", "free"])
@pytest.mark.parametrize("widths", ["uniform", "per_layer"])
def test_a_small_space_is_predicted_whole(make_model, batches, layers, widths):
    model = make_model(num_layers=5, num_experts=4, top_k=2, widths=(4, 2))
    space = SearchSpace.of(model.config, layers=layers, widths=widths).replace(experts=(2, 4))
    choices = list(space.every(model.config))
    assert len(choices) == space.num_choices(model.config)
    result = search(model, batches[:1], Limits(max_total=0.9), space=space, options=FAST)
    assert result.is_complete and result.num_predicted == len({*choices, model.config.full()})
    evolved = search(model, batches[:1], Limits(max_total=0.9), space=space, options=FAST.replace(enumerated=0))
    assert not evolved.is_complete
    best = min(candidate.predicted_nll for candidate in result.candidates if candidate.fits(result.limits))
    assert best <= min(candidate.predicted_nll for candidate in evolved.candidates if candidate.fits(result.limits))


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


def test_a_dead_expert_ranks_last(make_model, batches):
    model = make_model()
    model.blocks[3].mlp.down.data[1] = 0.0
    orders = rank_experts(model, batches).orders
    assert [sorted(order) for order in orders] == [list(range(6))] * 6
    assert orders[3][-1] == 1


def test_reachable_limits_can_be_met(make_model):
    config = make_model(num_layers=7).config
    limits = reachable_limits(config)
    scorer = Scorer(config, None, None)
    fitting = [subnet for subnet in SearchSpace.of(config).grid(config) if scorer.sized(subnet).fits(limits)]
    assert fitting and config.full() not in fitting


def test_candidates_are_healed_in_one_data_type(make_model, batches, monkeypatch, tmp_path):
    """``auto`` measures the machine, which may be busy with other work while the next candidate is healed."""
    model, recipe, used = make_model(), read_recipe("heal", HealRecipe), []

    def heal(recipe, job, student, teacher):
        used.append(recipe.train.dtype)
        chosen = "bfloat16" if recipe.train.dtype == "auto" else recipe.train.dtype
        pace = Pace(dtype=chosen, num_threads=1)
        return SimpleNamespace(pace=pace, model=model, meter=Meter("heal", "a CPU"))

    monkeypatch.setattr(api.stages, "heal", heal)
    monkeypatch.setattr(api, "open_loader", lambda *_: None)
    info = SimpleNamespace(data_hash="")
    healed_nll = api._healer(recipe, tmp_path, info, model, batches, join("cpu"), Meter("search", "a CPU"))
    for _ in range(3):
        healed_nll(model.config.full())
    assert used == ["auto", "bfloat16", "bfloat16"]
