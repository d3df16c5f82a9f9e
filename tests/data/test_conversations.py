"""Conversations: TRL's formats as they are, errors that name line and turn, masks that survive the shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from stretto.base.errors import UserError
from stretto.data.conversations import ConversationForm, Fitted, read_conversation
from stretto.data.files import LeftOut
from stretto.data.loader import Loader
from stretto.data.pack import IGNORED
from stretto.data.shards import TokenSet, tokenise
from stretto.data.sources import open_source

USER, ASSISTANT = {"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Four."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_the_assistants_turns_are_learnt_unless_they_say_no() -> None:
    wrong = {**ASSISTANT, "train": False, "weight": 1}
    read = read_conversation(
        {"messages": [USER, wrong, USER, {**ASSISTANT, "weight": 0}, USER, ASSISTANT]}, "f: line 1"
    )
    assert read.is_learnt == (False, False, False, False, False, True)
    assert all("train" not in turn and "weight" not in turn for turn in read.messages)


def test_a_prompts_turns_are_not_learnt() -> None:
    read = read_conversation({"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]}, "f")
    assert read.is_learnt == (False, False, False, True) and not read.is_plain
    plain = read_conversation({"prompt": "2+2=", "completion": "4"}, "f")
    assert plain.is_plain and plain.is_learnt == (False, True)


def test_tools_come_as_lists_or_as_json_and_arguments_as_objects() -> None:
    asked = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}],
    }
    turns = [USER, asked, {"role": "tool", "content": "4", "name": "add"}, ASSISTANT]
    for tools in ([TOOL], json.dumps([TOOL])):
        read = read_conversation({"messages": turns, "tools": tools}, "f")
        assert read.tools == (TOOL,) and read.messages[1]["tool_calls"] == [CALL] and read.messages[1]["content"] == ""
        assert read.is_learnt == (False, True, False, True)


def test_what_arrow_fills_with_nulls_is_not_there(tmp_path: Path) -> None:
    rows = [
        {"messages": [{**USER, "tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        {"messages": [{**USER, "tool_calls": None}, {**ASSISTANT, "tool_calls": None}]},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "some.parquet")
    read = [
        json.loads(each.text) for each in open_source(tmp_path / "some.parquet", ConversationForm("d")).read("train")
    ]
    assert read[0]["messages"][1]["tool_calls"] == [CALL] and read[1]["messages"] == [USER, ASSISTANT]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"messages": [USER, {"role": "asistant", "content": "x"}]}, r"messages: turn 1: role 'asistant' \(did you mean 'assistant'\?\)"),
        ({"messages": [USER, {"content": "x"}]}, "messages: turn 1: no role; it has content"),
        ({"messages": [USER, "Four."]}, "messages: turn 1: a text, not an object"),
        ({"messages": [None]}, "messages: turn 0: null, not an object"),
        ({"messages": "null"}, "messages: null, not a list"),
        ({"messages": [{"role": "user"}, ASSISTANT]}, "messages: turn 0: no content; add it"),
        ({"messages": [USER, {"role": "assistant"}]}, "messages: turn 1: no content and no tool_calls"),
        ({"messages": [{"role": "user", "content": 5}, ASSISTANT]}, "turn 0: content: a number, not a text; write a string"),
        ({"messages": []}, "messages: empty"),
        ({"messages": {"role": "user"}}, "messages: an object, not a list"),
        ({"messages": [ASSISTANT, USER]}, "turn 0: the assistant cannot speak first"),
        ({"messages": [USER, {**ASSISTANT, "weight": 0.5}]}, "turn 1: weight: 0.5; write 0 or 1"),
        ({"messages": [{**USER, "train": True}, ASSISTANT]}, "turn 0: train: only the assistant's turns"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ASSISTANT]}, "turn 0: content: part 0: 'image' is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "value": "x"}]}, ASSISTANT]}, "turn 0: content: part 0: no text; it has type, value"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "arguments of f are not JSON"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "turn 1: tool_calls: a call without a name"),
        ({"messages": [USER, ASSISTANT], "tools": "x"}, "tools: a text that is not JSON"),
        ({"prompt": "x", "completion": [ASSISTANT]}, "prompt: a text, and the other is turns"),
        ({"conversations": []}, 'no messages, or prompt and completion; it has conversations; conversations: rename it'),
        ({"text": "x"}, "it has text; text: plain text is learnt by"),
    ],
)  # fmt: skip
def test_a_malformed_conversation_names_line_and_turn(tmp_path: Path, record: dict[str, Any], problem: str) -> None:
    good = {"messages": [USER, ASSISTANT]}
    (tmp_path / "c.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in (good, good, record)))
    with pytest.raises(UserError, match=rf"c.jsonl: line 3: .*{problem}"):
        list(open_source(tmp_path / "c.jsonl", ConversationForm()).read("train"))


@pytest.mark.parametrize("name", ["", "c.jsonl"])
def test_without_an_answer_there_is_nothing_to_learn(tmp_path: Path, name: str) -> None:
    rows = [{"messages": [USER]}, {"messages": [USER, ASSISTANT], "domain": "sums"}]
    (tmp_path / "c.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    left_out = LeftOut()
    read = list(open_source(tmp_path / name, ConversationForm("talk")).read("train", left_out))
    assert [each.domain for each in read] == ["sums"] and read[0].place.endswith("line 2")
    assert "1 conversation without a turn to learn" in str(left_out)


def test_a_file_without_any_answer_is_not_called_empty(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(f"{json.dumps({'messages': [USER]})}\n" * 3)
    with pytest.raises(UserError, match=r"c.jsonl: holds nothing but conversations without a turn to learn \(3\)"):
        list(open_source(tmp_path / "c.jsonl", ConversationForm()).read("train"))


@dataclass(frozen=True)
class Marking:
    """A token a letter; capitals are learnt."""

    vocab_size: int = 40_000

    def fingerprint(self) -> str:
        return "letters"

    def encode_marked(self, texts: Sequence[str], places: Sequence[str], /) -> list[list[int]]:
        return [
            [2 * ord(letter) + letter.isupper() for letter in json.loads(text)["messages"][1]["content"]]
            for text in texts
        ]


@pytest.fixture
def answers(tmp_path: Path) -> TokenSet:
    """Forty answers of 3 to 22 letters, every third of which is learnt, of two domains; the longest learns its last alone."""
    form, documents = ConversationForm(), []
    for number in range(40):
        content = "".join("abC"[at % 3] for at in range(3 + number % 20)) if number != 39 else "a" * 21 + "Z"
        record = {"messages": [USER, {"role": "assistant", "content": content}], "domain": ("even", "odd")[number % 2]}
        documents.append(form.document(record, f"f: line {number}"))
    tokenise({"train": documents}, Marking(), tmp_path / "d", processes=1, shard_bytes=1000)
    return TokenSet(tmp_path / "d")


def test_shards_keep_what_is_learnt(answers: TokenSet) -> None:
    assert answers.manifest.settings.dtype == "uint32"  # twice the vocabulary does not fit into 16 bits
    for number in range(40):
        tokens, learnt = answers.document(number), answers.learnt(number)
        assert learnt is not None and [chr(token).isupper() for token in tokens] == learnt.tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_batches_have_targets_where_something_is_learnt(answers: TokenSet, world: int) -> None:
    loaders = [Loader([Fitted(answers, 22, "refuse")], [1.0], 4, 22, 0, rank, world) for rank in range(world)]
    for _ in range(5):
        batches = [loader.next() for loader in loaders]
        for batch in batches:
            targets = batch.targets_BT[batch.targets_BT != IGNORED]
            assert all(chr(target).isupper() for target in targets) and len(targets) == batch.num_target_tokens
        assert sum(batch.num_target_tokens for batch in batches) == batches[0].global_target_tokens > 0


def test_long_ones_are_refused_cut_or_left_out(answers: TokenSet) -> None:
    with pytest.raises(
        UserError, match=r"train.seq_len: 18 tokens hold all but 8 of 40 conversations, the longest has 22"
    ):
        Fitted(answers, 18, "refuse")
    cut, left = Fitted(answers, 18, "cut"), Fitted(answers, 18, "leave_out")
    assert (cut.num_long, cut.num_left_out, cut.num_documents) == (8, 1, 39)  # the last one's beginning teaches nothing
    assert (left.num_left_out, left.num_documents) == (8, 32)
    numbers = np.arange(39)
    assert cut.lengths(numbers).max() == 18 == max(len(cut.document(int(number))) for number in numbers)
    assert all(len(cut.learnt(int(number))) == len(cut.document(int(number))) for number in numbers)
    with pytest.raises(UserError, match="no conversation is left"):
        Fitted(answers, 2, "leave_out")


def test_a_domain_alone(answers: TokenSet) -> None:
    odd = Fitted(answers, 22, "refuse", "odd")
    assert odd.num_documents == 20
    assert [odd.document(number).tolist() for number in range(20)] == [
        answers.document(2 * n + 1).tolist() for n in range(20)
    ]
