"""Simulated customer service: database, policy, tools and customer, all drawn from a seed.

A scripted customer asks for a change of a record. The policy in the system message allows the change depending on the record's state, which
the model has to look up, and mostly requires the customer's consent. In other states the model must decline, or transfer to a person, each
by a call. An answer is correct when the whole database has its expected final state, as in tau-bench (2406.12045), and: the conversation
ended with the required call or none, records were read before they were changed, required consent was given, and the customer, who may
change the request when asked for consent, had no further request. An agent that says or does nothing is never correct.

Every problem has its own schema. No name in a schema of part ``held_out`` occurs in part ``train``.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any, Final, Literal

from stretto.base.config import Config
from stretto.base.trajectory import Outcome
from stretto.sandbox.isolate import Sandbox
from stretto.sandbox.outcome import ToolResult
from stretto.tasks.session import SessionSource, calling, recorded
from stretto.tasks.task import Answer, Problem, Score, Session, Tool, spoken
from stretto.tasks.tools import string_tool

Operation = Literal["cancel", "change", "refund", "create"]
Verdict = Literal["do", "decline", "transfer"]
"""Decision of the policy about a request; the last two are calls that end the conversation."""
Part = Literal["train", "held_out"]
Row = dict[str, str]
Rows = Mapping[str, Mapping[str, Row]]
"""Records by kind and id."""

YES: Final = "Yes."
PRICE: Final = "price"
_DONE = "Done."
_PATIENCE = 16
"""Number of turns after which a customer ends the conversation."""
_STATE_AFTER: Mapping[Operation, str] = {"cancel": "cancelled", "refund": "refunded"}
_NOT: Final = frozenset({"not", "never", "cannot", "without", "no", "dont", "wont", "cant"})
_TEXT = {"type": "string"}


@dataclass(frozen=True, slots=True)
class _Level:
    """Size and difficulty of the problems of a level."""

    is_coined: bool
    """Whether names are invented from syllables; else words of `_WORDS`."""
    num_kinds: int
    """Kinds of records."""
    num_fields: int
    """Fields per record, besides id, state and price."""
    num_states: int
    num_rows: int
    """Records per kind."""
    operations: tuple[Operation, ...]
    num_operations: int
    """Operations per kind, drawn from ``operations``."""
    asks: float
    """Share of operations that need the customer's consent."""
    withheld: float
    """Share of customers who name their record only when asked."""
    wavers: float
    """Share of customers who change their request when asked for consent."""
    id_length: int = 4
    """Characters per id; 0: ids are names. After 600 steps a small network copied names, but not ids of letters and digits."""
    num_words: int = 0
    """Smallest length of the policy, in words."""


_ALL: tuple[Operation, ...] = ("cancel", "change", "refund", "create")
LEVELS: Final[Mapping[str, _Level]] = {
    "tiny": _Level(True, 1, 0, 3, 3, ("cancel",), 1, asks=1.0, withheld=0.0, wavers=0.2, id_length=0),
    "small": _Level(True, 1, 2, 3, 4, ("cancel", "change"), 2, asks=0.7, withheld=0.3, wavers=0.3),
    "medium": _Level(False, 1, 4, 4, 8, _ALL, 3, asks=0.7, withheld=0.5, wavers=0.3),
    "long": _Level(False, 2, 5, 5, 16, _ALL, 2, asks=0.7, withheld=0.5, wavers=0.3, num_words=2000),
}

