"""A tiny data set, and a run on it that can be stopped and resumed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from stretto.base.track import Tracker
from stretto.data.loader import Loader, eval_batches
from stretto.data.shards import TokenSet, tokenise
from stretto.data.sources import Document
from stretto.evals.loss import EvalBatch
from stretto.model.parallel import Origin, Ranks, in_memory, join
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Transformer, build
from stretto.train import loop
from stretto.train.loop import Job, Trained
from stretto.train.recipe import ElasticizeRecipe, Recipe
from stretto.train.stages import elasticize, pretrain

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


class Bytes:
    """The smallest real tokenizer: a token a byte."""

    vocab_size = 257
    eos_id = 256

    def fingerprint(self) -> str:
        return "bytes"

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]


@pytest.fixture(scope="session")
def make_tokens(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], TokenSet]:
    """A data set by its seed: short documents of a few words that a small network soon learns to spell."""

    def make(seed: int) -> TokenSet:
        rng = random.Random(seed)
        documents = [Document(" ".join(rng.choices(WORDS, k=rng.randint(2, 30)))) for _ in range(300)]
        folder = tmp_path_factory.mktemp("tokens")
        tokenise({"train": documents}, Bytes(), folder, processes=1)
        return TokenSet(folder)

    return make


@pytest.fixture(scope="session")
def tokens(make_tokens: Callable[[int], TokenSet]) -> TokenSet:
    return make_tokens(0)


RECIPE: dict[str, Any] = {
    "model": {
        "vocab_size": 257, "hidden_size": 32, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "num_experts": 8, "top_k": 3, "expert_intermediate_size": 16, "num_shared_experts": 1, "qk_norm": True,
        "tie_embeddings": True, "dense_layers": (0,), "dense_intermediate_size": 32,
    },
    "elastic": {
        "sampler": "anchored", "anchors": {"corner": {"layers": 4, "experts": 4, "top_k": 2}}, "anchor_share": 0.25,
        "depth_share": 0.2, "top_k_share": 0.2, "width_share": 0.25,
    },
    "optim": {"lr": 5e-3, "warmup_steps": 2},
    "train": {
        "steps": 12, "rows": 4, "seq_len": 48, "micro_batches": 2, "eval_every": 3, "snapshot_every": 4,
        "log_every": 1, "dtype": "float32",
    },
}  # fmt: skip


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``tree`` with dotted ``changes``: ``{"train.steps": 3}``."""
    copy = {table: dict(values) for table, values in tree.items()}
    for name, value in changes.items():
        table, field = name.split(".")
        copy[table][field] = value
    return copy


@dataclass
class Run:
    """One run folder; every call trains in it, from the start or from its newest snapshot."""

    folder: Path
    tokens: TokenSet

    def __call__(
        self,
        *,
        resume: bool = False,
        observe: Callable[[Transformer, int], Mapping[str, float]] = lambda model, step: {},
        rank_layers: Callable[[Transformer], tuple[int, ...]] | None = None,
        rank_experts: Callable[[Transformer], tuple[tuple[int, ...], ...]] | None = None,
        data: TokenSet | None = None,
        log: bool = False,
        **changes: Any,
    ) -> Trained:
        """``observe`` (of the network and the steps done), ``rank_layers`` and ``rank_experts`` stand in for the measurements of a run; a ranking tells the
        watchdog that it goes on, since it makes no forward pass of the whole network."""
        recipe = self.recipe(**changes)
        data = data or self.tokens
        train = recipe.train
        loader = Loader([data], [1.0], train.micro_rows, train.seq_len, train.seed)

        def losses(model: Transformer, *_: object) -> Mapping[str, float]:
            return observe(model, loader.state()["position"] // train.rows)

        def ranking(model: Transformer, _: object, goes_on: Callable[[int], None], ranks: Ranks) -> SimpleNamespace:
            assert rank_layers is not None
            goes_on(1)
            return SimpleNamespace(order=rank_layers(model), flops=0)

        def ranking_experts(
            model: Transformer, _: object, goes_on: Callable[[int], None], ranks: Ranks
        ) -> SimpleNamespace:
            assert rank_experts is not None
            goes_on(1)
            return SimpleNamespace(orders=rank_experts(model), flops=0)

        def tracker(step: int) -> Tracker:
            return Tracker(self.folder, first_step=step and step + 1, tensorboard=False)

        with mock.patch.multiple(loop, held_out_losses=losses, rank_layers=ranking, rank_experts=ranking_experts):
            data_hash, held_out = data.manifest.data_hash, [mock.sentinel.held_out]
            return pretrain(
                recipe,
                Job(self.folder, loader, held_out, data_hash, join("cpu"), tracker if log else None, resume),
            )

    @staticmethod
    def recipe(**changes: Any) -> Recipe:
        return Recipe.model_validate(
            merged(RECIPE, {name.replace("__", "."): value for name, value in changes.items()})
        )

    def steps(self) -> list[int]:
        """Steps of the snapshots in the folder."""
        return sorted(int(path.name.removeprefix("step-")) for path in (self.folder / "snapshots").glob("step-*"))


@pytest.fixture
def make_run(tmp_path: Path, tokens: TokenSet) -> Callable[[str], Run]:
    return lambda name: Run(tmp_path / name, tokens)


@pytest.fixture
def run(make_run: Callable[[str], Run]) -> Run:
    return make_run("run")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, tokens: TokenSet) -> Trained:
    """The unchanged recipe, trained without interruption."""
    return Run(tmp_path_factory.mktemp("reference"), tokens)()


