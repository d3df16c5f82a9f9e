"""What a run tells of itself: scalars of every step, held-out rewards, the status file. Written on the driver's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from stretto.base.errors import UserError
from stretto.base.track import METRICS_FILE, Tracker, read_metrics
from stretto.rl.buffer import GroupRef
from stretto.rl.controller import Controller
from stretto.rl.driver import Waits
from stretto.rl.gauges import Counts, Gauges, Told
from stretto.rl.measures import StepReport
from stretto.rl.prompts import Prompts
from stretto.rl.recipe import RlRecipe
from stretto.rl.roles import Roles
from stretto.rl.status import RoleRow, RunStatus, write_status
from stretto.rl.trace import Trace

STATUS_EVERY_S = 1.0
_SHOWN_WAITS = 5


class Logbook:
    """Sinks of one run, over all of its attempts."""

    def __init__(
        self,
        folder: Path,
        recipe: RlRecipe,
        resumes: bool,
        wandb_project: str | None,
        advance: Callable[[int, str | None], None],
        say: Callable[[str], None],
    ):
        self._folder, self._recipe, self._advance, self._say = folder, recipe, advance, say
        self._wandb_project = wandb_project
        self._resumes = resumes
        self._tracker: Tracker | None = None
        self._roles: Roles | None = None
        self._controller: Controller | None = None
        self._trace: Trace | None = None
        self._metrics: dict[str, float] = {}
        self._rewards: list[float] = []
        self._shown_steps = 0
        self._window_s = time.perf_counter()
        self._busy = Counts()  # of the trace, which lasts as long as this
        self._counts = Counts()  # of an attempt's roles and controller
        self._gauges = Gauges(self._window_s)
        self._new_roles = 0
        self._undone = 0
        self._state = "starting"
        self._held_out: dict[int, float] = {}
        self._evaluation: asyncio.Task[None] | None = None

    @property
    def first_reward(self) -> float:
        """Mean held-out reward before the first step, as far as it was measured."""
        return self._held_out[min(self._held_out)] if self._held_out else float("nan")

    @property
    def last_reward(self) -> float:
        return self._held_out[max(self._held_out)] if self._held_out else float("nan")

    def begins(self, roles: Roles, controller: Controller, trace: Trace) -> None:
        """An attempt starts where ``controller`` stands; what was logged of later steps is dropped."""
        is_first = self._tracker is None
        self._roles, self._controller, self._trace = roles, controller, trace
        first = controller.version
        if self._tracker is not None:
            self._tracker.close()
        if not is_first or self._resumes:
            self._new_roles += 1  # the trainer at least
            self._undone += max(0, self._last_logged() - first)
        self._tracker = Tracker(
            self._folder,
            first_step=first + 1 if first else 0,
            wandb_project=self._wandb_project,
            config=self._recipe.model_dump(mode="json"),
        )
        rows = read_metrics(self._folder) if first else []
        self._rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
        self._held_out = {int(row["step"]): row["eval/reward"] for row in rows if "eval/reward" in row}
        self._advance(first - self._shown_steps, None)
        self._shown_steps = first
        self._state = "training"
        self._window_s = time.perf_counter()
        self._gauges, self._counts = Gauges(self._window_s), Counts()
        self._counts.grown("filtered", controller.counts()["filtered"])

    def _last_logged(self) -> int:
        """The last step that an earlier attempt has logged; 0 where it came to none."""
        path = self._folder / METRICS_FILE
        return max((int(row["step"]) for row in read_metrics(self._folder)), default=0) if path.is_file() else 0

    def stepped(self, report: StepReport, refs: tuple[GroupRef, ...], waits: Waits) -> None:
        """Log a step that is done."""
        assert self._controller is not None and self._trace is not None and self._tracker is not None
        assert self._roles is not None
        now_s = time.perf_counter()
        wall_s, self._window_s = max(1e-9, now_s - self._window_s), now_s
        busy_s = {name: self._busy.grown(name, seconds) for name, seconds in self._trace.busy_s.items()}
        scalars = dict(report.scalars)
        scalars |= {f"groups/{name}": value for name, value in self._controller.counts().items()}
        scalars |= self._roles.pool_scalars()
        scalars |= {f"busy/{name}_s": seconds for name, seconds in sorted(busy_s.items())}
        scalars |= {
            "wait/trainer_s": waits.trainer_s,
            "wait/trainer_share": waits.trainer_s / wall_s,
            "bubble/trainer": waits.trainer_s / wall_s,
            "time/activate_s": waits.activate_s,
            "time/wall_s": wall_s,
            "speed/tokens_per_s": report.num_tokens / wall_s,
            "speed/samples_per_s": report.num_samples / wall_s,
        }
        scalars |= self._gauges.scalars() | self._losses(len(refs), scalars["reward/uniform_groups"])
        bytes_, tokens = (sum(float(ref.extra.get(name, 0)) for ref in refs) for name in ("routes_bytes", "positions"))
        if bytes_ and tokens:
            scalars["routes/bytes_per_token"] = bytes_ / tokens
        self._metrics |= scalars
        self._rewards.append(scalars["reward/mean"])
        self._tracker.log(report.step, scalars, line=False)
        self._advance(report.step - self._shown_steps, f"reward {scalars['reward/mean']:.3f}")
        self._shown_steps = report.step

    def _losses(self, num_trained: int, trained_uniform: float) -> dict[str, float]:
        """Since the last step: what was thrown away, and what had to be done again."""
        assert self._controller is not None and self._roles is not None
        grown = self._counts.grown
        filtered = grown("filtered", self._controller.counts()["filtered"])
        restarts = self._new_roles + grown("restarts", self._roles.num_restarts())
        undone, self._new_roles, self._undone = self._undone, 0, 0
        return {
            "groups/uniform_share": (filtered + trained_uniform * num_trained) / (filtered + num_trained),
            "failures/restarts": restarts,
            "failures/steps_undone": undone,
            **{
                f"discarded/{why}_tokens": grown(f"discarded {why}", num)
                for why, num in self._controller.discarded.items()
            },
        }

    async def evaluate(self, prompts: Prompts, step: int) -> None:
        """Log the mean reward on held-out problems, one sample each at the run's temperature."""
        assert self._roles is not None and self._tracker is not None
        beside = self._evaluation
        if beside is not None and beside is not asyncio.current_task():
            await beside  # of the same problems
        num, rollout = self._recipe.train.eval_prompts, self._recipe.rollout
        tasks = [prompts.held_out(number) for number in range(num)]
        groups = await self._roles.evaluate(tasks, rollout.temperature, self._recipe.failures.lease_s)
        reward = float(np.mean([group.trajectories[0].verdict.reward for group in groups]))
        self._held_out[step] = reward
        self._metrics["eval/reward"] = reward
        self._tracker.log(step, {"eval/reward": reward}, line=False)
        self._say(f"step {step:>5,}  held-out reward {reward:.3f}  ({num} problems)")

    def evaluate_beside(self, prompts: Prompts, step: int) -> None:
        """`evaluate` while the run goes on, unless the last one is still under way."""
        if self._evaluation is None or self._evaluation.done():
            self._evaluation = asyncio.create_task(self._evaluate_beside(prompts, step))

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """The status file is replaced once a second; at the end it says how the attempt went."""
        watch = asyncio.create_task(self._watch())
        try:
            yield
        except BaseException as error:
            was_told = isinstance(error, asyncio.CancelledError)
            await self._end(watch, "interrupted" if was_told else str(error) or type(error).__name__)
            with suppress(UserError):  # the disk is full, maybe: what ended the attempt is to be heard
                await self._write_status()
            raise
        await self._end(watch, "done")
        await self._write_status()

    async def _end(self, watch: asyncio.Task[None], state: str) -> None:
        tasks = [watch] + ([] if self._evaluation is None else [self._evaluation])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._evaluation = None
        self._state = state

    async def _watch(self) -> None:
        while True:
            try:
                await self._write_status()
            except UserError as error:
                self._say(f"{error}")  # a run that nobody can watch is a run all the same
                return
            await asyncio.sleep(STATUS_EVERY_S)

    async def _evaluate_beside(self, prompts: Prompts, step: int) -> None:
        try:
            await self.evaluate(prompts, step)
        except UserError as error:
            self._say(f"step {step:>5,}  held-out reward not measured: {error}")

    async def _write_status(self) -> None:
        assert self._roles is not None and self._controller is not None
        waits = await self._roles.waits()
        status = RunStatus(
            updated_s=time.time(),
            step=self._controller.version,
            num_steps=self._recipe.train.steps,
            state=self._state,
            counts=self._controller.counts(),
            metrics=self._metrics,
            rewards=self._rewards,
            roles=await self._rows(),
            waits=[
                f"group {wait.ordinal}, sample {wait.sample}: {wait.waits_for}, {wait.seconds:,.1f} s, {wait.num_sampled} tokens so far"
                for wait in waits[:_SHOWN_WAITS]
            ],
        )
        await asyncio.to_thread(write_status, self._folder, status)

    async def _rows(self) -> list[RoleRow]:
        assert self._roles is not None
        rows = [self._roles.row(self._roles.trainer, 0, 0, note=self._trainer_note())]
        engines, agents, rewards = await asyncio.gather(
            self._roles.engine_stats(), self._roles.agent_stats(), self._roles.reward_stats()
        )
        by_agent, by_reward = ({handle.name: stats for handle, stats in told} for told in (agents, rewards))
        self._gauges.tell(Told(time.perf_counter(), engines, by_agent, by_reward))
        for name, stats in engines.items():
            note = f"version {stats.weight_version}, {stats.num_free_pages:,} of {stats.num_pages:,} pages free"
            rows.append(self._roles.row(self._roles.engines[name], stats.num_running, stats.num_waiting, note))
        for handle, agent in agents:
            rows.append(self._roles.row(handle, agent.num_samples, 0, f"{agent.groups_finished:,} groups"))
        rows += self._roles.pool_rows()
        for handle, reward in rewards:
            counts = ", ".join(f"{num:,} {name}" for name, num in sorted(reward.outcomes.items()))
            rows.append(self._roles.row(handle, reward.num_waiting, reward.num_waiting - reward.num_judged, counts))
        return rows

    def _trainer_note(self) -> str:
        share = self._metrics.get("wait/trainer_share")
        return "" if share is None else f"waited {share:.0%} of the last step"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tracker is not None:
            self._tracker.__exit__(kind, error, trace)
