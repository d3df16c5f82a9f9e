"""Preparation of text: the sources named by ``--data`` become token shards and a tokenizer. Prints one line a source."""

from __future__ import annotations

import hashlib
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np

from stretto.base import numbers
from stretto.base.errors import UserError
from stretto.base.paths import claimed, read_json, remove, write_json
from stretto.base.track import progress, say
from stretto.data.conversations import ConversationForm
from stretto.data.holdout import VAL_FRACTION, Holdout, agreed, choose_holdout, hashes_of, without_held_out
from stretto.data.loader import Mixture, Part
from stretto.data.shards import (
    MANIFEST,
    TOKENIZER,
    Encoder,
    Manifest,
    MarkingEncoder,
    TokenSet,
    forget_shards,
    is_slight,
    read_manifest,
    read_settings,
    require_own,
    tokenise,
)
from stretto.data.sources import Document, Fields, Form, Source, open_source
from stretto.text.chat import ChatEncoder
from stretto.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from stretto.train.recipe import TrainConfig

TOKENIZER_CHARS = 20_000_000
"""Characters of text that a tokenizer is trained on (ours). More text hardly changes a vocabulary of this size."""
VAL_FOLDER = "val"
REQUEST_FILE = "request.json"
"""In the folder of a tokenizer: what it was trained on."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options about text beside ``--data``."""

    val: str | None = None
    """``--val``: held-out text, in a format that ``--data`` accepts; None: the val split of the data, or a part of the data."""
    val_fraction: float | None = None
    """``--val-fraction``: share that is held out if the data has no val split; None: see `choose_holdout`."""
    text_field: str = "text"
    """``--text-field``: field of a record that holds the text."""
    is_chat: bool = False
    """Records are conversations. A loss is taken of the assistant's turns only."""
    holds_out: bool = True
    """Whether a part is held out if nothing else is; False for text on which no loss is compared."""

    def __post_init__(self) -> None:
        if self.val_fraction is not None and not 0 < self.val_fraction <= 0.5:
            raise UserError(f"--val-fraction {self.val_fraction:g}: must be between 0 and 0.5; for 5 % write 0.05")
        if self.val is not None and self.val_fraction is not None:
            raise UserError(
                f"--val-fraction: --val {self.val} already names the held-out text; remove one of the two options"
            )

    def form(self, source: str) -> Form:
        """Parser for the records of ``source``."""
        name = Path(source).name.partition(".")[0]
        return ConversationForm(domain=name) if self.is_chat else Fields(text=self.text_field)

    def encoder(self, tokenizer: Tokenizer, start: tuple[int, ...] = ()) -> Encoder | MarkingEncoder:
        """Encoder from documents to tokens. ``start``: ids before a prompt without a chat template."""
        return ChatEncoder(tokenizer, start) if self.is_chat else tokenizer


AS_IT_IS = TextOptions()


