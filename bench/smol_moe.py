"""A dense chat model as an elastic Mixture of Experts: what each size loses, beside the same model pruned and healed.

    stretto adopt smollm2 -o runs/s
    python -m bench.smol_moe runs/s --data TEXT --report OTHER_TEXT --seed 0 1 2             a quarter of an hour a seed
    python -m bench.smol_moe runs/s --data TEXT --report OTHER_TEXT --seed 0 1 2 --rows 8 --steps 1000 --pilot 100

SOURCE is cut into experts (`stretto.evals.neurons`), then trained as `stretto elasticize` does, with its recipe. The control of each
smaller size is the dense network with as many layers, dropped by the same ranking, and as many neurons in a feed-forward network
as that size computes for a token, the strongest on the same text. It is healed with the same loss twice: with its share of the
elastic run's FLOPs (all sizes' controls together get what the family got), and with as many tokens as the elastic run saw, all
of its sizes together. The control of the full network is SOURCE itself, continued on as many tokens: what the text teaches.

Every network has its own rate, the best of --rates in short runs on held-out rows of --data; rates are added until the best is
not the highest or lowest. The first seed chooses for all. A seed draws the rows that experts, layers and neurons are ranked on,
the order of training, and the rows of --report, which nothing else reads. What is in --out is not run again, so seeds may be
given one command at a time.

`--zero-shot` stops before training and compares routers; `--routers random` is a mutant that must lose to the default.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import rich
import torch
from pydantic import Field
from rich.table import Table
from torch import Tensor

from bench.common.measure import half_width, wide_console
from stretto.base.config import Config, read_recipe
from stretto.base.errors import UserError
from stretto.base.numbers import si
from stretto.base.paths import checkpoint_folder, read_json, remove, write_json
from stretto.base.track import progress
from stretto.data.loader import Loader, Mixture, eval_batches
from stretto.engine.engine import Engine
from stretto.engine.loading import generation_ends
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.evals.loss import EvalBatch, evaluate_many
from stretto.evals.neurons import activity, each_layer, plan_layer
from stretto.evals.order import layer_order, survey
from stretto.model.checkpoint import read_checkpoint
from stretto.model.parallel import join
from stretto.model.spec import ModelConfig, Subnet, SubnetChoice, count, extracted_config
from stretto.model.transformer import Context, Output, SwiGlu, Transformer, load_state, skeleton
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
from stretto.train.prepare import prepare_data
from stretto.train.recipe import ElasticizeRecipe, HealRecipe
from stretto.train.step import NonFiniteError

RECIPES = Path(__file__).parents[1] / "stretto/recipes"
KD_WEIGHT = 0.75
"""Of KL to the original, in every run; the rest is cross-entropy."""
SHORT = (
    "experts_from=0", "top_k_from=0", "elastic.ramp_fraction=0", "elastic.anchor_share=0.8", "elastic.depth_share=0.05",
    "elastic.top_k_share=0.05", "elastic.width_share=0.05",
)  # fmt: skip
"""Too few steps for one axis after the other, and for many sizes beside those that are shown."""
STILL_ROUTERS = ("optim.router_lr_factor=0", "elastic.balance_rate=0", "elastic.balance_final_rate=0")
"""Routers that were fitted to what experts write are kept: one step of an ordinary size would write over them."""
MOST_RATES = 8
"""Tried for a network before the bench gives up looking for a best one with others above and below."""
CONTROLS = ("equal FLOPs", "equal tokens")
CONTINUED = "original, continued"
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
class Source:
    """What all seeds share."""

    folder: Path
    """The dense model's checkpoint."""
    tokenizer: Tokenizer
    mixture: Mixture
    """Of --data."""
    data_hash: str
    told: Mixture
    """Of --report."""


@dataclass(frozen=True, slots=True)
class Text:
    """The rows of a seed."""

    calibration: list[EvalBatch]
    selection: list[EvalBatch]
    report: list[EvalBatch]
    report_bytes: int
    """Of the tokens that carry a loss."""


