"""Text in: what ``--data`` names becomes token shards and a tokenizer, and one line a source says what was used."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

from stretto.base import numbers
from stretto.base.errors import UserError
from stretto.base.paths import claimed
from stretto.base.track import progress, say
from stretto.data.conversations import ConversationForm
from stretto.data.holdout import VAL_FRACTION, Holdout, choose_holdout, without_held_out
from stretto.data.loader import Mixture, Part
from stretto.data.shards import (
    MANIFEST,
    TOKENIZER,
    Encoder,
    Manifest,
    MarkingEncoder,
    read_manifest,
    read_settings,
    tokenise,
)
from stretto.data.sources import Document, Fields, Form, Source, open_source
from stretto.text.chat import ChatEncoder
from stretto.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from stretto.train.recipe import TrainConfig

TOKENIZER_CHARS = 20_000_000
"""Text a tokenizer is trained on; a vocabulary of this size no longer changes beyond it (ours)."""
VAL_FOLDER = "val"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What a user says about text beside its place."""

    val: str | None = None
    """``--val``: held-out text, in the forms of ``--data``; None: the data's own split, or a part of it."""
    val_fraction: float | None = None
    """``--val-fraction``: share that is held out where the data has no split of its own; None: what is usual."""
    text_field: str = "text"
    """``--text-field``: of records, the one that holds the text."""
    is_chat: bool = False
    """Records are conversations, of which the assistant's turns are learnt."""

    def __post_init__(self) -> None:
        if self.val_fraction is not None and not 0 < self.val_fraction <= 0.5:
            raise UserError(f"--val-fraction {self.val_fraction:g}: not a share between 0 and 0.5; for 5 % write 0.05")
        if self.val is not None and self.val_fraction is not None:
            raise UserError(f"--val-fraction: --val {self.val} names what is held out; leave one of them out")

    def form(self, source: str) -> Form:
        """What a record of ``source`` becomes."""
        name = Path(source).name.partition(".")[0]
        return ConversationForm(domain=name) if self.is_chat else Fields(text=self.text_field)

    def encoder(self, tokenizer: Tokenizer) -> Encoder | MarkingEncoder:
        """What turns documents into tokens."""
        return ChatEncoder(tokenizer) if self.is_chat else tokenizer


AS_IT_IS = TextOptions()


def prepare_data(
    run: Path, data: Sequence[str], tokenizer: Path | None, vocab_size: int, text: TextOptions = AS_IT_IS
) -> tuple[Mixture, Path, str]:
    """Token shards of every ``PATH[@WEIGHT]`` in ``data``: the mixture, the tokenizer's folder, a hash of it all.

    A folder that `tokenise` wrote is used as it is, with the tokenizer it keeps; anything else is tokenised into the
    run, with ``tokenizer``, or that of such a folder, or one trained on all of the text by weight.

    Raises:
        UserError: bad data, a tokenizer that does not fit, or a vocabulary larger than the model's.
    """
    if not data:
        raise UserError("--data: name at least one file, folder or dataset")
    named = [_split_weight(argument) for argument in data]
    done = [Path(source) for source, _ in [*named, (text.val or "", 1.0)] if is_data_folder(source)]
    raw = {
        number: open_source(source, text.form(source))
        for number, (source, _) in enumerate(named)
        if Path(source) not in done
    }
    tokenizer = tokenizer or next((folder / TOKENIZER for folder in done), None)
    if tokenizer is None:
        weights = [named[number][1] for number in raw]
        tokenizer = _own_tokenizer(run / "data" / TOKENIZER, [*raw.values()], weights, vocab_size)
    held: set[int] = set()
    val = _prepare_val(run, tokenizer, text, [*raw.values()], held) if text.val is not None else None
    parts: list[Part] = []
    for number, (source, weight) in enumerate(named):
        folder = Path(source)
        if number in raw:
            folder = run / "data" / f"{number:02d}"
            _tokenise_source(raw[number], folder, load_tokenizer(tokenizer), text, held if val else None)
        else:
            say(f"{source}: token data: {_told(read_manifest(folder), val is not None)}")
        parts.append(Part(name=f"{number:02d}-{Path(source).name}", path=folder.resolve(), weight=weight))
    mixture = Mixture(parts=tuple(parts), val=val)
    mixture.open()
    mixture.open("val")
    manifests = [read_manifest(folder) for folder in (*(part.path for part in parts), *((val,) if val else ()))]
    largest = max(manifest.settings.vocab_size for manifest in manifests)
    if largest > vocab_size:
        raise UserError(
            f"model.vocab_size: {vocab_size} is less than the tokenizer's {largest}; raise it in the recipe"
        )
    if text.encoder(load_tokenizer(tokenizer)).fingerprint() != manifests[0].settings.tokenizer:
        remedy = "name the conversations themselves" if text.is_chat else "leave --tokenizer out"
        raise UserError(f"{tokenizer}: not the tokenizer that encoded {parts[0].path}; {remedy}")
    told = [f"{manifest.data_hash} {part.weight}" for manifest, part in zip(manifests, parts, strict=False)]
    told += [manifests[-1].data_hash] if val else []
    return mixture, Path(tokenizer).resolve(), hashlib.sha256("\n".join(told).encode()).hexdigest()


