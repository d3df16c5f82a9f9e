"""Post-training, evaluation and serving, as functions: sft, rl, distill, online, run, merge, evaluate, compare, serve.

The commands of the same names call these functions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.api.evaluate import compare_command, eval_command, harness_command, options, presets_command
from stretto.api.model import Model, load
from stretto.api.pipeline import last_result, run_command
from stretto.api.rl import distill_student, made_start, online_recipe, rl_command, say_gaps
from stretto.api.stages import Data, ModelLike, PathLike, listed_data, new_folder, place, run_folder
from stretto.api.train import (
    ADAPTER,
    begun_run,
    claim_run,
    new_info,
    new_job,
    own_tokenizer,
    same_folder,
    stem_of,
    write_result,
)
from stretto.base.config import overriding, read_recipe, source_name, validate
from stretto.base.errors import UserError, user_errors
from stretto.base.paths import CHECKPOINT, checkpoint_folder, require_new
from stretto.base.track import say
from stretto.flow.run import Result, start_of
from stretto.harness.suites import SUITES as HARNESSES
from stretto.harness.suites import check_installed, harness_names, serving
from stretto.learning.recipe import RlRecipe
from stretto.model.checkpoint import read_config, read_family, read_presets
from stretto.model.lora import read_adapter_config
from stretto.model.parallel import join
from stretto.post.distill import STAGE as DISTILL
from stretto.post.distill import parent_settings, teacher_settings
from stretto.post.merge import MergeOptions
from stretto.post.merge import merge as merge_checkpoints
from stretto.post.sft import open_conversations, sft_conversations
from stretto.post.suite import Evaluation, parse_suites, read_evaluation, write_right_answers
from stretto.report.evals import Comparison, comparison_table, domain_lines, score_bars, score_table
from stretto.report.page import Plot, Table
from stretto.report.rl import panels, read_rl_run, reward
from stretto.text.chat import tool_form
from stretto.text.tokenizer import load_tokenizer
from stretto.train.prepare import TextOptions
from stretto.train.recipe import SftRecipe
from stretto.train.run_folder import RunInfo

RlRecipeLike = PathLike | Mapping[str, Any] | RlRecipe
"""A TOML file, the name of a shipped recipe (``rl_gym``), a mapping of the same form, or an `RlRecipe`. In a mapping, a source's ``kind``
may be a `TaskSource` class, and ``loss.advantage`` a function."""
SftRecipeLike = PathLike | Mapping[str, Any] | SftRecipe


@user_errors
def sft(
    recipe: SftRecipeLike | RlRecipeLike,
    model: ModelLike | None = None,
    data: Data = (),
    out: PathLike | None = None,
    *,
    val: str | None = None,
    val_fraction: float | None = None,
    lora: int | None = None,
    adapter: PathLike | None = None,
    keep_adapter: bool = False,
    steps: int | None = None,
    settings: Sequence[str] = (),
    resume: bool = False,
    device: str = "auto",
    wandb: str | None = None,
) -> Model:
    """Train a checkpoint on conversations (supervised fine-tuning).

    Args:
        recipe: a recipe of SFT (``sft``); without ``data``, an RL recipe whose ``[start]`` describes the training.
        model: run or checkpoint to train; None with an RL recipe that describes a new network.
        data: conversations in TRL's format (``messages``, or ``prompt`` and ``completion``; ``tools``). Without any, the sources of an
            RL recipe give problems and their demonstrations.
        out: run folder to write; ``runs/`` and the recipe's name by default.
        lora: rank of adapters to train instead of every weight.
        adapter: a peft folder with adapters to continue from.
        keep_adapter: also write the adapters alone, to ``adapter/``.
        val: held-out conversations in the forms of ``data``; a part of the data by default.
        val_fraction: share of the data to hold out, 0 to 0.5; 0.01 by default, up to 0.1 of little text.
        steps: number of optimiser steps; short for the setting ``train.steps``.
        settings: overrides of single recipe keys: ``["train.rows=8"]``.
        resume: continue from the newest snapshot in ``out``.
        device: ``cpu``, ``cuda`` or ``auto``.
        wandb: name of a W&B project to log to.

    Raises:
        UserError: bad data or recipe, a model without a chat template, or a folder that holds another run.
    """
    folder, named = run_folder(out, recipe, "sft"), listed_data(data)
    if not named:
        told = {"--val": val, "--val-fraction": val_fraction, "--lora": lora, "--adapter": adapter, "--wandb": wandb}
        told |= {"--keep-adapter": keep_adapter or None}
        if unused := [flag for flag, value in told.items() if value is not None]:
            raise UserError(f"{unused[0]}: needs conversations; name some with --data, or leave it out")
        try:
            start = read_recipe(recipe, RlRecipe, overriding(settings, {"start.steps": steps}))
        except UserError as error:
            raise UserError(f"{error} (stretto sft without --data takes a recipe of `stretto rl`)") from None
        origin = None if model is None else checkpoint_folder(place(model))
        return load(made_start(start, folder, origin, device), device=device)
    if model is None:
        raise UserError("--model: missing; name the run or checkpoint to train")
    parsed = read_recipe(recipe, SftRecipe, overriding(settings, {"lora.rank": lora, "train.steps": steps}))
    text, ranks = TextOptions(val, val_fraction, is_chat=True), join(device, parsed.train.ep)
    origin, adapters = checkpoint_folder(place(model)).resolve(), None if adapter is None else Path(adapter)
    config, sizes = read_config(origin), read_presets(origin)
    if adapters is not None:
        if parsed.lora is not None:
            raise UserError(f"--adapter: {adapters} says its rank itself; leave lora out of the recipe, and --lora")
        parsed = parsed.replace(lora=read_adapter_config(adapters, config, read_family(origin)))
    if keep_adapter and parsed.lora is None:
        raise UserError("--keep-adapter: no adapters are trained; add --lora 16")
    complete = parsed.for_network(config, sizes)
    tokenizer = own_tokenizer(origin)
    template = load_tokenizer(tokenizer).chat_template
    if template is None:
        raise UserError(f"{origin}: has no chat template; put a chat_template.jinja beside its tokenizer.json")
    if ranks.is_first and (note := tool_form(template).note()):
        say(note)

    def begin() -> RunInfo:
        if resume:
            begun = begun_run(folder, complete, named, text=text)
            begun = same_folder(folder, begun, "--adapter", adapters, "adapters")
            return same_folder(folder, begun, "--model", origin, "parent")
        began = {"parent": origin, "adapters": adapters.resolve() if adapters is not None else None}
        return new_info("sft", complete, folder, named, tokenizer, config.vocab_size, text, **began)

    with ExitStack() as held:
        info = ranks.first(lambda: claim_run(folder, resume, held, begin))
        loader = open_conversations(info.mixture, complete, ranks)
        job = new_job(folder, info, ranks, resume, wandb, loader)
        kept = folder / ADAPTER if keep_adapter else None
        trained = sft_conversations(complete, job, origin, adapters=info.adapters, keep=kept)
        presets = complete.elastic.anchors if complete.elastic is not None else sizes
        write_result(folder / CHECKPOINT, folder.name, info, trained, ranks, presets, stem_of(origin))
    return load(folder, device=device)


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
        """Reward over steps, of training and of held-out problems."""
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
    recipe: RlRecipeLike,
    model: ModelLike | None = None,
    out: PathLike | None = None,
    *,
    settings: Sequence[str] = (),
    resume: bool = False,
    device: str = "auto",
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
    start = None if model is None else place(model)
    return RlRun(folder, rl_command(parsed, folder, start, resume=resume, device=device, wandb_project=wandb))


def _in_this_process(recipe: RlRecipe) -> RlRecipe:
    """``recipe``, with those roles in this process that need what a notebook defines. Raises `UserError`: they must have others."""
    named = {f"sources.{name}.kind": source.kind for name, source in recipe.sources.items()}
    named["loss.advantage"] = recipe.loss.advantage
    here = {field: name.removeprefix("__main__:") for field, name in named.items() if name.startswith("__main__:")}
    if not here:
        return recipe
    field, name = next(iter(here.items()))
    runtime = recipe.runtime
    if runtime.kind == "ray" or runtime.isolate == "all":
        raise UserError(
            f"{field}: {name} is defined in a notebook or a script, which worker processes cannot import; write it to a file and name it "
            f"FILE.py:{name} (in Jupyter, begin its cell with %%writefile FILE.py), or use runtime.kind local and isolate none"
        )
    isolate = "none" if "loss.advantage" in here else runtime.isolate
    say(f"{', '.join(here.values())}: defined in this program, so that verifiers run in its process")
    return recipe.replace(runtime=runtime.replace(verifiers="thread", isolate=isolate))


@user_errors
def online(
    recipe: RlRecipeLike,
    model: ModelLike | None = None,
    out: PathLike | None = None,
    *,
    self_teacher: bool = False,
    settings: Sequence[str] = (),
    resume: bool = False,
    device: str = "auto",
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
        UserError: as `rl`, or no source is judged.
    """
    parsed, folder = _in_this_process(read_recipe(recipe, RlRecipe, settings)), run_folder(out, recipe, "online")
    start = checkpoint_folder(place(model)) if model is not None else start_of(folder) if resume else None
    asked = online_recipe(parsed, source_name(recipe), start, self_teacher)
    return RlRun(
        folder, rl_command(asked, folder, start, resume=resume, device=device, wandb_project=wandb, stage="online")
    )


