"""The Python functions rl, online and distill: each prepares its recipe or student; one shared function runs and reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from stretto.api.arguments import ModelLike, PathLike, model_path, run_folder, shown
from stretto.api.model import Model, load
from stretto.api.search import extract_to
from stretto.api.train import command_to_try
from stretto.base.config import (
    RecipeLike,
    Settings,
    check_unchanged,
    completed,
    listed_settings,
    read_recipe,
    source_name,
    validate,
)
from stretto.base.errors import UserError, user_errors
from stretto.base.paths import checkpoint_folder, quoted, read_json, remove, require_apart, write_json
from stretto.base.records import find_lineage
from stretto.base.track import progress, require_wandb, say
from stretto.evals.ranker import scope_of
from stretto.flow.launch import Job
from stretto.flow.prompts import SourceTables, check_source
from stretto.flow.run import Result, check_places, opened, run_opened, start_of
from stretto.learning.algorithms import load_algorithm
from stretto.learning.recipe import START, DistillConfig, RlRecipe
from stretto.learning.teachers import check_teachers, find_teachers
from stretto.model.checkpoint import known_hash
from stretto.model.parallel import DeviceLike, check_split, join, stored, stored_for_training
from stretto.ops import exact
from stretto.post.distill import STAGE as DISTILL
from stretto.post.distill import gaps, parent_settings, teacher_settings
from stretto.post.merge import merge_teachers
from stretto.post.panel import EVALUATES, REWARDS
from stretto.post.sft import STAGE as SFT
from stretto.post.sft import latest_snapshot, sft
from stretto.report.page import Plot
from stretto.tasks.registry import source_kind
from stretto.train.recipe import check_keeps_orders

STUDENT = "student"
"""Folder in a run of `stretto distill` that holds the student's start: cut out with ``--subnet``, or merged (``distill.merge_scale``)."""
_START_KEYS = (
    "start",
    "sources.",
    "rollout.tool_chars",
    "train.seed",
    "train.seq_len",
    "train.eval_prompts",
    "train.balance_rate",
)
"""Beginnings of the recipe's keys on which the trained start depends. Held-out problems are those that it was not trained on."""


@dataclass(frozen=True, slots=True)
class RlRun:
    """A finished reinforcement-learning run."""

    folder: Path
    result: Result
    """Mean held-out reward before the first step and after the last, and the KL to the start in nats per token."""

    @property
    def model(self) -> Model:
        """The trained policy."""
        return load(self.folder)

    def plot(self) -> Plot:
        """Figure of the reward over steps, on training and on held-out problems."""
        from stretto.report.rl import panels, read_rl_run, reward

        data = read_rl_run(self.folder)
        return Plot(panels(data, reward(data)))

    def __repr__(self) -> str:
        found = self.result
        return (
            f"RlRun({str(self.folder)!r}, held-out reward {found.first_reward:.3f} → {found.last_reward:.3f}, "
            f"KL to the start {found.moved:.3g} nats per token)"
        )


@user_errors
def rl(
    recipe: RecipeLike,
    model: ModelLike | None = None,
    out: PathLike | None = None,
    *,
    settings: Settings = (),
    resume: bool = False,
    device: DeviceLike = "auto",
    wandb: str | None = None,
) -> RlRun:
    """Train a policy with reinforcement learning on a task: engines, agents, verifiers and a trainer, asynchronously.

    Tasks and algorithms that are defined in a notebook run in its own process; docs/RL.md says how to put them in a file for more
    processes.

    Args:
        recipe: an RL recipe (``rl_gym``; docs/RL.md).
        model: run or checkpoint to begin with; None: the recipe's ``[start]``.
        out: run folder to write; ``runs/`` and the recipe's name by default.
        settings: overrides of single recipe keys: ``["train.rows=8"]``.
        resume: continue from the newest snapshot in ``out``.
        device: ``cpu``, ``cuda`` or ``auto``.
        wandb: name of a W&B project to log to.

    Raises:
        UserError: a bad recipe, a task that fails its own check, or a run that cannot continue.
    """
    parsed, folder = _in_this_process(read_recipe(recipe, RlRecipe, settings)), run_folder(out, recipe, "rl")
    start = None if model is None else model_path(model)
    return RlRun(folder, _run(parsed, folder, start, resume=resume, device=device, wandb_project=wandb))


