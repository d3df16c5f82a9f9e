"""Supervised fine-tuning (SFT) on conversations, and on the tasks' demonstrations as the start of an RL run.

The loss is cross-entropy on the model's turns, including the end of the turn; prompts and tool results have no loss. Rows contain whole
examples, which do not attend to each other. Conversations are read from disk in the loader's order. Demonstrations are generated in
the order of the problems, with the prompts and turns of the agent loop (`stretto.flow.agent`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stretto.base.config import validate
from stretto.base.errors import UserError
from stretto.base.paths import remove
from stretto.base.track import say
from stretto.base.trajectory import Task
from stretto.data import pack
from stretto.data.conversations import Fitted
from stretto.data.loader import Batch, Loader, Mixture, key_of
from stretto.data.pack import Piece
from stretto.flow.prompts import SUPERVISED, Prompts, prompts_of
from stretto.learning.dialogue import Dialogue
from stretto.learning.recipe import RlRecipe, StartConfig
from stretto.model.lora import add_adapters, load_adapters, merge, write_adapters
from stretto.model.parallel import Origin, Ranks, join, random_network, stored, stored_for_training
from stretto.model.transformer import Transformer
from stretto.sandbox.tools import MAX_TEXT
from stretto.tasks.session import schemas
from stretto.tasks.task import Problem, TaskSource
from stretto.text.chat import CHATML, render, tokenise_chat
from stretto.text.tokenizer import TURN_END, TURN_START, Tokenizer, load_tokenizer, train_tokenizer
from stretto.train.finish import write_trained
from stretto.train.loop import Job, Trained
from stretto.train.recipe import FIXED_ROUTERS, SftRecipe, TrainConfig, fixes_routers
from stretto.train.snapshot import Snapshots, read_meta
from stretto.train.stages import finetune

STAGE = "sft"
_TOKENIZER_PROBLEMS = 2000
"""Number of problems per source from which a tokenizer is trained."""
_TOKENIZER_DEMONSTRATIONS = 500
"""Number of demonstrations per source with tools from which a tokenizer is trained; their tool calls are executed."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One sample. Written by `examples`."""

    tokens: np.ndarray
    """Token ids, int64 [T]."""
    is_learnt: np.ndarray
    """Whether a token has a loss, bool [T]: tokens of the model's turns, or all tokens with ``learns_prompts``."""


def sft_conversations(
    recipe: SftRecipe, job: Job, origin: Path, *, adapters: Path | None = None, keep: Path | None = None
) -> Trained:
    """Train the checkpoint ``origin`` on conversations. With ``recipe.lora``, adapters are trained and merged into the weights at the end.

    Args:
        recipe: complete for this network (`SftRecipe.for_network`).
        job: job whose loader was made by `open_conversations`.
        adapters: folder of peft adapters to start from; None: new adapters.
        keep: folder to which the adapters are also written, in peft's format.

    Raises:
        UserError: as `stretto.train.stages.finetune`, or adapters that do not fit.
        NonFiniteError: a loss or gradient is not finite.
    """
    network, lora = stored(origin), recipe.lora
    assert network.family is not None, "a checkpoint has one"
    family = network.family
    if lora is not None and job.ranks.world > 1:
        raise UserError(
            "lora: adapters are trained in one process only, because ranks hold parts of each weight; start one process"
        )

    def adapt(model: Transformer) -> None:
        assert lora is not None
        add_adapters(model, family, lora, recipe.train.seed)
        if adapters is not None:
            load_adapters(adapters, model, family, lora)

    presets = recipe.elastic.anchors if recipe.elastic is not None else network.presets
    trained = finetune(recipe, job, network, presets, adapt if lora else None)
    if lora is None:
        return trained
    if keep is not None:
        write_adapters(keep, trained.model, family, lora, str(origin))
    merge(trained.model)
    return trained


