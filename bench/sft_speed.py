"""Compare ``stretto sft`` with TRL's ``SFTTrainer``: training steps per second on the same packed rows, and the loss of step 1.

    python -m bench.sft_speed --data chats.jsonl [--rows N] [--seq-len N] [--rounds N] [--threads N] [--mutant]

Both start from one checkpoint of a small MoE network and take the same rows in the same order. Our loader renders, masks and packs the
conversations; TRL gets the packed rows as ``input_ids``, ``labels`` and ``seq_lengths`` without padding and computes them padding-free,
as it does with rows that it packs itself. Both use AdamW, gradient clipping and a constant learning rate. TRL runs without gradient
checkpointing, saving or evaluation, and in the fastest of its settings for this machine (rows at once, expert implementation). Our step
computes all its rows at once.

The two take turns in one process: our step runs between two of TRL's. TRL's time is from the end of our step to the end of its own and
includes the collation of rows. A fixed matrix product beside each shows whether other jobs slowed the machine. fp32 is measured, and bf16
autocast if the processor has units for it. Exits with 1 if the losses of step 1 differ, as a different mask, shift or packing would cause
(``--mutant`` trains on our prompts too, which must fail), or if our best tokens/s are less than 1.5 times TRL's best.

Limits: in so small a network a large part of a step is small operators, where TRL's general trainer costs most; with fused GPU kernels
or a large network the ratio differs. Rendering and tokenising are not timed.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.common.measure import (
    Calibration,
    Sample,
    Step,
    bench_parser,
    finish,
    quiet_pairs,
    ratio,
    table,
    times,
)
from stretto.base.track import progress, wide_console
from stretto.data.loader import Batch
from stretto.data.pack import IGNORED
from stretto.data.sources import open_source
from stretto.evals.loss import EvalBatch
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.parallel import join
from stretto.model.spec import ModelConfig
from stretto.model.transformer import build
from stretto.ops.tuning import multiplies_bf16
from stretto.optim.build import build_optimizers
from stretto.optim.schedule import OptimConfig
from stretto.post.sft import open_conversations
from stretto.text.chat import CHATML
from stretto.text.tokenizer import train_tokenizer
from stretto.train.prepare import TextOptions, prepare_data
from stretto.train.recipe import SftRecipe, TrainConfig
from stretto.train.step import MicroBatch, optimisation_step

AIM = 1.5
OPTIM = OptimConfig(lr=1e-4, beta2=0.999, weight_decay=0.0)
EXPERTS = ("grouped_mm", "eager")
"""Expert implementations of transformers that copy no weights for each token."""
TRIAL_STEPS = 3
"""Steps of each setting of TRL when the fastest is chosen; the first is not counted."""
TEXT = TextOptions(is_chat=True)


def network(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size, hidden_size=128, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=32, num_experts=16, top_k=4,
        expert_intermediate_size=64, num_shared_experts=1, max_positions=4096,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Peer:
    """A setting of TRL."""

    rows_at_once: int
    experts: str
    dtype: str


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--data", required=True, help="conversations, as for stretto sft")
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each dtype")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; default: all cores")
    parser.add_argument("--mutant", action="store_true", help="also train on our prompts; must fail")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    console = wide_console()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batches = prepare(folder, options.data, options.rows, options.seq_len, options.rounds + 4)
        dtypes = ["float32", *(["bfloat16"] if multiplies_bf16(torch.device("cpu")) else [])]
        results: dict[str, tuple[Peer, list[Sample], list[Sample]]] = {}
        for dtype in dtypes:
            peer = fastest_setting(folder, batches, options.rows, dtype, console.print)
            ours, our_losses = our_step(folder, batches, dtype, options.mutant)
            theirs, their_losses, mine = run_peer(folder, batches, peer, options.rounds, between=ours)
            results[dtype] = peer, theirs, mine
            # both are means over thousands of tokens in one dtype, computed by different kernels
            tolerance = 1e-4 if dtype == "float32" else 2e-2
            console.print(f"{dtype}: loss of step 1: {our_losses[0]:.5f} ours, {their_losses[0]:.5f} TRL's")
            if abs(our_losses[0] - their_losses[0]) > tolerance:
                finish([f"{dtype}: losses of step 1 differ: {our_losses[0]:.5f} and {their_losses[0]:.5f}"])
    show(console, results, [int((batch.documents_BT >= 0).sum()) for batch in batches])


def prepare(folder: Path, data: str, rows: int, seq_len: int, num: int) -> list[Batch]:
    """Write a checkpoint that both read; returns the rows of ``num`` steps."""
    source = open_source(data, TEXT.form(data))
    texts = (document.text for document in source.sample(2_000_000))
    train_tokenizer(texts, 4096, CHATML).save(folder / "tokenizer")
    config = network(4096)
    write_checkpoint(folder / "model", build(config, 0), config, family="glm4_moe", tokenizer_dir=folder / "tokenizer")
    (folder / "model" / "stretto.json").unlink()  # without these two files it is an ordinary checkpoint
    (folder / "model" / "elastic.tensors").unlink()
    mixture, _, _ = prepare_data(folder / "run", [data], folder / "tokenizer", 4096, TEXT)
    train = TrainConfig(steps=num, rows=rows, seq_len=seq_len)
    loader = open_conversations(mixture, SftRecipe(optim=OPTIM, train=train, long="leave_out"), join("cpu"))
    return [loader.next() for _ in range(num)]


def our_step(folder: Path, batches: Sequence[Batch], dtype: str, is_mutant: bool) -> tuple[Step, list[float]]:
    """Our step over the next rows, as the training loop takes it, and the list to which it appends losses."""
    model, ranks = read_checkpoint(folder / "model", dtype=torch.float32).model, join("cpu")
    optimizers, losses, upcoming = build_optimizers(OPTIM, model), list[float](), iter(batches)

    def step() -> None:
        loaded = next(upcoming)
        batch = EvalBatch.of(loaded, ranks.device)
        targets_BT, num = batch.targets_BT, loaded.global_target_tokens
        if is_mutant:
            whole_BT = torch.cat((batch.ids_BT[:, 1:], batch.ids_BT[:, :1]), 1)
            targets_BT = torch.where(batch.real_BT, whole_BT, IGNORED)
            num = int((targets_BT != IGNORED).sum())
        micro = MicroBatch("full", batch.ids_BT, targets_BT, batch.ctx, model.config.full(), num)
        result = optimisation_step(
            model, optimizers, [micro], ranks, clip_norm=OPTIM.clip_norm, balance_rate=0.0, dtype=getattr(torch, dtype)
        )
        losses.append(result.nll)

    return step, losses


def rows_for_trl(batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """The rows in the format of TRL's own packing: tokens, labels, and the lengths of the conversations of a row."""
    rows = []
    for batch in batches:
        for tokens_T, targets_T, documents_T in zip(batch.tokens_BT, batch.targets_BT, batch.documents_BT, strict=True):
            real = documents_T >= 0
            labels = np.concatenate(([IGNORED], targets_T[:-1]))  # transformers shifts labels by one position itself
            row = {"input_ids": tokens_T[real], "labels": labels[real], "seq_lengths": np.bincount(documents_T[real])}
            rows.append({name: values.tolist() for name, values in row.items()})
    return rows


