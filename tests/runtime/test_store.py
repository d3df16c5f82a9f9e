"""Stores: every kind keeps the same promises, and one that does not answer is reported in one line."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bench.common.s3 import s3_server
from stretto.base.errors import InfraError, UserError
from stretto.runtime import store as module
from stretto.runtime.store import (
    FolderStore,
    IncompleteError,
    RemoteStore,
    Store,
    UrlStore,
    fetch_folder,
    has_folder,
    send_folder,
)
from tests.flow.remote_servers import running


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(scope="module")
def ray_store() -> Iterator[Any]:
    import ray

    from stretto.runtime.ray import RayRuntime
    from stretto.runtime.ray_store import open_ray_store

    runtime = asyncio.run(RayRuntime.open("local"))
    yield open_ray_store("test", copies=1)
    del runtime
    ray.shutdown()


KINDS = ["folder", "relative folder", "url", "s3", pytest.param("ray", marks=pytest.mark.slow)]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    kind = request.param
    if kind == "relative folder":
        monkeypatch.chdir(tmp_path)
        return FolderStore("run")
    if kind == "folder":
        return FolderStore(tmp_path / "run")
    if kind == "ray":
        made = request.getfixturevalue("ray_store")
        for folder in ("groups", "tokens", "weights", "snapshots"):
            made.remove(made.names(folder))
        return made
    url = f"file://{tmp_path}" if kind == "url" else request.getfixturevalue("s3")
    return UrlStore(url, tmp_path.name)


@pytest.mark.parametrize("store", KINDS, indirect=True)
def test_what_is_written_is_read_listed_and_removed(store: Store) -> None:
    assert store.names("groups") == []
    first, second = (store.write(f"groups/{name}.group", name.encode() * 9, durable=True) for name in "ba")
    assert store.read(first) == b"b" * 9 and store.read(second) == b"a" * 9
    assert store.names("groups") == ["groups/a.group", "groups/b.group"]
    store.write("groups/a.group", b"new")
    assert store.read(second) == b"new"
    assert store.missing([first, second, first[:-1]]) == {first[:-1]}
    store.remove([first, first])
    assert store.names("groups") == ["groups/a.group"] and store.missing([first]) == {first}
    with pytest.raises(FileNotFoundError):
        store.read(first)


@pytest.mark.parametrize("store", KINDS, indirect=True)
def test_a_log_is_appended_to_in_order_and_begun_anew(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.read("tokens/1.log")
    store.write("tokens/1.log", b"start ")
    store.write("tokens/2.log", b"other")
    for number in range(20):
        store.append("tokens/1.log", b"%d " % number)
    assert store.read("tokens/1.log") == b"start " + b"".join(b"%d " % number for number in range(20))
    assert store.names("tokens") == ["tokens/1.log", "tokens/2.log"]
    store.write("tokens/1.log", b"anew ")
    store.append("tokens/1.log", b"end")
    assert store.read("tokens/1.log") == b"anew end"
    store.remove(["tokens/1.log"])
    assert store.names("tokens") == ["tokens/2.log"]


REMOTE = KINDS[2:]


@pytest.mark.parametrize("store", REMOTE, indirect=True)
def test_chunks_and_folders_travel(store: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    chunks = [os.urandom(size) for size in (5, 3000, 1)]
    location = store.write_chunks("weights/7", chunks)
    assert [bytes(chunk) for chunk in store.read_chunks(location)] == chunks
    store.remove_folder(location)
    with pytest.raises(FileNotFoundError):
        list(store.read_chunks(location))
    sent = tmp_path / "sent"
    (sent / "below").mkdir(parents=True)
    (sent / "below" / "large").write_bytes(np.arange(5000, dtype=np.uint8).tobytes())
    (sent / "empty").touch()
    assert not has_folder(store, "snapshots/step-1")
    send_folder(store, sent, "snapshots/step-1")
    assert has_folder(store, "snapshots/step-1") and store.folders("snapshots") == ["snapshots/step-1"]
    fetch_folder(store, "snapshots/step-1", tmp_path / "fetched")
    for path in sent.rglob("*"):
        if path.is_file():
            assert (tmp_path / "fetched" / path.relative_to(sent)).read_bytes() == path.read_bytes()
    store.remove(["snapshots/step-1/000000-000002"])
    with pytest.raises(IncompleteError, match="snapshots/step-1: incomplete: 000000-000002 is missing; continue with"):
        fetch_folder(store, "snapshots/step-1", tmp_path / "fetched")
    assert sorted(path.name for path in tmp_path.glob("fetched/*")) == ["below", "empty"], "unchanged"
    store.remove_folder("snapshots/step-1")
    assert not has_folder(store, "snapshots/step-1")
    with pytest.raises(UserError, match="snapshots/step-1: incomplete"):
        fetch_folder(store, "snapshots/step-1", tmp_path / "again")


def test_another_process_sees_what_was_flushed(s3: str) -> None:
    store = UrlStore(s3, "shared")
    store.check()
    store.append("tokens/3.log", b"some")
    store.flush()
    assert pickle.loads(pickle.dumps(store)).read("tokens/3.log") == b"some"
    store.destroy()
    assert store.names("tokens") == []


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (
            "s3://bucket/run?endpoint_override=http://127.0.0.1:9&region=us-east-1",
            "no server answers at http://127.0.0.1:9: Connection refused",
        ),
        ("s3://bucket/run?endpoint_override=host:port", "port"),
        ("s4://bucket/run", "s4"),
        ("file:///proc/run", "proc"),
    ],
)
def test_a_store_that_refuses_is_one_line_without_keys(url: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    with pytest.raises(UserError, match=r"^store: .*: .*; check the address, its options and your keys$") as caught:
        UrlStore(url, "run").check()
    message = str(caught.value)
    assert problem in message and "secret" not in message and "\n" not in message


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "AccessDenied"),
        (403, "InvalidAccessKeyId"),
        (403, "SignatureDoesNotMatch"),
        (403, "QuotaExceeded"),
        (507, "Full"),
    ],
)
def test_a_store_that_refuses_in_the_middle_is_told_at_once(
    status: int, code: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong keys and a full store: no wait mends them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-the-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")

    async def refuse(http: Request) -> Response:
        return Response(
            f"<Error><Code>{code}</Code><Message>no</Message></Error>", status, media_type="application/xml"
        )

    with running(Starlette(routes=[Route("/{path:path}", refuse, methods=["GET", "PUT", "POST", "DELETE"])])) as url:
        store = UrlStore(f"s3://bucket/runs?endpoint_override={url}&region=us-east-1", "run")
        with pytest.raises(
            UserError, match=r"^store: cannot write s3://bucket/runs/run/groups/a: .*; make room"
        ) as caught:
            store.write("groups/a", b"content")
        store.append("tokens/1.log", b"lost")
        store.flush()
        with pytest.raises(UserError, match="continue with --resume"):
            store.append("tokens/1.log", b"lost")
        with pytest.raises(UserError):
            store.write("tokens/1.log", b"")  # what was appended is dropped, so that nothing is written after the test
    told = str(caught.value) + caplog.text
    assert "\n" not in str(caught.value) and "of-the-test" not in told


def test_a_ray_store_without_room_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    from stretto.runtime.ray_store import RayStore

    def full(content: Any) -> Any:
        raise ray.exceptions.OutOfDiskError("Local disk is full\nmany more lines")

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(
        UserError, match=r"^store: ray: cannot write weights/1: .*--object-store-memory, or free"
    ) as caught:
        RayStore([]).write_chunks("weights/1", [b"content"])
    assert "\n" not in str(caught.value)


def test_a_server_that_is_gone_is_waited_for_and_then_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = UrlStore(f"file://{tmp_path}", "run")
    monkeypatch.setattr(module, "RETRY_S", 0.3)
    (tmp_path / "run").write_text("a file where the folder was")
    with pytest.raises(InfraError, match=r"^store: cannot write file://.*/run/groups/a for 0.3 s: "):
        store.write("groups/a", b"")
    assert caplog.text.count("trying again for 0.3 s") == 1
    store.append("tokens/1.log", b"one ")
    store.flush()
    with pytest.raises(InfraError, match="cannot write"):
        store.append("tokens/1.log", b"refused ")
    (tmp_path / "run").unlink()
    monkeypatch.setattr(module, "RETRY_S", 60.0)
    while True:  # the writer may have failed once more meanwhile
        with suppress(InfraError):
            store.append("tokens/1.log", b"two")
            break
    assert store.read("tokens/1.log") == b"one two"
