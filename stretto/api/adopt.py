"""`stretto adopt`: import of a checkpoint of any supported family as a run that works at every size. Weights are streamed.

The run folder then holds:

checkpoint/   an ordinary checkpoint folder of its own family; stretto.json has the order in which experts and layers are dropped
data/         the calibration text as tokens
order.json    the measurements behind the orders (`Measured`); a killed import resumes from this file
run.json      the record of the run, as in every run folder
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from stretto.base.config import Config, validate
from stretto.base.errors import UserError, one_line
from stretto.base.numbers import counted, si
from stretto.base.paths import (
    CHECKPOINT,
    LOCK_FILE,
    RUN_FILE,
    checkpoint_folder,
    claimed,
    read_json,
    remove,
    write_json,
)
from stretto.base.records import Elsewhere, Lineage, Meter, find_lineage, new_lineage
from stretto.base.track import progress, say
from stretto.data.demo_text import demo_documents
from stretto.data.loader import Loader, Mixture, Part
from stretto.data.shards import TOKENIZER
from stretto.evals.loss import EvalBatch
from stretto.evals.neurons import plan_layer, plan_network
from stretto.evals.order import ExpertRule, expert_orders, layer_order, pieces, survey
from stretto.evals.routing import LayerRouting
from stretto.model.checkpoint import generation_settings, write_checkpoint
from stretto.model.counts import count
from stretto.model.families import Family, remarks, stored_tensors
from stretto.model.gguf.read import GgufFile, gguf_file, packaged
from stretto.model.headers import WeightFiles
from stretto.model.parallel import device_name
from stretto.model.spec import ModelConfig, SubnetChoice, droppable_layers
from stretto.model.stored import Dtypes
from stretto.model.streamed import StreamedNetwork, StreamedState
from stretto.model.upcycle import FAMILY as UPCYCLED
from stretto.model.upcycle import UpcycledState, Upcycling, refuse_fp16, upcycled_config, upcycled_presets
from stretto.ops.tuning import rough_products
from stretto.text.tokenizer import load_tokenizer
from stretto.train.prepare import TextOptions, prepare_data, sources_named, tokenise_documents
from stretto.train.recipe import default_anchors
from stretto.train.run_folder import RunInfo, read_info, write_info

ORDER_FILE, DATA = "order.json", "data"
ROWS, ROW_TOKENS = 4, 512
"""Rows of a calibration batch and tokens of a row: large enough for fast products, with activations small beside a layer's weights."""
LAYER_BATCHES, NEURON_BATCHES = 4, 8
"""Number of calibration batches for ranking the layers of a dense network, and for grouping neurons into experts."""
LEFT_OUT_BATCHES = 2
"""Number of batches on which each layer of a dense network is left out. The ranking depends on the text; two batches make it
more stable than one (our measurement)."""
SHARD_BYTES = 10**9
"""Largest weight file that is written; one file is in memory at a time."""
OWN_TEXT_CHARS = {"max_code_chars": 1_500_000, "max_exercise_chars": 500_000}
"""Size of the default calibration text, which every Python installation has."""
HUB_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.jinja",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
)
"""Files that are downloaded from the hub: weights, configuration and tokenizer, never code."""
OTHER_FILES = ("*/*", "consolidated*")
"""Those of them that are weights once more, in another format."""
HASHED_BYTES = 1 << 24
"""Bytes that are read at a time while a file is hashed."""
_HUB_NAME = r"[\w][\w.-]*/[\w][\w.-]*"


class AdoptOptions(Config):
    """Options of `adopt_command`."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the written weights; ``auto``: that of the source; bf16 if it is a quantised folder, fp32 if it is a quantised GGUF file.
    With ``auto``, routers in fp32 beside narrower weights stay fp32."""
    order: ExpertRule | Literal["none"] = "reap"
    """Criterion for ranking experts; ``none``: neither experts nor layers are measured, and no text is read."""
    layer_order: Literal["leave-one-out", "influence"] = "leave-one-out"
    """Criterion for ranking layers."""
    calibration: tuple[str, ...] = ()
    """Calibration text, each ``PATH[@WEIGHT]``; none: text that every Python installation has."""
    calibration_tokens: int = Field(default=32_768, gt=0)
    text_field: str = "text"
    """Field of a record that holds its text."""
    upcycling: Upcycling | None = None
    """Conversion of a dense network into experts; None: the network keeps its form."""
    before: Elsewhere = Elsewhere()
    """Cost of the source's own training as stated by the user; the cost ledger marks the figures as stated."""


