"""Questions about documents that must be found, read and cited: generated corpora, or the user's own documents.

A generated corpus has invented words for its names, its kinds of things, and the relations that each kind has. A document lists the
relations of one name. A question follows a chain of relations, one document each, such as the rival of the founder of X. Some questions
have no answer in the corpus; then ``unknown`` is correct. No word of part ``held_out`` occurs in part ``train``; the syllables do.
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
    bare,
    find_answer,
    read_records,
    spoken,
)

Part = Literal["train", "held_out"]
_FIELDS = {"search": "query", "open": "id"}
"""Argument of each tool."""
UNKNOWN = "unknown"
"""Correct answer to a question without an answer in the corpus."""
RULES = f"Search, open what you need and cite it as [id]. If no document tells, answer {UNKNOWN}."
_CORPORA = 64
"""Number of corpora in the cache. An index takes a millisecond to build and 100 KB of memory."""
_TRIES, _REDRAW = 2000, 50
"""Attempts to draw a question; after each ``_REDRAW`` of them, another chain length is drawn."""

_SYLLABLES = [first + second for first in "bdfghjklmpvwxz" for second in "aeiou"]
_NUM_KINDS, _NUM_RELATIONS, _NUM_NUMBERS = 3, 8, 4
"""Number of words per corpus: kinds of things, relations between names, and relations to numbers."""


class SearchArgs(Range):
    """Arguments of kind ``search``; ``first`` and ``limit`` select questions of the file ``questions``."""

    path: Path | None = None
    """Folder or JSONL file of the user's documents; None: generated ones. Goes with ``questions``."""
    questions: Path | None = None
    """JSONL: ``question``, ``answer`` (empty: no document has it), ``documents`` (ids that must be cited)."""
    part: Part = "train"
    """Set of words; the two sets have no word in common."""
    documents: int = Field(default=60, ge=4, le=1000)
    """Number of documents in a generated corpus. There are few more names than this of one short word."""
    facts: int = Field(default=4, ge=2, le=8)
    """Number of relations per kind of thing, one of them to a number."""
    untold: float = Field(default=0.15, ge=0, lt=1)
    """Share of relations that documents leave out."""
    words: int = Field(default=2, ge=1, le=3)
    """Number of words per name."""
    syllables: int = Field(default=2, ge=2, le=4)
    """Number of syllables per word."""
    likeness: float = Field(default=0.5, ge=0, le=1)
    """Share of names that differ from an earlier name in one word."""
    hops: tuple[int, ...] = Field(default=(1, 2, 3), min_length=1)
    """Lengths of the chain of documents from question to answer; one is drawn per question."""
    unanswerable: float = Field(default=0.15, ge=0, lt=1)
    """Share of questions without an answer in the corpus."""
    per_corpus: int = Field(default=8, gt=0)
    """Number of questions per corpus."""
    hits: int = Field(default=5, gt=0, le=20)
    """Number of documents that a search returns."""
    snippet: int = Field(default=10, ge=0, le=64)
    """Number of words of text shown per hit; 0: only the title."""
    opens: int = Field(default=8, gt=0)
    """Largest number of documents that may be opened for one answer; further ones are refused."""
    seed: int = 0
    format: AnswerFormat = "tags"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) != (self.questions is None):
            raise ValueError("path and questions: give both, documents and questions about them, or neither")
        if not set(self.hops) <= set(range(1, 7)):
            raise ValueError("hops: chain lengths must be from 1 to 6")
        if max(self.hops) > self.opens:
            raise ValueError(f"opens: at least {max(self.hops)}, the documents of the longest chain in hops")
        return self


