"""Self-speculation is exact, whatever the draft; lookups find the right place; and what is drafted is worth its time."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.engine import speculation
from stretto.engine.cache import PageAllocator
from stretto.engine.engine import Engine
from stretto.engine.request import Grammar, Phases, SpeculateConfig
from stretto.engine.runner import Runner
from stretto.engine.sampling import Purpose, probabilities, process
from stretto.engine.sequence import Chunk, SequenceState, SubnetTable
from stretto.engine.speculation import (
    FIRST_WAIT,
    LOOKUPS,
    ORDER,
    TRIALS,
    WARM_STEPS,
    Draft,
    Lookup,
    Speculator,
    Watch,
    can_draft,
    continuation,
    draft_candidates,
)
from stretto.model.spec import ModelConfig, Subnet
from stretto.ops.native import Library, load
from tests.engine.chi_square import chi_square as check_chi_square
from tests.engine.engines import (
    CONFIG,
    CORNER,
    FULL,
    NARROW,
    SHALLOW,
    check_idle,
    engine,
    full_routes,
    network,
    prompts,
    request,
    tokenizer,
)  # fmt: skip

MODEL = network()
TORCH = Library(None, "for comparison")


@pytest.fixture(params=["torch", "native"])
def library(request: pytest.FixtureRequest) -> Library:
    """Both implementations of everything below."""
    found = TORCH if request.param == "torch" else load()
    if request.param == "native" and found.handle is None:
        pytest.skip(found.reason)
    return found


class Always(Watch):
    """Drafts whatever it costs, each length in turn, so that a test meets every case."""

    def choose(self, num_rows: int, shares: Sequence[float]) -> Draft | None:
        self.num = getattr(self, "num", 0) + 1
        return Draft(self.candidates[0], 1 + self.num % 4)


def drafting(draft: Subnet, library: Library = TORCH, **options: Any) -> Engine:
    """An engine that drafts in every step that may."""
    speculate = SpeculateConfig(draft=draft, max_draft=4)
    subject = engine(MODEL, speculate=speculate, engine={"library": library}, **options)
    watch = subject._speculator.watch
    assert watch is not None
    subject._speculator.watch = Always(watch.candidates, 4)
    return subject


@pytest.mark.parametrize("draft", [CORNER, NARROW, CONFIG.subnet(top_k=1)])
def test_greedy_is_identical(draft: Subnet, library: Library) -> None:
    asked = [
        request(f"r{index}", prompt, (FULL, NARROW, CONFIG.subnet(depth=4))[index % 3], max_tokens=30, routes=True)
        for index, prompt in enumerate(prompts(21, 10))
    ]
    plain = engine(MODEL).generate(asked)
    subject = drafting(draft, library, num_pages=300)
    done = subject.generate(asked)
    assert [completion.tokens for completion in done] == [completion.tokens for completion in plain]
    for one, ours, theirs in zip(asked, done, plain, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-4)
        reference = full_routes(MODEL, (ours.prompt + ours.tokens)[:-1], one.phases.answer)
        np.testing.assert_array_equal(np.sort(ours.routes, -1), np.sort(reference, -1))
    stats = subject.stats()
    assert stats.drafted_tokens > 100 and 0 < stats.accepted_tokens < stats.drafted_tokens
    assert sum(completion.usage.drafted_tokens for completion in done) == stats.drafted_tokens
    for ours, theirs in zip(done, plain, strict=True):
        if ours.usage.drafted_tokens > ours.usage.accepted_tokens and ours.usage.num_preemptions == 0:
            assert ours.usage.flops > theirs.usage.flops or ours.usage.cached_tokens > theirs.usage.cached_tokens
    check_idle(subject)


def test_ends_and_phases_within_a_draft(library: Library) -> None:
    greedy = engine(MODEL).generate([request("x", (9, 8, 7), max_tokens=30)])[0].tokens
    phases = Phases(answer=CORNER, thinking=FULL, thinking_end=greedy[6])
    asked = [
        request("ends", (9, 8, 7), max_tokens=30, stop_ids=(greedy[7],)),
        request("thinks", (9, 8, 7), phases, max_tokens=30),
        request("short", (9, 8, 7), max_tokens=2),
        request("one", (9, 8, 7), max_tokens=1),
        request("held", (9, 8, 7), max_tokens=30, stop_ids=(greedy[2],), min_tokens=9, presence_penalty=0.5),
    ]
    for one in asked:
        subject = drafting(CONFIG.subnet(top_k=2), library)
        done, plain = subject.generate([one])[0], engine(MODEL).generate([one])[0]
        assert (done.tokens, done.finish_reason, done.stop) == (plain.tokens, plain.finish_reason, plain.stop)
        check_idle(subject)


def test_drafts_never_reach_the_prefix_cache(library: Library) -> None:
    """Pages sealed while drafting hold what plain decoding puts there: a hit on them changes nothing."""
    prompt = prompts(22, 1, 20, 20)[0]
    subject = drafting(CORNER, library)
    first = subject.generate([request("first", prompt, max_tokens=40, routes=True)])[0]
    assert first.usage.accepted_tokens < first.usage.drafted_tokens
    longer = request("second", first.prompt + first.tokens, max_tokens=10, routes=True)
    hit, fresh = subject.generate([longer])[0], engine(MODEL).generate([longer])[0]
    assert hit.usage.cached_tokens >= 56
    assert hit.tokens == fresh.tokens
    np.testing.assert_allclose(hit.logprobs, fresh.logprobs, atol=2e-4)
    np.testing.assert_array_equal(np.sort(hit.routes, -1), np.sort(fresh.routes, -1))


SMALL = ModelConfig(
    vocab_size=12, hidden_size=16, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=8, num_experts=4, top_k=2,
    expert_intermediate_size=8, max_positions=32,
)  # fmt: skip


def chi_square(counts_V: np.ndarray, probs_V: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic over the tokens that are expected at least five times, and its degrees of freedom."""
    expected_V = probs_V * counts_V.sum()
    kept = expected_V >= 5
    observed = np.append(counts_V[kept], counts_V[~kept].sum())
    expected = np.append(expected_V[kept], expected_V[~kept].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    return float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 6}, {"temperature": 1.5, "top_p": 0.8}]
)
def test_sampled_tokens_are_distributed_as_without_drafts(settings: dict[str, float], library: Library) -> None:
    """The first two tokens of 4,000 seeds: the first drafted one, and the one after it given the first.

    The bound is the 99.99 % point of the chi-square distribution, by Wilson and Hilferty's approximation.
    """
    model = network(3, SMALL)
    num, page_size, prompt = 4000, 8, (1, 2, 3)
    table = SubnetTable()
    runner = Runner(
        model, table, num_pages=num, page_size=page_size, routes=False, library=library
    )  # one page each is enough: 3 prompt tokens and 3 more
    full, subnet = table.number(SMALL.full()), table.number(SMALL.subnet(depth=2, top_k=1))
    speculator = Speculator(runner, table, (), Watch([subnet], 2))
    draft = Draft(subnet, 2)
    firsts = np.zeros(12)
    seconds = np.zeros((12, 12))
    num_accepted = 0
    for start in range(0, num, 500):
        sequences = []
        for seed in range(start, start + 500):
            own = request(str(seed), prompt, SMALL.full(), **{"temperature": 1.0, "seed": seed, **settings})
            seq = SequenceState(own, (full, full, full))
            seq.pages, seq.num_computed = [seed], 0
            seq.table = (seed,)
            seq.most_drafts = 2
            sequences.append(seq)
        from_prompt(runner, sequences)
        distributions = speculator.draft(sequences, draft)
        verified = speculator.decide(sequences, distributions, speculator.verify(sequences, False))
        for tokens, *_ in verified.values():
            firsts[tokens[0]] += 1
            num_accepted += len(tokens) - 1
            if len(tokens) > 1:
                seconds[tokens[0], tokens[1]] += 1
    assert 0.1 * num < num_accepted < 1.9 * num
    sampling = sequences[0].sampling

    def target(tokens: Sequence[int]) -> np.ndarray:
        logits_1V = model.logits(torch.tensor([tokens]))[0, -1:]
        logp_1V = process(logits_1V, [sampling], [tokens], [3])
        return probabilities(logp_1V, [sampling])[0].double().numpy()

    tables = [(firsts, target(prompt)), *((seconds[token], target((*prompt, token))) for token in range(12))]
    for counts_V, probs_V in tables:
        if counts_V.sum() < 100:
            continue
        statistic, freedom = chi_square(counts_V, probs_V / probs_V.sum())
        bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3 if freedom else 1e-6
        assert statistic < bound, f"{statistic} of {freedom} degrees of freedom, at most {bound}"


