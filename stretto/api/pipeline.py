"""``stretto run``: the steps of a pipeline, each a command in its own process; finished steps are not repeated.

pipeline.json   of each step: what it was told, what it began with, and whether it ended
NAME.json       the step's recipe, complete: the command that is shown does the same by hand
NAME/           the step's folder, as its command writes it
NAME.log        what a step prints that has others at its side
before-1/…      what `--from` has set aside
"""

from __future__ import annotations

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

from stretto.api.model import Model, load
from stretto.api.stages import ModelLike, PathLike, place, run_folder
from stretto.base.config import Config, differences, read_recipe, validate
from stretto.base.errors import UserError, nearest, user_errors
from stretto.base.numbers import durations_alike, listed, short, si, si_alike
from stretto.base.paths import CHECKPOINT, RUN_FILE, checkpoint_folder, claimed, read_json, write_json
from stretto.base.records import LINEAGE_FILE, Receipt, read_lineage
from stretto.base.track import read_metrics
from stretto.flow.run import MOVED
from stretto.learning.recipe import LAYOUT, START, RlRecipe
from stretto.model.checkpoint import known_hash, read_config
from stretto.model.spec import ModelConfig, count
from stretto.post.pipeline import MODEL, RECIPE, STAGES, PipelineRecipe, Step, plan
from stretto.report.page import NOTHING, Cell, Table, in_columns
from stretto.train.recipe import SftRecipe
from stretto.train.step import NonFiniteError

STATE_FILE = "pipeline.json"
BEFORE = "before-"
BAD_INPUT = 2
"""Exit code of a command that was given something impossible: a second attempt would be, too."""
TRAINED_PASSES = 3
"""Forward passes that a forward and a backward cost."""
_LAYOUT = tuple(f"recipe.{table}" for table in LAYOUT)
_PLACE = re.compile(r"\{(model|recipe|sft|distill|online|(?:experts|controls)/[^{}]+)\}")
"""In arguments and recipes: `stretto.post.pipeline.Step`."""


class StepState(Config):
    """What pipeline.json holds of a step."""

    told: dict[str, Any]
    has_ended: bool = False


