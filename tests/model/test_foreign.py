"""Checkpoints that transformers made and saved, read and written by us: a small run of `bench.families_equality`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from bench.common.foreign import Draw, draw, make
from bench.families_equality import AIM, MUTANTS, difference, judge, quiet, their_model, token_ids
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.elastic import extract
from stretto.model.families import FAMILIES, Family


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet()


def judged(drawn: Draw) -> tuple[str, str]:
    found = judge(drawn)
    return found.verdict, "" if found.verdict in ("exact", "refused") else f"{drawn.label()}: {found.told}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_network_of_transformers_is_computed_alike_and_goes_back(family: Family) -> None:
    assert judged(draw(family, 0, refused=0)) == ("exact", "")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_switch_of_a_family_is_exact_or_refused_by_name(family: Family) -> None:
    for seed in range(1, 16):
        drawn = draw(family, seed)
        assert judged(drawn) == ("exact" if drawn.refused is None else "refused", "")


CAUGHT_IN: dict[str, Family] = {
    "window": "mistral",
    "pairs": "ernie4_5",
    "rope": "llama",
    "scale": "deepseek_v3",
    "latent_eps": "glm4_moe_lite",
    "groups": "deepseek_v3",
    "clamp": "gpt_oss",
    "fp8_scale": "qwen2",
    "mxfp4_scale": "gpt_oss",
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [name for name in MUTANTS if name is not None])
def test_a_mutant_is_found_out(mutant: str) -> None:
    with MUTANTS[mutant]():
        verdicts = (judge(draw(CAUGHT_IN[mutant], seed, refused=0)).verdict for seed in range(15))
        assert any(verdict == "wrong" for verdict in verdicts)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "gpt_oss", "deepseek_v3"])
def test_a_part_of_a_network_goes_back_to_its_family(family: Family, tmp_path: Path) -> None:
    drawn = draw(family, 1, refused=0)
    drawn.fields |= {"num_hidden_layers": 4, "num_experts_per_tok": 2, "layer_types": None}
    drawn.fields |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1} if family == "deepseek_v3" else {}
    drawn.fields |= dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts") & drawn.fields.keys(), 8)
    make(drawn, tmp_path / "theirs")
    read = read_checkpoint(tmp_path / "theirs", dtype=torch.float32)
    part = extract(read.model, read.config.subnet(depth=3, experts=5))
    write_checkpoint(tmp_path / "part", part, part.config, family=read.family)
    ids = token_ids(drawn)
    with torch.no_grad():
        found = difference(part.logits(ids), their_model(tmp_path / "part")(ids).logits)
    assert found <= AIM and len(part.blocks) == 3


NOT_OF_LOGITS = {
    *("initializer_range", "use_cache", "attention_dropout", "pretraining_tp", "output_router_logits"),
    *("router_aux_loss_coef", "router_jitter_noise", "num_mtp_layers", "num_nextn_predict_layers"),
}
"""Fields that training reads, or a cache, or that decide about layers we leave out."""
DERIVED = {"qk_head_dim", "head_dim"}
ELSEWHERE = {"hidden_act", "rope_interleave", "moe_norm_min"}
"""Drawn as what must be refused."""


@pytest.mark.parametrize("family", FAMILIES)
def test_no_field_of_transformers_configuration_is_forgotten(family: Family) -> None:
    drawn = [draw(family, seed) for seed in range(60)]
    seen = {name for each in drawn for name in (*each.fields, *each.edits)} | NOT_OF_LOGITS | DERIVED | ELSEWHERE
    fields = AutoConfig.for_model(family, **drawn[0].fields).to_dict().keys() - PreTrainedConfig().to_dict().keys()
    spelled = {"num_experts": "num_local_experts"} if family == "qwen3_moe" else {}
    assert fields - seen - {spelled.get(name, "") for name in seen} == set()
