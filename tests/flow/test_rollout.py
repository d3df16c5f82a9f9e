"""The engine role: rows, prefix sharing, weights that change under requests, and how it fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.base.errors import InfraError, UserError
from stretto.base.trajectory import WeightVersion
from stretto.flow import clients
from stretto.flow.clients import Forgotten, Generated, GenerateRequest
from stretto.flow.rollout import EngineRole, open_run_engine
from stretto.ops.native import load
from tests.engine.engines import FULL, full_routes, network
from tests.flow.agents import MODEL, OTHER, begun, role, settled, with_engines
from tests.flow.policies import checkpoint, recipe

PROMPT = np.arange(5, 27, dtype=np.int32)
ASK = GenerateRequest("a", PROMPT, max_tokens=12, temperature=1.0, seed=3, stop_ids=())
NEW = WeightVersion(1, "", "", 0)
"""Any version is the weights of `OTHER`."""


def tokens_of(request: GenerateRequest, done: Generated) -> list[int]:
    return [*request.tokens.tolist(), *done.segment.tokens.tolist()]


def test_one_row_less_than_tokens_and_the_next_call_brings_it() -> None:
    """As between two turns: others' tokens follow what was sampled, and the known rows are not sent again."""

    async def work(engine: EngineRole) -> None:
        first = await engine.generate(ASK)
        tokens = tokens_of(ASK, first)
        assert first.routes is not None and len(first.routes) == len(tokens) - 1 == 33
        np.testing.assert_array_equal(first.routes, full_routes(MODEL, tokens, FULL)[:-1])
        longer = np.array([*tokens, 40, 41, 42], np.int32)
        follow = replace(ASK, tokens=longer, routes_from=len(first.routes))
        second = await engine.generate(follow)
        assert second.cached_tokens >= 32 and second.routes is not None  # full pages of four
        assert second.computed_tokens == len(longer) - second.cached_tokens
        whole = full_routes(MODEL, tokens_of(follow, second), FULL)[:-1]
        np.testing.assert_array_equal(second.routes, whole[len(first.routes) :])

    with_engines(work, role())


def test_a_group_computes_its_prompt_once() -> None:
    async def work(engine: EngineRole) -> None:
        asks = [replace(ASK, id=str(seed), seed=seed) for seed in range(6)]
        found = await asyncio.gather(*map(engine.generate, asks))
        assert sorted(done.cached_tokens for done in found) == [0, *[20] * 5]  # full pages, less the last token's
        for ask, done in zip(asks, found, strict=True):
            np.testing.assert_array_equal(done.routes, full_routes(MODEL, tokens_of(ask, done), FULL)[:-1])
        alone = await engine.generate(asks[4])
        assert alone.segment.tokens.tolist() == found[4].segment.tokens.tolist()
        assert not engine._prefills

    with_engines(work, role())


def test_a_small_cache_changes_nothing_of_a_sample() -> None:
    """Samples that lose their pages and are computed again keep tokens, log-probabilities and routes, to the bit."""
    library = load()
    if library.handle is None:
        pytest.skip(library.reason)
    asks = [replace(ASK, id=str(seed), seed=seed, max_tokens=40, tokens=PROMPT[: 6 + seed]) for seed in range(8)]

    def sampled(num_pages: int) -> list[Generated]:
        found: list[Generated] = []

        async def work(engine: EngineRole) -> None:
            found.extend(await asyncio.gather(*map(engine.generate, asks)))

        with_engines(work, role(num_pages=num_pages, engine={"library": library}))
        return found

    large, small = sampled(200), sampled(30)
    assert sum(done.num_preemptions for done in large) == 0 < sum(done.num_preemptions for done in small)
    for one, other in zip(large, small, strict=True):
        assert one.segment.versions.dtype == np.int32
        for name in ("tokens", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(one.segment, name), getattr(other.segment, name))
        np.testing.assert_array_equal(one.routes, other.routes)


