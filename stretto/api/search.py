"""Commands on a trained network: latency, extract, quantise and export, and the limits and records of a search."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from pydantic import Field

from stretto.api.train import EVAL_BATCH_ROWS, held_out, own_tokenizer
from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.numbers import counted
from stretto.base.paths import (
    CHECKPOINT,
    LATENCY_FILE,
    RUN_FILE,
    checkpoint_folder,
    claimed,
    quoted,
    read_json,
    require_apart,
    require_new,
)
from stretto.base.records import Meter, Receipt, find_lineage
from stretto.base.table import Cell, Table, Tabled
from stretto.base.track import progress, say
from stretto.data.loader import Loader
from stretto.evals.loss import EvalBatch
from stretto.model.checkpoint import (
    Checkpoint,
    read_checkpoint,
    read_config,
    read_integers,
    require_new_checkpoint,
    stores_integers,
    tokenizer_dir_of,
    write_checkpoint,
)
from stretto.model.elastic import slice_integers
from stretto.model.families import kept_family, parse_family
from stretto.model.gguf.write import write_gguf
from stretto.model.parallel import ALONE, DeviceLike, Ranks, device_name, join
from stretto.model.spec import ModelConfig, Subnet, SubnetChoice, check_subnet, named_subnets, parse_subnet
from stretto.model.transformer import Context, Transformer
from stretto.model.upcycle import refuse_fp16
from stretto.ops.int_weights import IntScheme
from stretto.post.quantise import PARTS, gptq, round_to_nearest, schemes_of, untie
from stretto.report.page import Plot
from stretto.subnets.candidate import Limits
from stretto.subnets.extract import Extracted, verified_extract
from stretto.subnets.latency import LatencyTable, read_table
from stretto.subnets.search import SearchResult
from stretto.train.finish import write_trained
from stretto.train.prepare import TextOptions, prepare_data, sources_named
from stretto.train.run_folder import RunInfo, read_info
from stretto.train.step import metered

SEARCH_FILE = "search.json"
MAX_TABLE_ERROR = 0.5
"""Relative error of a prediction above which the user is told to measure again (ours)."""
BEST = "best"
"""Name of the size that the last search of a run chose."""


def warn_if_far_off(path: Path, table: LatencyTable) -> None:
    """Print that the table at ``path`` is to be measured again, if its predictions for the workload of searches, the first one, are more
    than `MAX_TABLE_ERROR` off."""
    timing = table.timings[0]
    if timing.held_out_error > MAX_TABLE_ERROR:
        say(
            f"{path}: its predictions for {timing.workload.label()} were wrong by up to {timing.held_out_error:.1%}, too far off to search "
            "with, probably because the machine was busy: measure again when it is quiet"
        )


def kept_table(run: Path, network: Transformer, ranks: Ranks, needed: bool) -> LatencyTable | None:
    """The latency table of ``run``; None if there is none. A table of another machine or network is ignored with a note, or refused
    if it is ``needed``. Prints a warning when the table's predictions are far off."""
    path = run / LATENCY_FILE
    if not path.is_file():
        return None
    try:
        table = read_table(path, network)
    except UserError as error:
        if needed:
            raise
        if ranks.is_first:
            say(f"searching without latency: {error}")
        return None
    if ranks.is_first:
        warn_if_far_off(path, table)
    return table


def parse_limits(max_total: float | None, max_active: float | None, max_latency_ms: float | None) -> Limits:
    """The limits of a search. Raises `UserError`: a share outside 0 to 1, or a time that is not above 0."""
    for flag, share in (("--max-total", max_total), ("--max-active", max_active)):
        if share is not None and not 0 < share <= 1:
            raise UserError(f"{flag} {share:g}: not a share of the full network's parameters; for 34 % write 0.34")
    if max_latency_ms is not None and not 0 < max_latency_ms < math.inf:
        raise UserError(f"--max-latency-ms {max_latency_ms:g}: not a time; write milliseconds above 0")
    return Limits(max_total=max_total, max_active=max_active, max_latency_ms=max_latency_ms)


def on_other_data(run: Path, info: RunInfo, data: Sequence[str], text: TextOptions, checkpoint: Checkpoint) -> RunInfo:
    """``info`` with ``data`` in place of the run's own text; the tokens are written to ``search/`` in the run folder."""
    tokenizer, vocab_size = own_tokenizer(checkpoint.folder), checkpoint.config.vocab_size
    mixture, _, data_hash = prepare_data(run / "search", data, tokenizer, vocab_size, text)
    return info.replace(data=mixture, data_hash=data_hash, sources=sources_named(data, text))


