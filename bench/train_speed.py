"""Compare training steps of Stretto with those of transformers' Glm4MoeForCausalLM, and the default dtype with fp32.

    python -m bench.train_speed [--shape small|medium] [--steps N] [--threads N]
    python -m bench.train_speed --joint [--steps N] [--threads N]

Both networks have the same shape and weights. A step is forward, loss, backward, gradient clipping and fused AdamW on new rows, so that
experts get different numbers of tokens each time, as in training. The default is what ``train.dtype = "auto"`` chooses. transformers
uses SDPA attention, and the fastest of its expert implementations, of fp32 and bf16 autocast, and of eager and compiled execution
(torch.compile, which takes minutes the first time) on this machine. The default is also timed with one thread, if it uses more. All steps
take turns in one process, and a fixed matrix product before and after each shows whether other jobs slowed the machine; slow steps are
dropped. Other jobs change processor time less than wall time.

fp32 is timed as two equal networks; their ratio shows the noise. Exits with 1 if the losses of both networks differ, if the noise is
larger than 5 %, or if by wall time the default is more than 5 % slower than fp32, or slower than transformers.

``--joint`` compares steps of the demo's network instead: joint elastic steps, with the Subnets of its sampler, over ordinary steps, by
counted FLOPs per second. Exits with 1 if joint steps reach less than 90 % of the rate.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from bench.common.measure import Sample, Step, bench_parser, finish, measure, ratio, table, times
from stretto.base.config import read_recipe
from stretto.base.track import progress, wide_console
from stretto.model.checkpoint import write_checkpoint
from stretto.model.parallel import join
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, Transformer, build
from stretto.ops.logprob import IGNORED
from stretto.ops.tuning import multiplies_bf16, threads_kept
from stretto.optim.build import build_optimizers
from stretto.optim.schedule import OptimConfig
from stretto.train.pace import find_pace
from stretto.train.recipe import Recipe
from stretto.train.sampler import Sampler
from stretto.train.step import Distil, MicroBatch, optimisation_step

EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "eager")
"""Those of transformers that need no optional kernels and copy no weights for each token."""
COMPILED_IMPLEMENTATION = "grouped_mm"
"""The one that is tried compiled, too: the other one loops over the experts, whose numbers of tokens change at each step."""
OPTIM = OptimConfig(lr=1e-4)
LEAST = 0.95
"""Lower limit of the default's tokens/s over those of fp32, by wall time."""
LEAST_JOINT = 0.9
"""Lower limit of the counted FLOPs per second of joint steps over those of ordinary steps."""
LENGTH = 256


class Shape(NamedTuple):
    """Network and rows of a step."""

    config: ModelConfig
    rows: int


SMALL = ModelConfig(
    vocab_size=4096,
    hidden_size=128,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    num_experts=16,
    top_k=4,
    expert_intermediate_size=64,
    num_shared_experts=1,
)
WIDER = {"hidden_size": 192, "num_heads": 6, "num_experts": 32, "widths": (32,), "expert_intermediate_size": 96}
SHAPES = {"small": Shape(SMALL, 8), "medium": Shape(SMALL.replace(vocab_size=8192, **WIDER), 16)}


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small", help="size of network and step")
    parser.add_argument(
        "--joint", action="store_true", help="joint elastic steps over ordinary ones, of the demo's network"
    )
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each; the table shows medians")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; default: all cores")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    num_threads, console = torch.get_num_threads(), wide_console()
    if options.joint:
        _show_joint(options.steps, console)
        return
    shape = SHAPES[options.shape]
    ours, theirs = _models(shape.config)
    with threads_kept():
        pace = find_pace("auto", shape.config, partial(_batch, shape), join("cpu"))
    torch.manual_seed(0)
    ids_BT = _batch(shape).ids_BT
    our_loss, their_loss = _our_loss(ours, ids_BT), _their_loss(theirs, ids_BT)
    assert abs(our_loss - their_loss) < 1e-4, f"not the same model: losses {our_loss} and {their_loss}"
    console.print(f"same weights, same batch: loss {our_loss:.6f} ours, {their_loss:.6f} transformers'")
    steps = {
        "ours": _our_step(ours, shape, pace.torch_dtype),
        "fp32": _our_step(build(shape.config, seed=0), shape, torch.float32),
        "again": _our_step(build(shape.config, seed=0), shape, torch.float32),
    }
    best, steps["theirs"] = _their_fastest_step(theirs, shape, console)
    threads = dict.fromkeys(steps, num_threads) | {"ours": pace.num_threads}
    if pace.num_threads > 1:
        steps["alone"], threads["alone"] = _our_step(build(shape.config, seed=0), shape, pace.torch_dtype), 1
    prepare = {name: partial(torch.set_num_threads, num) for name, num in threads.items()}
    with progress("interleaved", len(steps) * (2 + options.steps)) as advance:
        samples = measure(steps, options.steps, advance, prepare=prepare)
    console.print(f"default: {pace.dtype}, {pace.num_threads} threads; transformers: {best}")
    _show(console, shape.rows, samples)
    finish(missed(samples))


