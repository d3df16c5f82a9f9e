"""Which half of the experts to keep: an ordinary network cut by several orders, zero-shot and after equal healing.

    python -m bench.keep_half                                       the small version, on text of this Python's library
    python -m bench.keep_half --data FOLDER --steps 3000 --heal-steps 200 --seeds 5

For each seed an ordinary network is trained; then half of the experts of every layer are kept by: removal (ours), reap (ours:
the network's own gates, super experts protected), REAP as its published code computes it (a softmax over the router's logits,
the largest of them, renormalised; no selection bias), frequency, and several random draws. Each is healed with the same tokens
at each of --rates; the rate is chosen on one part of the held-out text and the loss told on another. Orders are found on
training text. Differences are paired over seeds; intervals are Student's, 95 %. Exit code 1: ours is neither best nor tied.

``--break`` swaps ours for its reverse, which must fail.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich
import torch
from rich.table import Table
from scipy import stats
from torch import Tensor

from bench.common.measure import wide_console
from bench.elastic_quality import RECIPE, own_text
from stretto.apps.data import prepare_data
from stretto.base.config import read_recipe
from stretto.base.paths import CHECKPOINT, read_json, remove, write_json
from stretto.data.loader import Loader, Mixture, eval_batches
from stretto.evals.loss import EvalBatch, evaluate
from stretto.evals.order import expert_orders, survey
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.elastic import extract
from stretto.model.parallel import Ranks, join
from stretto.model.transformer import MoeLayer, Transformer
from stretto.ops.grouped import Slots, experts
from stretto.train.loop import Job, heal, pretrain
from stretto.train.recipe import ElasticConfig, HealRecipe, Recipe

OURS = "removal"
Orders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Bench:
    """What all seeds share."""

    recipe: Recipe
    mixture: Mixture
    data_hash: str
    out: Path
    ranks: Ranks
    heal_steps: int
    rates: tuple[float, ...]
    num_random: int
    broken: bool

    def loader(self, seed: int, steps_apart: int = 0) -> Loader:
        train = self.recipe.train
        return Loader(self.mixture.open(), self.mixture.weights, train.rows, train.seq_len, seed + steps_apart)

    def held_out(self, num: int) -> tuple[list[EvalBatch], list[EvalBatch]]:
        """Two parts of the held-out text without a row in common: to choose on, and to tell."""
        train, parts = self.recipe.train, self.mixture.open("val")
        made = [each for part in parts for each in eval_batches(part, train.rows, train.seq_len, 2 * num)]
        batches = [EvalBatch.of(batch, "cpu") for batch in made]
        return batches[::2], batches[1::2]


def main() -> None:
    arguments = _parse()
    recipe = read_recipe(arguments.recipe, Recipe, [*arguments.set, f"train.steps={arguments.steps}"])
    recipe = recipe.replace(elastic=ElasticConfig(sampler="off", anchor_share=0.0))
    data = arguments.data or own_text(arguments.out, recipe)
    mixture, _, data_hash = prepare_data(arguments.out, [str(data)], None, recipe.model.vocab_size)
    bench = Bench(
        recipe, mixture, data_hash, arguments.out, join("cpu"), arguments.heal_steps, tuple(arguments.rates),
        arguments.random, arguments.break_,
    )  # fmt: skip
    rows = [_seed(bench, seed) for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)]
    sys.exit(_show(bench, rows))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="data folder of `stretto tokenize`, or text")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="of the network and its training")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--heal-steps", type=int, default=10)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3])
    parser.add_argument("--random", type=int, default=3, help="random draws a seed")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0, help="seeds can be run by several processes at once")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-keep-half"))
    parser.add_argument("--set", action="append", default=[], help="override a key of the recipe")
    parser.add_argument("--break", dest="break_", action="store_true", help="keep the half that ours would drop")
    return parser.parse_args()


def _seed(bench: Bench, seed: int) -> dict[str, dict[str, float]]:
    """By order: losses zero-shot and healed, and the rate; ``full`` is the uncut network. Kept in --out."""
    name = f"seed-{seed}-broken.json" if bench.broken else f"seed-{seed}.json"
    told = {
        "recipe": bench.recipe.model_dump(mode="json"),
        "heal": [bench.heal_steps, *bench.rates],
        "data": bench.data_hash,
    }
    if (bench.out / name).is_file():
        kept = read_json(bench.out / name)
        assert kept["told"] == told, f"{bench.out / name} is of other settings; choose another --out"
        return kept["found"]
    model = _ordinary(bench, seed)
    choosing, telling = bench.held_out(4)
    full = model.config.full()
    found = {"full": {"zero-shot": evaluate(model, full, telling).nll}}
    for order, ranked in _orders(bench, model, seed).items():
        rich.print(f"seed {seed}, {order}")
        found[order] = _kept(bench, model, ranked, seed, choosing, telling)
    write_json(bench.out / name, {"told": told, "found": found})
    return found


def _ordinary(bench: Bench, seed: int) -> Transformer:
    """The parent of this seed: trained once, whatever is asked of it later."""
    folder = bench.out / f"ordinary-{seed}"
    recipe = bench.recipe.replace(train=bench.recipe.train.replace(seed=seed))
    if not (folder / CHECKPOINT).is_dir():
        train = recipe.train
        loader = Loader(bench.mixture.open(), bench.mixture.weights, train.micro_rows, train.seq_len, seed)
        resume = (folder / "snapshots").is_dir()
        trained = pretrain(recipe, Job(folder, loader, (), bench.data_hash, bench.ranks, resume=resume))
        write_checkpoint(folder / CHECKPOINT, trained.model, trained.model.config)
    return read_checkpoint(folder / CHECKPOINT).model


def _orders(bench: Bench, model: Transformer, seed: int) -> dict[str, Orders]:
    """All orders, found on the same 16 batches of training text that no step saw in this order."""
    loader = bench.loader(seed, steps_apart=1000)
    batches = [EvalBatch.of(loader.next(), "cpu") for _ in range(16)]
    found = survey(model, batches, removal=True)
    ours = expert_orders(model.config, found, "removal")
    orders = {
        OURS: tuple(order[::-1] for order in ours) if bench.broken else ours,
        "reap": expert_orders(model.config, found, "reap"),
        "reap as published": _published(model, batches),
        "frequency": expert_orders(model.config, found, "frequency"),
    }
    rng = random.Random(seed)
    for draw in range(bench.num_random):
        orders[f"random {draw}"] = tuple(tuple(rng.sample(order, len(order))) for order in ours)
    return orders


@torch.no_grad()
def _published(model: Transformer, batches: Sequence[EvalBatch]) -> Orders:
    """REAP as CerebrasResearch/reap computes it: what a layer is given, routed by the largest logits, weighted by their softmax,
    renormalised over the chosen; mean over the tokens of an expert."""
    layers = [block.mlp for block in model.blocks if isinstance(block.mlp, MoeLayer)]
    sums = [torch.zeros(2, len(layer.gate), dtype=torch.float64) for layer in layers]
    real_N = torch.empty(0)

    def observe(layer: MoeLayer, arguments: tuple[Any, ...]) -> None:
        x_ND, top_k = arguments[0].flatten(0, 1), arguments[2]
        scores_NE = (x_ND.float() @ layer.gate.float().T).softmax(-1)
        gates_NK, chosen_NK = scores_NE.topk(top_k, dim=-1)
        gates_NK = gates_NK / gates_NK.sum(-1, keepdim=True)

        def note(slots: Slots, y_PD: Tensor) -> None:
            expert_P, real_P = chosen_NK.reshape(-1)[slots.order_P], real_N[slots.token_P]
            sums[layer.row][0].index_add_(0, expert_P, (y_PD.norm(dim=-1) * real_P).double())
            sums[layer.row][1].index_add_(0, expert_P, real_P.double())

        experts(x_ND, chosen_NK, gates_NK, layer.gate_up, layer.down, seen=note)

    hooks = [layer.register_forward_pre_hook(observe) for layer in layers]
    for batch in batches:
        real_N = batch.real_BT.reshape(-1)
        model(batch.ids_BT, model.config.full(), batch.ctx)
    for hook in hooks:
        hook.remove()
    means = [(weight / num.clamp_min(1)).tolist() for weight, num in sums]
    return tuple(tuple(sorted(range(len(mean)), key=lambda expert: -mean[expert])) for mean in means)


def _kept(
    bench: Bench,
    model: Transformer,
    ranked: Orders,
    seed: int,
    choosing: Sequence[EvalBatch],
    telling: Sequence[EvalBatch],
) -> dict[str, float]:
    config = model.config.replace(expert_order=ranked)
    parent = Transformer(config)
    parent.load_state_dict(model.state_dict(), assign=True)
    half = config.subnet(experts=config.num_experts // 2)
    healed: dict[float, tuple[float, float]] = {}
    for rate in bench.rates:
        train = bench.recipe.train.replace(
            steps=bench.heal_steps,
            seed=seed + 500,
            eval_every=bench.heal_steps,
            snapshot_every=bench.heal_steps,
            micro_batches=1,
        )
        warmup = max(1, bench.heal_steps // 10)
        optim = bench.recipe.optim.replace(lr=rate, warmup_steps=warmup, decay_fraction=1.0, final_lr_fraction=0.0)
        recipe = HealRecipe(optim=optim, train=train, ce_weight=1.0)
        folder = bench.out / f"heal-{seed}"
        remove(folder)
        done = heal(
            recipe, Job(folder, bench.loader(seed + 500), (), bench.data_hash, bench.ranks), extract(parent, half), None
        )
        own = done.model.config.full()
        healed[rate] = evaluate(done.model, own, choosing).nll, evaluate(done.model, own, telling).nll
    best = min(healed, key=lambda rate: healed[rate][0])
    return {"zero-shot": evaluate(parent, half, telling).nll, "healed": healed[best][1], "rate": best}


def _show(bench: Bench, rows: Sequence[dict[str, dict[str, float]]]) -> int:
    """Print the table; 1 where ours is neither best nor tied in one of the columns."""
    names = [name for name in rows[0] if name != "full" and not name.startswith("random")]
    randoms = [name for name in rows[0] if name.startswith("random")]
    train = bench.recipe.train
    tokens = train.rows * train.seq_len
    table = Table(
        title=f"half of {bench.recipe.model.num_experts} experts, top-{bench.recipe.model.top_k}; {train.steps * tokens / 1e6:.2f}M tokens, "
        f"healed with {bench.heal_steps * tokens / 1e6:.2f}M; {len(rows)} seeds; uncut {statistics.fmean(row['full']['zero-shot'] for row in rows):.4f}"
    )
    for column in ("kept by", "zero-shot", "minus ours", "healed", "minus ours", "rates"):
        table.add_column(column)
    failed = False
    for name in [*names, "random (mean of draws)"]:
        drawn = randoms if name.startswith("random") else [name]
        cells = [name]
        for column in ("zero-shot", "healed"):
            losses = [statistics.fmean(row[each][column] for each in drawn) for row in rows]
            ours = [row[OURS][column] for row in rows]
            low, mean, high = _interval([loss - own for loss, own in zip(losses, ours, strict=True)])
            failed |= high < 0
            cells += [
                f"{statistics.fmean(losses):.4f}",
                "" if name == OURS else f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]",
            ]
        rates = sorted({row[each]["rate"] for row in rows for each in drawn})
        table.add_row(*cells, ", ".join(f"{rate:g}" for rate in rates))
    wide_console().print(table)
    rich.print(f"ours ({OURS}): {'beaten' if failed else 'best or tied'}")
    return int(failed)


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Student's 95 % interval of the mean: low, mean, high; without bounds for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return -torch.inf, mean, torch.inf
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return mean - half, mean, mean + half


if __name__ == "__main__":
    main()
