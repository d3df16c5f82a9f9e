"""All steps through the compiled kernels: whatever else the engine does, a request's result has the same bits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from stretto.engine.engine import Engine
from stretto.engine.request import Completion, EngineConfig, Request
from stretto.ops.native import Library, load
from tests.engine.engines import FULL, SUBNETS, check_idle, network, prompts, request, run

MODEL = network()


@pytest.fixture(scope="module")
def library() -> Library:
    found = load()
    if found.handle is None:
        pytest.skip(found.reason)
    return found


@pytest.fixture
def threads() -> Iterator[None]:
    """Give the number of threads back."""
    num = torch.get_num_threads()
    yield
    torch.set_num_threads(num)


def engine(library: Library, compiled_prefill: bool = True, **sizes: Any) -> Engine:
    options = {"num_pages": 300, "page_size": 4, "max_batch": 16, "max_step_tokens": 400, **sizes}
    return Engine(MODEL, None, EngineConfig(**options, compiled_prefill=compiled_prefill), library=library)


def groups(seed: int) -> list[Request]:
    """Samples of one prompt with seeds of their own, of several Subnets and temperatures."""
    rng = random.Random(seed)
    return [
        request(
            f"{place}.{sample}", prompt, rng.choice((FULL, *SUBNETS)), routes=True,
            temperature=rng.choice((1.0, 0.6)), seed=100 * place + sample, max_tokens=rng.randint(1, 20),
        )
        for place, prompt in enumerate(prompts(seed, 6, low=20, high=90))
        for sample in range(3)
    ]  # fmt: skip


def assert_same_bits(left: Sequence[Completion], right: Sequence[Completion]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.request_id == other.request_id and one.tokens == other.tokens
        assert np.array_equal(one.logprobs, other.logprobs), one.request_id
        assert one.routes is not None and other.routes is not None and np.array_equal(one.routes, other.routes)


def test_the_batch_does_not_matter(library: Library) -> None:
    """In one crowd, which computes prompts in steps of hundreds of tokens; alone; in small chunks without a cache."""
    asked = groups(seed=1)
    subject = engine(library)
    together = subject.generate(asked)
    assert subject.stats().kernels == {"prefill": "native", "decode": "native"}
    alone = engine(library)
    assert_same_bits(together, [alone.generate([each])[0] for each in reversed(asked)][::-1])
    chunked = engine(library, prefix_cache=False, page_size=16, max_batch=5, max_step_tokens=7, num_pages=60)
    assert_same_bits(together, chunked.generate(asked))


def test_neither_a_small_cache_nor_threads_nor_arrivals_matter(library: Library, threads: None) -> None:
    asked = groups(seed=2)
    together = engine(library).generate(asked)
    torch.set_num_threads(2)
    subject = engine(library, num_pages=50, max_batch=8, max_step_tokens=130)
    rng, found = random.Random(0), {}
    for each in rng.sample(asked, len(asked)):
        subject.add(each, stream=False)
        for _ in range(rng.randint(0, 4)):
            found |= {done.request_id: done for done in subject.step() if isinstance(done, Completion)}
    found |= {done.request_id: done for done in run(subject).values()}
    assert subject.stats().num_preemptions > 0 and subject.stats().cached_tokens > 0, subject.stats()
    assert_same_bits(together, [found[each.id] for each in asked])
    check_idle(subject)


def test_long_steps_through_torch_do_matter(library: Library) -> None:
    """What the two above would miss if they compared too little: the usual engine, whose prompts go two ways."""
    asked = [
        request(f"r{place}", prompt, temperature=1.0, seed=place) for place, prompt in enumerate(prompts(3, 8, 60, 90))
    ]
    together = engine(library, compiled_prefill=False).generate(asked)
    alone = engine(library, compiled_prefill=False, max_step_tokens=40)
    apart = [alone.generate([each])[0] for each in asked]
    assert any(not np.array_equal(one.logprobs, other.logprobs) for one, other in zip(together, apart, strict=True))
