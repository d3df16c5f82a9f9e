"""Muon against torch's own, and what an orthogonal update is."""

from __future__ import annotations

import pytest
import torch

from stretto.optim.build import Muon, orthogonal


@pytest.mark.parametrize("shape", [(24, 24), (48, 16), (16, 48), (5, 32, 20)])
def test_singular_values_come_close_to_one_and_directions_stay(shape: tuple[int, ...]) -> None:
    update = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonal(update)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.4 and values.max() < 1.3, values
    left, _, right = torch.linalg.svd(update, full_matrices=False)
    # in the update's own singular directions the result is diagonal: nothing was rotated
    inside = left.mT @ result @ right.mT
    off = inside - torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-4


def test_a_stack_is_its_matrices_one_by_one() -> None:
    stack = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(orthogonal(stack), torch.stack([orthogonal(each) for each in stack]), atol=1e-6)


def test_scale_of_the_gradient_does_not_matter() -> None:
    update = torch.randn(16, 12, generator=torch.Generator().manual_seed(0))
    # the norm is divided out up to its 1e-7 guard
    assert torch.allclose(orthogonal(update), orthogonal(1e3 * update), atol=1e-5)


@pytest.mark.parametrize("shape", [(20, 20), (40, 16)])
def test_a_few_steps_equal_torchs_own_to_bf16(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    settings = {"lr": 0.02, "weight_decay": 0.1}
    optimizers = Muon([{"params": [ours], **settings}], lr=0.02), torch.optim.Muon([theirs], **settings)
    for _ in range(5):
        gradient = torch.randn(shape, generator=generator)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    # torch iterates in bf16: 5 iterations of 8 bits, on steps of size lr
    assert (ours - theirs).abs().max() < 5 * 5 * 2**-8 * 0.02
    assert not torch.equal(ours, start)


def test_state_survives_a_round_trip() -> None:
    parameter = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    optimizer = Muon([{"params": [parameter]}], lr=0.1)
    parameter.grad = torch.ones(8, 8)
    optimizer.step()
    other = Muon([{"params": [parameter]}], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    kept, restored = optimizer.state[parameter], other.state[parameter]
    assert torch.equal(kept["momentum_buffer"], restored["momentum_buffer"])
