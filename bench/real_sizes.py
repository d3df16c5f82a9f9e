"""Study of a real model: the sizes of SmolLM2-135M after elastic training, each beside pruned networks of the same size.

    python -m bench.real_sizes OUT --data TEXT --tokens 2e5 --seeds 0 1 2 3 --record FILE       run again to continue
    python -m bench.real_sizes OUT --data TEXT --tokens 8e3 --eval-rows 16 --rates 1 --seeds 0 1          small version
    python -m bench.real_sizes OUT … --arms elastic flops-half flops-corner                      only these arms for now
    python -m bench.real_sizes FILE --report [--picture FILE.png]                               print a record's figures again

SmolLM2 is cut into one shared and seven routed experts (`stretto adopt --experts 8`). Arms, each trained with every seed:

elastic            its sizes full, half (four of seven experts for a token) and corner (25 of 30 layers, five experts), all in one run
continued          SmolLM2 itself on the same tokens: what the text teaches
tokens-SIZE        SmolLM2 without the layers that SIZE leaves out, with as many neurons as it uses for a token, on as many tokens as
                   the elastic run
flops-SIZE         the same with half of the elastic run's FLOPs: all controls of this kind cost together as much as that run
layers-SIZE, neurons-SIZE     as flops-SIZE, but pruned by layers or by neurons alone to as many parameters

All arms have the same loss: KL to SmolLM2 (0.75) and cross-entropy. The first seed searches the learning rate of the first three kinds at
a quarter of the tokens (flops-, layers- and neurons-SIZE have the rate of tokens-SIZE); the other seeds are reported. One half of the
held-out rows ranks and chooses, the other half is reported. Exit code 1: a size is not better than its control at equal FLOPs, with
an interval that excludes zero, or an arm is not done.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench.common.measure import finish, half_width, refusing, shown_half, table
from bench.common.pictures import draw_means, save_picture
from bench.common.rate_search import parsed, recorded_search, search, search_run, search_table, searching_parser
from bench.common.real_networks import Parent, adopt_dense, dense_network, prepare, pruned, read_parent
from bench.common.study import (
    Results,
    Run,
    carry_out,
    is_record,
    read_fields,
    read_results,
    unfinished,
    write_record,
)
from bench.common.study_runs import held_out_halves, measured, sizes_of
from stretto.api.train import open_loader
from stretto.base.config import read_recipe
from stretto.base.paths import CHECKPOINT, RECIPES
from stretto.base.track import wide_console
from stretto.model.checkpoint import write_checkpoint
from stretto.model.counts import count
from stretto.model.parallel import in_memory, join
from stretto.model.spec import Subnet
from stretto.model.transformer import Transformer
from stretto.report import style
from stretto.text.tokenizer import load_tokenizer
from stretto.train.loop import Job, Trained
from stretto.train.prepare import prepare_data
from stretto.train.recipe import ElasticizeRecipe, HealRecipe
from stretto.train.run_folder import RunInfo
from stretto.train.stages import elasticize, heal

KD_WEIGHT = 0.75
"""Weight of KL to SmolLM2 in every run; the rest is cross-entropy."""
LEARNING_RATE = 3e-4
"""Multiplied by the candidates of the search."""
RATES = (0.5, 1.0, 2.0)
"""First candidates of the search without --rates."""
SIZES = ("half", "corner")
WAYS = {"tokens": "both", "flops": "both", "layers": "layers", "neurons": "neurons"}
"""Way of pruning by kind of control."""
EQUAL_FLOPS = ("flops", "layers", "neurons")
"""Kinds of controls that share the elastic run's FLOPs among the sizes."""
ABOUT = {
    "tokens": "pruned, all of the tokens",
    "flops": "pruned",
    "layers": "pruned by layers alone",
    "neurons": "pruned by neurons alone",
}
"""What the picture says of the kinds of controls."""
CONTROLS = tuple(f"{kind}-{size}" for kind in WAYS for size in SIZES)
ARMS = ("elastic", "continued", *CONTROLS)
SEARCHED = ("elastic", "continued", *(f"tokens-{size}" for size in SIZES))
SEARCH_SHARE = 0.25
"""Tokens of a run of the search, as a share of those of a reported run."""
RANKING_BATCHES = 4
"""Held-out batches on which neurons are ranked."""
MIXTURE = (
    "elastic.anchor_share=0.8",
    "elastic.depth_share=0.05",
    "elastic.top_k_share=0.05",
    "elastic.width_share=0.05",
)
"""Most micro-batches train the sizes that are reported."""


