"""Simulated customer service: database, policy, tools and customer, all drawn from a seed.

The model talks with a customer who wants something done to a record, and may do it where the policy in the system message
allows it: by the record's state, which has to be looked up, and mostly after the customer's yes. Where the policy says so it
must decline or hand over to a person instead, each by a call. Success is the data base at the end, compared whole, as in
tau-bench (2406.12045), and beside it: that the conversation ended by the right call or by none, that the record was read and
nothing done without the yes that it needs, and that the customer, who may change his mind when he is asked, was heard to the
end. So an agent that says or does nothing is never right, and one that hands over without a look hardly ever.

Every problem has a schema of its own. The names in those of part ``held_out`` occur in none of part ``train``.
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
from stretto.tasks.task import Answer, Problem, Score, Session, Tool

Operation = Literal["cancel", "change", "refund", "create"]
Verdict = Literal["do", "decline", "transfer"]
"""What the policy says of a request; the last two are calls that end the conversation."""
Part = Literal["train", "held_out"]
Row = dict[str, str]
Rows = Mapping[str, Mapping[str, Row]]
"""By kind and id."""

YES: Final = "Yes."
PRICE: Final = "price"
_DONE = "Done."
_PATIENCE = 16
"""Turns after which a customer goes."""
_STATE_AFTER: Mapping[Operation, str] = {"cancel": "cancelled", "refund": "refunded"}
_TEXT = {"type": "string"}


@dataclass(frozen=True, slots=True)
class _Level:
    """How much there is of everything."""

    is_coined: bool
    """Names are made of syllables, and mean nothing; else words of lists."""
    num_kinds: int
    """Of records."""
    num_fields: int
    """Of a record, beside its id, its state and a price."""
    num_states: int
    num_rows: int
    """Of each kind."""
    operations: tuple[Operation, ...]
    num_operations: int
    """Of each kind, drawn from these."""
    asks: float
    """Share of operations that want the customer's yes."""
    withheld: float
    """Share of customers who have to be asked which record they mean."""
    wavers: float
    """Share of customers who want something else when they are asked for a yes."""
    id_length: int = 4
    """Characters; 0: ids are names too, and copied as these are. A letter and a digit were not, after 600 steps that taught
    a small network to copy all names."""
    num_words: int = 0
    """Of the policy, at least."""


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
    """Of kind ``service``."""

    level: Literal["tiny", "small", "medium", "long"] = "small"
    """From a prompt of a few hundred tokens with four tools to a policy of thousands of words with ten."""
    part: Part = "train"
    """Of the schemas: the two have no names in common."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of records."""

    name: str
    state: str
    """Name of the field that holds the state."""
    states: tuple[str, ...]
    fields: tuple[str, ...]
    """The others, but for the price."""
    rules: Mapping[Operation, Mapping[str, Verdict]]
    """By the record's state, or that which a new one is to have."""
    asks: frozenset[Operation]
    """What needs the customer's yes."""
    limit: int
    """The largest price that is refunded; above, it is for a person."""


@dataclass(frozen=True, slots=True)
class _Request:
    """What a customer wants."""

    operation: Operation
    kind: _Kind
    id: str
    """Empty: of a record that is to be made."""
    values: tuple[tuple[str, str], ...] = ()
    """Fields and what they are to be."""

    @property
    def facts(self) -> set[str]:
        """What a question must name to get a yes."""
        return {self.id, *(value for _, value in self.values)} - {""}


@dataclass(frozen=True, slots=True)
class _Case:
    """A problem, whole. A function of item and arguments."""

    kinds: tuple[_Kind, ...]
    rows: Rows
    script: tuple[_Request | None, ...]
    """What the customer wants, and what instead when he is asked for a yes; None: that all is left as it is."""
    shown: Literal["all", "nothing", "field"]
    """What his first message says of the record; ``field``: nothing, and he knows no id but a field."""


