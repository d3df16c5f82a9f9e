"""Healing the corner of an elastic network: on-policy distillation from the whole of it, against two trainings on the data.

    python -m bench.heal_by_distillation --out runs/twist                                           a few minutes on two cores
    python -m bench.heal_by_distillation --out runs/twist --jobs 16 --seeds 0 1 2 3 4 --minutes 8   with more of them
    python -m bench.heal_by_distillation --out runs/twist --break                                   after that; must fail

For each seed a network (`bench/heal_by_distillation.toml`) learns problems of reasoning-gym from examples, some of them wrong, and its
corner with it; reinforcement learning then takes the whole further. The corner is cut out and healed: by on-policy distillation
(its own samples, reverse KL to the whole network), by cross-entropy on the examples, by KL(whole ‖ corner) on the examples. The two
get the FLOPs of the first (what is trained, the teacher's passes and the samples' generation are all counted), or its tokens.
Each has its learning rate searched on a network of its own, whose problems are others than those that are told. Scores are
shares of held-out problems answered rightly: sampled at temperature 1, as all were trained, and greedy.

What has ended is kept in --out: called again, a study goes on. Exit code 1: distillation is not better than both at equal FLOPs
by more than the interval of the difference (paired over seeds, Student's, 95 %), or their FLOPs are not equal. ``--break`` has the
corner taught by itself. ``--no-rl`` heals what supervised training left, ``--corner`` another size, and
``--set start.noise=0`` makes all examples right; what these change is for the reader to see.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from bench.common.measure import half_width, table, wide_console
from bench.common.post_runs import Asked, learn
from bench.common.studies import Run, Study
from stretto.api.search import extract_command
from stretto.base.config import read_recipe
from stretto.base.numbers import si
from stretto.base.paths import remove
from stretto.flow.launch import SourceTables
from stretto.flow.plain import run_plainly
from stretto.learning.recipe import RlRecipe, plan_prompts
from stretto.model.checkpoint import read_checkpoint
from stretto.model.parallel import join
from stretto.optim.schedule import OptimConfig
from stretto.post.sft import Demonstrations, examples, sft
from stretto.post.suite import EvalOptions, SuiteConfig, evaluate
from stretto.text.tokenizer import load_tokenizer
from stretto.train.loop import Job, heal, write_trained
from stretto.train.recipe import HealRecipe, TrainConfig

RECIPE = Path(__file__).with_suffix(".toml")
OURS, BROKEN = "on-policy distillation", "on-policy distillation by the corner"
GREEDY = "on-policy distillation, greedy at last"
"""Half of its steps see the corner's likeliest answers: a sample drawn leaves the right path early, and all behind that place is
spent on what no greedy answer comes to."""
GREEDY_SHARE = 0.5
DATA = {"cross-entropy on the data": 1.0, "KL to the whole on the data": 0.0}
"""The controls, and their weight of cross-entropy."""
SELECTION = 100
"""Seed of the network that learning rates are searched on."""
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""Learning rates, of which the search tries more where its best is at an end."""
PROBE_STEPS = 4
"""Of each training, to see what a step costs."""
EQUAL = 0.05
"""Relative difference of FLOPs, or tokens, that counts as none: a run has whole steps, and samples grow shorter."""
SCORES = {"sampled": 1.0, "greedy": 0.0}
"""Temperatures."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs share."""

    recipe: RlRecipe
    out: Path
    device: str
    corner: str
    has_rl: bool
    problems: int

    def folder(self, seed: int) -> Path:
        return self.out / f"seed-{seed}"

    def whole(self, seed: int) -> Path:
        return self.folder(seed) / ("rl.checkpoint" if self.has_rl else "sft")

    def cut(self, seed: int) -> Path:
        return self.folder(seed) / "corner"

    def seeded(self, seed: int) -> RlRecipe:
        return self.recipe.replace(train=self.recipe.train.replace(seed=seed))

    def fingerprint(self) -> str:
        told = [self.recipe.model_dump(mode="json"), self.corner, self.has_rl, self.problems]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]


