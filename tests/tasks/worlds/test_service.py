"""The service world: demonstrations are correct, and agents that break or ignore the policy are not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import pytest

from stretto.base.trajectory import Outcome
from stretto.tasks.session import recorded, use
from stretto.tasks.task import Answer, Problem, Score, Session
from stretto.tasks.worlds.service import LEVELS, YES, Part, ServiceArgs, ServiceSession, ServiceSource

Turns = Sequence[Mapping[str, Any]]
NUM = 60


def source(level: str = "small", part: Part = "train") -> ServiceSource:
    return ServiceSource("desk", ServiceArgs.model_validate({"level": level, "part": part}))


def judged(desk: ServiceSource, problem: Problem, turns: Turns) -> Score:
    """Score of an agent's and the customer's turns; tool results are added."""
    with closing(desk.open(problem)) as session:
        return desk.score(problem, Answer("", recorded(session, turns)))


def call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def names(turns: Turns) -> list[str]:
    return [each["function"]["name"] for turn in turns for each in turn.get("tool_calls", ())]


def cases(level: str = "small", gold: str | None = None) -> Iterator[tuple[ServiceSource, Problem, Turns]]:
    """Problems, optionally with one gold answer, and their demonstrations without tool results."""
    desk = source(level)
    for problem in map(desk.problem, range(NUM)):
        if gold in (None, problem.gold):
            yield desk, problem, [turn for turn in desk.demonstration(problem) if turn["role"] != "tool"]


@pytest.mark.parametrize("part", ["train", "held_out"])
@pytest.mark.parametrize("level", LEVELS)
def test_what_it_demonstrates_is_right(level: str, part: Part) -> None:
    desk = source(level, part)
    desk.validate()
    problems = [desk.problem(item) for item in range(NUM)]
    assert all(judged(desk, problem, desk.demonstration(problem)).ok for problem in problems)
    # No outcome is rare, and most conversations do not end with a transfer.
    shares = {
        gold: sum(problem.gold == gold for problem in problems) / NUM for gold in ("Done.", "decline", "transfer")
    }
    assert shares["Done."] > 0.3 and shares["decline"] > 0.1 and 0.1 < shares["transfer"] < 0.45


def ids(session: Session) -> list[str]:
    assert isinstance(session, ServiceSession)
    return [key for rows in session._rows.values() for key in rows]


def words(desk: ServiceSource) -> set[str]:
    """All names of kinds, fields and states."""
    found: set[str] = set()
    for item in range(NUM):
        policy = desk.problem(item).messages[0]["content"]
        found |= {
            *re.findall(r"_(\w+) where", policy),
            *re.findall(r'where "(\w+)"', policy),
            *re.findall(r'is "(\w+)"', policy),
        }
    return found - {"price"}


@pytest.mark.parametrize("level", LEVELS)
def test_schemas_that_are_held_out_share_no_name_with_others(level: str) -> None:
    train, held_out = words(source(level)), words(source(level, "held_out"))
    assert len(train) > 20 and len(held_out) > 10 and not train & held_out


def test_held_out_names_are_made_of_known_syllables() -> None:
    def syllables(part: Part) -> set[str]:
        desk = source("tiny", part)
        return {word[place : place + 2] for word in words(desk) for place in (0, 2)}

    assert len(syllables("held_out") & syllables("train")) > 0.9 * len(syllables("held_out"))


def test_doing_nothing_is_never_right() -> None:
    for desk, problem, _ in cases():
        assert not judged(desk, problem, []).ok
        assert not judged(desk, problem, [say("Done.")]).ok


def test_an_agent_that_hands_over_without_a_look_is_hardly_ever_right() -> None:
    for desk, problem, turns in cases("medium"):
        is_new = any(name.startswith("create") for name in names(desk.obliging(problem)))
        baselines = desk.baselines(problem)
        right = judged(desk, problem, baselines["always transfer"]).ok
        assert right <= (is_new and problem.gold == "transfer")
        for ending in ("transfer", "decline"):
            assert judged(desk, problem, baselines[f"read, then {ending}"]).ok <= (problem.gold == ending)
        blind = [turn for turn in turns if not names([turn]) or not names([turn])[0].startswith("get")]
        assert is_new or "leave it" in str(turns) or not judged(desk, problem, blind).ok


def test_an_agent_that_obliges_breaks_the_policy() -> None:
    for desk, problem, _ in cases():
        assert judged(desk, problem, desk.obliging(problem)).ok == (problem.gold == "Done.")


def test_an_agent_that_acts_before_it_reads_fails() -> None:
    num = 0
    for desk, problem, turns in cases(gold="Done."):
        reads = [turn for turn in turns if any(name.startswith("get") for name in names([turn]))]
        acts = [turn for turn in turns if names([turn]) and turn not in reads]
        if not reads or not acts:  # a new record, or a customer who withdraws the request
            continue
        num += 1
        late = [*(turn for turn in turns[:-1] if turn not in reads), *reads, turns[-1]]
        score = judged(desk, problem, late)
        assert not score.ok and score.parts["read"] == 0.0 and score.parts["database"] == 1.0
    assert num > 5


def test_the_customer_does_not_hear_thoughts() -> None:
    asked = [each for each in cases(gold="Done.") if any(turn["content"] == YES for turn in each[2])]
    assert len(asked) > 5
    for desk, problem, turns in asked:
        before = turns[: [turn["content"] for turn in turns].index(YES)]
        question = before[-1]["content"]
        with closing(desk.open(problem)) as session:

            def reply(text: str, before: Turns = before, session: Session = session) -> str | None:
                return session.reply([*before[:-1], say(text)])

            assert reply(question) == YES
            assert reply(f"<think>{question}</think>One moment.") is None
            assert reply(f"<think>Not {' or '.join(ids(session))}.</think>{question}") == YES


def test_an_agent_that_calls_every_tool_is_never_right() -> None:
    for desk, problem, _ in cases():
        calls = [each for turn in desk.obliging(problem) for each in turn.get("tool_calls", ())]
        known = {each["function"]["name"]: each["function"]["arguments"] for each in calls}
        with closing(desk.open(problem)) as session:
            every = [call(tool.name, **known.get(tool.name, {})) for tool in session.tools]
        assert not judged(desk, problem, [*every, say("Done.")]).ok


def test_an_agent_that_does_not_ask_fails_where_the_policy_wants_a_yes() -> None:
    fates = set()
    for desk, problem, turns in cases(gold="Done."):
        needed = any("Shall I" in turn["content"] for turn in turns)
        silent = [turn for turn in turns if turn["role"] == "assistant" and "Shall I" not in turn["content"]]
        score = judged(desk, problem, silent)
        assert score.ok is (not needed)
        assert not needed or score.parts["asked"] == 0.0 or score.parts["heard"] == 0.0
        fates.add(needed)
    assert fates == {True, False}


def test_a_yes_to_something_else_is_none() -> None:
    for desk, problem, turns in cases("tiny", "Done."):
        unnamed = [
            say("Shall I do it?") if "?" in turn["content"] else turn for turn in turns if turn["role"] == "assistant"
        ]
        with closing(desk.open(problem)) as session:
            told: list[Mapping[str, Any]] = []
            for turn in unnamed:
                told.append(turn)
                if not turn.get("tool_calls") and (reply := session.reply(told)):
                    told.append({"role": "user", "content": reply})
        assert YES not in [turn["content"] for turn in told]
        assert not judged(desk, problem, told).ok


def test_a_question_about_all_records_gets_no_yes() -> None:
    desk, problem, turns = next(each for each in cases("tiny", "Done.") if each[2][-2].get("tool_calls"))
    asked = next(turn["content"] for turn in turns if "?" in turn["content"])
    with closing(desk.open(problem)) as session:
        known = ids(session)
        assert session.reply([say(asked)]) == YES
        assert session.reply([say(f"{asked} {' '.join(known)}?")]) != YES


@pytest.mark.parametrize(
    ("question", "is_asked"),
    [
        ("Shall I {} {}?", True),
        ("Shall I {} _{}_?", True),
        ("May I {} **{}**？", True),
        ("Is {0}ing {1} what you want?", True),
        ("If not, say so. I would {} {} now. Is that right?", True),
        ("It is not shipped. Can I {} {}?", True),
        ("Is {1} yours?", False),
        ("I will not {} {}, all right?", False),
        ("I can't {} {}, all right?", False),
        ("I won’t {} {}, all right?", False),
        ("Shall I refund {1}?", False),
        ("If you do not mind, shall I {} {}?", True),
        ("It is not shipped, so shall I {} {}?", True),
        ("It isn't shipped: may I {} {}?", True),
        ("I am no longer able to {} {}, all right?", False),
        ("There is no way to {} {}, all right?", False),
        ("Dont {} {}, all right?", False),
    ],
)
def test_consent_needs_a_question_that_proposes_the_action(question: str, is_asked: bool) -> None:
    num = 0
    for desk, problem, turns in cases("tiny", "Done."):
        act = names(turns)[-1]
        if act.startswith("cancel_"):  # the customer does not withdraw the request
            key = re.findall(r'Shall I cancel "(\w+)"', str(turns))[-1]
            with closing(desk.open(problem)) as session:
                reply = session.reply([say(question.format("cancel", key))])
            assert (reply == YES or str(reply).startswith("No")) is is_asked, reply
            num += 1
    assert num > 5


def test_nothing_else_may_change() -> None:
    desk, problem, turns = next(each for each in cases("tiny", "Done.") if each[2][-2].get("tool_calls"))
    assert judged(desk, problem, turns).ok
    done = names(turns)[-1]
    with closing(desk.open(problem)) as session:
        others = [key for key in ids(session) if f'"{key}"' not in str(turns)]
    assert others
    assert not judged(desk, problem, [*turns[:-1], call(done, id=others[0]), turns[-1]]).ok


def test_customers_change_their_minds_when_they_are_asked() -> None:
    seen = set()
    for desk, problem, turns in cases():
        place = next((place for place, turn in enumerate(turns) if turn["content"].startswith("No")), None)
        if place is None:
            continue
        seen.add(turns[place]["content"].startswith("No, leave"))
        operation, key = re.findall(r'Shall I (\w+) "?(\w+)', turns[place - 1]["content"])[0]
        if operation == "cancel":  # the first request is carried out after a forged yes
            forged = {"role": "user", "content": YES}
            stubborn = [*turns[:place], forged, call(names(turns)[0].replace("get", "cancel"), id=key), say("Done.")]
            assert not judged(desk, problem, stubborn).ok
    assert seen == {True, False}


def test_customers_say_what_they_know_when_they_are_asked() -> None:
    replies = []
    for _, problem, turns in cases("medium"):
        if turns[0]["content"] == "Which one?":
            first, reply = problem.messages[1]["content"], turns[1]["content"]
            assert first.split()[3] == reply.split()[3] and len(reply) > len(first)
            replies.append(reply)
    assert any(re.search(r'"\w+" "\w\d\w\d"', reply) for reply in replies), "some know the id"
    assert any(re.search(r'"\w+" with "\w+" "\w+"', reply) for reply in replies), "others a field"


def test_a_customer_does_not_stay_for_ever() -> None:
    desk = source()
    with closing(desk.open(desk.problem(0))) as session:
        told: list[Mapping[str, Any]] = []
        for _ in range(100):
            told.append(say("Pardon?"))
            if (reply := session.reply(told)) is None:
                break
            told.append({"role": "user", "content": reply})
        assert reply is None


def test_bad_calls_are_answered_and_change_nothing() -> None:
    desk = source()
    with closing(desk.open(desk.problem(0))) as session:
        before = session.digest()
        for tool in session.tools[:-2]:
            wants = tool.parameters["required"]
            bad: list[dict[str, Any]] = [{}, dict.fromkeys(wants, 3), {**dict.fromkeys(wants, "x"), "more": "x"}]
            assert all("takes" in use(session.tools, tool.name, told).text for told in bad)
            if not tool.name.startswith("list"):
                assert use(session.tools, tool.name, dict.fromkeys(wants, "x")).outcome is Outcome.WRONG
        assert session.digest() == before and not session.is_over
        assert use(session.tools, "transfer", {}).outcome is Outcome.OK
        assert session.digest() != before and session.is_over


def test_the_longest_has_ten_tools_and_two_thousand_words() -> None:
    desk = source("long")
    problem = desk.problem(0)
    with closing(desk.open(problem)) as session:
        assert len(session.tools) == 10
    assert len(problem.messages[0]["content"].split()) > 2000