def _in_this_process(recipe: RlRecipe) -> RlRecipe:
    """``recipe`` with roles moved into this process where they need a class or function that a notebook or script defines.

    Raises `UserError`: the recipe runs these roles in other processes, which cannot import such a definition.
    """
    names = {f"sources.{name}.kind": source.kind for name, source in recipe.sources.items()}
    names["loss.advantage"] = recipe.loss.advantage
    local = {field: name.removeprefix("__main__:") for field, name in names.items() if name.startswith("__main__:")}
    if not local:
        return recipe
    field, name = next(iter(local.items()))
    runtime = recipe.runtime
    is_shared = "loss.advantage" in local and recipe.trainer.ranks > 1
    if runtime.kind == "ray" or runtime.isolate == "all" or is_shared:
        raise UserError(
            f"{field}: {name} is defined in a notebook or a script, which worker processes cannot import; write it to a file and name it "
            f"FILE.py:{name} (in Jupyter, begin its cell with %%writefile FILE.py), or use runtime.kind local, isolate none and one trainer rank"
        )
    isolate = "none" if "loss.advantage" in local else runtime.isolate
    say(f"{', '.join(local.values())}: defined in this program, so verifiers run in its process")
    return recipe.replace(runtime=runtime.replace(verifiers="thread", isolate=isolate))


@user_errors
def online(
    recipe: RecipeLike,
    model: ModelLike | None = None,
    out: PathLike | None = None,
    *,
    self_teacher: bool = False,
    settings: Settings = (),
    resume: bool = False,
    device: DeviceLike = "auto",
    wandb: str | None = None,
) -> RlRun:
    """Reinforcement learning on open-ended prompts, rewarded by an LLM judge and by rewards over whole groups.

    Args:
        self_teacher: distil the start on the verifiable sources at the same time, so that these skills are kept.
        recipe: an RL recipe with a source of kind ``judged`` (``online``; docs/RL.md).
        model: run or checkpoint to begin with; None: the recipe's ``[start]``.
        out: run folder to write; ``runs/`` and the recipe's name by default.
        settings: overrides of single recipe keys: ``["train.rows=8"]``.
        resume: continue from the newest snapshot in ``out``.
        device: ``cpu``, ``cuda`` or ``auto``.
        wandb: name of a W&B project to log to.

    Raises:
        UserError: as `rl`, or no source has a judge.
    """
    parsed, folder = _in_this_process(read_recipe(recipe, RlRecipe, settings)), run_folder(out, recipe, "online")
    start = checkpoint_folder(model_path(model)) if model is not None else start_of(folder) if resume else None
    parsed = _online_recipe(parsed, source_name(recipe), start, self_teacher)
    return RlRun(folder, _run(parsed, folder, start, resume=resume, device=device, wandb_project=wandb, stage="online"))


