"""Continued training of a network that was not trained elastic: what it starts from, what moves, and that it can be stopped."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pydantic import ValidationError
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.nn.functional import kl_div

from stretto.base.errors import UserError
from stretto.base.track import read_metrics
from stretto.data.loader import eval_batches
from stretto.data.shards import TokenSet
from stretto.evals.loss import EvalBatch
from stretto.evals.order import rank_experts, rank_layers
from stretto.model.checkpoint import write_checkpoint
from stretto.model.elastic import extract
from stretto.model.parallel import stored
from stretto.model.spec import LoraConfig, ModelConfig, SubnetChoice, extracted_config
from stretto.model.transformer import Transformer
from stretto.model.weight_files import TensorFiles
from stretto.train.loop import Trained
from stretto.train.recipe import (
    ElasticizeRecipe,
    HealRecipe,
    Recipe,
    SftRecipe,
    check_routers,
    default_anchors,
    fixes_routers,
    with_branches,
)
from stretto.train.snapshot import read_meta
from tests.train.conftest import ELASTICIZE, SHAPE, network

Same = Callable[[Trained, Trained], None]
DENSE = {
    **SHAPE, "num_experts": 1, "top_k": 1, "num_shared_experts": 0, "dense_layers": range(6), "dense_intermediate_size": 32,
}  # fmt: skip


@pytest.mark.slow
def test_it_begins_as_its_parent_whose_distribution_costs_nothing(
    elasticize_in: Callable[..., Trained], tmp_path: Path
) -> None:
    """All weight on a teacher that is the network itself: not a bit moves but the balance biases, which have no rate."""
    frozen = {"elastic__anchor_share": 0.0, "elastic__depth_share": 0.0, "elastic__top_k_share": 0.0}
    frozen |= {"elastic__width_share": 0.0, "elastic__balance_rate": 0.0, "elastic__balance_final_rate": 0.0}
    model = network()
    same = elasticize_in("same", model, kd_final_weight=1.0, optim__weight_decay=0.0, **frozen)
    assert all(row["optim/grad_norm"] == 0.0 for row in read_metrics(tmp_path / "same"))
    state, before = same.model.state_dict(), model.state_dict()
    assert same.model.config.widths == (8, 4, 2), "the default anchors keep half and a third of 8 experts"
    for name, tensor in before.items():
        rows = [0, 0, 0] if name.endswith("bias_WE") else ...
        assert torch.equal(state[name], tensor[rows]), name
    moved = elasticize_in("moved", model, **frozen)  # the text pulls from the second step on
    assert not torch.equal(moved.model.state_dict()["embedding.weight"], before["embedding.weight"])


@pytest.mark.slow
def test_one_rank_reads_its_checkpoint_once(
    elasticize_in: Callable[..., Trained], assert_same: Same, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher is copied from the network in memory; named as a teacher, the same checkpoint is read a second time."""
    model, folder = network(), tmp_path / "checkpoint"
    write_checkpoint(folder, model, model.config)
    num_bytes, raw = Counter[str](), TensorFiles.raw

    def counted(self: TensorFiles, *arguments: Any) -> torch.Tensor:
        tensor = raw(self, *arguments)
        num_bytes[name] += tensor.nbytes
        return tensor

    monkeypatch.setattr(TensorFiles, "raw", counted)
    trained = {}
    for name, teacher in (("own", None), ("named", stored(folder))):
        trained[name] = elasticize_in(name, stored(folder), teacher)
    assert_same(trained["own"], trained["named"])
    assert num_bytes["named"] == 2 * num_bytes["own"] > 0


@pytest.mark.slow
def test_subnets_come_closer_to_a_frozen_parent(elasticize_in: Callable[..., Trained]) -> None:
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = elasticize_in("run", model, train__steps=40, optim__lr=3e-4, kd_final_weight=1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {"corner", "half", "full"} <= set(trained.tokens_by_kind)
    ids_BT = torch.randint(model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0))
    corner = default_anchors(model.config)["corner"]
    with torch.no_grad():
        parents = model.logits(ids_BT).log_softmax(-1)
        start, end = (
            float(kl_div(each.logits(ids_BT, corner.of(each.config)).log_softmax(-1), parents, log_target=True))
            for each in (model, trained.model)
        )
    assert end < 0.9 * start, (start, end)
    receipt = trained.meter.receipt()
    alone = elasticize_in("alone", model, train__steps=40, kd_weight=0.0, kd_final_weight=0.0).meter.receipt()
    assert receipt.flops > alone.flops and receipt.tokens == alone.tokens, "the teacher's passes are paid for"