def main() -> None:
    options = _parse()
    recipe = read_recipe(RECIPE, RlRecipe, options.set)
    bench = Bench(recipe, options.out, options.device, options.corner, not options.no_rl, options.problems)
    study, mark = Study(options.out, options.jobs, options.minutes), {"settings": bench.fingerprint()}
    seeds, ours = options.seeds, BROKEN if options.break_ else OURS
    others = () if options.break_ else (GREEDY,)
    networks = study.run(
        "networks", partial(grow, bench), {f"network-{seed}": {"seed": seed, **mark} for seed in (SELECTION, *seeds)}
    )

    def plans(seed: int) -> dict[str, dict[str, Any]]:
        """By the name of a way: what it is told but for its rate."""
        costs = networks[f"network-{seed}"]["step"]
        budgets = {kind: options.steps * costs[kind] for kind in ("flops", "tokens")}
        found: dict[str, dict[str, Any]] = {name: {"method": name, "steps": options.steps} for name in (ours, *others)}
        for method in DATA:
            found |= {f"{method}, equal {kind}": {"method": method, kind: budgets[kind]} for kind in budgets}
        return {name: {"seed": seed, **mark, **told} for name, told in found.items()}

    searched: dict[str, dict[float, Run]] = {}
    if f"network-{SELECTION}" in networks:
        searched = search(study, partial(healed, bench), plans(SELECTION), options.rates)
    rates = {name: best(by_rate) for name, by_rate in searched.items() if by_rate}
    told = {
        f"seed {seed}, rate {rates[name]:g}, {name}": {**plan, "lr": rates[name]}
        for seed in seeds
        if f"network-{seed}" in networks
        for name, plan in plans(seed).items()
        if name in rates
    }
    made = study.run("healing", partial(healed, bench), told)
    found = {
        f"seed {each['seed']}, {name}": made[key]
        for key, each in told.items()
        if key in made
        for name in [key.split(", ", 2)[2]]
    }
    sys.exit(show(options, ours, networks, searched, rates, found))


def best(by_rate: Mapping[float, Run]) -> float:
    return max(by_rate, key=lambda rate: float(by_rate[rate]["sampled"]))


def search(
    study: Study, work: Callable[[Run], Run], plans: Mapping[str, Mapping[str, Any]], first: Sequence[float]
) -> dict[str, dict[float, Run]]:
    """What each way found at its rates: ``first``, and then, as long as the best of them is the lowest or the highest, the next of
    `RATES`."""
    tried = {name: sorted(first) for name in plans}
    while True:
        told = {f"rate {rate:g}, {name}": {**plans[name], "lr": rate} for name in plans for rate in tried[name]}
        made = study.run("search of rates", work, told)
        found = {
            name: {rate: made[key] for rate in tried[name] if (key := f"rate {rate:g}, {name}") in made}
            for name in plans
        }
        if len(made) < len(told):
            return found
        more = {}
        for name, by_rate in found.items():
            chosen = best(by_rate)
            lower, higher = [each for each in RATES if each < chosen], [each for each in RATES if each > chosen]
            more[name] = ([lower[-1]] if lower and chosen == tried[name][0] else []) + (
                [higher[0]] if higher and chosen == tried[name][-1] else []
            )
        if not any(more.values()):
            return found
        tried = {name: sorted([*tried[name], *more[name]]) for name in tried}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="networks and finished runs; taken up again")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, each a process of one thread")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after so many no run is begun any more")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the networks that are healed")
    parser.add_argument("--steps", type=int, default=40, help="of distillation; the others get its FLOPs or tokens")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3], help="the first that are tried")
    parser.add_argument("--problems", type=int, default=200, help="held-out ones of each source")
    parser.add_argument("--corner", default="layers=4,experts=5,top_k=1", help="what is cut out")
    parser.add_argument("--no-rl", action="store_true", help="cut it out of what supervised training left")
    parser.add_argument("--set", action="append", default=[], help="override a key of the recipe")
    parser.add_argument("--break", dest="break_", action="store_true", help="the corner is its own teacher")
    return parser.parse_args()


# --- runs, each in a process of its own -------------------------------------------------------------------------------


def grow(bench: Bench, told: Run) -> Run:
    """The network of a seed and its corner: scores, and what a step of distillation costs."""
    seed = told["seed"]
    recipe, folder = bench.seeded(seed), bench.folder(seed)
    remove(folder)
    folder.mkdir(parents=True)
    with SourceTables(dict(recipe.sources), recipe.sandbox).opened() as sources:
        sft(recipe, sources, folder / "sft", ranks=join(bench.device))
    if bench.has_rl:
        asyncio.run(run_plainly(recipe, folder / "rl", folder / "sft", bench.whole(seed), device=bench.device))
        remove(folder / "rl")
    extract_command(bench.whole(seed), bench.corner, bench.cut(seed), bench.device)
    places = {"sft": folder / "sft", "whole": bench.whole(seed), "corner": bench.cut(seed)}
    scores = {name: scored(bench, place, folder / f"{name}.eval", seed) for name, place in places.items()}
    step = {
        kind: total / PROBE_STEPS for kind, total in _distilled(bench, seed, OURS, PROBE_STEPS, 1e-9, "probe").items()
    }
    return {"scores": scores, "step": step}