def from_prompt(runner: Runner, sequences: Sequence[SequenceState]) -> None:
    """Compute all but the last prompt token of each."""
    runner.forward([Chunk(tuple(seq.tokens[:-1]), 0, seq.table, seq.subnet, 0) for seq in sequences], False)
    for seq in sequences:
        seq.num_computed = len(seq.tokens) - 1


def test_a_named_seed_is_kept_its_promise(library: Library) -> None:
    wanted = request("x", (9, 8, 7), temperature=1.0, seed=4, max_tokens=30)
    subject = drafting(CORNER, library)
    done = subject.generate([wanted])[0]
    assert done.usage.drafted_tokens == 0
    assert done.tokens == engine(MODEL, engine={"library": library}).generate([wanted])[0].tokens
    drawn = drafting(CORNER, library).generate([request("x", (9, 8, 7), temperature=1.0, max_tokens=30)])[0]
    assert drawn.usage.drafted_tokens > 0 and len(drawn.tokens) == 30


def test_grammars_are_rolled_back() -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": ["cat", "dog"]}}, "required": ["a"]})
    asked = [
        request(str(index), tokenizer().encode(text), max_tokens=60, grammar=Grammar(kind="json_schema", text=schema))
        for index, text in enumerate(("the", "cat", "dog sat"))
    ]
    plain = engine(MODEL, text=True).generate(asked)
    subject = drafting(CORNER, text=True)
    done = subject.generate(asked)
    assert [(one.tokens, one.text) for one in done] == [(one.tokens, one.text) for one in plain]
    assert subject.stats().accepted_tokens < subject.stats().drafted_tokens
    drawn = drafting(CORNER, text=True).generate(
        [request("x", (5, 6), temperature=1.0, max_tokens=60, grammar=Grammar(kind="regex", text="[a-z]{8}[0-9]{4}"))]
    )[0]
    assert drawn.usage.drafted_tokens > 0
    assert drawn.text[:8].isalpha() and (len(drawn.text) == 12 or drawn.finish_reason == "length")


