"""Teachers that score the student's samples: local networks or Subnets, and servers.

A teacher reads the samples of its own sources after the prompt in its own format; the student's tokens follow unchanged. Each
teacher packs its samples itself, and its scores are ordered by target: all targets of its samples, one sample after another,
whatever rows they were in. A teacher uses its own routes, because the student's routes belong to another network.

Shape letters: B rows, T positions, M targets of a teacher's samples, N targets of all samples, D the teacher's hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.base.endpoint import KEY_ENV, Unanswered, key_header, patiently
from stretto.base.errors import UserError, one_line
from stretto.base.paths import checkpoint_folder
from stretto.base.records import Lineage
from stretto.learning.algorithms import Streams
from stretto.learning.batch import pack, target_places
from stretto.learning.dialogue import translation
from stretto.learning.distillation import Lesson
from stretto.learning.passes import Pass, place
from stretto.learning.recipe import DistillConfig, RlRecipe, TeacherConfig
from stretto.model.checkpoint import describe, known_hash
from stretto.model.counts import count
from stretto.model.headers import check_files
from stretto.model.parallel import Ranks, read_placed
from stretto.model.spec import executed, parse_subnet
from stretto.ops.logprob import Teacher, chosen_logprobs
from stretto.ops.matmul import Arithmetic
from stretto.text.spans import Translated, Translation
from stretto.text.tokenizer import Tokenizer, load_tokenizer

Groups = Sequence[Sequence[Streams]]
_NUM_REQUESTS = 8
"""Concurrent requests to a server."""
_FIND_S = 30.0
"""Longest wait for a server to answer `find_teachers`, in seconds."""
_PAUSE_S = 1.0
"""Seconds before the second attempt at a request; each further pause is twice as long."""
_MIN_EQUAL = 0.5
"""Smallest share of a reply's tokens whose text equals the student's. Below it, the server has another tokenizer."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """A teacher's scores of the targets of its samples, one sample after another."""

    values: Teacher | Tensor
    """Final hidden states [M, D] and their head, or log-probabilities [M]."""
    flops: int
    """FLOPs over all ranks; 0 for a server."""
    spans_M: Tensor | None = None
    """See `Lesson`."""

    def lesson(self, here: Tensor, places: NDArray[np.int64]) -> Lesson:
        """Scores of the targets ``places``, which are at positions ``here`` of a pass; ``places`` cover whole samples."""
        at = torch.from_numpy(places).to(here.device)
        if isinstance(self.values, Tensor):
            return Lesson(here, self.values[at], None if self.spans_M is None else self.spans_M[at])
        return Lesson(here, Teacher(self.values.hidden_ND[at], self.values.head_VD))


class Scorer(Protocol):
    """Interface of a teacher. With several ranks, all ranks must call it together."""

    lineage: Lineage | None
    """Lineage of its checkpoint, whose cost is part of the student's cost."""

    def score(self, groups: Groups) -> Scores:
        """Scores of samples prepared by `as_read`. Raises UserError: the teacher is not available any more."""


def find_teachers(recipe: RlRecipe) -> None:
    """Check, before the student exists, that the teachers' checkpoints are there and that their servers answer.
    Raises UserError: one is missing, does not answer, or refuses the key."""
    folders = {f"teachers.{name}": folder for name, folder in recipe.teachers.items()}
    for name, config in {} if recipe.distill is None else recipe.distill.teachers.items():
        where = f"distill.teachers.{name}"
        if config.url is None:
            assert config.checkpoint is not None, "a teacher has one of both"
            folders[f"{where}.checkpoint"] = config.checkpoint
        else:
            try:
                reply = httpx.get(f"{config.url}/v1/models", headers=key_header(), timeout=_FIND_S)
            except httpx.HTTPError as error:
                problem = f"does not answer: {one_line(error)}; start the server, or correct the address"
                raise UserError(f"{where}.url: {config.url}: {problem}") from None
            if reply.status_code in (401, 403):
                raise UserError(f"{where}.url: {config.url}: refuses the key; correct {KEY_ENV}")
    for where, folder in folders.items():
        try:
            check_files(checkpoint_folder(folder))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def check_teachers(recipe: RlRecipe, start: Path) -> None:
    """Check the teachers' checkpoints without reading their weights. Raises UserError: a checkpoint is missing, has no such Subnet
    or an incompatible vocabulary, or is the student at ``start`` itself."""
    distill = recipe.distill
    own = describe(start).config
    for name, config in sorted({} if distill is None else distill.teachers.items()):
        if config.checkpoint is None or config.url is not None:
            continue
        where = f"distill.teachers.{name}"
        try:
            folder = checkpoint_folder(config.checkpoint)
            teacher = describe(folder)
            check_files(folder)
        except UserError as error:
            raise UserError(f"{where}.checkpoint: {error}") from None
        subnet = parse_subnet(config.subnet, teacher.config, teacher.presets, f"{where}.subnet")
        if _translation(recipe, name, start, folder) is None and teacher.config.vocab_size != own.vocab_size:
            problem = f"a vocabulary of {teacher.config.vocab_size}, the student's is {own.vocab_size}"
            raise UserError(f"{where}: {problem}; choose another")
        is_like = distill is not None and distill.kl_floor > 0 and subnet == teacher.config.full() == own.full()
        if is_like and known_hash(folder) == known_hash(start):
            raise UserError(
                f"{where}: {folder} holds the student's own weights: there is nothing to learn; name another checkpoint or a "
                "part of this one, or set distill.kl_floor = 0"
            )


