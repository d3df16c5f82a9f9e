"""Checkpoints: a Hugging Face folder, with extra files for elastic networks.

``config.json``, ``model*.safetensors``, the tokenizer's files and ``generation_config.json`` are what transformers,
vLLM and SGLang read. ``stretto.json`` (our configuration and named Subnets), ``elastic.tensors`` (the balance biases of
all widths) and ``lineage.json`` are ours; others ignore them, and a folder without is read from ``config.json`` alone.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.paths import read_json, replacing, write_json
from stretto.base.records import LINEAGE_FILE, Lineage, file_sha256, hash_files, read_lineage, write_lineage
from stretto.model.families import (
    Alias,
    Family,
    Stored,
    check_family,
    default_family,
    differing_field,
    from_hf,
    parse_family,
    readable_tensors,
    stored_tensors,
    to_hf,
)
from stretto.model.families.quantisation import quantisation
from stretto.model.gguf_read import GgufFile, gguf_file
from stretto.model.quantised import Dequantised, TensorSource
from stretto.model.spec import ModelConfig, SubnetChoice
from stretto.model.transformer import MoeLayer, Transformer, skeleton
from stretto.text.tokenizer import TURN_END, load_tokenizer

SCHEMA = 1
"""Version of stretto.json. Raised when a reader of the old form would misread the new one."""
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"
STRETTO_FILE = "stretto.json"
ELASTIC_FILE = "elastic.tensors"
"""In safetensors form, under another suffix: vLLM takes every ``*.safetensors`` of a folder for the model's."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_OURS = (
    *("config.json", GENERATION_FILE, "model*.safetensors", INDEX_FILE),
    *(STRETTO_FILE, ELASTIC_FILE, LINEAGE_FILE),
    *TOKENIZER_FILES,
)
"""What a checkpoint consists of: a folder that holds anything else is never replaced."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Of weights, by safetensors' name."""
_STORED_DTYPES = {**_DTYPES, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8}
"""And of quantised weights and their scales."""
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_AGAIN = "copy or fetch the checkpoint again"
_SHARD_BYTES = 5 * 10**9
"""Size at which transformers, too, begins another file."""
_LONGEST_NAME = 255
"""Of a file, on every common system."""
_COPY_BYTES = 1 << 24
"""Of a file that is copied, at a time."""


class StrettoFile(Config):
    """What stretto.json holds; written by `write_checkpoint`."""

    schema_version: int = SCHEMA
    family: Family
    config: ModelConfig
    presets: dict[str, SubnetChoice] = Field(default_factory=dict)
    """Subnets by name, for the command line and the server."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in memory; written by `read_checkpoint`."""

    model: Transformer
    config: ModelConfig
    family: Family
    presets: dict[str, SubnetChoice]
    lineage: Lineage | None
    """None for a checkpoint that other software wrote."""
    folder: Path