class Measured(Config):
    """Content of order.json."""

    inputs: dict[str, str]
    """Source, calibration data and options of the measurement; if any of them changes, the measurement is repeated."""
    expert_order: tuple[tuple[int, ...], ...]
    """Experts of each MoE layer, the most important first."""
    layer_order: tuple[int, ...]
    """Layers in the order in which they are kept."""
    influence: dict[int, float]
    """By layer: one minus the cosine of the residual stream before and after the layer."""
    logit_error: dict[int, float]
    """By droppable layer: relative squared error of the logits without the layer; empty with the criterion ``influence``."""
    experts: tuple[LayerRouting, ...]
    """Load and saliency of the experts of each MoE layer."""
    flops: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Network:
    """A network to write as a checkpoint."""

    config: ModelConfig
    family: Family
    state: Mapping[str, Tensor]
    """Weights by name. The writer reads them in the order of the layers, one part at a time."""
    presets: Mapping[str, SubnetChoice]

    @property
    def num_elements(self) -> int:
        """Number of weights on disk."""
        return sum(math.prod(stored.shape) for stored in stored_tensors(self.config, self.family))


def adopt_command(source: str, out: Path, options: AdoptOptions) -> None:
    """Import ``source`` as the run ``out``. A killed import resumes when it is called again: downloads, tokens and
    measurements are kept.

    Args:
        source: a run, a checkpoint folder, a GGUF file, a model that is installed as a package (``smollm2``), or a name on the hub.

    Raises:
        UserError: the source does not exist, is damaged, is not supported or has no tokenizer; ``out`` holds something else or
            is in use by another process; the text is too short; the disk is full.
    """
    _require_clear(out)  # before the claim, which writes a lock file into the folder
    with claimed(out):
        _clear(out)
        folder = find_source(source)
        tokenizer = _tokenizer(folder, out)
        parent = find_lineage(folder)
        if parent is not None and options.before != Elsewhere():
            raise UserError(f"--parent-flops, --parent-tokens: {folder} has a record of what it cost; leave them out")
        with StreamedState(folder, torch.float32 if options.dtype == "float32" else None) as state:
            for remark in remarks(read_json(folder / "config.json")) if folder.is_dir() else ():
                say(f"{folder}: {remark}")
            generation_settings(tokenizer, state.config)  # raises an error before the long measurement
            target = state.config if options.upcycling is None else upcycled_config(state.config, options.upcycling)
            if options.dtype != "auto":
                dtype, fp32 = getattr(torch, options.dtype), frozenset[str]()
                refuse_fp16(target, dtype)
            else:
                dtype, fp32 = _dtype_to_write(
                    folder, state.dtypes, splits=options.upcycling is not None and target.only_ranks
                )
            _require_room(out, Network(target, _family(state, options), state, {}), dtype)
            meter = Meter("adopt", device_name(torch.device("cpu")))
            whole = state.unchanged(dtype, fp32) if options.upcycling is None else ()
            with meter, _hashes([path for path in _weight_files(folder) if path not in whole]) as hashes:
                text = _text(out, tokenizer, state, options)
                measured = _measured(out, folder, state, text, options)
                if measured is not None:
                    meter.add(flops=measured.flops)
                network = _as_it_is(state, measured)
                if options.upcycling is not None:
                    network = _upcycled(state, network.config, text, options.upcycling)
                info = RunInfo(stage="adopt", tokenizer=(out / CHECKPOINT).resolve(), parent=folder)
                if text is not None:
                    info = info.replace(data=text.mixture, data_hash=text.data_hash, sources=text.sources)
                write_info(out, info)

                def lineage(copied: Mapping[Path, str]) -> Lineage:
                    digests = hashes() | {path.name: digest for path, digest in copied.items()}
                    settings = options.model_dump(mode="json") | {"source": str(folder), "source_sha256": digests}
                    return _lineage(out.name, parent, tokenizer, network.config, info, meter, settings, options.before)

                _write(out / CHECKPOINT, network, tokenizer, dtype, fp32, whole, lineage)


