"""Task sources of a recipe, and the order of the prompts that a run takes from them.

Sources are opened in the process of a role, after the run has checked all of them. The problem of each ordinal is a pure
function of the recipe, so that any process of any attempt computes the same one. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import UserError
from stretto.base.trajectory import Task
from stretto.data.loader import key_of, permute
from stretto.flow.agent import TOOL_SLOTS, check_room
from stretto.learning.dialogue import Dialogue, teacher_dialogues
from stretto.learning.recipe import RlRecipe, SourceConfig
from stretto.learning.roles import SandboxConfig
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.registry import open_source
from stretto.tasks.session import schemas
from stretto.tasks.task import ScoreTimeoutError, TaskSource, close_sources
from stretto.text.chat import tool_form
from stretto.text.similar import embeddings
from stretto.text.tokenizer import Tokenizer

_NEED_SANDBOX = ("code", "sheets", "tools")
"""Kinds of task that run programs. A task in a file of the user's may run programs too."""
_MAY_WAIT = (*_NEED_SANDBOX, "judged")
"""Kinds of task whose verdicts may take longer than sampling."""
_TRIED_PROMPTS = 32
"""Number of training prompts that are rendered before the start to check their length, beside all held-out prompts. A later one that is
too long fails its group."""
_CHECK_S = 60.0
"""Least deadline of a verdict while a task is checked: the first one may load something."""
# A source without end has at least 2^24 problems: a quarter for the run, a quarter for supervised training, half held out.
SUPERVISED = 1 << 22
"""First ordinal of supervised training before the run; the run's own ordinals are smaller."""
_HELD_OUT = 1 << 23
"""First held-out item of a source without end."""
_SOURCE, _SAMPLE, _HELD_OUT_SAMPLE, _ORDER = 1, 2, 3, 4
"""Purposes of random numbers, mixed into the seed."""
_DECK = 64
"""Ordinals per deck. Within a deck each source appears by its weight, up to one occurrence that moves to the next deck."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The endless list of prompts of a run, and the held-out ones. Made by `plan_prompts`.

    The number of occurrences of a source before an ordinal must be known without enumerating all earlier ordinals. So sources
    are dealt in shuffled decks: before the end of deck d, each has come ⌊64·d·its share⌋ times.
    """

    names: tuple[str, ...]
    shares: tuple[float, ...]
    """Shares of the sources, with sum 1."""
    sizes: tuple[int | None, ...]
    """Number of training items of each source; None: no end."""
    variants: tuple[int, ...]
    """Number of consecutive items of each source that are one problem."""
    group: int
    max_tokens: int
    seed: int

    def task(self, ordinal: int) -> Task:
        """The task of ``ordinal``. Its source is drawn by weight; items do not repeat before a source is used up, then they are
        shuffled again."""
        phase, number = divmod(ordinal, SUPERVISED)  # supervised training has epochs of its own
        place, num_before = self._dealt(phase, number)
        item, size = ordinal, self.sizes[place]
        if size is not None:
            epoch, within = divmod(num_before, size)
            order = key_of(self.seed, _ORDER, phase, place, epoch)
            item = int(permute(np.array([within], np.int64), size, order)[0])
        return self._task(ordinal, place, item, self.group, _SAMPLE)

    def held_out(self, number: int) -> Task:
        """Held-out problem ``number``, with one sample; the sources take turns, and so do the variants of their problems. Its ordinal is
        negative."""
        place = number % len(self.names)
        size, within, variants = self.sizes[place], number // len(self.names), self.variants[place]
        item = (_HELD_OUT if size is None else size) + within * variants + within % variants
        return self._task(-1 - number, place, item, 1, _HELD_OUT_SAMPLE)

    def _dealt(self, phase: int, number: int) -> tuple[int, int]:
        """Index of the source of prompt ``number`` of a phase, and how often the source came before."""
        deck = number // _DECK  # the deck starts there, or up to one ordinal per source earlier
        while sum(self._before(deck + 1)) <= number:
            deck += 1
        before = self._before(deck)
        nums = tuple(after - earlier for after, earlier in zip(self._before(deck + 1), before, strict=True))
        dealt = _shuffled(nums, self.seed, phase, deck)
        at = number - sum(before)
        place = int(dealt[at])
        return place, before[place] + int((dealt[:at] == place).sum())

    def _before(self, deck: int) -> list[int]:
        """Occurrences of each source before a deck."""
        return [int(deck * _DECK * share) for share in self.shares]

    def _task(self, ordinal: int, place: int, item: int, group: int, purpose: int) -> Task:
        seed = key_of(self.seed, purpose, ordinal) >> 1
        return Task(ordinal, self.names[place], item, group, seed, self.max_tokens)


@lru_cache(maxsize=16)
def _shuffled(nums: tuple[int, ...], seed: int, phase: int, deck: int) -> NDArray[np.int64]:
    """Indices of the sources of a deck in which they come ``nums`` times. Consecutive prompts are of the same deck."""
    cards = np.repeat(np.arange(len(nums)), nums)
    return cards[permute(np.arange(len(cards)), len(cards), key_of(seed, _SOURCE, phase, deck))]


def prompts_of(recipe: RlRecipe, sources: Mapping[str, TaskSource]) -> Prompts:
    """`plan_prompts` for opened ``sources``."""
    num_items, variants = (
        {name: getattr(each, field) for name, each in sources.items()} for field in ("num_items", "variants")
    )
    return plan_prompts(recipe, num_items, variants)


