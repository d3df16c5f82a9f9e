"""Recipe of a whole post-training: stages in order, and the complete recipe of each. Imports no torch.

The stages are SFT, one expert per domain, distillation of all experts into one student, online RL, control runs trained on as many samples, and
an evaluation of all results. Every stage is one command. Its recipe is the stage's table merged over ``[common]``, which all RL stages
share, with the sources of the domains. All recipes are complete before the first stage starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from stretto.base.config import Config, ConfigT, validate
from stretto.base.errors import UserError, one_line
from stretto.base.paths import CHECKPOINT
from stretto.learning.recipe import START, RlRecipe, SourceConfig
from stretto.train.recipe import SftRecipe

StageName = Literal["sft", "experts", "distill", "online", "controls", "evaluate"]
STAGES: tuple[StageName, ...] = get_args(StageName)
COMPARISON_FILE = "comparison.json"
"""Result file of `stretto compare`."""
EVALUATED = "evaluate"
"""Folder of the evaluation within a pipeline's folder."""
Table = dict[str, Any]


class DomainConfig(Config):
    """A domain: the sources of one expert."""

    sources: dict[str, SourceConfig] = Field(min_length=1)
    """Sources by name; a name may appear in one domain only."""
    expert: Table = Field(default_factory=dict)
    """Changes of this expert's recipe to ``[experts.recipe]``."""


class SftConfig(Config):
    """The SFT stage. Experts and student are trained from its checkpoint."""

    data: tuple[str, ...] = ()
    """Conversations, ``PATH`` or ``PATH@WEIGHT``; empty: demonstrations of the tasks."""
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
    """One RL run on all domains. Without ``train.steps`` it trains on as many samples as experts and distillation together. Samples of
    groups that ``loss.drop_uniform`` drops are not counted."""
    cascade: Table | None = None
    """RL on one domain after the other, each trained on as many samples as its expert."""


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
            if not re.fullmatch(r"[\w-]+", domain):  # the name of a folder
                raise ValueError(
                    f"domains.{one_line(domain)}: a name has letters, digits, _ and - only; choose another"
                )
            for source in config.sources:
                if "=" in source:  # the evaluation is told SOURCE=TEACHER
                    raise ValueError(
                        f"domains.{domain}.sources.{one_line(source)}: a name has no equals sign; choose another"
                    )
                if source in seen:
                    raise ValueError(
                        f"domains.{domain}.sources.{source}: domain {seen[source]!r} has a source with this name; choose another"
                    )
                seen[source] = domain
        if self.distill is not None and self.experts is None:
            raise ValueError("distill: its teachers are the experts; add [experts], or leave [distill] out")
        if self.controls is not None and self.experts is None:
            raise ValueError("controls: they draw as many samples as the experts; add [experts], or remove [controls]")
        return self

    @property
    def sources(self) -> Table:
        """Sources of all domains as plain data. The problems of the evaluation are held out of training."""
        tables = (config.sources.items() for config in self.domains.values())
        least = self.evaluate.problems if self.evaluate is not None else 0
        return {
            name: {**source.model_dump(mode="json"), "held_out": max(source.held_out, least)}
            for each in tables
            for name, source in each
        }


MODEL, RECIPE = "{model}", "{recipe}"
"""Placeholders in a step's arguments: the checkpoint that the pipeline starts from, and the file of the step's recipe. ``{NAME}``, also
as a teacher's folder in the recipe, is the checkpoint of the step NAME."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a pipeline."""

    stage: StageName
    name: str
    """Name and folder within the pipeline's folder: ``sft``, ``experts/math``."""
    arguments: tuple[str, ...]
    """Command-line arguments without ``--out``, ``--device`` and ``--resume``."""
    recipe: RlRecipe | SftRecipe
    result: str = CHECKPOINT
    """File or folder that exists in the step's folder once the step has finished."""

    @property
    def num_samples(self) -> int:
        """Number of samples that the step trains on. Samples of dropped groups are generated beside them."""
        assert isinstance(self.recipe, RlRecipe), f"{self.name} trains on no samples"
        return self.recipe.train.steps * self.recipe.train.prompts * self.recipe.rollout.group

    @property
    def num_tokens(self) -> int:
        """Largest number of tokens that the step trains on."""
        recipe = self.recipe
        if isinstance(recipe, SftRecipe):
            return recipe.train.steps * recipe.train.rows * recipe.train.seq_len
        if self.stage == "evaluate":
            return 0
        if self.stage == "sft":
            return recipe.start.steps * recipe.start.rows * recipe.train.seq_len if recipe.start else 0
        return self.num_samples * recipe.rollout.max_tokens


def plan(recipe: PipelineRecipe, source: str) -> tuple[Step, ...]:
    """The steps of ``recipe``, which was read from the file ``source``, in order. Raises `UserError`: an impossible recipe of a stage."""
    return tuple(_steps(recipe, source))


