"""`stretto run`: the steps of a post-training pipeline, each a command in a process of its own. Finished steps are not repeated.

The pipeline folder then holds:

pipeline.json   inputs of each step (recipe, hashes of weights), and whether it ended
NAME.json       the complete recipe of a step; with it, the command that is shown can be run by hand
NAME/           the run folder that a step's command writes
NAME.log        console output of a step that ran beside others
before-1/…      earlier results of the stages that `--from` runs again
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count as numbers
from pathlib import Path
from typing import Any

import rich
import rich.table
from pydantic import Field

from stretto.api.arguments import ModelLike, PathLike, model_path, run_folder
from stretto.api.model import Model, load
from stretto.api.rl import judged_and_verifiable
from stretto.api.train import command_to_try
from stretto.base.config import Config, Settings, completed, differences, read_recipe, validate
from stretto.base.errors import UserError, nearest, user_errors_naming
from stretto.base.numbers import durations_alike, listed, short, si, si_alike
from stretto.base.paths import CHECKPOINT, RUN_FILE, checkpoint_folder, claimed, read_json, user_path, write_json
from stretto.base.records import Receipt, find_lineage
from stretto.base.table import NOTHING, Cell, Table, in_columns
from stretto.base.track import read_metrics, say, wide_console
from stretto.flow.run import MOVED
from stretto.learning.recipe import LAYOUT, START, RlRecipe
from stretto.model.checkpoint import known_hash, read_config
from stretto.model.counts import count
from stretto.model.parallel import DeviceLike
from stretto.model.spec import ModelConfig
from stretto.post.pipeline import MODEL, RECIPE, STAGES, PipelineRecipe, Step, plan
from stretto.post.suites import check_kinds
from stretto.report.page import REPORT_FOLDER
from stretto.report.rl import report_rl_run
from stretto.train.recipe import SftRecipe
from stretto.train.step import NonFiniteError

STATE_FILE = "pipeline.json"
BEFORE = "before-"
BAD_INPUT = 2
"""Exit code of a command for bad input, which a second attempt would not change."""
TRAINED_PASSES = 3
"""Cost of one forward and backward pass, in forward passes."""
_LAYOUT = tuple(f"recipe.{table}" for table in LAYOUT)
_PLACE = re.compile(r"(?P<before>.*=)?\{(?P<name>model|sft|distill|online|(?:experts|controls)/[^{}]+)\}", re.DOTALL)
"""An argument that is a placeholder for a checkpoint (`stretto.post.pipeline.Step`), or a name, ``=`` and one."""
_TEACHER = re.compile(r"\{(?P<name>[^{}]+)\}")
"""A teacher's folder that is a placeholder for a checkpoint."""


class StepState(Config):
    """State of one step in pipeline.json."""

    inputs: dict[str, Any]
    has_ended: bool = False