_WORDS: Final[Mapping[str, str]] = {
    "kind": """parcel ticket lease permit policy voucher subscription appointment invoice claim rental charter shipment loan
        membership booking warrant licence contract deposit docket pledge quota ration""",
    "field": """colour gate depot tariff owner route grade channel branch origin target season format carrier region tier ward
        vessel sector shelf campus district harbour terminal phase track crew lane stall pier deck bay zone lot rack aisle""",
    "state": """pending packed sealed dormant frozen queued flagged drafted signed lapsed settled parked routed stored weighed
        billed pooled posted locked audited matched merged hoisted tabled scanned
        shelved traced mailed waived bundled graded halved loaned pinned swapped tallied""",
    "value": """amber birch cobalt dune ember fjord garnet heather indigo jasper kelp larch maple nickel onyx pearl quartz raven
        sable thistle umber velvet willow yarrow aspen basalt cedar delta elder flint granite hazel iris juniper karst lotus
        marble nutmeg opal poplar quill russet sorrel tundra ultra verbena walnut xenon yucca zinc acacia bronze clover dahlia
        ebony fennel ginger holly ivory jade kiwi lilac myrtle nettle""",
}
_SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
_COINED = [first + second for first in _SYLLABLES for second in _SYLLABLES]
_NOTES = (
    'The "{field}" of a "{kind}" is set by the office that files it and decides nothing by itself.',
    'When a customer asks what the "{field}" of a "{kind}" is, look it up and say it as it stands.',
    'A "{kind}" keeps its "{field}" for as long as it is on file, whoever asks.',
    'Do not guess the "{field}" of a "{kind}"; records are the only source.',
    'Customers may call the "{field}" of a "{kind}" by another name; use ours when you call a tool.',
)


class ServiceArgs(Config):
    """Arguments of kind ``service``."""

    level: Literal["tiny", "small", "medium", "long"] = "small"
    """Difficulty: from four tools and a prompt of a few hundred tokens to ten tools and a policy of thousands of words."""
    part: Part = "train"
    """Set of schemas; the two sets have no name in common."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of records and its policy."""

    name: str
    state: str
    """Name of the field that holds the state."""
    states: tuple[str, ...]
    fields: tuple[str, ...]
    """Names of the other fields, without the price."""
    rules: Mapping[Operation, Mapping[str, Verdict]]
    """Verdict by operation and state of the record; of a new record, its requested state."""
    asks: frozenset[Operation]
    """Operations that need the customer's consent."""
    limit: int
    """Largest price that may be refunded; higher ones are transferred."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A customer's request."""

    operation: Operation
    kind: _Kind
    id: str
    """Id of the record; empty: a new record."""
    values: tuple[tuple[str, str], ...] = ()
    """Requested field values."""

    @property
    def facts(self) -> set[str]:
        """Words that a question must contain to get consent."""
        return {self.id, *(value for _, value in self.values)} - {""}


@dataclass(frozen=True, slots=True)
class _Case:
    """All data of a problem, a function of item and arguments."""

    kinds: tuple[_Kind, ...]
    rows: Rows
    script: tuple[_Request | None, ...]
    """The first request, and the request that replaces it when consent is asked for; None: to leave everything as it is."""
    shown: Literal["all", "nothing", "field"]
    """What the first message says about the record: id and values, nothing, or nothing by a customer who knows a field instead of the id."""


