"""Lineage and receipts survive the disk, and say so when they did not; costs are measured once, and nothing is added twice."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.base.records import (
    LINEAGE_FILE,
    Elsewhere,
    Lineage,
    Meter,
    Receipt,
    break_even,
    family,
    file_sha256,
    git_commit,
    hash_files,
    history,
    ledger,
    new_lineage,
    process_peak_bytes,
    read_lineage,
    write_lineage,
)

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
        (_change(receipt={"stage": "heal"}), r"receipt\.device: missing; add it"),
        (_drop_commit, "git_commit: missing; add it"),  # never made up on reading
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

    def digests(*paths: Path) -> dict[str, str]:
        return {path.name: file_sha256(path) for path in paths}

    first = hash_files(digests(one, two))
    assert hash_files(digests(two, one)) == first
    told = subprocess.run(
        "sha256sum *.safetensors | sha256sum", cwd=tmp_path, shell=True, capture_output=True, check=True
    )
    assert told.stdout.decode().split()[0] == first
    one.write_bytes(b"c")
    two.write_bytes(b"ab")
    assert hash_files(digests(one, two)) != first


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


def stage(name: str, flops: int, *parents: Lineage, run_id: str | None = None) -> Lineage:
    return new_lineage(
        name=name,
        stage=name,
        run_id=run_id or name,
        parents=parents,
        weights_hash="",
        total_params=1,
        active_params=1,
        receipt=Receipt(stage=name, device="a CPU", flops=flops, tokens=flops // 10, wall_s=1.0),
    )


def ticks(*times: float) -> Iterator[float]:
    return iter(times)


def test_a_meter_counts_work_and_the_time_inside_its_blocks() -> None:
    clock = ticks(0.0, 10.0, 100.0, 105.0)
    meter = Meter("pretrain", "a GPU", num_devices=2, clock=lambda: next(clock))
    with meter:
        meter.add(flops=3, tokens=2)
    with meter:
        meter.add(flops=4, tokens=1, bytes_written=9, bytes_read=8, sandbox_s=0.5)
    assert meter.receipt(peak_memory_bytes=77) == Receipt(
        stage="pretrain",
        device="a GPU",
        num_devices=2,
        flops=7,
        tokens=3,
        wall_s=15.0,
        device_s=30.0,
        sandbox_s=0.5,
        peak_memory_bytes=77,
        bytes_read=8,
        bytes_written=9,
    )


def test_a_receipt_taken_while_running_includes_the_open_block_once() -> None:
    clock = ticks(0.0, 4.0, 6.0)
    meter = Meter("pretrain", "a CPU", clock=lambda: next(clock))
    with meter:
        assert meter.receipt(0).wall_s == 4.0
    assert meter.receipt(0).wall_s == 6.0


def test_a_resumed_stage_costs_what_both_attempts_cost() -> None:
    spent = Receipt(stage="heal", device="a CPU", flops=5, wall_s=2.0, device_s=2.0, peak_memory_bytes=50)
    clock = ticks(0.0, 1.0)
    meter = Meter("heal", "a CPU", spent=spent, clock=lambda: next(clock))
    with meter:
        meter.add(flops=1)
    total = meter.receipt(peak_memory_bytes=40)
    assert (total.flops, total.wall_s, total.peak_memory_bytes, total.stage) == (6, 3.0, 50, "heal")


def test_a_meter_refuses_the_receipt_of_another_stage() -> None:
    with pytest.raises(AssertionError, match="cannot resume from"):
        Meter("heal", "a CPU", spent=Receipt(stage="pretrain", device="a CPU"))


def test_the_peak_of_this_process_is_in_bytes() -> None:
    held = bytearray(64 << 20)
    held[::4096] = b"x" * len(held[::4096])
    assert (64 << 20) < process_peak_bytes() < (1 << 40)


def test_a_model_alone_and_with_its_parent() -> None:
    base = stage("pretrain", 1000)
    healed = stage("heal", 50, stage("extract", 3, base))
    cost = ledger(healed)
    assert [(row.name, row.role) for row in cost.rows] == [("pretrain", "parent"), ("extract", "own"), ("heal", "own")]
    assert (cost.alone.flops, cost.with_parents.flops) == (53, 1053)
    assert cost.alone.stage == "extract + heal"


def test_a_model_from_scratch_has_no_parent() -> None:
    cost = ledger(stage("pretrain", 1000))
    assert cost.alone == cost.with_parents == cost.rows[0].receipt


def test_a_shared_ancestor_counts_once() -> None:
    base = stage("pretrain", 1000)
    corner = stage("extract", 1, base)
    experts = stage("expert-a", 10, corner), stage("expert-b", 20, corner)
    merged = stage("distill", 100, *experts)
    assert [each.name for each in history(merged)] == ["pretrain", "extract", "expert-a", "expert-b", "distill"]
    assert ledger(merged).with_parents.flops == 1131


def test_what_came_before_a_cut_is_the_parent() -> None:
    adopted = stage("adopt", 1)
    elastic = stage("elasticize", 200, adopted)
    assert [row.role for row in ledger(elastic).rows] == ["parent", "own"]
    small, smaller = (
        stage(name, own, stage("extract", 2, elastic, run_id=f"cut-{name}")) for name, own in (("a", 30), ("b", 10))
    )
    assert [row.role for row in ledger(small).rows] == ["parent", "parent", "own", "own"]
    sizes = family([small, smaller], [500] * 2)
    assert (sizes.parent_flops, [row.own_flops for row in sizes.rows]) == (201, [32, 12])


def test_what_a_checkpoint_from_elsewhere_cost_is_unknown_and_never_0(tmp_path: Path) -> None:
    unknown = stage("adopt", 5).replace(adopted=Elsewhere())
    cost = ledger(stage("heal", 7, stage("extract", 1, unknown)))
    assert cost.adopted == (("adopt", Elsewhere(flops=None, tokens=None)),)
    assert cost.with_parents.flops == 13
    write_lineage(tmp_path, unknown)
    assert read_lineage(tmp_path) == unknown


def test_a_run_that_went_on_includes_its_earlier_record() -> None:
    early, late = stage("pretrain", 400, run_id="r"), stage("pretrain", 1000, run_id="r")
    merged = stage("distill", 5, stage("a", 1, late), stage("b", 2, early))
    assert ledger(merged).with_parents.flops == 1008


def test_a_family_pays_for_its_parent_once() -> None:
    base = stage("pretrain", 1000)
    corner = stage("corner", 60, stage("extract", 2, base))
    middle = stage("middle", 80, stage("extract-2", 4, base))
    sizes = family([base, middle, corner], [900, 600, 300])
    assert [row.own_flops for row in sizes.rows] == [0, 84, 62]
    assert (sizes.parent_flops, sizes.family_flops, sizes.alone_flops) == (1000, 1146, 1800)
    assert sizes.share_of_alone == pytest.approx(1146 / 1800)
    assert sizes.share_of_largest == pytest.approx(1146 / 900)
    # 1000 + n * 146/3 against n * 600: 1.81…
    assert sizes.break_even == 2


def test_a_parent_costs_a_family_no_less_than_an_ordinary_run() -> None:
    base = stage("pretrain", 700)  # an elastic run skips layers and experts in some steps
    sizes = family([base, stage("corner", 60, base)], [900, 300])
    assert (sizes.parent_flops, sizes.is_parent_raised, sizes.family_flops) == (900, True, 960)
    dear = family([stage("pretrain", 1000)], [900])
    assert (dear.parent_flops, dear.is_parent_raised) == (1000, False)


def test_a_stage_that_two_sizes_share_counts_with_the_first() -> None:
    shared = stage("sft", 10, stage("pretrain", 1000))
    sizes = family([stage("a", 1, shared), stage("b", 2, shared)], [500, 500])
    assert [row.own_flops for row in sizes.rows] == [11, 2]
    assert sizes.family_flops == 1013


@given(st.integers(0, 2**70), st.integers(0, 2**70), st.integers(0, 2**70), st.integers(1, 9))
def test_break_even_is_the_first_n_that_pays(parent: int, own: int, alone: int, num_sizes: int) -> None:
    def pays(n: int) -> bool:
        return parent * num_sizes + n * own <= n * alone

    n = break_even(parent, own, alone, num_sizes)
    if n is None:
        assert own >= alone
        assert not pays(1)
    else:
        assert pays(n)
        assert n == 1 or not pays(n - 1)


def test_a_session_shows_a_lineage_as_the_table_of_its_stages() -> None:
    lines = [line.split() for line in repr(CHILD).splitlines()]
    assert lines[1] == ["name", "stage", "params", "active", "tokens", "FLOPs", "time", "created"]
    assert [line[:4] for line in lines[3:5]] == [["base", "pretrain", "30", "10"], ["small", "heal", "10", "5"]]
    assert str(CHILD) == repr(CHILD) and CHILD._repr_html_().startswith("<table>")
