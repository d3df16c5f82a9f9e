"""Checkpoints: an ordinary Hugging Face folder, and beside it what only an elastic network has.

``config.json``, ``model*.safetensors``, the tokenizer's files and ``generation_config.json`` are what transformers,
vLLM and SGLang read. ``stretto.json`` (our configuration and named Subnets), ``elastic.tensors`` (the balance biases of
all widths) and ``lineage.json`` are ours; others ignore them, and a folder without is read from ``config.json`` alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.paths import read_json, replacing, write_json
from stretto.base.records import LINEAGE_FILE, Lineage, hash_files, read_lineage, write_lineage
from stretto.model.families import Family, check_family, default_family, parse_family, stored_tied
from stretto.model.hf_config import TokenIds, differing_field, from_hf, to_hf
from stretto.model.spec import ModelConfig, SubnetChoice
from stretto.model.tensorfile import TensorFiles, write_file, write_tensors
from stretto.model.transformer import MoeLayer, Transformer
from stretto.model.weights import Alias, Stored, from_stored, stored_tensors, tied_head, to_stored
from stretto.text.tokenizer import TURN_END, load_tokenizer

SCHEMA = 1
"""Version of stretto.json. Raised when a reader of the old form would misread the new one."""
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
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *(STRETTO_FILE, ELASTIC_FILE, LINEAGE_FILE),
    *TOKENIZER_FILES,
)
"""What a checkpoint consists of: a folder that holds anything else is never replaced."""
_DTYPES = ("float32", "bfloat16", "float16")
_SHARD_BYTES = 5 * 10**9
"""Size at which transformers, too, begins another file."""


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
    lineage: Lineage | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = _SHARD_BYTES,
    advance: Callable[[int], None] | None = None,
) -> Lineage | None:
    """Write a checkpoint; the folder appears, or takes the place of an older checkpoint, only when it is complete.

    Args:
        model_or_state: the model, or its whole state dict (on any device).
        family: architecture on disk; None is the first that can express ``config``.
        tokenizer_dir: where to copy the tokenizer's files and chat template from.
        presets: named Subnets to keep with an elastic network.
        lineage: record to keep; its ``weights_hash`` is set here, from what was written.
        dtype: of the weights on disk; None is the model's own. Selection biases are always fp32.
        max_shard_bytes: size beyond which another file is begun.
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
    tokens, generation = _token_ids(Path(tokenizer_dir), config) if tokenizer_dir is not None else (TokenIds(), {})
    with replacing(folder) as partial:
        partial.mkdir(parents=True)
        write_json(partial / "config.json", to_hf(config, family, _dtype_name(dtype), tokens))
        write_json(partial / "generation_config.json", generation)
        description = StrettoFile(family=family, config=config, presets=dict(presets or {}))
        write_json(partial / STRETTO_FILE, description.model_dump(mode="json"))
        stored = {tensor.name: tensor for tensor in stored_tensors(config, family)}
        write_tensors(
            partial,
            {name: tensor.num_bytes(dtype) for name, tensor in stored.items()},
            lambda name: to_stored(stored[name], state, dtype),
            max_shard_bytes=max_shard_bytes,
            advance=advance,
        )
        biases = {name: tensor.detach().cpu() for name, tensor in state.items() if name.endswith(".bias_WE")}
        if biases:
            write_file(partial / ELASTIC_FILE, biases)
        for name in TOKENIZER_FILES if tokenizer_dir is not None else ():
            if (Path(tokenizer_dir or "") / name).is_file():
                shutil.copyfile(Path(tokenizer_dir or "") / name, partial / name)
        if lineage is not None:
            lineage = lineage.replace(weights_hash=weights_hash(partial))
            write_lineage(partial, lineage)
    return lineage