@user_errors
def distill(
    recipe: RecipeLike,
    model: ModelLike | None = None,
    out: PathLike | None = None,
    *,
    teachers: Mapping[str, ModelLike] | Sequence[str] = (),
    subnet: str | None = None,
    settings: Settings = (),
    resume: bool = False,
    device: DeviceLike = "auto",
    wandb: str | None = None,
) -> RlRun:
    """On-policy distillation: the student samples, and the teacher of each source scores its tokens (docs/DISTILL.md).

    Args:
        recipe: an RL recipe with ``[distill]`` (``distill``).
        model: run or checkpoint of the student.
        teachers: by name, which is the source that it teaches: a run, a checkpoint, ``DIR:SUBNET`` or the URL of a server.
        subnet: cut this size out of ``model`` as the student; without teachers, the whole model teaches it every source.
        out: run folder to write; ``runs/`` and the recipe's name by default.
        settings: overrides of single recipe keys: ``["train.rows=8"]``.
        resume: continue from the newest snapshot in ``out``.
        device: ``cpu``, ``cuda`` or ``auto``.
        wandb: name of a W&B project to log to.

    Raises:
        UserError: as `rl`, no teachers, or a teacher that does not fit the student.
    """
    named = [f"{name}={shown(each)}" for name, each in teachers.items()] if isinstance(teachers, Mapping) else teachers
    student = None if model is None else model_path(model)
    parents = parent_settings(student) if subnet is not None and student is not None and not named else []
    parsed = _in_this_process(
        read_recipe(recipe, RlRecipe, [*parents, *teacher_settings(named), *listed_settings(settings)])
    )
    folder = run_folder(out, recipe, "distill")
    _check_student(parsed, student, subnet, resume)
    result = _run(parsed, folder, student, subnet, resume=resume, device=device, wandb_project=wandb, stage=DISTILL)
    assert parsed.distill is not None, "_check_student has checked it"
    _say_gaps(folder, parsed.distill)
    return RlRun(folder, result)


def _run(
    recipe: RlRecipe,
    folder: Path,
    model: Path | None,
    subnet: str | None = None,
    *,
    resume: bool = False,
    device: DeviceLike = "auto",
    wandb_project: str | None = None,
    stage: str = "rl",
) -> Result:
    """Run ``recipe`` in ``folder`` as ``stage``, beginning with ``model``, its ``subnet``, or the recipe's ``[start]``.

    Raises:
        UserError: bad input, or a run that cannot continue.
    """
    require_wandb(wandb_project)
    for name, source in recipe.sources.items():
        judge = source.args.get("judge")
        if isinstance(judge, dict) and str(judge.get("model")).startswith(REWARDS):
            say(f"warning: sources.{name}: judge: the local judge {judge['model']} {scope_of(judge['model'])}.")
        if isinstance(judge, dict) and str(judge.get("model")).startswith(EVALUATES):
            raise UserError(
                f"sources.{name}: judge: {judge['model']} was trained for evaluation, which would be biased if it also rewarded; use a judge "
                "of `stretto judge train --part reward`"
            )
    load_algorithm(recipe.loss.advantage)  # raises an error before anything is written
    devices = _devices(device, recipe)
    with opened(folder, resume) as has_run:
        job = Job(recipe, folder, folder / START, resume, devices, wandb_project, stage)
        job = replace(job, start=_start(job, model, subnet, device, has_run))
        with progress(stage, recipe.train.steps, "steps") as advance:
            result = run_opened(job, has_run, advance, say)
    say(
        f"held-out reward {result.first_reward:.3f} → {result.last_reward:.3f}, "
        f"KL to the start {result.moved:.3g} nats per token\ncheckpoint: {result.checkpoint}\n"
        f"execution trace: {folder / 'trace.json'} (ui.perfetto.dev, chrome://tracing)\n"
        f"next: {command_to_try(result.checkpoint)}; tensorboard --logdir {quoted(folder)}"
    )
    from stretto.report.rl import report_rl_run

    say(f"report: {report_rl_run(folder)}")
    return result


