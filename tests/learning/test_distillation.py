"""Forms of the reverse KL: what each is, that it vanishes where the teacher is the student, and what each source weighs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.learning.distillation import (
    STATISTICS,
    DistillObjective,
    Lesson,
    Progress,
    form_loss,
    progressed,
    source_scalars,
    source_weights,
    taught_loss,
)
from stretto.learning.objective import PolicyObjective
from stretto.learning.recipe import DistillConfig, LossConfig, TeacherConfig
from stretto.ops.logprob import Teacher, chosen_logprobs
from tests.learning.lessons import (
    FORMS,
    form_loss_reference,
    sampled_gradient,
    span_gradient,
    span_gradient_reference,
    taught_loss_reference,
)

EXACT = 1e-12
"""Of numbers near one in fp64, added up a few hundred times."""


def config(form: str = "full", **changes: Any) -> DistillConfig:
    teachers = {"digits": TeacherConfig(checkpoint="somewhere")}
    return DistillConfig.model_validate({"form": form, "top_k": 5, "teachers": teachers, **changes})


def setup(seed: int = 0, same: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Lesson]]:
    """Hidden states, head, targets and weights of a student; two teachers, of another width unless they are the ``same``."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=rng)

    hidden_ND, head_VD = draw(9, 4).requires_grad_(), draw(12, 4).requires_grad_()
    targets_N, weights_N = torch.randint(12, (9,), generator=rng), draw(9).abs()
    places = [torch.tensor([0, 2, 3, 7, 8]), torch.tensor([1, 4])]  # nobody speaks of 5 and 6
    lessons = [
        Lesson(
            at, Teacher(hidden_ND.detach()[at], head_VD.detach()) if same else Teacher(draw(len(at), 3), draw(12, 3))
        )
        for at in places
    ]
    return hidden_ND, head_VD, targets_N, weights_N, lessons


def pair() -> tuple[Tensor, Tensor]:
    """Log-probabilities of a student and a teacher."""
    rng = torch.Generator().manual_seed(1)
    one, other = (torch.randn(6, 12, dtype=torch.float64, generator=rng).log_softmax(-1) for _ in range(2))
    return one, other


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [2, 1024])
def test_the_gradient_by_hand_is_autograds(form: str, chunk: int) -> None:
    for entropy_aware in (None, 0.8):
        hidden_ND, head_VD, targets_N, weights_N, lessons = setup()
        asked = config(form, entropy_aware=entropy_aware)
        loss, statistics_SN = taught_loss(hidden_ND, head_VD, targets_N, weights_N, lessons, asked, chunk=chunk)
        expected = taught_loss_reference(hidden_ND, head_VD, weights_N, lessons, asked)
        assert loss.item() == pytest.approx(expected.item(), rel=EXACT)
        for mine, theirs in zip(
            torch.autograd.grad(loss, (hidden_ND, head_VD)),
            torch.autograd.grad(expected, (hidden_ND, head_VD)),
            strict=True,
        ):
            assert torch.allclose(mine, theirs, rtol=EXACT, atol=EXACT)
            assert mine.abs().max() > 0.01
        assert not statistics_SN[:, 5:7].any() and statistics_SN[STATISTICS.index("kl"), :5].min() > 0


