"""The compiled CPU kernels: compilation at first use, loading, and calls of those that decode.

A library has a plain C interface, so it depends on no version of torch or Python and compiles in seconds. It is stored
in a private folder of the user's cache, under a hash of its sources, the compiler and the processor. A library that another
user could have written is never loaded.

Shape letters: L layers, D hidden, C head width, G key/value heads, E experts, I SwiGLU width, W branches of balance state,
R half the rotated width, T positions, N tokens, M rows of logits, V vocabulary, P pages, Z tokens per page, K experts per token.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import signal
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
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.track import progress, wide_console
from stretto.ops.int_weights import SCALE_DTYPE, IntWeight, unsigned_codes

SOURCES = Path(__file__).parent
DECODING, TRAINING = "decode.cpp", "train.cpp"
"""Sources of the two libraries. Each is compiled when it is first used."""
VARIABLE = "STRETTO_NATIVE"
DTYPES = (torch.float32, torch.bfloat16)
"""Supported data types of weights and cache. Sums are fp32. On a processor with a matrix unit (AMX), products with bf16 weights
first round activations to bf16, as torch's do."""
INTEGERS = ("qkv", "out", "gate_up", "down", "shared_gate_up", "shared_down")
"""Weights of a layer that may be integers."""
MAX_GROUP = 64
"""Largest number of query heads per key head: the size of arrays in attention.inc."""
INT_GROUP, PANEL = 32, 16
"""Inputs that share a scale of an integer weight, and rows that the kernels multiply together (integers.h)."""
MAX_TOP_K = 256
"""Largest number of experts per token: the size of an array in experts.inc."""
_log = logging.getLogger(__name__)
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared")


@dataclass(frozen=True, slots=True)
class Library:
    """The compiled kernels, or the reason why they are not available."""

    handle: ctypes.CDLL | None
    reason: str
    """Empty if ``handle`` is set."""


def load(environment: Mapping[str, str] | None = None, source: str = DECODING) -> Library:
    """Load the kernels of ``source`` as the variable ``STRETTO_NATIVE`` says: ``1`` requires them, ``0`` leaves them out, ``auto`` (the default)
    uses them if they can be compiled.

    Raises:
        UserError: an unknown value, or ``1`` and the kernels cannot be compiled.
    """
    environment = os.environ if environment is None else environment
    choice = environment.get(VARIABLE) or "auto"
    if choice not in ("0", "1", "auto"):
        raise UserError(f"{VARIABLE}: unknown value {choice!r}; use 0, 1 or auto")
    if choice == "0":
        return Library(None, f"{VARIABLE}=0")
    library = _compiled(environment, source)
    if library.handle is None and choice == "1":
        raise UserError(
            f"{VARIABLE}: the CPU kernels cannot be used: {library.reason}; install a C++ compiler "
            f"(g++ 12 or later), or set {VARIABLE}=auto to run without"
        )
    if library.handle is None:
        _log.warning("The compiled CPU kernels are not used, torch computes instead: %s", library.reason)
    return library


def _compiled(environment: Mapping[str, str], source: str) -> Library:
    if sys.platform != "linux":
        return Library(None, f"not supported on {sys.platform}")
    name = environment.get("CXX") or next((name for name in ("g++", "clang++") if shutil.which(name)), None)
    compiler = name and shutil.which(name)
    if not compiler:
        return Library(None, f"no C++ compiler {name!r}" if name else "no C++ compiler")
    try:
        cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "stretto" / "native"
        folder.mkdir(parents=True, exist_ok=True)
        for level, forbidden in ((folder.parent, 0o022), (folder, 0o077)):
            status = level.stat()
            if status.st_uid != os.geteuid():
                return Library(
                    None, f"{level} belongs to user {status.st_uid}; set XDG_CACHE_HOME to a folder of yours"
                )
            if status.st_mode & forbidden:
                level.chmod(status.st_mode & 0o777 & ~forbidden)
        path = folder / f"{Path(source).stem}-{_key(compiler)}.so"
        if not _is_ours(path) and (problem := _compile(compiler, source, path)):
            return Library(None, problem)
        return Library(ctypes.CDLL(str(path)), "")
    except (OSError, RuntimeError) as error:  # no home folder, no write permission, a full disk, a damaged library
        return Library(None, f"{error}; set XDG_CACHE_HOME to a folder of yours, or delete its folder stretto/native")


def _is_ours(path: Path) -> bool:
    """Whether the library exists, belongs to this user and is writable for nobody else."""
    return path.exists() and (status := path.stat()).st_uid == os.geteuid() and not status.st_mode & 0o022


