"""`stretto eval` and `stretto compare`: from names of models and suites to scores, tables and a page."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import rich
import torch

from stretto.api.search import named_subnet
from stretto.base.config import validate
from stretto.base.endpoint import served_name
from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT, checkpoint_folder, claimed, sized, write_json
from stretto.base.track import say
from stretto.data.sources import open_source
from stretto.evals.scores import mean_interval, pass_at_k, pass_hat_k
from stretto.evals.writing import Similarity
from stretto.harness.suites import Budget, Judged, ask, serving
from stretto.model.checkpoint import read_config, read_presets, weights_hash
from stretto.model.parallel import join
from stretto.model.spec import Counts, count
from stretto.post.battle import battle
from stretto.post.panel import PANEL_FILE, judged_by
from stretto.post.panel import panels as writing_panels
from stretto.post.pipeline import COMPARISON_FILE
from stretto.post.suite import (
    RESULT_FILE,
    Cost,
    DomainResult,
    EvalOptions,
    Evaluation,
    SuiteConfig,
    evaluate,
    mean_of,
    parse_suites,
    problem_means,
    read_evaluation,
    suites_of,
    write_result,
)
from stretto.report.evals import (
    Comparison,
    asked_table,
    battle_table,
    chapters_table,
    compare,
    comparison_page,
    comparison_table,
    cost_table,
    evaluation_page,
    overused_table,
    panel_table,
    place_table,
    score_table,
)
from stretto.report.page import Page, Table, write_page
from stretto.text.similar import embeddings, similarity_NN


def options(**told: Any) -> EvalOptions:
    """What the flags of these names ask for. Raises `UserError`: a value that is impossible."""
    if told.get("embed") is not None:
        told["embed"] = checkpoint_folder(told["embed"])
    return validate(EvalOptions, told | {"threads": torch.get_num_threads()}, "stretto eval")


def eval_command(
    source: Path,
    suites: Mapping[str, SuiteConfig],
    out: Path,
    options: EvalOptions,
    subnet: str | None = None,
    device: str = "auto",
    judge: str | None = None,
    people: Path | None = None,
) -> Evaluation:
    """Evaluate the run or checkpoint ``source`` into ``out``, print what came of it and draw it; of open-ended answers a panel, too, which
    compares what they overuse with the texts of ``people``. ``judge``: address of who rates these. Raises `UserError`: as `evaluate`,
    or a Subnet that is not its, or a judge that may not be."""
    folder = checkpoint_folder(source)
    if judge is not None:
        suites = judged_by(suites, judge, served_name(judge), folder)
    corpus = None if people is None else [text.text for text in open_source(people).read("train")]
    chosen = None
    if subnet is not None:
        chosen = named_subnet(source, subnet, read_config(folder), read_presets(folder))
    name = f"{_name(source)}{f':{subnet}' if subnet else ''}"
    place = str(join(device).device)
    found = evaluate(folder, suites, out, options, name=name, subnet=chosen, device=place)
    tables = [score_table(found), asked_table(found), cost_table(found), place_table(found)]
    if any(domain.is_graded for domain in found.domains.values()):
        panels = writing_panels(out, suites_of(found.asked), _similar(), corpus)
        write_json(out / PANEL_FILE, [asdict(each) for each in panels])
        tables += [panel_table(panels), *(overused_table(each) for each in panels)]
        tables += [chapters_table(each.domain, each.chapters) for each in panels if each.chapters]
    show(tables, out / RESULT_FILE, evaluation_page(found))
    return found


def show(tables: Sequence[Table], path: Path, page: Page) -> None:
    """Print what of ``tables`` holds something, write ``page`` beside ``path``, and say where the two lie."""
    console = rich.get_console()
    for table in tables:
        if table.rows:
            console.print(table)
    console.print(f"{path}; report: {write_page(page, path.parent)}", soft_wrap=True)


def _similar() -> Similarity:
    """By words' vectors where the extra is installed, else by letters, which is said."""
    try:
        embeddings()
    except UserError as error:
        say(f"answers are alike by their letters: {error}")
        return partial(similarity_NN, kind="characters")
    return partial(similarity_NN, kind="meaning")


