"""Local rating model of writing: a small head on a network's hidden states, trained on original and perturbed passages.

The network reads a prompt and a text. Features of a text are its hidden states, pooled over pieces, the surprisal of each piece, how much
the prompt lowers the surprisal, and how much other orders of its sentences raise it. The head computes the score: the log odds
that the text is not perturbed. The model knows no facts, and prefers texts like its training books.

Layout is removed before reading, so bullets and blank lines have no effect. A text longer than the training passages is read in
windows, and its score is that of the worst window.

A model trained on readers' ratings instead (`stretto.evals.rated`) has another head, on the mean hidden state of the text alone.

Shape letters: N texts, X texts of several kinds or their pieces, B rows, T positions, D hidden, S pieces of a text and its last token,
F features, P principal directions, G pooled features, K perturbations.
"""

from __future__ import annotations

import math
import random
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
import torch.nn.functional as F
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.paths import quoted, read_json, replacing, write_json
from stretto.base.records import file_sha256
from stretto.data.files import find_files
from stretto.data.sources import read_rows
from stretto.evals.rated import LIKE_THESE, RATED, RatedText, RatingHead, Ratings
from stretto.model.checkpoint import read_checkpoint, weights_hash
from stretto.model.transformer import Context, Transformer
from stretto.ops.logprob import IGNORED, chosen_logprobs
from stretto.ops.tuning import multiplies_bf16
from stretto.text.passages import DAMAGES, Part, Passage, plain, scripts, sentences
from stretto.text.tokenizer import Tokenizer, load_tokenizer

JUDGE_FILE, HEAD_FILE = "judge.json", "head.safetensors"
PIECES = 8
"""Number of pieces, by position, over which a text's states are pooled."""
RATED_WINDOW = 1024
"""Largest number of tokens that are read at once for a head on ratings."""
WINDOW, PROMPT = 304, 192
"""Largest number of tokens of a text and of its prompt that are read at once, as in the training passages."""
_MAX_WINDOWS = 8
"""Largest number of windows of a text that are read, the first and the last among them."""
_MAX_FOREIGN = 0.05
"""Largest share of a text's letters in scripts that the judge does not know."""
_TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 65536}
FEATURES = 2
"""Version of the features; a head works with the version that it was trained on."""
_NUM_SCALARS = 4
"""Number of features of a piece that are not states: mean surprisal, largest surprisal, effect of the prompt, effect of the order."""
_ORDERS = 3
"""Number of other orders of a text's sentences that its own order is compared with."""
_MAX_DEVIATIONS = 4.0
"""Standardised features are clipped at this value."""
_MAX_DIRECTIONS = 32
_DECAY, _DECAY_SCALARS = 12.0, 0.01
"""Weight decay of states and of scalars, divided by the number of passages. States are many, and scalars are the better predictors."""

SCOPE = (
    "detects damaged text (reordered, looping, cut off, off-topic, padded, copied); its scores do not follow readers' ratings. "
    "To improve or compare writing, use an LLM judge"
)
"""What a judge trained on perturbed passages is for; measured by bench/rated_stories.py."""
TIE = 0.1
"""Largest difference of two scores that counts as a tie: log odds of 52 to 48 (our choice)."""


def scope_of(name: str) -> str:
    """What a local judge of this name is for, where its record is not at hand."""
    return f"{LIKE_THESE}. Use an LLM judge elsewhere" if f"-{RATED}-" in name else SCOPE


Asked = tuple[str, str]
"""A prompt and the text that answers it."""


class JudgeRecord(Config):
    """What `JUDGE_FILE` holds. Written by `save_judge`."""

    name: str
    """Part and first digits of the head's hash: a unique name, by which verdicts are cached."""
    part: Part
    network: Path
    """Checkpoint that computes the features."""
    weights: str
    """Hash of the network's weights."""
    features: int = 1
    """Version of the features (`FEATURES`)."""
    seed: int
    scripts: tuple[str, ...]
    """Scripts of the training texts."""
    authors: tuple[str, ...]
    """Authors of the training texts."""
    median: float
    """Median score of the original training passages."""
    spread: float = Field(gt=0)
    """Half of the range of the middle 68 % of these scores, about a standard deviation."""
    ratings: Ratings | None = None
    """The readers' ratings that the judge was trained on; None: it was trained on perturbed passages."""

    @property
    def scope(self) -> str:
        """What the judge is for, after its name."""
        return SCOPE if self.ratings is None else self.ratings.scope


