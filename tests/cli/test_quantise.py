"""`stretto quantise`: the command, what other commands do with its checkpoint, and refusals."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from stretto import load
from stretto.base.paths import CHECKPOINT
from stretto.base.records import read_lineage
from stretto.model.checkpoint import read_checkpoint, read_integers, read_presets, stores_integers
from stretto.model.elastic import slice_integers
from stretto.ops.int_weights import IntScheme
from stretto.post.quantise import round_to_nearest
from stretto.text.chat import CHATML
from tests.api.conftest import PRESETS, Run, refused


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_one_file_serves_every_size(stretto: Run, served_run: Path, tmp_path: Path, dtype: str) -> None:
    quantised, small, exact = (tmp_path / name for name in ("quantised", "small", "exact"))
    done = stretto("quantise", served_run, "--dtype", dtype, "--group", 16, "-o", quantised)
    assert not done.code and "head: tied to the embedding" in done.out, done
    assert read_presets(quantised) == PRESETS and read_lineage(quantised).stage == "quantise"
    integers = read_integers(quantised)
    assert {weight.bits for name, weight in integers.items() if "blocks" in name} == {int(dtype[3:])}
    assert integers["head.weight"].bits == 8 and "embedding.weight" not in integers

    # slicing the file gives the integers of the quantised slice
    assert not stretto("extract", quantised, "--subnet", "half", "-o", small).code
    assert not stretto("extract", served_run / CHECKPOINT, "--subnet", "half", "-o", exact).code
    scheme = IntScheme(int(dtype[3:]), 16)
    sliced, state = read_integers(small), read_checkpoint(exact).model.state_dict()
    inside = [name for name in sliced if name.startswith("blocks.")]
    for name, meant in round_to_nearest(state, dict.fromkeys(inside, scheme)).items():
        assert torch.equal(sliced[name].codes, meant.codes) and torch.equal(sliced[name].scales, meant.scales), name
    assert torch.equal(sliced["head.weight"].codes, integers["head.weight"].codes)

    for size in ("full", "half", "corner"):
        answer = stretto("generate", quantised, "--prompt", "steps", "--subnet", size, "--max-tokens", 4)
        assert not answer.code, answer
        model = load(quantised)
        assert model.generate("steps", subnet=size, max_tokens=4).text in answer.out
        assert "_checkpoint" not in vars(model), (
            "values of the weights that the engine multiplies as integers were read"
        )
    exported = tmp_path / "exported"
    assert not stretto("export", quantised, "-o", exported).code
    assert not stores_integers(exported)
    values, whole = read_checkpoint(exported).model.state_dict(), read_checkpoint(quantised).model.state_dict()
    assert all(torch.equal(values[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("has_template", [True, False])
def test_the_next_command_can_be_run(stretto: Run, served_run: Path, tmp_path: Path, has_template: bool) -> None:
    source = shutil.copytree(served_run / CHECKPOINT, tmp_path / "source")
    if not has_template:
        (source / "chat_template.jinja").unlink()
    hints = {}
    for command, options in (("quantise", ("--group", 16)), ("adopt", ("--order", "none"))):
        result = stretto(command, source, "-o", tmp_path / command, *options)
        assert not result.code, result
        hints[command] = result.out.split("next: ")[1].split(";")[0]
    if has_template:
        assert hints == {command: f"stretto chat {tmp_path / command}" for command in hints}
    else:
        assert hints == {command: f"stretto generate {tmp_path / command} --prompt …" for command in hints}
        assert not stretto(*hints["quantise"].split()[1:], "--max-tokens", 2).code


def test_the_next_commands_quote_a_folder_with_a_space(stretto: Run, served_run: Path, tmp_path: Path) -> None:
    options = {"quantise": ("--group", 16), "adopt": ("--order", "none"), "extract": ("--subnet", "corner")}
    for command, more in options.items():
        out = tmp_path / f"an {command}"
        result = stretto(command, served_run / CHECKPOINT, "-o", out, *more)
        assert not result.code, result
        for hint in result.out.split("next: ")[1].split("; "):
            assert shlex.split(hint)[2] == str(out)


def test_the_next_command_names_the_folder_of_an_output_in_the_home_folder(
    stretto: Run, served_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for command, options in (("quantise", ("--group", 16)), ("adopt", ("--order", "none"))):
        result = stretto(command, served_run / CHECKPOINT, f"--out=~/{command}", *options)  # no shell expands this ~
        assert not result.code, result
        assert f"next: stretto chat {tmp_path / command}; " in result.out and "~" not in result.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "method", "type_name"),
    [("int8", "rtn", "q8_0"), ("int4", "rtn", "q4_0"), ("int4", "gptq", "q4_0"), ("int4", "gptq", "q8_0")],
)
def test_integers_are_exact_in_llama_cpp_s_types(
    stretto: Run, recipe: Path, text: Path, tmp_path: Path, dtype: str, method: str, type_name: str
) -> None:
    run, quantised, file = tmp_path / "run", tmp_path / "quantised", tmp_path / "model.gguf"
    widths = ["--set", "model.expert_intermediate_size=32", "--set", "train.steps=1"]
    assert not stretto("pretrain", recipe, "--data", text, "--out", run, *widths).code
    options = ("--dtype", dtype, "--method", method, "--calibration-tokens", 512)
    assert not stretto("quantise", run, *options, "-o", quantised).code
    assert not stretto("export", quantised, "--gguf", "--dtype", type_name, "-o", file).code
    whole, packed = read_checkpoint(quantised).model.state_dict(), read_checkpoint(file).model.state_dict()
    integers = read_integers(quantised)
    assert integers and all(torch.equal(packed[name], whole[name]) for name in integers)


@pytest.mark.slow
def test_gptq_reads_the_run_s_own_text_and_healing_dequantises(
    stretto: Run, recipe: Path, healing: Path, text: Path, tmp_path: Path
) -> None:
    run, quantised, small, healed = (tmp_path / name for name in ("run", "quantised", "small", "healed"))
    assert not stretto("pretrain", recipe, "--data", text, "--out", run).code
    options = ("--dtype", "int4", "--group", 16, "--method", "gptq", "--calibration-tokens", 512)
    assert not stretto("quantise", run, *options, "--zeros", "-o", quantised).code
    integers = read_integers(quantised)
    assert integers["blocks.0.mlp.down"].zeros is not None and integers["head.weight"].zeros is None
    checkpoint = read_checkpoint(quantised)
    corner = checkpoint.presets["corner"].of(checkpoint.config)
    assert not stretto("extract", quantised, "--subnet", "corner", "-o", small).code
    sliced, found = slice_integers(checkpoint.config, corner, integers), read_integers(small)
    assert all(torch.equal(found[name].dequantise(), weight.dequantise()) for name, weight in sliced.items())
    done = stretto("heal", small, "-o", healed, "--data", run / "data" / "00", "--recipe", healing)
    assert not done.code and "integer weights are dequantised for healing" in done.out + done.err, done
    assert not stores_integers(healed) and stores_integers(small)
    # text of its own, for a checkpoint outside a run
    alone = tmp_path / "alone"
    assert not stretto("quantise", run / CHECKPOINT, *options, "--data", text, "-o", alone).code
    assert read_integers(alone).keys() == integers.keys()
    # one short document, of which nothing is held out
    little, calibrated = tmp_path / "little.txt", tmp_path / "calibrated"
    little.write_text("hello world\n" * 2)
    little_options = (*options[:-1], 4, "--data", little)
    assert not stretto("quantise", run / CHECKPOINT, *little_options, "-o", calibrated).code
    # conversations, which the checkpoint's chat template turns into text
    turns = [
        [{"role": "user", "content": f"After {n}?"}, {"role": "assistant", "content": f"{n + 1}"}] for n in range(200)
    ]
    chats, tuned = tmp_path / "chats.jsonl", tmp_path / "tuned"
    chats.write_text("".join(f"{json.dumps({'messages': each})}\n" for each in turns))
    (run / CHECKPOINT / "chat_template.jinja").write_text(CHATML)
    options = (*options, "--data", chats)
    refused(stretto("quantise", run / CHECKPOINT, *options, "-o", tuned), "it has messages", "--chat")
    assert not tuned.exists()
    assert not stretto("quantise", run / CHECKPOINT, *options, "--chat", "-o", tuned).code
    found, before = read_integers(tuned), read_integers(alone)
    assert found.keys() == before.keys()
    assert any(not torch.equal(found[name].codes, before[name].codes) for name in found)


def test_refusals(stretto: Run, served_run: Path, recipe: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def quantise(*options: object) -> None:
        refused(stretto("quantise", served_run / CHECKPOINT, "-o", out, *options[:-1]), *options[-1])
        assert not out.exists()

    quantise(("--group 32", "mlp.down has 16 inputs", "choose one of 8, 16"))
    quantise("--group", 0, ("--group 0", "choose one of 8, 16, 32"))
    quantise("--dtype", "int3", ("dtype", "int3"))
    quantise("--method", "awq", ("method", "awq"))
    quantise("--experts", "fp8", ("experts", "fp8"))
    nothing = ("--experts", "none", "--attention", "none", "--head", "none")
    quantise(*nothing, ("no part is left",))
    quantise("--zeros", "--group", 16, ("--zeros is for groups of 4 bits", "--dtype int4"))
    quantise("--group", 16, "--data", text, ("--data: rounding to nearest reads no text", "--method gptq"))
    quantise("--group", 16, "--method", "gptq", "--chat", ("--chat: describes the text of --data",))
    quantise("--group", 16, "--method", "gptq", ("has no training text", "--data"))
    quantise("--group", 16, "--method", "gptq", "--calibration-tokens", 0, ("--calibration-tokens", "greater than 0"))
    quantise("--group", 16, "--method", "gptq", "--data", tmp_path / "none", ("none",))
    little = tmp_path / "little.txt"
    little.write_text("hello")
    gptq = ("--group", 16, "--method", "gptq", "--data", little)
    quantise(*gptq, ("tokens of calibration text", "--calibration-tokens is 16,384", "give more text, or lower it"))

    assert not stretto("quantise", served_run, "-o", out, "--group", 16).code
    again = ("its weights are integers already",)
    refused(stretto("quantise", out, "-o", tmp_path / "again", "--group", 16), *again)
    refused(stretto("quantise", served_run, "-o", out, "--group", 16), "--force")
    refused(stretto("latency", out), f"{out}: its weights are integers", "measure the checkpoint that it was made from")
    assert not (out / "latency.json").exists()
    trained = ("integer weights cannot be trained", str(out))
    run = tmp_path / "run"
    refused(stretto("pretrain", recipe, "--from", out, "--data", text, "--out", run), *trained)
    refused(stretto("elasticize", out, "--data", text, "--out", run), *trained)
    refused(stretto("sft", "sft", "--model", out, "--data", text, "--out", run), *trained)
    refused(stretto("rl", "rl_gym", "--model", out, "--out", run), *trained)
    assert not run.exists()