def write_checkpoint(
    folder: Path | str,
    model_or_state: Transformer | Mapping[str, Tensor],
    config: ModelConfig,
    *,
    family: Family | None = None,
    tokenizer_dir: Path | str | None = None,
    presets: Mapping[str, SubnetChoice] | None = None,
    lineage: Lineage | Callable[[Mapping[Path, str]], Lineage] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = _SHARD_BYTES,
    whole: Sequence[Path] = (),
    advance: Callable[[int], None] | None = None,
) -> Lineage | None:
    """Write a checkpoint; the folder appears, or takes the place of an older checkpoint, only when it is complete.

    Args:
        model_or_state: the model, or its whole state dict (on any device); a mapping that reads its tensors when they are asked
            for is asked in the order of the layers.
        family: architecture on disk; None is the first that can express ``config``.
        tokenizer_dir: where to copy the tokenizer's files and chat template from; a generation_config.json there is kept.
        presets: named Subnets to keep with an elastic network.
        lineage: record to keep, or what makes it once the weights are written, of the SHA-256 of each file of ``whole``; its
            ``weights_hash`` is set here, from those.
        dtype: of the weights on disk; None is the model's own. Selection biases are always fp32.
        max_shard_bytes: size beyond which another file is begun.
        whole: tensor files that hold what would be written, in ``family`` and ``dtype``: they are copied as they are.
        advance: called with the bytes of each tensor file written.

    Returns: the lineage as written.

    Raises:
        UserError: the family cannot express the network, the folder holds other files, the tokenizer does not fit, or
            the disk is full.
    """
    folder = Path(folder)
    family = default_family(config) if family is None else check_family(config, family)
    state = model_or_state.state_dict() if isinstance(model_or_state, Transformer) else model_or_state
    dtype = dtype or state["embedding.weight"].dtype
    for choice in (presets or {}).values():
        choice.of(config)
    _refuse_other_files(folder)
    generation = generation_settings(Path(tokenizer_dir), config) if tokenizer_dir is not None else {}
    with replacing(folder) as partial:
        partial.mkdir(parents=True)
        ids = {name: generation.get(name) for name in _TOKEN_IDS}
        own = {name: value[0] if isinstance(value, list) else value for name, value in ids.items()}
        write_json(partial / "config.json", to_hf(config, family, _dtype_name(dtype)) | own)
        write_json(partial / GENERATION_FILE, generation)
        description = StrettoFile(family=family, config=config, presets=dict(presets or {}))
        write_json(partial / STRETTO_FILE, description.model_dump(mode="json"))
        tensors = list(stored_tensors(config, family))
        with ThreadPoolExecutor(1) as pool:
            hashing = pool if lineage is not None else None
            digests = _write_weights(partial, tensors, state, dtype, max_shard_bytes, whole, hashing, advance)
        biases = {name: state[name].detach().cpu() for name in state if name.endswith(".bias_WE")}
        if biases:
            write_file(partial / ELASTIC_FILE, biases)
        for name in TOKENIZER_FILES:
            if tokenizer_dir is not None and (Path(tokenizer_dir) / name).is_file():
                shutil.copyfile(Path(tokenizer_dir) / name, partial / name)
        if lineage is None:
            return None
        sources = dict(zip(whole, digests.values(), strict=False))
        made = lineage if isinstance(lineage, Lineage) else lineage(sources)
        made = made.replace(weights_hash=weights_hash(partial, digests))
        write_lineage(partial, made)
    return made


