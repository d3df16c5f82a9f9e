"""Recipe of a whole post-training: stages in order, and the complete recipe of each. Imports no torch.

SFT → an expert for each domain, side by side → one student that they all teach → online RL → what each of them can do, beside
reinforcement learning without experts that drew as many samples. Every
stage is a command of its own, and what a pipeline says of it is what its own recipe would say: over ``[common]``, which all
stages of reinforcement learning share, with the sources of the domains. All recipes are complete before the first stage starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from stretto.base.config import Config, ConfigT, validate
from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT
from stretto.learning.recipe import START, RlRecipe, SourceConfig
from stretto.train.recipe import SftRecipe

StageName = Literal["sft", "experts", "distill", "online", "controls", "evaluate"]
STAGES: tuple[StageName, ...] = get_args(StageName)
COMPARISON_FILE = "comparison.json"
"""What `stretto compare` leaves in its folder, when it is done."""
EVALUATED = "evaluate"
"""Its folder in a pipeline's."""
Table = dict[str, Any]


class DomainConfig(Config):
    """A domain: the sources of one expert."""

    sources: dict[str, SourceConfig] = Field(min_length=1)
    """Sources by name; a name may appear in one domain only."""
    expert: Table = Field(default_factory=dict)
    """Changes of this expert's recipe to ``[experts.recipe]``."""


class SftConfig(Config):
    """The SFT stage, from whose checkpoint experts and student begin."""

    data: tuple[str, ...] = ()
    """Conversations, ``PATH`` or ``PATH@WEIGHT``; none: the tasks' own answers."""
    recipe: Table = Field(default_factory=dict)
    """A `SftRecipe` with ``data``; an `RlRecipe` with ``start`` without ``data``."""


class ExpertsConfig(Config):
    """The stage of the experts, one RL run per domain."""

    recipe: Table = Field(default_factory=dict)
    at_once: int = Field(default=1, gt=0)
    """Number of experts trained in parallel."""
    attempts: int = Field(default=2, gt=0)
    """Attempts per expert; a retry resumes from the last snapshot while the other experts continue."""


class ControlsConfig(Config):
    """Control runs: changes of an `RlRecipe` to ``[common]``; None: left out."""

    mixed: Table | None = None
    """One RL run on all domains. Without ``train.steps`` it draws as many samples as experts and distillation together."""
    cascade: Table | None = None
    """RL on one domain after the other, each with as many samples as its expert."""


class EvaluateConfig(Config):
    """The evaluation of every stage."""

    samples: int = Field(default=1, gt=0)
    """Number of samples per problem."""
    problems: int = Field(default=64, gt=0)
    """Number of held-out problems per source."""


class PipelineRecipe(Config):
    """A pipeline. A stage runs if its table is present."""

    command: ClassVar[str] = "`stretto run`"

    domains: dict[str, DomainConfig] = Field(min_length=1)
    common: Table = Field(default_factory=dict)
    """Tables of an `RlRecipe`, shared by experts, distillation, online RL and controls."""
    sft: SftConfig | None = None
    experts: ExpertsConfig | None = None
    distill: Table | None = None
    """Changes of the distillation's recipe to ``common``; its teachers are the experts."""
    online: Table | None = None
    """Changes of the online stage's recipe to ``common``; may have further ``sources``."""
    controls: ControlsConfig | None = None
    evaluate: EvaluateConfig | None = EvaluateConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        seen: dict[str, str] = {}
        for domain, config in self.domains.items():
            if not re.fullmatch(r"[\w-]+", domain):  # a folder is called so
                raise ValueError(f"domains.{domain}: letters, digits, _ and - make a name; choose another")
            for source in config.sources:
                if source in seen:
                    raise ValueError(
                        f"domains.{domain}.sources.{source}: domain {seen[source]!r} has a source of that name; choose another"
                    )
                seen[source] = domain
        if self.distill is not None and self.experts is None:
            raise ValueError("distill: its teachers are the experts; add [experts], or leave [distill] out")
        if self.controls is not None and self.experts is None:
            raise ValueError(
                "controls: they draw as many samples as the experts; add [experts], or leave [controls] out"
            )
        return self

    @property
    def sources(self) -> Table:
        """Of all domains, as plain data. What the last stage asks, no other trains on."""
        tables = (config.sources.items() for config in self.domains.values())
        least = self.evaluate.problems if self.evaluate is not None else 0
        return {
            name: {**source.model_dump(mode="json"), "held_out": max(source.held_out, least)}
            for each in tables
            for name, source in each
        }