@refusing()
def main() -> None:
    options = _parse()
    if is_record(options.out):
        record = read_fields(options.out, ("model", "seeds", "rates", "runs"))
        arms, results = Arms(tuple(record["seeds"]), tuple(record["rates"])), record["runs"]
    else:
        arms = study = open_study(options)
        identity = {"model": options.model, "data_hash": study.info.data_hash, "settings": list(study.settings)}
        known = recorded_search(options.record, identity, study.seeds[0]) if options.record else {}
        found = (
            read_results(study.out)
            if options.report
            else carry_out(study.runs, study.out, options.jobs, options.minutes, known)
        )
        results = {**known, **found}
        if options.record:
            write_record(options.record, {**identity, "seeds": list(study.seeds), "rates": list(study.rates)}, results)
    wide_console().print(search_table(SEARCHED, arms.rates, arms.seeds[0], results))
    if options.picture:
        draw(differences(arms, results), options.picture)
    finish(report(arms, results))


def _parse() -> argparse.Namespace:
    parser = searching_parser(__doc__, RATES, ARMS, eval_rows=128, picture="each size minus its controls")
    parser.add_argument("--model", default="smollm2", help="dense network: a run, a checkpoint, or smollm2")
    parser.add_argument("--data", help="data folder of `stretto tokenize` with SmolLM2's tokenizer, or text")
    parser.add_argument("--tokens", type=float, default=2e5, help="tokens of the elastic run")
    options = parsed(parser)
    if not is_record(options.out) and options.data is None:
        parser.error("--data: name the text to train on")
    return options


@dataclass(frozen=True, slots=True)
class Arms:
    """Seeds, of which the first one searches, and first candidates of the search."""

    seeds: tuple[int, ...]
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Study(Arms):
    """Plan of the runs as a function of the results so far."""

    out: Path
    info: RunInfo
    calibration: str
    """Text on which experts are found."""
    settings: tuple[str, ...]
    """Changes to the recipes of `stretto elasticize` and `stretto heal`, for all arms."""
    arms: tuple[str, ...]
    """Arms that are searched and trained now."""

    def runs(self, results: Results) -> list[Run]:
        """Every run whose settings are known."""
        runs = [
            Run(f"parent-{seed}", partial(prepare_parent, self.info, self.calibration, seed)) for seed in self.seeds
        ]
        runs.append(Run("original", partial(measure_original, self.info)))
        first, *reported = self.seeds
        for arm in sorted({_searched(arm) for arm in self.arms}, key=SEARCHED.index):
            for rate in search(arm, self.rates, results)[0]:
                runs.append(self._training(search_run(arm, rate), arm, rate, first, SEARCH_SHARE))
        for seed in reported:
            elastic = results.get(f"elastic-{seed}")
            for arm in self.arms:
                kind, flops = arm.partition("-")[0], None
                chosen = search(_searched(arm), self.rates, results)[1]
                if kind in EQUAL_FLOPS:
                    if elastic is None:
                        continue
                    flops = elastic["flops"] / len(SIZES)
                if chosen is not None:
                    runs.append(self._training(f"{arm}-{seed}", arm, chosen, seed, 1.0, flops))
        return runs

    def _training(self, name: str, arm: str, rate: float, seed: int, share: float, flops: float | None = None) -> Run:
        parent = f"parent-{seed}"
        settings = (*self.settings, f"optim.lr={LEARNING_RATE * rate}", f"train.seed={seed}")
        work = partial(train, self.info, settings, arm, self.out / parent, share, flops)
        return Run(name, work, needs=(parent,))


def _searched(arm: str) -> str:
    """The arm whose search chooses the rate of ``arm``: a size's controls share one."""
    size = arm.partition("-")[2]
    return f"tokens-{size}" if size else arm


def open_study(options: argparse.Namespace) -> Study:
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = adopt_dense(options.model, out)
    rows, seq_len = 8, 256
    steps = max(1, round(options.tokens / (rows * seq_len)))
    settings = (
        "optim.name=adamw", "optim.warmup_steps=5", "optim.decay_fraction=0.8", "optim.final_lr_fraction=0.05", "optim.weight_decay=0",
        f"train.steps={steps}", f"train.rows={rows}", f"train.seq_len={seq_len}", "train.micro_batches=4", "train.dtype=bfloat16",
        f"train.eval_rows={options.eval_rows}", *options.settings,
    )  # fmt: skip
    mixture, _, data_hash = prepare_data(out, [options.data], tokenizer, load_tokenizer(tokenizer).vocab_size)
    info = RunInfo(
        stage="heal",
        recipe=read_recipe(RECIPES / "heal.toml", HealRecipe, settings),
        data=mixture,
        data_hash=data_hash,
        tokenizer=tokenizer,
    )
    held_out_halves(info, info.train)  # refuses too few rows
    return Study(tuple(options.seeds), tuple(options.rates), out, info, options.data, settings, tuple(options.arms))


