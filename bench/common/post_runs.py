"""The runs of a study of post-training, each in one process: from checkpoints to a checkpoint, its scores and its cost.

RL and distillation run in the synchronous loop that `bench.common.plain_loop` defines, with the same trainer and engine, but without
agents, leases and token logs, which would dominate small runs. Every run returns plain data: scores by source, samples drawn
(dropped ones included), tokens trained on, and FLOPs of sampling, teachers and training together.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from stretto.base.paths import CHECKPOINT
from stretto.base.records import read_lineage
from stretto.base.trajectory import Group, Outcome, Segment, Task, Trajectory, Verdict
from stretto.data.loader import key_of
from stretto.engine.request import Completion, Phases, Request, Sampling
from stretto.flow.prompts import SourceTables, prompts_of
from stretto.flow.rollout import open_rollout_engine
from stretto.learning.dialogue import Dialogue
from stretto.learning.recipe import RlRecipe, SourceConfig
from stretto.learning.samples import store_group
from stretto.learning.trainer import TrainerRole
from stretto.learning.weights import fetch
from stretto.model.parallel import Ranks, stored
from stretto.post.sft import Demonstrations, Example, example, sft
from stretto.runtime.store import FILES, FolderStore
from stretto.tasks.task import Answer, Problem, TaskSource
from stretto.text.tokenizer import load_tokenizer
from stretto.train.loop import Job
from stretto.train.recipe import SftRecipe, TrainConfig
from stretto.train.stages import finetune

_SCORING = 7
"""Stream of the seeds for scoring."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out problems of a score. Runs train on smaller items only."""

    first: int
    """First item of each source."""
    num: int
    """Problems per source."""


class Sampler:
    """An engine that answers problems, and sources that judge the answers. Counts samples and FLOPs."""

    def __init__(self, recipe: RlRecipe, start: Path, device: str, sources: Mapping[str, TaskSource]):
        self.engine, self.sources = open_rollout_engine(recipe, start, device), sources
        self.dialogue = Dialogue(load_tokenizer(start))
        self._phases, self._max_tokens = Phases(self.engine.model.config.full()), recipe.rollout.max_tokens
        self.num_samples = self.flops = 0

    def answers(self, tasks: Sequence[Task]) -> list[list[tuple[Completion, str, float]]]:
        """By task, its samples at temperature 1: completion, text and reward."""
        problems = [self.sources[task.source].problem(task.item) for task in tasks]
        requests = [
            Request(
                str(number),
                tuple(self.dialogue.prompt(problem.messages).tolist()),
                Sampling(
                    temperature=1.0,
                    seed=task.seed,
                    max_tokens=self._max_tokens,
                    n=task.group,
                    stop_ids=self.dialogue.stop_ids,
                    ignore_eos=True,
                ),
                self._phases,
            )
            for number, (task, problem) in enumerate(zip(tasks, problems, strict=True))
        ]
        drawn: list[list[tuple[Completion, str, float]]] = [[] for _ in tasks]
        for done in self.engine.generate(requests):
            assert done.error is None, done.error
            number, text = int(done.request_id), self.dialogue.text(np.array(done.tokens))
            score = self.sources[tasks[number].source].score(problems[number], Answer(text))
            drawn[number].append((done, text, score.reward))
            self.flops += done.usage.flops
        self.num_samples += sum(task.group for task in tasks)
        return drawn

    def groups(self, tasks: Sequence[Task]) -> list[Group]:
        """The samples as groups for the trainer."""
        return [
            Group(task, tuple(_trajectory(task, number, *each[::2]) for number, each in enumerate(samples)))
            for task, samples in zip(tasks, self.answers(tasks), strict=True)
        ]

    def scores(self, held_out: HeldOut, seed: int) -> dict[str, float]:
        """Share of right answers by source, one sample per problem at temperature 1. Its cost is not counted."""
        num = held_out.num
        tasks = [
            Task(number, name, held_out.first + number, 1, key_of(seed, _SCORING, number) >> 2, self._max_tokens)
            for name in self.sources
            for number in range(num)
        ]
        spent = self.num_samples, self.flops
        rewards = [samples[0][2] for samples in self.answers(tasks)]
        self.num_samples, self.flops = spent
        return {name: fmean(rewards[place * num : (place + 1) * num]) for place, name in enumerate(self.sources)}


def _trajectory(task: Task, number: int, done: Completion, reward: float) -> Trajectory:
    prompt, tokens = np.array(done.prompt, np.int32), np.array(done.tokens, np.int32)
    return Trajectory(
        ordinal=task.ordinal,
        sample=number,
        attempt=0,
        segments=(
            Segment(prompt, False, np.zeros(len(prompt), np.float32), np.full(len(prompt), -1, np.int32)),
            Segment(tokens, True, done.logprobs, done.versions.astype(np.int32)),
        ),
        routes=None,
        finish_reason=done.finish_reason,
        verdict=Verdict(reward, Outcome.OK if reward >= 1.0 else Outcome.WRONG, 0.0),
    )


def _ranks(device: str) -> Ranks:
    return Ranks(0, 1, torch.device(device))


def _cost(folder: Path) -> dict[str, int]:
    receipt = read_lineage(folder).receipt
    return {"tokens": receipt.tokens, "flops": receipt.flops}


