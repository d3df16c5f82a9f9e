"""Messages between the sandbox and its keepers: a JSON header and bytes, over a stream socket."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

_LENGTH = struct.Struct(">I")
_SIZES = "sizes"


def send(sock: socket.socket, header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
    """Write one message; raises OSError where the other side is gone."""
    text = json.dumps({**header, _SIZES: [len(blob) for blob in blobs]}).encode()
    sock.sendall(b"".join((_LENGTH.pack(len(text)), text, *blobs)))


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[bytes]] | None:
    """The next message, waited for; None where the other side is gone, in the midst of a message too."""
    try:
        (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
        header = json.loads(_exactly(sock, length))
        return header, [_exactly(sock, size) for size in header.pop(_SIZES)]
    except (EOFError, ConnectionError):
        return None


def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    pieces = []
    while num_bytes:
        piece = sock.recv(min(num_bytes, 1 << 20))
        if not piece:
            raise EOFError
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)
