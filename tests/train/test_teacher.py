"""A teacher's log-probabilities on disk: the same lesson as from memory, and a pass that can be stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.base.errors import UserError
from stretto.data.loader import Loader
from stretto.data.shards import TokenSet
from stretto.evals.loss import EvalBatch
from stretto.model.parallel import Ranks, join
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Transformer, build
from stretto.ops.logprob import top_log_probs
from stretto.train import teacher as module
from stretto.train.loop import Trained
from stretto.train.teacher import META, CacheKey, LogitCache, hash_state

ROWS, LENGTH, VOCAB = 4, 48, 257
CONFIG = ModelConfig(
    vocab_size=VOCAB, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8,
    num_experts=4, top_k=2, expert_intermediate_size=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build(CONFIG, 3).requires_grad_(False)


@pytest.fixture
def fill(tmp_path: Path, tokens: TokenSet, model: Transformer) -> Callable[..., LogitCache]:
    """Fills the cache of that name for a number of batches."""

    def work(name: str, num_batches: int, top_k: int = 5, **changes: Any) -> LogitCache:
        told = {"data_hash": tokens.manifest.data_hash, "loader_seed": 1, "seq_len": LENGTH, "top_k": top_k}
        key = CacheKey(**(told | {"teacher": hash_state(model), "dtype": "float32"} | changes))
        cache, loader = LogitCache(tmp_path / name, key, VOCAB), loader_of(tokens)
        loader.next()
        before = loader.state()
        loader.restore(loader_of(tokens).state())
        cache.fill(model, loader, num_batches * ROWS, ROWS, join("cpu"))
        assert loader.state()["position"] == 0 < before["position"], "left where it was"
        return cache

    return work


def loader_of(tokens: TokenSet) -> Loader:
    return Loader([tokens], [1.0], ROWS, LENGTH, 1)


def contents(cache: LogitCache) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.folder.iterdir()}


def test_a_row_on_disk_is_the_loaders_row(
    fill: Callable[..., LogitCache], tokens: TokenSet, model: Transformer
) -> None:
    cache, loader = fill("one", 3), loader_of(tokens)
    assert sum(path.stat().st_size for path in cache.folder.glob("*.bin")) == 3 * ROWS * cache.row_bytes
    for number in range(3):
        batch = EvalBatch.of(loader.next(), "cpu")
        hidden_ND = model(batch.ids_BT, CONFIG.full(), batch.ctx).hidden_BTD.flatten(0, 1)
        expected = top_log_probs(hidden_ND, model.head_VD, 5)
        found = cache.read(slice(number * ROWS, (number + 1) * ROWS), torch.device("cpu"))
        assert torch.equal(found.ids_NK, expected.ids_NK)
        assert torch.equal(found.logprobs_NK, expected.logprobs_NK) and torch.equal(found.rest_N, expected.rest_N)


class OneOfTwo(Ranks):
    """A rank of two whose other one has nothing to say."""

    def first(self, work: Callable[[], Any]) -> Any:
        return work()

    def barrier(self) -> None:
        pass


def test_one_rank_shows_the_progress(
    fill: Callable[..., LogitCache],
    tokens: TokenSet,
    model: Transformer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = fill("key", 1).key
    for rank, num_ends in ((0, 1), (1, 0)):
        capsys.readouterr()
        loader = Loader([tokens], [1.0], ROWS, LENGTH, 1, rank, 2)
        ranks = OneOfTwo(rank, 2, torch.device("cpu"))
        LogitCache(tmp_path / f"of-{rank}", key, VOCAB).fill(model, loader, ROWS, ROWS, ranks)
        assert capsys.readouterr().out.count("teacher's logits: done") == num_ends


def test_a_pass_that_was_stopped_goes_on(
    fill: Callable[..., LogitCache], monkeypatch: pytest.MonkeyPatch, tokens: TokenSet
) -> None:
    whole = contents(fill("whole", 6))
    monkeypatch.setattr(module, "BATCHES_PER_RECORD", 2)
    computed = 0
    top = LogitCache._top

    def counted(self: LogitCache, *arguments: Any) -> Any:
        nonlocal computed
        computed += 1
        if computed == 4:
            raise KeyboardInterrupt
        return top(self, *arguments)

    monkeypatch.setattr(LogitCache, "_top", counted)
    with pytest.raises(KeyboardInterrupt):
        fill("stopped", 6)
    assert contents(fill("stopped", 6)) == whole and computed == 4 + 4, "from the record of two batches on"
    fill("stopped", 6)
    fill("stopped", 5)
    assert computed == 8, "nothing is computed again"
    assert fill("stopped", 8).read(slice(28, 32), torch.device("cpu")).rest_N.numel() == 4 * LENGTH, (
        "a run was prolonged"
    )
    assert computed == 10
    fill("stopped", 1, data_hash="other text")
    assert computed == 11, "of another text, all is"


def test_no_room_is_said_before(fill: Callable[..., LogitCache], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(
        UserError, match=r"cached_logits: .* largest log-probabilities of .* 0\.00 GB are free; lower cached_logits"
    ):
        fill("full", 2)


@pytest.mark.parametrize("changes", [{}, pytest.param({"teacher_dtype": "bfloat16"}, marks=pytest.mark.slow)])
def test_with_all_of_them_kept_a_run_is_that_of_a_teacher_in_memory(
    changes: dict[str, Any], elasticize_in: Callable[..., Trained]
) -> None:
    # some text from the first step on: where student and teacher are equal AdamW would make steps of rounding
    resident = elasticize_in("resident", kd_weight=0.9, **changes)
    cached = elasticize_in("cached", kd_weight=0.9, cached_logits=VOCAB, **changes)
    assert resident.meter.receipt().flops == cached.meter.receipt().flops, "the teacher's pass is paid for once"
    for name, tensor in resident.model.state_dict().items():
        other = cached.model.state_dict()[
            name
        ]  # eight steps, each of which may double what rounding makes of the smallest
        assert (tensor - other).norm() <= 2**8 * 1e-6 * tensor.norm(), name


@pytest.mark.slow
def test_few_of_them_teach_too_and_a_resumed_run_is_an_uninterrupted_one(
    elasticize_in: Callable[..., Trained], tmp_path: Path, assert_same: Callable[[Trained, Trained], None]
) -> None:
    whole = elasticize_in("whole", cached_logits=8)
    elasticize_in("stopped", cached_logits=8)
    shutil.rmtree(tmp_path / "stopped" / "snapshots" / "step-0000008")
    before = (tmp_path / "stopped" / "teacher" / META).read_bytes()
    assert_same(whole, elasticize_in("stopped", resume=True, cached_logits=8))
    assert (tmp_path / "stopped" / "teacher" / META).read_bytes() == before
    other = elasticize_in("other", cached_logits=1)
    assert not torch.equal(whole.model.embedding.weight, other.model.embedding.weight)
