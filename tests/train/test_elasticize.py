"""Continued training of a network that was not trained elastic: what it starts from, what moves, and that it can be stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from stretto.base.errors import UserError
from stretto.base.track import Tracker, read_metrics
from stretto.data.loader import Loader, eval_batches
from stretto.data.shards import TokenSet
from stretto.evals.loss import EvalBatch
from stretto.evals.order import rank_experts, rank_layers
from stretto.model.elastic import extract
from stretto.model.parallel import join
from stretto.model.spec import ModelConfig, SubnetChoice
from stretto.model.transformer import Transformer, build
from stretto.train.loop import Job, Trained, elasticize
from stretto.train.recipe import ElasticizeRecipe, default_anchors, with_branches
from stretto.train.snapshot import read_meta

Same = Callable[[Trained, Trained], None]
SHAPE: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 32, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "num_experts": 8, "top_k": 3, "expert_intermediate_size": 16, "num_shared_experts": 1, "tie_embeddings": True,
}  # fmt: skip
DENSE = {
    **SHAPE, "num_experts": 1, "top_k": 1, "num_shared_experts": 0, "dense_layers": range(6), "dense_intermediate_size": 32,
}  # fmt: skip
TREE: dict[str, Any] = {
    "elastic": {"anchor_share": 0.5, "depth_share": 0.1, "top_k_share": 0.1, "width_share": 0.25},
    "optim": {"lr": 3e-3, "warmup_steps": 2},
    "train": {
        "steps": 8, "rows": 4, "seq_len": 48, "micro_batches": 2, "eval_every": 4, "snapshot_every": 3, "log_every": 1,
        "dtype": "float32",
    },
    "experts_from": 0.25, "top_k_from": 0.5,
}  # fmt: skip


def parent(seed: int = 0, **changes: Any) -> Transformer:
    """A network with a balance bias, as a trained one has."""
    model = build(ModelConfig(**{**SHAPE, **changes}), seed)
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("bias_WE"):
            buffer.normal_(0, 0.01, generator=generator)
    return model


@pytest.fixture
def train_in(tmp_path: Path, tokens: TokenSet) -> Callable[..., Trained]:
    """Elasticises a copy of a network in the folder of that name; ``changes`` are of the recipe, dotted with ``__``."""

    def train(
        name: str,
        model: Transformer | None = None,
        teacher: Transformer | None = None,
        resume: bool = False,
        **changes: Any,
    ) -> Trained:
        model = model or parent()
        tree: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in TREE.items()}
        for key, value in changes.items():
            *table, field = key.split("__")
            (tree[table[0]] if table else tree)[field] = value
        recipe = ElasticizeRecipe.model_validate(tree).for_network(model.config, {})
        job = Job(
            tmp_path / name,
            Loader([tokens], [1.0], recipe.train.micro_rows, recipe.train.seq_len, 1),
            [EvalBatch.of(batch, "cpu") for batch in eval_batches(tokens, 4, 48, 2)],
            tokens.manifest.data_hash,
            join("cpu"),
            tracker=lambda step: Tracker(tmp_path / name, first_step=step and step + 1, tensorboard=False),
            resume=resume,
        )
        return elasticize(recipe, job, lambda: extract_all(model), (lambda: teacher) if teacher is not None else None)

    return train


def extract_all(model: Transformer) -> Transformer:
    """A copy."""
    copy = build(model.config, 0)
    copy.load_state_dict(model.state_dict())
    return copy


def test_it_begins_as_its_parent_whose_distribution_costs_nothing(
    train_in: Callable[..., Trained], tmp_path: Path
) -> None:
    """All weight on a teacher that is the network itself: not a bit moves but the balance biases, which have no rate."""
    frozen = {"elastic__anchor_share": 0.0, "elastic__depth_share": 0.0, "elastic__top_k_share": 0.0}
    frozen |= {"elastic__width_share": 0.0, "elastic__balance_rate": 0.0, "elastic__balance_final_rate": 0.0}
    model = parent()
    same = train_in("same", model, kd_final_weight=1.0, optim__weight_decay=0.0, **frozen)
    assert all(row["optim/grad_norm"] == 0.0 for row in read_metrics(tmp_path / "same"))
    state, before = same.model.state_dict(), model.state_dict()
    assert same.model.config.widths == (8, 4, 2), "the default anchors keep half and a third of 8 experts"
    for name, tensor in before.items():
        rows = [0, 0, 0] if name.endswith("bias_WE") else ...
        assert torch.equal(state[name], tensor[rows]), name
    moved = train_in("moved", model, **frozen)  # the text pulls from the second step on
    assert not torch.equal(moved.model.state_dict()["embedding.weight"], before["embedding.weight"])


def test_subnets_come_closer_to_a_frozen_parent(train_in: Callable[..., Trained], tmp_path: Path) -> None:
    model = parent()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = train_in("run", model, train__steps=16, kd_final_weight=1.0)
    losses = [row for row in read_metrics(tmp_path / "run") if "loss/corner" in row]
    gaps = [row["loss/corner"] - row["loss/full"] for row in losses]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {"corner", "half", "full"} <= set(trained.tokens_by_kind)
    assert abs(gaps[-1]) < abs(gaps[0]), gaps
    receipt = trained.meter.receipt()
    alone = train_in("alone", model, train__steps=16, kd_weight=0.0, kd_final_weight=0.0).meter.receipt()
    assert receipt.flops > alone.flops and receipt.tokens == alone.tokens, "the teacher's passes are paid for"


def test_axes_join_one_after_another() -> None:
    recipe = ElasticizeRecipe.model_validate(TREE)
    config = ModelConfig(**SHAPE)
    anchors = {"corner": SubnetChoice(layers=4, experts=2, top_k=1), "narrow": SubnetChoice(experts=4)}
    recipe = recipe.replace(elastic=recipe.elastic.replace(anchors=anchors)).for_network(config, {})
    stages = [recipe.mixture_at(config, step) for step in (1, 2, 4)]
    assert [stage.anchors.get("corner") for stage in stages] == [
        SubnetChoice(layers=4), SubnetChoice(layers=4, experts=2, top_k=2), anchors["corner"],
    ]  # fmt: skip
    assert ["narrow" in stage.anchors for stage in stages] == [False, True, True]
    assert [stage.width_share for stage in stages] == [0, 0.25, 0.25]
    assert [stage.top_k_share for stage in stages] == [0, 0, 0.1]
    at_once = recipe.replace(experts_from=0.0, top_k_from=0.0)
    assert at_once.mixture_at(config, 0) == at_once.elastic
    assert [recipe.ce_weight_at(step) for step in (0, 7)] == pytest.approx([0, 0.25])
    for stage in stages:
        for choice in stage.anchors.values():
            choice.of(config)


def test_where_nothing_names_sizes_there_are_some() -> None:
    config = ModelConfig(**SHAPE)
    recipe = ElasticizeRecipe.model_validate(TREE)
    anchors = default_anchors(config)
    assert anchors == {
        "half": SubnetChoice(layers=5, experts=4, top_k=1),
        "corner": SubnetChoice(layers=4, experts=2, top_k=1),
    }
    complete = recipe.for_network(config, {})
    assert complete.elastic.anchors == anchors and complete.elastic.min_depth == 4
    presets = {"tiny": SubnetChoice(layers=4)}
    assert recipe.for_network(config, presets).elastic.anchors == presets
    named = recipe.replace(elastic=recipe.elastic.replace(anchors={"mine": SubnetChoice(experts=4)}))
    assert list(named.for_network(config, presets).elastic.anchors) == ["mine"], "the recipe's come first"
    assert with_branches(config, complete.elastic).widths == (8, 4, 2)
    dense = ModelConfig(**DENSE)
    assert default_anchors(dense) == {"half": SubnetChoice(layers=5), "corner": SubnetChoice(layers=4)}
    with pytest.raises(UserError, match=r"anchors\.mine: the network has no experts"):
        named.for_network(dense, {})
    with pytest.raises(UserError, match=r"no smaller size of it"):
        recipe.for_network(dense.replace(num_layers=4, dense_layers=range(4)), {})


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="all"),
        pytest.param({"trainable": "routers"}, id="routers", marks=pytest.mark.slow),
        pytest.param({"teacher_dtype": "bfloat16"}, id="teacher in bf16"),
    ],
)
def test_a_resumed_run_is_an_uninterrupted_one(
    changes: dict[str, Any], train_in: Callable[..., Trained], tmp_path: Path, assert_same: Same
) -> None:
    whole = train_in("whole", **changes)
    train_in("stopped", **changes)
    shutil.rmtree(tmp_path / "stopped" / "snapshots" / "step-0000008")
    resumed = train_in("stopped", resume=True, **changes)
    assert_same(whole, resumed)


def test_only_routers_norms_and_biases_move(
    train_in: Callable[..., Trained], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = parent(attention_bias=True)
    trained = train_in("run", model, trainable="routers")
    before, moved = model.state_dict(), set()
    for name, tensor in trained.model.state_dict().items():
        old = before[name]
        if not torch.equal(tensor[: len(old)] if name.endswith("bias_WE") else tensor, old):
            moved.add(name.removeprefix("blocks.").split(".", 1)[-1] if name.startswith("blocks.") else name)
    small = {"attention_norm.weight", "mlp_norm.weight", "attention.qkv.bias", "mlp.gate", "mlp.bias_WE", "norm.weight"}
    assert moved == small
    kept = sum(each.numel() for name, each in trained.model.named_parameters() if each.requires_grad)
    stored = FileSystemReader(tmp_path / "run" / "snapshots" / "step-0000008").read_metadata().state_dict_metadata
    with_moments = {key.removeprefix("optim.").rsplit(".", 1)[0] for key in stored if key.startswith("optim.")}
    assert with_moments == {name for name, each in trained.model.named_parameters() if each.requires_grad}
    num_all = sum(each.numel() for each in trained.model.parameters())
    assert f"trainable routers: {kept:,} of {num_all:,} parameters" in capsys.readouterr().out.replace("\n", " ")


def test_a_dense_network_gets_elastic_depth(train_in: Callable[..., Trained], tmp_path: Path) -> None:
    model = parent(**DENSE)
    trained = train_in("run", model)
    assert {"half", "corner", "full"} <= set(trained.tokens_by_kind)
    order = trained.model.config.layer_order
    assert order is not None and set(order[:4]) == {0, 1, 4, 5}, "measured, as the network brought none"
    assert read_meta(tmp_path / "run" / "snapshots" / "step-0000008").layer_order == order
    assert extract(trained.model, trained.model.config.subnet(4)).config.num_layers == 4


def test_orders_that_the_network_brings_are_kept(train_in: Callable[..., Trained]) -> None:
    layers, experts = (0, 1, 4, 5, 3, 2), tuple((7, 6, 5, 4, 3, 2, 1, 0) for _ in range(6))
    trained = train_in("run", parent(layer_order=layers, expert_order=experts), train__steps=2)
    assert (trained.model.config.layer_order, trained.model.config.expert_order) == (layers, experts)


def test_orders_that_it_does_not_bring_are_measured(
    train_in: Callable[..., Trained], tmp_path: Path, tokens: TokenSet
) -> None:
    """By saliency on held-out text; a Subnet's experts are then the first of that order, also after a resume."""
    model = parent()
    batches = [EvalBatch.of(batch, "cpu") for batch in eval_batches(tokens, 4, 48, 2)]
    expected = rank_experts(model, batches), rank_layers(model, batches).order
    config = train_in("run", model, train__steps=2).model.config
    assert (config.expert_order, config.layer_order) == expected
    assert config.expert_order != model.config.expert_orders
    resumed = train_in("run", model, resume=True, train__steps=3).model
    assert (resumed.config.expert_order, resumed.config.layer_order) == expected
    ranks = [block.mlp.rank_E.argsort().tolist() for block in resumed.blocks]
    assert ranks == [list(order) for order in expected[0]]


@pytest.mark.slow
def test_another_teacher_teaches(train_in: Callable[..., Trained]) -> None:
    model = parent()
    itself, other = train_in("itself", model), train_in("other", model, parent(1))
    assert not torch.equal(itself.model.embedding.weight, other.model.embedding.weight)
    wider = parent(2, hidden_size=48, head_dim=12, num_layers=5)  # only the vocabulary must be the same
    assert train_in("wider", model, wider).meter.receipt().flops > other.meter.receipt().flops
