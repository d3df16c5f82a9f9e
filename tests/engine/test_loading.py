"""Opening an engine from a folder, and what is said where that cannot be."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import stretto
from stretto.base.errors import UserError
from stretto.engine.forward_torch import KvPool
from stretto.engine.loading import generation_ends, open_engine
from stretto.engine.request import EngineConfig
from stretto.engine.runner import pages_within
from stretto.model.checkpoint import write_checkpoint
from stretto.model.counts import count
from stretto.model.spec import SubnetChoice
from stretto.ops.memory import free_bytes
from stretto.ops.native import Library
from tests.engine.engines import CONFIG, CORNER, SIZES, engine, network, request, tokenizer

TORCH = Library(None, "the tests' networks are too small for it to matter")
PRESETS = {"corner": SubnetChoice(layers=3, experts=4, top_k=1)}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    tokenizer().save(folder / "tokenizer")
    write_checkpoint(folder / "checkpoint", network(), CONFIG, tokenizer_dir=folder / "tokenizer", presets=PRESETS)
    (folder / "run.json").write_text("{}")
    return folder


def test_a_run_and_its_checkpoint_open_alike(run_folder: Path) -> None:
    asked = [request("x", (5, 6, 7), CORNER), request("y", (5, 6, 7))]
    expected = [completion.tokens for completion in engine(network()).generate(asked)]
    for path in (run_folder, run_folder / "checkpoint"):
        opened = open_engine(path, EngineConfig(**SIZES), library=TORCH)
        assert (opened.name, set(opened.presets)) == ("tiny", {"full", "corner"})
        assert opened.presets["corner"] == CORNER
        assert [completion.tokens for completion in opened.engine.generate(asked)] == expected
    cut = open_engine(run_folder, EngineConfig(**SIZES), cut=CORNER, library=TORCH)
    assert cut.engine.model.config.num_layers == 3 and set(cut.presets) == {"full"}
    alone = cut.engine.generate([request("x", (5, 6, 7), cut.presets["full"])])[0]
    assert alone.tokens == expected[0]


def test_a_run_of_rl_has_its_name_for_every_reader(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder has no run.json."""
    (run_folder / "run.json").rename(run_folder / "recipe.json")
    try:
        monkeypatch.chdir(run_folder)
        for path in (run_folder, run_folder / "checkpoint", Path("."), Path("checkpoint")):
            assert open_engine(path, EngineConfig(**SIZES), library=TORCH).name == "tiny"
            assert stretto.load(path).name == "tiny"
    finally:
        (run_folder / "recipe.json").rename(run_folder / "run.json")