def prepare_parent(info: RunInfo, calibration: str, seed: int, folder: Path) -> dict[str, Any]:
    """Cut SmolLM2 into experts and measure its sizes before training."""
    prepare(calibration, held_out_halves(info, info.train)[0][:RANKING_BATCHES], seed, folder)
    parent = read_parent(folder)
    return measured_with_params(info, parent.moe, sizes_of(parent.moe.config, parent.presets))


def measure_original(info: RunInfo, folder: Path) -> dict[str, Any]:
    """Measure SmolLM2 itself, and the reported rows in tokens per byte."""
    dense, tokenizer = dense_network(folder.parent), load_tokenizer(info.tokenizer)
    num_tokens = num_bytes = 0
    for batch in held_out_halves(info, info.train)[1]:
        for row_T in batch.targets_BT:
            ids = row_T[row_T >= 0].tolist()
            num_tokens, num_bytes = num_tokens + len(ids), num_bytes + len(tokenizer.decode(ids).encode())
    found = measured_with_params(info, dense, {"full": dense.config.full()})
    return found | {"tokens_per_byte": num_tokens / num_bytes}


def measured_with_params(info: RunInfo, model: Transformer, sizes: Mapping[str, Subnet]) -> dict[str, Any]:
    """Losses of ``sizes`` on both halves of the held-out rows, in bf16, nats per token, and their numbers of parameters."""
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as they were trained
        losses = measured(model, sizes, held_out_halves(info, info.train))
    counts = {name: count(model.config, subnet) for name, subnet in sizes.items()}
    return losses | {
        "params": {name: each.total_params for name, each in counts.items()},
        "active": {name: each.active_params for name, each in counts.items()},
    }


def train(
    info: RunInfo, settings: Sequence[str], arm: str, prepared: Path, share: float, flops: float | None, folder: Path
) -> dict[str, Any]:
    """Train ``arm`` and measure its sizes.

    Args:
        share: share of the steps of ``settings``.
        flops: FLOPs to spend in place of that share; never for more steps than it.
    """
    parent = read_parent(prepared)
    steps = max(1, round(share * info.train.steps))
    if arm == "elastic":
        done = _train_elastic(info, _for_steps(settings, steps), parent, folder)
        sizes = sizes_of(done.model.config, parent.presets)
        write_checkpoint(
            folder / CHECKPOINT, done.model, done.model.config, presets=parent.presets, tokenizer_dir=info.tokenizer,
            dtype=torch.bfloat16,
        )  # fmt: skip
    else:
        kind, _, size = arm.partition("-")
        model = parent.dense if arm == "continued" else pruned(parent, size, WAYS[kind])
        if flops is not None:
            tokens, length = info.train.rows * info.train.seq_len, info.train.seq_len
            passes = ((3, model.config), (1, parent.dense.config))  # of the student, and of the teacher
            step_flops = sum(num * count(config, config.full()).forward_flops(tokens, length) for num, config in passes)
            steps = max(1, min(steps, int(flops / step_flops)))
        done = _train_control(info, _for_steps(settings, steps), model, dense_network(prepared.parent), folder)
        sizes = {"full": done.model.config.full()}
    receipt = done.meter.receipt()
    return measured_with_params(info, done.model, sizes) | {"flops": receipt.flops, "tokens": receipt.tokens}


def _for_steps(settings: Sequence[str], steps: int) -> list[str]:
    return [*settings, f"train.steps={steps}", f"train.eval_every={steps}", f"train.snapshot_every={steps}"]


def _train_elastic(info: RunInfo, settings: Sequence[str], parent: Parent, folder: Path) -> Trained:
    weights = (f"kd_weight={KD_WEIGHT}", f"kd_final_weight={KD_WEIGHT}")
    recipe = read_recipe(RECIPES / "elasticize.toml", ElasticizeRecipe, [*MIXTURE, *weights, *settings])
    recipe = recipe.for_network(parent.moe.config, parent.presets)
    return elasticize(recipe, _job(info, recipe, folder), in_memory(parent.moe), in_memory(parent.dense))


def _train_control(
    info: RunInfo, settings: Sequence[str], model: Transformer, teacher: Transformer, folder: Path
) -> Trained:
    recipe = read_recipe(RECIPES / "heal.toml", HealRecipe, [f"ce_weight={1 - KD_WEIGHT}", *settings])
    return heal(recipe, _job(info, recipe, folder), in_memory(model), in_memory(teacher))


def _job(info: RunInfo, recipe: ElasticizeRecipe | HealRecipe, folder: Path) -> Job:
    ranks = join("auto")
    return Job(folder, open_loader(info, recipe.train, ranks), (), str(info.data_hash), ranks)


Row = Mapping[str, Mapping[str, Any] | None]
"""Results of one seed by arm; None: not done."""


