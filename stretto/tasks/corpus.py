"""Documents with word search, and the citations of an answer. No torch.

Documents are ranked by SQLite's FTS5, which computes BM25. A query is a set of words without operators, so that no query is malformed.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.base.errors import UserError
from stretto.base.track import progress
from stretto.base.trajectory import Outcome
from stretto.data.files import COMPRESSIONS, JSON_LINES, TEXT, kind_of
from stretto.data.sources import cut_before
from stretto.sandbox.outcome import ToolResult
from stretto.sandbox.tools import shorten
from stretto.tasks.task import Range, read_records
from stretto.tasks.tools import string_tool

MAX_QUERY = 32
"""Largest number of words in a query; further words are ignored."""
_TITLE_WEIGHT = 2.0
"""BM25 weight of a word in the title; a word in the text has weight 1."""
_PART_CHARS = 3000
"""Longest document in characters. Longer texts are split, because the model reads a document as a whole."""
_CITED = re.compile(r"\\?(?<![\[【])[\[【]++([^\[\]【】\n]+?)\\?[\]】]+")
"""Such as ``[7]``, ``【7】``, ``[[7]]`` or ``\\[7\\]``."""
_ONE = rf"(?>{_CITED.pattern}(?:\([^()\s]*\))?)"  # atomic: otherwise the time may be exponential in the number of citations
_LISTED = rf"{_ONE}(?:(?:[\s,;&*]|and)*{_ONE})*"
# In linear time: a search begins once in each run of blanks and commas, and no part of the run is read again.
_WITH_COMMAS = re.compile(rf"(?:(?<![\s,;])[\s,;]++)?(?:\(\s*+{_LISTED}\s*+\)|{_LISTED})")
"""Citations, with what joins them to each other and to the text before: ``, [7] and [8]``, ``([7], [8])`` or ``[7](link)``."""
_ANNOUNCED = re.compile(
    r"(?<![\s,;])[\s,;]*+(?:(?<!\w)\((?:sources?|references?|see)[\s:]*\)?"
    r"|(?:(?:(?<=[\n,.;]\s)|(?<=\n))(?:sources?|references?)\s*+)?:|[—–])\.?\Z",
    re.IGNORECASE,
)
"""What is left of ``7 (sources: [7])``, ``7: [7]`` and ``7 — [7]`` behind the 7."""


@dataclass(frozen=True, slots=True)
class Document:
    id: str
    """Id for opening and citing; without brackets."""
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Hit:
    """A search result. Written by `Corpus.search`."""

    document: Document
    snippet: str
    """Words of the text around words of the query."""


class Corpus:
    """Documents and their index, in memory. Thread-safe."""

    def __init__(self, documents: Sequence[Document]) -> None:
        """Raises `UserError`: two documents have the same id, or this Python's SQLite has no FTS5."""
        self.documents: Mapping[str, Document] = {each.id: each for each in documents}
        if len(self.documents) < len(documents):
            ((twice, _),) = Counter(each.id for each in documents).most_common(1)
            raise UserError(f"documents: two have the id {twice!r}; rename one")
        self._ids = list(self.documents)
        self._lock = threading.Lock()
        self._base = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._base.execute("CREATE VIRTUAL TABLE words USING fts5(title, text)")
        except sqlite3.OperationalError as error:
            raise UserError(f"documents: cannot be searched: {error}; use a Python whose SQLite has FTS5") from None
        rows = ((place, each.title, each.text) for place, each in enumerate(documents))
        self._base.executemany("INSERT INTO words (rowid, title, text) VALUES (?, ?, ?)", rows)

    def search(self, query: str, most: int, words: int = 8) -> list[Hit]:
        """The ``most`` best documents, equal ones in their order, each with a snippet of ``words`` words."""
        expression = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query)[:MAX_QUERY])
        if not expression:
            return []
        statement = (
            "SELECT rowid, snippet(words, 1, '', '', '…', ?) FROM words WHERE words MATCH ? "
            "ORDER BY bm25(words, ?, 1.0), rowid LIMIT ?"
        )
        with self._lock:
            rows = self._base.execute(statement, (max(1, words), expression, _TITLE_WEIGHT, most)).fetchall()
        return [Hit(self.documents[self._ids[place]], found if words else "") for place, found in rows]