class _World(NamedTuple):
    """A generated corpus."""

    corpus: Corpus
    kinds: Mapping[str, str]
    """Kind of each name, also of names without a document."""
    schema: Mapping[str, Sequence[str]]
    """Relations of each kind."""
    facts: Mapping[str, Mapping[str, str]]
    """Values that the documents give, by name and relation."""
    ids: Mapping[str, str]
    """Id of the document of each name."""


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
            self.num_items = len(self._asked)
            for number, record in enumerate(self._asked, start=args.first + 1):
                where, documents = f"{args.questions}: question {number}", record["documents"]
                if not isinstance(documents, list):
                    raise UserError(f"{where}: documents: no list; write their ids, or []")
                record["documents"] = documents = [id_of(str(each)) for each in documents]
                if missing := [each for each in documents if each not in self._corpus.documents]:
                    raise UserError(f"{where}: no document {missing[0]!r} in {args.path}; correct it")
                if len(documents) > args.opens:
                    raise UserError(f"{where}: {len(documents)} documents, and opens = {args.opens}; raise opens")

    def problem(self, item: int) -> Problem:
        if self._corpus is None:
            number = item // self.args.per_corpus
            draw = random.Random(f"search/{self.args.part}/{self.args.seed}/question/{item}")
            question = _question(self._world(number), self.args, draw)
            if question is None:
                settings = f"{self.args.documents} documents with hops {self.args.hops}"
                problem = f"{settings}, facts {self.args.facts} and untold {self.args.untold:g}: no question is found"
                raise UserError(
                    f"sources.{self.name}: item {item}: {problem}; raise documents, or add a shorter chain to hops"
                )
        else:
            record = self._asked[item]
            text, documents = str(record["question"]), tuple(record["documents"])
            calls = (("search", text, ""), *(("open", each, "") for each in documents))
            answer = "" if record["answer"] is None else str(record["answer"]).strip()
            question = _Question(text, answer or UNKNOWN, documents, calls)
        cited = [f"[{each}]" for each in question.documents if question.answer != UNKNOWN]
        payload = question._asdict() | {"documents": list(question.documents), "calls": list(question.calls)}
        text, gold = f"{payload.pop('text')} {RULES}", " ".join([question.answer, *cited])
        return Problem.of(item, text, gold, self.args.format, **payload)

    def open(self, problem: Problem, seed: int | None = None) -> SearchSession:
        corpus = self._corpus or self._world(problem.item // self.args.per_corpus).corpus
        return SearchSession(problem, corpus, self.args)

    def demonstration(self, problem: Problem) -> tuple[Mapping[str, Any], ...]:
        """A search and an opened document for each name in the chain, then the answer."""
        turns = [calling(tool, {_FIELDS[tool]: value}, note) for tool, value, note in problem.payload["calls"]]
        note = "" if self.args.format == "plain" else problem.payload["note"]
        turns.append({"role": "assistant", "content": f"{note}\n{problem.gold}".strip()})
        with closing(self.open(problem)) as session:
            return recorded(session, turns)


class SearchSession(Session):
    """Session on the documents of one problem. State: the ids of the opened documents in order."""

    def __init__(self, problem: Problem, corpus: Corpus, args: SearchArgs) -> None:
        self._problem, self._args = problem, args
        self.reader = Reader(corpus, args.hits, args.snippet, args.opens)
        self.tools = self.reader.tools

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
        text = bare(without_citations(found.text)).casefold()
        cited = citations(spoken(answer.text), self.reader.corpus.documents)
        read = [self.reader.corpus.documents[each] for each in cited if each in opened]
        evidence = supporting(read, text) | (set(gold["documents"]) & set(opened))
        unsupported = [each for each in cited if each not in evidence]
        astray = [each for each in cited if each not in gold["documents"]]
        precision = 1 - len(astray) / len(cited) if cited else 1.0
        parts = {
            "marked": float(found.is_marked),
            "abstained": float(text == UNKNOWN),
            "opened": float(len(opened)),
            "cited": float(len(cited)),
            "unsupported": float(len(unsupported)),
            "astray": float(len(astray)),
            "precision": precision,
        }
        unread = [each for each in cited if each not in opened]
        uncited = [each for each in gold["documents"] if each not in cited and gold["answer"] != UNKNOWN]
        why = ""
        if text != bare(gold["answer"]).casefold():
            why = f"the answer is {gold['answer']!r}"
        elif unread or uncited:
            why = f"cited and never opened: {unread[0]}" if unread else f"not cited: {uncited[0]}"
        elif precision < 0.5:
            why = f"{len(astray)} of {len(cited)} cited documents are not evidence, {astray[0]} for example"
        return replace(Score.of(not why, parts, why), reward=0.0 if why else precision)


# Worlds and questions


class _Question(NamedTuple):
    text: str
    answer: str
    documents: tuple[str, ...]
    """Ids of the chain's documents in the order in which they are needed; of an unanswerable question, the start of the chain."""
    calls: tuple[tuple[str, str, str], ...]
    """Calls of the demonstration: tool, argument, and the text before the call, which repeats the last fact that was read."""
    note: str = ""
    """Text before the answer in the demonstration."""


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
        given = [each for each in schema[kind_of[name]] if draw.random() >= args.untold] or schema[kind_of[name]][:1]
        others = [other for other in names if other != name]
        facts[name] = {
            relation: str(draw.randrange(10, 1000)) if relation in numbers else draw.choice(others)
            for relation in draw.sample(given, len(given))
        }
        sentences = " ".join(f'Its {relation} is "{value}".' for relation, value in facts[name].items())
        documents.append(Document(str(place), f'"{name}"', f"A {kind_of[name]}. {sentences}"))
    ids = {name: each.id for name, each in zip(names, documents, strict=False)}
    return _World(Corpus(documents), kind_of, schema, facts, ids)


def _names(args: SearchArgs, num: int, draw: random.Random, taken: Sequence[str]) -> list[str]:
    """``num`` different names, some of which differ in one word; none contains a word of ``taken``."""
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
    """A word of the part. Both parts have every syllable at every place, so that a small network can copy words that it never saw."""
    while True:
        places = [draw.randrange(len(_SYLLABLES)) for _ in range(args.syllables)]
        if (sum(places) % 4 == 0) is (args.part == "held_out"):
            return "".join(_SYLLABLES[place] for place in places)


def _question(world: _World, args: SearchArgs, draw: random.Random) -> _Question | None:
    """A question about the documents of ``world``; None: none is found."""
    is_answerable, num_hops = draw.random() >= args.unanswerable, draw.choice(args.hops)
    for attempt in range(2 * _TRIES if args.unanswerable else _TRIES):
        if attempt == _TRIES:  # this corpus may have only questions of the other kind
            is_answerable = not is_answerable
        if attempt and attempt % _REDRAW == 0:
            num_hops = draw.choice(args.hops)  # this corpus may have no chain of the length
        name = draw.choice(list(world.kinds))
        chain, relations = [name], list[str]()
        while len(relations) < num_hops and name in world.kinds:  # a number has no relations
            relations.append(draw.choice(world.schema[world.kinds[name]]))
            name = world.facts.get(name, {}).get(relations[-1], "")
            chain.append(name)
        documents = tuple(world.ids[each] for each in chain[: len(relations)] if each in world.ids)
        can_be_found = all(
            each in [hit.document.id for hit in world.corpus.search(query, args.hits, 0)]
            for query, each in zip(chain, documents, strict=False)
        )
        has_answer, is_circle = "" not in chain, len(set(chain)) < len(chain)
        if len(relations) == num_hops and has_answer is is_answerable and not is_circle and can_be_found:
            calls, note = _lookups(world, chain, relations)
            return _Question(f"What is {_phrase(chain[0], relations)}?", name or UNKNOWN, documents, calls, note)
    return None


def _phrase(name: str, relations: Sequence[str]) -> str:
    text = f'"{name}"'
    for relation in relations:
        text = f"the {relation} of {text}"
    return text


def _lookups(
    world: _World, chain: Sequence[str], relations: Sequence[str]
) -> tuple[tuple[tuple[str, str, str], ...], str]:
    """Calls and final note of a demonstration that follows ``relations`` along the names of ``chain``."""
    calls, note = list[tuple[str, str, str]](), _phrase(chain[0], relations)
    for place, (name, value) in enumerate(pairwise(chain)):
        calls.append(("search", name, note))
        note = f'"{name}" is unknown.'
        if name in world.ids:
            calls.append(("open", world.ids[name], f'"{name}" [{world.ids[name]}]'))
            left = relations[place + 1 :]
            found = f'"{value}"' + (f", so {_phrase(value, left)}" if left else "") if value else "unknown"
            note = f"Its {relations[place]} is {found}."
    return tuple(calls), note