def test_axes_join_one_after_another() -> None:
    recipe = ElasticizeRecipe.model_validate(ELASTICIZE)
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
    weighted = recipe.replace(elastic=recipe.elastic.replace(anchor_weights={"narrow": 3.0}))
    assert [weighted.mixture_at(config, step).anchor_weights for step in (1, 2)] == [{}, {"narrow": 3.0}]
    with pytest.raises(ValidationError, match="ernie reduces every axis from its start"):
        recipe.replace(elastic=recipe.elastic.replace(sampler="ernie"))


def test_where_nothing_names_sizes_there_are_some() -> None:
    config = ModelConfig(**SHAPE)
    recipe = ElasticizeRecipe.model_validate(ELASTICIZE)
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
    grouped = ModelConfig(
        **SHAPE | {"expert_groups": 2, "top_groups": 1, "num_experts": 16, "widths": (16,), "top_k": 6}
    )
    assert default_anchors(grouped)["corner"] == SubnetChoice(layers=4, experts=6, top_k=2)
    weighted = recipe.replace(elastic=recipe.elastic.replace(anchor_weights={"corner": 3.0}))
    with pytest.raises(UserError, match=r"anchor_weights\.corner: no anchor has this name; name one of tiny"):
        weighted.for_network(config, presets)
    dense = ModelConfig(**DENSE)
    assert default_anchors(dense) == {"half": SubnetChoice(layers=5), "corner": SubnetChoice(layers=4)}
    with pytest.raises(UserError, match=r"anchors\.mine: the network has no experts"):
        named.for_network(dense, {})
    with pytest.raises(UserError, match="it has no smaller size"):
        recipe.for_network(dense.replace(num_layers=4, dense_layers=range(4)), {})


def test_routers_that_only_rank_are_left_as_they_are() -> None:
    recipe = ElasticizeRecipe.model_validate(ELASTICIZE)
    presets = {"half": SubnetChoice(layers=5)}
    config = ModelConfig(**SHAPE)
    ranking = config.replace(normalize_gates=False, routed_scaling=2.0)
    whole = {"top_k": config.num_experts}
    cases = (
        (config, False), (config.replace(**whole), False), (ModelConfig(**DENSE), False), (ranking, True),
        (ranking.replace(**whole), True), (extracted_config(ranking, ranking.subnet(5, 4, 2)), True),
    )  # fmt: skip
    for shape, is_still in cases:
        assert fixes_routers(shape, None) is is_still
        complete = recipe.for_network(shape, presets)
        assert (complete.elastic.balance_rate == complete.elastic.balance_final_rate == 0.0) is is_still
        assert complete.optim.router_lr_factor == (0.0 if is_still else 1.0)
        tuned = SftRecipe(optim=recipe.optim, train=recipe.train).for_network(shape, presets)
        assert (tuned.optim, tuned.balance_rate == 0.0) == (complete.optim, is_still)
    healed = HealRecipe(optim=recipe.optim, train=recipe.train).with_fixed_routers()
    further = Recipe(model=ranking, optim=recipe.optim, train=recipe.train).with_fixed_routers()
    for fixed, rate in ((healed, healed.balance_rate), (further, further.elastic.balance_rate)):
        assert (fixed.optim.router_lr_factor, rate) == (0.0, 0.0)
    meant = recipe.replace(optim=recipe.optim.replace(router_lr_factor=1e-5))
    assert meant.for_network(ranking, {}, True).optim.router_lr_factor == 1e-5


