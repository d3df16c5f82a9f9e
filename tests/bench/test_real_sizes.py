"""The study of a real model asks for sizes that are better than their controls at equal FLOPs, beyond the spread of the seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import real_sizes
from bench.common.networks import random_network
from bench.common.real_networks import CONVERSION, Parent, pruned
from stretto.model.checkpoint import write_checkpoint
from stretto.model.counts import count
from stretto.model.spec import ModelConfig
from stretto.model.upcycle import upcycled_config, upcycled_presets
from stretto.text.chat import CHATML
from stretto.text.tokenizer import train_tokenizer

DENSE = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=8, num_heads=2, num_kv_heads=2, head_dim=16, dense_layers=tuple(range(8)),
    dense_intermediate_size=256, num_experts=1, top_k=1, expert_intermediate_size=8, tie_embeddings=True, max_positions=64,
)  # fmt: skip


def results(gaps: tuple[float, ...]) -> dict[str, dict[str, Any]]:
    """Results of three seeds, in which the size half is ``gaps`` nats above its control at equal FLOPs."""
    sizes = {"full": 3.0, "half": 3.5, "corner": 4.0}
    found = {"original": {"report": {"full": 3.1}, "tokens_per_byte": 0.3}}

    def run(report: dict[str, float]) -> dict[str, Any]:
        numbers = dict.fromkeys(report, 1e6)
        return {"report": report, "params": numbers, "active": numbers, "flops": 1e12, "tokens": 1000}

    for seed, gap in enumerate(gaps, 1):
        found |= {f"elastic-{seed}": run(sizes), f"parent-{seed}": run(sizes), f"continued-{seed}": run({"full": 3.0})}
        for arm in real_sizes.CONTROLS:
            found[f"{arm}-{seed}"] = run(
                {"full": sizes[arm.partition("-")[2]] - (gap if arm == "flops-half" else -0.1)}
            )
    return found


@pytest.mark.parametrize(
    ("gaps", "missed"), [((-0.1, -0.11, -0.12), 0), ((-0.1, 0.1, -0.12), 1), ((0.1, 0.11, 0.12), 1)]
)
def test_a_size_must_beat_its_control_beyond_the_spread(gaps: tuple[float, ...], missed: int, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"seeds": [0, 1, 2, 3], "rates": [1.0], "runs": results(gaps)}))
    arms = real_sizes.Arms((0, 1, 2, 3), (1.0,))
    failures = real_sizes.report(arms, json.loads(record.read_text())["runs"])
    assert len(failures) == missed, failures
    real_sizes.draw(real_sizes.differences(arms, results(gaps)), tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").stat().st_size > 1000
    without = results(gaps)
    del without["layers-half-1"], without["flops-half-1"], without["flops-half-2"]
    failures = real_sizes.report(arms, without)
    lacking = "the record lacks 3 runs: flops-half-1, layers-half-1, flops-half-2"
    assert failures[0] == lacking and len(failures) == 2, "one seed has no interval"
    del without["original"]
    assert real_sizes.report(arms, without) == [lacking.replace("3 runs: ", "4 runs: original, ")]


def test_controls_at_equal_flops_wait_for_the_elastic_run_and_share_its_cost(tmp_path: Path) -> None:
    info: Any = None  # the plan does not read it
    study = real_sizes.Study((0, 1), (1.0,), tmp_path, info, "text", (), real_sizes.ARMS)
    searched = {f"search-{arm}-x1": {"select": {"full": 3.0}} for arm in real_sizes.SEARCHED}
    names = {run.name for run in study.runs(searched)}
    assert {"elastic-1", "continued-1", "tokens-half-1"} <= names and "flops-half-1" not in names
    plan = {run.name: run for run in study.runs(searched | {"elastic-1": {"flops": 8e12}})}
    for kind in real_sizes.EQUAL_FLOPS:
        work: Any = plan[f"{kind}-corner-1"].work
        assert work.args[5] == 4e12 and work.args[2] == f"{kind}-corner"
    few = real_sizes.Study((0, 1), (1.0,), tmp_path, info, "text", (), ("elastic", "layers-half"))
    assert {run.name for run in few.runs({}) if run.name.startswith("search")} == {
        "search-elastic-x1",
        "search-tokens-half-x1",
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_small_version_runs_and_its_record_prints_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [" ".join(f"line {number}: {number * number}." for number in range(at, at + 200)) for at in range(400)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    train_tokenizer(iter(lines[:20]), 300, CHATML).save(tmp_path / "tokenizer")
    config = DENSE.replace(vocab_size=300, max_positions=1024)
    write_checkpoint(
        tmp_path / "model",
        random_network(config),
        config,
        family="glm4_moe",
        tokenizer_dir=tmp_path / "tokenizer",
    )
    record = tmp_path / "record.json"
    command = [tmp_path / "out", "--model", tmp_path / "model", "--data", tmp_path / "text.jsonl", "--record", record]
    command += ["--tokens", "8e3", "--eval-rows", "16", "--rates", "1", "--set", "train.seq_len=64"]

    def called(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["real_sizes", *map(str, arguments)])
        code = 0
        try:
            real_sizes.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    code, printed, errors = called(*command)
    assert code in (0, 1) and "neurons-corner" in printed and "missing; run the command" not in printed, errors
    resumed, _, errors = called(*command)
    assert resumed == code, errors
    again, shown, _ = called(record, "--report")
    assert again == code and shown and shown in printed


def test_each_way_of_pruning_keeps_at_most_the_parameters_of_its_size() -> None:
    dense = random_network(DENSE)
    moe_config = upcycled_config(DENSE.replace(layer_order=tuple(range(8))), CONVERSION)
    presets = upcycled_presets(moe_config, CONVERSION)
    strengths = [torch.arange(256.0).roll(layer) for layer in range(8)]
    parent = Parent(dense, random_network(moe_config), presets, strengths)
    for size in real_sizes.SIZES:
        both, layers, neurons = (pruned(parent, size, way) for way in ("both", "layers", "neurons"))
        most = count(both.config, both.config.full()).total_params
        for model in (layers, neurons):
            assert count(model.config, model.config.full()).total_params <= most
        assert layers.config.dense_intermediate_size == 256 and neurons.config.num_layers == 8
    kept = both.blocks[0].mlp.down.weight
    strongest = strengths[0].topk(kept.shape[1]).indices.sort().values
    torch.testing.assert_close(kept, dense.blocks[0].mlp.down.weight[:, strongest])
