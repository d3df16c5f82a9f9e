"""Chat templates: the only place that renders messages, and that says which of their tokens the model itself wrote.

Templates are Jinja sources as in a checkpoint's ``chat_template.jinja``, rendered in Jinja's sandbox with the helpers that
transformers offers them (without loading it, which takes seconds), so that it is what other software renders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stretto.base.errors import UserError
from stretto.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""``{"role": …, "content": …}``, optionally ``tool_calls``, as in TRL's conversational format."""

CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Tools, one JSON object a line; call one with <tool_call>{"name": …, "arguments": …}</tool_call>:' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + ((call.function or call) | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""The template of tokenizers that we train."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A rendered conversation, written by `tokenise_chat`."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    """One a token: whether the assistant wrote it (its end-of-turn token included), so that a loss may be taken."""


OWN_NAMES = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now")
"""What `render` gives every template."""


def named_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Spellings of the special tokens that templates know by name (``bos_token``…), as transformers gives them."""
    told = {name: value for name, value in tokenizer.config.items() if name.endswith("_token")}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in told.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def render(
    template: str,
    messages: Sequence[Message],
    tools: Sequence[Message] = (),
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Text of ``messages`` under a chat template.

    Args:
        template: Jinja source.
        messages: at least one.
        tools: JSON schemas of the functions that may be called.
        add_generation_prompt: end with the header of an assistant turn that is yet to be written.
        variables: what else the template may ask for; not one of `OWN_NAMES`.

    Raises:
        UserError: the template is not valid or refuses the messages.
    """
    if not messages:
        raise UserError("messages: the conversation is empty; give at least one message")
    offered = list(tools) or None
    try:
        given = {"messages": messages, "tools": offered, "add_generation_prompt": add_generation_prompt}
        return _compile(template).render({**(variables or {}), **given})
    except (jinja2.TemplateError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"chat_template: cannot render these messages: {error}; check roles and contents") from None


def tokenise_chat(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Conversation:
    """Token ids of a conversation, and which of them the assistant wrote.

    Each turn is encoded apart from what precedes it, as it is when a model is sampled: a token never spans the border
    between a prompt and an answer. Behind an answer's last special token (the line break of ChatML) the mask is off.

    Raises:
        UserError: no template, or one that rewrites earlier turns when later ones arrive (some drop old reasoning);
            train such conversations one answer at a time.
    """
    if tokenizer.chat_template is None:
        raise UserError("chat_template: the tokenizer has none; put a chat_template.jinja beside its tokenizer.json")
    rendered = partial(render, tokenizer.chat_template, tools=tools, variables=named_tokens(tokenizer))
    full, special = rendered(messages), tokenizer.special_ids()
    tokens: list[int] = []
    mask: list[bool] = []
    done = 0  # characters
    for turn, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        if turn == 0:
            raise UserError("messages: message 0: the assistant cannot speak first; begin with a system or user turn")
        prompt = rendered(messages[:turn], add_generation_prompt=True)
        through = rendered(messages[: turn + 1])
        if not (full.startswith(prompt) and full.startswith(through)) or len(prompt) > len(through):
            problem = "the chat template rewrites earlier turns"
            raise UserError(f"messages: message {turn}: {problem}; split the conversation there")
        context = tokenizer.encode_rendered(full[done : len(prompt)])
        answer = tokenizer.encode_rendered(full[len(prompt) : len(through)])
        num_written = max((end for end, token in enumerate(answer, start=1) if token in special), default=len(answer))
        tokens += context + answer
        mask += [False] * len(context) + [True] * num_written + [False] * (len(answer) - num_written)
        done = len(through)
    rest = tokenizer.encode_rendered(full[done:]) if done < len(full) else []
    return Conversation(tuple(tokens + rest), tuple(mask + [False] * len(rest)))


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}``: some templates mark answers with it; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    extensions = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    # As transformers does it: Jinja's own filter would escape HTML.
    environment.filters["tojson"] = lambda value, indent=None, ensure_ascii=False: json.dumps(
        value, indent=indent, ensure_ascii=ensure_ascii
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda layout: datetime.now().strftime(layout)}
    return environment.from_string(template)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
