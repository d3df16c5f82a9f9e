"""Local rating model of writing: a small head on a network's hidden states, trained on original and perturbed passages.

The network reads a prompt and a text. Its states are pooled over pieces of the text, beside how much each piece surprises it,
and less than without the prompt, or with the same sentences in another order. The head makes one number of them: the log odds that
nothing was done to the text. It knows nothing of facts, and what it likes is what its books are like.

Text is read without its layout, so that bullets and blank lines buy nothing. What is longer than the head has learnt from is read in
windows, and is as good as the worst of them.

Shape letters: N texts, X texts of several kinds or their pieces, B rows, T positions, D hidden, S pieces of a text and its last token,
F features, P main directions, G pooled features, K damages.
"""

from __future__ import annotations

import math
import random
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from torch import Tensor, nn

from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.paths import read_json, replacing, write_json
from stretto.base.records import file_sha256
from stretto.data.files import find_files
from stretto.data.sources import Rows, read_files
from stretto.model.checkpoint import read_checkpoint, weights_hash
from stretto.model.transformer import Context, Transformer
from stretto.ops.logprob import IGNORED, chosen_logprobs
from stretto.ops.tuning import multiplies_bf16
from stretto.text.passages import DAMAGES, Part, Passage, plain, scripts, sentences
from stretto.text.tokenizer import Tokenizer, load_tokenizer

JUDGE_FILE, HEAD_FILE = "judge.json", "head.safetensors"
PIECES = 8
"""Of a text, by position."""
WINDOW, PROMPT = 304, 192
"""Tokens of a text and before it that are read at once: what the passages have."""
_MOST_WINDOWS = 8
"""Of a longer text, the first and the last among them: a judgement has a bounded price."""
_MOST_FOREIGN = 0.05
"""Of a text's letters, in a script that the judge does not know."""
_TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 65536}
FEATURES = 2
"""Version of what a reader makes of a text; a head knows no other."""
_TOLD = 4
"""Features of a piece that are no states: the mean and the largest surprise, what the prompt explains, and what the order does."""
_ORDERS = 3
"""Of a text's sentences, that its own is compared with."""
_FURTHEST = 4.0
_MOST_DIRECTIONS = 32
_DECAY, _DECAY_TOLD = 12.0, 0.01
"""Of the weights of states and of the others, by passages learnt from: the others tell most alone, and states are many."""

SCOPE = (
    "detects damaged text (reordered, looping, cut off, off-topic, padded, copied); its scores do not follow readers' ratings. "
    "To improve or compare writing, use an LLM judge"
)
"""What a local judge is for; measured by bench/rated_stories.py."""
TIE = 0.1
"""Log odds that say nothing: 52 to 48 (ours)."""

Asked = tuple[str, str]
"""A prompt, and a text that answers it."""


class JudgeRecord(Config):
    """What `JUDGE_FILE` holds. Written by `save_judge`."""

    name: str
    """The part and the beginning of the head's hash: no two judges share it, and caches of verdicts go by it."""
    part: Part
    network: Path
    """Checkpoint whose states are read."""
    weights: str
    """Its hash."""
    features: int = 1
    """`FEATURES` that it has learnt from."""
    seed: int
    scripts: tuple[str, ...]
    """Of the letters that it has read."""
    authors: tuple[str, ...]
    """Learnt from."""
    median: float
    """Score of half of their passages, whole."""
    spread: float = Field(gt=0)
    """Half of what the middle two thirds of them differ by, about a standard deviation."""


@dataclass(frozen=True, slots=True)
class Head:
    """For each damage the log odds that a text has it, by a logistic regression over what was read. Made by `train_head`.

    The odds that it has any are their sum: whichever is likeliest decides, and where a pair differs in one, that one does.
    """

    mean_F: Tensor
    scale_F: Tensor
    basis_FP: Tensor
    """Main directions of the states, in standard units."""
    centre_G: Tensor
    spread_G: Tensor
    """Of what is pooled over pieces."""
    weight_GK: Tensor
    bias_K: Tensor

    def __call__(self, read_NSF: Tensor) -> Tensor:
        """Scores [N], fp64: log odds that nothing was done to them."""
        return -self.logits(read_NSF).double().logsumexp(-1)

    def logits(self, read_NSF: Tensor) -> Tensor:
        """[N, K]."""
        pooled_NG = _pooled_states(read_NSF, self.mean_F, self.scale_F, self.basis_FP)
        return _units(pooled_NG, self.centre_G, self.spread_G) @ self.weight_GK + self.bias_K


