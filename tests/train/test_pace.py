"""A run's dtype and threads are what its own work is fastest in, and stay what they were."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from stretto.model.parallel import join
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, Transformer
from stretto.ops import tuning
from stretto.train import loop, pace
from stretto.train.pace import Pace, find_pace
from stretto.train.snapshot import read_meta
from stretto.train.step import MicroBatch
from tests.train.conftest import network

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    num_experts=4, top_k=2, expert_intermediate_size=8,
)  # fmt: skip


def next_batch() -> MicroBatch:
    ids_BT = torch.randint(64, (2, 8))
    return MicroBatch("full", ids_BT, ids_BT, Context.plain(ids_BT), CONFIG.full(), 1)


@pytest.mark.parametrize("bf16_s", [0.5, 0.95, 2.0])
def test_auto_takes_bf16_where_it_is_clearly_faster(bf16_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is done; the clock is the test's."""
    seen = []

    def seconds_of(work: Any) -> float:
        work()
        seen.append(len(seen))
        return 1.0 if len(seen) == 1 else bf16_s

    monkeypatch.setattr(pace, "seconds_of", seconds_of)
    monkeypatch.setattr(pace, "multiplies_bf16", lambda device: True)
    found = find_pace("auto", CONFIG, next_batch, join("cpu"))
    assert found.dtype == ("bfloat16" if bf16_s == 0.5 else "float32")
    assert len(seen) == 2


def test_of_a_batch_that_takes_long_a_part_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of a minute were timed whole, six times."""
    sizes = []

    def forward_backward(network: Any, batch: MicroBatch, dtype: torch.dtype) -> None:
        sizes.append(tuple(batch.ids_BT.shape))
        assert batch.targets_BT.shape == batch.ids_BT.shape
        time.sleep(0.001 * batch.ids_BT.numel())

    monkeypatch.setattr(pace, "forward_backward", forward_backward)
    monkeypatch.setattr(pace, "multiplies_bf16", lambda device: True)
    monkeypatch.setattr(pace, "MIN_TIMED_TOKENS", 3)
    monkeypatch.setattr(pace, "LONG_BATCH_S", 0.012)
    find_pace("auto", CONFIG, next_batch, join("cpu"))
    assert sizes[0] == (1, 3) and {width for _, width in sizes[2:]} <= set(range(3, 9)) and sizes[-1][0] == 1
    assert "of a micro-batch's 16 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("is_lean", [False, True])
def test_a_lean_run_times_a_shallow_network(is_lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole network in fp32, with all gradients, would take more memory than the run itself."""
    depths = set[int]()

    def forward_backward(network: Transformer, batch: MicroBatch, dtype: torch.dtype) -> None:
        depths.add(len(network.blocks))
        time.sleep(0.001)

    monkeypatch.setattr(pace, "forward_backward", forward_backward)
    monkeypatch.setattr(pace, "multiplies_bf16", lambda device: True)
    find_pace("auto", CONFIG.replace(num_layers=9), next_batch, join("cpu"), is_lean)
    assert depths == {4 if is_lean else 9}


@pytest.mark.parametrize(
    ("changes", "is_lean"), [({}, False), ({"trainable": "routers"}, True), ({"optim__moments": "int8"}, True)]
)
def test_runs_that_save_memory_are_lean(
    changes: dict[str, Any], is_lean: bool, elasticize_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def found(choice: str, config: ModelConfig, batch: Any, ranks: Any, is_lean: bool) -> Pace:
        asked.append(is_lean)
        return Pace(dtype="float32", num_threads=1)

    monkeypatch.setattr(loop, "find_pace", found)
    elasticize_in("run", network(), train__steps=1, **changes)
    assert asked == [is_lean]


def test_what_the_recipe_says_stands(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_pace("bfloat16", CONFIG, next_batch, join("cpu")).dtype == "bfloat16"
    assert capsys.readouterr().out == "", "nothing to find out, nothing to say"


@pytest.mark.slow
def test_a_resume_computes_as_before_and_times_nothing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(train__dtype="auto", train__steps=4)
    assert read_meta(run.folder / "snapshots" / "step-0000004").pace == first.pace
    monkeypatch.setattr(loop, "find_pace", lambda *_: pytest.fail("timed again"))
    assert run(train__dtype="auto", train__steps=5, resume=True).pace == first.pace


@pytest.mark.slow
def test_looking_for_a_pace_changes_nothing(run: Any, make_run: Any, assert_same: Any, monkeypatch: Any) -> None:
    """Not the batches, the weights or the number of threads."""
    monkeypatch.setattr(pace, "multiplies_bf16", lambda device: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = run(train__dtype="auto")
        assert torch.get_num_threads() == 2
        torch.set_num_threads(found.pace.num_threads)
        assert_same(make_run("plain")(train__dtype="float32"), found)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "best", "tried"),
    [
        ({8: 1.0, 4: 1.2}, 8, [8, 4]),
        ({8: 4.0, 4: 1.0, 2: 0.8, 1: 1.5}, 2, [8, 4, 2, 1]),
        ({8: 1.0, 4: 0.95, 2: 0.99}, 8, [8, 4, 2]),
    ],
)
def test_fewer_threads_are_tried_while_that_helps(
    seconds: dict[int, float], best: int, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_threads = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", num_threads.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = tuning.fastest_threads(lambda: seconds[num_threads[-1]])
    assert list(found) == tried and num_threads[-1] == best


def test_a_number_of_threads_that_a_user_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    assert list(tuning.fastest_threads(lambda: 1.0)) == [8]
    Pace(dtype="float32", num_threads=4).follow()
    assert set(asked) <= {8}
    monkeypatch.delenv("OMP_NUM_THREADS")
    Pace(dtype="float32", num_threads=4).follow()
    assert asked[-1] == 4