def _key(compiler: str) -> str:
    """Hash of flags, sources, compiler and processor."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h", ".inc"):
            digest.update(source.read_bytes())
    # prints the compiler's version and the meaning of -march=native: different machines may share a home folder
    command = [compiler, *_FLAGS, "-E", "-v", "-x", "c++", os.devnull]
    digest.update(subprocess.run(command, capture_output=True, check=False).stderr)
    return digest.hexdigest()[:16]


def _compile(compiler: str, source: str, path: Path) -> str | None:
    """Compile ``source`` to the library ``path``; returns None, or the compiler's error on one line."""
    # To stderr outside a terminal: any command may come first, also one whose output a program reads.
    console = None if wide_console().is_terminal else Console(stderr=True)
    purpose = "decoding" if source == DECODING else "training"
    # Built in a folder with a random name, then renamed: two containers can share the cache and have equal process ids.
    with (
        progress(f"Compiling the CPU kernels for {purpose} (once)", 1, console=console) as advance,
        tempfile.TemporaryDirectory(dir=path.parent, prefix=".building-") as building,
    ):
        built = Path(building) / path.name
        command = [compiler, *_FLAGS, str(SOURCES / source), "-o", str(built)]
        with subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": building},
            start_new_session=True,
        ) as process:
            try:
                told = process.communicate()[1].splitlines()
            except BaseException:  # Ctrl-C or SIGTERM: the compiler starts further processes, which would go on
                os.killpg(process.pid, signal.SIGKILL)
                raise
        advance(1)
        if process.returncode:
            errors = [line for line in told if "error" in line]
            return f"{compiler} failed: {(errors or told or ['no message'])[0]}"
        built.chmod(0o700)
        built.replace(path)
    return None


# The records of abi.h, field by field; the fields are documented there.
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


def c_fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class _Integers(ctypes.Structure):
    _fields_ = c_fields(_POINTER, "codes scales zeros") + c_fields(ctypes.c_int64, "bits")


class _Shape(ctypes.Structure):
    _fields_ = (
        c_fields(_INT, "num_layers hidden num_heads num_kv_heads head_dim rotary_half vocab page_size")
        + c_fields(_INT, "num_moe_layers route_slots route_bytes softmax normalize is_bfloat16")
        + c_fields(_INT, "wide_norm expert_groups top_groups")
        + c_fields(_FLOAT, "eps scaling attention_scale qkv_clip alpha limit")
        + c_fields(ctypes.c_int64, "num_pages")
        + c_fields(_POINTER, "cosine sine embedding norm head keys values routes")
        + c_fields(_Integers, "int_head")
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        c_fields(_POINTER, "attention_norm qkv qkv_bias out out_bias q_norm k_norm sinks mlp_norm")
        + c_fields(_POINTER, "gate_up gate_up_bias down down_bias router router_bias")
        + c_fields(_POINTER, "shared_gate_up shared_gate_up_bias shared_down shared_down_bias bias rank")
        + c_fields(_INT, "num_experts inner shared_inner moe_row window unused")
        + c_fields(_Integers, " ".join(f"int_{name}" for name in INTEGERS))
    )


class _Choice(ctypes.Structure):
    _fields_ = c_fields(_INT, "active num_experts top_k branch")


class _Step(ctypes.Structure):
    _fields_ = c_fields(_INT, "num_tokens num_logits num_threads write_routes") + c_fields(
        _POINTER, "token position table subnet pages choices logit_tokens logits"
    )


class _Choose(ctypes.Structure):
    _fields_ = c_fields(_INT, "num_sequences vocab num_threads") + c_fields(
        _POINTER, "logits position temperature seed chosen logprob"
    )


_RECORDS = (_Shape, _Layer, _Choice, _Step, _Choose)


@dataclass(frozen=True, slots=True)
class Panels:
    """An integer weight in the kernels' order (integers.h): 16 rows at a time, the missing rows of the last filled with zeros.

    Letters: Q = ⌈rows / 16⌉ panels, J groups of 32 inputs, B bytes.
    """

    codes_QJB: Tensor
    """uint8."""
    scales_QJ16: Tensor
    """fp16."""
    zeros_QJ16: Tensor | None
    """int8."""
    bits: int

    @staticmethod
    def of(weight: IntWeight) -> Panels:
        """``weight`` […, F, D], whose leading dims are rows too. Its group must be `INT_GROUP`, its scales fp16."""
        assert weight.group == INT_GROUP and weight.scales.dtype == SCALE_DTYPE, (
            f"{weight.group}, {weight.scales.dtype}"
        )
        codes_RD, scales_RJ = weight.codes.flatten(0, -2), weight.scales.flatten(0, -2)
        rest = -len(codes_RD) % PANEL
        unsigned_RD = F.pad(unsigned_codes(codes_RD, weight.bits), (0, 0, 0, rest))
        quads = unsigned_RD.view(-1, PANEL, scales_RJ.shape[1], 8, 4).permute(0, 2, 3, 1, 4)
        if weight.bits == 4:
            quads = quads[:, :, 0::2] | quads[:, :, 1::2] << 4

        def by_panel(values_RJ: Tensor) -> Tensor:
            return F.pad(values_RJ, (0, 0, 0, rest)).view(-1, PANEL, values_RJ.shape[1]).mT.contiguous()

        zeros = None if weight.zeros is None else by_panel(weight.zeros.flatten(0, -2))
        return Panels(quads.flatten(2).contiguous(), by_panel(scales_RJ), zeros, weight.bits)

    def record(self) -> _Integers:
        """The record of abi.h; these tensors must outlive it."""
        zeros = None if self.zeros_QJ16 is None else self.zeros_QJ16.data_ptr()
        return _Integers(self.codes_QJB.data_ptr(), self.scales_QJ16.data_ptr(), zeros, self.bits)


