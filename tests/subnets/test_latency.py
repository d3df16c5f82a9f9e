from __future__ import annotations

import math

import pytest
import torch

from stretto.base.errors import UserError
from stretto.base.paths import write_json
from stretto.engine.runner import Runner
from stretto.subnets import latency as timing
from stretto.subnets.latency import (
    DECODE,
    LatencyTable,
    Workload,
    measure,
    read_table,
    step_seconds,
    usual_workloads,
    write_table,
)
from tests.engine.engines import LATENT, SWITCHES

PREFILL = Workload(phase="prefill", batch=2, context=8)


def planted_seconds(network, workload):
    """A machine whose layers cost 0.1 ms an expert kept and 1 ms a chosen one, 4 ms a dense layer, 7 ms for the rest."""
    config = network.config
    layers = zip(config.experts_by_layer, config.top_k_by_layer, strict=True)
    ms = 7.0 + 4.0 * len(config.dense_layers) + sum(0.1 * experts + 1.0 * k for experts, k in layers)
    return ms / 1000.0 * (2.0 if workload.phase == "prefill" else 1.0)


@pytest.fixture(autouse=True)
def small_matmul(monkeypatch):
    monkeypatch.setattr(timing, "MATMUL_SIZE", 64)


def planted_table(model, **options) -> LatencyTable:
    return measure(model, [2, 4, 6], [1, 2, 3], [DECODE, PREFILL], num_rounds=3, time_fn=planted_seconds, **options)


def test_a_network_without_room_for_a_decoding_step_is_refused(make_model):
    """It would be timed forever, because a step after the prefill never comes."""
    config = make_model().config
    with pytest.raises(UserError, match="max_positions: 2, and a measured decoding step needs 3"):
        usual_workloads(config.replace(max_positions=2))
    (decode, _) = usual_workloads(config.replace(max_positions=3))
    assert decode.context == 1


def test_a_planted_cost_is_solved_for_and_predicted(make_model):
    model = make_model()
    table = planted_table(model)
    config = model.config
    for subnet in (config.full(), config.subnet(5, 4, 2), config.subnet(5, 3, 2), config.subnet(4, 5, 3)):
        ms = 7.0 + sum(0.1 * e + k for e, k in zip(subnet.experts, subnet.top_k, strict=True))
        assert table.predict_ms(subnet, DECODE) == pytest.approx(ms)
        assert table.predict_ms(subnet, PREFILL) == pytest.approx(2 * ms)
    assert table.timings[0].fixed_ms == pytest.approx(7.0)


@pytest.mark.parametrize("dense", [(0,), (0, 2)])
def test_dense_layers_are_predicted_whether_droppable_or_not(make_model, dense):
    model = make_model(dense_layers=dense, dense_intermediate_size=16)
    table, config = planted_table(model), model.config
    for subnet in (config.full(), config.subnet(4, 2, 1), config.subnet(5, 4, 3)):
        num_dense = len(subnet.layers) - len(subnet.experts)
        ms = 7.0 + 4.0 * num_dense + sum(0.1 * e + k for e, k in zip(subnet.experts, subnet.top_k, strict=True))
        assert table.predict_ms(subnet, DECODE) == pytest.approx(ms)


def test_layers_that_differ_in_experts_and_top_k_are_measured_and_predicted(make_model):
    model = make_model(experts_per_layer=(6, 6, 4, 3, 6, 4), top_k_per_layer=(3, 3, 2, 3, 3, 2))
    table, config = planted_table(model), model.config
    assert {(3, 3), (4, 2)} <= {(cell.experts, cell.top_k) for cell in table.timings[0].cells}
    for subnet in (config.full(), config.subnet(4), config.subnet(6, 3, 2), config.subnet(5, 2, 1)):
        ms = 7.0 + sum(0.1 * e + k for e, k in zip(subnet.experts, subnet.top_k, strict=True))
        assert table.predict_ms(subnet, DECODE) == pytest.approx(ms)


