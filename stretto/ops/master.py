"""Master weights: the exact fp32 weights of parameters that compute in bf16.

A split parameter is the upper half of its weight, in bf16; the lower 16 bits are beside it (Split-SGD, 2005.04680). A product reads
the bf16 parameter directly, so a step casts no weights and stores no second copy of them. Code that needs the fp32 weights calls `masters`.

Shape letters: N elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

_LOW = "low"
"""Attribute of a split parameter: the lower bits of its weights, int16."""


def split(weight_N: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 nearest to ``weight_N`` (fp32), and the 16 bits that are lost, int16. A tie is rounded away from zero: rounding to even would
    need a 17th bit."""
    bits_N = weight_N.view(torch.int32)
    low_N = bits_N.to(torch.int16)  # the lower half as a signed number
    return ((bits_N - low_N) >> 16).to(torch.int16).view(torch.bfloat16), low_N


def joined(high_N: Tensor, low_N: Tensor) -> Tensor:
    """The fp32 weights of `split`, bit for bit."""
    return ((high_N.view(torch.int16).to(torch.int32) << 16) + low_N).view(torch.float32)


def rounded_stochastically(weight_N: Tensor, key: int, start: int = 0) -> Tensor:
    """``weight_N`` (fp32, finite) rounded to one of the two nearest bf16 numbers, with probabilities that make the expectation exact.

    Args:
        key: 32 bits that decide the random numbers; with the place of an element they are all that does.
        start: place of the first element.
    """
    noise_N = random_bits(len(weight_N), key, start, weight_N.device)
    return ((weight_N.view(torch.int32) + noise_N) >> 16).to(torch.int16).view(torch.bfloat16)


def random_bits(num: int, key: int, start: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """16 random bits, int32, for each of ``num`` places from ``start``: a hash of place and key (lowbias32, by Chris Wellons), so that every
    device and every division into parts draws the same bits."""
    x_N = torch.arange(start, start + num, dtype=torch.int32, device=device).bitwise_xor_(_signed(key))
    x_N.bitwise_xor_((x_N >> 16) & 0xFFFF).mul_(0x7FEB352D)
    x_N.bitwise_xor_((x_N >> 15) & 0x1FFFF).mul_(_signed(0x846CA68B))
    return (x_N >> 16) & 0xFFFF  # the last round of the hash changes the lower half only


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >= 1 << 31 else bits


@torch.no_grad()
def split_parameter(parameter: nn.Parameter) -> None:
    """Split the fp32 ``parameter`` in place."""
    high, low = split(parameter.data)
    setattr(parameter, _LOW, low)
    parameter.data = high


def low_part(parameter: Tensor) -> Tensor | None:
    """The lower bits of ``parameter``, in its shape; None: it is not split."""
    return getattr(parameter, _LOW, None)


def low_parts(model: nn.Module) -> dict[str, Tensor]:
    """The lower bits of all split parameters, by name."""
    found = ((name, low_part(parameter)) for name, parameter in model.named_parameters())
    return {name: low for name, low in found if low is not None}


def master(tensor: Tensor) -> Tensor:
    """The weights of a parameter as they are trained, in fp32; other tensors unchanged, except that bf16 becomes fp32."""
    low = low_part(tensor)
    if low is not None:
        return joined(tensor.detach(), low)
    return tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach()


def masters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The state dict of ``model`` with the weights as they are trained, one tensor at a time."""
    state = model.state_dict()  # first: FSDP frees the gathered parameters here, and registers the shards again
    parameters = dict(model.named_parameters())
    for name, tensor in state.items():
        yield name, master(parameters.get(name, tensor))


@torch.no_grad()
def restore(parameters: Iterable[nn.Parameter]) -> None:
    """Make ``parameters`` ordinary fp32 parameters again, one after the other."""
    for parameter in parameters:
        parameter.data = master(parameter)
        if low_part(parameter) is not None:
            delattr(parameter, _LOW)