class ServiceSource(SessionSource):
    """Endless; each problem with a schema of its own."""

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
        said = _told(first, case) if case.shown == "all" else f'I want to {first.operation} a "{first.kind.name}".'
        policy = _policy(case, self._level.num_words, self._draw(item, "policy"))
        messages = ({"role": "system", "content": policy}, {"role": "user", "content": said})
        verdict = _verdict(case.rows, last)
        return Problem(item, messages, _DONE if verdict == "do" else verdict)

    def open(self, problem: Problem, seed: int | None = None) -> Session:
        return ServiceSession(self._case(problem.item))

    def demonstration(self, problem: Problem) -> tuple[Mapping[str, Any], ...]:
        case = self._case(problem.item)
        with closing(ServiceSession(case)) as session:
            return recorded(session, _played(case))

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
        """An agent that does all that the customer wants and reads no policy. It knows his mind, so it is no baseline."""
        case = self._case(problem.item)
        return recorded(ServiceSession(case), _played(case, heeds_policy=False))

    def _draw(self, item: int, what: str) -> random.Random:
        args = self.args
        return random.Random(f"service/{args.level}/{args.part}/{args.seed}/{item}/{what}")

    def _case(self, item: int) -> _Case:
        level, draw = self._level, self._draw(item, "case")
        names = _Names(self._pools, level.id_length, draw)
        kinds = tuple(_kind(level, names, draw) for _ in range(level.num_kinds))
        rows = {kind.name: _rows(kind, level.num_rows, names, draw) for kind in kinds}
        kind = draw.choice(kinds)
        operation = draw.choice(tuple(kind.rules))
        first = _request(operation, kind, rows, names, draw)
        script: tuple[_Request | None, ...] = (first,)
        # he wavers when he is asked, and he is asked only for what is allowed
        if operation in kind.asks and _verdict(rows, first) == "do" and draw.random() < level.wavers:
            other = first
            while other == first:
                other = _request(operation, kind, rows, names, draw)
            script = (first, None if draw.random() < 0.25 else other)
        is_withheld = operation != "create" and draw.random() < level.withheld
        return _Case(kinds, rows, script, draw.choice(("nothing", "field")) if is_withheld else "all")


class _Names:
    """Words of one part."""

    def __init__(self, pools: Mapping[str, Sequence[str]], id_length: int, draw: random.Random) -> None:
        self._pools, self._id_length, self._draw, self._used = pools, id_length, draw, set[str]()

    def new(self, role: str) -> str:
        """One that no other thing of the problem is called."""
        return self._unused(lambda: self._draw.choice(self._pools[role]))

    def id(self) -> str:
        return self._unused(lambda: _id(self._draw, self._id_length)) if self._id_length else self.new("value")

    def values(self, num: int) -> list[str]:
        """Different from each other."""
        return self._draw.sample(self._pools["value"], num)

    def _unused(self, drawn: Callable[[], str]) -> str:
        while (word := drawn()) in self._used:
            pass
        self._used.add(word)
        return word


def _id(draw: random.Random, length: int) -> str:
    """Letters and digits by turns: most tokenizers cut it alike wherever it stands."""
    return "".join(draw.choice("0123456789" if place % 2 else "bcdfghjkmnpqrstvwxz") for place in range(length))


def _of_part(part: Part, words: Sequence[str]) -> Sequence[str]:
    """A third is held out. Of coined words both parts have all syllables at both places: their number is no multiple of 3."""
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
    """Each verdict of at least one state, where there are three; in any order."""
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
    """Mostly of what is allowed, where there is such a record: half are, all in all."""
    if operation == "create":
        state = draw.choice(kind.states)
        values = dict(zip(kind.fields, names.values(len(kind.fields)), strict=True))
        return _Request(operation, kind, "", ((kind.state, state), *values.items()))
    found = [_Request(operation, kind, key) for key in rows[kind.name]]
    if operation == "change":
        field = draw.choice(kind.fields)
        (value,) = names.values(1)
        found = [replace(each, values=((field, value),)) for each in found if rows[kind.name][each.id][field] != value]
    is_right = draw.random() < 0.7
    liked = [each for each in found if (_verdict(rows, each) == "do") is is_right]
    return draw.choice(liked or found)


class ServiceSession(Session):
    """One conversation: the rows as its calls have left them."""

    def __init__(self, case: _Case) -> None:
        self._case = case
        self._rows = {kind: {key: dict(row) for key, row in rows.items()} for kind, rows in case.rows.items()}
        self._read: list[str] = []
        self._acted_unread: list[str] = []
        """Ids of records that a call changed before any call had read them."""
        self._ending = ""
        self.tools = tuple(self._made())

    @property
    def is_over(self) -> bool:
        return bool(self._ending)

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        return _heard(self._case, messages)[0]

    def digest(self) -> str:
        told = json.dumps([self._rows, self._read, self._acted_unread, self._ending], sort_keys=True)
        return blake2b(told.encode(), digest_size=16).hexdigest()

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
            "heard": float(_heard(self._case, answer.messages)[1] == len(self._case.script) - 1),
            "asked": float(not _acts_unasked(self._case, answer.messages)),
        }
        wrong = ", ".join(name for name, right in parts.items() if not right)
        return Score.of(not wrong, parts, f"not right: {wrong}" if wrong else "")

    def _made(self) -> Iterator[Tool]:
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

    def _get(self, kind: _Kind, told: Mapping[str, str]) -> str | None:
        row = self._rows[kind.name].get(told["id"])
        if row is None:
            return None
        self._read.append(told["id"])
        return json.dumps({"id": told["id"], **row})

    def _list(self, kind: _Kind, told: Mapping[str, str]) -> str | None:
        rows = self._rows[kind.name].items()
        return json.dumps([key for key, row in rows if row.get(told["field"]) == told["value"]])

    def _act(self, kind: _Kind, operation: Operation, told: Mapping[str, str]) -> str | None:
        """Whatever the policy says: to keep to it is the agent's part."""
        values = {name: value for name, value in told.items() if name != "id"}
        if operation == "change":
            values = {values["field"]: values["value"]}
        is_known = operation == "create" or (told["id"] in self._rows[kind.name] and values.keys() <= {*kind.fields})
        request = _Request(operation, kind, told.get("id", ""), tuple(values.items()))
        if is_known and request.id not in ("", *self._read):
            self._acted_unread.append(request.id)
        return self._carry_out(request) if is_known else None

    def _carry_out(self, request: _Request) -> str:
        """What the tool says of it."""
        rows, key = self._rows[request.kind.name], request.id
        if request.operation == "create":
            taken = {each for rows in self._rows.values() for each in rows}
            key = next(each for number in count() if (each := _id(random.Random(number), 4)) not in taken)
        rows[key] = rows.get(key, {}) | dict(request.values)
        if request.operation in _STATE_AFTER:
            rows[key][request.kind.state] = _STATE_AFTER[request.operation]
        return json.dumps({"id": key, **rows[key]})

    def _end(self, ending: str, told: Mapping[str, str]) -> str:
        self._ending = self._ending or ending
        return f"{ending}: done"