class State(Config):
    """Content of pipeline.json."""

    steps: dict[str, StepState] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline and its folder."""

    folder: Path
    recipe: PipelineRecipe
    steps: tuple[Step, ...]
    model: Path | None
    """Checkpoint that the pipeline begins with."""
    device: str
    model_hash: str = ""
    """Hash of the weights of ``model``; empty for a dry run."""

    def place(self, name: str) -> Path:
        """The checkpoint for the placeholder ``{name}``: that of a step, or the one that the pipeline begins with."""
        if f"{{{name}}}" == MODEL:
            assert self.model is not None, "checked before anything ran"
            return self.model
        step = next(step for step in self.steps if step.name == name)
        return self.folder / name / step.result

    def is_done(self, step: Step) -> bool:
        """Whether its result exists. An evaluation without its page is compared again, from the answers that it has."""
        is_reported = step.stage != "evaluate" or (self.folder / step.name / REPORT_FOLDER).is_dir()
        return is_reported and (self.folder / step.name / step.result).exists()


@user_errors_naming(renamed={"from": "first"})
def run(
    recipe: PathLike,
    model: ModelLike | None = None,
    out: PathLike | None = None,
    *,
    first: str | None = None,
    until: str | None = None,
    dry_run: bool = False,
    price: float | None = None,
    settings: Settings = (),
    device: DeviceLike = "auto",
) -> Model | None:
    """Run a whole post-training: SFT, an expert for each domain, one student of all experts, online RL, evaluation.

    Called again on the same folder, it resumes with the first stage that has not finished.

    Args:
        recipe: a pipeline recipe (``pipeline``; docs/PIPELINE.md).
        model: run or checkpoint to begin with; None where the recipe's start describes a new network.
        out: pipeline folder; ``runs/`` and the recipe's name by default.
        first: repeat this stage and all after it.
        until: stop after this stage.
        dry_run: print commands, tokens, FLOPs and hours, and run nothing.
        price: price of one hour of a device, for ``dry_run``.
        settings: overrides of single recipe keys: ``["experts.at_once=2"]``.
        device: ``cpu``, ``cuda`` or ``auto``.

    Returns:
        The model of the last stage that has finished; None if no stage has.

    Raises:
        UserError: a bad recipe, one that changed since a stage finished, or a stage that failed.
    """
    path, folder = user_path(recipe, "recipe"), run_folder(out, recipe, "pipeline")
    parsed = read_recipe(path, PipelineRecipe, settings)
    steps = plan(parsed, str(path))
    _check_steps(steps, str(path))
    for flag, name in (("--from", first), ("--until", until)):
        stages = list(dict.fromkeys(step.stage for step in steps))
        if name is not None and name not in stages:
            raise UserError(f"{flag} {name}: no such stage{nearest(name, stages)}; this pipeline has {listed(stages)}")
    if first is not None and until is not None and STAGES.index(first) > STAGES.index(until):
        raise UserError(f"--from {first}, --until {until}: the first stage comes after the last; exchange them")
    if price is not None and not 0 < price < math.inf:
        raise UserError(f"--price {price}: must be a number above 0; give the price of one hour of a device")
    if price is not None and not dry_run:
        raise UserError("--price: only the plan of --dry-run uses it; add that, or leave it out")
    takes_model = any("model" in _named_places(step) for step in steps)
    if model is None and takes_model:
        raise UserError("--model: missing; name the run or checkpoint that this pipeline begins with")
    if model is not None and not takes_model:
        raise UserError(
            f"--model: the [sft.recipe.start.model] of {path} describes a new network, with which this pipeline begins; leave one out"
        )
    start = checkpoint_folder(model_path(model)).resolve() if model is not None else None
    model_hash = "" if dry_run or start is None else known_hash(start)
    pipeline = Pipeline(folder, parsed, steps, start, str(device), model_hash)
    wanted = [step for step in steps if until is None or STAGES.index(step.stage) <= STAGES.index(until)]
    if dry_run:
        _print_plan(pipeline, wanted, first, price)
    else:
        _run_stages(pipeline, wanted, first)
    done = [step for step in steps if step.stage in ("sft", "distill", "online") and pipeline.is_done(step)]
    return load(pipeline.place(done[-1].name), device=device) if done else None


def _check_steps(steps: Sequence[Step], source: str) -> None:
    """Raises `UserError`: a step, read from the file ``source``, has a task with a wrong kind or argument, is online RL without a
    judge, or reads the checkpoint of a step that does not come before it."""
    places = [MODEL]
    for step in steps:
        if unknown := [each for name in _named_places(step) if (each := f"{{{name}}}") not in places]:
            raise UserError(f"{source}: {step.name}: {unknown[0]}: no such earlier step; name one of {listed(places)}")
        places.append(f"{{{step.name}}}")
        if isinstance(step.recipe, RlRecipe):
            check_kinds(step.recipe.sources, f"{source}: {step.name}")
            if step.stage == "online":
                judged_and_verifiable(step.recipe, f"{source}: online")


def _run_stages(pipeline: Pipeline, wanted: Sequence[Step], first: str | None) -> None:
    """Run the steps in ``wanted`` that are not done; repeat all steps from the stage ``first`` on."""
    with claimed(pipeline.folder):
        check_unchanged(pipeline, first)  # refused before anything is moved
        if first is not None:
            _set_aside(pipeline.folder, STAGES.index(first))
        for stage in dict.fromkeys(step.stage for step in wanted):
            own = [step for step in wanted if step.stage == stage]
            if stage == "distill" and not pipeline.is_done(own[0]):
                _check_moved(pipeline, own[0])
            _run_stage(pipeline, own)
    if (table := _result_table(pipeline)).rows:
        wide_console().print(table)
    if last := [step for step, _ in _receipts(pipeline) if step.stage != "controls"][-1:]:
        say(f"next: {command_to_try(pipeline.place(last[0].name))}")


def last_result(folder: Path) -> Path | None:
    """The checkpoint of the last finished stage of the pipeline in ``folder``; None if no stage has finished."""
    places = [folder / stage / name for stage in reversed(STAGES) for name in (CHECKPOINT, START)]
    return next((place for place in places if place.is_dir()), None)


def check_unchanged(pipeline: Pipeline, first: str | None = None) -> None:
    """Raises `UserError`: the recipe or the starting weights of a finished step have changed, or are missing. Steps from the stage
    ``first`` on are not checked."""
    state = _read_state(pipeline.folder)
    for step in pipeline.steps:
        if first is not None and STAGES.index(step.stage) >= STAGES.index(first):
            continue
        if step.name not in state.steps or not pipeline.is_done(step):
            continue
        names = [name for name in _named_places(step) if f"{{{name}}}" != MODEL]
        if missing := [name for name in names if not pipeline.place(name).exists()]:
            raise UserError(
                f"{pipeline.place(missing[0])}: no such checkpoint, and {step.name} was made from it; put it back, or repeat its stage "
                f"with --from {missing[0].partition('/')[0]}"
            )
        inputs = state.steps[step.name].inputs
        inputs = inputs | {"recipe": completed(type(step.recipe), inputs.get("recipe", {}))}  # of an older version
        for field, (before, now) in differences(inputs, _inputs(pipeline, step)).items():
            if field.startswith(_LAYOUT):
                continue
            raise UserError(
                f"{pipeline.folder / STATE_FILE}: {step.name}: {field} was {before!r} when this stage ran, is {now!r} now; "
                f"undo the change, or repeat the stage with --from {step.stage}"
            )


def _check_moved(pipeline: Pipeline, distill: Step) -> None:
    """Print each expert's KL to its start. Raises `UserError`: an expert is closer than ``distill.kl_floor``."""
    assert isinstance(distill.recipe, RlRecipe) and distill.recipe.distill is not None
    floor, moved = distill.recipe.distill.kl_floor, _moved(pipeline)
    distances = listed([f"{name} {short(kl)}" for name, kl in moved.items()])
    say(f"KL to the start, nats per token: {distances}")
    for name, kl in moved.items():
        if kl < floor:
            raise UserError(
                f"{pipeline.folder}: {name} has not moved: KL to the start {kl:.1e} nats per token, less than distill.kl_floor "
                f"{floor:g}, so there is nothing to distil; train it longer or faster (domains.{name.partition('/')[2]}."
                "expert) after moving its folder away, or set distill.distill.kl_floor = 0"
            )


