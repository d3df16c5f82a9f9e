"""Two ranks are one: the same gradient, the same report, and a snapshot that either reads."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch

from stretto.base.errors import UserError
from stretto.learning.remote_trainer import RemoteTrainer
from stretto.learning.trainer import TrainerRole
from stretto.model.parallel import Ranks, join
from stretto.runtime.store import UrlStore, send_folder
from tests.flow.policies import checkpoint, recipe
from tests.learning.rank_worker import PLAN
from tests.learning.test_trainer import refs_of
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SAME = 1e-6
"""Relative difference of gradients that another order of summation may make."""


def launch(world: int, start: Path, refs: Path, out: Path, *store: str) -> None:
    out.mkdir()
    worker = str(Path(__file__).with_name("rank_worker.py"))
    for done in run_ranks(world, [sys.executable, worker, *map(str, (start, refs, out)), *store]):
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path: Path) -> None:
    start = checkpoint(tmp_path / "start")
    refs = tmp_path / "refs.pickle"
    refs.write_bytes(pickle.dumps([refs_of(step, tmp_path) for step in range(2)]))
    for world in (1, 2):
        launch(world, start, refs, tmp_path / f"world-{world}")
    one, *two = (
        json.loads((tmp_path / name).read_text(encoding="utf-8"))
        for name in ("world-1/scalars-0.json", "world-2/scalars-0.json", "world-2/scalars-1.json")
    )
    for step in range(2):
        timed = {name for name in one[step] if name.startswith("time/")}
        # the place of an empty row; and what is a difference of nearly equal numbers
        loose = timed | {"batch/padding", "batch/positions", "mismatch/same_k3_max"}
        assert two[0][step].keys() == one[step].keys()
        for name in one[step].keys() - timed:
            assert two[0][step][name] == two[1][step][name], name
        for name in one[step].keys() - loose:
            # the first step's gradient is of equal weights; later ones inherit AdamW's answer to its roundings
            limit = SAME if name == "optim/grad_norm" and step == 0 else 1e-3
            assert two[0][step][name] == pytest.approx(one[step][name], rel=limit, abs=1e-5), (step, name)
    alone, shared = (torch.load(tmp_path / f"world-{world}" / "weights-0.pt") for world in (1, 2))
    assert alone.keys() == shared.keys()
    for name, tensor in alone.items():
        assert torch.allclose(shared[name], tensor, atol=1e-4), name
    (*one_T, tolerance), (*two_T, _) = (
        json.loads((tmp_path / f"world-{world}" / "canary.json").read_text(encoding="utf-8")) for world in (1, 2)
    )
    assert two_T == pytest.approx(one_T, abs=tolerance)
    again = TrainerRole(PLAN, tmp_path / "world-2" / "run", start, ranks=join("cpu"))
    assert again.resume() == {"step": 2} and again.version == 2


@pytest.mark.slow
def test_ranks_without_a_shared_folder_write_one_snapshot_and_any_machine_resumes_it(tmp_path: Path) -> None:
    start, store = checkpoint(tmp_path / "start"), tmp_path / "store"
    launch(2, start, tmp_path / "no-refs", tmp_path / "out", store.as_uri())
    assert not list((tmp_path / "out" / "machine-1" / "snapshots").iterdir()), "complete on the first machine only"
    parts = sorted(path.name for path in (store / "run" / "snapshot-parts").iterdir())
    assert parts == ["step-0000002-1", "step-0000004-1", "step-0000006-1"]
    (tmp_path / "alone").mkdir()
    alone = RemoteTrainer(PLAN, tmp_path / "alone", start, ranks=join("cpu"), store=UrlStore(store.as_uri(), "run"))
    assert alone.resume() == {"step": 6}
    state = torch.load(tmp_path / "out" / "weights-0.pt")
    assert all(torch.equal(state[name], each) for name, each in alone._model.state_dict().items())


def test_a_store_that_lost_its_snapshots_does_not_take_the_one_on_the_disk_with_it(tmp_path: Path) -> None:
    start, folder, url = checkpoint(tmp_path / "start"), tmp_path / "machine", (tmp_path / "store").as_uri()
    folder.mkdir()

    def trainer() -> RemoteTrainer:
        return RemoteTrainer(PLAN, folder, start, ranks=join("cpu"), store=UrlStore(url, "run"))

    first = trainer()
    assert first.resume() is None
    first.version = 3
    first.save({"step": 3})
    shutil.rmtree(tmp_path / "store" / "run")
    again = trainer()
    assert again.resume() == {"step": 3} and again.version == 3
    again.version = 4
    again.save({"step": 4})
    assert UrlStore(url, "run").folders("snapshots") == ["snapshots/step-0000004"]
    shutil.rmtree(tmp_path / "store" / "run")
    next((folder / "snapshots" / "step-0000004").glob("__0_*")).unlink()  # as if the disk of another rank had it
    assert trainer().resume() is None, "a snapshot without the files of all ranks is none"


def test_a_snapshot_of_which_the_store_lost_a_part_is_passed_over(tmp_path: Path) -> None:
    start, folder, url = checkpoint(tmp_path / "start"), tmp_path / "machine", (tmp_path / "store").as_uri()
    folder.mkdir()
    store, stored = UrlStore(url, "run"), tmp_path / "store" / "run" / "snapshots"

    def trainer() -> RemoteTrainer:
        return RemoteTrainer(PLAN, folder, start, ranks=join("cpu"), store=store)

    first = trainer()
    first.resume()
    for step in (1, 2, 3):
        first.version = step
        first.save({"step": step})
    without_file = tmp_path / "without-file"
    shutil.copytree(folder / "snapshots" / "step-0000002", without_file)
    next(without_file.glob("__0_*")).unlink()  # as if the part of another rank had vanished
    store.remove_folder("snapshots/step-0000002")
    send_folder(store, without_file, "snapshots/step-0000002")
    (stored / "step-0000003" / "000001-000000").unlink()
    assert trainer().resume() == {"step": 1}
    assert store.folders("snapshots") == ["snapshots/step-0000001"]
    (stored / "step-0000001" / "000000-000000").unlink()
    assert trainer().resume() == {"step": 1}, "the one on the disk"
    assert store.folders("snapshots") == []
    assert sorted(path.name for path in folder.iterdir()) == ["fetched", "fetched.lock", "snapshots"]


@pytest.mark.parametrize("is_complete", [True, False])
def test_parts_that_a_killed_attempt_left_change_no_snapshot(tmp_path: Path, is_complete: bool) -> None:
    start, folder, url = checkpoint(tmp_path / "start"), tmp_path / "machine", (tmp_path / "store").as_uri()
    folder.mkdir()
    trainer = RemoteTrainer(PLAN, folder, start, ranks=join("cpu"), store=UrlStore(url, "run"))
    trainer.resume()
    trainer.save({"step": 0})
    (saved,) = (folder / "snapshots").glob("step-*/__0_*")
    before, old = saved.read_bytes(), tmp_path / "old"
    old.mkdir()
    (old / saved.name).write_bytes(b"of the attempt")
    part = f"snapshot-parts/{saved.parent.name}-0"
    send_folder(UrlStore(url, "run"), old, part)
    if not is_complete:
        UrlStore(url, "run").remove([f"{part}/manifest.json"])
    again = RemoteTrainer(PLAN, folder, start, ranks=join("cpu"), store=UrlStore(url, "run"))
    assert again.resume() == {"step": 0}
    assert saved.read_bytes() == before and UrlStore(url, "run").folders("snapshots")


def test_rows_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train.micro_rows: 2 rows cannot be shared by 3 ranks"):
        TrainerRole(recipe(), tmp_path, checkpoint(tmp_path / "start"), ranks=Ranks(0, 3, torch.device("cpu")))