def check_enough(mixture: Mixture, train: TrainConfig) -> None:
    """Raises `UserError`: the training text does not fill a single batch."""
    num, batch = sum(part.num_tokens for part in mixture.open()), train.rows * train.seq_len
    if num < batch:
        raise UserError(
            f"--data: {numbers.counted(num, 'token')} of training text, a batch is {batch:,} "
            f"(train.rows {train.rows} x train.seq_len {train.seq_len}); give more text, or lower them"
        )


def is_data_folder(source: str) -> bool:
    """Whether `tokenise` wrote it; somebody's text may well lie in a ``data.json`` too."""
    folder = Path(source)
    return (folder / MANIFEST).is_file() and any(folder.glob("*.tokens"))


def sources_named(data: Sequence[str], text: TextOptions = AS_IT_IS) -> tuple[str, ...]:
    """Every ``PATH[@WEIGHT]``, and what else was said of the text, in one spelling, wherever the command is called from."""
    named = [f"{_place(source)}@{weight:g}" for source, weight in map(_split_weight, data)]
    named += [f"--val {_place(text.val)}"] if text.val is not None else []
    named += [f"--val-fraction {text.val_fraction:g}"] if text.val_fraction is not None else []
    return (*named, *([f"--text-field {text.text_field}"] if text.text_field != AS_IT_IS.text_field else []))


def _place(source: str) -> str:
    return str(Path(source).resolve()) if Path(source).exists() else source


def tokenise_data(
    data: Sequence[str], out: Path, tokenizer: Path | None, vocab_size: int, text: TextOptions = AS_IT_IS
) -> Manifest:
    """Tokenise one source into the data folder ``out``, with ``tokenizer`` or one trained on it. Raises `UserError`:
    bad data, more than one source (a mixture is of data folders), or a folder in which another process works.
    """
    if len(data) != 1:
        raise UserError(
            f"--data: one source makes one data folder, {len(data)} were named; tokenise each by itself, "
            "all with one --tokenizer"
        )
    source = open_source(data[0], text.form(data[0]))
    with claimed(out):
        if tokenizer is None:
            tokenizer = _own_tokenizer(out / TOKENIZER, [source], [1.0], vocab_size)
        return _tokenise_source(source, out, load_tokenizer(tokenizer), text)


def _own_tokenizer(folder: Path, sources: Sequence[Source], weights: Sequence[float], vocab_size: int) -> Path:
    """The tokenizer that an earlier attempt left in ``folder``, or one learnt now. Raises `UserError`: it is too large."""
    if not (folder / "tokenizer.json").is_file():
        learn_tokenizer(_weighted(sources, weights), vocab_size).save(folder)
    elif (size := load_tokenizer(folder).vocab_size) > vocab_size:
        raise UserError(
            f"{folder}: has {size} tokens, more than the {vocab_size} asked for; "
            "raise the size of the vocabulary, or choose a new folder"
        )
    return folder


def _weighted(sources: Sequence[Source], weights: Sequence[float]) -> Iterator[Document]:
    """Of each source as much text as its weight says, again and again if need be: as training will see them."""
    for source, weight in zip(sources, weights, strict=True):
        quota = math.ceil(TOKENIZER_CHARS * weight / sum(weights))
        num_chars = 0
        for _ in repeat(None) if len(sources) > 1 else range(1):
            before = num_chars
            for document in source.sample(quota):
                num_chars += len(document.text)
                yield document
                if num_chars >= quota:
                    break
            if num_chars >= quota or num_chars == before:
                break


def _held_out_source(val: str, others: Sequence[Source], text: TextOptions) -> Source:
    """The source that ``--val`` names. Raises `UserError`: its files are those of ``--data``."""
    source = open_source(val, text.form(val))
    trained = {file.resolve() for other in others for file in other.files.get("train", ())}
    if both := [file for files in source.files.values() for file in files if file.resolve() in trained]:
        raise UserError(f"--val {val}: {both[0]} is training text, too; name text that --data does not hold")
    return source


