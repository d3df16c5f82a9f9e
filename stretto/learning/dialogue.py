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
from stretto.server.dialects import Said, read_answer
from stretto.server.messages import Message, Prompts
from stretto.server.messages import Tool as OfferedTool
from stretto.tasks.session import arguments_of
from stretto.text.spans import Translation
from stretto.text.tokenizer import Tokenizer, load_tokenizer

Trees = Sequence[Mapping[str, Any]]
"""Messages of a chat, or schemas of its tools."""


def teacher_dialogues(recipe: RlRecipe, tokenizer: Tokenizer) -> dict[str, dict[str, Dialogue]]:
    """By source and teacher: how a teacher's own chat template and tokenizer put a problem, where they are not the student's.
    Raises UserError: a teacher has no tokenizer, or one that it cannot teach with."""
    found: dict[str, dict[str, Dialogue]] = {}
    distill = recipe.distill
    if distill is None:
        return found
    for source, name in distill.teacher_of().items():
        config = distill.teachers[name]
        if config.checkpoint is None:
            continue  # a server's replies are checked where it is asked
        try:
            folder = checkpoint_folder(config.checkpoint)
            own = load_tokenizer(folder)
        except UserError as error:
            raise UserError(f"distill.teachers.{name}.checkpoint: {error}") from None
        other = translation(recipe, name, tokenizer, own)
        if config.template == "student":
            own = replace(own, chat_template=tokenizer.chat_template)
        if other is not None or own.chat_template != tokenizer.chat_template:
            found[source] = {name: Dialogue(own)}
    return found


