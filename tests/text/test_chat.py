from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stretto.base.errors import UserError
from stretto.text.chat import CHATML, render, tokenise_chat
from stretto.text.tokenizer import Tokenizer, train_tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four <b>&c</b>."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes é."},
]
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "sum <of> é", "parameters": {"type": "object"}}}
]
CALL = [
    *TALK[:2],
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(iter([Path(__file__).read_text()]), 400, chat_template=CHATML)


@pytest.mark.parametrize("messages", [TALK, TALK[1:4], CALL])
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_renders_as_transformers_does(tokenizer: Tokenizer, tmp_path: Path, messages: list, tools: list) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for prompt in (False, True):
        expected = theirs.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=prompt
        )
        assert render(CHATML, messages, tools, prompt) == expected


def test_mask_covers_what_the_assistant_wrote(tokenizer: Tokenizer) -> None:
    chat = tokenise_chat(tokenizer, TALK)
    assert tokenizer.decode(chat.tokens) == render(CHATML, TALK)
    assert len(chat.mask) == len(chat.tokens)
    written = [token for token, mine in zip(chat.tokens, chat.mask, strict=True) if mine]
    assert tokenizer.decode(written) == "Four <b>&c</b>.<|im_end|>Yes é.<|im_end|>"


def test_an_answer_starts_where_sampling_starts(tokenizer: Tokenizer) -> None:
    chat = tokenise_chat(tokenizer, TALK)
    prompt = tokenizer.encode_rendered(render(CHATML, TALK[:2], add_generation_prompt=True))
    assert list(chat.tokens[: len(prompt)]) == prompt
    assert chat.mask.index(True) == len(prompt)


def test_a_conversation_without_answers_has_no_loss(tokenizer: Tokenizer) -> None:
    chat = tokenise_chat(tokenizer, TALK[:2])
    assert tokenizer.decode(chat.tokens) == render(CHATML, TALK[:2])
    assert not any(chat.mask)


def test_generation_blocks_render_their_body() -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert render(template, TALK[:2]) == "Be brief.Two and two?"


def test_bad_conversations_are_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="messages: the conversation is empty"):
        render(CHATML, [])
    with pytest.raises(UserError, match="message 0: the assistant cannot speak first"):
        tokenise_chat(tokenizer, TALK[2:])
    with pytest.raises(UserError, match="chat_template: cannot render these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", TALK)
    with pytest.raises(UserError, match="chat_template: the tokenizer has none"):
        tokenise_chat(replace(tokenizer, chat_template=None), TALK)
    forgetful = "{% for m in messages %}{{ m.role }}:{{ m.content if loop.last }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    with pytest.raises(UserError, match="message 2: the chat template rewrites earlier turns"):
        tokenise_chat(replace(tokenizer, chat_template=forgetful), TALK)


def test_templates_cannot_reach_outside() -> None:
    with pytest.raises(UserError, match="unsafe"):
        render("{{ messages.__class__.__mro__ }}", TALK)