def _tool(
    name: str, description: str, wants: Mapping[str, Any], run: Callable[[Mapping[str, str]], str | None]
) -> Tool:
    """Its arguments are texts, all of them needed; ``run`` gives None where there is nothing of that name."""
    schema = {"type": "object", "properties": dict(wants), "required": list(wants)}

    def call(told: Mapping[str, Any]) -> ToolResult:
        if told.keys() != wants.keys() or not all(isinstance(value, str) for value in told.values()):
            return ToolResult(f"error: {name} takes {', '.join(wants) or 'nothing'}: texts", Outcome.WRONG, 0.0)
        text = run(told)
        return ToolResult(text or "error: there is none", Outcome.WRONG if text is None else Outcome.OK, 0.0)

    return Tool(name, description, schema, call)


# The policy


def _verdict(rows: Rows, request: _Request | None) -> Verdict:
    """Of a request; of none, that all be left as it is."""
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
    """All that decides, in any order, and at least so many words of what does not."""
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
        'Read records first. Decline and transfer by a call. For a yes ask with the "id" and all new values. '
        'A turn without "?" ends it.'
    )
    return "\n".join([*lines, last])


# The customer


def _told(request: _Request, case: _Case) -> str:
    """A request in his words, with what he knows."""
    name = f'the "{request.kind.name}" "{request.id}"' if request.id else f'a "{request.kind.name}"'
    if request.id and case.shown == "field":
        field = request.kind.fields[0]  # no two records share a value
        name = f'the "{request.kind.name}" with "{field}" "{case.rows[request.kind.name][request.id][field]}"'
    values = " and ".join(f'"{field}" "{value}"' for field, value in request.values)
    return f"I want to {request.operation} {name}" + (f", to have {values}." if values else ".")


def _heard(case: _Case, messages: Sequence[Mapping[str, Any]]) -> tuple[str | None, int]:
    """What he answers to the last turn, None: he goes; and the place in the script that he has come to."""
    place, reply = 0, None
    ids = {key for rows in case.rows.values() for key in rows}
    turns = [each for each in messages if each["role"] == "assistant" and not each.get("tool_calls")]
    for number, turn in enumerate(turns):
        text, wanted = str(turn["content"]), case.script[place]
        named = set(re.findall(r"\w+", text))
        if "?" not in text or wanted is None or number >= _PATIENCE:
            reply = None
        elif not wanted.facts <= named or named & ids - wanted.facts:
            # nor is a question about all records one about his
            reply = _told(wanted, case)
        elif place + 1 == len(case.script):
            reply = YES
        else:
            place += 1
            other = case.script[place]
            reply = "No, leave it as it is." if other is None else f"No. {_told(other, case)}"
    return reply, place


def _acts_unasked(case: _Case, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether something was done without the yes that it needs, as his last word before it."""
    asks = {f"{operation}_{kind.name}" for kind in case.kinds for operation in kind.asks}
    said = ""
    for message in messages:
        if message["role"] == "user":
            said = str(message["content"])
        elif message["role"] == "tool" and message.get("name") in asks and said != YES:
            return True
    return False


# The agent that is always right


def _played(case: _Case, heeds_policy: bool = True) -> Sequence[Mapping[str, Any]]:
    """Its turns and the customer's, without what tools give. It quotes the rule that it follows, so that what a small network has to
    learn is to copy; one that does not heed the policy does all that it is asked."""
    turns: list[Mapping[str, Any]] = []

    def say(text: str) -> None:
        turns.append({"role": "assistant", "content": text})
        if (reply := _heard(case, turns)[0]) is not None:
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
            told = {"id": request.id} | values if request.id else values
            turns.append(calling(f"{operation}_{kind.name}", told, rule))
    say(_DONE)
    return turns