def _moved(pipeline: Pipeline) -> dict[str, float]:
    """KL of each finished expert to its start, nats per token (`stretto.flow.run.Result.moved`)."""
    done = [step for step in pipeline.steps if step.stage == "experts" and pipeline.is_done(step)]
    found = {step.name: [row.get(MOVED) for row in read_metrics(pipeline.folder / step.name)] for step in done}
    return {name: kls[-1] for name, each in found.items() if (kls := [kl for kl in each if kl is not None])}


def _set_aside(folder: Path, first: int) -> None:
    """Move the results of the stages from ``first`` on into a ``before-N`` folder, so that no work is deleted. Stages and domains that the
    recipe does not have any more are moved, too."""
    state = _read_state(folder)
    place = next(place for number in numbers(1) if not (place := folder / f"{BEFORE}{number}").exists())
    for stage in STAGES[first:]:
        for path in (folder / stage, folder / f"{stage}.json", folder / f"{stage}.log"):
            if path.exists():
                place.mkdir(exist_ok=True)
                path.rename(place / path.name)
    earlier = STAGES[:first]
    _write_state(folder, {name: each for name, each in state.steps.items() if name.partition("/")[0] in earlier})


# --- running ----------------------------------------------------------------------------------------------------------


def _run_stage(pipeline: Pipeline, steps: Sequence[Step]) -> None:
    """Run all ``steps`` of a stage, several at once where the recipe allows. If one fails, the others still run to their end.

    Raises `UserError`: a step failed.
    """
    console, experts = wide_console(), pipeline.recipe.experts
    waiting = []
    for step in steps:
        is_done = pipeline.is_done(step)
        console.rule(f"[bold]{step.name}[/bold]" + ("  (done before)" if is_done else ""))
        if not is_done:
            waiting.append(step)
        elif step.stage != "sft" and not (pipeline.folder / step.name / REPORT_FOLDER).is_dir():
            report_rl_run(pipeline.folder / step.name)  # the step was killed after it had written its checkpoint
    at_once, attempts = 1, 1
    if experts is not None and steps[0].stage == "experts":
        at_once, attempts = experts.at_once, experts.attempts
    is_alone = min(at_once, len(waiting)) < 2
    lock = threading.Lock()
    with ThreadPoolExecutor(at_once) as pool:
        codes = pool.map(lambda step: _run_step(pipeline, step, attempts, is_alone, lock), waiting)
        failed = {step.name: code for step, code in zip(waiting, codes, strict=True) if code}
    if 130 in failed.values():
        raise KeyboardInterrupt
    if failed:
        endings = listed([f"{name} {_ending(code)}" for name, code in failed.items()])
        where = "" if is_alone else f" ({_log_file(pipeline, waiting[0]).parent}/*.log)"
        raise UserError(
            f"{pipeline.folder}: {endings}{where}; correct that and run the pipeline again; it resumes here (to change an "
            "expert's recipe, move its folder away first)"
        )


