"""Held-out losses are of the same rows, however many ranks share them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stretto.api.train import held_out
from stretto.base.config import read_recipe
from stretto.model.parallel import Ranks
from stretto.train.prepare import prepare_data
from stretto.train.recipe import Recipe
from stretto.train.run_folder import RunInfo


@pytest.mark.parametrize(("world", "micro_batches"), [(2, 4), (4, 2)])  # as many rows a micro-batch as ranks
def test_ranks_share_the_rows_of_one(recipe: Path, text: Path, tmp_path: Path, world: int, micro_batches: int) -> None:
    parsed = read_recipe(recipe, Recipe, [f"train.micro_batches={micro_batches}"])
    mixture, tokenizer, data_hash = prepare_data(tmp_path / "run", [str(text)], None, parsed.model.vocab_size)
    info = RunInfo(stage="pretrain", recipe=parsed, data=mixture, data_hash=data_hash, tokenizer=tokenizer)

    def ids(world: int) -> list[torch.Tensor]:
        """Batch by batch, the rows of all ranks."""
        of_ranks = [held_out(info, parsed.train, Ranks(rank, world, torch.device("cpu"), 1)) for rank in range(world)]
        return [torch.cat([batch.ids_BT for batch in shares]) for shares in zip(*of_ranks, strict=True)]

    assert all(torch.equal(*pair) for pair in zip(ids(world), ids(1), strict=True))
