"""Ranks of a distributed run: FSDP2 and expert parallelism. One process is the general case with a world size of one.

FSDP2 shards every block's matrices over all ranks and gathers them while the block computes. With expert parallelism the experts
are not gathered: each of ``ep`` neighbouring ranks has a block of them, and tokens are exchanged.

Shape letters: N tokens, K experts per token, S = N·K slots of this rank, M received slots, E experts of a layer, L experts of
this rank, R ranks, D hidden, F = 2·I, I expert width.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import platform
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch names no exports
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stretto.base.errors import UserError
from stretto.base.records import Lineage, find_lineage
from stretto.data.loader import share_of
from stretto.model.checkpoint import Checkpoint, stores_integers
from stretto.model.elastic import with_branch_rows
from stretto.model.families import Family
from stretto.model.spec import ModelConfig, SubnetChoice
from stretto.model.streamed import StreamedState
from stretto.model.transformer import MoeLayer, Transformer, initial_state, load_state, skeleton
from stretto.ops.grouped import ExpertBiases, Experts, group_slots
from stretto.ops.grouped import compute_dtype as product_dtype
from stretto.ops.master import masters
from stretto.ops.moe import experts
from stretto.ops.operators import Operators, Routes
from stretto.ops.shards import is_shard, is_sharded, local_part, whole

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor

    from stretto.ops.matmul import ArithmeticOperators

DeviceLike = str | torch.device
"""``auto``, ``cpu``, ``cuda`` or a `torch.device`."""
TIMEOUT_S = 600.0
"""Timeout of collectives in a step, for a rank that hangs (the death of a rank is detected at once)."""
PATIENCE_S = 7 * 24 * 3600.0
"""Timeout while one rank works alone outside of steps, for example tokenises a corpus."""

_LOOPBACK, _LOOPBACK_INTERFACE = "127.0.0.1", "lo0" if sys.platform == "darwin" else "lo"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the name of gloo's network interface."""
_SIOCGIFADDR = 0x8915
"""Linux' request for the address of an interface."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank, world size and device of this process, and collectives over all ranks. Created by `join`."""

    rank: int
    world: int
    """Number of ranks."""
    device: torch.device
    ep: int = 1
    """Number of neighbouring ranks that the experts of a layer are divided over; divides ``world``."""
    patient: dist.ProcessGroup | None = None
    """Process group of all ranks on the CPU with the timeout `PATIENCE_S`, for work that may take long: tokenising before the first
    step, writing snapshots in a thread during training, and writing the checkpoint. None for one rank."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def rows(self, num_rows: int) -> slice:
        """The rows of a global batch of ``num_rows`` rows that belong to this rank: a contiguous block. Where the ranks do not divide the
        rows, the sizes differ by one; rank 0 has the largest, and the last ranks have none if there are more ranks than rows."""
        return share_of(num_rows, self.rank, self.world)

    def sum(self, value: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        """Sum over all ranks, in place. ``group``: the process group to use; None: the default one."""
        if self.world > 1:
            dist.all_reduce(value, group=group)
        return value

    def gather(self, value: Tensor) -> Tensor:
        """``value`` of every rank [R, …]. Its shape must be the same on all ranks."""
        if self.world == 1:
            return value[None]
        gathered = [torch.empty_like(value) for _ in range(self.world)]
        dist.all_gather(gathered, value)
        return torch.stack(gathered)

    def barrier(self) -> None:
        """Wait until all ranks are here. One may work alone before for up to `PATIENCE_S`, for example write a checkpoint."""
        if self.world > 1:
            dist.barrier(self.patient)

    def first(self, work: Callable[[], Result]) -> Result:
        """Call ``work`` on rank 0 only and return its result on every rank; the others wait up to `PATIENCE_S`.

        Raises UserError, on all ranks: ``work`` raised it.
        """
        if self.world == 1:
            return work()
        message: list[Any] = [None, None]
        if self.is_first:
            try:
                message[0] = work()
            except UserError as error:
                message[1] = str(error)
        dist.broadcast_object_list(message, 0, group=self.patient)
        result, problem = message
        if problem is not None:
            raise UserError(problem)
        return result

    def sum_gradients(self, model: nn.Module) -> None:
        """Sum the gradients of replicated parameters over all ranks; FSDP sums those of sharded parameters."""
        replicated = [grad for grad in _gradients(model) if not is_shard(grad)]
        if self.world > 1 and replicated:
            flat = self.sum(torch.cat([grad.flatten() for grad in replicated]))
            for grad, total in zip(replicated, flat.split([grad.numel() for grad in replicated]), strict=True):
                grad.copy_(total.view_as(grad))

    def gradient_norm(self, model: nn.Module) -> Tensor:
        """Global norm of the gradients, in fp32."""
        grads = list(_gradients(model))
        if self.world == 1:
            return _norm(grads)
        # replicated gradients are on every rank, so only the first rank counts them
        counted = [local_part(grad) for grad in grads if self.is_first or is_shard(grad)]
        return self.sum(_norm(counted).square()).sqrt()


ALONE = Ranks(0, 1, torch.device("cpu"))
"""The ranks of a measurement that one process makes, on whatever device."""


def join(device: DeviceLike = "auto", ep: int = 1) -> Ranks:
    """Join the ranks of torchrun's environment; without one, a world of one.

    Args:
        device: where the ranks compute.
        ep: number of expert-parallel ranks.

    Raises:
        UserError: an unknown or missing device, or ``ep`` does not divide the number of ranks.
    """
    variables = (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0))
    world, rank, local = (int(os.environ.get(name, default)) for name, default in variables)
    kind = check_ranks(str(device), ep, world, local + 1)  # `torch.device("cpu")` is "cpu", too
    if kind == "cuda":
        torch.cuda.set_device(local)
        kind = f"cuda:{local}"
    ranks = Ranks(rank, world, torch.device(kind), ep)
    if world == 1:
        return ranks
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
        os.environ.setdefault(_GLOO_INTERFACE, _LOOPBACK_INTERFACE)
    return _connected(ranks)


class MeetingPoint:
    """Where the ranks of one incarnation of a gang meet: a key-value store in the process of the first rank, on a free port."""

    def __init__(self, host: str, world: int):
        """``host``: address of this machine, which the machines of the other ranks reach."""
        self.store: Store = TCPStore(host, 0, world, is_master=True, wait_for_workers=False)
        self.address = host, int(self.store.port)


def join_gang(ranks: Ranks, meeting: MeetingPoint | tuple[str, int], host: str) -> Ranks:
    """Join the other ranks of a gang. Returns ``ranks`` with its process groups.

    Args:
        ranks: rank, number of ranks, device and ``ep`` of this process, which is in no process group yet.
        meeting: on the first rank the meeting point, on the others its address.
        host: address of this machine, at which the other ranks reach it.
    """
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    if (interface := _interface(host)) is not None:
        os.environ.setdefault(_GLOO_INTERFACE, interface)
    store = meeting.store if isinstance(meeting, MeetingPoint) else TCPStore(*meeting, ranks.world, is_master=False)
    return _connected(ranks, store)


def _connected(ranks: Ranks, store: Store | None = None) -> Ranks:
    """``ranks`` with its process groups. ``store``: where the ranks meet; None: as torchrun's environment says."""
    if not dist.is_initialized():
        on_gpu = ranks.device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            timeout=timedelta(seconds=TIMEOUT_S),
            device_id=ranks.device if on_gpu else None,
            store=store,
            rank=-1 if store is None else ranks.rank,
            world_size=-1 if store is None else ranks.world,
        )
        # also after an error: closed connections make the other ranks' collectives fail at once
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    return replace(ranks, patient=dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S)))


