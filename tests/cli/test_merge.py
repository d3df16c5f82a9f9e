"""`stretto merge` as a user calls it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from stretto.model.checkpoint import stores_integers
from tests.api.conftest import Run, refused
from tests.post.siblings import checkpoints


def test_merge(tmp_path: Path, stretto: Run) -> None:
    base, a, b = checkpoints(tmp_path, num=2, num_layers=2, hidden_size=16)
    out = tmp_path / "out"
    done = stretto("merge", "task-arithmetic", a, b, "--base", base, "-o", out, "--weights", "1,0.5", "--scale", 2)
    assert (done.code, done.out.splitlines()[-1]) == (0, f"checkpoint: {out}")
    start, first, second, found = (load_file(each / "model.safetensors") for each in (base, a, b, out))
    name = "model.layers.1.self_attn.q_proj.weight"
    expected = start[name] + 2 * (first[name] - start[name]) + (second[name] - start[name])
    torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=0)


def test_an_existing_result_is_replaced_only_by_force(tmp_path: Path, stretto: Run) -> None:
    base, a, b = checkpoints(tmp_path, num=2, num_layers=2, hidden_size=16)
    out, one = tmp_path / "out", tmp_path / "one.gguf"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    one.write_text("mine")
    for command in (
        ("merge", "average", a, b, "-o", out),
        ("extract", base, "--subnet", "full", "-o", out),
        ("export", base, "-o", out),
        ("export", base, "--gguf", "-o", one),
        ("heal", base, "--data", a, "-o", out),
    ):
        refused(stretto(*command), f"{command[-1]}: exists already; choose another name, or replace it with --force")
    assert (out / "notes.txt").read_text() == one.read_text() == "mine"
    (out / "notes.txt").unlink()
    assert stretto("merge", "average", a, b, "-o", out).code == 0
    before = (out / "model.safetensors").read_bytes()
    refused(stretto("merge", "average", a, base, "-o", out), "exists already")
    assert (out / "model.safetensors").read_bytes() == before
    assert stretto("merge", "average", a, base, "-o", out, "--force").code == 0
    assert (out / "model.safetensors").read_bytes() != before


def test_a_checkpoint_that_is_read_is_never_replaced(tmp_path: Path, stretto: Run) -> None:
    base, a, b = checkpoints(tmp_path, num=2, num_layers=2, hidden_size=16)
    before = (base / "model.safetensors").read_bytes(), (a / "model.safetensors").read_bytes()
    for out in (a, base):
        refused(
            stretto("merge", "task-arithmetic", a, b, "--base", base, "-o", out, "--force"),
            f"{out}: contains the checkpoint that is read, which would be replaced; choose another folder",
        )
    assert ((base / "model.safetensors").read_bytes(), (a / "model.safetensors").read_bytes()) == before


def test_a_merge_of_integer_weights_says_that_its_weights_are_not_integers(tmp_path: Path, stretto: Run) -> None:
    _, a, b = checkpoints(tmp_path, num=2, num_layers=2, hidden_size=16)
    integers, out = tmp_path / "integers", tmp_path / "out"
    assert stretto("quantise", a, "-o", integers, "--group", 16).code == 0
    done = stretto("merge", "average", integers, b, "-o", out)
    said = f"{integers}: its integer weights are dequantised for the merge; quantise the merged checkpoint again"
    assert (done.code, (done.out + done.err).count("dequantised")) == (0, 1) and said in done.out + done.err
    assert stores_integers(integers) and not stores_integers(out)


def test_merge_refuses(tmp_path: Path, stretto: Run) -> None:
    base, a = checkpoints(tmp_path, num=1, num_layers=2, hidden_size=16)
    arguments = (a, a, "--base", base, "-o", tmp_path / "out")
    refused(stretto("merge", "tyes", *arguments), "method", "ties")
    refused(stretto("merge", "ties", *arguments, "--weights", "1,much"), "weights", "number")
    refused(stretto("merge", "ties", *arguments, "--density", "0"), "density")
    refused(stretto("merge", "ties", a, a, "-o", tmp_path / "out"), "--base")
    assert not (tmp_path / "out").exists()
