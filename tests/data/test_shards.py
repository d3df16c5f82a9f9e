from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.base.errors import UserError
from stretto.data.holdout import Holdout
from stretto.data.shards import MANIFEST, Manifest, TokenSet, in_order, tokenise
from stretto.data.sources import Document
from stretto.text.tokenizer import train_tokenizer
from tests.data.conftest import Bytes, texts


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@dataclass(frozen=True)
class Watched(Bytes):
    """Notes every text that is encoded, in a file."""

    log: str = ""
    fails_at: str = ""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        with open(self.log, "a") as handle:
            handle.writelines(f"{text.split()[0]}\n" for text in texts)
        if any(text.startswith(f"{self.fails_at} ") for text in texts):
            raise UserError("made to fail")
        return super().encode_batch(texts)


def test_documents_come_back(tmp_path: Path) -> None:
    documents = list(texts(100))
    manifest = tokenise(
        {"train": documents, "extra": texts(3, "x")}, Bytes(), tmp_path / "d", processes=1, shard_bytes=1000
    )
    data = TokenSet(tmp_path / "d", verify=True)
    assert [bytes(data.document(n)[:-1].astype(np.uint8)).decode() for n in range(100)] == [d.text for d in documents]
    for domain in {document.domain for document in documents}:
        assert data.of_domain(domain).tolist() == [n for n, d in enumerate(documents) if d.domain == domain]
    assert all(data.document(n)[-1] == 256 for n in range(100))
    assert data.lengths(np.arange(100)).tolist() == [len(d.text) + 1 for d in documents]
    assert data.all_lengths.tolist() == data.lengths(np.arange(100)).tolist()
    assert data.lengths(np.array([99, 0, 50])).tolist() == [len(documents[n].text) + 1 for n in (99, 0, 50)]
    assert (data.num_documents, manifest.num_documents) == (100, 103)
    assert len(manifest.splits["train"]) >= 4
    assert manifest.num_bytes == manifest.num_tokens - manifest.num_documents
    assert TokenSet(tmp_path / "d", "extra").num_documents == 3


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_token_width_follows_the_vocabulary(tmp_path: Path, vocab_size: int, itemsize: int) -> None:
    tokenizer = Bytes(vocab_size=vocab_size, eos_id=vocab_size - 1)
    tokenise({"train": texts(5)}, tokenizer, tmp_path, processes=1)
    document = TokenSet(tmp_path).document(4)
    assert (document.itemsize, document[-1]) == (itemsize, vocab_size - 1)


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    tokenizer = train_tokenizer((document.text for document in texts(50)), 300)
    for processes in (1, 3):
        folder = tmp_path / str(processes)
        tokenise(
            {"train": texts(300)},
            tokenizer,
            folder,
            processes=processes,
            holdout=Holdout("documents", 0.1),
            shard_bytes=2000,
        )
    assert files_of(tmp_path / "1") == files_of(tmp_path / "3")
    assert len(files_of(tmp_path / "1")) > 10  # several shards of each split


def test_what_one_shard_holds_is_encoded_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To start a process took half a minute once, on a busy machine, for a second's text."""
    asked = []

    def noted(processes: int, *others: Any) -> Any:
        asked.append(processes)
        return in_order(1, *others)

    monkeypatch.setattr("stretto.data.shards.in_order", noted)
    size = sum(len(document.text) for document in texts(40))
    for shard_bytes in (size, size - 1):
        told = {"processes": 7, "holdout": Holdout("documents", 0.1), "shard_bytes": shard_bytes}
        tokenise({"train": texts(40)}, Bytes(), tmp_path / str(shard_bytes), **told)
    assert asked == [1, 7]


def test_split_by_hash_is_stable(tmp_path: Path) -> None:
    def held_out(documents: list[Document], name: str) -> set[str]:
        tokenise({"train": documents}, Bytes(), tmp_path / name, processes=1, holdout=Holdout("documents", 0.2))
        data = TokenSet(tmp_path / name, "val")
        return {bytes(data.document(n)[:-1].astype(np.uint8)).decode() for n in range(data.num_documents)}

    documents = list(texts(400))
    some, more = held_out(documents[:200], "some"), held_out(documents[::-1] + documents[:5], "more")
    assert some == more & {document.text for document in documents[:200]}
    assert 40 < len(more) < 130  # 400 draws at 0.2: mean 80, five standard deviations of 8


