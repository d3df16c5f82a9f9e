"""Merges of written checkpoints against a slow reference over their files, and against mergekit where it is installed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.records import ledger, read_lineage
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.post.merge import MergeOptions, add_differences, merge, slerp
from stretto.text.tokenizer import train_tokenizer
from tests.post.siblings import checkpoints

ROUNDING = 2e-6
"""Of weights of order 1 in fp32, added in another order."""


def files(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def reference(method: str, base: Tensor, tensors: Sequence[Tensor], options: MergeOptions) -> np.ndarray:
    """Element by element, in fp64."""
    start, others = base.double().numpy(), [tensor.double().numpy() for tensor in tensors]
    weights = options.weights or (1.0,) * len(others)
    if method == "average":
        return sum(weight * other for weight, other in zip(weights, others, strict=True)) / sum(weights)
    if method == "slerp":
        first, second = others
        cosine = (first * second).sum() / max(1e-8, np.linalg.norm(first) * np.linalg.norm(second))
        if abs(cosine) > 0.9995 or not first.any():
            return (1 - options.t) * first + options.t * second
        angle = np.arccos(cosine)
        return (np.sin((1 - options.t) * angle) * first + np.sin(options.t * angle) * second) / np.sin(angle)
    deltas = [other - start for other in others]
    if method == "ties":
        for delta in deltas:
            num_kept = max(1, int(options.density * delta.size))
            delta[np.abs(delta) < np.sort(np.abs(delta).ravel())[-num_kept]] = 0
    shares = np.array(weights).reshape(-1, *[1] * start.ndim)
    moves = shares * np.stack(deltas)
    if method == "ties":
        agrees = np.sign(moves) == np.where(moves.sum(0) >= 0, 1, -1)
        total = (shares * agrees).sum(0)
        moves = np.where(agrees, moves, 0) / np.where(total == 0, 1, total)
    return start + options.scale * moves.sum(0)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("glm elastic", method) for method in ("average", "task-arithmetic", "ties", "slerp")),
        ("qwen with biases", "ties"),
        ("ernie", "slerp"),
    ],
)
def test_every_stored_tensor_is_merged_by_itself(tmp_path: Path, name: str, method: str) -> None:
    size = {"hidden_size": 16, "head_dim": 8, "expert_intermediate_size": 8, "num_experts": 4, "vocab_size": 290}
    widths = {"widths": (4, 2), "num_branches": 3} if name == "glm elastic" else {}
    base, *parents = checkpoints(tmp_path, name, 2 if method == "slerp" else 3, **size, **widths)
    weights = () if method == "slerp" else (1.0, 0.5, 2.0)
    options = MergeOptions(method=method, weights=weights, scale=0.7, density=0.3, t=0.3)
    merge(parents, base, tmp_path / "out", options)
    start, others, found = files(base), [files(parent) for parent in parents], files(tmp_path / "out")
    assert found.keys() == start.keys()
    for key, tensor in found.items():
        pieces = [other[key] for other in others]
        if key.endswith("e_score_correction_bias"):
            shares = MergeOptions(method="average", weights=weights or (0.7, 0.3))
            expected = reference("average", start[key], pieces, shares)
        else:
            expected = reference(method, start[key], pieces, options)
        np.testing.assert_allclose(tensor.double().numpy(), expected, atol=ROUNDING, err_msg=key)


def test_biases_of_every_width_are_means_and_the_rest_is_the_bases(tmp_path: Path) -> None:
    base, *parents = checkpoints(tmp_path, num_layers=2, hidden_size=16)
    merge(parents, base, tmp_path / "out", MergeOptions(method="ties"))
    before, after = read_checkpoint(base), read_checkpoint(tmp_path / "out")
    assert after.config == before.config
    assert after.presets == before.presets
    states = [read_checkpoint(parent).model.state_dict() for parent in parents]
    biases = [key for key in states[0] if key.endswith("bias_WE")]
    assert biases
    for key in biases:
        assert len(states[0][key]) == 4
        mean = torch.stack([state[key] for state in states]).mean(0)
        torch.testing.assert_close(after.model.state_dict()[key], mean)
    for place, (weights, meant) in enumerate(
        {(1.0, -0.9, 1.0): (states[0][key] + states[2][key]) / 2, (0.0, -1.0, 0.0): mean}.items()
    ):
        out = tmp_path / str(place)
        merge(parents, base, out, MergeOptions(method="task-arithmetic", weights=weights))
        torch.testing.assert_close(read_checkpoint(out).model.state_dict()[key], meant)


def test_lineage_and_cost(tmp_path: Path) -> None:
    base, *parents = checkpoints(tmp_path, num_layers=2, hidden_size=16)
    merge(parents, base, tmp_path / "out", MergeOptions(method="task-arithmetic"))
    lineage = read_lineage(tmp_path / "out")
    assert [parent.name for parent in lineage.parents] == ["0", "1", "2", "3"]
    assert lineage.receipt.flops == 2 * 3 * lineage.total_params
    assert lineage.receipt.bytes_read == sum((each / "model.safetensors").stat().st_size for each in (base, *parents))
    assert ledger(lineage).with_parents.flops == 1111 + lineage.receipt.flops  # each once


def test_what_was_not_learnt_is_not_merged(tmp_path: Path) -> None:
    base, parent, *_ = checkpoints(tmp_path, num=1, num_layers=2, hidden_size=16)
    for method in ("task-arithmetic", "ties"):
        merge([parent, base], base, tmp_path / "out", MergeOptions(method=method, density=1.0))
        for key, tensor in files(tmp_path / "out").items():
            if not key.endswith("e_score_correction_bias"):
                torch.testing.assert_close(tensor, files(parent)[key], atol=ROUNDING, rtol=0)
    merge([parent, parent], None, tmp_path / "out", MergeOptions(method="average"))
    assert all(torch.equal(tensor, files(parent)[key]) for key, tensor in files(tmp_path / "out").items())


def test_dare_keeps_its_share_and_the_size_of_what_it_keeps() -> None:
    base, delta = torch.zeros(400, 100), torch.randn(400, 100, generator=torch.Generator().manual_seed(0))
    options = MergeOptions(method="dare", density=0.2)
    draws = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    first, again, other = (add_differences(base, [delta], (1.0,), options, draw) for draw in draws)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert float(first.abs().sum()) == pytest.approx(float(delta.abs().sum()), rel=1e-4)
    share = float((first != 0).double().mean())
    assert abs(share - 0.2) < 5 * (0.2 * 0.8 / base.numel()) ** 0.5


def test_slerp_stays_on_the_sphere() -> None:
    rng = torch.Generator().manual_seed(0)
    first, second = (torch.nn.functional.normalize(torch.randn(9, 9, generator=rng).flatten(), dim=0) for _ in range(2))
    assert torch.equal(slerp(first, second, 0.0), first)
    for t in (0.25, 0.5, 1.0):
        assert float(slerp(first, second, t).norm()) == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(slerp(first, 2 * first, 0.5), 1.5 * first)  # one direction: a straight line


@pytest.mark.parametrize("method", ["task-arithmetic", "ties", "dare", "dare-ties", "slerp"])
def test_mergekit_finds_the_same(method: str) -> None:
    pytest.importorskip("mergekit", reason="mergekit is not installed")
    from mergekit.merge_methods.registry import get
    from mergekit.merge_methods.slerp import slerp as their_slerp

    rng = torch.Generator().manual_seed(0)
    base, *tensors = (torch.randn(40, 30, generator=rng) for _ in range(4))
    if method == "slerp":
        expected = their_slerp(torch.tensor([0.3]), tensors[0][None], tensors[1][None])[0]
        torch.testing.assert_close(slerp(tensors[0], tensors[1], 0.3), expected)
        return
    from types import SimpleNamespace

    name = {"task-arithmetic": "task_arithmetic", "dare": "dare_linear", "dare-ties": "dare_ties"}.get(method, method)
    theirs = get(name)
    entries = [SimpleNamespace(id=number, tensor=tensor) for number, tensor in enumerate(tensors)]
    weights, group = (1.0, 0.5, 2.0), SimpleNamespace(base=SimpleNamespace(tensor=base), non_base=entries)
    told = {"normalize": theirs.default_normalize, "rescale": theirs.default_rescale, "lambda": 0.7, "int8_mask": False}
    told |= {"weight": dict(enumerate(weights)), "density": dict.fromkeys(range(3), 0.3)}
    torch.manual_seed(5)
    expected = theirs.merge_group(group, **told)
    options = MergeOptions(method=method, scale=0.7, density=0.3)
    found = add_differences(base, tensors, weights, options, torch.Generator().manual_seed(5))
    torch.testing.assert_close(found, expected)


def refused(match: str, *arguments: Any) -> None:
    with pytest.raises(UserError, match=match):
        merge(*arguments)


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    base, a, b = checkpoints(tmp_path, num=2, num_layers=2, hidden_size=16)
    out, ties = tmp_path / "out", MergeOptions(method="ties")
    refused("--base: missing: ties", [a, b], None, out, ties)
    refused("two or more checkpoints, not 1", [a], base, out, ties)
    refused("two checkpoints, not 3", [a, b, base], None, out, MergeOptions(method="slerp"))
    refused("--weights: 1 weights for 2", [a, b], base, out, MergeOptions(method="ties", weights=(1.0,)))
    refused("config.json: no such file", [a, tmp_path / "nobody"], base, out, ties)
    with pytest.raises(ValueError, match="finite"):
        MergeOptions(method="average", weights=(1.0, float("nan")))
    with pytest.raises(ValueError, match="sum to 0"):
        MergeOptions(method="average", weights=(0.1, 0.2, -0.3))
    assert MergeOptions(method="average", weights=(1e-13, 1e-13)).weights == (1e-13, 1e-13)
    with pytest.raises(ValueError, match="slerp has none; give t"):
        MergeOptions(method="slerp", weights=(0.3, 0.7))
    orders = tuple(tuple(range(8)) for _ in range(2))
    reordered = read_checkpoint(a)
    config = reordered.config.replace(expert_order=orders)
    write_checkpoint(tmp_path / "reordered", reordered.model, config, tokenizer_dir=a)
    refused(
        "expert_order: differs from that of .* keep different experts", [tmp_path / "reordered", b], base, out, ties
    )
    shutil.copytree(a, tmp_path / "foreign")
    train_tokenizer(iter(["another text " * 9]), 270).save(tmp_path / "foreign")
    refused("tokenizer.json: differs from that of", [tmp_path / "foreign", b], base, out, ties)
    for place in ("other", "strange"):
        (tmp_path / place).mkdir()
    other, *_ = checkpoints(
        tmp_path / "other", num=0, num_layers=2, hidden_size=16, num_experts=4, widths=(4, 2), num_branches=2
    )
    refused("num_branches: 2, but 4", [other, b], base, out, ties)
    stranger, *_ = checkpoints(tmp_path / "strange", num=0, num_layers=2, hidden_size=16)
    refused("has no ancestor in common", [a, stranger], base, out, ties)
    assert not out.exists()