def test_what_cannot_be_opened(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.json: no such file"):
        open_engine(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError, match="finish it with --resume"):
        open_engine(tmp_path)
    (tmp_path / "run.json").rename(tmp_path / "recipe.json")  # as a run of `stretto rl` has it
    with pytest.raises(UserError, match="finish it with --resume"):
        open_engine(tmp_path)
    half = tmp_path / "half"
    write_checkpoint(half, network(), CONFIG, tokenizer_dir=run_folder / "tokenizer")
    weights = half / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(UserError, match="truncated or damaged"):
        open_engine(half, EngineConfig(**SIZES), library=TORCH)
    weights.unlink()
    with pytest.raises(UserError, match="no such file"):
        open_engine(half, EngineConfig(**SIZES), library=TORCH)
    (half / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="tokenizer"):
        open_engine(half, EngineConfig(**SIZES), library=TORCH)


def test_memory_that_does_not_suffice_says_what_would_fit(run_folder: Path) -> None:
    with pytest.raises(UserError, match=r"memory: .* would fit: a cache of \d+\.\d MiB") as caught:
        open_engine(run_folder, EngineConfig(cache_bytes=1 << 30), memory_bytes=2 << 20, library=TORCH)
    assert "\n" not in str(caught.value)
    with pytest.raises(
        UserError, match="neither a preset nor another dtype would fit; let `stretto serve --subnet auto` look"
    ):
        open_engine(run_folder, EngineConfig(cache_bytes=1 << 30), memory_bytes=1000, library=TORCH)
    small = EngineConfig(num_pages=40, page_size=4)
    assert open_engine(run_folder, small, memory_bytes=2 << 20, library=TORCH).engine.allocator.num_pages == 40


def test_the_cache_takes_what_the_weights_leave(run_folder: Path) -> None:
    """Of what is said to be there; what it cannot hold is no longer promised, and what was asked for is refused."""
    long = CONFIG.replace(max_positions=1 << 20)
    write_checkpoint(folder := run_folder.parent / "long", network(config=long), long)
    sizes = {"page_size": 4, "max_batch": 8, "max_step_tokens": 32}
    opened = open_engine(folder, EngineConfig(**sizes), memory_bytes=4 << 20, with_tokenizer=False, library=TORCH)
    stats, page_bytes = opened.engine.stats(), KvPool.bytes_per_page(long, torch.float32, 4, routes=True)
    assert opened.engine.max_len == stats.max_len == 4 * stats.num_pages
    assert stats.cache_bytes == stats.num_pages * page_bytes
    weights = 4 * count(long, long.full()).total_params
    assert 0.8 * (4 << 20) < stats.cache_bytes + weights <= 4 << 20
    prompt, room = (5,) * 40, stats.max_len - 40
    (done,) = opened.engine.generate([request("x", prompt, max_tokens=room, stop_ids=(9,), logit_bias={9: 100.0})])
    assert done.finish_reason == "stop"
    with pytest.raises(UserError, match="do not fit in"):
        opened.engine.add(request("y", prompt, max_tokens=room + 2))
    fixed = EngineConfig(**sizes, cache_bytes=100 * page_bytes)
    opened = open_engine(folder, fixed, with_tokenizer=False, library=TORCH)
    assert opened.engine.max_len == 400
    with pytest.raises(UserError, match=rf"^max_len: .* holds 400 positions, not 401; .* {101 * page_bytes} bytes"):
        open_engine(folder, fixed.replace(max_len=401), with_tokenizer=False, library=TORCH)
    with pytest.raises(UserError, match=r"memory: .*would fit: a cache of"):
        open_engine(folder, fixed.replace(num_pages=1 << 40), with_tokenizer=False, library=TORCH)


class Logits(TorchDispatchMode):
    """Measures the memory of tensors that operators make with one column per token of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.most = vocab_size, 0
        self.bytes_by_address: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.shape[-1:] == (self.vocab_size,):
            storage = made.untyped_storage()
            inputs = [each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)]
            if storage.data_ptr() not in inputs:  # not a view
                self.bytes_by_address[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self.bytes_by_address.pop, storage.data_ptr())
                self.most = max(self.most, sum(self.bytes_by_address.values()))
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_of_prompts_stay_within_the_memory(run_folder: Path, dtype: torch.dtype) -> None:
    """The logits of a step whose tokens all belong to such prompts, beside weights and cache; in bf16 also before their conversion."""
    wide = CONFIG.replace(vocab_size=4096, max_positions=1 << 20)
    write_checkpoint(folder := run_folder.parent / "wide", network(config=wide), wide)
    memory, config = 16 << 20, EngineConfig(page_size=4, max_batch=16, max_step_tokens=512)
    options = {"memory_bytes": memory, "with_tokenizer": False, "library": TORCH}
    subject = open_engine(folder, config, dtype=dtype, **options).engine
    requests = [request(f"r{number}", (5 + number,) * 32, max_tokens=1, prompt_logprobs=True) for number in range(16)]
    with Logits(4096) as logits:
        assert all(done.prompt_logprobs is not None for done in subject.generate(requests))
    assert logits.most >= 4096 * 512 * (4 if dtype == torch.float32 else 6), "all tokens of the step"
    weights = dtype.itemsize * count(wide, wide.full()).total_params
    assert weights + subject.stats().cache_bytes + logits.most <= memory


def test_a_share_of_the_free_memory_leaves_room_for_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    long, free = CONFIG.replace(max_positions=1 << 30), 1 << 30
    monkeypatch.setattr("stretto.engine.runner.free_bytes", lambda device: free)
    monkeypatch.setattr("stretto.engine.runner.CPU_SHARE", 0.9)  # as on a GPU
    model, page_bytes = network(config=long), KvPool.bytes_per_page(long, torch.float32, 16, routes=False)
    for max_step_tokens, left in ((1024, 0.1), (200_000, 4 * 288 * 200_128 / free), (10_000_000, 0.5)):
        config = EngineConfig(max_step_tokens=max_step_tokens)
        taken = pages_within(model, config, 1 << 30, routes=False) * page_bytes
        assert taken == pytest.approx((1 - left) * free, abs=page_bytes + 1)


def test_unsaid_it_is_a_share_of_what_is_free() -> None:
    long = CONFIG.replace(max_positions=1 << 30)
    model = network(config=long)
    page_bytes = KvPool.bytes_per_page(long, torch.float32, 16, routes=False)
    free = free_bytes(torch.device("cpu"))
    taken = pages_within(model, EngineConfig(), 1 << 30, routes=False) * page_bytes
    assert 0.25 * free < taken < 0.75 * free, "other processes take and give memory meanwhile, but not so much"
    assert pages_within(model, EngineConfig(max_batch=2), 100, routes=False) == 2 * 2 * 7, "no more than is of use"


def test_ends_come_from_the_generation_settings(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7, 900]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert generation_ends(tmp_path, 100) == (2, 3, 7)


def test_dtype(run_folder: Path) -> None:
    opened = open_engine(run_folder, EngineConfig(**SIZES), dtype=torch.bfloat16, library=TORCH)
    assert opened.engine.model.embedding.weight.dtype == torch.bfloat16
    assert len(opened.engine.generate([request("x", (5, 6, 7))])[0].tokens) == 10
