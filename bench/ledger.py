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
from pathlib import Path

from bench.common.measure import bench_parser, table, wide_console
from stretto.base.errors import UserError
from stretto.tasks.shapes.ledger import INVERSE, Ledger, Relation, read
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


def score(ledger: Ledger, label: str, tally: Counter[str]) -> list[str]:
    """Adds hits, missed and false demands of one prompt to ``tally``; returns the differences as text."""
    wrong: list[str] = []

    def note(kind: str, outcome: str, demand: str) -> None:
        tally[f"{kind} {outcome}"] += 1
        wrong.extend([f"{outcome} {kind}: {demand}"] if outcome != "hit" else [])

    demands = [each.strip() for each in label.split(";") if each.strip() and not each.strip().startswith("?!")]
    loose = [each.strip("?") for each in demands if each[0] == "?" or (each[-1] == "?" and each[0] != "!")]
    plain = [each for each in demands if each[0] not in "!?" and each[-1] != "?"]
    relations = [each for each in plain if len(each.split()) > 2 and _RELATION.search(each)]
    nouns = [each for each in plain if each not in relations and not each.startswith("no ")]
    absent, lacking = (
        {noun for each in ledger.absent for noun in heads(each)},
        [each[3:] for each in plain if each.startswith("no ")],
    )
    free, used = list(ledger.things), set[int]()
    for demand in sorted(nouns, key=lambda each: -len(part(each)[2])):
        count, noun, colours = part(demand)
        own = heads(noun, tail=False)
        exact = [each for each in free if heads(each.noun, tail=False) & own]
        fit = exact or [each for each in ledger.things if heads(each.noun) & own and " of " in each.noun]
        note("things", "hit" if fit else "missed", demand)
        if not fit and absent & own and not any(heads(each) & own for each in lacking):
            note("inverted", "demand", f"absent {noun}")
        if not fit:
            continue
        best = max(fit, key=lambda each: (len(colours & {*each.colours}), each.count == count))
        used.add(best.id)
        if not exact:
            continue
        free.remove(best)
        if count != 1 or best.count not in (1, None):
            note(
                "counts",
                "hit" if best.count == count else "missed" if count != 1 else "false",
                f"{demand}, read {best.count}",
            )
        if best.count not in (1, None, count) and count != 1:
            note("counts", "false", f"{demand}, read {best.count}")
        shown = {word for each in best.colours for word in each.split() if word != "and"}
        for colour in colours or ({"any"} if shown else set()):
            note(
                "colours",
                "hit" if colour in shown else "missed" if colours else "false",
                f"{demand}: {shown or colour}",
            )
    may = {word for each in loose for word in heads(part(each)[1])}
    for thing in ledger.things:
        if thing.id not in used and not heads(thing.noun) & may:
            note("things", "false", thing.noun)
    left = list(ledger.relations)
    for demand in relations:
        fulfilled = [each for each in left if same(ledger, each, demand)]
        note("relations", "hit" if fulfilled else "missed", demand)
        left = [each for each in left if each not in fulfilled]
    for relation in left:
        if not any(len(each.split()) > 2 and same(ledger, relation, each, any_kind=True) for each in loose):
            note(
                "relations",
                "false",
                f"{ledger.thing(relation.subject).noun} {relation.kind} {ledger.thing(relation.other).noun}",
            )
    for demand in lacking:
        note("absences", "hit" if heads(demand) & absent else "missed", demand)
        is_there = any(heads(demand) & heads(each.noun, tail=False) for each in ledger.things)
        if is_there and not heads(demand) & absent and not any(heads(demand) & heads(part(each)[1]) for each in nouns):
            note("inverted", "demand", f"shows {demand}")
    for noun in ledger.absent:
        if not any(
            heads(noun) & heads(each) for each in (*lacking, *(each[3:] for each in loose if each.startswith("no ")))
        ):
            note("absences", "false", noun)
    for demand in (each[1:].rstrip("?") for each in demands if each[0] == "!"):
        if len(demand.split()) > 2 and "," not in demand:
            bad = any(same(ledger, each, demand) for each in ledger.relations)
        elif demand.startswith(("thing ", "no ")):
            bad = bool(heads(demand) & (absent if demand[0] == "n" else {each.noun for each in ledger.things}))
        else:
            label, _, value = demand.partition("=")
            count, noun, colours = part(label)
            of_noun = [each for each in ledger.things if heads(each.noun) & heads(noun)]
            bad = any(
                str(each.count) == value or value in each.qualities
                if value
                else colours <= {*each.colours} and count in (1, each.count)
                for each in of_noun
            )
        if bad:
            note("inverted", "demand", demand)
    return wrong


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
