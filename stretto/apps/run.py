"""A run folder and what every command finds in it.

run.json       what the run was told: recipe, data, tokenizer (`RunInfo`)
data/          token shards, where the run tokenised its own
snapshots/     what --resume goes on from
metrics.jsonl  every scalar logged; tensorboard/ beside it
checkpoint/    the result: an ordinary Hugging Face folder with its lineage
adopted/       the network as it came, where `elasticize` put another in its place; elasticize/ holds the tokens of that
latency.json, search.json, report/   written by the commands of those names
samples.json   what each size of the demo wrote
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.paths import RUN_FILE, claimed, read_json
from stretto.base.track import progress
from stretto.data.loader import Mixture, Part
from stretto.data.shards import TOKENIZER, Manifest, read_manifest, tokenise
from stretto.data.sources import Document, open_sources
from stretto.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from stretto.train.recipe import ElasticizeRecipe, HealRecipe, Recipe, TrainConfig

ADOPTED = "adopted"
"""In a run folder: the checkpoint that continued training in place began with."""
SAMPLES_FILE = "samples.json"
VAL_FRACTION = 0.01
"""Held out where the data brings no validation split of its own (ours)."""
TOKENIZER_CHARS = 20_000_000
"""Text a tokenizer is trained on; a vocabulary of this size no longer changes beyond it (ours)."""


class RunInfo(Config):
    """What a run was told; written before it starts, read by every later command."""

    stage: str
    recipe: Recipe | ElasticizeRecipe | HealRecipe | None = None
    """None where nothing was trained: an adopted checkpoint."""
    data: Mixture | None = None
    """None where no text was seen, as the next one."""
    data_hash: str | None = None
    """Over all parts of the mixture and their weights."""
    sources: tuple[str, ...] = ()
    """What the data was made of, as `sources_named` tells; none in runs of a version that did not say."""
    tokenizer: Path
    """Folder with the tokenizer's files."""
    parent: Path | None = None
    """Checkpoint that the run started from; None: from random weights, or from the one in this folder."""
    teacher: Path | None = None

    @property
    def mixture(self) -> Mixture:
        """Raises `UserError`: the run has seen no text."""
        if self.data is None:
            raise UserError("--data: the network was adopted without text; name some")
        return self.data

    @property
    def train(self) -> TrainConfig:
        """How long rows are and how many are held out: as in training, or as usual where there was none."""
        return self.recipe.train if self.recipe is not None else TrainConfig(steps=1, rows=16, seq_len=256)


def read_info(run: Path) -> RunInfo:
    """Raises `UserError` where ``run`` is not a run folder."""
    path = run / RUN_FILE
    if not path.is_file():
        raise UserError(f"{run}: not a run folder: it has no {RUN_FILE}; name the folder that `stretto pretrain` wrote")
    return validate(RunInfo, read_json(path), source=str(path))


class Sample(Config):
    """What a size wrote."""

    size: str
    prompt: str
    text: str
    """Greedy continuation of the prompt."""


def read_samples(run: Path) -> list[Sample]:
    """Samples written before; none where none were."""
    path = run / SAMPLES_FILE
    return [validate(Sample, row, str(path)) for row in read_json(path)] if path.is_file() else []


def prepare_data(run: Path, data: Sequence[str], tokenizer: Path | None, vocab_size: int) -> tuple[Mixture, Path, str]:
    """Token shards of every ``PATH[@WEIGHT]`` in ``data``: the mixture, the tokenizer's folder, a hash of it all.

    A folder that `tokenise` wrote is used as it is, with the tokenizer it keeps; anything else is tokenised into the
    run, with ``tokenizer`` or one trained on it.

    Raises:
        UserError: bad data, a tokenizer that does not fit, or a vocabulary larger than the model's.
    """
    if not data:
        raise UserError("--data: name at least one file, folder or dataset")
    parts: list[Part] = []
    for number, argument in enumerate(data):
        source, weight = _split_weight(argument)
        if (Path(source) / "data.json").is_file():
            folder = Path(source)
        else:
            folder = run / "data" / f"{number:02d}"
            tokenise_data([source], folder, tokenizer, vocab_size)
        tokenizer = tokenizer or folder / TOKENIZER
        parts.append(Part(name=f"{number:02d}-{Path(source).name}", path=folder.resolve(), weight=weight))
    assert tokenizer is not None
    mixture = Mixture(parts=tuple(parts))
    mixture.open()
    manifests = [read_manifest(part.path) for part in parts]
    largest = max(manifest.settings.vocab_size for manifest in manifests)
    if largest > vocab_size:
        raise UserError(
            f"model.vocab_size: {vocab_size} is less than the tokenizer's {largest}; raise it in the recipe"
        )
    if load_tokenizer(tokenizer).fingerprint() != manifests[0].settings.tokenizer:
        raise UserError(f"{tokenizer}: not the tokenizer that encoded {parts[0].path}; leave --tokenizer out")
    told = "\n".join(f"{manifest.data_hash} {part.weight}" for manifest, part in zip(manifests, parts, strict=True))
    return mixture, Path(tokenizer).resolve(), hashlib.sha256(told.encode()).hexdigest()


def sources_named(data: Sequence[str]) -> tuple[str, ...]:
    """Every ``PATH[@WEIGHT]`` in one spelling, wherever the command is called from."""
    named = []
    for source, weight in map(_split_weight, data):
        place = str(Path(source).resolve()) if Path(source).exists() else source
        named.append(f"{place}@{weight:g}")
    return tuple(named)


def tokenise_data(data: Sequence[str], out: Path, tokenizer: Path | None, vocab_size: int) -> Manifest:
    """Tokenise one source into the data folder ``out``, with ``tokenizer`` or one trained on it. Raises `UserError`:
    bad data, more than one source (a mixture is of data folders), or a folder in which another process works.
    """
    if len(data) != 1:
        raise UserError(f"--data: one source makes one data folder, {len(data)} were named; tokenise each by itself")
    with claimed(out):
        if tokenizer is not None:
            loaded = load_tokenizer(tokenizer)
        elif (out / TOKENIZER).is_dir():  # an earlier attempt trained one
            loaded = load_tokenizer(out / TOKENIZER)
            if loaded.vocab_size > vocab_size:
                raise UserError(
                    f"{out / TOKENIZER}: has {loaded.vocab_size} tokens, more than the {vocab_size} asked for; "
                    "raise the size of the vocabulary, or choose a new folder"
                )
        else:
            documents = itertools.chain.from_iterable(open_sources(data[0]).values())
            loaded = learn_tokenizer(documents, vocab_size)
        return tokenise_documents(open_sources(data[0]), out, loaded)


def tokenise_documents(sources: Mapping[str, Iterable[Document]], out: Path, tokenizer: Tokenizer) -> Manifest:
    """Tokenise ``sources`` into ``out`` and keep the tokenizer with the shards."""
    tokenizer.save(out / TOKENIZER)
    with progress("tokenise", None) as advance:
        fraction = 0.0 if "val" in sources else VAL_FRACTION
        return tokenise(sources, tokenizer, out, val_fraction=fraction, advance=advance)


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