class ServiceSource(SessionSource):
    """Endless source; each problem has its own schema."""

    args_kind = ServiceArgs
    args: ServiceArgs

    def __init__(self, name: str, args: ServiceArgs, sandbox: Sandbox | None = None) -> None:
        super().__init__(name, args, sandbox)
        self._level = LEVELS[args.level]
        words = {role: _COINED if self._level.is_coined else text.split() for role, text in _WORDS.items()}
        self._pools = {role: _of_part(args.part, each) for role, each in words.items()}

    def problem(self, item: int) -> Problem:
        case = self._case(item)
        first, last = case.script[0], case.script[-1]
        assert first is not None
        opening = _phrase(first, case) if case.shown == "all" else f'I want to {first.operation} a "{first.kind.name}".'
        policy = _policy(case, self._level.num_words, self._draw(item, "policy"))
        messages = ({"role": "system", "content": policy}, {"role": "user", "content": opening})
        verdict = _verdict(case.rows, last)
        return Problem(item, messages, _DONE if verdict == "do" else verdict)

    def open(self, problem: Problem, seed: int | None = None) -> Session:
        return ServiceSession(self._case(problem.item))

    def demonstration(self, problem: Problem) -> tuple[Mapping[str, Any], ...]:
        case = self._case(problem.item)
        with closing(ServiceSession(case)) as session:
            return recorded(session, _scripted_agent(case))

    def baselines(self, problem: Problem) -> Mapping[str, tuple[Mapping[str, Any], ...]]:
        """Agents that end the conversation at once, without a look or after reading the customer's record."""
        case = self._case(problem.item)
        request = case.script[0]
        assert request is not None
        reads = [calling(f"get_{request.kind.name}", {"id": request.id})] if request.id else []
        policies = {
            "always transfer": [calling("transfer", {})],
            "read, then transfer": [*reads, calling("transfer", {})],
            "read, then decline": [*reads, calling("decline", {})],
        }
        return {name: recorded(ServiceSession(case), turns) for name, turns in policies.items()}

    def obliging(self, problem: Problem) -> tuple[Mapping[str, Any], ...]:
        """An agent that does what the customer wants and ignores the policy. It knows the script, so it is not a trivial baseline."""
        case = self._case(problem.item)
        return recorded(ServiceSession(case), _scripted_agent(case, heeds_policy=False))

    def _draw(self, item: int, purpose: str) -> random.Random:
        args = self.args
        return random.Random(f"service/{args.level}/{args.part}/{args.seed}/{item}/{purpose}")

    def _case(self, item: int) -> _Case:
        level, draw = self._level, self._draw(item, "case")
        names = _Names(self._pools, level.id_length, draw)
        kinds = tuple(_kind(level, names, draw) for _ in range(level.num_kinds))
        rows = {kind.name: _rows(kind, level.num_rows, names, draw) for kind in kinds}
        kind = draw.choice(kinds)
        operation = draw.choice(tuple(kind.rules))
        first = _request(operation, kind, rows, names, draw)
        script: tuple[_Request | None, ...] = (first,)
        # A customer changes the request when asked for consent, which an agent asks for only where the policy allows the request.
        if operation in kind.asks and _verdict(rows, first) == "do" and draw.random() < level.wavers:
            other = first
            while other == first:
                other = _request(operation, kind, rows, names, draw)
            script = (first, None if draw.random() < 0.25 else other)
        is_withheld = operation != "create" and draw.random() < level.withheld
        return _Case(kinds, rows, script, draw.choice(("nothing", "field")) if is_withheld else "all")


class _Names:
    """Draws the names of one problem from the words of one part."""

    def __init__(self, pools: Mapping[str, Sequence[str]], id_length: int, draw: random.Random) -> None:
        self._pools, self._id_length, self._draw, self._used = pools, id_length, draw, set[str]()

    def new(self, role: str) -> str:
        """A name that nothing else in the problem has."""
        return self._unused(lambda: self._draw.choice(self._pools[role]))

    def id(self) -> str:
        return self._unused(lambda: _id(self._draw, self._id_length)) if self._id_length else self.new("value")

    def values(self, num: int) -> list[str]:
        """``num`` different values."""
        return self._draw.sample(self._pools["value"], num)

    def _unused(self, drawn: Callable[[], str]) -> str:
        while (word := drawn()) in self._used:
            pass
        self._used.add(word)
        return word


def _id(draw: random.Random, length: int) -> str:
    """Alternating letters and digits, which most tokenizers split alike in every context."""
    return "".join(draw.choice("0123456789" if place % 2 else "bcdfghjkmnpqrstvwxz") for place in range(length))


def _of_part(part: Part, words: Sequence[str]) -> Sequence[str]:
    """Every third word is held out. Both parts have all syllables at both places, as the number of syllables is not a multiple of 3."""
    return [word for place, word in enumerate(words) if (place % 3 == 2) is (part == "held_out")]


def _kind(level: _Level, names: _Names, draw: random.Random) -> _Kind:
    states = tuple(names.new("state") for _ in range(level.num_states))
    operations = draw.sample(level.operations, level.num_operations)
    return _Kind(
        name=names.new("kind"),
        state=names.new("field"),
        states=states,
        fields=tuple(names.new("field") for _ in range(level.num_fields)),
        rules={operation: _rules(states, draw) for operation in operations},
        asks=frozenset(operation for operation in operations if draw.random() < level.asks),
        limit=10 * draw.randrange(20, 81),
    )


def _rules(states: Sequence[str], draw: random.Random) -> dict[str, Verdict]:
    """A random verdict for each state; with three states or more, each verdict occurs."""
    verdicts: list[Verdict] = ["do", "decline", "transfer", *draw.choices(("do", "decline", "transfer"), k=len(states))]
    return dict(zip(draw.sample(states, len(states)), verdicts, strict=False))