class SearchRecord(Config):
    """Content of search.json."""

    result: SearchResult
    receipt: Receipt
    """Cost of the search with the healing of its candidates; `extract_command` adds it to the lineage of the chosen Subnet."""
    weights: str = ""
    """Hash of the weights that were searched, of their lineage; empty: not known."""


def read_search(run: Path) -> SearchRecord | None:
    """The last search of ``run``, which may also be a run's checkpoint folder; None if these weights were not searched."""
    path = _search_file(run)
    found = validate(SearchRecord, read_json(path), source=str(path)) if path.is_file() else None
    return found if found is not None and found.weights in ("", searched_weights(run)) else None


@dataclass(frozen=True, slots=True, repr=False)
class Search(Tabled):
    """Result of `search`."""

    result: SearchResult
    """All measurements: candidates, Pareto front, rank correlations."""

    @property
    def best(self) -> Subnet:
        """The sub-network of lowest loss within the limits."""
        return self.result.chosen.subnet

    @property
    def table(self) -> Table:
        """The evaluated sub-networks by loss, those within the limits first."""
        limits, chosen = self.result.limits, self.result.chosen.subnet
        found = sorted(self.result.candidates, key=lambda each: (not each.fits(limits), each.nll or 0.0))
        rows = tuple(
            (
                Cell(("* " if each.subnet == chosen else "") + (each.name or self.result.label(each.subnet))),
                Cell(f"{each.total_share:.1%}", each.total_share),
                Cell(f"{each.active_share:.1%}", each.active_share),
                Cell("–" if each.latency_ms is None else f"{each.latency_ms:.3g}", each.latency_ms),
                Cell("–" if each.nll is None else f"{each.nll:.4f}", each.nll),
                Cell("–" if each.healed_nll is None else f"{each.healed_nll:.4f}", each.healed_nll),
                Cell("yes" if each.fits(limits) else "no"),
            )
            for each in found
        )
        columns = ("sub-network", "total", "active", "ms/step", "loss", "healed", "fits")
        brackets = " layers in brackets are dropped, counted from 0;" if self.result.space.layers == "free" else ""
        return Table("", columns, rows, note=f"* chosen;{brackets} loss in nats per token on held-out text")

    def plot(self) -> Plot:
        """Figure of loss over size: every candidate, the limits, and the chosen sub-network."""
        from stretto.report.search import candidates

        return Plot(candidates(self.result))

    def __repr__(self) -> str:
        return "\n".join(self.result.summary())


def searched_weights(run: Path) -> str:
    """Hash of the weights of ``run`` in their lineage; empty without one."""
    lineage = find_lineage(checkpoint_folder(run))
    return "" if lineage is None else lineage.weights_hash


def _search_file(run: Path) -> Path:
    return (run.parent if run.name == CHECKPOINT else run) / SEARCH_FILE


@contextmanager
def new_checkpoint(out: Path, sources: Iterable[Path], force: bool, ranks: Ranks = ALONE) -> Iterator[None]:
    """Claim the folder ``out`` for the checkpoint that a command makes from the runs or checkpoints ``sources``.

    Raises:
        UserError: ``out`` exists and ``force`` does not allow to replace it, holds other files, contains a checkpoint that is read or lies
            inside it, or another process writes it.
    """
    for source in sources:
        require_apart(out, checkpoint_folder(source))
    require_new_checkpoint(out, force)
    with ExitStack() as held:
        ranks.first(lambda: held.enter_context(claimed(out)))
        yield


def extract_command(
    source: Path, size: str | Subnet, out: Path, device: DeviceLike = "auto", force: bool = False
) -> Extracted:
    """`extract_to` a folder that no other process writes meanwhile; ``force``: replace what ``out`` holds."""
    ranks = join(device)
    with new_checkpoint(out, [source], force, ranks):
        return extract_to(out, source, size, ranks)