@pytest.fixture
def assert_same() -> Callable[[Trained, Trained], None]:
    """Bit for bit the same network, out of the same work."""

    def check(one: Trained, other: Trained) -> None:
        state, others = one.model.state_dict(), other.model.state_dict()
        assert state.keys() == others.keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, others[name]), name
        assert one.tokens_by_kind == other.tokens_by_kind
        assert one.model.config.layer_ranking == other.model.config.layer_ranking
        receipt, others_receipt = one.meter.receipt(), other.meter.receipt()
        assert (receipt.flops, receipt.tokens) == (others_receipt.flops, others_receipt.tokens)

    return check


SHAPE: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 32, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "num_experts": 8, "top_k": 3, "expert_intermediate_size": 16, "num_shared_experts": 1, "tie_embeddings": True,
}  # fmt: skip
ELASTICIZE: dict[str, Any] = {
    "elastic": {"anchor_share": 0.5, "depth_share": 0.1, "top_k_share": 0.1, "width_share": 0.25},
    "optim": {"lr": 3e-3, "warmup_steps": 2},
    "train": {
        "steps": 8, "rows": 4, "seq_len": 48, "micro_batches": 2, "eval_every": 4, "snapshot_every": 3, "log_every": 1,
        "dtype": "float32",
    },
    "experts_from": 0.25, "top_k_from": 0.5,
}  # fmt: skip


def network(seed: int = 0, **changes: Any) -> Transformer:
    """A network with a balance bias, as a trained one has."""
    model = build(ModelConfig(**{**SHAPE, **changes}), seed)
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("bias_WE"):
            buffer.normal_(0, 0.01, generator=generator)
    return model


@pytest.fixture
def elasticize_in(tmp_path: Path, tokens: TokenSet) -> Callable[..., Trained]:
    """Elasticises a copy of a network in the folder of that name; ``changes`` are of the recipe, dotted with ``__``."""

    def train(
        name: str,
        model: Transformer | Origin | None = None,
        teacher: Transformer | Origin | None = None,
        resume: bool = False,
        **changes: Any,
    ) -> Trained:
        model = model or network()
        tree: dict[str, Any] = {
            key: dict(value) if isinstance(value, dict) else value for key, value in ELASTICIZE.items()
        }
        for key, value in changes.items():
            *table, field = key.split("__")
            (tree[table[0]] if table else tree)[field] = value
        recipe = ElasticizeRecipe.model_validate(tree).for_network(model.config, {})
        job = Job(
            tmp_path / name,
            Loader([tokens], [1.0], recipe.train.micro_rows, recipe.train.seq_len, 1),
            [EvalBatch.of(batch, "cpu") for batch in eval_batches(tokens, 4, 48, 8)],
            tokens.manifest.data_hash,
            join("cpu"),
            tracker=lambda step: Tracker(tmp_path / name, first_step=step and step + 1, tensorboard=False),
            resume=resume,
        )
        return elasticize(recipe, job, copied(model), copied(teacher) if teacher is not None else None)

    return train


def copied(model: Transformer | Origin) -> Origin:
    """``model`` as the origin of a stage, which places a copy of it."""
    if isinstance(model, Origin):
        return model
    return Origin(model.config, lambda *place: in_memory(copy_of(model)).place(*place))


def copy_of(model: Transformer) -> Transformer:
    copy = build(model.config, 0)
    copy.load_state_dict(model.state_dict())
    return copy
