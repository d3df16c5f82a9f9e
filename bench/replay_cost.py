"""What rollout router replay (R3) costs a step of reinforcement learning, all of it.

    python -m bench.replay_cost [--shape small] [--rounds N] [--threads N] [--aim 0.03]

The same tokens on both sides, in turns: the engine samples completions with and without routes; then the trainer's step
(its recomputation of log-probabilities, then forward, backward and update at a rate of 0, so that routes stay what they
were) runs without replay, or with: routes packed to the bit as a trajectory is stored, unpacked, laid out along the batch's
tokens, and replayed in both passes. The overhead is the median over rounds of R3 over none, in processor time, which a
shared machine disturbs least, with the interval in which it lies with 95 % confidence.

Each round does the work without replay twice: the interval of one half over the other is what this machine can tell apart.
Exits with 1 if replay costs more than ``--aim``, and says how wide the interval is where it allows neither verdict.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace

import numpy as np
import torch

from bench.common.measure import Interval, Sample, Step, measure, random_prompts, table, wide_console
from bench.train_speed import OPTIM, shapes
from stretto.base.track import progress
from stretto.engine.engine import Engine
from stretto.engine.request import Completion, EngineConfig, Phases, Request, Sampling
from stretto.learning.samples import HEADER_BYTES, pack_routes, signed_routes, unpack_routes
from stretto.model.parallel import join
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, Replay, build
from stretto.ops.logprob import chosen_logprobs
from stretto.ops.native import load
from stretto.optim.build import build_optimizers, set_learning_rate
from stretto.train.step import MicroBatch, optimisation_step

PROMPT, LENGTH = 32, 128
"""Tokens of a prompt, and of prompt and completion together."""
SIDES, AGAIN = ("off", "R3"), "off again"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes(), default="small")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--aim", type=float, default=0.03, help="most that replay may cost, as a share")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; default: all cores")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    shape = shapes()[options.shape]
    num = shape.rows * shape.length // LENGTH
    engine = Engine(
        build(shape.config, seed=0).requires_grad_(False), None, EngineConfig(cache_bytes=1 << 27, prefix_cache=False),
        library=load(),
    )  # fmt: skip
    done = engine.generate(_requests(shape.config, num, routes=True))
    train = _training(shape.config, done, shape.length)
    rollout: dict[str, Step] = {
        "off": lambda: engine.generate(_requests(shape.config, num, routes=False)),
        "R3": lambda: engine.generate(_requests(shape.config, num, routes=True)),
    }
    steps = {
        f"{part} {name}": step[name] for part, step in (("rollout", rollout), ("training", train)) for name in SIDES
    }
    steps |= {f"{part} {AGAIN}": step["off"] for part, step in (("rollout", rollout), ("training", train))}
    with progress("interleaved", len(steps) * (2 + options.rounds)) as advance:
        samples = measure(steps, options.rounds, advance)
    whole = _show(samples, shape.config, done)
    sys.exit(_verdict(whole, options.aim))


def _requests(config: ModelConfig, num: int, *, routes: bool) -> list[Request]:
    sampling = [Sampling(temperature=1.0, seed=place, max_tokens=LENGTH - PROMPT) for place in range(num)]
    prompts = random_prompts(num, PROMPT, config.vocab_size)
    phases = Phases(config.full())
    return [
        Request(f"r{place}", tuple(prompt), sampling[place], phases, want_routes=routes)
        for place, prompt in enumerate(prompts)
    ]


def _training(config: ModelConfig, done: list[Completion], row_tokens: int) -> dict[str, Step]:
    """A step without replay and one with, of one model and batch: rows of packed completions."""
    model, ranks = build(config, seed=0), join("cpu")
    optimizers = build_optimizers(OPTIM, model)
    set_learning_rate(optimizers, 0.0)
    per_row = row_tokens // LENGTH
    ids_BT = torch.tensor([[*one.prompt, *one.tokens] for one in done]).view(-1, row_tokens)
    documents_BT = (torch.arange(row_tokens) // LENGTH).expand_as(ids_BT)
    plain = Context((torch.arange(row_tokens) % LENGTH).expand_as(ids_BT), documents_BT)

    def replayed() -> Context:
        routes_BTLK = np.full((*ids_BT.shape, config.num_moe_layers, config.top_k), -1, np.int16)
        for place, one in enumerate(done):
            assert one.routes is not None
            row, start = divmod(place, per_row)
            rows_PLK = signed_routes(unpack_routes(pack_routes(one.routes, config.num_experts)))
            routes_BTLK[row, start * LENGTH : start * LENGTH + len(rows_PLK)] = rows_PLK
        return replace(plain, routing=Replay(torch.from_numpy(routes_BTLK)))

    def step(ctx: Context) -> None:
        with torch.no_grad():
            hidden_BTD = model(ids_BT, config.full(), ctx).hidden_BTD
            chosen_logprobs(hidden_BTD.flatten(0, 1), model.head_VD, ids_BT.flatten())
        batch = MicroBatch("rl", ids_BT, ids_BT, ctx, config.full(), ids_BT.numel())
        optimisation_step(
            model, optimizers, [batch], ranks, clip_norm=OPTIM.clip_norm, balance_rate=0.0, dtype=torch.float32
        )

    return {"off": lambda: step(plain), "R3": lambda: step(replayed())}


def _show(samples: dict[str, list[Sample]], config: ModelConfig, done: list[Completion]) -> Interval | None:
    """Print all; returns what replay adds to a whole step."""
    shown = table(
        f"processor time, {torch.get_num_threads()} threads, {len(samples['rollout off'])} rounds: median [95 % confidence]",
        *("", "R3 over none", "none over none"),
    )
    parts = {"rollout": ("rollout",), "training": ("training",), "both: one step": ("rollout", "training")}
    found: dict[str, Interval | None] = {}
    for name, over in parts.items():
        off, on, again = (
            np.sum([[each.processor_s for each in samples[f"{part} {side}"]] for part in over], axis=0)
            for side in (*SIDES, AGAIN)
        )
        found[name] = Interval.of((2 * on / (off + again) - 1).tolist())
        shown.add_row(name, str(found[name]), str(Interval.of((again / off - 1).tolist())))
    wide_console().print(shown)
    packed = [len(pack_routes(one.routes, config.num_experts)) for one in done if one.routes is not None]
    rows = sum(len(one.routes) for one in done if one.routes is not None)
    allowed = math.ceil(math.log2(config.num_experts)) * config.top_k * config.num_moe_layers / 8
    wide_console().print(
        f"payload: {(sum(packed) - HEADER_BYTES * len(packed)) / rows:.2f} bytes a token "
        f"(⌈log2 E⌉·k·L/8 = {allowed:.2f}), and {HEADER_BYTES} a trajectory"
    )
    return found["both: one step"]


def _verdict(whole: Interval | None, aim: float) -> bool:
    """Say what the interval allows to be said; whether replay costs too much."""
    console = wide_console()
    if whole is None or whole.low <= aim < whole.high:
        console.print(f"no verdict on {aim:.0%}: {whole or 'too few rounds'}; take more rounds, or a quieter machine")
        return False
    console.print(f"replay costs {'at most' if whole.high <= aim else 'more than'} {aim:.0%} of a step")
    return whole.low > aim


if __name__ == "__main__":
    main()
