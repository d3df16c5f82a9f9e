"""Merging of checkpoints of one network, tensor by tensor, with one layer of each in memory.

The methods are mergekit's, with its defaults, applied to the tensors that a checkpoint stores: each projection of each expert
by itself. δ is a parent's tensor less the base's, w its weight:

- ``average``: Σ w·parent / Σ w (2203.05482).
- ``task-arithmetic``: base + λ·Σ w·δ (2212.04089).
- ``ties``: of each δ the largest ``density`` by magnitude are kept; where the sum of w·δ has a sign, the others of that place
  are left out; base + λ·Σ w·δ / Σ w, sums over those that are left (2306.01708).
- ``dare``: of each δ so many are kept at random, and scaled up to the size it had; then as task arithmetic (2311.03099).
- ``dare-ties``: the same, with the vote on signs of ``ties``, and not divided by Σ w.
- ``slerp``: two parents, at a share ``t`` of the arc between them; on a straight line where they point the same way.

What the vote and the magnitudes mean is a matter of weights that were trained by gradients. Balance biases are not: they answer
the load that their own router saw, so in every method they are their weighted mean.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self
from zlib import crc32

import torch
from pydantic import Field, model_validator
from torch import Tensor

from stretto.base.config import Config, differences
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder
from stretto.base.records import LINEAGE_FILE, Lineage, Meter, history, new_lineage, read_lineage
from stretto.base.track import progress
from stretto.model.checkpoint import write_checkpoint
from stretto.model.families import stored_tensors
from stretto.model.parallel import device_name
from stretto.model.spec import count
from stretto.model.streamed import StreamedState
from stretto.text.tokenizer import load_tokenizer

Method = Literal["average", "task-arithmetic", "ties", "dare", "dare-ties", "slerp"]
_STRAIGHT, _TINY = 0.9995, 1e-8
"""From which cosine on two tensors count as parallel; and the least length that has a direction. mergekit's."""
_SHARD_BYTES = 10**9
"""Of files: one is in memory at a time."""


class _Rule(NamedTuple):
    """How differences from the base are put together."""

    keeps: Literal["all", "largest", "random"]
    votes: bool
    """On the sign of each element."""
    divides: bool
    """By the sum of weights."""


_RULES: Final[Mapping[str, _Rule]] = {
    "task-arithmetic": _Rule("all", votes=False, divides=False),
    "ties": _Rule("largest", votes=True, divides=True),
    "dare": _Rule("random", votes=False, divides=False),
    "dare-ties": _Rule("random", votes=True, divides=False),
}


