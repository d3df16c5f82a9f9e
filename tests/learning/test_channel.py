"""Channels: what is published is what is fetched, whatever the size of the chunks."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from stretto.base.errors import InfraError, UserError
from stretto.base.trajectory import WeightVersion
from stretto.learning import channel
from stretto.learning.channel import ChunkChannel, FolderChannel, GlooChannel, open_channel
from stretto.learning.weights import pack_state
from stretto.runtime.store import FolderStore, UrlStore
from tests.learning import gloo_end

GLOO_END = (sys.executable, "-m", "tests.learning.gloo_end")
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
    chunks = ChunkChannel(UrlStore(f"file://{tmp_path}", "run"), chunk_bytes)
    version = chunks.publish(3, state)
    fetched = chunks.fetch(version)
    assert fetched.keys() == state.keys()
    assert all(torch.equal(fetched[name], state[name]) and fetched[name].dtype == state[name].dtype for name in state)
    assert version.num_bytes == sum(each.nbytes for each in state.values())
    assert FolderChannel(tmp_path / "weights").publish(3, state).checksum == version.checksum


def test_quantised_weights_arrive_in_fp32(tmp_path: Path) -> None:
    chunks, packed = ChunkChannel(UrlStore(f"file://{tmp_path}", "run")), pack_state(STATE)
    fetched = chunks.fetch(chunks.publish(1, packed))
    folder = FolderChannel(tmp_path / "weights")
    expected = folder.fetch(folder.publish(1, packed))
    assert all(torch.equal(fetched[name], expected[name]) for name in expected)


def test_old_versions_go_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    chunks = ChunkChannel(UrlStore(f"file://{tmp_path}", "run"))
    versions = [chunks.publish(number, {"a": torch.full((4,), number)}) for number in range(4)]
    chunks.retire(keep=2)
    assert [int(chunks.fetch(version)["a"][0]) for version in versions[2:]] == [2, 3]
    with pytest.raises(UserError, match=r"no such weights: .*; publish the version again"):
        chunks.fetch(versions[1])
    with pytest.raises(UserError, match=r"checksum: is .*, version 3 was announced with 00"):
        chunks.fetch(replace(versions[3], checksum="00"))


def test_a_run_folder_that_is_shared_passes_files(tmp_path: Path) -> None:
    version = open_channel("store", FolderStore(tmp_path), tmp_path).publish(1, STATE)
    assert Path(version.location).parent == tmp_path / "weights"


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 1 << 20])
def test_what_is_published_by_gloo_is_fetched(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "BUCKET_BYTES", bucket_bytes)
    state = STATE if bucket_bytes > 1 else {name: each for name, each in STATE.items() if each.numel() < 10}
    sender = GlooChannel()
    version = sender.publish(3, state)
    fetched = GlooChannel().fetch(version)
    assert fetched.keys() == state.keys()
    assert all(torch.equal(fetched[name], state[name]) and fetched[name].dtype == state[name].dtype for name in state)
    with pytest.raises(UserError, match=r"checksum: is .*, version 3 was announced with 00"):
        GlooChannel().fetch(replace(version, checksum="00"))


def test_quantised_weights_arrive_by_gloo_in_fp32(tmp_path: Path) -> None:
    sender, packed = GlooChannel(), pack_state(STATE)
    fetched = GlooChannel().fetch(sender.publish(1, packed))
    folder = FolderChannel(tmp_path / "weights")
    expected = folder.fetch(folder.publish(1, packed))
    assert all(torch.equal(fetched[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_gloo_keeps_one_version_and_ends_with_the_channel() -> None:
    sender = GlooChannel()
    versions = []
    for number in range(3):
        state = {"a": torch.full((4,), number)}
        versions.append(sender.publish(number, state))
        sender.retire(keep=4)
        if number == 1:
            sender.fetch(versions[1])
            await_end("weights-")
            storage = weakref.ref(state["a"].untyped_storage())
            del state
    assert storage() is None, "a version that was sent is kept"
    assert int(sender.fetch(versions[2])["a"][0]) == 2
    with pytest.raises(InfraError, match=r"^gloo://127\.0\.0\.1:\d+/1: cannot be fetched: the trainer has a newer"):
        sender.fetch(versions[1])
    del sender
    gc.collect()
    with pytest.raises(InfraError, match=r"cannot be fetched: .* refused"):
        GlooChannel().fetch(versions[2])


@pytest.mark.slow
def test_an_engine_that_asks_and_dies_does_not_disturb_others() -> None:
    sender = GlooChannel(wait_s=2.0)  # for the engine that never comes
    version = sender.publish(1, STATE)
    location = urlsplit(version.location)
    store = channel._connected(str(location.hostname), int(location.port or 0), 60.0)
    store.queue_push(channel._ASKED, "anybody 1")
    assert GlooChannel().fetch(version).keys() == STATE.keys()
    await_end("weights-anybody")


@pytest.mark.slow
def test_a_receiver_that_is_killed_in_the_middle_does_not_hold_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "BUCKET_BYTES", gloo_end.BUCKET_BYTES)
    sender = GlooChannel()
    version = sender.publish(1, gloo_end.state(8 << 20))
    died = subprocess.run([*GLOO_END, "receive", version.location], check=False)
    assert died.returncode == -signal.SIGKILL
    await_end("weights-")
    assert torch.equal(GlooChannel().fetch(version)["a"], gloo_end.state(8 << 20)["a"])


@pytest.mark.slow
def test_a_sender_that_is_killed_in_the_middle_is_an_infra_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "BUCKET_BYTES", gloo_end.BUCKET_BYTES)
    command = [*GLOO_END, "send", str(8 << 20)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None
        location, checksum = sender.stdout.readline().split()
        version = WeightVersion(1, location, checksum, 8 << 20)
        assert GlooChannel().fetch(version).keys() == {"a"}
        monkeypatch.setattr(channel, "_buckets", gloo_end.then(sender.kill))
        with pytest.raises(
            InfraError, match=r"^gloo://127\.0\.0\.1:\d+/1: cannot be fetched: .*[Cc]onnection (closed|reset)"
        ):
            GlooChannel().fetch(version)


def await_end(name: str) -> None:
    """Wait until no thread has a name that begins with ``name``."""
    end_s = time.monotonic() + 60
    while running := [each.name for each in threading.enumerate() if each.name.startswith(name)]:
        assert time.monotonic() < end_s, running
        time.sleep(0.01)