def rows_of(study: Arms, results: Results) -> list[Row]:
    """Results of the reported seeds."""
    return [{arm: results.get(f"{arm}-{seed}") for arm in (*ARMS, "parent")} for seed in study.seeds[1:]]


def differences(study: Arms, results: Results) -> dict[tuple[str, str], list[float]]:
    """Loss of a size minus that of a control, as a share of the original's, of every seed that has both; by size and arm."""
    found: dict[tuple[str, str], list[float]] = {}
    original, rows = results.get("original"), rows_of(study, results)
    if original is None:
        return found
    for size, arm in (("full", "continued"), *((size, f"{kind}-{size}") for size in SIZES for kind in WAYS)):
        pairs = [(row["elastic"], row[arm]) for row in rows]
        values = [ours["report"][size] - its["report"]["full"] for ours, its in pairs if ours and its]
        if values:
            found[size, arm] = [value / original["report"]["full"] for value in values]
    return found


def report(study: Arms, results: Results) -> list[str]:
    """Print the losses, and the differences paired by seed; return the aims that are missed. Each row has the seeds whose networks are
    done."""
    rows = rows_of(study, results)
    names = ["original", *(f"{arm}-{seed}" for seed in study.seeds[1:] for arm in (*ARMS, "parent"))]
    missed = unfinished([name for name in names if name not in results], isinstance(study, Study))
    original = results.get("original")
    if original is None or not any(row["elastic"] for row in rows):
        return missed
    _show_networks(original, rows)
    shown = table(
        "elastic sizes beside the other networks", "difference, share of the original's bits", "mean", "± 95 %", "seeds"
    )
    for (size, arm), values in differences(study, results).items():
        mean, half = fmean(values), half_width(values)
        shown.add_row(f"{size} − {arm}", f"{mean:+.2%}", shown_half(half, "{:.2%}"), str(len(values)))
        if arm.startswith("flops") and not mean + half < 0:
            missed.append(f"{size} − {arm}: {mean:+.2%} ± {half:.2%}, aim below zero with its interval")
    wide_console().print(shown)
    return missed


def _show_networks(original: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Bits per byte of every network, over the original's."""
    at = original["report"]["full"]
    bits = at * original["tokens_per_byte"] / math.log(2)
    shown = table(
        f"bits per byte over the original's {bits:.4f}",
        "network",
        "parameters",
        "per token",
        "untrained",
        "trained",
        "±",
        "TFLOP",
        "tokens",
        "seeds",
    )

    done = {arm: [found for row in rows if (found := row[arm]) is not None] for arm in (*ARMS, "parent")}

    def over(arm: str, size: str) -> list[float]:
        return [found["report"][size] / at - 1 for found in done[arm]]

    for arm in ARMS:
        found = done[arm]
        for size in found[0]["report"] if found else ():
            trained, untrained = over(arm, size), over("parent", size) if arm == "elastic" else []
            shown.add_row(
                size if arm == "elastic" else arm,
                f"{found[0]['params'][size] / 1e6:.1f}M",
                f"{found[0]['active'][size] / 1e6:.1f}M",
                f"{fmean(untrained):+.2%}" if untrained else "",
                f"{fmean(trained):+.2%}",
                shown_half(half_width(trained), "{:.2%}"),
                f"{fmean(each['flops'] for each in found) / 1e12:.1f}",
                f"{found[0]['tokens'] / 1e3:.0f}k",
                str(len(found)),
            )
    wide_console().print(shown)


def draw(found: Mapping[tuple[str, str], Sequence[float]], path: Path) -> None:
    """The differences of half and corner to their controls, with intervals, a row for each kind of control."""
    figure = style.blank(10.0, 1.4 + 0.7 * len(WAYS))
    axes = style.dress(figure.subplots(), "elastic size minus …", "share of the original's bits per byte", "", grid="x")
    style.subtitle(
        axes,
        [
            "left of zero: the elastic size is better",
            "equal FLOPs unless a row says otherwise",
            "no interval: one seed",
        ],
    )
    axes.axvline(0.0, color=style.INK, linewidth=1.0)
    for size, colour, shift in zip(SIZES, style.SERIES, (-0.12, 0.12), strict=False):
        pairs = ((place + shift, found.get((size, f"{kind}-{size}"))) for place, kind in enumerate(WAYS))
        shown = {at: values for at, values in pairs if values}
        draw_means(axes, list(shown), list(shown.values()), colour, size, along="x")
    axes.set_yticks(range(len(WAYS)), [ABOUT[kind] for kind in WAYS])
    axes.invert_yaxis()
    style.ticks(axes.xaxis, lambda value: f"{value:+.0%}" if value else "0", most=10, steps=[1, 2, 5, 10])
    axes.legend(frameon=False, fontsize=style.TEXT_PT, loc="lower left")
    save_picture(figure, path)


if __name__ == "__main__":
    main()
