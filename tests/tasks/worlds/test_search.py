"""Questions about generated and given documents: correct answers, citations, and their reward."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stretto.base.config import validate
from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.tasks.corpus import Corpus, Document, Reader, citations, read_documents, supporting, without_citations
from stretto.tasks.session import Diverged, calling, recorded, use
from stretto.tasks.task import Answer, Problem
from stretto.tasks.worlds.search import UNKNOWN, SearchArgs, SearchSource

TINY = {"documents": 12, "facts": 3, "words": 1, "hops": (1, 2), "per_corpus": 4, "hits": 3, "snippet": 0}


def source(**args: Any) -> SearchSource:
    return SearchSource("s", SearchArgs(**args))


def answered(problem: Problem, demonstration: Any, text: str) -> Answer:
    """The demonstration's calls with another last turn."""
    return Answer(text, (*demonstration[:-1], {"role": "assistant", "content": text}))


@pytest.mark.parametrize("args", [TINY, {}, {**TINY, "part": "held_out", "format": "plain"}])
def test_it_validates(args: dict[str, Any]) -> None:
    source(**args).validate()


@pytest.mark.parametrize("args", [TINY, {}])
def test_a_demonstration_is_right_and_cites_nothing_in_vain(args: dict[str, Any]) -> None:
    asked = source(**args)
    hops, num_unknown = set(), 0
    for item in range(60):
        problem = asked.problem(item)
        turns = asked.demonstration(problem)
        score = asked.score(problem, Answer(problem.gold, turns))
        assert score.ok and score.parts["unsupported"] == score.parts["astray"] == 0.0
        is_unknown = problem.payload["answer"] == UNKNOWN
        num_unknown += is_unknown
        hops |= set() if is_unknown else {len(problem.payload["documents"])}
        last_read = next((turn["content"] for turn in reversed(turns) if turn.get("name") == "open"), "")
        gold = problem.payload["answer"]
        assert is_unknown or f" is {gold}." in last_read or f' is "{gold}".' in last_read
    assert hops == set(SearchArgs(**args).hops) and 2 <= num_unknown <= 20


def test_a_corpus_without_a_question_of_one_kind_has_one_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.tasks.worlds.search._TRIES", 200)
    asked = source(documents=20, facts=2, untold=0.0, words=3, hops=(2,), unanswerable=0.9, per_corpus=1)
    assert asked.problem(4).payload["answer"] != UNKNOWN


def test_a_corpus_without_any_question_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.tasks.worlds.search._TRIES", 200)
    asked = source(documents=4, hops=(6,), unanswerable=0.0)
    with pytest.raises(
        UserError, match=r"sources\.s: item 0: 4 documents with hops \(6,\).*no question is found; raise documents"
    ) as error:
        asked.problem(0)
    assert "\n" not in str(error.value)


def test_an_answer_without_its_documents_is_not_right() -> None:
    asked = source(**TINY, unanswerable=0.0)
    item = next(item for item in range(40) if len(asked.problem(item).payload["documents"]) == 2)
    problem = asked.problem(item)
    turns, gold = asked.demonstration(problem), problem.payload["answer"]
    first, second = problem.payload["documents"]

    def score(text: str, calls: Any = turns) -> Any:
        return asked.score(problem, answered(problem, calls, f"<answer>{text}</answer>"))

    assert score(f"{gold} [{second}] [{first}]").ok
    assert f"not cited: {first}" in score(f"{gold} [{second}]").detail
    assert "never opened" in score(f"{gold} [{first}] [{second}] [99]").detail
    assert score(f"{gold} [{first}] [{second}] [99]").parts["unsupported"] == 1.0
    unread = asked.score(problem, Answer(problem.gold))
    assert not unread.ok and unread.parts["unsupported"] == 2.0
    assert not score(f"Somebody [{first}] [{second}]").ok and not score(UNKNOWN).ok