def test_what_is_said_of_spans_moves_the_student_down_their_kl() -> None:
    """In expectation over all texts of two tokens; half of it for each token would not."""
    rng = torch.Generator().manual_seed(0)
    first_V, second_VV, teacher_VV = (torch.randn(shape, generator=rng) for shape in ((5,), (5, 5), (5, 5)))
    given = first_V, second_VV, teacher_VV.flatten().log_softmax(-1).view(5, 5)
    expected = span_gradient_reference(*given)
    for by_span in (True, False):
        found = span_gradient(*given, by_span=by_span)
        assert all(torch.allclose(*pair, atol=1e-5) is by_span for pair in zip(found, expected, strict=True))
    spans = Lesson(torch.arange(3), torch.zeros(3), torch.tensor([0, 1, 1]))
    assert spans.summed(torch.tensor([1.0, 2.0, 4.0])).tolist() == [1.0, 6.0, 6.0]
    assert spans.estimate(torch.tensor([2.0, 4.0, 4.0])).tolist() == [2.0, 4.0, 4.0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entropy_aware", [None, 0.0])
def test_a_teacher_that_is_the_student_teaches_nothing(form: str, entropy_aware: float | None) -> None:
    """To the last bit: loss and gradient are 0."""
    hidden_ND, head_VD, targets_N, weights_N, lessons = setup(same=True)
    loss, statistics_SN = taught_loss(
        hidden_ND, head_VD, targets_N, weights_N, lessons, config(form, entropy_aware=entropy_aware)
    )
    grads = torch.autograd.grad(loss, (hidden_ND, head_VD))
    assert loss.item() == 0.0 and not any(grad.any() for grad in grads)
    assert not statistics_SN[STATISTICS.index("slope")].any()


def test_a_plain_top_k_sum_would_teach_something_there() -> None:
    """The mutant that the correction is for."""
    logp_CV, _ = pair()
    student_CV = logp_CV.clone().requires_grad_()
    top_CK = student_CV.topk(5).indices
    terms_CV = student_CV.log_softmax(-1).exp() * (student_CV.log_softmax(-1) - logp_CV)
    (grad_CV,) = torch.autograd.grad(terms_CV.gather(-1, top_CK).sum(), student_CV)
    assert grad_CV.abs().max() > 0.01


def test_forms_are_the_whole_where_they_see_all() -> None:
    student_CV, teacher_CV = pair()
    whole, whole_grad = form_loss(student_CV, teacher_CV, config())
    for form in ("top_k", "tail"):
        loss, grad = form_loss(student_CV, teacher_CV, config(form, top_k=100))
        assert torch.allclose(loss, whole, rtol=EXACT) and torch.allclose(grad, whole_grad, rtol=EXACT, atol=EXACT)
    for form in ("top_k", "tail"):  # both are below the KL, and above nothing
        loss, _ = form_loss(student_CV, teacher_CV, config(form))
        assert torch.allclose(loss, form_loss_reference(student_CV, teacher_CV, config(form)), rtol=1e-9)
        assert (loss > 0).all() and (loss <= whole + EXACT).all()


def test_the_sampled_form_is_the_whole_in_expectation() -> None:
    """Over every token that may be sampled, as often as it would be."""
    student_CV, teacher_CV = pair()
    _, whole_CV = form_loss(student_CV, teacher_CV, config())
    assert torch.allclose(sampled_gradient(student_CV, teacher_CV, math.inf), whole_CV, rtol=1e-9, atol=EXACT)
    assert not torch.allclose(sampled_gradient(student_CV, teacher_CV, 0.5), whole_CV, atol=1e-3), "a clip biases it"
    assert sampled_gradient(student_CV, student_CV, math.inf).abs().max() < EXACT


@pytest.mark.parametrize("balance", ["none", "sequence", "tokens", "gap", "sigma"])
def test_weights_of_sources(balance: str) -> None:
    """Two samples of one source, ten times as long as three of another."""
    sources, nums = ["long", "short", "long", "short", "short"], [100, 10, 300, 10, 20]
    known = {"long": Progress(2.0, 0.5, 3.0), "short": Progress(1.0, 1.0, 1.0)}
    weights = source_weights(sources, nums, balance, {"long": 1.0, "short": 1.0}, known)
    shares = {
        name: sum(weight * num for weight, num, source in zip(weights, nums, sources, strict=True) if source == name)
        for name in ("long", "short")
    }
    expected = {"none": 400 / 440, "sequence": 0.5, "tokens": 0.5, "gap": 0.2, "sigma": 0.25}
    assert shares["long"] == pytest.approx(expected[balance]) and sum(shares.values()) == pytest.approx(1.0)
    is_same = weights[0] == pytest.approx(weights[2])
    assert is_same is (balance != "sequence"), "its own sequences weigh the same, or its tokens"


def test_weights_before_anything_is_known_and_of_absent_sources() -> None:
    shares = {"a": 3.0, "b": 1.0, "c": 6.0}
    for balance in ("gap", "sigma", "tokens"):
        weights = source_weights(["a", "b", "b"], [5, 5, 0], balance, shares, {})
        assert weights == pytest.approx([0.75 / 5, 0.25 / 5, 0.0])
    settled = {"a": Progress(1.0, 0.0, 0.0), "b": Progress(1.0, 0.0, 0.0)}
    for balance in ("gap", "sigma"):
        weights = source_weights(["a", "b"], [5, 5], balance, shares, settled)
        assert weights == pytest.approx([0.75 / 5, 0.25 / 5]), "nothing left to learn anywhere"


def test_sigma_scales_taught_sources_beside_an_untaught_one() -> None:
    known = {"a": Progress(1.0, 1.0, 3.0), "b": Progress(1.0, 1.0, 1.0)}
    weights = source_weights(["a", "b", "c"], [10, 10, 10], "sigma", dict.fromkeys("abc", 1.0), known)
    assert [10 * weight for weight in weights] == pytest.approx([1 / 6, 1 / 2, 1 / 3])


def test_what_a_step_tells_of_its_sources() -> None:
    streams = {
        "kl": np.array([1.0, 3.0, 0.5]),
        "signal": np.array([-1.0, 1.0, 4.0]),
        "slope": np.array([1.0, 2.0, 1.0]),
        "entropy": np.array([0.5, 1.5, 1.0]),
    }
    sources_N = np.array(["a", "a", "b"])
    first = progressed({}, streams, sources_N, ["a", "b", "c"])
    assert first == {"a": Progress(2.0, 2.0, 1.0), "b": Progress(0.5, 0.5, 0.0)}
    after = progressed(first, {**streams, "kl": np.ones(3)}, sources_N, ["a"])
    assert after["a"] == Progress(2.0, 1.0, 1.0) and after["b"] is first["b"]
    scalars = source_scalars(streams, sources_N, ["a", "b", "c"])
    assert scalars["distill/share/a"] == 0.75 and scalars["distill/kl/b"] == 0.5 and scalars["distill/share/c"] == 0.0
    assert "distill/kl/c" not in scalars and scalars["distill/entropy/a"] == 1.0


def measured_slopes(lesson: Lesson, form: str, advantages_N: Tensor, ages_N: Tensor) -> tuple[Tensor, Tensor]:
    """The statistic ``slope`` [6], and the sum of the absolute gradient by each token's logits, from autograd. PPO; ``ages_N`` is
    log π − log μ."""
    logits_NV, targets_N = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6)
    logp_N = chosen_logprobs(logits_NV, torch.eye(8), targets_N)[0]
    behaviour_BT = (logp_N - ages_N)[None]
    streams = {"weights_BT": torch.full((1, 6), 1 / 6), "behaviour_BT": behaviour_BT}
    streams |= {"advantages_BT": advantages_N[None], "samples_BT": torch.tensor([[0, 0, 0, 1, 1, 1]])}
    policy = PolicyObjective(LossConfig(policy="ppo", clip_high=0.2), 1.0, streams, behaviour_BT)
    objective = DistillObjective(config(form, outcome_weight=1.0), (lesson,), policy, has_policy=True)
    leaf_NV = logits_NV.clone().requires_grad_()
    measured = objective(leaf_NV, torch.eye(8), targets_N)
    measured.loss.backward()
    assert leaf_NV.grad is not None
    return measured.streams_N["slope"], leaf_NV.grad.abs().sum(-1)