def _units(x_NG: Tensor, centre_G: Tensor, spread_G: Tensor) -> Tensor:
    """In standard units, and no further than training went: beyond it a straight line would take what is strangest for the best."""
    return ((x_NG - centre_G) / spread_G).clamp(-_FURTHEST, _FURTHEST)


def _pooled_states(read_NSF: Tensor, mean_F: Tensor, scale_F: Tensor, basis_FP: Tensor) -> Tensor:
    """[N, G]: over the pieces the mean and the deviation of states along the main directions and of what tokens tell, and the end."""
    units_NSP = _units(read_NSF[..., :-_TOLD], mean_F, scale_F) @ basis_FP
    both_NSX = torch.cat([units_NSP, read_NSF[..., -_TOLD:]], -1)
    return torch.cat([both_NSX[:, :-1].mean(1), both_NSX[:, :-1].std(1), both_NSX[:, -1]], -1)


def _reorders(text: str) -> list[str]:
    """The sentences of ``text`` in other orders: the same ones in whichever order they came, so that what two of them differ by in
    comparison with these is all their own orders' doing."""
    said = sorted(sentences(text))
    rng = random.Random(" ".join(said))
    return [" ".join(rng.sample(said, len(said))) for _ in range(_ORDERS)]


@dataclass(frozen=True, slots=True)
class Reader:
    """A network as judges read with it. Made by `open_reader`."""

    model: Transformer
    tokenizer: Tokenizer
    folder: Path
    weights: str
    """Their hash."""

    @property
    def device(self) -> torch.device:
        return self.model.embedding.weight.device

    @torch.no_grad()
    def read(self, asked: Sequence[Asked]) -> Tensor:
        """Features [N, S, F] in fp32 of texts that fit into a window each.

        Of each piece, and of the last token: the mean states after two thirds of the layers and after all; −log p, nats a character (a
        language that the tokenizer hardly knows has many tokens, each of them likely); the largest −log p of a token; how much less it
        is on average than where the network has not seen the prompt, times the text's length in windows (what a prompt explains is in the
        first sentences, and who stops there has not written better); and how much less the whole text's is, in nats a character, than
        that of its sentences in other orders.
        """
        before = [ids[-PROMPT:] for ids in self.tokenizer.encode_batch([prompt for prompt, _ in asked])]
        most, limit = WINDOW + PROMPT + 1, self.model.config.max_positions
        if most > limit:
            raise UserError(
                f"{self.folder}: has positions for {limit} tokens, but a judge needs {most}; choose another network"
            )
        own, density = self._encoded([text for _, text in asked])
        others = [_reorders(text) for _, text in asked]
        moved, _ = self._encoded([text for each in others for text in each])
        assert all(own), "a text without tokens has no features"
        known = [each for each in before for _ in range(_ORDERS)]
        states, told = self._seen([*before, *([[]] * len(own)), *known], [*own, *own, *moved], len(own))
        num, features = len(own), []
        for at, (states_TD, per) in enumerate(zip(states, density, strict=True)):
            elsewhere = torch.stack([each.mean() for each in told[2 * num + at * _ORDERS :][:_ORDERS]]).mean()
            order = per * (elsewhere - told[at].mean()) * (len(set(others[at])) > 1)
            features.append(_pooled(states_TD, told[at], told[num + at], per, order))
        return torch.stack(features)

    def _encoded(self, texts: Sequence[str]) -> tuple[list[list[int]], list[float]]:
        """Tokens of a window, and how many a character has."""
        ids = self.tokenizer.encode_batch([f" {text}" for text in texts])
        density = [len(own) / (1 + len(text)) for own, text in zip(ids, texts, strict=True)]
        return [each[:WINDOW] for each in ids], density

    def _seen(
        self, before: Sequence[list[int]], own: Sequence[list[int]], num_states: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Of the first texts the states [T, 2 D], and of all −log p [T] behind what is ``before`` them; fp32."""
        rows = [[self.tokenizer.eos_id, *b, *o] for b, o in zip(before, own, strict=True)]
        states, told = dict[int, Tensor](), dict[int, Tensor]()
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
        while order:
            num = max(1, _TOKENS_AT_ONCE[self.device.type] // len(rows[order[-1]]))
            some, order = order[-num:], order[:-num]
            # padding lies behind a row's own tokens, which see none of it
            ids_BT = nn.utils.rnn.pad_sequence([torch.tensor(rows[at]) for at in some], batch_first=True)
            targets_BT = torch.full_like(ids_BT, IGNORED)
            spans = [slice(len(rows[at]) - len(own[at]), len(rows[at])) for at in some]
            for row, span in enumerate(spans):
                targets_BT[row, span.start - 1 : span.stop - 1] = ids_BT[row, span]
            middle_BTD, last_BTD = self._states(ids_BT.to(self.device))
            logp_N, _ = chosen_logprobs(
                last_BTD.flatten(0, 1), self.model.head_VD, targets_BT.flatten().to(self.device)
            )
            surprise_BT = -logp_N.view(ids_BT.shape).cpu()
            for row, (at, span) in enumerate(zip(some, spans, strict=True)):
                told[at] = surprise_BT[row, span.start - 1 : span.stop - 1]
                if at < num_states:
                    states[at] = torch.cat([middle_BTD[row, span], last_BTD[row, span]], -1).float().cpu()
        return [states[at] for at in range(num_states)], [told[at] for at in range(len(rows))]

    def _states(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []
        block = self.model.blocks[2 * len(self.model.blocks) // 3]
        hook = block.register_forward_hook(lambda module, given, made: kept.append(made[0]))
        try:
            last_BTD = self.model(ids_BT, self.model.config.full(), Context.plain(ids_BT)).hidden_BTD
        finally:
            hook.remove()
        return kept[0], last_BTD


def _pooled(states_TD: Tensor, surprise_T: Tensor, alone_T: Tensor, density: float, order: Tensor) -> Tensor:
    """Features [S, F] of one text, of so many tokens a character."""
    num = len(states_TD)
    edges = torch.linspace(0, num, PIECES + 1).round().long().tolist()
    spans = [(min(low, num - 1), max(high, low + 1)) for low, high in pairwise(edges)]
    spans.append((num - 1, num))
    pieces = []
    for low, high in spans:
        own, alone = surprise_T[low:high], alone_T[low:high]
        gain = (alone - own).mean() * (num / WINDOW)  # of all tokens: a mean would fall with every further one
        told = torch.stack([density * own.mean(), own.max(), gain, order])
        pieces.append(torch.cat([states_TD[low:high].mean(0), told]))
    return torch.stack(pieces)


def open_reader(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Reader:
    """The checkpoint ``folder``; in bf16 where ``device`` has units for it. Raises `UserError`: it cannot be read."""
    place = torch.device(device)
    dtype = dtype or (torch.bfloat16 if multiplies_bf16(place) else torch.float32)
    model = read_checkpoint(folder, device=place, dtype=dtype).model.eval()
    return Reader(model, load_tokenizer(folder), folder, weights_hash(folder))


def train_head(whole_NSF: Tensor, damaged_KNSF: Tensor) -> Head:
    """A head that tells ``whole_NSF`` from the K damages of the same texts: from those of all texts, and each from its own."""
    every_KNSF = torch.cat([whole_NSF[None], damaged_KNSF])
    num = len(whole_NSF)
    # more than that, and a few dozen texts are told apart by their topics
    num_directions = min(_MOST_DIRECTIONS, max(1, num // 4), whole_NSF.shape[-1] - _TOLD)
    every_XF = every_KNSF.flatten(0, 2)[:, :-_TOLD]
    mean_F, scale_F = every_XF.mean(0), every_XF.std(0).clamp_min(1e-6)
    units_XF = _units(every_XF, mean_F, scale_F)
    basis_FP = torch.linalg.eigh(units_XF.T @ units_XF).eigenvectors[:, -num_directions:]
    pooled_KNG = torch.stack([_pooled_states(each, mean_F, scale_F, basis_FP) for each in every_KNSF])
    centre_G, spread_G = pooled_KNG.mean((0, 1)), pooled_KNG.flatten(0, 1).std(0).clamp_min(1e-6)
    units_KNG = _units(pooled_KNG, centre_G, spread_G)
    decay_G = torch.tensor([*[_DECAY] * num_directions, *[_DECAY_TOLD] * _TOLD]).repeat(3)[:, None] / num

    def loss(weight_GK: Tensor, bias_K: Tensor) -> Tensor:
        whole_NK = units_KNG[0] @ weight_GK + bias_K
        damaged_NK = torch.einsum("kng,gk->nk", units_KNG[1:], weight_GK) + bias_K
        missed_NK = F.softplus(whole_NK) + F.softplus(-damaged_NK) + F.softplus(whole_NK - damaged_NK)
        return missed_NK.mean(0).sum() + (decay_G * weight_GK.square()).sum()

    start_GK = whole_NSF.new_zeros(len(decay_G), len(damaged_KNSF))
    weight_GK, bias_K = _fitted(loss, start_GK, start_GK.new_zeros(len(damaged_KNSF)))
    return Head(mean_F, scale_F, basis_FP, centre_G, spread_G, weight_GK, bias_K)


def _fitted(loss: Callable[..., Tensor], *start: Tensor) -> list[Tensor]:
    """Where a convex ``loss`` is least."""
    parameters = [each.clone().requires_grad_() for each in start]
    optimiser = torch.optim.LBFGS(parameters, max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimiser.zero_grad()
        value = loss(*parameters)
        value.backward()
        return float(value.detach())

    optimiser.step(closure)
    return [each.detach() for each in parameters]


def windows(text: str, tokenizer: Tokenizer) -> list[tuple[str | None, str]]:
    """``text`` in pieces that a reader reads whole, each with what is before it, None being the prompt; they end where sentences do,
    unless one alone is too long."""
    whole = sentences(plain(text))
    said = [part for each, size in zip(whole, _sizes(whole, tokenizer), strict=True) for part in _broken(each, size)]
    sizes = _sizes(said, tokenizer)
    num = math.ceil(sum(sizes) / WINDOW)
    if num <= 1:
        return [(None, " ".join(said))]
    parts, ends = list[list[str]]([[]]), np.cumsum(sizes)
    size = 0
    for sentence, own, end in zip(said, sizes, ends, strict=True):
        if parts[-1] and (size + own > WINDOW or end - own >= len(parts) * sum(sizes) / num):
            parts.append([])
            size = 0
        parts[-1].append(sentence)
        size += own
    joined = [" ".join(part) for part in parts]
    chosen = np.unique(np.linspace(0, len(joined) - 1, _MOST_WINDOWS).round().astype(int)).tolist()
    return [(joined[at - 1] if at else None, joined[at]) for at in chosen]


def _sizes(texts: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    return [len(ids) for ids in tokenizer.encode_batch([f" {each}" for each in texts])]


def _broken(sentence: str, size: int) -> list[str]:
    """A sentence of so many tokens in lines that fit into a window, about: tokens are not equally long."""
    return [sentence] if size <= WINDOW else textwrap.wrap(sentence, max(1, len(sentence) * WINDOW // size))


class LocalJudge:
    """A reader and a head: how good texts are. Made by `open_judge`."""

    def __init__(self, record: JudgeRecord, reader: Reader, head: Head):
        self.record, self._reader, self.head = record, reader, head

    @torch.no_grad()
    def scores(self, asked: Sequence[Asked]) -> np.ndarray:
        """[N], fp64: differences are log odds. Texts without words, or in a script that it has never read, have −inf. Raises `UserError`:
        a prompt in one."""
        for prompt, _ in asked:
            if unknown := self._unknown(prompt):
                raise UserError(
                    f"judge {self.record.name}: a prompt written in {unknown[0]}, of which it has read nothing: {prompt[:40]!r}; leave it out"
                )
        pieces = [
            (place, prompt if before is None else before, part)
            for place, (prompt, text) in enumerate(asked)
            if not self._unknown(text)
            for before, part in windows(text, self._reader.tokenizer)
            if part
        ]
        found_N = np.full(len(asked), -np.inf)
        if pieces:
            read_NSF = self._reader.read([(plain(prompt), part) for _, prompt, part in pieces])
            worst = dict[int, float]()
            for (place, _, _), score in zip(pieces, self.head(read_NSF).tolist(), strict=True):
                worst[place] = min(score, worst.get(place, math.inf))
            found_N[list(worst)] = list(worst.values())
        return found_N

    def _unknown(self, text: str) -> list[str]:
        known = self.record.scripts
        return [name for name, share in scripts(text).items() if share > _MOST_FOREIGN and name not in known]

    @property
    def at_once(self) -> int:
        """Texts that are best read together: a GPU waits for launches with one, a CPU gains nothing by more."""
        return 1 if self._reader.device.type == "cpu" else 64

    def shares_of(self, scores_N: np.ndarray) -> np.ndarray:
        """Of texts with these scores, [N] in [0, 1]: ½ is the median of whole passages that it has learnt from."""
        return scipy.special.expit((scores_N - self.record.median) / self.record.spread)

    def first_wins(self, prompt: str, first: str, second: str) -> float:
        """1, ½ or 0; the same whichever is called the first."""
        return self.first_of(*self.scores([(prompt, first), (prompt, second)]).tolist())

    @staticmethod
    def first_of(one: float, other: float) -> float:
        """Of two texts' scores, the same."""
        return 0.5 if one == other or abs(one - other) <= TIE else float(one > other)


def read_books(paths: Iterable[Path]) -> list[tuple[str, str]]:
    """Author and text of the records that name one. Raises `UserError`: none does, or a file cannot be read."""
    rows = Rows()
    files = [file for path in paths for file in find_files(path).splits["train"]]
    for _ in read_files(files, rows):
        pass
    books = [(str(each["author"]), str(each["text"])) for each, _ in rows if each.get("author") and each.get("text")]
    if not books:
        raise UserError("--data: no record has the fields 'text' and 'author'; name books in JSONL, with their authors")
    return books


def save_judge(
    out: Path, reader: Reader, head: Head, part: Part, seed: int, found: Sequence[Passage], read_KNSF: Tensor
) -> JudgeRecord:
    """Write a judge to the folder ``out``; ``read_KNSF``: all that it has learnt from, the whole passages first."""
    with torch.no_grad():
        scores_KN = torch.stack([head(each_NSF) for each_NSF in read_KNSF])
    letters = scripts(" ".join(each.text for each in found))
    known = [name for name, share in letters.items() if share > _MOST_FOREIGN]
    with replacing(out) as partial:
        partial.mkdir(parents=True)
        save_file({name: getattr(head, name).contiguous() for name in Head.__slots__}, partial / HEAD_FILE)
        told: dict[str, Any] = {
            "name": f"{part}-{file_sha256(partial / HEAD_FILE)[:8]}", "part": part, "network": str(reader.folder.resolve()),
            "weights": reader.weights, "features": FEATURES, "seed": seed,
            "scripts": known,
            "authors": sorted({each.author for each in found}),
            "median": float(scores_KN[0].median()),
            "spread": float((scores_KN[0].quantile(0.84) - scores_KN[0].quantile(0.16)) / 2),
        }  # fmt: skip
        record = validate(JudgeRecord, told, str(out))
        write_json(partial / JUDGE_FILE, record.model_dump(mode="json"))
    return record


def read_judge(folder: Path) -> JudgeRecord:
    """Of the judge in ``folder``. Raises `UserError`: there is none, or of another version."""
    path = folder / JUDGE_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; `stretto judge train … -o {folder}` makes a judge")
    record = validate(JudgeRecord, read_json(path), str(path))
    if record.features != FEATURES:
        raise UserError(f"{path}: features: {record.features}, of another version; train the judge again")
    return record


def open_judge(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> LocalJudge:
    """What `save_judge` wrote. Raises `UserError`: it is not there or damaged, or its network is another one now."""
    record = read_judge(folder)
    reader = open_reader(record.network, device, dtype)
    if reader.weights != record.weights:
        raise UserError(
            f"{folder / JUDGE_FILE}: network: {record.network} has other weights now; train the judge again"
        )
    try:
        head = Head(**load_file(folder / HEAD_FILE))
    except Exception as error:
        raise UserError(f"{folder / HEAD_FILE}: not readable: {error}; train the judge again") from None
    return LocalJudge(record, reader, head)


def features(reader: Reader, found: Sequence[Passage], told: Sequence[Mapping[str, str]]) -> Tensor:
    """[1 + damages, N, S, F]: of passages and of what `stretto.text.passages.damaged` made of them."""
    texts = [[each.text for each in found], *([each[name] for each in told] for name in DAMAGES)]
    asked = [(own.prompt, text) for each in texts for own, text in zip(found, each, strict=True)]
    return reader.read(asked).unflatten(0, (len(texts), len(found)))
