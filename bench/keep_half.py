"""Criteria for ranking experts: loss of a network cut to half of its experts, zero-shot and after equal healing.

    python -m bench.keep_half                                       small version, on text of this Python's library
    python -m bench.keep_half --data FOLDER --steps 3000 --heal-steps 200 --seeds 5

Each seed trains an ordinary network. Then each criterion ranks the experts of every layer, and the better half stays: reap, removal
and frequency (`stretto adopt --order`), REAP as its published code computes it (top-k of the router's logits without selection bias,
weighted by a softmax, mean over tokens), and several random orders. Each half is healed on the same tokens at each of --rates. One
part of the held-out text chooses the rate, another gives the reported loss. Criteria are computed on training text.
Differences are paired over seeds; intervals are Student's 95 % confidence intervals.

Fails (exit code 1) if another criterion is significantly better than the default of `stretto adopt`. ``--break`` reverses the
default's order and must fail. Results are cached in --out by order, so a new criterion alone is measured.
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
from torch import Tensor

from bench.common.measure import bench_parser, half_width, table, wide_console
from bench.elastic_quality import RECIPE, own_text
from stretto.api.adopt import AdoptOptions
from stretto.base.config import read_recipe
from stretto.base.paths import CHECKPOINT, read_json, remove, write_json
from stretto.data.loader import Loader, Mixture, eval_batches
from stretto.evals.loss import EvalBatch, evaluate
from stretto.evals.order import expert_order, expert_orders, survey
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.elastic import extract
from stretto.model.parallel import Ranks, in_memory, join
from stretto.model.transformer import MoeLayer, Transformer
from stretto.ops.grouped import Slots, experts
from stretto.train.loop import Job, heal, pretrain
from stretto.train.prepare import prepare_data
from stretto.train.recipe import ElasticConfig, HealRecipe, Recipe

OURS: str = AdoptOptions.model_fields["order"].default
HELD_OUT = 24
"""Batches in each of the two parts of the held-out text; fewer where the text has fewer."""
Orders = tuple[tuple[int, ...], ...]
"""By MoE layer, its experts, best first."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings shared by all seeds."""

    recipe: Recipe
    mixture: Mixture
    data_hash: str
    out: Path
    ranks: Ranks
    heal_steps: int
    rates: tuple[float, ...]
    num_random: int
    broken: bool

    def loader(self, seed: int) -> Loader:
        train = self.recipe.train
        return Loader(self.mixture.open(), self.mixture.weights, train.rows, train.seq_len, seed)

    def held_out(self) -> tuple[list[EvalBatch], list[EvalBatch]]:
        """Two disjoint parts of the held-out text: for the choice of the rate, and for the reported losses."""
        train, parts = self.recipe.train, self.mixture.open("val")
        made = [each for part in parts for each in eval_batches(part, train.rows, train.seq_len, 2 * HELD_OUT)]
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
    parser = bench_parser(__doc__)
    parser.add_argument("--data", type=Path, help="data folder of `stretto tokenize`, or text")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="network and training")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--heal-steps", type=int, default=10, help="0: zero-shot only")
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3])
    parser.add_argument("--random", type=int, default=3, help="random orders per seed")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0, help="several processes can run different seeds")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-keep-half"))
    parser.add_argument("--set", action="append", default=[], help="override a key of the recipe")
    parser.add_argument("--break", dest="break_", action="store_true", help="reverse the default order; must fail")
    return parser.parse_args()


def _seed(bench: Bench, seed: int) -> dict[str, dict[str, float]]:
    """By criterion: losses zero-shot and healed, and the rate; ``full`` is the uncut network. Results are cached by order."""
    path = bench.out / f"seed-{seed}.json"
    settings = {
        "recipe": bench.recipe.model_dump(mode="json"),
        "heal": [bench.heal_steps, *bench.rates],
        "data": bench.data_hash,
        "held_out": HELD_OUT,
    }
    cache: dict[str, Any] = read_json(path) if path.is_file() else {"settings": settings, "results": []}
    assert cache["settings"] == settings, f"{path} has results of other settings; choose another --out"
    measured = {tuple(map(tuple, each["order"])): each["losses"] for each in cache["results"]}
    model = _ordinary(bench, seed)
    choosing, reporting = bench.held_out()
    found = {"full": {"zero-shot": evaluate(model, model.config.full(), reporting).nll}}
    for name, order in _orders(bench, model, seed).items():
        if order not in measured:
            rich.print(f"seed {seed}, {name}")
            measured[order] = _losses(bench, model, order, seed, choosing, reporting)
            cache["results"] = [{"order": each, "losses": losses} for each, losses in measured.items()]
            write_json(path, cache)
        found[name] = measured[order]
    return found


def _ordinary(bench: Bench, seed: int) -> Transformer:
    """The trained network of this seed, trained at most once."""
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
    """All orders, computed on the same 16 batches of training text, in a row order that no training step used."""
    loader = bench.loader(seed + 1000)
    batches = [EvalBatch.of(loader.next(), "cpu") for _ in range(16)]
    found = survey(model, batches, removal=True)
    orders = {
        "reap": expert_orders(model.config, found, "reap"),
        "removal": expert_orders(model.config, found, "removal"),
        "REAP as published": _published_orders(model, batches),
        "frequency": expert_orders(model.config, found, "frequency"),
    }
    if bench.broken:
        orders[OURS] = tuple(order[::-1] for order in orders[OURS])
    rng = random.Random(seed)
    for draw in range(bench.num_random):
        orders[f"random {draw}"] = tuple(tuple(rng.sample(sorted(order), len(order))) for order in orders[OURS])
    return orders


