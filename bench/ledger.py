"""Accuracy of the picture ledger on prompts that people wrote, and of its conversations.

    python -m bench.ledger PROMPTS.tsv [--show]

PROMPTS.tsv: prompts in the first column, for example PartiPrompts and DrawBench. Labels written by hand are in
``bench/data/ledger_labels.jsonl``, one prompt a line: by the SHA-256 of the prompt, or with the prompt itself where it is our own.
Prompts without a label are ignored. A label is a list of demands: "2 dog,brown" (count, noun, colours; ``*``: several), "cat on sofa",
"no lamp", "?sofa" or "sofa?" (may be read or not), "!dog,black" (would invert the prompt), alternatives after "|" and "/".
Conversations are in ``bench/data/dialogues.txt``; a turn counts as understood where the ledger is the expected one, or the program asks.
Prints recall and precision of every kind of demand, and the number of inverted demands.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections import Counter
from pathlib import Path

from bench.common.measure import table, wide_console
from stretto.base.errors import UserError
from stretto.tasks.shapes.ledger import INVERSE, Ledger, Relation, Thing, read
from stretto.tasks.shapes.syntax import understand
from stretto.tasks.shapes.turns import Conversation, tell
from stretto.tasks.shapes.words import COLOURS, singular

DATA = Path(__file__).parent / "data"
KINDS = ("things", "counts", "colours", "relations", "absences")
Pair = tuple[str, str, str]


def head(noun: str) -> str:
    return singular(noun.lower().partition(" of ")[0].split()[-1])


def words(noun: str) -> set[str]:
    """Last words of a noun and of what follows its "of": a "cup of tea" may be labelled as a cup or as tea."""
    last = [part.split()[-1] for part in noun.lower().split(" of ")]
    return {singular(each) for word in last for each in (word, word.split("-")[-1])}


def is_relation(demand: str) -> bool:
    kinds = "above below at behind through into around against between has by near over past up bats to twice on in with next left right"
    return len(demand.split()) > 2 and re.search(rf" (?:[a-z]+ing|{kinds.replace(' ', '|')})[ /]", demand) is not None


def pairs(demand: str) -> set[Pair]:
    """Every (subject, kind, other) that fulfils a relation's label."""
    found = set()
    for option in demand.split("|"):
        subjects, *kinds, others = option.split()
        kind = " ".join(word for word in kinds if word[0].islower())
        for subject in subjects.split("/"):
            for other in others.split("/"):
                found |= {(singular(subject.lower()), each, singular(other.lower())) for each in kind.split("/")}
    return found


def same(ledger: Ledger, relation: Relation, wanted: Pair, any_kind: bool = False) -> bool:
    subjects, others = (words(ledger.thing(id).noun) for id in (relation.subject, relation.other))
    kind = {"has": "with", "onto": "on", "into": "in", "over": "above", "near": "next to", "by": "next to"}.get(
        wanted[1], wanted[1]
    )
    if wanted[0] in subjects and wanted[2] in others and (any_kind or kind == relation.kind):
        return True
    return wanted[2] in subjects and wanted[0] in others and (any_kind or INVERSE.get(kind) == relation.kind)


def part(demand: str) -> tuple[int | None, str, set[str]]:
    found = re.fullmatch(r"(\*|\d+)?\s*~?([^,=]+?)(?:,(.*))?", demand)
    assert found is not None, demand
    count = 1 if found[1] is None else None if found[1] == "*" else int(found[1])
    return count, found[2], set(filter(None, (found[3] or "").split("/")))


