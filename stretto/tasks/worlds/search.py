"""Questions about documents that must be found, read and cited: generated corpora, or the user's own.

A generated corpus is a small world of coined words: its names, its kinds of things and what is told of each kind are its own;
a document tells of one name. Questions follow one relation or several, one document each: the rival of the founder of X, but
for the words. Of some no document tells, and to say so is the right answer. No word of part ``held_out`` occurs in the other;
the syllables of both are the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from stretto.base.errors import UserError
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.corpus import (
    Corpus,
    Document,
    Reader,
    citations,
    id_of,
    read_documents,
    supporting,
    without_citations,
)
from stretto.tasks.session import SessionSource, calling, recorded
from stretto.tasks.task import (
    Answer,
    AnswerFormat,
    Problem,
    Range,
    Score,
    Session,
    find_answer,
    read_records,
    spoken,
)

Part = Literal["train", "held_out"]
_FIELDS = {"search": "query", "open": "id"}
"""Of the tools: their one argument."""
UNKNOWN = "unknown"
"""The right answer where no document tells."""
RULES = f"Search, open what you need and cite it as [id]. If no document tells, answer {UNKNOWN}."
_CLOSED_RULES = f"If you do not know, answer {UNKNOWN}."
_CORPORA = 64
"""Kept at once: an index takes a millisecond to make and some 100 KB."""
_TRIES, _REDRAW = 2000, 50

_SYLLABLES = [first + second for first in "bdfghjklmpvwxz" for second in "aeiou"]
_NUM_KINDS, _NUM_RELATIONS, _NUM_NUMBERS = 3, 8, 4
"""Of a corpus: kinds of things, and what may be told of a kind, the last as numbers."""


class SearchArgs(Range):
    """Of kind ``search``; ``first`` and ``limit`` are of the questions."""

    path: Path | None = None
    """A folder or a JSONL file of documents, instead of generated ones; goes with ``questions``."""
    questions: Path | None = None
    """JSONL: ``question``, ``answer`` (empty: no document tells), ``documents`` (ids that have to be cited)."""
    part: Part = "train"
    """Of the words: the two have none in common."""
    documents: int = Field(default=60, ge=4, le=1000)
    """Of a generated corpus; names of one short word are not many more."""
    facts: int = Field(default=4, ge=2, le=8)
    """That are told of a kind of thing, one of them a number."""
    untold: float = Field(default=0.15, ge=0, lt=1)
    """Share of them that documents leave out."""
    words: int = Field(default=2, ge=1, le=3)
    """Of a name."""
    syllables: int = Field(default=2, ge=2, le=4)
    """Of a word."""
    likeness: float = Field(default=0.5, ge=0, le=1)
    """Share of names that are an earlier one but for a word."""
    hops: tuple[int, ...] = Field(default=(1, 2, 3), min_length=1)
    """Documents that an answer takes; one of these for each question."""
    unanswerable: float = Field(default=0.15, ge=0, lt=1)
    """Share of questions of which no document tells."""
    per_corpus: int = Field(default=8, gt=0)
    """Questions about one corpus."""
    hits: int = Field(default=5, gt=0, le=20)
    """Of one search."""
    snippet: int = Field(default=10, ge=0, le=64)
    """Words of a hit's text that are shown; 0: its title alone."""
    opens: int = Field(default=8, gt=0)
    """Largest number of documents that may be opened for one answer; further ones are refused."""
    closed_book: bool = False
    """No tools, and nothing to cite: what is known without the documents."""
    seed: int = 0
    format: AnswerFormat = "tags"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) != (self.questions is None):
            raise ValueError("path and questions go together: documents, and what is asked of them; give both or none")
        if not set(self.hops) <= set(range(1, 7)):
            raise ValueError("hops: an answer takes 1 to 6 documents")
        if max(self.hops) > self.opens:
            raise ValueError(f"opens: at least {max(self.hops)}, the documents of the longest chain in hops")
        return self


class _World(NamedTuple):
    """A generated corpus."""

    corpus: Corpus
    kinds: Mapping[str, str]
    """By name, those included that have no document."""
    schema: Mapping[str, Sequence[str]]
    """By kind: what may be told of it."""
    facts: Mapping[str, Mapping[str, str]]
    """By name and relation: what its document tells."""
    ids: Mapping[str, str]
    """By name: its document."""


