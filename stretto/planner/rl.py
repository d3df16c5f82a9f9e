"""An RL recipe on a cluster: memory and batch of an engine, memory and steps of the trainer, and the role times of a simulation."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import NormalDist

from pydantic import Field

from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder, read_json
from stretto.flow.controller import Limits, default_window
from stretto.learning.recipe import ADVANTAGES, RlRecipe
from stretto.model.counts import count
from stretto.model.families import from_hf
from stretto.model.headers import STRETTO_FILE
from stretto.model.spec import ModelConfig
from stretto.planner.hardware import HANDOVER, Cluster, Dtype
from stretto.planner.memory import WIDE, Layout, Memory, engine_memory, training_memory
from stretto.planner.simulate import Roles
from stretto.planner.speed import StepTime, decode_s, prefill_s, step_time

SIMULATED_STEPS = 4
"""Steps that a simulation counts, beside those that fill the pipeline."""
GPUS_OF_ENGINE = (1, 2, 4, 8)


class Workload(Config):
    """Facts about an RL run that its recipe does not know."""

    answer_tokens: float | None = Field(default=None, gt=0)
    """Mean number of sampled tokens of an answer; None: ``rollout.max_tokens``, the most."""
    prompt_tokens: int | None = Field(default=None, gt=0)
    """Tokens of a prompt; None: what ``rollout.max_tokens`` leaves of ``train.seq_len``, the most."""
    verdict_s: float = Field(default=0.0, ge=0)
    """Mean time of a verdict, in seconds."""
    verifiers: int | None = Field(default=None, gt=0)
    """Answers that are judged at once; None: ``runtime.rewards.max``."""


SPREAD = 0.5
"""Standard deviation of the logarithm of an answer's tokens and of a verdict's time (assumed)."""


class RlRun:
    """An RL recipe on a cluster, with everything that does not depend on the trainer's layout."""

    def __init__(self, recipe: RlRecipe, config: ModelConfig, cluster: Cluster, workload: Workload) -> None:
        """Raises `UserError`: answers or prompts of ``workload`` that the recipe does not allow."""
        rollout, self.hardware = recipe.rollout, cluster.hardware
        for option, asked, most, key in (
            ("--answer-tokens", workload.answer_tokens, rollout.max_tokens, "rollout.max_tokens"),
            ("--prompt-tokens", workload.prompt_tokens, recipe.train.seq_len - 1, "train.seq_len"),
        ):
            if asked is not None and asked > most:
                raise UserError(
                    f"{option} {asked:g}: {key} of the recipe allows {most}; give less, or change it with --set"
                )
        recipe = recipe.on("fp32" if self.hardware.name == "cpu" else "bf16")  # as every GPU of the table
        self.recipe, self.config, self.cluster, self.workload = recipe, config, cluster, workload
        self.dtype: Dtype = "float32" if recipe.precision.trainer == "fp32" else "bfloat16"
        self.decoded_bytes = {"fp32": 4, "bf16": 2, "fp8": 1}[recipe.precision.engines]
        """Bytes of a weight that a decoding step reads."""
        self.value_bytes = max(2, self.decoded_bytes)
        """Bytes of a weight's value, by which an engine multiplies prompts; with FP8 they stay beside the copy for decoding steps."""
        counts = count(config, config.full())
        self.params = counts.total_params
        self.teachers, self.notes = _teachers(recipe, config)
        """Networks of the teachers of ``distill`` that the trainer reads, and what is unknown of them."""
        self.answer = workload.answer_tokens or rollout.max_tokens
        self.prompt = workload.prompt_tokens or recipe.train.seq_len - rollout.max_tokens
        self.step_tokens = recipe.train.prompts * rollout.group * self.answer
        """Sampled tokens of a step."""
        # samples of a group share their prompt
        cached = counts.kv_elements * self.value_bytes * (self.prompt / rollout.group + self.answer)
        self.batch = max(1, min(rollout.max_batch, int(rollout.cache_bytes / cached)))
        """Sequences that an engine's cache and its batch hold."""
        self.engine_memory = engine_memory(
            config, self.value_bytes, self.decoded_bytes, rollout.cache_bytes, rollout.max_batch, self.prompt
        )
        needed = self.engine_memory.total / self.hardware.usable
        self.gpus_of_engine = next((each for each in GPUS_OF_ENGINE if needed <= each), GPUS_OF_ENGINE[-1])
        """Accelerators over which an engine is split, until it fits."""
        self.is_shared = cluster.num == 1
        """Whether trainer and engines share one accelerator, each at half its speed."""

    def engines(self, layout: Layout) -> int:
        if self.is_shared:
            return self.recipe.rollout.engines
        return (self.cluster.num - layout.ranks) // self.gpus_of_engine

    def passes(self, layout: Layout) -> Layout:
        """``layout`` with the number of passes of a step: shared prompts are packed once."""
        train, group = self.recipe.train, self.recipe.rollout.group
        num_tokens = train.prompts * (self.prompt + group * self.answer)
        return replace(layout, micro_batches=max(1, math.ceil(num_tokens / (train.seq_len * layout.micro_rows))))

    def memory(self, layout: Layout) -> Memory:
        """Memory of a trainer's rank."""
        length, optim = self.recipe.train.seq_len, self.recipe.optim
        distill = self.recipe.distill
        taught = distill is not None and bool(self.teachers) and distill.form != "sampled"
        group = self.recipe.rollout.group
        prefix_keys = group * self.prompt / (self.prompt + group * self.answer)
        memory = training_memory(self.config, layout, length, self.dtype, optim, prefix_keys=prefix_keys, taught=taught)
        params = [count(each, each.full()).total_params for each in self.teachers.values()]
        teachers = WIDE * (self.params * self._num_frozen + sum(params)) / layout.ranks
        # on a CPU the copy of the weights that is being published is in the same memory
        published = 0 if self.hardware.is_gpu else WIDE * self.params
        return replace(memory, teacher=teachers + published)

    def step(self, layout: Layout) -> StepTime:
        train, optimiser = self.recipe.train, self.recipe.optim.name
        scores = train.minibatches > 1 or self.recipe.loss.advantage not in ADVANTAGES
        own, shares = self.config, [count(each, each.full()).active_params for each in self.teachers.values()]
        # each sample is scored by the teacher of its source
        taught = sum(shares) / len(shares) / count(own, own.full()).active_params if shares else 0.0
        extra = scores + self._num_frozen + taught
        step = step_time(self.config, layout, train.seq_len, self.dtype, optimiser, self.hardware, extra_forwards=extra)
        return replace(step, update=step.update * train.minibatches)

    @property
    def _num_frozen(self) -> int:
        """Networks of the policy's shape that only score: the reference of the KL penalty, and those of an algorithm of the user's."""
        return (self.recipe.loss.kl_weight > 0) + len(self.recipe.teachers)

    def decode_s(self, batch: int) -> float:
        context = self.prompt + self.answer / 2
        seconds = decode_s(self.config, batch, context, self.decoded_bytes, self.hardware, self.gpus_of_engine)
        return 2 * seconds if self.is_shared else seconds

    def bound_s(self, layout: Layout) -> float:
        """A lower bound of the time of a step: that of the slower of trainer and engines."""
        rate = self.batch * self.engines(layout) / self.decode_s(self.batch)
        return max(self.step(layout).total, self.step_tokens / rate)

    def roles(self, layout: Layout) -> Roles:
        recipe, workload, engines, half = self.recipe, self.workload, self.engines(layout), 1 + self.is_shared
        train, rollout, staleness = recipe.train, recipe.rollout, recipe.staleness
        capacity = None
        if rollout.max_turns == 1 and not workload.verdict_s:
            capacity = max(1, engines * self.batch // rollout.group)
        limits = Limits(
            prompts=train.prompts,
            staleness=staleness,
            window=recipe.window or default_window(train.prompts, staleness, capacity),
            lease_s=math.inf,
            num_steps=min(train.steps, staleness + 1 + SIMULATED_STEPS),
        )
        step_s, weights = half * self.step(layout).total, self.params * self.value_bytes
        prefill = prefill_s(self.config, self.prompt, self.value_bytes, self.hardware, self.gpus_of_engine)

        uncut = _mean_before_cut(self.answer, rollout.max_tokens)

        def tokens(rng: random.Random, ordinal: int) -> float:
            return max(1.0, min(rollout.max_tokens, _lognormal(rng, uncut)))

        def verdict(rng: random.Random, ordinal: int) -> float:
            return _lognormal(rng, workload.verdict_s) if workload.verdict_s else 0.0

        return Roles(
            limits=limits,
            group=rollout.group,
            engines=engines,
            batch=self.batch,
            decode_s=cache(self.decode_s),
            tokens=tokens,
            step_s=lambda rng, step: step_s,
            prefill_s=half * prefill,
            verifiers=workload.verifiers or recipe.runtime.rewards.max,
            verdict_s=verdict,
            publish_s=2 * WIDE * self.params / self.hardware.bandwidth,
            deliver_s=weights / HANDOVER,
            activate_s=weights / HANDOVER,
        )


def _teachers(recipe: RlRecipe, config: ModelConfig) -> tuple[dict[str, ModelConfig], list[str]]:
    """Shapes of the teachers by name, without servers; and notes: one that is not on this machine is taken to have the policy's."""
    found, notes = dict[str, ModelConfig](), list[str]()
    for name, each in sorted(recipe.distill.teachers.items()) if recipe.distill is not None else ():
        if each.url is not None or each.checkpoint is None:
            continue
        try:
            folder = checkpoint_folder(each.checkpoint)
        except UserError:
            found[name] = config
            notes.append(f"Teacher {name} is not here: it is taken to be as large as the policy.")
        else:
            found[name] = network_of(folder)
    return found, notes


def network_of(folder: Path) -> ModelConfig:
    """Network of a checkpoint folder. Raises `UserError`: no file describes it."""
    if (own := folder / STRETTO_FILE).is_file():  # config.json may pad the network to its family
        tree = read_json(own)
        return validate(ModelConfig, tree.get("config", {}) if isinstance(tree, dict) else {}, str(own))
    path = folder / "config.json"
    return from_hf(read_json(path), str(path))[0]


def _lognormal(rng: random.Random, mean: float) -> float:
    return rng.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)


def _mean_before_cut(mean: float, most: float) -> float:
    """Mean of the lognormal draws that have the mean ``mean`` once they are cut at ``most``; many times ``most`` if both are equal."""
    phi = NormalDist().cdf

    def cut(uncut: float) -> float:
        # standard deviations from the mean logarithm to the cut
        above = (math.log(most / uncut) + SPREAD**2 / 2) / SPREAD
        return uncut * phi(above - SPREAD) + most * (1.0 - phi(above))

    low, high = mean, 64.0 * most
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cut(middle) < mean else (low, middle)
    return high
