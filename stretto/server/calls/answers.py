"""Answers of models, split into content, reasoning and calls while they are written."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

import regex

from stretto.server.calls.dialect import Call, Dialect, Pattern, Piece, Schemas, Think, Thought
from stretto.server.calls.json_text import parse_json


class AnswerReader:
    """Splits streamed text into content, reasoning and calls. Holds back text that may be the beginning of a mark, and white space that
    may be around a call."""

    def __init__(
        self,
        dialect: Dialect | None = None,
        schemas: Schemas | None = None,
        think: Think | None = None,
        is_thinking: bool = False,
        max_calls: int | None = None,
    ) -> None:
        """
        Args:
            dialect: None: no calls are read.
            think: None: no reasoning is read.
            is_thinking: the prompt ends with an opened block of reasoning.
            max_calls: number of calls after which further ones are left out; None: no limit.
        """
        self._dialect, self._schemas, self._calls_left = dialect, schemas or {}, max_calls
        marks = None if think is None else (regex.escape(think.open), regex.escape(think.close))
        self._think = marks and (regex.compile(rf"{marks[0]}\s?"), regex.compile(rf"\s?{marks[1]}"))
        self._is_thinking = is_thinking and think is not None
        self._may_think = not self._is_thinking  # only white space so far
        self._after_thought = False  # white space that follows is no content
        self._has_content = self._has_calls = self._has_thought = False
        self._blank = ""  # white space after the content, which is content only if more of it follows
        self._opened: Any = None  # match of the opening mark of the current call
        self._held = ""
        self._is_mended = False  # an opening mark that began no call was made text
        self._searched = 0  # place in the held text of a call where the search for the closing mark continues

    def push(self, text: str) -> list[Piece]:
        """The pieces that ``text`` completes, in order: content, reasoning and calls."""
        self._held += text
        return self._read(is_last=False)

    def finish(self, is_cut: bool = False) -> list[Piece]:
        """The remaining pieces at the end of the answer. An opening mark that begins no call becomes text, and calls behind it are read.
        If the answer was cut, the unfinished call is left out, and so is a part of a mark."""
        marks = [*(self._think or ()), *([self._dialect.open] if self._dialect else [])]
        halves = [pattern.search(self._held, partial=True) for pattern in marks if is_cut and self._opened is None]
        self._held = self._held[: min([half.start() for half in halves if half and half.partial], default=None)]
        found = self._read(is_last=True)
        while self._opened is not None and not is_cut:  # no call: the mark is text, and calls may follow
            self._add_content(found, self._opened.group())
            self._opened, self._searched, self._is_mended = None, 0, True
            found += self._read(is_last=True)
        if self._blank and not self._has_calls:
            found.append(self._blank)
        self._held, self._opened, self._blank = "", None, ""
        return found

    def _read(self, is_last: bool) -> list[Piece]:
        found: list[Piece] = []
        while self._step(found, is_last):
            pass
        return found

    def _step(self, found: list[Piece], is_last: bool) -> bool:
        """Continue to the next mark. False: more text is needed."""
        if self._opened is not None:
            return self._take_call(found, is_last)
        if self._is_thinking:
            return self._take_thought(found, is_last)
        if self._may_think and self._think is not None:
            mark = self._find_first(self._think[0], is_last)
            if mark is None:
                return False
            self._may_think, self._is_thinking = False, bool(mark)
            if mark:
                self._held, self._blank = self._held[mark.end() :], ""
            return True
        return self._take_content(found, is_last)

    def _find(self, pattern: Pattern, is_last: bool) -> Any:
        """The next match in the held text; False: there is none; None: more text is needed to decide."""
        match = pattern.search(self._held, self._searched, partial=not is_last)
        if match is None:
            return False
        # A match at the end of the text may still grow by an optional part of the pattern.
        if is_last or not (match.partial or match.end() == len(self._held)):
            return match
        self._searched = match.start()
        return None

    def _find_first(self, pattern: Pattern, is_last: bool) -> Any:
        """The match at the beginning of the held text, behind its white space; the results are those of `_find`."""
        text = self._held.lstrip()
        self._blank += self._held[: len(self._held) - len(text)]
        self._held = text
        match = pattern.match(text, partial=not is_last)
        if match is None:
            return False
        return match if is_last or not (match.partial or match.end() == len(text)) else None

    def _take_thought(self, found: list[Piece], is_last: bool) -> bool:
        assert self._think is not None
        content, mark = self._split(self._think[1], is_last)
        if content:
            found.append(Thought(content))
            self._has_thought = True
        self._is_thinking, self._after_thought = not mark, bool(mark)
        return bool(mark)

    def _take_content(self, found: list[Piece], is_last: bool) -> bool:
        if self._after_thought:
            self._held = self._held.lstrip()
            self._after_thought = not self._held
        content, mark = self._held, None
        if self._dialect is None or (self._dialect.is_first and self._has_content):  # no call can follow
            if content := self._blank + content:
                found.append(content)
            self._held = self._blank = ""
            return False
        if self._dialect.is_first:
            mark = self._find_first(self._dialect.open, is_last)
            if mark is None:
                return False
            content, self._held = ("", self._held[mark.end() :]) if mark else (self._held, "")
        else:
            content, mark = self._split(self._dialect.open, is_last)
        self._add_content(found, content)
        groups = mark.groupdict() if mark else {}
        is_call = mark and not groups.get("no")
        if groups.get("think") and self._think is None:
            self._add_content(found, mark.group())
        elif groups.get("think"):
            self._is_thinking = True
            found += [Thought("\n")] * self._has_thought  # between two blocks of reasoning
        if mark and not is_call and not self._dialect.frames:
            self._blank = ""
        self._opened = mark if is_call else None
        return bool(mark)

    def _add_content(self, found: list[Piece], text: str) -> None:
        """Add ``text`` without the white space at its end, and without that between calls and the first content."""
        said = text.rstrip()
        if not said:
            self._blank += text
            return
        whole = self._blank + said
        found.append(whole.lstrip() if self._has_calls and not self._has_content else whole)
        self._has_content, self._blank = True, text[len(said) :]

    def _split(self, pattern: Pattern, is_last: bool) -> tuple[str, Any]:
        """Text before the next mark, and the mark if it is complete. Text that may begin a mark is held back."""
        mark = self._find(pattern, is_last)
        start = len(self._held) if mark is False else mark.start() if mark else self._searched
        content, self._held = self._held[:start], self._held[mark.end() if mark else start :]
        self._searched = 0
        return content, mark or None

    def _take_call(self, found: list[Piece], is_last: bool) -> bool:
        # A closing mark within a string of the arguments does not end the call: the text before it cannot be parsed.
        assert self._dialect is not None
        close, most = self._dialect.close, len(self._held)
        # After a failure, a call ends before the next opening mark. Otherwise each mark could be tried with each closing one.
        if self._is_mended and (following := self._dialect.open.search(self._held)):
            most = following.start()
        while True:
            if close is None:
                end = after = most if is_last else -1
            else:
                mark = self._find(close, is_last)
                end, after = mark.span() if mark else (-1, -1)
            if end < 0 or after > most:
                return False
            try:
                calls = self._dialect.read(self._held[:end], self._opened.groupdict(""), self._schemas)
            except ValueError:
                if close is None:
                    return False
                self._searched = after
                continue
            found += [_call(*each) for each in calls[: self._calls_left]]
            if self._calls_left is not None:
                self._calls_left -= len(calls[: self._calls_left])
            self._held, self._opened, self._searched, self._has_calls = self._held[after:], None, 0, True
            return True


def _call(name: str, arguments: Any) -> Call:
    """A call with a new id. Some models write the arguments as a string that contains JSON, or null for none."""
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            return Call(_call_id(), name, arguments)
    return Call(_call_id(), name, json.dumps({} if arguments is None else arguments, ensure_ascii=False))


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class Said:
    """A whole answer, split into its parts. Written by `read_answer`."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]


def read_answer(reader: AnswerReader, text: str, is_cut: bool = False) -> Said:
    """The parts of a whole answer."""
    pieces = [*reader.push(text), *reader.finish(is_cut)]
    calls = tuple(piece for piece in pieces if isinstance(piece, Call))
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    return Said(content, reasoning, calls)