@dataclass(frozen=True, slots=True)
class Networks:
    """What is trained, as it is before."""

    original: Transformer
    moe: Transformer
    presets: Mapping[str, SubnetChoice]
    pruned: Mapping[str, Transformer]
    """By preset."""


@dataclass(frozen=True, slots=True)
class Size:
    """A network, or a part of one, that is compared."""

    name: str
    model: Transformer
    subnet: Subnet
    is_asked: bool = True
    """Whether `PROMPTS` are put to it, in the first seed."""


class Measured(Config):
    """What is told of a size."""

    num_layers: int
    total_params: int
    active_params: int
    bits: float
    """Per byte of --report."""
    answers: dict[str, str]
    """To `PROMPTS`; empty where they were not asked, as in all seeds but a command's first."""


class Run(Config):
    """A finished one, or what was not trained at all. Kept in the seed's folder."""

    sizes: dict[str, Measured]
    rate: float = 0.0
    losses: dict[str, float] = Field(default_factory=dict)
    """That the rate was chosen by, as in `Chosen`."""
    tokens: int = 0
    flops: int = 0
    """Of the training itself, the teacher's passes included."""
    tokens_by_kind: dict[str, int] = Field(default_factory=dict)
    """Tokens that each size of an elastic run was trained on; the sampler's other kinds beside them."""


class Chosen(Config):
    """A network's rate."""

    rate: float
    losses: dict[str, float]
    """On the selection rows, by rate."""
    flops_per_step: float