class MergeOptions(Config):
    """Options of `merge`."""

    method: Method
    weights: tuple[float, ...] = ()
    """Weight of each parent; none: 1 each."""
    scale: float = 1.0
    """λ."""
    density: float = Field(default=0.5, gt=0, le=1)
    """ties and dare: share of each difference that is kept."""
    t: float = Field(default=0.5, ge=0, le=1)
    """slerp: position between the first parent (0) and the second (1)."""
    seed: int = 0
    """dare: random seed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.weights and self.method in ("average", "ties") and sum(self.weights) == 0:
            raise ValueError(f"weights {list(self.weights)} add up to 0, and {self.method} divides by that")
        return self


def merge(parents: Sequence[Path], base: Path | None, out: Path, options: MergeOptions) -> Path:
    """Merge ``parents``, runs or checkpoints that began with ``base``, into the checkpoint ``out``; returns it.

    Tokenizer, presets, orders, family and dtype are the base's, or the first parent's where a method takes none; they must be
    the same network. Weights are computed in fp32.

    Raises:
        UserError: too few parents, no base where the method needs one, other networks, tokenizers or expert orders than its,
            parents that have no start in common, or a folder that holds something else.
    """
    folders, method = [checkpoint_folder(parent) for parent in parents], options.method
    if len(folders) < 2 or (method == "slerp" and len(folders) != 2):
        wanted = "two" if method == "slerp" else "two or more"
        raise UserError(f"{method}: takes {wanted} checkpoints, not {len(folders)}")
    if method in _RULES and base is None:
        raise UserError(
            f"--base: missing: {method} adds differences to a common base; name the checkpoint from which all models were trained"
        )
    if options.weights and len(options.weights) != len(folders):
        raise UserError(f"--weights: {len(options.weights)} of them for {len(folders)} checkpoints; give one each")
    origin = folders[0] if base is None else checkpoint_folder(base)
    with ExitStack() as held:
        each_once = dict.fromkeys([origin, *folders])
        opened = {folder: held.enter_context(StreamedState(folder, torch.float32)) for folder in each_once}
        first, meter = opened[origin], Meter("merge", device_name(torch.device("cpu")))
        for state in opened.values():
            _check_same(first, state)
        lineages, counts = _lineages(opened), count(first.config, first.config.full())
        num_bytes = sum(file.stat().st_size for folder in opened for file in folder.glob("model*.safetensors"))

        def lineage(_: Mapping[Path, str]) -> Lineage:
            # a multiply-add an element and parent: what every method does at least
            meter.add(flops=2 * len(folders) * counts.total_params, bytes_read=num_bytes)
            told = {"base": str(base) if base else None, "merged": [str(folder) for folder in folders]}
            return new_lineage(
                name=out.name,
                stage="merge",
                parents=lineages,
                total_params=counts.total_params,
                active_params=counts.active_params,
                receipt=meter.receipt(),
                tokenizer_hash=load_tokenizer(origin).fingerprint(),
                config=options.model_dump(mode="json") | told,
            )

        family, dtype = first.description.family, held.enter_context(StreamedState(origin)).dtype
        num_elements = sum(math.prod(stored.shape) for stored in stored_tensors(first.config, family))
        with meter, progress("merge", num_elements * dtype.itemsize) as advance:
            write_checkpoint(
                out,
                MergedState([opened[folder] for folder in folders], first, options),
                first.config,
                family=family,
                tokenizer_dir=origin,
                presets=first.description.presets,
                lineage=lineage,
                dtype=dtype,
                max_shard_bytes=_SHARD_BYTES,
                advance=advance,
            )
    return out


def _check_same(first: StreamedState, state: StreamedState) -> None:
    """Raises `UserError`: a place in one is not the same place in the other."""
    orders = {"expert_order", "layer_order"}
    told, other = (each.config.model_dump(mode="json", exclude=orders) for each in (first, state))
    for field, (before, after) in differences(told, other).items():
        raise UserError(
            f"{state.folder}: {field}: {after}, and {before} in {first.folder}; merge copies of one network"
        )
    for field, ranking in (("expert_order", "expert_orders"), ("layer_order", "layer_ranking")):
        if getattr(state.config, ranking) != getattr(first.config, ranking):
            what = field.partition("_")[0]
            raise UserError(
                f"{state.folder}: {field}: its smaller sizes keep other {what}s than those of {first.folder}: those of the merge would "
                "mix what was trained with what was not; merge before the orders are changed"
            )
    if load_tokenizer(state.folder).fingerprint() != load_tokenizer(first.folder).fingerprint():
        raise UserError(
            f"{state.folder}: tokenizer.json: differs from that of {first.folder}; merge checkpoints with the same tokenizer"
        )


def _lineages(folders: Iterable[Path]) -> tuple[Lineage, ...]:
    """Of those that have one. Raises `UserError`: two of them never were one network: an expert of one is none of the other."""
    found = {folder: read_lineage(folder) for folder in folders if (folder / LINEAGE_FILE).is_file()}
    runs = {folder: {stage.run_id for stage in history(lineage)} for folder, lineage in found.items()}
    for folder, own in runs.items():
        first = next(iter(runs))
        if not own & runs[first]:
            raise UserError(
                f"{folder}: has no stage in common with {first}: their experts have no common order, so that a merge would "
                "mix unrelated experts; merge checkpoints that were trained from the same one"
            )
    return tuple(found.values())


class MergedState(Mapping[str, Tensor]):
    """The state dict of a merge, computed when it is asked for, in the order of the layers."""

    def __init__(self, parents: Sequence[StreamedState], base: StreamedState, options: MergeOptions) -> None:
        """``base``: where differences are counted from; of methods without a base it says the order of names alone."""
        self._parents, self._base, self._options = parents, base, options
        self._weights = options.weights or (1.0,) * len(parents)
        self._parts: dict[str, list[tuple[int | slice, ...]]] = defaultdict(list)
        for stored in stored_tensors(base.config, base.description.family):
            if stored.ours is not None and not stored.is_copy:
                self._parts[stored.ours].append(stored.part)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)

    def __getitem__(self, name: str) -> Tensor:
        tensors = [parent[name] for parent in self._parents]
        if name.endswith(".bias_WE") or self._options.method == "average":
            return average(tensors, self._weights)
        result = torch.full_like(tensors[0], torch.nan)
        base = self._base[name]
        for place, part in enumerate(self._parts[name]):
            pieces = [tensor[part] for tensor in tensors]
            if self._options.method == "slerp":
                result[part] = slerp(pieces[0], pieces[1], self._options.t)
            else:
                draw = torch.Generator().manual_seed(crc32(f"{self._options.seed}/{name}/{place}".encode()))
                result[part] = add_differences(base[part], pieces, self._weights, self._options, draw)
        return result


def average(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Their weighted mean."""
    total = torch.zeros_like(tensors[0])
    for tensor, weight in zip(tensors, weights, strict=True):
        total.add_(tensor, alpha=weight)
    return total / sum(weights)