def healed(bench: Bench, told: Run) -> Run:
    """The corner of a seed, healed: its scores, and what that cost."""
    seed, method, lr = told["seed"], told["method"], told["lr"]
    name = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]
    if method not in DATA:
        steps = told["steps"]
        cost = _distilled(bench, seed, method, steps, lr, name)
    else:
        kind = "flops" if "flops" in told else "tokens"
        probe = _trained(bench, seed, PROBE_STEPS, lr, DATA[method], f"{name}-probe")
        steps = max(1, round(told[kind] * PROBE_STEPS / probe[kind]))
        cost = _trained(bench, seed, steps, lr, DATA[method], name)
    folder = bench.folder(seed) / name
    scores = scored(bench, folder / "checkpoint", folder / "eval", seed)
    remove(folder)
    return {**scores, **cost, "steps": steps}


def _optim(lr: float) -> OptimConfig:
    return OptimConfig(name="adamw", lr=lr, warmup_steps=5, decay_fraction=1.0, weight_decay=0.0)


def _distilled(bench: Bench, seed: int, method: str, steps: int, lr: float, name: str) -> dict[str, float]:
    """On-policy distillation of the corner, in the folder ``name``; its cost, generation included."""
    folder, start = bench.folder(seed) / name, bench.cut(seed)
    remove(folder)
    recipe = bench.seeded(seed)
    teacher = {"checkpoint": str(start if method == BROKEN else bench.whole(seed)), "domains": ["*"]}
    tree = recipe.model_dump(mode="json", exclude={"start", "loss"}) | {
        "optim": _optim(lr).model_dump(),
        "rollout": {**recipe.rollout.model_dump(), "group": 1},
        "distill": {"teachers": {"whole": teacher}, "kl_floor": 0.0},
        "loss": {"drop_uniform": False},
        "replay": "off",
    }
    prompts = recipe.train.prompts * recipe.rollout.group
    tree["train"] |= {"steps": steps, "prompts": prompts}
    share = GREEDY_SHARE if method == GREEDY else 0.0
    plan = RlRecipe.model_validate(tree)
    spent = learn(plan, start, plan.sources, (), Asked(0, 1), 1, True, bench.device, folder, share)
    return {"flops": spent["flops"], "tokens": spent["tokens"], "generated": spent["generated"]}


