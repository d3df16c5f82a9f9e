"""Policy losses: by hand, against each other, and their gradients in expectation over a whole distribution."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.base.trajectory import Group
from stretto.data.pack import IGNORED
from stretto.learning.algorithms import give_credit, unroll
from stretto.learning.batch import at_targets, pack
from stretto.learning.metrics import mismatch, samples
from stretto.learning.objective import (
    PolicyObjective,
    cispo,
    gspo,
    icepop,
    icepop_weights,
    kl_k2,
    kl_weights,
    ppo,
    tis_weights,
)
from stretto.learning.recipe import PRESETS, LossConfig
from tests.flow.samples import VOCAB, group

V = 7


def two_policies() -> tuple[Tensor, Tensor]:
    """Logits of π (to be differentiated) and log-probabilities of another distribution."""
    torch.manual_seed(0)
    return torch.randn(V, dtype=torch.float64, requires_grad=True), torch.randn(V, dtype=torch.float64).log_softmax(-1)


def expected_gradient(loss_V: Tensor, logits_V: Tensor) -> Tensor:
    """Of a loss for each token, over tokens that π samples: π itself is not differentiated as a sampler."""
    probs_V = logits_V.softmax(-1).detach()
    return torch.autograd.grad((probs_V * loss_V).sum(), logits_V, retain_graph=True)[0]


def test_k2_has_the_gradient_of_the_reverse_kl_and_the_others_do_not() -> None:
    logits_V, reference_V = two_policies()
    logp_V = logits_V.log_softmax(-1)
    reverse = torch.autograd.grad((logp_V.exp() * (logp_V - reference_V)).sum(), logits_V, retain_graph=True)[0]
    forward = torch.autograd.grad((reference_V.exp() * (reference_V - logp_V)).sum(), logits_V, retain_graph=True)[0]
    assert torch.allclose(expected_gradient(kl_k2(logp_V, reference_V), logits_V), reverse, atol=1e-12)
    k1_V = logp_V - reference_V
    assert expected_gradient(k1_V, logits_V).abs().max() < 1e-12 < 1e-3 < reverse.abs().max()
    k3_V = torch.expm1(reference_V - logp_V) - (reference_V - logp_V)
    assert torch.allclose(expected_gradient(k3_V, logits_V), forward, atol=1e-12)
    assert (forward - reverse).abs().max() > 1e-2


def test_the_kl_of_stale_tokens_is_weighted() -> None:
    """Over tokens of μ: with π/μ the gradient is that of KL(π ‖ reference); without, of nothing in particular."""
    logits_V, reference_V = two_policies()
    torch.manual_seed(4)
    logp_V = logits_V.log_softmax(-1)
    behaviour_V = (logp_V.detach() + 0.7 * torch.randn(V, dtype=torch.float64)).log_softmax(-1)
    reverse = torch.autograd.grad((logp_V.exp() * (logp_V - reference_V)).sum(), logits_V, retain_graph=True)[0]
    loss_V, weights_V = kl_k2(logp_V, reference_V), kl_weights(logp_V, behaviour_V)
    assert not weights_V.requires_grad and weights_V.max() < 10.0, "none of these is cut off"
    weighted, plain = (
        torch.autograd.grad((behaviour_V.exp() * each).sum(), logits_V, retain_graph=True)[0]
        for each in (weights_V * loss_V, loss_V)
    )
    assert torch.allclose(weighted, reverse, atol=1e-12)
    assert (plain - reverse).abs().max() > 1e-2
    assert kl_weights(torch.tensor([5.0]), torch.tensor([0.0])).item() == 10.0


def test_the_divergences_estimate_the_kl() -> None:
    """Over tokens that a uniform μ samples, each as often as any other."""
    logp_V = two_policies()[0].detach().log_softmax(-1).numpy()
    behaviour_V = np.full(V, -np.log(V))
    found = mismatch(logp_V, behaviour_V, np.zeros(V, np.int32), np.arange(V))
    kl = (np.exp(behaviour_V) * (behaviour_V - logp_V)).sum()
    assert found["mismatch/same_k1_mean"] == pytest.approx(kl) and found["mismatch/same_k3_mean"] == pytest.approx(kl)
    assert found["mismatch/same_k2_mean"] == pytest.approx(((logp_V - behaviour_V) ** 2).mean() / 2)


def test_a_tiny_divergence_does_not_drown_in_rounding() -> None:
    delta = np.array([1e-4, -3e-5])
    found = mismatch(delta, np.zeros(2), np.zeros(2, np.int32), np.arange(2))
    assert found["mismatch/same_k3_mean"] == pytest.approx((delta**2 / 2).mean(), rel=1e-3)


RATIOS = torch.tensor([0.5, 0.9, 1.0, 1.15, 1.5])


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_ppo_by_hand(advantage: float) -> None:
    logp = RATIOS.log().requires_grad_()
    result = ppo(logp, torch.zeros(5), torch.full((5,), advantage), 0.2, 0.3)
    bounded = [0.8, 0.9, 1.0, 1.15, 1.3]
    expected = [-min(float(u) * advantage, c * advantage) for u, c in zip(RATIOS, bounded, strict=True)]
    assert result.loss_N.tolist() == pytest.approx(expected)
    result.loss_N.sum().backward()
    assert logp.grad is not None
    clipped = [False, False, False, False, True] if advantage > 0 else [True, False, False, False, False]
    assert result.clipped_N.tolist() == clipped
    assert logp.grad.tolist() == pytest.approx(
        [0.0 if c else -float(u) * advantage for u, c in zip(RATIOS, clipped, strict=True)]
    )
    assert result.ratio_N.tolist() == pytest.approx(RATIOS.tolist())


def test_decoupled_ppo_at_age_zero_is_ppo() -> None:
    """With μ as the proximal policy, the factor is exactly one."""
    torch.manual_seed(1)
    behaviour, advantages = -torch.rand(20), torch.randn(20)
    logp = (behaviour + 0.3 * torch.randn(20)).requires_grad_()
    plain = ppo(logp, behaviour, advantages, 0.2, 0.2).loss_N
    for weights in (tis_weights(behaviour, behaviour, 2.0), icepop_weights(behaviour, behaviour, 0.5, 5.0)):
        decoupled = weights * plain
        assert torch.equal(decoupled, plain)


def test_decoupled_ppo_corrects_for_the_rollout_in_expectation() -> None:
    """Over tokens of μ, the weighted gradient is the policy gradient of the proximal policy; unweighted, it is not."""
    logits_V, behaviour_V = two_policies()
    torch.manual_seed(2)
    rewards_V = torch.randn(V, dtype=torch.float64)
    logp_V = logits_V.log_softmax(-1)
    proximal_V = logp_V.detach()
    truth = torch.autograd.grad(-(logp_V.exp() * rewards_V).sum(), logits_V, retain_graph=True)[0]
    loss_V = ppo(logp_V, proximal_V, rewards_V, 0.2, 0.2).loss_N

    def gradient(weights_V: Tensor) -> Tensor:
        return torch.autograd.grad((behaviour_V.exp() * weights_V * loss_V).sum(), logits_V, retain_graph=True)[0]

    assert torch.allclose(gradient(tis_weights(proximal_V, behaviour_V, 1e9)), truth, atol=1e-12)
    assert (gradient(torch.ones(V, dtype=torch.float64)) - truth).abs().max() > 1e-2


def test_gspo_takes_one_ratio_for_a_sample() -> None:
    delta = torch.tensor([0.1, -0.4, 0.3, 0.05])
    logp = delta.clone().requires_grad_()
    samples = torch.tensor([0, 2, 0, 2])  # sample 1 lies in another batch
    result = gspo(logp, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), samples, 0.3, 0.3)
    first, second = torch.tensor([0.2, -0.175]).exp().tolist()
    assert result.ratio_N.tolist() == pytest.approx([first, second, first, second])
    assert result.loss_N.tolist() == pytest.approx([-first, second, -first, second])
    result.loss_N.sum().backward()
    assert logp.grad is not None  # a sample's loss once for each of its tokens, each an n-th of its exponent
    assert logp.grad.tolist() == pytest.approx([-first, second, -first, second])
    assert gspo(logp[:0], delta[:0], delta[:0], samples[:0], 0.2, 0.2).loss_N.shape == (0,)


def test_gspo_of_samples_of_one_token_is_ppo() -> None:
    torch.manual_seed(3)
    logp, proximal, advantages = torch.randn(9), torch.randn(9), torch.randn(9)
    one = gspo(logp, proximal, advantages, torch.arange(9), 0.2, 0.28)
    other = ppo(logp, proximal, advantages, 0.2, 0.28)
    assert torch.equal(one.loss_N, other.loss_N) and torch.equal(one.clipped_N, other.clipped_N)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_bounds_the_weight_and_keeps_every_gradient(advantage: float) -> None:
    logp = RATIOS.log().requires_grad_()
    result = cispo(logp, torch.zeros(5), torch.full((5,), advantage), 0.2, 0.3)
    result.loss_N.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-advantage * c for c in (0.8, 0.9, 1.0, 1.15, 1.3)])
    assert result.clipped_N.tolist() == [True, False, False, False, True]


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_icepop_leaves_tokens_out(advantage: float) -> None:
    logp = RATIOS.log().requires_grad_()
    result = icepop(logp, torch.zeros(5), torch.full((5,), advantage), 0.2, 0.3)
    result.loss_N.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-advantage * u for u in (0.0, 0.9, 1.0, 1.15, 0.0)])
    assert result.clipped_N.tolist() == [True, False, False, False, True]


def test_corrections_by_hand_carry_no_gradient() -> None:
    proximal = torch.tensor([0.2, 0.9, 2.0, 7.0]).log().requires_grad_()
    tis, icepop = tis_weights(proximal, torch.zeros(4), 2.0), icepop_weights(proximal, torch.zeros(4), 0.5, 5.0)
    assert tis.tolist() == pytest.approx([0.2, 0.9, 2.0, 2.0])
    assert icepop.tolist() == pytest.approx([0.0, 0.9, 2.0, 0.0])
    assert not tis.requires_grad and not icepop.requires_grad


def paper(preset: str, groups: list[Group], logp: dict[tuple[int, int], list[Tensor]], most: int) -> Tensor:
    """The loss of ``preset`` as its paper writes it: sample by sample, from ``logp`` of its tokens: π, μ, centre, reference."""
    lengths = {key: len(each[0]) for key, each in logp.items()}
    loss = torch.zeros(())
    for each in groups:
        rewards = torch.tensor([one.verdict.reward for one in each.trajectories])
        if preset in ("dapo", "cispo"):  # the last fifth of the tokens is punished
            sizes = torch.tensor([float(one.num_sampled) for one in each.trajectories])
            rewards = rewards - ((sizes - 0.8 * most) / (0.2 * most)).clamp(0, 1)
        gains = rewards - rewards.mean()
        if preset != "dr_grpo":
            gains = gains / (rewards.std() + 1e-4)
        for one, gain in zip(each.trajectories, gains, strict=True):
            pi, mu, centre, reference = logp[one.ordinal, one.sample]
            rho = (pi - mu).exp()
            if preset in ("grpo", "dr_grpo", "dapo"):
                token = -torch.min(rho * gain, rho.clamp(0.8, 1.28 if preset == "dapo" else 1.2) * gain)
            elif preset == "decoupled":
                u, behind = (pi - centre).exp(), (centre - mu).exp()
                token = -(behind * (behind <= 5)) * torch.min(u * gain, u.clamp(0.8, 1.2) * gain)
            elif preset == "gspo":
                s = (pi - mu).mean().exp()
                token = -torch.min(s * gain, s.clamp(1 - 3e-4, 1 + 4e-4) * gain).expand(len(pi))
            else:
                bounded = {
                    "tis": rho.clamp(max=2),
                    "cispo": rho.clamp(max=5),
                    "icepop": rho * ((rho >= 0.5) & (rho <= 5)),
                }
                token = -bounded[preset].detach() * gain * pi
            if preset == "grpo":
                token = token + 0.04 * rho.detach() * 0.5 * (pi - reference) ** 2
            if preset in ("grpo", "gspo", "icepop"):
                loss = loss + token.mean() / len(logp)
            else:
                loss = loss + token.sum() / (len(logp) * most if preset == "dr_grpo" else sum(lengths.values()))
    return loss


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_papers_formula(preset: str) -> None:
    """The whole chain, credit, packing and objective, against the formula: loss and gradient, in every logit."""
    rng = np.random.default_rng(5)
    groups = [group(rng, [1.0, 0.0, 0.0, 0.5], ordinal=ordinal) for ordinal in range(3)]
    config, most = LossConfig(preset=preset), groups[0].task.max_tokens
    samples = unroll(groups, config.overlong_share)
    credits = give_credit(samples, config.advantage, config.normaliser, most)
    (batch,) = pack(samples, 400, 8, with_routes=False)
    torch.manual_seed(6)
    targets_BT, positions_BT = torch.from_numpy(batch.targets_BT), torch.from_numpy(batch.positions_BT)
    logits_BTV = (2 * torch.randn(*targets_BT.shape, VOCAB)).requires_grad_()
    logp_BT = logits_BTV.log_softmax(-1).gather(-1, targets_BT.clamp_min(0)[..., None])[..., 0]
    names = ("behaviour", "centre", "reference")
    others = {name: logp_BT.detach() + 0.5 * torch.randn(targets_BT.shape) for name in names}
    streams = {"samples_BT": torch.from_numpy(batch.samples_BT), "behaviour_BT": others["behaviour"]}
    for name in ("advantages", "weights"):
        values = [getattr(each, f"{name}_S") for each in credits]
        streams[f"{name}_BT"] = torch.from_numpy(at_targets(batch, values))
    centre_BT = others["centre"] if config.proximal == "recompute" else others["behaviour"]
    objective = PolicyObjective(config, 1.0, streams, centre_BT, others["reference"])
    measured = objective(logits_BTV.flatten(0, 1), torch.eye(VOCAB), targets_BT.flatten())
    ours = measured.loss
    kept_N = targets_BT.flatten() != IGNORED
    assert torch.allclose(measured.nll_N[kept_N], -logp_BT.detach().flatten()[kept_N], atol=1e-5)
    if config.correction == "none":
        assert not measured.streams_N["cut"].any()  # nothing there that could be cut off
    by_sample = {}
    for one in (sample for each in samples for sample in each):
        here = (streams["samples_BT"] == one.number) & (targets_BT != IGNORED)
        order = positions_BT[here].argsort()
        values = (logp_BT, others["behaviour"], others["centre"], others["reference"])
        by_sample[one.trajectory.ordinal, one.trajectory.sample] = [value_BT[here][order] for value_BT in values]
    theirs = paper(preset, groups, by_sample, most)
    gradients = [torch.autograd.grad(loss, logits_BTV, retain_graph=True)[0] for loss in (ours, theirs)]
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5, abs=1e-6)
    assert gradients[1].norm() > 1e-3 and (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()


def test_samples_that_ended_at_the_limit_of_tokens_or_turns_are_truncated() -> None:
    made = group(np.random.default_rng(0), [0.0, 1.0, 0.0, 1.0])
    reasons = ("stop", "length", "turns", "tool")
    ended = tuple(replace(each, finish_reason=why) for each, why in zip(made.trajectories, reasons, strict=True))
    assert samples([replace(made, trajectories=ended)])["samples/truncated"] == 0.5
