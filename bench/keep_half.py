"""Which half of the experts to keep: an ordinary network cut by several orders, zero-shot and after equal healing.

    python -m bench.keep_half                                       the small version, on text of this Python's library
    python -m bench.keep_half --data FOLDER --steps 3000 --heal-steps 200 --seeds 5
    python -m bench.keep_half --cost                                what measuring the orders costs, on random networks

For each seed an ordinary network is trained; then half of the experts of every layer are kept by each order: reap, removal and
frequency (`adopt`'s), removal of each expert by itself, REAP as its published code computes it (the largest of the router's logits
without a selection bias, weighted by a softmax; mean over tokens), the same by the network's own choice and gates, that summed over
tokens, and several random draws. Each is healed with the same tokens at each of --rates; the rate is chosen on one part of the
held-out text and the loss told on another. Orders are found on training text, or on --calibration: what a network is cut by is
seldom what it is used for. Differences are paired over seeds; intervals are Student's, 95 %. Exit code 1: another order beats ours.

What was measured is kept by order in --out: with an order added, only that one is measured. ``--break`` swaps ours for its
reverse, which must fail.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import rich
import torch
from rich.table import Table
from torch import Tensor

from bench.common.measure import half_width, wide_console
from bench.elastic_quality import RECIPE, own_text
from stretto.api.adopt import AdoptOptions
from stretto.base.config import read_recipe
from stretto.base.paths import CHECKPOINT, read_json, remove, write_json
from stretto.data.loader import Loader, Mixture, eval_batches
from stretto.evals.loss import EvalBatch, evaluate
from stretto.evals.order import expert_order, expert_orders, survey
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.elastic import extract
from stretto.model.parallel import Ranks, join
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, MoeLayer, Transformer, build
from stretto.ops.grouped import Slots, experts
from stretto.ops.operators import Routes
from stretto.train.loop import Job, heal, pretrain
from stretto.train.prepare import prepare_data
from stretto.train.recipe import ElasticConfig, HealRecipe, Recipe

OURS: str = AdoptOptions.model_fields["order"].default
HELD_OUT = 24
"""Batches of held-out text to choose on, and as many to tell; fewer where the text has fewer."""
Orders = tuple[tuple[int, ...], ...]
COST_SHAPE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 1024, "num_layers": 1, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128,
    "expert_intermediate_size": 384, "max_positions": 1024,
}  # fmt: skip
"""Of the network whose measuring is timed: experts a third as wide as Qwen3-30B-A3B's layers are, each way."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all seeds share."""

    recipe: Recipe
    mixture: Mixture
    calibration: Mixture
    """What orders are found on."""
    data_hash: str
    out: Path
    ranks: Ranks
    heal_steps: int
    rates: tuple[float, ...]
    num_random: int
    broken: bool

    def loader(self, mixture: Mixture, seed: int) -> Loader:
        train = self.recipe.train
        return Loader(mixture.open(), mixture.weights, train.rows, train.seq_len, seed)

    def held_out(self) -> tuple[list[EvalBatch], list[EvalBatch]]:
        """Two parts of the held-out text without a row in common: to choose on, and to tell."""
        train, parts = self.recipe.train, self.mixture.open("val")
        made = [each for part in parts for each in eval_batches(part, train.rows, train.seq_len, 2 * HELD_OUT)]
        batches = [EvalBatch.of(batch, "cpu") for batch in made]
        return batches[::2], batches[1::2]


