"""Policy losses: by hand, against each other, and their gradients in expectation over a whole distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.rl.log import mismatch
from stretto.rl.objective import cispo, gspo, icepop_weights, kl_k2, ppo, tis_weights

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


def test_the_divergences_estimate_the_kl() -> None:
    """Over tokens that a uniform μ samples, each as often as any other."""
    logp_V = two_policies()[0].detach().log_softmax(-1).numpy()
    behaviour_V = np.full(V, -np.log(V))
    found = mismatch(logp_V, behaviour_V, np.ones(V, np.bool_))
    kl = (np.exp(behaviour_V) * (behaviour_V - logp_V)).sum()
    assert found["mismatch/same_k1_mean"] == pytest.approx(kl) and found["mismatch/same_k3_mean"] == pytest.approx(kl)
    assert found["mismatch/same_k2_mean"] == pytest.approx(((logp_V - behaviour_V) ** 2).mean() / 2)


def test_a_tiny_divergence_does_not_drown_in_rounding() -> None:
    delta = np.array([1e-4, -3e-5])
    found = mismatch(delta, np.zeros(2), np.ones(2, np.bool_))
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


def test_corrections_by_hand_carry_no_gradient() -> None:
    proximal = torch.tensor([0.2, 0.9, 2.0, 7.0]).log().requires_grad_()
    tis, icepop = tis_weights(proximal, torch.zeros(4), 2.0), icepop_weights(proximal, torch.zeros(4), 0.5, 5.0)
    assert tis.tolist() == pytest.approx([0.2, 0.9, 2.0, 2.0])
    assert icepop.tolist() == pytest.approx([0.0, 0.9, 2.0, 0.0])
    assert not tis.requires_grad and not icepop.requires_grad
