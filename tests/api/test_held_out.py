"""Held-out losses are of the same rows, however many ranks share them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stretto.api.report import gather
from stretto.api.train import held_out, held_out_rows
from stretto.base.config import read_recipe
from stretto.base.records import read_lineage
from stretto.base.track import read_metrics
from stretto.model import checkpoint, streamed
from stretto.model.checkpoint import describe
from stretto.model.parallel import Ranks
from stretto.report.training import curves_caption
from stretto.train.prepare import prepare_data
from stretto.train.recipe import Recipe
from stretto.train.run_folder import RunInfo
from tests.api.conftest import Run


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


def test_the_rows_are_the_same_on_any_number_of_ranks(recipe: Path, text: Path, tmp_path: Path) -> None:
    parsed = read_recipe(recipe, Recipe, ["train.rows=10", "train.micro_batches=2", "train.eval_rows=13"])
    mixture, tokenizer, data_hash = prepare_data(tmp_path / "run", [str(text)], None, parsed.model.vocab_size)
    info = RunInfo(stage="pretrain", recipe=parsed, data=mixture, data_hash=data_hash, tokenizer=tokenizer)
    later = info.replace(held_out=held_out_rows(info, parsed.train).replace(rows=7))  # of a stage with other batches

    def ids(info: RunInfo, world: int) -> torch.Tensor:
        """The rows of all ranks, without padding."""
        of_ranks = [held_out(info, parsed.train, Ranks(rank, world, torch.device("cpu"), 1)) for rank in range(world)]
        assert len({batch.ids_BT.shape for shares in of_ranks for batch in shares}) == 1
        batches = [batch for shares in zip(*of_ranks, strict=True) for batch in shares]
        return torch.cat([batch.ids_BT[batch.real_BT.any(1)] for batch in batches])

    for each, num_rows in ((info, 10), (later, 7)):
        assert len(ids(each, 1)) == num_rows
        assert all(torch.equal(ids(each, world), ids(each, 1)) for world in (2, 3, 4, 16))


@pytest.mark.slow
def test_healing_measures_on_the_rows_of_pre_training(
    stretto: Run, recipe: Path, healing: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, corner, healed = tmp_path / "run", tmp_path / "run" / "corner", tmp_path / "run" / "healed"
    exact = ("--set", "train.dtype=float32")  # else each stage measures which dtype is faster
    assert stretto("pretrain", recipe, "-o", run, "--data", text, *exact).code == 0
    assert stretto("extract", run, "--subnet", "corner", "-o", corner).code == 0
    # another number and length of rows, and other batches, than the recipe of pre-training
    other = ("--set", "train.eval_rows=4", "--set", "train.seq_len=16", "--set", "train.micro_batches=4")
    described = []
    for module in (checkpoint, streamed):
        monkeypatch.setattr(module, "describe", lambda folder: described.append(folder) or describe(folder))
    done = stretto("heal", corner, "-o", healed, "--data", text, "--recipe", healing, *other, *exact)
    assert described.count(corner) == 2, "once before text is tokenised, once with the weights"
    assert done.code == 0 and "not comparable" not in done.out
    before = [row["loss/corner"] for row in read_metrics(run) if "loss/corner" in row][-1]
    first = read_metrics(tmp_path / "run" / "healed.run")[0]
    assert first["step"] == 0 and first["loss/full"] == pytest.approx(before, abs=1e-5)
    rows = [read_lineage(folder).config["held_out"] for folder in (run / "checkpoint", healed)]
    assert rows[0] == rows[1] and (rows[0]["rows"], rows[0]["seq_len"]) == (16, 32)
    assert "not comparable" not in curves_caption(gather(run))


@pytest.mark.slow
def test_a_loss_on_other_rows_is_marked(stretto: Run, recipe: Path, healing: Path, text: Path, tmp_path: Path) -> None:
    run, corner, healed = tmp_path / "run", tmp_path / "run" / "corner", tmp_path / "run" / "healed"
    assert stretto("pretrain", recipe, "-o", run, "--data", text).code == 0
    assert stretto("extract", run, "--subnet", "corner", "-o", corner).code == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.jsonl").write_text(
        "".join(f'{{"text": "{n} apples and {n} pears"}}\n' for n in range(600))
    )
    done = stretto("heal", corner, "-o", healed, "--data", tmp_path / "other", "--recipe", healing)
    assert done.code == 0 and "of other text than in the stages before" in done.out
    rows = [read_lineage(folder).config["held_out"]["hash"] for folder in (run / "checkpoint", healed)]
    assert rows[0] != rows[1]
    assert "on other held-out rows than pre-training: not comparable" in curves_caption(gather(run))