def test_who_waits_for_a_prompt_survives_its_leader() -> None:
    async def work(engine: EngineRole) -> None:
        asks = [asyncio.create_task(engine.generate(replace(ASK, id=str(seed), seed=seed))) for seed in range(3)]
        await asyncio.sleep(0)
        asks[0].cancel()
        found = await asyncio.gather(*asks, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert [len(done.segment.tokens) for done in found[1:] if isinstance(done, Generated)] == [12, 12]

    with_engines(work, role())


def test_an_engine_keeps_the_tokens_of_what_it_may_go_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(engine: EngineRole) -> None:
        first = await engine.generate(ASK)
        whole = await engine.generate(replace(ASK, id="b", tokens=np.array(tokens_of(ASK, first), np.int32)))
        told = np.array([40, 41], np.int32)
        for num_heard in (12, 5):  # an agent may not have heard all
            kept = len(PROMPT) + num_heard
            found = await engine.generate(replace(ASK, tokens=told, num_kept=kept))
            tokens = np.array([*tokens_of(ASK, first)[:kept], 40, 41], np.int32)
            plain = await engine.generate(replace(ASK, id="c", tokens=tokens))
            assert found.segment.tokens.tolist() == plain.segment.tokens.tolist()
        assert whole.segment.tokens.tolist() != plain.segment.tokens.tolist()
        with pytest.raises(Forgotten, match="request d: 0 of 5 tokens are here"):
            await engine.generate(replace(ASK, id="d", tokens=told, num_kept=5))
        monkeypatch.setattr(clients, "_KEPT_TOKENS", 60)
        await engine.generate(replace(ASK, id="e"))
        assert [*engine._kept._kept] == ["e"] and engine._kept._num_kept == 34, "what was not used for longest has gone"

    with_engines(work, role())


def test_only_what_is_asked_ends_a_turn() -> None:
    async def work(engine: EngineRole) -> None:
        whole = await engine.generate(ASK)
        assert (len(whole.segment.tokens), whole.finish_reason) == (12, "length")
        stop = int(whole.segment.tokens[6])
        cut = await engine.generate(replace(ASK, stop_ids=(stop,)))
        num = whole.segment.tokens.tolist().index(stop) + 1
        assert (cut.segment.tokens.tolist(), cut.finish_reason) == (whole.segment.tokens[:num].tolist(), "stop")
        plain = await engine.generate(replace(ASK, want_routes=False))
        assert plain.routes is None and plain.segment.tokens.tolist() == whole.segment.tokens.tolist()

    with_engines(work, role())


@pytest.mark.parametrize("keep_cache", [False, True])
def test_weights_change_while_requests_go_on(keep_cache: bool) -> None:
    async def work(engine: EngineRole) -> None:
        ask = replace(ASK, max_tokens=100)
        plain = await engine.generate(ask)
        running = asyncio.create_task(engine.generate(ask))
        await begun(engine)
        await engine.activate(NEW)
        assert engine.version == 1
        found = await running
        num_old = int((found.segment.versions == 0).sum())
        assert found.segment.versions.tolist() == [0] * num_old + [1] * (100 - num_old) and num_old < 100
        border = len(PROMPT) + num_old
        assert found.segment.tokens[:num_old].tolist() == plain.segment.tokens[:num_old].tolist()
        np.testing.assert_allclose(found.segment.logprobs[:num_old], plain.segment.logprobs[:num_old], atol=1e-4)
        assert found.routes is not None and plain.routes is not None and len(found.routes) == len(PROMPT) + 99
        np.testing.assert_array_equal(found.routes[: border - 1], plain.routes[: border - 1])
        assert found.num_preemptions == (bool(num_old) and not keep_cache)
        fresh = full_routes(OTHER, tokens_of(ask, found), FULL)
        is_fresh = np.array_equal(found.routes[border - 1 :], fresh[border - 1 : -1])
        assert is_fresh is not (keep_cache and bool(num_old))  # keys of older weights lead to other experts
        # nothing of the old weights is found in the cache
        later = await engine.generate(replace(ASK, seed=4))
        assert set(later.segment.versions.tolist()) == {1}
        np.testing.assert_array_equal(later.routes, full_routes(OTHER, tokens_of(ASK, later), FULL)[:-1])

    with_engines(work, role(network(), keep_cache=keep_cache))


def test_weights_that_are_not_those_announced_are_refused() -> None:
    def refuse(version: WeightVersion) -> Any:
        raise UserError("checksum: is another")

    async def work(engine: EngineRole) -> None:
        engine._fetch = refuse
        with pytest.raises(UserError, match="checksum: is another"):
            await engine.activate(NEW)
        assert engine.version == 0
        assert set((await engine.generate(ASK)).segment.versions.tolist()) == {0}

    with_engines(work, role())


def test_an_older_version_is_ignored() -> None:
    async def work(engine: EngineRole) -> None:
        await engine.activate(replace(NEW, number=5))
        await engine.activate(replace(NEW, number=4))
        assert engine.version == 5

    with_engines(work, role(network()))


def test_an_engine_whose_trainer_returns_to_a_snapshot_drops_requests_and_takes_older_weights() -> None:
    async def work(engine: EngineRole) -> None:
        await engine.activate(replace(NEW, number=5))
        long = asyncio.create_task(engine.generate(replace(ASK, max_tokens=40)))
        await begun(engine)
        await engine.rewind()
        with pytest.raises(InfraError, match="engine: dropped, because the trainer returns to a snapshot"):
            await long
        asked = asyncio.create_task(engine.generate(ASK))
        await settled(engine)
        assert not asked.done(), "the weights of the lost steps sample nothing more"
        await engine.activate(replace(NEW, number=4))
        assert set((await asked).segment.versions.tolist()) == {4}
        await engine.rewind()
        await engine.activate(replace(NEW, number=4))  # the snapshot may be of the last step

    with_engines(work, role(network()))


def test_a_request_that_comes_while_others_are_dropped_waits_for_weights_and_nobody_waits_for_it() -> None:
    async def work(engine: EngineRole) -> None:
        await engine.activate(replace(NEW, number=5))
        dropped = asyncio.create_task(engine.generate(replace(ASK, max_tokens=40)))
        await begun(engine)
        rewound = asyncio.create_task(engine.rewind())
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(replace(ASK, id="b")))
        async with asyncio.timeout(5):
            await rewound
        with pytest.raises(InfraError, match="engine: dropped"):
            await dropped
        await engine.activate(replace(NEW, number=4))
        assert set((await late).segment.versions.tolist()) == {4}

    with_engines(work, role(network()))