def read_checkpoint(
    folder: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Checkpoint:
    """Read a checkpoint of ours, or one of a supported family that other software wrote.

    The model is built without memory and filled tensor by tensor, so that the weights exist once. ``dtype`` None is
    that of the embedding on disk.

    Raises:
        UserError: a file is missing, truncated or damaged, a tensor is missing, unexpected or of another shape, or the
            architecture or one of its settings is not supported.
    """
    folder = Path(folder)
    description = _describe(folder)
    config, family = description.config, description.family
    with TensorFiles(folder) as files:
        dtype = dtype or files.dtype("model.embed_tokens.weight")
        with torch.device("meta"):
            model = Transformer(config)
        state = {
            name: torch.zeros(tensor.shape, dtype=torch.float32 if name.endswith(".bias_WE") else dtype, device=device)
            for name, tensor in model.state_dict().items()
        }
        tensors = list(stored_tensors(config, family))
        if stored_tied(config, family):
            tensors.append(tied_head(config))
        for stored in tensors:
            _fill(stored, files, state, folder)
        _refuse_unexpected(files, tensors, config)
    if (folder / STRETTO_FILE).is_file() and config.num_moe_layers:
        _fill_branches(folder, config, state)
    model.load_state_dict(state, assign=True)
    moe_layers = (block.mlp for block in model.blocks if isinstance(block.mlp, MoeLayer))
    for layer, order in zip(moe_layers, config.expert_orders, strict=True):
        layer.rank_E = torch.tensor(order, device=device).argsort()  # not in the state dict, so still without memory
    lineage = read_lineage(folder) if (folder / LINEAGE_FILE).is_file() else None
    return Checkpoint(model, config, family, description.presets, lineage, folder)


def read_config(folder: Path | str) -> ModelConfig:
    """The network that a checkpoint holds, without its weights. Raises `UserError` as `read_checkpoint` does."""
    return _describe(Path(folder)).config


def read_presets(folder: Path | str) -> dict[str, SubnetChoice]:
    """Named Subnets kept with a checkpoint. Raises `UserError` as `read_checkpoint` does."""
    return _describe(Path(folder)).presets


def weights_hash(folder: Path | str) -> str:
    """SHA-256 over names and bytes of all tensor files of a checkpoint, as a lineage keeps it."""
    return hash_files([*Path(folder).glob("model*.safetensors"), *Path(folder).glob(ELASTIC_FILE)])


def _describe(folder: Path) -> StrettoFile:
    """What stretto.json says, checked against config.json; without it, what config.json says."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; {folder} is not a checkpoint folder")
    tree = read_json(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: (whole file): not a JSON object; the file is damaged")
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
    field = differing_field(tree, to_hf(description.config, description.family, "float32", TokenIds()))
    if field is not None:
        raise UserError(
            f"{ours}: does not belong to config.json ({field} is {tree.get(field)!r} there); delete it to read the folder as an ordinary checkpoint"
        )
    return description


def _refuse_other_files(folder: Path) -> None:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() or not any(fnmatch(path.name, pattern) for pattern in _OURS):
            raise UserError(
                f"{folder}: would be replaced, and holds {path.name}, which is no part of a checkpoint; choose another folder"
            )


def _token_ids(folder: Path, config: ModelConfig) -> tuple[TokenIds, dict[str, object]]:
    """Ids for config.json, and the generation_config.json: generation ends at a document's and at a turn's end."""
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens and the network vocab_size {config.vocab_size}; use the one it was trained with"
        )
    tokens = TokenIds(eos=tokenizer.eos_id, bos=tokenizer.named_id("bos_token"), pad=tokenizer.named_id("pad_token"))
    turn_end = tokenizer.rust.token_to_id(TURN_END) if tokenizer.chat_template else None
    ends = sorted({tokens.eos, turn_end} - {None}, key=lambda index: index != tokens.eos)
    generation = {"bos_token_id": tokens.bos, "eos_token_id": ends, "pad_token_id": tokens.pad}
    return tokens, {name: value for name, value in generation.items() if value is not None}


def _fill(stored: Stored, files: TensorFiles, state: Mapping[str, Tensor], folder: Path) -> None:
    places = [Alias(stored.name, stored.shape), *stored.aliases]
    place = next((place for place in places if place.name in files.names), None)
    if place is None:
        if stored.ours is None or stored.is_copy:
            return
        raise UserError(f"{folder}: {stored.name}: missing from the weights; fetch the checkpoint again")
    tensor = files.read(place.name, place.shape, place.part)
    if not from_stored(stored, tensor, state):
        remedy = "use a checkpoint without them"
        if (folder / STRETTO_FILE).is_file():
            remedy = f"delete {STRETTO_FILE} to read the folder as an ordinary checkpoint"
        raise UserError(
            f"{files.path(place.name)}: {place.name}: holds weights that have no place in this network; {remedy}"
        )


def _refuse_unexpected(files: TensorFiles, tensors: list[Stored], config: ModelConfig) -> None:
    known = {stored.name for stored in tensors} | {alias.name for stored in tensors for alias in stored.aliases}
    for name in files.names:
        if name in known or name.endswith("rotary_emb.inv_freq") or name.startswith("model.mtp_"):
            continue
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        if layer.isdigit() and int(layer) >= config.num_layers:
            continue  # multi-token prediction, an extra of GLM's and ERNIE's checkpoints that plain decoding leaves out
        raise UserError(
            f"{files.path(name)}: {name}: a tensor this architecture has no place for; use a checkpoint of the plain text model"
        )


def _fill_branches(folder: Path, config: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """Balance biases of all widths; the first row, the full width's, must be the one in the model's own files."""
    with TensorFiles(folder, ELASTIC_FILE) as files:
        for name, bias_WE in state.items():
            if not name.endswith(".bias_WE"):
                continue
            stored_WE = files.read(name, tuple(bias_WE.shape))
            if config.selection_bias and not torch.equal(stored_WE[0], bias_WE[0].cpu()):
                raise UserError(
                    f"{folder / ELASTIC_FILE}: {name}: is not of these weights; delete it and {STRETTO_FILE} to read the folder as an ordinary checkpoint"
                )
            bias_WE.copy_(stored_WE)


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise UserError(f"dtype: weights cannot be stored as {dtype}; choose {', '.join(_DTYPES)}")
    return name
