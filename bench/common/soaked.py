"""A Ray cluster of several nodes and a store server, whose processes are killed while RL runs on them."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.common.killing import PATIENCE_S, POLL_S, Kill, Killed, rl_command
from bench.common.nodes import ROLES, Cluster, in_namespace
from bench.common.run_account import Account
from bench.common.s3 import S3Process
from stretto.flow.log import read_status

KINDS = ("actor", "node", "drain", "rank", "store")
ROLE_NAMES = ("trainer", "engine", "agent", "reward")
EVENTS = (1, 15)
"""Events in the journal between the step after a kill and the next kill; a step has ten."""
APART_S, OUTAGE_S = 4.0, (2.0, 6.0)
"""Longest time between two kills of one moment; shortest and longest outage of the store server. Seconds."""
DRIVER = "driver"
"""Folder below /tmp of node 0."""


@dataclass(slots=True)
class Soak:
    """Runs on a cluster, and their kills."""

    machines: Cluster
    server: S3Process
    folder: Path
    rng: random.Random
    advance: Callable[[int, str], None]
    """Shows the progress after each kill."""
    stop_s: float
    """`time.monotonic` after which no more kills are made."""
    outage: threading.Timer | None = None
    """Starts the store server again."""

    def run(self, name: str, start: Path, text: str) -> Killed:
        """A run of the recipe ``text`` on the cluster, not started, from the checkpoint ``start``."""
        self.recover()
        inside, outside = Path("/tmp") / DRIVER, self.machines.tmp(0) / DRIVER
        shutil.copytree(start, outside / name / start.name)
        path = outside / f"{name}.toml"
        path.write_text(text)
        command = in_namespace(self.machines.tmp(0), *rl_command(inside / path.name, inside / name))
        account = Account(outside / name, self.folder / f"{name}-groups", self.server.url)
        return Killed(path, account, self.rng, command=command)

    def recover(self) -> None:
        """Wait until all nodes and the store server are up."""
        self.machines.wait()
        if self.outage is not None:
            self.outage.join()

    def strike(self, run: Killed, moments: list[tuple[str, ...]]) -> None:
        """Let the run end, with kills at the first of ``moments``. Those that were made are removed from ``moments``."""
        run.start()
        while moments and time.monotonic() < self.stop_s and self._calm(run):
            for number, kind in enumerate(moments.pop(0)):
                time.sleep(self.rng.uniform(0, APART_S) if number else 0)
                if run.is_running() and self._kill(run, kind):
                    self.advance(1, f"{run.account.run.name}: {run.kills[-1].name}")
                else:
                    moments.append((kind,))
        run.end()

    def _calm(self, run: Killed) -> bool:
        """Wait until the run has trained a step since the last kill, and for a random time after that; False: it has ended."""
        goal, last, quiet_s = 0, -1, time.time()
        while run.is_running():
            now = run.account.look()
            if now != last:
                last, quiet_s = now, time.time()
            if time.time() - quiet_s > PATIENCE_S:
                raise SystemExit(f"{run.account.run}: hangs; {read_status(run.account.run)}")
            if not goal and run.account.trained() and all(kill.recovered_s is not None for kill in run.kills):
                goal = now + self.rng.randint(*EVENTS)
            if goal and now >= goal:
                return True
            time.sleep(POLL_S)
        return False

    def _kill(self, run: Killed, kind: str) -> bool:
        """Make one kill; False: the run ended first."""
        if kind in ("actor", "rank"):
            return self._kill_role(run, kind, self.rng.choice(ROLE_NAMES) if kind == "actor" else "trainer")
        if kind in ("node", "drain"):
            self.machines.wait()
            number = self.rng.choice(sorted(set(ROLES.values())))
            if kind == "drain":
                return self._drain(run, number)
            run.note(Kill(kind, f"node {number}"))
            self.machines.end(number)
            self.machines.start(number)
            return True
        if self.outage is not None:
            self.outage.join()
        run.note(Kill(kind, "store"))
        self.server.kill()
        self.outage = threading.Timer(self.rng.uniform(*OUTAGE_S), self.server.start)
        self.outage.start()
        return True

    def _drain(self, run: Killed, number: int) -> bool:
        """Drain a node beside a new one with its label; False: the run ended before that was up."""
        left = self.machines.add(number)
        if is_running := run.is_running():
            run.note(Kill("drain", f"node {number}"))
        self.machines.drain(left)
        return is_running

    def _kill_role(self, run: Killed, kind: str, name: str) -> bool:
        """Kill a process whose role's name begins with ``name``, once there is one. The status may name processes of an earlier attempt,
        so only those that are below a node are killed."""
        while run.is_running():
            here = {process.pid for number in set(ROLES.values()) for process in self.machines.processes(number)}
            roles = [row for row in read_status(run.account.run).roles if row.name.startswith(name) and row.pid in here]
            if roles:
                role = self.rng.choice(roles)
                with suppress(psutil.NoSuchProcess):  # it has just ended
                    psutil.Process(role.pid).kill()
                    run.note(Kill(kind, role.name))
                    return True
            time.sleep(POLL_S)
        return False
