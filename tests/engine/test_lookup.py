"""Drafts looked up in the text itself: the right place is found, and what comes out is exact."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.engine import draw
from stretto.engine.lookup import ORDER, Lookup, continuation
from stretto.engine.request import SpeculateConfig
from stretto.engine.utility import LOOKUPS, Draft, Watch
from tests.engine.chi_square import chi_square
from tests.engine.engines import CORNER, FULL, check_idle, engine, network, prompts, request

MODEL = network()


class Always(Watch):
    """Looks up in every step that has a match, at each length in turn."""

    def choose(self, num_rows: int, shares: Sequence[float] | None = None) -> Draft | None:
        assert shares is not None
        self.num = getattr(self, "num", 0) + 1
        return Draft(None, 1 + self.num % 4, LOOKUPS[0]) if shares[-2] else None


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_finds_the_newest_place(tokens: list[int], stops: list[int]) -> None:
    lookup = Lookup()
    for stop in sorted({min(stop, len(tokens)) for stop in stops} | {len(tokens)}):
        known = tokens[:stop]
        match = lookup.find(known, 8)
        places = [start for start in range(ORDER, stop) if known[start - ORDER : start] == known[-ORDER:]]
        assert match.length == 0 if not places else match.start == places[-1]
        if places:
            same = [
                num
                for num in range(1, 9)
                if num <= match.start and known[match.start - num : match.start] == known[-num:]
            ]
            assert match.length == max(same)


def test_a_draft_goes_on_as_the_text_repeats_itself() -> None:
    assert continuation([7, 1, 2, 3, 1, 2, 3], 4, 5) == [1, 2, 3, 1, 2]
    assert continuation([5, 5, 5, 5], 3, 3) == [5, 5, 5]
    assert continuation([1, 2, 3, 4, 5, 6], 2, 3) == [3, 4, 5]


def test_greedy_is_identical() -> None:
    asked = [
        request(f"r{index}", (*prompt, *prompt[-6:]), (FULL, CORNER)[index % 2], max_tokens=40)
        for index, prompt in enumerate(prompts(5, 8))
    ]
    plain = engine(MODEL).generate(asked)
    subject = engine(MODEL, speculate=SpeculateConfig(draft=CORNER, max_draft=4), num_pages=300)
    subject._stepper._watch = Always([], 4, lookup=True)
    done = subject.generate(asked)
    assert [completion.tokens for completion in done] == [completion.tokens for completion in plain]
    stats = subject.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    check_idle(subject)


def test_sampled_tokens_are_distributed_as_without_drafts() -> None:
    allowed = [1, 2, 3]
    # every three of them stand together somewhere, so each second token is drafted
    prompt = (1, 1, 1, 2, 1, 1, 3, 1, 2, 2, 1, 2, 3, 1, 3, 2, 1, 3, 3, 2, 2, 2, 3, 2, 3, 3, 3, 1, 1)
    settings = {"temperature": 4.0, "logit_bias": dict.fromkeys(allowed, 100.0), "max_tokens": 3, "n": 64, "seed": None}
    subject = engine(MODEL, speculate=SpeculateConfig(draft=CORNER, max_draft=4), num_pages=900)
    subject._stepper._watch = Always([], 4, lookup=True)
    counts = np.zeros(len(allowed), int)
    for number in range(16):
        for done in subject.generate([request(f"r{number}", prompt, FULL, **settings)]):
            counts[allowed.index(done.tokens[1])] += 1
    assert subject.stats().drafted_tokens > counts.sum() / 5

    def after(tokens: tuple[int, ...]) -> np.ndarray:
        logits_V = MODEL.logits(torch.tensor([tokens]), FULL)[0, -1]
        return (logits_V[allowed] / 4.0).softmax(-1).double().numpy()

    expected = sum(first * after((*prompt, token)) for token, first in zip(allowed, after(prompt), strict=True))
    chi_square(np.repeat(np.arange(len(allowed)), counts), np.asarray(expected))


@pytest.mark.parametrize("vocab", [200, 256, 3000])
def test_numpy_draws_what_torch_draws(vocab: int) -> None:
    probs_MV = torch.randn(50, vocab, generator=torch.Generator().manual_seed(1)).mul(4).softmax(-1)
    padded_MCS = draw._empty_chunks(probs_MV)
    padded_MCS.flatten(1)[:, :vocab] = probs_MV
    for uniform_M in (draw.uniform(np.arange(50), 3, 0), np.zeros(50), np.full(50, draw.LARGEST)):
        assert torch.equal(draw._draw(padded_MCS, uniform_M), draw._draw_torch(padded_MCS, uniform_M))


def test_one_number_alone_is_the_one_among_many() -> None:
    many = draw.uniform(np.arange(40), 9, 2)
    assert [float(draw.uniform(seed, 9, 2)[0]) for seed in range(40)] == many.tolist()
    assert all(one != other for one, other in pairwise(many.tolist()))
