"""The engine role: rows, prefix sharing, weights that change under requests, and how it fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.trajectory import WeightVersion
from stretto.engine.weights import read_weights
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, build
from stretto.ops.matmul import Arithmetic
from stretto.rl.clients import Generated, GenerateRequest, Trouble
from stretto.rl.rollout import EngineRole, fetch, is_quantised, pack_state, publish, retire, unpack_state
from tests.engine.engines import FULL, full_routes, network
from tests.rl.agents import MODEL, OTHER, role, settled, with_engines

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


def test_who_waits_for_a_prompt_survives_its_leader() -> None:
    async def work(engine: EngineRole) -> None:
        asks = [asyncio.create_task(engine.generate(replace(ASK, id=str(seed), seed=seed))) for seed in range(3)]
        await asyncio.sleep(0)
        asks[0].cancel()
        found = await asyncio.gather(*asks, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert [len(done.segment.tokens) for done in found[1:] if isinstance(done, Generated)] == [12, 12]

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


def test_weights_change_while_requests_go_on() -> None:
    async def work(engine: EngineRole) -> None:
        ask = replace(ASK, max_tokens=100)
        plain = await engine.generate(ask)
        running = asyncio.create_task(engine.generate(ask))
        while not (await engine.stats()).num_running:
            await asyncio.sleep(0)
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
        assert found.num_preemptions == bool(num_old)
        fresh = full_routes(OTHER, tokens_of(ask, found), FULL)
        np.testing.assert_array_equal(found.routes[border - 1 :], fresh[border - 1 : -1])
        # nothing of the old weights is found in the cache
        later = await engine.generate(replace(ASK, seed=4))
        assert set(later.segment.versions.tolist()) == {1}
        np.testing.assert_array_equal(later.routes, full_routes(OTHER, tokens_of(ASK, later), FULL)[:-1])

    with_engines(work, role(network()))


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


def test_a_restarted_engine_samples_nothing_with_old_weights() -> None:
    async def work(engine: EngineRole) -> None:
        asked = asyncio.create_task(engine.generate(ASK))
        hurried = asyncio.create_task(engine.generate(replace(ASK, id="b", deadline_s=0.05)))
        with pytest.raises(Trouble, match=r"engine: request b: not done within 0\.05 s"):
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
            while not (await engine.stats()).num_running:
                await asyncio.sleep(0)
            running.cancel()
        with pytest.raises((asyncio.CancelledError, Trouble)):
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

        await engine._service.call(die)
        with pytest.raises(Trouble, match="engine: the engine has failed: MemoryError: no pages"):
            await engine.generate(ASK)
        assert "MemoryError" in await engine.failure()
        for call in (engine.stats(), engine.activate(NEW)):
            with pytest.raises(Trouble, match="MemoryError"):
                await call
        engine.close()

    asyncio.run(work())
    closed = role()
    closed.close()
    with pytest.raises(Trouble, match=r"closed|shutting down"):
        asyncio.run(closed.generate(ASK))


def test_a_full_queue_is_trouble() -> None:
    async def work(engine: EngineRole) -> None:
        asks = [replace(ASK, id=str(n), tokens=PROMPT[n:], max_tokens=30) for n in range(8)]
        found = await asyncio.gather(*map(engine.generate, asks), return_exceptions=True)
        full = [error for error in found if isinstance(error, BaseException)]
        assert full and all(isinstance(error, Trouble) and "wait already" in str(error) for error in full)

    with_engines(work, role(max_waiting=2, max_batch=1))


# The weight edge: what is published is what is fetched, or an error in one line

CONFIG = ModelConfig(
    vocab_size=31, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    num_experts=4, top_k=2, expert_intermediate_size=8,
)  # fmt: skip


def state(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in build(CONFIG, seed).state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_published_is_fetched(tmp_path: Path, dtype: torch.dtype) -> None:
    before = state(dtype=dtype)
    version = publish(tmp_path / "weights", 3, before)
    after = fetch(version)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) and after[name].dtype == dtype for name, tensor in before.items())
    assert version.num_bytes == sum(tensor.nbytes for tensor in before.values())
    assert version.number == 3
    read_weights(after, CONFIG, version.checksum)  # an engine's own check agrees


def test_a_version_does_not_change_with_the_weights_it_was_made_of(tmp_path: Path) -> None:
    """Weights on a CPU are the trainer's own memory, into which it goes on training."""
    weights = state()
    expected = {name: tensor.clone() for name, tensor in weights.items()}
    version = publish(tmp_path, 0, weights)
    held = fetch(version)
    for tensor in weights.values():
        tensor.add_(1.0)
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(fetch(version)[name], tensor) for name, tensor in expected.items())