MODEL, RECIPE = "{model}", "{recipe}"
"""In a step's arguments: the checkpoint that the pipeline begins with, and the file of the step's recipe. ``{NAME}`` there, and in
its recipe, is the checkpoint of the step NAME."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a pipeline."""

    stage: StageName
    name: str
    """``sft``, ``experts/math``…: its folder within the pipeline's."""
    arguments: tuple[str, ...]
    """Of stretto, but for ``--out``, ``--device`` and ``--resume``."""
    recipe: RlRecipe | SftRecipe
    result: str = CHECKPOINT
    """What is there in its folder when it is done."""

    @property
    def num_samples(self) -> int:
        """That reinforcement learning or distillation draws."""
        assert isinstance(self.recipe, RlRecipe), "no other stage draws any"
        return self.recipe.train.steps * self.recipe.train.prompts * self.recipe.rollout.group

    @property
    def num_tokens(self) -> int:
        """That are trained on, at most."""
        recipe = self.recipe
        if isinstance(recipe, SftRecipe):
            return recipe.train.steps * recipe.train.rows * recipe.train.seq_len
        if self.stage == "evaluate":
            return 0
        if self.stage == "sft":
            return recipe.start.steps * recipe.start.rows * recipe.train.seq_len if recipe.start else 0
        return self.num_samples * recipe.rollout.max_tokens


def plan(recipe: PipelineRecipe, source: str) -> tuple[Step, ...]:
    """The steps of ``recipe`` in order; ``source`` is its file. Raises `UserError`: the recipe of a stage is impossible; the line
    names the stage."""
    return tuple(_steps(recipe, source))


def _steps(recipe: PipelineRecipe, source: str) -> Iterator[Step]:
    start, results, teachers, taught = MODEL, [MODEL], dict[str, str](), list[Step]()
    if recipe.sft is not None:
        step = _sft(recipe, recipe.sft, source)
        yield step
        start = "{sft}"
        results = [*(results if MODEL in step.arguments else ()), start]
    last = start
    if recipe.experts is not None:
        for name, domain in recipe.domains.items():
            own = {"sources": {key: recipe.sources[key] for key in domain.sources}}
            told = _complete(
                RlRecipe, source, f"experts, {name}", recipe.common, recipe.experts.recipe, domain.expert, own
            )
            teachers[name] = f"{{experts/{name}}}"
            taught.append(Step("experts", f"experts/{name}", ("rl", RECIPE, "--model", start), told))
        yield from taught
    if recipe.distill is not None:
        names = {
            name: {"checkpoint": place, "domains": list(recipe.domains[name].sources)}
            for name, place in teachers.items()
        }
        own = {"sources": recipe.sources, "distill": {"teachers": names}}
        told = _complete(RlRecipe, source, "distill", recipe.common, recipe.distill, own)
        taught.append(Step("distill", "distill", ("distill", RECIPE, "--model", start), told))
        yield taught[-1]
        last = "{distill}"
        results.append(last)
    if recipe.online is not None:
        told = _complete(RlRecipe, source, "online", recipe.common, {"sources": recipe.sources}, recipe.online)
        yield Step("online", "online", ("online", RECIPE, "--model", last), told)
        results.append("{online}")
    if recipe.controls is not None:
        controls = list(_controls(recipe, recipe.controls, start, taught, source))
        yield from controls
        last_of = {step.name.split("/")[1]: f"{{{step.name}}}" for step in controls}
        results += last_of.values()
    if recipe.evaluate is not None:
        yield _evaluate(recipe, recipe.evaluate, results, start, teachers, source)


