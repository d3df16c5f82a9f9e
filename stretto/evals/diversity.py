"""Diversity of the answers to one problem: measures of a group of texts, and means over problems.

The measures need pairwise similarities: of characters or words (`stretto.text.similar`), or of a network's hidden states (`embed`),
which compare meaning. Models that are compared with each other must use the same network for all of them.

Shape letters: N texts, D hidden, B rows, T positions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from stretto.model.transformer import Context, Transformer
from stretto.text.similar import clusters_N, distinct, ngrams, words

MEASURES = ("distinct_1", "distinct_2", "self_bleu", "vendi", "clusters")
"""Keys of `diversity`, in the order of reports."""
SAME_AT = {"characters": 0.8, "hidden": 0.9}
"""Smallest similarity of two texts of one cluster (our choice: one changed word in a sentence of ten; a guess for hidden states)."""
_ORDERS, _SMOOTHING = 4, 0.1
"""BLEU: longest n-gram, and the count that replaces a count of 0 (nltk's smoothing method 1)."""


def diversity(texts: Sequence[str], alike_NN: np.ndarray, same_at: float) -> dict[str, float]:
    """The `MEASURES` of ``texts`` that answer one problem.

    ``distinct_n``: number of different word n-grams divided by the number of all (1510.03055). ``self_bleu``: mean BLEU of each text against
    the others, 1 for equal texts (1802.01886). ``vendi``: effective number of different texts, from 1 for equal texts to N for texts
    without similarity (2210.02410). ``clusters``: number of clusters.

    Args:
        alike_NN: similarities, positive semi-definite, 1 on the diagonal.
        same_at: smallest similarity of two texts of one cluster.
    """
    return {
        "distinct_1": distinct(*texts, n=1),
        "distinct_2": distinct(*texts, n=2),
        "self_bleu": self_bleu([words(text) for text in texts]),
        "vendi": vendi(alike_NN),
        "clusters": float(clusters_N(alike_NN, same_at).max() + 1),
    }


def vendi(alike_NN: np.ndarray) -> float:
    """Vendi score: exp of the entropy of the eigenvalues of ``alike_NN / N`` (2210.02410)."""
    values_N = np.linalg.eigvalsh(alike_NN / len(alike_NN))
    values_N = values_N[values_N > 1e-12]  # smaller eigenvalues are rounding errors
    return float(np.exp(-(values_N * np.log(values_N)).sum()))


def self_bleu(texts: Sequence[Sequence[str]]) -> float:
    """Mean BLEU of each text (a list of words) with the other texts as references; NaN for a single text.

    N-grams have up to 4 words, or as many as the text. For texts of at least four words, the result is nltk's with smoothing method 1.
    """
    if len(texts) < 2:
        return math.nan
    counts = [[Counter(ngrams(each, n)) for n in range(1, _ORDERS + 1)] for each in texts]
    scores = []
    for place, own in enumerate(texts):
        others = [number for number in range(len(texts)) if number != place]
        if not own:
            scores.append(float(any(not texts[number] for number in others)))
            continue
        shares = []
        for order, grams in enumerate(counts[place][: len(own)]):
            most = Counter[tuple[str, ...]]()
            for number in others:
                most |= counts[number][order]
            shares.append(max(_SMOOTHING, (grams & most).total()) / grams.total())
        closest = min((abs(len(texts[number]) - len(own)), len(texts[number])) for number in others)[1]
        brevity = min(1.0, math.exp(1 - closest / len(own)))
        scores.append(brevity * math.exp(sum(map(math.log, shares)) / len(shares)))
    return float(np.mean(scores))


def padded_batches(rows: Sequence[Sequence[int]], num_tokens: int) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Batches of about ``num_tokens`` tokens of the non-empty ``rows``, of similar length: indices of the rows, and token ids [B, T].
    Padding with 0 follows a row's own tokens, which do not attend to it."""
    order = sorted((place for place, row in enumerate(rows) if len(row)), key=lambda place: len(rows[place]))
    while order:
        num = max(1, num_tokens // len(rows[order[-1]]))
        batch, order = order[-num:], order[:-num]
        tensors = [torch.tensor(rows[place], dtype=torch.int64) for place in batch]
        yield batch, torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


@torch.no_grad()
def embed(model: Transformer, tokens: Sequence[Sequence[int]], tokens_at_once: int = 4096) -> np.ndarray:
    """Mean over positions of the last hidden states, fp64 [N, D]; zeros for a text without tokens. Texts are truncated to the network's
    positions."""
    device = next(model.parameters()).device
    rows = [each[: model.config.max_positions] for each in tokens]
    found_ND = np.zeros((len(rows), model.config.hidden_size))
    for batch, ids_BT in padded_batches(rows, tokens_at_once):
        ids_BT = ids_BT.to(device)
        hidden_BTD = model(ids_BT, model.config.full(), Context.plain(ids_BT)).hidden_BTD.double()
        for row, place in enumerate(batch):
            found_ND[place] = hidden_BTD[row, : len(rows[place])].mean(0).cpu().numpy()
    return found_ND


def cosines(embedded_ND: np.ndarray, centre_D: np.ndarray) -> np.ndarray:
    """Cosine similarities [N, N] of embeddings after subtraction of ``centre_D``. Without it all texts would be similar, because
    hidden states have a large common component. Embeddings equal to the centre are similar to each other only."""
    centred_ND = embedded_ND - centre_D
    sizes_N1 = np.linalg.norm(centred_ND, axis=1, keepdims=True)
    unit_ND = np.divide(centred_ND, sizes_N1, out=np.zeros_like(centred_ND), where=sizes_N1 > 1e-9)
    alike_NN = unit_ND @ unit_ND.T
    alike_NN[np.outer(sizes_N1 <= 1e-9, sizes_N1 <= 1e-9)] = 1.0
    np.fill_diagonal(alike_NN, 1.0)
    return alike_NN
