"""A dense chat model as an elastic Mixture of Experts: what each size loses, beside the same model pruned and healed.

    stretto adopt smollm2 -o runs/s
    python -m bench.smol_moe runs/s --data TEXT --report OTHER_TEXT            about half an hour on two cores
    python -m bench.smol_moe runs/s --data TEXT --report OTHER_TEXT --steps 2000 --pilot 100 --rates 5e-5 1e-4 2e-4 4e-4

SOURCE is cut into experts (`stretto.evals.neurons`), then trained as `stretto elasticize` does, with its recipe. The control of each
smaller size is the dense network with as many layers, dropped by the same ranking, and as many neurons in a feed-forward network
as that size computes for a token, the strongest on the same text; it is healed with its own best rate and the same loss. All
controls together get the FLOPs of the elastic run. Rates are chosen by short runs on held-out rows of --data; figures are of
--report, which nothing else reads. Every result stays in --out, and what is there is not run again.

`--zero-shot` stops before training and compares routers; `--routers random` is a mutant that must lose to the default.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import rich
import torch
from rich.table import Table
from torch import Tensor

from stretto.apps.data import prepare_data
from stretto.base.config import read_recipe
from stretto.base.numbers import si
from stretto.base.paths import checkpoint_folder, read_json, remove, write_json
from stretto.base.track import progress
from stretto.data.loader import Loader, Mixture, eval_batches
from stretto.engine.engine import Engine
from stretto.engine.loading import generation_ends
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.evals.loss import EvalBatch, evaluate_many
from stretto.evals.neurons import activity, each_layer, plan_network
from stretto.evals.order import layer_order, survey
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.parallel import join
from stretto.model.spec import ModelConfig, Subnet, SubnetChoice, count, extracted_config
from stretto.model.transformer import SwiGlu, Transformer, load_state, skeleton
from stretto.model.upcycle import (
    ROUTER_SCALE,
    LayerPlan,
    UpcycledState,
    Upcycling,
    upcycled_config,
    upcycled_presets,
)
from stretto.text.chat import named_tokens, render
from stretto.text.tokenizer import Tokenizer, load_tokenizer
from stretto.train.loop import Job, Trained, elasticize, heal
from stretto.train.recipe import ElasticizeRecipe, HealRecipe

RECIPES = Path(__file__).parents[1] / "recipes"
KD_WEIGHT = 0.75
"""Of KL to the original, in every run; the rest is cross-entropy."""
SHORT = (
    "experts_from=0", "top_k_from=0", "elastic.ramp_fraction=0", "elastic.anchor_share=0.8", "elastic.depth_share=0.05",
    "elastic.top_k_share=0.05", "elastic.width_share=0.05",
)  # fmt: skip
"""Too few steps for one axis after the other, and for many sizes beside those that are shown."""
STILL_ROUTERS = ("optim.router_lr_factor=0", "elastic.balance_rate=0", "elastic.balance_final_rate=0")
"""Routers that were fitted to what experts write are kept: one step of an ordinary size would write over them."""
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 7 + 5?",
    "Name three colours.",
    "Why is the sky blue?",
    "Translate to French: Good morning.",
    "Give me a tip for sleeping well.",
    "What does a carpenter do?",
    "Complete: The quick brown fox",
    "Write a Python function that adds two numbers.",
)
ANSWER_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Text:
    """What networks read."""

    mixture: Mixture
    data_hash: str
    calibration: list[EvalBatch]
    selection: list[EvalBatch]
    report: list[EvalBatch]
    report_bytes: int
    """Of the tokens that carry a loss."""


@dataclass(frozen=True, slots=True)
class Size:
    """A network, or a part of one, that is compared."""

    name: str
    model: Transformer
    subnet: Subnet


def main() -> None:
    arguments = _parse()
    torch.manual_seed(0)
    out: Path = arguments.out
    folder = checkpoint_folder(arguments.source)
    tokenizer = load_tokenizer(folder)
    dense = read_checkpoint(folder, dtype=torch.float32).model
    text = _text(arguments, folder, tokenizer, dense.config.vocab_size)
    dense.config = dense.config.replace(layer_order=_layers(dense, text))
    how = Upcycling(experts=arguments.experts, top_k=arguments.top_k)
    plans = plan(dense, how, text)
    if arguments.zero_shot:
        _zero_shot(dense, how, plans, text)
        return
    moe = upcycled(dense, how, plans, arguments.routers)
    presets = upcycled_presets(moe.config, how)
    small = {name: choice.of(moe.config) for name, choice in presets.items()}
    strength = strengths(dense, text)
    controls = {name: pruned(dense, moe.config, subnet, strength) for name, subnet in small.items()}
    sizes = [Size("original", dense, dense.config.full()), Size("full, untrained", moe, moe.config.full())]
    sizes += [Size(f"{name}, untrained", moe, subnet) for name, subnet in small.items()]
    sizes += [Size(f"{name}'s control, untrained", model, model.config.full()) for name, model in controls.items()]
    bench = Bench(arguments, text, dense)
    elastic = bench.elastic(moe, presets)
    budget = elastic.flops // len(controls)
    healed = {name: bench.control(name, model, budget) for name, model in controls.items()}
    sizes += [Size("full", elastic.model, elastic.model.config.full())]
    sizes += [Size(name, elastic.model, choice.of(elastic.model.config)) for name, choice in presets.items()]
    sizes += [Size(f"{name}'s control", run.model, run.model.config.full()) for name, run in healed.items()]
    bits = _bits(sizes, text)
    runs = {"elastic": elastic} | {f"{name}'s control": run for name, run in healed.items()}
    rich.print(_table(sizes, bits), _cost(runs))
    write_json(out / "bits.json", bits)
    trained = [size for size in sizes if "untrained" not in size.name]
    _print_answers(trained, tokenizer, folder, out)
    _verdict(bits)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="run or checkpoint of a dense model")
    parser.add_argument("--data", nargs="+", required=True, help="text to train on, and to choose rates by")
    parser.add_argument("--report", nargs="+", required=True, help="other text, for the figures")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="of the elastic run")
    parser.add_argument("--pilot", type=int, default=10, help="steps that try a rate")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4])
    parser.add_argument("--rows", type=int, default=8, help="of a step")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--report-rows", type=int, default=48)
    parser.add_argument("--routers", choices=("informed", "random"), default="informed")
    parser.add_argument("--set", action="append", default=[], help="override a key of the elastic run's recipe")
    parser.add_argument("--zero-shot", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-smol-moe"))
    return parser.parse_args()


# --- text -------------------------------------------------------------------------------------------------------------


def _text(arguments: argparse.Namespace, folder: Path, tokenizer: Tokenizer, vocab_size: int) -> Text:
    mixture, _, data_hash = prepare_data(arguments.out, arguments.data, folder, vocab_size)
    told, _, _ = prepare_data(arguments.out / "report", arguments.report, folder, vocab_size)

    def batches(parts: Mixture, split: str, rows: int, seed: int) -> list[EvalBatch]:
        num = max(1, rows // (8 * len(parts.parts)))
        found = (eval_batches(part, 8, arguments.seq_len, num, seed) for part in parts.open(split))
        return [EvalBatch.of(batch, "cpu") for each in found for batch in each]

    report = batches(told, "train", arguments.report_rows, 0)
    num_bytes = sum(
        len(tokenizer.decode(targets_T[targets_T >= 0].tolist()).encode())
        for batch in report
        for targets_T in batch.targets_BT
    )
    return Text(mixture, data_hash, batches(mixture, "train", 48, 1), batches(mixture, "val", 16, 0), report, num_bytes)


def _bits(sizes: Sequence[Size], text: Text) -> dict[str, float]:
    """Bits per byte of --report, by name."""
    found: dict[str, float] = {}
    with progress("measure", len(sizes) * len(text.report)) as advance, _bf16():
        for size in sizes:
            (told,) = evaluate_many(size.model, [size.subnet], text.report, advance=advance)
            found[size.name] = told.nll * told.num_tokens / math.log(2) / text.report_bytes
    return found


def _bf16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


# --- networks ---------------------------------------------------------------------------------------------------------


def _layers(dense: Transformer, text: Text) -> tuple[int, ...]:
    """By leaving each out, as `stretto adopt` ranks them."""
    with progress("rank layers", dense.config.num_layers) as advance, _bf16():
        return layer_order(dense.config, survey(dense, text.calibration[:1], left_out=1, advance=advance).logit_error)


def plan(dense: Transformer, how: Upcycling, text: Text) -> list[LayerPlan]:
    with progress("plan experts", dense.config.num_layers * len(text.calibration)) as advance:
        return plan_network(dense, text.calibration, how, advance=advance)


def upcycled(dense: Transformer, how: Upcycling, plans: Sequence[LayerPlan], routers: str) -> Transformer:
    """The dense network in experts. ``routers``: ``informed``, ``static`` (the same experts for every token), ``zero`` or ``random``."""
    config = upcycled_config(dense.config, how)
    order_E = torch.tensor(config.expert_orders[0])
    place_E = order_E.argsort().float()
    generator = torch.Generator().manual_seed(0)
    if routers == "random":
        drawn = [torch.randn(each.gate_ED.shape, generator=generator) * each.gate_ED.std() for each in plans]
        plans = [replace(each, gate_ED=gate_ED, bias_E=0 * place_E) for each, gate_ED in zip(plans, drawn, strict=True)]
    elif routers != "informed":
        bias_E = -ROUTER_SCALE * place_E * (routers == "static")
        plans = [replace(each, gate_ED=torch.zeros_like(each.gate_ED), bias_E=bias_E) for each in plans]
    return load_state(skeleton(config), UpcycledState(config, how, plans, dense.state_dict()).items())


def strengths(dense: Transformer, text: Text) -> list[Tensor]:
    """By layer, what each neuron writes."""
    with progress("rank neurons", dense.config.num_layers * len(text.calibration)) as advance:
        return each_layer(dense, text.calibration, _strength, advance=advance)


def _strength(layer: int, mlp: SwiGlu, x_ND: Tensor) -> Tensor:
    return activity(mlp.gate_up.weight, mlp.down.weight, x_ND)[0]


def pruned(dense: Transformer, moe: ModelConfig, subnet: Subnet, strength: Sequence[Tensor]) -> Transformer:
    """The dense network with the layers of ``subnet``, and the strongest neurons of each feed-forward network: as many as a token
    uses in ``subnet``."""
    width = (moe.num_shared_experts + subnet.top_k[0]) * moe.expert_intermediate_size
    config = extracted_config(dense.config, dense.config.full(subnet.layers)).replace(dense_intermediate_size=width)
    state: dict[str, Tensor] = {}
    for name, tensor in dense.state_dict().items():
        if not name.startswith("blocks."):
            state[name] = tensor.clone()
            continue
        _, number, rest = name.split(".", 2)
        layer = int(number)
        if layer not in subnet.layers:
            continue
        kept = strength[layer].topk(width).indices.sort().values
        if rest == "mlp.gate_up.weight":
            tensor = torch.cat([half[kept] for half in tensor.chunk(2)])
        elif rest == "mlp.down.weight":
            tensor = tensor[:, kept]
        state[f"blocks.{subnet.layers.index(layer)}.{rest}"] = tensor.clone()
    return load_state(skeleton(config), state.items())


def _zero_shot(dense: Transformer, how: Upcycling, plans: Sequence[LayerPlan], text: Text) -> None:
    """Rise of bits per byte over the original's at every top-k, by router."""
    names = [f"{k}" for k in range(how.num_routed, 0, -1)]
    original = _bits([Size("original", dense, dense.config.full())], text)["original"]
    table = Table("router", *(f"top-{name}" for name in names), title="bits per byte over the original's")
    for routers in ("informed", "static", "zero", "random"):
        model = upcycled(dense, how, plans, routers)
        bits = _bits([Size(name, model, model.config.subnet(top_k=int(name))) for name in names], text)
        table.add_row(routers, *(f"{value - original:+.4f}" for value in bits.values()))
    rich.print(table)


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """A finished one."""

    model: Transformer
    rate: float
    tokens: int
    flops: int
    """Of the training itself, the teacher's passes included."""
    pilot: dict[str, float]
    """Loss on the selection rows, by rate."""


