"""Checkpoints: Hugging Face folders, with additional files for elastic networks.

transformers, vLLM and SGLang read ``config.json``, ``model*.safetensors``, the tokenizer's files and ``generation_config.json``.
``stretto.json`` (configuration and presets), ``elastic.tensors`` (balance biases of all widths) and ``lineage.json`` are additions,
which other software ignores. A folder without them is read from ``config.json`` alone.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from stretto.base.config import Config, read_versioned
from stretto.base.errors import UserError
from stretto.base.paths import LATENCY_FILE, LOCK_FILE, read_json, replacing, require_new, write_json
from stretto.base.records import LINEAGE_FILE, Lineage, file_sha256, find_lineage, hash_files, write_lineage
from stretto.model.families import (
    Family,
    Stored,
    check_family,
    default_family,
    differing_field,
    from_hf,
    parse_family,
    stored_tensors,
    to_hf,
)
from stretto.model.families.quantisation import packed_config, quantisation
from stretto.model.gguf.read import GgufFile, gguf_file
from stretto.model.headers import ELASTIC_FILE, INDEX_FILE, STRETTO_FILE, WEIGHTS_FILE
from stretto.model.quantised import CODES, SCALES, SHAPE, ZEROS, Dequantised, TensorSource
from stretto.model.shard import Shard, ShardSource
from stretto.model.spec import ModelConfig, SubnetChoice
from stretto.model.stored import ROUTERS, Dtypes, fill, from_stored, readable, to_stored
from stretto.model.transformer import MoeLayer, Transformer, skeleton
from stretto.model.weight_files import DTYPES, TensorFiles, copy_file, open_tensors, tensor_names, write_file
from stretto.ops.int_weights import IntWeight, pack
from stretto.text.tokenizer import TURN_END, load_tokenizer

SCHEMA = 1
"""Version of stretto.json; incremented when a reader of the old form would misread the new one."""
GENERATION_FILE = "generation_config.json"
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
    *(STRETTO_FILE, ELASTIC_FILE, LINEAGE_FILE, LATENCY_FILE, LOCK_FILE),
    *TOKENIZER_FILES,
)
"""Patterns of the files in a checkpoint folder; a folder with other files is never replaced."""
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

_SHARD_BYTES = 5 * 10**9
"""Largest size of a file of weights; also transformers' default."""


