"""A local judge of writing: a small head on a network's hidden states, trained on passages of books against damaged ones.

The network reads a prompt and a text. Its states are pooled over pieces of the text, beside how much each piece surprises it,
and the head makes one number of them: a difference of two is the log odds (Bradley and Terry) that the first is whole and the
second damaged. It knows nothing of facts, and what it likes is what its books are like.

Text is read without its layout, so that bullets and blank lines buy nothing. What is longer than the head has learnt from is read in
windows, and is as good as the worst of them.

Shape letters: N texts, X texts of several kinds or their pieces, B rows, T positions, D hidden, S pieces of a text and its last token,
F features, P main directions, G pooled features, K damages, Z qualities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from safetensors.torch import load_file, save_file
from scipy.special import expit
from torch import Tensor, nn

from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.paths import read_json, replacing, write_json
from stretto.base.records import file_sha256
from stretto.data.files import find_files
from stretto.data.sources import Rows, read_files
from stretto.model.checkpoint import read_checkpoint, weights_hash
from stretto.model.transformer import Context, Transformer
from stretto.ops.logprob import chosen_logprobs
from stretto.ops.tuning import multiplies_bf16
from stretto.text.passages import DAMAGES, Part, Passage, plain, scripts, sentences
from stretto.text.tokenizer import Tokenizer, load_tokenizer

JUDGE_FILE, HEAD_FILE = "judge.json", "head.safetensors"
PIECES = 8
"""Of a text, by position."""
WINDOW, PROMPT = 288, 192
"""Tokens of a text and before it that are read at once: what the passages have."""
_MOST_WINDOWS = 8
"""Of a longer text, the first and the last among them: a judgement has a bounded price."""
_MOST_FOREIGN = 0.05
"""Of a text's letters, in a script that the judge does not know."""
_TOKENS_AT_ONCE = 4096
_TOLD = 3
"""Features of a piece that are no states: the mean and the largest surprise, and the gain."""
_FURTHEST, _DECAY, _SHARP = 4.0, 0.03, 60.0
_MOST_DIRECTIONS = 32
_FINDS = 0.9
"""Of pairs of any two texts, by which a damage has a gate."""
_ERRS = 0.02
"""Share of the texts on either side that do not say where its limit is."""

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
    """Gates and a slope over what was read of a text. Made by `train_head`.

    A gate is a logistic regression that finds one damage by the states, whatever the text is about. A damage that changes too little
    to be found so, the order of sentences say, has none: there the slope decides, over how surprising the text is and how much its
    prompt explains of it. A gate that shuts outweighs any slope.
    """

    mean_F: Tensor
    scale_F: Tensor
    basis_FP: Tensor
    """Main directions of the states, in standard units."""
    centre_G: Tensor
    spread_G: Tensor
    """Of what is pooled over pieces."""
    weight_GK: Tensor
    limit_K: Tensor
    """From which logit on a gate shuts; infinite: the damage has no gate."""
    slope_Z: Tensor
    origin_Z: Tensor
    shut_K: Tensor
    """What a shut gate takes off: more than any slope gives, and the surer one more than all that are less sure."""

    def __call__(self, read_NSF: Tensor) -> Tensor:
        """Scores [N], fp64."""
        gates_NK = self.logits(read_NSF) - self.limit_K
        quality_N = (_quality(read_NSF) - self.origin_Z) @ self.slope_Z
        return quality_N.double() - torch.sigmoid(_SHARP * gates_NK.double()) @ self.shut_K.double()

    def logits(self, read_NSF: Tensor) -> Tensor:
        """[N, K], before the limits."""
        pooled_NG = _pooled_states(read_NSF, self.mean_F, self.scale_F, self.basis_FP)
        return _units(pooled_NG, self.centre_G, self.spread_G) @ self.weight_GK


def _units(x_NG: Tensor, centre_G: Tensor, spread_G: Tensor) -> Tensor:
    """In standard units, and no further than training went: beyond it a straight line would take what is strangest for the best."""
    return ((x_NG - centre_G) / spread_G).clamp(-_FURTHEST, _FURTHEST)


def _pooled_states(read_NSF: Tensor, mean_F: Tensor, scale_F: Tensor, basis_FP: Tensor) -> Tensor:
    """[N, G]: over the pieces the mean and the deviation of states along the main directions and of what tokens tell, and the end."""
    units_NSP = _units(read_NSF[..., :-_TOLD], mean_F, scale_F) @ basis_FP
    both_NSX = torch.cat([units_NSP, read_NSF[..., -_TOLD:]], -1)
    return torch.cat([both_NSX[:, :-1].mean(1), both_NSX[:, :-1].std(1), both_NSX[:, -1]], -1)


