"""Mismatch between the engine's log-probabilities of sampled tokens and the trainer's, with and without routing replay.

    python -m bench.mismatch [--model runs/demo/checkpoint] [--data runs/demo/data/00] [--seeds 3]

The engine completes beginnings of held-out documents at temperature 1, in the rollout's arithmetic. The trainer scores the tokens in
its own arithmetic, under the same weights. With the trainer's π and the rollout's μ, Δ = log π − log μ per sampled token;
K3 = mean(expm1 Δ − Δ) and K1 = mean(−Δ) estimate KL(μ ‖ π). Replay is off, R2 (routes of the trainer's own recomputation, which under
the same weights change nothing) or R3 (the engine's routes). Each seed has its own prompts and samples. The reduction of K3 by replay
is relative to the same seed without replay. This bench has no aim; it fails only by an error.

On a CPU, bf16 is emulated: weights, activations and residual stream are rounded to bf16, products are in fp32. FP8 products are exact
emulations of E4M3 with blockwise scales.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bench.common.measure import table, wide_console
from stretto.base.track import progress
from stretto.data.shards import TokenSet
from stretto.engine.engine import Engine
from stretto.engine.request import Completion, EngineConfig, Phases, Request, Sampling
from stretto.learning.samples import signed_routes
from stretto.model.checkpoint import read_checkpoint
from stretto.model.transformer import Context, Recorder, Replay, Transformer
from stretto.ops.logprob import IGNORED, chosen_logprobs
from stretto.ops.matmul import PLAIN, Arithmetic

PAIRS = {
    "bf16 → fp32": (Arithmetic("bf16"), PLAIN),
    "fp8 → bf16": (Arithmetic("fp8"), Arithmetic("bf16")),
    "fp8 → fp8, same quantiser": (Arithmetic("fp8"), Arithmetic("fp8")),
    "fp8 → fp8, shared (batch-invariant)": (Arithmetic("fp8", True), Arithmetic("fp8", True)),
    "fp32 → fp32": (PLAIN, PLAIN),
    "fp32 → fp32, shared (batch-invariant)": (Arithmetic("fp32", True), Arithmetic("fp32", True)),
}
REPLAYS = ("off", "R2", "R3")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Mismatch of one seed."""

    k3: float
    k1: float
    worst: float
    """Largest |Δ|."""
    flipped: float
    """Share of (token, layer) pairs whose set of experts differs from the engine's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/demo/checkpoint"))
    parser.add_argument("--data", type=Path, default=Path("runs/demo/data/00"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=24, help="prompts per seed")
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--only", choices=list(PAIRS), help="one pair of arithmetics")
    options = parser.parse_args()
    pairs = {name: pair for name, pair in PAIRS.items() if options.only in (None, name)}
    found: dict[str, dict[str, list[Mismatch]]] = {}
    with progress("mismatch", len(pairs) * options.seeds) as advance:
        for name, (rollout, trainer) in pairs.items():
            model = read_checkpoint(options.model, device="cpu", dtype=torch.float32).model.requires_grad_(False)
            config = EngineConfig(
                cache_bytes=1 << 27, max_batch=32, precision=rollout.precision, batch_invariant=rollout.batch_invariant
            )
            engine = Engine(model, None, config)
            found[name] = {replay: [] for replay in REPLAYS}
            for seed in range(options.seeds):
                done = engine.generate(_requests(options, model, seed))
                for replay, mismatch in _score(model, done, trainer).items():
                    found[name][replay].append(mismatch)
                advance(1)
    _show(found, model)


def _requests(options: argparse.Namespace, model: Transformer, seed: int) -> list[Request]:
    documents = TokenSet(options.data, "val")
    order = np.random.default_rng(seed).permutation(documents.num_documents)
    prompts = [documents.document(int(number))[: options.prompt_tokens].tolist() for number in order]
    chosen = [prompt for prompt in prompts if len(prompt) == options.prompt_tokens][: options.prompts]
    return [
        Request(
            f"{seed}-{place}", tuple(prompt),
            Sampling(temperature=1.0, seed=10_000 * seed + place, max_tokens=options.max_tokens),
            Phases(model.config.full()), want_routes=True,
        )
        for place, prompt in enumerate(chosen)
    ]  # fmt: skip


def _score(model: Transformer, done: list[Completion], arithmetic: Arithmetic) -> dict[str, Mismatch]:
    """The trainer's forward passes over padded rows, one completion each."""
    length = max(len(one.prompt) + len(one.tokens) for one in done)
    config = model.config
    ids_BT = torch.zeros(len(done), length, dtype=torch.int64)
    documents_BT, targets_BT = torch.full_like(ids_BT, -1), torch.full_like(ids_BT, IGNORED)
    logp_BT = torch.zeros(ids_BT.shape)
    routes_BTLK = torch.full((*ids_BT.shape, config.num_moe_layers, config.top_k), -1, dtype=torch.int16)
    for row, one in enumerate(done):
        tokens, first = torch.tensor([*one.prompt, *one.tokens]), len(one.prompt) - 1
        ids_BT[row, : len(tokens)], documents_BT[row, : len(tokens)] = tokens, 0
        targets_BT[row, first : len(tokens) - 1] = tokens[first + 1 :]
        logp_BT[row, first : len(tokens) - 1] = torch.from_numpy(one.logprobs)
        assert one.routes is not None
        routes_BTLK[row, : len(one.routes)] = torch.from_numpy(signed_routes(one.routes))
    ctx = Context(
        torch.arange(length).expand_as(ids_BT), documents_BT, operators=arithmetic.operators
    )  # fmt: skip
    sampled_BT, has_route_BT = targets_BT != IGNORED, routes_BTLK[:, :, 0, 0] >= 0
    found: dict[str, Mismatch] = {}
    own_BTLK: torch.Tensor | None = None
    for replay in REPLAYS:
        replayed = {"off": None, "R2": own_BTLK, "R3": routes_BTLK}[replay]
        routing = Recorder(config, ids_BT, None if replayed is None else Replay(replayed))
        output = model(ids_BT, config.full(), replace(ctx, routing=routing))
        if replay == "off":
            own_BTLK = routing.own_BTLK
        ours_N, _ = chosen_logprobs(
            output.hidden_BTD.flatten(0, 1), model.head_VD, targets_BT.flatten(), operators=arithmetic.operators
        )
        delta_N = (ours_N.view_as(logp_BT) - logp_BT)[sampled_BT].double()
        taken_BTLK = routing.own_BTLK if replayed is None else replayed
        flipped = (taken_BTLK.sort(-1).values != routes_BTLK.sort(-1).values).any(-1)[has_route_BT]
        found[replay] = Mismatch(
            float((torch.expm1(delta_N) - delta_N).mean()),
            float(-delta_N.mean()),
            float(delta_N.abs().max()),
            float(flipped.double().mean()),
        )
    return found