def open_teachers(recipe: RlRecipe, start: Path, ranks: Ranks, arithmetic: Arithmetic) -> dict[str, Scorer]:
    """The teachers of ``recipe.distill`` by name, for the student at ``start``; {} without distillation.
    Raises UserError: as `check_teachers`; a checkpoint cannot be read, or a server does not answer."""
    teachers: dict[str, Scorer] = {}
    if recipe.distill is None:
        return teachers
    check_teachers(recipe, start)
    for name, config in sorted(recipe.distill.teachers.items()):
        folder = start if config.checkpoint is None else checkpoint_folder(config.checkpoint)
        if config.url is None:
            teachers[name] = LocalTeacher(config, recipe, ranks, arithmetic)
        else:
            teachers[name] = RemoteTeacher(name, config, recipe, _tokenizer(folder), ranks)
        if (translation := _translation(recipe, name, start, folder)) is not None:
            teachers[name] = TranslatedTeacher(teachers[name], translation)
    return teachers


def _tokenizer(folder: Path) -> Tokenizer | None:
    return load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None


def _translation(recipe: RlRecipe, name: str, start: Path, folder: Path) -> Translation | None:
    """`translation` between two checkpoints; also None if one of them has no tokenizer."""
    own, other = _tokenizer(start), _tokenizer(folder)
    return None if own is None or other is None else translation(recipe, name, own, other)


def as_read(sample: Streams, teacher: str, number: int) -> Streams:
    """``sample`` as ``teacher`` reads it: after the teacher's own prompt if it has one. The targets stay the same."""
    tokens, mask_S, prompt = sample.tokens, sample.mask_S, sample.prompts.get(teacher)
    if prompt is not None:
        num = len(sample.trajectory.segments[0].tokens)
        tokens = np.concatenate([prompt, tokens[num:]])
        mask_S = np.concatenate([np.zeros(len(prompt) - 1, np.bool_), mask_S[num - 1 :]])
    return _retokenised(sample, number, tokens, mask_S)


def _retokenised(sample: Streams, number: int, tokens: NDArray[np.int32], mask_S: NDArray[np.bool_]) -> Streams:
    """``sample`` with other tokens and the data needed to score them."""
    blank_S = np.zeros(len(mask_S), np.int32)
    streams: dict[str, Any] = dict.fromkeys(("logprobs_S", "steps_S"), blank_S.astype(np.float32))
    return replace(
        sample,
        **streams,
        number=number,
        tokens=tokens,
        versions_S=blank_S,
        routes_SLK=None,
        mask_S=mask_S,
        turns_S=blank_S - ~mask_S,
        scores={},
    )


def give_lessons(
    groups: Groups, passes: Sequence[Pass], teachers: Mapping[str, Scorer], distill: DistillConfig, ranks: Ranks
) -> int:
    """Score every sample by the teacher of its source, and store the scores in the passes. Returns the FLOPs.

    Teachers are called in order of their names, so that their order in the recipe changes nothing.
    """
    samples, owners = [sample for group in groups for sample in group], distill.teacher_of()
    lessons: list[list[Lesson]] = [[] for _ in passes]
    places = [target_places(micro.batch, samples)[ranks.rows(len(micro.batch.tokens_BT))].ravel() for micro in passes]
    flops = 0
    for name, teacher in sorted(teachers.items()):
        is_own = [owners.get(sample.source) == name for sample in samples]
        if not any(is_own):
            continue
        numbers = dict(zip(np.flatnonzero(is_own).tolist(), range(len(samples)), strict=False))
        own = [
            [as_read(sample, name, numbers[sample.number]) for sample in group if sample.number in numbers]
            for group in groups
        ]
        scores = teacher.score([group for group in own if group])
        flops += scores.flops
        is_own_N = np.repeat(is_own, [int(sample.mask_S.sum()) for sample in samples])
        own_N = np.append(np.where(is_own_N, np.cumsum(is_own_N) - 1, -1), -1)  # the last: index −1, without a target
        for micro, places_N, given in zip(passes, places, lessons, strict=True):
            here = np.flatnonzero(own_N[places_N] >= 0)
            at = torch.from_numpy(here).to(micro.mine["tokens_BT"].device)
            given.append(scores.lesson(at, own_N[places_N[here]]))
    for micro, given in zip(passes, lessons, strict=True):
        micro.lessons = tuple(given)
    return flops


