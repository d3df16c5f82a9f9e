"""What an answer on an open connection takes, with TCP_NODELAY on the server's connections and without.

    python -m bench.keep_alive [--rounds N]

Two server processes over one small network: ours, and a control whose listening socket leaves the protocol open, as
``socket.create_server`` makes it, so that asyncio never sets TCP_NODELAY. A client of each keeps its connection and asks in
turn. Exits with 1 if ours is not the faster one by far: a delayed acknowledgement costs the control about 40 ms.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from bench.common.measure import table, wide_console
from bench.common.networks import write_network
from bench.common.server import serving

CONTROL = """
import socket
import stretto.api.serve
stretto.api.serve.open_socket = lambda host, port: socket.create_server((host, port))
from stretto.cli.main import main
main()
"""
FASTER = 3.0
"""Times that ours must be faster."""
REQUESTS: Mapping[str, tuple[str, str, bytes | None]] = {
    "GET /v1/models": ("GET", "/v1/models", None),
    "one token": ("POST", "/v1/completions", b'{"prompt": [9, 10, 11], "max_tokens": 1, "ignore_eos": true}'),
    "one token, streamed": (
        "POST",
        "/v1/completions",
        b'{"prompt": [9, 10, 11], "max_tokens": 1, "ignore_eos": true, "stream": true}',
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        source = write_network(Path(temporary), "tiny")
        ours = stack.enter_context(serving(source, "--memory", "64MB"))
        control = stack.enter_context(serving(source, "--memory", "64MB", program=("-c", CONTROL)))
        clients = [http.client.HTTPConnection(each.url.removeprefix("http://")) for each in (ours, control)]
        shown = table("milliseconds an answer, median", "", "ours", "control", "control / ours")
        ratios = []
        for name, request in REQUESTS.items():
            rounds = [[_seconds(client, request) for client in clients] for _ in range(options.rounds)]
            mine, other = (1e3 * median(each) for each in zip(*rounds, strict=True))
            ratios.append(other / mine)
            shown.add_row(name, f"{mine:.2f}", f"{other:.2f}", f"{other / mine:.1f}x")
    wide_console().print(shown)
    if max(ratios) < FASTER:
        sys.exit(1)


def _seconds(client: http.client.HTTPConnection, request: tuple[str, str, bytes | None]) -> float:
    method, path, body = request
    start = time.perf_counter()
    client.request(method, path, body, {"Content-Type": "application/json"})
    answer = client.getresponse()
    answer.read()
    assert answer.status == 200, answer.status
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