def test_the_same_number_with_other_weights_is_another_file(tmp_path: Path) -> None:
    """A trainer that was killed and resumed may make another version of the same number."""
    first, again, other = (publish(tmp_path, 5, state(seed)) for seed in (0, 0, 1))
    assert first == again and first.location != other.location
    assert not torch.equal(fetch(first)["embedding.weight"], fetch(other)["embedding.weight"])


def test_another_checksum_is_one_line(tmp_path: Path) -> None:
    version = publish(tmp_path, 1, state())
    with pytest.raises(UserError, match=r"checksum: is [0-9a-f]{32}, version 1 was announced with 00") as caught:
        fetch(replace(version, checksum="00"))
    assert version.location in str(caught.value) and "\n" not in str(caught.value)


def test_one_flipped_bit_is_noticed(tmp_path: Path) -> None:
    version = publish(tmp_path, 1, state())
    path = Path(version.location)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="checksum"):
        fetch(version)


@pytest.mark.parametrize("keep", [0, 5, 500])
def test_a_truncated_file_is_one_line(tmp_path: Path, keep: int) -> None:
    version = publish(tmp_path, 1, state())
    path = Path(version.location)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="not readable as safetensors") as caught:
        fetch(version)
    assert "\n" not in str(caught.value)


def test_old_versions_are_retired_and_stay_readable_for_who_holds_them(tmp_path: Path) -> None:
    versions = [publish(tmp_path, number, state(number)) for number in range(4)]
    held = fetch(versions[0])
    retire(tmp_path, keep=2)
    assert [Path(version.location).is_file() for version in versions] == [False, False, True, True]
    assert torch.equal(held["embedding.weight"], state(0)["embedding.weight"])
    with pytest.raises(UserError, match="no such file"):
        fetch(versions[0])


def test_fp8_weights_travel_as_bytes_and_arrive_as_the_values_they_stand_for(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {
        "blocks.0.attention.qkv.weight": torch.randn(40, 130, generator=generator),
        "blocks.0.mlp.gate_up": torch.randn(3, 16, 24, generator=generator),
        "norm.weight": torch.ones(8),
    }
    plain = publish(tmp_path, 1, state)
    packed = publish(tmp_path, 2, pack_state(state))
    assert packed.num_bytes < 0.4 * plain.num_bytes
    arrived = fetch(packed)
    assert arrived.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(arrived[name], tensor, rtol=2**-4, atol=2e-3)
        again = pack_state({name: arrived[name]})
        assert all(torch.equal(again[part], pack_state({name: tensor})[part]) for part in again)


NETWORK = ModelConfig(
    vocab_size=31, hidden_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, num_experts=5, top_k=2,
    expert_intermediate_size=12, num_shared_experts=1, dense_layers=(1,), dense_intermediate_size=20, qk_norm=True,
    attention_bias=True,
)  # fmt: skip


def test_an_fp8_network_computes_the_same_bits_from_shipped_bytes() -> None:
    model, other = build(NETWORK, 0).requires_grad_(False), build(NETWORK, 1).requires_grad_(False)
    state = model.state_dict()
    shipped = unpack_state(pack_state(state))
    assert shipped.keys() == state.keys()
    other.load_state_dict(shipped)
    ids_BT = torch.randint(0, 31, (2, 9))
    ctx = replace(Context.plain(ids_BT), operators=Arithmetic("fp8", True).operators)
    assert torch.equal(model.logits(ids_BT, ctx=ctx), other.logits(ids_BT, ctx=ctx))
    assert not torch.equal(model.logits(ids_BT), other.logits(ids_BT))  # in fp32 the quantisation does show


def test_matrices_of_blocks_travel_as_a_quarter_and_all_else_as_it_is() -> None:
    state = build(NETWORK, 0).state_dict()
    packed = pack_state(state)
    quantised = [name for name in state if is_quantised(name)]
    assert len(quantised) == 3 * 2 + 2 * 4 + 2  # attention, MoE layers with a shared expert, a dense layer
    for name, tensor in state.items():
        if name in quantised:
            assert packed[name + ":fp8"].nbytes * 4 == tensor.nbytes
        else:
            assert packed[name] is tensor


def test_bytes_without_scales_are_refused() -> None:
    packed = pack_state(build(NETWORK, 0).state_dict())
    del packed["blocks.0.mlp.down:scale"]
    with pytest.raises(UserError, match=r"blocks\.0\.mlp\.down: FP8 bytes without scales"):
        unpack_state(packed)