class State(Config):
    """What pipeline.json holds."""

    steps: dict[str, StepState] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline in its folder."""

    folder: Path
    recipe: PipelineRecipe
    steps: tuple[Step, ...]
    model: Path | None
    """That it begins with."""
    device: str
    model_hash: str = ""
    """Of what it begins with; unknown where nothing will run."""

    def place(self, name: str) -> Path:
        """What ``{name}`` stands for: the checkpoint of a step, or what the pipeline begins with."""
        if f"{{{name}}}" == MODEL:
            assert self.model is not None, "checked before anything ran"
            return self.model
        step = next(step for step in self.steps if step.name == name)
        return self.folder / name / step.result

    def is_done(self, step: Step) -> bool:
        return (self.folder / step.name / step.result).exists()


@user_errors
def run(
    recipe: PathLike,
    model: ModelLike | None = None,
    out: PathLike | None = None,
    *,
    first: str | None = None,
    until: str | None = None,
    dry_run: bool = False,
    price: float | None = None,
    settings: Sequence[str] = (),
    device: str = "auto",
) -> Model | None:
    """Run a whole post-training: SFT, an expert for each domain, one student of all experts, online RL, evaluation.

    Called again on the same folder, it resumes with the first stage that has not finished.

    Args:
        recipe: a pipeline recipe (``pipeline``; docs/PIPELINE.md).
        model: run or checkpoint to begin with; None where the recipe's start describes a new network.
        out: pipeline folder; ``runs/`` and the recipe's name by default.
        first: repeat this stage and all after it.
        until: stop after this stage.
        dry_run: print commands, tokens, FLOPs and hours, and do nothing.
        price: price of one hour of a device, for ``dry_run``.

    Returns:
        The model of the last stage that has finished; None: of none.

    Raises:
        UserError: a bad recipe, one that changed since a stage finished, or a stage that failed.
    """
    path, folder = Path(recipe), run_folder(out, recipe, "pipeline")
    parsed = read_recipe(path, PipelineRecipe, settings)
    steps = plan(parsed, str(path))
    for flag, name in (("--from", first), ("--until", until)):
        stages = list(dict.fromkeys(step.stage for step in steps))
        if name is not None and name not in stages:
            raise UserError(f"{flag} {name}: no such stage{nearest(name, stages)}; this pipeline has {listed(stages)}")
    start = checkpoint_folder(place(model)).resolve() if model is not None else None
    if start is None and any(MODEL in step.arguments for step in steps):
        raise UserError("--model: missing; name the run or checkpoint that this pipeline begins with")
    model_hash = "" if dry_run or start is None else known_hash(start)
    pipeline = Pipeline(folder, parsed, steps, start, device, model_hash)
    wanted = [step for step in steps if until is None or STAGES.index(step.stage) <= STAGES.index(until)]
    if dry_run:
        _print_plan(pipeline, wanted, first, price)
    else:
        _run_stages(pipeline, wanted, first)
    made = last_result(folder)
    return None if made is None else load(made, device=device)


def _run_stages(pipeline: Pipeline, wanted: Sequence[Step], first: str | None) -> None:
    """Run the steps ``wanted`` that are not done, and those from the stage ``first`` on again."""
    with claimed(pipeline.folder):
        if first is not None:
            _set_aside(pipeline, STAGES.index(first))
        check_unchanged(pipeline)
        for stage in dict.fromkeys(step.stage for step in wanted):
            own = [step for step in wanted if step.stage == stage]
            if stage == "distill" and not pipeline.is_done(own[0]):
                _check_moved(pipeline, own[0])
            _run_stage(pipeline, own)
    console = rich.get_console()
    console.print(_result_table(pipeline))
    if last := [step for step, _ in _receipts(pipeline) if step.stage != "controls"][-1:]:
        console.print(f"next: stretto chat {pipeline.place(last[0].name)}", soft_wrap=True)


def last_result(folder: Path) -> Path | None:
    """The checkpoint of the last stage that a pipeline in ``folder`` has done; None: of none."""
    places = [folder / stage / name for stage in reversed(STAGES) for name in (CHECKPOINT, START)]
    return next((place for place in places if place.is_dir()), None)


def check_unchanged(pipeline: Pipeline) -> None:
    """Raises `UserError`: a step that is done was told something else, or began with something else."""
    state = _read_state(pipeline.folder)
    for step in pipeline.steps:
        if step.name not in state.steps or not pipeline.is_done(step):
            continue
        for field, (before, now) in differences(state.steps[step.name].told, _told(pipeline, step)).items():
            if field.startswith(_LAYOUT):
                continue
            raise UserError(
                f"{pipeline.folder / STATE_FILE}: {step.name}: {field} was {before!r} when this stage ran, is {now!r} now; "
                f"undo the change, or repeat the stage with --from {step.stage}"
            )


def _check_moved(pipeline: Pipeline, distill: Step) -> None:
    """Say how far the experts are from where they began. Raises `UserError`: one of them is still there."""
    assert isinstance(distill.recipe, RlRecipe) and distill.recipe.distill is not None
    floor, moved = distill.recipe.distill.kl_floor, _moved(pipeline)
    said = listed([f"{name} {short(kl)}" for name, kl in moved.items()])
    rich.get_console().print(f"KL to the start, nats per token: {said}")
    for name, kl in moved.items():
        if kl < floor:
            raise UserError(
                f"{pipeline.folder}: {name} has not moved: KL to the start {kl:.1e} nats per token, less than distill.kl_floor "
                f"{floor:g}, so there is nothing to distil; train it longer or faster (domains.{name.partition('/')[2]}."
                "expert) after moving its folder away, or set distill.distill.kl_floor = 0"
            )


def _moved(pipeline: Pipeline) -> dict[str, float]:
    """Of each expert that has ended: `stretto.flow.run.Result.moved`."""
    done = [step for step in pipeline.steps if step.stage == "experts" and pipeline.is_done(step)]
    found = {step.name: [row.get(MOVED) for row in read_metrics(pipeline.folder / step.name)] for step in done}
    return {name: kls[-1] for name, each in found.items() if (kls := [kl for kl in each if kl is not None])}


def _set_aside(pipeline: Pipeline, first: int) -> None:
    """Move what the stages from ``first`` on have made out of the way: work is not deleted."""
    state = _read_state(pipeline.folder)
    place = next(place for number in numbers(1) if not (place := pipeline.folder / f"{BEFORE}{number}").exists())
    for step in pipeline.steps:
        if STAGES.index(step.stage) < first:
            continue
        for path in (pipeline.folder / step.name, _recipe_file(pipeline, step), _log_file(pipeline, step)):
            if path.exists():
                target = place / path.relative_to(pipeline.folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.rename(target)
    kept = {step.name for step in pipeline.steps if STAGES.index(step.stage) < first}
    _write_state(pipeline.folder, {name: each for name, each in state.steps.items() if name in kept})


# --- running ----------------------------------------------------------------------------------------------------------


def _run_stage(pipeline: Pipeline, steps: Sequence[Step]) -> None:
    """All ``steps`` of a stage, some at once. One that fails does not keep the others from their end. Raises `UserError`: it did."""
    console, experts = rich.get_console(), pipeline.recipe.experts
    waiting = []
    for step in steps:
        is_done = pipeline.is_done(step)
        console.rule(f"[bold]{step.name}[/bold]" + ("  (done before)" if is_done else ""))
        if not is_done:
            waiting.append(step)
    at_once, attempts = (
        (1, 1) if experts is None or steps[0].stage != "experts" else (experts.at_once, experts.attempts)
    )
    is_alone = min(at_once, len(waiting)) < 2
    lock = threading.Lock()
    with ThreadPoolExecutor(at_once) as pool:
        codes = pool.map(lambda step: _run_step(pipeline, step, attempts, is_alone, lock), waiting)
        failed = {step.name: code for step, code in zip(waiting, codes, strict=True) if code}
    if 130 in failed.values():
        raise KeyboardInterrupt
    if failed:
        told = listed([f"{name} {_ending(code)}" for name, code in failed.items()])
        where = "" if is_alone else f" ({_log_file(pipeline, waiting[0]).parent}/*.log)"
        raise UserError(
            f"{pipeline.folder}: {told}{where}; correct that and run the pipeline again; it resumes here (an "
            "expert whose recipe has changed begins anew: move its folder away)"
        )


def _run_step(pipeline: Pipeline, step: Step, attempts: int, is_alone: bool, lock: threading.Lock) -> int:
    """Exit code of the last attempt."""
    folder, told = pipeline.folder / step.name, _told(pipeline, step)
    write_json(_recipe_file(pipeline, step), _filled(pipeline, step.recipe.model_dump(mode="json")))
    code = 0
    for attempt in range(attempts):
        command = [sys.executable, "-m", "stretto.cli.step", str(os.getpid()), *_arguments(pipeline, step)]
        if is_alone:
            code = subprocess.run(command, check=False).returncode
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _log_file(pipeline, step).open("a", encoding="utf-8") as log:
                code = subprocess.run(command, check=False, stdout=log, stderr=log).returncode
        with lock:
            now = StepState(told=told, has_ended=code == 0)
            _write_state(pipeline.folder, {**_read_state(pipeline.folder).steps, step.name: now})
        if code in (0, BAD_INPUT, 130) or attempt + 1 == attempts:
            break
        rich.get_console().print(f"{step.name} {_ending(code)}; retrying from its last good snapshot")
    return code


def _ending(code: int) -> str:
    return "diverged" if code == NonFiniteError.exit_code else f"ended with {code}"


def _arguments(pipeline: Pipeline, step: Step) -> list[str]:
    """Of stretto, as one would type them."""
    folder = pipeline.folder / step.name
    filled = [
        str(_recipe_file(pipeline, step)) if each == RECIPE else _filled(pipeline, each) for each in step.arguments
    ]
    # a comparison goes on by itself, and training on conversations once it knows them
    begun = folder / RUN_FILE if isinstance(step.recipe, SftRecipe) else folder
    goes_on = begun.exists() and step.stage != "evaluate"
    return [*filled, "--out", str(folder), "--device", pipeline.device, *["--resume"] * goes_on]


def _told(pipeline: Pipeline, step: Step) -> dict[str, Any]:
    """What makes the step's result: its recipe, and the weights it begins with and is taught by."""
    told = {"recipe": step.recipe.model_dump(mode="json"), "arguments": list(step.arguments)}
    names = sorted(set(_PLACE.findall(str(told))) - {RECIPE[1:-1]})
    hashes = {name: pipeline.model_hash if name == "model" else known_hash(pipeline.place(name)) for name in names}
    return told | {"weights": hashes}


