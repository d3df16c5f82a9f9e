"""A run folder and what every command finds in it.

run.json       what the run was told: recipe, data, tokenizer (`RunInfo`)
data/          token shards and their tokenizer, where the run tokenised its own
snapshots/     what --resume goes on from
metrics.jsonl  every scalar logged; tensorboard/ beside it
checkpoint/    the result: an ordinary Hugging Face folder with its lineage
adopted/       the network as it came, where `elasticize` put another in its place; elasticize/ holds the tokens of that
teacher/       its log-probabilities of the text to come, where `elasticize --cache-logits` was asked to keep some
latency.json, search.json, report/   written by the commands of those names
samples.json   what each size of the demo wrote
post/          the demo's post-training of its best size, as `stretto run` leaves it
"""

from __future__ import annotations

from pathlib import Path

from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.paths import RUN_FILE, read_json
from stretto.data.loader import Mixture
from stretto.train.recipe import ElasticizeRecipe, HealRecipe, Recipe, SftRecipe, TrainConfig

ADOPTED = "adopted"
"""In a run folder: the checkpoint that continued training in place began with."""
SAMPLES_FILE = "samples.json"
POST = "post"


class RunInfo(Config):
    """What a run was told; written before it starts, read by every later command."""

    stage: str
    recipe: Recipe | ElasticizeRecipe | HealRecipe | SftRecipe | None = None
    """None where nothing was trained: an adopted checkpoint."""
    data: Mixture | None = None
    """None where no text was seen, as the next one."""
    data_hash: str | None = None
    """Over all parts of the mixture and their weights."""
    sources: tuple[str, ...] = ()
    """What the data was made of, as `stretto.train.prepare.sources_named` tells; none in runs of a version that did not say."""
    tokenizer: Path
    """Folder with the tokenizer's files."""
    parent: Path | None = None
    """Checkpoint that the run started from; None: from random weights, or from the one in this folder."""
    teacher: Path | None = None
    adapters: Path | None = None
    """Folder of peft's with adapters that training began with."""

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
