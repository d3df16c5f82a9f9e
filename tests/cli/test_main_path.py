"""The whole path through the command line, on a tiny network: text in, a checkpoint that transformers loads out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stretto.base import numbers
from stretto.base.records import read_lineage
from stretto.model.checkpoint import read_checkpoint
from tests.api.conftest import Run, refused


@pytest.mark.slow
def test_from_text_to_a_checkpoint_that_transformers_loads(
    stretto: Run, recipe: Path, healing: Path, text: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, corner, healed, hf = (tmp_path / name for name in ("run", "run/corner", "run/healed", "run/hf"))

    def ok(*arguments: object) -> str:
        result = stretto(*arguments)
        assert result.code == 0, result.err
        return result.out

    ok("pretrain", recipe, "--data", text, "--out", run)
    assert "measurements on" in ok("latency", run)
    found = ok("search", run, "--max-total", 0.75, "--max-active", 0.9)
    assert "chosen:" in found
    assert "rank correlation" in found
    assert "logits differ by" in ok("extract", run, "--subnet", "corner", "-o", corner)
    ok("extract", run, "--subnet", "best", "-o", tmp_path / "best")
    searched = read_lineage(tmp_path / "best").receipt
    assert "search" in searched.stage
    assert (
        searched.flops > read_lineage(corner).receipt.flops
    )  # what finding it cost is in the lineage of what it found
    ok("heal", corner, "-o", healed, "--data", run / "data" / "00", "--recipe", healing)
    ok("export", healed, "--family", "glm4_moe", "-o", hf)
    ok("export", healed, "--gguf", "-o", run / "model.gguf")
    assert (run / "model.gguf").stat().st_size > 10_000

    ours = read_checkpoint(healed).model
    theirs = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    ids = torch.tensor([AutoTokenizer.from_pretrained(hf)("line 12: 144 is the square of 12").input_ids])
    assert (ours.logits(ids) - theirs(ids).logits).abs().max() < 1e-4

    stages = [lineage.stage for lineage in _ancestry(healed)]
    assert stages == ["pretrain", "extract", "heal"]
    assert {"pretrain", "extract", "heal"} <= set(ok("cost", healed).split())
    assert "All 2 together" in ok("cost", run, healed, healed, run)  # each once, however often it is named
    page = Path(ok("report", run).split("report:")[1].strip())
    assert "corner" in page.read_text()
    trained = read_lineage(run / "checkpoint").receipt.tokens
    assert f"after {numbers.si(trained)} tokens of pre-training" in page.read_text()  # the ledger's count
    assert "All 3 together" in page.read_text()  # the best was cut out into a folder beside the run
    assert json.loads((run / "search.json").read_text())["result"]["candidates"]


@pytest.mark.slow
def test_a_dense_network_with_windows_goes_the_same_way(
    stretto: Run, recipe: Path, healing: Path, text: Path, tmp_path: Path
) -> None:
    """Depth is all that is elastic, and one family alone can hold it."""
    run, part, healed = (tmp_path / name for name in ("run", "part", "healed"))
    network = ("dense_layers=[0,1,2,3,4]", "dense_intermediate_size=24", "num_experts=1", "top_k=1")
    windows = ("selection_bias=false", "sliding_window=7", "sliding_layers=[1,3]")
    settings = [f"model.{each}" for each in (*network, *windows)]
    settings += ["elastic.anchors={small={layers=4}}", "elastic.width_share=0", "train.steps=2"]
    told = ("pretrain", recipe, "--data", text, *(word for each in settings for word in ("--set", each)))
    refused(stretto(*told, "-o", run, "--set", "model.attention_sinks=true"), "no supported family", "has sinks")
    assert not run.exists(), "refused before, and not after the training"

    def ok(*arguments: object) -> str:
        result = stretto(*arguments)
        assert result.code == 0, result.err
        return result.out

    ok(*told, "-o", run)
    assert "chosen: 4 layers" in ok("search", run, "--max-total", 0.9)
    refused(stretto("extract", run, "--subnet", "experts=2", "-o", part), "--subnet experts=2", "name layers alone")
    assert "logits differ by" in ok("extract", run, "--subnet", "best", "-o", part)
    ok("heal", part, "-o", healed, "--data", text, "--recipe", healing, "--steps", 1)
    assert read_checkpoint(healed).family == "qwen2"
    ok("export", healed, "-o", tmp_path / "hf")
    refused(stretto("export", healed, "--family", "mistral", "-o", tmp_path / "no"), "sliding window", "use qwen2")
    refused(stretto("export", healed, "--gguf", "-o", tmp_path / "a.gguf"), "sliding_layers")
    for source, size in ((run, "small"), (run, "layers=3"), (healed, "full")):
        ok("generate", source, "--prompt", "line 1", "--subnet", size, "--max-tokens", 2)


def _ancestry(folder: Path) -> list:
    lineage = read_lineage(folder)
    chain = [lineage]
    while chain[0].parents:
        chain.insert(0, chain[0].parents[0])
    return chain


@pytest.mark.slow
def test_a_renamed_run_is_extracted_from_and_continued(stretto: Run, recipe: Path, text: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "a run"
    assert not stretto("pretrain", recipe, "--data", text, "-o", whole, "--steps", 4).code
    assert not stretto("pretrain", recipe, "--data", text, "-o", tmp_path / "run", "--steps", 2).code
    (tmp_path / "run").rename(run)
    assert not stretto("pretrain", recipe, "-o", run, "--steps", 4, "--resume").code
    assert not stretto("search", run).code
    assert not stretto("extract", run, "--subnet", "best", "-o", tmp_path / "best").code
    hashes = [read_lineage(folder / "checkpoint").data_hash for folder in (whole, run)]
    assert hashes[0] == hashes[1]