def test_grammars_of_all_kinds_in_one_batch_end_at_their_own_time(library: Library) -> None:
    """One draft meets the end of its text while the others go on, refuses a token, or cannot be followed."""
    texts = ["(a{1,1000}){1,1000}", "(ab|cd){5}", "[a-z ]*", "the( cat){1,3}", "[^b]{1,3}"]
    asked = [
        request(f"{text}-{prompt}", (prompt, 6, 7), max_tokens=60, grammar=Grammar(kind="regex", text=text))
        for text in texts
        for prompt in (5, 90)
    ]
    plain = engine(MODEL, text=True).generate(asked)
    subject = drafting(CORNER, library, text=True)
    assert [one.tokens for one in subject.generate(asked)] == [one.tokens for one in plain]
    assert subject.stats().drafted_tokens > 0
    drawn = [replace(one, sampling=one.sampling.model_copy(update={"temperature": 1.0})) for one in asked]
    for done in drafting(CORNER, library, text=True).generate(drawn):
        text = done.request_id.rpartition("-")[0]
        assert done.finish_reason == "length" or re.fullmatch(text, done.text)


def test_drafting_that_fails_costs_nobody_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar(kind="regex", text="[a-z ]{40}")
    asked = [request("plain", (5, 6, 7), max_tokens=30), request("word", (5, 6), max_tokens=30, grammar=grammar)]
    wanted = [one.tokens for one in engine(MODEL, text=True).generate(asked)]
    subject, sample, num_failed = drafting(CORNER, text=True), speculation.sample, 0

    def fails_behind_a_draft(*arguments: Any, **rest: Any) -> torch.Tensor:
        nonlocal num_failed
        if arguments[-1] is Purpose.DRAFT and any(seq.drafts for seq in subject._scheduler.running):
            num_failed += 1
            raise RuntimeError("no draft")
        return sample(*arguments, **rest)

    monkeypatch.setattr(speculation, "sample", fails_behind_a_draft)
    assert [one.tokens for one in subject.generate(asked)] == wanted
    assert num_failed > 0
    check_idle(subject)


