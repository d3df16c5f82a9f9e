"""Lineage and receipts survive the disk, and say so when they did not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.base.records import LINEAGE_FILE, Receipt, git_commit, hash_files, new_lineage, read_lineage, write_lineage

PARENT = new_lineage(
    name="base",
    stage="pretrain",
    weights_hash="aa",
    data_hash="dd",
    config={"train": {"steps": 3, "anchors": [0.1, 0.2]}, "name": None},
    total_params=30,
    active_params=10,
    receipt=Receipt(stage="pretrain", device="a CPU", flops=2**70 + 1, tokens=7, wall_s=0.1, device_s=0.2),
)
CHILD = new_lineage(
    name="small",
    stage="heal",
    parents=(PARENT,),
    weights_hash="bb",
    total_params=10,
    active_params=5,
    receipt=Receipt(stage="heal", device="a CPU"),
)

receipts = st.builds(
    Receipt,
    stage=st.sampled_from(["pretrain", "heal", "extract"]),
    device=st.sampled_from(["a CPU", "a GPU"]),
    num_devices=st.integers(1, 8),
    flops=st.integers(0, 2**80),
    tokens=st.integers(0, 2**50),
    wall_s=st.integers(0, 1000).map(float),
    device_s=st.integers(0, 1000).map(float),
    peak_memory_bytes=st.integers(0, 2**40),
)


def test_a_lineage_with_its_parents_survives_the_disk(tmp_path: Path) -> None:
    write_lineage(tmp_path, CHILD)
    read = read_lineage(tmp_path)
    assert read == CHILD
    assert read.parents[0].receipt.flops == 2**70 + 1  # more than a float can count


def test_two_runs_have_two_ids_and_a_resume_keeps_its_own() -> None:
    assert PARENT.run_id != CHILD.run_id
    fields = {
        name: getattr(PARENT, name) for name in ("name", "stage", "weights_hash", "total_params", "active_params")
    }
    assert new_lineage(**fields, receipt=PARENT.receipt, run_id=PARENT.run_id).run_id == PARENT.run_id


@given(receipts, receipts, receipts)
def test_receipts_add_in_any_grouping(a: Receipt, b: Receipt, c: Receipt) -> None:
    assert (a + b) + c == a + (b + c)
    assert (a + b).flops == a.flops + b.flops
    assert (a + b).peak_memory_bytes == max(a.peak_memory_bytes, b.peak_memory_bytes)


def test_a_sum_names_each_stage_once() -> None:
    extract, heal = (Receipt(stage=stage, device="a CPU") for stage in ("extract", "heal"))
    assert (extract + heal + heal).stage == "extract + heal"
    assert (extract + heal + heal).device == "a CPU"


def _cut(text: str) -> str:
    return text[: len(text) // 2]


def _drop_commit(text: str) -> str:
    return json.dumps({name: value for name, value in json.loads(text).items() if name != "git_commit"})


def _change(**changes: object) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), **changes})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, "not readable as JSON"),
        (lambda text: "[]", "schema_version: missing"),
        (lambda text: '{"model_type": "glm4_moe"}', "schema_version: missing"),
        (_change(schema_version=99), "schema_version: 99 cannot be read"),
        (_change(receipt={"stage": "heal"}), r"receipt\.device: Field required"),
        (_drop_commit, "git_commit: Field required"),  # never made up on reading
        (_change(total_params=-1), r"total_params: .*greater than or equal to 0"),
        (_change(wieghts_hash="x"), r"wieghts_hash: unknown key \(did you mean 'weights_hash'\?\)"),
    ],
)
def test_a_damaged_or_foreign_file_is_named(tmp_path: Path, damage: Callable[[str], str], message: str) -> None:
    write_lineage(tmp_path, CHILD)
    path = tmp_path / LINEAGE_FILE
    path.write_text(damage(path.read_text()))
    with pytest.raises(UserError, match=rf"lineage\.json: {message}") as caught:
        read_lineage(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_lineage_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a checkpoint"):
        read_lineage(tmp_path)


def test_the_hash_depends_on_names_and_contents_but_not_on_order(tmp_path: Path) -> None:
    one, two = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    one.write_bytes(b"ab")
    two.write_bytes(b"c")
    first = hash_files([one, two])
    assert hash_files([two, one]) == first
    one.write_bytes(b"a")
    two.write_bytes(b"bc")
    assert hash_files([one, two]) != first


def test_the_commit_is_that_of_the_checkout_that_tracks_the_code(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, check=True)
        return done.stdout.decode().strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert git_commit(package) is None  # no checkout
    git("init", "--quiet")
    (tmp_path / "other").write_text("")
    git("add", "other")
    git("commit", "--quiet", "-m", "Another project")
    assert git_commit(package) is None  # a checkout of something else, as around an installed package
    git("add", ".")
    git("commit", "--quiet", "-m", "The code")
    git("tag", "v1")
    assert git_commit(package) == git("rev-parse", "HEAD")
    (package / "__init__.py").write_text("changed")
    assert git_commit(package) == git("rev-parse", "HEAD") + "-dirty"
