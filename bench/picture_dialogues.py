"""Five-turn dialogues about a picture: is what was asked for there at the end?

    python -m bench.picture_dialogues                       100 dialogues, the exact renderer with planted faults
    python -m bench.picture_dialogues --wording unseen      turns in words that the rules have never been tried on, as they were on the others
    python -m bench.picture_dialogues --wording unseen --patient
    python -m bench.picture_dialogues --forget              no ledger: must fail

Each dialogue asks for shapes, then recolours, moves, changes a number and takes back, in any order; a script keeps what must be there in
the end, apart from the ledger. Pictures are drawn by the renderer, which with chance --faults draws an object or a relation wrongly: without
planted faults there would be nothing to verify, and how often one picture is right follows from them, not from any model. Beside the agent:
the same where the renderer cannot change a part of a picture, so that all is painted anew; its ledger with one picture a turn; the last
turn alone; all turns in one prompt. The last two may take as many pictures of the end as the agent painted
in the whole dialogue, of which the one is taken that the exact verifier, which knows the truth, finds best. A prompt of all turns
does not fail because painters are deaf: this one reads "undo" as nothing, and a better reader of whole dialogues might do better.
Exit code 1: the agent is right in fewer than nine of ten, or not above both.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

from bench.common.erring import misreading
from bench.common.measure import table, wide_console
from stretto.base.errors import UserError
from stretto.base.track import progress
from stretto.pictures.agent import Dialogue, PaintOptions, respond
from stretto.pictures.backend import PaintRequest
from stretto.pictures.renderer import Renderer
from stretto.pictures.verify import ShapesVerifier
from stretto.tasks.shapes.draw import PALETTE, see, unmet
from stretto.tasks.shapes.ledger import Ledger, Relation, Thing, describe, plural

NOUNS = ("circle", "square", "triangle")
PLACES = ("left of", "right of", "above", "below")
NUMBERS = ("", "one", "two", "three", "four")
WORDINGS = {
    "usual": {
        "colour": ("make the {a} {c}", "paint the {a} {c}", "change the {a} to {c}", "the {a} should be {c}"),
        "move": ("move the {a} {p} the {b}", "put the {a} {p} the {b}", "the {a} should be {p} the {b}"),
        "count": ("make it {n} {a}", "there should be {n} {a}", "change the number of {a} to {n}"),
        "undo": ("undo", "undo that", "go back", "undo the last change"),
    },
    "other": {
        "colour": (
            "could you recolour the {a} {c}, please?",
            "I think the {a} must be {c}",
            "turn the {a} {c}",
            "Let the {a} be {c}.",
        ),
        "move": (
            "shift the {a} so that it is {p} the {b}",
            "the {a} has to be {p} the {b}",
            "place the {a} {p} the {b} please",
        ),
        "count": ("I want {n} {a}", "use {n} {a} instead", "Set the number of {a} to {n}, please."),
        "undo": ("take that back", "No, undo that please", "revert the last change"),
    },
    "third": {
        "colour": (
            "I would prefer the {a} in {c}",
            "give the {a} a {c} colour",
            "{c} would be better for the {a}",
            "Make the {a} look {c}",
        ),
        "move": ("bring the {a} {p} the {b}", "the {a} belongs {p} the {b}", "I want the {a} {p} the {b}"),
        "count": ("I need {n} {a}", "there are to be {n} {a}", "only {n} {a}, please"),
        "undo": ("undo the last step", "cancel that", "go one step back"),
    },
    "unseen": {
        "colour": (
            "the {a} would look better in {c}",
            "have the {a} be {c}",
            "color the {a} {c} instead",
            "swap the color of the {a} for {c}",
        ),
        "move": (
            "have the {a} {p} the {b}",
            "relocate the {a} to be {p} the {b}",
            "{p} the {b} is where the {a} should go",
        ),
        "count": ("let's have {n} {a}", "change to {n} {a}", "I'd rather see {n} {a}"),
        "undo": ("scratch that", "forget that last change", "go back one step"),
    },
}


@dataclass(frozen=True)
class Script:
    turns: tuple[str, ...]
    again: tuple[str, ...]
    """Each turn in the usual words: what a user says who was asked back."""
    truth: Ledger


def script(seed: int, wording: str) -> Script:
    """A dialogue and what must be there at its end, kept by the script's own bookkeeping."""
    rng = random.Random(f"dialogue/{seed}")
    words = WORDINGS[wording]
    nouns = rng.sample(NOUNS, rng.choice((2, 3)))
    things = [Thing(id, noun, rng.randint(1, 3), (rng.choice(list(PALETTE)),)) for id, noun in enumerate(nouns)]
    states = [Ledger(tuple(things), (Relation(0, rng.choice(PLACES), 1),))]
    turns = [(describe(states[0]), describe(states[0]))]
    kinds = ["colour", "move", "count"]
    rng.shuffle(kinds)
    kinds.insert(rng.randint(1, 3), "undo")
    for kind in kinds:
        now = states[-1]
        thing = rng.choice(now.things)
        name = thing.noun if thing.count == 1 else plural(thing.noun)
        templates = rng.choice(words[kind]), WORDINGS["usual"][kind][0]
        if kind == "undo":
            states.pop()
            turns.append(templates)
        elif kind == "colour":
            colour = rng.choice([each for each in PALETTE if each not in thing.colours])
            turns.append(_both(templates, a=name, c=colour))
            states.append(_with(now, replace(thing, colours=(colour,))))
        elif kind == "count":
            number = rng.choice([each for each in range(1, 5) if each != thing.count])
            many = "number of" in templates[0] or number > 1
            turns.append(_both(templates, a=plural(thing.noun) if many else thing.noun, n=NUMBERS[number]))
            states.append(_with(now, replace(thing, count=number)))
        else:
            pair = rng.sample(now.things[:2], 2)  # the two that stand in a relation: no circle can come of it
            place = rng.choice(PLACES)
            names = [each.noun if each.count == 1 else plural(each.noun) for each in pair]
            turns.append(_both(templates, a=names[0], b=names[1], p=place))
            states.append(Ledger(now.things, (Relation(pair[0].id, place, pair[1].id),)))
    said, again = zip(*turns, strict=True)
    return Script(said, again, states[-1])


