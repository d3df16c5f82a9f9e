"""Diversity of the answers to one problem: measures of a group of texts, and means over problems.

Which texts are alike is said by a similarity: of letters or words (`stretto.text.similar`), which is the same for every model,
or of what a network makes of them (`embed`), for meaning. The network that is measured would judge itself, so models are
compared through one network for all.

Shape letters: N texts, D hidden, B rows, T positions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from stretto.model.transformer import Context, Transformer
from stretto.text.similar import clusters_N, distinct, ngrams, words

MEASURES = ("distinct_1", "distinct_2", "self_bleu", "vendi", "clusters")
"""Of `diversity`, in the order of reports."""
SAME_AT = {"characters": 0.8, "hidden": 0.9}
"""From which similarity on two texts count as one cluster (ours: a word changed in a sentence of ten; a guess for networks)."""
_ORDERS, _SMOOTHING = 4, 0.1
"""Of BLEU: longest n-gram, and what counts for no match at all (nltk's method 1)."""


def diversity(texts: Sequence[str], alike_NN: np.ndarray, same_at: float) -> dict[str, float]:
    """By name of `MEASURES`, of ``texts`` that answer one problem.

    ``distinct_n``: different n-grams of words over all of them (1510.03055). ``self_bleu``: how much of a text the others say,
    1 for equal ones (1802.01886). ``vendi``: the effective number of different texts (2210.02410), 1 for equal ones, N for
    ones with nothing in common. ``clusters``: their number.

    Args:
        alike_NN: similarities, positive semi-definite, 1 on the diagonal.
        same_at: from which on two texts count as one cluster.
    """
    return {
        "distinct_1": distinct(*texts, n=1),
        "distinct_2": distinct(*texts, n=2),
        "self_bleu": self_bleu([words(text) for text in texts]),
        "vendi": vendi(alike_NN),
        "clusters": float(clusters_N(alike_NN, same_at).max() + 1),
    }


def vendi(alike_NN: np.ndarray) -> float:
    """exp of the entropy of the eigenvalues of the similarities over N (2210.02410)."""
    values_N = np.linalg.eigvalsh(alike_NN / len(alike_NN))
    values_N = values_N[values_N > 1e-12]  # rounding; a term of that size adds nothing
    return float(np.exp(-(values_N * np.log(values_N)).sum()))


def self_bleu(spoken: Sequence[Sequence[str]]) -> float:
    """The mean BLEU of each text with the others as its references; NaN for a single text.

    Of n-grams up to 4, or as long as the text is: nltk's, smoothed by its method 1, where texts have four words or more."""
    if len(spoken) < 2:
        return math.nan
    counts = [[Counter(ngrams(each, n)) for n in range(1, _ORDERS + 1)] for each in spoken]
    scores = []
    for place, own in enumerate(spoken):
        others = [number for number in range(len(spoken)) if number != place]
        if not own:
            scores.append(float(any(not spoken[number] for number in others)))
            continue
        shares = []
        for order, grams in enumerate(counts[place][: len(own)]):
            most = Counter[tuple[str, ...]]()
            for number in others:
                most |= counts[number][order]
            shares.append(max(_SMOOTHING, (grams & most).total()) / grams.total())
        closest = min((abs(len(spoken[number]) - len(own)), len(spoken[number])) for number in others)[1]
        brevity = min(1.0, math.exp(1 - closest / len(own)))
        scores.append(brevity * math.exp(sum(map(math.log, shares)) / len(shares)))
    return float(np.mean(scores))


@torch.no_grad()
def embed(model: Transformer, tokens: Sequence[Sequence[int]], tokens_at_once: int = 4096) -> np.ndarray:
    """The mean over positions of the last hidden states, fp64 [N, D]; zeros for no tokens. Cut at what the network has positions
    for."""
    most, device = model.config.max_positions, next(model.parameters()).device
    rows = [torch.tensor(list(each)[:most], dtype=torch.int64) for each in tokens]
    found_ND = np.zeros((len(rows), model.config.hidden_size))
    order = sorted((place for place, row in enumerate(rows) if len(row)), key=lambda place: len(rows[place]))
    while order:
        num = max(1, tokens_at_once // len(rows[order[-1]]))
        some, order = order[-num:], order[:-num]
        # padding lies behind a row's own tokens, which see none of it
        ids_BT = torch.nn.utils.rnn.pad_sequence([rows[place] for place in some], batch_first=True).to(device)
        hidden_BTD = model(ids_BT, model.config.full(), Context.plain(ids_BT)).hidden_BTD.double()
        for row, place in enumerate(some):
            found_ND[place] = hidden_BTD[row, : len(rows[place])].mean(0).cpu().numpy()
    return found_ND


def cosines(embedded_ND: np.ndarray, centre_D: np.ndarray) -> np.ndarray:
    """Similarities [N, N] of embeddings as seen from ``centre_D``: what all texts share points the same way in any network,
    and would make them all alike. Those at the centre are like each other alone."""
    seen_ND = embedded_ND - centre_D
    sizes_N1 = np.linalg.norm(seen_ND, axis=1, keepdims=True)
    unit_ND = np.divide(seen_ND, sizes_N1, out=np.zeros_like(seen_ND), where=sizes_N1 > 1e-9)
    alike_NN = unit_ND @ unit_ND.T
    alike_NN[np.outer(sizes_N1 <= 1e-9, sizes_N1 <= 1e-9)] = 1.0
    np.fill_diagonal(alike_NN, 1.0)
    return alike_NN
