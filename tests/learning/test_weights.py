"""The weight edge: what is published is what is fetched, or an error in one line."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stretto.base.errors import UserError
from stretto.engine.runner import read_weights, state_checksum
from stretto.learning.weights import fetch, is_quantised, pack_state, publish, retire, unpack_state
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, build
from stretto.ops.matmul import Arithmetic

CONFIG = ModelConfig(
    vocab_size=31, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    num_experts=4, top_k=2, expert_intermediate_size=8,
)  # fmt: skip


def state(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in build(CONFIG, seed).state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_published_is_fetched(tmp_path: Path, dtype: torch.dtype) -> None:
    before = state(dtype=dtype)
    version = publish(tmp_path / "weights", 3, before)
    after = fetch(version)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) and after[name].dtype == dtype for name, tensor in before.items())
    assert version.num_bytes == sum(tensor.nbytes for tensor in before.values())
    assert version.number == 3
    read_weights(after, CONFIG, version.checksum)  # an engine's own check agrees


def test_a_version_does_not_change_with_the_weights_it_was_made_of(tmp_path: Path) -> None:
    """Weights on a CPU are the trainer's own memory, into which it goes on training."""
    weights = state()
    expected = {name: tensor.clone() for name, tensor in weights.items()}
    version = publish(tmp_path, 0, weights)
    held = fetch(version)
    for tensor in weights.values():
        tensor.add_(1.0)
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(fetch(version)[name], tensor) for name, tensor in expected.items())


def test_the_same_number_with_other_weights_is_another_file(tmp_path: Path) -> None:
    """A trainer that was killed and resumed may make another version of the same number."""
    first, again, other = (publish(tmp_path, 5, state(seed)) for seed in (0, 0, 1))
    assert first == again and first.location != other.location
    assert not torch.equal(fetch(first)["embedding.weight"], fetch(other)["embedding.weight"])


@pytest.mark.slow
def test_a_kill_leaves_whole_versions_only(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from stretto.learning.weights import publish\n"
        "for number in range(10**6): publish(sys.argv[1], number, {'a': torch.full((1 << 22,), number)})"
    )
    for pause_s in (0.0, 0.004, 0.009, 0.015):
        folder = tmp_path / f"{pause_s}"
        with subprocess.Popen([sys.executable, "-c", code, folder]) as trainer:
            while len(list(folder.glob("weights-*"))) < 3:
                assert trainer.poll() is None
            time.sleep(pause_s)
            trainer.kill()
        for path in folder.glob("weights-*"):
            found = load_file(path)
            assert path.stem.split("-")[2] == state_checksum(found)[:12]
            assert set(found["a"].unique().tolist()) == {int(path.stem.split("-")[1])}


def test_another_checksum_is_one_line(tmp_path: Path) -> None:
    version = publish(tmp_path, 1, state())
    with pytest.raises(UserError, match=r"checksum: is [0-9a-f]{32}, version 1 was announced with 00") as caught:
        fetch(replace(version, checksum="00"))
    assert version.location in str(caught.value) and "\n" not in str(caught.value)


def test_one_flipped_bit_is_noticed(tmp_path: Path) -> None:
    version = publish(tmp_path, 1, state())
    path = Path(version.location)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="checksum"):
        fetch(version)


@pytest.mark.parametrize("keep", [0, 5, 500])
def test_a_truncated_file_is_one_line(tmp_path: Path, keep: int) -> None:
    version = publish(tmp_path, 1, state())
    path = Path(version.location)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="not readable as safetensors") as caught:
        fetch(version)
    assert "\n" not in str(caught.value)


def test_old_versions_are_retired_and_stay_readable_for_who_holds_them(tmp_path: Path) -> None:
    versions = [publish(tmp_path, number, state(number)) for number in range(4)]
    held = fetch(versions[0])
    retire(tmp_path, keep=2)
    assert [Path(version.location).is_file() for version in versions] == [False, False, True, True]
    assert torch.equal(held["embedding.weight"], state(0)["embedding.weight"])
    with pytest.raises(UserError, match="no such file"):
        fetch(versions[0])


def test_fp8_weights_travel_as_bytes_and_arrive_as_the_values_they_stand_for(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {
        "blocks.0.attention.qkv.weight": torch.randn(40, 130, generator=generator),
        "blocks.0.mlp.gate_up": torch.randn(3, 16, 24, generator=generator),
        "norm.weight": torch.ones(8),
    }
    plain = publish(tmp_path, 1, state)
    packed = publish(tmp_path, 2, pack_state(state))
    assert packed.num_bytes < 0.4 * plain.num_bytes
    arrived = fetch(packed)
    assert arrived.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(arrived[name], tensor, rtol=2**-4, atol=2e-3)
        again = pack_state({name: arrived[name]})
        assert all(torch.equal(again[part], pack_state({name: tensor})[part]) for part in again)


NETWORK = ModelConfig(
    vocab_size=31, hidden_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, num_experts=5, top_k=2,
    expert_intermediate_size=12, num_shared_experts=1, dense_layers=(1,), dense_intermediate_size=20, qk_norm=True,
    attention_bias=True,
)  # fmt: skip


def test_an_fp8_network_computes_the_same_bits_from_shipped_bytes() -> None:
    model, other = build(NETWORK, 0).requires_grad_(False), build(NETWORK, 1).requires_grad_(False)
    state = model.state_dict()
    shipped = unpack_state(pack_state(state))
    assert shipped.keys() == state.keys()
    other.load_state_dict(shipped)
    ids_BT = torch.randint(0, 31, (2, 9))
    ctx = replace(Context.plain(ids_BT), operators=Arithmetic("fp8", True).operators)
    assert torch.equal(model.logits(ids_BT, ctx=ctx), other.logits(ids_BT, ctx=ctx))
    assert not torch.equal(model.logits(ids_BT), other.logits(ids_BT))  # in fp32 the quantisation does show


def test_matrices_of_blocks_travel_as_a_quarter_and_all_else_as_it_is() -> None:
    state = build(NETWORK, 0).state_dict()
    packed = pack_state(state)
    quantised = [name for name in state if is_quantised(name)]
    assert len(quantised) == 3 * 2 + 2 * 4 + 2  # attention, MoE layers with a shared expert, a dense layer
    for name, tensor in state.items():
        if name in quantised:
            assert packed[name + ":fp8"].nbytes * 4 == tensor.nbytes
        else:
            assert packed[name] is tensor


def test_bytes_without_scales_are_refused() -> None:
    packed = pack_state(build(NETWORK, 0).state_dict())
    del packed["blocks.0.mlp.down:scale"]
    with pytest.raises(UserError, match=r"blocks\.0\.mlp\.down: FP8 bytes without scales"):
        unpack_state(packed)
