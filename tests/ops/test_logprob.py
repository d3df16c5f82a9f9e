from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops.logprob import IGNORED, Teacher, head_loss, head_loss_reference, log_probs

Close = Callable[[Tensor, Tensor, int], None]
N, D, V = 37, 12, 50


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(V, (N,))
    targets[[0, 5, 6, 36]] = IGNORED
    return torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True), targets


def _teacher(width: int) -> Teacher:
    torch.manual_seed(1)
    return Teacher(torch.randn(N, width, requires_grad=True), torch.randn(V, width, requires_grad=True))


@pytest.mark.parametrize(("width", "ce_weight"), [(None, 1.0), (D, 0.5), (20, 0.3), (20, 0.0), (20, 1.0)])
@pytest.mark.parametrize("chunk", [1, 8, 37, 1024])
def test_equals_the_reference(width: int | None, ce_weight: float, chunk: int, close: Close) -> None:
    hidden, head, targets = _inputs()
    teacher = None if width is None else _teacher(width)
    loss, nll = head_loss(hidden, head, targets, teacher, ce_weight, chunk)
    expected = head_loss_reference(hidden, head, targets, teacher, ce_weight)
    close(loss, expected, N + V)
    close(nll, -log_probs(hidden, head, targets), V)
    for ours, theirs in zip(
        torch.autograd.grad(loss, (hidden, head), torch.tensor(0.7)),
        torch.autograd.grad(expected, (hidden, head), torch.tensor(0.7)),
        strict=True,
    ):
        close(ours, theirs, N + V)


def test_cross_entropy_is_torchs_own(close: Close) -> None:
    hidden, head, targets = _inputs()
    loss, _ = head_loss(hidden, head, targets)
    close(loss, F.cross_entropy(hidden @ head.T, targets, ignore_index=IGNORED, reduction="sum"), N + V)


def test_ignored_positions_have_no_loss_and_no_gradient() -> None:
    hidden, head, targets = _inputs()
    teacher = _teacher(20)
    loss, nll = head_loss(hidden, head, targets, teacher, 0.5)
    loss.backward()
    ignored = targets == IGNORED
    assert hidden.grad is not None
    assert not hidden.grad[ignored].any()
    assert hidden.grad[~ignored].any(-1).all()
    assert not nll[ignored].any()
    nothing, _ = head_loss(hidden, head, torch.full_like(targets, IGNORED), teacher, 0.5)
    assert nothing.item() == 0.0


def test_a_teacher_equal_to_the_student_pulls_nowhere() -> None:
    hidden, head, targets = _inputs()
    loss, _ = head_loss(hidden, head, targets, Teacher(hidden, head), ce_weight=0.0)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None and not hidden.grad.any()
    assert head.grad is not None and not head.grad.any()


def test_a_teacher_receives_no_gradient() -> None:
    hidden, head, targets = _inputs()
    teacher = _teacher(20)
    head_loss(hidden, head, targets, teacher, 0.5)[0].backward()
    assert teacher.hidden_ND.grad is None
    assert teacher.head_VD.grad is None


def test_large_logits_stay_finite() -> None:
    hidden, head, targets = _inputs()
    loss, _ = head_loss(hidden * 1e3, head, targets, Teacher(hidden.detach() * 1e3, head), 0.5)
    loss.backward()
    assert torch.isfinite(loss)
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all()


def test_a_share_of_the_loss_needs_a_teacher() -> None:
    with pytest.raises(AssertionError, match=r"0\.5"):
        head_loss(*_inputs(), ce_weight=0.5)


def test_without_gradients_it_is_the_same_loss() -> None:
    hidden, head, targets = _inputs()
    with torch.no_grad():
        assert head_loss(hidden, head, targets)[0] == head_loss(hidden.requires_grad_(), head, targets)[0].detach()
