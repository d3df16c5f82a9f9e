"""Reliability of a judge of writing: perturbed passages, layout, length, order of a pair, identical texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from stretto.base.errors import UserError
from stretto.base.track import progress
from stretto.evals.scores import MOST_INFRA, Interval, mean_interval
from stretto.tasks.judge import JudgeFailed
from stretto.text.passages import DAMAGES, Passage, bulleted, sentences, spaced


@dataclass(frozen=True, slots=True)
class Trust:
    """Reliability of a judge, with intervals over passages. Written by `calibrate`."""

    damages: dict[str, Interval]
    """Win rate of the original passage by perturbation of the other (pairwise AUC); ties and contradictory verdicts count half."""
    layouts: dict[str, Interval]
    """Win rate of the same words in another layout; an unbiased judge gives one half."""
    longer: Interval
    """Win rate of a passage against its own first half, which also ends with a complete sentence."""
    itself: Interval
    """Win rate of the first of two identical passages."""
    position: Interval
    """Win rate of the first text over all pairs in both orders; an unbiased judge gives one half."""
    contradicted: float
    """Share of pairs with contradictory verdicts in the two orders."""
    num_infra: int
    """Number of comparisons without a verdict."""


def num_comparisons(num_passages: int) -> int:
    """Comparisons that `calibrate` makes: six perturbations, two layouts, the first half and the text itself, in both orders."""
    return 2 * num_passages * (len(DAMAGES) + 4)


def calibrate(
    prefer: Callable[[str, str, str], float],
    passages: Sequence[Passage],
    damages: Sequence[Mapping[str, str]],
    at_once: int = 1,
) -> Trust:
    """Have a judge compare every passage with its perturbed copies, in both orders.

    Args:
        prefer: takes a prompt and two texts; returns 1 if the first text is better, 0 if the second is, ½ for a tie. Raises `JudgeFailed`.
        passages: original passages.
        damages: perturbed copies of each passage by the name of the perturbation.
        at_once: number of comparisons in parallel.

    Raises:
        UserError: the judge refuses, or more than `MOST_INFRA` of the comparisons have no verdict.
    """
    pairs = []
    for place, (passage, copies) in enumerate(zip(passages, damages, strict=True)):
        parts = sentences(passage.text)
        others = {
            **copies,
            "bulleted": bulleted(passage.text),
            "spaced": spaced(passage.text),
            "half": " ".join(parts[: len(parts) // 2]),
            "itself": passage.text,
        }
        pairs += [(place, kind, passage.text, other) for kind, other in others.items()]
    wins, failures = dict[tuple[str, bool], np.ndarray](), list[str]()
    with ThreadPoolExecutor(at_once) as pool, progress("comparisons", 2 * len(pairs)) as advance:

        def ask(task: tuple[int, str, str, str, bool]) -> float:
            place, _, own, other, is_swapped = task
            pair = (other, own) if is_swapped else (own, other)
            try:
                return prefer(f"Continue this text:\n\n{passages[place].prompt}", *pair)
            except JudgeFailed as failed:
                failures.append(str(failed))
                if len(failures) > MOST_INFRA * 2 * len(pairs):
                    raise UserError(
                        f"calibrate: {len(failures)} comparisons have no verdict: {failed}; correct that and repeat the command"
                    ) from failed
                return math.nan
            finally:
                advance(1)

        tasks = [(*pair, is_swapped) for pair in pairs for is_swapped in (False, True)]
        for (place, kind, _, _, is_swapped), first in zip(tasks, pool.map(ask, tasks), strict=True):
            wins.setdefault((kind, is_swapped), np.full(len(passages), math.nan))[place] = first
    kinds = list(dict.fromkeys(kind for kind, _ in wins))
    # win rate of the passage; contradictory verdicts count as a tie, since their mean over both orders is ½
    won = {kind: (wins[kind, False] + 1 - wins[kind, True]) / 2 for kind in kinds}
    first_PK = np.stack([(wins[kind, False] + wins[kind, True]) / 2 for kind in kinds], -1)
    both = [np.stack([wins[kind, False], 1 - wins[kind, True]], -1) for kind in kinds if kind != "itself"]
    both_X2 = np.concatenate(both)
    both_X2 = both_X2[~np.isnan(both_X2).any(1)]
    return Trust(
        damages={kind: mean_interval({"judge": won[kind]}) for kind in damages[0]},
        layouts={kind: mean_interval({"judge": 1 - won[kind]}) for kind in ("bulleted", "spaced")},
        longer=mean_interval({"judge": won["half"]}),
        itself=mean_interval({"judge": wins["itself", False]}),
        position=mean_interval({"judge": np.nanmean(first_PK, 1)}),
        contradicted=float((both_X2[:, 0] != both_X2[:, 1]).mean()),
        num_infra=len(failures),
    )
