"""How far a local judge of writing can be trusted: six damages, layout, order, and what games it (figures 1, 2 and 4 of writing).

    python -m bench.judge OUT --model CHECKPOINT --data BOOKS          again: goes on; books are JSONL with text and author
    python -m bench.judge OUT --model CHECKPOINT --data BOOKS --device cuda     600 passages a judge, 200 tried, 40 in figures 2 and 4

Two judges learn, one to reward and one to evaluate, from other authors each and by other draws; both are tried with a third part of
the authors, by a draw of its own (`--seed`; 0 to 4 have been looked at in LOG.md). Of a passage and what a damage made of it, who is
higher? Beside it: whether the worst whole passage is above, that of all
prompts together (*any pair*); and what zlib's ratio, distinct-2 and length alone tell, each in the direction that the training
authors say is better.

Games are answers to the held-out prompts that nobody should like: the passage's own words in any order, its prompt again, the passage
over and over to 16,000 tokens, sentences of other languages.

Exits with 1 unless each damage has 95 % of pairs, layouts win 45 to 55 %, order changes nothing by more than 3 points, and no game
is above the median of whole passages, by both judges. ``--mute surprise``, ``order`` or ``states`` leaves out a part of what the judges
read, and ``--as-written`` shows them the layout: mutants, that should fail.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.common.measure import table, wide_console
from stretto.api.judge import passage_states
from stretto.base.paths import checkpoint_folder
from stretto.evals import ranker
from stretto.evals.ranker import LocalJudge, open_judge, open_reader, read_books, save_judge, train_head
from stretto.post.calibrate import calibrate
from stretto.text.passages import DAMAGES, Passage
from stretto.text.similar import compression, distinct, words

GAME_WORDS = 11_000
"""About 16,000 tokens."""
MUTES = {"": slice(0), "surprise": slice(-4, None), "order": slice(-1, None), "states": slice(-4)}
SIZES = {"cpu": (64, 32, 8), "cuda": (600, 200, 40)}
"""Passages to learn from, tried, and compared."""
AIM, LAYOUT, ORDER = 0.95, (0.45, 0.55), 0.03
OTHER_LANGUAGES = {
    "German": "Es war einmal ein König, der hatte drei Söhne. Der Wald lag still im Abendlicht, und niemand sprach ein Wort. Am Morgen "
    "gingen sie hinunter zum Fluss, um Wasser zu holen. Die alte Frau öffnete die Tür und sah ihn lange an. Er wusste nicht, was er ihr "
    "antworten sollte. Draußen fiel der Regen auf die Dächer der Stadt. Später erinnerte er sich kaum noch an jenen Tag. Das Haus stand "
    "seit vielen Jahren leer.",
    "French": "Il était une fois une reine qui vivait au bord de la mer. Le soir tombait lentement sur les toits de la ville. Personne ne "
    "savait d'où venait cet homme. Elle posa la lettre sur la table et ne dit rien. Les enfants couraient dans le jardin sous la pluie. "
    "Il se souvint alors de ce que son père lui avait dit. La route était longue, mais ils ne s'arrêtèrent pas. Au matin, la maison était vide.",
    "Chinese": "从前有一个老人住在山里。每天早上他都到河边去打水。天黑了，村子里没有人说话。她把信放在桌子上，什么也没说。"
    "孩子们在雨里跑来跑去。他忽然想起父亲说过的话。路很长，可是他们没有停下来。第二天，那座房子已经空了。",
}
"""Written for this; sentences are drawn in any order."""
PLAIN: Mapping[str, Callable[[str], float]] = {
    "zlib": compression,
    "distinct-2": distinct,
    "length": lambda text: float(len(words(text))),
}


def shares_won(whole_N: np.ndarray, worse_N: np.ndarray) -> tuple[float, float]:
    """Of pairs of one prompt, and of any two; a tie is a half."""
    own = np.mean((whole_N > worse_N) + 0.5 * (whole_N == worse_N))
    any_NN = whole_N[:, None] - worse_N[None]
    return float(own), float(np.mean((any_NN > 0) + 0.5 * (any_NN == 0)))


def by_rule(
    rule: Callable[[str], float], found: Sequence[Passage], told: Sequence[Mapping[str, str]]
) -> dict[str, tuple[float, float]]:
    """What a rule's number tells, by damage, higher being better."""
    whole_N = np.array([rule(each.text) for each in found])
    return {name: shares_won(whole_N, np.array([rule(each[name]) for each in told])) for name in DAMAGES}