@user_errors
def distill(
    recipe: RlRecipeLike,
    model: ModelLike | None = None,
    out: PathLike | None = None,
    *,
    teachers: Mapping[str, ModelLike] | Sequence[str] = (),
    subnet: str | None = None,
    settings: Sequence[str] = (),
    resume: bool = False,
    device: str = "auto",
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
    told = [f"{name}={_shown(each)}" for name, each in teachers.items()] if isinstance(teachers, Mapping) else teachers
    student = None if model is None else place(model)
    parents = parent_settings(student) if subnet is not None and student is not None and not told else []
    parsed = _in_this_process(read_recipe(recipe, RlRecipe, [*parents, *teacher_settings(told), *settings]))
    folder = run_folder(out, recipe, "distill")
    student = distill_student(parsed, folder, student, subnet, resume, device)
    done = rl_command(parsed, folder, student, resume=resume, device=device, wandb_project=wandb, stage=DISTILL)
    assert parsed.distill is not None, "distill_student has refused it"
    say_gaps(folder, parsed.distill)
    return RlRun(folder, done)


def _shown(model: ModelLike) -> str:
    return str(model.source) if isinstance(model, Model) else os.fspath(model)


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
    folder = run_folder(out, recipe, "pipeline")
    start = None if model is None else place(model)
    run_command(
        Path(recipe), folder, start, settings, first=first, until=until, dry_run=dry_run, price=price, device=device
    )
    made = last_result(folder)
    return None if made is None else load(made, device=device)


@user_errors
def merge(
    method: str,
    models: Sequence[ModelLike],
    out: PathLike | None = None,
    *,
    base: ModelLike | None = None,
    weights: Sequence[float | str] = (),
    force: bool = False,
    **options: float,
) -> Model:
    """Merge checkpoints that were trained from the same one, a layer in memory at a time (the methods of mergekit).

    Args:
        method: ``average``, ``task-arithmetic``, ``ties`` (2306.01708), ``dare`` (2311.03099), ``dare-ties`` or ``slerp``.
        models: runs or checkpoints of one network.
        out: checkpoint to write; beside the first model, with ``-merge`` added, by default.
        base: the checkpoint all of them began with; not used by average and slerp.
        weights: one per model; 1 each by default.
        force: replace what ``out`` holds.
        options: ``scale`` (λ of what is added to the base), ``density`` (of ties and dare: share of each difference that is kept), ``t``
            (of slerp: 0 is the first model, 1 the second), ``seed`` (of dare).

    Raises:
        UserError: different networks or tokenizers, no base where the method needs one, or ``out`` exists.
    """
    told = {"method": method, "weights": list(weights), **options}
    folder = new_folder(models[0], "merge") if out is None else Path(out)
    require_new(folder, force)
    origin = None if base is None else place(base)
    made = merge_checkpoints(
        [place(each) for each in models], origin, folder, validate(MergeOptions, told, "stretto merge")
    )
    return load(made)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A finished evaluation."""

    folder: Path
    result: Evaluation

    @property
    def scores(self) -> dict[str, float]:
        """Mean score of each domain, 0 to 1."""
        return {name: domain.score.value for name, domain in self.result.domains.items()}

    @property
    def table(self) -> Table:
        return score_table(self.result)

    def plot(self) -> Plot:
        """Score of each domain with its 95 % confidence interval, beside the trivial baseline."""
        return Plot(score_bars(self.result))

    def __repr__(self) -> str:
        return self.table.text()

    def _repr_html_(self) -> str:
        return self.table.html()


@dataclass(frozen=True, slots=True)
class Compared:
    """A finished per-domain comparison of models."""

    folder: Path
    result: Comparison

    @property
    def table(self) -> Table:
        return comparison_table(self.result)

    def plot(self) -> Plot:
        """Difference of every model to the reference, per domain."""
        return Plot(domain_lines(self.result))

    def __repr__(self) -> str:
        return self.table.text()

    def _repr_html_(self) -> str:
        return self.table.html()


@user_errors
def evaluate(
    model: ModelLike,
    suites: str | Sequence[str],
    out: PathLike | None = None,
    *,
    subnet: str | None = None,
    presets: bool = False,
    judge: str | None = None,
    human: PathLike | None = None,
    right: PathLike | None = None,
    device: str = "auto",
    **settings: Any,
) -> Evaluated | Compared:
    """Evaluate a checkpoint on benchmark suites, with 95 % bootstrap confidence intervals over problems and a trivial baseline.

    Args:
        model: run or checkpoint.
        suites: ``gym``, ``code``, ``writing``, ``math=FILE`` … (docs/EVAL.md), ``tau`` and ``bfcl`` (docs/HARNESSES.md), a TOML file, or an RL recipe.
        out: folder to write; called again, the evaluation resumes there. Beside the model's, with ``-eval`` added, by default.
        subnet: size to evaluate; the full network by default.
        presets: evaluate every named size and compare them with the full network; returns `Compared`.
        judge: URL of an LLM judge for open-ended answers; not the judge that rewarded the model.
        human: human-written texts, to report what open-ended answers overuse.
        right: file to write the correct answers to, as conversations for `sft`.
        settings: ``samples`` (4 per problem), ``limit`` (problems per domain), ``temperature``, ``baselines``, ``embed``, ``seed``, ``max_batch``.

    Raises:
        UserError: no such suite or size, or a judge that may not be used.
    """
    named = [suites] if isinstance(suites, str) else list(suites)
    source, folder = place(model), new_folder(model, "eval") if out is None else Path(out)
    theirs, ours = harness_names(named)
    flags = {"--right": right, "--judge": judge, "--human": human}
    _refuse_unused(theirs, ours, flags | {"--embed": settings.get("embed")}, flags | {"--subnet": subnet}, presets)
    check_installed(theirs)
    told = options(**{"samples": 4, **settings})
    if presets:
        return Compared(folder, presets_command(source, ours, folder, told, device))
    if ours:
        people = None if human is None else Path(human)
        eval_command(source, parse_suites(ours, HARNESSES), folder, told, subnet, device, judge, people)
    asked = folder / "harness" if ours else folder
    if theirs:
        harness_command(source, theirs, asked, told, subnet, device)
    if right is not None:
        say(f"{write_right_answers(folder, Path(right)):,} correct answers: {right}")
    return Evaluated(folder, read_evaluation(folder if ours else asked))


def _refuse_unused(
    theirs: Sequence[str], ours: Sequence[str], answers: Mapping[str, Any], sizes: Mapping[str, Any], presets: bool
) -> None:
    """Raises `UserError`: an option that these suites would not read."""
    if presets and (unused := [flag for flag, value in sizes.items() if value is not None]):
        raise UserError(f"{unused[0]}: applies to one size; leave out --presets")
    if theirs and not ours and (unused := [flag for flag, value in answers.items() if value is not None]):
        raise UserError(f"{unused[0]}: needs the answers, which other harnesses do not keep; leave it out")
    if presets and theirs:
        raise UserError(f"--suite {theirs[0]}: is asked one size at a time; leave out --presets, give --subnet")


@user_errors
def compare(
    models: Sequence[ModelLike],
    out: PathLike | None = None,
    *,
    suites: str | Sequence[str] = (),
    teachers: Mapping[str, ModelLike] | Sequence[str] = (),
    reference: str | None = None,
    battle: bool = False,
    device: str = "auto",
    **settings: Any,
) -> Compared:
    """Compare models per domain: paired differences to a reference model, and to the teacher of each domain.

    Args:
        models: evaluations, runs or checkpoints, ``PATH`` or ``PATH:SUBNET``.
        out: folder to write; beside the first model's, with ``-compare`` added, by default.
        suites: suites for models that were not evaluated yet.
        teachers: by domain, for the normalised score: the share of the teacher's gain that each model recovers.
        reference: the model that the others are compared with; the first by default.
        battle: also compare answers in pairs by the LLM judge of a judged suite (win rate).
        settings: ``samples``, ``limit``, ``max_batch`` as of `evaluate`.

    Raises:
        UserError: evaluations of different problems, or as `evaluate`.
    """
    folder = new_folder(str(_shown(models[0])).partition(":")[0], "compare") if out is None else Path(out)
    named = [suites] if isinstance(suites, str) else list(suites)
    told = [f"{name}={_shown(each)}" for name, each in teachers.items()] if isinstance(teachers, Mapping) else teachers
    asked = options(**{"samples": 4, **settings})
    shown = [_shown(each) for each in models]
    return Compared(folder, compare_command(shown, told, named, folder, asked, device, reference, battle))


@dataclass(frozen=True, slots=True)
class Server:
    """A running server with an OpenAI-compatible API."""

    url: str
    """Address, ``http://127.0.0.1:PORT``; the API lies at ``/v1``."""

    @property
    def base_url(self) -> str:
        """Address for ``openai.OpenAI(base_url=…)``."""
        return f"{self.url}/v1"


@contextmanager
def serve(model: ModelLike, *flags: str, port: int = 0) -> Iterator[Server]:
    """Serve a checkpoint at every size in a process of its own, until the block ends.

    Args:
        flags: further options of ``stretto serve``, such as ``"--memory", "8GB"``.
        port: 0: any free port.

    Raises:
        UserError: the server did not start; its own message stands above.
    """
    with serving(place(model), *flags, "--port", str(port)) as (url, _):
        yield Server(url)