def extract_to(out: Path, source: Path, size: str | Subnet, ranks: Ranks = ALONE) -> Extracted:
    """Extract a Subnet of ``source`` as the checkpoint ``out``, which replaces an older one, after its logits were compared with those of
    the masked network. Integer weights stay the same integers.

    Args:
        size: the Subnet, a preset, ``best`` (the choice of the run's last search), or ``layers=…,experts=…,top_k=…``.
    """
    checkpoint = load_checkpoint(source, ranks)
    subnet = size if isinstance(size, Subnet) else named_subnet(source, size, checkpoint.config, checkpoint.presets)
    check_subnet(checkpoint.config, subnet)
    integers = slice_integers(checkpoint.config, subnet, read_integers(checkpoint.folder))
    meter = Meter("extract", device_name(ranks.device), ranks.world)
    with meter, metered(checkpoint.model, meter):
        extracted = verified_extract(checkpoint.model, subnet, _probe(source, checkpoint, ranks))
    found = read_search(source)
    if found is not None and found.result.chosen.subnet != subnet:
        found = None  # the search's cost belongs to the Subnet that it chose
    write_trained(
        out,
        extracted.model,
        meter,
        ranks,
        name=out.name,
        stage="extract",
        config={"source": str(checkpoint.folder.resolve()), "subnet": subnet.model_dump(mode="json")},
        family=kept_family(extracted.model.config, checkpoint.family),
        tokenizer_dir=tokenizer_dir_of(checkpoint.folder),
        parents=(checkpoint.lineage,) if checkpoint.lineage else (),
        spent=found.receipt if found else None,
        integers=integers,
    )
    return extracted


def named_subnet(source: Path, name: str, config: ModelConfig, presets: Mapping[str, SubnetChoice]) -> Subnet:
    """The Subnet of ``source`` that ``name`` describes: `BEST`, or a form of `parse_subnet`. Raises `UserError`: there is no such size."""
    return best_subnet(source, config) if name == BEST else parse_subnet(name, config, presets)


def best_subnet(source: Path, config: ModelConfig) -> Subnet:
    """The Subnet that the last search of ``source`` chose. Raises `UserError`: the run was not searched."""
    found = read_search(source)
    if found is None:
        problem = (
            "its weights have changed since the search"
            if _search_file(source).is_file()
            else "no search has been made here"
        )
        raise UserError(f"{source}: --subnet best: {problem}; run `stretto search {quoted(source)}` first")
    return check_subnet(config, found.result.chosen.subnet)


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
    chat: bool = False

    def plan(self) -> dict[str, IntScheme]:
        """The scheme of every part of the network that is quantised. The head has 8 bits unless it is named: it decides between tokens."""
        defaults = {"experts": self.dtype, "attention": self.dtype, "head": "int8"}
        chosen = {part: getattr(self, part) or defaults[part] for part in PARTS}
        bits = {part: int(dtype.removeprefix("int")) for part, dtype in chosen.items() if dtype != "none"}
        return {part: IntScheme(num, self.group, self.zeros and num == 4) for part, num in bits.items()}


def quantise_command(
    source: Path,
    out: Path,
    options: QuantiseOptions,
    data: Sequence[str] = (),
    device: DeviceLike = "auto",
    force: bool = False,
) -> None:
    """Quantise the checkpoint ``source`` and write it to ``out``, with its presets; ``force``: replace what ``out`` holds."""
    ranks = join(device)
    with new_checkpoint(out, [source], force, ranks):
        _quantise(source, out, options, data, ranks)


def _quantise(source: Path, out: Path, options: QuantiseOptions, data: Sequence[str], ranks: Ranks) -> None:
    folder = checkpoint_folder(source)
    if stores_integers(folder):
        raise UserError(f"{folder}: its weights are integers already; quantise the checkpoint that it was made from")
    plan = options.plan()
    if not plan:
        raise UserError(
            "stretto quantise: no part is left to quantise; leave one of --experts, --attention and --head out"
        )
    if options.zeros and not any(scheme.zeros for scheme in plan.values()):
        raise UserError(
            "stretto quantise: --zeros is for groups of 4 bits, and no part has 4; leave it out, or use --dtype int4"
        )
    if data and options.method == "rtn":
        raise UserError(
            "stretto quantise: --data: rounding to nearest reads no text; add --method gptq, or leave --data out"
        )
    if options.chat and not data:
        raise UserError("stretto quantise: --chat: describes the text of --data; name conversations with --data")
    checkpoint = load_checkpoint(source, ranks)
    network = checkpoint.model
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
            batches = _calibration(source, checkpoint, data, options, ranks)
            subnets = list(named_subnets(network.config, checkpoint.presets).values())
            with metered(network, meter), progress("gptq", network.config.num_layers, "layers") as advance:
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
        tokenizer_dir=tokenizer_dir_of(folder),
        parents=(checkpoint.lineage,) if checkpoint.lineage else (),
        presets=checkpoint.presets,
        integers={name: weight.map(lambda tensor: tensor.cpu()) for name, weight in integers.items()},
    )