def _rows(kind: _Kind, num: int, names: _Names, draw: random.Random) -> dict[str, Row]:
    columns = {field: names.values(num) for field in kind.fields}
    rows = {}
    for place in range(num):
        row = {kind.state: draw.choice(kind.states), **{field: values[place] for field, values in columns.items()}}
        if "refund" in kind.rules:
            row[PRICE] = str(draw.randrange(1, 1000))
        rows[names.id()] = row
    return rows


def _request(operation: Operation, kind: _Kind, rows: Rows, names: _Names, draw: random.Random) -> _Request:
    """A random request, preferably one that the policy allows; over all operations, half are allowed."""
    if operation == "create":
        state = draw.choice(kind.states)
        values = dict(zip(kind.fields, names.values(len(kind.fields)), strict=True))
        return _Request(operation, kind, "", ((kind.state, state), *values.items()))
    found = [_Request(operation, kind, key) for key in rows[kind.name]]
    if operation == "change":
        field = draw.choice(kind.fields)
        (value,) = names.values(1)
        found = [replace(each, values=((field, value),)) for each in found if rows[kind.name][each.id][field] != value]
    is_allowed = draw.random() < 0.7
    preferred = [each for each in found if (_verdict(rows, each) == "do") is is_allowed]
    return draw.choice(preferred or found)


class ServiceSession(Session):
    """One conversation. State: the records, the order of reads and changes, and the call that ended the conversation."""

    def __init__(self, case: _Case) -> None:
        self._case = case
        self._rows = {kind: {key: dict(row) for key, row in rows.items()} for kind, rows in case.rows.items()}
        self._read: list[str] = []
        self._acted_unread: list[str] = []
        """Ids of records that a call changed before any call had read them."""
        self._ending = ""
        self.tools = tuple(self._make_tools())

    @property
    def is_over(self) -> bool:
        return bool(self._ending)

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        return _customer(self._case, messages)[0]

    def digest(self) -> str:
        state = json.dumps([self._rows, self._read, self._acted_unread, self._ending], sort_keys=True)
        return blake2b(state.encode(), digest_size=16).hexdigest()

    def score(self, answer: Answer) -> Score:
        goal, wanted = ServiceSession(self._case), self._case.script[-1]
        if (verdict := _verdict(goal._rows, wanted)) != "do":
            goal._ending = verdict
        elif wanted is not None:
            goal._carry_out(wanted)
        parts = {
            "database": float(self._rows == goal._rows),
            "ending": float(self._ending == goal._ending),
            "read": float(not self._acted_unread and (wanted is None or wanted.id in ("", *self._read))),
            "heard": float(_customer(self._case, answer.messages)[1] == len(self._case.script) - 1),
            "asked": float(not _acts_unasked(self._case, answer.messages)),
        }
        wrong = ", ".join(name for name, right in parts.items() if not right)
        return Score.of(not wrong, parts, f"not right: {wrong}" if wrong else "")

    def _make_tools(self) -> Iterator[Tool]:
        for kind in self._case.kinds:
            yield _tool(f"get_{kind.name}", "Reads one.", {"id": _TEXT}, partial(self._get, kind))
            if len(kind.fields) > 1:
                choice = {"field": {**_TEXT, "enum": [kind.state, *kind.fields]}, "value": _TEXT}
                yield _tool(f"list_{kind.name}", "Gives ids.", choice, partial(self._list, kind))
            for operation in kind.rules:
                wants: dict[str, Any] = {"id": _TEXT}
                if operation == "change":
                    wants |= {"field": {**_TEXT, "enum": list(kind.fields)}, "value": _TEXT}
                elif operation == "create":
                    wants = dict.fromkeys((kind.state, *kind.fields), _TEXT)
                yield _tool(f"{operation}_{kind.name}", "Does it.", wants, partial(self._act, kind, operation))
        for ending in ("transfer", "decline"):
            yield _tool(ending, "Ends it.", {}, partial(self._end, ending))

    def _get(self, kind: _Kind, arguments: Mapping[str, str]) -> str | None:
        row = self._rows[kind.name].get(arguments["id"])
        if row is None:
            return None
        self._read.append(arguments["id"])
        return json.dumps({"id": arguments["id"], **row})

    def _list(self, kind: _Kind, arguments: Mapping[str, str]) -> str | None:
        rows = self._rows[kind.name].items()
        return json.dumps([key for key, row in rows if row.get(arguments["field"]) == arguments["value"]])

    def _act(self, kind: _Kind, operation: Operation, arguments: Mapping[str, str]) -> str | None:
        """Execute the operation even where the policy forbids it: following the policy is the agent's task."""
        values = dict(arguments)
        key = values.pop("id", "")
        if operation == "change":
            values = {values["field"]: values["value"]}
        is_known = operation == "create" or (key in self._rows[kind.name] and values.keys() <= {*kind.fields})
        request = _Request(operation, kind, key, tuple(values.items()))
        if is_known and request.id not in ("", *self._read):
            self._acted_unread.append(request.id)
        return self._carry_out(request) if is_known else None

    def _carry_out(self, request: _Request) -> str:
        """Change the records; returns the tool's result."""
        rows, key = self._rows[request.kind.name], request.id
        if request.operation == "create":
            used = {each for rows in self._rows.values() for each in rows}
            key = next(each for number in count() if (each := _id(random.Random(number), 4)) not in used)
        rows[key] = rows.get(key, {}) | dict(request.values)
        if request.operation in _STATE_AFTER:
            rows[key][request.kind.state] = _STATE_AFTER[request.operation]
        return json.dumps({"id": key, **rows[key]})

    def _end(self, ending: str, arguments: Mapping[str, str]) -> str:
        self._ending = self._ending or ending
        return f"{ending}: done"


