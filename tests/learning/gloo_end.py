"""One end of a `GlooChannel` as a process: sends a version, or fetches one and kills itself in the middle.

python -m tests.learning.gloo_end send NUM_BYTES
python -m tests.learning.gloo_end receive LOCATION
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from stretto.base.trajectory import WeightVersion
from stretto.learning import channel
from stretto.learning.channel import GlooChannel

BUCKET_BYTES = 1 << 20


def state(num_bytes: int) -> dict[str, Tensor]:
    return {"a": torch.arange(num_bytes // 4, dtype=torch.float32)}


def then(act: Callable[[], None], after: int = 2) -> Callable[..., Iterator[list[Tensor]]]:
    """`channel._buckets` that calls ``act`` when ``after`` buckets have passed."""
    buckets = channel._buckets

    def interrupted(tensors: dict[str, Tensor]) -> Iterator[list[Tensor]]:
        for number, bucket in enumerate(buckets(tensors)):
            if number == after:
                act()
            yield bucket

    return interrupted


def main(part: str, argument: str) -> None:
    channel.BUCKET_BYTES = BUCKET_BYTES
    if part == "send":
        sender = GlooChannel()
        version = sender.publish(1, state(int(argument)))
        sys.stdout.write(f"{version.location} {version.checksum}\n")
        sys.stdout.flush()
        sys.stdin.read()
    else:
        with patch.object(channel, "_buckets", then(lambda: os.kill(os.getpid(), signal.SIGKILL))):
            GlooChannel().fetch(WeightVersion(1, argument, "", 0))


if __name__ == "__main__":
    main(*sys.argv[1:])