@pytest.mark.slow
def test_only_what_is_missing_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # workers import this file
    log = tmp_path / "log"
    folder, documents = tmp_path / "d", list(texts(200))
    failing = Watched(log=str(log), fails_at="150")
    with pytest.raises(UserError, match="made to fail"):
        tokenise({"train": documents}, failing, folder, processes=2, shard_bytes=1000)
    assert not (folder / MANIFEST).exists()
    with pytest.raises(UserError, match="interrupted: tokenise again"):
        TokenSet(folder)
    log.unlink()
    tokenise({"train": documents}, Watched(log=str(log)), folder, processes=1, shard_bytes=1000)
    again = {int(line) for line in log.read_text().split()}
    assert 0 not in again and 150 in again
    log.unlink()
    tokenise({"train": documents}, Bytes(), tmp_path / "whole", processes=1, shard_bytes=1000)
    assert files_of(folder) == files_of(tmp_path / "whole")
    appended = [*documents, Document("new ")]
    seen: list[int] = []
    manifest = tokenise(
        {"train": appended}, Watched(log=str(log)), folder, processes=1, shard_bytes=1000, advance=seen.append
    )
    assert log.read_text().split()[-1] == "new" and len(log.read_text().split()) < 20  # the last, open shard only
    assert sum(seen) == manifest.num_bytes == sum(len(document.text) for document in appended)


