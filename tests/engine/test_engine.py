"""The engine against generation written out, under everything that may go on around a request."""

from __future__ import annotations

import random

import numpy as np
import pytest

from stretto.base.errors import UserError
from stretto.engine.reference import generate_naive
from stretto.engine.request import Completion, Grammar, Phases, QueueFull, Request
from tests.engine.engines import (
    CONFIG,
    CORNER,
    FULL,
    SHALLOW,
    check_greedy,
    check_idle,
    engine,
    mixed,
    network,
    prompts,
    request,
    run,
)  # fmt: skip

MODEL = network()
"""Of those tests that leave weights alone."""


@pytest.mark.parametrize("num_pages", [200, 24])
def test_greedy_equals_naive(num_pages: int) -> None:
    """60 mixed requests in one engine; with 24 pages of 4 tokens, they take pages from each other all the time."""
    asked = mixed(60, seed=num_pages)
    subject = engine(num_pages=num_pages, max_step_tokens=20)
    done = subject.generate(asked)
    assert [completion.request_id for completion in done] == [one.id for one in asked]
    for one, completion in zip(asked, done, strict=True):
        check_greedy(MODEL, one, completion)
        assert len(completion.tokens) == one.sampling.max_tokens
    for one, completion in zip(asked[:5], done, strict=False):
        assert completion.tokens == generate_naive(MODEL, one.prompt, one.sampling, one.phases).tokens
    stats = subject.stats()
    assert stats.cached_tokens > 0
    assert (stats.num_preemptions > 0) == (num_pages == 24)
    check_idle(subject)


def test_aborts_between_steps_disturb_nobody() -> None:
    asked = mixed(20, seed=3)
    subject, rng = engine(num_pages=26), random.Random(3)
    for one in asked:
        subject.add(one)
    found: dict[str, Completion] = {}
    while subject.has_work:
        for event in subject.step():
            if isinstance(event, Completion):
                found[event.request_id] = event
        if rng.random() < 0.3:
            name = f"r{rng.randrange(20)}"
            for completion in subject.abort(name):
                assert completion.finish_reason == "abort"
                found[name] = completion
        subject.allocator.check()
    assert len(found) == 20
    aborted = [name for name, completion in found.items() if completion.finish_reason == "abort"]
    assert 2 < len(aborted) < 18
    for one in asked:
        check_greedy(MODEL, one, found[one.id])
        assert one.id in aborted or len(found[one.id].tokens) == one.sampling.max_tokens
    assert subject.abort("r0") == []
    check_idle(subject)


def test_choices_share_the_prompt_and_differ() -> None:
    subject = engine()
    prompt = prompts(1, 1, 41, 41)[0]
    done = subject.generate([request("many", prompt, temperature=1.0, seed=5, n=4)])
    assert [completion.index for completion in done] == [0, 1, 2, 3]
    assert len({completion.tokens for completion in done}) == 4
    assert [completion.usage.cached_tokens for completion in done] == [0, 40, 40, 40]
    alone = engine().generate([request("one", prompt, temperature=1.0, seed=7)])[0]
    assert alone.tokens == done[2].tokens and done[2].seed == 7


def test_a_seed_gives_the_same_tokens_in_company() -> None:
    wanted = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2, "max_tokens": 20, "seed": 11}
    subject = [request("x", prompts(2, 1, 30, 30)[0], SHALLOW, **wanted)]
    alone = engine().generate(subject)[0]
    company = mixed(20, seed=5, temperature=1.0)
    crowded = engine(num_pages=40).generate(company[:10] + subject + company[10:])
    again = next(completion for completion in crowded if completion.request_id == "x")
    assert again.tokens == alone.tokens
    # another batch composition: other summation orders in the products, of length at most 64
    np.testing.assert_allclose(again.logprobs, alone.logprobs, atol=2e-4)
    other = engine().generate([request("x", subject[0].prompt, SHALLOW, **{**wanted, "seed": 12})])[0]
    assert other.tokens != alone.tokens


def test_a_seed_is_drawn_and_told() -> None:
    first, second = engine().generate([request(name, (5, 6, 7), temperature=1.0) for name in "ab"])
    assert first.seed != second.seed and first.tokens != second.tokens
    again = engine().generate([request("a", (5, 6, 7), temperature=1.0, seed=first.seed)])[0]
    assert again.tokens == first.tokens


def test_an_error_of_one_request_is_its_own() -> None:
    """A grammar that no token can follow ends that request; the others do not notice."""
    others = [request(f"r{index}", prompt) for index, prompt in enumerate(prompts(8, 5))]
    bad = request("bad", (5, 6), grammar=Grammar(kind="regex", text="[a-z]+"))
    subject = engine(text=True)
    for one in [*others, bad]:
        subject.add(one)
    (seq,) = subject._open["bad"]
    seq.grammar.mask = lambda: np.zeros(CONFIG.vocab_size // 32, np.int32)  # a dead end, made by hand
    done = run(subject)
    assert done["bad", 0].finish_reason == "error" and "grammar" in (done["bad", 0].error or "")
    for one in others:
        check_greedy(MODEL, one, done[one.id, 0])
    check_idle(subject)


def test_logits_that_are_no_numbers() -> None:
    model = network()
    model.embedding.weight[100] = float("nan")
    subject = engine(model)
    subject.add(request("bad", (5, 100, 6), temperature=1.0, seed=1))
    done = run(subject)
    assert done["bad", 0].finish_reason == "error" and done["bad", 0].tokens == ()
    check_idle(subject)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (request("x", ()), "prompt: empty"),
        (request("x", (5, 288)), "288 is not a token id"),
        (request("x", (5,) * 160), "no room for a completion"),
        (request("x", (5,), CONFIG.subnet(depth=2).replace(layers=(3, 9))), "layers"),
        (request("x", (5,), Phases(answer=FULL, prefill=CORNER)), "left out in the phase before"),
        (request("x", (5,), stop=("a",)), "no tokenizer"),
        (request("x", (5,), logit_bias={999: 1.0}), "logit_bias"),
    ],
)
def test_refusals(asked: Request, problem: str) -> None:
    subject = engine()
    with pytest.raises(UserError, match=problem) as caught:
        subject.add(asked)
    assert "\n" not in str(caught.value)
    assert not subject.has_work
    check_idle(subject)


def test_refuses_doubles_and_a_full_queue() -> None:
    subject = engine(max_waiting=2, max_batch=1)
    subject.add(request("a", (5,)))
    with pytest.raises(UserError, match="already in flight"):
        subject.add(request("a", (5,)))
    subject.add(request("b", (5,)))
    with pytest.raises(QueueFull):
        subject.add(request("c", (5,)))
    assert set(run(subject)) == {("a", 0), ("b", 0)}
    subject.add(request("c", (5,)))
    assert subject.abort("c")[0].tokens == ()


def test_usage_counts_what_was_computed() -> None:
    plain = engine().generate([request("x", (5, 6, 7), max_tokens=1)])[0].usage
    longer = engine().generate([request("x", (5, 6, 7), max_tokens=5)])[0].usage
    small = engine().generate([request("x", (5, 6, 7), CORNER, max_tokens=5)])[0].usage
    assert 0 < plain.flops < longer.flops and small.flops < longer.flops
    assert (longer.prompt_tokens, longer.output_tokens, longer.subnet) == (3, 5, FULL.label())
    assert 0 <= longer.queued_s <= longer.first_token_s <= longer.total_s
