"""The engine against generation written out, under everything that may go on around a request: what a completion brings with
its tokens, and weights that change while requests are in flight."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models

from bench.common.naive_engine import generate_naive
from stretto.base.errors import UserError
from stretto.engine.engine import Engine
from stretto.engine.request import Completion, Grammar, Phases, QueueFull, Request, TokenEvent
from stretto.engine.runner import state_checksum
from stretto.engine.sequence import SequenceState
from stretto.model.checkpoint import weights_hash, write_checkpoint
from stretto.ops.native import Library, load
from stretto.text.stream import Detokenizer, StopStrings
from stretto.text.tokenizer import Tokenizer
from tests.engine.engines import (
    CONFIG,
    CORNER,
    FULL,
    LATENT,
    SHALLOW,
    SUBNETS,
    SWITCHES,
    check_greedy,
    check_idle,
    engine,
    full_routes,
    mixed,
    network,
    prompts,
    request,
    run,
    tokenizer,
)  # fmt: skip
from tests.engine.scheduler_loop import check_pages

MODEL = network()
"""Of those tests that leave weights alone."""


@pytest.mark.parametrize("num_pages", [pytest.param(200, marks=pytest.mark.slow), 24])
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


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", [*SWITCHES, *LATENT])
def test_networks_of_all_families_generate_what_a_forward_pass_would(name: str, compiled: bool) -> None:
    """Several Subnets in a batch, prompts in chunks, pages of others: in the kernels where they know the network."""
    library = load() if compiled else Library(None, "not asked for")
    if compiled and library.handle is None:
        pytest.skip(library.reason)
    config = CONFIG.replace(**{**SWITCHES, **LATENT}[name])
    model = network(config=config)
    generator = torch.Generator().manual_seed(1)
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1 and not key.endswith("norm"):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    rng = random.Random(2)
    subnets = [config.full(), config.subnet(3, 4, 1), config.subnet(3), config.subnet(None, 4, 2)]
    asked = [
        request(f"r{place}", prompt, rng.choice(subnets), max_tokens=rng.randint(2, 16))
        for place, prompt in enumerate(prompts(4, 10))
    ]
    subject = engine(model, max_step_tokens=20, num_pages=60, engine={"library": library})
    for one, done in zip(asked, subject.generate(asked), strict=True):
        check_greedy(model, one, done)
    stats = subject.stats()
    assert stats.cached_tokens > 0
    why = "no kernels for latent attention" if compiled else "not asked for"
    is_native = compiled and name not in LATENT
    assert stats.kernels["decode"] == ("native" if is_native else f"torch ({why})")


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
        check_pages(subject.allocator)
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


WORD = Grammar(kind="regex", text="[a-z ]{200}")


def broken(*_: object, **__: object) -> Any:
    raise ValueError("broken")


class Panic(BaseException):
    """As a library in Rust raises it: no Exception."""


def panics(*_: object) -> Any:
    raise Panic


class Stubborn(list[float]):
    __iadd__ = broken


FAULTS: dict[str, tuple[dict[str, Any], Callable[[SequenceState], object]]] = {
    "mask": ({"grammar": WORD}, lambda seq: setattr(seq.grammar, "mask", broken)),
    "accept": ({"grammar": WORD}, lambda seq: setattr(seq.grammar, "accept", panics)),
    "settings": ({"presence_penalty": 1.0}, lambda seq: seq.sampling.__dict__.update(presence_penalty=10**400)),
    "logprobs": ({"top_logprobs": 2}, lambda seq: seq.sampling.__dict__.update(top_logprobs="2")),
    "scores": ({"prompt_logprobs": True}, lambda seq: setattr(seq, "prompt_log_probs", Stubborn())),
    "text": ({}, lambda seq: setattr(seq.detokenizer, "push", panics)),
    "stops": ({"stop": ("zzz",)}, lambda seq: setattr(seq.stops, "push", broken)),
    "rest": ({}, lambda seq: setattr(seq.detokenizer, "finish", broken)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_request_is_its_own(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever depends on one request alone: it raises there, that request ends with an error, the others do not notice."""
    settings, inflict = FAULTS[fault]
    others = [request(f"r{index}", prompt) for index, prompt in enumerate(prompts(8, 3))]
    subject = engine(MODEL, text=True)
    for one in [*others, request("bad", (5, 6, 5, 6, 5, 6), n=2, **settings)]:
        subject.add(one)
    hurt = subject._open["bad"][0]
    inflict(hurt)
    done = run(subject)
    assert done["bad", 0].finish_reason == "error" and not done["bad", 0].is_refused
    assert re.fullmatch(
        r"the engine could not finish this request: (ValueError|TypeError|OverflowError|Panic)",
        done["bad", 0].error or "",
    )
    assert done["bad", 1].finish_reason in ("stop", "length")
    assert "request bad, choice 0 has failed" in caplog.text
    for one in others:
        check_greedy(MODEL, one, done[one.id, 0])
    check_idle(subject)