def plan_prompts(recipe: RlRecipe, num_items: Mapping[str, int | None], variants: Mapping[str, int]) -> Prompts:
    """The prompts of ``recipe``. The last problems of each finite source are held out, each with all of its ``variants``; a source without
    an entry there has one. Raises UserError: a source has too few problems to hold some out."""
    names, sizes = tuple(recipe.sources), list[int | None]()
    nums = tuple(variants.get(name, 1) for name in names)
    for name, num_variants in zip(names, nums, strict=True):
        size = num_items[name]
        num_held_out = max(-(-recipe.train.eval_prompts // len(names)), recipe.sources[name].held_out)
        if size is not None and size <= num_held_out * num_variants:
            raise UserError(
                f"sources.{name}: has {size // num_variants} problems, and {num_held_out} are held out; lower train.eval_prompts and its held_out"
            )
        sizes.append(None if size is None else size - num_held_out * num_variants)
    total = sum(source.weight for source in recipe.sources.values())
    shares = tuple(source.weight / total for source in recipe.sources.values())
    return Prompts(
        names, shares, tuple(sizes), nums, recipe.rollout.group, recipe.rollout.max_tokens, recipe.train.seed
    )


@dataclass(frozen=True, slots=True)
class SourceTables:
    """The recipe's sources. A call opens them in the process of the caller, with one sandbox for all."""

    sources: Mapping[str, SourceConfig]
    sandbox: SandboxConfig

    @property
    def are_slow(self) -> bool:
        """Whether groups may wait for tools and verdicts longer than for engines."""
        return self._may_have(_MAY_WAIT)

    def __call__(self) -> dict[str, TaskSource]:
        """Raises UserError: a source refuses its arguments, or the required isolation is not available."""
        sandbox = None
        if self._may_have(_NEED_SANDBOX):
            # an agent runs the programs of many groups; keepers start on demand
            workers = min(TOOL_SLOTS, os.cpu_count() or 1)
            sandbox = Sandbox(self.sandbox, strict=self.sandbox.strict, workers=workers)
        opened: dict[str, TaskSource] = {}
        with ExitStack() as stack:  # closes what is open when a later source is refused
            if sandbox is not None:
                stack.callback(sandbox.close)
            for name, source in self.sources.items():
                opened[name] = open_source(name, source, sandbox)
                stack.callback(opened[name].close)
            stack.pop_all()
        return opened

    def _may_have(self, kinds: Collection[str]) -> bool:
        """Whether any source is of ``kinds``, or a user's own."""
        return any(source.kind in kinds or ":" in source.kind for source in self.sources.values())

    @contextmanager
    def opened(self) -> Iterator[dict[str, TaskSource]]:
        """Context with open sources, which are closed at the end. They stay open after a `ScoreTimeoutError`: a score() still runs."""
        sources = self()
        with ExitStack() as stack:
            stack.callback(close_sources, sources.values())
            try:
                yield sources
            except ScoreTimeoutError:
                stack.pop_all()
                raise


def check_sources(
    recipe: RlRecipe, tables: SourceTables, tokenizer: Tokenizer, say: Callable[[str], None]
) -> tuple[Prompts, dict[str, int]]:
    """Open every source, validate it, render the first prompts, and close it again. Returns the prompts of the run, and by
    source the number of answers that one verifier judges at once.
    Raises UserError: names the source, and the item if the error concerns one."""
    train, dialogue = recipe.train, Dialogue(tokenizer)
    for name, reward in recipe.rewards.items():
        if reward.diversity == "meaning":
            try:
                embeddings()
            except UserError as error:
                raise UserError(f"rewards.{name}.diversity: {error}") from error
    teacher_dialogues(recipe, tokenizer)  # refuses teachers of another tokenizer
    with tables.opened() as sources:
        deadline_s, limits = recipe.runtime.rewards.deadline_s, recipe.sandbox
        for name, source in sources.items():
            if source.verdict_s >= deadline_s:
                raise UserError(
                    f"sources.{name}: a verdict may take {source.verdict_s:g} s, and runtime.rewards.deadline_s is "
                    f"{deadline_s:g}; raise that"
                )
            if recipe.sources[name].kind in _NEED_SANDBOX and max(limits.wall_s, limits.cpu_s) >= deadline_s:
                raise UserError(
                    f"sources.{name}: a program may take {max(limits.wall_s, limits.cpu_s):g} s (sandbox.wall_s, sandbox.cpu_s), and "
                    f"runtime.rewards.deadline_s is {deadline_s:g}; raise that, or lower them"
                )
            check_source(source, recipe)
        sizes = {name: (source.num_items, source.variants) for name, source in sources.items()}
        counts = ", ".join(
            f"{name} ({'endless' if num is None else f'{num // variants:,}'})"
            for name, (num, variants) in sizes.items()
        )
        levels = [source.sandbox.isolation for source in sources.values() if source.sandbox is not None]
        say(f"problems: {counts}" + "".join(f"; sandbox isolation: {level}" for level in levels[:1]))
        prompts = prompts_of(recipe, sources)
        tasks = [prompts.task(ordinal) for ordinal in range(min(_TRIED_PROMPTS, train.steps * train.prompts))]
        tasks += [prompts.held_out(number) for number in range(train.eval_prompts)]
        offers_tools = False
        for task in tasks:
            source = sources[task.source]
            problem = source.tried(task.item)
            offered = schemas(source, problem)
            offers_tools |= bool(offered)
            check_room(task, len(dialogue.prompt(problem.messages, offered)), train.seq_len)
        if offers_tools and tokenizer.chat_template and (note := tool_form(tokenizer.chat_template).note()):
            say(note)
        return prompts, {name: source.at_once for name, source in sources.items()}


def check_source(source: TaskSource, recipe: RlRecipe) -> None:
    """`TaskSource.validate`, in which a verdict may take as long as in the run, and at least `_CHECK_S`. Raises UserError."""
    source.validate(limit_s=max(_CHECK_S, recipe.runtime.rewards.deadline_s))