def open_conversations(mixture: Mixture, recipe: SftRecipe, ranks: Ranks) -> Loader:
    """The loader of a run: rows of whole conversations, divided between sources, or between domains if the recipe has ``domains``.

    Raises:
        UserError: a conversation is too long, or ``domains`` differ from those of the data.
    """
    train, shares = recipe.train, recipe.domains
    data = mixture.open()
    domains_of = [[domain for domain in each.manifest.domains if len(each.of_domain(domain))] for each in data]
    if shares:
        known = {domain for domains in domains_of for domain in domains}
        if missing := sorted(shares.keys() - known):
            raise UserError(
                f"domains.{missing[0]}: no conversation has this domain; the data has {', '.join(sorted(known))}"
            )
        if unshared := sorted(known - shares.keys()):
            raise UserError(f"domains: {unshared[0]} is in the data and has no share; add one")
    parts: list[Fitted] = []
    weights: list[float] = []
    for each, domains, weight in zip(data, domains_of, mixture.weights, strict=True):
        for domain in domains if shares else [None]:
            parts.append(Fitted(each, train.seq_len, recipe.long, domain))
            total = sum(other for other, names in zip(mixture.weights, domains_of, strict=True) if domain in names)
            weights.append(weight if domain is None else shares[domain] * weight / total)
    if (num_long := sum(part.num_long for part in parts)) and ranks.is_first:
        num, num_left_out = (sum(getattr(part, name) for part in parts) for name in ("num_before", "num_left_out"))
        say(
            f"longer than train.seq_len {train.seq_len}: {num_long:,} of {num:,} conversations, the longest has "
            f"{max(part.longest for part in parts):,} tokens; {num_long - num_left_out:,} cut, {num_left_out:,} left out"
        )
    return Loader(parts, weights, train.micro_rows, train.seq_len, train.seed, ranks.rank, ranks.world)


def sft(
    recipe: RlRecipe,
    sources: Mapping[str, TaskSource],
    out: Path | str,
    *,
    origin: Path | None = None,
    tokenizer: Tokenizer | None = None,
    ranks: Ranks | None = None,
) -> Path:
    """Train the start of an RL run (``recipe.start``) and write the checkpoint folder ``out`` with its tokenizer. If it was interrupted, it
    resumes from the last snapshot in ``{out}.run``.

    Args:
        sources: task sources by their names in the recipe.
        origin: checkpoint to train further if the start describes no network; its tokenizer is used.
        tokenizer: tokenizer of a new network; None: a byte-level tokenizer is trained on the sources' texts.

    Raises:
        UserError: the recipe has no start, or both a new network and ``origin``; an example is longer than ``train.seq_len``, or
            ``train.seq_len`` than the network's positions; or the tokenizer does not fit.
        NonFiniteError: a loss or gradient is not finite.
    """
    start, ranks = recipe.start, ranks or join()
    if start is None:
        raise UserError("recipe: start: missing; add one, or give a checkpoint with --model")
    prompts = prompts_of(recipe, sources)
    initial = _initial(recipe, start, origin)
    config = initial.config
    if tokenizer is None:
        tokenizer = load_tokenizer(origin) if origin else learn_tokenizer(sources, prompts, config.vocab_size)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"start.model.vocab_size: {config.vocab_size} is less than the tokenizer's {tokenizer.vocab_size}; raise it"
        )
    torch.set_num_threads(recipe.train.threads)
    out = Path(out)
    run, tool_chars = _run_of(out), recipe.rollout.tool_chars
    plan, latest = _plan_of(recipe, start), latest_snapshot(out)
    is_fixed = origin is not None and config.only_ranks
    if latest is not None:
        is_fixed = fixes_routers(config, validate(SftRecipe, read_meta(latest).recipe, str(latest)))
    if is_fixed and ranks.is_first:
        say(f"{STAGE}: {FIXED_ROUTERS}")
    plan = plan.for_network(config, initial.presets, is_fixed)
    job = Job(
        run=run,
        loader=Demonstrations(
            lambda first: examples(sources, prompts, tokenizer, start.noise, start.learns_prompts, tool_chars, first),
            plan.train,
            ranks,
        ),
        held_out=(),
        data_hash=tokenizer.fingerprint(),
        ranks=ranks,
        resume=latest is not None,
    )
    trained = finetune(plan, job, initial, {})
    files = out.with_name(f"{out.name}.tokenizer")
    if ranks.is_first:
        tokenizer.save(files)
    write_trained(
        out,
        trained.model,
        trained.meter,
        ranks,
        name=out.name,
        stage=STAGE,
        config=recipe.model_dump(mode="json"),
        tokenizer_dir=files,
        family=initial.family,
        presets=initial.presets if plan.elastic is None else plan.elastic.anchors,
        parents=(initial.lineage,) if initial.lineage is not None else (),
        run_id=trained.run_id,
    )
    if ranks.is_first:
        remove(run)
    return out


