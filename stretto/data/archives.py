"""Compressed files as streams of bytes; a damaged archive is a `UserError`, a truncated one too."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from stretto.base.errors import UserError

COMPRESSIONS = (".gz", ".xz", ".zst", ".bz2")
_BLOCK = 1 << 18
"""Compressed bytes read at once."""


@contextmanager
def unpacked(file: Path) -> Iterator[BinaryIO]:
    """The bytes of ``file``, decompressed as its suffix says.

    Raises:
        UserError: while reading, when the archive is damaged, truncated, or not one.
    """
    damage: tuple[type[Exception], ...] = (EOFError, zlib.error, lzma.LZMAError, OSError)
    openers: dict[str, Callable[[Path], Any]] = {
        ".gz": gzip.open,
        ".xz": lzma.open,
        ".bz2": bz2.open,
        ".zst": _open_zstd,
    }
    if file.suffix.lower() == ".zst":
        damage = (*damage, _zstandard(file).ZstdError)
    try:
        with openers.get(file.suffix.lower(), lambda path: path.open("rb"))(file) as handle:
            yield cast(BinaryIO, handle)
    except damage as error:
        packed = file.suffix.lower() in COMPRESSIONS
        remedy = "the archive is damaged or not one, fetch it again" if packed else "check its permissions"
        raise UserError(f"{file}: cannot be read: {short(error)}; {remedy}") from None


def short(error: BaseException) -> str:
    """An error's message on one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


class _ZstdReader(io.RawIOBase):
    """Decompresses frame after frame. The library's own stream reader takes a truncated file for a whole one."""

    def __init__(self, file: Path) -> None:
        self._source = file.open("rb")
        self._decompressor = _zstandard(file).ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._ready = b""
        self._inside = False  # between the first byte of a frame and its end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._frame.unused_data if self._frame.eof else b""
            packed = packed or self._source.read(_BLOCK)
            if not packed:
                if self._inside:
                    raise EOFError("the file ends in the middle of a frame")
                return 0
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._ready = self._frame.decompress(packed)
            self._inside = not self._frame.eof
        num = min(len(buffer), len(self._ready))
        buffer[:num], self._ready = self._ready[:num], self._ready[num:]
        return num

    def close(self) -> None:
        self._source.close()
        super().close()


def _open_zstd(file: Path) -> io.BufferedReader:
    return io.BufferedReader(_ZstdReader(file), _BLOCK)


def _zstandard(file: Path) -> Any:
    try:
        import zstandard  # optional
    except ImportError:
        raise UserError(f"{file}: reading .zst needs a package; pip install zstandard, or unpack the file") from None
    return zstandard
