"""Runs of ``stretto rl`` that are killed at random points, one role or all of the job, and continued."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.common.run_account import Account, Key, logged
from stretto.base.errors import UserError
from stretto.flow.log import read_status

STEPS, PROMPTS, GROUP = 60, 4, 4
RECIPE = f"""
replay = "r3"
[sources]
short = {{ kind = "strings", args = {{ operation = "sort", length = 3, graded = true }} }}
middle = {{ kind = "strings", args = {{ operation = "sort", length = 8, graded = true }} }}
long = {{ kind = "strings", args = {{ operation = "sort", length = 16, graded = true }} }}
[start]
steps = 10                     # it knows how often an answer ends, not where: samples of one problem differ in length
rows = 8
model = {{ vocab_size = 300, hidden_size = 32, num_layers = 2, num_heads = 2, num_kv_heads = 1, head_dim = 16,
  num_experts = 4, top_k = 2, expert_intermediate_size = 32, qk_norm = true, tie_embeddings = true, max_positions = 128 }}
optim = {{ lr = 1e-2, warmup_steps = 5 }}
[rollout]
group = {GROUP}
max_tokens = 40
chunk_tokens = 1               # so that a sample takes the longer the longer it is, and kills find many on their way
engines = 2
max_batch = 16
cache_bytes = 8388608
[loss]
drop_uniform = false           # else what is trained depends on what was sampled, and that on who was fast
[optim]
lr = 3e-5
decay_fraction = 0.0
[train]
steps = {STEPS}
prompts = {PROMPTS}
seq_len = 96
snapshot_every = 4
eval_every = 20
eval_prompts = 8
[runtime]
isolate = "all"
agents = {{ min = 2, max = 2 }}
rewards = {{ min = 1, max = 2 }}
""".replace("\n  num_experts", " num_experts")
KINDS = ("engine", "agent", "reward", "trainer", "job", "any")
"""Whom to kill; ``any``: whichever process of the job, at a moment that no progress chooses."""
LINES_A_LIFE = (1, 40)
"""Events in the journal between two kills; a step has ten."""
LIFE_S = (0.5, 12.0)
"""Seconds before a kill of ``any``."""
POLL_S = 0.05
PATIENCE_S = 300.0
"""Without an event in the journal for so long, the run hangs."""
ORPHANS_S = 3.0
"""By then the children of a killed job must have noticed."""


@dataclass(slots=True)
class Kill:
    """One kill. Written by `Killed`."""

    kind: str
    name: str
    recovered_s: float | None = None
    """Until the next step was trained; None: none was left."""
    num_tokens: int = 0
    """Sampled tokens in flight, as the token logs had them."""
    num_lost: int = 0
    """Of those, not in what was trained."""
    num_orphans: int = 0


@dataclass(slots=True)
class Killed:
    """A run that is killed again and again, and continued."""

    recipe: Path
    account: Account
    rng: random.Random
    kills: list[Kill] = field(default_factory=list)
    logs: list[dict[Key, np.ndarray]] = field(default_factory=list)
    """Of each kill: what was in flight."""
    job: subprocess.Popen[bytes] | None = None

    def finish(self, kinds: list[str]) -> None:
        """Run to the end, with a kill for each of ``kinds`` as long as the run lasts."""
        self._start()
        for kind in kinds:
            if not self._wait(kind) or not self._kill(kind):
                break
        while self._is_running():
            time.sleep(POLL_S)
        self.account.look()

    def _start(self) -> None:
        run = self.account.run
        command = [sys.executable, "-m", "stretto", "rl", str(self.recipe), "-o", str(run), "--device", "cpu"]
        if self.job is not None:
            command.append("--resume")
        with run.with_suffix(".log").open("ab") as log:
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            self.job = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def _is_running(self) -> bool:
        assert self.job is not None
        code = self.job.poll()
        if code is not None and not self._is_done():
            log = self.account.run.with_suffix(".log").read_text()
            raise SystemExit(f"{self.account.run}: ended by itself with exit code {code}:\n{log[-4000:]}")
        self.account.look()
        self._note_recovery()
        if code is None and self._is_done():
            self.job.terminate()  # it has written its checkpoint, and goes on to its report
            self.job.wait()
            return False
        return code is None

    def _is_done(self) -> bool:
        try:
            return read_status(self.account.run).state == "done"
        except UserError:
            return False  # none yet

    def _note_recovery(self) -> None:
        now = time.time()
        for kill, (since, last) in zip(self.kills, self._moments, strict=True):
            if kill.recovered_s is None and any(
                each.kind == "trained" and number > last for number, each in self.account.events.items()
            ):
                kill.recovered_s = now - since

    _moments: list[tuple[float, int]] = field(default_factory=list)
    """Of each kill: Unix seconds, and the number of the journal's last event."""

    def _wait(self, kind: str) -> bool:
        """For the moment of the next kill; False: the run is over."""
        last = self.account.look()
        goal = last + self.rng.randint(*LINES_A_LIFE)
        end_s = time.time() + self.rng.uniform(*LIFE_S)
        quiet_s = time.time()
        while time.time() < end_s if kind == "any" else self.account.look() < goal:
            if not self._is_running():
                return False
            if self.account.look() != last:
                last, quiet_s = self.account.look(), time.time()
            if time.time() - quiet_s > PATIENCE_S:
                raise SystemExit(f"{self.account.run}: hangs; {read_status(self.account.run)}")
            time.sleep(POLL_S)
        time.sleep(self.rng.uniform(0.0, 0.3))
        return self._is_running()

    def _kill(self, kind: str) -> bool:
        """Kill one process of that kind; False: the run was over before."""
        assert self.job is not None
        while (victim := self._victim(kind)) is None:
            if not self._is_running():
                return False
            time.sleep(POLL_S)
        name, pid = victim
        self.logs.append(logged(self.account.run))
        children = _children(self.job.pid)
        kill = Kill(kind, name, num_tokens=sum(map(len, self.logs[-1].values())))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            self.logs.pop()
            return self._is_running()  # it has just ended
        self.kills.append(kill)
        self._moments.append((time.time(), self.account.look()))
        if pid == self.job.pid:
            self.job.wait()
            self._start()
            time.sleep(ORPHANS_S)
            kill.num_orphans = sum(map(_is_alive, children))
        return True

    def _victim(self, kind: str) -> tuple[str, int] | None:
        """A living process of the kind, and its name."""
        assert self.job is not None
        children = _children(self.job.pid)
        try:
            named = {row.pid: row.name for row in read_status(self.account.run).roles if row.pid in children}
        except UserError:
            named = {}
        if kind == "job":
            return "job", self.job.pid
        if kind == "any":
            pid = self.rng.choice([self.job.pid, *children])
            return named.get(pid, "job" if pid == self.job.pid else "one that starts"), pid
        found = [(name, pid) for pid, name in named.items() if name.startswith(kind) and pid is not None]
        return self.rng.choice(found) if found else None


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