def test_candidates_and_which_can_draft() -> None:
    named = [CORNER, FULL]
    candidates = draft_candidates(CONFIG, named)
    assert candidates[0] == CORNER and FULL not in candidates and len(set(candidates)) == len(candidates) >= 4
    grouped = CONFIG.replace(expert_groups=2, widths=(CONFIG.num_experts,), num_branches=1)
    assert min(draft_candidates(grouped, [])[-1].experts) == 4, "two experts a group, at least"
    assert can_draft(CORNER, FULL) and not can_draft(FULL, FULL) and not can_draft(FULL, SHALLOW)
    with pytest.raises(UserError, match="layers"):
        drafting(FULL.replace(layers=(1, 2, 3, 4, 99)))


def test_candidates_are_measured_on_the_first_requests() -> None:
    subject = engine(MODEL, speculate=SpeculateConfig(), engine={"drafts": (CORNER,)})
    asked = [request("x", (5, 6), max_tokens=100)]
    assert subject.generate(asked)[0].tokens == engine(MODEL).generate(asked)[0].tokens
    watch = subject._speculator.watch
    assert watch is not None and utility(watch)
    assert len(watch.candidates) > 2 and subject.stats().drafted_tokens > 2 * TRIALS


def test_pages_are_where_the_allocator_says(library: Library) -> None:
    """A tiny pool under drafts: sequences take pages from each other, and none is lost."""
    asked = [request(f"r{index}", prompt, max_tokens=20) for index, prompt in enumerate(prompts(23, 12, 1, 30))]
    subject = drafting(CORNER, library, num_pages=20)
    assert isinstance(subject.allocator, PageAllocator)
    done = subject.generate(asked)
    plain = engine(MODEL).generate(asked)
    assert [completion.tokens for completion in done] == [completion.tokens for completion in plain]
    assert subject.stats().num_preemptions > 0 and subject.stats().drafted_tokens > 0
    check_idle(subject)


def test_settings_of_neighbours_change_no_token(library: Library) -> None:
    """Plain rows are chosen by the kernels, others by torch; whoever is beside them, each keeps its own tokens."""
    asked = [
        request("plain", (9, 8, 7), temperature=0.9, seed=3, max_tokens=20),
        request("filtered", (5, 6), temperature=0.9, seed=4, top_p=0.8, max_tokens=20),
        request("greedy", (4, 4), max_tokens=20),
        request("listed", (4, 5), max_tokens=20, top_logprobs=3),
    ]
    alone = [engine(MODEL, engine={"library": library}).generate([one])[0] for one in asked]
    for subject in (engine(MODEL, engine={"library": library}), drafting(CORNER, library)):
        together = subject.generate(asked)
        assert [one.tokens for one in together] == [one.tokens for one in alone]
        for ours, theirs in zip(together, alone, strict=True):
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-4)
        assert all(len(tops) == 3 for tops in together[3].top)