def _run_step(pipeline: Pipeline, step: Step, attempts: int, is_alone: bool, lock: threading.Lock) -> int:
    """Run one step, with further attempts after a failure. Returns the exit code of the last attempt."""
    folder, inputs = pipeline.folder / step.name, _inputs(pipeline, step)
    write_json(_recipe_file(pipeline, step), _filled_recipe(pipeline, step))

    def record(has_ended: bool) -> None:
        with lock:
            now = StepState(inputs=inputs, has_ended=has_ended)
            _write_state(pipeline.folder, {**_read_state(pipeline.folder).steps, step.name: now})

    record(has_ended=False)  # this process may be killed between the step's result and its end
    code = 0
    for attempt in range(attempts):
        command = [sys.executable, "-m", "stretto.cli.step", str(os.getpid()), *_arguments(pipeline, step)]
        if is_alone:
            code = subprocess.run(command, check=False).returncode
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _log_file(pipeline, step).open("a", encoding="utf-8") as log:
                code = subprocess.run(command, check=False, stdout=log, stderr=log).returncode
        record(has_ended=code == 0)
        if code in (0, BAD_INPUT, 130) or attempt + 1 == attempts:
            break
        say(f"{step.name} {_ending(code)}; retrying from its last good snapshot")
    return code


def _ending(code: int) -> str:
    return "diverged" if code == NonFiniteError.exit_code else f"ended with {code}"


def _arguments(pipeline: Pipeline, step: Step) -> list[str]:
    """Arguments of the `stretto` command that runs ``step``."""
    folder = pipeline.folder / step.name
    filled = [
        str(_recipe_file(pipeline, step)) if each == RECIPE else _filled(pipeline, each) for each in step.arguments
    ]
    # evaluations resume without the option; SFT can resume once its run file exists
    start_mark = folder / RUN_FILE if isinstance(step.recipe, SftRecipe) else folder
    resumes = start_mark.exists() and step.stage != "evaluate"
    return [*filled, "--out", str(folder), "--device", pipeline.device, *["--resume"] * resumes]


def _inputs(pipeline: Pipeline, step: Step) -> dict[str, Any]:
    """Everything that determines the step's result: recipe, arguments, and hashes of the starting and teacher weights."""
    hashes = {
        name: pipeline.model_hash if name == "model" else known_hash(pipeline.place(name))
        for name in _named_places(step)
    }
    return {"recipe": step.recipe.model_dump(mode="json"), "arguments": list(step.arguments), "weights": hashes}


def _named_places(step: Step) -> list[str]:
    """Names of the checkpoints that the step begins with or reads, sorted."""
    distill = step.recipe.distill if isinstance(step.recipe, RlRecipe) else None
    teachers = () if distill is None else distill.teachers.values()
    found = [_PLACE.fullmatch(each) for each in step.arguments]
    found += [_TEACHER.fullmatch(each.checkpoint or "") for each in teachers]
    return sorted({each["name"] for each in found if each is not None})


def _filled(pipeline: Pipeline, text: str) -> str:
    """``text`` with its placeholder ``{NAME}``, if it is one, replaced by the path of its checkpoint."""
    found = _PLACE.fullmatch(text)
    return text if found is None else f"{found['before'] or ''}{pipeline.place(found['name'])}"


def _filled_recipe(pipeline: Pipeline, step: Step) -> dict[str, Any]:
    """The recipe of ``step`` as plain data, with the folders of its teachers. Other texts are the user's."""
    tree = step.recipe.model_dump(mode="json")
    for teacher in (tree.get("distill") or {}).get("teachers", {}).values():
        if (found := _TEACHER.fullmatch(teacher["checkpoint"] or "")) is not None:
            teacher["checkpoint"] = str(pipeline.place(found["name"]))
    return tree


def _recipe_file(pipeline: Pipeline, step: Step) -> Path:
    return pipeline.folder / f"{step.name}.json"


def _log_file(pipeline: Pipeline, step: Step) -> Path:
    return pipeline.folder / f"{step.name}.log"


