"""Runs of ``stretto rl`` in which one role or the whole job is killed at random moments; a killed job is resumed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.common.run_account import Account
from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT
from stretto.flow.log import read_status

RECIPE = Path(__file__).with_suffix(".toml").read_text()
HEAD = "staleness = 0\nprecision = { batch_invariant = true }\n"
"""Begins a recipe whose runs end with equal bits."""
_TABLES = tomllib.loads(RECIPE)
STEPS, PROMPTS, GROUP = _TABLES["train"]["steps"], _TABLES["train"]["prompts"], _TABLES["rollout"]["group"]
EVENTS_A_LIFE = (1, 40)
"""Events in the journal between two kills; a step has ten."""
POLL_S = 0.05
PATIENCE_S = 300.0
"""Time without an event in the journal after which the run counts as hanging."""
ORPHANS_S = 3.0
"""Time within which the children of a killed job must end."""


@dataclass(slots=True)
class Kill:
    """One kill. Written by `Killed`."""

    kind: str
    name: str
    recovered_s: float | None = None
    """Time until the next step was trained; None: no step was left."""
    num_orphans: int = 0
    """Children that still ran `ORPHANS_S` after their job was killed."""


@dataclass(slots=True)
class Killed:
    """A run with kills."""

    recipe: Path
    account: Account
    rng: random.Random
    kills: list[Kill] = field(default_factory=list)
    job: subprocess.Popen[bytes] | None = None
    command: list[str] | None = None
    """Starts the job; None: ``stretto rl`` on this machine."""

    def finish(self, kinds: list[str]) -> None:
        """Run to the end, with one kill for each of ``kinds`` while the run lasts: engine, agent, reward, trainer or job."""
        self.start()
        for kind in kinds:
            if not self._wait() or not self._kill(kind):
                break
        self.end()

    def end(self) -> None:
        """Wait until the run has ended."""
        while self.is_running():
            time.sleep(POLL_S)
        self.account.look()

    def start(self) -> None:
        run = self.account.run
        command = self.command or rl_command(self.recipe, run)
        if self.job is not None:
            command = [*command, "--resume"]
        with run.with_suffix(".log").open("ab") as log:
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            self.job = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def is_running(self) -> bool:
        assert self.job is not None
        code = self.job.poll()
        if code is not None and not self._is_done():
            log = self.account.run.with_suffix(".log").read_text()
            raise SystemExit(f"{self.account.run}: failed, exit code {code}:\n{log[-4000:]}")
        self.account.look()
        self._note_recovery()
        if code is None and self._is_done():
            self.job.terminate()  # the checkpoint is written; the report is not needed
            self.job.wait()
            return False
        return code is None

    def _is_done(self) -> bool:
        try:
            # without a shared folder, the checkpoint arrives later than the state
            is_written = (self.account.run / CHECKPOINT).exists()
            return is_written and read_status(self.account.run).state == "done"
        except UserError:
            return False  # there is no status yet

    def note(self, kill: Kill) -> None:
        """Record a kill at the moment at which it is made."""
        self.kills.append(kill)
        self._moments.append((time.time(), self.account.look()))

    def _note_recovery(self) -> None:
        now = time.time()
        for kill, (since, last) in zip(self.kills, self._moments, strict=True):
            if kill.recovered_s is None and any(
                each.kind == "trained" and number > last for number, each in self.account.events.items()
            ):
                kill.recovered_s = now - since

    _moments: list[tuple[float, int]] = field(default_factory=list)
    """Unix time and number of the journal's last event at each kill."""

    def _wait(self) -> bool:
        """Wait for the moment of the next kill; False: the run has ended."""
        last = self.account.look()
        goal = last + self.rng.randint(*EVENTS_A_LIFE)
        quiet_s = time.time()
        while self.account.look() < goal:
            if not self.is_running():
                return False
            if self.account.look() != last:
                last, quiet_s = self.account.look(), time.time()
            if time.time() - quiet_s > PATIENCE_S:
                raise SystemExit(f"{self.account.run}: hangs; {read_status(self.account.run)}")
            time.sleep(POLL_S)
        time.sleep(self.rng.uniform(0.0, 0.3))
        return self.is_running()

    def _kill(self, kind: str) -> bool:
        """Kill one process of that kind; False: the run ended first."""
        assert self.job is not None
        while (victim := self._victim(kind)) is None:
            if not self.is_running():
                return False
            time.sleep(POLL_S)
        name, pid = victim
        children = psutil.Process(self.job.pid).children()
        kill = Kill(kind, name)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return self.is_running()  # the process has just ended
        self.note(kill)
        if pid == self.job.pid:
            self.job.wait()
            self.start()
            kill.num_orphans = len(psutil.wait_procs(children, ORPHANS_S)[1])
        return True

    def _victim(self, kind: str) -> tuple[str, int] | None:
        """Name and process id of a running process of the kind; None: there is none."""
        assert self.job is not None
        if kind == "job":
            return "job", self.job.pid
        found = list[tuple[str, int]]()
        with suppress(UserError, psutil.NoSuchProcess):  # there is no status yet, or the job has just ended
            children = {child.pid for child in psutil.Process(self.job.pid).children()}
            rows = [row for row in read_status(self.account.run).roles if row.name.startswith(kind)]
            found = [(row.name, row.pid) for row in rows if row.pid is not None and row.pid in children]
        return self.rng.choice(found) if found else None


def rl_command(recipe: Path, run: Path) -> list[str]:
    return [sys.executable, "-m", "stretto", "rl", str(recipe), "-o", str(run), "--device", "cpu"]
