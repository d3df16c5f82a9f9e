"""The policy gradient: whole however it is split, through the recorded routes, of the tempered distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.base.trajectory import Group
from stretto.model.moe import MoeLayer
from stretto.model.parallel import join
from stretto.model.transformer import Transformer
from stretto.ops.matmul import PLAIN, Arithmetic
from stretto.rl.batches import pack
from stretto.rl.credit import assign
from stretto.rl.passes import Pass, micro_batch, place, recompute, score
from stretto.rl.recipe import LossConfig
from stretto.train.step import StepResult, optimisation_step
from tests.rl.policies import groups, network

SAME = 1e-6
"""Relative difference that another order of summation may make: a few dozen fp32 roundings of 6e-8."""


class Catch(torch.optim.SGD):
    """Keeps the gradients that a step would have applied, and applies nothing."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.model = model
        self.caught: dict[str, Tensor] = {}

    def step(self, closure: Any = None) -> None:
        grads = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        self.caught = {name: grad.clone() for name, grad in grads.items() if grad is not None}


def passes(
    made: Sequence[Group],
    loss: LossConfig,
    seq_len: int = 48,
    rows: int = 2,
    replay: str = "r3",
    arithmetic: Arithmetic = PLAIN,
) -> list[Pass]:
    batches = pack(made, assign(made, loss), seq_len, rows)
    return [place(batch, join("cpu"), arithmetic, replays=replay == "r3") for batch in batches]


def gradient(
    model: Transformer,
    made: Sequence[Group],
    loss: LossConfig,
    replay: str = "r3",
    temperature: float = 1.0,
    **how: Any,
) -> tuple[dict[str, Tensor], StepResult, list[Pass]]:
    flat = passes(made, loss, replay=replay, **how)
    for each in flat:
        if loss.proximal == "recompute":
            recompute(model, each, temperature, replay)
        if loss.kl_weight:
            each.reference_BT = score(network(7), each, temperature).logp_BT
    catch = Catch(model)
    batches = [micro_batch(each, loss, temperature, model.config.full()) for each in flat]
    result = optimisation_step(
        model, [catch], batches, join("cpu"), clip_norm=1e9, balance_rate=0.0, dtype=torch.float32
    )
    return catch.caught, result, flat


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    difference = sum(float((grad - other[name]).square().sum()) for name, grad in one.items())
    return (difference / sum(float(grad.square().sum()) for grad in one.values())) ** 0.5


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(),
        LossConfig(normaliser="sequence", advantage="rloo", correction="icepop"),
        LossConfig(normaliser="constant", advantage="dr_grpo", policy="cispo", kl_weight=0.1),
        LossConfig(policy="gspo", normaliser="sequence", clip_low=1e-3, clip_high=1e-3, proximal="behaviour"),
    ],
    ids=["dapo", "rloo", "cispo", "gspo"],
)
def test_the_normaliser_is_global(loss: LossConfig) -> None:
    """Micro-batches of any size, and any packing, are one and the same gradient."""
    model = network()
    made = groups(model, noise=0.3)
    whole, result, flat = gradient(model, made, loss, seq_len=48, rows=64)
    assert len(flat) == 1 and len(flat[0].batch.tokens_BT) >= 4 and result.grad_norm > 1e-4
    for seq_len, rows in [(48, 1), (48, 2), (30, 3), (200, 1)]:
        split, other, parts = gradient(model, made, loss, seq_len=seq_len, rows=rows)
        assert len(parts) > 1 or seq_len > 48
        assert distance(whole, split) <= SAME, (seq_len, rows)
        assert other.nll == pytest.approx(result.nll, rel=SAME) and other.num_tokens == result.num_tokens