def _sft(recipe: PipelineRecipe, config: SftConfig, source: str) -> Step:
    if config.data:
        data = tuple(each for path in config.data for each in ("--data", path))
        told = _complete(SftRecipe, source, "sft", config.recipe)
        return Step("sft", "sft", ("sft", RECIPE, "--model", MODEL, *data), told)
    own = _complete(RlRecipe, source, "sft", recipe.common, config.recipe, {"sources": recipe.sources})
    if own.start is None:
        raise UserError(
            f"{source}: sft: neither data nor recipe.start; name conversations in data, or describe the training on the tasks' own answers in recipe.start"
        )
    return Step("sft", "sft", ("sft", RECIPE, *(("--model", MODEL) if own.start.model is None else ())), own, START)


def _controls(
    recipe: PipelineRecipe, config: ControlsConfig, start: str, taught: Sequence[Step], source: str
) -> Iterator[Step]:
    """``taught``: the steps whose samples they match."""
    if config.mixed is not None:
        own: Table = {"sources": recipe.sources}
        told = _complete(RlRecipe, source, "controls, mixed", recipe.common, config.mixed, own)
        if "steps" not in config.mixed.get("train", {}):
            a_step = told.train.prompts * told.rollout.group
            own["train"] = {"steps": -(-sum(step.num_samples for step in taught) // a_step)}
            told = _complete(RlRecipe, source, "controls, mixed", recipe.common, config.mixed, own)
        yield Step("controls", "controls/mixed", ("rl", RECIPE, "--model", start), told)
    if config.cascade is not None and recipe.experts is not None:
        for name, domain in recipe.domains.items():
            own = {"sources": {key: recipe.sources[key] for key in domain.sources}}
            tables = (recipe.common, recipe.experts.recipe, domain.expert, config.cascade, own)
            step = f"controls/cascade/{name}"
            told = _complete(RlRecipe, source, f"controls, cascade, {name}", *tables)
            yield Step("controls", step, ("rl", RECIPE, "--model", start), told)
            start = f"{{{step}}}"


def _evaluate(
    recipe: PipelineRecipe,
    config: EvaluateConfig,
    results: Sequence[str],
    start: str,
    teachers: Mapping[str, str],
    source: str,
) -> Step:
    """All stages' results, each domain beside its teacher, set against the checkpoint ``start`` that all of these began with. The
    online stage's own sources are domains too."""
    online = recipe.online or {}
    own = {name: each for name, each in online.get("sources", {}).items() if name not in recipe.sources}
    tables = {"sources": recipe.sources | own, "rollout": online.get("rollout", {})}
    told = _complete(RlRecipe, source, "evaluate", recipe.common, tables)
    pairs = [(name, key) for name, domain in recipe.domains.items() for key in domain.sources if name in teachers]
    taught = [each for name, key in pairs for each in ("--teacher", f"{key}={teachers[name]}")]
    numbers = ("--samples", str(config.samples), "--limit", str(config.problems))
    at_once = ("--max-batch", str(told.rollout.max_batch))
    arguments = ("compare", *results, "--reference", start, *taught, "--suite", RECIPE, *numbers, *at_once)
    return Step("evaluate", EVALUATED, arguments, told, COMPARISON_FILE)


def merged(*tables: Mapping[str, Any]) -> Table:
    """Later tables over earlier ones, key by key."""
    result: Table = {}
    for table in tables:
        for key, value in table.items():
            below = result.get(key)
            if isinstance(value, Mapping) and isinstance(below, Mapping):
                value = merged(below, value)
            result[key] = value
    return result


def _complete(kind: type[ConfigT], source: str, stage: str, *tables: Mapping[str, Any]) -> ConfigT:
    return validate(kind, merged(*tables), f"{source}: {stage}")