class SearchSource(SessionSource):
    args_kind = SearchArgs
    args: SearchArgs

    def __init__(self, name: str, args: SearchArgs, sandbox: Sandbox | None = None) -> None:
        super().__init__(name, args, sandbox)
        self._world = lru_cache(_CORPORA)(lambda number: _make_world(args, number))
        self._corpus: Corpus | None = None
        self._asked: list[dict[str, Any]] = []
        if args.path is not None and args.questions is not None:
            self._corpus = Corpus(read_documents(args.path))
            self._asked = read_records(args.questions, args, [("question",), ("answer",), ("documents",)])
            for place, each in enumerate(self._asked, start=args.first + 1):
                if not isinstance(each["documents"], list):
                    raise UserError(f"{args.questions}: question {place}: documents: no list; write their ids, or []")
                each["documents"] = [id_of(str(one)) for one in each["documents"]]
                if missing := [one for one in each["documents"] if one not in self._corpus.documents]:
                    raise UserError(
                        f"{args.questions}: question {place}: no document {missing[0]!r} in {args.path}; correct it"
                    )
                if (num := len(each["documents"])) > args.opens:
                    raise UserError(
                        f"{args.questions}: question {place}: {num} documents, and opens = {args.opens}; raise opens"
                    )

    @property
    def num_items(self) -> int | None:
        return None if self._corpus is None else len(self._asked)

    def problem(self, item: int) -> Problem:
        if self._corpus is None:
            number = item // self.args.per_corpus
            draw = random.Random(f"search/{self.args.part}/{self.args.seed}/question/{item}")
            question = _question(self._world(number), self.args, draw)
        else:
            told = self._asked[item]
            documents = tuple(told["documents"])
            asked = str(told["question"])
            calls = (("search", asked, ""), *(("open", each, "") for each in documents))
            question = _Question(asked, str(told["answer"] or UNKNOWN), documents, calls)
        rules = _CLOSED_RULES if self.args.closed_book else RULES
        cited = [] if self.args.closed_book else [f"[{each}]" for each in question.documents]
        return Problem.of(
            item,
            f"{question.text} {rules}",
            " ".join([question.answer, *(cited if question.answer != UNKNOWN else [])]),
            self.args.format,
            answer=question.answer,
            documents=list(question.documents),
            calls=list(question.calls),
            note=question.note,
        )

    def open(self, problem: Problem, seed: int | None = None) -> SearchSession:
        corpus = self._corpus or self._world(problem.item // self.args.per_corpus).corpus
        return SearchSession(problem, corpus, self.args)

    def demonstration(self, problem: Problem) -> tuple[Mapping[str, Any], ...]:
        """For each name on the way: it is searched, and its document opened; then the answer."""
        told = problem.payload
        calls = () if self.args.closed_book else told["calls"]
        turns = [calling(tool, {_FIELDS[tool]: value}, note) for tool, value, note in calls]
        note = "" if self.args.closed_book or self.args.format == "plain" else told["note"]
        turns.append({"role": "assistant", "content": f"{note}\n{problem.gold}".strip()})
        with closing(self.open(problem)) as session:
            return recorded(session, turns)


class SearchSession(Session):
    """The documents of one problem. Its state: which were opened, in order."""

    def __init__(self, problem: Problem, corpus: Corpus, args: SearchArgs) -> None:
        self._problem, self._args = problem, args
        self.reader = Reader(corpus, args.hits, args.snippet, args.opens)
        self.tools = () if args.closed_book else self.reader.tools

    def digest(self) -> str:
        return " ".join(self.reader.opened)

    def score(self, answer: Answer) -> Score:
        """Score the answer and its citations.

        Correct: the right answer, with citations of all documents of its chain, of no document that was not opened, and of at least
        as many documents in the chain as outside of it. The reward of a correct answer is the precision of its citations, the share
        that lies in the chain: an answer that cites everything it opened earns less than one that cites its evidence. The part
        ``unsupported`` counts citations of documents that were not opened, or that name neither the answer nor a step towards it.
        """
        gold, opened = self._problem.payload, self.reader.opened
        found = find_answer(answer.text, self._args.format)
        said = _plain(without_citations(found.text))
        cited = citations(spoken(answer.text))
        read = [self.reader.corpus.documents[each] for each in cited if each in opened]
        bearing = supporting(read, said) | (set(gold["documents"]) & set(opened))
        unsupported = [each for each in cited if each not in bearing]
        astray = [each for each in cited if each not in gold["documents"]]
        precision = 1 - len(astray) / len(cited) if cited else 1.0
        parts = {
            "marked": float(found.is_marked),
            "abstained": float(said == UNKNOWN),
            "opened": float(len(opened)),
            "cited": float(len(cited)),
            "unsupported": float(len(unsupported)),
            "astray": float(len(astray)),
            "precision": precision,
        }
        unread = [each for each in cited if each not in opened]
        needed = () if self._args.closed_book or gold["answer"] == UNKNOWN else gold["documents"]
        uncited = [each for each in needed if each not in cited]
        why = ""
        if said != _plain(gold["answer"]):
            why = f"the answer is {gold['answer']!r}"
        elif unread or uncited:
            why = f"cited and never opened: {unread[0]}" if unread else f"not cited: {uncited[0]}"
        elif precision < 0.5:
            why = f"{len(astray)} of {len(cited)} cited documents are no evidence, {astray[0]} for example"
        return replace(Score.of(not why, parts, why), reward=0.0 if why else precision)


def _plain(answer: str) -> str:
    return " ".join(answer.split()).strip("\"'. ").casefold()


# Worlds and questions


class _Question(NamedTuple):
    text: str
    answer: str
    documents: tuple[str, ...]
    """That tell it, in the order in which they are needed; those that lead nowhere, where none tells it."""
    calls: tuple[tuple[str, str, str], ...]
    """Tool, argument and what is said before it: what was just read, as to repeat it before one acts on it is to copy."""
    note: str = ""
    """What is said before the answer."""


def _make_world(args: SearchArgs, number: int) -> _World:
    """Corpus ``number`` of the part and seed."""
    draw = random.Random(f"search/{args.part}/{args.seed}/corpus/{number}")
    words = _names(args.replace(words=1), _NUM_KINDS + _NUM_RELATIONS + _NUM_NUMBERS, draw, ())
    kinds, relations, numbers = words[:_NUM_KINDS], words[_NUM_KINDS:-_NUM_NUMBERS], words[-_NUM_NUMBERS:]
    schema = {kind: [*draw.sample(relations, args.facts - 1), draw.choice(numbers)] for kind in kinds}
    names = _names(args, args.documents + max(1, args.documents // 8), draw, words)
    kind_of = {name: draw.choice(kinds) for name in names}
    facts: dict[str, dict[str, str]] = {}
    documents: list[Document] = []
    for place, name in enumerate(names[: args.documents], start=1):
        told = [each for each in schema[kind_of[name]] if draw.random() >= args.untold] or schema[kind_of[name]][:1]
        others = [other for other in names if other != name]
        facts[name] = {
            relation: str(draw.randrange(10, 1000)) if relation in numbers else draw.choice(others)
            for relation in draw.sample(told, len(told))
        }
        said = " ".join(f'Its {relation} is "{value}".' for relation, value in facts[name].items())
        documents.append(Document(str(place), f'"{name}"', f"A {kind_of[name]}. {said}"))
    ids = {name: each.id for name, each in zip(names, documents, strict=False)}
    return _World(Corpus(documents), kind_of, schema, facts, ids)


def _names(args: SearchArgs, num: int, draw: random.Random, taken: Sequence[str]) -> list[str]:
    """Different ones, some alike; none that is ``taken``."""
    names: dict[tuple[str, ...], None] = {}
    while len(names) < num:
        name = [_coined(args, draw) for _ in range(args.words)]
        if names and draw.random() < args.likeness:
            other, place = draw.choice(list(names)), draw.randrange(args.words)
            name = [*other[:place], name[place], *other[place + 1 :]]
        if not set(name) & set(taken):
            names[tuple(name)] = None
    return [" ".join(each) for each in names]


def _coined(args: SearchArgs, draw: random.Random) -> str:
    """A word of the part. Both parts have all syllables at all places: so a small network may know how to copy what it never saw."""
    while True:
        places = [draw.randrange(len(_SYLLABLES)) for _ in range(args.syllables)]
        if (sum(places) % 4 == 0) is (args.part == "held_out"):
            return "".join(_SYLLABLES[place] for place in places)


def _question(world: _World, args: SearchArgs, draw: random.Random) -> _Question:
    is_known, wanted = draw.random() >= args.unanswerable, draw.choice(args.hops)
    for tries in range(_TRIES):
        if tries and tries % _REDRAW == 0:
            wanted = draw.choice(args.hops)  # this corpus may have no chain of that length
        name = draw.choice(list(world.kinds))
        way, relations = [name], list[str]()
        while len(relations) < wanted and name in world.kinds:  # of a number nothing is told
            relations.append(draw.choice(world.schema[world.kinds[name]]))
            name = world.facts.get(name, {}).get(relations[-1], "")
            way.append(name)
        documents = tuple(world.ids[each] for each in way[: len(relations)] if each in world.ids)
        can_be_found = all(
            each in [hit.document.id for hit in world.corpus.search(query, args.hits, 0)]
            for query, each in zip(way, documents, strict=False)
        )
        is_told = "" not in way
        if len(relations) == wanted and is_told is is_known and len(set(way)) == len(way) and can_be_found:
            calls, note = _looked_up(world, way, relations)
            return _Question(f"What is {_asked(way[0], relations)}?", name or UNKNOWN, documents, calls, note)
    raise AssertionError(f"no question about a corpus of {args}")


def _asked(name: str, relations: Sequence[str]) -> str:
    text = f'"{name}"'
    for relation in relations:
        text = f"the {relation} of {text}"
    return text


def _looked_up(
    world: _World, way: Sequence[str], relations: Sequence[str]
) -> tuple[tuple[tuple[str, str, str], ...], str]:
    """Calls and note of one who looks up what a question's ``relations`` lead to, ``way``."""
    calls, note = list[tuple[str, str, str]](), _asked(way[0], relations)
    for place, (name, told) in enumerate(pairwise(way)):
        calls.append(("search", name, note))
        note = f'"{name}" is unknown.'
        if name in world.ids:
            calls.append(("open", world.ids[name], f'"{name}" [{world.ids[name]}]'))
            left = relations[place + 1 :]
            found = f'"{told}"' + (f", so {_asked(told, left)}" if left else "") if told else "unknown"
            note = f"Its {relations[place]} is {found}."
    return tuple(calls), note
