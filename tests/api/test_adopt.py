"""`stretto adopt` on small checkpoints of several families, and what goes wrong on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stretto.api import adopt
from stretto.base.paths import claimed
from stretto.base.records import file_sha256, read_lineage
from stretto.evals.order import survey
from stretto.model.checkpoint import read_checkpoint, weights_hash, write_checkpoint
from stretto.model.spec import SubnetChoice
from stretto.text.chat import CHATML
from stretto.text.tokenizer import train_tokenizer
from tests.api.conftest import Result, Run, refused
from tests.api.hub import hub
from tests.model.checkpoints import IDS, NETWORKS, edit_json, edit_tensors, forget_ours, network, put

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(["line 12: 144 is the square of 12, and 19 is 12 and seven."]), 300, CHATML).save(folder)
    return folder


@pytest.fixture
def make(tmp_path: Path, tokenizer: Path) -> Make:
    """A checkpoint as other software writes it, of a network of `NETWORKS`, in several shards."""

    def write(name: str = "glm", folder: str = "source", ours: bool = False, **changes: object) -> Path:
        family, told = NETWORKS[name]
        model = network(**{**told, **changes})
        path = tmp_path / folder
        write_checkpoint(path, model, model.config, family=family, tokenizer_dir=tokenizer, max_shard_bytes=150_000)
        if not ours:
            forget_ours(path)
        return path

    return write


QUICK = ("--calibration-tokens", 2048)


def adopted(stretto: Run, source: Path | str, out: Path, *arguments: object) -> Result:
    result = stretto("adopt", source, "-o", out, *arguments)
    assert result.code == 0, result.err
    return result


@pytest.mark.parametrize("name", ["glm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen", "ernie"))])
def test_the_full_network_is_the_sources_to_the_bit(
    stretto: Run, make: Make, text: Path, tmp_path: Path, name: str
) -> None:
    source, out = make(name, num_layers=7), tmp_path / "run"
    shown = adopted(stretto, source, out, "--calibration", text, *QUICK).out
    theirs, ours = read_checkpoint(source), read_checkpoint(out / "checkpoint")
    assert ours.family == theirs.family
    assert torch.equal(ours.model.logits(IDS), theirs.model.logits(IDS))
    assert ours.config.expert_order is not None and ours.config.layer_order is not None
    assert ours.config.expert_order != theirs.config.expert_orders
    assert set(ours.presets) == {"half", "corner"} and "corner: 5 layers, 2 experts, top-1" in shown
    told = read_lineage(out / "checkpoint")
    assert (told.stage, told.parents, told.receipt.tokens) == ("adopt", (), 0) and told.receipt.flops > 0
    assert told.config["source_sha256"] == {path.name: file_sha256(path) for path in source.glob("*.safetensors")}
    assert told.weights_hash == weights_hash(out / "checkpoint")
    cut = stretto("extract", out, "--subnet", "half", "-o", tmp_path / "half")  # compares masked and extracted logits
    assert cut.code == 0, cut.err


@pytest.mark.slow
def test_orders_are_those_of_the_resident_network(stretto: Run, make: Make, text: Path, tmp_path: Path) -> None:
    source, out = make(num_layers=6), tmp_path / "run"
    done = adopted(stretto, source, out, "--calibration", text, *QUICK).out
    assert "times the work of --layer-order influence" in done and "--order none skips the ranking" in done
    info = adopt.read_info(out)
    batches = adopt._batches(info.mixture, read_checkpoint(source).config, 2048)
    found = survey(read_checkpoint(source).model, batches, left_out=1)
    measured = json.loads((out / "order.json").read_text())
    assert [tuple(layer["saliency"]) for layer in measured["experts"]] == [layer.saliency for layer in found.experts]
    assert measured["logit_error"] == {str(layer): error for layer, error in found.logit_error.items()}
    config = read_checkpoint(out / "checkpoint").config
    assert config.expert_order == adopt.expert_orders(config, found, "reap")
    assert config.layer_order == adopt.layer_order(config, found.logit_error)


@pytest.mark.slow
def test_what_a_run_can_do_an_adopted_one_can(stretto: Run, make: Make, text: Path, tmp_path: Path) -> None:
    source, out = make("qwen", num_layers=6), tmp_path / "run"
    adopted(stretto, source, out, "--calibration", text, *QUICK)
    for command in (
        ("search", out, "--max-total", 0.8),
        ("extract", out, "--subnet", "best", "-o", tmp_path / "best"),
        ("generate", out, "--prompt", "line 12", "--subnet", "corner", "--max-tokens", 4),
        ("export", out, "--family", "qwen3_moe", "--dtype", "bfloat16", "-o", tmp_path / "hf"),
        ("cost", out),
    ):
        done = stretto(*command)
        assert done.code == 0, (command, done.err)


def test_files_that_need_no_change_are_copied_and_others_are_not(stretto: Run, make: Make, tmp_path: Path) -> None:
    source = make("qwen")
    (source / "consolidated.safetensors").write_bytes(b"the weights once more, as in Mistral's folders")
    done = adopted(stretto, source, tmp_path / "a", "--order", "none").out
    assert done.rstrip().endswith(f"stretto search {tmp_path / 'a'} --data …"), "it has no text of its own"
    assert "consolidated.safetensors" not in read_lineage(tmp_path / "a/checkpoint").config["source_sha256"]
    files = {path.name: path.read_bytes() for path in source.glob("model-*")}
    assert len(files) > 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "a/checkpoint").glob("model-*")} == files
    adopted(stretto, source, tmp_path / "b", "--order", "none", "--dtype", "bfloat16")
    narrow, wide = read_checkpoint(tmp_path / "b/checkpoint").model, read_checkpoint(source).model
    assert narrow.embedding.weight.dtype == torch.bfloat16
    assert all(
        torch.equal(tensor, other.to(tensor.dtype))
        for tensor, other in zip(narrow.state_dict().values(), wide.state_dict().values(), strict=True)
    )
    assert json.loads((tmp_path / "a/run.json").read_text())["data"] is None


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_routers_in_fp32_beside_bf16_weights(stretto: Run, make: Make, tmp_path: Path, dtype: str) -> None:
    source = make("ernie")  # as ERNIE is published
    gates: dict[str, torch.Tensor] = {}

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        gates.update({name: tensor for name, tensor in tensors.items() if name.endswith("mlp.gate.weight")})
        is_wide = (*gates, "model.norm.weight")
        tensors.update(
            {name: x.bfloat16() for name, x in tensors.items() if "bias" not in name and name not in is_wide}
        )

    for file in source.glob("model-*"):
        edit_tensors(file, narrow)
    shown = adopted(stretto, source, tmp_path / "run", "--order", "none", "--dtype", dtype).out
    assert ("model.norm.weight" in shown) == (dtype == "auto")
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "run/checkpoint").glob("model*.safetensors"):
        found |= load_file(file)
    kept = torch.float32 if dtype == "auto" else torch.bfloat16
    assert all(torch.equal(found[name], gate.to(kept)) for name, gate in gates.items()) and gates
    assert found["model.norm.weight"].dtype == found["model.embed_tokens.weight"].dtype == torch.bfloat16
    again = adopted(stretto, tmp_path / "run", tmp_path / "again", "--order", "none").out
    assert "model.norm.weight" not in again
    assert stretto("export", source, "-o", tmp_path / "hf").code == 0
    exported = load_file(tmp_path / "hf/model.safetensors")
    assert all(torch.equal(exported[name], gate) for name, gate in gates.items())


def test_few_calibration_tokens_are_fewer_rows(stretto: Run, make: Make, text: Path, tmp_path: Path) -> None:
    command = ("--calibration", text, "--layer-order", "influence", "--calibration-tokens", 1100)
    adopted(stretto, make(), tmp_path / "run", *command)
    config = read_checkpoint(tmp_path / "run/checkpoint").config
    batches = adopt._batches(adopt.read_info(tmp_path / "run").mixture, config, 1100)
    row = min(adopt.ROW_TOKENS, config.max_positions)
    assert [tuple(each.ids_BT.shape) for each in batches] == [(min(adopt.ROWS, 1100 // row), row)]


def test_a_dense_network_has_depth_only(stretto: Run, make: Make, text: Path, tmp_path: Path) -> None:
    source = make("glm, all dense", num_layers=6, dense_layers=tuple(range(6)))
    adopted(stretto, source, tmp_path / "run", "--calibration", text, "--layer-order", "influence", *QUICK)
    found = read_checkpoint(tmp_path / "run/checkpoint")
    assert found.presets == {"half": SubnetChoice(layers=5), "corner": SubnetChoice(layers=4)}
    measured = json.loads((tmp_path / "run/order.json").read_text())
    assert measured["logit_error"] == {} and measured["experts"] == []
    assert tuple(measured["layer_order"]) == found.config.layer_order


@pytest.mark.slow
def test_layers_of_a_dense_network_are_left_out_on_more_text(
    stretto: Run, make: Make, text: Path, tmp_path: Path
) -> None:
    source = make("glm, all dense", num_layers=6, dense_layers=tuple(range(6)))
    adopted(stretto, source, tmp_path / "run", "--calibration", text, "--calibration-tokens", 4 * 2048)
    model, info = read_checkpoint(source).model, adopt.read_info(tmp_path / "run")
    found = survey(model, adopt._batches(info.mixture, model.config, 4 * 2048), left_out=2, watched=False)
    measured = json.loads((tmp_path / "run/order.json").read_text())
    assert measured["logit_error"] == {str(layer): error for layer, error in found.logit_error.items()}


@pytest.mark.parametrize("with_text", [True, False])
def test_a_dense_network_with_experts_is_the_same_function(
    stretto: Run, make: Make, text: Path, tmp_path: Path, with_text: bool
) -> None:
    source = make("glm, all dense", num_layers=6, dense_layers=tuple(range(6)), dense_intermediate_size=64)
    arguments = ("--calibration", text, *QUICK) if with_text else ("--order", "none")
    adopted(stretto, source, tmp_path / "run", *arguments, "--experts", 4, "--top-k", 2)
    ours, theirs = read_checkpoint(tmp_path / "run/checkpoint"), read_checkpoint(source)
    assert ours.config.num_moe_layers == 6 and ours.config.num_experts == 3 and "half" in ours.presets
    assert (ours.model.logits(IDS) - theirs.model.logits(IDS)).abs().max() < 1e-3
    assert (ours.config.layer_order is not None) == with_text


def test_fp16_cannot_hold_the_router_of_a_split_network(stretto: Run, make: Make, tmp_path: Path) -> None:
    dense = {"num_layers": 6, "dense_layers": tuple(range(6)), "dense_intermediate_size": 64}
    wide, narrow = make("glm, all dense", **dense), tmp_path / "narrow"
    assert stretto("export", wide, "-o", narrow, "--dtype", "float16").code == 0
    split = ("--order", "none", "--experts", 4, "--top-k", 2)
    refused(
        stretto("adopt", narrow, "-o", tmp_path / "no", *split, "--dtype", "float16"), "--dtype float16", "bfloat16"
    )
    printed = adopted(stretto, narrow, tmp_path / "run", *split).out
    assert "writing bfloat16" in printed and "--dtype float32 keeps them exact" in printed
    found = read_checkpoint(tmp_path / "run/checkpoint").model
    assert found.embedding.weight.dtype == torch.bfloat16
    refused(
        stretto("export", tmp_path / "run", "-o", tmp_path / "no", "--dtype", "float16"), "--dtype float16", "bfloat16"
    )
    assert stretto("export", tmp_path / "run", "-o", tmp_path / "file.gguf", "--gguf", "--dtype", "float16").code == 0
    copies = ("--method", "copy", "--dtype", "float16")
    adopted(stretto, narrow, tmp_path / "copies", *split, *copies)


def test_an_elastic_network_keeps_its_orders(stretto: Run, make: Make, tmp_path: Path) -> None:
    order = tuple(tuple(reversed(range(8))) for _ in range(4))
    source = make("glm elastic", ours=True, expert_order=order)
    assert "elastic already" in adopted(stretto, source, tmp_path / "run").out
    assert read_checkpoint(tmp_path / "run/checkpoint").config == read_checkpoint(source).config
    biases = [read_checkpoint(each).model.blocks[1].mlp.bias_WE for each in (source, tmp_path / "run/checkpoint")]
    assert torch.equal(*biases)


def test_where_generation_ends_is_the_sources(stretto: Run, make: Make, tmp_path: Path) -> None:
    source = make("qwen")
    edit_json(source / "generation_config.json", eos_token_id=[7, 11], temperature=0.6)
    adopted(stretto, source, tmp_path / "run", "--order", "none")
    kept = json.loads((tmp_path / "run/checkpoint/generation_config.json").read_text())
    assert (kept["eos_token_id"], kept["temperature"]) == ([7, 11], 0.6)
    cut = stretto("extract", tmp_path / "run", "--subnet", "half", "-o", tmp_path / "half")
    assert cut.code == 0, cut.err
    assert json.loads((tmp_path / "half/generation_config.json").read_text()) == kept


# --- going on ---------------------------------------------------------------------------------------------------------


def test_what_was_measured_is_not_measured_again(
    stretto: Run, make: Make, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = make(), tmp_path / "run"

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(adopt, "write_checkpoint", interrupted)
        assert stretto("adopt", source, "-o", out, "--calibration", text, *QUICK).code == 130
    assert sorted(path.name for path in out.iterdir()) == [".lock", "data", "order.json", "run.json"]
    with monkeypatch.context() as patched:
        patched.setattr(adopt, "survey", interrupted)
        other = stretto("adopt", source, "-o", out, "--calibration", text, *QUICK, "--order", "frequency")
        assert other.code == 130  # another criterion is measured again
        assert (
            "using the measurement of an earlier call"
            in adopted(stretto, source, out, "--calibration", text, *QUICK).out
        )
    assert read_checkpoint(out / "checkpoint").config.expert_order is not None


def test_ctrl_c_while_writing_leaves_nothing_half_written(
    stretto: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = make(), tmp_path / "run"
    left = iter(range(3))

    def interrupted(*arguments: object) -> torch.Tensor:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return to_stored(*arguments)

    to_stored = adopt.write_checkpoint.__globals__["to_stored"]
    monkeypatch.setitem(adopt.write_checkpoint.__globals__, "to_stored", interrupted)
    assert stretto("adopt", source, "-o", out, "--order", "none", "--dtype", "bfloat16").code == 130
    assert sorted(path.name for path in out.iterdir()) == [".lock", "run.json"]
    monkeypatch.undo()


@pytest.mark.slow
def test_kill_9_anywhere_and_once_more(make: Make, text: Path, tmp_path: Path) -> None:
    """Killed again and again, later each time; what it makes in the end is what an undisturbed call makes."""
    source = make(num_layers=12)
    command = [sys.executable, "-m", "stretto", "adopt", source, "--calibration", text, "--dtype", "bfloat16"]

    def start(out: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*map(str, command), "-o", str(out)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    undisturbed = start(tmp_path / "a")
    assert undisturbed.wait() == 0, undisturbed.stderr and undisturbed.stderr.read()
    num_killed, delay_s = 0, 2.0
    while True:
        running = start(tmp_path / "b")
        try:
            running.wait(delay_s)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGKILL)
            running.wait()
            num_killed += 1
            assert not (tmp_path / "b/checkpoint").exists() or read_checkpoint(tmp_path / "b/checkpoint")
            delay_s *= 1.3
            continue
        break
    assert running.returncode == 0 or "holds a checkpoint already" in running.stderr.read()  # type: ignore[union-attr]
    assert num_killed > 1
    assert [path.name for path in (tmp_path / "b").glob(".*.partial")] == []
    a, b = (read_lineage(tmp_path / each / "checkpoint") for each in "ab")
    assert a.weights_hash == b.weights_hash
    files = [(tmp_path / each / "checkpoint/stretto.json").read_text() for each in "ab"]
    assert files[0] == files[1]


# --- the hub ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_name_on_the_hub(make: Make, tmp_path: Path) -> None:
    """Real HTTP, to a stand-in: a connection that breaks, names that are not there, then the same without a network."""
    source = make("qwen")
    (source / "modeling.py").write_text("raise SystemExit('code was run')")
    (source / "original").mkdir()  # as in gpt-oss; the next file is as in Mistral
    for other in (source / "original" / "model.safetensors", source / "consolidated.safetensors"):
        other.write_bytes(b"the weights once more")
    edit_json(source / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Model"})
    with hub("owner/tiny", source, breaks_at=50_000) as (address, asked):

        def call(name: str, out: str, **environment: str) -> subprocess.CompletedProcess[str]:
            told = {
                **os.environ,
                "HF_ENDPOINT": address,
                "HF_HUB_OFFLINE": "0",
                "HF_HOME": str(tmp_path / "hf"),
                **environment,
            }
            command = [
                sys.executable,
                "-m",
                "stretto",
                "adopt",
                name,
                "-o",
                str(tmp_path / out),
                "--order",
                "none",
            ]
            return subprocess.run(command, env=told, text=True, capture_output=True, check=False)

        done = call("owner/tiny", "a")
        assert done.returncode == 0, done.stderr
        assert len([name for name in asked if name.endswith(".safetensors")]) == 1 + len(
            list(source.glob("model*.safetensors"))
        )
        assert not {"consolidated.safetensors", "original/model.safetensors"} & set(asked)
        assert "modeling.py" not in asked and "code to be run, which is never run" in done.stdout
        asked.clear()
        missing = call("owner/other", "c")
        assert missing.returncode == 2 and "the hub has no such model" in missing.stderr
        offline = call("owner/tiny", "b", HF_HUB_OFFLINE="1")
        assert offline.returncode == 0 and not asked, offline.stderr
    unreachable = call("owner/else", "d")
    assert unreachable.returncode == 2, unreachable.stderr
    assert unreachable.stderr.splitlines()[-1].startswith("stretto: owner/else: no such folder here")
    assert torch.equal(
        read_checkpoint(tmp_path / "a/checkpoint").model.logits(IDS), read_checkpoint(source).model.logits(IDS)
    )


def test_an_offline_machine_gets_one_line(stretto: Run, tmp_path: Path) -> None:
    refused(
        stretto("adopt", "owner/tiny", "-o", tmp_path / "run"),
        "owner/tiny: no such folder here, and the hub cannot be reached",
        "name a folder",
    )
    assert not (tmp_path / "run").exists()


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_taken(stretto: Run, make: Make, tmp_path: Path) -> None:
    source, out = make("qwen"), tmp_path / "run"
    (out / "notes").mkdir(parents=True)
    refused(stretto("adopt", source, "-o", out), str(out), "holds notes")
    (out / "notes").rmdir()
    with claimed(out):
        refused(stretto("adopt", source, "-o", out), "running in it")
    (out / "run.json").write_text(json.dumps({"stage": "heal", "tokenizer": "x"}))
    refused(stretto("adopt", source, "-o", out), "a heal run")
    (out / "run.json").unlink()
    adopted(stretto, source, out, "--order", "none")
    refused(stretto("adopt", source, "-o", out), "holds a checkpoint already")
    refused(stretto("adopt", out, "-o", out), "holds a checkpoint already")


def test_no_such_source(stretto: Run, tmp_path: Path) -> None:
    refused(stretto("adopt", "nowhere", "-o", tmp_path / "run"), "nowhere: no such folder", "not a name on the hub")
    refused(stretto("adopt", tmp_path, "-o", tmp_path / "run"), "config.json: no such file")
    assert not (tmp_path / "run").exists()


def test_a_source_that_cannot_be_adopted(stretto: Run, make: Make, text: Path, tmp_path: Path) -> None:
    source, out = make("qwen"), tmp_path / "run"

    def call(*arguments: object) -> Result:
        return stretto("adopt", source, "-o", out, "--calibration", text, *arguments)

    shutil.move(source / "tokenizer.json", tmp_path / "kept.json")
    refused(call(), "tokenizer.json: no such file")
    shutil.move(tmp_path / "kept.json", source / "tokenizer.json")
    edit_json(source / "config.json", model_type="mamba2")
    refused(call(), "model_type", "'mamba2' is not a supported architecture")
    edit_json(source / "config.json", model_type="qwen3_moe", hidden_act="relu")
    refused(call(), "hidden_act")
    edit_json(source / "config.json", hidden_act="silu")
    refused(call("--order", "best"), "order")
    refused(call("--calibration-tokens", 0), "--calibration-tokens")
    refused(call("--top-k", 2), "--top-k 2", "--experts")
    refused(call("--experts", 4), "MoE layers already")
    first = sorted(source.glob("model-*"))[0]
    put(first.name, "model.embed_tokens.weight", torch.zeros(2, 2))(source)
    assert call().code == 2
    assert not out.exists() or sorted(path.name for path in out.iterdir()) in ([".lock"], [".lock", "data"])


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", "null", ("config.json: not a JSON object",)),
        ("config.json", "[" * 99_999, ("config.json: not readable as JSON",)),
        (
            "generation_config.json",
            '{"eos_token_id": []}',
            ("generation_config.json: eos_token_id: [] is not a token id",),
        ),
        ("generation_config.json", '{"pad_token_id": "x"}', ("pad_token_id: 'x' is not a token id",)),
        ("tokenizer_config.json", "[]", ("tokenizer_config.json: ",)),
        ("stretto.json", "[]", ("stretto.json: schema_version",)),
        ("lineage.json", '{"schema_version": 1}', ("lineage.json: ",)),
    ],
)
def test_a_damaged_file_is_refused_before_anything_is_measured(
    stretto: Run,
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    content: str,
    words: tuple[str],
) -> None:
    source = make("qwen")
    (source / file).write_text(content)
    monkeypatch.setattr(adopt, "_text", None)
    refused(stretto("adopt", source, "-o", tmp_path / "run"), *words)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_does_not_match_the_embedding(
    stretto: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make("qwen", vocab_size=300)
    train_tokenizer(iter([" ".join(f"w{number}x{number}" for number in range(999))]), 400).save(source)
    monkeypatch.setattr(adopt, "_text", None)
    refused(stretto("adopt", source, "-o", tmp_path / "run"), str(source), "the network vocab_size 300")
    assert not (tmp_path / "run").exists()


def test_a_source_that_is_the_output_stays_as_it_was(stretto: Run, make: Make) -> None:
    source = make("qwen")
    before = {path: path.read_bytes() for path in source.iterdir()}
    refused(stretto("adopt", source, "-o", source), "which is not part of a run; choose a new folder")
    assert {path: path.read_bytes() for path in source.iterdir()} == before
    adopted(stretto, source, source / "run", "--order", "none")
    assert read_checkpoint(source / "run/checkpoint").config == read_checkpoint(source).config


def test_weights_that_are_no_numbers(stretto: Run, make: Make, text: Path, tmp_path: Path) -> None:
    source = make("qwen", num_layers=6)
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.3.input_layernorm.weight"
    put(index[name], name, torch.full((64,), torch.nan))(source)
    told = stretto("adopt", source, "-o", tmp_path / "run", "--calibration", text, *QUICK)
    refused(told, str(source), "not finite", "--order none")
    assert not (tmp_path / "run" / "checkpoint").exists() and not (tmp_path / "run" / "order.json").exists()


def test_text_shorter_than_a_batch(stretto: Run, make: Make, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("line 12: 144 is the square of 12\n" * 9)
    result = stretto("adopt", make("qwen"), "-o", tmp_path / "run", "--calibration", short)
    refused(result, "--calibration: the text has", "--order none")
    assert not (tmp_path / "run/checkpoint").exists()


def test_a_full_disk(stretto: Run, make: Make, tmp_path: Path) -> None:
    """Known beforehand, or found out while writing; what fits can be called again."""
    source, out = make(), tmp_path / "small" / "run"
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(out.parent)]
    out.parent.mkdir()
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        refused(stretto("adopt", source, "-o", out, "--order", "none"), "needs", "are free")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(adopt, "_require_room", lambda *_: None)
            for dtype in ("auto", "bfloat16"):
                told = stretto("adopt", source, "-o", out, "--order", "none", "--dtype", dtype)
                refused(told, str(out), "cannot be written", "free some space")
                assert sorted(path.name for path in out.iterdir()) == [".lock", "run.json"]
        subprocess.run(["mount", "-o", "remount,size=3m", str(out.parent)], check=True)
        adopted(stretto, source, out, "--order", "none")
    finally:
        subprocess.run(["umount", str(out.parent)], check=True)


@pytest.mark.slow
def test_what_it_had_cost_is_unknown_unless_told(stretto: Run, make: Make, tmp_path: Path) -> None:
    source = make("qwen")
    assert stretto("adopt", source, "--order", "none", "-o", tmp_path / "a").code == 0
    assert (
        "Not included: the training of a before its adoption, unknown (adopted)." in stretto("cost", tmp_path / "a").out
    )
    told = ("--order", "none", "--parent-flops", "6e21", "--parent-tokens", "1e12")
    assert stretto("adopt", source, *told, "-o", tmp_path / "b").code == 0
    said = stretto("cost", tmp_path / "b").out
    assert "before its adoption, 6.00 ZFLOPs and 1.00T tokens, as published." in said and "unknown" not in said
    refused(stretto("adopt", tmp_path / "b", *told, "-o", tmp_path / "c"), "--parent-flops", "has a record")
    for option, value in (("--parent-flops", "-1"), ("--calibration-tokens", "0"), ("--dtype", "int4")):
        refused(stretto("adopt", tmp_path / "b", option, value, "-o", tmp_path / "c"), f"stretto: {option}: must be")
    refused(stretto("adopt", source, "--parent-tokens", "-5", "-o", tmp_path / "d"), "--parent-tokens: must be")
