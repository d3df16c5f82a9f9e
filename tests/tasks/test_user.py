"""A simulated user behind real HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.base.endpoint import Unanswered
from stretto.base.errors import UserError
from stretto.tasks.user import STOP, ModelUser, UserConfig
from tests.tasks.counting import calling
from tests.tasks.judges import judging

SAID = (
    {"role": "system", "content": "policy"},
    {"role": "user", "content": "cancel it"},
    calling(4),
    {"role": "tool", "name": "add", "content": "7"},
    {"role": "assistant", "content": "<think>who is it?</think>Your name?"},
)


def reply(text: Any, **settings: Any) -> tuple[str | None, list[dict[str, Any]]]:
    with judging(lambda body: text) as (url, asked):
        user = ModelUser(UserConfig(url=url, model="m", retries=0, **settings), "sources.toy.args.user")
        try:
            return user.reply("You are Ann.", SAID), asked
        finally:
            user.close()


def test_it_sees_the_conversation_from_its_own_side() -> None:
    found, (asked,) = reply("<think>hm</think> Ann. ")
    assert found == "Ann."
    assert asked["messages"][0]["content"].endswith("\n\nYou are Ann.")
    assert [(each["role"], each["content"]) for each in asked["messages"][1:]] == [
        ("user", "How can I help you?"),
        ("assistant", "cancel it"),
        ("user", "Your name?"),
    ]


def test_it_ends_the_conversation() -> None:
    assert reply(f"Bye. {STOP}")[0] is None


def test_one_that_says_nothing_in_time_or_at_all_has_not_ended_it() -> None:
    with pytest.raises(Unanswered, match="an empty answer"):
        reply(" ")
    with pytest.raises(Unanswered, match="Timeout"):
        reply(None, reply_s=0.1)


def test_a_server_that_refuses_is_the_users_to_mend() -> None:
    with pytest.raises(UserError, match=r"^sources\.toy\.args\.user: the user refuses: 401: .*; check url, model, key"):
        reply(401)
