"""The compiled CPU kernels: compilation at first use, loading, and calls.

The library has a plain C interface, so it depends on no version of torch or Python and compiles in seconds. It is kept
in a folder of the user's cache that is theirs alone, under a hash of its sources, the compiler and the processor it was
compiled for. What another user could have written is never loaded.

Shape letters: L layers, D hidden, C head width, G key/value heads, E experts, I SwiGLU width, W branches of balance state,
R half the rotated width, T positions, N tokens, M rows of logits, V vocabulary, P pages, Z page size, K experts a token.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.track import progress

SOURCES = Path(__file__).parent
VARIABLE = "STRETTO_NATIVE"
DTYPES = (torch.float32, torch.bfloat16)
"""Of weights and cache. Sums are fp32 for both; where the processor has a matrix unit (AMX), products with bf16 weights round tokens
to bf16 first, as torch's do."""
MAX_GROUP = 64
"""Query heads that may share a key head; arrays of attention.inc hold so many."""
MAX_TOP_K = 256
"""Experts that a token may choose; an array of experts.inc holds so many."""
_log = logging.getLogger(__name__)
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared")


@dataclass(frozen=True, slots=True)
class Library:
    """The compiled kernels, or why there are none."""

    handle: ctypes.CDLL | None
    reason: str
    """Empty where there is a handle."""


def load(environment: Mapping[str, str] | None = None) -> Library:
    """The kernels as ``STRETTO_NATIVE`` asks: ``1`` must have them, ``0`` must not, ``auto`` (the default) may.

    Raises:
        UserError: an unknown value, or ``1`` where they cannot be compiled.
    """
    environment = os.environ if environment is None else environment
    choice = environment.get(VARIABLE) or "auto"
    if choice not in ("0", "1", "auto"):
        raise UserError(f"{VARIABLE}: unknown value {choice!r}; use 0, 1 or auto")
    if choice == "0":
        return Library(None, f"{VARIABLE}=0")
    library = _compiled(environment)
    if library.handle is None and choice == "1":
        raise UserError(
            f"{VARIABLE}: the CPU kernels cannot be used: {library.reason}; install a C++ compiler "
            f"(g++ 12 or later), or set {VARIABLE}=auto to run without"
        )
    if library.handle is None:
        _log.warning("The compiled CPU kernels are not used, torch computes instead: %s", library.reason)
    return library


def _compiled(environment: Mapping[str, str]) -> Library:
    if sys.platform != "linux":
        return Library(None, f"not supported on {sys.platform}")
    name = environment.get("CXX") or next((found for found in ("g++", "clang++") if shutil.which(found)), None)
    compiler = name and shutil.which(name)
    if not compiler:
        return Library(None, f"no C++ compiler {name!r}" if name else "no C++ compiler")
    try:
        cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "stretto" / "native"
        folder.mkdir(parents=True, exist_ok=True)
        for each, forbidden in ((folder.parent, 0o022), (folder, 0o077)):
            found = each.stat()
            if found.st_uid != os.geteuid():
                why = f"{each} belongs to user {found.st_uid}; set XDG_CACHE_HOME to a folder of yours"
                return Library(None, why)
            if found.st_mode & forbidden:
                each.chmod(found.st_mode & 0o777 & ~forbidden)
        path = folder / f"{_key(compiler)}.so"
        if not _is_ours(path) and (problem := _compile(compiler, path)):
            return Library(None, problem)
        return Library(ctypes.CDLL(str(path)), "")
    except (OSError, RuntimeError) as error:  # no home, no right to write there, a full disk, no such format
        return Library(
            None, f"{error}; set XDG_CACHE_HOME to a folder of yours, or delete what is in its stretto/native"
        )