def presets_command(
    source: Path, named: Sequence[str], out: Path, options: EvalOptions, device: str = "auto"
) -> Comparison:
    """Evaluate every named size of ``source``, and compare them with all of it: score over size. Raises `UserError`: as
    `compare_command`, or it has no named sizes."""
    names = [name for name in read_presets(checkpoint_folder(source)) if name != "full"]
    if not names:
        raise UserError(f"{source}: --presets: names no sizes; leave it out, or give --subnet")
    return compare_command([str(source), *(f"{source}:{name}" for name in names)], [], named, out, options, device)


def _name(source: Path) -> str:
    resolved = source.resolve()
    return resolved.parent.name if resolved.name == CHECKPOINT else resolved.name


def compare_command(
    models: Sequence[str],
    teachers: Sequence[str],
    named: Sequence[str],
    out: Path,
    options: EvalOptions,
    device: str = "auto",
    reference: str | None = None,
    is_battle: bool = False,
) -> Comparison:
    """Compare evaluations, runs or checkpoints (``PATH`` or ``PATH:SUBNET``); of what was not evaluated, the evaluation by the suites
    ``named`` is made, in a folder of ``out``. ``teachers``: ``DOMAIN=PATH`` each; ``reference``: one of ``models``, None: the first;
    ``is_battle``: a judge compares their answers, too.
    Raises `UserError`: as `eval_command`, `compare` and `battle`."""
    if is_battle and len(models) < 2:
        raise UserError(f"--battle: {models[0]} alone has no opponent; name two models or more")
    if reference is not None and reference not in models:
        raise UserError(f"--reference {reference}: none of the models; name one as it is named there")
    taught = {}
    for text in teachers:
        domain, equals, path = text.partition("=")
        if not equals:
            raise UserError(f"--teacher {text}: say whose it is: DOMAIN={text}")
        taught[domain] = path
    suites = parse_suites(named)
    if unknown := [domain for domain in taught if suites and not _only(suites, {domain})]:
        raise UserError(f"--teacher {unknown[0]}: no such domain in --suite")
    places: dict[str, Path] = {}
    for text in dict.fromkeys([*models, *taught.values()]):
        # of a teacher that is no model beside, what it teaches
        own = {domain for domain, path in taught.items() if path == text}
        asked = suites if text in models else _only(suites, own)
        places[text] = _evaluated(text, asked, out / "evals", options, device)
    found = {text: read_evaluation(place) for text, place in places.items()}
    guides = {domain: found[path] for domain, path in taught.items()}
    place, compared = 0 if reference is None else list(models).index(reference), [found[text] for text in models]
    done = compare(compared, guides, options.seed, place)
    if is_battle:
        done = replace(done, battles=battle(compared, [places[text] for text in models], place, options.seed))
    write_result(out / COMPARISON_FILE, asdict(done))
    tables = [comparison_table(done), *([] if done.battles is None else [battle_table(done.battles)])]
    show(tables, out / COMPARISON_FILE, comparison_page(done))
    return done


def _only(suites: Mapping[str, SuiteConfig], domains: Collection[str]) -> dict[str, SuiteConfig]:
    kept = {
        name: {key: suite.sources[key] for key in suite.sources if key in domains} for name, suite in suites.items()
    }
    return {name: suites[name].replace(sources=sources) for name, sources in kept.items() if sources}


def _evaluated(text: str, suites: Mapping[str, SuiteConfig], folder: Path, options: EvalOptions, device: str) -> Path:
    """Where the evaluation lies that ``text`` names, if need be made."""
    if (Path(text) / RESULT_FILE).is_file():
        return Path(text)
    path, subnet = sized(text)
    if not suites:
        raise UserError(
            f"{text}: holds no evaluation; name the --suite to evaluate it with, or run `stretto eval` before"
        )
    place = "-".join(part for part in (*path.parts[-3:], subnet) if part not in ("/", "", CHECKPOINT))
    eval_command(path, suites, folder / place, options, subnet or None, device)
    return folder / place