def _trained(bench: Bench, seed: int, steps: int, lr: float, ce_weight: float, name: str) -> dict[str, float]:
    """The corner trained on the examples that the whole has learnt from, in the folder ``name``; its cost."""
    folder, recipe = bench.folder(seed) / name, bench.seeded(seed)
    remove(folder)
    assert recipe.start is not None, RECIPE
    train = TrainConfig(
        steps=steps,
        rows=recipe.start.rows,
        seq_len=recipe.train.seq_len,
        micro_batches=-(-recipe.start.rows // recipe.train.micro_rows),
        seed=seed,
        dtype="float32",
        snapshot_every=steps,
        keep_snapshots=1,
    )
    ranks, student, tokenizer = join(bench.device), read_checkpoint(bench.cut(seed)), load_tokenizer(bench.cut(seed))
    with SourceTables(dict(recipe.sources), recipe.sandbox).opened() as sources:
        prompts = plan_prompts(recipe, {key: source.num_items for key, source in sources.items()})
        noise = recipe.start.noise
        loader = Demonstrations(lambda: examples(sources, prompts, tokenizer, noise), train, ranks)
        job = Job(folder / "run", loader, (), "", ranks)
        told = HealRecipe(optim=_optim(lr), train=train, ce_weight=ce_weight, balance_rate=0.0)
        trained = heal(told, job, student.model, lambda: read_checkpoint(bench.whole(seed)).model)
    remove(folder / "run")
    write_trained(
        folder / "checkpoint",
        trained.model,
        trained.meter,
        ranks,
        name=name,
        stage="heal",
        config=told.model_dump(mode="json"),
        tokenizer_dir=bench.cut(seed),
        family=student.family,
    )
    receipt = trained.meter.receipt()
    return {"flops": receipt.flops, "tokens": receipt.tokens, "generated": 0}


def scored(bench: Bench, checkpoint: Path, out: Path, seed: int) -> dict[str, Any]:
    """Shares of right answers, by temperature, mean over the sources; problems of the search are others than those that are told."""
    found: dict[str, Any] = {}
    sources = bench.recipe.sources
    if seed == SELECTION:
        sources = {name: each.replace(args={**each.args, "seed": 1}) for name, each in sources.items()}
    for name, temperature in SCORES.items():
        suite = SuiteConfig(
            sources=sources,
            problems=bench.problems,
            max_tokens=bench.recipe.rollout.max_tokens,
            temperature=temperature,
        )
        asked = EvalOptions(samples=1, baselines=False, seed=seed)
        result = evaluate(checkpoint, {"held out": suite}, out / name, asked, name=name, device=bench.device)
        found[name] = result.mean.value
        found[f"{name} by source"] = {source: each.score.value for source, each in result.domains.items()}
    remove(out)
    return found


# --- what came of it --------------------------------------------------------------------------------------------------


def show(
    options: argparse.Namespace,
    ours_name: str,
    networks: Mapping[str, Run],
    searched: Mapping[str, Mapping[float, Run]],
    rates: Mapping[str, float],
    found: Mapping[str, Run],
) -> int:
    """Print tables; the exit code."""
    console = wide_console()
    names = [*searched]
    tried = sorted({rate for by_rate in searched.values() for rate in by_rate})
    shown = table("search of learning rates, sampled", "", *(f"{rate:g}" for rate in tried))
    for name in names:
        row = [searched.get(name, {}).get(rate) for rate in tried]
        shown.add_row(name, *("" if each is None else f"{each['sampled']:.3f}" for each in row))
    console.print(shown)
    seeds = [seed for seed in options.seeds if all(f"seed {seed}, {name}" in found for name in names)]
    if not seeds:
        console.print("no seed is whole yet; call again")
        return 1
    shown = table(
        f"{len(seeds)} seeds, {options.steps} steps of distillation, {options.problems} problems of each source: means ± 95 %",
        *(
            "",
            "rate",
            "sampled",
            "ours less this",
            "greedy",
            "ours less this",
            "steps",
            "tokens",
            "FLOPs",
            "generating",
        ),
    )
    ours = [found[f"seed {seed}, {ours_name}"] for seed in seeds]
    for label, place in (("the whole", "whole"), ("the whole before RL", "sft"), ("the corner, unhealed", "corner")):
        runs = [networks[f"network-{seed}"]["scores"][place] for seed in seeds]
        shown.add_row(label, "", *_scores(runs, ours), "", "", "", "")
    is_good = True
    for name in names:
        runs = [found[f"seed {seed}, {name}"] for seed in seeds]
        costs = {kind: mean(each[kind] for each in runs) for kind in ("steps", "tokens", "flops", "generated")}
        shown.add_row(
            name,
            f"{rates[name]:g}",
            *_scores(runs, ours if name != ours_name else None),
            f"{costs['steps']:,.0f}",
            f"{costs['tokens']:,.0f}",
            si(costs["flops"]),
            f"{costs['generated'] / costs['flops']:.0%}",
        )
        kind = name.rpartition("equal ")[2]
        if name not in (ours_name, GREEDY):
            relative = costs[kind] / mean(each[kind] for each in ours) - 1
            is_good &= relative >= -EQUAL
            if abs(relative) > EQUAL:
                console.print(f"{name}: {relative:+.1%} of ours: not equal")
        if kind == "flops":
            gains = [one["sampled"] - other["sampled"] for one, other in zip(ours, runs, strict=True)]
            is_good &= mean(gains) > half_width(gains)
    console.print(shown)
    by_source = table("sampled, by source", "", *(sources := list(ours[0]["sampled by source"])))
    for label in ("whole", "corner", *names):
        told = [
            networks[f"network-{seed}"]["scores"][label]
            if label in ("whole", "corner")
            else found[f"seed {seed}, {label}"]
            for seed in seeds
        ]
        values = [[each["sampled by source"][source] for each in told] for source in sources]
        by_source.add_row(label, *(f"{mean(each):.3f}" for each in values))
    console.print(by_source)
    console.print(f"distillation is {'' if is_good else 'NOT '}better than both at equal FLOPs, beyond the intervals")
    return 0 if is_good else 1


def _scores(runs: Sequence[Run], ours: Sequence[Run] | None) -> list[str]:
    """Of each score its mean, and what ours has more."""
    cells = []
    for score in SCORES:
        values = [each[score] for each in runs]
        cells.append(f"{mean(values):.3f} ± {half_width(values):.3f}")
        gains = [one[score] - value for one, value in zip(ours or runs, values, strict=True)]
        cells.append("" if ours is None else f"{mean(gains):+.3f} ± {half_width(gains):.3f}")
    return cells


if __name__ == "__main__":
    main()