def latest_snapshot(out: Path) -> Path | None:
    """The newest snapshot of the interrupted training that will write ``out``; None: there is none."""
    return Snapshots(_run_of(out) / "snapshots", 1).latest()


def _run_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.run")


def _initial(recipe: RlRecipe, start: StartConfig, origin: Path | None) -> Origin:
    """The checkpoint ``origin``, or random weights."""
    model, seed = start.model, recipe.train.seed
    if origin is None:
        if model is None:
            raise UserError("recipe: start.model: missing; describe a network, or name one with --model")
        return random_network(model, seed)
    if model is not None:
        raise UserError(f"recipe: start.model: describes a new network, and --model names {origin}; leave one out")
    return stored_for_training(origin)


def _plan_of(recipe: RlRecipe, start: StartConfig) -> SftRecipe:
    """The start of an RL recipe as the recipe of an SFT stage."""
    train = recipe.train
    fits = range(-(-start.rows // train.micro_rows), start.rows + 1)
    num = next(num for num in fits if start.rows % num == 0)
    loop = TrainConfig(
        steps=start.steps,
        rows=start.rows,
        seq_len=train.seq_len,
        micro_batches=num,
        seed=train.seed,
        dtype=start.dtype,
        snapshot_minutes=train.snapshot_minutes,
        keep_snapshots=1,
    )
    return SftRecipe(optim=start.optim, train=loop, elastic=start.elastic, balance_rate=train.balance_rate)


class Demonstrations:
    """Micro-batches of generated examples, in order. Implements `stretto.data.loader.Batches`."""

    def __init__(self, stream: Callable[[int], Iterator[Example]], train: TrainConfig, ranks: Ranks) -> None:
        """``stream``: returns the examples from the one with a number on."""
        self._stream, self._train, self._ranks = stream, train, ranks
        self.restore({"taken": 0})

    def next(self) -> Batch:
        batch = next(self._batches)
        self._taken += 1
        return batch

    def state(self) -> dict[str, Any]:
        return {"first_example": self._first, "taken": self._taken}

    def restore(self, state: dict[str, Any]) -> None:
        """Return to ``state``. Only the examples of its step are generated again; those of all steps if an earlier version of Stretto
        wrote the state, which then has no ``first_example``."""
        self._first, self._taken = state.get("first_example", 0), 0
        self._batches = self._all_batches()
        for _ in range(state["taken"]):
            self.next()

    def _all_batches(self) -> Iterator[Batch]:
        """Micro-batches from the step whose first example is ``self._first``; a step begins with a new row."""
        for rows in fill_rows(self._stream(self._first), self._train.rows, self._train.seq_len):
            yield from micro_batches(rows, self._train.micro_rows, self._ranks)
            self._first += sum(map(len, rows))
            self._taken = 0


def learn_tokenizer(sources: Mapping[str, TaskSource], prompts: Prompts, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with the ChatML template on problems and answers. For sources with tools it is trained on whole
    conversations, because an unknown tool schema would take one token per byte in every prompt."""
    num_tasks = len(sources) * _TOKENIZER_PROBLEMS
    num_demonstrations = len(sources) * _TOKENIZER_DEMONSTRATIONS

    def texts() -> Iterator[str]:
        for number in range(num_tasks):
            task = prompts.task(SUPERVISED + number)
            source, problem = sources[task.source], _problem(sources, task)
            if not (offered := schemas(source, problem)):
                yield "\n".join([*(str(message["content"]) for message in problem.messages), problem.gold])
            elif number < num_demonstrations:
                text = render(CHATML, [*problem.messages, *source.demonstration(problem)], offered)
                yield text.replace(TURN_START, "\n").replace(TURN_END, "\n")

    return train_tokenizer(texts(), vocab_size, CHATML)


def examples(
    sources: Mapping[str, TaskSource],
    prompts: Prompts,
    tokenizer: Tokenizer,
    noise: float,
    learns_prompts: bool = False,
    tool_chars: int = MAX_TEXT,
    first: int = 0,
) -> Iterator[Example]:
    """Endless deterministic stream of examples. Raises `UserError`: the chat template refuses a conversation.

    Args:
        noise: share of examples with the answer of another problem of the same source.
        learns_prompts: whether prompts have a loss too.
        tool_chars: as of `RolloutConfig`.
        first: number of the first example; an example depends on its number alone.
    """
    dialogue, number = Dialogue(tokenizer, tool_chars), first
    while True:
        task = prompts.task(SUPERVISED + number)
        source, problem = sources[task.source], _problem(sources, task)
        rng = np.random.default_rng(key_of(task.seed, number))
        answered = problem
        if rng.random() < noise:
            size = prompts.sizes[prompts.names.index(task.source)]
            shift = 1 + int(rng.integers(1 << 20 if size is None else max(1, size - 1)))
            answered = source.problem(task.item + shift if size is None else (task.item + shift) % size)
        one = example(dialogue, problem, source.demonstration(answered), schemas(source, problem))
        yield replace(one, is_learnt=np.ones_like(one.is_learnt)) if learns_prompts else one
        number += 1


def example(
    dialogue: Dialogue,
    problem: Problem,
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> Example:
    """Tokens of the conversation that consists of ``problem`` and ``turns``."""
    tokenizer = dialogue.tokenizer
    if tokenizer.chat_template is not None:
        chat = tokenise_chat(tokenizer, dialogue.shortened([*problem.messages, *turns]), tools)
        tokens, mask = np.array(chat.tokens, np.int64), np.array(chat.mask, np.bool_)
    else:
        parts = [(dialogue.prompt(problem.messages, tools).tolist(), False)]
        for turn in turns:
            if turn["role"] == "assistant":
                parts.append(([*tokenizer.encode(str(turn["content"])), tokenizer.eos_id], True))
            else:
                parts.append((tokenizer.encode(f"\n{turn['content']}\n"), False))
        tokens = np.array([token for part, _ in parts for token in part], np.int64)
        mask = np.concatenate([np.full(len(part), is_learnt) for part, is_learnt in parts])
    end = int(np.flatnonzero(mask)[-1]) + 1  # tokens of the template after the last turn are never sampled
    return Example(tokens[:end], mask[:end])


def fill_rows(stream: Iterator[Example], num_rows: int, seq_len: int) -> Iterator[list[list[Example]]]:
    """Rows of whole examples, ``num_rows`` per step; no example is left out. Raises `UserError`: an example longer than a row."""
    rows: list[list[Example]] = [[]]
    room = seq_len
    for each in stream:
        length = len(each.tokens) - 1
        if length > seq_len:
            raise UserError(f"train.seq_len: {seq_len} is less than the {length} tokens of an example; raise it")
        if length > room:
            if len(rows) == num_rows:
                yield rows
                rows = []
            rows.append([])
            room = seq_len
        rows[-1].append(each)
        room -= length


def micro_batches(rows: Sequence[Sequence[Example]], micro_rows: int, ranks: Ranks) -> Iterator[Batch]:
    """This rank's micro-batches of one step's rows, each as long as its longest row."""
    for start in range(0, len(rows), micro_rows):
        yield _micro_batch(rows[start : start + micro_rows], ranks)


def _micro_batch(rows: Sequence[Sequence[Example]], ranks: Ranks) -> Batch:
    mine = ranks.rows(len(rows))
    if not rows[mine]:  # as with `Loader`, a rank without rows gets a row of padding
        rows, mine = [*rows, []], slice(len(rows), len(rows) + 1)
    # the last token of an example is a target and no input
    plan = [tuple(Piece(at, 0, len(each.tokens) - 1, False) for at, each in enumerate(row)) for row in rows]
    longest = max(sum(piece.length for piece in row) for row in plan)
    packed = pack.fill_rows(
        plan, longest, lambda row, at: rows[row][at].tokens, lambda row, at: rows[row][at].is_learnt
    )
    num_mine, num_all = (int((each != pack.IGNORED).sum()) for each in (packed.targets_BT[mine], packed.targets_BT))
    arrays = packed.tokens_BT[mine], packed.targets_BT[mine], packed.documents_BT[mine], packed.positions_BT[mine]
    return Batch(*arrays, np.zeros(len(arrays[0]), np.int64), num_mine, num_all)


def _problem(sources: Mapping[str, TaskSource], task: Task) -> Problem:
    return sources[task.source].problem(task.item)
