"""An advantage of one's own, for samples of several turns: ``loss.advantage = "recipes/examples/turns.py:by_turns"``.

A turn gets what it and all after it earned, against what the group's other samples got from their turn of that number on.
"""

import numpy as np


def returns(sample):
    earned = [sample.steps_S[sample.turns_S == turn].sum() for turn in range(sample.turns_S.max() + 1)]
    return sample.reward + np.cumsum(earned[::-1])[::-1]


def by_turns(groups):
    credits = []
    for group in groups:
        gains = [returns(sample) for sample in group]
        table = np.full((len(group), max(map(len, gains))), np.nan)  # samples by turns
        for row, gain in zip(table, gains, strict=True):
            row[: len(gain)] = gain
        table -= np.nanmean(table, axis=0)
        credits.append([np.where(one.mask_S, row[one.turns_S], 0.0) for one, row in zip(group, table, strict=True)])
    return credits
