"""Held-out reward of a checkpoint, and our training step on given samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stretto.base.trajectory import Group, Outcome, Segment, Trajectory, Verdict
from stretto.engine.loading import open_engine
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.learning.algorithms import advantages
from stretto.learning.dialogue import Dialogue
from stretto.learning.recipe import Prompts, RlRecipe
from stretto.learning.samples import store_group
from stretto.learning.trainer import TrainerRole
from stretto.runtime.store import FolderStore
from stretto.tasks.task import Answer, TaskSource


def held_out_reward(
    folder: Path, recipe: RlRecipe, prompts: Prompts, sources: Mapping[str, TaskSource], num: int
) -> float:
    """Mean reward on ``num`` held-out problems, one sample of each at the recipe's temperature, drawn by our engine."""
    opened = open_engine(folder, EngineConfig(cache_bytes=recipe.rollout.cache_bytes))
    assert opened.engine.tokenizer is not None
    dialogue, phases = Dialogue(opened.engine.tokenizer), Phases(opened.engine.model.config.full())
    tasks = [prompts.held_out(number) for number in range(num)]
    problems = [sources[task.source].problem(task.item) for task in tasks]
    requests = [
        Request(
            str(number),
            tuple(dialogue.prompt(problem.messages).tolist()),
            Sampling(
                temperature=recipe.rollout.temperature,
                seed=number,
                max_tokens=task.max_tokens,
                stop_ids=dialogue.stop_ids,
            ),
            phases,
        )
        for number, (task, problem) in enumerate(zip(tasks, problems, strict=True))
    ]
    done = opened.engine.generate(requests)
    assert len(done) == num, f"{len(done)} answers to {num} problems"
    by_id = {int(each.request_id): dialogue.text(np.array(each.tokens)) for each in done}
    scores = [
        sources[task.source].score(problem, Answer(by_id[number])).reward
        for number, (task, problem) in enumerate(zip(tasks, problems, strict=True))
    ]
    return float(np.mean(scores))


def worst_advantage(rows: Sequence[Mapping[str, Any]], group: int) -> float:
    """Largest difference between our GRPO advantages and those in ``rows``, for the same rewards."""
    worst = 0.0
    for row in rows:
        rewards, theirs = (np.array(row[name], np.float64).reshape(-1, group) for name in ("rewards", "advantages"))
        ours = np.stack([advantages(rewards_G, "grpo") for rewards_G in rewards])
        worst = max(worst, float(np.abs(ours - theirs).max()))
    return worst


def our_gradient(row: Mapping[str, Any], recipe: RlRecipe, prompts: Prompts, start: Path, folder: Path) -> float:
    """Gradient norm of our first step on the samples of ``row``: prompts, completions and rewards, sorted by group.

    The samples have no log-probabilities and routes, so the step recomputes the log-probabilities and replays no routes. With a
    staleness of 0 both are without effect.
    """
    loss = recipe.loss.model_copy(update={"proximal": "recompute"})
    role = TrainerRole(recipe.model_copy(update={"loss": loss, "replay": "off"}), folder, start)
    size = prompts.group
    samples = list(zip(row["prompt_ids"], row["completion_ids"], row["rewards"], strict=True))
    refs = []
    for ordinal, begin in enumerate(range(0, len(samples), size)):
        trajectories = tuple(
            Trajectory(
                ordinal=ordinal,
                sample=sample,
                attempt=0,
                segments=(_segment(prompt, False), _segment(completion, True)),
                routes=None,
                finish_reason="stop",
                verdict=Verdict(reward, Outcome.OK, 0.0),
            )
            for sample, (prompt, completion, reward) in enumerate(samples[begin : begin + size])
        )
        refs.append(store_group(FolderStore(folder), Group(prompts.task(ordinal), trajectories)))
    return role.step(refs, 0).scalars["optim/grad_norm"]


def _segment(tokens: Sequence[int], is_sampled: bool) -> Segment:
    ids = np.array(tokens, np.int32)
    versions = np.zeros(len(ids), np.int32) if is_sampled else np.full(len(ids), -1, np.int32)
    return Segment(ids, is_sampled, np.zeros(len(ids), np.float32), versions)