def _start(job: Job, model: Path | None, subnet: str | None, device: DeviceLike, has_run: bool) -> Path:
    """The checkpoint with which ``job`` begins, or began: ``model``, its ``subnet``, the recipe's ``[start]`` or merged teachers. What
    is missing is made in the run folder.

    Raises:
        UserError: bad input, or the folder holds a start that was made from something else.
    """
    recipe, folder = job.recipe, job.folder
    start = checkpoint_folder(model) if model is not None else (start_of(folder) if has_run else None)
    made = [(folder / name).resolve() for name in (START, STUDENT)]
    if has_run and start is not None and (model is None or start.resolve() in made):
        check_ranks(recipe, start, job.devices)
        return start
    if start is not None and model is not None and subnet is not None:
        inputs = {"--model": _weights(start), "--subnet": subnet}
        if not has_run:
            require_apart(folder / STUDENT, start)
        cut = partial(extract_to, folder / STUDENT, model, subnet, join(device))
        start = _student(recipe, folder, (), inputs, cut, has_run)
    check_ranks(recipe, start, job.devices)  # raises an error before anything is written
    if not has_run:  # a run of an older version keeps its train.seq_len, which no resumed run may change
        _check_length(recipe, start)
    if start is None or (recipe.start is not None and recipe.start.model is None):
        if not (folder / START).is_dir():
            _check_before_training(job, start)
        start = made_start(recipe, folder, start, device)
    if recipe.distill is not None and recipe.distill.merge_scale:
        named = {f"distill.teachers.{name}": each.checkpoint for name, each in recipe.distill.teachers.items()}
        inputs = {name: _weights(checkpoint_folder(each)) for name, each in named.items() if each is not None}
        merge = partial(merge_teachers, recipe.distill, start, folder / STUDENT)
        inputs["--model"] = _weights(start)
        require_apart(folder / STUDENT, start)
        start = _student(recipe, folder, ("distill.merge_scale",), inputs, merge, has_run)
    return start


def _student(
    recipe: RlRecipe,
    folder: Path,
    keys: tuple[str, ...],
    inputs: Mapping[str, str],
    make: Callable[[], object],
    has_run: bool,
) -> Path:
    """The student's checkpoint in the run ``folder``, which ``make`` writes. Without a run it is made again, which takes little time.
    Raises UserError: the run began with a student that was made from something else; ``keys`` and ``inputs`` as of `_check_inputs`."""
    out = folder / STUDENT
    if has_run:
        _check_inputs(recipe, out, keys, inputs)
    if not has_run or not out.is_dir():
        make()
        _record_inputs(recipe, out, inputs)
    return out


def _inputs_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.inputs.json")


def _record_inputs(recipe: RlRecipe, out: Path, inputs: Mapping[str, str]) -> None:
    """Write beside ``out``, a checkpoint in a run folder, what it is made from."""
    write_json(_inputs_file(out), {"recipe": recipe.model_dump(mode="json"), "inputs": inputs})


def _check_inputs(recipe: RlRecipe, out: Path, keys: tuple[str, ...], inputs: Mapping[str, str]) -> None:
    """Check that ``out``, a checkpoint in a run folder, was made from the same as it would be now. Without a record, because it was
    copied or an older version made it, a start is compared by the recipe in its lineage.

    Args:
        keys: beginnings of the recipe's keys on which it depends.
        inputs: what else it depends on, by the name of an option or a key. Inputs that are not given are not compared.

    Raises:
        UserError: it was made from something else.
    """
    path, lineage = _inputs_file(out), find_lineage(out)
    if path.is_file():
        known = read_json(path)
    elif lineage is not None and lineage.stage == SFT:
        known = {"recipe": lineage.config, "inputs": inputs}
    else:
        return
    before, now = (
        {key: value for key, value in completed(RlRecipe, tree).items() if key.startswith(keys)}
        for tree in (known["recipe"], recipe.model_dump(mode="json"))
    )
    given = {name: known["inputs"].get(name) for name in inputs}
    check_unchanged(before | given, now | dict(inputs), out.parent)


def _weights(checkpoint: Path) -> str:
    """The weights of a checkpoint as messages name them: the beginning of their hash."""
    return f"weights {known_hash(checkpoint)[:12]}"


def _check_before_training(job: Job, origin: Path | None) -> None:
    """Check what ``job`` will need later, before its start is trained from ``origin`` or from random weights.
    Raises UserError: an address, a label, a key or a checkpoint is wrong."""
    start = job.recipe.start
    config = stored(origin).config if origin is not None else None if start is None else start.model
    if config is not None:  # else `made_start` refuses
        check_places(job, config)
        find_teachers(job.recipe)


