"""`stretto.load` and its result, `Model`: a checkpoint at every size, with generation, scores of texts, logits and export.

Shape letters: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Annotated, Any, overload

import torch
from pydantic import ValidationError
from torch import Tensor

from stretto.api.adopt import AdoptOptions, adopt_command, find_source
from stretto.api.search import BEST, export_command, named_subnet, read_search
from stretto.base.config import first_problem, validate
from stretto.base.errors import UserError, check_text, user_errors
from stretto.base.numbers import params, si
from stretto.base.paths import CHECKPOINT, RUN_FILE, checkpoint_folder, expanded, model_name, user_cache, user_path
from stretto.base.records import Lineage
from stretto.base.table import Cell, Table, Tabled
from stretto.engine.engine import Engine, stream
from stretto.engine.loading import DTYPES, generation_ends, open_engine
from stretto.engine.request import CONSOLE_PENALTY, Completion, EngineConfig, Phases, Request, Sampling
from stretto.model.checkpoint import Checkpoint, read_checkpoint, read_config, read_presets, stores_integers
from stretto.model.counts import count
from stretto.model.parallel import DeviceLike, join
from stretto.model.spec import ModelConfig, Subnet, check_subnet, named_subnets
from stretto.model.transformer import Context, Transformer
from stretto.ops import native
from stretto.ops.logprob import head_loss
from stretto.server.calls.answers import read_answer
from stretto.server.messages import Message, Prompts
from stretto.text.tokenizer import Tokenizer, load_tokenizer

CACHED_SEQUENCES, CACHED_TOKENS = 16, 4096
"""Size of the key-value cache: number of sequences, and tokens of each (at most the network's positions). Small enough to leave
memory for the rest of a notebook."""

SizeLike = Annotated[str | Subnet, "the name of a size, layers=…,experts=…,top_k=…, or a Subnet"]
SubnetLike = SizeLike | None
"""The name of a size (``full``, ``half``, ``corner``, ``best``), ``layers=…,experts=…,top_k=…``, a `Subnet`, or None for the full network."""
SourceLike = Annotated["str | os.PathLike[str] | Model", "a folder, a file, or a name on the hub"]
"""A run or checkpoint folder, a GGUF file, a name on the Hugging Face hub, or an opened model."""
Messages = Annotated[str | Sequence[Mapping[str, Any]], 'a text, or a list of messages {"role": …, "content": …}']
"""One message of the user, or a conversation."""


@dataclass(frozen=True, slots=True)
class Size:
    """One named size of a model."""

    name: str
    subnet: Subnet
    layers: int
    experts: str
    """Experts per MoE layer: one number, or a range if layers differ."""
    top_k: str
    """Experts per token: one number, or a range if layers differ."""
    total_params: int
    active_params: int
    """Parameters that one token uses."""
    flops_per_token: int
    """FLOPs of all matrix products with weights for one token, without attention over earlier tokens."""


class Sizes(Tabled, Mapping[str, Subnet]):
    """The named sizes of a model: a mapping from name to `Subnet`, shown as a table."""

    def __init__(self, config: ModelConfig, named: Mapping[str, Subnet]):
        self.rows = tuple(_size(config, name, subnet) for name, subnet in named.items())
        self._by_name = {row.name: row for row in self.rows}

    def __getitem__(self, name: str) -> Subnet:
        return self._by_name[name].subnet

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def table(self) -> Table:
        """Name, layers, experts, top-k, parameters and FLOPs per token of each size."""
        full = self.rows[0]
        rows = tuple(
            (
                Cell(row.name),
                Cell(str(row.layers), row.layers),
                Cell(row.experts),
                Cell(row.top_k),
                Cell(params(row.total_params), row.total_params),
                Cell(f"{row.total_params / full.total_params:.0%}"),
                Cell(params(row.active_params), row.active_params),
                Cell(si(row.flops_per_token, ""), row.flops_per_token),
            )
            for row in self.rows
        )
        columns = ("size", "layers", "experts", "top-k", "params", "share", "active", "FLOPs/token")
        return Table("", columns, rows, note="FLOPs: forward, without those of attention, which grow with the context.")


def _size(config: ModelConfig, name: str, subnet: Subnet) -> Size:
    counts = count(config, subnet)
    spans = (_span(subnet.experts), _span(subnet.top_k))
    return Size(
        name, subnet, len(subnet.layers), *spans, counts.total_params, counts.active_params, counts.linear_flops
    )


def _span(values: tuple[int, ...]) -> str:
    if not values:
        return "–"
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)}–{max(values)}"


@dataclass(frozen=True, slots=True)
class Generation:
    """The continuation of one prompt. ``print`` shows its text."""

    prompt: str
    text: str
    """The continuation without the prompt."""
    token_ids: tuple[int, ...]
    """Sampled token ids, the ending token included."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token, nats, after temperature and penalties."""
    finish_reason: str
    """``stop`` (an end token or a stop string), or ``length`` (``max_tokens`` were sampled)."""
    seed: int
    """The seed that gives the same text again."""
    reasoning: str | None = None
    """With `Model.chat`: the reasoning before the answer, which ``text`` does not contain; None: there is none."""

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f'<pre><span style="opacity:.6">{escape(self.prompt)}</span>{escape(self.text)}</pre>'


@dataclass(frozen=True, slots=True)
class Score:
    """Log-likelihood of one text."""

    text: str
    log_likelihood: float
    """Sum over all tokens of the text, nats; the first token is predicted from the end-of-document token."""
    num_tokens: int
    num_bytes: int

    @property
    def nats_per_token(self) -> float:
        return -self.log_likelihood / self.num_tokens

    @property
    def bits_per_byte(self) -> float:
        """Negative log-likelihood in bits over UTF-8 bytes: comparable between tokenizers."""
        return -self.log_likelihood / (self.num_bytes * math.log(2))


class Scores(Tabled, Sequence[Score]):
    """Log-likelihoods of several texts, shown as a table."""

    def __init__(self, rows: Sequence[Score]):
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, place: int) -> Score: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Score, ...]: ...
    def __getitem__(self, place: int | slice) -> Score | tuple[Score, ...]:
        return self._rows[place]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def bits_per_byte(self) -> float:
        """Negative log-likelihood of all texts in bits, divided by their number of UTF-8 bytes."""
        bits = -sum(row.log_likelihood for row in self._rows) / math.log(2)
        return bits / sum(row.num_bytes for row in self._rows)

    @property
    def table(self) -> Table:
        rows = tuple(
            (
                Cell(row.text[:40].replace("\n", " ") + ("…" if len(row.text) > 40 else "")),
                Cell(f"{row.log_likelihood:.2f}", row.log_likelihood),
                Cell(f"{row.num_tokens:,}", row.num_tokens),
                Cell(f"{row.nats_per_token:.3f}", row.nats_per_token),
                Cell(f"{row.bits_per_byte:.3f}", row.bits_per_byte),
            )
            for row in self._rows
        )
        return Table("", ("text", "log-likelihood (nats)", "tokens", "nats/token", "bits/byte"), rows)