class StrettoFile(Config):
    """Contents of stretto.json. Written by `write_checkpoint`."""

    schema_version: int = SCHEMA
    family: Family
    config: ModelConfig
    presets: dict[str, SubnetChoice] = Field(default_factory=dict)
    """Named Subnets, for the command line and the server."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in memory. Written by `read_checkpoint`."""

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
    fp32: Collection[str] = (),
    integers: Mapping[str, IntWeight] = MappingProxyType({}),
    max_shard_bytes: int = _SHARD_BYTES,
    whole: Sequence[Path] = (),
    advance: Callable[[int], None] | None = None,
) -> Lineage | None:
    """Write a checkpoint. The folder appears, or replaces an older checkpoint, only when it is complete.

    Args:
        model_or_state: the model or its state dict, on any device; a mapping that reads tensors on access is accessed in the order of
            the layers.
        family: architecture on disk; None: the first that can express ``config``.
        tokenizer_dir: folder from which the tokenizer's files, the chat template and the fields of generation_config.json are copied.
        presets: named Subnets of an elastic network.
        lineage: the record to write, or a function that creates it from the SHA-256 of each file of ``whole``, called after the
            weights are written. Its ``weights_hash`` is set here.
        dtype: dtype of the weights on disk; None: that of the model, whose routers may be fp32. Selection biases are always fp32.
        fp32: routers (names in the state dict) that are fp32 on disk beside weights in ``dtype``.
        integers: integer weights by their names in the state dict, which are written in place of those of the state.
        max_shard_bytes: largest size of a file of weights.
        whole: safetensors files that already have tensors of the result, in ``family`` and ``dtype``; they are copied.
        advance: called with the number of bytes of each file written.

    Returns: the lineage as written.

    Raises:
        UserError: the family cannot express the network, the folder contains other files, the tokenizer does not fit, or
            the disk is full.
    """
    folder = Path(folder)
    family = default_family(config) if family is None else check_family(config, family)
    state = model_or_state.state_dict() if isinstance(model_or_state, Transformer) else model_or_state
    if dtype is None:
        dtype = state["embedding.weight"].dtype
        if dtype != torch.float32:
            fp32 = {name for name in state if name.endswith(ROUTERS) and state[name].dtype == torch.float32}
    for choice in (presets or {}).values():
        choice.of(config)
    _refuse_other_files(folder)
    generation = generation_settings(Path(tokenizer_dir), config) if tokenizer_dir is not None else {}
    with replacing(folder) as partial:
        partial.mkdir(parents=True)
        ids = {name: generation.get(name) for name in _TOKEN_IDS}
        single_ids = {name: value[0] if isinstance(value, list) else value for name, value in ids.items()}
        tree = to_hf(config, family, _dtype_name(dtype)) | single_ids
        tensors = [
            replace(stored, always_fp32=True) if stored.ours in fp32 else stored
            for stored in stored_tensors(config, family)
        ]
        if integers:
            tree["quantization_config"] = _integer_settings(tensors, integers)
        write_json(partial / "config.json", tree)
        write_json(partial / GENERATION_FILE, generation)
        description = StrettoFile(family=family, config=config, presets=dict(presets or {}))
        write_json(partial / STRETTO_FILE, description.model_dump(mode="json"))
        source = _Source(state, dtype, integers)
        with ThreadPoolExecutor(1) as pool:
            hashing = pool if lineage is not None else None
            digests = _write_weights(partial, tensors, source, max_shard_bytes, whole, hashing, advance)
        biases = {name: state[name].detach().cpu() for name in state if name.endswith(".bias_WE")}
        if biases:
            write_file(partial / ELASTIC_FILE, biases)
        for name in TOKENIZER_FILES:
            if tokenizer_dir is not None and (Path(tokenizer_dir) / name).is_file():
                shutil.copyfile(Path(tokenizer_dir) / name, partial / name)
        if lineage is None:
            return None
        if not isinstance(lineage, Lineage):
            lineage = lineage(dict(zip(whole, digests.values(), strict=False)))
        lineage = lineage.replace(weights_hash=weights_hash(partial, digests))
        write_lineage(partial, lineage)
    return lineage


def tokenizer_dir_of(folder: Path) -> Path | None:
    """``folder`` as the ``tokenizer_dir`` of a checkpoint made from it; None: it holds no tokenizer."""
    return folder if (folder / "tokenizer.json").is_file() else None


def read_checkpoint(
    folder: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    shard: Shard | None = None,
    without: Collection[str] = (),
) -> Checkpoint:
    """Read a checkpoint: a folder written by Stretto or other software, or a GGUF file.

    The model is filled one tensor at a time, so the weights are in memory once.

    Args:
        dtype: dtype of the weights; None: as `Dtypes.on_disk`.
        without: weights (names in the state dict) that are not read and stay on the meta device.
        shard: read this rank's part of the network only; ``model`` and ``config`` of the result are those of the part.

    Raises:
        UserError: a file is missing, truncated or damaged, a tensor is missing, unexpected or of another shape, or the
            architecture or one of its settings is not supported; the ranks cannot divide the network, or its weights are quantised.
    """
    folder = Path(folder)
    description = describe(folder)
    config, family = description.config, description.family
    with open_tensors(folder) as opened:
        files: TensorSource = opened
        if shard is not None:
            whole = readable(config, family, files, folder)
            config, files = shard.config(config), ShardSource(files, whole, shard)
        tensors = readable(config, family, files, folder)
        dtypes = Dtypes.on_disk(tensors, files, folder) if dtype is None else Dtypes(dtype)
        model = skeleton(config)
        state = {
            name: torch.zeros(tensor.shape, dtype=dtypes.of(name), device="meta" if name in without else device)
            for name, tensor in model.state_dict().items()
        }
        for stored in tensors:
            if stored.ours not in without:
                fill(stored, files, state, folder)
    if (folder / STRETTO_FILE).is_file() and config.num_moe_layers:
        fill_branches(folder, config, state)
    if shard is not None:
        shard.silence(state)
    model.load_state_dict(state, assign=True)
    moe_layers = (block.mlp for block in model.blocks if isinstance(block.mlp, MoeLayer))
    for layer, order in zip(moe_layers, config.expert_orders, strict=True):
        layer.set_order(order, device)  # not in the state dict, so still on the meta device
    return Checkpoint(model, config, family, description.presets, find_lineage(folder), folder)


