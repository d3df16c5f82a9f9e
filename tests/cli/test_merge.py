"""`stretto merge` as a user calls it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

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


def test_merge_refuses(tmp_path: Path, stretto: Run) -> None:
    base, a = checkpoints(tmp_path, num=1, num_layers=2, hidden_size=16)
    arguments = (a, a, "--base", base, "-o", tmp_path / "out")
    refused(stretto("merge", "tyes", *arguments), "method", "ties")
    refused(stretto("merge", "ties", *arguments, "--weights", "1,much"), "weights", "number")
    refused(stretto("merge", "ties", *arguments, "--density", "0"), "density")
    refused(stretto("merge", "ties", a, a, "-o", tmp_path / "out"), "--base")
    assert not (tmp_path / "out").exists()
