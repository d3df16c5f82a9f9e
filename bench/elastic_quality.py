"""Quality of elastic training: losses of an elastic network, of its sizes and of healed sizes, each beside its control.

    python -m bench.elastic_quality                        small version, on text of this Python's library
    python -m bench.elastic_quality --data FOLDER --steps 3000 --seeds 3

Each seed trains four networks on the same tokens: an ordinary one, an elastic one (``anchored``), an elastic one with ERNIE 5.0's
sampler, and the shape of the corner alone (scratch control). Then the corner is extracted from the elastic network, and pruned in the
same way from the ordinary one. Both are healed with shares of the scratch control's FLOPs. The table has means over seeds and aims.
Every run writes a result file in --out and is not repeated. Fails if --out has results of another recipe.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich
from rich.table import Table

from bench.common.measure import bench_parser, table, wide_console
from stretto.api.train import held_out, open_loader
from stretto.base.config import read_recipe
from stretto.base.paths import CHECKPOINT, read_json, write_json
from stretto.base.track import Tracker
from stretto.data.demo_text import demo_documents
from stretto.evals.loss import evaluate, held_out_losses
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.elastic import extract
from stretto.model.parallel import Ranks, in_memory, join
from stretto.model.spec import ModelConfig, count, extracted_config
from stretto.train.loop import Job, heal, pretrain
from stretto.train.prepare import learn_tokenizer, prepare_data, tokenise_documents
from stretto.train.recipe import ElasticConfig, HealRecipe, Recipe
from stretto.train.run_folder import RunInfo

BUDGETS = (0.015, 0.03, 0.06)
"""Healing budgets, as shares of the scratch control's FLOPs. The aim is parity with the control at the largest."""
RECIPE = Path(__file__).with_name("elastic_quality.toml")


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings shared by all runs."""

    recipe: Recipe
    info: RunInfo
    out: Path
    ranks: Ranks

    def scratch(self) -> ModelConfig:
        network = self.recipe.network()
        return extracted_config(network, self.recipe.elastic.anchors["corner"].of(network))


def main() -> None:
    arguments = _parse()
    recipe = read_recipe(arguments.recipe, Recipe, arguments.set + [f"train.steps={arguments.steps}"])
    data = arguments.data or own_text(arguments.out, recipe)
    mixture, tokenizer, data_hash = prepare_data(arguments.out, [str(data)], None, recipe.model.vocab_size)
    info = RunInfo(stage="pretrain", recipe=recipe, data=mixture, data_hash=data_hash, tokenizer=tokenizer)
    bench = Bench(recipe, info, arguments.out, join(arguments.device))
    rows = [_seed(bench, seed) for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)]
    wide_console().print(_table(bench, rows))


def _parse() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--data", type=Path, help="data folder of `stretto tokenize`, or text")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0, help="several processes can run different seeds")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-quality"))
    parser.add_argument("--set", action="append", default=[], help="override a key of the recipe")
    return parser.parse_args()


def own_text(out: Path, recipe: Recipe) -> Path:
    folder = out / "data"
    if not (folder / "data.json").is_file():
        tokenizer = learn_tokenizer(demo_documents(), recipe.model.vocab_size)
        tokenise_documents({"train": demo_documents()}, folder, tokenizer)
    return folder


def _seed(bench: Bench, seed: int) -> dict[str, Any]:
    """Results of all runs of one seed, by name."""
    elastic = bench.recipe.elastic
    off = ElasticConfig(sampler="off", anchors=elastic.anchors, anchor_share=0.0)
    ernie = elastic.replace(sampler="ernie", joint=False, starts_at=0.0, ramp_fraction=0.1, rank_layers_at=())
    alone = ElasticConfig(sampler="off", anchor_share=0.0)
    shapes = {
        "ordinary": bench.recipe.replace(elastic=off),
        "scratch": bench.recipe.replace(model=bench.scratch(), elastic=alone),
        "anchored": bench.recipe,
        "ernie": bench.recipe.replace(elastic=ernie),
    }
    runs = {name: _seeded(recipe, seed) for name, recipe in shapes.items()}
    found = {
        name: _cached(bench, f"{name}-{seed}", recipe, lambda folder, r=recipe: _pretrain(bench, folder, r))
        for name, recipe in runs.items()
    }
    for parent in ("anchored", "ordinary"):
        for budget in BUDGETS:
            name = f"heal-{parent}-{budget:g}"
            found[name] = _cached(
                bench,
                f"{name}-{seed}",
                runs[parent],
                lambda folder, p=parent, b=budget: _heal(
                    bench, folder, runs[p], bench.out / f"{p}-{seed}", b * found["scratch"]["flops"], seed
                ),
            )
    return found


def _cached(bench: Bench, name: str, recipe: Recipe, work: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    folder = bench.out / name
    settings = json.loads(recipe.model_dump_json())
    if (folder / "result.json").is_file():
        done = read_json(folder / "result.json")
        assert done["recipe"] == settings, f"{folder} has results of another recipe; choose another --out"
        return done
    rich.print(f"[bold]{name}")
    result = work(folder) | {"recipe": settings}
    write_json(folder / "result.json", result)
    return result


def _seeded(recipe: Recipe, seed: int) -> Recipe:
    return recipe.replace(train=recipe.train.replace(seed=seed))


def _pretrain(bench: Bench, folder: Path, recipe: Recipe) -> dict[str, Any]:
    ranks = bench.ranks
    batches = held_out(bench.info, recipe.train, ranks)
    job = Job(
        folder,
        open_loader(bench.info, recipe.train, ranks),
        batches,
        bench.info.data_hash,
        ranks,
        tracker=lambda step: Tracker(folder, first_step=step, tensorboard=False),
        resume=(folder / "snapshots").is_dir(),
    )
    trained = pretrain(recipe, job)
    write_checkpoint(folder / CHECKPOINT, trained.model, trained.model.config)
    receipt = trained.meter.receipt()
    found = held_out_losses(trained.model, recipe.elastic.anchors, batches, ranks)
    losses = {f"loss/{name}": loss for name, loss in found.items()}
    return {"losses": losses, "flops": receipt.flops, "tokens": receipt.tokens, "wall_s": receipt.wall_s}


def _heal(bench: Bench, folder: Path, recipe: Recipe, parent: Path, flops: float, seed: int) -> dict[str, Any]:
    """Extract the corner of ``parent`` and heal it for ``flops``: by cross-entropy alone, and with KL to the parent."""
    ranks = bench.ranks
    batches = held_out(bench.info, recipe.train, ranks)
    corner = recipe.elastic.anchors["corner"]
    result: dict[str, Any] = {"flops": 0}
    for label, ce_weight in (("ce", 1.0), ("kl", 0.5)):
        big = read_checkpoint(parent / CHECKPOINT, device=ranks.device).model
        student = extract(big, corner.of(big.config))
        healing = _healing(recipe, student.config, big.config, ce_weight, flops, seed + 100)
        train = healing.train
        info = bench.info.replace(stage="heal", recipe=healing)
        job = Job(folder / label, open_loader(info, train, ranks), (), info.data_hash, ranks)
        done = heal(healing, job, in_memory(student), in_memory(big))
        receipt = done.meter.receipt()
        full = done.model.config.full()
        result |= {
            label: evaluate(done.model, full, batches).nll,
            f"{label}_flops": receipt.flops,
            f"{label}_tokens": receipt.tokens,
        }
    return result


def _healing(
    recipe: Recipe, student: ModelConfig, teacher: ModelConfig, ce_weight: float, flops: float, seed: int
) -> HealRecipe:
    """A recipe of as many steps as ``flops`` allow, at least one."""
    train = recipe.train
    length = train.seq_len
    tokens = train.rows * length
    a_step = 3 * count(student, student.full()).forward_flops(tokens, length)
    if ce_weight < 1:
        a_step += count(teacher, teacher.full()).forward_flops(tokens, length)
    steps = max(1, int(flops / a_step))
    loop = train.replace(
        steps=steps, seed=seed, eval_every=steps, snapshot_every=steps, micro_batches=1, rows=train.rows
    )
    optim = recipe.optim.replace(
        lr=recipe.optim.lr * 0.2, warmup_steps=min(5, steps), decay_fraction=1.0, final_lr_fraction=0.0
    )
    return HealRecipe(optim=optim, train=loop, ce_weight=ce_weight)


def _table(bench: Bench, rows: Sequence[dict[str, Any]]) -> Table:
    network = bench.recipe.network()
    full = count(network, network.full())
    small = count(network, bench.recipe.elastic.anchors["corner"].of(network))
    title = (
        f"{full.total_params / 1e6:.2f}M total, {full.active_params / 1e6:.2f}M active; corner "
        f"{small.total_params / full.total_params:.1%} and {small.active_params / full.active_params:.1%}; "
        f"{rows[0]['anchored']['tokens'] / 1e6:.2f}M tokens, {len(rows)} seeds"
    )
    shown = table(title, "loss or difference, nats", "mean", "lowest", "highest", "aim")

    def loss(run: str, name: str) -> list[float]:
        return [row[run]["losses"][f"loss/{name}"] for row in rows]

    def add(text: str, values: Sequence[float], aim: str, form: str = "{:+.4f}") -> None:
        summary = (statistics.fmean(values), min(values), max(values))
        shown.add_row(text, *(form.format(value) for value in summary), aim)

    def minus(left: Sequence[float], right: Sequence[float]) -> list[float]:
        return [a - b for a, b in zip(left, right, strict=True)]

    scratch = loss("scratch", "full")
    for run in ("ordinary", "anchored", "ernie"):
        add(f"loss of {run}, full", loss(run, "full"), "", "{:.4f}")
        add(f"loss of {run}, corner", loss(run, "corner"), "", "{:.4f}")
    add("loss of the corner's shape from scratch", scratch, "", "{:.4f}")
    add("tax: anchored full − ordinary full", minus(loss("anchored", "full"), loss("ordinary", "full")), "≤ +0.02")
    add("corner zero-shot − scratch", minus(loss("anchored", "corner"), scratch), "≤ +0.03")
    for budget in BUDGETS:
        for parent in ("anchored", "ordinary"):
            for label in ("ce", "kl"):
                healed = [row[f"heal-{parent}-{budget:g}"][label] for row in rows]
                add(
                    f"{parent} corner healed ({label}, {budget:.1%} of scratch FLOPs) − scratch",
                    minus(healed, scratch),
                    "≤ 0 at 6 %" if parent == "anchored" else "",
                )
    for sizes in (1, 2, 4):
        family = [_family_cost(row, sizes) for row in rows]
        add(f"FLOPs of {sizes} healed sizes and their parent / ordinary", family, "≤ 1.24 at 4", "{:.3f}")
    add("anchored full − ernie full", minus(loss("anchored", "full"), loss("ernie", "full")), "≤ 0")
    add("anchored corner − ernie corner", minus(loss("anchored", "corner"), loss("ernie", "corner")), "< 0")
    return shown


def _family_cost(row: dict[str, Any], sizes: int) -> float:
    """FLOPs of the elastic network and ``sizes − 1`` healed corners (its full size is the first), over the FLOPs of the ordinary
    network. Healing counts at the largest budget."""
    healed = row[f"heal-anchored-{BUDGETS[-1]:g}"]
    return (row["anchored"]["flops"] + (sizes - 1) * healed["kl_flops"]) / row["ordinary"]["flops"]


if __name__ == "__main__":
    main()
