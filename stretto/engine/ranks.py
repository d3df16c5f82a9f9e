"""Tensor parallelism: processes on one machine that compute one network together.

Rank 0 is the engine's own process, with scheduler, sampling and server. `Team` starts the other ranks as processes of
`stretto.engine.follower`, and sends them the plan of every step. All ranks then run the same forward pass, each on its
`stretto.model.shard.Shard`, and sum the outputs of every attention and feed-forward network: two all-reduces per layer, over gloo on a
CPU and over NCCL on GPUs. All ranks get the same sums, to the bit, so their routers choose the same experts.

Plans go through pipes and not through the process group: a follower waits in a pipe for any time, and sees the end of rank 0 there.
"""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import stretto
from stretto.base.errors import UserError
from stretto.engine.sequence import Chunk, SubnetTable
from stretto.model.shard import Shard
from stretto.model.spec import ModelConfig, Subnet

_JOIN_S = 120.0
"""Longest time in which ranks that have read their weights may connect; long, for busy machines."""
_WATCH_S = 0.2
"""Interval at which rank 0 looks for ranks that have ended, in seconds."""


class RankFailed(RuntimeError):  # noqa: N818 - says what happened
    """A rank has ended, so the engine must not be used any more. The message has the rank and its exit code or signal."""


@dataclass(frozen=True, slots=True)
class Setup:
    """First message to a follower. Written by `Team`."""

    shard: Shard
    folder: Path
    """Folder of the checkpoint."""
    device: str
    dtype: torch.dtype
    num_threads: int
    """Threads of each rank on a CPU; equal on all ranks, because torch's sums may depend on it."""
    store: str
    """Path of the file through which the ranks find each other."""
    timeout_s: float
    """Longest time of a collective, in seconds."""


@dataclass(frozen=True, slots=True)
class Cache:
    """Size of every rank's cache, for a follower's runner. Written by rank 0's runner before the first step."""

    num_pages: int
    page_size: int


@dataclass(frozen=True, slots=True)
class Step:
    """Plan of a step. Written by rank 0's runner."""

    chunks: list[Chunk]
    """Without logits, which only rank 0 needs."""
    subnets: list[Subnet]
    """Subnets that were numbered since the last step, in the order of their numbers."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Rank 0 broadcasts new weights, tensor by tensor, in the order of the state dict. Written by rank 0's runner."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's view of all ranks, with their collectives."""

    shard: Shard
    network: ModelConfig
    """The whole network."""
    group: Any
    """Process group of all ranks (`torch.distributed.ProcessGroupGloo` or ``ProcessGroupNCCL``). It is not torch's default group, so a
    process may have several engines."""
    team: Team | None = None
    """The other ranks' processes; None on the other ranks."""

    @staticmethod
    def join(setup: Setup, network: ModelConfig, team: Team | None = None) -> Ranks:
        """Connect this rank with the others, which call this at the same time."""
        rank, num_ranks, timeout = setup.shard.rank, setup.shard.num_ranks, timedelta(seconds=setup.timeout_s)
        torch_ranks: Any = dist  # whose type stubs lack what follows
        store = torch_ranks.FileStore(setup.store, num_ranks)
        store.set_timeout(timedelta(seconds=_JOIN_S))
        if torch.device(setup.device).type == "cuda":
            options = torch_ranks.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return Ranks(setup.shard, network, torch_ranks.ProcessGroupNCCL(store, rank, num_ranks, options), team)
        # the loopback address: other machines cannot connect
        group = gloo_group(store, rank, num_ranks, "127.0.0.1", setup.timeout_s)
        return Ranks(setup.shard, network, group, team)

    def sum(self, part: Tensor) -> Tensor:
        """Sum of all ranks' ``part``, in place."""
        self.group.allreduce([part]).wait()
        return part

    def part(self, name: str, whole: Tensor | None, own: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Broadcast rank 0's tensor ``name`` of ``shape``, and return the part of it that replaces ``own``.

        ``whole``: the tensor on rank 0, None on the other ranks.
        """
        if whole is None:
            buffer = torch.empty(shape, dtype=own.dtype, device=own.device)
        else:
            buffer = whole.detach().to(own.device, own.dtype).contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([buffer], options).wait()
        return self.shard.cut(name, buffer, tuple(own.shape), self.network)


def gloo_group(store: Any, rank: int, num_ranks: int, host: str, timeout_s: float) -> Any:
    """A gloo process group (``ProcessGroupGloo``) of its own, beside torch's default group.

    ``store``: where the ranks meet. ``host``: address of this machine, at which the others reach it; gloo then does not look up the
    machine's name. ``timeout_s``: longest time of an operation, and of the wait for the other ranks.
    """
    gloo: Any = dist.ProcessGroupGloo  # whose type stubs lack what follows
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, num_ranks, options)


@dataclass(slots=True)
class Followers:
    """Processes of ranks 1 and up, in order. `Team` shares them with the thread that watches them, which must not keep `Team` alive."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    failure: str = ""
    """The rank that ended first, and how; empty while all run."""
    is_closed: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, setup: Setup) -> None:
        """Start the process of the next rank."""
        connection, remote = multiprocessing.Pipe()
        command = [sys.executable, "-m", "stretto.engine.follower", str(remote.fileno())]
        package, null = Path(stretto.__file__).parents[1], subprocess.DEVNULL
        with remote:
            process = subprocess.Popen(command, stdin=null, stdout=null, cwd=package, pass_fds=[remote.fileno()])
        self.processes.append(process)
        self.connections.append(connection)
        with suppress(OSError):  # it has ended already, which `Team.join` reports
            connection.send(setup)

    def look(self) -> str:
        """`failure`, after a look at all processes. Ends all of them if one has ended: the others would wait for it."""
        with self.lock:
            for rank, process in enumerate(self.processes, start=1):
                if self.failure or self.is_closed.is_set() or (code := process.poll()) is None:
                    continue
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                self.failure = f"rank {rank} of {len(self.processes) + 1} ranks of tensor parallelism {how}"
            if self.failure:
                for process in self.processes:
                    process.kill()
            return self.failure

    def watch(self) -> None:
        """End all ranks when one has ended, so that a collective of rank 0 fails and does not wait."""
        while not self.is_closed.wait(_WATCH_S) and not self.look():
            pass

    def end(self) -> None:
        self.is_closed.set()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for connection in self.connections:
            connection.close()


