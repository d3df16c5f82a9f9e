"""Greedy tokens of the engine against the slow reference, `generate_naive`.

    python -m bench.engine_equality [--requests N] [--run FOLDER] [--kernels native|torch]

Requests differ in length, and half of the prompts begin like an earlier one. Subnets are drawn per request; some requests have another
Subnet for the prompt or for thinking. Requests arrive while others run, and some are aborted. Two engines compute them: ``tight`` has
so few cache pages that sequences are preempted and recomputed; ``roomy`` reuses the pages of earlier prompts. For every token that
differs, the table shows the gap between both candidates' log-probabilities under the reference. Rounding explains a gap of 1e-5.
Fails (exit code 1) unless all tokens are equal, and sequences were preempted or pages reused, respectively.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.common.measure import bench_parser, finish, table
from bench.common.naive_engine import generate_naive, logits_naive, subnets_by_position
from bench.common.networks import random_network, shape
from stretto.base.paths import checkpoint_folder
from stretto.base.track import progress, wide_console
from stretto.engine.engine import Engine
from stretto.engine.request import Completion, EngineConfig, Phases, Request, Sampling
from stretto.model.checkpoint import read_checkpoint
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Transformer
from stretto.ops.native import Library, load

PAGE_SIZE = 4
TIGHT, ROOMY = 30, 600
"""Cache pages: little more than the longest request needs, so that sequences are preempted; and enough for all."""
LONGEST_PROMPT, LONGEST_COMPLETION = 72, 20
NEAR = 8
"""Number of latest requests with which a prompt may share its beginning: their pages are likely still cached."""
ABORTS = 0.1
"""Extra requests that are aborted while they run, as a share of the compared requests."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A request with a token that differs from the reference."""

    request: Request
    place: int
    """Index of the first token that differs."""
    gap: float
    """Log-probability of the reference's token minus that of the engine's token, under the reference; nats."""


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--run", type=Path, help="a run or a checkpoint; default: random weights of the demo's shape")
    parser.add_argument("--kernels", choices=("native", "torch"), help="default: both, where they compile")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.run:
        model = read_checkpoint(checkpoint_folder(options.run), dtype=torch.float32).model.requires_grad_(False)
    else:
        model = random_network(shape("demo")[0])
    compared = list(requests(model.config, options.requests, options.seed))
    expected = reference(model, compared)
    console, failures = wide_console(), list[str]()
    shown = table(
        f"{len(compared)} greedy requests, {sum(map(len, expected.values())):,} tokens",
        *("engine", "identical", "preemptions", "cached tokens", "steps"),
    )
    for (kernels, library), (kind, config) in itertools.product(
        _libraries(options.kernels).items(), _configs().items()
    ):
        engine = Engine(model, None, config, library=library)
        done = drive(engine, compared, random.Random(options.seed))
        differences = list(_differences(model, compared, expected, done))
        stats = engine.stats()
        assert stats.num_free_pages == stats.num_pages, f"leaked pages: {stats}"
        seen = {"tight": stats.num_preemptions, "roomy": stats.cached_tokens}
        counts = (stats.num_preemptions, stats.cached_tokens, stats.num_steps)
        same = f"{len(compared) - len(differences)} of {len(compared)}"
        shown.add_row(f"{kernels}, {kind}", same, *(f"{num:,}" for num in counts))
        for each in differences:
            failures.append(f"{kernels}, {kind}: {each.request.id}, token {each.place}: gap {each.gap:.1e} nats")
        if not seen[kind]:
            failures.append(f"{kernels}, {kind}: no {'preemption' if kind == 'tight' else 'cached token'} occurred")
    console.print(shown)
    finish(failures)


def _configs() -> dict[str, EngineConfig]:
    """Engines in which sequences are preempted, and in which cached pages are reused."""
    sizes: dict[str, Any] = {"page_size": PAGE_SIZE, "max_batch": 8, "max_step_tokens": 64}
    return {"tight": EngineConfig(num_pages=TIGHT, **sizes), "roomy": EngineConfig(num_pages=ROOMY, **sizes)}


def _libraries(kernels: str | None) -> dict[str, Library]:
    native = load()
    found = {"torch": load({"STRETTO_NATIVE": "0"})}
    if native.handle is not None:
        found["native"] = native
    return {name: library for name, library in found.items() if kernels in (None, name)}