def check_ranks(recipe: RlRecipe, start: Path | None, devices: Sequence[str]) -> None:
    """Check that the recipe's trainer ranks have a GPU each among ``devices``, or the CPU, and that they can divide the experts of the
    policy, which begins at ``start`` or is the recipe's own, and of its teachers.

    Raises UserError: they cannot, or a checkpoint cannot be read.
    """
    trainer, num_devices = recipe.trainer, len(devices)
    if trainer.ranks > num_devices and devices != ("cpu",):
        raise UserError(
            f"trainer.ranks: {trainer.ranks} ranks need a GPU each, and this machine has {num_devices}; use at most {num_devices}, or "
            "--device cpu"
        )
    configs = [] if start is None else [stored_for_training(start).config]
    if recipe.start is not None and recipe.start.model is not None:
        configs.append(recipe.start.model)
    teachers = (
        [] if recipe.distill is None else [each.checkpoint for each in recipe.distill.teachers.values() if not each.url]
    )
    if trainer.ep > 1:
        names = [*recipe.teachers.values(), *filter(None, teachers)]
        configs += [stored(checkpoint_folder(each)).config for each in names]
    for config in configs:
        check_split(config, trainer.ranks, trainer.ep, "trainer.ep")


def _check_length(recipe: RlRecipe, start: Path | None) -> None:
    """Check that the policy, which begins at ``start`` or is the recipe's own, has a position for every token of a sample, and that
    batch-invariant attention takes a packed row. Raises UserError: they do not, or the checkpoint cannot be read."""
    model = None if recipe.start is None else recipe.start.model
    config = stored_for_training(start).config if start is not None else model
    length = recipe.train.seq_len
    if recipe.precision.batch_invariant and length > (longest := exact.longest(recipe.rollout.page_size)):
        raise UserError(
            f"train.seq_len: {length} exceeds the {longest} tokens that batch-invariant attention takes; set at most that many, "
            "or leave precision.batch_invariant out"
        )
    if config is not None and recipe.sample_length > config.max_positions:  # without a network, `made_start` refuses
        field = "train.seq_len" if recipe.rollout.max_turns > 1 else "rollout.max_tokens"
        raise UserError(
            f"{field}: a sample may have {recipe.sample_length} tokens, and the network has {config.max_positions} positions; lower it"
        )


def judged_and_verifiable(recipe: RlRecipe, source: str) -> tuple[list[str], list[str]]:
    """Sources of ``recipe``, read from ``source``, with and without a judge. Raises `UserError`: nothing that `stretto online` is for."""
    is_verifiable = {name: source_kind(name, each.kind).is_verifiable for name, each in recipe.sources.items()}
    judged, verifiable = ([name for name, each in is_verifiable.items() if each is kind] for kind in (False, True))
    if not judged and not recipe.rewards:
        raise UserError(f"{source}: sources: none has a judge, and there is no [rewards]; add one, or use stretto rl")
    return judged, verifiable


def _online_recipe(recipe: RlRecipe, source: str, start: Path | None, self_teacher: bool) -> RlRecipe:
    """``recipe``, read from ``source``, as `stretto online` runs it from ``start``. With ``self_teacher``, the start is also the
    teacher of all verifiable sources.

    Prints which sources have a judge and what keeps the policy near its start. Raises `UserError`: no source has a judge, or there
    is no start.
    """
    judged, verifiable = judged_and_verifiable(recipe, source)
    if start is None and recipe.start is None:
        raise UserError("--model: missing; name the run or checkpoint to train")
    if self_teacher:
        if not verifiable or start is None or recipe.distill is not None:
            raise UserError("--self-teacher: needs --model, a verifiable source and a recipe without [distill]")
        teacher = {"checkpoint": str(start.resolve()), "domains": verifiable}
        distill = {"teachers": {"start": teacher}, "untaught": judged, "outcome_weight": 1.0, "kl_floor": 0.0}
        # what the recipe leaves out has other defaults with [distill]
        given = recipe.model_dump(mode="json", exclude_unset=True)
        recipe = validate(RlRecipe, given | {"distill": distill}, source)
    limits = [f"a KL penalty to the start of weight {recipe.loss.kl_weight:g}"] if recipe.loss.kl_weight else []
    limits += [f"the verifiable sources {', '.join(verifiable)}"] if verifiable else []
    limits += [f"the teachers {', '.join(recipe.distill.teachers)}"] if recipe.distill else []
    held_by = " and ".join(limits) or "nothing (the policy may learn to please the judge only; set loss.kl_weight)"
    say(f"judged sources: {', '.join(judged) or 'none'}; the policy is held near its start by {held_by}")
    return recipe