@dataclass(frozen=True, slots=True)
class Network:
    """A network for the kernels. Tensors are read in place, so a weight that is overwritten takes effect at once."""

    options: Mapping[str, float]
    """The fields of ``StrettoShape`` (abi.h) that do not follow from the tensors, by their names there."""
    cos_TR: Tensor
    """fp32, for every possible position."""
    sin_TR: Tensor
    layers: Sequence[Mapping[str, Tensor | None]]
    """For each layer, the tensors of ``StrettoLayer`` (abi.h) by their names there; ``rank`` is int64."""
    windows: Sequence[int]
    """For each layer, the number of positions that a query sees; 0: all."""
    embedding_VD: Tensor
    norm_D: Tensor
    head_VD: Tensor
    keys_LPZGC: Tensor
    values_LPZGC: Tensor
    routes_PZLK: Tensor | None
    """uint8 or uint16; L counts MoE layers here, K is the largest top-k."""
    integers: Sequence[Mapping[str, Panels]] = ()
    """For each layer, integer weights by their names in `INTEGERS`, which are used in place of its tensors; empty: none."""
    int_head: Panels | None = None


class Decoder:
    """The compiled forward pass of one network. Not thread-safe."""

    def __init__(self, library: ctypes.CDLL, network: Network):
        sizes = (_INT * len(_RECORDS))()
        library.stretto_sizes(sizes)
        ours = [ctypes.sizeof(kind) for kind in _RECORDS]
        assert list(sizes) == ours, f"records of the compiled library {list(sizes)}, here {ours}"
        library.stretto_create.restype = _POINTER
        self._library, self._network = library, network
        self._num_experts = [0 if (gate := layer["router"]) is None else len(gate) for layer in network.layers]
        self._ranks: list[Tensor] = []  # the kernels read them, so they must stay alive
        records, moe_row = (_Layer * len(network.layers))(), 0
        for place, num_experts in enumerate(self._num_experts):
            integers = network.integers[place] if network.integers else {}
            records[place] = self._layer(network.layers[place], num_experts, moe_row, network.windows[place])
            for name, panels in integers.items():
                setattr(records[place], f"int_{name}", panels.record())
            moe_row += num_experts > 0
        self._handle = library.stretto_create(ctypes.byref(_shape(network, moe_row)), records)
        weakref.finalize(self, library.stretto_destroy, _POINTER(self._handle))
        self._choices = np.zeros((0, len(network.layers), 4), np.int32)

    def subnet(self, choices: Sequence[tuple[int, int, int] | None]) -> int:
        """Register a Subnet and return its number.

        Args:
            choices: for each layer the number of experts (by rank) that may be chosen, the top-k, and the row of the balance
                state; all 0 in a dense layer. None: the layer is skipped.
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
        """Compute one step of all sequences, and write keys, values and (``write_routes``) routes to the cache.

        A token's result does not depend, to the bit, on other tokens of the step. Among experts with equal scores, the lower id
        is chosen first. The outputs of a token's experts are added in rising order of id.

        Args:
            tables: for each token, the place in ``pages`` where the page table of its sequence starts.
            subnets: for each token, a number that `subnet` returned.
            pages: page tables of all sequences, one after the other.
            logits: tokens whose logits are returned.

        Returns:
            fp32 logits [M, V].
        """
        assert not write_routes or self._network.routes_PZLK is not None, "no pool for routes"
        vocab, length = len(self._network.head_VD), len(self._network.cos_TR)
        # out of range they would read memory of others
        assert min(tokens) >= 0 and max(tokens) < vocab, f"token ids {tokens} of {vocab}"
        assert min(positions) >= 0 and max(positions) < length, f"positions {positions} of {length}"
        lists = (tokens, positions, tables, subnets, pages, logits)
        _alive, starts = _flat(lists)
        logits_MV = torch.empty(len(logits), vocab)
        record = _Step(
            *(len(tokens), len(logits), torch.get_num_threads(), write_routes),
            *starts[:-1],
            self._choices.ctypes.data,
            starts[-1],
            logits_MV.data_ptr(),
        )
        self._library.stretto_step(_POINTER(self._handle), ctypes.byref(record))
        return logits_MV

    def _layer(self, tensors: Mapping[str, Tensor | None], num_experts: int, moe_row: int, window: int) -> _Layer:
        down, gate_up, qkv, shared = map(tensors.get, ("down", "gate_up", "qkv", "shared_down"))
        assert down is not None and gate_up is not None and qkv is not None
        hidden, inner = down.shape[-2:]
        shapes = {
            "attention_norm": (hidden,),
            "mlp_norm": (hidden,),
            "qkv_bias": (len(qkv),),
            "out_bias": (hidden,),
            "sinks": (int(self._network.options["num_heads"]),),
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
    assert pool == network.values_LPZGC.shape, f"{tuple(pool)} keys, {tuple(network.values_LPZGC.shape)} values"
    routes, slots = network.routes_PZLK, network.options["route_slots"]
    assert routes is None or routes.shape[2:] == (num_moe_layers, slots), f"routes {tuple(routes.shape)}"
    return _Shape(
        **network.options,
        num_layers=len(network.layers),
        hidden=hidden,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_half=network.cos_TR.shape[1],
        vocab=vocab,
        page_size=page_size,
        num_moe_layers=num_moe_layers,
        route_bytes=0 if routes is None else routes.element_size(),
        is_bfloat16=dtype == torch.bfloat16,
        num_pages=num_pages,
        cosine=_pointer(network.cos_TR, torch.float32),
        sine=_pointer(network.sin_TR, torch.float32, *network.cos_TR.shape),
        embedding=_pointer(network.embedding_VD, dtype),
        norm=_pointer(network.norm_D, dtype, hidden),
        head=_pointer(network.head_VD, dtype, vocab, hidden),
        keys=_pointer(network.keys_LPZGC, dtype),
        values=_pointer(network.values_LPZGC, dtype),
        routes=None if routes is None else _pointer(routes, routes.dtype),
        int_head=_Integers() if network.int_head is None else network.int_head.record(),
    )


def _pointer(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    """Address of a contiguous tensor of ``dtype`` and, if given, ``shape``; a null pointer for None and for a tensor without values, in
    whose place the kernels use integers."""
    if tensor is None or tensor.is_meta:
        return None
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), f"{tensor.device}, strides {tensor.stride()}"
    assert tensor.dtype == dtype, f"{tensor.dtype}, not {dtype}"
    assert not shape or tensor.shape == shape, f"{tuple(tensor.shape)}, not {shape}"
    return tensor.data_ptr()


def _flat(lists: Sequence[Sequence[int]]) -> tuple[np.ndarray, list[int]]:
    """All numbers as one int32 array, which must outlive the call of the kernel, and the address where each list begins."""
    numbers = np.array([*chain(*lists)], np.int32)
    return numbers, list(accumulate([4 * len(values) for values in lists[:-1]], initial=numbers.ctypes.data))


class Chosen(NamedTuple):
    """The next token of each sequence."""

    ids: list[int]
    logprobs: list[float]
    """Nats, from the distribution that the token was drawn from; from that of temperature 1 for greedy sequences."""


def choose_tokens(
    library: ctypes.CDLL,
    logits_MV: Tensor,
    positions: Sequence[int],
    temperatures: Sequence[float],
    seeds: Sequence[int],
) -> Chosen:
    """Choose the next tokens of sequences without sampling options other than a temperature. One call replaces about thirty of torch
    and numpy.

    Args:
        logits_MV: fp32, one row per sequence.
        positions: position of the chosen token in each sequence.
        temperatures: 0 chooses the most probable token; the lowest id among equals.
        seeds: uint64; the random number is `stretto.engine.sampling.uniform` of seed and position.
    """
    num, vocab = logits_MV.shape
    assert logits_MV.is_contiguous() and logits_MV.dtype == torch.float32, f"{logits_MV.dtype}, {logits_MV.stride()}"
    assert len(temperatures) == len(seeds) == len(positions) == num, f"{num} rows, {len(seeds)} seeds"
    position_M, temperature_M = np.array(positions, np.int32), np.array(temperatures, np.float32)
    seed_M, chosen_M, logprob_M = np.array(seeds, np.uint64), np.empty(num, np.int32), np.empty(num, np.float32)
    record = _Choose(
        *(num, vocab, torch.get_num_threads(), logits_MV.data_ptr()),
        *(array.ctypes.data for array in (position_M, temperature_M, seed_M, chosen_M, logprob_M)),
    )
    library.stretto_choose(ctypes.byref(record))
    return Chosen(chosen_M.tolist(), logprob_M.tolist())
