"""Prompts and tool turns in tokens: what the template says, around what was sampled."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.base.errors import UserError
from stretto.rl.dialogue import Dialogue, ToolCall
from stretto.text.chat import CHATML, render, tokenise_chat
from tests.rl.agents import calculator, tokenizer

ASKED = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat <|im_end|> sat"})
OFFERS = (calculator().schema(),)
CALL = ToolCall("add", {"a": 1, "b": 2})


def test_a_prompt_is_what_sft_trains_on() -> None:
    made = tokenizer()
    messages = ({"role": "user", "content": "the cat sat"},)
    prompt = Dialogue(made).prompt(messages)
    taught = tokenise_chat(made, [*messages, {"role": "assistant", "content": "on the mat"}])
    assert prompt.dtype == np.int32
    assert prompt.tolist() == list(taught.tokens[: taught.mask.index(True)])
    assert taught.tokens[len(taught.mask) - 1 - taught.mask[::-1].index(True)] in Dialogue(made).stop_ids


def test_a_message_cannot_spell_its_own_end() -> None:
    made = tokenizer()
    prompt = Dialogue(made).prompt(ASKED).tolist()
    assert made.decode(prompt) == render(CHATML, ASKED, add_generation_prompt=True)
    assert sum(token in made.special_ids() for token in prompt) == 5


@pytest.mark.parametrize("num", [1, 2])
def test_a_tool_turn_is_what_the_template_says(num: int) -> None:
    """Prompt, the model's own turn as the template would have it, and the tool turn together are the conversation."""
    made = tokenizer()
    dialogue = Dialogue(made)
    written = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>' * num + "<|im_end|>"
    told = dialogue.tool_turn(ASKED, OFFERS, [CALL] * num, ["3", " 3\n"][:num])
    text = made.decode(dialogue.prompt(ASKED, OFFERS).tolist()) + written + made.decode(told.tolist())
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}] * num
    turns = [{"role": "tool", "content": content} for content in ("3", " 3\n")[:num]]
    whole = [*ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, *turns]
    assert text == render(CHATML, whole, OFFERS, add_generation_prompt=True)


def test_a_template_that_rewrites_is_refused() -> None:
    rewriting = CHATML.replace(
        "{%- for message in messages %}", "{{- messages | length }}{%- for message in messages %}"
    )
    with pytest.raises(UserError, match="chat_template: rewrites earlier turns when a tool answers"):
        Dialogue(tokenizer(rewriting)).tool_turn(ASKED, (), [CALL], ["3"])


def test_the_plain_form() -> None:
    made = tokenizer(None)
    dialogue = Dialogue(made)
    assert made.decode(dialogue.prompt(ASKED).tolist()) == "be brief\nthe cat <|im_end|> sat\n"
    assert made.decode(dialogue.tool_turn(ASKED, (), [CALL, CALL], ["3", "4"]).tolist()) == "\n3\n4\n"
    assert made.eos_id in dialogue.stop_ids
    with pytest.raises(UserError, match="messages: the problem has none"):
        dialogue.prompt(())


def test_reads_turns() -> None:
    made = tokenizer()
    dialogue = Dialogue(made)
    turn = np.array(
        made.encode_rendered('hm <tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call><|im_end|>')
    )
    assert dialogue.calls(turn) == (ToolCall("f", {"x": 1}),)
    assert dialogue.message(turn)["content"] == "hm"
    broken = np.array(made.encode_rendered("<tool_call>{oops}</tool_call>"))
    assert dialogue.calls(broken) == () and dialogue.text(broken) == "<tool_call>{oops}</tool_call>"
    assert dialogue.message(broken) == {"role": "assistant", "content": "<tool_call>{oops}</tool_call>"}
