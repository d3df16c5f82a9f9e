"""Weights that change while requests are in flight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.base.errors import UserError
from stretto.engine.runner import state_checksum
from stretto.model.hub import weights_hash, write_checkpoint
from tests.engine.engines import (
    CONFIG,
    FULL,
    check_greedy,
    check_idle,
    engine,
    full_routes,
    network,
    prompts,
    request,
    run,
)  # fmt: skip


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
    with pytest.raises(UserError, match="serves already"):
        subject.load_weights(1, tmp_path / "new")
    state = other_weights(2)
    subject.load_weights(2, state, checksum=state_checksum(state))
    assert subject.stats().weight_version == 2
