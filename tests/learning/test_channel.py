"""Channels: what is published is what is fetched, whatever the size of the chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stretto.base.errors import UserError
from stretto.learning.channel import ChunkChannel, FolderChannel, open_channel
from stretto.learning.weights import pack_state
from stretto.runtime.store import FolderStore, UrlStore

STATE = {
    "blocks.0.qkv.weight": torch.randn(130, 128, generator=torch.Generator().manual_seed(0)),
    "bias": torch.arange(7, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "bytes": torch.arange(9, dtype=torch.uint8)[::2],
}


@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 20])
def test_what_is_published_is_fetched(tmp_path: Path, chunk_bytes: int) -> None:
    state = STATE if chunk_bytes > 1 else {name: each for name, each in STATE.items() if each.numel() < 10}
    channel = ChunkChannel(UrlStore(f"file://{tmp_path}", "run"), chunk_bytes)
    version = channel.publish(3, state)
    fetched = channel.fetch(version)
    assert fetched.keys() == state.keys()
    assert all(torch.equal(fetched[name], state[name]) and fetched[name].dtype == state[name].dtype for name in state)
    assert version.num_bytes == sum(each.nbytes for each in state.values())
    assert FolderChannel(tmp_path / "weights").publish(3, state).checksum == version.checksum


def test_quantised_weights_arrive_in_fp32(tmp_path: Path) -> None:
    channel, packed = ChunkChannel(UrlStore(f"file://{tmp_path}", "run")), pack_state(STATE)
    fetched = channel.fetch(channel.publish(1, packed))
    folder = FolderChannel(tmp_path / "weights")
    expected = folder.fetch(folder.publish(1, packed))
    assert all(torch.equal(fetched[name], expected[name]) for name in expected)


def test_old_versions_go_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    channel = ChunkChannel(UrlStore(f"file://{tmp_path}", "run"))
    versions = [channel.publish(number, {"a": torch.full((4,), number)}) for number in range(4)]
    channel.retire(keep=2)
    assert [int(channel.fetch(version)["a"][0]) for version in versions[2:]] == [2, 3]
    with pytest.raises(UserError, match=r"no such weights: .*; publish the version again"):
        channel.fetch(versions[1])
    with pytest.raises(UserError, match=r"checksum: is .*, version 3 was announced with 00"):
        channel.fetch(replace(versions[3], checksum="00"))


def test_a_run_folder_that_is_shared_passes_files(tmp_path: Path) -> None:
    version = open_channel(FolderStore(tmp_path), tmp_path).publish(1, STATE)
    assert Path(version.location).parent == tmp_path / "weights"