def _filled(pipeline: Pipeline, tree: Any) -> Any:
    """``tree`` with a path for each ``{NAME}``."""
    if isinstance(tree, Mapping):
        return {key: _filled(pipeline, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_filled(pipeline, value) for value in tree]
    if isinstance(tree, str):
        return _PLACE.sub(lambda found: str(pipeline.place(found[1])), tree)
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


# --- what is told -----------------------------------------------------------------------------------------------------


def _print_plan(pipeline: Pipeline, steps: Sequence[Step], first: str | None, price: float | None) -> None:
    """Each command, and what it will cost where that can be known: at the pace of what has run before."""
    console, network, pace = rich.get_console(), _network(pipeline), _pace(pipeline)
    per_token = 0 if network is None else count(network, network.full()).forward_flops(1, 1)
    known = (
        "tokens, at most",
        "FLOPs, about",
        *(["hours, about"] if pace else []),
        *(["cost, about"] if pace and price else []),
    )
    numbers = (rich.table.Column(each, justify="right", no_wrap=True) for each in known)
    table = rich.table.Table("step", "state", *numbers)
    total_tokens, total_flops = 0, 0
    for step in steps:
        is_again = first is not None and STAGES.index(step.stage) >= STAGES.index(first)
        is_done = pipeline.is_done(step) and not is_again
        flops = step.num_tokens * _passes(step) * per_token
        if not is_done:
            total_tokens, total_flops = total_tokens + step.num_tokens, total_flops + flops
        table.add_row(
            step.name, "done" if is_done else "to do", *_costs(step.num_tokens, flops, pace, price)[: len(known)]
        )
    table.add_section()
    table.add_row("to do", "", *_costs(total_tokens, total_flops, pace, price)[: len(known)])
    for step in steps:
        console.print(shlex.join(["stretto", *_arguments(pipeline, step)]), soft_wrap=True, highlight=False)
    console.print(table)
    if pace is None:
        console.print("hours and cost: known once a stage has run in this folder")


def _costs(tokens: int, flops: int, pace: float | None, price: float | None) -> tuple[str, str, str, str]:
    hours = flops / pace / 3600 if pace is not None and flops else None
    money = f"{hours * price:,.2f}" if hours is not None and price is not None else ""
    return f"{tokens:,}" if tokens else "", si(flops) if flops else "", "" if hours is None else short(hours), money


def _passes(step: Step) -> int:
    """Forward passes that a token costs: trained on, sampled, scored by a teacher."""
    return TRAINED_PASSES + (step.stage != "sft") + (step.stage == "distill")


def _network(pipeline: Pipeline) -> ModelConfig | None:
    """That is trained."""
    if pipeline.model is not None:
        return read_config(pipeline.model)
    recipe = pipeline.steps[0].recipe
    return recipe.start.model if isinstance(recipe, RlRecipe) and recipe.start is not None else None


def _pace(pipeline: Pipeline) -> float | None:
    """FLOPs a second of one device, over what has run."""
    receipts = [receipt for _, receipt in _receipts(pipeline) if receipt.device_s]
    return sum(each.flops for each in receipts) / sum(each.device_s for each in receipts) if receipts else None


def _receipts(pipeline: Pipeline) -> Iterator[tuple[Step, Receipt]]:
    """Of the steps that left a checkpoint."""
    for step in pipeline.steps:
        folder = pipeline.place(step.name)
        if (folder / LINEAGE_FILE).is_file():
            yield step, read_lineage(folder).receipt


def _result_table(pipeline: Pipeline) -> Table:
    """What each step did and cost."""
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
