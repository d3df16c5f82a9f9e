"""AdamW with small states: equal to torch's where states are exact, unbiased where they are rounded."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import stretto
from stretto.ops.master import (
    joined,
    low_part,
    master,
    random_bits,
    restore,
    rounded_stochastically,
    split,
    split_parameter,
)
from stretto.optim.compact import BLOCK, CompactAdamW, dequantised, quantised
from stretto.optim.schedule import OptimConfig

SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}
SHAPE = (3, 40, 128)  # a stack of experts, of more than 4,096 numbers and a multiple of the block


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compact(parameter: nn.Parameter, **changes: Any) -> CompactAdamW:
    given = {**SETTINGS, "moments": "fp32", **changes}
    return CompactAdamW([{"params": [parameter], "weight_decay": 0.1}], **given)


def test_the_two_halves_are_the_weight() -> None:
    special = torch.tensor([0.0, -0.0, 1.0, 3.4e38, -3.4e38, 1e-45, 1.00390625, -1.01171875])  # the last two are ties
    weights = torch.cat([special, drawn(0, 100_000) * torch.logspace(-40, 30, 100_000)])
    high, low = split(weights)
    assert torch.equal(joined(high, low).view(torch.int32), weights.view(torch.int32))
    nearest = weights.bfloat16()
    is_tie = low == -(1 << 15)
    assert torch.equal(high[~is_tie], nearest[~is_tie]) and is_tie[6:8].all()


@pytest.mark.parametrize("is_split", [True, False])
def test_fp32_moments_give_torchs_adamw_to_the_bit(is_split: bool) -> None:
    """Also with a factor of clipping, over several parts of a tensor, and when some steps have no gradient."""
    start = drawn(0, (1 << 20) + 1003)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    if is_split:
        split_parameter(ours)
        assert ours.dtype == torch.bfloat16
    optimizers = compact(ours), AdamW([theirs], weight_decay=0.1, fused=True, **SETTINGS)
    scale = torch.tensor(0.37)
    for step in range(5):
        gradient = drawn(step + 1, *start.shape).to(ours.dtype)
        ours.grad, theirs.grad = gradient, gradient.float() * scale
        if step == 2:
            ours.grad = theirs.grad = None
        optimizers[0].step(scale=scale)
        optimizers[1].step()
    assert torch.equal(master(ours), theirs.detach()) and not torch.equal(theirs, start)
    restore([ours])
    assert ours.dtype == torch.float32 and low_part(ours) is None and torch.equal(ours, theirs)


@pytest.mark.parametrize("is_second", [False, True])
def test_8_bit_codes_are_as_fine_as_their_curve(is_second: bool) -> None:
    moment = drawn(0, 64 * BLOCK) * torch.logspace(-3, 0, 64 * BLOCK)
    if is_second:
        moment = moment.square()
    codes, scales = quantised(moment, is_second=is_second)
    share, found = (each.view(-1, BLOCK) / scales[:, None] for each in (moment, dequantised(codes, scales)))
    # half a code, bent back: the curve's inverse has slope (1+|x|)²/2 or 4·y³, at most over the half code
    half = 0.5 / (255 if is_second else 127)
    slope = 4 * (share.sqrt().sqrt() + half) ** 3 if is_second else (1 + share.abs() + 4 * half) ** 2 / 2
    assert ((found - share).abs() <= half * slope + 1e-6).all()
    again, same = quantised(dequantised(codes, scales), is_second=is_second)
    assert torch.equal(again, codes) and torch.allclose(
        same, scales, rtol=1e-6
    )  # reading and writing loses nothing more


def test_a_second_moment_above_zero_stays_above_zero() -> None:
    moment = torch.zeros(2 * BLOCK)
    moment[:3] = torch.tensor([1.0, 1e-30, 0.0])
    found = dequantised(*quantised(moment, is_second=True))
    assert found[0] == 1.0 and found[1] > 0 and not found[2:].any()


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean of n roundings differs from the weight by at most 5 standard errors, of at most half a step each; and by more where the
    random numbers are missing."""
    weight = drawn(0, 256)
    num = 4096
    found = torch.stack([rounded_stochastically(weight, key).float() for key in range(num)])
    below, above = found.amin(0), found.amax(0)
    step = 2.0**-7 * weight.abs().log2().floor().exp2()  # of bf16, with 8 bits
    assert ((above - below) <= step).all()
    bound = 5 * 0.5 * step / num**0.5
    assert ((found.double().mean(0) - weight).abs() <= bound).all()
    assert ((weight.bfloat16().float() - weight).abs() > bound).float().mean() > 0.8  # the nearest number fails it
    exact = weight.bfloat16().float()
    assert torch.equal(rounded_stochastically(exact, 7).float(), exact)


def test_random_bits_are_even_and_do_not_depend_on_the_division() -> None:
    whole = random_bits(1 << 18, 0x9E3779B9)
    assert torch.equal(whole[1000:3000], random_bits(2000, 0x9E3779B9, 1000))
    counts = torch.bincount(whole >> 8, minlength=256).double()
    expected = len(whole) / 256
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - 255) < 5 * (2 * 255) ** 0.5  # chi-squared: mean 255, variance 510
    other = random_bits(1 << 18, 0x9E3779BA)
    # two keys agree as often as chance has it: a rate of 2⁻¹⁶
    assert int((whole == other).sum()) < 4 + 5 * 4**0.5