def test_a_resumed_run_leaves_routers_as_it_began() -> None:
    """Also one that an older version began, whose rule was another one."""
    recipe = ElasticizeRecipe.model_validate(ELASTICIZE)
    config = ModelConfig(**SHAPE)
    split = config.replace(normalize_gates=False, routed_scaling=2.0)
    for model in (config, split):
        fixed = recipe.for_network(model, {}, True)
        assert fixes_routers(model, fixed), "of a network with all experts for each token, or of a split one"
        assert not fixes_routers(model, recipe), "trained routers"
        slow = recipe.optim.replace(router_lr_factor=1e-5)
        assert not fixes_routers(model, recipe.replace(optim=slow)), "its balance biases moved"
        healed = HealRecipe(optim=recipe.optim, train=recipe.train)
        assert fixes_routers(model, healed.with_fixed_routers()) and not fixes_routers(model, healed)
        adapted = SftRecipe(optim=recipe.optim, train=recipe.train, lora=LoraConfig()).for_network(model, {}, False)
        assert not fixes_routers(model, adapted)


def test_training_fixed_routers_is_refused() -> None:
    recipe = ElasticizeRecipe.model_validate(ELASTICIZE).replace(trainable="routers")
    with pytest.raises(
        UserError, match=r"trainable: routers, .* stay fixed at the default rate; set optim\.router_lr_fac"
    ):
        check_routers(recipe)
    check_routers(recipe.replace(optim=recipe.optim.replace(router_lr_factor=1e-5)))
    adapted = SftRecipe(optim=recipe.optim, train=recipe.train, lora=LoraConfig(targets=("experts", "router")))
    with pytest.raises(UserError, match=r"lora\.targets: router, and .* stay fixed; leave it out"):
        check_routers(adapted)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="all"),
        pytest.param({"trainable": "routers"}, id="routers", marks=pytest.mark.slow),
        pytest.param({"teacher_dtype": "bfloat16"}, id="teacher in bf16", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_an_uninterrupted_one(
    changes: dict[str, Any], elasticize_in: Callable[..., Trained], tmp_path: Path, assert_same: Same
) -> None:
    whole = elasticize_in("whole", **changes)
    elasticize_in("stopped", **changes)
    shutil.rmtree(tmp_path / "stopped" / "snapshots" / "step-0000008")
    resumed = elasticize_in("stopped", resume=True, **changes)
    assert_same(whole, resumed)


@pytest.mark.slow
@pytest.mark.parametrize(("done", "starts"), [(8, 8), pytest.param(6, 6, marks=pytest.mark.slow), (3, 12)])
def test_more_steps_do_not_start_the_sizes_again(done: int, starts: int, run: Any) -> None:
    """A run of 8 steps ranks experts after step 4 and trains smaller sizes from then on. After ``done`` steps it gets 24."""
    asked: list[int] = []

    def measure(model: Transformer) -> tuple[tuple[int, ...], ...]:
        asked.append(1)
        return (tuple(range(8)),) * 5

    changes = {"elastic__starts_at": 0.5, "elastic__rank_experts_at": (0.5,), "train__micro_batches": 4}
    changes |= {"train__snapshot_every": 1, "train__keep_snapshots": 99, "elastic__width_share": 0.0}
    run(rank_experts=measure, train__steps=8, **changes)
    snapshots = run.folder / "snapshots"
    for step in range(done + 1, 9):
        shutil.rmtree(snapshots / f"step-{step:07d}")
    if done < 4:
        asked.clear()
    run(rank_experts=measure, resume=True, train__steps=24, **changes)
    assert asked == [1]

    def smaller(step: int) -> int:
        kinds = read_meta(snapshots / f"step-{step:07d}").tokens_by_kind
        return sum(kinds.values()) - kinds["full"]

    assert smaller(starts) == smaller(done) and smaller(starts + 2) > smaller(starts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "steps", "done", "changed_to"),
    [
        pytest.param(0.5, 8, 3, 5, id="fewer steps: its step lies behind"),
        pytest.param(0.25, 8, 1, 5, id="fewer steps: it is due at once"),
        pytest.param(0.3, 8, 2, 24, id="more steps: it was measured at a rounded step"),
    ],
)
def test_other_steps_measure_each_order_once(share: float, steps: int, done: int, changed_to: int, run: Any) -> None:
    asked: list[int] = []

    def measure(model: Transformer) -> tuple[tuple[int, ...], ...]:
        asked.append(1)
        return (tuple(range(8)),) * 5

    changes = {"elastic__rank_experts_at": (share,), "train__snapshot_every": 1, "train__keep_snapshots": 99}
    run(rank_experts=measure, train__steps=steps, **changes)
    snapshots = run.folder / "snapshots"
    for step in range(done + 1, steps + 1):
        shutil.rmtree(snapshots / f"step-{step:07d}")
    if done < round(share * steps):
        asked.clear()
    run(rank_experts=measure, resume=True, train__steps=changed_to, **changes)
    assert asked == [1]
    shutil.rmtree(snapshots / f"step-{changed_to:07d}")
    run(rank_experts=measure, resume=True, train__steps=changed_to, **changes)
    assert asked == [1], "the changed run is resumed once more"