@pytest.mark.parametrize("replay", ["off", "r2", "r3"])
def test_a_shared_prompt_is_the_gradient_of_its_copies(replay: str) -> None:
    """Also where a sample shares a part of it only."""
    model, loss = network(), LossConfig()
    made = groups(None, num=3, rewards=(1.0, 0.0, 0.0, 0.5, 1.0, 0.0))
    shared, result, flat = gradient(model, made, loss, replay=replay, seq_len=200)
    alone = [Group(replace(each.task, group=1), (one,)) for each in made for one in each.trajectories]
    credits = [[one] for each in assign(made, loss) for one in each]
    batches = pack(alone, credits, 200, 2)
    assert sum(each.batch.num_inputs for each in flat) < 0.9 * sum(each.num_inputs for each in batches)
    copies = [place(batch, join("cpu"), PLAIN, replays=replay == "r3") for batch in batches]
    for each in copies:
        recompute(model, each, 1.0, replay)
    catch = Catch(model)
    whole = [micro_batch(each, loss, 1.0, model.config.full()) for each in copies]
    other = optimisation_step(model, [catch], whole, join("cpu"), clip_norm=1e9, balance_rate=0.0, dtype=torch.float32)
    assert distance(shared, catch.caught) <= SAME and other.nll == pytest.approx(result.nll, rel=SAME)


def test_shared_prompts_change_no_bit_of_exact_log_probs() -> None:
    model, exact = network(), Arithmetic("fp32", batch_invariant=True)
    made = groups(None, num=2)
    alone = [Group(replace(each.task, group=1), (one,)) for each in made for one in each.trajectories]
    credits = [[one] for each in assign(made, LossConfig()) for one in each]
    found = []
    for batches in (pack(made, assign(made, LossConfig()), 200, 2), pack(alone, credits, 200, 2)):
        by_sample: dict[int, list[float]] = {}
        for batch in batches:
            logp_BT = score(model, place(batch, join("cpu"), exact, replays=True), 1.0, replays=True).logp_BT.numpy()
            for number in range(8):
                at = (batch.samples_BT == number) & (batch.targets_BT >= 0)
                by_sample.setdefault(number, []).extend(logp_BT[at].tolist())
        found.append(by_sample)
    assert found[0] == found[1] and all(found[0].values())


def test_a_normaliser_of_each_micro_batch_would_be_another_gradient() -> None:
    """What the test above could not see if micro-batches happened to be alike."""
    model = network()
    made = groups(model, noise=0.3)
    whole, _, _ = gradient(model, made, LossConfig(), rows=64)
    halves = [gradient(model, half, LossConfig())[0] for half in (made[:1], made[1:])]
    mean = {name: (halves[0][name] + halves[1][name]) / 2 for name in whole}
    assert distance(whole, mean) > 1e-2


@pytest.mark.parametrize("replay", ["off", "r2", "r3"])
def test_the_update_sees_what_the_recomputation_saw(replay: str) -> None:
    """To the bit: with equal routes both passes are one network, so every ratio is exactly one."""
    model = network()
    made = groups(None)
    _, result, flat = gradient(model, made, LossConfig(), replay=replay, rows=3)
    for each, streams in zip(flat, result.streams_N, strict=True):
        kept_BT = each.mine["targets_BT"] >= 0
        assert torch.equal(streams["logp"].view_as(each.proximal_BT), each.proximal_BT)
        assert (streams["ratio"].view_as(kept_BT)[kept_BT] == 1.0).all() and not streams["clipped"].any()
        assert not streams["logp"].view_as(kept_BT)[~kept_BT].any()


def test_replay_is_of_the_engines_routes_in_r3_only() -> None:
    model = network()
    made = groups(None)  # recorded routes are random
    scored = {}
    for replay in ("off", "r2", "r3"):
        _, _, flat = gradient(model, made, LossConfig(), replay=replay)
        scored[replay] = flat
        assert sum(each.num_flips for each in flat) > 0.5 * sum(each.num_recorded for each in flat) > 0
    for off, r2, r3 in zip(*scored.values(), strict=True):
        assert torch.equal(off.proximal_BT, r2.proximal_BT)
        assert not torch.equal(off.proximal_BT, r3.proximal_BT)
        assert off.ctx.routes_BTLK is None and r2.ctx.routes_BTLK is not None
        assert r3.ctx.routes_BTLK is r3.mine["routes_BTLK"]


