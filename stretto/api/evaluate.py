"""`stretto.evaluate` and `stretto.compare`, which the commands call: from names of models and suites to scores, tables and a report page."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import numpy as np
import torch

from stretto.api.arguments import ModelLike, PathLike, model_path, new_folder, several, shown
from stretto.api.model import Model
from stretto.api.search import named_subnet
from stretto.base.config import validate_options
from stretto.base.endpoint import served_name
from stretto.base.errors import UserError, user_errors_naming
from stretto.base.paths import CHECKPOINT, checkpoint_folder, claimed, model_name, sized, user_path
from stretto.base.table import Table, Tabled
from stretto.base.track import say, wide_console
from stretto.data.sources import open_source
from stretto.evals.writing import Similarity
from stretto.harness.suites import SUITES as HARNESSES
from stretto.harness.suites import Budget, Judged, ask, check_installed, harness_names, serving
from stretto.model.checkpoint import read_config, read_presets, weights_hash
from stretto.model.counts import Counts, count
from stretto.model.parallel import DeviceLike, join
from stretto.model.spec import Subnet
from stretto.post.battle import battle as play_battles
from stretto.post.panel import PANEL_FILE, judged_by
from stretto.post.panel import panels as writing_panels
from stretto.post.pipeline import COMPARISON_FILE
from stretto.post.suite import (
    RESULT_FILE,
    Cost,
    DomainResult,
    Evaluation,
    mean_of,
    read_evaluation,
    scored,
    write_result,
    write_right_answers,
)
from stretto.post.suite import evaluate as evaluate_suites
from stretto.post.suites import EvalOptions, SuiteConfig, only_domains, parse_suites, samples_at, suites_of
from stretto.report.comparison import Comparison, battle_table, comparison_page, comparison_table, domain_lines
from stretto.report.comparison import compare as compared_by_domain
from stretto.report.evals import (
    asked_table,
    chapters_table,
    cost_table,
    evaluation_page,
    overused_table,
    panel_table,
    place_table,
    score_bars,
    score_table,
)
from stretto.report.page import Page, Plot, write_page
from stretto.text.similar import embeddings, similarity_NN
from stretto.text.tokenizer import load_tokenizer

SuitesLike = Annotated[
    str | Sequence[str] | Mapping[str, Any], "the name or file of a suite, several in a list, or a mapping"
]
"""Suites by name or file (docs/EVAL.md), or a mapping with the tables of a suite file or of an RL recipe. In a mapping, a source's
``kind`` may be a `TaskSource` class."""


@dataclass(frozen=True, slots=True, repr=False)
class Evaluated(Tabled):
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


@dataclass(frozen=True, slots=True, repr=False)
class Compared(Tabled):
    """A finished per-domain comparison of models."""

    folder: Path
    result: Comparison

    @property
    def table(self) -> Table:
        return comparison_table(self.result)

    def plot(self) -> Plot:
        """Difference of every model to the reference, per domain."""
        return Plot(domain_lines(self.result))


@user_errors_naming(further=EvalOptions.model_fields)
def evaluate(
    model: ModelLike,
    suites: SuitesLike,
    out: PathLike | None = None,
    *,
    subnet: str | Subnet | None = None,
    presets: bool = False,
    judge: str | None = None,
    human: PathLike | None = None,
    right: PathLike | None = None,
    device: DeviceLike = "auto",
    **settings: Any,
) -> Evaluated | Compared:
    """Evaluate a checkpoint on benchmark suites, with 95 % confidence intervals over problems and a trivial baseline.

    Args:
        model: run or checkpoint.
        suites: ``gym``, ``code``, ``writing``, ``math=FILE`` … (docs/EVAL.md), ``tau`` and ``bfcl`` (docs/HARNESSES.md), a TOML file, or an RL recipe; or a
            mapping with the tables of such a file, in which a source's ``kind`` may be a `TaskSource` class.
        out: folder to write; called again, the evaluation resumes there. Beside the model's, with ``-eval`` added, by default.
        subnet: size to evaluate; the full network by default.
        presets: evaluate every named size and compare them with the full network; returns `Compared`.
        judge: URL of an LLM judge for open-ended answers; not the judge that rewarded the model.
        human: file of human-written texts; the report lists the word trigrams that open-ended answers use more often.
        right: file to write the correct answers to, as conversations for `sft`.
        settings: ``samples`` (per problem; 1 for greedy decoding, otherwise 4), ``limit`` (problems per domain), ``temperature`` (the suite's),
            ``baselines``, ``seed``, ``max_batch``.

    Raises:
        UserError: no such suite or size, or a judge that may not be used.
    """
    if not suites:
        raise UserError("evaluate: no suites; name at least one")
    source, folder = model_path(model), new_folder(model, "eval") if out is None else user_path(out, "out")
    if isinstance(subnet, Subnet):
        subnet = _named(source, subnet)
    theirs, ours = ([], suites) if isinstance(suites, Mapping) else harness_names(_listed(suites))
    flags = {"--right": right, "--judge": judge, "--human": human}
    _refuse_unused(theirs, ours, flags, flags | {"--subnet": subnet}, presets)
    check_installed(theirs)
    asked = options(**settings)
    if presets:
        names = [name for name in read_presets(checkpoint_folder(source)) if name != "full"]
        if not names:
            raise UserError(f"{source}: --presets: names no sizes; leave it out, or give --subnet")
        sizes = [f"{source}:{name}" for name in names]
        return compare([source, *sizes], folder, suites=ours, device=device, **settings)
    if ours:
        people = None if human is None else user_path(human, "human")
        _evaluate(source, parse_suites(ours, HARNESSES), folder, asked, subnet, device, judge, people)
    if theirs:
        _ask_harnesses(source, theirs, folder / "harness" if ours else folder, asked, subnet, device)
    if right is not None:
        say(f"{write_right_answers(folder, user_path(right, 'right')):,} correct answers: {right}")
    return Evaluated(folder, read_evaluation(folder))


def _listed(suites: str | Sequence[str]) -> list[str]:
    return [suites] if isinstance(suites, str) else list(suites)


def _named(source: Path, subnet: Subnet) -> str:
    """Name of the size ``subnet`` of ``source``. Raises `UserError`: it has none."""
    name = next((name for name, each in Model(source).subnets.items() if each == subnet), None)
    if name is None:
        raise UserError(
            f"subnet: {subnet.label()}: no named size of {source}; extract it, and evaluate the checkpoint that this gives"
        )
    return name


def _refuse_unused(
    theirs: Sequence[str],
    ours: Sequence[str] | Mapping[str, Any],
    answers: Mapping[str, Any],
    sizes: Mapping[str, Any],
    presets: bool,
) -> None:
    """Raises `UserError`: an option that these suites do not use."""
    if presets and (unused := [flag for flag, value in sizes.items() if value is not None]):
        raise UserError(f"{unused[0]}: applies to one size; leave out --presets")
    if theirs and not ours and (unused := [flag for flag, value in answers.items() if value is not None]):
        raise UserError(f"{unused[0]}: needs the answers, which other harnesses do not store; leave it out")
    if presets and theirs:
        raise UserError(f"--suite {theirs[0]}: evaluates one size at a time; leave out --presets, give --subnet")


@user_errors_naming(further=EvalOptions.model_fields)
def compare(
    models: ModelLike | Sequence[ModelLike],
    out: PathLike | None = None,
    *,
    suites: SuitesLike = (),
    teachers: Mapping[str, ModelLike] | Sequence[str] = (),
    reference: ModelLike | None = None,
    battle: bool = False,
    device: DeviceLike = "auto",
    **settings: Any,
) -> Compared:
    """Compare models per domain: paired differences to a reference model, and to the teacher of each domain.

    Args:
        models: an evaluation, run or checkpoint, ``PATH`` or ``PATH:SUBNET``, or several.
        out: folder to write; beside the first model's, with ``-compare`` added, by default.
        suites: suites for models that were not evaluated yet, as of `evaluate`.
        teachers: by domain, for the normalised score: the share of the teacher's gain that each model recovers.
        reference: the model that the others are compared with; the first by default.
        battle: also compare answers in pairs by the LLM judge of a judged suite (win rate).
        settings: ``samples``, ``limit``, ``max_batch`` as of `evaluate`.

    Raises:
        UserError: evaluations of different problems, or as `evaluate`.
    """
    listed = several(models)
    if not listed:
        raise UserError("compare: no models; name at least one")
    folder = new_folder(str(shown(listed[0])).partition(":")[0], "compare") if out is None else user_path(out, "out")
    if (folder / RESULT_FILE).is_file():
        raise UserError(
            f"{folder}: contains an evaluation, whose report would be replaced; name another folder with --out"
        )
    asked, named = options(**settings), [shown(each) for each in listed]
    if battle and len(named) < 2:
        raise UserError(f"--battle: {named[0]} alone has no opponent; name two models or more")
    against = None if reference is None else shown(reference)
    if against is not None and against not in named:
        raise UserError(f"--reference {against}: not among the models; use the same name as there")
    taught = _teachers_by_domain(teachers)
    wanted = parse_suites(suites if isinstance(suites, Mapping) else _listed(suites))
    kinds = [source.kind for suite in wanted.values() for source in suite.sources.values()]
    if battle and wanted and not any(kind == "judged" or ":" in kind for kind in kinds):
        raise UserError("--battle: no suite has a judged source; add --suite writing, or a suite of your own")
    if unknown := [domain for domain in taught if wanted and not only_domains(wanted, {domain})]:
        raise UserError(f"--teacher {unknown[0]}: no such domain in --suite")
    places = _all_evaluated(named, taught, wanted, folder / "evals", asked, device)
    found = {text: read_evaluation(path) for text, path in places.items()}
    guides = {domain: found[path] for domain, path in taught.items()}
    first, compared = 0 if against is None else named.index(against), [found[text] for text in named]
    done = compared_by_domain(compared, guides, asked.seed, first)
    if battle:
        done = replace(done, battles=play_battles(compared, [places[text] for text in named], first, asked.seed))
    write_result(folder / COMPARISON_FILE, asdict(done))
    tables = [comparison_table(done), *([] if done.battles is None else [battle_table(done.battles)])]
    show(tables, folder / COMPARISON_FILE, comparison_page(done))
    return Compared(folder, done)


def options(**settings: Any) -> EvalOptions:
    """Validated options of an evaluation. Raises `UserError`: an impossible value."""
    return validate_options(EvalOptions, settings | {"threads": torch.get_num_threads()})


def _evaluate(
    source: Path,
    suites: Mapping[str, SuiteConfig],
    out: Path,
    options: EvalOptions,
    subnet: str | None = None,
    device: DeviceLike = "auto",
    judge: str | None = None,
    people: Path | None = None,
) -> Evaluation:
    """Evaluate the run or checkpoint ``source`` into ``out``; print the tables and write the report page.

    Args:
        judge: URL of the judge of open-ended answers.
        people: file of human-written texts; the report lists the word trigrams that open-ended answers use more often.

    Raises:
        UserError: as `evaluate`, an unknown Subnet, or a judge that may not be used.
    """
    folder = checkpoint_folder(source)
    if judge is not None:
        suites = judged_by(suites, judge, served_name(judge), folder)
    corpus = None if people is None else [text.text for text in open_source(people).read("train")]
    chosen = _chosen(source, subnet)
    used = str(join(device).device)
    found = evaluate_suites(folder, suites, out, options, name=_title(source, subnet), subnet=chosen, device=used)
    tables = [score_table(found), asked_table(found), cost_table(found), place_table(found)]
    if any(domain.is_graded for domain in found.domains.values()):
        panels = writing_panels(out, suites_of(found.asked), _similar(), corpus)
        write_result(out / PANEL_FILE, panels)
        tables += [panel_table(panels), *(overused_table(each) for each in panels)]
        tables += [chapters_table(each.domain, each.chapters) for each in panels if each.chapters]
    show(tables, out / RESULT_FILE, evaluation_page(found))
    return found


def show(tables: Sequence[Table], path: Path, page: Page) -> None:
    """Print the tables that have rows, write ``page`` beside the result file ``path``, and print both paths."""
    console = wide_console()
    for table in tables:
        if table.rows:
            console.print(table)
    say(f"{path}; report: {write_page(page, path.parent)}")


def _similar() -> Similarity:
    """Similarity by word vectors if the extra is installed, else by character trigrams, which is printed."""
    try:
        embeddings()
    except UserError as error:
        say(f"similarity of answers by character trigrams: {error}")
        return partial(similarity_NN, kind="characters")
    return partial(similarity_NN, kind="meaning")


def _chosen(source: Path, subnet: str | None) -> Subnet | None:
    """The size ``subnet`` of the run or checkpoint ``source``; None: none is named. Raises `UserError`: there is no such model or size."""
    folder = checkpoint_folder(source)
    return named_subnet(source, subnet, read_config(folder), read_presets(folder)) if subnet is not None else None


def _title(source: Path, subnet: str | None) -> str:
    """Name of the run or checkpoint, and of the size."""
    name = model_name(source)
    return f"{name}:{subnet}" if subnet else name


def _eval_folders(texts: Sequence[str], folder: Path) -> dict[str, Path]:
    """Folder below ``folder`` for the evaluation of each of ``texts``, named after the end of its path. Where two of these names are the
    same, a hash of the whole path is added."""
    models = {text: sized(text) for text in texts}
    names = {
        text: "-".join(part for part in (*path.parts[-3:], subnet) if part not in ("/", "", CHECKPOINT))
        for text, (path, subnet) in models.items()
    }
    num = Counter(names.values())
    for text, (path, subnet) in models.items():
        if num[names[text]] > 1:
            names[text] += "-" + sha256(f"{path.resolve()}:{subnet}".encode()).hexdigest()[:8]
    return {text: folder / name for text, name in names.items()}


def _teachers_by_domain(teachers: Mapping[str, ModelLike] | Sequence[str]) -> dict[str, str]:
    """Names of the teachers by domain. Raises `UserError`: a text without a domain."""
    if isinstance(teachers, Mapping):
        return {domain: shown(teacher) for domain, teacher in teachers.items()}
    taught = {}
    for text in teachers:
        domain, equals, path = text.partition("=")
        if not equals:
            raise UserError(f"--teacher {text}: names no domain; write DOMAIN={text}")
        taught[domain] = path
    return taught


def _all_evaluated(
    models: Sequence[str],
    teachers: Mapping[str, str],
    suites: Mapping[str, SuiteConfig],
    folder: Path,
    options: EvalOptions,
    device: DeviceLike,
) -> dict[str, Path]:
    """Folders of the evaluations of models and teachers, by the names of these. Missing evaluations are made below ``folder``."""
    named = [*models, *teachers.values()]
    for text in named:
        if suites and not (Path(text) / RESULT_FILE).is_file():
            path, subnet = sized(text)
            _chosen(path, subnet or None)  # raises an error for a missing model or size before another one is evaluated
    places = {}
    for text, out in _eval_folders(named, folder).items():
        # a teacher that is not among the models is evaluated on its domains only
        own = {domain for domain, path in teachers.items() if path == text}
        places[text] = _evaluated(text, suites if text in models else only_domains(suites, own), out, options, device)
    return places


def _evaluated(
    text: str, suites: Mapping[str, SuiteConfig], out: Path, options: EvalOptions, device: DeviceLike
) -> Path:
    """Folder of the evaluation ``text``; a model named by ``text`` is evaluated into ``out`` first."""
    if (Path(text) / RESULT_FILE).is_file():
        return Path(text)
    path, subnet = sized(text)
    if not suites:
        raise UserError(f"{text}: contains no evaluation; name the --suite, or run `stretto eval` before")
    _evaluate(path, suites, out, options, subnet or None, device)
    return out


# Suites of other harnesses: each harness in turn evaluates a server of the checkpoint


def _ask_harnesses(
    source: Path,
    suites: Sequence[str],
    out: Path,
    options: EvalOptions,
    subnet: str | None = None,
    device: DeviceLike = "auto",
) -> None:
    """Evaluate ``source`` with the harnesses of ``suites``; write ``out`` and print the tables.

    Raises:
        UserError: a checkpoint without a chat template, or a domain without a score.
    """
    folder = checkpoint_folder(source)
    if load_tokenizer(folder).chat_template is None:
        raise UserError(
            f"{folder}: has no chat template, which the harness of {suites[0]} needs; put a chat_template.jinja beside its tokenizer.json"
        )
    config, start_s = read_config(folder), time.perf_counter()
    chosen = named_subnet(source, subnet or "full", config, read_presets(folder))
    temperature = options.temperature or 0.0
    samples = samples_at(temperature, options.samples, suites[0])
    budget = Budget(limit=options.limit, samples=samples, temperature=temperature, at_once=min(16, options.max_batch))
    if (out / RESULT_FILE).exists():
        raise UserError(f"{out}: contains an evaluation, and other harnesses cannot resume; name another folder")
    with claimed(out):
        # both are given, because otherwise environment variables may choose a size
        flags = ["--device", str(device), "--subnet", subnet or "full"]
        with (out / "server.txt").open("w") as log, serving(source, *flags, log=log) as (url, _):
            found = {suite: ask(suite, url, out / suite, budget, options.baselines) for suite in suites}
        domains = {
            name: _result(suite, name, one, samples, options.seed)
            for suite in suites
            for name, one in found[suite].items()
        }
        asked = {suite: budget.model_dump() | {"sources": dict.fromkeys(found[suite], suite)} for suite in suites}
        judged = [one for each in found.values() for one in each.values()]
        done = Evaluation(
            _title(source, subnet),
            {"prompt": "chat, by the harness", "weights": weights_hash(folder), "subnet": subnet, "suites": asked},
            mean_of(domains, options.seed),
            domains,
            _cost(count(config, chosen), judged, time.perf_counter() - start_s),
        )
        write_result(out / RESULT_FILE, done)
    show([score_table(done), asked_table(done), cost_table(done)], out / RESULT_FILE, evaluation_page(done))


def _result(suite: str, name: str, judged: Judged, num_samples: int, seed: int) -> DomainResult:
    """Result of a domain from a harness, which reports no texts and no probabilities."""
    value_PS = _table(judged.values, num_samples)
    is_graded = bool((np.nan_to_num(value_PS) % 1).any())
    return DomainResult(
        **scored(name, value_PS, [] if is_graded else sorted({1, num_samples}), seed),
        suite=suite,
        is_graded=is_graded,
        items=[crc32(problem.encode()) for problem in sorted(judged.values)],
        baselines={
            rule: scored(name, _table(values, 1), [], seed)["score"] for rule, values in judged.baselines.items()
        },
        num_tokens=judged.num_sampled / max(1, judged.finishes.total()),
        finishes=dict(judged.finishes),
        num_infra=len(judged.failures),
    )


def _table(values: Mapping[str, Sequence[float | None]], num_samples: int) -> np.ndarray:
    """Scores [P, S] by problem, in the order of the problems' ids; NaN: an infrastructure error."""
    value_PS = np.full((len(values), num_samples), np.nan)
    for row, problem in enumerate(sorted(values)):
        scores = [np.nan if value is None else value for value in values[problem]]
        value_PS[row, : len(scores)] = scores
    return value_PS


def _cost(counts: Counts, domains: Sequence[Judged], seconds: float) -> Cost:
    """Cost of an evaluation by a harness. FLOPs are those of products with weights, since lengths of single answers are unknown."""
    num_prompt, num_sampled = sum(one.num_prompt for one in domains), sum(one.num_sampled for one in domains)
    return Cost(counts.total_params, counts.active_params, counts.linear_flops, num_prompt, num_sampled, seconds)