def prepare_data(
    run: Path, data: Sequence[str], tokenizer: Path | None, vocab_size: int, text: TextOptions = AS_IT_IS
) -> tuple[Mixture, Path, str]:
    """Write token shards of every ``PATH[@WEIGHT]`` in ``data``.

    All sources are tokenised into the run, except folders that `tokenise` wrote: they are used unchanged. The tokenizer is
    ``tokenizer``, else that of such a folder, else one trained on all of the text by weight.

    Returns:
        The mixture, the tokenizer's folder, and a hash over all data and weights.

    Raises:
        UserError: bad data, a tokenizer that did not encode the data, or a vocabulary larger than the model's.
    """
    if not data:
        raise UserError("--data: name at least one file, folder or dataset")
    weighted = [_split_weight(argument) for argument in data]
    sources = [source for source, _ in weighted] + ([text.val] if text.val else [])
    tokenised = [Path(source) for source in sources if is_data_folder(source)]
    raw = {
        number: open_source(source, text.form(source))
        for number, (source, _) in enumerate(weighted)
        if Path(source) not in tokenised
    }
    if text.val is not None and not is_data_folder(text.val):
        _val_source(text, [*raw.values()])  # raises an error before a tokenizer is trained
    tokenizer = tokenizer or next((folder / TOKENIZER for folder in tokenised), None)
    if tokenizer is not None and tokenizer.name == "tokenizer.json":
        tokenizer = tokenizer.parent  # with the chat template beside it
    if tokenizer is None:
        weights = [weighted[number][1] for number in raw]
        path = run / "data" / TOKENIZER / REQUEST_FILE
        if path.is_file() and read_json(path) != _request([*raw.values()], weights, vocab_size):
            _forget(run / "data", [source for source, _ in weighted])
        tokenizer = _own_tokenizer(run / "data" / TOKENIZER, [*raw.values()], weights, vocab_size)
    elif (size := load_tokenizer(tokenizer).vocab_size) > vocab_size:
        raise UserError(
            f"{tokenizer}: has {size:,} tokens, more than the network's vocabulary of {vocab_size:,}; name another tokenizer, or raise "
            "model.vocab_size in the recipe of a new network"
        )
    fingerprint = text.encoder(load_tokenizer(tokenizer)).fingerprint()
    for name in (VAL_FOLDER, *(f"{number:02d}" for number in raw)):
        _forget_other_tokens(run / "data" / name, fingerprint, sources)
    val_hashes: set[int] = set()
    val = _prepare_val(run, tokenizer, text, [*raw.values()], val_hashes) if text.val is not None else None
    is_val_elsewhere = val is not None or not text.holds_out
    divisions = {number: Division(None, val_hashes) for number in raw}
    if not is_val_elsewhere:
        divisions = dict(zip(raw, _divide([*raw.values()], text), strict=True))
    parts: list[Part] = []
    for number, (source, weight) in enumerate(weighted):
        folder = Path(source)
        if number in raw:
            folder = run / "data" / f"{number:02d}"
            _tokenise_source(raw[number], folder, tokenizer, text, divisions[number], is_val_elsewhere)
        else:
            say(f"{source}: token data: {_summary(read_manifest(folder), is_val_elsewhere)}")
        parts.append(Part(name=f"{number:02d}-{Path(source).name}", path=folder.resolve(), weight=weight))
    mixture = Mixture(parts=tuple(parts), val=val)
    mixture.open()
    if text.holds_out:
        mixture.open("val")
        if tokenised and len(sources) > 1:
            _tell_shared(mixture, [source for source, _ in weighted], tokenised)
    manifests = [read_manifest(folder) for folder in (*(part.path for part in parts), *((val,) if val else ()))]
    largest = max(manifest.settings.vocab_size for manifest in manifests)
    if largest > vocab_size:
        raise UserError(
            f"model.vocab_size: {vocab_size} is less than the tokenizer's {largest}; raise it in the recipe"
        )
    if fingerprint != manifests[0].settings.tokenizer:
        remedy = "name the files of the conversations" if text.is_chat else "remove --tokenizer"
        raise UserError(f"{tokenizer}: not the tokenizer that encoded {parts[0].path}; {remedy}")
    hashed = [f"{manifest.data_hash} {part.weight}" for manifest, part in zip(manifests, parts, strict=False)]
    hashed += [manifests[-1].data_hash] if val else []
    return mixture, Path(tokenizer).resolve(), hashlib.sha256("\n".join(hashed).encode()).hexdigest()


def check_enough(mixture: Mixture, train: TrainConfig) -> None:
    """Raise `UserError` if the training text does not fill a single batch."""
    num, batch = sum(part.num_tokens for part in mixture.open()), train.rows * train.seq_len
    if num < batch:
        raise UserError(
            f"--data: {numbers.counted(num, 'token')} of training text, a batch is {batch:,} "
            f"(train.rows {train.rows} x train.seq_len {train.seq_len}); give more text, or lower these two"
        )


