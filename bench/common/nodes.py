"""A Ray cluster of several nodes on one machine that share no folder: each node has a ``/tmp`` of its own, in its own mount namespace.

This needs root. The label ``node`` of a node is its number; node 0 is the head, on which the driver belongs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import ray
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

NODES = 4
ROLES = {"trainer": 1, "engines": 2, "agents": 3, "rewards": 3}
"""Node of each kind of role; the driver is on node 0."""
RESOURCES = {role: {"labels": {"node": str(node)}} for role, node in ROLES.items()}
"""The table ``resources`` of a recipe with that placement."""
DRAIN_S = 30.0
"""Time from the announcement that a node goes until it is killed, in seconds: the shortest that a cloud gives."""
START_S = 300.0
"""Longest wait for a node to start, in seconds."""


def in_namespace(node_tmp: Path, *command: str) -> list[str]:
    """``command`` with ``node_tmp`` as its /tmp."""
    return ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /tmp && exec "$@"', str(node_tmp), *command]


@dataclass(slots=True)
class Cluster:
    """The nodes of a cluster. Made by `cluster`."""

    base: Path
    address: str
    env: Mapping[str, str]
    """Environment of the nodes other than the head."""
    nodes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Process of each node; all others of the node are below it."""
    logs: dict[int, Path] = field(default_factory=dict)
    leaving: threading.Timer | None = None
    """Kills the drained node."""
    num_started: int = 0

    def tmp(self, number: int) -> Path:
        """The /tmp of the first node with that number."""
        return self.base / f"node-{number}"

    def start(self, number: int) -> None:
        """Start a node with an empty /tmp."""
        tmp = self.tmp(number) if number not in self.nodes else self.base / f"node-{number}-{self.num_started}"
        tmp.mkdir()
        self.num_started += 1
        role = [f"--address={self.address}"]
        if number == 0:
            role = ["--head", f"--port={self.address.partition(':')[2]}", "--include-dashboard=false"]
        # without CPUs, Ray starts no processes in advance; roles ask for none
        options = [
            f"--labels=node={number}",
            f"--node-name={tmp.name}",
            "--num-cpus=0",
            "--block",
            "--disable-usage-stats",
        ]
        options += ["--object-store-memory=200000000"]
        program = str(Path(sys.executable).with_name("ray"))
        with tmp.with_suffix(".log").open("wb") as log:
            command = in_namespace(tmp, program, "start", *role, *options)
            env = {**os.environ, **(self.env if number else {})}
            self.nodes[number], self.logs[number] = (
                subprocess.Popen(command, env=env, stdout=log, stderr=log),
                Path(log.name),
            )

    def wait(self) -> None:
        """Wait until all nodes are up, and the drained one is gone."""
        if self.leaving is not None:
            self.leaving.join()
        end_s = time.monotonic() + START_S
        while waits_for := [log for log in self.logs.values() if "Ray runtime started" not in log.read_text()]:
            assert time.monotonic() < end_s, f"not up after {START_S:g} s; see {waits_for}"
            time.sleep(0.2)

    def processes(self, number: int) -> list[psutil.Process]:
        """All processes of a node."""
        return _family(self.nodes[number])

    def end(self, number: int) -> None:
        """Kill a node with all its processes."""
        _kill(self.nodes[number])

    def add(self, number: int) -> str:
        """Start another node with that number, and wait until it is up. Returns Ray's name of the one before, which is to be drained."""
        left, name = self.nodes[number], self.logs[number].stem
        self.start(number)
        self.wait()
        self.leaving = threading.Timer(DRAIN_S, _kill, [left])
        return name

    def drain(self, name: str) -> None:
        """Tell Ray that the node goes, and kill it `DRAIN_S` later."""
        assert self.leaving is not None, "no other node was added"
        self.leaving.start()
        client = ray._raylet.GcsClient(address=self.address)  # as `ray drain-node`, in less time
        (node,) = (id for id, node in client.get_all_node_info().items() if node.node_name == name)
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        is_accepted, why = client.drain_node(node.hex(), reason, "spot price", int(1000 * (time.time() + DRAIN_S)))
        assert is_accepted, why


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The process and all below it."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        return [*root.children(recursive=True), root]
    return []


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all below it."""
    processes = _family(process)
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(processes, 30)
    process.wait()


@contextmanager
def cluster(base: Path, env: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """A cluster of `NODES` nodes, with one folder of ``base`` as /tmp of each. ``env``: for all nodes but the head."""
    os.environ |= {  # also of the driver
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_raylet_start_wait_time_s": f"{START_S:g}",
        "RAY_worker_niceness": "0",  # Ray's own default would leave roles no time on a busy machine
    }
    host = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    made = Cluster(base, f"{host}:{port}", env or {})
    try:
        made.start(0)
        made.wait()  # on a busy machine, nodes that start beside the head give up
        for number in range(1, NODES):
            made.start(number)
        yield made
    finally:
        if made.leaving is not None:
            made.leaving.join()
        for number in reversed(made.nodes):
            made.end(number)