def main() -> None:
    arguments = _parse()
    if arguments.cost:
        return _cost()
    recipe = read_recipe(arguments.recipe, Recipe, [*arguments.set, f"train.steps={arguments.steps}"])
    recipe = recipe.replace(elastic=ElasticConfig(sampler="off", anchor_share=0.0))
    data = arguments.data or own_text(arguments.out, recipe)
    mixture, tokenizer, data_hash = prepare_data(arguments.out, [str(data)], None, recipe.model.vocab_size)
    calibration = mixture
    if arguments.calibration is not None:
        named = [str(arguments.calibration)]
        calibration, _, more = prepare_data(arguments.out / "calibration", named, tokenizer, recipe.model.vocab_size)
        data_hash += more
    bench = Bench(
        recipe, mixture, calibration, data_hash, arguments.out, join("cpu"), arguments.heal_steps, tuple(arguments.rates),
        arguments.random, arguments.break_,
    )  # fmt: skip
    rows = [_seed(bench, seed) for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)]
    sys.exit(_show(bench, rows))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="data folder of `stretto tokenize`, or text")
    parser.add_argument(
        "--calibration", type=Path, help="text that orders are found on; that of training, if none is named"
    )
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="of the network and its training")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--heal-steps", type=int, default=10, help="0: zero-shot only")
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3])
    parser.add_argument("--random", type=int, default=3, help="random draws a seed")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0, help="seeds can be run by several processes at once")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-keep-half"))
    parser.add_argument("--set", action="append", default=[], help="override a key of the recipe")
    parser.add_argument("--break", dest="break_", action="store_true", help="keep the half that ours would drop")
    parser.add_argument("--cost", action="store_true", help="print what measuring costs instead; random networks")
    return parser.parse_args()


def _seed(bench: Bench, seed: int) -> dict[str, dict[str, float]]:
    """By order: losses zero-shot and healed, and the rate; ``full`` is the uncut network. Kept in --out by the order itself, so
    that what is there is not measured again, and an order that comes out otherwise than before is.
    """
    path = bench.out / f"seed-{seed}.json"
    told = {
        "recipe": bench.recipe.model_dump(mode="json"),
        "heal": [bench.heal_steps, *bench.rates],
        "data": bench.data_hash,
        "held_out": HELD_OUT,
    }
    kept: dict[str, Any] = read_json(path) if path.is_file() else {"told": told, "measured": []}
    assert kept["told"] == told, f"{path} is of other settings; choose another --out"
    measured = {tuple(map(tuple, each["order"])): each["found"] for each in kept["measured"]}
    model = _ordinary(bench, seed)
    choosing, telling = bench.held_out()
    found = {"full": {"zero-shot": evaluate(model, model.config.full(), telling).nll}}
    for name, order in _orders(bench, model, seed).items():
        if order not in measured:
            rich.print(f"seed {seed}, {name}")
            measured[order] = _kept(bench, model, order, seed, choosing, telling)
            kept["measured"] = [{"order": order, "found": losses} for order, losses in measured.items()]
            write_json(path, kept)
        found[name] = measured[order]
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
    """All orders, found on the same 16 batches, of training text in an order that no step saw."""
    loader = bench.loader(bench.calibration, seed + 1000)
    batches = [EvalBatch.of(loader.next(), "cpu") for _ in range(16)]
    found = survey(model, batches, removal=True)
    orders = {
        "reap": expert_orders(model.config, found, "reap"),
        "removal": expert_orders(model.config, found, "removal"),
        "removal, each alone": _watched(model, batches, _removed_alone),
        "REAP as published": _watched(model, batches, partial(_mean, route=_published_routes)),
        "REAP, own gates": _watched(model, batches, partial(_mean, route=_own_routes)),
        "REAP, own gates, summed": _watched(model, batches, partial(_summed, route=_own_routes)),
        "frequency": expert_orders(model.config, found, "frequency"),
    }
    if bench.broken:
        orders[OURS] = tuple(order[::-1] for order in orders[OURS])
    rng = random.Random(seed)
    for draw in range(bench.num_random):
        orders[f"random {draw}"] = tuple(tuple(rng.sample(sorted(order), len(order))) for order in orders[OURS])
    return orders


Score = Callable[[MoeLayer, Tensor], Tensor]
"""What each expert of a layer is worth [E], by what the layer is given [N, D]."""
Route = Callable[[MoeLayer, Tensor], Routes]
"""Which experts those inputs are said to choose, and their gates."""