def translation(recipe: RlRecipe, name: str, own: Tokenizer, other: Tokenizer) -> Translation | None:
    """From the student's tokens to those of the teacher ``name``; None where they are the same. Raises UserError: it cannot teach
    with that tokenizer."""
    if own.rust.get_vocab() == other.rust.get_vocab():
        return None
    assert recipe.distill is not None
    remedy = "or name a teacher with the student's tokenizer"
    try:
        if recipe.distill.form != "sampled":
            raise UserError(f'form {recipe.distill.form!r} compares tokens; set distill.form = "sampled"')
        if recipe.rollout.max_turns > 1:
            raise UserError("what lies between turns is not its own; set rollout.max_turns = 1")
        return Translation(own, other, Dialogue(own).stop_ids, Dialogue(other).end_id)
    except UserError as error:
        told = f"distill.teachers.{name}: its tokenizer gives other ids than the student's: {error}"
        raise UserError(f"{told}, {remedy}") from None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wrote. Written by `Dialogue.calls`."""

    name: str
    arguments: Mapping[str, Any] | None
    """None where they are no JSON object."""


def _calls(said: Said) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(one.name, arguments_of(one.arguments)) for one in said.calls)


class Dialogue:
    """One tokenizer's way to write and read turns."""

    def __init__(self, tokenizer: Tokenizer, tool_chars: int = MAX_TEXT):
        """``tool_chars``: as of `RolloutConfig`."""
        self.tokenizer = tokenizer
        self._prompts = Prompts(tokenizer, tool_chars)
        self.shortened = self._prompts.shortened
        self._special = tokenizer.special_ids()
        self._hidden = self._special - self._prompts.visible_ids
        self.stop_ids: tuple[int, ...] = tuple(sorted({tokenizer.eos_id, *self._prompts.turn_ends}))
        """Any of them ends the model's turn; the token belongs to the turn."""
        template, added = tokenizer.chat_template or "", tokenizer.rust.get_added_tokens_decoder()
        self.end_id = next((e for e in self._prompts.turn_ends if added[e].content in template), tokenizer.eos_id)
        """The one that the chat template writes."""

    def prompt(self, messages: Trees, tools: Trees = ()) -> np.ndarray:
        """Tokens int32 [T] up to where the model begins to write; ``tools`` as of `Tool.schema`.
        Raises UserError: no messages, or the chat template refuses them; or tools, and there is no template."""
        if not messages:
            raise UserError("messages: the problem has none; give at least one message")
        if self.tokenizer.chat_template is None and not tools:
            return self._encoded("".join(f"{message['content']}\n" for message in messages))
        return np.array(self._chat(messages, tools), np.int32)

    def tool_turn(self, messages: Trees, tools: Trees, calls: Sequence[ToolCall], answers: Sequence[str]) -> np.ndarray:
        """Tokens int32 [T] between a turn that called tools, its end token included, and the model's next turn.

        Found by rendering a conversation with and without the tools' answers: where the first begins the second, what
        follows is what follows the model's own turn too, however that was tokenised.

        Raises UserError: the chat template has no such turn, or rewrites earlier ones when later ones arrive.
        """
        assert len(calls) == len(answers) > 0, f"{len(answers)} answers to {len(calls)} calls"
        ids = [f"call{number:05d}" for number in range(len(calls))]  # nine letters or digits: what Mistral's asks for
        called = [
            {"id": name, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments or {})}}
            for name, call in zip(ids, calls, strict=True)
        ]
        told = [
            {"role": "tool", "tool_call_id": name, "name": call.name, "content": answer}
            for name, call, answer in zip(ids, calls, answers, strict=True)
        ]
        return self._between([*messages, {"role": "assistant", "content": "", "tool_calls": called}], told, tools)

    def user_turn(self, messages: Trees, tools: Trees, text: str) -> np.ndarray:
        """The same between a turn that called nothing, and that the user answers with ``text``. Raises as `tool_turn`."""
        if self.tokenizer.chat_template is None:
            return self._encoded(f"\n{text}\n")
        before = [*messages, {"role": "assistant", "content": ""}]
        return self._between(before, [{"role": "user", "content": text}], tools)

    def _between(self, before: Trees, told: Trees, tools: Trees) -> np.ndarray:
        """What lies between the last turn of ``before`` and the model's next, with ``told`` between them."""
        base, full = self._chat(before, tools, generation_prompt=False), self._chat([*before, *told], tools)
        ends = [place for place, token in enumerate(base) if token in self._special]
        if full[: len(base)] != base or not ends:
            raise UserError(
                "chat_template: rewrites earlier turns when a tool or the user answers, or ends them with no special token; "
                "use a template whose conversations only grow"
            )
        return np.array(base[ends[-1] + 1 :] + full[len(base) :], np.int32)

    def text(self, turn: np.ndarray) -> str:
        """What the model wrote in one turn, without special tokens."""
        return self.tokenizer.decode(turn.tolist(), skip_special_tokens=True)

    def num_tokens(self, turn: np.ndarray, num_characters: int) -> int:
        """Leading tokens of a turn that write so many characters of its `text`."""
        return 1 + bisect_left(range(1, len(turn)), num_characters, key=lambda num: len(self.text(turn[:num])))

    def calls(self, turn: np.ndarray, tools: Trees = ()) -> tuple[ToolCall, ...]:
        """The tool calls in a turn, in order; one that cannot be read is text. ``tools``, as of `prompt`, say of what kind the arguments
        are where the dialect does not."""
        return _calls(self._said(turn, tools))

    def message(self, turn: np.ndarray, tools: Trees = ()) -> dict[str, Any]:
        """A turn of the model as verifiers read it: content, and ``tool_calls`` where there are any."""
        said = self._said(turn, tools)
        message: dict[str, Any] = {"role": "assistant", "content": said.content}
        if calls := _calls(said):
            message["tool_calls"] = [{"type": "function", "function": asdict(call)} for call in calls]
        return message

    def _said(self, turn: np.ndarray, tools: Trees) -> Said:
        """Reasoning stays in the content: a verifier looks for the answer in all that was written."""
        visible = [token for token in turn.tolist() if token not in self._hidden]
        offered = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        return read_answer(self._prompts.reader(offered, reads_thoughts=False), self.tokenizer.decode(visible))

    def _encoded(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text), np.int32)

    def _chat(self, messages: Trees, tools: Trees, generation_prompt: bool = True) -> list[int]:
        turns = [Message.model_validate(dict(message)) for message in messages]
        offers = [OfferedTool.model_validate(dict(tool)) for tool in tools]
        return self._prompts.chat(turns, offers, generation_prompt=generation_prompt)
