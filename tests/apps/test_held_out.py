"""Held-out losses are of the same rows, however many ranks share them."""

from __future__ import annotations

from pathlib import Path

import torch

from stretto.apps.run import RunInfo, prepare_data
from stretto.apps.train import held_out
from stretto.base.config import read_recipe
from stretto.model.parallel import Ranks
from stretto.train.recipe import Recipe


def test_ranks_share_the_rows_of_one(recipe: Path, text: Path, tmp_path: Path) -> None:
    parsed = read_recipe(recipe, Recipe)
    mixture, tokenizer, data_hash = prepare_data(tmp_path / "run", [str(text)], None, parsed.model.vocab_size)
    info = RunInfo(stage="pretrain", recipe=parsed, data=mixture, data_hash=data_hash, tokenizer=tokenizer)

    def ids(rank: int, world: int) -> torch.Tensor:
        batches = held_out(info, parsed.train, Ranks(rank, world, torch.device("cpu"), 1))
        return torch.cat([batch.ids_BT for batch in batches])

    alone = ids(0, 1)
    assert torch.equal(torch.cat([ids(0, 2), ids(1, 2)]), alone)
    assert torch.equal(torch.cat([ids(rank, 4) for rank in range(4)]), alone)
