"""Dequantisation: equal to transformers' own where that has one, to the control's values where not; scales must fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bench.common.foreign import Draw, draw, make
from bench.common.quantiser import KINDS, MXFP4, fp8, quantise
from stretto.base.errors import UserError
from stretto.model.checkpoint import read_checkpoint
from stretto.model.families.quantisation import quantisation
from stretto.model.quantised import Dequantised, from_fp8
from stretto.model.streamed import StreamedState
from stretto.model.weight_files import TensorFiles, open_tensors
from tests.model.checkpoints import edit_tensors

NAME = "layers.0.mlp.experts.down_proj"
VALUES = torch.randn(3, 64, 40, generator=torch.Generator().manual_seed(0))


def folder_of(tensors: dict[str, torch.Tensor], config: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_was_meant(kind: str, tmp_path: Path) -> None:
    other = {"norm.weight": torch.randn(5), f"{NAME}_bias": torch.randn(3, 40)}
    folder = folder_of({NAME: VALUES, **other}, {}, tmp_path / "c")
    quantise(folder, KINDS[kind], tmp_path / "meant")
    meant = load_file(tmp_path / "meant" / "model.safetensors")
    assert 0 < (meant[NAME] - VALUES).abs().max() < 1.5  # something was quantised; FP4 has no 7
    with open_tensors(folder) as files:
        assert isinstance(files, Dequantised) and files.names == meant.keys()
        assert files.dtype(NAME) == torch.bfloat16 and files.path(NAME).name == "model.safetensors"
        assert not files.is_empty(NAME)
        for name, tensor in meant.items():
            assert torch.equal(files.read(name, tuple(tensor.shape)), tensor), name
        assert torch.equal(files.read(NAME, (3, 64, 40), (2,)), meant[NAME][2])
        assert torch.equal(files.read(NAME, (3, 64, 40), (1, slice(16, 32))), meant[NAME][1, 16:32])


def test_fp8_is_dequantised_as_transformers_does(tmp_path: Path) -> None:
    values = torch.randn(64, 48, generator=torch.Generator().manual_seed(1))
    folder = folder_of({f"{NAME}.weight": values}, {}, tmp_path / "c")
    quantise(folder, fp8((16, 24)), tmp_path / "meant")  # transformers' wants blocks that divide
    stored = load_file(folder / "model.safetensors")
    theirs = Fp8Dequantize(None)._dequantize_one(
        stored[f"{NAME}.weight"], stored[f"{NAME}.weight_scale_inv"], output_dtype=torch.float32
    )
    with open_tensors(folder) as files:
        assert torch.equal(files.read(f"{NAME}.weight", (64, 48)), theirs)


def test_every_number_of_fp8_is_what_torch_says() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = every[~every.float().isnan()]
    assert torch.equal(from_fp8(finite).view(torch.int32), finite.float().view(torch.int32))  # the sign of 0, too
    assert torch.equal(from_fp8(every).isnan(), every.float().isnan()) and len(finite) == 254


def test_mxfp4_is_dequantised_as_transformers_does(tmp_path: Path) -> None:
    folder = folder_of({NAME: VALUES}, {}, tmp_path / "c")
    quantise(folder, MXFP4, tmp_path / "meant")
    stored = load_file(folder / "model.safetensors")
    blocks, scales = (stored[f"{NAME}_{ending}"] for ending in ("blocks", "scales"))
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    with open_tensors(folder) as files:
        assert torch.equal(files.read(NAME, (3, 64, 40)), theirs)


def test_scales_in_bytes_are_powers_of_two(tmp_path: Path) -> None:
    stored = {"x.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.tensor([[129]]).byte()}
    folder = folder_of(stored, {"quantization_config": {"quant_method": "fp8"}}, tmp_path / "c")
    with open_tensors(folder) as files:
        assert torch.equal(files.read("x.weight", (2, 2)), torch.full((2, 2), 4.0))
    stored["x.weight_scale_inv"] = torch.tensor([[4.0]]).to(torch.float8_e8m0fnu)
    folder = folder_of(stored, {"quantization_config": {"quant_method": "fp8"}}, tmp_path / "d")
    with open_tensors(folder) as files:
        assert torch.equal(files.read("x.weight", (2, 2)), torch.full((2, 2), 4.0))


def test_weights_become_bf16_or_what_is_asked_for(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    drawn = Draw("llama", 0, sizes, quantised="fp8")
    make(drawn, tmp_path / "c", tmp_path / "meant")
    edit_tensors(tmp_path / "c" / "model.safetensors", _round_the_rest)
    bf16, fp32 = (read_checkpoint(tmp_path / "c", dtype=dtype).model for dtype in (None, torch.float32))
    meant = read_checkpoint(tmp_path / "meant").model
    assert bf16.blocks[0].mlp.down.weight.dtype == torch.bfloat16
    assert torch.equal(fp32.blocks[0].mlp.down.weight, meant.blocks[0].mlp.down.weight)
    assert torch.equal(bf16.blocks[0].mlp.down.weight, meant.blocks[0].mlp.down.weight.bfloat16())


def test_a_part_at_a_time_is_dequantised_too(tmp_path: Path) -> None:
    drawn = draw("gpt_oss", 0, refused=0)
    drawn.fields |= {"hidden_size": 32, "intermediate_size": 64}
    drawn.quantised = "mxfp4"
    make(drawn, tmp_path / "c", tmp_path / "meant")
    whole = read_checkpoint(tmp_path / "meant").model.state_dict()
    with StreamedState(tmp_path / "c") as state:
        assert state.keys() == whole.keys() and state.unchanged(torch.float32) == ()
        assert all(torch.equal(state[name], tensor) for name, tensor in whole.items())


def _round_the_rest(tensors: dict[str, torch.Tensor]) -> None:
    """As in published checkpoints; scales and what is quantised stay."""
    tensors.update(
        {name: x.bfloat16() for name, x in tensors.items() if x.dtype == torch.float32 and "scale" not in name}
    )


DAMAGE: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "scales of a weight": (
        "fp8",
        lambda tensors: tensors.pop(f"{NAME}_scale_inv"),
        rf"{NAME}: quantised, and its scales {NAME}_scale_inv are missing",
    ),
    "scales of blocks": (
        "mxfp4",
        lambda tensors: tensors.pop(f"{NAME}_scales"),
        rf"{NAME}: quantised, and its scales {NAME}_scales are missing",
    ),
    "scales of another block": (
        "fp8 in small blocks",
        lambda tensors: tensors.update({f"{NAME}_scale_inv": torch.ones(3, 2, 2)}),
        rf"{NAME}_scale_inv: shape \[3, 2, 2\] where config\.json gives \[3, 4, 2\]",
    ),
    "weights of another shape": (
        "fp8",
        lambda tensors: tensors.update({NAME: torch.ones(3, 64, 4).to(torch.float8_e4m3fn)}),
        rf"{NAME}: shape \[3, 64, 4\] where config\.json gives \[3, 64, 40\]",
    ),
    "too few blocks": (
        "mxfp4",
        lambda tensors: tensors.update({f"{NAME}_blocks": torch.ones(3, 40, 1, 16).byte()}),
        rf"{NAME}_blocks: shape",
    ),
    "blocks of another dtype": (
        "mxfp4",
        lambda tensors: tensors.update({f"{NAME}_blocks": tensors[f"{NAME}_blocks"].bfloat16()}),
        rf"{NAME}_blocks: torch\.bfloat16 in place of bytes",
    ),
    "exponents as numbers": (
        "mxfp4",
        lambda tensors: tensors.update({f"{NAME}_scales": torch.ones(3, 40, 2).to(torch.float8_e8m0fnu)}),
        rf"{NAME}_scales: torch\.float8_e8m0fnu in place of bytes",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_scales_that_are_missing_or_do_not_fit_are_one_line(damage: str, tmp_path: Path) -> None:
    kind, act, message = DAMAGE[damage]
    folder = folder_of({NAME: VALUES}, {}, tmp_path / "c")
    quantise(folder, KINDS[kind], tmp_path / "meant")
    edit_tensors(folder / "model.safetensors", act)
    with pytest.raises(UserError, match=f"model.safetensors: {message}") as caught, open_tensors(folder) as files:
        files.read(NAME, (3, 64, 40))
    assert "\n" not in str(caught.value)


PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq' cannot be read"),
        ({"quant_method": "awq"}, "'awq' cannot be read"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' cannot be read"),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized"},
            "'compressed-tensors' .int-quantized. cannot",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "config_groups.group_0: weights of 4 bits of int cannot be read",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"a block of \[128\] is not two whole numbers"),
        ("gptq", "'gptq' cannot be read"),
        ({**PACKED, "config_groups": [1]}, "config_groups: not an object; the file is damaged"),
        ({**PACKED, "config_groups": {"a": 4}}, "config_groups.a: not an object with weights; the file is damaged"),
        ({**PACKED, "config_groups": {"a": {"weights": [4]}}}, "config_groups.a: not an object with weights"),
    ],
)
def test_other_quantisations_are_refused_by_name(told: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^config.json: quantization_config.*{message}") as caught:
        quantisation({"quantization_config": told}, "config.json")
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_quantised_are_read_as_they_are(tmp_path: Path) -> None:
    with open_tensors(folder_of({NAME: VALUES}, {}, tmp_path / "c")) as files:
        assert isinstance(files, TensorFiles) and torch.equal(files.read(NAME, (3, 64, 40)), VALUES)
