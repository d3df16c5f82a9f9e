"""What a step trains: a pure function of seed and step, whose shares are those of the recipe."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stretto.base.config import validate
from stretto.base.errors import UserError
from stretto.model.spec import ModelConfig, check_subnet
from stretto.train.recipe import MixtureConfig, Recipe
from stretto.train.sampler import MicroPlan, Sampler, idle_widths

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4,
    "num_experts": 16, "top_k": 4, "expert_intermediate_size": 8, "dense_layers": (0,), "dense_intermediate_size": 8,
    "widths": (16, 8, 3),
}  # fmt: skip
CORNERS = {"corner": {"layers": 6, "experts": 6, "top_k": 2}, "small": {"layers": 4, "experts": 5, "top_k": 1}}
SAMPLERS = ["anchored", "ernie", "off"]


def sampler(kind: str = "anchored", seed: int = 0, steps: int = 400, **changes: Any) -> Sampler:
    elastic = {"sampler": kind, "anchors": CORNERS, "anchor_share": 0.2, "width_share": 0.2}
    recipe = Recipe.model_validate(
        {
            "model": SHAPE | changes.pop("model", {}),
            "elastic": elastic | changes,
            "optim": {"lr": 1e-3},
            "train": {"steps": steps, "rows": 32, "micro_batches": 4, "seq_len": 16, "seed": seed},
        }
    )
    train = recipe.train
    return Sampler(recipe.network(), recipe.elastic, train.micro_rows, train.micro_batches, train.steps, train.seed)


def same(one: MicroPlan, other: MicroPlan) -> bool:
    if (one.kind, one.subnet, one.is_anchor) != (other.kind, other.subnet, other.is_anchor):
        return False
    if one.widths is None or other.widths is None:
        return one.widths is other.widths
    names = ("branch_B", "allowed_BE", "counted_B")
    return all(np.array_equal(getattr(one.widths, name), getattr(other.widths, name)) for name in names)


@pytest.mark.parametrize("kind", SAMPLERS)
@given(seed=st.integers(0, 2**31), steps=st.permutations(range(12)))
@settings(max_examples=10)
def test_a_plan_follows_from_seed_and_step_alone(kind: str, seed: int, steps: list[int]) -> None:
    """Every rank and every resume draws the same, in whatever order and however often it asks."""
    reference = [sampler(kind, seed).draw(step) for step in range(12)]
    again = sampler(kind, seed)
    for step in steps:
        assert all(same(*pair) for pair in zip(reference[step], again.draw(step), strict=True))


@pytest.mark.parametrize("kind", ["anchored", "ernie"])
def test_seeds_differ(kind: str) -> None:
    one, other = sampler(kind, 0), sampler(kind, 1)
    assert not all(same(*pair) for step in range(20) for pair in zip(one.draw(step), other.draw(step), strict=True))


@pytest.mark.parametrize("kind", SAMPLERS)
@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), step=st.integers(0, 399))
def test_every_plan_is_legal(kind: str, seed: int, step: int) -> None:
    one = sampler(kind, seed)
    config = one.config
    for plan in one.draw(step):
        check_subnet(config, plan.subnet)
        if not plan.is_anchor:
            assert {0, 1, 6, 7} <= set(plan.subnet.layers), "the first and last two layers are never dropped"
            assert plan.subnet.experts == (16,) * len(plan.subnet.experts)
        if plan.widths is None:
            continue
        assert not plan.is_anchor
        allowed_BE = plan.widths.allowed_BE
        assert allowed_BE.shape == (8, 16)
        assert (allowed_BE.sum(1) >= config.top_k).all(), "a row must hold its top-k"
        assert plan.num_narrow_rows == (allowed_BE.sum(1) < 16).sum() > 0
        assert ((plan.widths.branch_B >= 0) & (plan.widths.branch_B < config.num_branches)).all()
        for branch, allowed_E, counted in zip(plan.widths.branch_B, allowed_BE, plan.widths.counted_B, strict=True):
            if kind == "ernie":  # random subsets share the full network's bias, and must not steer it
                assert branch == 0 and counted == allowed_E.all() and allowed_E.sum() in config.widths
            else:
                assert counted and np.array_equal(allowed_E, np.arange(16) < config.widths[branch])


def kinds(one: Sampler, first: int, last: int) -> Counter[str]:
    return Counter(plan.kind for step in range(first, last) for plan in one.draw(step))


@settings(max_examples=12)
@given(
    seed=st.integers(0, 1000),
    shares=st.tuples(*[st.floats(0, 0.33)] * 3),
    first=st.integers(0, 300),
    num=st.integers(1, 100),
)
def test_shares_are_met_in_every_stretch(seed: int, shares: tuple[float, float, float], first: int, num: int) -> None:
    """Steps of the golden ratio put N·share + O(log N) of N points into any interval.

    N times the star discrepancy is at most 3 + (1/ln φ + K/ln(K+1))·ln N for partial quotients of at most K (Kuipers
    and Niederreiter, chapter 2, theorem 3.4); for φ they are all one, and an interval has two ends.
    """
    anchor, depth, top_k = shares
    one = sampler("anchored", seed, anchor_share=anchor, depth_share=depth, top_k_share=top_k)
    drawn, total = kinds(one, first, first + num), 4 * num
    bound = 2 * (3 + (1 / math.log((1 + 5**0.5) / 2) + 1 / math.log(2)) * math.log(total))
    expected = {"corner": anchor / 2, "small": anchor / 2, "depth": depth, "top_k": top_k}
    expected["full"] = 1 - anchor - depth - top_k
    assert set(drawn) <= set(expected)
    for name, share in expected.items():
        assert abs(drawn[name] - share * total) <= bound, name


def test_the_bound_is_not_slack() -> None:
    """Far below what independent draws give: over 1,600 micro-batches, within two of every share."""
    drawn = kinds(sampler(seed=3), 0, 400)
    for name, share in {"corner": 0.1, "small": 0.1, "depth": 0.1, "top_k": 0.1, "full": 0.6}.items():
        assert abs(drawn[name] - share * 1600) <= 3, name


def test_anchors_share_by_their_weights() -> None:
    drawn = kinds(sampler(anchor_share=0.4, anchor_weights={"corner": 3}), 0, 400)
    for name, share in {"corner": 0.3, "small": 0.1}.items():
        assert abs(drawn[name] - share * 1600) <= 3, name
    with pytest.raises(ValueError, match=r"anchor_weights.tiny: .* name one of corner, small"):
        sampler(anchor_weights={"tiny": 1})


def test_orders_are_measured_at_shares_of_the_run() -> None:
    for name in ("rank_layers_at", "rank_experts_at"):
        with pytest.raises(ValueError, match=f"{name}.0"):
            sampler(**{name: (1.5,)})


def narrow_rows(one: Sampler, first: int, last: int) -> int:
    return sum(plan.num_narrow_rows for step in range(first, last) for plan in one.draw(step))


def within(found: float, probability: float, num: int) -> bool:
    """Five standard deviations of ``num`` independent draws."""
    return abs(found - probability * num) <= 5 * math.sqrt(num * probability * (1 - probability)) + 1


def test_the_share_of_narrow_rows_is_of_all_rows() -> None:
    """Anchors carry no narrow rows, so the others carry more: 0.2 of all 12,800 rows in the end."""
    one = sampler(seed=5)
    assert within(narrow_rows(one, 0, 400), 0.2, 400 * 32)


def test_ernies_axes_are_independent() -> None:
    one = sampler("ernie", seed=2, min_top_k=1)
    plans = [plan for step in range(400) for plan in one.draw(step)]
    shallow = [len(plan.subnet.layers) < 8 for plan in plans]
    sparse = [set(plan.subnet.top_k) != {4} for plan in plans]
    both = [one and other for one, other in zip(shallow, sparse, strict=True)]
    assert within(sum(shallow), 0.25, 1600) and within(sum(sparse), 0.2, 1600) and within(sum(both), 0.05, 1600)
    assert within(narrow_rows(one, 0, 400), 0.2, 400 * 32)
    assert not any(plan.is_anchor for plan in plans)
    # random subsets: over many rows every expert is left out now and then, also the first of the order
    left_out = sum((~plan.widths.allowed_BE).sum(0) for plan in plans if plan.widths is not None)
    assert (left_out > 0).all()


def test_off_is_the_full_network() -> None:
    one = sampler("off")
    assert one.config.num_branches == 3, "the widths of the model itself stay"
    for plan in one.draw(7):
        assert same(plan, MicroPlan("full", one.config.full(), None, False))


def test_zero_shares_are_the_full_network() -> None:
    zero = {"anchors": {}, "anchor_share": 0, "depth_share": 0, "top_k_share": 0, "width_share": 0}
    one = sampler(**zero)
    for step in range(50):
        assert all(same(plan, MicroPlan("full", one.config.full(), None, False)) for plan in one.draw(step))


@pytest.mark.parametrize("kind", ["anchored", "ernie"])
def test_the_ramp_starts_at_the_full_network(kind: str) -> None:
    ramped, plain = sampler(kind, steps=400, ramp_fraction=0.5), sampler(kind, steps=400)
    # a quarter of the ramp: the mixture has an eighth of its strength on average
    early = 1 - kinds(ramped, 0, 50)["full"] / 200
    late = 1 - kinds(plain, 0, 50)["full"] / 200
    assert early < 0.35 * late
    assert narrow_rows(ramped, 0, 50) < 0.35 * narrow_rows(plain, 0, 50)
    for step in range(200, 230):
        assert all(same(*pair) for pair in zip(ramped.draw(step), plain.draw(step), strict=True))


@pytest.mark.parametrize("kind", ["anchored", "ernie"])
def test_before_its_start_the_mixture_is_the_full_network(kind: str) -> None:
    late, plain = sampler(kind, starts_at=0.5, ramp_fraction=0.1), sampler(kind)
    for step in range(200):
        assert all(same(plan, MicroPlan("full", late.config.full(), None, False)) for plan in late.draw(step))
    assert 0 < 1 - kinds(late, 200, 220)["full"] / 80 < 1 - kinds(plain, 200, 220)["full"] / 80
    for step in range(240, 260):
        assert all(same(*pair) for pair in zip(late.draw(step), plain.draw(step), strict=True))


def test_a_recipe_without_anchors_still_draws_the_other_axes() -> None:
    drawn = kinds(sampler(anchors={}, anchor_share=0.0, depth_share=0.25, top_k_share=0.25), 0, 400)
    shares = {kind: num / drawn.total() for kind, num in drawn.items()}
    assert shares == pytest.approx({"full": 0.5, "depth": 0.25, "top_k": 0.25}, abs=0.02)


def test_the_ramp_rises_by_equal_steps_to_its_end() -> None:
    ramped = sampler(steps=400, starts_at=0.25, ramp_fraction=0.5)
    strengths = [ramped._strength(step) for step in (99, 100, 199, 298, 299, 300)]
    assert strengths == pytest.approx([0.0, 1 / 200, 100 / 200, 199 / 200, 1.0, 1.0])


def test_early_steps_train_smaller_sizes_more_often() -> None:
    early, plain = sampler(steps=400, early_factor=2.0, early_until=0.5), sampler(steps=400)
    assert [early._strength(step) for step in (0, 50, 100, 199, 200, 399)] == [2.0, 1.75, 1.5, 1.005, 1.0, 1.0]
    drawn, usual = kinds(early, 0, 200), kinds(plain, 0, 200)
    for name in ("corner", "small", "depth", "top_k"):
        assert drawn[name] == pytest.approx(1.5 * usual[name], rel=0.1), name
    assert narrow_rows(early, 0, 200) == pytest.approx(1.5 * narrow_rows(plain, 0, 200), rel=0.1)
    assert early.elastic.mean_factor == 1.25
    for step in range(200, 230):
        assert all(same(*pair) for pair in zip(early.draw(step), plain.draw(step), strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"early_factor": 2.0, "starts_at": 0.1}, "early_factor: needs the sampler anchored, starts_at = 0"),
        ({"early_factor": 2.0, "ramp_fraction": 0.1}, "and ramp_fraction = 0"),
        ({"early_factor": 2.0, "sampler": "ernie"}, "needs the sampler anchored"),
        ({"early_factor": 3.0}, "early_factor 3 times the shares exceeds 1"),
        ({"early_factor": 1.9, "anchor_share": 0.3, "width_share": 0.5}, "early_factor 1.9 times the shares exceeds 1"),
        ({"early_factor": float("inf")}, "finite"),
    ],
)
def test_early_factors_that_no_run_could_follow_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(**changes)


def test_the_ramp_meets_its_integral() -> None:
    """Over the whole ramp half of every share was drawn."""
    ramped = sampler(steps=400, ramp_fraction=1.0)
    drawn = kinds(ramped, 0, 400)
    for name, share in {"corner": 0.1, "small": 0.1, "depth": 0.1, "top_k": 0.1}.items():
        assert abs(drawn[name] - share * 1600 / 2) <= 0.1 * share * 1600, name


def test_top_k_differs_from_layer_to_layer() -> None:
    plans = [plan for step in range(60) for plan in sampler().draw(step) if plan.kind == "top_k"]
    assert any(len(set(plan.subnet.top_k)) > 1 for plan in plans)
    assert {k for plan in plans for k in plan.subnet.top_k} == {1, 2, 3, 4}


def test_a_larger_top_k_of_one_layer_is_held_too() -> None:
    """``top_k`` is the default of layers that name none: narrow rows must hold the largest."""
    one = sampler(model={"widths": (16, 8, 6, 3), "top_k_per_layer": (4, 4, 4, 7, 4, 4, 4)}, anchors={}, anchor_share=0)
    widths = {
        int(num)
        for step in range(60)
        for plan in one.draw(step)
        if plan.widths
        for num in plan.widths.allowed_BE.sum(1)
    }
    assert widths == {16, 8}


def test_rows_are_narrowed_to_what_groups_of_experts_can_hold() -> None:
    """Of 16 experts in four groups, two of which a token chooses in: 12 hold the top-k of 6 and 8 do not."""
    groups = {"expert_groups": 4, "top_groups": 2, "top_k": 6, "widths": (16, 12, 8)}
    one = sampler(model=groups, anchors={"corner": {"experts": 8, "top_k": 2}})
    plans = [plan for step in range(60) for plan in one.draw(step)]
    narrow = {int(num) for plan in plans if plan.widths for num in plan.widths.allowed_BE.sum(1)}
    assert narrow == {16, 12}
    for plan in plans:
        check_subnet(one.config, plan.subnet)


def test_random_subsets_of_grouped_experts_are_refused() -> None:
    with pytest.raises(ValidationError, match="make the 4 groups of experts unequal; use anchored"):
        sampler("ernie", model={"expert_groups": 4, "top_groups": 2, "widths": (16, 8)}, anchors={}, anchor_share=0)


def test_the_network_has_a_branch_for_every_width() -> None:
    assert sampler("anchored").config.widths == (16, 8, 6, 5, 3)
    assert sampler("off").config == ModelConfig(**SHAPE)


def test_a_mixture_that_asks_for_narrow_rows_and_gets_none_is_told() -> None:
    """Without a width below the full one that holds the full top-k; a share that nobody set asks for nothing."""
    cases: list[tuple[dict[str, Any], str | None]] = [
        (
            {"anchors": {"corner": {"experts": 3, "top_k": 2}}, "width_share": 0.4},
            "elastic.width_share: no row uses fewer",
        ),
        ({"anchors": {}, "anchor_share": 0.0, "kind": "ernie"}, "elastic.sampler: no row uses fewer"),
        ({"anchors": {}, "anchor_share": 0.0, "width_share": 0.1}, None),
        ({"anchors": {}, "anchor_share": 0.0, "width_share": 0.0}, None),
        ({"anchors": {}, "anchor_share": 0.0, "width_share": 0.4, "kind": "off"}, None),
        ({"width_share": 0.4}, None),
        ({"kind": "ernie"}, None),
    ]
    for changes, note in cases:
        made = sampler(model={"widths": (16,)}, **changes)
        found = idle_widths(made.config, made.elastic)
        assert (found or "").startswith(note or "") and (found is None) is (note is None), changes
        narrow = sum(plan.num_narrow_rows for step in range(20) for plan in made.draw(step))
        assert note is None or narrow == 0


def test_a_run_prints_that_its_rows_are_not_narrowed(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(elastic__anchors={"corner": {"experts": 2, "top_k": 2}}, train__steps=1)
    assert "pretrain: elastic.width_share: no row uses fewer experts" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["full", "best", "train", "depth", "top_k", "experts=2", " "])
def test_an_anchor_has_a_name_of_its_own(name: str) -> None:
    """``--subnet best`` is the choice of a search, and ``loss/train`` in the log the training loss."""
    with pytest.raises(UserError, match=r"^anchors[.:]"):
        validate(MixtureConfig, {"anchors": {name: {"experts": 2}}}, "")
