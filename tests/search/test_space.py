from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.model.spec import ModelConfig, check_subnet, fixed_layers
from stretto.search.space import Limits, SearchSpace, Sizes, require_feasible

CONFIG = ModelConfig(
    vocab_size=41, hidden_size=24, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=6, num_experts=8, top_k=3,
    expert_intermediate_size=16, dense_layers=(0, 3), dense_intermediate_size=40, widths=(8, 6, 3),
)  # fmt: skip
SPACE = SearchSpace.of(CONFIG)
SIZES = Sizes(CONFIG)
GRID = [SIZES.candidate(subnet, 0.0, None) for subnet in SPACE.grid(CONFIG)]


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
    found = SIZES.candidate(subnet, 0.0, None)
    assert found.total_params >= min(candidate.total_params for candidate in GRID)
    assert found.active_params >= min(candidate.active_params for candidate in GRID)


@given(st.sampled_from(GRID))
def test_a_limit_equal_to_the_size_fits_and_one_parameter_less_does_not(candidate):
    total = SIZES.full.total_params
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
