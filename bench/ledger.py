"""Measure the accuracy of the picture ledger on prompts that people wrote, and of conversations about pictures, against labels by hand.

    python -m bench.ledger PROMPTS.tsv [--rules] [--part dev|test|last|held] [--show]

PROMPTS.tsv has prompts in its first column: those of PartiPrompts, DrawBench, and the COCO captions of TIFA v1.0. The labels, written by
hand before the reader was tried on their prompts, are in ``bench/data/ledger_labels.jsonl``:
by the SHA-256 of a prompt, or with the prompt itself where it is our own. Other prompts are ignored.
A label is a list of demands: "2 dog,brown" (count, noun, colours; ``*``: several), "cat on sofa", "no lamp"; "?sofa" and "sofa?" may be read or not,
"!dog,black" would invert the prompt; "|" and "/" separate alternatives. Conversations are in ``bench/data/dialogues.txt``.
Prints recall and precision by kind of demand, inverted demands, and turns that were understood, asked about, or misunderstood.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from bench.common.measure import bench_parser, table
from stretto.base.errors import UserError
from stretto.base.track import wide_console
from stretto.tasks.shapes.ledger import INVERSE, Ledger, Relation, Thing
from stretto.tasks.shapes.rules import read
from stretto.tasks.shapes.syntax import understand
from stretto.tasks.shapes.turns import Conversation, tell
from stretto.tasks.shapes.words import COLOURS, singular

DATA = Path(__file__).parent / "data"
KINDS = ("things", "counts", "colours", "relations", "absences")
SAME_KIND = {"has": "with", "onto": "on", "into": "in", "over": "above", "near": "next to", "by": "next to"}
_WORDS = "above below at behind through into around against between has by near over past up bats to twice on in next left right with"
_RELATION = re.compile(rf" (?:[a-z]+ing|{_WORDS.replace(' ', '|')})[ /]")


def heads(noun: str, tail: bool = True) -> set[str]:
    """Last words of a noun and, with ``tail``, of what follows its "of": a "cup of tea" may be labelled as a cup or as tea."""
    parts = noun.lower().split(" of ")[: None if tail else 1]
    return {singular(word) for part in parts for word in (part.split()[-1], part.split()[-1].split("-")[-1])}


def same(ledger: Ledger, relation: Relation, demand: str, any_kind: bool = False) -> bool:
    """Whether a relation fulfils one of a label's alternatives."""
    subjects, others = (heads(ledger.thing(id).noun) for id in (relation.subject, relation.other))
    for option in demand.split("|"):
        first, *kinds, last = option.split()
        ends = ({singular(each.lower()) for each in end.split("/")} for end in (first, last))
        wanted = {
            SAME_KIND.get(each, each) for each in " ".join(each for each in kinds if each[0].islower()).split("/")
        }
        start, end = ends
        if (start & subjects and end & others and (any_kind or relation.kind in wanted)) or (
            end & subjects and start & others and (any_kind or INVERSE.get(relation.kind) in wanted)
        ):
            return True
    return False


def part(demand: str) -> tuple[int | None, str, set[str]]:
    """Count, noun and colours of a thing's label."""
    match = re.fullmatch(r"(\*|\d+)?\s*~?([^,=]+?)(?:,(.*))?", demand)
    assert match is not None, demand
    return None if match[1] == "*" else int(match[1] or 1), match[2], set(filter(None, (match[3] or "").split("/")))


@dataclass(frozen=True, slots=True)
class Label:
    """The demands of a label, by what they are about."""

    things: tuple[str, ...]
    relations: tuple[str, ...]
    absences: tuple[str, ...]
    """Nouns that must not be there."""
    optional: tuple[str, ...]
    """What may be read or not."""
    inversions: tuple[str, ...]
    """What would invert the prompt."""

    @classmethod
    def of(cls, text: str) -> Label:
        demands = [each.strip() for each in text.split(";") if each.strip() and not each.strip().startswith("?!")]
        plain = [each for each in demands if each[0] not in "!?" and each[-1] != "?"]
        relations = [each for each in plain if len(each.split()) > 2 and _RELATION.search(each)]
        return cls(
            things=tuple(each for each in plain if each not in relations and not each.startswith("no ")),
            relations=tuple(relations),
            absences=tuple(each[3:] for each in plain if each.startswith("no ")),
            optional=tuple(
                each.strip("?") for each in demands if each[0] == "?" or (each[-1] == "?" and each[0] != "!")
            ),
            inversions=tuple(each[1:].rstrip("?") for each in demands if each[0] == "!"),
        )


