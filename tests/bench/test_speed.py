"""Benches of speed fail where the sides do not agree, or where ours is slower than it must be."""

from __future__ import annotations

import pytest

from bench import decode_speed, rl_trl, train_speed
from bench.common.measure import Sample
from bench.decode_speed import OURS, Result
from bench.rl_trl import THEIRS, Measured
from stretto.base.track import wide_console


def test_rl_fails_for_each_of_our_ways_that_misses_the_aim() -> None:
    def rounds(*speeds: float) -> list[Measured]:
        return [Measured(speed, speed, (0.5,), 0.5, 5.0, 1.0) for speed in speeds]

    runs = {
        "stretto, asynchronous": rounds(31.0, 30.0),
        "stretto, synchronous": rounds(25.0, 25.0),
        THEIRS: rounds(10.0, 10.0),
    }
    told = rl_trl.show_speed(runs, wide_console())
    assert told == ["stretto, synchronous: 2.50x the speed of TRL, aim at least 3x"]


@pytest.mark.parametrize(
    ("worst", "ours", "num"),
    [(1.2e-7, 0.092995, 0), (1e-3, 0.092995, 1), (1.2e-7, 0.0935, 1), (float("nan"), float("nan"), 2)],
)
def test_rl_fails_where_advantages_or_gradients_differ(worst: float, ours: float, num: int) -> None:
    assert len(rl_trl.disagreements(worst, ours, 0.092995)) == num


def test_decoding_fails_where_an_engine_gives_other_tokens() -> None:
    results = {OURS: Result("1 thread", [], 16), "llama.cpp": Result("flash", [], 13), "vllm": Result("", [], 16)}
    told = decode_speed.other_tokens(results, 16)
    assert told == ["llama.cpp, batch 16: other tokens than stretto for 3 of 16 prompts; setting: flash"]


@pytest.mark.parametrize(
    ("ours", "again", "theirs", "told"),
    [
        (1.0, 1.0, 2.0, []),
        (1.0, 1.0, 0.9, ["the default is slower than transformers: 0.90x"]),
        (1.2, 1.0, 1.0, ["the default is slower than fp32: 0.83x", "the default is slower than transformers: 0.83x"]),
        (1.0, 1.2, 0.9, ["fp32 over itself is 0.83x"]),
    ],
)
def test_training_fails_where_the_default_is_slower(ours: float, again: float, theirs: float, told: list[str]) -> None:
    seconds = {"ours": ours, "fp32": 1.0, "again": again, "theirs": theirs}
    samples = {name: [Sample(each, each, 1.0)] * 8 for name, each in seconds.items()}
    lines = train_speed.missed(samples)
    assert len(lines) == len(told) and all(line.startswith(start) for line, start in zip(lines, told, strict=True))