def _show(found: dict[str, dict[str, list[Mismatch]]], model: Transformer) -> None:
    num_params = sum(parameter.numel() for parameter in model.parameters())
    title = f"rollout → trainer, same weights, {num_params / 1e6:.1f}M parameters; mean over seeds, in brackets lowest and highest"
    shown = table(title, "arithmetic, replay", "K3", "reduction of K3", "K1", "largest |Δ|", "routes that differ")
    for name, by_replay in found.items():
        for replay, seeds in by_replay.items():
            k3 = np.array([seed.k3 for seed in seeds])
            off = np.array([seed.k3 for seed in by_replay["off"]])
            reduction = "" if replay == "off" or not off.all() else _spread(1 - k3 / off, "{:.0%}")
            shown.add_row(
                f"{name}, {replay}", _spread(k3, "{:.2e}"), reduction, f"{np.mean([seed.k1 for seed in seeds]):.1e}",
                f"{max(seed.worst for seed in seeds):.1e}", f"{np.mean([seed.flipped for seed in seeds]):.1%}",
            )  # fmt: skip
    wide_console().print(shown)


def _spread(values: np.ndarray, form: str) -> str:
    return f"{form.format(values.mean())} [{form.format(values.min())}, {form.format(values.max())}]"


if __name__ == "__main__":
    main()
