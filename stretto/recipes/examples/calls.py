"""The next call of a dialogue: ``kind = "recipes/examples/calls.py:Calls"`` in a table of sources.

Its file holds conversations as `stretto sft` takes them, in which calls are text: all that such a turn says is
``<tool_call>{"name": …, "arguments": {…}}</tool_call>``. Each of these turns is a problem, what comes before it the prompt. Right
is the same function with the same arguments, whatever their order and capitals; the answer ends there.
"""

import json
import re
from pathlib import Path

from stretto.tasks.task import Problem, Range, Score, TaskSource, read_records

_CALL = re.compile(r"\s*<tool_call>(.*?)</tool_call>", re.DOTALL)


class CallsArgs(Range):
    path: Path


class Calls(TaskSource):
    args_kind = CallsArgs

    def __init__(self, name, args, sandbox=None):
        super().__init__(name, args, sandbox)
        self._problems = [
            (record["messages"][:turn], message["content"])
            for record in read_records(args.path, args, [("messages",)])
            for turn, message in enumerate(record["messages"])
            if message["role"] == "assistant" and _call(message["content"]) is not None
        ]

    @property
    def num_items(self):
        return len(self._problems)

    def problem(self, item):
        messages, gold = self._problems[item]
        return Problem(item, tuple(messages), gold)

    def score(self, problem, answer):
        found, gold = _call(answer.text), _call(problem.gold)
        is_named = found is not None and found["name"] == gold["name"]
        return Score.of(found == gold, {"called": float(found is not None), "named": float(is_named)})


def _call(text):
    """The call that ``text`` begins with, its arguments as texts; None: it is none."""
    match = _CALL.match(text)
    try:
        call = json.loads(match[1]) if match else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
        return None
    arguments = {name: str(value).strip().casefold() for name, value in call["arguments"].items()}
    return {"name": call.get("name"), "arguments": arguments}