def score(ledger: Ledger, label: str, tally: Counter[str]) -> list[str]:
    """Adds hits, missed and false demands of one prompt to ``tally``; returns the differences as text."""
    comparison = _Comparison(ledger, Label.of(label), tally)
    comparison.compare_things()
    comparison.compare_relations()
    comparison.compare_absences()
    comparison.find_inversions()
    return comparison.differences


class _Comparison:
    """A ledger beside a label: counts every demand of the label, and everything else that was read."""

    def __init__(self, ledger: Ledger, label: Label, tally: Counter[str]):
        self.ledger, self.label, self.tally = ledger, label, tally
        self.absent = {noun for each in ledger.absent for noun in heads(each)}
        self.differences: list[str] = []

    def note(self, kind: str, outcome: str, demand: str) -> None:
        self.tally[f"{kind} {outcome}"] += 1
        if outcome != "hit":
            self.differences.append(f"{outcome} {kind}: {demand}")

    def compare_things(self) -> None:
        free, used = list(self.ledger.things), set[int]()
        for demand in sorted(self.label.things, key=lambda each: -len(part(each)[2])):
            count, noun, colours = part(demand)
            own = heads(noun, tail=False)
            exact = [each for each in free if heads(each.noun, tail=False) & own]
            fit = exact or [each for each in self.ledger.things if heads(each.noun) & own and " of " in each.noun]
            self.note("things", "hit" if fit else "missed", demand)
            if fit:
                best = max(fit, key=lambda each: (len(colours & {*each.colours}), each.count == count))
                used.add(best.id)
                if exact:
                    free.remove(best)
                    self._compare_count(demand, count, best.count)
                    self._compare_colours(demand, colours, best)
            elif self.absent & own and not any(heads(each) & own for each in self.label.absences):
                self.note("inverted", "demand", f"absent {noun}")
        optional = {word for each in self.label.optional for word in heads(part(each)[1])}
        for thing in self.ledger.things:
            if thing.id not in used and not heads(thing.noun) & optional:
                self.note("things", "false", thing.noun)

    def _compare_count(self, demand: str, count: int | None, found: int | None) -> None:
        """A demand of one thing is a demand of its count only if several were read."""
        if count != 1:
            self.note("counts", "hit" if found == count else "missed", f"{demand}, read {found}")
        if found not in (1, None, count):
            self.note("counts", "false", f"{demand}, read {found}")

    def _compare_colours(self, demand: str, colours: set[str], thing: Thing) -> None:
        shown = {word for each in thing.colours for word in each.split() if word != "and"}
        for colour in colours:
            self.note("colours", "hit" if colour in shown else "missed", f"{demand}: {shown or colour}")
        if shown and not colours:
            self.note("colours", "false", f"{demand}: {shown}")

    def compare_relations(self) -> None:
        left = list(self.ledger.relations)
        for demand in self.label.relations:
            fulfilled = [each for each in left if same(self.ledger, each, demand)]
            self.note("relations", "hit" if fulfilled else "missed", demand)
            left = [each for each in left if each not in fulfilled]
        optional = [each for each in self.label.optional if len(each.split()) > 2]
        for relation in left:
            if not any(same(self.ledger, relation, each, any_kind=True) for each in optional):
                subject, other = (self.ledger.thing(id).noun for id in (relation.subject, relation.other))
                self.note("relations", "false", f"{subject} {relation.kind} {other}")

    def compare_absences(self) -> None:
        for demand in self.label.absences:
            own = heads(demand)
            self.note("absences", "hit" if own & self.absent else "missed", demand)
            is_there = any(own & heads(each.noun, tail=False) for each in self.ledger.things)
            if is_there and not own & self.absent and not any(own & heads(part(each)[1]) for each in self.label.things):
                self.note("inverted", "demand", f"shows {demand}")
        optional = [each[3:] for each in self.label.optional if each.startswith("no ")]
        for noun in self.ledger.absent:
            if not any(heads(noun) & heads(each) for each in (*self.label.absences, *optional)):
                self.note("absences", "false", noun)

    def find_inversions(self) -> None:
        for demand in self.label.inversions:
            if self._is_inverted(demand):
                self.note("inverted", "demand", demand)

    def _is_inverted(self, demand: str) -> bool:
        """Whether the ledger has what ``demand`` forbids: a relation, a thing, an absence, or a property of a thing."""
        things = self.ledger.things
        if len(demand.split()) > 2 and "," not in demand:
            return any(same(self.ledger, each, demand) for each in self.ledger.relations)
        if demand.startswith(("thing ", "no ")):
            return bool(heads(demand) & (self.absent if demand[0] == "n" else {each.noun for each in things}))
        text, _, value = demand.partition("=")
        count, noun, colours = part(text)
        named = [each for each in things if heads(each.noun) & heads(noun)]
        if value:
            return any(str(each.count) == value or value in each.qualities for each in named)
        return any(colours <= {*each.colours} and count in (1, each.count) for each in named)