def test_the_share_of_the_gradient_counts_what_the_policy_loss_trains() -> None:
    """Rewards of tokens without a teacher count; tokens that PPO clips do not."""
    rng = torch.Generator().manual_seed(1)
    teacher = Teacher(torch.randn(3, 4, generator=rng), torch.randn(8, 4, generator=rng))
    rewards_N = torch.tensor([0.0, 0.0, 0.0, 2.0, -2.0, 2.0])
    slope_N, gradient_N = measured_slopes(Lesson(torch.arange(3), teacher), "full", rewards_N, torch.zeros(6))
    assert torch.allclose(slope_N, gradient_N, rtol=1e-5) and (gradient_N > 0).all()
    streams, sources_N = {"slope": slope_N.numpy()}, np.array(["taught"] * 3 + ["untaught"] * 3)
    scalars = source_scalars({**streams, "kl": slope_N.numpy()}, sources_N, ["taught"])
    share = gradient_N[3:].sum().item() / gradient_N.sum().item()
    assert scalars["distill/share/untaught"] == pytest.approx(share, rel=1e-5) and "distill/kl/untaught" not in scalars
    ages_N = torch.tensor([0.0, 0.1, -0.1, 1.0, 1.0, 1.0])
    slope_N, gradient_N = measured_slopes(Lesson(torch.arange(6), torch.full((6,), 4.0)), "sampled", rewards_N, ages_N)
    assert torch.allclose(slope_N, gradient_N, rtol=1e-5)
    assert (slope_N[:3] > 0).all() and not slope_N[3:].any(), "their ratio is above the bound, their advantage positive"


def test_gap_never_raises_the_weight_of_a_source() -> None:
    """A source whose teacher agreed with the student at first, and that has drifted since."""
    known = {"a": Progress(1e-5, 1e-2, 0.5), "b": Progress(0.5, 0.5, 0.5)}
    weights = source_weights(["a", "b"], [10, 10], "gap", {"a": 1.0, "b": 1.0}, known)
    assert weights == pytest.approx([0.05, 0.05])
