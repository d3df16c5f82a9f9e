"""Tensor parallelism: tokens, weights and failures of engines whose network is divided over ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stretto.base.errors import UserError
from stretto.engine.async_engine import AsyncEngine, EngineFailed
from stretto.engine.engine import Engine
from stretto.engine.follower import follow
from stretto.engine.loading import open_engine
from stretto.engine.ranks import Followers, RankFailed, Ranks, Setup, Team
from stretto.engine.request import Completion, EngineConfig
from stretto.model.checkpoint import write_checkpoint
from stretto.model.shard import Shard
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Transformer
from tests.engine.engines import CONFIG, CORNER, LATENT, SIZES, SWITCHES, engine, mixed, network, request

NETWORKS: dict[str, ModelConfig] = {
    "shared expert, a key head for two": CONFIG,
    **{name: CONFIG.replace(**SWITCHES[name]) for name in ("biases", "sinks and windows", "scale, groups")},
    "latent": CONFIG.replace(**LATENT["latent"]),
    "dense": CONFIG.replace(dense_layers=tuple(range(CONFIG.num_layers))),
}


def part(model: Transformer, shard: Shard) -> Transformer:
    divided = Transformer(shard.config(model.config))
    shapes = {name: tuple(tensor.shape) for name, tensor in divided.state_dict().items()}
    whole = model.state_dict()
    divided.load_state_dict({name: shard.cut(name, whole[name], shapes[name], model.config) for name in shapes})
    return divided.requires_grad_(False)


@contextmanager
def divided(model: Transformer, folder: Path, **options: Any) -> Iterator[Engine]:
    """An engine of two ranks, of which the second is a thread here: a process takes seconds to start."""
    here, there = Pipe()
    setups = [Setup(Shard(rank, 2), folder, "cpu", torch.float32, 1, str(folder / "store"), 60.0) for rank in range(2)]

    def second() -> None:
        there.send(None)
        follow(there, part(model, setups[1].shard), Ranks.join(setups[1], model.config))

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    team = Team(setups[0], model.config, Followers(connections=[here]))
    with closing(engine(part(model, setups[0].shard), tp=2, engine={"ranks": team.join()}, **options)) as subject:
        yield subject
    thread.join(10)
    assert not thread.is_alive()


def same(found: list[Completion], expected: list[Completion]) -> None:
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    for one, other in zip(found, expected, strict=True):
        # fp32 sums in another order, of logits of order 10
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=2e-4)
        assert (one.routes is None) == (other.routes is None)
        if one.routes is not None and other.routes is not None:
            np.testing.assert_array_equal(one.routes, other.routes)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_two_ranks_choose_the_tokens_and_experts_of_one(name: str, tmp_path: Path) -> None:
    model = network(config=NETWORKS[name])
    full = model.config.full()
    requests = [request(f"r{at}", range(3, 3 + 7 * at), full, routes=at % 2 == 0) for at in range(1, 8)]
    expected = engine(network(config=NETWORKS[name])).generate(requests)
    with divided(model, tmp_path) as subject:
        same(subject.generate(requests), expected)
        stats = subject.stats()
        assert stats.kernels["decode"] == "torch (tensor parallel over 2 ranks)"
        whole = engine(model).stats()
        assert stats.num_pages == whole.num_pages
        assert stats.cache_bytes < whole.cache_bytes or model.config.latent is not None


@pytest.mark.slow
def test_sizes_routes_preemption_prefix_cache_and_new_weights(tmp_path: Path) -> None:
    tight = {"num_pages": 40, "max_batch": 8}
    single = engine(network(), **tight)
    requests = [replace(each, want_routes=at % 2 == 0) for at, each in enumerate(mixed(6, 1))]
    with divided(network(), tmp_path, **tight) as subject:
        for asked in (requests, requests[-2:]):  # the second time, pages of the first are found
            same(subject.generate(asked), single.generate(asked))
        ours, theirs = subject.stats(), single.stats()
        assert (ours.num_preemptions, ours.cached_tokens) == (theirs.num_preemptions, theirs.cached_tokens)
        assert ours.num_preemptions and ours.cached_tokens
        other = network(seed=5, config=CONFIG).state_dict()
        subject.load_weights(3, other)
        single.load_weights(3, other)
        done = subject.generate(requests[:2])
        same(done, single.generate(requests[:2]))
        assert set(done[0].versions.tolist()) == {3}
        with pytest.raises(UserError, match=r"weights: blocks.0.attention.qkv.weight: shape .*, not \[64, 32\]"):
            subject.load_weights(4, other | {"blocks.0.attention.qkv.weight": torch.zeros(32, 32)})
        with pytest.raises(UserError, match=r"norm\.weight: missing"):
            subject.load_weights(4, {name: tensor for name, tensor in other.items() if name != "norm.weight"})
        same(subject.generate(requests[2:3]), single.generate(requests[2:3]))


@pytest.mark.slow
def test_two_ranks_in_bf16_are_no_further_from_fp32_than_one(tmp_path: Path) -> None:
    requests = [request(f"r{at}", range(3, 3 + 9 * at), max_tokens=1, prompt_logprobs=True) for at in range(1, 6)]

    def scores(subject: Engine) -> np.ndarray:
        return np.concatenate([each.prompt_logprobs for each in subject.generate(requests)])

    exact, one = scores(engine(network())), scores(engine(network().bfloat16()))
    with divided(network().bfloat16(), tmp_path) as subject:
        two = scores(subject)
    # each rank rounds its part of a sum: at most twice as many roundings
    assert 0 < np.abs(two - exact).mean() < 2 * np.abs(one - exact).mean()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "checkpoint"
    write_checkpoint(folder, network(), CONFIG)
    return folder


def processes(subject: Engine) -> list[subprocess.Popen[bytes]]:
    assert subject._team is not None
    return subject._team._followers.processes


def opened(folder: Path, tp: int, **options: Any) -> Engine:
    config = EngineConfig(**{**SIZES, "tp": tp, **options})
    return open_engine(folder, config, with_tokenizer=False).engine


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 4}, r"checkpoint: tp: 4 does not divide num_kv_heads 2; choose tp from 1, 2$"),
        ({"tp": 3}, r"checkpoint: tp: 3 does not divide num_heads 4"),
    ],
)
def test_ranks_that_do_not_divide(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened(folder, **options)


def test_what_ranks_cannot_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(**SIZES, tp=2)
    with pytest.raises(UserError, match="tp: 2: a Subnet cannot be extracted"):
        open_engine(folder, config, cut=CORNER, with_tokenizer=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"tp: 2: 1 CUDA devices are available from cuda on; choose tp 1 at most"):
        open_engine(folder, config, device="cuda", with_tokenizer=False, memory_bytes=1 << 30)
    for wrong in ({"batch_invariant": True}, {"precision": "bf16"}):
        with pytest.raises(ValueError, match="sums over ranks do not round"):
            EngineConfig(tp=2, **wrong)


@pytest.mark.slow
def test_processes_serve_and_end_with_the_engine(folder: Path) -> None:
    requests = mixed(6, 1)
    expected = engine(network()).generate(requests)
    subject = opened(folder, 2)
    same(subject.generate(requests), expected)
    (process,) = processes(subject)
    subject.close()
    assert process.poll() is not None


@pytest.mark.slow
def test_a_rank_that_cannot_read_its_weights(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Followers.start
    monkeypatch.setattr(Followers, "start", lambda self, setup: start(self, replace(setup, folder=tmp_path)))
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        opened(folder, 2)


@pytest.mark.slow
@pytest.mark.parametrize("is_idle", [True, False])
def test_a_dead_rank_ends_the_engine(folder: Path, is_idle: bool) -> None:
    subject = opened(folder, 2, max_step_s=60.0)
    (process,) = processes(subject)

    async def serve() -> None:
        with closing(AsyncEngine(subject).start()) as service:
            stream = service.submit(request("x", (5, 6, 7), CORNER, max_tokens=150))
            await stream.admitted()
            if is_idle:
                async for _ in stream:
                    pass
            process.kill()
            with pytest.raises(EngineFailed, match="rank 1 of 2 ranks of tensor parallelism was ended by SIGKILL"):
                async for _ in stream:
                    pass
                while service.error is None:
                    await asyncio.sleep(0.05)
                raise service.error

    asyncio.run(asyncio.wait_for(serve(), 30))


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_engine(folder: Path) -> None:
    subject = opened(folder, 2, max_step_s=1.0)
    (process,) = processes(subject)

    async def serve() -> None:
        with closing(AsyncEngine(subject).start()) as service:
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(EngineFailed, match=r"no progress for 1 s|Timed out"):
                async for _ in service.submit(request("x", (5, 6, 7), CORNER)):
                    pass

    asyncio.run(asyncio.wait_for(serve(), 30))
    assert process.poll() == -signal.SIGKILL


@pytest.mark.slow
def test_no_rank_outlives_a_killed_engine(folder: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tests.engine.test_ranks import opened, processes\n"
        "subject = opened(Path(sys.argv[1]), 2)\n"
        "print(processes(subject)[0].pid, flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    deadline_s = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_a_direct_call_reports_a_dead_rank(folder: Path) -> None:
    with closing(opened(folder, 2)) as subject:
        processes(subject)[0].kill()
        with pytest.raises(RankFailed, match="was ended by SIGKILL"):
            subject.generate([request("x", (5, 6, 7))])
