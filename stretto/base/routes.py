"""Routes on the wire: the experts that tokens chose, as few bits as can name them.

Shape letters: P rows (tokens), L MoE layers of the maximum network, K route slots, N = P·L·K ids, Q = ⌈N / 8⌉ octets of
ids.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

_HEADER = struct.Struct("<2sBBIIHHI")
"""Mark, bits an id, bytes an id when unpacked, rows, experts, layers, slots, CRC-32 of the ids' bytes."""
_MARK = b"SR"
HEADER_BYTES = _HEADER.size
"""What a trajectory of any length pays beside its ids."""


def route_dtype(num_experts: int) -> np.dtype:
    """uint8 where it leaves its largest value free to mean "no expert", else uint16."""
    assert 1 <= num_experts <= 65535, f"{num_experts} experts"
    return np.dtype(np.uint8 if num_experts <= 255 else np.uint16)


def id_bits(num_experts: int, has_absent: bool) -> int:
    """Bits of one id: ⌈log2 E⌉, of one value more where some places name no expert."""
    return (num_experts + has_absent - 1).bit_length()


def packed_bytes(num_rows: int, num_layers: int, num_slots: int, num_experts: int, has_absent: bool = False) -> int:
    """Size of what `pack_routes` returns."""
    return HEADER_BYTES + -(-num_rows * num_layers * num_slots * id_bits(num_experts, has_absent) // 8)


def pack_routes(routes_PLK: np.ndarray, num_experts: int) -> bytes:
    """``routes_PLK`` (uint8 or uint16, the dtype's largest value: no expert) in `id_bits` bits an id.

    Ids follow each other in C order without gaps, low bits first, so a row costs L·K·`id_bits` / 8 bytes.
    """
    assert routes_PLK.ndim == 3 and routes_PLK.dtype in (np.uint8, np.uint16), f"{routes_PLK.dtype} {routes_PLK.shape}"
    num_rows, num_layers, num_slots = routes_PLK.shape
    flat_N = routes_PLK.reshape(-1)
    absent_N = flat_N == np.iinfo(routes_PLK.dtype).max
    has_absent = bool(absent_N.any())
    ids_N = np.where(absent_N, np.uint16(num_experts), flat_N) if has_absent else flat_N
    highest = int(ids_N.max(initial=0))
    assert highest < num_experts + has_absent, f"expert {highest} of {num_experts}"
    bits = id_bits(num_experts, has_absent)
    body = _pack(ids_N, bits)
    itemsize = routes_PLK.dtype.itemsize
    return _HEADER.pack(
        _MARK, bits, itemsize, num_rows, num_experts, num_layers, num_slots, zlib.crc32(body)
    ) + body  # fmt: skip


def unpack_routes(packed: bytes) -> np.ndarray:
    """What `pack_routes` was given.

    Raises:
        ValueError: the bytes are not packed routes, or damaged.
    """
    if len(packed) < HEADER_BYTES or packed[:2] != _MARK:
        raise ValueError(f"{len(packed)} bytes that are no packed routes")
    _, bits, itemsize, num_rows, num_experts, num_layers, num_slots, checksum = _HEADER.unpack_from(packed)
    num_ids, body = num_rows * num_layers * num_slots, packed[HEADER_BYTES:]
    if len(body) != -(-num_ids * bits // 8) or zlib.crc32(body) != checksum:
        raise ValueError(
            f"packed routes of {num_rows} rows are damaged: {len(body)} bytes of ids do not match their header"
        )
    dtype = np.dtype(np.uint8 if itemsize == 1 else np.uint16)
    ids_N = _unpack(body, bits, num_ids)
    routes_N = np.where(ids_N == num_experts, 255 if itemsize == 1 else 65535, ids_N).astype(dtype)
    return routes_N.reshape(num_rows, num_layers, num_slots)


def signed_routes(routes_PLK: np.ndarray) -> np.ndarray:
    """int16, −1 for no expert: as the trainer's forward pass takes them."""
    absent_PLK = routes_PLK == np.iinfo(routes_PLK.dtype).max
    assert not routes_PLK.size or int(routes_PLK[~absent_PLK].max(initial=0)) < 32768, "an expert id past int16"
    return np.where(absent_PLK, -1, routes_PLK.astype(np.int32)).astype(np.int16)


def _pack(ids_N: np.ndarray, bits: int) -> bytes:
    """Eight ids make ``bits`` whole bytes: they are shifted into two words of 64 bits, of which those bytes are the first."""
    padded_Q8 = np.zeros((-(-len(ids_N) // 8), 8), "<u8")
    padded_Q8.reshape(-1)[: len(ids_N)] = ids_N
    words_Q2 = np.zeros((len(padded_Q8), 2), "<u8")
    for place in range(8):
        word, shift = divmod(bits * place, 64)
        words_Q2[:, word] |= padded_Q8[:, place] << np.uint64(shift)
        if shift + bits > 64:
            words_Q2[:, 1] |= padded_Q8[:, place] >> np.uint64(64 - shift)
    return words_Q2.view(np.uint8)[:, :bits].tobytes()[: -(-len(ids_N) * bits // 8)]


def _unpack(body: bytes, bits: int, num_ids: int) -> np.ndarray:
    num_octets = -(-num_ids // 8)
    bytes_Q16 = np.zeros((num_octets, 16), np.uint8)
    padded = np.zeros(num_octets * bits, np.uint8)
    padded[: len(body)] = np.frombuffer(body, np.uint8)
    bytes_Q16[:, :bits] = padded.reshape(num_octets, bits)
    words_Q2 = bytes_Q16.view("<u8")
    ids_Q8 = np.empty((num_octets, 8), np.uint16)
    mask = np.uint64((1 << bits) - 1)
    for place in range(8):
        word, shift = divmod(bits * place, 64)
        value_Q = words_Q2[:, word] >> np.uint64(shift)
        if shift + bits > 64:
            value_Q = value_Q | words_Q2[:, 1] << np.uint64(64 - shift)
        ids_Q8[:, place] = value_Q & mask
    return ids_Q8.reshape(-1)[:num_ids]