def run_peer(
    folder: Path, batches: Sequence[Batch], peer: Peer, rounds: int, between: Step | None = None
) -> tuple[list[Sample], list[float], list[Sample]]:
    """Take ``rounds`` steps of TRL after an untimed one, and call ``between`` before each.

    Returns samples of TRL's steps, their losses, and samples of ``between``.
    """
    import datasets
    import transformers
    from trl import SFTConfig, SFTTrainer

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="sdpa"
    )
    model.set_experts_implementation(peer.experts)
    samples, mine, losses, calibration = list[Sample](), list[Sample](), list[float](), Calibration()
    total = rounds + 1

    class Turns(transformers.TrainerCallback):
        """Times each step of TRL, and runs our step after it."""

        def __init__(self, advance: Callable[[int], None]) -> None:
            self.advance, self.start = advance, self._turn()

        def _turn(self) -> tuple[float, float, float]:
            before = calibration.seconds()
            if between is not None and len(mine) < total:
                mine.append(calibration.sample(between))
            return before, time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            before, wall, processor = self.start
            wall_s, processor_s = time.perf_counter() - wall, time.process_time() - processor
            samples.append(Sample(wall_s, processor_s, max(before, calibration.seconds())))
            self.advance(1)
            self.start = self._turn()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **named: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    with warnings.catch_warnings(), progress(f"{peer.dtype}, {peer.rows_at_once} x {peer.experts}", total) as advance:
        warnings.simplefilter("ignore")
        accumulated = len(batches[0].tokens_BT) // peer.rows_at_once
        settings = SFTConfig(
            output_dir=str(folder / "trl"), max_steps=total, per_device_train_batch_size=peer.rows_at_once,
            gradient_accumulation_steps=accumulated, learning_rate=OPTIM.lr, adam_beta2=OPTIM.beta2, weight_decay=0.0,
            max_grad_norm=OPTIM.clip_norm, lr_scheduler_type="constant", bf16=peer.dtype == "bfloat16", use_cpu=True,
            padding_free=True, max_length=None, shuffle_dataset=False, gradient_checkpointing=False, save_strategy="no",
            logging_steps=1, report_to=[], disable_tqdm=True, dataset_kwargs={"skip_prepare_dataset": True},
            train_sampling_strategy="sequential",
        )  # fmt: skip
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
        trainer = SFTTrainer(
            model,
            args=settings,
            train_dataset=datasets.Dataset.from_list(rows_for_trl(batches)),
            processing_class=tokenizer,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.add_callback(Turns(advance))
        trainer.train()
    return samples[1:], losses, mine[1:]


def fastest_setting(folder: Path, batches: Sequence[Batch], rows: int, dtype: str, say: Callable[[str], None]) -> Peer:
    """The fastest setting of TRL by processor time, which other jobs change less than wall time."""
    seconds: dict[Peer, float] = {}
    for experts in EXPERTS:
        for at_once in (1, 2) if rows % 2 == 0 else (1,):
            peer = Peer(at_once, experts, dtype)
            samples, _, _ = run_peer(folder, batches, peer, TRIAL_STEPS - 1)
            seconds[peer] = median(sample.processor_s for sample in samples)
    best = min(seconds, key=seconds.__getitem__)
    for peer, each in seconds.items():
        say(f"TRL, {dtype}, {peer.rows_at_once} rows at once, {peer.experts}: {each / seconds[best]:.2f}x its fastest")
    return best


def show(console: Any, results: dict[str, tuple[Peer, list[Sample], list[Sample]]], sizes: Sequence[int]) -> None:
    """Print the table of all dtypes; fails if the best of ours is too slow. ``sizes``: tokens of each step without padding."""
    headings = ("", "TRL tokens/s", "ours tokens/s", "ratio", "by processor time", "quiet rounds")
    shown, rates = table("training steps, tokens without padding", *headings), list[list[float]]()
    for dtype, (peer, theirs, mine) in results.items():
        pairs = quiet_pairs(theirs, mine) or list(zip(theirs, mine, strict=True))
        rates.append([median(sizes) / median(pair[side].wall_s for pair in pairs) for side in (0, 1)])
        each = ratio({"TRL": theirs, "ours": mine}, "TRL", "ours")
        label = f"{dtype} (TRL: {peer.rows_at_once} rows at once, {peer.experts})"
        cells = times(each.wall), times(each.processor), each.rounds
        shown.add_row(label, *(f"{rate:,.0f}" for rate in rates[-1]), *cells)
    console.print(shown)
    their_best, our_best = map(max, zip(*rates, strict=True))
    line = f"faster dtype of ours over faster dtype of TRL: {times(our_best / their_best)}, aim {AIM}x"
    console.print(line)
    finish([] if our_best >= AIM * their_best else [line])


if __name__ == "__main__":
    main()