class Model:
    """A checkpoint and all of its sizes. `stretto.load` opens one. The weights are read at the first use.

    Several threads may use one model: calls of `generate` and `chat` take turns. While a `stream` is open, both and a second `stream`
    raise `UserError`.
    """

    def __init__(self, source: str | os.PathLike[str], device: DeviceLike = "auto", dtype: str | None = None):
        """Open the run or checkpoint folder ``source``; ``device`` and ``dtype`` are those of `load`.

        Raises:
            UserError: there is no such checkpoint, or it is not supported.
        """
        self.given = user_path(source, "source")
        """The run or checkpoint folder, as given."""
        self.folder = checkpoint_folder(self.given).absolute()
        """The absolute path of the checkpoint folder."""
        self.source = self.given.absolute()
        """The absolute path of the run or checkpoint folder, so that the model works after `os.chdir`, too."""
        self.config: ModelConfig = read_config(self.folder)
        """Shape of the full network."""
        self.device = join(device).device
        if dtype is not None and dtype not in DTYPES:
            raise UserError(f"dtype {dtype}: unknown; use {', '.join(DTYPES)}")
        default = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.dtype = DTYPES[dtype] if dtype is not None else default
        self._turn = threading.Lock()
        """Held by the thread that uses the engine; a stream holds it only while it opens, and sets ``_is_streaming`` until its end."""
        self._is_streaming = False

    def __fspath__(self) -> str:
        """The run or checkpoint folder, so that a model is a path, too."""
        return str(self.source)

    @property
    def run(self) -> Path | None:
        """The run folder; None for a checkpoint outside a run."""
        for folder in (self.source, self.folder.parent):
            if (folder / RUN_FILE).is_file():
                return folder
        return None

    @property
    def name(self) -> str:
        """Name of the run, or of the checkpoint folder outside a run."""
        return model_name(self.folder)

    @property
    def subnets(self) -> Sizes:
        """The named sizes: ``full``, the presets, and ``best`` where the run was searched."""
        named = dict(named_subnets(self.config, read_presets(self.folder)))
        if self.run is not None and read_search(self.run) is not None:
            named[BEST] = self.subnet(BEST)
        return Sizes(self.config, named)

    def subnet(self, size: SubnetLike) -> Subnet:
        """The `Subnet` that ``size`` names.

        Raises:
            UserError: the network has no such size.
        """
        if size is None:
            return self.config.full()
        if isinstance(size, Subnet):
            return check_subnet(self.config, size)
        if not isinstance(size, str):
            raise UserError(f"subnet: {size!r}; needs a name, layers=…,experts=…,top_k=…, or a Subnet")
        return named_subnet(self.run or self.source, size, self.config, read_presets(self.folder))

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return read_checkpoint(self.folder, device=self.device, dtype=self.dtype)

    @property
    def module(self) -> Transformer:
        """The full network as a `torch.nn.Module`; ``module(ids_BT, subnet, ctx)`` runs one size of it."""
        return self._checkpoint.model

    @property
    def lineage(self) -> Lineage | None:
        """Parents, settings and cost of the checkpoint; None for a foreign checkpoint."""
        return self._checkpoint.lineage

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises `UserError`: it has none."""
        return load_tokenizer(self.folder)

    @cached_property
    def _engine(self) -> Engine:
        max_len = min(self.config.max_positions, CACHED_TOKENS)
        config = EngineConfig(max_batch=CACHED_SEQUENCES, max_step_tokens=1024, max_len=max_len)
        config = config.replace(num_pages=CACHED_SEQUENCES * -(-max_len // config.page_size))
        if stores_integers(self.folder):
            # the kernels need no values of these weights: a network of its own takes less memory than `module`
            return open_engine(self.folder, config, device=self.device, dtype=self.dtype, routes=False).engine
        return Engine(
            self.module.requires_grad_(False),
            self.tokenizer,
            config,
            end_ids=generation_ends(self.folder, self.config.vocab_size),
            routes=False,
            library=native.load() if self.device.type == "cpu" else None,
        )

    @overload
    def generate(self, prompt: str, *, subnet: SubnetLike = None, **sampling: Any) -> Generation: ...
    @overload
    def generate(self, prompt: Sequence[str], *, subnet: SubnetLike = None, **sampling: Any) -> list[Generation]: ...
    @user_errors
    def generate(
        self, prompt: str | Sequence[str], *, subnet: SubnetLike = None, **sampling: Any
    ) -> Generation | list[Generation]:
        """Continue a text, or several at once. A prompt begins with the tokens that the tokenizer adds before a text, as the BOS of
        Llama; an empty one begins a new document.

        Args:
            subnet: the size that generates.
            sampling: ``max_tokens`` (128), ``temperature`` (0: greedy decoding), ``seed``, ``top_p``, ``top_k``, ``min_p``,
                ``repetition_penalty`` (1.1), ``stop`` (a tuple of strings) and the other fields of `Sampling`.

        Returns:
            A `Generation` for one prompt, a list of them for several.

        Raises:
            UserError: no such size, a prompt longer than the context, or an impossible sampling value.
        """
        prompts = _texts(prompt, "prompt")
        ids = [self.tokenizer.document(text) for text in prompts]
        completions = self._run(ids, self.subnet(subnet), _sampling(sampling))
        generations = [_generation(text, done) for text, done in zip(prompts, completions, strict=True)]
        return generations[0] if isinstance(prompt, str) else generations

    @user_errors
    def stream(self, prompt: str, *, subnet: SubnetLike = None, **sampling: Any) -> Iterator[str]:
        """Yield the continuation of one prompt piece by piece while it is generated. Arguments and errors as in `generate`. Closing the
        iterator ends the generation."""
        if not isinstance(prompt, str):
            raise UserError("prompt: needs a text")
        check_text(prompt, "prompt")
        ids = self.tokenizer.document(prompt)
        self._require_no_stream()
        return self._pieces(ids, self.subnet(subnet), _sampling(sampling))

    def _pieces(self, ids: list[int], subnet: Subnet, sampling: Sampling) -> Iterator[str]:
        with self._turn:
            self._require_no_stream()  # one may have opened before this one was read
            engine, self._is_streaming = self._engine, True
        try:
            yield from stream(engine, ids, subnet, sampling)
        finally:
            self._is_streaming = False

    @user_errors
    def chat(self, messages: Messages, *, subnet: SubnetLike = None, **sampling: Any) -> Generation:
        """The assistant's next message.

        Args:
            messages: one user message, or a conversation as ``[{"role": "user", "content": "…"}, …]``.
            subnet: the size that answers.
            sampling: as in `generate`.

        Raises:
            UserError: the tokenizer has no chat template, a message is none, or an error of `generate`.
        """
        if self.tokenizer.chat_template is None:
            raise UserError(
                f"{self.folder}: chat_template: the tokenizer has none; use generate, or add a chat_template.jinja"
            )
        prompts, settings = Prompts(self.tokenizer), _sampling(sampling)
        ids = prompts.chat(_conversation(messages))
        settings = settings.replace(stop_ids=(*settings.stop_ids, *prompts.turn_ends))
        completion = self._run([ids], self.subnet(subnet), settings, prompts.visible_ids)[0]
        reader = prompts.reader(None, reads_thoughts=True, is_thinking=prompts.thinks(ids))
        said = read_answer(reader, completion.text)
        generation = _generation(self.tokenizer.decode(ids), completion)
        return replace(generation, text=said.content, reasoning=said.reasoning or None)

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        subnet: Subnet,
        sampling: Sampling,
        visible_ids: frozenset[int] = frozenset(),
    ) -> list[Completion]:
        requests = [
            Request(f"model-{number}", tuple(ids), sampling, Phases(subnet), visible_ids=visible_ids)
            for number, ids in enumerate(prompts)
        ]
        with self._turn:
            self._require_no_stream()
            engine = self._engine
            try:
                done = engine.generate(requests)
            finally:  # after an error or an interrupt, the engine must be idle again
                for request in requests:
                    engine.abort(request.id)
        for each in done:
            if each.error is not None:
                raise UserError(f"generate: the engine could not finish this request: {each.error}")
        return done

    def _require_no_stream(self) -> None:
        """Raises `UserError`: a `stream` is open, whose pieces another request would take."""
        if self._is_streaming:
            raise UserError("a stream of this model is open; read it to its end, or close it")

    @user_errors
    @torch.no_grad()
    def logits(
        self, token_ids: Tensor | Sequence[int] | Sequence[Sequence[int]], *, subnet: SubnetLike = None
    ) -> Tensor:
        """Logits of the next token after every position.

        Args:
            token_ids: [batch, position], or [position] for one row; every row has the same length.
            subnet: the size that computes them.

        Returns:
            fp32 [batch, position, vocabulary].

        Raises:
            UserError: an id outside the vocabulary, rows of different lengths, or no such size.
        """
        chosen = self.subnet(subnet)
        try:
            ids_BT = torch.as_tensor(token_ids, device=self.device)
            if ids_BT.is_floating_point() and ids_BT.numel():
                raise TypeError("it has fractions")
            ids_BT = ids_BT.long()
        except (ValueError, TypeError) as error:
            raise UserError(f"token_ids: not a table of integers with rows of equal length: {error}") from None
        ids_BT = ids_BT[None] if ids_BT.ndim == 1 else ids_BT
        if ids_BT.ndim != 2 or not ids_BT.numel():
            raise UserError(f"token_ids: shape {tuple(ids_BT.shape)}; needs [batch, position] with at least one token")
        if ids_BT.min() < 0 or ids_BT.max() >= self.config.vocab_size:
            raise UserError(f"token_ids: an id is outside the vocabulary of {self.config.vocab_size}")
        if ids_BT.shape[1] > self.config.max_positions:
            raise UserError(f"token_ids: {ids_BT.shape[1]} positions; the network has {self.config.max_positions}")
        return self.module.logits(ids_BT, chosen)

    @user_errors
    @torch.no_grad()
    def score(self, texts: str | Sequence[str], *, subnet: SubnetLike = None) -> Scores:
        """Log-likelihood of each text over all its tokens. The first token is predicted from the tokens that the tokenizer adds before
        a text, as the BOS of Llama, or else from the end-of-document token. A text longer than the context is cut into pieces, and each
        piece is scored on its own.

        Args:
            texts: one text or several.
            subnet: the size that scores.

        Raises:
            UserError: an empty text, or no such size.
        """
        chosen, several = self.subnet(subnet), _texts(texts, "texts")
        if not several:
            raise UserError("texts: there are none; name one at least")
        rows = []
        for text in several:
            ids = self.tokenizer.encode(text)
            if not ids:
                raise UserError("texts: one is empty; a text needs at least one token")
            length = self.config.max_positions + 1 - len(self._before)
            pieces = [ids[start : start + length] for start in range(0, len(ids), length)]
            nll = sum(self._nll(piece, chosen) for piece in pieces)
            rows.append(Score(text, -nll, len(ids), len(text.encode())))
        return Scores(rows)

    @property
    def _before(self) -> tuple[int, ...]:
        """Tokens from which the first token of a scored text is predicted."""
        return self.tokenizer.start or (self.tokenizer.eos_id,)

    def _nll(self, ids: list[int], subnet: Subnet) -> float:
        inputs = torch.tensor([[*self._before, *ids[:-1]]], device=self.device)
        targets = torch.tensor(ids, device=self.device)
        hidden_ND = self.module(inputs, subnet, Context.plain(inputs)).hidden_BTD[0, -len(ids) :]
        return float(head_loss(hidden_ND, self.module.head_VD.detach(), targets)[1].double().sum())

    @user_errors
    def export(
        self,
        out: str | os.PathLike[str],
        *,
        family: str | None = None,
        dtype: str = "float32",
        gguf: bool = False,
        force: bool = False,
    ) -> Path:
        """Write the checkpoint for other software: transformers, vLLM and SGLang, or llama.cpp with ``gguf``.

        Args:
            out: folder to write, or a file for ``gguf``.
            family: architecture on disk (docs/FORMATS.md); None: its own, or one that can hold the network.
            dtype: ``float32``, ``bfloat16``, ``float16``; with ``gguf`` also ``q8_0`` and ``q4_0``.
            force: replace what ``out`` holds.

        Returns:
            The path that was written.

        Raises:
            UserError: the family cannot hold the network, ``out`` exists, or ``out`` cannot be written.
        """
        known = (*DTYPES, *(["q8_0", "q4_0"] if gguf else []))
        if dtype not in known:
            raise UserError(f"--dtype {dtype}: unknown; use {', '.join(known)}")
        path = user_path(out, "out")
        export_command(self.source, family, path, dtype, gguf, force)
        return path

    def __repr__(self) -> str:
        total = count(self.config, self.config.full()).total_params
        return f"Model({str(self.given)!r}, {params(total)} parameters, sizes: {', '.join(self.subnets)})"

    def _repr_html_(self) -> str:
        return f"<p><b>{escape(self.name)}</b> <code>{escape(str(self.given))}</code></p>{self.subnets._repr_html_()}"


@user_errors
def load(source: SourceLike, *, device: DeviceLike = "auto", dtype: str | None = None) -> Model:
    """Open a run or a checkpoint at all of its sizes.

    Args:
        source: a run folder, a checkpoint folder, a GGUF file, a name on the Hugging Face hub (``Qwen/Qwen3-30B-A3B``), or ``smollm2``
            (a chat model in a Python package). A GGUF file is converted once and kept in the user's cache.
        device: ``cpu``, ``cuda`` or ``auto``.
        dtype: of the weights in memory: ``float32``, ``bfloat16`` or ``float16``; None: float32 on a CPU, bfloat16 elsewhere.

    Raises:
        UserError: there is no such model, it is damaged, or its architecture is not supported.
    """
    if isinstance(source, Model):
        kept = str(source.dtype).removeprefix("torch.")
        asked = Model(source.source, source.device.type if device == "auto" else device, dtype or kept)
        return source if (asked.device, asked.dtype) == (source.device, source.dtype) else asked
    named = user_path(source, "source")
    if (named / RUN_FILE).is_file() or (named / "config.json").is_file():
        return Model(named, device, dtype)
    found = find_source(expanded(source, "source"))  # as it is spelled: ./a/b is not a name on the hub
    if found.is_dir():
        return Model(found, device, dtype)
    stat = found.stat()
    key = hashlib.sha256(f"{found.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    run = user_cache() / "models" / f"{found.stem}-{key}"
    if not (run / CHECKPOINT).is_dir():
        adopt_command(str(found), run, AdoptOptions(order="none"))
    return Model(run, device, dtype)


def _texts(given: str | Sequence[str], name: str) -> list[str]:
    """One text or several as a list. Raises `UserError`: something else."""
    texts = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{name}: needs a text, or several")
    for text in texts:
        check_text(text, name)
    return texts


def _sampling(fields: Mapping[str, Any]) -> Sampling:
    defaults = {"max_tokens": 128, "temperature": 0.0, "repetition_penalty": CONSOLE_PENALTY}
    sampling = validate(Sampling, defaults | dict(fields), "generate")
    if sampling.n != 1:
        raise UserError(f"generate: n: must be 1, is {sampling.n}; repeat the prompt in a list for several texts")
    return sampling


def _conversation(messages: str | Iterable[Any]) -> list[Message]:
    """The messages of a conversation; a text is one message of the user. Raises `UserError`: one of them is none."""
    given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    conversation = []
    for number, message in enumerate(given):
        try:
            read = message if isinstance(message, Message) else Message.model_validate(dict(message))
        except (TypeError, ValueError) as error:
            if not isinstance(error, ValidationError):
                raise UserError(f'messages.{number}: must be a message {{"role": …, "content": …}}') from None
            problem = first_problem(error, Message)
            raise UserError(": ".join(filter(None, (f"messages.{number}", problem.field, problem.message)))) from None
        for text in [read.content] if isinstance(read.content, str) else [part.text for part in read.content or ()]:
            check_text(text, f"messages.{number}: content")
        conversation.append(read)
    return conversation


def _generation(prompt: str, completion: Completion) -> Generation:
    return Generation(
        prompt,
        completion.text,
        completion.tokens,
        tuple(completion.logprobs.tolist()),
        completion.finish_reason,
        completion.seed,
    )