@torch.no_grad()
def _published_orders(model: Transformer, batches: Sequence[EvalBatch]) -> Orders:
    """Experts by falling `_published_saliency` of their layer's inputs."""
    layers = [block.mlp for block in model.blocks if isinstance(block.mlp, MoeLayer)]
    inputs: dict[int, list[Tensor]] = {layer.row: [] for layer in layers}
    for batch in batches:
        real_N = batch.real_BT.reshape(-1)

        def note(layer: MoeLayer, arguments: tuple[Any, ...], real_N: Tensor = real_N) -> None:
            inputs[layer.row].append(arguments[0].flatten(0, 1)[real_N])

        hooks = [layer.register_forward_pre_hook(note) for layer in layers]
        model(batch.ids_BT, model.config.full(), batch.ctx)
        for hook in hooks:
            hook.remove()
    return tuple(
        expert_order(_published_saliency(layer, torch.cat(inputs[layer.row])).tolist(), ()) for layer in layers
    )


def _published_saliency(layer: MoeLayer, x_ND: Tensor) -> Tensor:
    """Saliency [E] as CerebrasResearch/reap computes it (2510.13999): gate times norm of the output, mean over an expert's tokens.

    Experts are the top-k of the router's logits; gates are a softmax of all logits, renormalised over the chosen.
    """
    scores_NE = (x_ND.float() @ layer.gate.float().T).softmax(-1)
    gates_NK, chosen_NK = scores_NE.topk(layer.config.top_k_by_layer[layer.row], dim=-1)
    gates_NK = gates_NK / gates_NK.sum(-1, keepdim=True)
    outputs: list[Tensor] = []

    def note(slots: Slots, y_PD: Tensor) -> None:
        outputs.append(y_PD[slots.place_S].view(*chosen_NK.shape, -1))

    experts(x_ND, chosen_NK, torch.ones_like(gates_NK), layer.experts, note)
    norm_NK = outputs[0].norm(dim=-1)
    num_experts = len(layer.gate)
    sum_E = torch.zeros(num_experts, dtype=torch.float64)
    sum_E.index_add_(0, chosen_NK.flatten(), (gates_NK * norm_NK).flatten().double())
    return sum_E / torch.bincount(chosen_NK.flatten(), minlength=num_experts).clamp_min(1)


def _losses(
    bench: Bench,
    model: Transformer,
    ranked: Orders,
    seed: int,
    choosing: Sequence[EvalBatch],
    reporting: Sequence[EvalBatch],
) -> dict[str, float]:
    """Losses of the better half by ``ranked``, and the rate at which the healed one is best on ``choosing``."""
    config = model.config.replace(expert_order=ranked)
    parent = Transformer(config)
    parent.load_state_dict(model.state_dict(), assign=True)
    half = config.subnet(experts=config.num_experts // 2)
    healed: dict[float, tuple[float, float]] = {}
    for rate in bench.rates if bench.heal_steps else ():
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
            recipe,
            Job(folder, bench.loader(seed + 500), (), bench.data_hash, bench.ranks),
            in_memory(extract(parent, half)),
            None,
        )
        own = done.model.config.full()
        healed[rate] = evaluate(done.model, own, choosing).nll, evaluate(done.model, own, reporting).nll
    found = {"zero-shot": evaluate(parent, half, reporting).nll}
    if healed:
        best = min(healed, key=lambda rate: healed[rate][0])
        found |= {"healed": healed[best][1], "rate": best}
    return found


def _show(bench: Bench, rows: Sequence[dict[str, dict[str, float]]]) -> int:
    """Print the table. Returns 1 if another criterion is significantly better than the default in a column."""
    names = [name for name in rows[0] if name != "full" and not name.startswith("random")]
    randoms = [name for name in rows[0] if name.startswith("random")]
    model, train = bench.recipe.model, bench.recipe.train
    tokens = train.rows * train.seq_len
    healed = f", healed on {bench.heal_steps * tokens / 1e6:.2f}M" if bench.heal_steps else ""
    uncut = statistics.fmean(row["full"]["zero-shot"] for row in rows)
    title = (
        f"loss in nats, half of {model.num_experts} experts, top-{model.top_k}; trained on {train.steps * tokens / 1e6:.2f}M tokens"
        f"{healed}; {len(rows)} seeds; uncut {uncut:.4f}"
    )
    columns = ["zero-shot", "healed"] if bench.heal_steps else ["zero-shot"]
    differences = [heading for column in columns for heading in (column, f"minus {OURS}")]
    shown = table(title, "criterion", *differences, "rates")
    better = set()
    for name in [*names, *(["random (mean of draws)"] if randoms else [])]:
        drawn = randoms if name.startswith("random") else [name]
        cells = [name]
        for column in columns:
            losses = [statistics.fmean(row[each][column] for each in drawn) for row in rows]
            ours = [row[OURS][column] for row in rows]
            low, mean, high = _interval([loss - own for loss, own in zip(losses, ours, strict=True)])
            if high < 0:
                better.add(name)
            cells.append(f"{statistics.fmean(losses):.4f}")
            cells.append("" if name == OURS else f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]")
        rates = sorted({row[each]["rate"] for row in rows for each in drawn if "rate" in row[each]})
        shown.add_row(*cells, ", ".join(f"{rate:g}" for rate in rates))
    wide_console().print(shown)
    verdict = f"significantly worse than {', '.join(sorted(better))}" if better else "best or tied"
    rich.print(f"default criterion ({OURS}): {verdict}")
    return int(bool(better))


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Student's 95 % confidence interval of the mean: low, mean, high; infinite for a single value."""
    mean, half = statistics.fmean(values), half_width(values)
    return mean - half, mean, mean + half


if __name__ == "__main__":
    main()
