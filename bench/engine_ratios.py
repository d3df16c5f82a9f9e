"""Measure the engine against itself: smaller Subnets, recorded routes, and mixed Subnets in one batch. Prints ratios and their aims.

    python -m bench.engine_ratios [--shape demo|100m] [--run FOLDER] [--batch N] [--rounds N]

Smaller Subnets: decoding speed at a quarter of the top-k and at the corner over that of the full network; prompts are processed before
the clock starts. Routes: throughput of requests with recorded routes over that without. Mixed: throughput of requests at four Subnets in
one batch over that of one Subnet after another, with the same number of sequences at once. All steps take turns in one process, beside
a fixed matrix product. The aims are for a machine without other jobs; the bench does not fail on them.

Beside each ratio of Subnets stand the ratios of the FLOPs of a token and of the parameters that a step reads if it uses every expert of
its Subnets. A decoding step whose time is products reaches the first at best, one whose time is reading weights the second.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.table import Table

from bench.common.measure import (
    Ratio,
    Sample,
    Step,
    bench_parser,
    measure,
    random_prompts,
    ratio,
    table,
    times,
)
from bench.common.networks import SHAPES, random_network, shape
from stretto.base.paths import checkpoint_folder
from stretto.base.track import progress, wide_console
from stretto.engine.engine import Engine
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.model.checkpoint import read_checkpoint
from stretto.model.counts import count
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Transformer
from stretto.ops.native import load

AIMS = {"top-k / 4": 1.15, "corner": 2.2, "routes": 0.98, "mixed": 0.95}
"""For batch 16."""


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="demo", help="shape of a network with random weights")
    parser.add_argument("--run", type=Path, help="a run or a checkpoint, in place of random weights")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64], help="batch sizes")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=33, help="generated tokens for each prompt")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; default: all cores")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model, corner = _network(options)
    engine = Engine(
        model.to(options.device, getattr(torch, options.dtype)),
        None,
        EngineConfig(max_batch=max(*options.batch, 16), max_step_tokens=8192, prefix_cache=False),
        library=load() if options.device == "cpu" else None,
    )
    console, bench = wide_console(), Bench(engine, corner, options.prompt, options.tokens)
    console.print(f"kernels: {engine.stats().kernels}; {torch.get_num_threads()} threads")
    shown = table("over 1: faster", "", "wall", "processor", "FLOPs", "parameters", "aim", "quiet rounds")
    for batch in options.batch:
        samples = bench.run(bench.subnets(batch), options.rounds, f"Subnets, batch {batch}")
        for subnet, label in ((bench.quarter, "top-k / 4"), (bench.corner, "corner")):
            each = ratio(samples, "full", label)
            work = bench.work([bench.config.full()], [subnet])
            _add(shown, f"{label} over full, batch {batch}", each, AIMS[label], work)
    for batch in options.batch:
        samples = bench.run(bench.routes(batch), 2 * options.rounds, f"routes, batch {batch}")
        _add(shown, f"routes on over off, batch {batch}", ratio(samples, "off", "on"), AIMS["routes"])
    samples = bench.run(bench.mixed(16), options.rounds, "mixed Subnets")
    # both ways compute the same tokens; a mixed step may read the full network's weights, whatever its sequences' sizes
    _, params = bench.work(bench.kinds, [bench.config.full()] * len(bench.kinds))
    _add(shown, "mixed over grouped, batch 16", ratio(samples, "grouped", "mixed"), AIMS["mixed"], (1.0, params))
    console.print(shown)


def _network(options: argparse.Namespace) -> tuple[Transformer, Subnet]:
    """The network and its corner: the smallest preset."""
    if options.run:
        checkpoint = read_checkpoint(checkpoint_folder(options.run))
        model, presets = checkpoint.model.requires_grad_(False), checkpoint.presets
    else:
        config, presets, _ = shape(options.shape)
        model = random_network(config)
    subnets = [choice.of(model.config) for choice in presets.values()] or [_half(model.config)]
    return model, min(subnets, key=lambda subnet: sum(subnet.top_k))


def _half(config: ModelConfig) -> Subnet:
    return config.subnet(max(1, config.num_layers // 2), max(1, config.num_experts // 2), max(1, config.top_k // 2))


class Bench:
    """Makes the steps that are compared; they share one engine."""

    def __init__(self, engine: Engine, corner: Subnet, num_prompt: int, num_tokens: int):
        self.engine = engine
        self.config = engine.model.config
        self.quarter = self.config.subnet(top_k=max(1, self.config.top_k // 4))
        self.corner = corner
        self.kinds = (self.config.full(), _half(self.config), self.quarter, self.corner)
        """Subnets of the mixed batches."""
        self.num_prompt = num_prompt
        self.num_tokens = num_tokens
        self._numbers = itertools.count()

    def run(
        self, steps: dict[str, tuple[Callable[[], None], Step]], rounds: int, title: str
    ) -> dict[str, list[Sample]]:
        """Time the second step of each pair; the first prepares it, untimed."""
        with progress(title, len(steps) * (2 + rounds)) as advance:
            prepare = {name: pair[0] for name, pair in steps.items()}
            return measure({name: pair[1] for name, pair in steps.items()}, rounds, advance, prepare=prepare)

    def subnets(self, batch: int) -> dict[str, tuple[Callable[[], None], Step]]:
        """Decoding at full, a quarter of the top-k, and the corner."""
        chosen = {"full": self.config.full(), "top-k / 4": self.quarter, "corner": self.corner}
        return {name: self._decoding([subnet] * batch) for name, subnet in chosen.items()}

    def work(self, over: Sequence[Subnet], under: Sequence[Subnet]) -> tuple[float, float]:
        """FLOPs per token, and parameters, of the Subnets ``over`` in all over those of ``under``."""
        length = self.num_prompt + self.num_tokens // 2
        counts = [[count(self.config, subnet) for subnet in subnets] for subnets in (over, under)]
        flops = [sum(each.forward_flops(1, length) for each in side) for side in counts]
        params = [sum(each.total_params for each in side) for side in counts]
        return flops[0] / flops[1], params[0] / params[1]

    def routes(self, batch: int) -> dict[str, tuple[Callable[[], None], Step]]:
        """Requests without and with recorded routes."""
        full = [self.config.full()] * batch
        return {
            "off": (_nothing, lambda: self.engine.generate(self._requests(full))),
            "on": (_nothing, lambda: self.engine.generate(self._requests(full, want_routes=True))),
        }

    def mixed(self, batch: int) -> dict[str, tuple[Callable[[], None], Step]]:
        """Requests at four Subnets, ``batch`` of each; the engine has one batch at a time."""
        grouped = [kind for kind in self.kinds for _ in range(batch)]
        mixed = [self.kinds[index % len(self.kinds)] for index in range(len(grouped))]
        return {
            "grouped": (_nothing, self._in_batches(grouped, batch)),
            "mixed": (_nothing, self._in_batches(mixed, batch)),
        }

    def _in_batches(self, subnets: Sequence[Subnet], batch: int) -> Step:
        def step() -> None:
            requests = self._requests(subnets)
            for start in range(0, len(requests), batch):
                self.engine.generate(requests[start : start + batch])

        return step

    def _decoding(self, subnets: Sequence[Subnet]) -> tuple[Callable[[], None], Step]:
        def prepare() -> None:
            for request in self._requests(subnets):
                self.engine.add(request, stream=False)
            self.engine.step()  # one step processes all prompts and samples the first tokens

        def step() -> None:
            while self.engine.has_work:
                self.engine.step()

        return prepare, step

    def _requests(self, subnets: Sequence[Subnet], want_routes: bool = False) -> list[Request]:
        sampling = Sampling(temperature=0.0, max_tokens=self.num_tokens, ignore_eos=True)
        prompts = random_prompts(len(subnets), self.num_prompt, self.config.vocab_size)
        return [
            Request(str(next(self._numbers)), tuple(prompt), sampling, Phases(subnet), want_routes)
            for prompt, subnet in zip(prompts, subnets, strict=True)
        ]


def _nothing() -> None:
    pass


def _add(shown: Table, label: str, each: Ratio, aim: float, work: tuple[float, float] | None = None) -> None:
    by_work = ("", "") if work is None else map(times, work)
    shown.add_row(label, times(each.wall), times(each.processor), *by_work, f"≥ {aim:.2f}x", each.rounds)


if __name__ == "__main__":
    main()
