from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stretto.base.errors import UserError
from stretto.evals.loss import evaluate, evaluate_many, held_out_losses
from stretto.model.elastic import extract
from stretto.model.parallel import Ranks
from stretto.ops.logprob import IGNORED


def test_nll_is_the_mean_over_kept_tokens_of_all_batches(make_model, batches):
    model = make_model()
    subnet = model.config.subnet(5, 3, 2)
    # unequal batches: a mean of batch means would differ from the token-weighted one
    batches = (batches[0], replace(batches[1], targets_BT=batches[1].targets_BT.clone().fill_(IGNORED)))
    batches[1].targets_BT[0, :3] = torch.tensor([4, 5, 6])
    losses = []
    for batch in batches:
        logits = model.logits(batch.ids_BT, subnet, batch.ctx).detach()
        losses.append(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.targets_BT.flatten(), ignore_index=IGNORED, reduction="none"
            )[batch.targets_BT.flatten() != IGNORED]
        )
    report = evaluate(model, subnet, batches)
    assert report.num_tokens == sum(loss.numel() for loss in losses) == 3 * 14 + 3
    assert report.nll == pytest.approx(torch.cat(losses).double().mean().item(), rel=1e-5)
    assert report.kl is None and report.logit_error is None


def test_kl_and_logit_error_equal_their_definitions_on_full_logits(make_model, batches):
    model = make_model()
    subnet = model.config.subnet(4, 3, 1)
    kl, error, size, num = 0.0, 0.0, 0.0, 0
    for batch in batches:
        kept = batch.targets_BT != IGNORED
        full = model.logits(batch.ids_BT, None, batch.ctx)[kept].detach().double()
        own = model.logits(batch.ids_BT, subnet, batch.ctx)[kept].detach().double()
        kl += float((full.softmax(-1) * (full.log_softmax(-1) - own.log_softmax(-1))).sum())
        error, size, num = (
            error + float((own - full).square().sum()),
            size + float(full.square().sum()),
            num + len(full),
        )
    (report,) = evaluate_many(model, [subnet], batches, against_full=True)
    assert report.kl == pytest.approx(kl / num, rel=1e-4)
    assert report.logit_error == pytest.approx(error / size, rel=1e-4)
    assert report.kl is not None and report.kl > 0


def test_full_network_is_at_no_distance_from_itself(make_model, batches):
    model = make_model()
    (report,) = evaluate_many(model, [model.config.full()], batches, against_full=True)
    assert report.kl == pytest.approx(0.0, abs=1e-6) and report.logit_error == 0.0


def test_many_equal_one_at_a_time_and_advance_counts(make_model, batches):
    model = make_model()
    subnets = [model.config.full(), model.config.subnet(4, 3, 2), model.config.subnet(5)]
    steps: list[int] = []
    together = evaluate_many(model, subnets, batches, advance=steps.append)
    assert [report.nll for report in together] == [evaluate(model, subnet, batches).nll for subnet in subnets]
    assert sum(steps) == len(subnets) * len(batches)


def test_masked_and_extracted_losses_agree(make_model, batches):
    model = make_model()
    subnet = model.config.subnet(4, 3, 2)
    smaller = extract(model, subnet)
    own = evaluate(smaller, smaller.config.full(), batches)
    assert own.nll == pytest.approx(evaluate(model, subnet, batches).nll, abs=1e-5)


def test_evaluation_leaves_no_gradient(make_model, batches):
    model = make_model()
    evaluate_many(model, [model.config.full()], batches, against_full=True)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_padding_cannot_change_the_loss(make_model, batches):
    model = make_model()
    batch = batches[0]
    other_ids = torch.where(batch.ctx.documents_BT < 0, 7, batch.ids_BT)
    full = model.config.full()
    assert evaluate(model, full, [batch]).nll == evaluate(model, full, [replace(batch, ids_BT=other_ids)]).nll


def test_no_target_is_refused(make_model, batches):
    model = make_model()
    blank = replace(batches[0], targets_BT=torch.full_like(batches[0].targets_BT, IGNORED))
    with pytest.raises(UserError, match="contains no target token"):
        evaluate(model, model.config.full(), [blank])


class ASecondRank(Ranks):
    """A rank beside another one that measured a summed loss of 3 nats over 2 tokens."""

    def sum(self, value, group=None):
        return value + torch.tensor([[3.0, 2.0]])


def test_a_rank_with_padding_alone_has_the_losses_of_the_others(make_model, batches):
    model, batch = make_model(), batches[0]
    ctx = replace(batch.ctx, documents_BT=torch.full_like(batch.ids_BT, -1))
    padding = replace(batch, targets_BT=torch.full_like(batch.targets_BT, IGNORED), ctx=ctx)
    found = held_out_losses(model, {}, [padding], ASecondRank(1, 2, torch.device("cpu")))
    assert found == {"full": 1.5}
    with pytest.raises(UserError, match="contains no target token"):
        held_out_losses(model, {}, [padding], Ranks(0, 1, torch.device("cpu")))


def test_subnet_outside_the_network_is_refused(make_model, batches):
    model = make_model()
    foreign = model.config.full().replace(layers=(0, 9))
    with pytest.raises(UserError, match="rising indices"):
        evaluate(model, foreign, batches)
