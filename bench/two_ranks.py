"""Training loss of two ranks against one: the same run alone, under FSDP2, and with the experts split over the ranks.

    python -m bench.two_ranks [--steps N] [--seed S]

All runs have the same recipe and rows: anchors with distillation, random depth, top-k and width. The two ranks are processes on this
machine that communicate through gloo. Fails (exit code 1) if a loss differs from one rank's by more than the derived `tolerance`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.common.measure import table, wide_console
from stretto.base.track import Tracker, progress
from stretto.data.demo_text import demo_documents
from stretto.data.loader import Loader
from stretto.data.shards import TokenSet, tokenise
from stretto.model.parallel import Ranks, join
from stretto.text.tokenizer import load_tokenizer, train_tokenizer
from stretto.train.loop import Job, pretrain
from stretto.train.recipe import Recipe

RUNS = {"one": "one rank", "two": "two ranks, FSDP2", "split": "two ranks, experts split"}
ROWS, LENGTH, VOCAB = 16, 64, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options.worker, options.steps, options.seed)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _prepare(folder)
        with progress("one rank and two", 2) as advance:
            for world in (1, 2):
                _launch(world, folder, options)
                advance(1)
        _show({run: _losses(folder / run) for run in RUNS})


def tolerance(step: int) -> float:
    """Largest relative difference that a different order of summation explains after ``step`` steps, in fp32.

    A sum over the n tokens of a step has a relative error of about √n·ε: a random walk of n roundings. AdamW's update is
    independent of scale and has the same error. Errors of different steps are independent, so they grow with √steps.
    """
    return math.sqrt(ROWS * LENGTH * step) * torch.finfo(torch.float32).eps


def _recipe(steps: int, seed: int, ep: int) -> Recipe:
    shape = {
        "vocab_size": VOCAB, "hidden_size": 64, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        "num_experts": 8, "top_k": 2, "expert_intermediate_size": 32, "num_shared_experts": 1, "widths": [8, 4],
    }  # fmt: skip
    mixture = {"anchors": {"corner": {"layers": 5, "experts": 4, "top_k": 1}}, "anchor_share": 0.2}
    mixture |= {"depth_share": 0.2, "top_k_share": 0.2, "width_share": 0.25}
    loop = {"steps": steps, "rows": ROWS, "seq_len": LENGTH, "micro_batches": 2, "seed": seed, "ep": ep}
    loop |= {"log_every": 1, "eval_every": steps, "snapshot_every": steps, "dtype": "float32"}
    whole = {"model": shape, "elastic": mixture, "optim": {"lr": 2e-3, "warmup_steps": 2}, "train": loop}
    return Recipe.model_validate(whole)


def _prepare(folder: Path) -> None:
    texts = [document.text for document in demo_documents(200_000, 0)]
    train_tokenizer(iter(texts), VOCAB).save(folder / "tokenizer")
    tokenizer = load_tokenizer(folder / "tokenizer" / "tokenizer.json")
    tokenise({"train": demo_documents(200_000, 0)}, tokenizer, folder / "data", processes=1)


def _launch(world: int, folder: Path, options: argparse.Namespace) -> None:
    """Start ``world`` processes with torchrun's environment variables, and wait for them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "bench.two_ranks", "--worker", str(folder)]
    command += ["--steps", str(options.steps), "--seed", str(options.seed)]
    processes = []
    for rank in range(world):
        place: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"{world} ranks: exit codes {codes}")


def _work(folder: Path, steps: int, seed: int) -> None:
    data = TokenSet(folder / "data")
    alone = os.environ["WORLD_SIZE"] == "1"
    for run, ep in [("one", 1)] if alone else [("two", 1), ("split", 2)]:
        recipe, ranks = _recipe(steps, seed, ep), join("cpu", ep)
        _train(recipe, folder / run, data, ranks)


def _train(recipe: Recipe, run: Path, data: TokenSet, ranks: Ranks) -> None:
    train = recipe.train
    loader = Loader([data], [1.0], train.micro_rows, train.seq_len, train.seed, ranks.rank, ranks.world)
    job = Job(
        run,
        loader,
        (),
        data.manifest.data_hash,
        ranks,
        tracker=lambda step: Tracker(run, first_step=step, tensorboard=False),
    )
    pretrain(recipe, job)


def _losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss/train"] for line in lines if "loss/train" in line]


def _show(losses: dict[str, list[float]]) -> None:
    title = f"training loss in nats, {ROWS} rows of {LENGTH} tokens per step, fp32, gloo"
    shown = table(title, "step", *RUNS.values(), "max relative difference", "tolerance", "verdict")
    worst, good = 0.0, True
    for step, row in enumerate(zip(*(losses[run] for run in RUNS), strict=True), 1):
        difference = max(abs(value / row[0] - 1.0) for value in row)
        within = difference <= tolerance(step)
        worst, good = max(worst, difference), good and within
        losses_row = [f"{value:.7f}" for value in row]
        shown.add_row(
            str(step), *losses_row, f"{difference:.1e}", f"{tolerance(step):.1e}", "within" if within else "OUTSIDE"
        )
    console = wide_console()
    console.print(shown)
    console.print(f"largest relative difference {worst:.1e}: {'within' if good else 'OUTSIDE'} the derived tolerance")
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
