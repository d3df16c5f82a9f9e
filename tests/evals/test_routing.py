from __future__ import annotations

import pytest
import torch

from stretto.evals.routing import routing
from stretto.model.transformer import MoeLayer
from tests.ops.references import experts_reference


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"router": "softmax"},
        {"router": "softmax", "normalize_gates": False, "selection_bias": False},
        {"num_experts": 12, "widths": (12, 6), "expert_groups": 3, "top_groups": 2, "routed_scaling": 2.5},
    ],
)
@torch.no_grad()
def test_load_and_saliency_equal_a_loop_over_experts(make_model, batches, changes):
    model = make_model(**changes)
    layer, config = model.blocks[2].mlp, model.config
    layer.bias_WE.mul_(3.0)  # so that it decides
    seen = []
    handle = layer.register_forward_pre_hook(lambda module, arguments: seen.append(arguments))
    report = next(one for one in routing(model, config.full(), batches) if one.row == 2)
    handle.remove()
    load, num, weight = ([0] * config.num_experts for _ in range(3))
    for batch, arguments in zip(batches, seen, strict=True):
        x_ND, bias_WE = arguments[0].flatten(0, 1), layer.bias_WE.clone()
        chosen_NK = layer.route(*arguments)[0].chosen_NK
        layer.bias_WE.zero_()
        free_NK = layer.route(*arguments)[0].chosen_NK
        layer.bias_WE.copy_(bias_WE)
        gates_NE = (x_ND @ layer.gate.T).softmax(-1)
        if config.normalize_gates:
            gates_NE = gates_NE / gates_NE.gather(1, free_NK).sum(-1, keepdim=True)
        real_N = batch.ctx.documents_BT.flatten() >= 0
        for expert in range(config.num_experts):
            is_its_N = (chosen_NK == expert).any(1) & real_N
            token = (is_its_N & (free_NK == expert).any(1)).nonzero().squeeze(1)
            alone = torch.full((len(token), 1), expert)
            y = experts_reference(x_ND[token], alone, torch.ones(len(token), 1), layer.gate_up, layer.down)
            load[expert] += int(is_its_N.sum())
            num[expert] += len(token)
            weight[expert] += float((gates_NE[token, expert] * y.norm(dim=-1)).sum())
    assert report.load == tuple(load)
    assert (sum(num) < sum(load)) == config.selection_bias
    assert report.saliency == pytest.approx([w / max(n, 1) for w, n in zip(weight, num, strict=True)], rel=1e-4)


def test_every_real_token_is_counted_top_k_times(make_model, batches):
    model = make_model()
    num_real = sum(int((batch.ctx.documents_BT >= 0).sum()) for batch in batches)
    for layer in routing(model, model.config.full(), batches):
        assert sum(layer.load) == num_real * 3


def test_a_subnet_reports_its_kept_layers_and_experts_only(make_model, batches):
    model = make_model()
    subnet = model.config.subnet(4, 3, 2)
    layers = routing(model, subnet, batches)
    assert [layer.row for layer in layers] == list(subnet.layers)
    kept = set(model.config.expert_orders[0][:3])
    for layer in layers:
        assert {expert for expert, load in enumerate(layer.load) if load} <= kept


def test_dense_layers_have_no_row(make_model, batches):
    model = make_model(dense_layers=(0,), dense_intermediate_size=16)
    assert [layer.row for layer in routing(model, model.config.full(), batches)] == [0, 1, 2, 3, 4]


def test_an_expert_that_writes_nothing_is_not_salient(make_model, batches):
    model = make_model()
    model.blocks[3].mlp.down.data[4] = 0.0
    saliency = routing(model, model.config.full(), batches)[3].saliency
    assert saliency[4] == 0.0 and min(saliency[:4]) > 0


def test_hooks_are_gone_afterwards(make_model, batches):
    model = make_model()
    routing(model, model.config.full(), batches)
    assert all(not m._forward_pre_hooks for m in model.modules() if isinstance(m, MoeLayer))
