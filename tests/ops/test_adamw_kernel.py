"""The optimiser's kernel against the updates in parts, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from stretto.ops.master import low_part, master, split_parameter
from stretto.optim.compact import BLOCK, CompactAdamW, Update, update_in_parts
from stretto.optim.schedule import Moments

pytest.importorskip("triton")
from stretto.ops.kernels.adamw import update

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = (3, 18, 128)  # blocks that do not fill the last program
NUMBERS = Update(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=0, key=0)


def random(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def states(moments: Moments, kind: str) -> tuple[nn.Parameter, dict[str, Tensor]]:
    weight = nn.Parameter(random(0))
    if kind == "split":
        split_parameter(weight)
    elif kind == "bf16":
        weight.data = weight.data.bfloat16()
    optimizer = CompactAdamW([{"params": [weight]}], 0.0, (0.9, 0.95), 1e-8, moments, in_backward=True)
    optimizer._begin(weight, optimizer.state[weight])
    return weight, optimizer.state[weight]


def by_kernel(
    weight: nn.Parameter, gradient: Tensor, state: dict[str, Tensor], numbers: Update, *factors: Tensor
) -> None:
    scale, norm = factors
    update(
        *(weight.data, low_part(weight), gradient, state), lr=numbers.lr, betas=(numbers.beta1, numbers.beta2), eps=numbers.eps,
        weight_decay=numbers.weight_decay, step=numbers.step, key=numbers.key, scale=scale, norm=norm, block=BLOCK,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["fp32", "split", "bf16"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_the_kernel_makes_the_same_update(moments: Moments, kind: str) -> None:
    """To a few roundings of fp32: torch's kernel fuses products and sums. Stored numbers that are rounded to fewer bits may then be
    neighbours, in one place in thousands."""
    (weight, state), (other, others) = states(moments, kind), states(moments, kind)
    scale, norm = torch.tensor(0.7, device=DEVICE), torch.tensor(1.0, device=DEVICE)
    for step in range(1, 4):
        numbers, gradient = replace(NUMBERS, step=step, key=0x9E3779B9 + step), random(step).to(weight.dtype)
        update_in_parts(weight, gradient, state, numbers, scale, norm)
        by_kernel(other, gradient, others, numbers, scale, norm)
    error = (master(weight) - master(other)).abs()
    # weights of up to 5 (an ulp of 2⁻²¹), moved thrice by at most lr
    is_near = error <= 8 * 2.0**-21
    rare = 2e-3 if kind == "bf16" or moments != "fp32" else 0.0
    assert (~is_near).float().mean() <= rare and not torch.equal(master(weight), random(0))
    for name, tensor in state.items():
        difference = (tensor.float() - others[name].float()).abs()
        step = {torch.int8: 1.0, torch.uint8: 1.0, torch.bfloat16: 2.0**-7 * float(tensor.float().abs().max())}
        assert (difference <= step.get(tensor.dtype, 1e-6)).all(), name
        assert (difference > 1e-6).float().mean() <= 2e-3, name


@pytest.mark.parametrize("kind", ["split", "bf16"])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1])
def test_weights_and_moments_in_bf16_stay_nan(bits: int, kind: str) -> None:
    """CUDA's arithmetic returns 0x7fffffff, to which rounding would carry beyond the sign."""
    weight, state = states("bf16", kind)
    gradient = random(1)
    gradient.view(torch.int32)[0, 0, 3] = bits
    update(
        *(weight.data, low_part(weight), gradient, state), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=1, key=0, scale=None,
        norm=None, block=BLOCK,
    )  # fmt: skip
    for changed in (master(weight), state["exp_avg"], state["exp_avg_sq"]):
        assert changed.isnan().sum() == 1 and changed.view(SHAPE)[0, 0, 3].isnan()


def test_the_kernel_skips_a_gradient_that_is_not_finite() -> None:
    weight, state = states("int8", "split")
    before, kept = master(weight), {name: tensor.clone() for name, tensor in state.items()}
    for norm in (torch.inf, torch.nan):
        factors = torch.ones((), device=DEVICE), torch.tensor(norm, device=DEVICE)
        by_kernel(weight, random(1).bfloat16(), state, replace(NUMBERS, step=1), *factors)
    assert torch.equal(master(weight), before) and all(torch.equal(kept[name], state[name]) for name in kept)