@pytest.mark.slow
def test_more_steps_do_not_repeat_what_is_past(elasticize_in: Callable[..., Trained], tmp_path: Path) -> None:
    """Random top-k begins after half of the steps; the weight of the teacher falls until the last one."""
    changes = {"elastic__top_k_share": 0.6, "elastic__anchor_share": 0.2, "train__keep_snapshots": 9}
    elasticize_in("run", **changes)
    weights: list[float] = []

    def recorded(recipe: ElasticizeRecipe, step: int) -> float:
        weights.append(weight_at(recipe, step))
        return weights[-1]

    weight_at = ElasticizeRecipe.ce_weight_at
    with mock.patch.object(ElasticizeRecipe, "ce_weight_at", recorded):
        elasticize_in("run", resume=True, train__steps=24, **changes)
    by_step = [read_meta(tmp_path / "run" / "snapshots" / f"step-{step:07d}").tokens_by_kind for step in (8, 12)]
    assert by_step[1]["top_k"] > by_step[0]["top_k"]
    assert weights == [0.25] * 16


@pytest.mark.slow
def test_only_routers_norms_and_biases_move(
    elasticize_in: Callable[..., Trained], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = network(attention_bias=True)
    trained = elasticize_in("run", model, trainable="routers")
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


def test_a_dense_network_gets_elastic_depth(elasticize_in: Callable[..., Trained], tmp_path: Path) -> None:
    model = network(**DENSE)
    trained = elasticize_in("run", model)
    assert {"half", "corner", "full"} <= set(trained.tokens_by_kind)
    order = trained.model.config.layer_order
    assert order is not None and set(order[:4]) == {0, 1, 4, 5}, "measured, as the network brought none"
    assert read_meta(tmp_path / "run" / "snapshots" / "step-0000008").layer_order == order
    assert extract(trained.model, trained.model.config.subnet(4)).config.num_layers == 4


def test_orders_that_the_network_brings_are_kept(elasticize_in: Callable[..., Trained]) -> None:
    layers, experts = (0, 1, 4, 5, 3, 2), tuple((7, 6, 5, 4, 3, 2, 1, 0) for _ in range(6))
    trained = elasticize_in("run", network(layer_order=layers, expert_order=experts), train__steps=2)
    assert (trained.model.config.layer_order, trained.model.config.expert_order) == (layers, experts)


@pytest.mark.slow
def test_orders_that_it_does_not_bring_are_measured(
    elasticize_in: Callable[..., Trained], tmp_path: Path, tokens: TokenSet
) -> None:
    """On held-out text; a Subnet's experts are then the first of that order, also after a resume."""
    model = network()
    batches = [EvalBatch.of(batch, "cpu") for batch in eval_batches(tokens, 4, 48, 8)]
    expected = rank_experts(model, batches).orders, rank_layers(model, batches).order
    config = elasticize_in("run", model, train__steps=2).model.config
    assert (config.expert_order, config.layer_order) == expected
    assert config.expert_order != model.config.expert_orders
    resumed = elasticize_in("run", model, resume=True, train__steps=3).model
    assert (resumed.config.expert_order, resumed.config.layer_order) == expected
    ranks = [block.mlp.rank_E.argsort().tolist() for block in resumed.blocks]
    assert ranks == [list(order) for order in expected[0]]


@pytest.mark.slow
def test_another_teacher_teaches(elasticize_in: Callable[..., Trained]) -> None:
    model = network()
    itself, other = elasticize_in("itself", model), elasticize_in("other", model, network(1))
    assert not torch.equal(itself.model.embedding.weight, other.model.embedding.weight)
    wider = network(2, hidden_size=48, head_dim=12, num_layers=5)  # only the vocabulary must be the same
    assert elasticize_in("wider", model, wider).meter.receipt().flops > other.meter.receipt().flops
