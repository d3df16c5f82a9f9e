"""Supervised training on the sources' own answers: the start of an RL run whose network begins with nothing.

Rows: samples one after the other, in the order of the problems, none cut. The loss is cross-entropy on what the model
is to write, the end of its turn included; prompts and tools' answers carry none. What is written is what an agent loop
will ask for: the same prompts, the same turns (`stretto.rl.agent`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stretto.base.errors import UserError
from stretto.base.records import Meter
from stretto.base.track import progress
from stretto.base.trajectory import Task
from stretto.data.loader import key_of
from stretto.data.pack import IGNORED, PADDING
from stretto.model.parallel import Ranks, device_name, join, placed
from stretto.model.transformer import Context, Transformer, initial_state
from stretto.optim.build import build_optimizers, set_learning_rate
from stretto.optim.schedule import learning_rate
from stretto.rl.agent import Dialogue
from stretto.rl.recipe import SUPERVISED, Prompts, RlRecipe, plan_prompts
from stretto.tasks.task import Problem, TaskSource
from stretto.text.chat import CHATML, tokenise_chat
from stretto.text.tokenizer import Tokenizer, train_tokenizer
from stretto.train.loop import write_trained
from stretto.train.step import MicroBatch, optimisation_step

STAGE = "sft"
_TOKENIZER_PROBLEMS = 2000
"""Per source: what the tokenizer is learnt from."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One sample. Written by `examples`."""

    tokens: np.ndarray
    """int64 [T]."""
    is_written: np.ndarray
    """bool [T]: the model is to write the token."""


def sft(
    recipe: RlRecipe,
    sources: Mapping[str, TaskSource],
    out: Path | str,
    *,
    tokenizer: Tokenizer | None = None,
    ranks: Ranks | None = None,
) -> Path:
    """Train ``recipe.start`` and write it as the checkpoint folder ``out``, with its tokenizer.

    Args:
        sources: by their names in the recipe.
        tokenizer: None: a byte-level one is learnt from the sources' texts.

    Raises:
        UserError: the recipe has no start, an example is longer than ``train.seq_len``, or the tokenizer does not fit.
        NonFiniteError: a loss or gradient is not finite.
    """
    start, ranks = recipe.start, ranks or join()
    if start is None:
        raise UserError("recipe: start: missing; add one, or give a checkpoint with --model")
    prompts = plan_prompts(recipe, {name: source.num_items for name, source in sources.items()})
    tokenizer = tokenizer or learn_tokenizer(sources, prompts, start.model.vocab_size)
    if tokenizer.vocab_size > start.model.vocab_size:
        raise UserError(
            f"start.model.vocab_size: {start.model.vocab_size} is less than the tokenizer's {tokenizer.vocab_size}; raise it"
        )
    torch.set_num_threads(recipe.train.threads)
    model = placed(start.model, initial_state(start.model, recipe.train.seed), ranks)
    optimizers = build_optimizers(start.optim, model)
    meter = Meter(STAGE, device_name(ranks.device), ranks.world)
    stream = examples(sources, prompts, tokenizer, start.noise)
    rows = fill_rows(stream, start.rows, recipe.train.seq_len)
    bar = progress(STAGE, start.steps) if ranks.is_first else nullcontext(lambda num=1, status=None: None)
    with bar as advance:
        for step in range(start.steps):
            set_learning_rate(optimizers, learning_rate(start.optim, step, start.steps))
            with meter:
                result = optimisation_step(
                    model,
                    optimizers,
                    micro_batches(next(rows), recipe.train.micro_rows, model, ranks),
                    ranks,
                    clip_norm=start.optim.clip_norm,
                    balance_rate=recipe.train.balance_rate,
                    dtype=torch.float32,
                )
            meter.add(flops=result.flops, tokens=result.num_tokens)
            advance(1, f"loss {result.nll:.3f}")
    out = Path(out)
    files = out.with_name(f"{out.name}.tokenizer")
    if ranks.is_first:
        tokenizer.save(files)
    told = recipe.model_dump(mode="json")
    return write_trained(out, model, meter, ranks, name=out.name, stage=STAGE, config=told, tokenizer_dir=files)


def learn_tokenizer(sources: Mapping[str, TaskSource], prompts: Prompts, vocab_size: int) -> Tokenizer:
    """A byte-level BPE over problems and their answers, with the ChatML template."""
    texts = (
        "\n".join([*(str(message["content"]) for message in problem.messages), problem.gold])
        for number in range(_TOKENIZER_PROBLEMS * len(sources))
        for problem in [_problem(sources, prompts.task(SUPERVISED + number))]
    )
    return train_tokenizer(texts, vocab_size, CHATML)