def test_real_steps_of_the_engine_are_timed(make_model, monkeypatch):
    monkeypatch.setattr(timing, "TIMED_STEPS", 1)
    model = make_model()
    table = measure(model, [3], [1], [DECODE, PREFILL], num_rounds=1)
    assert all(timing.fixed_ms + sum(cell.ms for cell in timing.cells) > 0 for timing in table.timings)
    assert table.num_samples == (4 + 2 + 2) * 2  # each width and k; two shallow; two in between; both workloads


@pytest.mark.slow
def test_a_deep_network_takes_no_more_measurements_than_a_shallow_one(make_model):
    counts = {planted_table(make_model(num_layers=num)).num_samples for num in (6, 24)}
    assert len(counts) == 1


def test_sizes_that_were_not_fitted_tell_how_far_predictions_are_off(make_model):
    """A machine that takes half as long again for layers of four experts, between the two measured widths."""

    def curved(network, workload):
        has_four = 4 in network.config.experts_by_layer
        return planted_seconds(network, workload) * (1.5 if has_four else 1.0)

    exact, off = (
        measure(make_model(), [2, 6], [2, 3], num_rounds=1, time_fn=time_fn).timings[0]
        for time_fn in (planted_seconds, curved)
    )
    assert exact.held_out_error < 1e-9
    assert off.fit_error < 1e-9 and off.held_out_error > 0.3


@pytest.mark.parametrize(("round_s", "num_rounds"), [(30.0, 2), (12.0, 5), (0.1, 7)])
def test_turns_end_with_the_budget_but_not_before_the_second(make_model, monkeypatch, round_s, num_rounds):
    """By a clock that only networks move."""
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    clock, model = [0.0], make_model()

    def slow(network, workload):
        clock[0] += round_s / 3
        return planted_seconds(network, workload)

    monkeypatch.setattr(timing, "BUDGET_S", 60.0)
    assert measure(model, [6], [3], time_fn=slow).num_samples == 3 * num_rounds


def test_long_steps_are_fewer(make_model, monkeypatch):
    monkeypatch.setattr(timing, "SAMPLE_S", 0.0)
    steps = []
    forward = Runner.forward
    monkeypatch.setattr(Runner, "forward", lambda *arguments: (steps.append(1), forward(*arguments))[1])
    step_seconds(make_model(), PREFILL, library=None)
    assert len(steps) == timing.MIN_STEPS


@pytest.mark.parametrize("workload", [Workload(phase="decode", batch=3, context=20), PREFILL])
def test_an_engine_step_has_the_rows_and_the_context_of_the_workload(make_model, monkeypatch, workload):
    seen = []
    forward = Runner.forward

    def noted(runner, chunks, want_routes):
        seen.append([(chunk.start, len(chunk.tokens)) for chunk in chunks])
        return forward(runner, chunks, want_routes)

    monkeypatch.setattr(Runner, "forward", noted)
    monkeypatch.setattr(timing, "SAMPLE_S", math.inf)  # a slow machine takes no fewer steps
    step_seconds(make_model(), workload, library=None)
    prompts = [[(0, workload.context)] * workload.batch]
    steps = timing.WARM_UP_STEPS + timing.TIMED_STEPS
    if workload.phase == "prefill":
        assert seen == prompts * steps
    else:
        assert seen == prompts + [[(workload.context + at, 1)] * workload.batch for at in range(steps)]


def test_outside_the_measured_range_is_refused(make_model):
    model = make_model()
    table = measure(model, [4], [2], num_rounds=1, time_fn=planted_seconds)
    with pytest.raises(UserError, match="3 experts, top-2 lies outside the measured 4-6 experts, top-2-3"):
        table.predict_ms(model.config.subnet(experts=3, top_k=2), DECODE)
    with pytest.raises(UserError, match="prefill of 2 x 8 was not measured"):
        table.predict_ms(model.config.full(), PREFILL)


