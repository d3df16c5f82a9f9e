"""Simulated users: a model behind a URL that plays the user in a session. No torch.

A simulated user's turns are not reproducible. The agent loop stores them and asks for no turn a second time. State and verdicts depend on
calls alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from stretto.base.endpoint import Chat, ChatConfig, Unanswered
from stretto.tasks.task import spoken

STOP = "###STOP###"
"""The simulated user's message that ends the conversation, as in tau-bench."""
_RULES = (
    "You play the user in a conversation with an assistant. Write the user's next message and nothing else, one at a time. Tell "
    f"only what the user knows, and only when it is needed. Where the conversation is over for the user, write {STOP} alone."
)
_OPENING = "How can I help you?"


class UserConfig(ChatConfig):
    """Server, model and time limit of a simulated user."""

    reply_s: float = Field(default=50.0, gt=0)
    """Time limit of one turn with all retries, seconds; less than ``runtime.rewards.deadline_s``."""


class ModelUser:
    """A simulated user. A source makes one for all of its sessions, and closes it."""

    def __init__(self, config: UserConfig, where: str) -> None:
        """``where``: beginning of error messages."""
        self._config, self._chat = config, Chat(config, f"{where}: the user refuses")

    def reply(self, about: str, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The user's turn after ``messages``, which begin with the problem's own; None: the conversation is over. ``about``: the user's
        role and request. Calls, their results and system messages are not shown to the user.

        Raises:
            Unanswered: no answer, or an empty one.
            UserError: the server refuses.
        """
        chat = [{"role": "system", "content": f"{_RULES}\n\n{about}"}, {"role": "user", "content": _OPENING}]
        for message in messages:
            text = spoken(str(message.get("content") or ""))
            if message["role"] in ("user", "assistant") and text:
                chat.append({"role": "user" if message["role"] == "assistant" else "assistant", "content": text})
        text = spoken(self._chat.said(chat, time.monotonic() + self._config.reply_s))
        if not text:
            raise Unanswered(f"the user {self._config.model} at {self._config.url}: an empty answer")
        return None if STOP in text else text

    def close(self) -> None:
        self._chat.close()