def read_integers(folder: Path | str) -> dict[str, IntWeight]:
    """The integer weights of a checkpoint as they are stored, by their names in our state dict; those of several tensors on disk (queries,
    keys and values) only if all are integers of one form. Empty for a checkpoint without integer weights. Raises `UserError` as
    `read_checkpoint` does.
    """
    return dict(each_integer(folder))


def integer_forms(folder: Path | str) -> dict[str, IntWeight]:
    """As `read_integers`, on the meta device: bits, shapes and groups, from the headers of the files."""
    return dict(each_integer(folder, ()))


def each_integer(folder: Path | str, names: Collection[str] | None = None) -> Iterator[tuple[str, IntWeight]]:
    """The items of `read_integers`, read one weight after another, so that a caller that repacks each of them holds one of them twice at
    most. Weights that are not in ``names`` (None: all) are not read and are on the meta device."""
    folder = Path(folder)
    if not stores_integers(folder):
        return
    description = describe(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in skeleton(description.config).state_dict().items()}
    places: dict[str, list[Stored]] = {}
    with open_tensors(folder) as files:
        assert isinstance(files, Dequantised), folder
        for stored in readable(description.config, description.family, files, folder):
            if stored.ours is not None and _is_packable(stored):
                places.setdefault(stored.ours, []).append(stored)
        for name, parts in places.items():
            read = files.int_weight if names is None or name in names else files.int_form
            weight = _joined([(stored, read(stored.name, stored.shape)) for stored in parts], shapes[name], name)
            if weight is not None:
                yield name, weight


def _joined(parts: Sequence[tuple[Stored, IntWeight | None]], shape: tuple[int, ...], name: str) -> IntWeight | None:
    """The integer weight ``name`` of ``shape`` from its tensors on disk; None: they are not all integers of one form."""
    weights = [weight for _, weight in parts if weight is not None]
    forms = {(weight.bits, weight.group, weight.zeros is None) for weight in weights}
    if len(weights) < len(parts) or len(forms) != 1:
        return None

    def join(tensors: Sequence[Tensor]) -> Tensor:
        whole = tensors[0].new_zeros(*shape[:-1], tensors[0].shape[-1])
        for (stored, _), tensor in () if whole.is_meta else zip(parts, tensors, strict=True):
            from_stored(replace(stored, shape=tuple(tensor.shape)), tensor, {name: whole})
        return whole

    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    codes, scales = [weight.codes for weight in weights], [weight.scales for weight in weights]
    if len({each.dtype for each in scales}) > 1:  # fp16, and others that fp16 would round
        scales = [each.float() for each in scales]
    return IntWeight(join(codes), join(scales), join(zeros) if zeros else None, weights[0].bits)


def stores_integers(folder: Path) -> bool:
    """Whether a checkpoint has integer weights, as `stretto quantise` writes them."""
    path = folder / "config.json"
    if not path.is_file():
        return False
    how = quantisation(read_json(path), str(path))
    return how is not None and how.is_packed


def read_config(folder: Path | str) -> ModelConfig:
    """Configuration of the network in a checkpoint. Raises `UserError` as `read_checkpoint` does."""
    return describe(Path(folder)).config


def read_presets(folder: Path | str) -> dict[str, SubnetChoice]:
    """Presets of a checkpoint. Raises `UserError` as `read_checkpoint` does."""
    return describe(Path(folder)).presets


def weights_hash(folder: Path | str, known: Mapping[str, str] = MappingProxyType({})) -> str:
    """Hash of all tensor files of a checkpoint (`hash_files`), for its lineage. ``known``: SHA-256 by file name, for files that need
    not be read.
    """
    paths = [*Path(folder).glob("model*.safetensors"), *Path(folder).glob(ELASTIC_FILE)]
    return hash_files({path.name: known.get(path.name) or file_sha256(path) for path in paths})


