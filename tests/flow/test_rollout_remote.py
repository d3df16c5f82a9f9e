"""Engines at an address: our own server, and doubles of vLLM and SGLang. What they return, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from bench.common.server import in_thread
from bench.rollout_engines import our_server as our_rows
from stretto.base.errors import InfraError, UserError
from stretto.base.trajectory import canary_tokens
from stretto.data.loader import key_of
from stretto.engine.engine import Engine
from stretto.flow.clients import GenerateRequest, Unavailable
from stretto.flow.launch import Job
from stretto.flow.rollout import EngineRole
from stretto.flow.rollout_remote import RemoteEngineRole, moe_routes
from stretto.flow.rollout_server import create_rollout_app
from stretto.flow.run import check_places
from stretto.flow.servers.client import Server
from stretto.flow.servers.dialect import Ask
from stretto.flow.servers.vllm import Vllm
from stretto.harness.suites import serving
from stretto.learning.trainer import TrainerRole
from stretto.model.checkpoint import write_checkpoint
from stretto.model.transformer import build
from stretto.server.server import ServeSettings, make_server
from tests.engine.engines import CONFIG, FULL, engine, full_routes, network
from tests.flow.agents import MODEL, OTHER
from tests.flow.policies import recipe
from tests.flow.remote_servers import Double, SglangDouble, VllmDouble, running, version_of

PROMPT = np.arange(5, 27, dtype=np.int32)
ASK = GenerateRequest("a", PROMPT, max_tokens=12, temperature=1.0, seed=3, stop_ids=())
DOUBLES = {"vllm": VllmDouble, "sglang": SglangDouble}
RECORDED = Path(__file__).parent / "vllm_0_32.json"


@pytest.fixture
def start(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "start", MODEL, CONFIG)
    return tmp_path / "start"


@contextmanager
def our_server(**settings: Any) -> Iterator[tuple[str, EngineRole]]:
    def opened() -> Engine:
        made = engine(network(seed=9))
        made.weight_version = -1
        return made

    role = EngineRole(opened, name="server")
    try:
        with in_thread(make_server(create_rollout_app(role, CONFIG, "fp32", ServeSettings(**settings)))) as url:
            yield url, role
    finally:
        role.close()


@contextmanager
def a_double(kind: str, **switches: Any) -> Iterator[tuple[str, Double]]:
    double = DOUBLES[kind]()
    for name, value in switches.items():
        setattr(double, name, value)
    try:
        with running(double.app()) as url:
            yield url, double
    finally:
        double.role.close()


def open_role(kind: str, url: str, start: Path, **changes: Any) -> RemoteEngineRole:
    made = recipe(rollout={"group": 4, "max_tokens": 18, "engine": kind, "address": url, "start_s": 0.1}, **changes)
    return RemoteEngineRole(made.on("fp32"), url, start, start.parent / "engine-0")


def using(made: RemoteEngineRole, work: Callable[[RemoteEngineRole], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        try:
            return await asyncio.wait_for(work(made), 60)
        finally:
            await made.close()

    return asyncio.run(run())


def test_our_server_gives_what_an_engine_in_this_process_gives_to_the_bit(start: Path) -> None:
    local = EngineRole(lambda: engine(MODEL), name="local")
    long = replace(ASK, routes_from=5)

    async def work(remote: RemoteEngineRole) -> None:
        waiting = asyncio.create_task(remote.generate(ASK))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "nothing is sampled before the run's weights are there"
        await remote.activate(version_of(start.parent, 7, MODEL))
        for ask, found in ((ASK, await waiting), (long, await remote.generate(long))):
            expected = await local.generate(ask)
            for name in ("tokens", "logprobs"):
                np.testing.assert_array_equal(getattr(found.segment, name), getattr(expected.segment, name))
            np.testing.assert_array_equal(found.routes, expected.routes)
            assert found.segment.versions.tolist() == [7] * 12 and found.finish_reason == "length"
        follow = replace(ASK, tokens=PROMPT[:3], num_kept=len(PROMPT) + 12)
        assert len((await remote.generate(follow)).segment.tokens) == 12
        assert (await remote.stats()).output_tokens >= 36 and not await remote.failure()
        await remote.activate(version_of(start.parent, 8, OTHER))
        assert set((await remote.generate(ASK)).segment.versions.tolist()) == {8}

    with our_server() as (url, _):
        using(open_role("stretto", url, start), work)
    local.close()


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("temperature", -0.5, "must be greater than or equal to 0, is -0.5"),
        ("max_tokens", 0, "must be greater than 0, is 0"),
        ("tokens", [1 << 31], "must be less than 2147483648"),
        ("routes_from", -1, "must be greater than or equal to 0, is -1"),
    ],
)
def test_our_server_names_the_field_that_no_engine_takes(field: str, value: Any, problem: str) -> None:
    body = {"tokens": [5, 6], "max_tokens": 2, "temperature": 1.0, "seed": 3, field: value}
    with our_server() as (url, _):
        answer = httpx.post(f"{url}/rollout/generate", json=body)
    assert answer.status_code == 400 and field in answer.json()["error"]["param"]
    assert problem in answer.json()["error"]["message"]


@pytest.mark.slow
def test_our_server_divided_over_two_ranks(start: Path) -> None:
    """The command, with an engine of two processes: tokens and routes as of one rank, before and after an update."""
    local = EngineRole(lambda: engine(MODEL), name="local")

    async def work(remote: RemoteEngineRole) -> None:
        for number, model in ((7, MODEL), (8, OTHER), (9, MODEL)):
            await remote.activate(version_of(start.parent, number, model))
            found = await remote.generate(ASK)
            assert set(found.segment.versions.tolist()) == {number}
        expected = await local.generate(ASK)
        np.testing.assert_array_equal(found.segment.tokens, expected.segment.tokens)
        np.testing.assert_array_equal(found.routes, expected.routes)
        # fp32 sums in another order
        np.testing.assert_allclose(found.segment.logprobs, expected.segment.logprobs, rtol=0, atol=2e-4)

    options = ("--rollout", "--tp", "2", "--dtype", "float32", "--cache-memory", "4MiB")
    with serving(start, *options) as (url, _):
        using(open_role("stretto", url, start), work)
    local.close()


@pytest.mark.parametrize("kind", DOUBLES)
def test_tokens_routes_and_versions_of_other_servers(kind: str, start: Path) -> None:
    async def work(remote: RemoteEngineRole) -> None:
        await remote.activate(version_of(start.parent, 4, MODEL))
        found = await remote.generate(replace(ASK, routes_from=6))
        tokens = [*PROMPT.tolist(), *found.segment.tokens.tolist()]
        local = EngineRole(lambda: engine(MODEL), name="local")
        own_seed = key_of(ASK.seed, len(PROMPT)) & 0x7FFF_FFFF
        expected = await local.generate(replace(ASK, seed=own_seed))
        local.close()
        np.testing.assert_array_equal(found.segment.tokens, expected.segment.tokens)
        np.testing.assert_allclose(found.segment.logprobs, expected.segment.logprobs, atol=1e-5)
        assert found.routes is not None and found.routes.dtype == np.uint8
        np.testing.assert_array_equal(found.routes, full_routes(MODEL, tokens, FULL)[6:-1])
        assert found.segment.versions.tolist() == [4] * 12
        stop = int(found.segment.tokens[5])
        cut = await remote.generate(replace(ASK, stop_ids=(stop,)))
        assert cut.finish_reason == "stop" and int(cut.segment.tokens[-1]) == stop
        follow = await remote.generate(replace(ASK, tokens=PROMPT[:0], num_kept=len(PROMPT) + 3, want_routes=False))
        assert follow.routes is None and len(follow.segment.tokens) == 12
        await remote.activate(version_of(start.parent, 5, OTHER))
        assert [path.name[:2] for path in (start.parent / "engine-0").iterdir()] == ["5-"]

    with a_double(kind) as (url, double):
        using(open_role(kind, url, start), work)
        first = "/pause" if kind == "vllm" else "/pause_generation"
        last = "/resume" if kind == "vllm" else "/continue_generation"
        assert double.calls.index(first) < double.calls.index(last)
    assert not (start.parent / "engine-0").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", DOUBLES)
def test_the_canary_catches_wrong_weights_and_the_old_ones_stay(kind: str, start: Path) -> None:
    async def work(remote: RemoteEngineRole) -> None:
        await remote.activate(version_of(start.parent, 0, MODEL))
        before = await remote.generate(ASK)
        double.loads_wrong = True
        flying = asyncio.create_task(remote.generate(replace(ASK, id="b", max_tokens=110)))
        while not (await double.role.stats()).num_running:
            await asyncio.sleep(0.001)
        read = double._read

        def wrong_once(version: Any) -> Any:
            state = read(version)
            double.loads_wrong = False
            return state

        double.role._fetch = wrong_once
        with pytest.raises(
            UserError, match=r"canary: after loading version 1, .* nats on average.*; version 0 is active again"
        ):
            await remote.activate(version_of(start.parent, 1, OTHER))
        with pytest.raises(InfraError, match="refused weights"):
            await flying
        after = await remote.generate(ASK)
        np.testing.assert_array_equal(before.segment.tokens, after.segment.tokens)
        assert remote.version == 0 and set(after.segment.versions.tolist()) == {0}

    with a_double(kind) as (url, double):
        using(open_role(kind, url, start), work)


def test_a_version_that_cannot_be_restored_stops_sampling(start: Path) -> None:
    async def work(remote: RemoteEngineRole) -> None:
        await remote.activate(version_of(start.parent, 0, MODEL))
        double.loads_wrong = True
        with pytest.raises(UserError, match=r"and version 0 cannot be restored: .*; restart the server"):
            await remote.activate(version_of(start.parent, 1, OTHER))
        with pytest.raises(InfraError, match=r"not done within 0\.1 s"):
            await remote.generate(replace(ASK, deadline_s=0.1))

    with a_double("vllm") as (url, double):
        using(open_role("vllm", url, start), work)


def test_our_server_gets_weights_that_are_in_a_store(start: Path) -> None:
    version = version_of(start.parent, 0, MODEL)
    stored = replace(version, location="store://weights-0")
    made = recipe(rollout={"group": 4, "max_tokens": 18, "engine": "stretto", "address": "http://127.0.0.1:9"})

    async def work(remote: RemoteEngineRole) -> None:
        await remote.activate(stored)
        assert remote.version == 0 and len(list((start.parent / "engine-0").iterdir())) == 1

    with our_server() as (url, _):
        fetched = RemoteEngineRole(made.on("fp32"), url, start, start.parent / "engine-0", lambda _: MODEL.state_dict())
        using(fetched, work)


def test_our_server_with_other_weights_than_announced(start: Path) -> None:
    async def work(remote: RemoteEngineRole) -> None:
        version = version_of(start.parent, 0, MODEL)
        with pytest.raises(UserError, match=r"canary: .*; serve the run's start, or set rollout\.canary"):
            await remote.activate(replace(version, canary=version_of(start.parent, 0, OTHER).canary))
        with pytest.raises(UserError, match=r"none\.safetensors: no such file"):
            await remote.activate(replace(version, location=str(start / "none.safetensors")))

    with our_server() as (url, _):
        using(open_role("stretto", url, start), work)


def test_weights_that_are_one_small_step_behind_are_noticed(start: Path) -> None:
    moved = network(seed=0)
    moved.load_state_dict(MODEL.state_dict())
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter).sign())

    async def work(remote: RemoteEngineRole) -> None:
        first, second = version_of(start.parent, 0, MODEL), version_of(start.parent, 1, moved)
        await remote.activate(first)
        with pytest.raises(UserError, match=r"canary: .*; version 0 is active again"):
            await remote.activate(replace(second, location=first.location, checksum=first.checksum))
        await remote.activate(second)
        assert remote.version == 1

    with our_server() as (url, _):
        using(open_role("stretto", url, start), work)


def test_a_server_that_was_restarted_is_noticed_by_its_labels(start: Path) -> None:
    async def work(remote: RemoteEngineRole) -> None:
        await remote.activate(version_of(start.parent, 0, MODEL))
        double.forgets_labels = True
        with pytest.raises(Unavailable, match=r"has weights 'default', which this run did not load"):
            await remote.generate(ASK)
        assert "was it restarted?" in await remote.failure()

    with a_double("vllm") as (url, double):
        using(open_role("vllm", url, start), work)


@pytest.mark.parametrize("kind", DOUBLES)
def test_a_server_that_dies_in_an_update_is_a_failure_and_no_mistake(kind: str, start: Path) -> None:
    async def work(remote: RemoteEngineRole) -> None:
        await remote.activate(version_of(start.parent, 0, MODEL))
        double.dies_in_update = True
        with pytest.raises(Unavailable, match="Error"):
            await remote.activate(version_of(start.parent, 1, OTHER))

    with a_double(kind) as (url, double):
        using(open_role(kind, url, start), work)


def test_a_server_that_is_gone_is_noticed(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.flow.rollout_remote._PROBE_S", 0.0)

    async def work(remote: RemoteEngineRole) -> None:
        await remote.activate(version_of(start.parent, 0, MODEL))
        assert await remote.failure() == ""
        double._is_dead = True
        with pytest.raises(Unavailable):
            await remote.generate(ASK)
        assert "/inference/v1/generate" in await remote.failure()

    with a_double("vllm") as (url, double):
        using(open_role("vllm", url, start), work)


@pytest.mark.parametrize(
    ("kind", "switches", "changes", "message"),
    [
        ("vllm", {"left_out": ("/update_weight_version",)}, {}, "has no /update_weight_version: it is too old, or was started without"),
        ("sglang", {"left_out": ("/pause_generation",)}, {}, "has no /pause_generation: it is too old"),
        ("vllm", {"has_no_routes": True}, {}, "returns no routes, and replay is 'r3'; start it with --enable-return-routed-experts"),
        ("sglang", {"has_no_routes": True}, {}, "returns no routes"),
        ("vllm", {}, {"precision": {"rollout": "bf16"}}, r"computes in float32, and precision\.rollout is bf16"),
        ("vllm", {}, {"train__seq_len": 500}, r"takes 160 tokens, and train\.seq_len is 500; .*--max-model-len"),
        ("sglang", {}, {"train__seq_len": 500}, r"takes 159 tokens, .*--context-length"),
    ],
)  # fmt: skip
def test_servers_that_cannot_do_what_the_run_needs(
    kind: str, switches: Any, changes: dict[str, Any], message: str, start: Path
) -> None:
    train = {"steps": 6, "prompts": 4, "seq_len": changes.pop("train__seq_len", 48), "micro_rows": 2}
    with a_double(kind, **switches) as (url, _), pytest.raises(UserError, match=message) as error:
        open_role(kind, url, start, train=train, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["stretto", "vllm", "sglang"])
def test_another_vocabulary_is_refused_at_the_start(kind: str, tmp_path: Path) -> None:
    for size in (CONFIG.vocab_size - 16, CONFIG.vocab_size + 16):
        config = CONFIG.replace(vocab_size=size)
        write_checkpoint(tmp_path / str(size), build(config, 0), config)
        opened = our_server() if kind == "stretto" else a_double(kind)
        with opened as (url, _), pytest.raises(UserError, match=r"vocab|not a token id"):
            open_role(kind, url, tmp_path / str(size))


def test_a_server_is_checked_before_the_run_has_a_start(tmp_path: Path) -> None:
    with a_double("vllm") as (url, _):
        rollout = {"group": 4, "max_tokens": 18, "engine": "vllm", "address": url, "start_s": 0.1}
        job = Job(recipe(rollout=rollout), tmp_path / "run", tmp_path / "run" / "sft")
        check_places(job, CONFIG)
        with pytest.raises(UserError, match=r"serves a vocabulary of more than"):
            check_places(job, CONFIG.replace(vocab_size=CONFIG.vocab_size - 16))
    assert list(tmp_path.iterdir()) == []


def test_nothing_or_something_else_at_the_address(start: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"at http://127\.0\.0\.1:9: does not answer within 0\.1 s: .*start the server, raise rollout\.start_s",
    ):
        open_role("vllm", "http://127.0.0.1:9", start)
    with running(Starlette()) as url:
        for kind in ("stretto", "vllm", "sglang"):
            with pytest.raises(UserError, match=r"has no /.*; see docs/CLUSTER\.md"):
                open_role(kind, url, start)


def test_our_server_wants_its_key(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRETTO_API_KEYS", raising=False)
    with our_server(api_keys=("secret",)) as (url, _):
        with pytest.raises(UserError, match="refuses the key; put its key first in STRETTO_API_KEYS"):
            open_role("stretto", url, start)
        monkeypatch.setenv("STRETTO_API_KEYS", "secret")

        async def work(remote: RemoteEngineRole) -> None:
            await remote.activate(version_of(start.parent, 0, MODEL))

        using(open_role("stretto", url, start), work)


def test_answers_that_vllm_0_32_gave(start: Path) -> None:
    """Recorded from vLLM 0.32 on a CPU: SmolLM2-135M, 33 tokens of the canary, and six sampled tokens."""
    recorded = json.loads(RECORDED.read_text())

    async def answer(http: Any) -> JSONResponse:
        params = (await http.json())["sampling_params"]
        return JSONResponse(recorded["score" if "prompt_logprobs" in params else "generate"])

    async def work() -> None:
        with running(Starlette(routes=[Route("/inference/v1/generate", answer, methods=["POST"])])) as url:
            dialect = Vllm(Server(url, "vllm"), recipe().on("fp32"), CONFIG, start, start.parent, dict)
            reply = await dialect.generate(Ask([1], 0, ASK))
            assert list(reply.tokens) == [198, 68, 29, 50, 5113, 216] and reply.labels == ["default"] * 6
            assert reply.logprobs[0] == pytest.approx(-3.3027437) and reply.routes is None
            ids = [int(next(iter(row))) for row in recorded["score"]["prompt_logprobs"][1:]]
            scores = await dialect.score([1, *ids])
            assert len(scores) == 32 and scores[0] == pytest.approx(-16.3012008)

    asyncio.run(work())


def test_routes_of_all_layers_and_of_other_networks() -> None:
    routes_RLK = np.random.default_rng(0).integers(0, 8, (9, 4, 3))
    whole_RNK = np.zeros((9, 5, 3), np.int32)
    whole_RNK[:, list(CONFIG.moe_layers)] = routes_RLK
    np.testing.assert_array_equal(moe_routes(whole_RNK, CONFIG), routes_RLK)
    np.testing.assert_array_equal(moe_routes(routes_RLK, CONFIG), routes_RLK)
    for wrong in (whole_RNK[:, :3], whole_RNK[:, :, :2], whole_RNK + 8):
        with pytest.raises(UserError, match="serve the run's start"):
            moe_routes(wrong, CONFIG)


def test_the_trainer_publishes_its_canary_for_engines_at_an_address(start: Path) -> None:
    at = {"group": 4, "max_tokens": 18, "engine": "stretto", "address": "http://127.0.0.1:9"}
    for rollout, num in ((at, 46), ({"group": 4, "max_tokens": 18}, 0)):
        trainer = TrainerRole(recipe(rollout=rollout), start.parent / "run", start)
        trainer.copy_weights()
        version = asyncio.run(trainer.publish())
        assert version is not None and len(version.canary) == num
        if num:
            local = EngineRole(lambda: engine(MODEL), name="local")
            found = asyncio.run(local.score(canary_tokens(CONFIG.vocab_size, num)))
            assert 0 < np.abs(np.subtract(found, version.canary)).mean() <= version.tolerance < 1e-4
            local.close()


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"engine": "vllm"}, "address does not fit engine 'vllm': give the addresses"),
        ({"address": "http://a:1"}, "address does not fit engine 'own': leave it out, or set engine"),
        ({"engine": "vllm", "address": "a:1"}, "'a:1' is not of the form http://HOST:PORT"),
        ({"engine": "vllm", "address": "http://a:80a0"}, "'http://a:80a0' is not of the form http://HOST:PORT"),
        ({"engine": "vllm", "address": "http://a:1/docs"}, "'http://a:1/docs' is not of the form http://HOST:PORT"),
        (
            {"engine": "vllm", "address": ["http://b:1", "http://a:1/v1/completions"]},
            "is not of the form http://HOST:PORT",
        ),
        ({"engine": "vllm", "address": ["http://a:1", "http://a:1/v1"]}, "engines 2 and 1 different addresses"),
        ({"engine": "vllm", "address": "http://a:1", "engines": 3}, "engines 3 and 1 different addresses"),
        (
            {"engine": "vllm", "address": "http://a:1", "keep_cache": True},
            "keep_cache is for engines that the run starts",
        ),
    ],
)
def test_addresses_that_do_not_fit(rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(rollout={"group": 4, "max_tokens": 18, **rollout})


def test_an_address_may_stand_alone_and_sets_the_number_of_engines() -> None:
    for address, num in (("http://a:1", 1), (["http://a:1//v1", "http://b:1/v1/"], 2)):
        rollout = recipe(rollout={"group": 4, "max_tokens": 18, "engine": "vllm", "address": address}).rollout
        assert rollout.engines == len(rollout.address) == num
        assert rollout.address == ("http://a:1", "http://b:1")[:num]
    with pytest.raises(ValueError, match="weights go to vllm in fp32 or bf16"):
        recipe(
            rollout={"group": 4, "max_tokens": 18, "engine": "vllm", "address": "http://a:1"},
            precision={"rollout": "fp8"},
        )


@pytest.mark.slow
def test_a_run_on_our_server_has_the_weights_of_the_run_with_its_own_engine(tmp_path: Path) -> None:
    (row,) = our_rows(tmp_path)
    assert row[1] == "equal"