def read_checkpoint(
    folder: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Checkpoint:
    """Read a checkpoint of ours, or one of a supported family that other software wrote: a folder, or a GGUF file.

    The model is built without memory and filled tensor by tensor, so that the weights exist once. ``dtype`` None is
    that of the embedding on disk.

    Raises:
        UserError: a file is missing, truncated or damaged, a tensor is missing, unexpected or of another shape, or the
            architecture or one of its settings is not supported.
    """
    folder = Path(folder)
    description = describe(folder)
    config, family = description.config, description.family
    with open_tensors(folder) as files:
        tensors = readable(config, family, files, folder)
        dtype = dtype or files.dtype("model.embed_tokens.weight")
        model = skeleton(config)
        state = {
            name: torch.zeros(tensor.shape, dtype=torch.float32 if name.endswith(".bias_WE") else dtype, device=device)
            for name, tensor in model.state_dict().items()
        }
        for stored in tensors:
            fill(stored, files, state, folder)
    if (folder / STRETTO_FILE).is_file() and config.num_moe_layers:
        fill_branches(folder, config, state)
    model.load_state_dict(state, assign=True)
    moe_layers = (block.mlp for block in model.blocks if isinstance(block.mlp, MoeLayer))
    for layer, order in zip(moe_layers, config.expert_orders, strict=True):
        layer.set_order(order, device)  # not in the state dict, so still without memory
    lineage = read_lineage(folder) if (folder / LINEAGE_FILE).is_file() else None
    return Checkpoint(model, config, family, description.presets, lineage, folder)


def read_config(folder: Path | str) -> ModelConfig:
    """The network that a checkpoint holds, without its weights. Raises `UserError` as `read_checkpoint` does."""
    return describe(Path(folder)).config


def read_family(folder: Path | str) -> Family:
    """The architecture that a checkpoint is stored as. Raises `UserError` as `read_checkpoint` does."""
    return describe(Path(folder)).family


def read_presets(folder: Path | str) -> dict[str, SubnetChoice]:
    """Named Subnets kept with a checkpoint. Raises `UserError` as `read_checkpoint` does."""
    return describe(Path(folder)).presets


def weights_hash(folder: Path | str, known: Mapping[str, str] = MappingProxyType({})) -> str:
    """SHA-256 over names and bytes of all tensor files of a checkpoint, as a lineage keeps it (`hash_files`). ``known``: those of
    single files by name, which are not read.
    """
    paths = [*Path(folder).glob("model*.safetensors"), *Path(folder).glob(ELASTIC_FILE)]
    return hash_files({path.name: known.get(path.name) or file_sha256(path) for path in paths})


def known_hash(folder: Path) -> str:
    """`weights_hash` as the lineage has it; the weights are only read where there is none."""
    return read_lineage(folder).weights_hash if (folder / LINEAGE_FILE).is_file() else weights_hash(folder)


def describe(folder: Path) -> StrettoFile:
    """What stretto.json says, checked against config.json; without it, what config.json says. Raises `UserError` as
    `read_checkpoint` does.
    """
    packed = gguf_file(folder)
    if packed is not None:
        with GgufFile(packed) as file:
            config, family = from_hf(file.config, str(packed))
        return StrettoFile(family=family, config=config)
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; {folder} is not a checkpoint folder")
    tree = read_json(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: not a JSON object; the file is damaged")
    ours = folder / STRETTO_FILE
    if not ours.is_file():
        config, family = from_hf(tree, str(path))
        return StrettoFile(family=family, config=config)
    own = read_json(ours)
    version = own.get("schema_version") if isinstance(own, dict) else None
    if version != SCHEMA:
        raise UserError(
            f"{ours}: schema_version: {version} cannot be read, this Stretto reads {SCHEMA}; use the version that wrote it"
        )
    description = validate(StrettoFile, own, str(ours))
    parse_family(str(tree.get("model_type")), f"{path}: model_type")
    check_family(description.config, description.family)
    field = differing_field(tree, to_hf(description.config, description.family, "float32"))
    if field is not None:
        raise UserError(
            f"{ours}: does not belong to config.json ({field} is {tree.get(field)!r} there); delete it to read the folder as an ordinary checkpoint"
        )
    return description


def _refuse_other_files(folder: Path) -> None:
    if (folder / "config.json").is_file() and not (folder / STRETTO_FILE).is_file():
        raise UserError(f"{folder}: would be replaced, and holds a checkpoint of other software; choose another folder")
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() or not any(fnmatch(path.name, pattern) for pattern in _OURS):
            raise UserError(
                f"{folder}: would be replaced, and holds {path.name}, which is no part of a checkpoint; choose another folder"
            )


def generation_settings(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """What generation_config.json will say: what the one beside the tokenizer in ``folder`` does, and where it says nothing, that
    generation ends at a document's and at a turn's end. Raises `UserError`: no tokenizer is there, one with more tokens than the
    embedding has rows, or ids that are none.
    """
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens and the network vocab_size {config.vocab_size}; use the one it was trained with"
        )
    turn_end = tokenizer.rust.token_to_id(TURN_END) if tokenizer.chat_template else None
    ends = [tokenizer.eos_id] if turn_end in (None, tokenizer.eos_id) else [tokenizer.eos_id, turn_end]
    named = (tokenizer.named_id("bos_token"), ends, tokenizer.named_id("pad_token"))
    found = {name: value for name, value in zip(_TOKEN_IDS, named, strict=True) if value is not None}
    path = folder / GENERATION_FILE
    own = read_json(path) if path.is_file() else {}
    if not isinstance(own, dict):
        raise UserError(f"{path}: not a JSON object; the file is damaged")
    for name in _TOKEN_IDS:
        told = own.get(name)
        ids = told if isinstance(told, list) and told else [told]
        if told is not None and any(type(index) is not int for index in ids):
            raise UserError(f"{path}: {name}: {told!r} is not a token id; correct it, or remove the file")
    return found | {name: value for name, value in own.items() if value is not None and name != "transformers_version"}


def readable(config: ModelConfig, family: Family, files: TensorSource, folder: Path) -> list[Stored]:
    """What of ``files`` is read, after a look at their headers: one tensor after the other, before anything is built by what
    config.json says of its size. Raises `UserError`: a tensor is missing, unexpected, of another shape or of a dtype that is not read.
    """
    found = []
    for stored in readable_tensors(config, family):
        if (place := _place(stored, files, folder)) is not None:
            files.check(place.name, place.shape)
        found.append(stored)
    _refuse_unexpected(files, found, config)
    return found


def _place(stored: Stored, files: TensorSource, folder: Path) -> Alias | None:
    """Where ``stored`` lies; None: nowhere, and it need not. Raises `UserError`: it is missing."""
    places = [Alias(stored.name, stored.shape), *stored.aliases]
    place = next((place for place in places if place.name in files.names), None)
    if place is None:
        if stored.ours is None or stored.is_copy:
            return None
        raise UserError(
            f"{folder}: {stored.name}: missing from the weights, and config.json has a place for it; fetch the checkpoint again"
        )
    if stored.ours is None and files.is_empty(place.name):
        return None  # transformers stores a shared expert of no width where ``n_shared_experts`` is 0
    return place


def fill(stored: Stored, files: TensorSource, state: Mapping[str, Tensor], folder: Path) -> None:
    """Read ``stored`` of the checkpoint ``folder``, whose ``files`` these are, into its place in ``state``, our state dict or the
    part of it that is wanted. Raises `UserError` as `read_checkpoint` does.
    """
    place = _place(stored, files, folder)
    if place is None:
        return
    if not all(from_stored(piece, tensor, state) for piece, tensor in _pieces(stored, place, files, state)):
        remedy = "use a checkpoint without them"
        if (folder / STRETTO_FILE).is_file():
            remedy = f"delete {STRETTO_FILE} to read the folder as an ordinary checkpoint"
        raise UserError(
            f"{files.path(place.name)}: {place.name}: holds weights that have no place in this network; {remedy}"
        )


def _pieces(
    stored: Stored, place: Alias, files: TensorSource, state: Mapping[str, Tensor]
) -> Iterator[tuple[Stored, Tensor]]:
    """``stored`` and what ``place`` holds; of stacked experts one after the other, because all may be gigabytes."""
    if not stored.is_stacked:
        yield stored, files.read(place.name, place.shape, place.part)
        return
    num_ours = 0 if stored.ours is None else len(state[stored.ours])
    for expert in range(place.shape[0]):
        tensor = files.read(place.name, place.shape, (expert,))
        yield stored.of_expert(expert, num_ours), tensor.mT if tensor.dim() == 2 else tensor


def _refuse_unexpected(files: TensorSource, tensors: list[Stored], config: ModelConfig) -> None:
    known = {stored.name for stored in tensors} | {alias.name for stored in tensors for alias in stored.aliases}
    # multi-token prediction, an extra of GLM's, DeepSeek's and ERNIE's checkpoints that plain decoding leaves out
    extra = {_layer(name) for name in files.names if ".eh_proj." in name}
    for name in sorted(files.names):
        if name in known or name.endswith("rotary_emb.inv_freq") or name.startswith("model.mtp_"):
            continue
        layer = _layer(name)
        if layer is not None and layer >= config.num_layers:
            if layer in extra:
                continue
            raise UserError(
                f"{files.path(name)}: {name}: a layer more than the {config.num_layers} (num_hidden_layers) of config.json;"
                f" the files do not belong together, {_AGAIN}"
            )
        raise UserError(
            f"{files.path(name)}: {name}: a tensor this architecture has no place for; use a checkpoint of the plain text model"
        )


def _layer(name: str) -> int | None:
    """The layer that a tensor of this name belongs to."""
    number = name.split(".")[2] if name.startswith("model.layers.") else ""
    return int(number) if number.isdigit() else None


def fill_branches(folder: Path, config: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """Balance biases of all widths; the first row, the full width's, must be the one in the model's own files."""
    with TensorFiles(folder, ELASTIC_FILE) as files:
        for name, bias_WE in state.items():
            if not name.endswith(".bias_WE"):
                continue
            stored_WE = files.read(name, tuple(bias_WE.shape))
            if config.selection_bias and not torch.equal(stored_WE[0], bias_WE[0].cpu()):
                raise UserError(
                    f"{folder / ELASTIC_FILE}: {name}: does not belong to these weights; delete it and {STRETTO_FILE} to read an ordinary checkpoint"
                )
            bias_WE.copy_(stored_WE)


def _dtype_name(dtype: torch.dtype) -> str:
    names = [str(known).removeprefix("torch.") for known in _DTYPES.values()]
    name = str(dtype).removeprefix("torch.")
    if name not in names:
        raise UserError(f"dtype: weights cannot be stored as {dtype}; choose {', '.join(names)}")
    return name


def to_stored(stored: Stored, state: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The tensor ``stored`` as it goes to disk, on the CPU; ``state`` is our state dict."""
    dtype = torch.float32 if stored.always_fp32 else dtype
    if stored.ours is None:
        return torch.full(stored.shape, stored.filling, dtype=dtype)
    tensor = state[stored.ours].detach()[stored.part].to("cpu", dtype)
    tensor = paired(stored, tensor, on_disk=True)
    if stored.is_stacked:
        tensor = tensor.mT if tensor.dim() == 3 else tensor
        missing = stored.shape[0] - tensor.shape[0]
    else:
        missing = math.prod(stored.shape) // math.prod(tensor.shape[1:]) - tensor.shape[0]
    if missing:
        tensor = torch.cat((tensor, tensor.new_full((missing, *tensor.shape[1:]), stored.filling)))
    tensor = tensor.reshape(stored.shape).contiguous()
    return tensor.clone() if stored.is_copy else tensor  # safetensors refuses two names of one memory


def from_stored(stored: Stored, tensor: Tensor, state: Mapping[str, Tensor]) -> bool:
    """Copy ``tensor``, of ``stored.shape``, into its place in ``state``; of stacked experts, `Stored.of_expert` each.

    False if it holds something that has no place there: a constant, a padding or a copy that is not what it should be.
    """
    if stored.ours is None:
        return bool(_is_filling(tensor, stored.filling))
    place = state[stored.ours][stored.part]
    if stored.is_copy:
        return torch.equal(tensor.to(place), place)
    rows = tensor.reshape(-1, *place.shape[1:])
    own, padding = rows[: place.shape[0]], rows[place.shape[0] :]
    if not _is_filling(padding, stored.filling):
        return False
    place.copy_(paired(stored, own, on_disk=False))
    return True


def _is_filling(tensor: Tensor, filling: float) -> bool:
    # one per cent: other software may have rounded a bias to bf16
    return bool(((tensor.float() - filling).abs() <= 0.01 * abs(filling)).all())


def paired(stored: Stored, rows: Tensor, on_disk: bool) -> Tensor:
    """``rows`` of memory as they are paired on disk, or the other way round: the last rows of each group are read as a table
    of halves by pairs, and transposed.
    """
    width, start = stored.neighbours_of, stored.neighbours_from
    if not width:
        return rows
    outer, inner = (2, (width - start) // 2) if on_disk else ((width - start) // 2, 2)
    rest = rows.shape[2:] if stored.is_stacked else rows.shape[1:]
    groups = rows.reshape(-1, width, *rest)
    pairs = groups[:, start:].unflatten(1, (outer, inner)).transpose(1, 2).flatten(1, 2)
    return torch.cat((groups[:, :start], pairs), dim=1).reshape(rows.shape)


@contextmanager
def open_tensors(folder: Path) -> Iterator[TensorSource]:
    """The tensors of a checkpoint, dequantised. Raises `UserError`: as `TensorFiles` does, and a quantisation that cannot be
    read.
    """
    packed = gguf_file(folder)
    if packed is not None:
        with GgufFile(packed) as file:
            yield file
        return
    path = folder / "config.json"
    how = quantisation(read_json(path), str(path))
    with TensorFiles(folder) as files:
        yield files if how is None else Dequantised(files, how)


class TensorFiles(ExitStack):
    """Reads tensors by name from ``file`` of ``folder``, or from the shards that an index names; a context that closes them."""

    def __init__(self, folder: Path, file: str = WEIGHTS_FILE) -> None:
        """Open all files and read their headers. Raises `UserError`: no weights, a shard that is missing or damaged, or
        an index that does not match its shards.
        """
        super().__init__()
        self._folder = folder
        self._files: dict[Path, Any] = {}
        self._path_of: dict[str, Path] = {}
        index = folder / INDEX_FILE
        try:
            if not (folder / file).is_file() and file == WEIGHTS_FILE and index.is_file():
                self._open_shards(folder, index)
            else:
                self._path_of = dict.fromkeys(self._open(folder / file), folder / file)
        except BaseException:
            self.close()
            raise

    def _open_shards(self, folder: Path, index: Path) -> None:
        tree = read_json(index)
        weight_map = tree.get("weight_map") if isinstance(tree, dict) else None
        if not isinstance(weight_map, dict):
            raise UserError(f"{index}: weight_map: missing; {_AGAIN}")
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard or len(shard) > _LONGEST_NAME:
                raise UserError(f"{index}: weight_map.{name}: {shard!r} is not a file of this folder; {_AGAIN}")
        held = {shard: self._open(folder / shard) for shard in sorted(set(weight_map.values()))}
        for name, shard in weight_map.items():
            if name not in held[shard]:
                raise UserError(
                    f"{folder / shard}: {name}: the index says that this file holds it, and it does not; {_AGAIN}"
                )
            self._path_of[name] = folder / shard

    def _open(self, path: Path) -> frozenset[str]:
        if not path.is_file():
            remedy = "only checkpoints in safetensors can be read" if path.name == WEIGHTS_FILE else _AGAIN
            raise UserError(f"{path}: no such file; {remedy}")
        try:
            # not mapped: pages of a mapped file would stay in memory until it is closed
            file = self.enter_context(safe_open(path, framework="pt", backend="pread"))
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path}: not readable as safetensors: {error}; the file is truncated or damaged, {_AGAIN}"
            ) from None
        self._files[path] = file
        return frozenset(file.keys())

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._path_of)

    def path(self, name: str) -> Path:
        """The file that holds ``name``."""
        return self._path_of[name]

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of ``name`` as stored. Raises `UserError`: it is missing, or of a dtype that is none of fp32, bf16 and
        fp16.
        """
        if name not in self._path_of:
            raise UserError(f"{self._folder}: {name}: missing from the weights; {_AGAIN}")
        path = self._path_of[name]
        stored = self._slice(name).get_dtype()
        if stored not in _DTYPES:
            raise UserError(
                f"{path}: {name}: dtype {stored} is not supported; convert the checkpoint to one of {', '.join(_DTYPES)}"
            )
        return _DTYPES[stored]

    @property
    def files(self) -> dict[Path, frozenset[str]]:
        """Names of all that each file holds, whatever an index says."""
        return {path: frozenset(file.keys()) for path, file in self._files.items()}

    def stored_as(self, name: str) -> tuple[torch.dtype | None, tuple[int, ...]]:
        """Dtype and shape of ``name`` in its file; the dtype is None for one that weights are not read in."""
        return _STORED_DTYPES.get(self._slice(name).get_dtype()), tuple(self._slice(name).get_shape())

    def is_empty(self, name: str) -> bool:
        """Whether ``name`` has no elements."""
        return 0 in self.stored_as(name)[1]

    def raw(self, name: str, part: tuple[int | slice, ...] = ()) -> Tensor:
        """``part`` of the tensor ``name``, on the CPU, whatever its dtype and shape."""
        tensor: Tensor = self._slice(name)[part] if part else self._files[self._path_of[name]].get_tensor(name)
        return tensor

    def _slice(self, name: str) -> Any:
        return self._files[self._path_of[name]].get_slice(name)

    def read(self, name: str, shape: tuple[int, ...], part: tuple[int | slice, ...] = ()) -> Tensor:
        """``part`` of the tensor ``name`` of ``shape``, on the CPU. Raises `UserError`: it is missing, of another
        shape, or of a dtype that is none of fp32, bf16 and fp16.
        """
        self.check(name, shape)
        return self.raw(name, part)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """What `read` raises, from the header alone."""
        self.dtype(name)
        stored = self.stored_as(name)[1]
        if stored != shape:
            raise UserError(
                f"{self.path(name)}: {name}: shape {list(stored)} where config.json gives {list(shape)}; the files do not belong together, {_AGAIN}"
            )


def _write_weights(
    folder: Path,
    tensors: list[Stored],
    state: Mapping[str, Tensor],
    dtype: torch.dtype,
    max_shard_bytes: int,
    whole: Sequence[Path],
    hashing: Executor | None,
    advance: Callable[[int], None] | None,
) -> dict[str, str]:
    """Copy the files ``whole``, then write what of ``tensors`` they do not hold, in that order; one shard exists in memory at a
    time, while ``hashing`` reads the one before. Returns: the SHA-256 of each file by its name here, those of ``whole`` first."""
    ready = {path: tensor_names(path) for path in whole}
    held = frozenset[str]().union(*ready.values())
    shards: list[list[Stored]] = [[]]
    size, total = 0, 0

    def num_bytes(stored: Stored) -> int:
        return math.prod(stored.shape) * (torch.float32 if stored.always_fp32 else dtype).itemsize

    for stored in tensors:
        total += num_bytes(stored)
        if stored.name in held:
            continue
        if shards[-1] and size + num_bytes(stored) > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(stored)
        size += num_bytes(stored)
    parts: list[Path | list[Stored]] = [*whole, *(shard for shard in shards if shard)]
    weight_map: dict[str, str] = {}
    digests: dict[str, str | Future[str]] = {}
    for number, part in enumerate(parts, start=1):
        file = WEIGHTS_FILE if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors"
        if isinstance(part, Path):
            digests[file] = copy_file(part, folder / file, advance)
            weight_map |= dict.fromkeys(ready[part], file)
            continue
        write_file(folder / file, {stored.name: to_stored(stored, state, dtype) for stored in part})
        weight_map |= {stored.name: file for stored in part}
        if hashing is not None:
            digests[file] = hashing.submit(file_sha256, folder / file)
        if advance is not None:
            advance(sum(map(num_bytes, part)))
    if len(parts) > 1:
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return {file: digest if isinstance(digest, str) else digest.result() for file, digest in digests.items()}


def tensor_names(path: Path) -> frozenset[str]:
    """Names of the tensors in one safetensors file. Raises `UserError`: it is missing or damaged."""
    with TensorFiles(path.parent, path.name) as files:
        return files.names


def copy_file(source: Path, target: Path, advance: Callable[[int], None] | None = None) -> str:
    """Copy a large file; ``advance`` is called with the bytes of each step. (``shutil.copyfile`` tells nothing on the way.)
    Returns: its SHA-256, taken meanwhile: reading the copy for it would take as long again.
    """
    digest = hashlib.sha256()
    chunks = [memoryview(bytearray(_COPY_BYTES)) for _ in range(2)]  # one is hashed while the other is filled
    hashed: list[Future[None] | None] = [None, None]
    with ThreadPoolExecutor(1) as pool, source.open("rb", buffering=0) as reading, target.open("wb") as writing:
        for place in cycle(range(2)):
            if (earlier := hashed[place]) is not None:
                earlier.result()
            chunk = chunks[place][: reading.readinto(chunks[place])]
            if not chunk:
                break
            hashed[place] = pool.submit(digest.update, chunk)
            writing.write(chunk)
            if advance is not None:
                advance(len(chunk))
    return digest.hexdigest()


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """One safetensors file, marked as PyTorch's, as transformers demands. Raises `UserError`: the disk is full."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # how the library reports it
        raise UserError(f"{path}: cannot be written: {error}; free some space or choose another folder") from error