def examples(
    sources: Mapping[str, TaskSource], prompts: Prompts, tokenizer: Tokenizer, noise: float
) -> Iterator[Example]:
    """Endless, the same each time. A share ``noise`` of answers is another problem's of the same source. Raises
    `UserError`: the chat template refuses a conversation.
    """
    dialogue, number = Dialogue(tokenizer), 0
    while True:
        task = prompts.task(SUPERVISED + number)
        source, problem = sources[task.source], _problem(sources, task)
        rng = np.random.default_rng(key_of(task.seed, number))
        answered = problem
        if rng.random() < noise:
            size = prompts.sizes[prompts.names.index(task.source)]
            shift = 1 + int(rng.integers(1 << 20 if size is None else max(1, size - 1)))
            answered = source.problem(task.item + shift if size is None else (task.item + shift) % size)
        yield example(dialogue, problem, source.demonstration(answered), [tool.schema() for tool in source.tools()])
        number += 1


def example(
    dialogue: Dialogue,
    problem: Problem,
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> Example:
    """``problem`` with ``turns`` after it, as tokens."""
    tokenizer = dialogue.tokenizer
    if tokenizer.chat_template is not None:
        chat = tokenise_chat(tokenizer, [*problem.messages, *turns], tools)
        tokens, mask = np.array(chat.tokens, np.int64), np.array(chat.mask, np.bool_)
    else:
        parts = [(dialogue.prompt(problem.messages).tolist(), False)]
        for index, turn in enumerate(turns):
            is_last_answer = index + 1 == len(turns) or turns[index + 1]["role"] != "tool"
            if turn["role"] == "assistant":
                parts.append(([*tokenizer.encode(str(turn["content"])), tokenizer.eos_id], True))
            else:
                parts.append((tokenizer.encode(f"\n{turn['content']}" + "\n" * is_last_answer), False))
        tokens = np.array([token for part, _ in parts for token in part], np.int64)
        mask = np.concatenate([np.full(len(part), is_written) for part, is_written in parts])
    end = int(np.flatnonzero(mask)[-1]) + 1  # what the template writes behind the last turn, nobody samples
    return Example(tokens[:end], mask[:end])


def fill_rows(stream: Iterator[Example], num_rows: int, seq_len: int) -> Iterator[list[list[Example]]]:
    """Rows of whole examples for step after step; nothing is left out. Raises `UserError`: an example that no row can
    hold.
    """
    rows: list[list[Example]] = [[]]
    room = seq_len
    for each in stream:
        length = len(each.tokens) - 1
        if length > seq_len:
            raise UserError(f"train.seq_len: {seq_len} is less than the {length} of an example; raise it")
        if length > room:
            if len(rows) == num_rows:
                yield rows
                rows = []
            rows.append([])
            room = seq_len
        rows[-1].append(each)
        room -= length


def micro_batches(
    rows: Sequence[Sequence[Example]], micro_rows: int, model: Transformer, ranks: Ranks
) -> list[MicroBatch]:
    """One step's rows as this rank's micro-batches, cut to the longest row of each."""
    batches = []
    for start in range(0, len(rows), micro_rows):
        some = [*rows[start : start + micro_rows]]
        some += [[]] * (-len(some) % ranks.world)
        longest = max(sum(len(each.tokens) - 1 for each in row) for row in some)
        arrays = [np.full((len(some), longest), blank, np.int64) for blank in (0, IGNORED, PADDING, 0)]
        tokens_BT, targets_BT, documents_BT, positions_BT = arrays
        for row, contents in enumerate(some):
            at = 0
            for number, each in enumerate(contents):
                length = len(each.tokens) - 1
                here = (row, slice(at, at + length))
                tokens_BT[here], documents_BT[here], positions_BT[here] = each.tokens[:-1], number, np.arange(length)
                targets_BT[here] = np.where(each.is_written[1:], each.tokens[1:], IGNORED)
                at += length
        num_targets = int((targets_BT != IGNORED).sum())
        mine = ranks.rows(len(some))
        ids, targets, documents, positions = (torch.from_numpy(array[mine]).to(ranks.device) for array in arrays)
        batches.append(MicroBatch(STAGE, ids, targets, Context(positions, documents), model.config.full(), num_targets))
    return batches


def _problem(sources: Mapping[str, TaskSource], task: Task) -> Problem:
    return sources[task.source].problem(task.item)