def start(recipe: RlRecipe, held_out: HeldOut, device: str, folder: Path) -> dict[str, Any]:
    """SFT of the recipe's new network into ``folder``."""
    with SourceTables(dict(recipe.sources), recipe.sandbox).opened() as sources:
        made = sft(recipe, sources, folder / CHECKPOINT, ranks=_ranks(device))
        sampler = Sampler(recipe, made, device, sources)
        return {"scores": sampler.scores(held_out, recipe.train.seed), "samples": 0, **_cost(made)}


def learn(
    recipe: RlRecipe,
    begin: Path,
    judged: Mapping[str, SourceConfig],
    held_out: HeldOut,
    device: str,
    folder: Path,
) -> dict[str, Any]:
    """Reinforcement learning or distillation by ``recipe``, from the checkpoint ``begin``. The sources ``judged`` are scored at the end."""
    assert recipe.staleness == 0 and recipe.replay == "off" and not recipe.loss.drop_uniform, (
        "the synchronous loop has none of these"
    )
    with (
        SourceTables(dict(recipe.sources), recipe.sandbox).opened() as sources,
        TemporaryDirectory() as passing,
        closing(TrainerRole(recipe, passing, begin, ranks=_ranks(device))) as trainer,
    ):
        sampler = Sampler(recipe, begin, device, sources)
        prompts = prompts_of(recipe, sources)
        train = recipe.train
        for step in range(train.steps):
            tasks = [prompts.task(number) for number in range(step * train.prompts, (step + 1) * train.prompts)]
            refs = [store_group(FolderStore(Path(passing)), group) for group in sampler.groups(tasks)]
            trainer.step(refs, step)
            FILES.remove(ref.location for ref in refs)
            trainer.copy_weights()
            version = asyncio.run(trainer.publish())
            assert version is not None, "only the first of several ranks publishes"
            sampler.engine.load_weights(version.number, fetch(version))
        trainer.write(folder / CHECKPOINT)
        receipt = trainer.receipt
        return {
            "scores": _judged(sampler, recipe, judged, held_out),
            "samples": sampler.num_samples,
            "tokens": receipt.tokens,
            "flops": receipt.flops + sampler.flops,
        }


def _judged(
    sampler: Sampler, recipe: RlRecipe, judged: Mapping[str, SourceConfig], held_out: HeldOut
) -> dict[str, float]:
    """Scores of the sources ``judged``, whose verdicts may differ from those of the training."""
    with SourceTables(dict(judged), recipe.sandbox).opened() as sampler.sources:
        return sampler.scores(held_out, recipe.train.seed)


def imitate(
    recipe: RlRecipe,
    begin: Path,
    teachers: Mapping[str, Path],
    num_samples: int,
    epochs: int,
    judged: Mapping[str, SourceConfig],
    held_out: HeldOut,
    device: str,
    folder: Path,
) -> dict[str, Any]:
    """Offline distillation: SFT of ``begin`` on the right ones among ``num_samples`` answers of the teachers, by source."""
    with SourceTables(dict(recipe.sources), recipe.sandbox).opened() as sources:
        prompts = replace(prompts_of(recipe, sources), group=1)
        tasks = [prompts.task(number) for number in range(num_samples)]
        right: dict[int, tuple[Problem, str]] = {}
        flops = 0
        for name, teacher in teachers.items():
            sampler, own = Sampler(recipe, teacher, device, sources), [task for task in tasks if task.source == name]
            for task, samples in zip(own, sampler.answers(own), strict=True):
                if samples[0][2] >= 1.0:
                    right[task.ordinal] = sources[name].problem(task.item), samples[0][1]
            flops += sampler.flops
        dialogue = Dialogue(load_tokenizer(begin))
        taught = [
            example(dialogue, problem, [{"role": "assistant", "content": text}])
            for _, (problem, text) in sorted(right.items())
        ]
        plan = _imitation(recipe, taught, epochs)
        ranks = _ranks(device)

        def stream(first: int) -> Iterator[Example]:
            for number in itertools.count(first):
                epoch, place = divmod(number, len(taught))
                order = np.random.default_rng(key_of(recipe.train.seed, epoch)).permutation(len(taught))
                yield taught[order[place]]

        job = Job(folder / "run", Demonstrations(stream, plan.train, ranks), (), "", ranks)
        trained = finetune(plan, job, stored(begin), {})
        receipt = trained.meter.receipt()
        judge = Sampler(recipe, begin, device, sources)
        judge.engine.load_weights(0, {name: each.clone() for name, each in trained.model.state_dict().items()})
        shutil.rmtree(folder / "run", ignore_errors=True)
        return {
            "scores": _judged(judge, recipe, judged, held_out),
            "right": len(taught) / num_samples,
            "samples": num_samples,
            "tokens": receipt.tokens,
            "flops": receipt.flops + flops,
        }


def _imitation(recipe: RlRecipe, taught: Sequence[Example], epochs: int) -> SftRecipe:
    """Rows of the run's length, as many steps as ``epochs`` fill, and a learning rate that decays to 0."""
    train = recipe.train
    rows = -(-sum(len(each.tokens) - 1 for each in taught) * epochs // train.seq_len)
    steps = max(1, round(rows / train.micro_rows))
    loop = TrainConfig(
        steps=steps, rows=train.micro_rows, seq_len=train.seq_len, seed=train.seed, dtype="float32", keep_snapshots=1
    )
    return SftRecipe(optim=recipe.optim.replace(decay_fraction=1.0), train=loop)