@pytest.mark.parametrize(
    "cited",
    [
        "{} [{}], [{}]",
        "{}, [{}]; [{}].",
        "{} [{}, {}]",
        "{} [{};{}]",
        "{} [{}] and [{}]",
        "{} ([{}], [{}])",
        "{} ([{}, {}])",
        "{} [[{}]] [[{}]]",
        "{} [{}](bridge.md) [{}](http://a.b)",
        "{} \\[{}\\] [{}]",
        "{} **[{}]**, **[{}]**",
        "{}\n[{}]\n[{}]",
    ],
)
def test_the_typography_of_citations_is_ignored(cited: str) -> None:
    asked = source(**TINY, unanswerable=0.0)
    problem = next(each for each in map(asked.problem, range(40)) if len(each.payload["documents"]) == 2)
    text = cited.format(problem.payload["answer"], *problem.payload["documents"])
    turns = asked.demonstration(problem)
    assert asked.score(problem, answered(problem, turns, f"<answer>{text}</answer>")).reward == 1.0
    wrong = text.replace(problem.payload["documents"][0], "99")
    assert not asked.score(problem, answered(problem, turns, f"<answer>{wrong}</answer>")).ok


def test_citing_everything_is_not_right_and_each_needless_citation_costs() -> None:
    asked = source(**TINY, unanswerable=0.0, opens=12)
    problem = next(each for each in map(asked.problem, range(40)) if len(each.payload["documents"]) == 2)
    gold, chain = problem.payload["answer"], problem.payload["documents"]
    others = [each for each in map(str, range(1, 13)) if each not in chain]

    def score(cited: list[str]) -> Any:
        turns = [calling("open", {"id": each}) for each in cited]
        text = f"<answer>{gold}</answer> {' '.join(f'[{each}]' for each in cited)}"
        made = recorded(asked.open(problem), [*turns, {"role": "assistant", "content": text}])
        return asked.score(problem, Answer(text, made))

    assert score(chain).reward == 1.0
    one_more = score([*chain, others[0]])
    assert one_more.ok and one_more.reward == one_more.parts["precision"] == pytest.approx(2 / 3)
    everything = score([*chain, *others])
    assert not everything.ok and everything.reward == 0.0 and "are not evidence" in everything.detail


def test_only_so_many_documents_may_be_opened() -> None:
    asked = source(**TINY, opens=3)
    session = asked.open(asked.problem(0))
    told = [use(session.tools, "open", {"id": str(number)}) for number in (1, 2, 3, 4, 1)]
    assert [each.outcome is Outcome.OK for each in told] == [True, True, True, False, True]
    assert "3 documents were opened, which is the limit" in told[3].text and session.reader.opened == ["1", "2", "3"]
    with pytest.raises(UserError, match="opens: at least 2"):
        validate(SearchArgs, {"hops": [2], "opens": 1}, "sources.s.args")


def test_abstaining_is_right_where_no_document_tells() -> None:
    asked = source(**TINY, unanswerable=0.9)
    item = next(item for item in range(40) if asked.problem(item).payload["answer"] == UNKNOWN)
    problem = asked.problem(item)
    assert asked.score(problem, Answer(f"I looked.\n<answer>{UNKNOWN.capitalize()}</answer>")).ok
    assert not asked.score(problem, Answer("<answer>Nobody</answer>")).ok
    for text in ('"unknown".', "**unknown**", "“unknown”", "$\\text{unknown}$"):
        assert asked.score(problem, Answer(f"<answer>{text}</answer>")).ok, text


def test_results_that_were_others_are_not_judged() -> None:
    asked = source(**TINY, unanswerable=0.0)
    problem = asked.problem(0)
    told = [
        {**turn, "content": "nothing found"} if turn["role"] == "tool" else turn
        for turn in asked.demonstration(problem)
    ]
    with pytest.raises(Diverged, match="search"):
        asked.score(problem, Answer(problem.gold, tuple(told)))