# suites that other harnesses ask: a server of the checkpoint, one harness after the other


def harness_command(
    source: Path,
    suites: Sequence[str],
    out: Path,
    options: EvalOptions,
    subnet: str | None = None,
    device: str = "auto",
) -> Evaluation:
    """Have the harnesses of ``suites`` ask a server of ``source``, write ``out`` and print what came of it.

    Raises:
        UserError: a checkpoint without a chat template, or a domain without a score.
    """
    folder = checkpoint_folder(source)
    config, start_s = read_config(folder), time.perf_counter()
    chosen = named_subnet(source, subnet or "full", config, read_presets(folder))
    told = {} if options.temperature is None else {"temperature": options.temperature}
    budget = Budget(limit=options.limit, samples=options.samples, at_once=min(16, options.max_batch), **told)
    if (out / RESULT_FILE).exists():
        raise UserError(f"{out}: holds an evaluation; harnesses begin anew, so name another folder")
    with claimed(out):
        flags = ["--device", device, "--subnet", subnet or "full"]  # else the environment may choose one
        with (out / "server.txt").open("w") as log, serving(source, *flags, log=log) as (url, _):
            found = {suite: ask(suite, url, out / suite, budget) for suite in suites}
        domains = {name: _result(suite, name, one, options) for suite in suites for name, one in found[suite].items()}
        asked = {suite: budget.model_dump() | {"sources": dict.fromkeys(found[suite], suite)} for suite in suites}
        judged = [one for each in found.values() for one in each.values()]
        done = Evaluation(
            f"{source.resolve().name}{f':{subnet}' if subnet else ''}",
            {"samples": options.samples, "weights": weights_hash(folder), "subnet": subnet, "suites": asked},
            mean_of(domains, options.seed),
            domains,
            _cost(count(config, chosen), judged, time.perf_counter() - start_s),
        )
        write_result(out / RESULT_FILE, done)
    show([score_table(done), cost_table(done)], out / RESULT_FILE, evaluation_page(done))
    return done


def _result(suite: str, name: str, judged: Judged, options: EvalOptions) -> DomainResult:
    """As of our own suites; what a harness does not tell, the answers' texts and probabilities, is left open."""
    ids = sorted(judged.values)
    value_PS = np.full((len(ids), options.samples), np.nan)
    for row, each in enumerate(ids):
        kept = [np.nan if value is None else value for value in judged.values[each]]
        value_PS[row, : len(kept)] = kept
    means_P = problem_means(value_PS)
    is_graded = bool((np.nan_to_num(value_PS) % 1).any())

    spread = partial(mean_interval, name, seed=options.seed)
    ks = [] if is_graded else sorted({1, options.samples})
    return DomainResult(
        suite=suite,
        is_graded=is_graded,
        items=[crc32(each.encode()) for each in ids],
        values=[None if np.isnan(value) else value for value in means_P.tolist()],
        score=spread(means_P),
        pass_at={k: spread(pass_at_k(value_PS, k)) for k in ks},
        pass_hat={k: spread(pass_hat_k(value_PS, k)) for k in ks},
        majority_at={},
        baselines={},
        diversity={},
        entropy=None,
        num_tokens=judged.num_sampled / max(1, judged.finishes.total()),
        finishes=dict(judged.finishes),
        num_infra=len(judged.failures),
    )


def _cost(counts: Counts, asked: Sequence[Judged], seconds: float) -> Cost:
    """FLOPs are those of products with weights: lengths of single answers are not told."""
    num_prompt, num_sampled = sum(one.num_prompt for one in asked), sum(one.num_sampled for one in asked)
    return Cost(counts.total_params, counts.active_params, counts.linear_flops, num_prompt, num_sampled, seconds)