@dataclass(frozen=True, slots=True)
class Head:
    """Logistic regression per perturbation over the features of a text. Made by `train_head`.

    The odds that a text is perturbed are the sum over perturbations, so the most likely perturbation dominates.
    """

    mean_F: Tensor
    scale_F: Tensor
    basis_FP: Tensor
    """Principal directions of the standardised states."""
    centre_G: Tensor
    spread_G: Tensor
    """``centre_G`` and ``spread_G`` standardise the pooled features."""
    weight_GK: Tensor
    bias_K: Tensor

    def __call__(self, features_NSF: Tensor) -> Tensor:
        """Scores [N], fp64: log odds that a text is not perturbed."""
        return -self.logits(features_NSF).double().logsumexp(-1)

    def logits(self, features_NSF: Tensor) -> Tensor:
        """Log odds of each perturbation [N, K]."""
        pooled_NG = _pooled_states(features_NSF, self.mean_F, self.scale_F, self.basis_FP)
        return _standardised(pooled_NG, self.centre_G, self.spread_G) @ self.weight_GK + self.bias_K


def _standardised(x_NG: Tensor, centre_G: Tensor, spread_G: Tensor) -> Tensor:
    """Standardised and clipped: a linear head would extrapolate to high scores for texts unlike all training texts."""
    return ((x_NG - centre_G) / spread_G).clamp(-_MAX_DEVIATIONS, _MAX_DEVIATIONS)


def _pooled_states(features_NSF: Tensor, mean_F: Tensor, scale_F: Tensor, basis_FP: Tensor) -> Tensor:
    """Pooled features [N, G]: mean and standard deviation over the pieces, and the last token's features."""
    states_NSP = _standardised(features_NSF[..., :-_NUM_SCALARS], mean_F, scale_F) @ basis_FP
    both_NSX = torch.cat([states_NSP, features_NSF[..., -_NUM_SCALARS:]], -1)
    return torch.cat([both_NSX[:, :-1].mean(1), both_NSX[:, :-1].std(1), both_NSX[:, -1]], -1)


def _reorders(text: str) -> list[str]:
    """The sentences of ``text`` in `_ORDERS` random orders, which do not depend on their order in ``text``."""
    ordered = sorted(sentences(text))
    rng = random.Random(" ".join(ordered))
    return [" ".join(rng.sample(ordered, len(ordered))) for _ in range(_ORDERS)]


