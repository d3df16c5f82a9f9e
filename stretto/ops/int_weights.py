"""Integer weights: the quantiser by rounding to nearest, and the packed form on disk.

A weight is a code (4 or 8 bits, signed) times the scale of its group. A group is a number of neighbouring inputs of one output, so
outputs, and therefore experts and layers, are quantised independently of each other: a slice of a quantised network is the quantised
slice, to the bit. Scales are fp16, as in llama.cpp's Q8_0 and Q4_0.

Packed, codes are stored as unsigned numbers, 2^(bits − 1) larger, the first code of a byte in its lower bits. Four bytes are one int32: the
format "pack-quantized" of compressed-tensors (its ``pack_to_int32``).

Shape letters: F outputs, D inputs, J = D / group groups; dims before F (experts) are written as …. P int32 per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.base.errors import UserError

BITS = (8, 4)
SCALE_DTYPE = torch.float16
MULTIPLE = 8
"""Groups are multiples of this many inputs: the codes of 4 bits in an int32."""
WIDTHS = tuple(round(0.7 + 0.03 * step, 2) for step in range(13))
"""Candidates for the scale of a group in `fitted_grid`, as a multiple of the scale that its extremes give."""


@dataclass(frozen=True, slots=True)
class IntScheme:
    """How the weights of a part of a network are quantised."""

    bits: int
    group: int = 32
    """Number of neighbouring inputs that share a scale."""
    zeros: bool = False
    """Whether a group also has a zero: the code of the value 0. It fits groups whose values lie to one side of 0."""

    def label(self) -> str:
        """Short text for tables: ``int4 in groups of 32``."""
        return f"int{self.bits} in groups of {self.group}{', with zeros' if self.zeros else ''}"


@dataclass(frozen=True, slots=True)
class IntWeight:
    """A quantised weight."""

    codes: Tensor
    """int8 […, F, D]."""
    scales: Tensor
    """[…, F, J], fp16; in another dtype if another software's scales are not numbers in fp16."""
    zeros: Tensor | None
    """int8 […, F, J]; None: all are 0."""
    bits: int

    @property
    def group(self) -> int:
        return self.codes.shape[-1] // self.scales.shape[-1]

    def dequantise(self) -> Tensor:
        """fp32 […, F, D]. Exact: a code has 8 significant bits at most and a scale 11."""
        zeros = None if self.zeros is None else self.zeros[..., None]
        return code_values(self.codes.unflatten(-1, (-1, self.group)), self.scales[..., None], zeros).flatten(-2)

    def map(self, change: Callable[[Tensor], Tensor]) -> IntWeight:
        """The weight with ``change``, which leaves the last dim alone, applied to each of its tensors."""
        zeros = None if self.zeros is None else change(self.zeros)
        return IntWeight(change(self.codes), change(self.scales), zeros, self.bits)


def check_group(group: int, inputs: int, name: str) -> None:
    """Raises `UserError`: groups of ``group`` do not divide the ``inputs`` of the weight ``name``; the message names those that do."""
    if group > 0 and inputs % group == 0 and group % MULTIPLE == 0:
        return
    fitting = [size for size in range(MULTIPLE, inputs + 1, MULTIPLE) if inputs % size == 0]
    remedy = (
        f"choose one of {', '.join(map(str, fitting))}" if fitting else "leave this part of the network unquantised"
    )
    raise UserError(
        f"--group {group}: {name} has {inputs} inputs, which groups of {group} do not divide into multiples of {MULTIPLE}; {remedy}"
    )


