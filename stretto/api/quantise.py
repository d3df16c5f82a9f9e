"""`stretto quantise`: a checkpoint with integer weights, which works at every size of the network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from pydantic import Field

from stretto.api.model import Model, load
from stretto.api.search import load_checkpoint
from stretto.api.stages import Data, ModelLike, PathLike, listed_data, new_folder, place
from stretto.api.train import EVAL_BATCH_ROWS
from stretto.base.config import Config, validate
from stretto.base.errors import UserError, user_errors
from stretto.base.paths import RUN_FILE, checkpoint_folder, require_apart, require_new
from stretto.base.records import Meter
from stretto.base.track import progress, say
from stretto.data.loader import Loader
from stretto.evals.loss import EvalBatch
from stretto.model.checkpoint import Checkpoint, stores_integers
from stretto.model.gptq import gptq
from stretto.model.integers import PARTS, round_to_nearest, schemes_of, untie
from stretto.model.parallel import Ranks, device_name, join
from stretto.model.spec import named_subnets
from stretto.ops.int_weights import IntScheme
from stretto.train.loop import write_trained
from stretto.train.prepare import prepare_data
from stretto.train.run_folder import read_info
from stretto.train.step import metered

IntDtype = Literal["int8", "int4", "none"]
ROW_TOKENS = 512
"""Largest number of tokens of a calibration row, if the text is not the run's own."""


class QuantiseOptions(Config):
    """Options of `stretto quantise`."""

    dtype: Literal["int8", "int4"]
    method: Literal["rtn", "gptq"] = "rtn"
    experts: IntDtype | None = None
    attention: IntDtype | None = None
    head: IntDtype | None = None
    group: int = 32
    zeros: bool = False
    calibration_tokens: int = Field(default=16_384, gt=0)

    def plan(self) -> dict[str, IntScheme]:
        """The scheme of every part of the network that is quantised. The head has 8 bits unless it is named: it decides between tokens."""
        defaults = {"experts": self.dtype, "attention": self.dtype, "head": "int8"}
        chosen = {part: getattr(self, part) or defaults[part] for part in PARTS}
        bits = {part: int(dtype.removeprefix("int")) for part, dtype in chosen.items() if dtype != "none"}
        return {part: IntScheme(num, self.group, self.zeros and num == 4) for part, num in bits.items()}


@user_errors
def quantise(
    model: ModelLike,
    out: PathLike | None = None,
    *,
    dtype: str = "int8",
    method: str = "rtn",
    experts: str | None = None,
    attention: str | None = None,
    head: str | None = None,
    group: int = 32,
    zeros: bool = False,
    data: Data = (),
    calibration_tokens: int = 16_384,
    device: str = "auto",
    force: bool = False,
) -> Model:
    """Write a checkpoint with integer weights, of which every size is the quantised size (docs/QUANTISE.md).

    Args:
        model: run or checkpoint whose weights are not integers.
        out: checkpoint folder to write; beside the model's, with the dtype added, by default.
        dtype: ``int8`` or ``int4``, of experts and attention; the head has ``int8`` unless it is named.
        method: ``rtn`` rounds to nearest; ``gptq`` makes up for errors on calibration text (2210.17323).
        experts: ``int8``, ``int4`` or ``none`` for all feed-forward weights.
        attention: the same for the projections of attention.
        head: the same for the output matrix; a head that is tied to the embedding becomes a matrix of its own.
        group: number of neighbouring inputs with one scale.
        zeros: give each group of 4 bits a zero as well. Such weights cannot be exported to Q4_0, and vLLM has no experts with zeros.
        data: calibration text; the training text of a run by default.
        calibration_tokens: number of tokens of that text for ``gptq``.
        device: ``cpu``, ``cuda`` or ``auto``.
        force: replace what ``out`` holds.

    Raises:
        UserError: a group that does not divide the inputs of a weight, no calibration text, or ``out`` exists.
    """
    parts = {"experts": experts, "attention": attention, "head": head}
    fields = {
        "dtype": dtype,
        "method": method,
        "group": group,
        "zeros": zeros,
        "calibration_tokens": calibration_tokens,
    }
    options = validate(QuantiseOptions, fields | parts, "stretto quantise")
    folder = new_folder(model, options.dtype) if out is None else Path(out)
    quantise_command(place(model), folder, options, listed_data(data), device, force)
    return load(folder, device=device)


def quantise_command(
    source: Path,
    out: Path,
    options: QuantiseOptions,
    data: Sequence[str] = (),
    device: str = "auto",
    force: bool = False,
) -> None:
    """Quantise the checkpoint ``source`` and write it to ``out``, with its presets."""
    folder = checkpoint_folder(source)
    require_apart(out, folder)
    require_new(out, force)
    if stores_integers(folder):
        raise UserError(f"{folder}: its weights are integers already; quantise the checkpoint that it was made from")
    ranks = join(device)
    checkpoint = load_checkpoint(source, ranks)
    network, plan = checkpoint.model, options.plan()
    if not plan:
        raise UserError(
            "stretto quantise: no part is left to quantise; leave one of --experts, --attention and --head out"
        )
    if "head" in plan and network.head is None:
        say("head: tied to the embedding, which is not quantised; it becomes a matrix of its own")
        untie(network)
    schemes = schemes_of(network.config, checkpoint.family, plan)
    state = network.state_dict()
    meter = Meter("quantise", device_name(ranks.device), ranks.world)
    with meter:
        if options.method == "rtn":
            integers = round_to_nearest(state, schemes)
        else:
            batches = _calibration(source, checkpoint, data, options.calibration_tokens, ranks)
            subnets = list(named_subnets(network.config, checkpoint.presets).values())
            with metered(network, meter), progress("gptq", network.config.num_layers) as advance:
                integers = gptq(network, schemes, [(each.ids_BT, each.ctx) for each in batches], subnets, advance)
    write_trained(
        out,
        network,
        meter,
        ranks,
        name=out.name,
        stage="quantise",
        config={"source": str(folder.resolve()), "options": options.model_dump(mode="json")},
        family=checkpoint.family,
        tokenizer_dir=folder if (folder / "tokenizer.json").is_file() else None,
        parents=(checkpoint.lineage,) if checkpoint.lineage else (),
        presets=checkpoint.presets,
        integers={name: weight.map(lambda tensor: tensor.cpu()) for name, weight in integers.items()},
    )


def _calibration(
    source: Path, checkpoint: Checkpoint, data: Sequence[str], num_tokens: int, ranks: Ranks
) -> list[EvalBatch]:
    """Batches of about ``num_tokens`` tokens of ``data``, or of the training text of the run ``source``."""
    config = checkpoint.config
    with TemporaryDirectory() as folder:
        if data:
            if not (checkpoint.folder / "tokenizer.json").is_file():
                raise UserError(f"{checkpoint.folder}: has no tokenizer.json; put the tokenizer beside the weights")
            mixture, _, _ = prepare_data(Path(folder), data, checkpoint.folder, config.vocab_size)
            length = min(ROW_TOKENS, config.max_positions)
        else:
            if not (source / RUN_FILE).is_file() or (info := read_info(source)).data is None:
                raise UserError(
                    f"{source}: --method gptq: has no training text of its own; name calibration text with --data"
                )
            mixture, length = info.mixture, info.train.seq_len
        num_rows = max(1, num_tokens // length)
        rows = min(num_rows, EVAL_BATCH_ROWS)
        loader = Loader(mixture.open(), mixture.weights, rows, length, seed=0)
        return [EvalBatch.of(loader.next(), ranks.device) for _ in range(num_rows // rows)]