def score(ledger: Ledger, label: str, tally: Counter[str]) -> list[str]:
    """Adds the hits, misses and false readings of one prompt to ``tally``; returns them as text."""
    wrong: list[str] = []
    demands = [each.strip() for each in label.split(";") if each.strip() and not each.strip().startswith("?!")]
    plain = [each for each in demands if each[0] not in "!?" and not each.endswith("?")]
    loose = [each.strip("?") for each in demands if each[0] == "?" or (each.endswith("?") and each[0] != "!")]

    def note(kind: str, what: str, demand: str) -> None:
        tally[f"{kind} {what}"] += 1
        if what != "hit":
            wrong.append(f"{what} {kind}: {demand}")

    def invert(demand: str) -> None:
        note("inverted", "demand", demand)

    free: list[Thing] = list(ledger.things)
    matched: list[tuple[str, Thing]] = []
    nouns = [each for each in plain if not is_relation(each) and not each.startswith("no ")]
    for demand in sorted(nouns, key=lambda each: -len(part(each)[2])):
        count, noun, colours = part(demand)
        fit = [each for each in free if head(each.noun) == head(noun)]
        fit = fit or [each for each in ledger.things if head(noun) in words(each.noun) and each.noun.count(" of ")]
        note("things", "hit" if fit else "missed", demand)
        if not fit:
            if any(head(each) == head(noun) for each in ledger.absent) and not any(
                head(each.split()[-1]) == head(noun) for each in plain if each.startswith("no ")
            ):
                invert(f"absent {noun}")
            continue
        best = max(fit, key=lambda each: (len(colours & {*each.colours}), each.count == count))
        if head(best.noun) != head(noun):
            matched.append((noun, best))
            continue
        free.remove(best)
        matched.append((noun, best))
        if count != 1:
            note("counts", "hit" if best.count == count else "missed", f"{demand}, read {best.count}")
        if best.count not in (1, None, count):
            note("counts", "false", f"{demand}, read {best.count}")
        shown = {colour for each in best.colours for colour in each.replace(" and ", " ").split() if colour != "and"}
        for colour in colours:
            note("colours", "hit" if colour in shown else "missed", f"{demand}: {colour}")
        if not colours and shown:
            note("colours", "false", f"{demand}: {shown}")
    used = {id(thing) for _, thing in matched}
    for thing in ledger.things:
        if id(thing) not in used and not any(
            head(part(each)[1]) in words(thing.noun) for each in loose if not is_relation(each)
        ):
            note("things", "false", thing.noun)
    relations = list(ledger.relations)
    for demand in filter(is_relation, plain):
        fit_r = [each for each in relations if any(same(ledger, each, wanted) for wanted in pairs(demand))]
        note("relations", "hit" if fit_r else "missed", demand)
        relations = [each for each in relations if each not in fit_r]
    for each in relations:
        if not any(
            same(ledger, each, wanted, any_kind=True)
            for demand in loose
            if is_relation(demand)
            for wanted in pairs(demand)
        ):
            note("relations", "false", f"{ledger.thing(each.subject).noun} {each.kind} {ledger.thing(each.other).noun}")
    absent = {head(each) for each in ledger.absent}
    lacking = {head(each[3:]) for each in plain if each.startswith("no ")}
    for noun in lacking:
        note("absences", "hit" if noun in absent else "missed", noun)
        if (
            noun not in absent
            and any(noun == head(each.noun) for each in ledger.things)
            and not any(noun == head(part(each)[1]) for each in nouns)
        ):
            invert(f"shows {noun}")
    may = {head(each[3:]) for each in loose if each.startswith("no ")}
    for noun in absent - lacking - may:
        note("absences", "false", noun)
    for demand in (each[1:] for each in demands if each[0] == "!"):
        if is_relation(demand):
            bad = any(same(ledger, each, wanted) for each in ledger.relations for wanted in pairs(demand))
        elif demand.startswith(("thing ", "no ")):
            kind, _, noun = demand.partition(" ")
            bad = head(noun) in (absent if kind == "no" else {head(each.noun) for each in ledger.things})
        else:
            noun, _, value = demand.partition("=")
            count, noun, colours = part(noun)
            bad = any(
                head(each.noun) == head(noun)
                and (
                    str(each.count) == value or value in each.qualities
                    if value
                    else colours <= {*each.colours} and (count == 1 or each.count == count)
                )
                for each in ledger.things
            )
        if bad:
            invert(demand)
    return wrong


def dialogues(show: bool) -> None:
    tally: Counter[str] = Counter()
    for dialogue in (DATA / "dialogues.txt").read_text(encoding="utf-8").split("\n\n"):
        conversation = Conversation()
        lines = [each for each in dialogue.splitlines() if "=>" in each and each[0] != "#" and not each.startswith("#")]
        for line in lines:
            said, _, expected = (each.strip() for each in line.partition("=>"))
            try:
                told = tell(conversation, said)
            except UserError:
                tally["refused"] += 1
                continue
            before, conversation, now = conversation.now, told.conversation, told.conversation.now
            outcome = (
                "asked" if told.questions else "understood" if expected != "?" and fits(now, expected) else "wrong"
            )
            tally[outcome] += 1
            if show and outcome != "understood" and not (outcome == "asked" and expected == "?"):
                print(
                    f"{outcome}: {said!r} => {expected!r}: {told.questions or now} before {before if outcome == 'wrong' else ''}"
                )
    print(dict(tally))


def fits(now: Ledger, expected: str) -> bool:
    tally: Counter[str] = Counter()
    demands = []
    for demand in expected.split(";"):
        *before, noun = demand.split() or [""]
        colours = [each for each in before if each in COLOURS]
        plain = is_relation(demand) or "no" in before or not colours
        number = before[:1] if before[:1] and (before[0].isdecimal() or before[0] == "*") else []
        demands.append(demand if plain else " ".join((*number, f"{noun},{'/'.join(colours)}")))
    wrong = score(now, ";".join(each for each in demands if '"' not in each), tally)
    return not [each for each in wrong if not each.startswith(("false relations", "missed absences", "false absences"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--rules", action="store_true", help="the rules alone, as where no parser is installed")
    parser.add_argument(
        "--half", choices=("dev", "test"), help="prompts that the rules were written on, or those held out"
    )
    parser.add_argument("--show", action="store_true", help="print every reading that differs from its label")
    args = parser.parse_args()
    known = {
        hashlib.sha256(line.split("\t")[0].strip().encode()).hexdigest()[:16]: line.split("\t")[0].strip()
        for line in args.prompts.read_text(encoding="utf-8").splitlines()
    }
    tally: Counter[str] = Counter()
    num = 0
    for line in (DATA / "ledger_labels.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        prompt = entry.get("prompt") or known.get(entry["sha256"])
        if prompt is None:
            continue
        half = "test" if hashlib.sha256(prompt.encode()).digest()[0] % 2 else "dev"
        if args.half not in (None, half):
            continue
        num += 1
        wrong = score((read if args.rules else understand)(prompt), entry["label"], tally)
        if args.show and wrong:
            print(f"{prompt}\n    " + "\n    ".join(wrong))
    shown = table(f"the ledger on {num} prompts", "", "recall", "precision", "demands")
    for kind in KINDS:
        hit, missed, false = (tally[f"{kind} {what}"] for what in ("hit", "missed", "false"))
        shown.add_row(kind, f"{hit / max(1, hit + missed):.3f}", f"{hit / max(1, hit + false):.3f}", str(hit + missed))
    wide_console().print(shown)
    print("inverted demands:", tally["inverted demand"])
    if not args.half:
        dialogues(args.show)


if __name__ == "__main__":
    main()