def require_outside(out: Path, data: Sequence[str], text: TextOptions) -> None:
    """Raises `UserError` if a source that is read lies in the output folder ``out``, among the files to write. Token data in ``out/data`` may:
    a run made them."""
    named = [("--data", argument, _split_weight(argument)[0]) for argument in data]
    for option, argument, source in (*named, *([("--val", text.val, text.val)] if text.val else [])):
        path, folder = Path(source).resolve(), out.resolve()
        is_own = folder / "data" in (path, path.parent) and is_data_folder(source)
        if path.exists() and path.is_relative_to(folder) and not is_own:
            raise UserError(
                f"{option} {argument}: lies in the output folder {out}; name another output folder with --out"
            )


def is_data_folder(source: str) -> bool:
    """Whether `tokenise` wrote this folder. A ``data.json`` alone does not prove it."""
    folder = Path(source)
    return (folder / MANIFEST).is_file() and any(folder.glob("*.tokens"))


def sources_named(data: Sequence[str], text: TextOptions = AS_IT_IS) -> tuple[str, ...]:
    """Every ``PATH[@WEIGHT]`` and the other text options, with absolute paths: equal for equal inputs from any working directory."""

    def place(source: str) -> str:
        return str(Path(source).resolve()) if Path(source).exists() else source

    spelt = [f"{place(source)}@{weight:g}" for source, weight in map(_split_weight, data)]
    spelt += [f"--val {place(text.val)}"] if text.val is not None else []
    spelt += [f"--val-fraction {text.val_fraction:g}"] if text.val_fraction is not None else []
    return (*spelt, *([f"--text-field {text.text_field}"] if text.text_field != AS_IT_IS.text_field else []))


def tokenise_data(
    data: Sequence[str], out: Path, tokenizer: Path | None, vocab_size: int, text: TextOptions = AS_IT_IS
) -> Manifest:
    """Tokenise one source into the data folder ``out``, with ``tokenizer`` or one trained on the source. Raises `UserError`: bad data,
    more than one source (a mixture consists of data folders), a source in ``out``, or another process is writing to the folder.
    """
    if len(data) != 1:
        raise UserError(
            f"--data: a data folder is made from one source, {len(data)} were named; "
            "tokenise each source into its own folder, all with the same --tokenizer"
        )
    require_outside(out, data, text)
    if is_data_folder(data[0]):
        raise UserError(f"--data {data[0]}: is token data already; name it in --data of the training command")
    source = open_source(data[0], text.form(data[0]))
    if text.val is not None:
        _val_source(text, [source])  # raises an error before a tokenizer is trained
    with claimed(out):
        if not (out / TOKENIZER).exists():
            require_own(out)  # raises an error before a tokenizer is trained
        if tokenizer is None:
            _forget_unfinished(source, out, vocab_size)
            tokenizer = _own_tokenizer(out / TOKENIZER, [source], [1.0], vocab_size)
        division = Division(None) if text.val is not None else _divide([source], text)[0]
        return _tokenise_source(source, out, tokenizer, text, division)


def _forget_unfinished(source: Source, out: Path, vocab_size: int) -> None:
    """Delete what an attempt with other text, which never became a data folder, wrote into ``out``. An attempt that has finished several
    shards stays, and so does a folder that holds other files."""
    path, now = out / TOKENIZER / REQUEST_FILE, _request([source], [1.0], vocab_size)
    if path.is_file() and not _is_same_request(read_json(path), now) and is_slight(out, TOKENIZER):
        remove(out / TOKENIZER)
        forget_shards(out)


