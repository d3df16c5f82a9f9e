"""A teacher with another tokenizer beside one with the student's: what a student gains from either, at the same cost.

    python -m bench.other_tokenizer [--seeds 3] [--jobs 2] [--device cpu] [--out DIR]    # some minutes on two cores

The student is a small network that saw half wrong answers to problems of digits, in the tokens of a BPE with hardly a merge. Its teachers
learnt the right ones, from as many examples: one with the student's tokenizer; its twin with a BPE of more merges; and the first
with all its ids in another order, which goes through spans and differs in nothing else. All teach by the form ``sampled``, the same
prompts, steps and rates; a rate is chosen for each by the reward of the run's own held-out problems, and reported is the share of
right answers to others. The mutant takes the ids of the third for the student's own: it must gain nothing. Gain: (student − start) /
(teacher − start). Exits with 1 where the re-ordered teacher's gain is further from the first one's than `NEAR`, or the mutant's is
above it.

A harsh reader: one network, one kind of problem, answers of few tokens; the twin is another training, so that its own score differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.common.lessons import twin
from bench.common.measure import table, wide_console
from bench.common.stages import START, carry_out, told
from bench.common.studies import Run, Study
from stretto.base.paths import CHECKPOINT
from stretto.model.checkpoint import read_checkpoint, write_checkpoint

NEAR = 0.15
RATES = (5e-4, 2e-3)
VOCABULARIES = {"fine": 262, "coarse": 300}
"""Entries of the student's tokenizer, and of the twin's."""
TEACHERS = {
    "same tokenizer": "teacher",
    "other tokenizer": "coarse",
    "same, other ids": "reordered",
    "mutant: ids mistaken": "mistaken",
}
SCORED = {"samples": 2, "problems": 100}


def recipe(seed: int, vocabulary: str, noise: float, steps: int, **tables: Any) -> dict[str, Any]:
    """Problems of digits, and a network of half a million parameters."""
    model = {
        "vocab_size": VOCABULARIES[vocabulary], "hidden_size": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        "num_experts": 8, "top_k": 2, "expert_intermediate_size": 48, "num_shared_experts": 1, "qk_norm": True,
        "tie_embeddings": True, "max_positions": 96,
    }  # fmt: skip
    return {
        "sources": {"digits": {"kind": "strings", "args": {"operation": "complement", "length": 4}}},
        "start": {"model": model, "optim": {"name": "muon", "lr": 3e-3}, "steps": steps, "rows": 16, "noise": noise},
        "rollout": {"group": 1 if "distill" in tables else 2, "max_tokens": 16, "max_batch": 32},
        "train": {"steps": 40, "prompts": 16, "seq_len": 80, "micro_rows": 8, "eval_every": 99, "eval_prompts": 64, "seed": seed},
        "optim": {"lr": RATES[0]},
        "staleness": 0,
        "runtime": {"isolate": "none"},
        "failures": {"lease_s": 3600, "stuck_s": 3600},
        **tables,
    }  # fmt: skip


def begin(options: argparse.Namespace, seed: int, name: str) -> Run:
    """A student or a teacher, from nothing."""
    noise, steps = (0.5, 120) if name == "student" else (0.0, 120)
    plan = recipe(seed, "coarse" if name == "coarse" else "fine", noise, steps)
    scored = {**SCORED, "sources": plan["sources"]}
    return told(START, plan, options.out / f"{name}-{seed}", options.device, scored)


def reordered(folder: Path, seed: int, is_mistaken: bool) -> Path:
    """The teacher of ``seed`` with other ids; with the student's tokenizer all the same, if that is a mistake."""
    name = "mistaken" if is_mistaken else "reordered"
    out, origin = folder / f"{name}-{seed}" / CHECKPOINT, folder / f"teacher-{seed}" / CHECKPOINT
    if not out.is_dir():
        out.parent.mkdir(exist_ok=True)
        twin(origin, out, seed + 1)
        if is_mistaken:
            found = read_checkpoint(out)
            write_checkpoint(out, found.model, found.config, tokenizer_dir=origin)
    return out


def taught(options: argparse.Namespace, seed: int, teacher: str, rate: float) -> Run:
    where = options.out / f"{teacher}-{seed}" / CHECKPOINT
    distill = {"form": "sampled", "teachers": {"one": {"checkpoint": str(where), "domains": ["*"]}}}
    plan = recipe(seed, "fine", 0.5, 120, distill=distill, optim={"lr": rate, "decay_fraction": 0.5})
    out, scored = options.out / f"{teacher}-{seed}-{rate:g}", {**SCORED, "sources": plan["sources"]}
    return told("distill", plan, out, options.device, scored, options.out / f"student-{seed}" / CHECKPOINT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="where runs are kept, and not repeated (default: nowhere)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        options.out = options.out or Path(temporary)
        sys.exit(not study(options))


def study(options: argparse.Namespace) -> bool:
    """Run it, print it; whether it came out as it should."""
    runs, seeds = Study(options.out, options.jobs), range(options.seeds)
    kinds = ("student", "teacher", "coarse")
    begun = runs.run(
        "starts", carry_out, {f"{kind}-{seed}": begin(options, seed, kind) for kind in kinds for seed in seeds}
    )
    for seed in seeds:
        for is_mistaken in (False, True):
            reordered(options.out, seed, is_mistaken)
    plans = {
        (kind, seed, rate): taught(options, seed, kind, rate)
        for kind in TEACHERS.values()
        for seed in seeds
        for rate in RATES
    }
    done = runs.run(
        "students", carry_out, {f"{kind}-{seed}-{rate:g}": plan for (kind, seed, rate), plan in plans.items()}
    )

    def score(found: Run) -> float:
        return float(found["scores"]["digits"])

    starts, gains = [score(begun[f"student-{seed}"]) for seed in seeds], dict[str, list[float]]()
    made = table("Right answers, by teacher", "teacher", "start", "teacher's own", "student", "gain", "by seed", "rate")
    for name, kind in TEACHERS.items():
        # by the last step's samples, of the run's own problems
        chosen = max(
            RATES,
            key=lambda rate: fmean(
                done[f"{kind}-{seed}-{rate:g}"]["curve"]["reward/source/digits"][-1] for seed in seeds
            ),
        )
        tops = [score(begun[f"{kind if kind in kinds else 'teacher'}-{seed}"]) for seed in seeds]
        ends = [score(done[f"{kind}-{seed}-{chosen:g}"]) for seed in seeds]
        gains[name] = [(end - start) / (top - start) for start, top, end in zip(starts, tops, ends, strict=True)]
        share = partial("{:.1%}".format)
        each = ", ".join(f"{gain:.2f}" for gain in gains[name])
        made.add_row(
            name,
            *(share(fmean(some)) for some in (starts, tops, ends)),
            f"{fmean(gains[name]):.2f}",
            each,
            f"{chosen:g}",
        )
    wide_console().print(made)
    same, _, other_ids, mutant = (fmean(each) for each in gains.values())
    return abs(other_ids - same) <= NEAR >= mutant


if __name__ == "__main__":
    main()