def add_differences(
    base: Tensor, tensors: Sequence[Tensor], weights: Sequence[float], options: MergeOptions, draw: torch.Generator
) -> Tensor:
    """``base`` and what each of ``tensors`` has learnt since, by the rule of the method."""
    rule = _RULES[options.method]
    deltas = torch.stack([_kept(tensor - base, rule, options.density, draw) for tensor in tensors])
    shares = torch.tensor(weights, dtype=deltas.dtype).view(-1, *[1] * base.dim())
    deltas *= shares
    if rule.votes:
        agrees = deltas.sign() == torch.where(deltas.sum(0) >= 0, 1.0, -1.0)
        deltas, shares = deltas * agrees, shares * agrees
    total = deltas.sum(0)
    if rule.divides:
        divisor = shares.sum(0)
        total = total / torch.where(divisor == 0, 1.0, divisor)
    return base + options.scale * total


def _kept(delta: Tensor, rule: _Rule, density: float, draw: torch.Generator) -> Tensor:
    """``delta`` with all but a share ``density`` of its elements at 0."""
    if rule.keeps == "all" or density >= 1:
        return delta
    if rule.keeps == "largest":
        flat = delta.flatten()
        best = flat.abs().argsort(descending=True)[: max(1, int(density * flat.numel()))]
        return torch.zeros_like(flat).index_copy(0, best, flat[best]).view_as(delta)
    kept = delta * torch.bernoulli(torch.full_like(delta, density), generator=draw)
    # mergekit's scale: the sum of magnitudes that was, where the paper divides by the density
    before, after = delta.abs().sum(), kept.abs().sum()
    return kept if min(before, after) < 1e-7 else kept * (before / after)


def slerp(first: Tensor, second: Tensor, t: float) -> Tensor:
    """At a share ``t`` of the arc from ``first`` to ``second``, both seen as one vector each."""
    sizes = [torch.linalg.vector_norm(tensor) for tensor in (first, second)]
    units = [tensor / size if size > _TINY else tensor for tensor, size in zip((first, second), sizes, strict=True)]
    cosine = (units[0] * units[1]).sum().clamp(-1, 1)
    if cosine.abs() > _STRAIGHT:
        return (1 - t) * first + t * second
    angle = torch.acos(cosine)
    return (torch.sin((1 - t) * angle) * first + torch.sin(t * angle) * second) / torch.sin(angle)