def requests(config: ModelConfig, num: int, seed: int) -> Iterator[Request]:
    """``num`` different requests; some prompts share their beginnings."""
    rng, made = random.Random(seed), list[Request]()
    for index in range(num):
        length = rng.randint(1, LONGEST_PROMPT)
        earlier = rng.choice(made[-NEAR:]) if made and rng.random() < 0.5 else None
        shared = earlier.prompt[:length] if earlier else ()
        rest = (rng.randrange(8, config.vocab_size) for _ in range(length - len(shared)))
        # pages are shared only within a Subnet, so half of the prompts with a shared beginning keep the earlier Subnet
        phases = earlier.phases if earlier and rng.random() < 0.5 else _phases(config, rng)
        sampling = Sampling(
            temperature=0.0,
            max_tokens=rng.randint(1, LONGEST_COMPLETION),
            repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
            ignore_eos=True,
        )
        made.append(Request(f"r{index}", (*shared, *rest), sampling, phases, want_routes=rng.random() < 0.25))
        yield made[-1]


def _phases(config: ModelConfig, rng: random.Random) -> Phases:
    answer = _subnet(config, rng)
    kind = rng.random()
    if kind < 0.7:
        return Phases(answer)
    if kind < 0.85:
        return Phases(answer, prefill=config.full())
    # a frequent id, so that the thinking phase sometimes ends
    return Phases(answer, thinking=config.full(), thinking_end=rng.randrange(8, config.vocab_size))


def _subnet(config: ModelConfig, rng: random.Random) -> Subnet:
    if rng.random() < 0.3:
        return config.full()
    experts = rng.choice(config.widths)
    return config.subnet(
        depth=rng.randint(config.num_layers // 2, config.num_layers),
        experts=experts,
        top_k=rng.randint(1, min(config.top_k, experts)),
    )


def reference(model: Transformer, compared: list[Request]) -> dict[str, tuple[int, ...]]:
    """Tokens of `generate_naive` by request."""
    expected: dict[str, tuple[int, ...]] = {}
    with progress("reference, token by token", len(compared)) as advance:
        for request in compared:
            done = generate_naive(model, request.prompt, request.sampling, request.phases)
            expected[request.id] = done.tokens
            advance(1)
    return expected


def drive(engine: Engine, compared: list[Request], rng: random.Random) -> dict[str, tuple[int, ...]]:
    """Tokens of the engine by request. Requests arrive while others run; extra requests are aborted."""
    waiting, extras = list(reversed(compared)), 0
    done: dict[str, tuple[int, ...]] = {}
    with progress("engine", len(compared)) as advance:
        while waiting or engine.has_work:
            while waiting and (rng.random() < 0.8 or not engine.has_work):
                request = waiting.pop()
                engine.add(request, stream=False)
                if rng.random() < ABORTS:
                    extras += 1
                    extra = Request(
                        f"extra{extras}", request.prompt, request.sampling, request.phases, want_routes=True
                    )
                    engine.add(extra, stream=False)
            for event in engine.step():
                if isinstance(event, Completion) and not event.request_id.startswith("extra"):
                    done[event.request_id] = event.tokens
                    advance(1)
            if extras and rng.random() < 0.2:
                engine.abort(f"extra{rng.randint(1, extras)}")
    return done


def _differences(
    model: Transformer, compared: list[Request], expected: dict[str, tuple[int, ...]], done: dict[str, tuple[int, ...]]
) -> Iterator[Difference]:
    for request in compared:
        mine, theirs = done[request.id], expected[request.id]
        if mine == theirs:
            continue
        place = next(
            (place for place, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(mine), len(theirs)),
        )
        gap = float("nan")
        if place < min(len(mine), len(theirs)):
            tokens = [*request.prompt, *theirs[:place]]
            subnets = subnets_by_position(tokens, len(request.prompt), request.phases)
            logp_V = logits_naive(model, tokens, subnets)[-1].log_softmax(-1)
            gap = float(logp_V[theirs[place]] - logp_V[mine[place]])
        yield Difference(request, place, gap)


if __name__ == "__main__":
    main()