def _quality(read_NSF: Tensor) -> Tensor:
    """[N, Z]: how surprising a text is, and how much of that its prompt explains: of all of it, and of its first piece."""
    surprise_NS, gain_NS = read_NSF[..., -_TOLD], read_NSF[..., -1]
    return torch.stack([surprise_NS[:, :-1].mean(1), gain_NS[:, :-1].mean(1), gain_NS[:, 0]], -1)


@dataclass(frozen=True, slots=True)
class Reader:
    """A network as judges read with it. Made by `open_reader`."""

    model: Transformer
    tokenizer: Tokenizer
    folder: Path

    @torch.no_grad()
    def read(self, asked: Sequence[Asked]) -> Tensor:
        """Features [N, S, F] in fp32 of texts that fit into a window each.

        Of each piece, and of the last token: the mean states after two thirds of the layers and after all; −log p, nats a character (a
        language that the tokenizer hardly knows has many tokens, each of them likely); the largest −log p of a token; and how much less it
        is on average than where the network has not seen the prompt, times the text's length in windows (what a prompt explains is in the
        first sentences, and who stops there has not written better).
        """
        before = [ids[-PROMPT:] for ids in self.tokenizer.encode_batch([prompt for prompt, _ in asked])]
        whole = self.tokenizer.encode_batch([f" {text}" for _, text in asked])
        density = [len(ids) / (1 + len(text)) for ids, (_, text) in zip(whole, asked, strict=True)]
        own = [ids[:WINDOW] for ids in whole]
        assert all(own), "a text without tokens has no features"
        most, limit = WINDOW + PROMPT + 1, self.model.config.max_positions
        if most > limit:
            raise UserError(f"{self.folder}: has positions for {limit} tokens, and a judge reads {most}")
        seen, alone = self._seen(before, own), self._seen([[]] * len(own), own)
        return torch.stack(
            [_pooled(*each, other[1], per) for each, other, per in zip(seen, alone, density, strict=True)]
        )

    def _seen(self, before: Sequence[list[int]], own: Sequence[list[int]]) -> list[tuple[Tensor, Tensor]]:
        """Of each text behind what is ``before`` it: states [T, 2 D] and −log p [T], both fp32."""
        device = next(self.model.parameters()).device
        rows = [[self.tokenizer.eos_id, *b, *o] for b, o in zip(before, own, strict=True)]
        found = dict[int, tuple[Tensor, Tensor]]()
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
        while order:
            num = max(1, _TOKENS_AT_ONCE // len(rows[order[-1]]))
            some, order = order[-num:], order[:-num]
            # padding lies behind a row's own tokens, which see none of it
            ids_BT = nn.utils.rnn.pad_sequence([torch.tensor(rows[at]) for at in some], batch_first=True).to(device)
            middle_BTD, last_BTD = self._states(ids_BT)
            for row, at in enumerate(some):
                start, end = len(rows[at]) - len(own[at]), len(rows[at])
                hidden_TD, ids_T = last_BTD[row, start - 1 : end - 1], ids_BT[row, start:end]
                logp_T, _ = chosen_logprobs(hidden_TD, self.model.head_VD, ids_T)
                states_TD = torch.cat([middle_BTD[row, start:end], last_BTD[row, start:end]], -1)
                found[at] = states_TD.float().cpu(), -logp_T.float().cpu()
        return [found[at] for at in range(len(rows))]

    def _states(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []
        block = self.model.blocks[2 * len(self.model.blocks) // 3]
        hook = block.register_forward_hook(lambda module, given, made: kept.append(made[0]))
        try:
            last_BTD = self.model(ids_BT, self.model.config.full(), Context.plain(ids_BT)).hidden_BTD
        finally:
            hook.remove()
        return kept[0], last_BTD


def _pooled(states_TD: Tensor, surprise_T: Tensor, alone_T: Tensor, density: float) -> Tensor:
    """Features [S, F] of one text, of so many tokens a character."""
    num = len(states_TD)
    edges = torch.linspace(0, num, PIECES + 1).round().long().tolist()
    spans = [(min(low, num - 1), max(high, low + 1)) for low, high in pairwise(edges)]
    spans.append((num - 1, num))
    pieces = []
    for low, high in spans:
        own, alone = surprise_T[low:high], alone_T[low:high]
        gain = (alone - own).mean() * (num / WINDOW)  # of all tokens: a mean would fall with every further one
        told = torch.stack([density * own.mean(), own.max(), gain])
        pieces.append(torch.cat([states_TD[low:high].mean(0), told]))
    return torch.stack(pieces)


def open_reader(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Reader:
    """The checkpoint ``folder``; in bf16 where ``device`` has units for it. Raises `UserError`: it cannot be read."""
    place = torch.device(device)
    dtype = dtype or (torch.bfloat16 if multiplies_bf16(place) else torch.float32)
    return Reader(read_checkpoint(folder, device=place, dtype=dtype).model.eval(), load_tokenizer(folder), folder)


def train_head(whole_NSF: Tensor, damaged_KNSF: Tensor) -> Head:
    """A head that tells ``whole_NSF`` from the K damages of the same texts. The first four fifths of the texts fit the gates; by the
    last fifth it is decided which of them stand, and where. All fit the slope, each text against its own damage."""
    num = max(1, len(whole_NSF) * 4 // 5)
    # more than that, and a few dozen texts are told apart by their topics
    num_directions = min(_MOST_DIRECTIONS, max(1, num // 4), whole_NSF.shape[-1] - _TOLD)
    every_XF = torch.cat([whole_NSF[None], damaged_KNSF])[:, :num].flatten(0, 2)[:, :-_TOLD]
    mean_F, scale_F = every_XF.mean(0), every_XF.std(0).clamp_min(1e-6)
    units_XF = _units(every_XF, mean_F, scale_F)
    basis_FP = torch.linalg.eigh(units_XF.T @ units_XF).eigenvectors[:, -num_directions:]

    def pooled(read_NSF: Tensor) -> Tensor:
        return _pooled_states(read_NSF, mean_F, scale_F, basis_FP)

    whole_NG, damaged_KNG = pooled(whole_NSF), torch.stack([pooled(each) for each in damaged_KNSF])
    every_XG = torch.cat([whole_NG[None], damaged_KNG])[:, :num].flatten(0, 1)
    centre_G, spread_G = every_XG.mean(0), every_XG.std(0).clamp_min(1e-6)
    whole_NG, damaged_KNG = (_units(each, centre_G, spread_G) for each in (whole_NG, damaged_KNG))

    def gates(of_G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """By damage: weights of the features ``of_G``, the share of the last fifth's pairs that they tell, and the limit."""

        def loss(weight_KG: Tensor, bias_K: Tensor) -> Tensor:
            whole_NK = whole_NG[:num] @ (weight_KG * of_G).T + bias_K
            damaged_KN = torch.einsum("kng,kg->kn", damaged_KNG[:, :num], weight_KG * of_G) + bias_K[:, None]
            missed = F.softplus(whole_NK).mean(0).sum() + F.softplus(-damaged_KN).mean(1).sum()
            return missed + _DECAY * weight_KG.square().sum()

        weight_KG = _fitted(
            loss, damaged_KNG.new_zeros(len(damaged_KNG), len(of_G)), damaged_KNG.new_zeros(len(damaged_KNG))
        )[0]
        tried_KN = weight_KG @ whole_NG[num:].T
        found_KN = torch.einsum("kng,kg->kn", damaged_KNG[:, num:], weight_KG)
        told_K = (found_KN[:, :, None] > tried_KN[:, None]).float().mean((1, 2))
        limit_K = (tried_KN.quantile(1 - _ERRS, 1) + found_KN.quantile(_ERRS, 1)) / 2
        return weight_KG, told_K, limit_K

    # of few texts all features together may tell less than those that are no states
    is_told_X = torch.arange(num_directions + _TOLD) >= num_directions
    all_, few = gates(torch.ones(whole_NG.shape[1])), gates(is_told_X.repeat(3).float())
    is_few_K = few[1] > all_[1]
    weight_KG = torch.where(is_few_K[:, None], few[0], all_[0])
    told_K = torch.where(is_few_K, few[1], all_[1])
    limit_K = torch.where(told_K >= _FINDS, torch.where(is_few_K, few[2], all_[2]), math.inf)
    rest_K = limit_K.isinf() if limit_K.isinf().any() else torch.ones(len(limit_K), dtype=torch.bool)
    quality_NZ, worse_KNZ = _quality(whole_NSF), torch.stack([_quality(each) for each in damaged_KNSF])
    apart_KNZ = quality_NZ - worse_KNZ[rest_K]
    unit_Z = apart_KNZ.abs().flatten(0, 1).median(0).values.clamp_min(1e-6)  # what the subtle damages change
    apart_KNZ = apart_KNZ / unit_Z

    def slope_loss(slope_Z: Tensor) -> Tensor:
        return F.softplus(-apart_KNZ @ slope_Z).mean() + _DECAY * slope_Z.square().sum()

    slope_Z = _fitted(slope_loss, torch.zeros(len(unit_Z)))[0] / unit_Z
    reach = torch.cat([quality_NZ, *worse_KNZ]) @ slope_Z
    shut_K = (reach.max() - reach.min()).clamp_min(1.0) * 2.0 ** told_K.argsort().argsort()
    origin_Z = quality_NZ.median(0).values
    return Head(
        mean_F, scale_F, basis_FP, centre_G, spread_G, weight_KG.T.contiguous(), limit_K, slope_Z, origin_Z, shut_K
    )


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
    """``text`` in pieces that a reader reads whole, each with what is before it, None being the prompt; they end where sentences do."""
    said = sentences(plain(text))
    sizes = [len(ids) for ids in tokenizer.encode_batch([f" {each}" for each in said])]
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


class LocalJudge:
    """A reader and a head: how good texts are. Made by `open_judge`."""

    def __init__(self, record: JudgeRecord, reader: Reader, head: Head):
        self.record, self._reader, self.head = record, reader, head

    @torch.no_grad()
    def scores(self, asked: Sequence[Asked]) -> np.ndarray:
        """[N], fp64: differences are log odds. Texts without words have −inf. Raises `UserError`: a prompt in a script that it has
        never seen; an answer in one is an answer that it finds strange."""
        for prompt, _ in asked:
            if unknown := [
                name
                for name, share in scripts(prompt).items()
                if share > _MOST_FOREIGN and name not in self.record.scripts
            ]:
                raise UserError(
                    f"judge {self.record.name}: a prompt written in {unknown[0]}, of which it has read nothing: {prompt[:40]!r}; leave it out"
                )
        pieces = [
            (place, prompt if before is None else before, part)
            for place, (prompt, text) in enumerate(asked)
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

    def shares(self, asked: Sequence[Asked]) -> np.ndarray:
        """[N] in [0, 1]: ½ is the median of whole passages that it has learnt from."""
        return expit((self.scores(asked) - self.record.median) / self.record.spread)

    def first_wins(self, prompt: str, first: str, second: str) -> float:
        """1, ½ or 0; the same whichever is called the first."""
        one, other = self.scores([(prompt, first), (prompt, second)])
        return 0.5 if one == other or abs(one - other) <= TIE else float(one > other)


def read_books(paths: Iterable[Path], author: str = "author") -> list[tuple[str, str]]:
    """Author and text of the records that name an ``author``. Raises `UserError`: none does, or a file cannot be read."""
    rows = Rows()
    files = [file for path in paths for file in find_files(path).splits["train"]]
    for _ in read_files(files, rows):
        pass
    books = [(str(each[author]), str(each["text"])) for each, _ in rows if each.get(author) and each.get("text")]
    if not books:
        raise UserError(
            f"--data: no record has the fields 'text' and {author!r}; name books in JSONL, with their authors"
        )
    return books


def check_enough(found: Sequence[Passage], part: Part, least: int) -> None:
    """Raises `UserError`: fewer than ``least`` passages, or of one author alone."""
    authors = {each.author for each in found}
    if len(found) < least or len(authors) < 2:
        raise UserError(
            f"--data: {len(found)} passages by {len(authors)} authors of the part {part!r}, of {least} and two at least; name more books"
        )


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
            "weights": weights_hash(reader.folder), "seed": seed,
            "scripts": known,
            "authors": sorted({each.author for each in found}),
            "median": float(scores_KN[0].median()),
            "spread": float((scores_KN[0].quantile(0.84) - scores_KN[0].quantile(0.16)) / 2),
        }  # fmt: skip
        record = validate(JudgeRecord, told, str(out))
        write_json(partial / JUDGE_FILE, record.model_dump(mode="json"))
    return record


def open_judge(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> LocalJudge:
    """What `save_judge` wrote. Raises `UserError`: it is not there or damaged, or its network is another one now."""
    if not (folder / JUDGE_FILE).is_file():
        raise UserError(f"{folder / JUDGE_FILE}: no such file; `stretto judge train … -o {folder}` makes a judge")
    record = validate(JudgeRecord, read_json(folder / JUDGE_FILE), str(folder / JUDGE_FILE))
    if weights_hash(record.network) != record.weights:
        raise UserError(
            f"{folder / JUDGE_FILE}: network: {record.network} has other weights now; train the judge again"
        )
    try:
        state = load_file(folder / HEAD_FILE)
    except Exception as error:
        raise UserError(f"{folder / HEAD_FILE}: not readable: {error}; train the judge again") from None
    return LocalJudge(record, open_reader(record.network, device, dtype), Head(**state))


def features(reader: Reader, found: Sequence[Passage], told: Sequence[Mapping[str, str]]) -> Tensor:
    """[1 + damages, N, S, F]: of passages and of what `stretto.text.passages.damaged` made of them."""
    texts = [[each.text for each in found], *([each[name] for each in told] for name in DAMAGES)]
    asked = [(own.prompt, text) for each in texts for own, text in zip(found, each, strict=True)]
    return reader.read(asked).unflatten(0, (len(texts), len(found)))