@pytest.mark.parametrize("name", [*SWITCHES, *LATENT, "all dense"])
def test_networks_of_all_families_are_timed_and_their_tables_survive_the_disk(make_model, monkeypatch, tmp_path, name):
    monkeypatch.setattr(timing, "TIMED_STEPS", 1)
    dense = {"dense_layers": tuple(range(6)), "dense_intermediate_size": 16, "expert_groups": 4, "top_groups": 2}
    model = make_model(**{"widths": (6,)} | {**SWITCHES, **LATENT, "all dense": dense}[name])  # 3 would halve no group
    table = measure(model, [4], [2], [DECODE], num_rounds=1)
    write_table(tmp_path / "latency.json", table)
    assert read_table(tmp_path / "latency.json", model) == table


def test_a_table_survives_the_disk(make_model, tmp_path):
    model = make_model()
    table = planted_table(model)
    write_table(tmp_path / "latency.json", table)
    assert read_table(tmp_path / "latency.json", model) == table
    assert [path.name for path in tmp_path.iterdir()] == ["latency.json"]


def test_another_dtype_threads_or_shape_is_refused(make_model, tmp_path):
    model = make_model()
    path = tmp_path / "latency.json"
    table = planted_table(model)
    write_table(path, table)
    with pytest.raises(UserError, match="num_layers: measured with 6, now it is 7"):
        read_table(path, make_model(num_layers=7))
    write_table(path, table.replace(machine=table.machine.replace(device="Abacus")))
    with pytest.raises(UserError, match="device: measured with Abacus"):
        read_table(path, model)
    write_table(path, table.replace(machine=table.machine.replace(dtype="bfloat16")))
    with pytest.raises(UserError, match=r"latency.json: dtype: measured with bfloat16, now it is float32"):
        read_table(path, model)


def test_a_table_holds_for_a_network_that_is_kept_in_another_dtype(make_model, tmp_path):
    write_table(tmp_path / "latency.json", planted_table(make_model().to(torch.bfloat16)))
    read_table(tmp_path / "latency.json", make_model())


def test_a_new_nested_order_keeps_the_table(make_model, tmp_path):
    write_table(tmp_path / "latency.json", planted_table(make_model()))
    read_table(tmp_path / "latency.json", make_model(layer_order=(0, 1, 4, 5, 3, 2)))


@pytest.mark.parametrize("text", ["[]", "{}", '{"machine": 3}', "{"])
def test_a_file_that_is_no_table_is_refused_in_one_line(make_model, tmp_path, text):
    path = tmp_path / "latency.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_table(path, make_model())
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_table_without_timings_is_refused(make_model, tmp_path):
    model, path = make_model(), tmp_path / "latency.json"
    write_json(path, planted_table(model).model_dump(mode="json") | {"timings": []})
    with pytest.raises(UserError, match=r"latency.json: timings: "):
        read_table(path, model)


def test_a_busy_machine_is_noticed_and_does_no_harm(make_model, monkeypatch):
    """After every third network the matmul takes ten times as long, and so did the network."""
    model = make_model()
    state = {"calls": 0}

    def busy(network, workload):
        state["calls"] += 1
        return planted_seconds(network, workload) * (10.0 if state["calls"] % 3 == 0 else 1.0)

    def calibrate(self):
        return 0.01 if state["calls"] % 3 == 0 and state["calls"] else 0.001

    monkeypatch.setattr(timing._Samples, "_calibrate", calibrate)
    table = measure(model, [2], [1], num_rounds=8, time_fn=busy)
    assert 0 < table.num_disturbed < table.num_samples and table.num_uncertain == 0
    assert table.predict_ms(model.config.full(), DECODE) == pytest.approx(7.0 + 6 * 3.6)


def test_a_network_that_was_never_timed_in_peace_is_counted(make_model, monkeypatch):
    model = make_model()
    matmul_s = iter([0.001] * 3 + [0.005] * 100)  # calm while it warms up, never again
    monkeypatch.setattr(timing._Samples, "_calibrate", lambda self: next(matmul_s))
    table = measure(model, [6], [3], num_rounds=2, time_fn=planted_seconds)
    assert table.num_disturbed == table.num_samples == 6 and table.num_uncertain == 3