class Team:
    """The other ranks' processes, which rank 0 starts, sends plans to, and ends. They end with this object, and with this process."""

    def __init__(self, setup: Setup, network: ModelConfig, followers: Followers):
        """``setup``: that of rank 0. ``followers`` have theirs, and read their weights until `join`."""
        self.setup, self._network, self._num_known = setup, network, 0
        self._followers = followers
        self._end = weakref.finalize(self, followers.end)

    @staticmethod
    def start(
        folder: Path,
        network: ModelConfig,
        num_ranks: int,
        device: torch.device,
        dtype: torch.dtype,
        timeout_s: float,
    ) -> Team:
        """Start ``num_ranks`` − 1 processes for the checkpoint in ``folder``."""
        scratch, followers = tempfile.mkdtemp(prefix="stretto-ranks-"), Followers()
        setups = [
            Setup(
                Shard(rank, num_ranks),
                folder.resolve(),
                f"cuda:{(device.index or 0) + rank}" if device.type == "cuda" else device.type,
                dtype,
                max(1, torch.get_num_threads() // num_ranks),
                f"{scratch}/store",
                timeout_s,
            )
            for rank in range(num_ranks)
        ]
        team = Team(setups[0], network, followers)
        weakref.finalize(team, shutil.rmtree, scratch, ignore_errors=True)
        for setup in setups[1:]:
            followers.start(setup)
        return team

    def join(self) -> Ranks:
        """Wait until all ranks have their weights, and connect them.

        Raises:
            UserError: a rank could not read its weights. RankFailed: a rank has ended.
        """
        with self.attributed():
            problems = [connection.recv() for connection in self._followers.connections]
        if problem := next(filter(None, problems), None):
            raise UserError(problem)
        torch.set_num_threads(self.setup.num_threads)
        with self.attributed():
            ranks = Ranks.join(self.setup, self._network, self)
        threading.Thread(target=self._followers.watch, name="ranks", daemon=True).start()
        return ranks

    def step(self, chunks: Sequence[Chunk], subnets: SubnetTable) -> None:
        """Let the followers compute ``chunks``."""
        new = subnets.since(self._num_known)
        self._num_known += len(new)
        self.tell(Step([Chunk(each.tokens, each.start, each.pages, each.subnet, 0) for each in chunks], new))

    def tell(self, message: Cache | Step | Weights) -> None:
        """Send ``message`` to every follower."""
        data = pickle.dumps(message)
        for connection in self._followers.connections:
            connection.send_bytes(data)

    def check(self) -> None:
        """Raises RankFailed: a rank has ended."""
        if failure := self._followers.look():
            raise RankFailed(failure)

    @property
    def has_failed(self) -> bool:
        return bool(self._followers.failure)

    @contextmanager
    def attributed(self) -> Iterator[None]:
        """Turn an error inside into `RankFailed` if a rank has ended: gloo reports only a closed connection."""
        try:
            yield
        except Exception as error:
            for _ in range(10):  # a connection is closed before its process has ended
                if failure := self._followers.look():
                    raise RankFailed(failure) from error
                time.sleep(_WATCH_S)
            raise

    def close(self) -> None:
        """End all followers. A second call has no effect."""
        self._end()