def known_hash(folder: Path) -> str:
    """The `weights_hash` in the lineage; without a lineage, it is computed from the weights."""
    lineage = find_lineage(folder)
    return weights_hash(folder) if lineage is None else lineage.weights_hash


def describe(folder: Path) -> StrettoFile:
    """Description of a checkpoint: stretto.json, checked against config.json, or else config.json alone.

    Raises UserError as `read_checkpoint` does.
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
    description = read_versioned(ours, StrettoFile, SCHEMA)
    parse_family(str(tree.get("model_type")), f"{path}: model_type")
    check_family(description.config, description.family)
    field = differing_field(tree, to_hf(description.config, description.family, "float32"))
    if field is not None:
        raise UserError(
            f"{ours}: does not belong to config.json ({field} is {tree.get(field)!r} there); delete it to read the folder as an ordinary checkpoint"
        )
    return description


def require_new_checkpoint(out: Path, force: bool) -> None:
    """`require_new` for a folder that `write_checkpoint` writes at the end of the work, with its refusals."""
    require_new(out, force)
    _refuse_other_files(out)


def _refuse_other_files(folder: Path) -> None:
    if folder.is_file():
        raise UserError(f"{folder}: is a file, not a folder; choose another folder")
    if (folder / "config.json").is_file() and not (folder / STRETTO_FILE).is_file():
        raise UserError(f"{folder}: would be replaced, and holds a checkpoint of other software; choose another folder")
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() or not any(fnmatch(path.name, pattern) for pattern in _OURS):
            raise UserError(
                f"{folder}: would be replaced, and holds {path.name}, which is not part of a checkpoint; choose another folder"
            )


def generation_settings(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """Contents of generation_config.json: the settings beside the tokenizer in ``folder``. Without them, generation ends at the end of a
    document, at the end of a turn, and at those end tokens in config.json that are in the vocabulary.

    Raises UserError: the folder has no tokenizer, the tokenizer has more tokens than the embedding, or an id is not an integer.
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
    has_settings = path.is_file()
    if not has_settings:
        path = folder / "config.json"  # transformers takes the end tokens from there
    own = read_json(path) if path.is_file() else {}
    if not isinstance(own, dict):
        raise UserError(f"{path}: not a JSON object; the file is damaged")
    for name in _TOKEN_IDS if has_settings else ("eos_token_id",):
        value = own.get(name)
        ids = value if isinstance(value, list) and value else [value]
        if value is not None and any(type(index) is not int for index in ids):
            raise UserError(f"{path}: {name}: {value!r} is not a token id; correct or remove it")
    if not has_settings:
        told = own.get("eos_token_id")
        listed: list[int | None] = told if isinstance(told, list) else [told]
        known = [index for index in listed if index is not None and 0 <= index < config.vocab_size]
        return found | {"eos_token_id": list(dict.fromkeys([*known, *ends]))}
    return found | {name: value for name, value in own.items() if value is not None and name != "transformers_version"}