def main() -> None:
    arguments = _parse()
    if arguments.zero_shot:
        _zero_shot(arguments, _source(arguments))
        return
    _same_command(arguments)
    results = [_seed(arguments, seed) for seed in arguments.seed]
    _print_answers(arguments.seed[0], results[0])
    console = wide_console()
    console.print(_networks(results), _runs(results), _pairs(results))
    if not all([_is_met(*aim) for aim in _aims(results)]):
        raise SystemExit(1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="run or checkpoint of a dense model")
    parser.add_argument("--data", nargs="+", required=True, help="text to train on, and to choose rates by")
    parser.add_argument("--report", nargs="+", required=True, help="other text, for the figures")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one or more; intervals need two")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--shared", type=int, default=1, help="parts that every token uses")
    parser.add_argument("--steps", type=int, default=20, help="of the elastic run")
    parser.add_argument("--pilot", type=int, default=5, help="steps that try a rate")
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 6e-4, 1.2e-3], help="the first that are tried")
    parser.add_argument("--rows", type=int, default=4, help="of a step")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--report-rows", type=int, default=24)
    parser.add_argument("--routers", choices=("informed", "random"), default="informed")
    parser.add_argument("--set", action="append", default=[], help="override a key of the elastic run's recipe")
    parser.add_argument("--zero-shot", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-smol-moe"))
    arguments = parser.parse_args()
    if len(set(arguments.rates)) < 3:
        parser.error("--rates: give three or more; of two, one is always at an edge")
    return arguments


def _same_command(arguments: argparse.Namespace) -> None:
    """Raises `UserError`: --out holds results of other arguments."""
    told = {name: str(value) for name, value in vars(arguments).items() if name not in ("seed", "out")}
    kept = arguments.out / "arguments.json"
    before = read_json(kept) if kept.is_file() else told
    differing = [name for name in told if before.get(name) != told[name]]
    if differing:
        name = differing[0]
        raise UserError(f"{kept}: {name} was {before.get(name)}, now it is {told[name]}; choose another --out")
    write_json(kept, told)


def _seed(arguments: argparse.Namespace, seed: int) -> dict[str, Run]:
    """All runs of a seed, by name."""
    kept = arguments.out / f"seed-{seed}.json"
    if kept.is_file():
        return {name: Run.model_validate(run) for name, run in read_json(kept).items()}
    rich.print(f"[bold]seed {seed}")
    source = _source(arguments)
    text = _text(arguments, source, seed)
    bench = Bench(arguments, source, seed, text, networks(arguments, source, seed, text))
    runs = {"": bench.untrained(), "elastic": bench.elastic()}
    shares = dict(zip(CONTROLS, (runs["elastic"].flops / len(bench.networks.presets), math.inf), strict=True))
    runs[CONTINUED] = bench.control(CONTINUED, "original", bench.networks.original, math.inf)
    for size, model in bench.networks.pruned.items():
        for what, flops in shares.items():
            name = f"{size}'s control, {what}"
            runs[name] = bench.control(name, f"{size}'s control", model, flops)
    write_json(kept, {name: run.model_dump() for name, run in runs.items()})
    return runs


# --- text -------------------------------------------------------------------------------------------------------------


def _source(arguments: argparse.Namespace) -> Source:
    folder = checkpoint_folder(arguments.source)
    tokenizer = load_tokenizer(folder)
    mixture, _, data_hash = prepare_data(arguments.out, arguments.data, folder, tokenizer.vocab_size)
    told, _, _ = prepare_data(arguments.out / "report", arguments.report, folder, tokenizer.vocab_size)
    return Source(folder, tokenizer, mixture, data_hash, told)


def _text(arguments: argparse.Namespace, source: Source, seed: int) -> Text:
    def batches(mixture: Mixture, split: str, rows: int, seed: int) -> list[EvalBatch]:
        num = max(1, rows // (8 * len(mixture.parts)))
        found = (eval_batches(part, 8, arguments.seq_len, num, seed) for part in mixture.open(split))
        return [EvalBatch.of(batch, "cpu") for each in found for batch in each]

    report = batches(source.told, "train", arguments.report_rows, seed)
    num_bytes = sum(
        len(source.tokenizer.decode(targets_T[targets_T >= 0].tolist()).encode())
        for batch in report
        for targets_T in batch.targets_BT
    )
    calibration = batches(source.mixture, "train", 32, 1000 + seed)  # another order than training's
    return Text(calibration, batches(source.mixture, "val", 16, seed), report, num_bytes)


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


def networks(arguments: argparse.Namespace, source: Source, seed: int, text: Text) -> Networks:
    how, dense, plans, strength = _planned(arguments, source, seed, text)
    moe = upcycled(dense, how, plans, arguments.routers)
    presets = upcycled_presets(moe.config, how)
    smaller = {name: pruned(dense, moe.config, choice.of(moe.config), strength) for name, choice in presets.items()}
    return Networks(dense, moe, presets, smaller)


def _planned(
    arguments: argparse.Namespace, source: Source, seed: int, text: Text
) -> tuple[Upcycling, Transformer, list[LayerPlan], list[Tensor]]:
    """How the dense network is cut, itself with its layers ranked, and of every layer its plan and what each neuron writes."""
    how = Upcycling(experts=arguments.experts, top_k=arguments.top_k, shared=arguments.shared, seed=seed)
    dense = read_checkpoint(source.folder, dtype=torch.float32).model
    with progress("rank layers", dense.config.num_layers) as advance, _bf16():  # as `stretto adopt` does
        worth = survey(dense, text.calibration[:1], left_out=1, advance=advance).logit_error
    dense.config = dense.config.replace(layer_order=layer_order(dense.config, worth))

    def find(layer: int, mlp: SwiGlu, x_ND: Tensor) -> tuple[LayerPlan, Tensor]:
        gate_up_FD, down_DW = mlp.gate_up.weight, mlp.down.weight
        return plan_layer(layer, gate_up_FD, down_DW, x_ND, how), activity(gate_up_FD, down_DW, x_ND)[0]

    with progress("plan experts", dense.config.num_layers * len(text.calibration)) as advance, torch.no_grad():
        found = each_layer(dense, text.calibration, find, advance=advance)
    return how, dense, [plan for plan, _ in found], [strength_W for _, strength_W in found]


def upcycled(dense: Transformer, how: Upcycling, plans: Sequence[LayerPlan], routers: str) -> Transformer:
    """The dense network in experts. ``routers``: ``informed``, ``static`` (the same experts for every token), ``zero`` or ``random``."""
    config = upcycled_config(dense.config, how)
    order_E = torch.tensor(config.expert_orders[0])
    place_E = order_E.argsort().float()
    generator = torch.Generator().manual_seed(how.seed)
    if routers == "random":
        drawn = [torch.randn(each.gate_ED.shape, generator=generator) * each.gate_ED.std() for each in plans]
        plans = [replace(each, gate_ED=gate_ED, bias_E=0 * place_E) for each, gate_ED in zip(plans, drawn, strict=True)]
    elif routers != "informed":
        bias_E = -ROUTER_SCALE * place_E * (routers == "static")
        plans = [replace(each, gate_ED=torch.zeros_like(each.gate_ED), bias_E=bias_E) for each in plans]
    return load_state(skeleton(config), UpcycledState(config, how, plans, dense.state_dict()).items())


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


def _zero_shot(arguments: argparse.Namespace, source: Source) -> None:
    """Rise of bits per byte over the original's at every top-k, by router."""
    seed = arguments.seed[0]
    text = _text(arguments, source, seed)
    how, dense, plans, _ = _planned(arguments, source, seed, text)
    names = [f"{k}" for k in range(how.num_routed, 0, -1)]
    original = _bits([Size("original", dense, dense.config.full())], text)["original"]
    table = Table("router", *(f"top-{name}" for name in names), title="bits per byte over the original's")
    for routers in ("informed", "static", "zero", "random"):
        model = upcycled(dense, how, plans, routers)
        bits = _bits([Size(name, model, model.config.subnet(top_k=int(name))) for name in names], text)
        table.add_row(routers, *(f"{value - original:+.4f}" for value in bits.values()))
    rich.print(table)


# --- training ---------------------------------------------------------------------------------------------------------


class Teacher(Transformer):
    """Knows what it said about rows that it was given before: all runs of a seed read the same. Receipts count it as computed."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.said: dict[bytes, Output] = {}

    def forward(self, ids_BT: Tensor, subnet: Subnet, ctx: Context) -> Output:
        rows = ids_BT.numpy().tobytes()
        if rows not in self.said:
            self.said[rows] = super().forward(ids_BT, subnet, ctx)
        return self.said[rows]


class Bench:
    """Trains and measures the networks of a seed."""

    def __init__(self, arguments: argparse.Namespace, source: Source, seed: int, text: Text, networks: Networks):
        self.arguments, self.source, self.seed, self.text, self.networks = arguments, source, seed, text, networks
        self.ranks = join("cpu", 1)
        with torch.device("meta"):
            teacher = Teacher(networks.original.config)
        self.teacher = load_state(teacher, networks.original.state_dict().items())

    def untrained(self) -> Run:
        original, moe, presets = self.networks.original, self.networks.moe, self.networks.presets
        parts = {"full": moe.config.full()} | {name: choice.of(moe.config) for name, choice in presets.items()}
        sizes = [Size("original", original, original.config.full())]
        sizes += [Size(f"{name}, untrained", moe, subnet, is_asked=False) for name, subnet in parts.items()]
        sizes += [
            Size(f"{name}'s control, untrained", model, model.config.full(), is_asked=False)
            for name, model in self.networks.pruned.items()
        ]
        return self._once("untrained", lambda: Run(sizes=self._measured(sizes)))

    def elastic(self) -> Run:
        """The recipe's run, of which the network's sizes are measured."""
        moe, presets = self.networks.moe, self.networks.presets

        def train(rate: float, steps: int) -> Trained:
            told = [*self._told(rate, steps), f"kd_weight={KD_WEIGHT}", f"kd_final_weight={KD_WEIGHT}"]
            told += [*SHORT, *STILL_ROUTERS, *self.arguments.set]
            recipe = read_recipe(RECIPES / "elasticize.toml", ElasticizeRecipe, told).for_network(moe.config, presets)
            return elasticize(recipe, self._job(recipe.train.micro_rows), lambda: _copy(moe), lambda: self.teacher)

        def sizes(model: Transformer) -> list[Size]:
            smaller = [Size(name, model, choice.of(model.config)) for name, choice in presets.items()]
            return [Size("full", model, model.config.full()), *smaller]

        return self._once("elastic", lambda: self._trained("elastic", train, sizes, math.inf))

    def control(self, name: str, kind: str, model: Transformer, flops: float) -> Run:
        """``model`` trained on the elastic run's tokens, or on fewer where that is all that ``flops`` pay for. Controls of a
        ``kind`` share a rate."""

        def train(rate: float, steps: int) -> Trained:
            told = [*self._told(rate, steps), f"ce_weight={1 - KD_WEIGHT}"]
            recipe = read_recipe(RECIPES / "heal.toml", HealRecipe, told)
            return heal(recipe, self._job(recipe.train.micro_rows), _copy(model), lambda: self.teacher)

        def sizes(trained: Transformer) -> list[Size]:
            return [Size(name, trained, trained.config.full())]

        return self._once(name, lambda: self._trained(kind, train, sizes, flops))

    def _told(self, rate: float, steps: int) -> list[str]:
        arguments = self.arguments
        return [
            f"optim.lr={rate}", "optim.name=adamw", f"optim.warmup_steps={max(1, steps // 10)}", "optim.decay_fraction=0.8",
            "optim.final_lr_fraction=0.05", "optim.weight_decay=0", f"train.steps={steps}", f"train.rows={arguments.rows}",
            f"train.seq_len={arguments.seq_len}", "train.micro_batches=2", "train.dtype=bfloat16",
            f"train.seed={self.seed}", f"train.snapshot_every={steps}", "train.keep_snapshots=1",
        ]  # fmt: skip

    def _job(self, rows: int) -> Job:
        mixture = self.source.mixture
        loader = Loader(mixture.open(), mixture.weights, rows, self.arguments.seq_len, self.seed, 0, 1)
        run = self.arguments.out / f"seed-{self.seed}" / "run"
        remove(run)
        return Job(run, loader, (), self.source.data_hash, self.ranks)

    def _once(self, name: str, make: Callable[[], Run]) -> Run:
        """What ``make`` gives, now or earlier."""
        folder = self.arguments.out / f"seed-{self.seed}"
        kept = folder / f"{name}.json"
        if kept.is_file():
            return Run.model_validate(read_json(kept))
        run = make()
        remove(folder / "run")
        write_json(kept, run.model_dump())
        return run

    def _trained(
        self,
        kind: str,
        train: Callable[[float, int], Trained],
        sizes: Callable[[Transformer], list[Size]],
        flops: float,
    ) -> Run:
        """Trained at its rate, and measured."""
        chosen = self._chosen(kind, train, sizes)
        trained = train(chosen.rate, round(min(self.arguments.steps, flops / chosen.flops_per_step)))
        receipt = trained.meter.receipt()
        return Run(
            sizes=self._measured(sizes(trained.model)),
            rate=chosen.rate,
            losses=chosen.losses,
            tokens=receipt.tokens,
            flops=receipt.flops,
            tokens_by_kind=trained.tokens_by_kind,
        )

    def _chosen(
        self, kind: str, train: Callable[[float, int], Trained], sizes: Callable[[Transformer], list[Size]]
    ) -> Chosen:
        """The rate with the lowest loss on the selection rows, as a mean over ``sizes``, after a short run."""
        kept = self.arguments.out / "rates" / f"{kind}.json"
        if kept.is_file():
            return Chosen.model_validate(read_json(kept))
        losses, flops, waiting = dict[float, float](), 0.0, list(self.arguments.rates)
        while waiting:
            rate = waiting.pop(0)
            try:
                trained = train(rate, self.arguments.pilot)
            except NonFiniteError:
                losses[rate] = math.inf
            else:
                losses[rate] = self._selection_loss(sizes(trained.model))
                flops = trained.meter.receipt().flops / self.arguments.pilot
            if not waiting and (further := beyond(losses)) is not None:
                if len(losses) == MOST_RATES:
                    raise UserError(f"--rates: of {sorted(losses)} an outermost is best for {kind}; give others")
                waiting.append(further)
        rate = min(losses, key=losses.__getitem__)
        told = {f"{each:g}": losses[each] for each in sorted(losses)}
        rich.print(f"{kind}: selection loss by rate {told}")
        chosen = Chosen(rate=rate, losses=told, flops_per_step=flops)
        write_json(kept, chosen.model_dump())
        return chosen

    def _selection_loss(self, sizes: Sequence[Size]) -> float:
        with _bf16():
            found = [evaluate_many(each.model, [each.subnet], self.text.selection)[0] for each in sizes]
        return statistics.fmean(each.nll for each in found)

    def _measured(self, sizes: Sequence[Size]) -> dict[str, Measured]:
        bits, found = _bits(sizes, self.text), dict[str, Measured]()
        is_first = self.seed == self.arguments.seed[0]
        for size in sizes:
            counts = count(size.model.config, size.subnet)
            found[size.name] = Measured(
                num_layers=len(size.subnet.layers),
                total_params=counts.total_params,
                active_params=counts.active_params,
                bits=bits[size.name],
                answers=_answers(size, self.source) if is_first and size.is_asked else {},
            )
        return found


def beyond(losses: Mapping[float, float]) -> float | None:
    """The next rate to try where the best of ``losses`` is the highest or the lowest; None where it lies between others."""
    rates = sorted(losses)
    best = min(rates, key=losses.__getitem__)
    if best not in (rates[0], rates[-1]):
        return None
    neighbour = rates[1] if best == rates[0] else rates[-2]
    return float(f"{best * best / neighbour:.3g}")


def _copy(model: Transformer) -> Transformer:
    return load_state(skeleton(model.config), model.state_dict().items())


def _answers(size: Size, source: Source) -> dict[str, str]:
    """To the same prompts, greedily."""
    ends = generation_ends(source.folder, source.tokenizer.vocab_size)
    config = EngineConfig(max_len=512, cache_bytes=1 << 28)
    engine = Engine(size.model, source.tokenizer, config, end_ids=ends, routes=False)
    done = engine.generate([_request(prompt, source.tokenizer, size.subnet) for prompt in PROMPTS])
    return {each.request_id: each.text.strip() for each in done}


def _request(prompt: str, tokenizer: Tokenizer, subnet: Subnet) -> Request:
    assert tokenizer.chat_template is not None, "a chat model has a template"
    messages = [{"role": "user", "content": prompt}]
    rendered = render(tokenizer.chat_template, messages, add_generation_prompt=True, variables=named_tokens(tokenizer))
    sampling = Sampling(temperature=0, max_tokens=ANSWER_TOKENS)
    return Request(prompt, tuple(tokenizer.encode_rendered(rendered)), sampling, Phases(subnet))


# --- what is told -----------------------------------------------------------------------------------------------------


def _sizes(runs: Mapping[str, Run]) -> dict[str, Measured]:
    return {name: size for run in runs.values() for name, size in run.sizes.items()}


def _presets(runs: Mapping[str, Run]) -> list[str]:
    return [name for name in runs["elastic"].sizes if name != "full"]


def _rises(results: Sequence[Mapping[str, Run]], one: str, other: str = "original") -> list[float]:
    """By seed: bits per byte of ``one`` less those of ``other``, as a share of the original's."""
    found = []
    for runs in results:
        sizes = _sizes(runs)
        found.append((sizes[one].bits - sizes[other].bits) / sizes["original"].bits)
    return found


def _percent(values: Sequence[float]) -> str:
    mean, half = statistics.fmean(values), half_width(values)
    return f"{mean:+.2%}" if math.isinf(half) else f"{mean:+.2%} ± {half:.2%}"


def _networks(results: Sequence[Mapping[str, Run]]) -> Table:
    columns = ("network", "layers", "parameters", "for a token", "bits/byte", "over the original")
    table = Table(*columns, title=f"seeds: {len(results)}")
    for name, size in _sizes(results[0]).items():
        bits = statistics.fmean(_sizes(runs)[name].bits for runs in results)
        numbers = (f"{size.num_layers}", si(size.total_params), si(size.active_params), f"{bits:.4f}")
        table.add_row(name, *numbers, _percent(_rises(results, name)))
    return table


def _runs(results: Sequence[Mapping[str, Run]]) -> Table:
    """Means over the seeds."""
    columns = ("run", "rate", "selection loss by rate", "tokens", "of them, by size", "FLOPs", "of the elastic run's")
    table = Table(*columns, title="what training cost")

    of_elastic = statistics.fmean(runs["elastic"].flops for runs in results)
    for name, first in results[0].items():
        if not first.tokens:
            continue
        losses = ", ".join(f"{rate}: {loss:.3f}" for rate, loss in first.losses.items())
        tokens = statistics.fmean(runs[name].tokens for runs in results)
        kinds = sum((Counter(runs[name].tokens_by_kind) for runs in results), Counter())
        by_size = ", ".join(f"{kind} {num / len(results):,.0f}" for kind, num in sorted(kinds.items()))
        flops = statistics.fmean(runs[name].flops for runs in results)
        share = f"{flops / of_elastic:.2f}"
        table.add_row(name, f"{first.rate:g}", losses, f"{tokens:,.0f}", by_size, f"{flops:.2e}", share)
    return table


def _pairs(results: Sequence[Mapping[str, Run]]) -> Table:
    """Differences within a seed, as a share of the original's bits per byte."""
    table = Table(
        "difference", "mean ± 95 % (Student)", "by seed", title="paired by seed, share of the original's bits per byte"
    )
    pairs = [("full", "original"), ("full", CONTINUED), (CONTINUED, "original")]
    pairs += [(size, f"{size}'s control, {what}") for size in _presets(results[0]) for what in CONTROLS]
    for one, other in pairs:
        rises = _rises(results, one, other)
        table.add_row(f"{one} − {other}", _percent(rises), ", ".join(f"{rise:+.2%}" for rise in rises))
    return table


def _print_answers(seed: int, runs: Mapping[str, Run]) -> None:
    asked = {name: size.answers for name, size in _sizes(runs).items() if size.answers}
    for prompt in PROMPTS:
        table = Table("network", "answer", title=f"{prompt} (seed {seed})", title_justify="left")
        for name, answers in asked.items():
            table.add_row(name, answers[prompt])
        rich.print(table)


def _aims(results: Sequence[Mapping[str, Run]]) -> list[tuple[str, list[float], float]]:
    """What is aimed at, by how much it is missed or met in each seed, and the most that is allowed."""
    sizes = ["full", *_presets(results[0])]
    aims = [("full within 1 % of the original", _rises(results, "full"), 0.01)]
    aims += [(f"{one} no worse than {other}", _rises(results, one, other), 0.0) for one, other in pairwise(sizes)]
    controls = {size: f"{size}'s control, {CONTROLS[0]}" for size in sizes[1:]}
    return aims + [(f"{size} beats {name}", _rises(results, size, name), 0.0) for size, name in controls.items()]


def _is_met(aim: str, rises: Sequence[float], most: float) -> bool:
    """Tells whether the mean meets the aim, and whether the interval leaves it open."""
    mean, half = statistics.fmean(rises), half_width(rises)
    certain = "" if abs(mean - most) > half else ", within the spread: not settled" if len(rises) > 1 else ", one seed"
    rich.print(f"{'met   ' if mean <= most else 'MISSED'} {aim}{certain}")
    return mean <= most


if __name__ == "__main__":
    main()