class Reader:
    """The tools ``search`` and ``open`` of one session, and the documents that it opened."""

    def __init__(self, corpus: Corpus, most: int, words: int, max_opened: int | None = None) -> None:
        """``most``, ``words``: as in `Corpus.search`. ``max_opened``: largest number of documents to open; None: no limit."""
        self.corpus, self._most, self._words, self._max_opened = corpus, most, words, max_opened
        self.opened: list[str] = []
        """Ids of the opened documents in order, each once."""
        text = {"type": "string"}
        opener = string_tool("open", "Gives a document that was found.", {"id": text}, self._open)
        self.tools = (
            string_tool("search", "Finds documents by their words.", {"query": text}, self._search),
            # An id may also be a number.
            replace(
                opener, call=lambda told: opener.call({k: str(v) if type(v) is int else v for k, v in told.items()})
            ),
        )

    def _search(self, arguments: Mapping[str, str]) -> ToolResult:
        lines = []
        for hit in self.corpus.search(arguments["query"], self._most, self._words):
            snippet = f": {' '.join(hit.snippet.split())}" if hit.snippet else ""
            lines.append(f"{hit.document.title} [{hit.document.id}]{snippet}")
        return ToolResult(shorten("\n".join(lines) or "nothing found"), Outcome.OK)

    def _open(self, arguments: Mapping[str, str]) -> ToolResult:
        document = self.corpus.documents.get(arguments["id"].strip(" []"))
        if document is None:
            return ToolResult(shorten(f"error: there is no document {arguments['id']!r}"), Outcome.WRONG)
        if document.id not in self.opened:
            if len(self.opened) == self._max_opened:
                problem = f"error: {self._max_opened} documents were opened, which is the limit; answer now"
                return ToolResult(problem, Outcome.WRONG)
            self.opened.append(document.id)
        return ToolResult(shorten(f"{document.title} [{document.id}]\n{document.text}"), Outcome.OK)


# What an answer cites


def citations(text: str, known: Container[str] = ()) -> tuple[str, ...]:
    """Ids in brackets, such as ``[7]``, ``【7】`` or ``[7, 8]``, in order, each once. A comma may also be part of an id in ``known``."""
    wholes = [match[1].strip() for match in _CITED.finditer(text)]
    ids = [part for whole in wholes for part in ([whole] if whole in known else re.split(r"[,;]", whole))]
    return tuple(dict.fromkeys(filter(None, map(str.strip, ids))))


def without_citations(text: str) -> str:
    """``text`` without its citations, and without the words and marks at its end that announce them."""
    without, num = _WITH_COMMAS.subn("", text)
    return (_ANNOUNCED.sub("", without.strip()) if num else without).strip()


def supporting(cited: Sequence[Document], answer: str) -> set[str]:
    """Ids of the ``cited`` documents that contain the answer, or the title of another supporting document."""
    named, found = [answer], set[str]()
    while named:
        name = named.pop()
        for each in cited:
            if each.id not in found and _names(each.text, name):
                found.add(each.id)
                named.append(each.title)
    return found


def _names(text: str, name: str) -> bool:
    words, wanted = (" ".join(re.findall(r"\w+", each.casefold())) for each in (text, name))
    return bool(wanted) and f" {wanted} " in f" {words} "


# The user's documents


def id_of(name: str) -> str:
    """``name`` in a form that can be cited: on one line, without brackets."""
    match = _CITED.fullmatch(name.strip())
    return " ".join((match[1] if match else name).translate(str.maketrans("[]【】", "()()")).split())


def read_documents(path: Path) -> list[Document]:
    """Documents of a file, or of a folder with its sub-folders; hidden files are ignored. A text file is one document, or several if it is
    long; its path is the id. A JSONL record has ``text`` or ``contents``, and optionally ``id`` and ``title``.

    Raises:
        UserError: no such path, or no readable document.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; check the path")
    names = [(each, each.relative_to(path).parts) for each in (path.rglob("*") if path.is_dir() else [path])]
    visible = sorted(
        each for each, parts in names if not any(part.startswith(".") for part in parts) and each.is_file()
    )
    files = [each for each in visible if each.suffix not in COMPRESSIONS and kind_of(each) in (*JSON_LINES, *TEXT)]
    found: list[Document] = []
    with progress("documents", len(files)) as advance:
        for file in files:
            found += _records(file) if kind_of(file) in JSON_LINES else _parts(file, path)
            advance(1)
    if not found:
        raise UserError(f"{path}: holds nothing to search; give text files (.txt, .md, source code) or JSONL")
    return found


def _records(file: Path) -> Iterator[Document]:
    for number, record in enumerate(read_records(file, Range(), [("text", "contents")]), start=1):
        name = str(record.get("id", number))
        text = str(record.get("text", record.get("contents")))
        yield Document(id_of(name), str(record.get("title", name)), text)


def _parts(file: Path, root: Path) -> Iterator[Document]:
    name = id_of((file.relative_to(root) if root.is_dir() else Path(file.name)).as_posix())
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}; check its permissions") from None
    start, number = 0, 1
    while start < len(text):
        end = len(text) if len(text) - start <= _PART_CHARS else cut_before(text, start + _PART_CHARS, start)
        if part := text[start:end].strip():
            place = f"{name}#{number}" if number > 1 else name
            yield Document(place, place, part)
            number += 1
        start = end