def _both(templates: tuple[str, str], **names: str) -> tuple[str, str]:
    return templates[0].format(**names), templates[1].format(**names)


def _with(ledger: Ledger, thing: Thing) -> Ledger:
    return Ledger(tuple(thing if each.id == thing.id else each for each in ledger.things), ledger.relations)


def by_agent(told: Script, renderer: Renderer, options: PaintOptions, is_patient: bool = False) -> tuple[bool, int]:
    """Whether it is right in the end, and how many pictures that took. A patient user who is asked back says it in the usual words."""
    dialogue = Dialogue()
    for said, again in zip(told.turns, told.again, strict=True):
        for words in (said, again)[: 1 + is_patient]:
            try:
                reply = respond(dialogue, words, renderer, ShapesVerifier(), options)
            except UserError:  # it did not understand: the user goes on
                continue
            dialogue = reply.dialogue
            if not reply.is_question:
                break
    shown = dialogue.shown
    return shown is not None and not unmet(told.truth, see(shown.picture)), sum(
        each.num_images for each in dialogue.versions
    )


def by_prompt(told: Script, prompt: str, renderer: Renderer, options: PaintOptions, num: int) -> bool:
    """Whether any of ``num`` pictures of a prompt shows the truth."""
    for seed in range(num):
        try:
            picture = renderer.paint(PaintRequest(prompt, options.width, options.height, options.seed + seed))
        except UserError:
            return False
        if not unmet(told.truth, see(picture)):
            return True
    return False


def row(name: str, right: Sequence[bool], num_images: float) -> list[str]:
    share = sum(right) / len(right)
    return [name, f"{share:.0%} ±{1.96 * sqrt(share * (1 - share) / len(right)):.0%}", f"{num_images:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=100, help="dialogues")
    parser.add_argument(
        "--faults", type=float, default=0.1, help="chance of each object and relation to be drawn wrongly"
    )
    parser.add_argument("--images", type=int, default=6, help="pictures a turn, at most")
    parser.add_argument("--wording", choices=list(WORDINGS), default="usual")
    parser.add_argument(
        "--patient", action="store_true", help="a user who is asked back says it again, in the usual words"
    )
    parser.add_argument(
        "--forget", action="store_true", help="the agent hears each turn as if it were the first; must fail"
    )
    told = parser.parse_args()
    misread = misreading(told.faults)
    renderer, whole = Renderer(misread), Renderer(misread, edits=False)
    options = PaintOptions(width=256, height=256, images=told.images)
    rights: dict[str, list[bool]] = {
        name: []
        for name in (
            "agent",
            "agent, new pictures only",
            "ledger, one picture a turn",
            "last turn only",
            "all turns, best of N",
        )
    }
    spent: dict[str, list[int]] = {name: [] for name in rights}
    with progress("dialogues", told.n) as advance:
        for number in range(told.n):
            dialogue = script(number, told.wording)
            options = options.replace(seed=1000 * number)
            heard = replace(dialogue, turns=dialogue.turns[-1:], again=dialogue.again[-1:]) if told.forget else dialogue
            right, num = by_agent(heard, renderer, options, told.patient)
            anew, num_anew = by_agent(heard, whole, options, told.patient)
            alone, num_alone = by_agent(heard, renderer, options.replace(images=1), told.patient)
            joined = " ".join(f"{turn.rstrip('.?')}." for turn in dialogue.turns)
            results = (
                (right, num),
                (anew, num_anew),
                (alone, num_alone),
                (by_prompt(dialogue, dialogue.turns[-1], renderer, options, num), num),
                (by_prompt(dialogue, joined, renderer, options, num), num),
            )
            for name, (is_right, painted) in zip(rights, results, strict=True):
                rights[name].append(is_right)
                spent[name].append(painted)
            advance(1)
    made = table(
        f"{told.n} dialogues, faults {told.faults:g}, {told.wording} wording", "", "right at the end", "pictures"
    )
    for name, right in rights.items():
        made.add_row(*row(name, right, sum(spent[name]) / told.n))
    wide_console().print(made)
    shares = [sum(right) / len(right) for right in rights.values()]
    sys.exit(int(shares[0] < 0.9 or shares[0] <= max(shares[3:])))


if __name__ == "__main__":
    main()
