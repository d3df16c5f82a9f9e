from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops.logprob import (
    IGNORED,
    Teacher,
    TopLogProbs,
    chosen_logprobs,
    chunk_tokens,
    head_loss,
    top_log_probs,
    wide_product,
)
from stretto.ops.matmul import Arithmetic
from tests.ops.references import chosen_logprobs_reference, head_loss_reference

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
def test_equals_the_reference(
    width: int | None, ce_weight: float, chunk: int, close: Close, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.ops.logprob.CHUNK", chunk)
    hidden, head, targets = _inputs()
    teacher = None if width is None else _teacher(width)
    loss, nll = head_loss(hidden, head, targets, teacher, ce_weight)
    expected = head_loss_reference(hidden, head, targets, teacher, ce_weight)
    close(loss, expected, N + V)
    close(nll, -chosen_logprobs_reference(hidden, head, targets)[0], V)
    for ours, theirs in zip(
        torch.autograd.grad(loss, (hidden, head), torch.tensor(0.7)),
        torch.autograd.grad(expected, (hidden, head), torch.tensor(0.7)),
        strict=True,
    ):
        close(ours, theirs, N + V)


@pytest.mark.parametrize("num_ignored", [0, 4, 30])
def test_a_known_number_of_targets_changes_nothing(num_ignored: int) -> None:
    hidden, head, targets = _inputs()
    targets = torch.where(torch.arange(N) < num_ignored, IGNORED, targets.clamp_min(0))
    results = []
    for known in (None, N - num_ignored):
        loss, nll = head_loss(hidden, head, targets, num_targets=known)
        results.append((loss, nll, *torch.autograd.grad(loss, (hidden, head))))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_the_gradient_of_a_head_in_bf16_is_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.ops.logprob.CHUNK", 1)
    hidden, head, targets = _inputs()
    rough = [each.detach().bfloat16().requires_grad_() for each in (hidden, head)]
    wide = rough[1].detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        for weight in (rough[1], wide):
            head_loss(rough[0], weight, targets)[0].backward()
            rough[0].grad = None
    assert wide.grad is not None and rough[1].grad is not None
    assert torch.equal(rough[1].grad, wide.grad.bfloat16())


def test_accelerators_take_chunks_of_a_gibibyte_of_logits_and_of_4096_tokens_at_least() -> None:
    sizes = {vocab: chunk_tokens(torch.empty(vocab, 2, device="meta")) for vocab in (32768, 50304, 151936)}
    assert sizes == {32768: 8192, 50304: 4096, 151936: 4096}
    assert chunk_tokens(torch.empty(32768, 2)) == 1024


def _kept(top_k: int, width: int = 20) -> TopLogProbs:
    teacher = _teacher(width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.ops.logprob.CHUNK", 8)
        return top_log_probs(teacher.hidden_ND.detach(), teacher.head_VD, top_k)


@pytest.mark.parametrize("top_k", [1, 7, V])
@pytest.mark.parametrize("ce_weight", [0.0, 0.3])
def test_what_was_kept_of_a_teacher_equals_the_reference(
    top_k: int, ce_weight: float, close: Close, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, head, targets = _inputs()
    kept = _kept(top_k)
    monkeypatch.setattr("stretto.ops.logprob.CHUNK", 8)
    loss, nll = head_loss(hidden, head, targets, kept, ce_weight)
    expected = head_loss_reference(hidden, head, targets, kept, ce_weight)
    close(loss, expected, N + V)
    close(nll, -chosen_logprobs_reference(hidden, head, targets)[0], V)
    grads, others = (torch.autograd.grad(each, (hidden, head), torch.tensor(0.7)) for each in (loss, expected))
    for ours, theirs in zip(grads, others, strict=True):
        close(ours, theirs, N + V)


def test_all_of_a_teacher_kept_is_the_teacher(close: Close) -> None:
    hidden, head, targets = _inputs()
    kept, teacher = _kept(V), _teacher(20)
    assert not kept.rest_N.any()
    whole, ours = (head_loss(hidden, head, targets, each, 0.0)[0] for each in (teacher, kept))
    close(ours, whole, N + V)
    for one, other in zip(
        torch.autograd.grad(ours, (hidden, head)), torch.autograd.grad(whole, (hidden, head)), strict=True
    ):
        close(one, other, N + V)
    fewer = [head_loss(hidden, head, targets, _kept(top_k), 0.0)[0].item() for top_k in (1, 7, 20)]
    assert fewer == sorted(fewer) and fewer[-1] < whole.item(), "outcomes taken together are never farther apart"


@pytest.mark.parametrize("top_k", [1, 7, V])
def test_where_student_and_teacher_are_equal_the_kept_pull_nowhere(top_k: int, close: Close) -> None:
    """Without the other tokens' sum there would be a gradient of their whole probability."""
    hidden, head, targets = _inputs()
    kept = top_log_probs(hidden.detach(), head, top_k)
    loss, _ = head_loss(hidden, head, targets, kept, 0.0)
    scale, _ = head_loss(hidden, head, targets)  # what rounding is measured by: a zero has no size
    close(scale + loss, scale, N + V)
    pulls, scales = (torch.autograd.grad(each, (hidden, head)) for each in (loss, scale))
    for pull, size in zip(pulls, scales, strict=True):
        close(size + pull, size, N + V)


def test_a_frozen_head_costs_no_gradient() -> None:
    hidden, head, targets = _inputs()
    (expected, _) = torch.autograd.grad(head_loss(hidden, head, targets)[0], (hidden, head))
    (found,) = torch.autograd.grad(head_loss(hidden, head.detach(), targets)[0], (hidden,))
    assert torch.equal(found, expected)


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


def test_the_head_is_applied_to_what_is_learnt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation's prompt costs no product with the vocabulary, and changes neither loss nor gradient."""
    generator = torch.Generator().manual_seed(0)
    hidden_ND, head_VD = torch.randn(64, 8, generator=generator), torch.randn(50, 8, generator=generator)
    targets_N = torch.randint(50, (64,), generator=generator)
    targets_N[torch.rand(64, generator=generator) < 0.5] = IGNORED
    results, widths = [], []
    product = wide_product
    monkeypatch.setattr(
        "stretto.ops.logprob.wide_product", lambda x, *others: widths.append(len(x)) or product(x, *others)
    )
    for share in (0.9, 0.0):  # left out, and computed all the same
        monkeypatch.setattr("stretto.ops.logprob.WORTH_LEAVING_OUT", share)
        inputs = [each.clone().requires_grad_() for each in (hidden_ND, head_VD)]
        loss, nll_N = head_loss(*inputs, targets_N)
        loss.backward()
        results.append([loss.detach(), nll_N, *(each.grad for each in inputs)])
    assert widths == [int((targets_N != IGNORED).sum()), 64]
    for apart, whole in zip(*results, strict=True):
        torch.testing.assert_close(apart, whole, rtol=1e-5, atol=1e-5)  # fp32, sums of at most 64 terms of order 1


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


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 8, 33, 1024])
def test_chosen_log_probs_equal_the_reference(
    temperature: float, chunk: int, close: Close, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.ops.logprob.CHUNK", chunk)
    hidden, head, targets = _inputs()
    logp, entropy = chosen_logprobs(hidden, head, targets, temperature)
    expected, expected_entropy = chosen_logprobs_reference(hidden, head, targets, temperature)
    close(logp, expected, V + D)
    close(entropy, expected_entropy, V + D)
    assert not entropy.requires_grad
    stream = torch.linspace(-2.0, 3.0, N)  # a gradient of its own for each token, as a policy loss gives
    for ours, theirs in zip(
        torch.autograd.grad((stream * logp).sum(), (hidden, head)),
        torch.autograd.grad((stream * expected).sum(), (hidden, head)),
        strict=True,
    ):
        close(ours, theirs, N + V)


def test_chosen_log_probs_are_those_of_the_tempered_distribution(close: Close) -> None:
    hidden, head, targets = _inputs()
    kept = targets != IGNORED
    tempered = torch.distributions.Categorical(logits=(hidden @ head.T / 0.7)[kept])
    logp, entropy = chosen_logprobs(hidden, head, targets, 0.7)
    close(logp[kept], tempered.log_prob(targets[kept]), V + D)
    close(entropy[kept], tempered.entropy(), V + D)
    assert not logp[~kept].any() and not entropy[~kept].any()


def test_chosen_log_probs_are_plain_unless_a_temperature_is_asked_for() -> None:
    hidden, head, targets = _inputs()
    assert torch.equal(chosen_logprobs(hidden, head, targets)[0], chosen_logprobs(hidden, head, targets, 1.0)[0])


def test_chosen_log_probs_without_a_target_still_reach_the_backward_pass() -> None:
    """A rank whose rows are all padding must take part in the gradients' sum."""
    hidden, head, targets = _inputs()
    logp, _ = chosen_logprobs(hidden, head, torch.full_like(targets, IGNORED))
    logp.sum().backward()
    assert hidden.grad is not None and not hidden.grad.any()
    assert head.grad is not None and not head.grad.any()


def test_chosen_log_probs_keep_no_logits() -> None:
    hidden, head, targets = _inputs()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        chosen_logprobs(hidden, head, targets)
    assert max(kept) == V * D < N * V


def test_chosen_log_probs_under_autocast_differentiate_in_its_dtype() -> None:
    hidden, head, targets = _inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp, _ = chosen_logprobs(hidden, head, targets)
    plain, _ = chosen_logprobs(hidden, head, targets)
    assert logp.dtype == torch.float32 and not torch.equal(logp, plain)
    ours, theirs = torch.autograd.grad(logp.sum(), hidden)[0], torch.autograd.grad(plain.sum(), hidden)[0]
    assert 0 < (ours - theirs).norm() / theirs.norm() < 2 * torch.finfo(torch.bfloat16).eps * D**0.5


@pytest.mark.parametrize("others", [0, 1, 5])
def test_batch_invariant_log_probs_do_not_see_their_neighbours(others: int) -> None:
    hidden, head, targets = _inputs()
    exact = Arithmetic("bf16", batch_invariant=True)
    whole, _ = chosen_logprobs(hidden, head, targets, 0.7, operators=exact.operators)
    part = slice(9, 10 + others)
    alone, _ = chosen_logprobs(hidden[part], head, targets[part], 0.7, operators=exact.operators)
    assert torch.equal(whole[part], alone)
    plain, _ = chosen_logprobs(hidden, head, targets, 0.7)
    assert (whole - plain).abs().max() < 1e-4
    assert torch.autograd.grad(whole.sum(), hidden)[0].isfinite().all()
