from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from stretto.base.errors import UserError
from stretto.evals.loss import EvalBatch
from stretto.evals.order import survey
from stretto.model.checkpoint import read_checkpoint, weights_hash, write_checkpoint
from stretto.model.streamed import StreamedNetwork, StreamedState, part_of
from stretto.model.transformer import Context
from stretto.model.weight_files import TensorFiles
from tests.model.checkpoints import IDS, NETWORKS, drop, edit_tensors, network, put, truncate

BATCHES = tuple(EvalBatch(ids_BT, ids_BT.roll(-1, 1), Context.plain(ids_BT)) for ids_BT in IDS.split(1))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_streamed_state_is_the_whole_one(tmp_path, name):
    family, changes = NETWORKS[name]
    model = network(**changes)
    write_checkpoint(tmp_path, model, model.config, family=family, max_shard_bytes=50_000)
    whole = read_checkpoint(tmp_path).model.state_dict()
    with StreamedState(tmp_path) as state:
        assert list(state) == list(whole)
        for each in state:
            assert torch.equal(state[each], whole[each]), each
            assert {part_of(held) for held in state._tensors} <= {part_of(each), state._part}


def count_bytes(monkeypatch) -> list[int]:
    """Bytes of each tensor, or part of one, that is read from a safetensors file from now on."""
    found = []

    def raw(self, name, part=(), read=TensorFiles.raw):
        tensor = read(self, name, part)
        found.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(TensorFiles, "raw", raw)
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_rows_are_those_of_the_whole_tensor_and_no_others_are_read(tmp_path, name, monkeypatch):
    family, changes = NETWORKS[name]
    model = network(**changes)
    write_checkpoint(tmp_path, model, model.config, family=family, max_shard_bytes=50_000)
    whole = read_checkpoint(tmp_path).model.state_dict()
    found = count_bytes(monkeypatch)
    with StreamedState(tmp_path) as state:
        for each in (each for each in state if not each.endswith(".bias_WE")):
            num = len(whole[each])
            for start, stop in ((0, num), (0, num // 2), (num // 2, num), (num // 3, num // 3 + 1), (num, num)):
                found.clear()
                assert torch.equal(state.rows(each, start, stop), whole[each][start:stop]), (each, start, stop)
                # rows of a head are read together where the family permutes them, at both ends of the range
                extra = 2 * model.config.head_dim if "attention" in each else 0
                assert sum(found) <= (stop - start + extra) * whole[each][:1].nbytes, (each, start, stop)


def test_padding_and_copies_are_checked_without_reading_the_rest(tmp_path, monkeypatch):
    model = network(tie_embeddings=True, experts_per_layer=(8, 3, 5, 2))
    write_checkpoint(tmp_path, model, model.config, family="glm4_moe")
    found = count_bytes(monkeypatch)
    with StreamedState(tmp_path) as state:
        state.check_constants()
    assert 0 < sum(found) < 0.8 * (tmp_path / "model.safetensors").stat().st_size
    put("model.safetensors", "lm_head.weight", torch.zeros(300, 64))(tmp_path)
    with StreamedState(tmp_path) as state, pytest.raises(UserError, match=r"lm_head\.weight: holds weights"):
        state.check_constants()


@pytest.mark.parametrize("name", ["glm", "qwen with biases", "ernie"])
def test_a_streamed_network_is_surveyed_like_a_resident_one(tmp_path, name):
    """To the bit: the same operations on the same weights."""
    family, changes = NETWORKS[name]
    model = network(**changes)
    write_checkpoint(tmp_path, model, model.config, family=family)
    resident = survey(read_checkpoint(tmp_path).model, BATCHES, left_out=2, removal=True)
    with StreamedState(tmp_path) as state:
        streamed = StreamedNetwork(state.config, state)
        assert survey(streamed.model, BATCHES, left_out=2, removal=True, hold=streamed.hold) == resident
    assert all(tensor.is_meta for tensor in streamed.model.state_dict().values())


@pytest.mark.parametrize(
    "name", ["glm elastic", "glm tied, no shared expert", "glm, layers of different width", "ernie"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_from_a_streamed_state_equals_written_from_a_whole_one(tmp_path, name, dtype):
    family, changes = NETWORKS[name]
    model = network(**changes)
    write_checkpoint(tmp_path / "a", model, model.config, family=family)
    with StreamedState(tmp_path / "a") as state:
        for folder, whole in (("b", ()), ("c", state.unchanged(dtype))):
            write_checkpoint(tmp_path / folder, state, state.config, family=family, dtype=dtype, whole=whole)
    write_checkpoint(tmp_path / "d", model, model.config, family=family, dtype=dtype)
    assert len({weights_hash(tmp_path / folder) for folder in "bcd"}) == 1


def test_routers_in_fp32_beside_narrower_weights_stay_exact(tmp_path):
    model = network(**NETWORKS["qwen"][1])
    write_checkpoint(tmp_path / "a", model, model.config, family="qwen3_moe", dtype=torch.bfloat16)
    layers = model.config.moe_layers
    gates = {f"model.layers.{layer}.mlp.gate.weight": model.blocks[layer].mlp.gate.detach() for layer in layers}
    norm = {"model.norm.weight": model.norm.weight.detach()}
    edit_tensors(tmp_path / "a" / "model.safetensors", lambda tensors: tensors.update(gates | norm))
    found = read_checkpoint(tmp_path / "a").model
    assert torch.equal(found.blocks[1].mlp.gate, model.blocks[1].mlp.gate)
    assert {t.dtype for name, t in found.state_dict().items() if not name.endswith(("gate", "bias_WE"))} == {
        torch.bfloat16
    }
    assert found.logits(IDS).isfinite().all()
    write_checkpoint(tmp_path / "b", found, model.config, family="qwen3_moe")
    with StreamedState(tmp_path / "a") as state:
        assert state.dtypes.fp32 == {f"blocks.{layer}.mlp.gate" for layer in layers}
        assert state.dtypes.rounded == ("model.norm.weight",)
        whole = state.unchanged(state.dtypes.weights, state.dtypes.fp32)
        assert state.unchanged(torch.bfloat16) == whole == ()
        write_checkpoint(
            tmp_path / "c", state, state.config, family="qwen3_moe", dtype=state.dtypes.weights, fp32=state.dtypes.fp32
        )
    for folder in "bc":
        stored = load_file(tmp_path / folder / "model.safetensors")
        assert all(torch.equal(stored[name], gate) for name, gate in gates.items())
        assert stored["model.norm.weight"].dtype == torch.bfloat16
    put("model.safetensors", "model.norm.weight", norm["model.norm.weight"].bfloat16())(tmp_path / "a")
    with StreamedState(tmp_path / "a") as state:
        assert state.unchanged(state.dtypes.weights, state.dtypes.fp32) == (tmp_path / "a" / "model.safetensors",)
    put("model.safetensors", "lm_head.weight", model.head.weight.detach())(tmp_path / "a")
    wide = read_checkpoint(tmp_path / "a").model
    assert {tensor.dtype for tensor in wide.state_dict().values()} == {torch.float32}
    assert torch.equal(wide.head.weight, model.head.weight)


def test_fp16_is_computed_in_fp32(tmp_path):
    model = network(**NETWORKS["qwen"][1])
    write_checkpoint(tmp_path, model, model.config, family="qwen3_moe", dtype=torch.float16)
    with StreamedState(tmp_path) as state:
        assert state.dtypes.weights == torch.float16
        streamed = StreamedNetwork(state.config, state)
        found = survey(streamed.model, BATCHES, left_out=2, hold=streamed.hold)
    assert found == survey(read_checkpoint(tmp_path, dtype=torch.float32).model, BATCHES, left_out=2)


def test_files_that_need_no_change_are_copied(tmp_path):
    model = network(**NETWORKS["qwen"][1])
    write_checkpoint(tmp_path / "a", model, model.config, family="qwen3_moe", max_shard_bytes=50_000)
    files = sorted((tmp_path / "a").glob("model-*"))
    assert len(files) > 3
    put(files[1].name, "model.layers.9.mlp.gate.weight", torch.zeros(1))(
        tmp_path / "a"
    )  # an extra, left out in reading
    with StreamedState(tmp_path / "a") as state:
        assert state.unchanged(torch.bfloat16) == ()
        whole = state.unchanged(torch.float32)
        assert whole == (files[0], *files[2:])
        write_checkpoint(tmp_path / "b", state, state.config, family="qwen3_moe", whole=whole)
    made = sorted((tmp_path / "b").glob("model-*"))
    assert [path.read_bytes() for path in made[:-1]] == [path.read_bytes() for path in whole]
    assert torch.equal(read_checkpoint(tmp_path / "b").model.logits(IDS), model.logits(IDS))


def test_constants_and_copies_are_not_taken_on_trust(tmp_path):
    model = network(**NETWORKS["glm tied, no shared expert"][1])
    write_checkpoint(tmp_path, model, model.config)
    with StreamedState(tmp_path) as state:
        assert state.unchanged(torch.float32) == ()
    shared = "model.layers.2.mlp.shared_experts.down_proj.weight"
    put("model.safetensors", shared, torch.ones(64, 16))(tmp_path)
    with StreamedState(tmp_path) as state, pytest.raises(UserError, match="no place in this network"):
        state["blocks.2.mlp.gate"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop("model.layers.1.mlp.gate.weight"), "model.layers.1.mlp.gate.weight: missing"),
        (truncate, "truncated or damaged"),
        (put("model.safetensors", "model.extra", torch.zeros(2)), "has no such tensor"),
        (put("model.safetensors", "model.layers.1.mlp.gate.weight", torch.zeros(3, 64)), r"shape \[3, 64\]"),
        (put("model.safetensors", "model.layers.1.mlp.gate.weight", torch.zeros(8, 64).int()), "dtype I32"),
    ],
)
def test_damage_that_headers_tell_is_found_before_anything_is_read(tmp_path, damage, words):
    model = network(**NETWORKS["qwen"][1])
    write_checkpoint(tmp_path, model, model.config, family="qwen3_moe")
    damage(tmp_path)
    with pytest.raises(UserError, match=words):
        StreamedState(tmp_path)