class AlwaysLookUp(Watch):
    """Looks up in every step that has a match, at each length in turn."""

    def choose(self, num_rows: int, shares: Sequence[float]) -> Draft | None:
        self.num = getattr(self, "num", 0) + 1
        return Draft(None, 1 + self.num % 4, LOOKUPS[0]) if shares[-2] else None


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_finds_the_newest_place(tokens: list[int], stops: list[int]) -> None:
    lookup = Lookup()
    for stop in sorted({min(stop, len(tokens)) for stop in stops} | {len(tokens)}):
        known = tokens[:stop]
        lookup.find(known, 8)
        places = [start for start in range(ORDER, stop) if known[start - ORDER : start] == known[-ORDER:]]
        assert lookup.length == 0 if not places else lookup.start == places[-1]
        if places:
            same = [
                num
                for num in range(1, 9)
                if num <= lookup.start and known[lookup.start - num : lookup.start] == known[-num:]
            ]
            assert lookup.length == max(same)


def test_a_draft_goes_on_as_the_text_repeats_itself() -> None:
    assert [continuation([7, 1, 2, 3, 1, 2, 3], 4, step) for step in range(5)] == [1, 2, 3, 1, 2]
    assert [continuation([5, 5, 5, 5], 3, step) for step in range(3)] == [5, 5, 5]
    assert [continuation([1, 2, 3, 4, 5, 6], 2, step) for step in range(3)] == [3, 4, 5]


def test_greedy_is_identical_with_lookups() -> None:
    asked = [
        request(f"r{index}", (*prompt, *prompt[-6:]), (FULL, CORNER)[index % 2], max_tokens=40)
        for index, prompt in enumerate(prompts(5, 8))
    ]
    plain = engine(MODEL).generate(asked)
    subject = engine(MODEL, speculate=SpeculateConfig(draft=CORNER, max_draft=4), num_pages=300)
    subject._speculator.watch = AlwaysLookUp([], 4, lookup=True)
    done = subject.generate(asked)
    assert [completion.tokens for completion in done] == [completion.tokens for completion in plain]
    stats = subject.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    check_idle(subject)


def test_sampled_tokens_are_distributed_as_without_lookups() -> None:
    allowed = [1, 2, 3]
    # every three of them stand together somewhere, so each second token is drafted
    prompt = (1, 1, 1, 2, 1, 1, 3, 1, 2, 2, 1, 2, 3, 1, 3, 2, 1, 3, 3, 2, 2, 2, 3, 2, 3, 3, 3, 1, 1)
    settings = {"temperature": 4.0, "logit_bias": dict.fromkeys(allowed, 100.0), "max_tokens": 3, "n": 64, "seed": None}
    subject = engine(MODEL, speculate=SpeculateConfig(draft=CORNER, max_draft=4), num_pages=900)
    subject._speculator.watch = AlwaysLookUp([], 4, lookup=True)
    counts = np.zeros(len(allowed), int)
    for number in range(16):
        for done in subject.generate([request(f"r{number}", prompt, FULL, **settings)]):
            counts[allowed.index(done.tokens[1])] += 1
    assert subject.stats().drafted_tokens > counts.sum() / 5

    def after(tokens: tuple[int, ...]) -> np.ndarray:
        logits_V = MODEL.logits(torch.tensor([tokens]), FULL)[0, -1]
        return (logits_V[allowed] / 4.0).softmax(-1).double().numpy()

    expected = sum(first * after((*prompt, token)) for token, first in zip(allowed, after(prompt), strict=True))
    check_chi_square(np.repeat(np.arange(len(allowed)), counts), np.asarray(expected))


