"""Can it be done afterwards? An ordinary checkpoint made elastic, against a network that was elastic from the start: figure 6.

    python -m bench.elasticise                                  an hour on one thread, on text of this Python's library
    python -m bench.elasticise --data FOLDER --steps 3000       long
    python -m bench.elasticise --data FOLDER --memory           what frozen experts save, instead

For each seed: an ordinary network; one trained elastic on the same tokens, which costs more FLOPs; and the ordinary one
elasticised for exactly that difference (the teacher's passes and the ordering included), so that both sides cost the same. Beside
them the ordinary network itself, cut down without training; at the same cost all axes at once instead of one after another, and
two mutants of the stage (no teacher; no anchors); and the stage with --more times the difference. Each side's rate is chosen on a
seed of its own by the mean loss of the three sizes on text that the figures are not measured on. Every run leaves a result in
--out; one that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich
from rich.console import Console
from rich.table import Table

from bench.common.measure import half_width
from bench.elastic_quality import RECIPE, own_text
from stretto.api.train import held_out, open_loader
from stretto.base.config import read_recipe
from stretto.base.paths import CHECKPOINT, read_json, remove, write_json
from stretto.base.records import process_peak_bytes
from stretto.base.track import Tracker
from stretto.evals.loss import EvalBatch, held_out_losses
from stretto.evals.order import rank_layers, survey
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.parallel import Ranks, join
from stretto.model.spec import ModelConfig, Subnet, SubnetChoice, count, executed
from stretto.model.transformer import build
from stretto.train.loop import Job, Trained, elasticize, pretrain
from stretto.train.prepare import prepare_data
from stretto.train.recipe import ElasticConfig, ElasticizeRecipe, MixtureConfig, Recipe, with_branches
from stretto.train.run_folder import RunInfo
from stretto.train.sampler import Sampler

SIZES = ("full", "half", "corner")
SEARCH_SEED = 100
"""Of the runs that rates are chosen by: no other run sees its order of the data."""
RATES = (1.5e-3, 3e-3, 6e-3)
"""Of pre-training, Muon's."""
CONTINUED_RATES = (("adamw", 3e-4), ("adamw", 1e-3), ("muon", 1e-3), ("muon", 3e-3))
LARGE = {"hidden_size": 256, "num_experts": 64, "expert_intermediate_size": 256}
"""For --memory: so that weights outweigh the interpreter."""
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs share."""

    recipe: Recipe
    """Of the network that is elastic from the start."""
    info: RunInfo
    out: Path
    ranks: Ranks
    chosen_by: tuple[EvalBatch, ...]
    """Held-out text that rates are chosen on."""
    measured_on: tuple[EvalBatch, ...]
    """Other held-out text."""

    @property
    def ordered_by(self) -> tuple[EvalBatch, ...]:
        """What orders of layers and experts are measured on: few rows, as their passes are paid for."""
        return self.chosen_by[:2]

    def losses(self, trained: Trained) -> Result:
        """On both texts, of all sizes."""
        anchors = self.recipe.elastic.anchors
        return {
            name: held_out_losses(trained.model, anchors, batches, self.ranks)
            for name, batches in (("chosen_by", self.chosen_by), ("measured_on", self.measured_on))
        }

    def once(self, name: str, told: Recipe | ElasticizeRecipe, work: Callable[[Path], Trained]) -> Result:
        """What the run of that name gave, now or earlier."""
        folder, recipe = self.out / name, json.loads(told.model_dump_json())
        if (folder / "result.json").is_file():
            kept: Result = read_json(folder / "result.json")
            assert kept["recipe"] == recipe, f"{folder} holds results of another recipe; choose another --out"
            return kept
        rich.print(f"[bold]{name}")
        trained = work(folder)
        write_checkpoint(folder / CHECKPOINT, trained.model, trained.model.config)
        receipt = trained.meter.receipt()
        spent = {"flops": receipt.flops, "tokens": receipt.tokens, "wall_s": receipt.wall_s}
        result = self.losses(trained) | spent | {"recipe": recipe}
        write_json(folder / "result.json", result)
        return result

    def job(self, folder: Path, recipe: Recipe | ElasticizeRecipe) -> Job:
        loader = open_loader(self.info, recipe.train, self.ranks)
        assert self.info.data_hash is not None

        def tracker(step: int) -> Tracker:
            return Tracker(folder, first_step=step, tensorboard=False)

        resume = (folder / "snapshots").is_dir()
        return Job(folder, loader, self.ordered_by, self.info.data_hash, self.ranks, tracker, resume)

    def pretrain(self, name: str, recipe: Recipe) -> Result:
        return self.once(name, recipe, lambda folder: pretrain(recipe, self.job(folder, recipe)))

    def elasticize(self, name: str, recipe: ElasticizeRecipe, parent: str) -> Result:
        model = read_checkpoint(self.out / parent / CHECKPOINT, device=self.ranks.device).model
        complete = recipe.for_network(model.config, self.recipe.elastic.anchors)
        return self.once(name, complete, lambda folder: elasticize(complete, self.job(folder, complete), lambda: model))


def main() -> None:
    told = _parse()
    recipe = read_recipe(told.recipe, Recipe, [*told.set, f"train.steps={told.steps}"])
    anchors = {"half": SubnetChoice(layers=7, experts=12, top_k=3), **recipe.elastic.anchors}
    recipe = recipe.replace(elastic=recipe.elastic.replace(anchors=anchors))
    data = told.data or own_text(told.out, recipe)
    mixture, tokenizer, data_hash = prepare_data(told.out, [str(data)], None, recipe.model.vocab_size)
    info = RunInfo(stage="pretrain", recipe=recipe, data=mixture, data_hash=data_hash, tokenizer=tokenizer)
    ranks = join(told.device)
    text = held_out(info, recipe.train.replace(eval_rows=2 * recipe.train.eval_rows), ranks)
    half = len(text) // 2
    bench = Bench(recipe, info, told.out, ranks, text[:half], text[half:])
    if told.memory:
        _memory(bench, told)
        return
    rates = _search(bench, told)
    rows = [_seed(bench, rates, seed, told.more) for seed in range(told.seeds)]
    Console(width=max(140, Console().width)).print(_table(rows, told.more))
    for side, chosen in rates.items():
        rich.print(f"rate of {side}: {chosen.optim.name} {chosen.optim.lr:g}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="data folder of `stretto tokenize`, or text")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--steps", type=int, default=300, help="of the ordinary and the elastic run")
    parser.add_argument("--search-steps", type=int, default=100, help="of the runs that rates are chosen by")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--more", type=float, default=3.0, help="how many times the elastic run's extra FLOPs, beside once"
    )
    parser.add_argument(
        "--memory", action="store_true", help="peak memory with all parameters trained and with routers alone"
    )
    parser.add_argument("--trainable", help=argparse.SUPPRESS)  # one of the two, in a process of its own
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-elasticise"))
    parser.add_argument("--set", action="append", default=[], help="override a key of the recipe")
    return parser.parse_args()


def _ordinary(recipe: Recipe) -> Recipe:
    off = ElasticConfig(sampler="off", anchors=recipe.elastic.anchors, anchor_share=0.0)
    return recipe.replace(elastic=off)


def _with(recipe: Recipe, seed: int, steps: int, lr: float) -> Recipe:
    train = recipe.train.replace(seed=seed, steps=steps)
    return recipe.replace(train=train, optim=recipe.optim.replace(lr=lr))


def _stage(bench: Bench, name: str, lr: float, steps: int, seed: int, **changes: Any) -> ElasticizeRecipe:
    """The stage as shipped, but for what this bench varies and its recipe's rows: continued on data of another order."""
    anchors = bench.recipe.elastic.anchors
    elastic = MixtureConfig(anchors=anchors, anchor_share=0.7, depth_share=0.0, top_k_share=0.0, width_share=0.0)
    every = {"eval_every": steps, "snapshot_every": steps, "log_every": 1}
    optim = bench.recipe.optim.replace(name=name, lr=lr, warmup_steps=max(1, steps // 10), weight_decay=0.0)
    recipe = ElasticizeRecipe(
        elastic=elastic,
        optim=optim.replace(decay_fraction=0.7, final_lr_fraction=0.05),
        train=bench.recipe.train.replace(steps=steps, seed=1000 + seed, **every),
        experts_from=0.2,
        top_k_from=0.4,
    )
    return recipe.replace(**changes)


def _search(bench: Bench, told: argparse.Namespace) -> dict[str, Recipe | ElasticizeRecipe]:
    """Each side's recipe with the best rate, by the mean loss of what the side is for."""
    chosen: dict[str, Recipe | ElasticizeRecipe] = {}
    for side, recipe, sizes in (("ordinary", _ordinary(bench.recipe), SIZES[:1]), ("born", bench.recipe, SIZES)):
        tried = {lr: _with(recipe, SEARCH_SEED, told.search_steps, lr) for lr in RATES}
        found = {lr: bench.pretrain(f"search-{side}-{lr:g}", each) for lr, each in tried.items()}
        chosen[side] = tried[min(RATES, key=lambda lr, f=found, s=sizes: _mean(f[lr]["chosen_by"], s))]  # type: ignore[misc]
    parent = f"search-ordinary-{chosen['ordinary'].optim.lr:g}"
    extra = _flops(bench, f"search-born-{chosen['born'].optim.lr:g}") - _flops(bench, parent)
    stages = [
        _for_flops(bench, lambda steps, n=name, r=lr: _stage(bench, n, r, steps, SEARCH_SEED), parent, extra)  # type: ignore[misc]
        for name, lr in CONTINUED_RATES
    ]
    names = [f"search-elasticised-{name}-{lr:g}" for name, lr in CONTINUED_RATES]
    results = [bench.elasticize(name, each, parent) for name, each in zip(names, stages, strict=True)]
    best = min(range(len(stages)), key=lambda at: _mean(results[at]["chosen_by"], SIZES))
    return chosen | {"elasticised": stages[best]}


def _for_flops(bench: Bench, make: Callable[[int], ElasticizeRecipe], parent: str, flops: float) -> ElasticizeRecipe:
    """As many steps as ``flops`` pay for, after the orders were measured."""
    model = read_checkpoint(bench.out / parent / CHECKPOINT, device=bench.ranks.device).model
    left = flops - rank_layers(model, bench.ordered_by).flops - survey(model, bench.ordered_by, side_by_side=1).flops
    steps = 1
    while _step_flops(make(steps + 1), model.config) <= left:
        steps += 1
    return make(steps)


def _step_flops(recipe: ElasticizeRecipe, config: ModelConfig) -> int:
    """Of all steps: each pass forward and backward, and the teacher's forward."""
    train, total = recipe.train, 0
    config = with_branches(config, recipe.elastic)

    def forward(subnet: Subnet) -> int:
        return count(config, executed(config, subnet)).forward_flops(train.micro_rows * train.seq_len, train.seq_len)

    taught = 1 if recipe.kd_weight or recipe.kd_final_weight else 0
    for step in range(train.steps):
        mixture = recipe.mixture_at(config, step)
        plans = Sampler(config, mixture, train.micro_rows, train.micro_batches, train.steps, train.seed).draw(step)
        total += sum(3 * forward(plan.subnet) + taught * forward(config.full()) for plan in plans)
    return total


def _flops(bench: Bench, name: str) -> float:
    return float(read_json(bench.out / name / "result.json")["flops"])


def _mean(losses: Mapping[str, float], sizes: Sequence[str]) -> float:
    return statistics.fmean(losses[size] for size in sizes)


def _seed(bench: Bench, rates: Mapping[str, Recipe | ElasticizeRecipe], seed: int, more: float) -> dict[str, Result]:
    """All runs of one seed: name -> result."""
    steps, optim = bench.recipe.train.steps, rates["elasticised"].optim
    found = {
        side: bench.pretrain(f"{side}-{seed}", _with(recipe, seed, steps, rates[side].optim.lr))
        for side, recipe in (("ordinary", _ordinary(bench.recipe)), ("born", bench.recipe))
    }
    parent, extra = f"ordinary-{seed}", found["born"]["flops"] - found["ordinary"]["flops"]
    no_anchors = MixtureConfig(
        anchors=bench.recipe.elastic.anchors, anchor_share=0.0, depth_share=0.35, top_k_share=0.35, width_share=0.25
    )
    variants: dict[str, tuple[float, dict[str, Any]]] = {
        "elasticised": (1.0, {}),
        "no teacher": (1.0, {"kd_weight": 0.0, "kd_final_weight": 0.0}),
        "no anchors": (1.0, {"elastic": no_anchors}),
        "at once": (1.0, {"experts_from": 0.0, "top_k_from": 0.0}),
        "more": (more, {}),
    }
    for name, (times, changes) in variants.items():

        def make(steps: int, c: dict[str, Any] = changes) -> ElasticizeRecipe:
            return _stage(bench, optim.name, optim.lr, steps, seed, **c)

        recipe = _for_flops(bench, make, parent, times * extra)
        found[name] = bench.elasticize(f"{name.replace(' ', '-')}-{seed}", recipe, parent)
    return found


def _table(rows: Sequence[dict[str, Result]], more: float) -> Table:
    first = rows[0]
    ratio = first["born"]["flops"] / first["ordinary"]["flops"]
    table = Table(
        title=f"{len(rows)} seeds, {first['born']['tokens'] / 1e6:.2f}M tokens; the elastic run costs {ratio:.3f} of the ordinary one"
    )
    for column in ("held-out loss", *SIZES, "FLOPs / ordinary", "tokens beside"):
        table.add_column(column)
    titles = {
        "ordinary": "ordinary, cut without training",
        "born": "elastic from the start",
        "elasticised": "ordinary, then elasticised, axis after axis",
        "at once": "  all axes at once, as shipped",
        "no teacher": "  mutant: no teacher",
        "no anchors": "  mutant: no anchors",
        "more": f"  with {more:g} times the extra FLOPs",
    }
    for name, title in titles.items():
        losses = [_interval([row[name]["measured_on"][size] for row in rows], "{:.4f}") for size in SIZES]
        own = [row[name]["flops"] + (0 if name in ("ordinary", "born") else row["ordinary"]["flops"]) for row in rows]
        cost = statistics.fmean(flops / row["ordinary"]["flops"] for flops, row in zip(own, rows, strict=True))
        extra = 0 if name in ("ordinary", "born") else statistics.fmean(row[name]["tokens"] for row in rows)
        table.add_row(title, *losses, f"{cost:.3f}", f"{extra / 1e6:.2f}M" if extra else "")
    table.add_section()
    pairs = [("elasticised", "born"), ("at once", "born")]
    pairs += [("elasticised", name) for name in ("no teacher", "no anchors", "at once")]
    for one, other in [*pairs, ("more", "born"), ("elasticised", "ordinary"), ("born", "ordinary")]:
        gaps = [[row[one]["measured_on"][size] - row[other]["measured_on"][size] for row in rows] for size in SIZES]
        table.add_row(f"{one} − {other}", *(_interval(gap, "{:+.4f}") for gap in gaps))
    return table


def _interval(values: Sequence[float], form: str) -> str:
    """Mean, and half of its 95 % interval by Student's t over the seeds."""
    mean = form.format(statistics.fmean(values))
    if len(values) < 2:
        return mean
    return f"{mean} ± {half_width(values):.4f}"


def _memory(bench: Bench, told: argparse.Namespace) -> None:
    """Peak memory of a few steps with everything trained, and with routers, norms and biases alone; a process each."""
    parent = bench.out / "memory" / "parent"
    if told.trainable is not None:
        recipe = _stage(bench, "adamw", 1e-4, 3, 0, trainable=told.trainable)
        model = read_checkpoint(parent, device=bench.ranks.device).model
        complete = recipe.for_network(model.config, bench.recipe.elastic.anchors)
        elasticize(complete, bench.job(bench.out / "memory" / told.trainable, complete), lambda: model)
        sys.stdout.write(f"{process_peak_bytes()}\n")
        return
    remove(parent.parent)
    config = bench.recipe.model.replace(**LARGE, widths=())
    write_checkpoint(parent, build(config, 0), config)
    num_params = count(config, config.full()).total_params
    peaks = {}
    for trainable in ("all", "routers"):
        command = [sys.executable, "-m", "bench.elasticise", *sys.argv[1:], "--trainable", trainable]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        peaks[trainable] = int(done.stdout.splitlines()[-1])
        rich.print(f"{num_params / 1e6:.0f}M parameters, trainable {trainable}: peak {peaks[trainable] / 1e6:,.0f} MB")
    saved = peaks["all"] - peaks["routers"]
    rich.print(f"saved {saved / 1e6:,.0f} MB, {saved / num_params:.1f} bytes a parameter")


if __name__ == "__main__":
    main()
