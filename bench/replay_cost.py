"""What rollout router replay (R3) costs a step of reinforcement learning, all of it.

    python -m bench.replay_cost [--shape small] [--rounds N] [--threads N]

The same tokens on both sides, in turns: the engine samples completions with and without routes; then the trainer's step
(its recomputation of log-probabilities, then forward, backward and update) runs without replay, or with: routes packed to
the bit as a trajectory is stored, unpacked, laid out along the batch's tokens, and replayed in both passes. The
overhead is the median over rounds of (rollout + training) with R3 over that without, measured in processor time, which a
shared machine disturbs least, and in wall time of quiet rounds.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import numpy as np
import torch

from bench.common.measure import SLOW, Sample, Step, fastest_calibration, measure, random_prompts, table, wide_console
from bench.train_speed import OPTIM, shapes
from stretto.base.track import progress
from stretto.engine.engine import Engine
from stretto.engine.request import Completion, EngineConfig, Phases, Request, Sampling
from stretto.model.parallel import join
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, Replay, build
from stretto.ops.logprob import chosen_logprobs
from stretto.ops.native import load
from stretto.optim.build import build_optimizers
from stretto.rl.samples import HEADER_BYTES, pack_routes, signed_routes, unpack_routes
from stretto.train.step import MicroBatch, optimisation_step

PROMPT, LENGTH = 32, 128
"""Tokens of a prompt, and of prompt and completion together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes(), default="small")
    parser.add_argument("--rounds", type=int, default=15)
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
    steps: dict[str, Step] = {
        "rollout off": lambda: engine.generate(_requests(shape.config, num, routes=False)),
        "rollout R3": lambda: engine.generate(_requests(shape.config, num, routes=True)),
        "training off": train["off"],
        "training R3": train["R3"],
    }
    with progress("interleaved", len(steps) * (2 + options.rounds)) as advance:
        samples = measure(steps, options.rounds, advance)
    _show(samples, shape.config, done)


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
    optimizers, dtype = build_optimizers(OPTIM, model), torch.float32
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
        optimisation_step(model, optimizers, [batch], ranks, clip_norm=OPTIM.clip_norm, balance_rate=0.0, dtype=dtype)

    return {"off": lambda: step(plain), "R3": lambda: step(replayed())}


def _show(samples: dict[str, list[Sample]], config: ModelConfig, done: list[Completion]) -> None:
    best_s = fastest_calibration(samples.values())
    rounds = list(zip(*samples.values(), strict=True))
    calm = [each for each in rounds if max(sample.calibration_s for sample in each) <= SLOW * best_s]
    shown = table(
        f"R3 over none, {torch.get_num_threads()} threads", "", "processor", f"wall ({len(calm)} quiet rounds)"
    )
    places = {"rollout": (0, 1), "training": (2, 3), "both: one step": (None, None)}
    for name, (off, on) in places.items():
        cells = []
        for clock, kept in (("processor_s", rounds), ("wall_s", calm)):
            pairs = [
                (sum(getattr(each[at], clock) for at in ([off] if off is not None else [0, 2])),
                 sum(getattr(each[at], clock) for at in ([on] if on is not None else [1, 3])))
                for each in kept
            ]  # fmt: skip
            cells.append(f"{np.median([b / a for a, b in pairs]) - 1:+.1%}" if pairs else "none quiet")
        shown.add_row(name, *cells)
    wide_console().print(shown)
    packed = [len(pack_routes(one.routes, config.num_experts)) for one in done if one.routes is not None]
    rows = sum(len(one.routes) for one in done if one.routes is not None)
    allowed = math.ceil(math.log2(config.num_experts)) * config.top_k * config.num_moe_layers / 8
    wide_console().print(
        f"payload: {(sum(packed) - HEADER_BYTES * len(packed)) / rows:.2f} bytes a token "
        f"(⌈log2 E⌉·k·L/8 = {allowed:.2f}), and {HEADER_BYTES} a trajectory"
    )


if __name__ == "__main__":
    main()