def target_logprobs(lesson: Lesson, micro: Pass) -> Tensor:
    """The teacher's log-probabilities [M] of the targets of ``lesson``, a lesson of the pass, or of their spans."""
    if isinstance(lesson.scores, Tensor):
        return lesson.scores
    targets_M = micro.mine["targets_BT"].flatten()[lesson.places_M]
    return chosen_logprobs(lesson.scores.hidden_ND, lesson.scores.head_VD, targets_M, operators=micro.ctx.operators)[0]


class LocalTeacher:
    """A checkpoint, or a Subnet of it, in this process."""

    def __init__(self, config: TeacherConfig, recipe: RlRecipe, ranks: Ranks, arithmetic: Arithmetic):
        """``config`` has passed `check_teachers`. Raises UserError: the weights cannot be read."""
        assert config.checkpoint is not None and recipe.distill is not None
        self._folder, self._train, self._ranks = checkpoint_folder(config.checkpoint), recipe.train, ranks
        self._arithmetic, self._gives_hidden = arithmetic, recipe.distill.form != "sampled"
        checkpoint = read_placed(self._folder, ranks)
        self.lineage, self._shape = checkpoint.lineage, checkpoint.config
        self._subnet = parse_subnet(config.subnet, checkpoint.config, checkpoint.presets)
        self._model = None if config.residence == "swapped" else checkpoint.model.requires_grad_(False)

    @torch.no_grad()
    def score(self, groups: Groups) -> Scores:
        """Forward pass over the samples. Gives hidden states, or log-probabilities of the targets for the form ``sampled``."""
        model, ranks, train = self._model or read_placed(self._folder, self._ranks).model, self._ranks, self._train
        samples = [sample for group in groups for sample in group]
        longest = max(train.seq_len, *(sample.num_inputs for sample in samples))  # the teacher's prompts may be longer
        total = sum(int(sample.mask_S.sum()) for sample in samples)
        values_M = torch.zeros(total, *[self._shape.hidden_size] * self._gives_hidden, device=ranks.device)
        counts, flops = count(self._shape, executed(self._shape, self._subnet)), 0
        for batch in pack(groups, longest, train.micro_rows, share=ranks.world, with_routes=False):
            micro = place(batch, ranks, self._arithmetic, replays=False)
            with micro.autocast:
                hidden_BTD = model(micro.mine["tokens_BT"], self._subnet, micro.ctx).hidden_BTD
            mine_N = target_places(batch, samples)[ranks.rows(len(batch.tokens_BT))].ravel()
            at, to = (
                torch.from_numpy(part).to(ranks.device) for part in (np.flatnonzero(mine_N >= 0), mine_N[mine_N >= 0])
            )
            value_M = hidden_BTD.flatten(0, 1)[at]
            if not self._gives_hidden:
                targets_M = micro.mine["targets_BT"].flatten()[at]
                with micro.autocast:
                    value_M = chosen_logprobs(value_M, model.head_VD, targets_M, operators=micro.ctx.operators)[0]
            values_M[to] = value_M
            flops += counts.forward_flops(batch.tokens_BT.size, batch.tokens_BT.shape[1])
        ranks.sum(values_M)
        return Scores(Teacher(values_M, model.head_VD.detach()) if self._gives_hidden else values_M, flops)


