"""How each role is made: what a process that knows nothing needs, small enough to be pickled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stretto.rl.agent import AgentRole, AgentSettings
from stretto.rl.clients import Connect, Verifiers
from stretto.rl.recipe import PrecisionConfig, RlRecipe, RolloutConfig, SandboxConfig, SourceConfig
from stretto.rl.reward import RewardRole
from stretto.rl.samples import store_group
from stretto.runtime.runtime import Handle
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.registry import open_source
from stretto.tasks.task import TaskSource
from stretto.text.tokenizer import Tokenizer

NEEDS_SANDBOX = ("code", "tools")
"""Kinds that run programs; one of somebody else's may, too."""


def needs_sandbox(sources: Iterable[SourceConfig]) -> bool:
    """Whether any of them runs programs, or may."""
    return any(source.kind in NEEDS_SANDBOX or ":" in source.kind for source in sources)


@dataclass(frozen=True, slots=True)
class SourceTables:
    """The recipe's sources; called, it opens them where it is called, behind one sandbox."""

    sources: Mapping[str, SourceConfig]
    sandbox: SandboxConfig

    def __call__(self) -> dict[str, TaskSource]:
        """
        Raises:
            UserError: a source refuses, or the isolation that is asked for is not to be had.
        """
        needed = needs_sandbox(self.sources.values())
        sandbox = Sandbox(self.sandbox, strict=self.sandbox.strict) if needed else None
        return {name: open_source(name, source, sandbox) for name, source in self.sources.items()}

    def only(self, names: Collection[str]) -> SourceTables:
        """Those of them."""
        return SourceTables({name: self.sources[name] for name in names}, self.sandbox)

    def describe(self, sources: Mapping[str, TaskSource]) -> str:
        """One line: what was opened, and behind which walls programs run."""
        sizes = [
            f"{name} ({'endless' if source.num_items is None else f'{source.num_items:,}'})"
            for name, source in sources.items()
        ]
        walls = next((source.sandbox.isolation for source in sources.values() if source.sandbox is not None), None)
        return f"problems: {', '.join(sizes)}" + ("" if walls is None else f"; programs run behind {walls}")


@dataclass(frozen=True, slots=True)
class Factories:
    """What the roles are made by, each picklable: they may be called in other processes. Made by `make_factories`."""

    trainer: Callable[[], Any]
    engines: Sequence[Callable[[], Any]]
    reward: Callable[[Collection[str]], Callable[[], Any]]
    """From sources to the factory of a verifier for them."""
    agent: Callable[[tuple[Handle, ...], Verifiers], Callable[..., Any]]
    """From engines and verifiers to the factory of an agent."""


def make_factories(
    recipe: RlRecipe, folder: Path, start: Path, tables: SourceTables, tokenizer: Tokenizer, device: str
) -> Factories:
    """The factories of a run in ``folder`` that begins with the checkpoint ``start``."""
    deadline_s = recipe.runtime.rewards.deadline_s

    def agent(engines: tuple[Handle, ...], rewards: Verifiers) -> Callable[..., Any]:
        connect = Connect(engines, rewards, deadline_s)
        return partial(AgentRole, AgentSettings.of(recipe, folder), tokenizer, tables, connect, store_group)

    return Factories(
        trainer=partial(_trainer, recipe, folder, start),
        engines=[
            partial(_engine, f"engine-{number}", start, recipe.rollout, recipe.precision, recipe.replay == "r3", device)
            for number in range(recipe.rollout.engines)
        ],
        reward=lambda names: partial(RewardRole, tables.only(names), deadline_s),
        agent=agent,
    )


def _trainer(recipe: RlRecipe, folder: Path, start: Path) -> Any:
    from stretto.rl.trainer import TrainerRole  # torch, where the role lives

    return TrainerRole(recipe, folder, start)


def _engine(
    name: str, start: Path, rollout: RolloutConfig, precision: PrecisionConfig, routes: bool, device: str
) -> Any:
    from stretto.rl.rollout import (
        EngineRole,
        open_rollout_engine,  # torch, where the role lives
    )
    from stretto.rl.weights import fetch

    opened = partial(open_rollout_engine, start, rollout, precision, routes, device)
    return EngineRole(opened, fetch, name=name, waits=True)