def games(found: Sequence[Passage]) -> dict[str, list[tuple[str, str]]]:
    """Prompts and answers, by name."""
    rng, made = random.Random(0), dict[str, list[tuple[str, str]]]()
    for own in found:
        salad = own.text.split()
        rng.shuffle(salad)
        many = own.text + f" {own.text}" * (GAME_WORDS // len(own.text.split()))
        made.setdefault("word salad", []).append((own.prompt, " ".join(salad)))
        made.setdefault("the prompt again", []).append((own.prompt, own.prompt))
        made.setdefault("the prompt, three times", []).append((own.prompt, f"{own.prompt} {own.prompt} {own.prompt}"))
        made.setdefault("16,000 tokens", []).append((own.prompt, many))
        for name, text in OTHER_LANGUAGES.items():
            said = ranker.sentences(text)
            made.setdefault(name, []).append(
                (own.prompt, ("" if name == "Chinese" else " ").join(rng.sample(said, len(said))))
            )
    return made


def muted(read_KNSF: Tensor, what: str) -> Tensor:
    """Without ``surprise``, the last four features, ``order``, the last of them, or the ``states`` before them."""
    made = read_KNSF.clone()
    made[..., MUTES[what]] = 0
    return made


class Bench:
    """Judges, and what they are tried with."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.console, self.missed = options, wide_console(), list[str]()
        books, reader, kept = (
            read_books(options.data),
            open_reader(checkpoint_folder(options.model), options.device),
            options.out / "states",
        )
        self.found, self.told, states = passage_states(reader, books, "held_out", options.tried, kept, options.seed)
        self.states = muted(states, options.mute)
        self.judges, self.learnt = dict[str, LocalJudge](), ([], [])
        for seed, part in enumerate(options.judges):
            found, told, read_KNSF = passage_states(reader, books, part, options.passages, kept)
            read_KNSF = muted(read_KNSF, options.mute)
            head = train_head(read_KNSF[0], read_KNSF[1:])
            folder = options.out / part  # where `bench.writing OUT` looks for them
            save_judge(folder, reader, head, part, seed, found, read_KNSF)
            self.judges[part] = open_judge(folder, options.device)
            self.learnt[0].extend(found)
            self.learnt[1].extend(told)

    def damages(self) -> None:
        shown = table(
            f"Figure 1: {len(self.found)} held-out passages by {len({each.author for each in self.found})} authors: pairs won (any pair)",
            "",
            *DAMAGES,
        )
        for part, judge in self.judges.items():
            with torch.no_grad():
                scores_KN = np.stack([judge.head(each).numpy() for each in self.states])
            won = {name: shares_won(scores_KN[0], scores_KN[1 + at]) for at, name in enumerate(DAMAGES)}
            shown.add_row(f"judge, {part}", *(f"{own:.3f} ({every:.3f})" for own, every in won.values()))
            self.missed += [f"{part}: {name} {own:.3f}" for name, (own, _) in won.items() if own < AIM]
        for name, rule in PLAIN.items():
            is_better = np.mean([own for own, _ in by_rule(rule, *self.learnt).values()]) >= 0.5
            won = by_rule(rule if is_better else lambda text, rule=rule: -rule(text), self.found, self.told)
            shown.add_row(
                f"{name}, {'more' if is_better else 'less'}",
                *(f"{own:.3f} ({every:.3f})" for own, every in won.values()),
            )
        self.console.print(shown)

    def fairness(self) -> None:
        shown = table(
            "Figure 2: what should change nothing",
            "",
            "bulleted wins",
            "spaced wins",
            "itself",
            "shown first",
            "longer wins",
        )
        num = self.options.compared
        for part, judge in self.judges.items():
            found = calibrate(judge.first_wins, self.found[:num], [{} for _ in self.found[:num]])
            shown.add_row(
                part,
                *(
                    f"{each.value:.3f}"
                    for each in (*found.layouts.values(), found.itself, found.position, found.longer)
                ),
            )
            self.missed += [
                f"{part}: {name} {each.value:.3f}"
                for name, each in found.layouts.items()
                if not LAYOUT[0] <= each.value <= LAYOUT[1]
            ]
            self.missed += [f"{part}: order {found.position.value:.3f}"] * (abs(found.position.value - 0.5) > ORDER)
            self.missed += [f"{part}: itself {found.itself.value:.3f}"] * (found.itself.value != 0.5)
        self.console.print(shown)

    def gamed(self) -> None:
        some = self.found[: self.options.compared]
        made = {"whole": [(each.prompt, each.text) for each in some], **games(some)}
        shown = table(
            "Figure 4: share above the median of whole passages (highest, in standard deviations above that median)",
            "",
            *made,
        )
        for part, judge in self.judges.items():
            scores = {name: judge.scores(asked) for name, asked in made.items()}
            median, spread = np.median(scores["whole"]), scores["whole"].std()
            shown.add_row(
                part,
                *(
                    f"{np.mean(own_N > median):.0%} ({(own_N.max() - median) / spread:+.2f})"
                    for own_N in scores.values()
                ),
            )
            self.missed += [
                f"{part}: {name} above the median"
                for name, own_N in scores.items()
                if name != "whole" and own_N.max() > median
            ]
        self.console.print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--passages", type=int, help="that each judge learns from (64, on a GPU 600)")
    parser.add_argument("--judges", nargs="+", choices=("reward", "evaluation"), default=["reward", "evaluation"])
    parser.add_argument("--tried", type=int, help="passages of authors that neither has read (32, on a GPU 200)")
    parser.add_argument(
        "--compared", type=int, help="of those, in figures 2 and 4, whose texts are read anew (8, on a GPU 40)"
    )
    parser.add_argument("--seed", type=int, default=5, help="of the draw of the passages tried")
    parser.add_argument("--mute", choices=tuple(MUTES), default="")
    parser.add_argument("--as-written", action="store_true", help="let the judges see layout")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    for name, size in zip(("passages", "tried", "compared"), SIZES[options.device.partition(":")[0]], strict=True):
        setattr(options, name, getattr(options, name) or size)
    if options.as_written:
        ranker.plain = str
    bench = Bench(options)
    bench.damages()
    bench.fairness()
    bench.gamed()
    for each in bench.missed:
        bench.console.print(f"MISSED: {each}")
    sys.exit(bool(bench.missed))


if __name__ == "__main__":
    main()