def dialogues(show: bool) -> None:
    tally: Counter[str] = Counter()
    for dialogue in (DATA / "dialogues.txt").read_text(encoding="utf-8").split("\n\n"):
        conversation = Conversation()
        for line in (each for each in dialogue.splitlines() if " => " in f"{each} " and not each.startswith("#")):
            text, _, expected = (each.strip() for each in line.partition("=>"))
            label = re.sub(
                rf"((?:\b(?:{'|'.join(COLOURS)}) )+)([\w ]+)",
                lambda match: f"{match[2]},{match[1].strip().replace(' ', '/')}",
                expected,
            )
            try:
                reply = tell(conversation, text)
            except UserError:
                tally["refused"] += 1
                continue
            conversation = reply.conversation
            differences = score(conversation.now, re.sub('"[^"]*"|^[?]$', "", label), Counter())
            is_right = expected != "?" and not [
                each for each in differences if not re.match("false rel|.* absences", each)
            ]
            outcome = "asked" if reply.questions else "understood" if is_right else "misunderstood"
            tally[outcome] += 1
            if show and outcome == "misunderstood":
                print(f"{text!r} => {expected!r}: {differences}")
    print("turns of dialogues:", dict(tally))


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--rules", action="store_true", help="the rules alone, as without spaCy")
    parser.add_argument(
        "--part",
        choices=("dev", "test", "last", "held"),
        help="prompts for writing the reader, for correcting it, tried last, or labelled before its relations were changed",
    )
    parser.add_argument("--show", action="store_true", help="print all differences from the labels")
    args = parser.parse_args()
    prompts = [line.split("\t")[0].strip() for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    known = {hashlib.sha256(each.encode()).hexdigest()[:16]: each for each in prompts}
    tally, num = Counter[str](), 0
    for entry in map(json.loads, (DATA / "ledger_labels.jsonl").read_text(encoding="utf-8").splitlines()):
        prompt = entry.get("prompt") or known.get(entry["sha256"])
        own = entry.get("set") or ("dev", "test")[hashlib.sha256((prompt or "").encode()).digest()[0] % 2]
        if prompt is None or args.part not in (None, own):
            continue
        num += 1
        wrong = score((read if args.rules else understand)(prompt), entry["label"], tally)
        if args.show and wrong:
            print("\n    ".join((prompt, *wrong)))
    shown = table(f"the ledger on {num} prompts", "", "recall", "precision", "demands")
    for kind in KINDS:
        hit, missed, false = (tally[f"{kind} {outcome}"] for outcome in ("hit", "missed", "false"))
        shown.add_row(kind, f"{hit / max(1, hit + missed):.3f}", f"{hit / max(1, hit + false):.3f}", str(hit + missed))
    wide_console().print(shown)
    print("inverted demands:", tally["inverted demand"])
    dialogues(args.show)


if __name__ == "__main__":
    main()