def test_the_held_out_part_has_other_words() -> None:
    def words(part: str) -> set[str]:
        asked, found = source(**TINY, part=part), set[str]()
        for item in range(0, 400, 4):
            session = asked.open(asked.problem(item))
            texts = (f"{each.title} {each.text}" for each in session.reader.corpus.documents.values())
            found |= {word.casefold() for text in texts for word in re.findall(r"[^\W\d]+", text)}
        return found

    train, held_out = words("train"), words("held_out")
    assert train & held_out == {"a", "its", "is"}
    # Both parts have the same syllables at both places.
    assert {word[:2] for word in train} == {word[:2] for word in held_out}
    assert {word[2:] for word in train} == {word[2:] for word in held_out}


def test_a_demonstration_says_what_is_left_before_it_looks() -> None:
    asked = source(**TINY, unanswerable=0.0, format="line")
    item = next(item for item in range(40) if len(asked.problem(item).payload["documents"]) == 2)
    problem = asked.problem(item)
    question = str(problem.messages[0]["content"]).partition("?")[0].removeprefix("What is ")
    outer, inner, first = re.findall(r"the (\w+) of", question) + re.findall(r'"(\w+)"', question)
    said = [turn["content"] for turn in asked.demonstration(problem) if turn["role"] == "assistant"]
    ids, answer = problem.payload["documents"], problem.payload["answer"]
    second = said[3].split('"')[1]
    assert said == [
        question,
        f'"{first}" [{ids[0]}]',
        f'Its {inner} is "{second}", so the {outer} of "{second}".',
        f'"{second}" [{ids[1]}]',
        f'Its {outer} is "{answer}".\n{answer} [{ids[0]}] [{ids[1]}]',
    ]
    assert asked.score(problem, Answer(said[-1], asked.demonstration(problem))).ok


def test_questions_about_documents_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/bridge.md").write_text("The bridge at Ens was built by Ada Holm in 1912.")
    (tmp_path / "corpus/holm.txt").write_text("Ada Holm was born in Vik.\n" * 200)
    told = [
        {
            "question": "Where was the builder of the bridge at Ens born?",
            "answer": "Vik",
            "documents": ["bridge.md", "holm.txt"],
        },
        {"question": "Who painted the bridge?", "answer": "", "documents": []},
        {"question": "How many cats live under it?", "answer": 0, "documents": ["bridge.md"]},
    ]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, told)))
    asked = source(path=tmp_path / "corpus", questions=questions)
    asked.validate()
    assert [asked.problem(item).payload["answer"] for item in range(asked.num_items)] == ["Vik", UNKNOWN, "0"]
    questions.write_text(json.dumps({**told[0], "documents": ["tower.md"]}))
    with pytest.raises(UserError, match=r"no document 'tower\.md'"):
        source(path=tmp_path / "corpus", questions=questions)
    questions.write_text(json.dumps({**told[0], "documents": "bridge.md"}))
    with pytest.raises(UserError, match="question 1: documents: no list"):
        source(path=tmp_path / "corpus", questions=questions)
    (tmp_path / "corpus/holm.txt").write_text("Ada Holm was a builder.")
    (tmp_path / "corpus/few.jsonl").write_text(json.dumps({"id": "Holm [born]", "text": "Ada Holm was born in Vik."}))
    questions.write_text(json.dumps({**told[0], "documents": ["bridge.md", "Holm [born]"]}))
    asked = source(path=tmp_path / "corpus", questions=questions)
    asked.validate()  # it can be cited
    assert asked.problem(0).payload["documents"] == ["bridge.md", "Holm (born)"]
    with pytest.raises(UserError, match="question 1: 2 documents, and opens = 1; raise opens"):
        source(path=tmp_path / "corpus", questions=questions, opens=1, hops=(1,))
    with pytest.raises(UserError, match="path and questions: give both"):
        validate(SearchArgs, {"path": str(tmp_path)}, "sources.s.args")
    with pytest.raises(UserError, match="nothing to search"):
        read_documents(_empty(tmp_path))
    with pytest.raises(UserError, match="no such file"):
        read_documents(tmp_path / "nowhere")


def test_hidden_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (".env.md", ".git/config.txt", "sub/.hidden/b.txt", "a.txt"):
        (tmp_path / "notes" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "notes" / name).write_text("text")
    for inside, name in (("", "notes"), ("notes", "."), ("notes/sub", "..")):
        monkeypatch.chdir(tmp_path / inside)
        assert [each.id for each in read_documents(Path(name))] == ["a.txt"]
    assert [each.id for each in read_documents(Path("../.env.md"))] == [".env.md"]  # it is named


