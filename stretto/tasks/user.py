"""Simulated users: a model behind a URL that answers in a session. No torch.

What it says comes from outside, and is not the same again; the agent loop writes it down, and asks for no turn twice that it
has. State and verdicts are made of calls alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from stretto.base.endpoint import Chat, ChatConfig, Unanswered
from stretto.tasks.task import spoken

STOP = "###STOP###"
"""Written by the model that plays a user where the user has nothing more to say, as in tau-bench."""
_RULES = (
    "You play the user in a conversation with an assistant. Write the user's next message and nothing else, one at a time. Tell "
    f"only what the user knows, and only when it is needed. Where the conversation is over for the user, write {STOP} alone."
)
_OPENING = "How can I help you?"


class UserConfig(ChatConfig):
    """Of a user."""

    reply_s: float = Field(default=50.0, gt=0)
    """Of one turn, all retries together; less than ``runtime.rewards.deadline_s``."""


class ModelUser:
    """For several sessions of a source, which makes it and closes it."""

    def __init__(self, config: UserConfig, where: str) -> None:
        """``where``: what messages about it begin with."""
        self._config, self._chat = config, Chat(config, f"{where}: the user refuses")

    def reply(self, about: str, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The user's turn after ``messages``, the problem's own among them; None: it is over. ``about``: who the user is, and
        what he wants. Calls, their results and what a system says are not shown to him.

        Raises:
            Unanswered: no answer, or an empty one.
            UserError: the server refuses.
        """
        said = [{"role": "system", "content": f"{_RULES}\n\n{about}"}, {"role": "user", "content": _OPENING}]
        for message in messages:
            text = spoken(str(message.get("content") or ""))
            if message["role"] in ("user", "assistant") and text:
                said.append({"role": "user" if message["role"] == "assistant" else "assistant", "content": text})
        text = spoken(self._chat.said(said, time.monotonic() + self._config.reply_s))
        if not text:
            raise Unanswered(f"the user {self._config.model} at {self._config.url}: an empty answer")
        return None if STOP in text else text

    def close(self) -> None:
        self._chat.close()