@torch.no_grad()
def _watched(model: Transformer, batches: Sequence[EvalBatch], score: Score) -> Orders:
    """Experts by falling ``score`` of their layer."""
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
    return tuple(expert_order(score(layer, torch.cat(inputs[layer.row])).tolist(), ()) for layer in layers)


def _written(layer: MoeLayer, x_ND: Tensor, chosen_NK: Tensor) -> Tensor:
    """What the chosen experts write before their gates [N, K, D]."""
    made: list[Tensor] = []

    def note(slots: Slots, y_PD: Tensor) -> None:
        made.append(y_PD[slots.place_S].view(*chosen_NK.shape, -1))

    ones_NK = torch.ones_like(chosen_NK, dtype=torch.float32)
    experts(x_ND, chosen_NK, ones_NK, layer.experts, note)
    return made[0]


def _own_routes(layer: MoeLayer, x_ND: Tensor) -> Routes:
    return layer.route(x_ND[None], len(layer.gate), layer.config.top_k_by_layer[layer.row], None)[0]


def _published_routes(layer: MoeLayer, x_ND: Tensor) -> Routes:
    """As CerebrasResearch/reap computes them: the largest logits, weighted by a softmax of all, renormalised over the chosen."""
    scores_NE = (x_ND.float() @ layer.gate.float().T).softmax(-1)
    gates_NK, chosen_NK = scores_NE.topk(layer.config.top_k_by_layer[layer.row], dim=-1)
    return Routes(chosen_NK, gates_NK / gates_NK.sum(-1, keepdim=True))


def _summed(layer: MoeLayer, x_ND: Tensor, route: Route) -> Tensor:
    """By expert, gate times length of its output, summed over its tokens."""
    routes = route(layer, x_ND)
    length_NK = _written(layer, x_ND, routes.chosen_NK).norm(dim=-1)
    sum_E = torch.zeros(len(layer.gate), dtype=torch.float64)
    return sum_E.index_add_(0, routes.chosen_NK.flatten(), (routes.gates_NK * length_NK).flatten().double())


def _mean(layer: MoeLayer, x_ND: Tensor, route: Route) -> Tensor:
    """The same divided by the expert's tokens: REAP's saliency (2510.13999)."""
    num_E = torch.bincount(route(layer, x_ND).chosen_NK.flatten(), minlength=len(layer.gate))
    return _summed(layer, x_ND, route) / num_E.clamp_min(1)


def _removed_alone(layer: MoeLayer, x_ND: Tensor) -> Tensor:
    """The squared change of the layer's output when one expert is gone and each of its tokens takes the next best: `removal_order`'s
    first round, for a network that renormalises its gates and has no groups, with one expert a token more than it computes."""
    assert layer.config.normalize_gates and layer.config.expert_groups == 1
    num_experts, top_k = len(layer.gate), layer.config.top_k_by_layer[layer.row]
    routes = layer.route(x_ND[None], num_experts, top_k + 1, None)[0]
    y_NKD = _written(layer, x_ND, routes.chosen_NK) * routes.gates_NK[..., None]
    gates_NK = routes.gates_NK / layer.config.routed_scaling
    whole_N1D = y_NKD[:, :top_k].sum(1, keepdim=True) / gates_NK[:, :top_k].sum(1)[:, None, None]
    without_NKD = (y_NKD.sum(1, keepdim=True) - y_NKD) / (1 - gates_NK)[..., None]
    change_NK = (without_NKD - whole_N1D)[:, :top_k].square().sum(-1).double()
    chosen_NK = routes.chosen_NK[:, :top_k]
    return torch.zeros(num_experts, dtype=torch.float64).index_add_(0, chosen_NK.flatten(), change_NK.flatten())


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
            Job(folder, bench.loader(bench.mixture, seed + 500), (), bench.data_hash, bench.ranks),
            extract(parent, half),
            None,
        )
        own = done.model.config.full()
        healed[rate] = evaluate(done.model, own, choosing).nll, evaluate(done.model, own, telling).nll
    found = {"zero-shot": evaluate(parent, half, telling).nll}
    if healed:
        best = min(healed, key=lambda rate: healed[rate][0])
        found |= {"healed": healed[best][1], "rate": best}
    return found