def _own_tokenizer(folder: Path, sources: Sequence[Source], weights: Sequence[float], vocab_size: int) -> Path:
    """The tokenizer that an earlier attempt with the same request left in ``folder``, else one that is trained now. Raises `UserError`:
    the existing one is too large or was trained for another request, or there is no text.
    """
    request, path = _request(sources, weights, vocab_size), folder / REQUEST_FILE
    before = read_json(path) if path.is_file() else request
    if not (folder / "tokenizer.json").is_file():
        documents = _weighted(sources, weights)
        if (first := next(documents, None)) is None:
            for source in sources:  # raises an error that names the file, unless a folder has blank files only
                deque(source.read("train"), maxlen=0)
            raise UserError(f"--data: {', '.join(source.name for source in sources)}: no text; name files with text")
        trained = learn_tokenizer(chain([first], documents), vocab_size)
        write_json(path, request)
        trained.save(folder)
    elif (size := load_tokenizer(folder).vocab_size) > vocab_size:
        raise UserError(
            f"{folder}: has {size} tokens, more than the {vocab_size} asked for; "
            "raise the size of the vocabulary, or choose a new folder"
        )
    elif not _is_same_request(before, request):
        raise UserError(f"{folder}: trained on other text, or for another size of the vocabulary; choose a new folder")
    return folder


