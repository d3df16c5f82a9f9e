"""Free memory: what every control group above this process leaves, in both versions of them."""

from __future__ import annotations

import platform
import resource
from pathlib import Path

import psutil
import pytest
import torch

from stretto.ops.memory import free_bytes, freed_memory_kept, group_free_bytes

NAMES = {
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "v2": ("memory.max", "memory.current", "inactive_file"),
}


@pytest.fixture(params=sorted(NAMES))
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def write(folder: Path, version: str, limit: str, used: int, reclaimable: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, used_name, cache_name = NAMES[version]
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{cache_name} {reclaimable}\n")


def groups(tmp_path: Path, version: str, path: str) -> tuple[Path, Path, Path]:
    """The membership file, the root, and the process's own group."""
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    membership.write_text(f"9:cpu:/elsewhere\n0::{path}\n" if version == "v2" else f"4:memory:{path}\n3:cpuset:/\n")
    top = root / "memory" if version == "v1" else root
    top.mkdir(parents=True)
    return membership, root, top / path.lstrip("/")


def test_the_tightest_group_counts(tmp_path: Path, version: str) -> None:
    membership, root, own = groups(tmp_path, version, "/user/job")
    write(own, version, "9000" if version == "v1" else "max", 500)
    write(own.parent, version, "5000", 2000)
    assert group_free_bytes(membership, root) == 3000
    write(own, version, "1600", 500)
    assert group_free_bytes(membership, root) == 1100
    write(own, version, "1600", 1500, reclaimable=900)  # files that were read and can be dropped
    assert group_free_bytes(membership, root) == 1000
    write(own, version, "1600", 1700)
    assert group_free_bytes(membership, root) == 0


def test_a_container_sees_only_the_root(tmp_path: Path, version: str) -> None:
    membership, root, own = groups(tmp_path, version, "/docker/abc")
    write(own.parents[1], version, "4000", 1000)
    assert group_free_bytes(membership, root) == 3000


def test_without_groups_there_is_no_limit(tmp_path: Path, version: str) -> None:
    membership, root, _ = groups(tmp_path, version, "/user/job")
    assert group_free_bytes(membership, root) == 1 << 62
    assert group_free_bytes(tmp_path / "no such file", root) == 1 << 62


def test_this_machine() -> None:
    assert 0 < free_bytes(torch.device("cpu")) <= psutil.virtual_memory().total


def pages_of_a_second_block() -> int:
    """Pages that the system clears for a block of almost 64 MiB, after one of 64 MiB was freed."""
    torch.empty(1 << 24).fill_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty((1 << 24) - (1 << 16)).fill_(1)  # aligned blocks need some room, so one of 64 MiB might not fit
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_training_keeps_freed_blocks_and_returns_them_at_its_end() -> None:
    with freed_memory_kept(torch.device("cpu")):
        assert pages_of_a_second_block() < 1000
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not huge.is_file() or "[always]" not in huge.read_text():
        assert pages_of_a_second_block() > 10_000, "64 MiB are 16,384 pages"