def upcycling(experts: int | None, top_k: int | None, method: str, shared: int | None) -> Upcycling | None:
    """The conversion that the options of these names describe; None without ``--experts``.

    Raises:
        UserError: the conversion is impossible, or another option is given without ``--experts``.
    """
    if experts is None:
        is_given = {"--top-k": top_k, "--shared": shared, "--method": None if method == "split" else method}
        for flag, value in is_given.items():
            if value is not None:
                raise UserError(f"{flag} {value}: needs --experts; add it, or leave {flag} out")
        return None
    if top_k is None:
        top_k = 2 if method == "copy" else max(1, (experts - (1 if shared is None else shared) + 1) // 2)
    fields = {"method": method, "experts": experts, "top_k": top_k, "shared": shared}
    return validate(Upcycling, fields, source="--experts")


def find_source(source: str) -> Path:
    """The folder or GGUF file that ``source`` names. A name on the hub is downloaded. Raises `UserError`: there is no such source."""
    if Path(source).exists():
        return gguf_file(source) or checkpoint_folder(source).resolve()
    if (packed := packaged(source)) is not None:
        return packed
    if re.fullmatch(_HUB_NAME, source):
        return _fetched(source)
    raise UserError(f"{source}: no such folder, and not a name on the hub, such as Qwen/Qwen3-30B-A3B")


def _dtype_to_write(folder: Path, found: Dtypes, splits: bool) -> tuple[torch.dtype, frozenset[str]]:
    """With ``--dtype auto``: dtype of the written weights and routers that stay fp32 beside it. What is rounded is printed. ``splits``: a
    dense network is split into experts."""
    dtype = found.weights
    if found.rounded:
        say(
            f"{folder}: rounding {counted(len(found.rounded), 'tensor')} (norms and biases, such as {found.rounded[0]}) from float32 to "
            f"{str(dtype).removeprefix('torch.')}, the data type of the matrices; --dtype float32 keeps them exact"
        )
    if splits and dtype == torch.float16:
        dtype = torch.bfloat16
        say(
            "--dtype auto: writing bfloat16, because float16 cannot hold the router weights of a split network; this rounds all "
            "weights to 8 bits of precision, --dtype float32 keeps them exact"
        )
    return dtype, found.fp32


def _fetched(name: str) -> Path:
    """The snapshot of ``name`` in the hub's local cache; files that are there are not downloaded again. Downloads no code."""
    import httpx  # slow to import, as the next
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), ignore_patterns=list(OTHER_FILES)))
    except errors.GatedRepoError:
        raise UserError(f"{name}: gated; accept its terms on the hub, then run `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{name}: the hub has no such model, or it is private; check the name, or `hf auth login`"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise UserError(
            f"{name}: no such folder here, and the hub cannot be reached; connect it, or name a folder that holds the checkpoint"
        ) from None
    except (errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        problem = one_line(error, 200)
        raise UserError(f"{name}: download failed: {problem}; run the command again to resume") from None


def _require_clear(out: Path) -> None:
    """Raises `UserError`: ``out`` holds anything but the remains of an earlier import that did not end."""
    if (out / CHECKPOINT).exists():
        raise UserError(f"{out}: holds a checkpoint already; choose another folder")
    if (out / RUN_FILE).is_file() and (stage := read_info(out).stage) != "adopt":
        raise UserError(f"{out}: holds a {stage} run; choose another folder")
    for path in sorted(out.iterdir()) if out.is_dir() else ():
        if path.name not in (LOCK_FILE, RUN_FILE, ORDER_FILE, DATA) and not _is_partial(path):
            raise UserError(f"{out}: holds {path.name}, which is not part of a run; choose a new folder")


def _clear(out: Path) -> None:
    """Remove the unfinished files of a killed import from ``out``. Raises as `_require_clear`."""
    _require_clear(out)
    for path in filter(_is_partial, out.iterdir()):
        remove(path)


def _is_partial(path: Path) -> bool:
    return path.name.startswith(f".{CHECKPOINT}.") and path.name.endswith(".partial")


def _tokenizer(folder: Path, out: Path) -> Path:
    """The folder of the tokenizer that belongs to the checkpoint ``folder``. Raises `UserError`: it has none."""
    packed = gguf_file(folder)
    if packed is None:
        load_tokenizer(folder)  # raises an error before anything is written
        return folder
    with GgufFile(packed) as file:
        file.tokenizer().save(out / DATA / TOKENIZER)
    return out / DATA / TOKENIZER


def _family(state: StreamedState, options: AdoptOptions) -> Family:
    return state.description.family if options.upcycling is None else UPCYCLED


def _as_it_is(state: StreamedState, measured: Measured | None) -> Network:
    """The source's network with the measured orders of experts and layers."""
    config = state.config
    if measured is not None:
        config = config.replace(expert_order=measured.expert_order or None, layer_order=measured.layer_order)
    return Network(config, state.description.family, state, state.description.presets or default_anchors(config))


def _upcycled(state: StreamedState, dense: ModelConfig, text: Text | None, how: Upcycling) -> Network:
    """The dense network of ``state`` with its neurons grouped into experts. Routers are fitted on ``text`` if there is any."""
    config = upcycled_config(dense, how)
    if text is None:
        names = (
            (f"blocks.{layer}.mlp.gate_up.weight", f"blocks.{layer}.mlp.down.weight")
            for layer in range(dense.num_layers)
        )
        plans = [
            plan_layer(layer, state[gate_up], state[down], None, how) for layer, (gate_up, down) in enumerate(names)
        ]
    else:
        streamed = StreamedNetwork(dense, state)
        batches = text.batches[:NEURON_BATCHES]
        rough = rough_products(torch.device("cpu"), dense.hidden_size)
        with progress("make experts", dense.num_layers * len(batches)) as advance, rough:
            plans = plan_network(streamed.model, batches, how, hold=streamed.hold, advance=advance)
    return Network(config, UPCYCLED, UpcycledState(config, how, plans, state), upcycled_presets(config, how))


def _require_room(out: Path, network: Network, dtype: torch.dtype) -> None:
    """Raises `UserError` where the disk has less room than the checkpoint needs."""
    needed, free = network.num_elements * dtype.itemsize, shutil.disk_usage(out).free
    if free < needed:
        raise UserError(
            f"{out}: needs {si(needed, 'B')} of disk space, {si(free, 'B')} are free; free some space or choose another folder"
        )


@contextmanager
def _hashes(files: Sequence[Path]) -> Iterator[Callable[[], dict[str, str]]]:
    """Hash ``files`` in a thread. Yields a function that waits for the SHA-256 digests, by file name, as the hub shows them."""
    stopped = threading.Event()

    def read() -> dict[str, str]:
        found = {}
        for path in files:
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while not stopped.is_set() and (chunk := file.read(HASHED_BYTES)):
                    digest.update(chunk)
            found[path.name] = digest.hexdigest()
        return found

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(read)
        try:
            yield result.result
        finally:
            stopped.set()


def _weight_files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    with WeightFiles(folder) as files:
        return sorted(files.files)


# --- orders -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """Calibration text."""

    mixture: Mixture
    sources: tuple[str, ...]
    data_hash: str
    batches: tuple[EvalBatch, ...]


def _text(out: Path, tokenizer: Path, state: StreamedState, options: AdoptOptions) -> Text | None:
    """The calibration text, tokenised into the run; None where none is needed."""
    if options.order == "none" or _is_elastic(state.config):
        if options.calibration:
            why = "the network has an order" if options.order != "none" else "--order none ranks nothing"
            raise UserError(f"--calibration: {why}; leave it out")
        return None
    vocab_size = state.config.vocab_size
    if options.calibration:
        fields = TextOptions(text_field=options.text_field)
        mixture, _, data_hash = prepare_data(out, options.calibration, tokenizer, vocab_size, fields)
        sources = sources_named(options.calibration, fields)
    else:
        say(
            "calibration text: Python's library, its documentation and generated exercises; --calibration names another"
        )
        place = out / DATA / "00"
        manifest = tokenise_documents({"train": demo_documents(**OWN_TEXT_CHARS)}, place, load_tokenizer(tokenizer))
        mixture = Mixture(parts=(Part(name="00-demo", path=place.resolve(), weight=1.0),))
        sources, data_hash = (), manifest.data_hash
    return Text(mixture, sources, data_hash, _batches(mixture, state.config, options.calibration_tokens))


def _is_elastic(config: ModelConfig) -> bool:
    """Whether the network was trained or adopted with an order of experts or layers."""
    return len(config.widths) > 1 or config.expert_order is not None or config.layer_order is not None


def _measured(
    out: Path, folder: Path, state: StreamedState, text: Text | None, options: AdoptOptions
) -> Measured | None:
    """The orders of experts and layers, measured or read from order.json; None without calibration text."""
    if text is None:
        if _is_elastic(state.config):
            say(f"{folder}: elastic already; the order of its experts and layers is kept")
        return None
    inputs = {
        "source": str(folder),
        "files": ", ".join(f"{path.name} {path.stat().st_size}" for path in _weight_files(folder)),
        "network": state.config.model_dump_json(),
        "data": text.data_hash,
        "options": options.model_dump_json(include={"order", "layer_order", "calibration_tokens"}),
    }
    path = out / ORDER_FILE
    if path.is_file() and (before := validate(Measured, read_json(path), str(path))).inputs == inputs:
        say(f"{path}: using the measurement of an earlier call")
        return before
    measured = _measure(state, text.batches, options, inputs)
    write_json(path, measured.model_dump(mode="json"))
    return measured


def _batches(mixture: Mixture, config: ModelConfig, num_tokens: int) -> tuple[EvalBatch, ...]:
    """Full batches of up to ``num_tokens`` tokens of text, at least one row. Raises `UserError`: the text does not fill one batch."""
    length = min(ROW_TOKENS, config.max_positions)
    rows = min(ROWS, max(1, num_tokens // length))
    parts = mixture.open("train")
    available = sum(part.num_tokens for part in parts)
    if available < rows * length:
        raise UserError(
            f"--calibration: the text has {available:,} tokens, a batch needs {rows * length:,}; name more text, or use --order none"
        )
    num = max(1, min(num_tokens, available) // (rows * length))
    loader = Loader(parts, mixture.weights, rows, length, seed=0)
    return tuple(EvalBatch.of(loader.next(), "cpu") for _ in range(num))


def _measure(
    state: StreamedState, batches: Sequence[EvalBatch], options: AdoptOptions, inputs: dict[str, str]
) -> Measured:
    """Run the text through the network, with one part of the network in memory at a time."""
    config = state.config
    streamed = StreamedNetwork(config, state)
    if not config.num_moe_layers:
        batches = batches[:LAYER_BATCHES]
    left_out = 1 if options.layer_order == "leave-one-out" else 0
    batches = [*pieces(batches[0], config), *batches[1:]]  # the first batch in pieces whose activations fit in memory
    if left_out and not config.num_moe_layers and len(batches) == LAYER_BATCHES:
        left_out = LEFT_OUT_BATCHES
    what = "measure experts and layers" if config.num_moe_layers else "measure layers"
    if left_out:
        num = sum(batch.ids_BT.numel() for batch in batches[:left_out])
        layers = len(droppable_layers(config))
        what += f" (and the network without each of {layers}, on {num:,} tokens)"
        # leaving a layer out repeats the layers after it: half of them on average
        times = 1 + num * layers / 2 / sum(batch.ids_BT.numel() for batch in batches)
        say(
            f"ranking layers by leaving each out: about {times:.1f} times the work of --layer-order influence, which is less exact; "
            "--order none skips the ranking"
        )
    # the criterion removal compares outputs whose differences are below bf16's precision
    rough = nullcontext() if options.order == "removal" else rough_products(torch.device("cpu"), config.hidden_size)
    with progress(what, config.num_layers * len(batches)) as advance, rough:
        found = survey(
            streamed.model,
            batches,
            hold=streamed.hold,
            left_out=left_out,
            removal=options.order == "removal",
            advance=advance,
        )
    if not all(map(math.isfinite, (*found.influence.values(), *found.logit_error.values()))):
        raise UserError(
            f"{state.folder}: the network's outputs on this text are not finite, so experts and layers cannot be ranked; download the"
            " checkpoint again, try --dtype float32, or use --order none"
        )
    assert options.order != "none"
    return Measured(
        inputs=inputs,
        expert_order=expert_orders(config, found, options.order),
        layer_order=layer_order(config, found.logit_error or found.influence),
        influence=found.influence,
        logit_error=found.logit_error,
        experts=found.experts,
        flops=found.flops,
        num_tokens=sum(int(batch.real_BT.sum()) for batch in batches),
    )


# --- writing ----------------------------------------------------------------------------------------------------------


def _lineage(
    name: str,
    parent: Lineage | None,
    tokenizer: Path,
    config: ModelConfig,
    info: RunInfo,
    meter: Meter,
    settings: dict[str, object],
    before: Elsewhere,
) -> Lineage:
    """Lineage of the adopted checkpoint. A foreign network has no parents, only its stated cost ``before``."""
    counts = count(config, config.full())
    return new_lineage(
        name=name,
        stage="adopt",
        parents=() if parent is None else (parent,),
        adopted=before if parent is None else None,
        total_params=counts.total_params,
        active_params=counts.active_params,
        receipt=meter.receipt(),
        data_hash=info.data_hash,
        tokenizer_hash=load_tokenizer(tokenizer).fingerprint(),
        config=settings,
    )


def _write(
    out: Path,
    network: Network,
    tokenizer: Path,
    dtype: torch.dtype,
    fp32: Collection[str],
    whole: Sequence[Path],
    lineage: Callable[[Mapping[Path, str]], Lineage],
) -> None:
    with progress("write", network.num_elements * dtype.itemsize, "bytes") as advance:
        write_checkpoint(
            out,
            network.state,
            network.config,
            family=network.family,
            tokenizer_dir=tokenizer,
            presets=network.presets,
            lineage=lineage,
            dtype=dtype,
            fp32=fp32,
            max_shard_bytes=SHARD_BYTES,
            whole=whole,
            advance=advance,
        )