def _show(bench: Bench, rows: Sequence[dict[str, dict[str, float]]]) -> int:
    """Print the table; 1 where another order beats ours in one of the columns."""
    names = [name for name in rows[0] if name != "full" and not name.startswith("random")]
    randoms = [name for name in rows[0] if name.startswith("random")]
    train = bench.recipe.train
    tokens = train.rows * train.seq_len
    healed = f", healed with {bench.heal_steps * tokens / 1e6:.2f}M" if bench.heal_steps else ""
    uncut = statistics.fmean(row["full"]["zero-shot"] for row in rows)
    table = Table(
        title=f"half of {bench.recipe.model.num_experts} experts, top-{bench.recipe.model.top_k}; {train.steps * tokens / 1e6:.2f}M tokens{healed}; "
        f"{len(rows)} seeds; uncut {uncut:.4f}"
    )
    columns = ["zero-shot", "healed"] if bench.heal_steps else ["zero-shot"]
    for head in ("kept by", *(head for column in columns for head in (column, "minus ours")), "rates"):
        table.add_column(head)
    beaten_by = set()
    for name in [*names, *(["random (mean of draws)"] if randoms else [])]:
        drawn = randoms if name.startswith("random") else [name]
        cells = [name]
        for column in columns:
            losses = [statistics.fmean(row[each][column] for each in drawn) for row in rows]
            ours = [row[OURS][column] for row in rows]
            low, mean, high = _interval([loss - own for loss, own in zip(losses, ours, strict=True)])
            if high < 0:
                beaten_by.add(name)
            cells += [
                f"{statistics.fmean(losses):.4f}",
                "" if name == OURS else f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]",
            ]
        rates = sorted({row[each]["rate"] for row in rows for each in drawn if "rate" in row[each]})
        table.add_row(*cells, ", ".join(f"{rate:g}" for rate in rates))
    wide_console().print(table)
    rich.print(f"ours ({OURS}): " + (f"beaten by {', '.join(sorted(beaten_by))}" if beaten_by else "best or tied"))
    return int(bool(beaten_by))


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Student's 95 % interval of the mean: low, mean, high; without bounds for a single value."""
    mean, half = statistics.fmean(values), half_width(values)
    return mean - half, mean, mean + half


def _cost() -> None:
    """What `survey` costs with and without removal, on as many tokens as `adopt` measures on."""
    num_tokens = AdoptOptions.model_fields["calibration_tokens"].default
    table = Table(title=f"measuring one layer on {num_tokens:,} tokens, hidden {COST_SHAPE['hidden_size']}, fp32")
    for column in ("experts", "reap", "s", "removal", "s", "FLOPs: removal / reap", "processor time: removal / reap"):
        table.add_column(column)
    for num_experts, top_k in ((16, 4), (128, 8)):
        config = ModelConfig.model_validate(COST_SHAPE | {"num_experts": num_experts, "top_k": top_k})
        model = build(config, 0)
        rng = torch.Generator().manual_seed(0)
        ids_BT = torch.randint(config.vocab_size, (num_tokens // 1024, 1024), generator=rng)
        batches = [EvalBatch(rows_BT, rows_BT, Context.plain(rows_BT)) for rows_BT in ids_BT.split(2)]
        taken: dict[bool, tuple[int, float]] = {}
        for removal in (False, True):
            survey(model, batches[:1], removal=removal)  # warm
            start = time.process_time()
            flops = survey(model, batches, removal=removal).flops
            taken[removal] = flops, time.process_time() - start
        (plain, plain_s), (more, more_s) = taken[False], taken[True]
        cells = (f"{plain / 1e12:.2f}T", f"{plain_s:.1f}", f"{more / 1e12:.2f}T", f"{more_s:.1f}")
        table.add_row(f"{num_experts}, top-{top_k}", *cells, f"{more / plain:.2f}", f"{more_s / plain_s:.2f}")
    wide_console().print(table)


if __name__ == "__main__":
    main()
