"""What a completion brings with its tokens: routes, log-probs, an end, and text."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from stretto.base.errors import UserError
from stretto.engine.engine import Engine
from stretto.engine.request import Completion, Grammar, Request, TokenEvent
from tests.engine.engines import (
    SUBNETS,
    engine,
    full_routes,
    network,
    prompts,
    request,
    tokenizer,
)  # fmt: skip


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