def _prepare_val(run: Path, tokenizer: Path, text: TextOptions, others: Sequence[Source], held: set[int]) -> Path:
    """The data folder of ``--val``; the hashes of its documents go to ``held``."""
    assert text.val is not None
    if is_data_folder(text.val):
        say(f"{text.val}: held out: {_told(read_manifest(text.val))}")
        return Path(text.val).resolve()
    source, folder = _held_out_source(text.val, others, text), run / "data" / VAL_FOLDER
    left_out = source.left_out.copy()
    documents = chain.from_iterable(source.read(split, left_out) for split in source.splits)
    sources = without_held_out({"val": documents}, left_out, held)
    manifest = _encode(sources, folder, load_tokenizer(tokenizer), None, text)
    say(f"{source.name}: held out: {_told(manifest)}" + (f"; left out {left_out}" if len(left_out) else ""))
    return folder.resolve()


def _tokenise_source(
    source: Source, out: Path, tokenizer: Tokenizer, text: TextOptions, held: set[int] | None = None
) -> Manifest:
    """Tokenise ``source`` into ``out`` and say what became of it. ``held``: hashes of text that is held out elsewhere."""
    left_out, holdout = source.left_out.copy(), None
    sources: dict[str, Iterable[Document]] = {"train": source.read("train", left_out)}
    if held is None and text.val is not None:
        other = _held_out_source(text.val, [source], text)
        sources["val"] = chain.from_iterable(other.read(split, left_out) for split in other.splits)
    elif held is None and "val" in source.splits:
        if text.val_fraction is not None:
            raise UserError(f"--val-fraction: {source.name} has held-out text of its own; leave it out")
        sources["val"] = source.read("val", left_out)
    elif held is None:
        holdout = choose_holdout(source.read("train"), text.val_fraction, by_position=not text.is_chat)
    if "val" in source.splits and "val" not in sources:
        left_out.add("of a val split, as --val names one", source.name)
    manifest = _encode(without_held_out(sources, left_out, held), out, tokenizer, holdout, text)
    files = f"{numbers.counted(len(source.files['train']), 'file')}, " if "train" in source.files else ""
    told = _told(manifest, held is not None) + (f": {holdout}" if holdout else "")
    say(f"{source.name}: {files}{told}" + (f"; left out {left_out}" if len(left_out) else ""))
    return manifest


def tokenise_documents(sources: Mapping[str, Iterable[Document]], out: Path, tokenizer: Tokenizer) -> Manifest:
    """Tokenise ``sources`` into ``out`` and keep the tokenizer with the shards; a hundredth is held out if they hold out nothing."""
    return _encode(sources, out, tokenizer, None if "val" in sources else Holdout("documents", VAL_FRACTION), AS_IT_IS)


def _encode(
    sources: Mapping[str, Iterable[Document]],
    out: Path,
    tokenizer: Tokenizer,
    holdout: Holdout | None,
    text: TextOptions,
) -> Manifest:
    before, encoder = read_settings(out), text.encoder(tokenizer)
    if before is None or before.tokenizer == encoder.fingerprint():  # or `tokenise` refuses, and the old one stays
        tokenizer.save(out / TOKENIZER)
    with progress("tokenise", None) as advance:
        return tokenise(sources, encoder, out, holdout=holdout, advance=advance)


def _told(manifest: Manifest, is_held_out_elsewhere: bool = False) -> str:
    """``train 3 documents, 1.31 MiB, 402k tokens; val …``."""
    told = []
    for split, shards in sorted(manifest.splits.items(), key=lambda each: each[0] != "train"):
        if split == "train" or not is_held_out_elsewhere:
            num, num_bytes, tokens = (
                sum(getattr(shard, name) for shard in shards) for name in ("num_documents", "num_bytes", "num_tokens")
            )
            size = numbers.size_in_bytes(num_bytes)
            told.append(f"{split} {numbers.counted(num, 'document')}, {size}, {numbers.si(tokens)} tokens")
    return "; ".join(told)


def learn_tokenizer(documents: Iterable[Document], vocab_size: int, chat_template: str | None = None) -> Tokenizer:
    """Train a tokenizer of at most ``vocab_size`` on the first stretch of ``documents``."""
    with progress("train tokenizer", None) as advance:

        def texts() -> Iterator[str]:
            num_chars = 0
            for document in documents:
                yield document.text
                num_chars += len(document.text)
                advance(len(document.text))
                if num_chars > TOKENIZER_CHARS:
                    return

        return train_tokenizer(texts(), vocab_size, chat_template)


def _split_weight(argument: str) -> tuple[str, float]:
    source, at, told = argument.rpartition("@")
    try:
        weight = float(told)
    except ValueError:
        return argument, 1.0  # no @, or a name with one in it
    if not at:
        return argument, 1.0
    if not 0 < weight < math.inf:
        raise UserError(
            f"--data {argument}: the weight after @ is no positive number; correct it, or leave the part out"
        )
    return source, weight