class Bench:
    """Trains; every run is kept in ``out`` as a checkpoint and what it cost."""

    def __init__(self, arguments: argparse.Namespace, text: Text, dense: Transformer):
        self.arguments, self.text, self.dense, self.ranks = arguments, text, dense, join("cpu", 1)

    def elastic(self, moe: Transformer, presets: Mapping[str, SubnetChoice]) -> Run:
        def train(rate: float, steps: int) -> Trained:
            told = self._told(rate, steps)
            told += [
                f"kd_weight={KD_WEIGHT}",
                f"kd_final_weight={KD_WEIGHT}",
                *SHORT,
                *STILL_ROUTERS,
                *self.arguments.set,
            ]
            recipe = read_recipe(RECIPES / "elasticize.toml", ElasticizeRecipe, told)
            recipe = recipe.for_network(moe.config, presets)
            return elasticize(
                recipe, self._job(recipe.train.micro_rows, recipe.train.seed), lambda: _copy(moe), self._teacher
            )

        def losses(model: Transformer) -> float:
            subnets = [model.config.full(), *(choice.of(model.config) for choice in presets.values())]
            with _bf16():
                return sum(each.nll for each in evaluate_many(model, subnets, self.text.selection)) / len(subnets)

        return self._best("elastic", train, losses, lambda flops_per_step: self.arguments.steps)

    def control(self, name: str, model: Transformer, budget: int) -> Run:
        def train(rate: float, steps: int) -> Trained:
            told = [*self._told(rate, steps), f"ce_weight={1 - KD_WEIGHT}"]
            recipe = read_recipe(RECIPES / "heal.toml", HealRecipe, told)
            return heal(recipe, self._job(recipe.train.micro_rows, recipe.train.seed), _copy(model), self._teacher)

        def loss(trained: Transformer) -> float:
            with _bf16():
                return evaluate_many(trained, [trained.config.full()], self.text.selection)[0].nll

        return self._best(f"control-{name}", train, loss, lambda flops_per_step: round(budget / flops_per_step))

    def _told(self, rate: float, steps: int) -> list[str]:
        arguments = self.arguments
        return [
            f"optim.lr={rate}", "optim.name=adamw", f"optim.warmup_steps={max(1, steps // 20)}", "optim.decay_fraction=0.8",
            "optim.final_lr_fraction=0.05", "optim.weight_decay=0", f"train.steps={steps}", f"train.rows={arguments.rows}",
            f"train.seq_len={arguments.seq_len}", "train.micro_batches=2", "train.dtype=bfloat16", "train.seed=0",
            f"train.snapshot_every={steps}", "train.keep_snapshots=1",
        ]  # fmt: skip

    def _teacher(self) -> Transformer:
        return _copy(self.dense)

    def _job(self, rows: int, seed: int) -> Job:
        mixture = self.text.mixture
        loader = Loader(mixture.open(), mixture.weights, rows, self.arguments.seq_len, seed, 0, 1)
        run = self.arguments.out / "run"
        remove(run)
        return Job(run, loader, (), self.text.data_hash, self.ranks)

    def _best(
        self,
        name: str,
        train: Callable[[float, int], Trained],
        loss: Callable[[Transformer], float],
        steps: Callable[[float], int],
    ) -> Run:
        """Trained at the best of the rates; ``steps`` of the FLOPs of one step."""
        folder = self.arguments.out / name
        if (folder / "cost.json").is_file():
            return Run(read_checkpoint(folder, dtype=torch.float32).model, **read_json(folder / "cost.json"))
        pilot, flops_per_step = dict[str, float](), 0.0
        for rate in self.arguments.rates:
            trained = train(rate, self.arguments.pilot)
            pilot[f"{rate:g}"] = loss(trained.model)
            flops_per_step = trained.meter.receipt().flops / self.arguments.pilot
        rate = min(self.arguments.rates, key=lambda rate: pilot[f"{rate:g}"])
        rich.print(f"{name}: selection loss by rate {pilot}")
        trained = train(rate, steps(flops_per_step))
        receipt = trained.meter.receipt()
        remove(self.arguments.out / "run")
        write_checkpoint(folder, trained.model, trained.model.config)
        cost = {"rate": rate, "tokens": receipt.tokens, "flops": receipt.flops, "pilot": pilot}
        write_json(folder / "cost.json", cost)
        return Run(trained.model, **cost)