def _check_student(recipe: RlRecipe, model: Path | None, subnet: str | None, resume: bool) -> None:
    """Raises `UserError`: a distillation has no teachers, no student, or a teacher whose tokenizer or vocabulary does not fit."""
    if recipe.distill is None:
        raise UserError("recipe: distill: missing; name teachers in [distill.teachers], or with --teacher NAME=DIR")
    if subnet is not None and model is None:
        raise UserError("--subnet: needs --model, the network to extract the student from")
    if subnet is not None and recipe.distill.merge_scale:
        raise UserError(
            "--subnet: cuts out a new student, and distill.merge_scale needs teachers that were trained from the student; leave one out"
        )
    if model is None and not resume and recipe.start is None:
        raise UserError("--model: missing; name the run or checkpoint to train")
    if model is not None and subnet is None:
        check_teachers(recipe, checkpoint_folder(model))
    elif model is not None and not resume:
        stored_for_training(checkpoint_folder(model))  # before the student is written


def _say_gaps(folder: Path, config: DistillConfig) -> None:
    """Print the KL between student and teacher at the start and at the end, per source."""
    for gap in gaps(folder, config):
        change = f"{gap.source}: KL to {gap.teacher} {gap.first_kl:.3g} → {gap.last_kl:.3g} nats per token"
        say(f"{change}, {gap.share:.0%} of the gradient")


def made_start(recipe: RlRecipe, folder: Path, origin: Path | None = None, device: DeviceLike = "auto") -> Path:
    """The checkpoint that the recipe's ``[start]`` describes, trained in the run folder unless it exists already. Interrupted training
    goes on.

    Args:
        origin: checkpoint to train, for a ``[start]`` without a network of its own.

    Raises:
        UserError: another start was trained or begun there, or as `stretto.post.sft.sft`.
    """
    if recipe.start is None:
        raise UserError("--model: missing, and the recipe has no [start]; name a run or checkpoint to begin with")
    out, inputs = folder / START, {} if origin is None else {"--model": _weights(origin)}
    if out.is_dir() or latest_snapshot(out) is not None:
        _check_inputs(recipe, out, _START_KEYS, inputs)
    else:
        check_keeps_orders(recipe.start.elastic, "start.elastic")
    if out.is_dir():
        return out
    with SourceTables(dict(recipe.sources), recipe.sandbox).opened() as sources:
        for source in sources.values():
            check_source(source, recipe)
        _record_inputs(recipe, out, inputs)  # before the training, which may be interrupted
        try:
            return sft(recipe, sources, out, origin=origin, ranks=join(device))
        finally:
            if not out.is_dir() and latest_snapshot(out) is None:  # nothing was made
                remove(_inputs_file(out))


def _devices(name: DeviceLike, recipe: RlRecipe) -> tuple[str, ...]:
    """Names of the devices of roles for which ``recipe`` reserves no GPU: ``cpu``, or one name per GPU of this machine. On a cluster
    they have the CPU, because each machine has other GPUs, which Ray shares out.
    Raises UserError: GPUs of a cluster were asked for, and no role reserves one."""
    device = join(name).device
    if (
        recipe.runtime.kind == "ray"
        and device.type != "cpu"
        and not any(each.gpus for each in recipe.resources.needs().values())
    ):
        remedy = "on a cluster, resources.trainer.gpus and resources.engines.gpus reserve GPUs for the roles"
        if name != "auto":
            raise UserError(f"--device {name}: {remedy}; set them, or use --device cpu")
        say(f"all roles compute on CPUs: {remedy}")
    if device.type == "cpu" or recipe.runtime.kind == "ray":
        return ("cpu",)
    return tuple(f"{device.type}:{number}" for number in range(torch.cuda.device_count()))