def missed(samples: Mapping[str, Sequence[Sample]]) -> list[str]:
    """Why there is no result, or the comparisons that the default loses."""
    control, default = (ratio(samples, "fp32", name).wall for name in ("again", "ours"))
    theirs = ratio(samples, "theirs", "ours").wall
    if control is None or default is None or theirs is None:
        return ["the machine was slow in every round: use more --steps, or a machine with fewer other jobs"]
    if abs(control - 1.0) > 1.0 - LEAST:
        return [f"fp32 over itself is {times(control)}: too much noise for a result; run again"]
    slower = [f"the default is slower than fp32: {times(default)}, at least {LEAST}x"] if default < LEAST else []
    return slower + ([f"the default is slower than transformers: {times(theirs)}, at least 1x"] if theirs < 1 else [])


def _models(config: ModelConfig) -> tuple[Transformer, nn.Module]:
    """Our model, and transformers' model read from a checkpoint of it."""
    import transformers

    model = build(config, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(f"{folder}/model", model, config, family="glm4_moe")
        theirs = transformers.Glm4MoeForCausalLM.from_pretrained(
            f"{folder}/model", attn_implementation="sdpa", dtype=torch.float32
        )
    return model, theirs.train()


def _targets(ids_BT: Tensor) -> Tensor:
    return torch.cat((ids_BT[:, 1:], torch.full_like(ids_BT[:, :1], IGNORED)), dim=1)


@torch.no_grad()
def _our_loss(model: Transformer, ids_BT: Tensor) -> float:
    logits_BTV = model.logits(ids_BT)
    return float(
        nn.functional.cross_entropy(logits_BTV.flatten(0, 1), _targets(ids_BT).flatten(), ignore_index=IGNORED)
    )


@torch.no_grad()
def _their_loss(model: nn.Module, ids_BT: Tensor) -> float:
    return float(model(ids_BT, labels=ids_BT, use_cache=False).loss)


def _batch(shape: Shape) -> MicroBatch:
    config, rows = shape
    ids_BT = torch.randint(config.vocab_size, (rows, LENGTH))
    return MicroBatch("full", ids_BT, _targets(ids_BT), Context.plain(ids_BT), config.full(), rows * (LENGTH - 1))


def _our_step(model: Transformer, shape: Shape, dtype: torch.dtype) -> Step:
    optimizers, ranks = build_optimizers(OPTIM, model), join("cpu")

    def step() -> float:
        result = optimisation_step(
            model, optimizers, [_batch(shape)], ranks, clip_norm=OPTIM.clip_norm, balance_rate=0.0, dtype=dtype
        )
        return result.nll

    return step


def _their_step(model: nn.Module, shape: Shape, dtype: torch.dtype) -> Step:
    optimizers = build_optimizers(OPTIM, model)

    def step() -> float:
        ids_BT = _batch(shape).ids_BT
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = model(ids_BT, labels=ids_BT, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_norm, foreach=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _their_fastest_step(model: Any, shape: Shape, console: Console) -> tuple[str, Step]:
    """The fastest step of transformers by processor time, and its name: expert implementation, dtype, and whether it is compiled."""
    dtypes = [torch.float32, torch.bfloat16] if multiplies_bf16(torch.device("cpu")) else [torch.float32]
    compiled = torch.compile(model)
    settings = [(each, dtype, model, "") for each, dtype in product(EXPERTS_IMPLEMENTATIONS, dtypes)]
    settings += [(COMPILED_IMPLEMENTATION, dtype, compiled, ", compiled") for dtype in dtypes]
    found: dict[str, tuple[float, str, Step]] = {}
    with progress("transformers' settings", len(settings)) as advance:
        for implementation, dtype, network, note in settings:
            name, step = f"{implementation}, {str(dtype)[6:]}{note}", _their_step(network, shape, dtype)
            advance(0, name)
            model.set_experts_implementation(implementation)
            samples = measure({"": step}, 3, warm_up=2)[""]
            found[name] = median(sample.processor_s for sample in samples), implementation, step
            advance()
    best = min(found, key=lambda name: found[name][0])
    for name, (seconds, *_) in found.items():
        console.print(f"transformers' {name}: {seconds / found[best][0]:.2f}x the step time of its fastest")
    model.set_experts_implementation(found[best][1])
    return best, found[best][2]


def _show(console: Console, rows: int, samples: dict[str, list[Sample]]) -> None:
    """Tokens per second of each step, and ratios of the default to the others."""
    shown = table(
        f"training step of {rows} x {LENGTH} tokens, medians of all rounds", "", "tokens/s", "per processor-s"
    )
    labels = {"ours": "default", "fp32": "fp32", "again": "fp32 again", "theirs": "transformers", "alone": "one thread"}
    for name, label in labels.items():
        if name not in samples:
            continue
        wall_s, processor_s = (median(getattr(each, f) for each in samples[name]) for f in ("wall_s", "processor_s"))
        shown.add_row(label, f"{rows * LENGTH / wall_s:,.0f}", f"{rows * LENGTH / processor_s:,.0f}")
    console.print(shown)
    ratios = table("speed ratio, median of rounds", "", "wall", "95 % interval", "processor", "quiet rounds")
    for over, under in (("theirs", "ours"), ("fp32", "ours"), ("fp32", "again"), ("alone", "ours")):
        if over not in samples:
            continue
        each = ratio(samples, over, under)
        spread = f"{each.spread.low:.2f} to {each.spread.high:.2f}" if each.spread else "too few rounds"
        cells = times(each.wall), spread, times(each.processor), each.rounds
        ratios.add_row(f"{labels[under]} over {labels[over]}", *cells)
    console.print(ratios)


def _show_joint(rounds: int, console: Console) -> None:
    """Counted FLOPs per second of joint steps and of ordinary steps of the demo's network. Single rows are not narrowed."""
    recipe, ranks = read_recipe("demo", Recipe, ["elastic.joint=true", "elastic.anchor_ce_weight=0.5"]), join("cpu")
    train, elastic, config = recipe.train, recipe.elastic, recipe.network()
    model = build(config, seed=0)
    optimizers = build_optimizers(recipe.optim, model)
    teacher = Distil(model, config.full(), elastic.anchor_ce_weight, elastic.joint)
    samplers = {
        name: Sampler(config, mixture, train.micro_rows, train.micro_batches, train.steps, train.seed)
        for name, mixture in (("ordinary", elastic.replace(sampler="off")), ("joint", elastic))
    }
    flops = {name: list[int]() for name in samplers}

    def step(name: str) -> None:
        # the last steps of the recipe, in which the shares of the mixture have their full size
        batches = []
        for micro in samplers[name].draw(train.steps - 1 - len(flops[name])):
            batch = replace(_batch(Shape(config, train.micro_rows)), subnet=micro.subnet)
            is_smaller = micro.subnet != config.full()
            batches.append(replace(batch, distil=teacher if is_smaller else None))
        result = optimisation_step(
            model, optimizers, batches, ranks, clip_norm=recipe.optim.clip_norm, balance_rate=0.0, dtype=torch.float32
        )
        flops[name].append(result.flops)

    warm_up = 2
    with progress("interleaved", len(flops) * (warm_up + rounds)) as advance:
        samples = measure({name: partial(step, name) for name in flops}, rounds, advance, warm_up)
    shown = table(
        "steps of the demo's network, medians of all rounds",
        "",
        "tokens/s",
        "GFLOP per step",
        "GFLOP/s",
        "per processor-s",
    )
    rates: dict[str, list[float]] = {}
    for name, each in samples.items():
        done, walls = flops[name][warm_up:], [sample.wall_s for sample in each]
        clocks = walls, [sample.processor_s for sample in each]
        rates[name] = [median(num / s for num, s in zip(done, clock, strict=True)) for clock in clocks]
        cells = f"{train.rows * LENGTH / median(walls):,.0f}", f"{median(done) / 1e9:.1f}"
        shown.add_row(name, *cells, *(f"{rate / 1e9:.1f}" for rate in rates[name]))
    console.print(shown)
    wall, processor = (joint / ordinary for joint, ordinary in zip(rates["joint"], rates["ordinary"], strict=True))
    console.print(
        f"joint over ordinary steps at equal FLOPs: {times(wall)} by wall, {times(processor)} by processor time"
    )
    if wall < LEAST_JOINT:
        finish([f"joint steps compute at {times(wall)} of the rate of ordinary steps, at least {LEAST_JOINT}x"])


if __name__ == "__main__":
    main()
