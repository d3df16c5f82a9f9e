"""Stages of post-training as runs of a `bench.common.studies.Study`: a start, an expert, a student; and how each answers.

What a stage is told and what it finds are plain data. A stage is the run that a command makes, with a staleness of 0, so that it
repeats itself; begun again after a kill, it goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch

from bench.common.measure import half_width
from bench.common.studies import Run
from stretto.base.paths import CHECKPOINT
from stretto.base.records import read_lineage
from stretto.base.track import read_metrics
from stretto.base.trajectory import Outcome
from stretto.evals.diversity import vendi
from stretto.flow.launch import Job, SourceTables
from stretto.flow.run import run_rl
from stretto.learning.recipe import RlRecipe
from stretto.model.checkpoint import read_config
from stretto.model.parallel import Ranks
from stretto.model.spec import count
from stretto.post.sft import sft
from stretto.post.suite import SAMPLES_FILE, EvalOptions, Sample, SuiteConfig, evaluate
from stretto.text.similar import similarity_NN

START = "start"
MODEL = {
    "hidden_size": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "num_experts": 8, "top_k": 2,
    "expert_intermediate_size": 64, "num_shared_experts": 1, "qk_norm": True, "tie_embeddings": True,
}  # fmt: skip
"""Of networks that learn a made-up language in seconds; a bench adds its vocabulary and its positions."""
NUM_RIGHT = 4
"""Right answers to a problem that are compared with each other."""
LOGGED = ("reward/source/", "policy/entropy", "policy/kl_reference")
"""Beginnings of what is kept of a run's log."""


def told(
    stage: str, recipe: Mapping[str, Any], out: Path, device: str, scored: Mapping[str, Any], begin: Path | None = None
) -> dict[str, Any]:
    """What `carry_out` takes: a ``stage`` by its name (``start``, ``rl``, ``distill``, ``online``) into the folder ``out``, from the
    checkpoint ``begin``; ``scored``: ``sources`` whose held-out ``problems`` are answered, each with ``samples``.
    Raises UserError: the recipe is none."""
    return {
        "stage": stage,
        "recipe": RlRecipe.model_validate(recipe).model_dump(mode="json"),
        "out": str(out),
        "device": device,
        "begin": None if begin is None else str(begin),
        "scored": dict(scored),
    }


def carry_out(asked: Run) -> Run:
    """A stage, and the scores of its result: ``scores`` and measures of ``diversity`` by source; ``curve``: what the log says by step, as
    `LOGGED`; ``tokens`` trained on, ``flops`` of training, teachers and, computed from its lengths, sampling; of this stage alone."""
    recipe, out, begin = RlRecipe.model_validate(asked["recipe"]), Path(asked["out"]), asked["begin"]
    if asked["stage"] == START:
        ranks = Ranks(0, 1, torch.device(asked["device"]))
        with SourceTables(dict(recipe.sources), recipe.sandbox).opened() as sources:
            made = (
                out / CHECKPOINT if (out / CHECKPOINT).is_dir() else sft(recipe, sources, out / CHECKPOINT, ranks=ranks)
            )
    else:
        job = Job(recipe, out, Path(begin), resume=True, devices=(asked["device"],), stage=asked["stage"])
        made = run_rl(job, lambda num, status: None, print).checkpoint
    rows = [] if asked["stage"] == START else [row for row in read_metrics(out) if "reward/mean" in row]
    receipt = read_lineage(made).receipt
    return {
        "checkpoint": str(made),
        "tokens": receipt.tokens,
        "flops": receipt.flops + _sampling_flops(made, recipe, rows),
        "curve": {name: [row.get(name) for row in rows] for name in _logged(rows)},
        **_scored(made, out / "scores", asked),
    }


def _logged(rows: Sequence[Mapping[str, float]]) -> list[str]:
    return sorted({name for row in rows for name in row if name.startswith(LOGGED)})


def _sampling_flops(made: Path, recipe: RlRecipe, rows: Sequence[Mapping[str, float]]) -> int:
    """Of the tokens that were sampled; prompts, which a group computes once, and what was dropped are left out."""
    config = read_config(made)
    counts, num = count(config, config.full()), recipe.train.prompts * recipe.rollout.group
    tokens = round(sum(num * row["samples/tokens_mean"] for row in rows))
    return int(counts.forward_flops(tokens, recipe.train.seq_len / 2))


def _scored(made: Path, out: Path, asked: Run) -> dict[str, Any]:
    told, recipe = asked["scored"], asked["recipe"]
    suite = SuiteConfig(sources=told["sources"], max_tokens=recipe["rollout"]["max_tokens"])
    options = EvalOptions(samples=told["samples"], limit=told["problems"], baselines=False)
    found = evaluate(made, {"held out": suite}, out, options, name=out.parent.name, device=asked["device"]).domains
    return {
        "scores": {name: each.score.value for name, each in found.items()},
        "diversity": {
            name: {
                "entropy": each.entropy,
                "right": _among_right(out, name),
                **{kind: value.value for kind, value in each.diversity.items()},
            }
            for name, each in found.items()
        },
    }


def _among_right(out: Path, name: str) -> float | None:
    """The Vendi score of `NUM_RIGHT` right answers to one problem, mean over those that have as many; None: none has. What is
    wrong is various too, and would count for diversity otherwise."""
    lines = (out / SAMPLES_FILE).read_bytes().splitlines()
    right: dict[int, list[str]] = {}
    for each in sorted((msgspec.json.decode(line, type=Sample) for line in lines), key=lambda each: each.number):
        if each.domain == name and each.outcome is Outcome.OK:
            right.setdefault(each.item, []).append(each.text)
    found = [
        vendi(similarity_NN(texts[:NUM_RIGHT], "characters")) for texts in right.values() if len(texts) >= NUM_RIGHT
    ]
    return fmean(found) if found else None


def mean_and_width(values: Sequence[float], digits: int = 2) -> str:
    """The mean over seeds, and half of its 95 % interval by Student's t, which one seed alone has not."""
    width = f" ± {half_width(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{width}"