FIRST, SECOND = 0, 1
"""Numbers of Subnets."""


def utility(watch: Watch) -> float:
    """Of the best draft for one row, as known now."""
    costs = watch._at(1)
    return watch._best(costs, dict.fromkeys(costs.draft, 1.0))[0]


def expected_tokens(acceptance: float, num_drafted: int) -> float:
    """Tokens a cycle yields when each draft is accepted with the same probability (Leviathan, 2211.17192, eq. 1)."""
    return sum(acceptance**power for power in range(num_drafted + 1))


def feed(watch: Watch, draft_s: float, verify_s: float, acceptance: float, num_steps: int) -> list[Draft | None]:
    """Let the watch choose ``num_steps`` times at made-up costs; a plain step takes 1 s."""
    chosen: list[Draft | None] = []
    for _ in range(num_steps):
        draft = watch.choose(1, [1.0])
        chosen.append(draft)
        if draft is None:
            watch.plain(1, 1.0)
            continue
        accepted = round(100 * (expected_tokens(acceptance, draft.num_tokens) - 1))
        rejected = round(100 * (1 - acceptance**draft.num_tokens))
        verify = 1.0 + (verify_s - 1.0) * draft.num_tokens
        watch.cycle(1, draft, draft_s * draft.num_tokens, verify, accepted, rejected)
    return chosen


def test_drafting_pays() -> None:
    watch = Watch([FIRST], 4)
    chosen = feed(watch, draft_s=0.1, verify_s=1.05, acceptance=0.9, num_steps=60)
    assert chosen[:WARM_STEPS] == [None] * WARM_STEPS
    assert chosen[-1] == Draft(FIRST, 4)
    assert utility(watch) == pytest.approx(expected_tokens(0.9, 4) / (0.4 + 1.2), rel=0.02)


def test_the_length_follows_acceptance() -> None:
    watch = Watch([FIRST], 8)
    chosen = feed(watch, draft_s=0.15, verify_s=1.05, acceptance=0.4, num_steps=80)[-1]
    assert chosen is not None and chosen.num_tokens in (1, 2)


def test_drafting_that_does_not_pay_is_switched_off_and_tried_again() -> None:
    watch = Watch([FIRST], 4)
    feed(watch, draft_s=0.6, verify_s=1.4, acceptance=0.5, num_steps=WARM_STEPS + TRIALS)
    rest = feed(watch, draft_s=0.6, verify_s=1.4, acceptance=0.5, num_steps=400)
    assert utility(watch) < 1
    assert rest[:FIRST_WAIT] == [None] * FIRST_WAIT
    num_drafted = sum(draft is not None for draft in rest)
    assert 0 < num_drafted < 0.1 * len(rest)
    better = feed(watch, draft_s=0.05, verify_s=1.01, acceptance=0.95, num_steps=1500)  # the traffic has changed
    assert better[-1] is not None


def test_the_better_candidate_wins() -> None:
    watch = Watch([SECOND, FIRST], 4)
    for _ in range(80):
        draft = watch.choose(2, [1.0, 1.0])
        if draft is None:
            watch.plain(2, 1.0)
        elif draft.subnet == FIRST:
            watch.cycle(2, draft, 0.05 * draft.num_tokens, 1.1, 80 * draft.num_tokens, 20)
        else:
            watch.cycle(2, draft, 0.9 * draft.num_tokens, 1.1, 95 * draft.num_tokens, 5)
    assert draft is not None and draft.subnet == FIRST


def test_rows_that_cannot_be_drafted_for_count() -> None:
    watch = Watch([FIRST], 4)
    feed(watch, draft_s=0.3, verify_s=1.1, acceptance=0.7, num_steps=40)
    assert watch.choose(1, [1.0]) is not None
    assert watch.choose(1, [0.1]) is None
    assert watch.choose(1, [0.0]) is None