class TranslatedTeacher:
    """A teacher with another tokenizer. Its score of a span of text is the sum over the span's tokens."""

    def __init__(self, teacher: Scorer, translation: Translation):
        self._teacher, self._translation, self.lineage = teacher, translation, teacher.lineage

    def score(self, groups: Groups) -> Scores:
        """Scores of samples of one turn after a prompt in the teacher's own tokens."""
        pairs = [[self._translated(sample) for sample in group] for group in groups]
        scores = self._teacher.score([[sample for sample, _ in group] for group in pairs])
        assert isinstance(scores.values, Tensor), "hidden states are of other tokens"
        turns, device = [turn for group in pairs for _, turn in group], scores.values.device
        starts = np.cumsum([0, *(turn.num_spans for turn in turns)])
        own_M, theirs = (
            torch.from_numpy(np.concatenate([start + spans_M for start, spans_M in zip(starts, spans, strict=False)]))
            for spans in ([turn.own_T for turn in turns], [turn.theirs_K for turn in turns])
        )
        totals = scores.values.new_zeros(int(starts[-1])).index_add(0, theirs.to(device), scores.values)
        return Scores(totals[own_M.to(device)], scores.flops, own_M.to(device))

    def _translated(self, sample: Streams) -> tuple[Streams, Translated]:
        num = 1 + int(sample.mask_S.argmax())
        assert sample.mask_S[num - 1 :].all(), f"{sample.where}: more than one turn"
        turn = self._translation(sample.tokens[num:].tolist())
        tokens = np.concatenate([sample.tokens[:num], turn.ids_K])
        return _retokenised(sample, sample.number, tokens, np.arange(1, len(tokens)) >= num), turn


class RemoteTeacher:
    """A model behind an OpenAI-compatible server that returns the log-probabilities of a prompt."""

    lineage: Lineage | None = None

    def __init__(self, name: str, config: TeacherConfig, recipe: RlRecipe, tokenizer: Tokenizer | None, ranks: Ranks):
        """``tokenizer``: checked against the server's replies; None: not checked. Raises UserError: the server does not answer."""
        self._where, self._url = f"distill.teachers.{name}: {config.url}", str(config.url)
        self._failures, self._tokenizer, self._ranks = recipe.failures, tokenizer, ranks
        self._model = config.model or ranks.first(self._first_model)

    def score(self, groups: Groups) -> Scores:
        """Log-probabilities of the targets, with one request per sample."""

        def ask() -> list[list[float]]:
            samples = [sample for group in groups for sample in group]
            with self._client() as client, ThreadPoolExecutor(_NUM_REQUESTS) as pool:
                return list(pool.map(partial(self._scored, client), samples))

        by_sample = self._ranks.first(ask)
        return Scores(torch.tensor([value for values in by_sample for value in values], device=self._ranks.device), 0)

    def _client(self) -> httpx.Client:
        return httpx.Client(headers=key_header(), timeout=self._failures.lease_s)

    def _first_model(self) -> str:
        with self._client() as client:
            listed = self._request(lambda: client.get(f"{self._url}/v1/models"))
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise UserError(f"{self._where}: lists no model; name one with model") from None

    def _scored(self, client: httpx.Client, sample: Streams) -> list[float]:
        """Log-probabilities of the sample's targets."""
        tokens = sample.tokens.tolist()
        # one token is sampled and dropped, because some servers refuse ``max_tokens`` 0
        options = {"max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 1.0}
        body = {"model": self._model, "prompt": tokens, **options}
        reply = self._request(lambda: client.post(f"{self._url}/v1/completions", json=body))
        try:
            table = reply["choices"][0]["logprobs"]
            num, texts, values = reply["usage"]["prompt_tokens"], table["tokens"], table["token_logprobs"]
            logprobs = [float(value) for value, is_target in zip(values[1:], sample.mask_S, strict=False) if is_target]
        except (KeyError, IndexError, TypeError):
            logprobs, num = [], len(tokens)
        if len(logprobs) != int(sample.mask_S.sum()) or not np.isfinite(logprobs).all():
            raise UserError(
                f"{self._where}: gives no log-probabilities of a prompt (echo, logprobs); use another server"
            )
        if num != len(tokens):
            raise UserError(
                f"{self._where}: makes {num} tokens of the {len(tokens)} that it was given; serve the student's tokenizer"
            )
        if self._tokenizer is not None:
            own_texts = [self._tokenizer.decode([token]) for token in tokens]
            num_equal = sum(own == other for own, other in zip(own_texts, texts, strict=False))
            if num_equal < _MIN_EQUAL * len(tokens):
                raise UserError(
                    f"{self._where}: spells {len(tokens) - num_equal} of {len(tokens)} tokens otherwise; a teacher needs the "
                    "student's tokenizer"
                )
        return logprobs

    def _request(self, send: Callable[[], httpx.Response]) -> Any:
        """JSON of a reply. Raises UserError: the server refuses the request, or does not answer within all attempts."""
        remedy, tries = f"correct url, model or {KEY_ENV}", self._failures.max_attempts
        try:
            return patiently(send, self._where, remedy, tries=tries, pause_s=_PAUSE_S)
        except Unanswered as error:
            raise UserError(f"{self._where}: {error}; start it again, then continue with --resume") from error
