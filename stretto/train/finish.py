"""The checkpoint of a finished stage, with its lineage and its cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stretto.base.records import Lineage, Meter, Receipt, new_lineage
from stretto.model.checkpoint import write_checkpoint
from stretto.model.counts import count
from stretto.model.families import Family
from stretto.model.parallel import Ranks, full_state
from stretto.model.spec import SubnetChoice
from stretto.model.transformer import Transformer
from stretto.ops.int_weights import IntWeight
from stretto.ops.memory import peak_bytes
from stretto.text.tokenizer import load_tokenizer


def write_trained(
    folder: Path,
    model: Transformer,
    meter: Meter,
    ranks: Ranks,
    *,
    name: str,
    stage: str,
    config: Mapping[str, Any],
    tokenizer_dir: Path | None,
    parents: tuple[Lineage, ...] = (),
    run_id: str | None = None,
    data_hash: str | None = None,
    family: Family | None = None,
    presets: Mapping[str, SubnetChoice] | None = None,
    spent: Receipt | None = None,
    integers: Mapping[str, IntWeight] = MappingProxyType({}),
) -> Path:
    """Write the checkpoint of a finished stage with its lineage. All ranks call this; rank 0 writes.

    The keyword arguments are those of `new_lineage` and `write_checkpoint`. ``config``: settings of the stage. ``spent``: cost of
    the stage before ``meter`` was started.

    Raises UserError, on all ranks: the checkpoint cannot be written.
    """
    state = full_state(model)

    def write() -> None:
        counts = count(model.config, model.config.full())
        receipt = meter.receipt(peak_bytes(ranks.device))
        lineage = new_lineage(
            name=name,
            stage=stage,
            total_params=counts.total_params,
            active_params=counts.active_params,
            receipt=receipt if spent is None else spent + receipt,
            parents=parents,
            run_id=run_id,
            data_hash=data_hash,
            tokenizer_hash=load_tokenizer(tokenizer_dir).fingerprint() if tokenizer_dir is not None else None,
            config=config,
        )
        write_checkpoint(
            folder,
            state,
            model.config,
            family=family,
            tokenizer_dir=tokenizer_dir,
            presets=presets,
            lineage=lineage,
            integers=integers,
        )

    ranks.first(write)
    return folder
