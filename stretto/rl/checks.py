"""What can be known to be wrong before anybody is hired and anything is written. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stretto.rl.agent import check_room
from stretto.rl.dialogue import Dialogue
from stretto.rl.factories import SourceTables
from stretto.rl.prompts import Prompts, plan_prompts
from stretto.rl.recipe import RlRecipe
from stretto.tasks.task import TaskSource
from stretto.text.tokenizer import Tokenizer

_TRIED_PROMPTS = 32
"""Of the run, and as many held-out ones: whether they leave room for an answer. A later one that does not stops the run."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What the sources tell of themselves. Written by `checked`."""

    prompts: Prompts
    at_once: Mapping[str, int]
    """By source: answers that one verifier judges at once."""


def checked(recipe: RlRecipe, tables: SourceTables, tokenizer: Tokenizer, say: Callable[[str], None]) -> Checked:
    """Open every source, have it validate itself, and try the first prompts; then close them again.

    Raises:
        UserError: naming the source, and the item where it is about one.
    """
    sources = tables()
    try:
        for source in sources.values():
            source.validate()
        say(tables.describe(sources))
        prompts = plan_prompts(recipe, {name: source.num_items for name, source in sources.items()})
        _check_prompts(recipe, sources, prompts, Dialogue(tokenizer))
        return Checked(prompts, {name: source.at_once for name, source in sources.items()})
    finally:
        for source in sources.values():
            source.close()


def _check_prompts(recipe: RlRecipe, sources: Mapping[str, TaskSource], prompts: Prompts, dialogue: Dialogue) -> None:
    train = recipe.train
    tasks = [prompts.task(ordinal) for ordinal in range(min(_TRIED_PROMPTS, train.steps * train.prompts))]
    tasks += [prompts.held_out(number) for number in range(min(_TRIED_PROMPTS, train.eval_prompts))]
    for task in tasks:
        source = sources[task.source]
        tokens = dialogue.prompt(source.tried(task.item).messages, [tool.schema() for tool in source.tools()])
        check_room(task, len(tokens), train.seq_len)