@dataclass(frozen=True, slots=True)
class Reader:
    """Network that computes the features of texts. Made by `open_reader`."""

    model: Transformer
    tokenizer: Tokenizer
    folder: Path
    weights: str
    """Hash of the weights."""

    @property
    def device(self) -> torch.device:
        return self.model.embedding.weight.device

    @torch.no_grad()
    def read(self, asked: Sequence[Asked]) -> Tensor:
        """Features [N, S, F], fp32, of texts that fit into one window.

        For each piece and for the last token: mean states after two thirds of the layers and after the last one, and four scalars:

        - mean surprisal (−log p) in nats per character; per token, languages with many tokens per character would score too well;
        - largest surprisal of a token;
        - how much the prompt lowers the mean surprisal, times the text's length in windows: the effect is in the first sentences, so
          without this factor short texts would score better;
        - how much other orders of the sentences raise the surprisal of the whole text, in nats per character.
        """
        prompts = [ids[-PROMPT:] for ids in self.tokenizer.encode_batch([prompt for prompt, _ in asked])]
        needed, limit = WINDOW + PROMPT + 1, self.model.config.max_positions
        if needed > limit:
            raise UserError(f"{self.folder}: has {limit} positions, but a judge needs {needed}; choose another network")
        own, density = self._encoded([text for _, text in asked])
        others = [_reorders(text) for _, text in asked]
        reordered, _ = self._encoded([text for each in others for text in each])
        assert all(own), "a text without tokens has no features"
        repeated = [each for each in prompts for _ in range(_ORDERS)]
        states, surprisals = self._run([*prompts, *([[]] * len(own)), *repeated], [*own, *own, *reordered], len(own))
        num, features = len(own), []
        for at, (states_TD, per_character) in enumerate(zip(states, density, strict=True)):
            elsewhere = torch.stack([each.mean() for each in surprisals[2 * num + at * _ORDERS :][:_ORDERS]]).mean()
            order = per_character * (elsewhere - surprisals[at].mean()) * (len(set(others[at])) > 1)
            features.append(_pooled(states_TD, surprisals[at], surprisals[num + at], per_character, order))
        return torch.stack(features)

    @torch.no_grad()
    def mean_states(self, texts: Sequence[str]) -> Tensor:
        """Mean over a text's tokens of the states after two thirds of the layers [N, D], fp32, without a prompt and without layout. A text
        longer than `RATED_WINDOW` is read in parts; a text without words has zeros."""
        limit = min(RATED_WINDOW, self.model.config.max_positions) - 1
        stripped = [plain(text) for text in texts]
        ids = self.tokenizer.encode_batch([f" {text}" for text in stripped])
        encoded = [own if text else [] for text, own in zip(stripped, ids, strict=True)]
        owners = [(at, start) for at, ids in enumerate(encoded) for start in range(0, len(ids), limit)]
        rows = [[self.tokenizer.eos_id, *encoded[at][start : start + limit]] for at, start in owners]
        sum_ND = torch.zeros(len(texts), self.model.config.hidden_size)
        for batch, ids_BT in _padded_batches(rows, _TOKENS_AT_ONCE[self.device.type]):
            middle_BTD, _ = self._states(ids_BT.to(self.device))
            for row, at in enumerate(batch):
                sum_ND[owners[at][0]] += middle_BTD[row, 1 : len(rows[at])].float().sum(0).cpu()
        return sum_ND / torch.tensor([max(1, len(ids)) for ids in encoded])[:, None]

    def _encoded(self, texts: Sequence[str]) -> tuple[list[list[int]], list[float]]:
        """Token ids of each text, cut to a window, and its number of tokens per character."""
        ids = self.tokenizer.encode_batch([f" {text}" for text in texts])
        density = [len(own) / (1 + len(text)) for own, text in zip(ids, texts, strict=True)]
        return [each[:WINDOW] for each in ids], density

    def _run(
        self, prompts: Sequence[list[int]], own: Sequence[list[int]], num_states: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """States [T, 2 D] of the first ``num_states`` texts, and surprisals [T] of all texts after their prompts; fp32."""
        rows = [[self.tokenizer.eos_id, *prompt, *text] for prompt, text in zip(prompts, own, strict=True)]
        states, surprisals = dict[int, Tensor](), dict[int, Tensor]()
        for batch, ids_BT in _padded_batches(rows, _TOKENS_AT_ONCE[self.device.type]):
            targets_BT = torch.full_like(ids_BT, IGNORED)
            spans = [slice(len(rows[at]) - len(own[at]), len(rows[at])) for at in batch]
            for row, span in enumerate(spans):
                targets_BT[row, span.start - 1 : span.stop - 1] = ids_BT[row, span]
            middle_BTD, last_BTD = self._states(ids_BT.to(self.device))
            hidden_ND, targets_N = last_BTD.flatten(0, 1), targets_BT.flatten().to(self.device)
            logp_N, _ = chosen_logprobs(hidden_ND, self.model.head_VD, targets_N)
            surprise_BT = -logp_N.view(ids_BT.shape).cpu()
            for row, (at, span) in enumerate(zip(batch, spans, strict=True)):
                surprisals[at] = surprise_BT[row, span.start - 1 : span.stop - 1]
                if at < num_states:
                    states[at] = torch.cat([middle_BTD[row, span], last_BTD[row, span]], -1).float().cpu()
        return [states[at] for at in range(num_states)], [surprisals[at] for at in range(len(rows))]

    def _states(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [B, T, D] after two thirds of the layers and after the last one."""
        middle: list[Tensor] = []
        block = self.model.blocks[2 * len(self.model.blocks) // 3]
        hook = block.register_forward_hook(lambda module, arguments, output: middle.append(output[0]))
        try:
            last_BTD = self.model(ids_BT, self.model.config.full(), Context.plain(ids_BT)).hidden_BTD
        finally:
            hook.remove()
        return middle[0], last_BTD


def _pooled(states_TD: Tensor, surprise_T: Tensor, alone_T: Tensor, density: float, order: Tensor) -> Tensor:
    """Features [S, F] of one text. ``density``: tokens per character."""
    num = len(states_TD)
    edges = torch.linspace(0, num, PIECES + 1).round().long().tolist()
    spans = [(min(low, num - 1), max(high, low + 1)) for low, high in pairwise(edges)]
    spans.append((num - 1, num))
    pieces = []
    for low, high in spans:
        own, alone = surprise_T[low:high], alone_T[low:high]
        gain = (alone - own).mean() * (num / WINDOW)  # a sum: the mean would fall with the text's length
        scalars = torch.stack([density * own.mean(), own.max(), gain, order])
        pieces.append(torch.cat([states_TD[low:high].mean(0), scalars]))
    return torch.stack(pieces)


def open_reader(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Reader:
    """Open the checkpoint ``folder``, in bf16 if ``device`` multiplies it natively. Raises `UserError`: it cannot be read."""
    place = torch.device(device)
    dtype = dtype or (torch.bfloat16 if multiplies_bf16(place) else torch.float32)
    model = read_checkpoint(folder, device=place, dtype=dtype).model.eval()
    return Reader(model, load_tokenizer(folder), folder, weights_hash(folder))


def train_head(original_NSF: Tensor, perturbed_KNSF: Tensor) -> Head:
    """Fit a head that separates original texts from their K perturbations, over all texts and within each pair."""
    every_KNSF = torch.cat([original_NSF[None], perturbed_KNSF])
    num = len(original_NSF)
    # with more directions, a few dozen texts would be distinguished by their topics
    num_directions = min(_MAX_DIRECTIONS, max(1, num // 4), original_NSF.shape[-1] - _NUM_SCALARS)
    every_XF = every_KNSF.flatten(0, 2)[:, :-_NUM_SCALARS]
    mean_F, scale_F = every_XF.mean(0), every_XF.std(0).clamp_min(1e-6)
    units_XF = _standardised(every_XF, mean_F, scale_F)
    basis_FP = torch.linalg.eigh(units_XF.T @ units_XF).eigenvectors[:, -num_directions:]
    pooled_KNG = torch.stack([_pooled_states(each, mean_F, scale_F, basis_FP) for each in every_KNSF])
    centre_G, spread_G = pooled_KNG.mean((0, 1)), pooled_KNG.flatten(0, 1).std(0).clamp_min(1e-6)
    units_KNG = _standardised(pooled_KNG, centre_G, spread_G)
    decay_G = torch.tensor([*[_DECAY] * num_directions, *[_DECAY_SCALARS] * _NUM_SCALARS]).repeat(3)[:, None] / num
    weight_GK = original_NSF.new_zeros(len(decay_G), len(perturbed_KNSF)).requires_grad_()
    bias_K = original_NSF.new_zeros(len(perturbed_KNSF)).requires_grad_()
    optimiser = torch.optim.LBFGS([weight_GK, bias_K], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimiser.zero_grad()
        original_NK = units_KNG[0] @ weight_GK + bias_K
        perturbed_NK = torch.einsum("kng,gk->nk", units_KNG[1:], weight_GK) + bias_K
        loss_NK = F.softplus(original_NK) + F.softplus(-perturbed_NK) + F.softplus(original_NK - perturbed_NK)
        loss = loss_NK.mean(0).sum() + (decay_G * weight_GK.square()).sum()
        loss.backward()
        return float(loss.detach())

    optimiser.step(closure)
    return Head(mean_F, scale_F, basis_FP, centre_G, spread_G, weight_GK.detach(), bias_K.detach())


def windows(text: str, tokenizer: Tokenizer) -> list[tuple[str | None, str]]:
    """``text`` in windows of whole sentences, at most `_MAX_WINDOWS`, each with the window before it; None: the prompt is before it. A
    sentence that is longer than a window is broken."""
    whole = sentences(plain(text))
    parts_of = [
        # lines of about a window's length, since tokens differ in length
        [each] if size <= WINDOW else textwrap.wrap(each, max(1, len(each) * WINDOW // size))
        for each, size in zip(whole, _sizes(whole, tokenizer), strict=True)
    ]
    lines = [line for each in parts_of for line in each]
    sizes = _sizes(lines, tokenizer)
    num = math.ceil(sum(sizes) / WINDOW)
    if num <= 1:
        return [(None, " ".join(lines))]
    parts, ends = list[list[str]]([[]]), np.cumsum(sizes)
    size = 0
    for sentence, own, end in zip(lines, sizes, ends, strict=True):
        if parts[-1] and (size + own > WINDOW or end - own >= len(parts) * sum(sizes) / num):
            parts.append([])
            size = 0
        parts[-1].append(sentence)
        size += own
    joined = [" ".join(part) for part in parts]
    chosen = np.unique(np.linspace(0, len(joined) - 1, _MAX_WINDOWS).round().astype(int)).tolist()
    return [(joined[at - 1] if at else None, joined[at]) for at in chosen]


def _sizes(texts: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Number of tokens of each text."""
    return [len(ids) for ids in tokenizer.encode_batch([f" {each}" for each in texts])]


class LocalJudge:
    """A reader and a head, which rate texts. Made by `open_judge`."""

    def __init__(self, record: JudgeRecord, reader: Reader, head: Head | RatingHead):
        self.record, self._reader, self.head = record, reader, head

    @torch.no_grad()
    def scores(self, asked: Sequence[Asked]) -> np.ndarray:
        """Scores [N], fp64; differences are log odds, or standard deviations of a head on ratings. Texts without words or in an unknown
        script score −inf. Raises `UserError`: a prompt in an unknown script."""
        for prompt, _ in asked:
            if unknown := self._unknown(prompt):
                raise UserError(
                    f"judge {self.record.name}: a prompt in the script {unknown[0]}, on which it was not trained: {prompt[:40]!r}; leave it out"
                )
        if isinstance(self.head, RatingHead):
            return self._ratings([text for _, text in asked], self.head)
        pieces = [
            (place, prompt if before is None else before, part)
            for place, (prompt, text) in enumerate(asked)
            if not self._unknown(text)
            for before, part in windows(text, self._reader.tokenizer)
            if part
        ]
        found_N = np.full(len(asked), -np.inf)
        if pieces:
            features_NSF = self._reader.read([(plain(prompt), part) for _, prompt, part in pieces])
            worst = dict[int, float]()
            for (place, _, _), score in zip(pieces, self.head(features_NSF).tolist(), strict=True):
                worst[place] = min(score, worst.get(place, math.inf))
            found_N[list(worst)] = list(worst.values())
        return found_N

    def _ratings(self, texts: Sequence[str], head: RatingHead) -> np.ndarray:
        """Scores of a head on ratings, which reads texts without their prompts."""
        found_N = np.full(len(texts), -np.inf)
        known = [place for place, text in enumerate(texts) if plain(text) and not self._unknown(text)]
        if known:
            found_N[known] = head(self._reader.mean_states([texts[place] for place in known])).numpy()
        return found_N

    def _unknown(self, text: str) -> list[str]:
        """Scripts of ``text`` that the judge does not know."""
        known = self.record.scripts
        return [name for name, share in scripts(text).items() if share > _MAX_FOREIGN and name not in known]

    @property
    def at_once(self) -> int:
        """Best number of texts per call: on a GPU launches dominate a single text, a CPU gains nothing from more."""
        return 1 if self._reader.device.type == "cpu" else 64

    def shares_of(self, scores_N: np.ndarray) -> np.ndarray:
        """Scores mapped to [0, 1]; the median of the original training passages maps to ½."""
        return scipy.special.expit((scores_N - self.record.median) / self.record.spread)

    def first_wins(self, prompt: str, first: str, second: str) -> float:
        """1: the first text is better; ½: tie; 0: the second is better. Consistent in both orders."""
        return self.first_of(*self.scores([(prompt, first), (prompt, second)]).tolist())

    @staticmethod
    def first_of(one: float, other: float) -> float:
        """`first_wins` from the scores of the two texts."""
        return 0.5 if one == other or abs(one - other) <= TIE else float(one > other)


def read_books(paths: Iterable[Path]) -> list[tuple[str, str]]:
    """Author and text of every record that has both. Raises `UserError`: there is none, or a file cannot be read."""
    rows = read_rows([file for path in paths for file in find_files(path).splits["train"]])
    books = [(str(each["author"]), str(each["text"])) for each, _ in rows if each.get("author") and each.get("text")]
    if not books:
        raise UserError("--data: no record has the fields 'text' and 'author'; name books in JSONL with both fields")
    return books


def save_judge(
    out: Path, reader: Reader, head: Head, part: Part, seed: int, passages: Sequence[Passage], original_NSF: Tensor
) -> JudgeRecord:
    """Write a judge to the folder ``out``. ``original_NSF``: features of the original training ``passages``."""
    texts, authors = [each.text for each in passages], {each.author for each in passages}
    return _save(out, reader, head, head(original_NSF), texts, part=part, seed=seed, authors=sorted(authors))


def save_rating_judge(
    out: Path,
    reader: Reader,
    head: RatingHead,
    part: Part,
    rated: Sequence[RatedText],
    states_ND: Tensor,
    ratings: Ratings,
) -> JudgeRecord:
    """Write a judge to the folder ``out``. ``states_ND``: states of the training texts ``rated``."""
    texts, authors = [each.text for each in rated], sorted({each.author for each in rated})
    fields = {"part": part, "seed": 0, "authors": authors, "ratings": ratings.model_dump(mode="json")}
    return _save(out, reader, head, head(states_ND), texts, **fields)


@torch.no_grad()
def _save(
    out: Path, reader: Reader, head: Head | RatingHead, scores_N: Tensor, texts: Sequence[str], **fields: Any
) -> JudgeRecord:
    """Write a judge and its record, with ``fields`` and the fields that follow from the training texts and their scores."""
    known = [name for name, share in scripts(" ".join(texts)).items() if share > _MAX_FOREIGN]
    with replacing(out) as partial:
        partial.mkdir(parents=True)
        save_file({name: getattr(head, name).contiguous() for name in head.__slots__}, partial / HEAD_FILE)
        prefix = fields["part"] if isinstance(head, Head) else f"{fields['part']}-{RATED}"
        fields |= {
            "name": f"{prefix}-{file_sha256(partial / HEAD_FILE)[:8]}", "network": str(reader.folder.resolve()),
            "weights": reader.weights, "features": FEATURES, "scripts": known, "median": float(scores_N.median()),
            "spread": float((scores_N.quantile(0.84) - scores_N.quantile(0.16)) / 2),
        }  # fmt: skip
        record = validate(JudgeRecord, fields, str(out))
        write_json(partial / JUDGE_FILE, record.model_dump(mode="json"))
    return record


def read_judge(folder: Path) -> JudgeRecord:
    """Record of the judge in ``folder``. Raises `UserError`: there is none, or one of another version."""
    path = folder / JUDGE_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; `stretto judge train … -o {quoted(folder)}` trains a judge")
    record = validate(JudgeRecord, read_json(path), str(path))
    if record.features != FEATURES:
        raise UserError(f"{path}: features: version {record.features}, not {FEATURES}; train the judge again")
    return record


def open_judge(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> LocalJudge:
    """Open the judge that `save_judge` wrote. Raises `UserError`: it is missing or damaged, or its network has changed."""
    record = read_judge(folder)
    reader = open_reader(record.network, device, dtype)
    if reader.weights != record.weights:
        raise UserError(f"{folder / JUDGE_FILE}: network: {record.network} has changed; train the judge again")
    try:
        head = (Head if record.ratings is None else RatingHead)(**load_file(folder / HEAD_FILE))
    except Exception as error:
        raise UserError(f"{folder / HEAD_FILE}: not readable: {error}; train the judge again") from None
    return LocalJudge(record, reader, head)


def features(reader: Reader, passages: Sequence[Passage], damages: Sequence[Mapping[str, str]]) -> Tensor:
    """Features [1 + K, N, S, F] of ``passages`` and of their perturbed copies (`stretto.text.passages.damaged`)."""
    texts = [[each.text for each in passages], *([each[name] for each in damages] for name in DAMAGES)]
    asked = [(own.prompt, text) for each in texts for own, text in zip(passages, each, strict=True)]
    return reader.read(asked).unflatten(0, (len(texts), len(passages)))


def _padded_batches(rows: Sequence[Sequence[int]], num_tokens: int) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Batches of about ``num_tokens`` tokens of the non-empty ``rows``, of similar length: indices of the rows, and token ids [B, T].
    Padding with 0 follows a row's own tokens, which do not attend to it."""
    order = sorted((place for place, row in enumerate(rows) if len(row)), key=lambda place: len(rows[place]))
    while order:
        num = max(1, num_tokens // len(rows[order[-1]]))
        batch, order = order[-num:], order[:-num]
        tensors = [torch.tensor(rows[place], dtype=torch.int64) for place in batch]
        yield batch, torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