def test_small_updates_survive_on_average() -> None:
    """An update of a hundredth of a bf16 step moves the mean of stochastically rounded weights; nearest rounding loses it."""
    weight = nn.Parameter(torch.ones(SHAPE, dtype=torch.bfloat16))
    optimizer = compact(weight, lr=2.0**-8 / 100, moments="int8")
    for _ in range(50):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    moved = 1.0 - float(weight.detach().float().mean())
    expected = 50 * 2.0**-8 / 100 * 1.1  # Adam's step is lr for a constant gradient, and decay adds a tenth
    # below 1 a step of bf16 is 2⁻⁸: variance of each rounding at most that squared times its probability, 50 independent ones
    error = 5 * 2.0**-8 * (50 * 0.011) ** 0.5 / weight.numel() ** 0.5
    assert abs(moved - expected) < error + 0.02 * expected  # int8 moments: their codes are 0.4 % apart


@pytest.mark.parametrize(("moments", "kind"), [*itertools.product(["fp32", "bf16", "int8"], ["fp32", "split", "bf16"])])
def test_every_pair_of_states_descends_and_repeats(moments: str, kind: str) -> None:
    target = drawn(0, *SHAPE)

    def trained(seed: int) -> Tensor:
        weight = nn.Parameter(torch.zeros(SHAPE))
        if kind == "split":
            split_parameter(weight)
        elif kind == "bf16":
            weight.data = weight.data.bfloat16()
        optimizer = compact(weight, moments=moments, seed=seed, lr=0.05)
        for _ in range(60):
            weight.grad = (weight.detach() - target.to(weight.dtype)).contiguous()
            optimizer.step()
        return master(weight)

    first = trained(0)
    assert float((first - target).square().mean()) < 0.05
    assert torch.equal(first, trained(0))
    assert torch.equal(first, trained(1)) == (kind != "bf16")


@pytest.mark.parametrize(("moments", "bytes_each"), [("fp32", 8.0), ("bf16", 4.0), ("int8", 2.0 + 2 * 4 / BLOCK)])
def test_moments_take_the_memory_that_the_setting_says(moments: str, bytes_each: float) -> None:
    weight = nn.Parameter(drawn(0, *SHAPE))
    optimizer = compact(weight, moments=moments)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = sum(tensor.nbytes for name, tensor in optimizer.state[weight].items() if name != "step")
    assert held == bytes_each * weight.numel()


def test_a_gradient_that_is_not_finite_changes_no_weight() -> None:
    weight, other = nn.Parameter(drawn(0, *SHAPE)), nn.Parameter(drawn(1, 7))
    split_parameter(weight)
    before = master(weight)
    groups = [{"params": [weight, other], "weight_decay": 0.1}]
    optimizer = CompactAdamW(groups, **SETTINGS, moments="int8", in_backward=True)
    with optimizer.updating(optimizer.begin(1.0)):
        (weight.float().sum() * torch.inf + other.square().sum()).backward()
    assert weight.grad is None and torch.equal(master(weight), before) and not torch.equal(other, drawn(1, 7))
    assert not torch.isfinite(optimizer.gradient_norm())


def test_a_resumed_optimiser_adds_norms_in_the_same_order() -> None:
    weights = [nn.Parameter(drawn(number, 3)) for number in range(40)]
    optimizers = [CompactAdamW([{"params": weights}], **SETTINGS, moments="fp32", in_backward=True) for _ in range(2)]
    with optimizers[0].updating(
        optimizers[0].begin(1.0)
    ):  # whose first gradients come in another order than the parameters
        for number in reversed(range(len(weights))):
            (weights[number] * drawn(100 + number, 3) * 1.3 ** (number % 11)).sum().backward()
    held = optimizers[0].state_dict()
    optimizers[1].load_state_dict(
        held | {"state": dict(sorted(held["state"].items()))}
    )  # a snapshot sorts by parameter
    assert torch.equal(*(each.gradient_norm() for each in optimizers))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"name": "muon", "moments": "int8"}, "muon"),
        ({"moments": "bf16", "beta2": 0.999}, "beta2"),
        ({"moments": "int4"}, "moments"),
        ({"master": "bf16"}, "master"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        OptimConfig.model_validate({"lr": 1e-3, **changes})


READERS = {
    "api/search.py": "a loaded checkpoint",
    "engine/runner.py": "an engine's own network",
    "model/checkpoint.py": "a finished network, or names",
    "model/elastic.py": "a finished network",
    "model/parallel.py": "names, and targets of `copy_`",
    "model/streamed.py": "names",
    "model/upcycle.py": "names",
    "ops/master.py": "the accessor itself",
    "post/quantise.py": "names",
    "subnets/extract.py": "a finished network",
    "train/snapshot.py": "the two parts of split weights",
    "train/teacher.py": "a frozen teacher",
}
"""Files that read state dicts, and whose. A network in training is read with `stretto.ops.master.masters`; a run ends with fp32 weights."""


def test_weights_in_training_are_read_by_one_accessor() -> None:
    package = Path(stretto.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if ".state_dict(" in path.read_text(encoding="utf-8")
    }
    assert found == READERS.keys(), "read weights with `masters`, or say here whose they are"