def fill_branches(folder: Path, config: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """Read the balance biases of all widths into ``state``. The first row, of the full width, must equal that in the model's files."""
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
    names = [str(known).removeprefix("torch.") for known in DTYPES.values()]
    name = str(dtype).removeprefix("torch.")
    if name not in names:
        raise UserError(f"dtype: weights cannot be stored as {dtype}; choose {', '.join(names)}")
    return name


@dataclass(frozen=True, slots=True)
class _Source:
    """What a checkpoint is written from."""

    state: Mapping[str, Tensor]
    dtype: torch.dtype
    integers: Mapping[str, IntWeight]

    def tensors(self, stored: Stored) -> dict[str, Tensor]:
        """The tensors on disk for ``stored``: one, or those of an integer weight."""
        weight = self.integers.get(stored.ours or "")
        if weight is None or not _is_packable(stored):
            return {stored.name: to_stored(stored, self.state, self.dtype)}
        assert stored.ours is not None

        def on_disk(values: Tensor) -> Tensor:
            place = replace(stored, shape=(stored.shape[0], values.shape[-1]))
            return to_stored(place, {str(stored.ours): values}, values.dtype)

        found = {CODES: pack(on_disk(weight.codes), weight.bits), SCALES: on_disk(weight.scales)}
        if weight.zeros is not None:
            zeros_FJ = on_disk(weight.zeros)
            padding = zeros_FJ.new_zeros(-len(zeros_FJ) % (32 // weight.bits), zeros_FJ.shape[1])
            found[ZEROS] = pack(torch.cat((zeros_FJ, padding)).mT, weight.bits).mT.contiguous()
        found[SHAPE] = torch.tensor(stored.shape)
        return {stored.name + ending: tensor for ending, tensor in found.items()}

    def num_bytes(self, stored: Stored) -> int:
        weight, size = self.integers.get(stored.ours or ""), math.prod(stored.shape)
        if weight is None or not _is_packable(stored):
            return size * (torch.float32 if stored.always_fp32 else self.dtype).itemsize
        num_groups, zeros = size // weight.group, weight.bits if weight.zeros is not None else 0
        return (size * weight.bits + num_groups * (8 * weight.scales.itemsize + zeros)) // 8


def _is_packable(stored: Stored) -> bool:
    """Whether ``stored`` is a weight of the form that integer weights have on disk."""
    return len(stored.shape) == 2 and not stored.is_stacked and not stored.is_copy


def _integer_settings(tensors: Sequence[Stored], integers: Mapping[str, IntWeight]) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint with ``integers``: modules of equal bits and groups, by the ends of their names."""
    names: dict[tuple[int, int, bool], set[str]] = {}
    others = set()
    for stored in tensors:
        module = re.sub(r"\d+", "[0-9]+", re.escape(stored.name.removesuffix(".weight")))
        weight = integers.get(stored.ours or "")
        if weight is not None:
            names.setdefault((weight.bits, weight.group, weight.zeros is not None), set()).add(module)
        elif len(stored.shape) == 2 and "embed_tokens" not in stored.name:
            others.add(module)
    schemes = {f"^({'|'.join(sorted(modules))})$": scheme for scheme, modules in names.items()}
    # experts that only fill a layer up have names like those of the others
    ignored = others.difference(*names.values())
    return packed_config(schemes, [f"re:^{module}$" for module in sorted(ignored)])


def _write_weights(
    folder: Path,
    tensors: list[Stored],
    source: _Source,
    max_shard_bytes: int,
    whole: Sequence[Path],
    hashing: Executor | None,
    advance: Callable[[int], None] | None,
) -> dict[str, str]:
    """Copy the files ``whole``, then write the tensors that they lack, in the order of ``tensors``. One shard is in memory at a time,
    while the executor ``hashing`` reads the previous one.

    Returns: the SHA-256 of each file by its new name, in the order of writing.
    """
    names_of = {path: tensor_names(path) for path in whole}
    copied = frozenset[str]().union(*names_of.values())
    shards: list[list[Stored]] = [[]]
    size, total = 0, 0

    for stored in tensors:
        total += source.num_bytes(stored)
        if stored.name in copied:
            continue
        if shards[-1] and size + source.num_bytes(stored) > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(stored)
        size += source.num_bytes(stored)
    parts: list[Path | list[Stored]] = [*whole, *(shard for shard in shards if shard)]
    weight_map: dict[str, str] = {}
    digests: dict[str, str | Future[str]] = {}
    for number, part in enumerate(parts, start=1):
        file = WEIGHTS_FILE if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors"
        if isinstance(part, Path):
            digests[file] = copy_file(part, folder / file, advance)
            weight_map |= dict.fromkeys(names_of[part], file)
            continue
        found = {name: tensor for stored in part for name, tensor in source.tensors(stored).items()}
        write_file(folder / file, found)
        weight_map |= dict.fromkeys(found, file)
        if hashing is not None:
            digests[file] = hashing.submit(file_sha256, folder / file)
        if advance is not None:
            advance(sum(map(source.num_bytes, part)))
    if len(parts) > 1:
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return {file: digest if isinstance(digest, str) else digest.result() for file, digest in digests.items()}