def _tool(
    name: str, description: str, wants: Mapping[str, Any], run: Callable[[Mapping[str, str]], str | None]
) -> Tool:
    """A tool whose arguments ``wants`` are all required strings; ``run`` returns None for an unknown record or field."""

    def call(arguments: Mapping[str, str]) -> ToolResult:
        text = run(arguments)
        return ToolResult(text or "error: there is none", Outcome.WRONG if text is None else Outcome.OK)

    return string_tool(name, description, wants, call)


# The policy


def _verdict(rows: Rows, request: _Request | None) -> Verdict:
    """The policy's verdict on a request; leaving everything as it is (None) is allowed."""
    if request is None:
        return "do"
    kind = request.kind
    row = dict(request.values) if request.operation == "create" else rows[kind.name][request.id]
    verdict = kind.rules[request.operation][row[kind.state]]
    is_dear = request.operation == "refund" and int(row[PRICE]) > kind.limit
    return "transfer" if verdict == "do" and is_dear else verdict


def _rule(kind: _Kind, operation: Operation, state: str) -> str:
    verdict = kind.rules[operation][state]
    allowed = "allowed after a yes" if operation in kind.asks else "allowed"
    return f'"{state}": {allowed if verdict == "do" else verdict}.'


def _dear(kind: _Kind) -> str:
    return f'"{PRICE}" is above {kind.limit}: transfer.'


def _policy(case: _Case, num_words: int, draw: random.Random) -> str:
    """The policy's rules in random order, with irrelevant notes until it has ``num_words`` words."""
    lines = []
    for kind in case.kinds:
        for operation, rules in kind.rules.items():
            for state in rules:
                lines.append(f'{operation}_{kind.name} where "{kind.state}" is {_rule(kind, operation, state)}')
        if "refund" in kind.rules:
            lines.append(f"refund_{kind.name} that is allowed, where {_dear(kind)}")
    draw.shuffle(lines)
    left = num_words - sum(len(line.split()) for line in lines)
    while left > 0:
        kind = draw.choice(case.kinds)
        note = draw.choice(_NOTES).format(kind=kind.name, field=draw.choice(kind.fields))
        lines.insert(draw.randrange(len(lines) + 1), note)
        left -= len(note.split())
    last = (
        'Read records first. Decline and transfer by a call. For a yes ask with action, "id", all new values. '
        'A turn without "?" ends it.'
    )
    return "\n".join([*lines, last])


# The customer


def _phrase(request: _Request, case: _Case) -> str:
    """The customer's message for a request, with the facts that the customer knows."""
    name = f'the "{request.kind.name}" "{request.id}"' if request.id else f'a "{request.kind.name}"'
    if request.id and case.shown == "field":
        field = request.kind.fields[0]  # its values are unique
        name = f'the "{request.kind.name}" with "{field}" "{case.rows[request.kind.name][request.id][field]}"'
    values = " and ".join(f'"{field}" "{value}"' for field, value in request.values)
    return f"I want to {request.operation} {name}" + (f", to have {values}." if values else ".")


