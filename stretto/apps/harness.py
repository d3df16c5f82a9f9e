"""`stretto eval` with suites that other harnesses ask: a server of the checkpoint, one harness after the other, our own record of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np

from stretto.apps.evaluate import show
from stretto.apps.search import named_subnet
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder, claimed
from stretto.evals.scores import mean_interval, pass_at_k, pass_hat_k
from stretto.harness.suites import Budget, Judged, ask, serving
from stretto.model.checkpoint import read_config, read_presets, weights_hash
from stretto.model.spec import Counts, count
from stretto.post.suite import (
    RESULT_FILE,
    Cost,
    DomainResult,
    EvalOptions,
    Evaluation,
    mean_of,
    problem_means,
    write_result,
)
from stretto.report.evals import cost_table, evaluation_page, score_table


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
