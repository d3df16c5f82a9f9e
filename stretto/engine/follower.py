"""The process of a rank of tensor parallelism other than rank 0: follows the plans that `stretto.engine.ranks.Team` sends."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection

import torch

from stretto.base.errors import UserError
from stretto.base.parent import end_with_parent
from stretto.engine.ranks import Cache, Ranks, Setup, Step, Weights
from stretto.engine.runner import Runner
from stretto.engine.sequence import SubnetTable
from stretto.model.checkpoint import read_checkpoint, read_config
from stretto.model.transformer import Transformer


def main() -> None:
    """Read this rank's weights, then compute until rank 0 closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which finishes open requests
    end_with_parent(os.getppid())
    connection = Connection(int(sys.argv[1]))
    setup: Setup = connection.recv()
    torch.set_num_threads(setup.num_threads)
    try:
        if torch.device(setup.device).type == "cuda":
            torch.cuda.set_device(setup.device)
        checkpoint = read_checkpoint(setup.folder, device=setup.device, dtype=setup.dtype, shard=setup.shard)
    except UserError as error:
        connection.send(str(error))
        return
    connection.send(None)
    ranks = Ranks.join(setup, read_config(setup.folder))
    follow(connection, checkpoint.model.requires_grad_(False), ranks)


def follow(connection: Connection, model: Transformer, ranks: Ranks) -> None:
    """Carry out the messages of rank 0 until it closes the connection."""
    subnets, runner = SubnetTable(), None
    while True:
        try:
            message: Cache | Step | Weights = connection.recv()
        except EOFError:
            return
        if isinstance(message, Cache):
            runner = Runner(
                model, subnets, num_pages=message.num_pages, page_size=message.page_size, routes=False, ranks=ranks
            )
            continue
        assert runner is not None, f"{message} before the size of the cache"
        if isinstance(message, Step):
            for subnet in message.subnets:
                subnets.number(subnet)
            runner.forward(message.chunks, want_routes=False)
        else:
            runner.load_weights(None)


if __name__ == "__main__":
    main()
