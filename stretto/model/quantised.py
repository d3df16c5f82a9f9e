"""Dequantisation of weights while they are read.

Shape letters: E experts, R rows, C columns, r blocks of rows, c blocks of columns, G groups of 32 values, B bytes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from stretto.model.families.quantisation import Quantisation
from stretto.model.headers import damaged
from stretto.ops.int_weights import BITS, SCALE_DTYPE, IntWeight, unpack

_FP8 = torch.float8_e4m3fn
_NAN_BITS = 0x7F0
"""The seven bits of NaN in e4m3, at the place to which `from_fp8` moves them."""
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""FP4 values by the lower three bits; the fourth bit is the sign (OCP Microscaling Formats 1.0, E2M1)."""
_E8M0_BIAS = 127
_IGNORED = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".output_scale")
"""Scales of activations, which do not apply to stored weights."""


CODES, SCALES, ZEROS, SHAPE = "_packed", "_scale", "_zero_point", "_shape"
"""Suffixes that are added to the name of a packed weight, for its codes, scales, zeros and shape (compressed-tensors' names)."""


def require_shape(path: Path, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raises `UserError`: the tensor ``name`` has another shape than the network in config.json."""
    if shape != expected:
        problem = f"shape {list(shape)} where config.json gives {list(expected)}"
        raise damaged(path, name, f"{problem}; the files do not belong together")


class TensorSource(Protocol):
    """Interface of the weights of a checkpoint: dequantised tensors by name."""

    @property
    def names(self) -> frozenset[str]: ...

    def path(self, name: str) -> Path:
        """The file that holds ``name``, for messages."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of the result of `read`. Raises `UserError`: the tensor is missing, or its dtype is not fp32, bf16 or fp16."""
        ...

    def is_empty(self, name: str) -> bool:
        """Whether ``name`` has no elements."""
        ...

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check a tensor without reading it. Raises `UserError`: as `dtype` does, or another shape."""
        ...

    def read(self, name: str, shape: tuple[int, ...], part: tuple[int | slice, ...] = ()) -> Tensor:
        """``part`` of the tensor ``name`` of shape ``shape``, on the CPU. Raises `UserError` as `check` does."""
        ...


class StoredSource(TensorSource, Protocol):
    """A source that can also read tensors as they are stored, in any dtype."""

    def stored_as(self, name: str) -> tuple[torch.dtype | None, tuple[int, ...]]:
        """Dtype (None: not supported) and shape on disk."""
        ...

    def raw(self, name: str, part: tuple[int | slice, ...] = ()) -> Tensor: ...


class Dequantised:
    """The tensors of ``inner``, dequantised: quantised tensors are multiplied by their scales in fp32. Scales have no names here."""

    def __init__(self, inner: StoredSource, how: Quantisation) -> None:
        others = [name for name in inner.names if name.endswith("_scale") and not name.endswith(_IGNORED)]
        if how.scales == "_scale_inv" and others and not any(name.endswith(how.scales) for name in inner.names):
            how = replace(how, scales="_scale")  # the name in AutoFP8, which also declares ``fp8``
        self._inner, self._how = inner, how
        endings = (CODES, SCALES, ZEROS, SHAPE) if how.is_packed else ("_blocks", "_scales")
        self._values = endings[0]
        blocks = {name.removesuffix(self._values) for name in inner.names if name.endswith(self._values)}
        self._packed = frozenset(blocks) if how.is_mxfp4 or how.is_packed else frozenset()
        hidden = {f"{name}{ending}" for name in self._packed for ending in endings}
        hidden |= {name for name in inner.names if name.endswith((*_IGNORED, how.scales))}
        self._names = (inner.names - hidden) | self._packed

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def path(self, name: str) -> Path:
        return self._inner.path(f"{name}{self._values}" if name in self._packed else name)

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if self._is_quantised(name) else self._inner.dtype(name)

    def is_empty(self, name: str) -> bool:
        return name not in self._packed and self._inner.is_empty(name)

    def read(self, name: str, shape: tuple[int, ...], part: tuple[int | slice, ...] = ()) -> Tensor:
        if not self._is_quantised(name):
            return self._inner.read(name, shape, part)
        self.check(name, shape)
        if self._how.is_packed:
            weight = self.int_weight(name, shape)
            assert weight is not None, name
            return weight.dequantise()[part]
        read = self._read_mxfp4 if name in self._packed else self._read_fp8
        experts = tuple(takewhile(lambda index: isinstance(index, int), part)) if len(shape) > 2 else ()
        return read(name, shape, experts)[part[len(experts) :]]

    def int_weight(self, name: str, shape: tuple[int, ...]) -> IntWeight | None:
        """The integer weight ``name`` of ``shape`` [F, D] as it is stored; None: it is stored in another form. Raises `UserError` as
        `check` does."""
        if not self.has_integers(name):
            return None
        self.check(name, shape)
        codes_FP = self._inner.raw(name + CODES)
        bits = 32 * codes_FP.shape[-1] // shape[-1]
        zeros_FJ = None
        if (stored := name + ZEROS) in self._inner.names:
            zeros_FJ = unpack(self._inner.raw(stored).mT, bits).mT[: shape[0]].contiguous()
        return IntWeight(unpack(codes_FP, bits), self._int_scales(name), zeros_FJ, bits)

    def has_integers(self, name: str) -> bool:
        """Whether the weight ``name`` is stored as integers."""
        return self._how.is_packed and name in self._packed

    def int_form(self, name: str, shape: tuple[int, ...]) -> IntWeight | None:
        """As `int_weight`, on the meta device: nothing but headers is read, and scales that are not stored in fp16."""
        if not self.has_integers(name):
            return None
        self.check(name, shape)
        bits = 32 * self._inner.stored_as(name + CODES)[1][-1] // shape[-1]
        dtype, grouped = self._inner.stored_as(name + SCALES)
        has_zeros = name + ZEROS in self._inner.names
        zeros_FJ = torch.empty(grouped, dtype=torch.int8, device="meta") if has_zeros else None
        codes_FD = torch.empty(shape, dtype=torch.int8, device="meta")
        is_half = dtype == SCALE_DTYPE
        scales_FJ = torch.empty(grouped, dtype=dtype, device="meta") if is_half else self._int_scales(name).to("meta")
        return IntWeight(codes_FD, scales_FJ, zeros_FJ, bits)

    def _int_scales(self, name: str) -> Tensor:
        """The scales of an integer weight in fp16, as kernels read them; as they are stored if fp16 would round one of them."""
        stored_FJ = self._inner.raw(name + SCALES)
        half_FJ = stored_FJ.to(SCALE_DTYPE)
        return half_FJ if torch.equal(half_FJ.float(), stored_FJ.float()) else stored_FJ

    def _check_int(self, name: str, shape: tuple[int, ...]) -> None:
        """The number of bits follows from the shape of the codes, the size of a group from that of the scales."""
        dtype, stored = self._inner.stored_as(name + CODES)
        if len(shape) != 2 or len(stored) != 2 or dtype != torch.int32:
            raise damaged(
                self.path(name), name + CODES, f"{dtype} of shape {list(stored)} is not a packed matrix in int32"
            )
        columns = stored[1]
        bits = 32 * columns // shape[1]
        if bits not in BITS:
            raise damaged(
                self.path(name), name + CODES, f"{columns} columns for {shape[1]} inputs are not codes of 4 or 8 bits"
            )
        self._compare(name + CODES, (shape[0], shape[1] * bits // 32))
        scale_dtype, scale_shape = self._inner.stored_as(name + SCALES)
        if scale_dtype is None or not scale_dtype.is_floating_point or len(scale_shape) != 2:
            raise damaged(
                self.path(name), name + SCALES, f"{scale_dtype} of shape {list(scale_shape)} is not a matrix of scales"
            )
        num_groups = scale_shape[1]
        if num_groups < 1 or shape[1] % num_groups:
            raise damaged(self.path(name), name + SCALES, f"{num_groups} groups do not divide {shape[1]} inputs")
        self._compare(name + SCALES, (shape[0], num_groups))
        if name + ZEROS in self._inner.names:
            if (zero_dtype := self._inner.stored_as(name + ZEROS)[0]) != torch.int32:
                raise damaged(self.path(name), name + ZEROS, f"{zero_dtype} in place of zeros packed in int32")
            self._compare(name + ZEROS, (-(-shape[0] * bits // 32), num_groups))

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        if not self._is_quantised(name):
            self._inner.check(name, shape)
            return
        self._need_scales(name)
        if self._how.is_packed:
            self._check_int(name, shape)
            return
        if name in self._packed:
            groups = (*shape[:-2], shape[-1], shape[-2] // 32)
            for stored, expected in ((f"{name}_blocks", (*groups, 16)), (f"{name}_scales", groups)):
                self._compare(stored, expected)
                if (dtype := self._inner.stored_as(stored)[0]) != torch.uint8:
                    raise damaged(self.path(name), stored, f"{dtype} in place of bytes")
            return
        self._compare(name, shape)
        if (block := self._block(name, shape)) is not None:
            cut = tuple(-(-size // of) for size, of in zip(shape[-2:], block, strict=False))
            self._compare(name + self._how.scales, (*shape[:-2], *cut) if len(shape) > 1 else (1,))

    def _block(self, name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Numbers of rows and columns of ``name`` that share a scale; None: the whole tensor has one."""
        stored = self._inner.stored_as(name + self._how.scales)[1]
        if math.prod(stored) == 1:
            return None
        if stored[-2:] == (1, 1) and len(shape) > 1:
            return shape[-2], shape[-1]
        return self._how.block or (1, shape[-1])

    def _is_quantised(self, name: str) -> bool:
        return name in self._packed or (name in self._names and self._inner.stored_as(name)[0] == _FP8)

    def _need_scales(self, name: str) -> None:
        if (scales := name + self._how.scales) not in self._inner.names:
            raise damaged(self.path(name), name, f"quantised, and its scales {scales} are missing from the weights")

    def _read_fp8(self, name: str, shape: tuple[int, ...], experts: tuple[int | slice, ...]) -> Tensor:
        """A scale applies to the tensor, a matrix, a row or a block; the last block of a dimension may be smaller."""
        scales, block = name + self._how.scales, self._block(name, shape)
        values_RC = from_fp8(self._inner.raw(name, experts))
        if block is None:
            return values_RC.mul_(_as_float(self._inner.raw(scales)).reshape(()))
        scales_rc = _as_float(self._inner.raw(scales, experts))
        for dim, size in zip((-2, -1), block, strict=True):
            if values_RC.shape[dim] % size:  # the last block is smaller
                scales_rc = scales_rc.repeat_interleave(size, dim).narrow(dim, 0, values_RC.shape[dim])
        (r, c), (rows, columns) = scales_rc.shape[-2:], values_RC.shape[-2:]
        blocks_RC = values_RC.unflatten(-1, (c, columns // c)).unflatten(-3, (r, rows // r))
        blocks_RC.mul_(scales_rc[..., :, None, :, None])
        return values_RC

    def _read_mxfp4(self, name: str, shape: tuple[int, ...], experts: tuple[int | slice, ...]) -> Tensor:
        """Two values are stored per byte, the lower four bits first, one row of the product after another. The result has the rows
        last, as gpt-oss's unquantised tensors.
        """
        bytes_RGB = self._inner.raw(f"{name}_blocks", experts)
        codes_RG32 = torch.stack((bytes_RGB & 15, bytes_RGB >> 4), dim=-1).flatten(-2).int()
        values = torch.tensor((*_FP4_VALUES, *(-value for value in _FP4_VALUES)))
        exponents_RG = self._inner.raw(f"{name}_scales", experts).int() - _E8M0_BIAS
        return torch.ldexp(values[codes_RG32], exponents_RG[..., None]).flatten(-2).mT

    def _compare(self, name: str, expected: tuple[int, ...]) -> None:
        require_shape(self._inner.path(name), name, self._inner.stored_as(name)[1], expected)


def from_fp8(values: Tensor) -> Tensor:
    """``values.float()`` for e4m3 in a third of the time: the shifted bits are a bf16 number, which is too small by 2^120."""
    # -30736 = 0x87F0: sign, four zeros, exponent and mantissa, four zeros
    bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(-30736)
    if values.numel() and int((bits & _NAN_BITS).amax()) == _NAN_BITS:
        return values.float()
    return bits.view(torch.bfloat16).float().mul_(2.0**120)


def _as_float(scales: Tensor) -> Tensor:
    """Scales in fp32; uint8 scales are exponents of two (E8M0)."""
    return torch.exp2(scales.float() - _E8M0_BIAS) if scales.dtype == torch.uint8 else scales.float()