def _customer(case: _Case, messages: Sequence[Mapping[str, Any]]) -> tuple[str | None, int]:
    """The customer's answer to the last turn, None at the end of the conversation; and the index of the current request in the script."""
    place, reply = 0, None
    ids = {key for rows in case.rows.values() for key in rows}
    turns = [each for each in messages if each["role"] == "assistant" and not each.get("tool_calls")]
    for number, turn in enumerate(turns):
        text, wanted = spoken(str(turn["content"] or "")), case.script[place]
        named = set(re.findall(r"[^\W_]+", text))
        if not re.search("[?？]", text) or wanted is None or number >= _PATIENCE:
            reply = None
        elif not wanted.facts <= named or named & ids - wanted.facts or not _names(text, wanted.operation):
            # A question that names other records, too, or does not name the operation, or negates it, gets no consent.
            reply = _phrase(wanted, case)
        elif place + 1 == len(case.script):
            reply = YES
        else:
            place += 1
            other = case.script[place]
            reply = "No, leave it as it is." if other is None else f"No. {_phrase(other, case)}"
    return reply, place


def _names(text: str, operation: Operation) -> bool:
    """Whether ``text`` names the operation, in any form of the word, and no negation stands before it in the same clause."""
    stem = operation.removesuffix("e")  # also of changing and created
    for clause in re.split(r"[.!?？\n,;:]|\b(?:so|but)\b", text.lower()):
        words = re.findall(r"[^\W_]+(?:['’]t)?", clause)
        place = next((place for place, word in enumerate(words) if word.startswith(stem)), None)
        if place is not None and not any(word in _NOT or word.endswith(("'t", "’t")) for word in words[:place]):
            return True
    return False


def _acts_unasked(case: _Case, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an operation that needs consent was called without it: the customer's last message before the call was not a yes."""
    asks = {f"{operation}_{kind.name}" for kind in case.kinds for operation in kind.asks}
    last = ""
    for message in messages:
        if message["role"] == "user":
            last = str(message["content"])
        elif message["role"] == "tool" and message.get("name") in asks and last != YES:
            return True
    return False


# The agent that is always correct


def _scripted_agent(case: _Case, heeds_policy: bool = True) -> Sequence[Mapping[str, Any]]:
    """The agent's and the customer's turns, without tool results. The agent quotes the rule that it follows, so that a small network can
    learn the task as copying. Without ``heeds_policy`` it does whatever the customer asks."""
    turns: list[Mapping[str, Any]] = []

    def say(text: str) -> None:
        turns.append({"role": "assistant", "content": text})
        if (reply := _customer(case, turns)[0]) is not None:
            turns.append({"role": "user", "content": reply})

    if case.shown != "all":
        say("Which one?")
    for place, request in enumerate(case.script):
        if request is None:
            break
        kind, operation, values = request.kind, request.operation, dict(request.values)
        row = case.rows[kind.name].get(request.id, values)
        if request.id:
            if case.shown == "field":
                turns.append(calling(f"list_{kind.name}", {"field": kind.fields[0], "value": row[kind.fields[0]]}))
            turns.append(calling(f"get_{kind.name}", {"id": request.id}))
        verdict, rule = _verdict(case.rows, request), _rule(kind, operation, row[kind.state])
        if verdict == "transfer" and kind.rules[operation][row[kind.state]] == "do":
            rule += f" But {_dear(kind)}"
        if heeds_policy and verdict != "do":
            return [*turns, calling(verdict, {}, rule)]
        if operation in kind.asks:
            named = [f'"{request.id}"'] * bool(request.id) + [f'"{name}" "{value}"' for name, value in values.items()]
            say(f"{rule} Shall I {operation} {', '.join(named)}?")
            rule = ""
        if place + 1 == len(case.script):
            if operation == "change":
                ((field, value),) = request.values
                values = {"field": field, "value": value}
            arguments = {"id": request.id} | values if request.id else values
            turns.append(calling(f"{operation}_{kind.name}", arguments, rule))
    say(_DONE)
    return turns
