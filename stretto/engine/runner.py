"""The runner: a model's weights and cache tensors on one device, and the computation of steps.

Shape letters: L layers (MoE layers in routes), P pages, Z tokens per page, G key/value heads, C head width,
K route slots, N tokens of a step, M tokens with returned logits, V vocabulary, T positions of a sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
import xxhash
from torch import Tensor

from stretto.base.errors import UserError
from stretto.engine.forward_cpu import Integers, NativeForward, in_panels, why_not
from stretto.engine.forward_torch import KvPool, TorchForward
from stretto.engine.graphs import DecodeGraphs
from stretto.engine.ranks import Cache, Ranks, Weights
from stretto.engine.request import EngineConfig
from stretto.engine.scheduler import MOST_LOGITS
from stretto.engine.sequence import Chunk, SubnetTable
from stretto.model.checkpoint import read_checkpoint, read_config, weights_hash
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Transformer, skeleton
from stretto.ops.fp8_rows import Fp8Weights, Rows, why_emulated
from stretto.ops.int_weights import IntWeight
from stretto.ops.kernels import why_not as why_no_kernels
from stretto.ops.matmul import PLAIN, Arithmetic, kernels
from stretto.ops.memory import free_bytes
from stretto.ops.native import DTYPES, INT_GROUP, PANEL, Library, Panels

_log = logging.getLogger(__name__)
MAX_NATIVE_TOKENS = 128
"""Most tokens of a step for the compiled kernels with ``fast_prefill``; torch's matrix library computes longer steps faster."""
WeightSource = Mapping[str, Tensor] | Path | str
"""New weights for an engine: a state dict of `Transformer`, or a checkpoint folder."""
CPU_SHARE, GPU_SHARE = 0.5, 0.9
"""Default size of the cache as a share of the memory that is free after loading the weights. A CPU's memory also serves other
programs and the file cache; a GPU's memory only activations, as in vLLM."""