def _copy(model: Transformer) -> Transformer:
    return load_state(skeleton(model.config), model.state_dict().items())


# --- what is told -----------------------------------------------------------------------------------------------------


def _table(sizes: Sequence[Size], bits: Mapping[str, float]) -> Table:
    table = Table("network", "layers", "parameters", "for a token", "bits/byte", "over the original")
    for size in sizes:
        counts = count(size.model.config, size.subnet)
        rise = bits[size.name] / bits["original"] - 1
        numbers = (len(size.subnet.layers), si(counts.total_params), si(counts.active_params))
        table.add_row(size.name, *map(str, numbers), f"{bits[size.name]:.4f}", f"{rise:+.2%}")
    return table


def _cost(runs: Mapping[str, Run]) -> Table:
    table = Table("run", "rate", "tokens", "FLOPs", "selection loss by rate")
    for name, run in runs.items():
        told = ", ".join(f"{rate}: {loss:.3f}" for rate, loss in run.pilot.items())
        table.add_row(name, f"{run.rate:g}", f"{run.tokens:,}", f"{run.flops:.2e}", told)
    return table


def _print_answers(sizes: Sequence[Size], tokenizer: Tokenizer, folder: Path, out: Path) -> None:
    """The same prompts, greedily, at each size."""
    ends = generation_ends(folder, tokenizer.vocab_size)
    answers: dict[str, dict[str, str]] = {prompt: {} for prompt in PROMPTS}
    for size in sizes:
        engine = Engine(
            size.model, tokenizer, EngineConfig(max_len=512, cache_bytes=1 << 28), end_ids=ends, routes=False
        )
        requests = [_request(prompt, tokenizer, size.subnet) for prompt in PROMPTS]
        for done in engine.generate(requests):
            answers[done.request_id][size.name] = done.text.strip()
    for prompt, told in answers.items():
        table = Table("network", "answer", title=prompt, title_justify="left")
        for name, answer in told.items():
            table.add_row(name, answer)
        rich.print(table)
    write_json(out / "answers.json", answers)


def _request(prompt: str, tokenizer: Tokenizer, subnet: Subnet) -> Request:
    assert tokenizer.chat_template is not None, "a chat model has a template"
    messages = [{"role": "user", "content": prompt}]
    rendered = render(tokenizer.chat_template, messages, add_generation_prompt=True, variables=named_tokens(tokenizer))
    sampling = Sampling(temperature=0, max_tokens=ANSWER_TOKENS)
    return Request(prompt, tuple(tokenizer.encode_rendered(rendered)), sampling, Phases(subnet))


def _verdict(bits: Mapping[str, float]) -> None:
    """The aims; exits with 1 where one is missed."""
    told = {
        "full within 1 % of the original": bits["full"] <= 1.01 * bits["original"],
        "full ≤ half ≤ corner": bits["full"] <= bits["half"] <= bits["corner"],
        "corner beats its control": bits["corner"] < bits["corner's control"],
        "half beats its control": bits["half"] < bits["half's control"],
    }
    for aim, is_met in told.items():
        rich.print(f"{'met   ' if is_met else 'MISSED'} {aim}")
    if not all(told.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