def _interface(host: str) -> str | None:
    """Name of this machine's network interface with the address ``host``; None: not found. Unless gloo knows it, gloo looks up the name
    of the machine, which a laptop or a container may not have."""
    if host == _LOOPBACK:
        return _LOOPBACK_INTERFACE
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address, or another system than Linux
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == host:
                    return name
    return None


def check_ranks(device: str, ep: int, world: int, num_here: int) -> str:
    """``cpu`` or ``cuda``: where ``world`` ranks, ``num_here`` of them on this machine, compute. Raises the errors of `join`."""
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {device}: unknown; use auto, cpu or cuda")
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if ep < 1 or world % ep:
        raise UserError(f"train.ep: {ep} does not divide the number of ranks, {world}; choose one of its divisors")
    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and num_here > num:
        problem = f"torch {torch.__version__} finds no CUDA device"
        if num:
            problem = f"this machine has {num} CUDA devices, and this is its rank {num_here}"
        raise UserError(f"--device cuda: {problem}; use cpu, or auto, which uses the devices that exist")
    return kind


def device_name(device: torch.device) -> str:
    """Model name of ``device`` from its driver or the kernel, for receipts and latency tables."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if device.type == "cpu" and cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def placed(
    config: ModelConfig,
    state: Iterable[tuple[str, Tensor]],
    ranks: Ranks,
    dtype: torch.dtype = torch.float32,
    weights: torch.dtype = torch.float32,
) -> Transformer:
    """The model of ``config`` with the tensors of ``state``, sharded over the ranks. No device ever has all of it. ``weights``: data type of
    the parameters on one rank; shards are in fp32."""
    return load_state(_shard(_empty(config, ranks, weights), ranks, dtype), state, ranks.device)


def _empty(config: ModelConfig, ranks: Ranks, weights: torch.dtype) -> Transformer:
    """`skeleton` with parameters in ``weights``; buffers stay in fp32."""
    model = skeleton(config)
    for parameter in model.parameters() if ranks.world == 1 else ():
        parameter.data = parameter.data.to(weights)
    return model


def spread(model: Transformer, ranks: Ranks, dtype: torch.dtype = torch.float32) -> Transformer:
    """Shard ``model``, which is on the CPU, over the ranks, one tensor at a time; a world of one moves it to the device."""
    if ranks.world == 1:
        return model.to(ranks.device)
    return placed(model.config, model.state_dict().items(), ranks, dtype)


def read_placed(
    folder: Path,
    ranks: Ranks,
    dtype: torch.dtype = torch.float32,
    config: ModelConfig | None = None,
    weights: torch.dtype = torch.float32,
) -> Checkpoint:
    """`stretto.model.checkpoint.read_checkpoint` in fp32, sharded over the ranks. A rank reads and holds its own experts and its own
    rows of matrices only.

    Args:
        dtype: compute dtype, as of `placed`.
        config: the same network with other branches of balance state or other orders; None: as in the folder.
        weights: data type of the parameters, as of `placed`.

    Raises:
        UserError: on all ranks, as `read_checkpoint` does.
    """
    with StreamedState(folder, torch.float32) as state:
        ranks.first(state.check_constants)
        config = config or state.config
        model = _shard(_empty(config, ranks, weights), ranks, dtype)
        model.to_empty(device=ranks.device)
        for layer in (module for module in model.modules() if isinstance(module, MoeLayer)):
            layer.reset_buffers()
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if is_shard(tensor):
                    (start, stop), *others = own_part(tensor)
                    rows = state.rows(name, start, stop)
                    for dim, (start, stop) in enumerate(others, 1):
                        rows = rows.narrow(dim, start, stop - start)
                    tensor.to_local().copy_(rows)
                elif name.endswith(".bias_WE"):
                    tensor.copy_(dict(with_branch_rows(state.config, config, [(name, state[name])]))[name])
                else:
                    tensor.copy_(state.rows(name, 0, len(tensor)))
        found = state.description
        return Checkpoint(model, config, found.family, found.presets, find_lineage(folder), folder)


def own_part(tensor: DTensor) -> list[tuple[int, int]]:
    """Start and stop of this rank's shard of ``tensor`` in every dimension. Shards are cut as `torch.chunk` cuts them."""
    from torch.distributed.tensor import Shard

    bounds = [(0, size) for size in tensor.shape]
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None, "this rank is not in the mesh"
    for place, num, placement in zip(coordinates, tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            continue
        assert type(placement) is Shard, f"{placement}: shards of other kinds are not contiguous"
        start, stop = bounds[placement.dim]
        size = -(-(stop - start) // num)
        bounds[placement.dim] = min(start + place * size, stop), min(start + (place + 1) * size, stop)
    sizes = tuple(stop - start for start, stop in bounds)
    assert sizes == tuple(tensor.to_local().shape), f"a shard of {tuple(tensor.to_local().shape)} is not {bounds}"
    return bounds


@dataclass(frozen=True, slots=True)
class Origin:
    """A network that a stage trains or learns from, before it is on the ranks. Written by `stored`, `random_network` and `in_memory`."""

    config: ModelConfig
    place: Callable[[ModelConfig, Ranks, torch.dtype, torch.dtype], Transformer]
    """Returns the network, sharded over the ranks, whose blocks compute in the first dtype and, on one rank, whose parameters have the
    second. The configuration is ``config``, or the same network with other branches of balance state or other orders."""
    family: Family | None = None
    """Architecture of its checkpoint; None: it has none."""
    presets: Mapping[str, SubnetChoice] = field(default_factory=dict)
    """Named Subnets of its checkpoint."""
    lineage: Lineage | None = None
    """Lineage of its checkpoint; None: a foreign one, or none."""


def stored(folder: Path) -> Origin:
    """The network of the checkpoint ``folder``. Reads headers only; `Origin.place` reads the weights, a rank its own share.

    Raises UserError: as `stretto.model.checkpoint.read_checkpoint` does, except for errors in the values of tensors.
    """

    def place(config: ModelConfig, ranks: Ranks, dtype: torch.dtype, weights: torch.dtype) -> Transformer:
        return read_placed(folder, ranks, dtype, config, weights).model

    with StreamedState(folder) as state:
        found = state.description
        return Origin(state.config, place, found.family, found.presets, find_lineage(folder))


def stored_for_training(folder: Path) -> Origin:
    """`stored`, for a network whose weights are trained. Raises `UserError` also if they are integers: steps of an optimiser are smaller
    than the distance between two codes."""
    if stores_integers(folder):
        raise UserError(
            f"{folder}: integer weights cannot be trained; train the checkpoint that it was quantised from, and quantise the result"
        )
    return stored(folder)


def random_network(config: ModelConfig, seed: int) -> Origin:
    """The network of ``config`` with `stretto.model.transformer.initial_state`; a rank keeps its shard of each tensor."""
    return Origin(config, lambda config, *where: placed(config, initial_state(config, seed), *where))


def in_memory(model: Transformer) -> Origin:
    """``model``, which is on the CPU. A world of one moves it to the device if its configuration stays, and does not copy it."""

    def place(config: ModelConfig, ranks: Ranks, dtype: torch.dtype, weights: torch.dtype) -> Transformer:
        if config == model.config:
            return spread(model, ranks, dtype)
        return copied(model, config).place(config, ranks, dtype, weights)

    return Origin(model.config, place)


def copied(model: Transformer, config: ModelConfig) -> Origin:
    """A copy of ``model``, which is on one rank, under ``config``: the same network with other branches of balance state or other orders."""

    def place(config: ModelConfig, ranks: Ranks, dtype: torch.dtype, weights: torch.dtype) -> Transformer:
        return placed(config, with_branch_rows(model.config, config, masters(model)), ranks, dtype, weights)

    return Origin(config, place)


def _shard(model: Transformer, ranks: Ranks, dtype: torch.dtype) -> Transformer:
    """Shard ``model`` over the ranks, in place; a world of one does not change it.

    Weights stay in fp32. A block's matrices are gathered in ``dtype``, the compute dtype, to which autocast would cast them. Norms and
    routers, which autocast does not cast, are small and replicated. Gradients are reduced in fp32 as sums, not means, so a loss
    that is divided by the global number of tokens needs no other factor.

    Raises:
        UserError: the experts cannot be divided evenly over the ranks.
    """
    if ranks.world == 1:
        return model
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # half a second, for several ranks only

    check_split(model.config, ranks.world, ranks.ep)
    kind = ranks.device.type
    everyone = init_device_mesh(kind, (ranks.world,), mesh_dim_names=("ranks",))
    gathered = None if dtype == torch.float32 else dtype
    # otherwise FSDP casts the residual stream too
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if ranks.ep > 1:
        grid = init_device_mesh(kind, (ranks.world // ranks.ep, ranks.ep), mesh_dim_names=("copies", "ep"))
        for layer in (module for module in model.modules() if isinstance(module, MoeLayer)):
            _spread_experts(layer, grid, everyone, policy)
    named = model.blocks.named_parameters()
    replicated = {parameter for name, parameter in named if parameter.dim() == 1 or name.endswith("mlp.gate")}
    for block in model.blocks:
        fully_shard(block, mesh=everyone, mp_policy=policy, ignored_params=replicated)
    # embedding and head in fp32, as the residual stream; gathered until the backward pass, because the loss multiplies by the
    # head outside the forward pass
    outer = MixedPrecisionPolicy(cast_forward_inputs=False)
    fully_shard(model, mesh=everyone, mp_policy=outer, reshard_after_forward=False)
    for module in model.modules():
        if is_sharded(module):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def check_split(config: ModelConfig, world: int, ep: int, field: str = "train.ep") -> None:
    """Raises UserError: ``world`` ranks, ``ep`` of them expert-parallel, cannot divide the experts of ``config`` evenly. ``field``:
    name of the setting in the error."""
    if ep == 1 or not config.experts_by_layer:
        return
    copies, num_rows, hidden = world // ep, 2 * config.expert_intermediate_size, config.hidden_size
    for num_experts in config.experts_by_layer:
        if num_experts % ep:
            raise UserError(f"{field}: {ep} does not divide the {num_experts} experts of a layer; choose a divisor")
    if num_rows % copies or hidden % copies:
        raise UserError(
            f"{field}: {copies} ranks cannot split experts of {num_rows} x {hidden} evenly; use more expert-parallel ranks"
        )


def _spread_experts(layer: MoeLayer, grid: DeviceMesh, everyone: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Give each rank of a row of ``grid`` (copies × ep) its block of experts, and shard each expert over the copies."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        if (parameter := getattr(layer, name)) is not None:
            setattr(layer, name, nn.Parameter(distribute_tensor(parameter.data, grid["ep"], [Shard(0)])))
    layer.exchange = partial(_experts, grid.get_group("ep"))
    # outputs are cloned below because FSDP warns of outputs that are views
    if layer.shared is not None:
        biases = {parameter for parameter in layer.shared.parameters() if parameter.dim() == 1}
        # a product with a bias, or one by the operators of an `Arithmetic`, returns a view
        layer.shared.register_forward_hook(lambda module, arguments, y_BTD: y_BTD.clone() if y_BTD._is_view() else None)
        fully_shard(layer.shared, mesh=everyone, mp_policy=policy, ignored_params=biases)
    else:  # without shared experts, the layer's output is a view of the experts' output
        layer.register_forward_hook(lambda module, arguments, output: (output[0].clone(), output[1]))
    # sharded along the rows of each expert, because a rank may have fewer experts than there are copies
    fully_shard(
        layer,
        mesh=grid["copies"],
        mp_policy=policy,
        ignored_params={layer.gate} if layer.gate_bias is None else {layer.gate, layer.gate_bias},
        shard_placement_fn=lambda parameter: Shard(1),
    )


def full_state(model: Transformer) -> dict[str, Tensor]:
    """The state dict of ``model`` with unsharded tensors on the CPU of rank 0; empty on other ranks. All ranks must call it."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    state: dict[str, Tensor] = {}
    for name, tensor in masters(model):
        full = whole(tensor)
        if is_first:
            state[name] = full.cpu()
    return state


def _gradients(model: nn.Module) -> Iterable[Tensor]:
    return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    """Norm of all ``tensors`` together; torch's `get_total_norm` would give that of bf16 tensors in bf16."""
    norms = torch._foreach_norm(list(tensors), 2.0, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))


def scale_gradients(model: nn.Module, scale: Tensor) -> None:
    """Multiply all gradients by ``scale``, in place."""
    torch._foreach_mul_([local_part(grad) for grad in _gradients(model)], scale)


def reshard(model: Transformer) -> None:
    """Drop the matrices of ``model`` that a forward pass without a backward pass has left gathered."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()


def _experts(group: dist.ProcessGroup, operators: Operators, x_ND: Tensor, routes: Routes, weights: Experts) -> Tensor:
    """``operators.experts`` over the ranks of ``group``, all of which must call it together.

    Rank r has the experts r·L to (r + 1)·L − 1. Dropless: an expert computes all tokens that choose it. The nested expert order is
    interleaved over the ranks, so a smaller Subnet loads all ranks equally.

    With the operators of an `Arithmetic`, gates travel with their tokens and multiply the input of the down projection, as on one rank,
    so every output has the bits that it has on one rank if these operators are batch-invariant.
    """
    chosen_NK, (gate_up_EFD, down_EDI, biases, clamp) = routes.chosen_NK, weights
    assert is_shard(gate_up_EFD) and is_shard(down_EDI), "experts are not sharded"
    (num_tokens, num_chosen), num_experts = chosen_NK.shape, gate_up_EFD.shape[0]
    slots = group_slots(chosen_NK, num_experts)
    counts_RL = slots.ends_E.diff(prepend=slots.ends_E.new_zeros(1)).view(group.size(), -1)
    arriving_RL = torch.empty_like(counts_RL)
    dist.all_to_all_single(arriving_RL, counts_RL, group=group)
    sent, received = counts_RL.sum(1).tolist(), arriving_RL.sum(1).tolist()
    # Copy, then permute: in the gradient of a permutation each row has one writer, so the result does not depend on an order of
    # summation. Slots sorted by expert are also sorted by the rank of the expert.
    x_SD = x_ND.to(product_dtype(x_ND)).repeat_interleave(num_chosen, dim=0).index_select(0, slots.order_P)
    arithmetic = _arithmetic(operators)
    if arithmetic is not None:
        gates_S1 = arithmetic.rounded(routes.gates_NK).reshape(-1, 1).index_select(0, slots.order_P)
        x_SD = torch.cat([x_SD, gates_S1], 1)  # one exchange for both
    x_MD = _Swap.apply(x_SD, sent, received, group)
    local_biases = None if biases is None else ExpertBiases(*(local_part(bias) for bias in biases))
    own = Experts(gate_up_EFD.to_local(), down_EDI.to_local(), local_biases, clamp)
    y_MD = _local_experts(operators, x_MD, arriving_RL, own)
    y_SD = _Swap.apply(y_MD, received, sent, group).index_select(0, slots.place_S)
    y_NKD = y_SD.view(num_tokens, num_chosen, x_ND.shape[1])
    if arithmetic is not None:
        return arithmetic.summed_experts(y_NKD)
    return (y_NKD * routes.gates_NK.unsqueeze(-1).to(y_NKD.dtype)).sum(1)


def _local_experts(operators: Operators, x_MD: Tensor, arrived_RL: Tensor, own: Experts) -> Tensor:
    """Expert outputs [M, D] of rows sorted by source rank, then expert; ``arrived_RL``: number of rows of each. With the operators of
    an `Arithmetic`, the last column of ``x_MD`` is the gate that multiplies the output.

    Within an expert, rows keep the order of ranks, which is that of the global batch on one rank.
    """
    num_ranks, num_local = arrived_RL.shape
    arithmetic = _arithmetic(operators)
    expert_M = torch.arange(num_local, device=x_MD.device).repeat(num_ranks).repeat_interleave(arrived_RL.flatten())
    if arithmetic is None:
        return experts(x_MD, expert_M[:, None], x_MD.new_ones(len(x_MD), 1), own)
    slots = group_slots(expert_M[:, None], num_local)
    x_SD, ends = x_MD.index_select(0, slots.order_P), slots.ends_E.tolist()
    y_SD = arithmetic.expert_rows(x_SD[:, :-1], x_SD[:, -1:], ends, arithmetic.matrices(own), own)
    return y_SD.index_select(0, slots.place_S)


def _arithmetic(operators: Operators) -> ArithmeticOperators | None:
    """``operators`` if they belong to an `Arithmetic`, whose module plain training does not import; else None."""
    return None if operators.is_plain else cast("ArithmeticOperators", operators)


class _Swap(torch.autograd.Function):
    """All-to-all with gradient: the first ``sent[0]`` rows go to rank 0 and so on; returns the received rows in order of rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Swap.apply(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None