def _read_state(folder: Path) -> State:
    path = folder / STATE_FILE
    return validate(State, read_json(path), str(path)) if path.is_file() else State()


def _write_state(folder: Path, steps: Mapping[str, StepState]) -> None:
    write_json(folder / STATE_FILE, State(steps=dict(steps)).model_dump(mode="json"))


# --- plan and results -------------------------------------------------------------------------------------------------


def _print_plan(pipeline: Pipeline, steps: Sequence[Step], first: str | None, price: float | None) -> None:
    """Print each command and its estimated cost. Hours and money need the speed of a stage that has run in this folder."""
    console, network, speed = wide_console(), _network(pipeline), _flops_per_s(pipeline)
    per_token = 0 if network is None else count(network, network.full()).forward_flops(1, 1)
    known = ["trained tokens, at most", "FLOPs, about"]
    if speed:
        known += ["hours, about", "cost, about"] if price else ["hours, about"]
    columns = (rich.table.Column(each, justify="right", no_wrap=True) for each in known)
    table = rich.table.Table("step", "state", *columns)
    total_tokens, total_flops = 0, 0
    for step in steps:
        is_again = first is not None and STAGES.index(step.stage) >= STAGES.index(first)
        is_done = pipeline.is_done(step) and not is_again
        flops = step.num_tokens * _passes(step) * per_token
        if not is_done:
            total_tokens, total_flops = total_tokens + step.num_tokens, total_flops + flops
        table.add_row(
            step.name, "done" if is_done else "to do", *_costs(step.num_tokens, flops, speed, price)[: len(known)]
        )
    table.add_section()
    table.add_row("to do", "", *_costs(total_tokens, total_flops, speed, price)[: len(known)])
    for step in steps:
        say(shlex.join(["stretto", *_arguments(pipeline, step)]))
    console.print(table)
    sampling = [step.recipe for step in steps if step.stage not in ("sft", "evaluate")]
    if any(isinstance(each, RlRecipe) and each.loss.drop_uniform for each in sampling):
        say("not counted: samples of groups that loss.drop_uniform drops")
    if speed is None:
        say("hours and cost: known once a stage has run in this folder")


def _costs(tokens: int, flops: int, speed: float | None, price: float | None) -> tuple[str, str, str, str]:
    hours = flops / speed / 3600 if speed is not None and flops else None
    money = f"{hours * price:,.2f}" if hours is not None and price is not None else ""
    return f"{tokens:,}" if tokens else "", si(flops) if flops else "", "" if hours is None else short(hours), money


def _passes(step: Step) -> int:
    """Cost of one token of ``step`` in forward passes: training, sampling, scoring by a teacher."""
    return TRAINED_PASSES + (step.stage != "sft") + (step.stage == "distill")


def _network(pipeline: Pipeline) -> ModelConfig | None:
    """The network that the pipeline trains; None if the recipe does not describe it."""
    if pipeline.model is not None:
        return read_config(pipeline.model)
    recipe = pipeline.steps[0].recipe
    return recipe.start.model if isinstance(recipe, RlRecipe) and recipe.start is not None else None


def _flops_per_s(pipeline: Pipeline) -> float | None:
    """Measured FLOPs per second of one device over the finished stages; None if no stage has finished."""
    receipts = [receipt for _, receipt in _receipts(pipeline) if receipt.device_s]
    return sum(each.flops for each in receipts) / sum(each.device_s for each in receipts) if receipts else None


def _receipts(pipeline: Pipeline) -> Iterator[tuple[Step, Receipt]]:
    """Each step that wrote a checkpoint, and the receipt of its cost."""
    for step in pipeline.steps:
        if (lineage := find_lineage(pipeline.place(step.name))) is not None:
            yield step, lineage.receipt


def _result_table(pipeline: Pipeline) -> Table:
    """Cost of each finished step, and the KL of each expert to its start."""
    moved = _moved(pipeline)
    rows = tuple(
        (
            Cell(step.name),
            Cell("", receipt.tokens),
            Cell("", receipt.flops),
            Cell("", receipt.wall_s),
            Cell(short(moved[step.name])) if step.name in moved else NOTHING,
            Cell(str(pipeline.place(step.name))),
        )
        for step, receipt in _receipts(pipeline)
    )
    forms = None, si_alike, partial(si_alike, unit="FLOPs"), durations_alike
    columns = ("Step", "Tokens", "FLOPs", "Time", "KL from its start", "Checkpoint")
    note = "KL in nats per token."
    return Table("Post-training", columns, in_columns(rows, *forms), note=note)