def test_a_restarted_engine_samples_nothing_with_old_weights() -> None:
    async def work(engine: EngineRole) -> None:
        asked = asyncio.create_task(engine.generate(ASK))
        hurried = asyncio.create_task(engine.generate(replace(ASK, id="b", deadline_s=0.05)))
        with pytest.raises(InfraError, match=r"engine: request b: not done within 0\.05 s"):
            await hurried
        assert not asked.done()
        await engine.activate(NEW)
        assert set((await asked).segment.versions.tolist()) == {1}

    with_engines(work, role(network(), waits=True))


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_nothing_is_left_of_a_request_that_is_given_up(how: str) -> None:
    async def work(engine: EngineRole) -> None:
        ask = replace(ASK, max_tokens=120, deadline_s=60.0 if how == "cancelled" else 0.03)
        running = asyncio.create_task(engine.generate(ask))
        if how == "cancelled":
            await begun(engine)
            running.cancel()
        with pytest.raises((asyncio.CancelledError, InfraError)):
            await running
        await settled(engine)
        again = await engine.generate(ASK)  # the same name as the one that was given up
        assert len(again.segment.tokens) == 12

    with_engines(work, role(OTHER))


def test_failures_are_trouble_and_mistakes_are_not() -> None:
    async def work() -> None:
        engine = role()
        with pytest.raises(UserError, match="is not a token id"):
            await engine.generate(replace(ASK, tokens=np.array([5, 9999], np.int32)))

        def die(subject: Any) -> None:
            def step() -> None:
                raise MemoryError("no pages")

            subject.step = step

        await engine.service.call(die)
        with pytest.raises(InfraError, match="engine: the engine has failed: MemoryError: no pages"):
            await engine.generate(ASK)
        assert "MemoryError" in await engine.failure()
        for call in (engine.stats(), engine.activate(NEW)):
            with pytest.raises(InfraError, match="MemoryError"):
                await call
        engine.close()

    asyncio.run(work())
    closed = role()
    closed.close()
    with pytest.raises(InfraError, match=r"closed|shutting down"):
        asyncio.run(closed.generate(ASK))


def test_a_full_queue_is_trouble() -> None:
    async def work(engine: EngineRole) -> None:
        asks = [replace(ASK, id=str(n), tokens=PROMPT[n:], max_tokens=30) for n in range(8)]
        found = await asyncio.gather(*map(engine.generate, asks), return_exceptions=True)
        full = [error for error in found if isinstance(error, BaseException)]
        assert full and all(isinstance(error, InfraError) and "wait already" in str(error) for error in full)

    with_engines(work, role(max_waiting=2, max_batch=1))


# The weight edge: what is published is what is fetched, or an error in one line


def test_the_cache_of_a_run_must_hold_the_longest_sample(tmp_path: Path) -> None:
    start = checkpoint(tmp_path)
    with pytest.raises(
        UserError, match=r"rollout\.cache_bytes: 4000 bytes hold 16 tokens, .* may have 48; give the cache"
    ) as refused:
        open_run_engine(recipe(rollout__cache_bytes=4000, rollout__max_turns=2), start, "cpu")
    num_bytes = int(str(refused.value).split()[-4])
    assert open_run_engine(recipe(rollout__cache_bytes=num_bytes, rollout__max_turns=2), start, "cpu").max_len == 48
    with pytest.raises(UserError, match=r"rollout\.cache_bytes"):
        open_run_engine(recipe(rollout__cache_bytes=num_bytes - 1, rollout__max_turns=2), start, "cpu")
    with pytest.raises(UserError, match=r"^cache memory: 100 bytes hold no page .* rollout\.cache_bytes of a recipe"):
        open_run_engine(recipe(rollout__cache_bytes=100), start, "cpu")
    # without further turns, train.seq_len may be the length of packed rows alone
    assert open_run_engine(recipe(rollout__cache_bytes=4000, rollout__max_tokens=8), start, "cpu").max_len == 16