def _is_ours(path: Path) -> bool:
    """Whether there is a library that nobody else can have written."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _key(compiler: str) -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h", ".inc"):
            digest.update(source.read_bytes())
    # its version, and what -march=native stands for here: a home folder may be shared by different machines
    told = subprocess.run([compiler, *_FLAGS, "-E", "-v", "-x", "c++", os.devnull], capture_output=True, check=False)
    digest.update(told.stderr)
    return digest.hexdigest()[:16]


def _compile(compiler: str, path: Path) -> str | None:
    """Compile to ``path``; returns what went wrong, on one line."""
    # Beside its place, to be renamed; under a name of its own, since two containers may share the folder and their ids.
    with (
        progress("Compiling the CPU kernels (once)", total=1) as advance,
        tempfile.TemporaryDirectory(dir=path.parent, prefix=".building-") as building,
    ):
        built = Path(building) / path.name
        command = [compiler, *_FLAGS, str(SOURCES / "decode.cpp"), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        advance(1)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            return f"{compiler} failed: {(errors or done.stderr.splitlines() or ['no message'])[0]}"
        built.chmod(0o700)
        built.replace(path)
    return None


# The records of abi.h, field by field; what the fields mean is said there.
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class _Shape(ctypes.Structure):
    _fields_ = (
        _fields(_INT, "num_layers hidden num_heads num_kv_heads head_dim rotary_half vocab page_size")
        + _fields(_INT, "num_moe_layers route_slots route_bytes softmax normalize is_bfloat16")
        + _fields(_INT, "wide_norm expert_groups top_groups")
        + _fields(_FLOAT, "eps scaling attention_scale qkv_clip alpha limit")
        + _fields(ctypes.c_int64, "num_pages")
        + _fields(_POINTER, "cosine sine embedding norm head keys values routes")
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        _fields(_POINTER, "attention_norm qkv qkv_bias out out_bias q_norm k_norm sinks mlp_norm")
        + _fields(_POINTER, "gate_up gate_up_bias down down_bias router router_bias")
        + _fields(_POINTER, "shared_gate_up shared_gate_up_bias shared_down shared_down_bias bias rank")
        + _fields(_INT, "num_experts inner shared_inner moe_row window")
    )


class _Choice(ctypes.Structure):
    _fields_ = _fields(_INT, "active num_experts top_k branch")


class _Step(ctypes.Structure):
    _fields_ = _fields(_INT, "num_tokens num_logits num_threads write_routes") + _fields(
        _POINTER, "token position table subnet pages choices logit_tokens logits"
    )


class _Choose(ctypes.Structure):
    _fields_ = _fields(_INT, "num_sequences vocab num_threads") + _fields(
        _POINTER, "logits position temperature seed chosen logprob"
    )


_RECORDS = (_Shape, _Layer, _Choice, _Step, _Choose)


@dataclass(frozen=True, slots=True)
class Network:
    """What the kernels compute with. The tensors are read where they lie: weights written in place are seen at once."""

    num_heads: int
    norm_eps: float
    attention_scale: float
    wide_norm: bool
    """Queries, and keys, of all heads are normed as one vector."""
    qkv_clip: float
    """0: none."""
    clamp: tuple[float, float]
    """Alpha and limit of a clamped SwiGLU; a limit of 0: silu(gate) · up."""
    softmax: bool
    normalize: bool
    scaling: float
    expert_groups: tuple[int, int]
    """Into how many groups experts fall, and in how many of them a token chooses."""
    max_top_k: int
    cos_TR: Tensor
    """fp32, for every position that may occur."""
    sin_TR: Tensor
    layers: Sequence[Mapping[str, Tensor | None]]
    """Of each layer the tensors that ``StrettoLayer`` of abi.h points to, by their names there; ``rank`` in int64."""
    windows: Sequence[int]
    """Of each layer, the positions that a query sees; 0: all."""
    embedding_VD: Tensor
    norm_D: Tensor
    head_VD: Tensor
    keys_LPZGC: Tensor
    values_LPZGC: Tensor
    routes_PZLK: Tensor | None
    """uint8 or uint16; L counts MoE layers here, K is ``max_top_k``."""


class Decoder:
    """The compiled step of one network. Not for use from two threads at once."""

    def __init__(self, library: ctypes.CDLL, network: Network):
        sizes = (_INT * len(_RECORDS))()
        library.stretto_sizes(sizes)
        ours = [ctypes.sizeof(kind) for kind in _RECORDS]
        assert list(sizes) == ours, f"records of the compiled library {list(sizes)}, here {ours}"
        library.stretto_create.restype = _POINTER
        self._library, self._network = library, network
        self._num_experts = [0 if (gate := layer["router"]) is None else len(gate) for layer in network.layers]
        self._ranks: list[Tensor] = []  # alive as long as the kernels
        records, moe_row = (_Layer * len(network.layers))(), 0
        for place, num_experts in enumerate(self._num_experts):
            records[place] = self._layer(network.layers[place], num_experts, moe_row, network.windows[place])
            moe_row += num_experts > 0
        self._handle = library.stretto_create(ctypes.byref(_shape(network, moe_row)), records)
        weakref.finalize(self, library.stretto_destroy, _POINTER(self._handle))
        self._choices = np.zeros((0, len(network.layers), 4), np.int32)

    def subnet(self, choices: Sequence[tuple[int, int, int] | None]) -> int:
        """Register a Subnet; returns its number.

        Args:
            choices: for each layer how many experts, by rank, may be chosen, how many a token chooses, and its row of
                balance state, all 0 in a dense layer. None: the layer is skipped.
        """
        rows = [(0, 0, 0, 0) if choice is None else (1, *choice) for choice in choices]
        for row, experts in zip(rows, self._num_experts, strict=True):
            assert not row[0] or not experts or 1 <= row[2] <= row[1] <= experts, f"choice {row} of {experts} experts"
        self._choices = np.concatenate((self._choices, np.array([rows], np.int32)))
        return len(self._choices) - 1

    def step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        tables: Sequence[int],
        subnets: Sequence[int],
        pages: Sequence[int],
        logits: Sequence[int],
        write_routes: bool,
    ) -> Tensor:
        """Compute one step, all sequences in one list: keys, values and (``write_routes``) routes go to the pools.

        A token's result does not depend, to the bit, on the others in the step. Of experts with equal scores the one
        with the lowest id is chosen first. The experts of a token are added in rising order of id.

        Args:
            tables: for each token, where in ``pages`` the table of its sequence starts.
            subnets: for each token a number that `subnet` gave.
            pages: page tables of all sequences, one after the other.
            logits: tokens whose logits are wanted.

        Returns:
            fp32 logits [M, V].
        """
        assert not write_routes or self._network.routes_PZLK is not None, "no pool for routes"
        self._check(tokens, positions, max(positions))
        lists = (tokens, positions, tables, subnets, pages, logits)
        _alive, starts = _flat(lists)
        logits_MV = torch.empty(len(logits), len(self._network.head_VD))
        record = _Step(
            *(len(tokens), len(logits), torch.get_num_threads(), write_routes),
            *starts[:-1],
            self._choices.ctypes.data,
            starts[-1],
            logits_MV.data_ptr(),
        )
        self._library.stretto_step(_POINTER(self._handle), ctypes.byref(record))
        return logits_MV

    def _check(self, tokens: Sequence[int], positions: Sequence[int], last: int) -> None:
        """Out of range they would read memory that is not ours."""
        vocab, length = len(self._network.head_VD), len(self._network.cos_TR)
        assert min(tokens) >= 0 and max(tokens) < vocab, f"token ids {tokens} of {vocab}"
        assert min(positions) >= 0 and last < length, f"positions {positions} up to {last} of {length}"

    def _layer(self, tensors: Mapping[str, Tensor | None], num_experts: int, moe_row: int, window: int) -> _Layer:
        down, gate_up, qkv, shared = map(tensors.get, ("down", "gate_up", "qkv", "shared_down"))
        assert down is not None and gate_up is not None and qkv is not None
        hidden, inner = down.shape[-2:]
        shapes = {
            "attention_norm": (hidden,),
            "mlp_norm": (hidden,),
            "qkv_bias": (len(qkv),),
            "out_bias": (hidden,),
            "sinks": (self._network.num_heads,),
            "gate_up": (*gate_up.shape[:-2], 2 * inner, hidden),
            "gate_up_bias": gate_up.shape[:-1],
            "down_bias": down.shape[:-1],
            "router_bias": (num_experts,),
        }
        dtypes = {"bias": torch.float32, "rank": torch.int32}
        pointers = {}
        for name, tensor in tensors.items():
            if name == "rank" and tensor is not None:
                tensor = tensor.to(torch.int32)
                self._ranks.append(tensor)
            dtype = dtypes.get(name, self._network.embedding_VD.dtype)
            pointers[name] = _pointer(tensor, dtype, *shapes.get(name, ()))
        shared_inner = 0 if shared is None else shared.shape[-1]
        sizes = {"num_experts": num_experts, "inner": inner, "shared_inner": shared_inner}
        return _Layer(**pointers, **sizes, moe_row=moe_row, window=window)


def _shape(network: Network, num_moe_layers: int) -> _Shape:
    dtype, (vocab, hidden) = network.embedding_VD.dtype, network.embedding_VD.shape
    assert dtype in DTYPES, f"no kernels for {dtype}"
    _, num_pages, page_size, num_kv_heads, head_dim = pool = network.keys_LPZGC.shape
    group = network.num_heads // num_kv_heads
    assert group <= MAX_GROUP, f"{group} query heads share a key head; the kernels take {MAX_GROUP}"
    assert network.max_top_k <= MAX_TOP_K, f"{network.max_top_k} experts a token; the kernels take {MAX_TOP_K}"
    assert pool == network.values_LPZGC.shape, f"{tuple(pool)} keys, {tuple(network.values_LPZGC.shape)} values"
    routes = network.routes_PZLK
    assert routes is None or routes.shape[2:] == (num_moe_layers, network.max_top_k), f"routes {tuple(routes.shape)}"
    return _Shape(
        num_layers=len(network.layers),
        hidden=hidden,
        num_heads=network.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_half=network.cos_TR.shape[1],
        vocab=vocab,
        page_size=page_size,
        num_moe_layers=num_moe_layers,
        route_slots=network.max_top_k,
        route_bytes=0 if routes is None else routes.element_size(),
        softmax=network.softmax,
        normalize=network.normalize,
        is_bfloat16=dtype == torch.bfloat16,
        wide_norm=network.wide_norm,
        expert_groups=network.expert_groups[0],
        top_groups=network.expert_groups[1],
        eps=network.norm_eps,
        scaling=network.scaling,
        attention_scale=network.attention_scale,
        qkv_clip=network.qkv_clip,
        alpha=network.clamp[0],
        limit=network.clamp[1],
        num_pages=num_pages,
        cosine=_pointer(network.cos_TR, torch.float32),
        sine=_pointer(network.sin_TR, torch.float32, *network.cos_TR.shape),
        embedding=_pointer(network.embedding_VD, dtype),
        norm=_pointer(network.norm_D, dtype, hidden),
        head=_pointer(network.head_VD, dtype, vocab, hidden),
        keys=_pointer(network.keys_LPZGC, dtype),
        values=_pointer(network.values_LPZGC, dtype),
        routes=None if routes is None else _pointer(routes, routes.dtype),
    )


def _pointer(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    if tensor is None:
        return None
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), f"{tensor.device}, strides {tensor.stride()}"
    assert tensor.dtype == dtype, f"{tensor.dtype}, not {dtype}"
    assert not shape or tensor.shape == shape, f"{tuple(tensor.shape)}, not {shape}"
    return tensor.data_ptr()


def _flat(lists: Sequence[Sequence[int]]) -> tuple[np.ndarray, list[int]]:
    """All numbers as one int32 array, which must outlive the call, and the address at which each list begins."""
    numbers = np.array([*chain(*lists)], np.int32)
    return numbers, list(accumulate([4 * len(values) for values in lists[:-1]], initial=numbers.ctypes.data))


class Chosen(NamedTuple):
    """The next token of each sequence."""

    ids: list[int]
    logprobs: list[float]
    """Nats, of the distribution that the token was drawn from; of temperature 1 where it was not drawn."""


def choose_tokens(
    library: ctypes.CDLL,
    logits_MV: Tensor,
    positions: Sequence[int],
    temperatures: Sequence[float],
    seeds: Sequence[int],
) -> Chosen:
    """Choose the next tokens of sequences whose distribution nothing but a temperature changes: one call instead of
    some thirty of torch and numpy.

    Args:
        logits_MV: fp32, a row for each sequence.
        positions: of the token that is chosen, in its sequence.
        temperatures: 0: the most probable token, of several the one with the lowest id.
        seeds: uint64; `stretto.engine.sampling.uniform` of seed and position decides.
    """
    num, vocab = logits_MV.shape
    assert logits_MV.is_contiguous() and logits_MV.dtype == torch.float32, f"{logits_MV.dtype}, {logits_MV.stride()}"
    assert len(temperatures) == len(seeds) == len(positions) == num, f"{num} rows, {len(seeds)} seeds"
    position_M, temperature_M = np.array(positions, np.int32), np.array(temperatures, np.float32)
    seed_M, chosen_M, logprob_M = np.array(seeds, np.uint64), np.empty(num, np.int32), np.empty(num, np.float32)
    record = _Choose(
        *(num, vocab, torch.get_num_threads(), logits_MV.data_ptr()),
        *(each.ctypes.data for each in (position_M, temperature_M, seed_M, chosen_M, logprob_M)),
    )
    library.stretto_choose(ctypes.byref(record))
    return Chosen(chosen_M.tolist(), logprob_M.tolist())
