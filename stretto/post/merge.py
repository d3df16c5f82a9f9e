"""Merging of checkpoints of one network, tensor by tensor, with one layer of each in memory.

The methods are mergekit's, with its defaults, applied to every stored tensor: each projection of each expert separately. δ is a parent's
tensor minus the base's, w the parent's weight:

- ``average``: Σ w·parent / Σ w (2203.05482).
- ``task-arithmetic``: base + λ·Σ w·δ (2212.04089).
- ``ties``: the share ``density`` of the elements of each δ with the largest magnitude is kept; elements whose sign differs from the
  sign of Σ w·δ are removed; base + λ·Σ w·δ / Σ w over the remaining elements (2306.01708).
- ``dare``: a random share ``density`` of the elements of each δ is kept and rescaled; then as task arithmetic (2311.03099).
- ``dare-ties``: as ``dare``, with the sign vote of ``ties``, without division by Σ w.
- ``slerp``: point at the share ``t`` of the arc between two parents; linear interpolation if they are nearly parallel.

Balance biases are averaged in every method: they are not trained by gradients, so magnitudes and signs have no meaning for them. The mean
has the parents' weights, where negative ones count as 0, or 1 − t and t.
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
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from stretto.base.config import Config, differences
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder
from stretto.base.records import Lineage, Meter, find_lineage, history, new_lineage
from stretto.base.track import progress, say
from stretto.learning.recipe import DistillConfig
from stretto.model.checkpoint import stores_integers, write_checkpoint
from stretto.model.counts import count
from stretto.model.families import stored_tensors
from stretto.model.parallel import device_name
from stretto.model.streamed import StreamedState
from stretto.text.tokenizer import load_tokenizer

Method = Literal["average", "task-arithmetic", "ties", "dare", "dare-ties", "slerp"]
_PARALLEL, _TINY = 0.9995, 1e-8
"""slerp: smallest cosine of parallel tensors, and smallest norm of a tensor with a direction (mergekit's values)."""
_SHARD_BYTES = 10**9
"""Largest size of a weight file; one file is in memory at a time."""


class _Rule(NamedTuple):
    """Combination of the differences from the base."""

    keeps: Literal["all", "largest", "random"]
    """Elements of each difference that are kept."""
    votes: bool
    """Whether elements with a minority sign are removed."""
    divides: bool
    """Whether the sum is divided by the sum of weights."""


_RULES: Final[Mapping[str, _Rule]] = {
    "task-arithmetic": _Rule("all", votes=False, divides=False),
    "ties": _Rule("largest", votes=True, divides=True),
    "dare": _Rule("random", votes=False, divides=False),
    "dare-ties": _Rule("random", votes=True, divides=False),
}


class MergeOptions(Config):
    """Options of `merge`."""

    model_config = ConfigDict(allow_inf_nan=False)

    method: Method
    weights: tuple[float, ...] = ()
    """Weight of each parent; empty: 1 each."""
    scale: float = 1.0
    """λ of the methods with a base."""
    density: float = Field(default=0.5, gt=0, le=1)
    """ties and dare: share of each difference that is kept."""
    t: float = Field(default=0.5, ge=0, le=1)
    """slerp: position between the first parent (0) and the second (1)."""
    seed: int = 0
    """dare: random seed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        total, size = sum(self.weights), sum(map(abs, self.weights))
        if self.weights and self.method in ("average", "ties") and abs(total) <= _TINY * size:
            raise ValueError(f"weights {list(self.weights)} sum to 0, and {self.method} divides by the sum")
        if self.weights and self.method == "slerp":
            raise ValueError("weights: slerp has none; give t, the position between the two parents")
        return self


def merge(parents: Sequence[Path], base: Path | None, out: Path, options: MergeOptions) -> Path:
    """Merge ``parents``, runs or checkpoints that were trained from ``base``, into the checkpoint ``out`` and return it.

    Tokenizer, presets, orders, family and dtype are those of the base, or of the first parent if the method has no base. Weights are
    computed in fp32.

    Raises:
        UserError: too few parents, no base although the method needs one, different networks, tokenizers or expert orders, or parents
            without a common ancestor.
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
        raise UserError(f"--weights: {len(options.weights)} weights for {len(folders)} checkpoints; give one for each")
    origin = folders[0] if base is None else checkpoint_folder(base)
    with ExitStack() as stack:
        distinct = dict.fromkeys([origin, *folders])
        opened = {folder: stack.enter_context(StreamedState(folder, torch.float32)) for folder in distinct}
        first, meter = opened[origin], Meter("merge", device_name(torch.device("cpu")))
        for state in opened.values():
            _check_same(first, state)
            if stores_integers(state.folder):
                say(
                    f"{state.folder}: its integer weights are dequantised for the merge; quantise the merged checkpoint again"
                )
        lineages, counts = _lineages(opened), count(first.config, first.config.full())
        num_bytes = sum(file.stat().st_size for folder in opened for file in folder.glob("model*.safetensors"))

        def lineage(_: Mapping[Path, str]) -> Lineage:
            # one multiply-add per element and parent, a lower bound for every method
            meter.add(flops=2 * len(folders) * counts.total_params, bytes_read=num_bytes)
            merged = {"base": str(base) if base else None, "merged": [str(folder) for folder in folders]}
            return new_lineage(
                name=out.name,
                stage="merge",
                parents=lineages,
                total_params=counts.total_params,
                active_params=counts.active_params,
                receipt=meter.receipt(),
                tokenizer_hash=load_tokenizer(origin).fingerprint(),
                config=options.model_dump(mode="json") | merged,
            )

        family, dtypes = first.description.family, stack.enter_context(StreamedState(origin)).dtypes
        num_elements = sum(math.prod(stored.shape) for stored in stored_tensors(first.config, family))
        with meter, progress("merge", num_elements * dtypes.weights.itemsize, "bytes") as advance:
            write_checkpoint(
                out,
                MergedState([opened[folder] for folder in folders], first, options),
                first.config,
                family=family,
                tokenizer_dir=origin,
                presets=first.description.presets,
                lineage=lineage,
                dtype=dtypes.weights,
                fp32=dtypes.fp32,
                max_shard_bytes=_SHARD_BYTES,
                advance=advance,
            )
    return out


def merge_teachers(config: DistillConfig, start: Path, out: Path) -> Path:
    """Write ``start`` plus ``merge_scale`` times the sum of the teachers' differences to it into the checkpoint ``out`` and return it.
    Raises UserError: as `merge`."""
    teachers = [Path(each.checkpoint) for each in config.teachers.values() if each.checkpoint is not None]
    return merge(teachers, start, out, MergeOptions(method="task-arithmetic", scale=config.merge_scale))


def _check_same(first: StreamedState, state: StreamedState) -> None:
    """Raises `UserError`: the elements of the two networks do not correspond."""
    orders = {"expert_order", "layer_order"}
    one, other = (each.config.model_dump(mode="json", exclude=orders) for each in (first, state))
    for field, (before, after) in differences(one, other).items():
        raise UserError(
            f"{state.folder}: {field}: {after}, but {before} in {first.folder}; merge copies of one network"
        )
    for field, ranking in (("expert_order", "expert_orders"), ("layer_order", "layer_ranking")):
        if getattr(state.config, ranking) != getattr(first.config, ranking):
            part = field.partition("_")[0]
            raise UserError(
                f"{state.folder}: {field}: differs from that of {first.folder}, so the smaller sizes keep different {part}s and a merge would "
                "mix trained with untrained ones; merge before the orders are changed"
            )
    if load_tokenizer(state.folder).fingerprint() != load_tokenizer(first.folder).fingerprint():
        raise UserError(
            f"{state.folder}: tokenizer.json: differs from that of {first.folder}; merge checkpoints with the same tokenizer"
        )


def _lineages(folders: Iterable[Path]) -> tuple[Lineage, ...]:
    """Lineages of the folders that have one. Raises `UserError`: two of them have no common ancestor, so their experts do not correspond."""
    found = {folder: lineage for folder in folders if (lineage := find_lineage(folder))}
    runs = {folder: {stage.run_id for stage in history(lineage)} for folder, lineage in found.items()}
    for folder, own in runs.items():
        first = next(iter(runs))
        if not own & runs[first]:
            raise UserError(
                f"{folder}: has no ancestor in common with {first}, so a merge would mix unrelated experts; merge checkpoints that "
                "were trained from the same one"
            )
    return tuple(found.values())


class MergedState(Mapping[str, Tensor]):
    """State dict of a merge. Each tensor is computed on access; iteration follows the order of the layers."""

    def __init__(self, parents: Sequence[StreamedState], base: StreamedState, options: MergeOptions) -> None:
        """``base``: network from which differences are taken; methods without a base use only its names."""
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
        if self._options.method == "average":
            return average(tensors, self._weights)
        if name.endswith(".bias_WE"):  # selection biases of the routers, which no method adds
            return average(tensors, self._bias_weights())
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

    def _bias_weights(self) -> Sequence[float]:
        """Weights of the parents' balance biases. A parent that is subtracted has none; 1 each where no parent is added."""
        if self._options.method == "slerp":
            return 1.0 - self._options.t, self._options.t
        added = [max(0.0, weight) for weight in self._weights]
        return added if any(added) else [1.0] * len(added)


def average(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Weighted mean of ``tensors``."""
    total = torch.zeros_like(tensors[0])
    for tensor, weight in zip(tensors, weights, strict=True):
        total.add_(tensor, alpha=weight)
    return total / sum(weights)


def add_differences(
    base: Tensor, tensors: Sequence[Tensor], weights: Sequence[float], options: MergeOptions, draw: torch.Generator
) -> Tensor:
    """``base`` plus the combined differences of ``tensors`` from it, by the method's `_Rule`."""
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
    """``delta`` with all but the share ``density`` of its elements set to 0."""
    if rule.keeps == "all" or density >= 1:
        return delta
    if rule.keeps == "largest":
        flat = delta.flatten()
        best = flat.abs().argsort(descending=True)[: max(1, int(density * flat.numel()))]
        return torch.zeros_like(flat).index_copy(0, best, flat[best]).view_as(delta)
    kept = delta * torch.bernoulli(torch.full_like(delta, density), generator=draw)
    # as mergekit: rescaled to the former sum of magnitudes; the paper divides by the density
    before, after = delta.abs().sum(), kept.abs().sum()
    return kept if min(before, after) < 1e-7 else kept * (before / after)


def slerp(first: Tensor, second: Tensor, t: float) -> Tensor:
    """Point at the share ``t`` of the arc from ``first`` to ``second``, each flattened to one vector."""
    sizes = [torch.linalg.vector_norm(tensor) for tensor in (first, second)]
    units = [tensor / size if size > _TINY else tensor for tensor, size in zip((first, second), sizes, strict=True)]
    cosine = (units[0] * units[1]).sum().clamp(-1, 1)
    if cosine.abs() > _PARALLEL:
        return (1 - t) * first + t * second
    angle = torch.acos(cosine)
    return (torch.sin((1 - t) * angle) * first + torch.sin(t * angle) * second) / torch.sin(angle)