def _empty(folder: Path) -> Path:
    (folder / "empty/.hidden").mkdir(parents=True)
    (folder / "empty/.hidden/a.txt").write_text("hidden")
    (folder / "empty/picture.png").write_bytes(b"\x89")
    return folder / "empty"


def test_long_texts_are_cut_and_nothing_is_lost(tmp_path: Path) -> None:
    text = "\n".join(f"line {number} of the long text" for number in range(600))
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "few.jsonl").write_text('{"id": "[x 1]", "title": "X", "contents": "one"}\n{"text": "two"}\n')
    found = read_documents(tmp_path)
    assert [each.id for each in found] == [
        "x 1",
        "2",
        "long.txt",
        *(f"long.txt#{number}" for number in range(2, len(found) - 1)),
    ]
    assert "\n".join(each.text for each in found[2:]) == text and len(found) > 6


def test_bad_calls_are_answered_not_raised() -> None:
    reader = Reader(Corpus([Document("1", "Ada Holm", 'Born in Vik. AND NEAR( * "')]), most=3, words=4)
    search, read = reader.tools
    assert search.call({"query": 'vik AND NEAR( "* title:x'}).text == 'Ada Holm [1]: …in Vik. AND NEAR( * "'
    assert search.call({"query": "\"'"}).text == search.call({"query": "Oslo " * 500}).text == "nothing found"
    for arguments in ({}, {"query": ["a"]}, {"query": "a", "more": 1}, {"id": "1"}):
        assert search.call(arguments).outcome is Outcome.WRONG
    assert read.call({"id": "7"}).outcome is Outcome.WRONG and reader.opened == []
    assert read.call({"id": 1}).text == read.call({"id": "[1]"}).text and reader.opened == ["1"]
    with pytest.raises(UserError, match="two have the id '1'"):
        Corpus([Document("1", "a", ""), Document("1", "b", "")])


def test_a_citation_supports_the_answer_or_a_step_to_it() -> None:
    first, second = Document("1", "Ens", "Built by Ada Holm."), Document("2", "Ada Holm", "Born in Vik.")
    other = Document("3", "Vikings", "Ada Holmes sailed to Viken.")
    assert supporting([first, second, other], "vik") == {"1", "2"}
    assert supporting([first, other], "Vik") == set() == supporting([second], "")
    assert citations("Vik [2], as [1] and [2] say") == ("2", "1")
    assert citations("Vik 【2】【1】") == ("2", "1") and without_citations("Vik 【2】 [1]") == "Vik"
    assert citations("Vik [a, b.md] [c; d]", {"a, b.md"}) == ("a, b.md", "c", "d")
    assert without_citations("Vik [2], as [1] and [2] say") == "Vik, as say"
    many = "(" + "\\[1\\](x)" * 400
    assert without_citations(many) == "("  # in linear time
    for text in (", " * 20_000, " " * 20_000, "[1]" + " ," * 20_000, "(" + " " * 20_000, "[" * 20_000):
        assert without_citations(text) == text.removeprefix("[1]").strip()  # in linear time
    assert without_citations("(as in [1]) Vik (see Ens [2])") == "(as in) Vik (see Ens)"
    for text in (
        "Vik: [1]",
        "Vik — [1], [2]",
        "Vik (sources: [1], [2])",
        "Vik (see [1])",
        "Vik\nSources: [1]",
        "Vik, source: [1]",
    ):
        assert without_citations(text) == "Vik"
    assert without_citations("open source [1]") == "open source" and without_citations("Vik:") == "Vik:"
    assert without_citations("open source: [2]") == "open source" and without_citations("f(see) [1]") == "f(see)"
    for piece in (": ", "(see ", " sources ", ", source: ", "\n", "— "):
        assert without_citations("[1]" + piece * 20_000 + "x").endswith("x")  # in linear time