def group_grid(grouped: Tensor, scheme: IntScheme) -> tuple[Tensor, Tensor | None]:
    """Scales (fp16) and zeros (int8) of groups of values […, group], from their extremes.

    8 bits: largest magnitude / 127. 4 bits: the value of largest magnitude gets the code −8 and the scale its sign, as in llama.cpp's Q4_0,
    so that all 16 codes are of use. With zeros: the range, which includes 0, divided by the number of steps.
    """
    wide = grouped.float()
    if scheme.zeros:
        low, high = wide.amin(-1).clamp_max(0.0), wide.amax(-1).clamp_min(0.0)
        scales = _representable((high - low) / (2**scheme.bits - 1))
        zeros = (-low / scales.float()).round() - 2 ** (scheme.bits - 1)
        return scales, zeros.clamp_(*_range(scheme.bits)).to(torch.int8)
    if scheme.bits == 8:
        return _representable(wide.abs().amax(-1) / 127), None
    extreme = wide.gather(-1, wide.abs().argmax(-1, keepdim=True)).squeeze(-1)
    return _representable(extreme / -(2 ** (scheme.bits - 1))), None


def fitted_grid(grouped: Tensor, importance: Tensor, scheme: IntScheme) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros of groups of values […, group] with the least squared error, each value's error times its ``importance``.

    The candidates for 4 bits are the grid of the extremes (`group_grid`), narrower to a little wider, and without zeros also with the other
    sign, which gives the value of largest magnitude the code 7. With 8 bits the steps are too small for this to matter.
    """
    best, zeros = group_grid(grouped, scheme)
    if scheme.bits == 8:
        return best, zeros
    extreme, least = best.float(), torch.full_like(best, torch.inf, dtype=torch.float32)
    wide_zeros = None if zeros is None else zeros[..., None]
    for factor in (*WIDTHS, *(() if scheme.zeros else (-8 / 7 * width for width in WIDTHS))):
        scales = _representable(extreme * factor)
        codes = nearest_codes(grouped, scales[..., None], wide_zeros, scheme.bits)
        error = ((code_values(codes, scales[..., None], wide_zeros) - grouped).square() * importance).sum(-1)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return best, zeros


def _representable(scales: Tensor) -> Tensor:
    """``scales`` in fp16, without infinity, and 1 where a scale would be 0: its group has zeros only."""
    largest = torch.finfo(SCALE_DTYPE).max
    rounded = scales.clamp(-largest, largest).to(SCALE_DTYPE)
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)


def _range(bits: int) -> tuple[int, int]:
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def nearest_codes(values: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    """The codes (fp32) whose weights are nearest to ``values``; scales and zeros broadcast."""
    codes = (values.float() / scales.float()).round_()
    if zeros is not None:
        codes = codes + zeros.float()
    return codes.clamp_(*_range(bits))


def code_values(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """The values (fp32) of ``codes``; scales and zeros broadcast."""
    wide = codes.float() if zeros is None else codes.float() - zeros.float()
    return wide * scales.float()


def quantise(weight: Tensor, scheme: IntScheme) -> IntWeight:
    """Round ``weight`` […, F, D] to nearest. A dequantised weight without zeros quantises to the same codes again."""
    grouped = weight.detach().unflatten(-1, (-1, scheme.group))
    scales, zeros = group_grid(grouped, scheme)
    wide = None if zeros is None else zeros[..., None]
    codes = nearest_codes(grouped, scales[..., None], wide, scheme.bits).to(torch.int8).flatten(-2)
    return IntWeight(codes, scales, zeros, scheme.bits)


def unsigned_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes as unsigned numbers, uint8, 2^(bits − 1) larger."""
    return (codes.view(torch.uint8) ^ 2 ** (bits - 1)) & 2**bits - 1


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes […, D] as int32 […, P], with P = D · bits / 32."""
    unsigned = unsigned_codes(codes, bits)
    if bits == 4:
        unsigned = unsigned[..., 0::2] | unsigned[..., 1::2] << 4
    return unsigned.reshape(-1).view(torch.int32).view(*codes.shape[:-1], -1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Codes int8 […, D] from the result of `pack`."""
    unsigned = packed.reshape(-1).view(torch.uint8).view(*packed.shape[:-1], -1)
    if bits == 8:
        return (unsigned ^ 128).view(torch.int8)
    return torch.stack((unsigned & 15, unsigned >> 4), -1).flatten(-2).view(torch.int8).sub_(8)