def _is_same_request(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two results of `_request` are about the same text, to which documents may have been appended."""
    return {**before, "bytes": None} == {**now, "bytes": None}


def _request(sources: Sequence[Source], weights: Sequence[float], vocab_size: int) -> dict[str, Any]:
    """What a tokenizer is trained on, as far as names and sizes of files tell."""
    sizes = [sum(file.stat().st_size for file in source.files.get("train", ())) for source in sources]
    names = [str(Path(each.name).resolve()) if Path(each.name).exists() else each.name for each in sources]
    return {"sources": names, "bytes": sizes, "weights": [*weights], "vocab_size": vocab_size}


def _forget(data: Path, sources: Sequence[str]) -> None:
    """Delete what an attempt with other text, which never became a run, wrote into the run's folder ``data``."""
    if any(Path(source).resolve().is_relative_to(data.resolve()) for source in sources):
        return  # what is read stays; the tokenizer is refused
    for path in data.iterdir():
        if path.name in (TOKENIZER, VAL_FOLDER) or re.fullmatch(r"\d\d", path.name):
            remove(path)


def _forget_other_tokens(folder: Path, fingerprint: str, sources: Sequence[str]) -> None:
    """Delete the shards in ``folder`` of a run's own data if they are of another tokenizer than that of ``fingerprint``: an attempt that
    never became a run wrote them. More than a shard of each split stays, and is refused later."""
    settings = read_settings(folder)
    is_read = any(Path(source).resolve().is_relative_to(folder.resolve()) for source in sources)
    if settings is None or settings.tokenizer == fingerprint or is_read:
        return
    if is_slight(folder, MANIFEST, TOKENIZER, most=2):
        forget_shards(folder)


def _weighted(sources: Sequence[Source], weights: Sequence[float]) -> Iterator[Document]:
    """Documents of each source in proportion to its weight, repeated if a source is too small: the distribution that training will see.
    Together at most about `TOKENIZER_CHARS` characters; if all sources have less than their part of these, one of them is read once.
    """
    quotas = [math.ceil(TOKENIZER_CHARS * weight / sum(weights)) for weight in weights]
    samples = [[*source.sample(quota)] for source, quota in zip(sources, quotas, strict=True)]
    sizes = [sum(len(document.text) for document in sample) for sample in samples]
    size, full = max(zip(sizes, quotas, strict=True), key=lambda pair: pair[0] / pair[1])  # of the source read once
    for sample, quota in zip(samples, quotas, strict=True):
        num_chars = 0
        for document in cycle(sample):
            num_chars += len(document.text)
            yield document
            if num_chars >= quota * min(size, full) // full:
                break


def _val_source(text: TextOptions, trained: Sequence[Source]) -> Source:
    """The source that ``--val`` names. Raises `UserError`: one of its files is also in ``trained``."""
    assert text.val is not None
    source = open_source(text.val, text.form(text.val))
    train_files = {file.resolve() for other in trained for file in other.files.get("train", ())}
    if shared := [file for files in source.files.values() for file in files if file.resolve() in train_files]:
        raise UserError(f"--val {text.val}: {shared[0]} is also training text; name text that --data does not contain")
    return source


def _prepare_val(run: Path, tokenizer: Path, text: TextOptions, trained: Sequence[Source], hashes: set[int]) -> Path:
    """The data folder of ``--val``. The hashes of its documents are added to ``hashes``."""
    assert text.val is not None
    if is_data_folder(text.val):
        say(f"{text.val}: held out: {_summary(read_manifest(text.val))}")
        return Path(text.val).resolve()
    source, folder = _val_source(text, trained), run / "data" / VAL_FOLDER
    left_out = source.left_out.copy()
    documents = chain.from_iterable(source.read(split, left_out) for split in source.splits)
    sources = without_held_out({"val": documents}, left_out, hashes)
    manifest = _encode(sources, folder, load_tokenizer(tokenizer), None, text, source.name)
    say(f"{source.name}: held out: {_summary(manifest)}" + (f"; left out {left_out}" if len(left_out) else ""))
    return folder.resolve()


@dataclass(frozen=True, slots=True)
class Division:
    """Which documents of a source are held out. Written by `_divide`."""

    holdout: Holdout | None
    """Division of its training documents; None: they are not divided."""
    elsewhere: set[int] = field(default_factory=set)
    """Hashes of documents that are held out in another source or with ``--val``: they are not trained on."""


def _divide(sources: Sequence[Source], text: TextOptions) -> list[Division]:
    """The division of each source. No source trains on a document that another one holds out."""
    with_val = [source for source in sources if "val" in source.splits]
    if with_val and text.val_fraction is not None:
        raise UserError(f"--val-fraction: {with_val[0].name} already has held-out text; remove the option")
    readers = [partial(source.read, "train") for source in sources if source not in with_val]
    holdouts = [choose_holdout(read(), text.val_fraction, by_position=not text.is_chat) for read in readers]
    if len(sources) == 1:
        return [Division(holdouts[0] if holdouts else None)]
    holdouts = agreed(holdouts, readers, text.val_fraction)
    given = hashes_of(chain.from_iterable(source.read("val") for source in with_val))
    chosen: set[int] = set()
    if with_val:  # their documents are not divided: compare them with what is held out of the other sources
        pairs = zip(holdouts, readers, strict=True)
        chosen = hashes_of(document for holdout, read in pairs for document in read() if holdout.holds(document))
    left = iter(holdouts)
    return [Division(None, given | chosen) if each in with_val else Division(next(left), given) for each in sources]


def _tell_shared(mixture: Mixture, sources: Sequence[str], tokenised: Sequence[Path]) -> None:
    """Print how many held-out documents each of ``sources`` trains on; they are the parts of ``mixture``. Token data, the folders
    ``tokenised``, is used unchanged, so these documents cannot be left out.
    """

    def key(data: TokenSet, number: int) -> bytes:
        return hashlib.blake2b(data.document(number).astype("<u4").tobytes(), digest_size=16).digest()

    opened = mixture.open("val")
    held_out = {key(data, number) for data in opened for number in range(data.num_documents)}
    lengths = np.concatenate([data.all_lengths for data in opened])
    shared: list[set[bytes]] = [set() for _ in sources]
    with progress("compare held-out documents", unit="documents") as advance:
        for found, data in zip(shared, mixture.open(), strict=True):
            for number in np.flatnonzero(np.isin(data.all_lengths, lengths)).tolist():
                found |= held_out & {key(data, number)}
                advance(1)
    for source, found in zip(sources, shared, strict=True):
        if found:
            say(
                f"{source}: trains on {len(found):,} of {numbers.counted(len(held_out), 'held-out document')}; to leave them out, name "
                f"the text of all token data ({', '.join(map(str, tokenised))})"
            )


def _tokenise_source(
    source: Source, out: Path, tokenizer: Path, text: TextOptions, division: Division, is_val_elsewhere: bool = False
) -> Manifest:
    """Tokenise ``source`` into ``out`` and print one line about the result. ``is_val_elsewhere``: no held-out text goes into ``out``."""
    left_out, holdout = source.left_out.copy(), division.holdout
    sources: dict[str, Iterable[Document]] = {"train": source.read("train", left_out)}
    if not is_val_elsewhere and text.val is not None:
        val = _val_source(text, [source])
        sources["val"] = chain.from_iterable(val.read(split, left_out) for split in val.splits)
    elif not is_val_elsewhere and "val" in source.splits:
        sources["val"] = source.read("val", left_out)
    if "val" in source.splits and "val" not in sources:
        left_out.add("of a val split" + (", as --val names one" if text.val is not None else ""), source.name)
    sources = without_held_out(sources, left_out, division.elsewhere)
    manifest = _encode(sources, out, load_tokenizer(tokenizer), holdout, text, source.name)
    files = f"{numbers.counted(len(source.files['train']), 'file')}, " if "train" in source.files else ""
    summary = _summary(manifest, is_val_elsewhere) + (f": {holdout}" if holdout else "")
    say(f"{source.name}: {files}{summary}" + (f"; left out {left_out}" if len(left_out) else ""))
    return manifest


def tokenise_documents(sources: Mapping[str, Iterable[Document]], out: Path, tokenizer: Tokenizer) -> Manifest:
    """Tokenise ``sources`` into ``out`` and store the tokenizer beside the shards. Without a ``val`` split, `VAL_FRACTION` of the documents
    is held out.
    """
    return _encode(sources, out, tokenizer, None if "val" in sources else Holdout("documents", VAL_FRACTION), AS_IT_IS)


def _encode(
    sources: Mapping[str, Iterable[Document]],
    out: Path,
    tokenizer: Tokenizer,
    holdout: Holdout | None,
    text: TextOptions,
    name: str | None = None,
) -> Manifest:
    before = read_settings(out)
    start = tokenizer.start if before is None else before.start  # one of an older version stays as it is
    encoder = text.encoder(tokenizer, start)
    if (
        before is None or before.tokenizer == encoder.fingerprint()
    ):  # else `tokenise` raises and the old tokenizer must stay
        tokenizer.save(out / TOKENIZER)
    with progress("tokenise", unit="bytes") as advance:
        return tokenise(sources, encoder, out, holdout=holdout, start=start, advance=advance, name=name)


def _summary(manifest: Manifest, is_val_elsewhere: bool = False) -> str:
    """Size of each split: ``train 3 documents, 1.31 MiB, 402k tokens; val …``; ``train`` alone if held-out text is elsewhere."""
    parts = []
    for split, shards in sorted(manifest.splits.items(), key=lambda item: item[0] != "train"):
        if split == "train" or not is_val_elsewhere:
            documents = numbers.counted(sum(shard.num_documents for shard in shards), "document")
            size = numbers.size_in_bytes(sum(shard.num_bytes for shard in shards))
            tokens = numbers.si(sum(shard.num_tokens for shard in shards))
            parts.append(f"{split} {documents}, {size}, {tokens} tokens")
    return "; ".join(parts)


def learn_tokenizer(documents: Iterable[Document], vocab_size: int, chat_template: str | None = None) -> Tokenizer:
    """Train a tokenizer of at most ``vocab_size`` entries on the first `TOKENIZER_CHARS` characters of ``documents``."""
    with progress("train tokenizer", unit="characters") as advance:

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
    """Source and weight of ``PATH[@WEIGHT]``; the default weight is 1."""
    source, at, suffix = argument.rpartition("@")
    try:
        weight = float(suffix)
    except ValueError:
        return argument, 1.0  # no @, or an @ in the name
    if not at:
        return argument, 1.0
    if not 0 < weight < math.inf:
        raise UserError(
            f"--data {argument}: the weight after @ is not a positive number; correct it, or remove the source"
        )
    return source, weight
