"""Chat templates as short as they can be that still write calls the way each family's own does."""

from __future__ import annotations

_TURNS = """\
{%- for message in messages %}
{%- if message.role != 'assistant' %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content or '' }}
{%- if message.tool_calls %}BEGIN
{%- for call in message.tool_calls %}{% set call = call.function %}CALL{% endfor %}END{% endif %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined %}{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


def _template(call: str, begin: str = "", end: str = "") -> str:
    return _TURNS.replace("CALL", call).replace("BEGIN", begin).replace("END", end)


_PAIRS = "{% for key, value in call.arguments.items() %}PAIR{% endfor %}"
_TEXT = "{{ value if value is string else value | tojson }}"
_PYTHON = (
    "{{ call.name }}(" + _PAIRS.replace("PAIR", "{{ ', ' if not loop.first }}{{ key }}={{ value | tojson }}") + ")"
)
_COMMA = "{{ ', ' if not loop.last }}"

TEMPLATES = {
    "hermes": _template(
        """{{ '\\n' if not loop.first }}{{ '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}"""
        """{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}"""
    ),
    "glm": _template(
        "{{ '\\n' if not loop.first }}<tool_call>{{ call.name }}{{ '\\n' }}"
        + _PAIRS.replace(
            "PAIR",
            f"<arg_key>{{{{ key }}}}</arg_key>{{{{ '\\n' }}}}<arg_value>{_TEXT}</arg_value>{{{{ '\\n' }}}}",
        )
        + "</tool_call>"
    ),
    "qwen-coder": _template(
        "{{ '\\n' if not loop.first }}<tool_call>{{ '\\n' }}<function={{ call.name }}>{{ '\\n' }}"
        + _PAIRS.replace(
            "PAIR", f"<parameter={{{{ key }}}}>{{{{ '\\n' }}}}{_TEXT}{{{{ '\\n' }}}}</parameter>{{{{ '\\n' }}}}"
        )
        + "</function>{{ '\\n' }}</tool_call>"
    ),
    "deepseek": _template(
        "{{ '\\n' if not loop.first }}{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.name }}"
        "{{ '\\n```json\\n' + call.arguments + '\\n```<｜tool▁call▁end｜>' }}",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek-3.1": _template(
        "{{ '<｜tool▁call▁begin｜>' + call.name + '<｜tool▁sep｜>' + call.arguments + '<｜tool▁call▁end｜>' }}",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi-k2": _template(
        "<|tool_call_begin|>{{ call_id }}<|tool_call_argument_begin|>{{ call.arguments | tojson }}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    )
    .replace("{% set call = call.function %}", "{% set call_id = call.id %}{% set call = call.function %}")
    .replace(
        "+ message.content",
        "+ ('## Return of ' + message.tool_call_id + '\\n' if message.role == 'tool' else '') + message.content",
    ),
    "mistral-11": _template("[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}"),
    "mistral": _template(
        """{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}""" + _COMMA, "[TOOL_CALLS] [", "]"
    ),
    "lfm2": _template(_PYTHON + _COMMA, "<|tool_call_start|>[", "]<|tool_call_end|>"),
    "pythonic": _template(_PYTHON + _COMMA, "[", "]").replace("{%- for", "{# [func_name1(params)] #}{%- for", 1),
    "llama": _template(
        """{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}{{ '; ' if not loop.last }}"""
    ).replace("{%- for", "{# <|python_tag|> #}{%- for", 1),
}
MARKS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<|tool_call_start|>", "<|tool_call_end|>"),
    *(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_calls_section_end|>",
    ),
)
"""What real tokenizers have tokens for, special ones or not."""