def _calibration(
    source: Path, checkpoint: Checkpoint, data: Sequence[str], options: QuantiseOptions, ranks: Ranks
) -> list[EvalBatch]:
    """Batches of about ``options.calibration_tokens`` tokens of ``data``, or of the training text of the run ``source``."""
    config = checkpoint.config
    with TemporaryDirectory() as folder:
        if data:
            text = TextOptions(is_chat=options.chat, holds_out=False)
            mixture, _, _ = prepare_data(Path(folder), data, own_tokenizer(checkpoint.folder), config.vocab_size, text)
            if (num := sum(part.num_tokens for part in mixture.open())) < options.calibration_tokens:
                raise UserError(
                    f"stretto quantise: --data: {counted(num, 'token')} of calibration text, --calibration-tokens is "
                    f"{options.calibration_tokens:,}; give more text, or lower it"
                )
            length = min(ROW_TOKENS, config.max_positions)
        else:
            if not (source / RUN_FILE).is_file() or (info := read_info(source)).data is None:
                raise UserError(
                    f"{source}: --method gptq: has no training text of its own; name calibration text with --data"
                )
            mixture, length = info.mixture, info.train.seq_len
        num_rows = max(1, options.calibration_tokens // length)
        rows = min(num_rows, EVAL_BATCH_ROWS)
        loader = Loader(mixture.open(), mixture.weights, rows, length, seed=0)
        return [EvalBatch.of(loader.next(), ranks.device) for _ in range(num_rows // rows)]


def export_command(source: Path, family: str | None, out: Path, dtype: str, gguf: bool, force: bool = False) -> None:
    """Write the checkpoint ``source`` as a Hugging Face folder of ``family`` (None: `kept_family`), or as a GGUF file.

    ``force`` replaces existing content of ``out``.
    """
    folder = checkpoint_folder(source)
    if gguf and family is not None:
        raise UserError(f"--family {family}: a GGUF file has the checkpoint's own; leave --family or --gguf out")
    if gguf:
        require_apart(out, folder)
        require_new(out, force or out.is_dir())  # write_gguf refuses a folder
        with progress("write GGUF", unit="bytes") as advance:
            short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(dtype, dtype)
            write_gguf(folder, out, dtype=short, advance=advance)
        return
    with new_checkpoint(out, [folder], force):
        refuse_fp16(read_config(folder), getattr(torch, dtype))
        checkpoint = read_checkpoint(folder, dtype=getattr(torch, dtype))
        chosen = kept_family(checkpoint.config, checkpoint.family) if family is None else parse_family(family)
        with progress(f"write {chosen}", unit="bytes") as advance:
            write_checkpoint(
                out,
                checkpoint.model,
                checkpoint.config,
                family=chosen,
                tokenizer_dir=tokenizer_dir_of(folder),
                presets=checkpoint.presets,
                lineage=checkpoint.lineage,
                advance=advance,
            )


def load_checkpoint(source: Path, ranks: Ranks) -> Checkpoint:
    return read_checkpoint(checkpoint_folder(source), device=ranks.device)


def _probe(source: Path, checkpoint: Checkpoint, ranks: Ranks) -> tuple[EvalBatch, ...]:
    """A few hundred tokens on which logits are compared: held-out text of the run, which reaches the experts that text uses.

    For a checkpoint without a run, or a run without text, the tokens are random; equality must hold for any input.
    """
    if (source / RUN_FILE).is_file() and (info := read_info(source)).data is not None:
        return held_out(info, info.train.replace(eval_rows=EVAL_BATCH_ROWS), ranks)[:1]
    config = checkpoint.config
    shape = (4, min(128, config.max_positions))
    ids_BT = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(ranks.device)
    return (EvalBatch(ids_BT, ids_BT, Context.plain(ids_BT)),)
