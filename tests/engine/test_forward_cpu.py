"""All steps through the compiled kernels: whatever else the engine does, a request's result has the same bits."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from stretto.engine.engine import Engine
from stretto.engine.request import Completion, EngineConfig, Request
from stretto.model.transformer import Transformer
from stretto.ops.native import DTYPES, Library
from tests.engine.engines import FULL, PHASES, SUBNETS, check_idle, network, prompts, request, run


@functools.cache
def model(dtype: torch.dtype) -> Transformer:
    own = network()
    for parameter in own.parameters():
        parameter.data = parameter.data.to(dtype)
    return own


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """What the kernels are built for."""
    assert request.param in DTYPES and len(DTYPES) == 2
    return cast(torch.dtype, request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    """Give the number of threads back."""
    num = torch.get_num_threads()
    yield
    torch.set_num_threads(num)


def engine(library: Library, dtype: torch.dtype, **sizes: Any) -> Engine:
    options = {"num_pages": 300, "page_size": 4, "max_batch": 16, "max_step_tokens": 400, **sizes}
    return Engine(model(dtype), None, EngineConfig(**options), library=library)


def groups(seed: int, num: int = 6) -> list[Request]:
    """Samples of one prompt with seeds of their own, of several Subnets and settings."""
    rng = random.Random(seed)
    settings: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
        {"temperature": 1.2, "min_p": 0.01, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logit_bias": {9: 2.0}, "min_tokens": 3, "top_logprobs": 2},
    ]
    return [
        request(
            f"{place}.{sample}", prompt, rng.choice((FULL, PHASES, *SUBNETS)), routes=True,
            seed=100 * place + sample, max_tokens=rng.randint(1, 20), **rng.choice(settings),
        )
        for place, prompt in enumerate(prompts(seed, num, low=20, high=90))
        for sample in range(3)
    ]  # fmt: skip


def assert_same_bits(left: Sequence[Completion], right: Sequence[Completion]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.request_id == other.request_id and one.tokens == other.tokens
        assert np.array_equal(one.logprobs, other.logprobs), one.request_id
        assert one.routes is not None and other.routes is not None and np.array_equal(one.routes, other.routes)


def test_the_batch_does_not_matter(library: Library, dtype: torch.dtype) -> None:
    """In one crowd, which computes prompts in steps of hundreds of tokens; alone; in small chunks without a cache."""
    asked = groups(seed=1)
    subject = engine(library, dtype)
    together = subject.generate(asked)
    stats = subject.stats()
    assert stats.kernels == {"prefill": "native", "decode": "native"} and stats.is_batch_invariant
    alone = engine(library, dtype)
    assert_same_bits(together, [alone.generate([each])[0] for each in reversed(asked)][::-1])
    chunked = engine(library, dtype, prefix_cache=False, page_size=16, max_batch=5, max_step_tokens=7, num_pages=60)
    assert_same_bits(together, chunked.generate(asked))


def in_random_order(subject: Engine, asked: Sequence[Request], seed: int) -> list[Completion]:
    """Requests that arrive while others run, as ``asked`` has them."""
    rng, found = random.Random(seed), {}
    for each in rng.sample(asked, len(asked)):
        subject.add(each, stream=False)
        for _ in range(rng.randint(0, 4)):
            found |= {done.request_id: done for done in subject.step() if isinstance(done, Completion)}
    found |= {done.request_id: done for done in run(subject).values()}
    check_idle(subject)
    return [found[each.id] for each in asked]


@pytest.mark.parametrize("prefix_cache", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_neither_a_small_cache_nor_threads_nor_arrivals_matter(
    library: Library, dtype: torch.dtype, prefix_cache: bool, threads: None
) -> None:
    """Sequences lose their pages and are computed again, whatever their size; some find the pages of others."""
    asked = groups(seed=2)
    together = engine(library, dtype).generate(asked)
    torch.set_num_threads(2)
    subject = engine(library, dtype, num_pages=40, max_batch=8, max_step_tokens=130, prefix_cache=prefix_cache)
    assert_same_bits(together, in_random_order(subject, asked, seed=0))
    stats = subject.stats()
    assert stats.num_preemptions > 0 and (stats.cached_tokens > 0) == prefix_cache, stats


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 22))
def test_random_batches(library: Library, dtype: torch.dtype, seed: int) -> None:
    asked, rng = groups(seed, num=20), random.Random(seed)
    together = engine(library, dtype, num_pages=2000, max_batch=60, max_step_tokens=2000).generate(asked)
    sizes = {"num_pages": rng.randint(40, 90), "max_batch": rng.randint(1, 9), "max_step_tokens": rng.randint(10, 300)}
    subject = engine(library, dtype, **sizes, page_size=rng.choice((4, 8)), prefix_cache=rng.random() < 0.8)
    assert_same_bits(together, in_random_order(subject, asked, seed))


def test_long_steps_through_torch_do_matter(library: Library, dtype: torch.dtype) -> None:
    """What those above would miss if they compared too little: prompts that go two ways."""
    asked = [
        request(f"r{place}", prompt, temperature=1.0, seed=place) for place, prompt in enumerate(prompts(3, 8, 60, 90))
    ]
    subject = engine(library, dtype, fast_prefill=True)
    together = subject.generate(asked)
    alone = engine(library, dtype, fast_prefill=True, max_step_tokens=40)
    apart = [alone.generate([each])[0] for each in asked]
    assert any(not np.array_equal(one.logprobs, other.logprobs) for one, other in zip(together, apart, strict=True))
    assert not subject.stats().is_batch_invariant