def _steps(recipe: PipelineRecipe, source: str) -> Iterator[Step]:
    start, results, teachers, sampling = MODEL, [MODEL], dict[str, str](), list[Step]()
    if recipe.sft is not None:
        step = _sft(recipe, recipe.sft, source)
        yield step
        start = "{sft}"
        results = [*(results if MODEL in step.arguments else ()), start]
    last = start
    if recipe.experts is not None:
        for name, domain in recipe.domains.items():
            own = {"sources": {key: recipe.sources[key] for key in domain.sources}}
            tables = (recipe.common, recipe.experts.recipe, domain.expert, own)
            complete = _complete(RlRecipe, source, f"experts, {name}", *tables)
            teachers[name] = f"{{experts/{name}}}"
            sampling.append(Step("experts", f"experts/{name}", ("rl", RECIPE, "--model", start), complete))
        yield from sampling
    if recipe.distill is not None:
        domains = {name: list(recipe.domains[name].sources) for name in teachers}
        names = {name: {"checkpoint": place, "domains": domains[name]} for name, place in teachers.items()}
        own = {"sources": recipe.sources, "distill": {"teachers": names}}
        complete = _complete(RlRecipe, source, "distill", recipe.common, recipe.distill, own)
        sampling.append(Step("distill", "distill", ("distill", RECIPE, "--model", start), complete))
        yield sampling[-1]
        last = "{distill}"
        results.append(last)
    if recipe.online is not None:
        complete = _complete(RlRecipe, source, "online", recipe.common, {"sources": recipe.sources}, recipe.online)
        yield Step("online", "online", ("online", RECIPE, "--model", last), complete)
        results.append("{online}")
    if recipe.controls is not None:
        controls = list(_controls(recipe, recipe.controls, start, sampling, source))
        yield from controls
        last_of = {step.name.split("/")[1]: f"{{{step.name}}}" for step in controls}
        results += last_of.values()
    if recipe.evaluate is not None:
        yield _evaluate(recipe, recipe.evaluate, results, start, teachers, source)


def _sft(recipe: PipelineRecipe, config: SftConfig, source: str) -> Step:
    if config.data:
        data = tuple(each for path in config.data for each in ("--data", path))
        complete = _complete(SftRecipe, source, "sft", config.recipe)
        return Step("sft", "sft", ("sft", RECIPE, "--model", MODEL, *data), complete)
    own = _complete(RlRecipe, source, "sft", recipe.common, config.recipe, {"sources": recipe.sources})
    if own.start is None:
        raise UserError(
            f"{source}: sft: neither data nor recipe.start; name conversations in data, or describe training on the tasks' demonstrations in recipe.start"
        )
    return Step("sft", "sft", ("sft", RECIPE, *(("--model", MODEL) if own.start.model is None else ())), own, START)


def _controls(
    recipe: PipelineRecipe, config: ControlsConfig, start: str, sampling: Sequence[Step], source: str
) -> Iterator[Step]:
    """The control runs. ``sampling``: the steps whose number of samples ``mixed`` matches."""
    if config.mixed is not None:
        own: Table = {"sources": recipe.sources}
        complete = _complete(RlRecipe, source, "controls, mixed", recipe.common, config.mixed, own)
        if "steps" not in config.mixed.get("train", {}):
            samples_per_step = complete.train.prompts * complete.rollout.group
            own["train"] = {"steps": -(-sum(step.num_samples for step in sampling) // samples_per_step)}
            complete = _complete(RlRecipe, source, "controls, mixed", recipe.common, config.mixed, own)
        yield Step("controls", "controls/mixed", ("rl", RECIPE, "--model", start), complete)
    if config.cascade is not None and recipe.experts is not None:
        for name, domain in recipe.domains.items():
            own = {"sources": {key: recipe.sources[key] for key in domain.sources}}
            tables = (recipe.common, recipe.experts.recipe, domain.expert, config.cascade, own)
            step = f"controls/cascade/{name}"
            complete = _complete(RlRecipe, source, f"controls, cascade, {name}", *tables)
            yield Step("controls", step, ("rl", RECIPE, "--model", start), complete)
            start = f"{{{step}}}"


def _evaluate(
    recipe: PipelineRecipe,
    config: EvaluateConfig,
    results: Sequence[str],
    start: str,
    teachers: Mapping[str, str],
    source: str,
) -> Step:
    """Comparison of all ``results`` with the checkpoint ``start`` and with the teacher of each domain. Sources that only the online stage
    has are domains too."""
    online = recipe.online or {}
    own = {name: each for name, each in online.get("sources", {}).items() if name not in recipe.sources}
    tables = {"sources": recipe.sources | own, "rollout": online.get("rollout", {})}
    complete = _complete(RlRecipe, source, "evaluate", recipe.common, tables)
    pairs = [(name, key) for name, domain in recipe.domains.items() for key in domain.sources if name in teachers]
    taught_by = [each for name, key in pairs for each in ("--teacher", f"{key}={teachers[name]}")]
    numbers = ("--samples", str(config.samples), "--limit", str(config.problems))
    batch = ("--max-batch", str(complete.rollout.max_batch))
    arguments = ("compare", *results, "--reference", start, *taught_by, "--suite", RECIPE, *numbers, *batch)
    return Step("evaluate", EVALUATED, arguments, complete, COMPARISON_FILE)


def merged(*tables: Mapping[str, Any]) -> Table:
    """Nested merge of ``tables``; values of later tables replace those of earlier ones."""
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