def logit_bytes(network: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """Largest size of the logits of one step, whose tokens may all belong to prompts with requested log-probabilities. They are in fp32;
    beside them are first the logits in ``dtype`` that torch computed, and later the log-probabilities of one chunk."""
    num = config.max_step_tokens
    narrow = 0 if dtype == torch.float32 else dtype.itemsize * num
    return network.vocab_size * (4 * num + max(narrow, 4 * MOST_LOGITS))


def pages_within(model: Transformer, config: EngineConfig, max_len: int, routes: bool) -> int:
    """Number of cache pages that fit into ``config.cache_bytes``, or into a share of the free memory; at most
    twice the number that a full batch of sequences of ``max_len`` needs. Of the free memory, half at most is kept for logits (`logit_bytes`).

    Raises:
        UserError: not even one page fits, or not one sequence of the configured ``max_len``.
    """
    weight = model.embedding.weight
    page_bytes = KvPool.bytes_per_page(model.config, weight.dtype, config.page_size, routes)
    num_needed = -(-max_len // config.page_size)
    budget = config.cache_bytes
    if budget is None:
        share = CPU_SHARE if weight.device.type == "cpu" else GPU_SHARE
        # ranks of tensor parallelism share the memory of a CPU
        num_sharing = config.tp if weight.device.type == "cpu" else 1
        free = free_bytes(weight.device)
        if has_fp8_kernels(model.config, weight.device, Arithmetic(config.precision, config.batch_invariant)):
            free -= sum(each.numel() for each in model.blocks.parameters())  # bytes in FP8, beside the values
        most_logits = logit_bytes(model.config, config, weight.dtype)
        budget = min(int(share * free), max(free - most_logits, free // 2)) // num_sharing
        if config.max_len is not None:  # configured, so the cache may exceed the share
            budget = max(budget, num_needed * page_bytes)
    num_pages = min(budget // page_bytes, 2 * config.max_batch * num_needed)
    if num_pages < 1:
        raise UserError(
            f"cache memory: {budget} bytes hold no page of {page_bytes} bytes; give the cache more "
            "(--cache-memory of a server, rollout.cache_bytes of a recipe)"
        )
    if config.max_len is not None and num_pages < num_needed:
        raise UserError(
            f"max_len: a cache of {budget} bytes holds {num_pages * config.page_size} positions, not {max_len}; "
            f"lower it, or give the cache {num_needed * page_bytes} bytes"
        )
    return num_pages


def why_torch(
    library: Library | None,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    arithmetic: Arithmetic,
    num_ranks: int,
) -> str:
    """Reason why torch computes and not the compiled kernels; empty if the kernels do."""
    if num_ranks > 1:  # the kernels compute all layers in one call, without a place for the sums over ranks
        return f"tensor parallel over {num_ranks} ranks"
    if not arithmetic.is_plain:
        return "batch-invariant" if arithmetic.batch_invariant else f"in {arithmetic.precision}"
    if device.type != "cpu":
        return f"on {device.type}"
    if library is None or library.handle is None:
        return "no kernels were loaded" if library is None else library.reason
    return why_not(config) if dtype in DTYPES else f"no kernels for {dtype}"


def has_fp8_kernels(config: ModelConfig, device: torch.device, arithmetic: Arithmetic) -> bool:
    """Whether decoding steps in this arithmetic can read weights in FP8 with one scale per output (`Fp8Weights`)."""
    if arithmetic.precision != "fp8" or arithmetic.batch_invariant or config.latent is not None:
        return False
    return not why_emulated(device) and not why_no_kernels(device)


class Runner:
    """Computes steps of one model, on its device and in its data type. No other code may change the model afterwards."""

    def __init__(
        self,
        model: Transformer,
        subnets: SubnetTable,
        *,
        num_pages: int,
        page_size: int,
        routes: bool,
        library: Library | None = None,
        arithmetic: Arithmetic = PLAIN,
        max_native_tokens: int | None = None,
        cuda_graphs: bool = False,
        ranks: Ranks | None = None,
        integers: Integers = MappingProxyType({}),
    ):
        """
        Args:
            integers: integer weights by their names in the state dict. The compiled kernels multiply by the integers where they can
                (`fits_kernels`), and ``model`` needs no values for these; torch multiplies by the values that ``model`` has.
            subnets: Subnets by their numbers in chunks.
            library: compiled kernels, for a CPU and plain arithmetic; None: torch computes.
            max_native_tokens: most tokens of a step that the kernels compute; None: no limit, so no token depends, to the bit,
                on the rest of the batch. Kernels and torch round differently, mostly in bf16. Not used with integers in the kernels,
                which compute every step.
            cuda_graphs: use `DecodeGraphs` for decoding steps, if torch computes in plain arithmetic.
            ranks: ranks of tensor parallelism, of which ``model`` is one's part; plain arithmetic only. Rank 0's runner directs the
                others' runners.
        """
        device, dtype = model.embedding.weight.device, model.embedding.weight.dtype
        assert not arithmetic.batch_invariant or dtype == torch.float32, (
            f"batch-invariant operators are fp32, not {dtype}"
        )
        self.model, self.config = model, model.config
        assert ranks is None or arithmetic.is_plain, "ranks compute in plain arithmetic only"
        self._ranks, self._team = ranks, None if ranks is None else ranks.team
        num_ranks = 1 if ranks is None else ranks.shard.num_ranks
        self._fp8: Fp8Weights | None = None
        if ranks is None and has_fp8_kernels(self.config, device, arithmetic):
            self._fp8, arithmetic = Fp8Weights(model.blocks, "blocks."), PLAIN
        self._why_torch = why_torch(library, self.config, device, dtype, arithmetic, num_ranks)
        has_graphs = cuda_graphs and ranks is None and bool(self._why_torch) and arithmetic.is_plain
        # graphs need one page that the allocator does not know
        self.pool = KvPool.allocate(self.config, num_pages + has_graphs, page_size, dtype, device, routes)
        self._subnets, self._arithmetic, self._max_native_tokens = subnets, arithmetic, max_native_tokens
        self.native: NativeForward | None = None
        self._int_bits, self._num_integers = {each.bits for each in integers.values()}, len(integers)
        self.panels: dict[str, Panels] = {}
        """The integer weights by which the kernels multiply."""
        if not self._why_torch:
            assert library is not None and library.handle is not None
            self.panels = in_panels(integers)
            self.native = NativeForward(library.handle, model, subnets, self.pool, self.panels)
            if self.panels:
                self._max_native_tokens = None
            if num_rest := len(integers) - len(self.panels):
                _log.warning(
                    "%d of %d integer weights are dequantised, which is slower: the kernels multiply groups of %d inputs with scales in fp16, "
                    "and rows in panels of %d.",
                    *(num_rest, len(integers), INT_GROUP, PANEL),
                )
            if self.panels and not library.handle.stretto_has_int_dot():
                _log.warning(
                    "Integer weights are multiplied in plain C++, several times slower: this processor has none of AVX2, AVX-512 and "
                    "NEON's dot products."
                )
        self._torch = None if self._is_all_native else self._new_torch()
        if self._team is not None:
            self._team.tell(Cache(num_pages, page_size))
        self._graphs = None
        if has_graphs and self._torch is not None:
            quantised: dict[str, IntWeight | Rows] = {} if self._fp8 is None else {**self._fp8.rows}
            quantised |= {name: weight for name, weight in integers.items() if isinstance(weight, IntWeight)}
            self._graphs = DecodeGraphs(self._torch, self.pool, self.config, subnets, quantised)

    def _new_torch(self) -> TorchForward:
        return TorchForward(self.model, self._subnets, self.pool, self._arithmetic, self._ranks)

    @property
    def _is_all_native(self) -> bool:
        """Whether the compiled kernels compute every step."""
        return self.native is not None and self._max_native_tokens is None

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token's result does not depend, to the bit, on the rest of the batch, on chunks or on pages."""
        return self._arithmetic.batch_invariant or self._is_all_native

    @property
    def kernels(self) -> dict[str, str]:
        """Kind of step -> its implementation, with the reason if it is the slower one."""
        limit = self._max_native_tokens
        native = "native" if limit is None else f"native (up to {limit} tokens a step)"
        decode = f"torch ({self._why_torch})" if self._why_torch else native
        prefill = "native" if limit is None and not self._why_torch else "torch"
        if self._graphs is not None:
            decode += f", CUDA graphs of {self._graphs.kernels}"
        matrices = [parameter for parameter in self.model.blocks.parameters() if parameter.ndim > 1]
        products = {} if self._arithmetic.is_plain else kernels(self._arithmetic, matrices)
        return {"prefill": prefill, "decode": decode, **products, **self._weights()}

    def _weights(self) -> dict[str, str]:
        """How steps use quantised weights."""
        is_multiplied = self._graphs is not None and self._graphs.multiplies_quantised
        if self._fp8 is not None:
            where = " in decoding steps, their values in bf16 in others" if is_multiplied else ", their values in bf16"
            return {"weights": f"FP8 with one scale per output{where}"}
        if not self._num_integers:
            return {}
        kinds = " and ".join(f"int{bits}" for bits in sorted(self._int_bits))
        if is_multiplied:
            return {"weights": f"{kinds} in decoding steps, dequantised in others"}
        if not self.panels:
            return {"weights": f"{kinds}, dequantised"}
        rest = self._num_integers - len(self.panels)
        where = "native steps" if rest == 0 else f"native steps, {rest} of {self._num_integers} weights dequantised"
        return {"weights": f"{kinds} in {where}"}

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], want_routes: bool) -> Tensor:
        """Compute ``chunks``, and write keys, values and (``want_routes``) routes to the cache.

        A chunk may begin at any position, also at one that was computed before: earlier positions must be in the cache, and
        later ones become invalid. Two chunks must not write to the same place.

        Returns:
            fp32 logits [M, V], chunk by chunk in the caller's order, in order of positions.
        """
        assert chunks, "a step without chunks"
        for chunk in chunks:
            assert 0 <= chunk.num_logits <= len(chunk.tokens) and chunk.tokens, f"chunk {chunk}"
        assert not want_routes or self.pool.routes_PZLK is not None, "the cache stores no routes"
        self._clear(chunks)
        if self._team is not None:
            with self._team.attributed():
                self._team.step(chunks, self._subnets)
                assert self._torch is not None, "ranks without torch"
                return self._torch.forward(chunks, want_routes)
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        if self.native is not None and num_tokens <= (self._max_native_tokens or num_tokens):
            return self.native.forward(chunks, want_routes)
        if self._graphs is not None and self._graphs.takes(chunks):
            return self._graphs.forward(chunks, want_routes)
        assert self._torch is not None, "the kernels compute every step"
        return self._torch.forward(chunks, want_routes)

    def _clear(self, chunks: Sequence[Chunk]) -> None:
        """Set to zero each last page that a chunk begins and does not fill, if torch may read it before it is full.

        torch attends to whole pages and masks later positions. If a masked key or value from an earlier owner of the page is NaN,
        the sums of all sequences that read the page would be NaN.
        """
        if self._is_all_native:
            return
        size = self.pool.keys_LPZGC.shape[2]
        begun = [chunk.pages[(chunk.end - 1) // size] for chunk in chunks if 0 < chunk.end % size <= len(chunk.tokens)]
        if begun:
            pages = torch.tensor(begun, device=self.pool.keys_LPZGC.device)
            for tensor in (self.pool.keys_LPZGC, self.pool.values_LPZGC):
                if tensor is not None:
                    tensor.index_fill_(1, pages, 0.0)

    def read_routes(self, pages: Sequence[int], start: int, end: int) -> np.ndarray:
        """Copy of the routes [T, L, K] of positions ``start`` to ``end`` of a sequence with the page table ``pages``."""
        pool = self.pool.routes_PZLK
        assert pool is not None, "the cache stores no routes"
        positions, page_size = np.arange(start, end), pool.shape[1]
        slots = np.asarray(pages, np.int64)[positions // page_size] * page_size
        slots_T = torch.from_numpy(slots + positions % page_size).to(pool.device)
        return pool.flatten(0, 1).index_select(0, slots_T).cpu().numpy()

    def load_weights(self, state: Mapping[str, Tensor] | None) -> None:
        """Copy ``state`` (names and shapes of the whole network's state dict) into the weights, in place.

        With tensor parallelism, rank 0 broadcasts one tensor after another, and every rank takes its part; ``state`` is None on the
        other ranks.

        Raises:
            UserError: a name is missing or unknown, or a shape differs, or the engine has integer weights; the weights are unchanged.
        """
        if self._num_integers:
            raise UserError(
                "weights: this engine has integer weights, which are not replaced; serve the new checkpoint in another"
            )
        own = self.model.state_dict()
        whole = own if self._ranks is None else skeleton(self._ranks.network).state_dict()
        if state is not None:
            _refuse_others(state, whole)
        with torch.no_grad(), nullcontext() if self._team is None else self._team.attributed():
            if self._team is not None:
                self._team.tell(Weights())
            for name, tensor in own.items():
                values = None if state is None else state[name]
                if self._ranks is not None:
                    values = self._ranks.part(name, values, tensor, tuple(whole[name].shape))
                assert values is not None, "rank 0 without new weights"
                tensor.copy_(values)
        if self._fp8 is not None:
            self._fp8.refresh()
        if self._torch is None:  # the kernels read the weights in place
            return
        fresh = self._new_torch()
        if self._graphs is None:
            self._torch = fresh
        else:  # graphs contain addresses of tensors
            with torch.inference_mode():
                self._torch.refresh(fresh)
                self._graphs.refresh()


def _refuse_others(state: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
    """Raises UserError: ``state`` and ``whole`` differ in names or shapes."""
    for name in whole.keys() | state.keys():
        if name not in state:
            raise UserError(f"weights: {name}: missing; send every tensor of the network")
        if name not in whole:
            raise UserError(f"weights: {name}: the network has no such tensor; send the network this engine serves")
        if whole[name].shape != state[name].shape:
            raise UserError(
                f"weights: {name}: shape {list(state[name].shape)}, not {list(whole[name].shape)}; "
                "send the network this engine serves"
            )


def state_checksum(state: Mapping[str, Tensor]) -> str:
    """XXH3 (128 bits) of names, types, shapes and bytes of all tensors, in order of name.

    It detects damage, not manipulation. Trainer and engines compute it for all weights in every step of an RL run, and a
    cryptographic hash would take a hundred times as long.
    """
    digest = xxhash.xxh3_128()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_weights(source: WeightSource, config: ModelConfig, checksum: str | None) -> Mapping[str, Tensor]:
    """State dict of ``source`` (a state dict or a checkpoint folder) for a network of ``config``. Thread-safe.

    Args:
        checksum: `state_checksum` of a state dict, or the ``weights_hash`` in a folder's lineage; None: not checked.

    Raises:
        UserError: a wrong checksum, a checkpoint of another network, or one that cannot be read.
    """
    if isinstance(source, Mapping):
        if checksum is not None:
            _refuse_other(state_checksum(source), checksum, "state")
        return source
    folder = Path(source)
    stored = read_config(folder)
    if stored != config:
        field = next(name for name in ModelConfig.model_fields if getattr(stored, name) != getattr(config, name))
        raise UserError(
            f"{folder}: {field}: is {getattr(stored, field)!r}, the network in service has {getattr(config, field)!r}; "
            "serve this checkpoint in an engine of its own"
        )
    if checksum is not None:
        _refuse_other(weights_hash(folder), checksum, str(folder))
    return read_checkpoint(folder).model.state_dict()


def _refuse_other(found: str | None, expected: str, source: str) -> None:
    if found != expected:
        raise UserError(f"{source}: checksum: is {found}, {expected} was announced; send the weights again")