KILLED = """
import sys, time
from stretto.data.shards import tokenise
from tests.data.conftest import Bytes, texts
def slow():
    for index, document in enumerate(texts(300)):
        if index == 200: print("far", flush=True); time.sleep(60)
        yield document
if __name__ == "__main__":
    tokenise({"train": slow()}, Bytes(), sys.argv[1], processes=int(sys.argv[2]), shard_bytes=1000)
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_run_continues(tmp_path: Path, processes: int) -> None:
    script, root = tmp_path / "run.py", Path(__file__).parents[2]
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, str(script), str(tmp_path / "d"), str(processes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout and process.stdout.readline() == "far\n"
        process.send_signal(signal.SIGKILL)
    time.sleep(0.2)  # workers end with their parent
    finished = list((tmp_path / "d" / "unfinished").glob("train-*.json"))
    assert finished
    stamp = {path: (tmp_path / "d" / f"{path.stem}.tokens").stat().st_mtime_ns for path in finished}
    tokenise({"train": texts(300)}, Bytes(), tmp_path / "d", processes=1, shard_bytes=1000)
    assert {path: (tmp_path / "d" / f"{path.stem}.tokens").stat().st_mtime_ns for path in finished} == stamp
    tokenise({"train": texts(300)}, Bytes(), tmp_path / "whole", processes=1, shard_bytes=1000)
    assert files_of(tmp_path / "d") == files_of(tmp_path / "whole")


def test_shorter_sources_leave_no_stale_shards(tmp_path: Path) -> None:
    tokenise({"train": texts(200)}, Bytes(), tmp_path / "d", processes=1, shard_bytes=1000)
    tokenise({"train": texts(50)}, Bytes(), tmp_path / "d", processes=1, shard_bytes=1000)
    tokenise({"train": texts(50)}, Bytes(), tmp_path / "fresh", processes=1, shard_bytes=1000)
    assert files_of(tmp_path / "d") == files_of(tmp_path / "fresh")


def test_what_is_held_out_may_change(tmp_path: Path) -> None:
    for fraction in (0.1, 0.3):
        tokenise({"train": texts(90)}, Bytes(), tmp_path / "d", processes=1, holdout=Holdout("documents", fraction))
    tokenise({"train": texts(90)}, Bytes(), tmp_path / "fresh", processes=1, holdout=Holdout("documents", 0.3))
    assert files_of(tmp_path / "d") == files_of(tmp_path / "fresh")


def test_the_end_of_each_document_is_held_out(tmp_path: Path) -> None:
    documents = [Document("some words " * 200, "even"), Document("x", "odd")]
    tokenise({"train": documents}, Bytes(), tmp_path, processes=1, holdout=Holdout("position", 0.1))
    train, val = TokenSet(tmp_path), TokenSet(tmp_path, "val")
    assert (train.num_documents, val.num_documents, val.of_domain("even").tolist()) == (2, 1, [0])
    read = [bytes(each.document(0)[:-1].astype(np.uint8)).decode() for each in (train, val)]
    assert "".join(read) == documents[0].text and 0.1 <= len(read[1]) / len(documents[0].text) <= 0.15


def test_data_hash_names_the_content(tmp_path: Path) -> None:
    def manifest(name: str, documents: Iterator[Document]) -> Manifest:
        return tokenise({"train": documents}, Bytes(), tmp_path / name, processes=1)

    assert (
        manifest("a", texts(9)).data_hash == manifest("b", texts(9)).data_hash != manifest("c", texts(9, "x")).data_hash
    )


def test_refusals(tmp_path: Path) -> None:
    tokenise({"train": texts(9)}, Bytes(), tmp_path / "d", processes=1)
    with pytest.raises(UserError, match="tokenizer: was bytes-257, is now bytes-300; choose a new folder"):
        tokenise({"train": texts(9)}, Bytes(vocab_size=300), tmp_path / "d", processes=1)
    TokenSet(tmp_path / "d")  # a refused call leaves the data whole
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files and no data"):
        tokenise({"train": texts(9)}, Bytes(), tmp_path / "other", processes=1)
    with pytest.raises(UserError, match="split 'train' has no documents"):
        tokenise({"train": [Document("")]}, Bytes(), tmp_path / "e", processes=1)
    with pytest.raises(UserError, match=r"too little text to hold any out \(2 documents, 18 B\)"):
        tokenise({"train": texts(2)}, Bytes(), tmp_path / "f", processes=1, holdout=Holdout("documents", 1e-9))


def test_damaged_shards_are_named_and_mended(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    tokenise({"train": texts(50)}, Bytes(), folder, processes=1, shard_bytes=1000)
    whole = files_of(folder)
    shard = folder / "train-00001.tokens"
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"train-00001\.tokens: has \d+ bytes instead of"):
        TokenSet(folder)
    shard.unlink()
    with pytest.raises(UserError, match=r"train-00001\.tokens: is missing"):
        TokenSet(folder)
    tokenise({"train": texts(50)}, Bytes(), folder, processes=1, shard_bytes=1000)
    assert files_of(folder) == whole
    shard.write_bytes(bytes(len(whole["train-00001.tokens"])))
    TokenSet(folder)
    with pytest.raises(UserError, match=r"train-00001\.tokens: content does not match its hash"):
        TokenSet(folder, verify=True)
    with pytest.raises(UserError, match="split 'val' is not there; it has train"):
        TokenSet(folder, "val")


@pytest.mark.parametrize("value", [b"\x00", b"\xff", b"\x7f"])
def test_an_index_that_leads_astray_is_not_followed(tmp_path: Path, value: bytes) -> None:
    folder = tmp_path / "d"
    tokenise({"train": texts(50)}, Bytes(), folder, processes=1)
    index = folder / "train-00000.index"
    index.write_bytes(value * index.stat().st_size)
    with pytest.raises(UserError, match=r"train-00000\.index: its offsets do not rise"):
        TokenSet(folder)


@pytest.mark.parametrize("processes", [1, 3])
def test_results_come_in_the_order_of_the_work(processes: int) -> None:
    assert list(in_order(processes, partial(operator.mul, 2), range(20))) == list(range(0, 40, 2))


@pytest.mark.parametrize("processes", [1, 2])
def test_what_a_worker_raises_is_raised_here(processes: int) -> None:
    results: list[float] = []
    with pytest.raises(ZeroDivisionError):
        results.extend(in_order(processes, partial(operator.truediv, 2), (1, 2, 0)))
    assert results == [2, 1]


def test_a_worker_that_dies_is_told() -> None:
    with pytest.raises(UserError, match="one of 2 worker processes died"):
        list(in_order(2, os._exit, [3]))


@pytest.mark.parametrize("processes", [1, 2])
def test_no_more_is_under_way_than_memory_holds(processes: int) -> None:
    num_taken = 0

    def units() -> Iterator[int]:
        nonlocal num_taken
        while num_taken < 50:
            num_taken += 1
            yield num_taken

    for num_done, _ in enumerate(in_order(processes, partial(operator.mul, 2), units()), start=1):
        assert num_taken - num_done <= 2 * processes


@pytest.mark.slow
def test_an_interrupt_ends_the_workers_too(tmp_path: Path) -> None:
    script, root = tmp_path / "run.py", Path(__file__).parents[2]
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, str(script), str(tmp_path / "d"), "2"]
    with subprocess.Popen(
        command, stdout=-1, stderr=subprocess.DEVNULL, text=True, env=environment, process_group=0
    ) as process:
        assert process.stdout and process.stdout.readline() == "far\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers as well
        assert process.wait(30) == -signal.SIGINT
    deadline = time.monotonic() + 30
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """Peak memory of a fresh process, for 8 MB and for 32 MB of text."""
    script = tmp_path / "run.py"
    script.write_text(
        "import resource, sys\nfrom stretto.data.sources import Document\nfrom stretto.data.shards import tokenise\n"
        "from tests.data.conftest import Bytes\n"
        "tokenise({'train': (Document(f'{n} ' * 2000) for n in range(int(sys.argv[2])))}, Bytes(), sys.argv[1], processes=1, shard_bytes=1 << 20)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    def peak(num: int) -> int:
        command = [sys.executable, str(script), str(tmp_path / str(num)), str(num)]
        return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    assert peak(3200) < 1.05 * peak(800)
