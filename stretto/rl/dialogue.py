"""From messages to tokens and back for whoever samples from a policy, or trains it beforehand on the same form.

With a chat template the prompt is what the server would send. Without one it is the plain form: the contents of the
messages, each followed by a line break, then the answer, which ends with the tokenizer's end of text. A tool's answer
is a line of its own there, and no tool is described.

What the model wrote is never rendered or tokenised again: a later turn appends tokens to it. Text that others wrote
(problems, answers of tools) may spell a special token and stays text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stretto.base.errors import UserError
from stretto.serve.messages import Message, Prompts, Tool, read_answer
from stretto.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wrote. Written by `Dialogue.calls`."""

    name: str
    arguments: Mapping[str, Any] | None
    """None where they are no JSON object."""


class Dialogue:
    """One tokenizer's way to write and read turns."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._prompts = Prompts(tokenizer)
        self._special = tokenizer.special_ids()
        self.stop_ids: tuple[int, ...] = tuple(sorted({tokenizer.eos_id, *self._prompts.turn_ends}))
        """Any of them ends the model's turn; the token belongs to the turn."""

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """Tokens int32 [T] up to where the model begins to write.

        Args:
            tools: schemas of the functions that may be called (`Tool.schema`).

        Raises:
            UserError: no messages, or the chat template refuses them.
        """
        if not messages:
            raise UserError("messages: the problem has none; give at least one message")
        if self.tokenizer.chat_template is None:
            return self._encoded("".join(f"{message['content']}\n" for message in messages))
        return np.array(self._prompts.chat(_turns(messages), _offers(tools)), np.int32)

    def tool_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        calls: Sequence[ToolCall],
        answers: Sequence[str],
    ) -> np.ndarray:
        """Tokens int32 [T] between a turn that called tools, its end token included, and the model's next turn.

        Found by rendering a conversation with and without the tools' answers: where the first is a beginning of the
        second, what follows is what follows the model's own turn too, however that was tokenised.

        Raises:
            UserError: the chat template has no such turn, or rewrites earlier ones when later ones arrive.
        """
        assert len(calls) == len(answers) > 0, f"{len(answers)} answers to {len(calls)} calls"
        if self.tokenizer.chat_template is None:
            return self._encoded("".join(f"\n{answer}" for answer in answers) + "\n")
        ids = [f"call{number:05d}" for number in range(len(calls))]  # nine letters or digits: what Mistral's asks for
        called = [
            {"id": name, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments or {})}}
            for name, call in zip(ids, calls, strict=True)
        ]
        before = [*messages, {"role": "assistant", "content": "", "tool_calls": called}]
        told = [
            {"role": "tool", "tool_call_id": name, "name": call.name, "content": answer}
            for name, call, answer in zip(ids, calls, answers, strict=True)
        ]
        base = self._prompts.chat(_turns(before), _offers(tools), generation_prompt=False)
        full = self._prompts.chat(_turns([*before, *told]), _offers(tools))
        ends = [place for place, token in enumerate(base) if token in self._special]
        if full[: len(base)] != base or not ends:
            raise UserError(
                "chat_template: rewrites earlier turns when a tool answers, or ends them with no special token; "
                "use a template whose conversations only grow"
            )
        return np.array(base[ends[-1] + 1 :] + full[len(base) :], np.int32)

    def text(self, turn: np.ndarray) -> str:
        """What the model wrote in one turn, special tokens left out, that which ended it among them."""
        return self.tokenizer.decode(turn.tolist(), skip_special_tokens=True)

    def calls(self, turn: np.ndarray) -> tuple[ToolCall, ...]:
        """The tool calls in a turn, in order; one that cannot be read is text."""
        found = read_answer(self.text(turn))[1]
        # a name may spell half a surrogate pair, which is no UTF-8
        return tuple(ToolCall(_utf8(call.name), _arguments(call.arguments)) for call in found)

    def message(self, turn: np.ndarray) -> dict[str, Any]:
        """A turn of the model as verifiers read it: content, and ``tool_calls`` where there are any."""
        message: dict[str, Any] = {"role": "assistant", "content": read_answer(self.text(turn))[0]}
        if calls := self.calls(turn):
            message["tool_calls"] = [{"type": "function", "function": asdict(call)} for call in calls]
        return message

    def _encoded(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text), np.int32)


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    return [Message.model_validate(dict(message)) for message in messages]


def _offers(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    return [Tool.model_validate(dict(tool)) for tool in tools]


def _utf8(text: str) -> str:
    return text.encode(errors="replace").decode()


def _arguments(text: str) -> Mapping[str, Any] | None:
    try:
        tree = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    return tree if isinstance(tree, dict) else None
