"""Conversion between messages and tokens by a chat template, for the student and for teachers with another one.

Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder
from stretto.learning.recipe import RlRecipe
from stretto.sandbox.tools import MAX_TEXT
from stretto.server.calls.answers import Said, read_answer
from stretto.server.messages import Message, Prompts
from stretto.server.messages import Tool as OfferedTool
from stretto.tasks.session import arguments_of
from stretto.text.spans import Translation
from stretto.text.tokenizer import Tokenizer, load_tokenizer

Trees = Sequence[Mapping[str, Any]]
"""Messages of a chat, or schemas of its tools, as JSON trees."""


def teacher_dialogues(recipe: RlRecipe, tokenizer: Tokenizer) -> dict[str, dict[str, Dialogue]]:
    """By source and teacher: the dialogue of a teacher whose chat template or tokenizer is not the student's.
    Raises UserError: a teacher has no tokenizer, or an incompatible one."""
    dialogues: dict[str, dict[str, Dialogue]] = {}
    distill = recipe.distill
    if distill is None:
        return dialogues
    for source, name in distill.teacher_of().items():
        config = distill.teachers[name]
        if config.checkpoint is None:
            continue  # `RemoteTeacher` checks the replies of a server
        try:
            folder = checkpoint_folder(config.checkpoint)
            own = load_tokenizer(folder)
        except UserError as error:
            raise UserError(f"distill.teachers.{name}.checkpoint: {error}") from None
        other = translation(recipe, name, tokenizer, own)
        if config.template == "student":
            own = replace(own, chat_template=tokenizer.chat_template)
        if other is not None or own.chat_template != tokenizer.chat_template:
            dialogues[source] = {name: Dialogue(own)}
    return dialogues


def translation(recipe: RlRecipe, name: str, own: Tokenizer, other: Tokenizer) -> Translation | None:
    """Translation from the student's tokens (``own``) to those of the teacher ``name`` (``other``); None if the vocabularies are
    equal. Raises UserError: the teacher's tokenizer is incompatible."""
    if own.rust.get_vocab() == other.rust.get_vocab():
        return None
    assert recipe.distill is not None
    remedy = "or name a teacher with the student's tokenizer"
    try:
        if recipe.distill.form != "sampled":
            raise UserError(f'form {recipe.distill.form!r} compares tokens; set distill.form = "sampled"')
        if recipe.rollout.max_turns > 1:
            raise UserError("only answers of one turn can be translated; set rollout.max_turns = 1")
        return Translation(own, other, Dialogue(own).stop_ids, Dialogue(other).end_id)
    except UserError as error:
        problem = f"distill.teachers.{name}: its tokenizer gives other ids than the student's: {error}"
        raise UserError(f"{problem}, {remedy}") from None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call in a turn of the model. Written by `Dialogue.calls`."""

    name: str
    arguments: Mapping[str, Any] | None
    """None if the arguments are not a JSON object."""


def _calls(answer: Said) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(call.name, arguments_of(call.arguments)) for call in answer.calls)


class Dialogue:
    """Writes and reads turns with one tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer, tool_chars: int = MAX_TEXT):
        """``tool_chars``: see `RolloutConfig`."""
        self.tokenizer = tokenizer
        self._prompts = Prompts(tokenizer, tool_chars)
        self.shortened = self._prompts.shortened
        self._special = tokenizer.special_ids
        self._hidden = self._special - self._prompts.visible_ids
        self.stop_ids: tuple[int, ...] = tuple(sorted({tokenizer.eos_id, *self._prompts.turn_ends}))
        """Each of these tokens ends the model's turn and is part of it."""
        template, added = tokenizer.chat_template or "", tokenizer.rust.get_added_tokens_decoder()
        self.end_id = next((e for e in self._prompts.turn_ends if added[e].content in template), tokenizer.eos_id)
        """The end token that the chat template writes."""

    def prompt(self, messages: Trees, tools: Trees = ()) -> np.ndarray:
        """int32 tokens [T] up to the start of the model's turn. ``tools``: results of `Tool.schema`.
        Raises UserError: there are no messages, the chat template refuses them, or tools are given without a template."""
        if not messages:
            raise UserError("messages: the problem has none; give at least one message")
        if self.tokenizer.chat_template is None and not tools:
            text = "".join(f"{message['content']}\n" for message in messages)
            return np.array(self.tokenizer.document(text), np.int32)
        return np.array(self._chat(messages, tools), np.int32)

    def tool_turn(self, messages: Trees, tools: Trees, calls: Sequence[ToolCall], answers: Sequence[str]) -> np.ndarray:
        """int32 tokens [T] between a turn that called tools, its end token included, and the model's next turn.

        The conversation is rendered without and with the tools' answers. If the first rendering is a prefix of the second, the
        rest also follows the turn that the model sampled, however that turn was tokenised.

        Raises UserError: the chat template has no tool turns, or changes earlier turns when later ones are added.
        """
        assert len(calls) == len(answers) > 0, f"{len(answers)} answers to {len(calls)} calls"
        ids = [
            f"call{number:05d}" for number in range(len(calls))
        ]  # Mistral's template requires nine letters or digits
        called = [
            {"id": name, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments or {})}}
            for name, call in zip(ids, calls, strict=True)
        ]
        added = [
            {"role": "tool", "tool_call_id": name, "name": call.name, "content": answer}
            for name, call, answer in zip(ids, calls, answers, strict=True)
        ]
        return self._between([*messages, {"role": "assistant", "content": "", "tool_calls": called}], added, tools)

    def user_turn(self, messages: Trees, tools: Trees, text: str) -> np.ndarray:
        """int32 tokens [T] between a turn without tool calls and the model's next turn, where the user answers ``text``. Raises
        as `tool_turn`."""
        if self.tokenizer.chat_template is None:
            return self._encoded(f"\n{text}\n")
        before = [*messages, {"role": "assistant", "content": ""}]
        return self._between(before, [{"role": "user", "content": text}], tools)

    def _between(self, before: Trees, added: Trees, tools: Trees) -> np.ndarray:
        """Tokens between the last turn of ``before`` and the model's next turn, if ``added`` follows ``before``."""
        base, full = self._chat(before, tools, generation_prompt=False), self._chat([*before, *added], tools)
        ends = [place for place, token in enumerate(base) if token in self._special]
        if full[: len(base)] != base or not ends:
            raise UserError(
                "chat_template: rewrites earlier turns when a tool or the user answers, or ends them with no special token; "
                "use a template whose conversations only grow"
            )
        return np.array(base[ends[-1] + 1 :] + full[len(base) :], np.int32)

    def text(self, turn: np.ndarray) -> str:
        """Text of one turn of the model, without special tokens."""
        return self.tokenizer.decode(turn.tolist(), skip_special_tokens=True)

    def num_tokens(self, turn: np.ndarray, num_characters: int) -> int:
        """Number of leading tokens of a turn whose `text` has ``num_characters``."""
        return 1 + bisect_left(range(1, len(turn)), num_characters, key=lambda num: len(self.text(turn[:num])))

    def calls(self, turn: np.ndarray, tools: Trees = ()) -> tuple[ToolCall, ...]:
        """The tool calls in a turn, in order; an invalid call counts as text. ``tools`` (see `prompt`) give the types of the
        arguments for dialects that do not write them."""
        return _calls(self._read(turn, tools))

    def message(self, turn: np.ndarray, tools: Trees = ()) -> dict[str, Any]:
        """A turn of the model as a message for verifiers: content, and ``tool_calls`` if there are any."""
        answer = self._read(turn, tools)
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if calls := _calls(answer):
            message["tool_calls"] = [{"type": "function", "function": asdict(call)} for call in calls]
        return message

    def _read(self, turn: np.ndarray, tools: Trees) -> Said:
        """Content and calls of a turn. Reasoning stays in the content, because verifiers search the whole turn for the answer."""
        visible = [token for token in turn.tolist() if token not in self._hidden]
        offered = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        return read_answer(self._prompts.reader(offered, reads_thoughts=False), self.tokenizer.decode(visible))

    def _encoded(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text), np.int32)

    def _chat(self, messages: Trees, tools: Trees, generation_prompt: bool = True) -> list[int]:
        turns = [Message.model_validate(dict(message)) for message in messages]
        offers = [OfferedTool.model_validate(dict(tool)) for tool in tools]
        return self._prompts.chat(turns, offers, generation_prompt=generation_prompt)