@pytest.mark.parametrize("settings", [{}, {"stop": ("zzz",)}], ids=["at the end", "token by token"])
def test_a_fault_in_text_that_nobody_streams(settings: dict[str, Any]) -> None:
    subject = engine(MODEL, text=True)
    subject.add(request("bad", (5, 6), **settings), stream=False)
    subject._open["bad"][0].detokenizer.push = panics  # type: ignore[union-attr, method-assign]
    assert run(subject)["bad", 0].finish_reason == "error"
    subject.add(request("bad", (5, 6), **settings))
    subject._open["bad"][0].detokenizer.finish = panics  # type: ignore[union-attr, method-assign]
    assert subject.abort("bad")[0].finish_reason == "error"
    check_idle(subject)


def test_a_fault_that_nobody_is_to_blame_for_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice without settings of its own: whoever came next would meet the same."""
    monkeypatch.setattr("stretto.engine.engine.sample", broken)
    subject = engine(MODEL)
    subject.add(request("x", (5, 6)))
    with pytest.raises(ValueError, match="broken"):
        run(subject)


def test_a_grammar_that_leads_nowhere_is_the_requests_own_fault() -> None:
    subject = engine(MODEL, text=True)
    wide = "start: first\nfirst: " + " | ".join(f'"a" "w{at}" first?' for at in range(2500))
    bias = dict.fromkeys(range(CONFIG.vocab_size), -100.0) | {tokenizer().encode("a")[0]: 100.0}
    subject.add(request("bad", (5, 6), grammar=Grammar(kind="lark", text=wide), logit_bias=bias))
    done = run(subject)["bad", 0]
    assert done.is_refused and done.finish_reason == "error" and "grammar: " in (done.error or "")
    check_idle(subject)


def test_a_grammar_that_names_the_end_is_the_requests_own_fault() -> None:
    subject, end = engine(MODEL, text=True), tokenizer().rust.id_to_token(tokenizer().eos_id)
    grammar = Grammar(kind="lark", text=f'start: {end} "b"')
    subject.add(request("bad", (5, 6), grammar=grammar, ignore_eos=True))
    done = run(subject)["bad", 0]
    assert done.is_refused and "do not name the end token" in (done.error or "")
    check_idle(subject)


def test_an_admission_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = engine(MODEL)
    monkeypatch.setattr("stretto.engine.scheduler.chain_hash", broken)
    with pytest.raises(ValueError, match="broken"):
        subject.add(request("x", (5,) * 20, n=3))
    assert not subject.has_work
    monkeypatch.undo()
    subject.add(request("x", (5,) * 20))
    assert len(run(subject)) == 1
    check_idle(subject)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_outputs_that_are_no_numbers_fail_their_request_alone(value: float) -> None:
    """One token has such an embedding: whose prompt holds it fails; those beside it do not, nor those who get its pages,
    nor those whose prompts begin as it did."""
    model = network()
    model.embedding.weight[100] = value
    subject = engine(model, num_pages=60)
    good = [request(f"r{index}", prompt, max_tokens=20) for index, prompt in enumerate(prompts(8, 12, 3, 40))]
    good = [one for one in good if 100 not in one.prompt]
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "top_p": 0.5},
        {"top_logprobs": 5},
        {"prompt_logprobs": True},
    ]
    bad = [
        request(f"bad{index}", (index + 3, *range(3, 33), 100, *range(3, 8 + index)), **kinds[index % len(kinds)])
        for index in range(len(good))
    ]
    for pair in zip(bad, good, strict=True):
        for one in pair:
            subject.add(one)
    done = run(subject)
    for one in bad:
        failed = done[one.id, 0]
        assert failed.finish_reason == "error" and failed.tokens == () and "finite" in (failed.error or "")
    for one in good:
        check_greedy(model, one, done[one.id, 0])
    check_idle(subject)
    alone, like_bad = engine(model), request("like", (*bad[0].prompt[:30], 9))
    assert alone.generate(bad[:1])[0].error is not None
    check_greedy(model, like_bad, alone.generate([like_bad])[0])


def test_weights_that_are_no_numbers_leave_nothing_behind() -> None:
    """After others, all goes on as if they had never been there: no page keeps what they wrote."""
    subject, asked = engine(network(), num_pages=30), mixed(12, seed=4)
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in network().state_dict().items()}
    subject.load_weights(
        1, broken | {name: tensor for name, tensor in network().state_dict().items() if "rank" in name}
    )
    assert {one.finish_reason for one in subject.generate(asked)} == {"error"}
    subject.load_weights(2, network().state_dict())
    for one, completion in zip(asked, subject.generate(asked), strict=True):
        check_greedy(MODEL, one, completion)


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
        (request("x", (5,), stop_ids=tuple(range(288)), min_tokens=2), "min_tokens: every token"),
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


def test_generate_keeps_to_the_queue_and_a_refusal_leaves_an_idle_engine() -> None:
    subject = engine(max_waiting=2, max_batch=4)
    asked = [request(f"r{index}", (5, index), max_tokens=3, n=1 + index % 3) for index in range(8)]
    done = subject.generate(asked)
    assert [(one.request_id, one.index) for one in done] == [
        (one.id, at) for one in asked for at in range(one.sampling.n)
    ]
    with pytest.raises(UserError, match="not a token id"):
        subject.generate([*asked, request("bad", (999,))])
    check_idle(subject)
    assert len(subject.generate(asked[:2])) == 3


def test_whoever_waits_too_long_is_told() -> None:
    """Those without a place only: neither who runs, nor who lost its pages, nor a request one of whose choices began."""
    clock = itertools.count().__next__
    subject = engine(max_batch=2, max_wait_s=30, num_pages=24, engine={"clock": clock})
    subject.add(request("long", (5, 6), max_tokens=60))
    subject.add(request("two", (7, 8), max_tokens=30, n=2))
    subject.add(request("late", (9,), max_tokens=30, n=2))
    done = run(subject)
    assert {name for (name, _), one in done.items() if one.finish_reason == "timeout"} == {"late"}
    assert [done["late", index].tokens for index in range(2)] == [(), ()]
    assert done["late", 0].error == "no place in the batch came free within 30 s; ask again later"
    assert len(done["two", 1].tokens) == 30 and len(done["long", 0].tokens) == 60
    assert subject.stats().num_timeouts == 1
    check_idle(subject)
    crowd = [request(f"r{index}", prompt, max_tokens=40) for index, prompt in enumerate(prompts(21, 6, 10, 20))]
    tight = engine(max_wait_s=10**6, num_pages=24)
    assert len(tight.generate(crowd)) == 6 and tight.stats().num_preemptions > 0 and tight.stats().num_timeouts == 0


def test_a_stream_goes_on_after_its_pages_were_lost() -> None:
    """Every token comes once, whatever is computed again, and nothing that was recorded changes: here what is computed
    again comes from other weights."""
    model = network()
    subject = engine(model, num_pages=26, max_step_tokens=16, max_batch=6)
    asked = [
        request(f"r{index}", prompt, SUBNETS[index % 4], routes=True, max_tokens=16, temperature=1.0, seed=index)
        for index, prompt in enumerate(prompts(9, 16))
    ]
    for one in asked:
        subject.add(one)
    streamed: dict[str, list[TokenEvent]] = {one.id: [] for one in asked}
    kept: dict[str, np.ndarray] = {}
    done: dict[str, Completion] = {}
    while subject.has_work:
        for event in subject.step():
            if isinstance(event, TokenEvent):
                streamed[event.request_id].append(event)
            else:
                done[event.request_id] = event
        for name, (seq,) in subject._open.items():
            if seq.routes is not None and len(seq.routes) > len(kept.get(name, ())):
                kept[name] = seq.routes.copy()
                model.embedding.weight.mul_(1.01)
    assert len(kept) >= 3 and subject.stats().num_preemptions >= 3
    for one in asked:
        completion = done[one.id]
        assert tuple(event.token for event in streamed[one.id]) == completion.tokens
        np.testing.assert_array_equal([event.logprob for event in streamed[one.id]], completion.logprobs.astype(float))
        if one.id in kept:
            assert completion.routes is not None
            np.testing.assert_array_equal(completion.routes[: len(kept[one.id])], kept[one.id])


def test_usage_counts_what_was_computed() -> None:
    plain = engine().generate([request("x", (5, 6, 7), max_tokens=1)])[0].usage
    longer = engine().generate([request("x", (5, 6, 7), max_tokens=5)])[0].usage
    small = engine().generate([request("x", (5, 6, 7), CORNER, max_tokens=5)])[0].usage
    assert 0 < plain.flops < longer.flops and small.flops < longer.flops
    assert (longer.prompt_tokens, longer.output_tokens, longer.subnet) == (3, 5, FULL.label())
    assert 0 <= longer.queued_s <= longer.first_token_s <= longer.total_s


@pytest.mark.parametrize("num_pages", [200, 26])
def test_routes_and_logprobs_equal_one_forward(num_pages: int) -> None:
    """Under chunked prefill, prefix hits and (26 pages) preemption."""
    model = network()
    asked = [
        request(f"r{index}", prompt, SUBNETS[index % 4], routes=True, max_tokens=16)
        for index, prompt in enumerate(prompts(9, 16))
    ]
    subject = engine(model, num_pages=num_pages, max_step_tokens=16, max_batch=6)
    done = subject.generate(asked)
    assert (subject.stats().num_preemptions > 0) == (num_pages == 26)
    assert (subject.stats().cached_tokens > 0) == (num_pages == 200)
    for one, completion in zip(asked, done, strict=True):
        tokens = completion.prompt + completion.tokens
        assert completion.routes is not None and completion.routes.dtype == np.uint8
        reference_TLK = full_routes(model, tokens[:-1], one.phases.answer)
        np.testing.assert_array_equal(np.sort(completion.routes, -1), np.sort(reference_TLK, -1))
        logp_TV = model.logits(torch.tensor([tokens[:-1]]), one.phases.answer)[0].log_softmax(-1)
        chosen = logp_TV[len(completion.prompt) - 1 :].gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        # logits of size 30 after 5 layers of fp32 (eps 6e-8) and sums of at most 64 terms
        np.testing.assert_allclose(completion.logprobs, chosen.numpy(), atol=2e-4)


def test_routes_after_a_hit_come_from_those_who_kept_them() -> None:
    prompt = prompts(4, 1, 30, 30)[0]
    subject = engine()
    plain = subject.generate([request("plain", prompt)])[0]
    assert plain.routes is None
    first = subject.generate([request("first", prompt, routes=True)])[0]
    second = subject.generate([request("second", prompt, routes=True)])[0]
    assert first.usage.cached_tokens == 0 and second.usage.cached_tokens == 28
    np.testing.assert_array_equal(first.routes, second.routes)


def test_without_routes_there_is_no_room_for_them() -> None:
    subject = engine(engine={"routes": False})
    assert subject._runner.pool.routes_PZLK is None
    with pytest.raises(UserError, match="want_routes"):
        subject.add(request("x", (5,), routes=True))


def test_prompt_logprobs() -> None:
    model, prompt = network(), prompts(6, 1, 50, 50)[0]
    subject = engine(model, max_step_tokens=12)
    subject.generate([request("before", prompt)])  # leaves its pages in the prefix cache
    done = subject.generate([request("x", prompt, prompt_logprobs=True, temperature=0.5, seed=1, top_logprobs=3)])[0]
    logp_TV = model.logits(torch.tensor([prompt]))[0].log_softmax(-1)
    reference = logp_TV[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
    np.testing.assert_allclose(done.prompt_logprobs, reference.numpy(), atol=2e-4)
    assert [len(top) for top in done.top] == [3] * 10
    assert all(top[0].logprob >= logprob for top, logprob in zip(done.top, done.logprobs, strict=True))


def test_ends() -> None:
    greedy = engine().generate([request("x", (9, 8, 7), max_tokens=20)])[0]
    end = greedy.tokens[4]
    first = greedy.tokens.index(end) + 1
    stopped = engine().generate([request("x", (9, 8, 7), max_tokens=20, stop_ids=(end,))])[0]
    assert stopped.tokens == greedy.tokens[:first]
    assert (stopped.finish_reason, stopped.stop, greedy.finish_reason, greedy.stop) == ("stop", end, "length", None)
    with_end = engine(engine={"end_ids": (end,)})
    assert with_end.generate([request("x", (9, 8, 7), max_tokens=20)])[0].tokens == stopped.tokens
    ignoring = with_end.generate([request("y", (9, 8, 7), max_tokens=20, ignore_eos=True)])[0]
    assert ignoring.tokens == greedy.tokens
    held = with_end.generate([request("z", (9, 8, 7), max_tokens=20, min_tokens=12)])[0]
    assert len(held.tokens) >= 12 and end not in held.tokens[:11]
    longest = engine(max_len=15).generate([request("x", (9, 8, 7), max_tokens=99)])[0]
    assert longest.tokens == engine().generate([request("x", (9, 8, 7), max_tokens=12)])[0].tokens


def streamed(subject: Engine, asked: Request) -> tuple[str, list[int], Completion]:
    subject.add(asked)
    text, tokens, done = "", [], None
    while subject.has_work:
        for event in subject.step():
            if isinstance(event, TokenEvent):
                assert done is None
                text, tokens = text + event.text, [*tokens, event.token]
            else:
                done = event
    assert done is not None
    return text, tokens, done


def test_stop_strings_and_streamed_text() -> None:
    prompt = tokenizer().encode("the cat")
    text, tokens, done = streamed(engine(text=True), request("x", prompt, temperature=1.0, seed=3, max_tokens=40))
    assert text == done.text and tuple(tokens) == done.tokens
    whole = engine(text=True).generate([request("x", prompt, temperature=1.0, seed=3, max_tokens=40)])[0]
    assert (whole.text, whole.tokens) == (text, done.tokens)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut, cut_tokens, ended = streamed(
        engine(text=True), request("x", prompt, temperature=1.0, seed=3, max_tokens=40, stop=(stop,))
    )
    assert cut == ended.text == text[: text.index(stop)]
    assert (ended.finish_reason, ended.stop) == ("stop", stop)
    assert tuple(cut_tokens) == done.tokens[: len(cut_tokens)]
    quiet = engine(text=True).generate([request("x", prompt, temperature=1.0, seed=3, max_tokens=40, stop=(stop,))])[0]
    assert (quiet.text, quiet.tokens) == (ended.text, ended.tokens)


def test_a_stop_string_in_text_that_was_withheld_until_the_last_token() -> None:
    """Text of byte tokens is complete only with the next token, or at the end."""
    rust = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "<0x0A>": 2}, [], byte_fallback=True, unk_token="a"))
    rust.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    rust.add_special_tokens(["</s>"])

    def ended(min_tokens: int) -> SequenceState:
        asked = request("x", (0,), max_tokens=2, stop=("\n",), min_tokens=min_tokens)
        seq = SequenceState(asked, (0, 0, 0), limit=3)
        seq.detokenizer, seq.stops = Detokenizer(Tokenizer(rust, "</s>"), after=(0,)), StopStrings(("\n",))
        for token in (1, 2):
            seq.push(token, -1.0, 0, (), 0.0)
        return seq

    assert (found := ended(0)).finish_reason == "stop" and (found.stop, found.text) == ("\n", "b")
    assert (early := ended(3)).finish_reason == "length" and (early.stop, early.text) == (None, "b\n")


SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": ["cat", "dog"]}}, "required": ["a"]})


def test_a_grammar_is_followed() -> None:
    grammar = Grammar(kind="json_schema", text=SCHEMA)
    asked = [
        request(str(seed), tokenizer().encode("the"), temperature=1.0, seed=seed, max_tokens=80, grammar=grammar)
        for seed in range(6)
    ]
    done = engine(text=True).generate(asked)
    finished = [completion for completion in done if completion.finish_reason == "stop"]
    assert finished
    for completion in finished:
        assert json.loads(completion.text)["a"] in ("cat", "dog")


def other_weights(seed: int = 1) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in network(seed).state_dict().items()}


@pytest.mark.parametrize("keep_cache", [False, True])
def test_weights_change_under_way(keep_cache: bool) -> None:
    """Tokens say which weights they are from; with a fresh cache, each follows from those weights alone."""
    subject = engine(network(), num_pages=60)
    asked = [
        request(f"r{index}", prompt, routes=True, max_tokens=20) for index, prompt in enumerate(prompts(12, 6, 5, 30))
    ]
    for one in asked:
        subject.add(one)
    for _ in range(12):
        subject.step()
    before = {name: list(seq.tokens) for name, (seq,) in subject._open.items()}
    log_probs = {name: list(seq.log_probs) for name, (seq,) in subject._open.items()}
    subject.load_weights(3, other_weights(), keep_cache=keep_cache)
    done = run(subject)
    old, new = network(), network(1)
    num_changed = 0
    for one in asked:
        completion = done[one.id, 0]
        num_old = len(before[one.id]) - len(one.prompt)
        assert completion.versions.tolist() == [0] * num_old + [3] * (20 - num_old)
        np.testing.assert_array_equal(completion.logprobs[:num_old], np.array(log_probs[one.id], np.float32))
        tokens = [*one.prompt, *completion.tokens]
        first = max(0, len(before[one.id]) - 1)
        follow = new.logits(torch.tensor([tokens]))[0].argmax(-1)[len(before[one.id]) - 1 : -1].tolist()
        num_changed += follow != tokens[len(before[one.id]) :]
        routes = completion.routes
        assert routes is not None and len(routes) == len(tokens) - 1
        if num_old:  # its rows of before are those of the old weights
            reference = full_routes(old, tokens[:first], FULL)
            np.testing.assert_array_equal(np.sort(routes[:first], -1), np.sort(reference, -1))
        if not keep_cache:
            reference = full_routes(new, tokens[:-1], FULL)
            np.testing.assert_array_equal(
                np.sort(routes[first:], -1), np.sort(reference[first:], -1)
            ) if num_old else None
    assert any(0 < len(tokens) - len(one.prompt) < 20 for one, tokens in zip(asked, before.values(), strict=True))
    assert (num_changed > 0) == keep_cache
    check_idle(subject)


def test_a_prompt_of_which_nothing_was_sampled_is_of_the_new_weights() -> None:
    asked = request("x", prompts(14, 1, 50, 50)[0], routes=True, prompt_logprobs=True, top_logprobs=1, max_tokens=2)
    subject = engine(network(), max_step_tokens=16)
    subject.add(asked)
    subject.step()
    subject.load_weights(1, other_weights())
    done, expected = run(subject)["x", 0], engine(network(1)).generate([asked])[0]
    assert done.versions.tolist() == [1, 1] and done.tokens == expected.tokens
    np.testing.assert_array_equal(done.routes, expected.routes)
    np.testing.assert_allclose(done.prompt_logprobs, expected.prompt_logprobs, atol=2e-4)
    assert [top[0].token for top in done.prompt_top] == [top[0].token for top in expected.prompt_top]


@pytest.mark.parametrize("keep_cache", [False, True])
def test_the_prefix_cache_never_crosses_versions(keep_cache: bool) -> None:
    prompt = prompts(13, 1, 50, 50)[0]
    subject = engine(network())
    subject.add(request("running", prompt[:30], max_tokens=40))
    for _ in range(8):
        subject.step()
    subject.load_weights(1, other_weights(), keep_cache=keep_cache)
    run(subject)  # fills and seals pages under mixed weights, if it is let
    hit = subject.generate([request("fresh", prompt[:30] + (9,))])[0]
    reference = engine(network(1)).generate([request("fresh", prompt[:30] + (9,))])[0]
    assert hit.tokens == reference.tokens
    assert (hit.usage.cached_tokens == 0) == keep_cache  # pages computed anew are the new weights' own
    np.testing.assert_allclose(hit.logprobs, reference.logprobs, atol=2e-4)


@pytest.mark.parametrize("version", [1 << 31, (1 << 63) - 1, -(1 << 63)])
def test_large_versions(version: int) -> None:
    subject = engine(network(), version=0)
    subject.load_weights(version, other_weights())
    done = subject.generate([request("x", prompts(13, 1, 20, 20)[0], max_tokens=8)])[0]
    assert done.versions.tolist() == [version] * 8 and subject.stats().weight_version == version


def wrong_shape(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return state | {"norm.weight": torch.ones(7)}


@pytest.mark.parametrize(
    ("change", "checksum", "problem"),
    [
        (wrong_shape, None, "norm.weight: shape"),
        (lambda state: {name: state[name] for name in list(state)[1:]}, None, "missing"),
        (lambda state: state | {"more": torch.ones(1)}, None, "more"),
        (dict, "0123", "checksum"),
    ],
)
def test_a_failed_change_leaves_the_old_weights(change: object, checksum: str | None, problem: str) -> None:
    subject = engine(network(), version=5)
    asked = request("x", prompts(14, 1)[0], max_tokens=20)
    subject.add(asked)
    subject.step()
    subject.step()
    with pytest.raises(UserError, match=problem):
        subject.load_weights(6, change(other_weights()), checksum=checksum)  # type: ignore[operator]
    done = run(subject)["x", 0]
    check_greedy(network(), asked, done)
    assert set(done.versions.tolist()) == {5} and subject.stats().weight_version == 5


def test_weights_from_a_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "new", network(1), CONFIG)
    write_checkpoint(tmp_path / "other", network(1, CONFIG.replace(top_k=2)), CONFIG.replace(top_k=2))
    subject = engine(network())
    with pytest.raises(UserError, match="top_k"):
        subject.load_weights(1, tmp_path / "other")
    with pytest.raises(UserError, match="checksum"):
        subject.load_weights(1, tmp_path / "new", checksum="wrong")
    subject.load_weights(1, tmp_path / "new", checksum=weights_hash(tmp_path / "new"))
    asked = [request("x", (5, 6, 7))]
    assert subject.generate(asked)[0].tokens == engine(network(1)).generate(asked)[0].tokens
    with pytest.raises(UserError, match="in service already"):
        subject.load_weights(1, tmp_path / "new")
    with pytest.raises(UserError, match="version: 9223372036854775808 is not a 64-bit integer"):
        subject.load_weights(1 << 63, tmp_path / "new")
    with pytest.raises(UserError, match="version: PosixPath is not an integer; give the version first"):
        subject.load_weights(tmp_path / "new", 3)  # type: ignore[arg-type]
    state = other_weights(2)
    subject.load_weights(2, state, checksum=state_checksum(state))
    assert subject.stats().weight_version == 2