def test_recorded_routes_give_the_recorded_log_probs_whatever_the_router_would_do_now() -> None:
    """The engine's routes follow the permutation of the tokens: replayed, they undo a changed router, and only they do."""
    model = network()
    made = groups(model)
    with torch.no_grad():  # the selection changes, the gates do not: what a rounding near a tie does, but everywhere
        for layer in (block.mlp for block in model.blocks if isinstance(block.mlp, MoeLayer)):
            layer.bias_WE[0].copy_(torch.randn(8, generator=torch.Generator().manual_seed(5)))
    for replay, closest in (("r3", 1e-5), ("off", None)):
        for each in passes(made, LossConfig(), replay=replay):
            recompute(model, each, 1.0, replay)
            gap = (each.proximal_BT - each.mine["behaviour_BT"]).abs().max()
            assert gap < closest if closest else gap > 1e-2
            assert each.num_flips > 0.2 * each.num_recorded


def test_gradients_reach_the_router_through_replayed_routes() -> None:
    model = network()
    caught, _, _ = gradient(model, groups(None), LossConfig(correction="none"))
    gates = [grad for name, grad in caught.items() if name.endswith("mlp.gate")]
    assert len(gates) == 2 and all(grad.norm() > 1e-5 for grad in gates)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.4])
def test_log_probs_are_those_of_the_temperature_that_sampled(temperature: float) -> None:
    model = network()
    made = groups(model, temperature=temperature)
    for each in passes(made, LossConfig()):
        at_it = score(model, each, temperature, replays=True).logp_BT
        beside = score(model, each, temperature * 1.1, replays=True).logp_BT
        assert torch.allclose(at_it, each.mine["behaviour_BT"], atol=2e-5)
        assert (beside - each.mine["behaviour_BT"]).abs().max() > 1e-2


def test_decoupled_ppo_at_age_zero_is_ppo() -> None:
    """Tokens of these very weights, by this very arithmetic: the trust region's centre is what sampled them."""
    model = network()
    made = groups(model)
    decoupled, _, _ = gradient(model, made, LossConfig(proximal="recompute", correction="tis"))
    plain, _, _ = gradient(model, made, LossConfig(proximal="behaviour", correction="none"))
    assert (
        distance(decoupled, plain) < 1e-4
    )  # of batched against single rows: the log-probabilities differ by roundings
    stale, _, _ = gradient(model, groups(model, noise=0.5), LossConfig(proximal="recompute", correction="tis"))
    assert distance(decoupled, stale) > 1e-2


def test_tokens_that_nobody_sampled_take_no_part() -> None:
    """Log-probabilities and rewards sit on sampled tokens; another prompt's recorded values change nothing."""
    model = network()
    made = groups(model)
    prompts = [
        replace(
            each,
            trajectories=tuple(
                replace(
                    one,
                    segments=tuple(
                        part if part.is_sampled else replace(part, logprobs=part.logprobs - 5.0)
                        for part in one.segments
                    ),
                )
                for one in each.trajectories
            ),
        )
        for each in made
    ]
    (one, result, _), (other, _, _) = (gradient(model, some, LossConfig()) for some in (made, prompts))
    assert all(torch.equal(grad, other[name]) for name, grad in one.items())
    assert result.num_tokens == sum(sample.num_sampled for each in made for sample in each.trajectories)


def test_batch_invariant_arithmetic_packs_to_the_bit() -> None:
    model = network()
    made = groups(model)
    exact = Arithmetic("fp32", batch_invariant=True)
    by_sample: list[dict[int, list[float]]] = []
    for seq_len, rows in [(48, 2), (90, 1)]:
        found: dict[int, list[float]] = {}
        for each in passes(made, LossConfig(), seq_len, rows, arithmetic=exact):
            logp_BT = score(model, each, 0.8, replays=True).logp_BT
            for sample in each.mine["samples_BT"].unique().tolist():
                found[sample] = logp_BT[each.mine["samples_BT"] == sample].tolist()
        by_sample.append({sample: values for sample, values in found.items() if sample >= 0})
    assert by_sample[0] == by_sample[1]
