from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from stretto.base.errors import UserError
from stretto.data import sources
from stretto.data.sources import Document, Fields, find_splits, open_sources, read_files

RECORDS = [{"text": "one\ntwo", "source": "a"}, {"text": "drei é 中", "source": "b"}]
DOCUMENTS = [Document("one\ntwo", "a"), Document("drei é 中", "b")]
JSONL = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}
FIELDS = Fields(domain="source")


@pytest.mark.parametrize("suffix", PACKERS)
def test_jsonl_in_any_wrapping(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(PACKERS[suffix](JSONL) + PACKERS[suffix](b"\n" + JSONL))  # two frames in a row are one file
    assert list(read_files([file], FIELDS)) == DOCUMENTS * 2


@pytest.mark.parametrize("suffix", [suffix for suffix in PACKERS if suffix])
@pytest.mark.parametrize("damage", ["truncated", "foreign"])
def test_damaged_archives_are_named(tmp_path: Path, suffix: str, damage: str) -> None:
    packed = PACKERS[suffix](JSONL * 100)
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(packed[: len(packed) - 5] if damage == "truncated" else b"this is no archive, not at all")
    with pytest.raises(UserError, match=rf"a\.jsonl{suffix}: .*(archive|not JSON)"):
        list(read_files([file]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty; remove it"),
        (b"\n\n", "empty; remove it"),
        (b'{"text": "a"}\n{"text": \n', "line 2: not JSON"),
        (b'{"text": "a"}\n["a"]\n', "line 2: not a JSON object"),
        (b'{"txt": "a", "id": 1}\n', r"line 1: no field 'text' \(did you mean 'txt'\?\); it has txt, id"),
        (b'{"text": 3}\n', "line 1: field 'text': a int, not text"),
        (b'{"text": "\\ud800"}\n', "line 1: field 'text': half of a surrogate pair"),
        (b'{"text": "a"}\n{"text": "\xe9"}\n', r"line 2: not UTF-8 \(byte 0xe9\); convert it"),
        (b'\xff\xfe{\0"\0', "line 1: UTF-16 text; convert it"),
        (b"PK\0\1\2", "line 1: a NUL byte: this is a binary file"),
    ],
)
def test_bad_jsonl_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"bad\.jsonl: {message}") as caught:
        list(read_files([file]))
    assert "\n" not in str(caught.value)


def test_missing_domain_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    with pytest.raises(UserError, match="line 1: no field 'origin'"):
        list(read_files([tmp_path / "a.jsonl"], Fields(domain="origin")))


def test_text_files_are_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(b"x\n" * 50))
    assert [document.text for document in read_files([tmp_path / "a.txt", tmp_path / "b.md.gz"])] == [
        "one\r\ntwo\n",
        "x\n" * 50,
    ]
    monkeypatch.setattr(sources, "MAX_TEXT_CHARS", 32)
    pieces = [document.text for document in read_files([tmp_path / "b.md.gz"])]
    assert "".join(pieces) == "x\n" * 50
    assert [len(piece) for piece in pieces] == [32, 32, 32, 4]


def test_bad_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n\xfcber\n")
    with pytest.raises(UserError, match=r"a\.txt: line 2: not UTF-8"):
        list(read_files([tmp_path / "a.txt"]))
    with pytest.raises(UserError, match=r"none\.txt: no such file"):
        list(read_files([tmp_path / "none.txt"]))


def test_parquet(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS * 100), file)
    assert list(read_files([file], FIELDS)) == DOCUMENTS * 100
    with pytest.raises(UserError, match=r"a\.parquet: no field 'body'.*it has text, source"):
        list(read_files([file], Fields(text="body")))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"a\.parquet: not readable as Parquet"):
        list(read_files([file]))


def test_folders_split_by_file_name(tmp_path: Path) -> None:
    for name in (
        "train-1.jsonl",
        "train-0.jsonl",
        "validation.jsonl.gz",
        "test-0.jsonl",
        "extra.jsonl",
        "README.md",
        ".hidden.jsonl",
    ):
        (tmp_path / name).write_bytes(gzip.compress(JSONL) if name.endswith(".gz") else JSONL)
    found = {split: [file.name for file in files] for split, files in find_splits(tmp_path).items()}
    assert found == {
        "train": ["extra.jsonl", "train-0.jsonl", "train-1.jsonl"],
        "val": ["validation.jsonl.gz"],
        "test": ["test-0.jsonl"],
    }
    opened = open_sources(tmp_path, FIELDS)
    assert sorted(opened) == ["train", "val"]
    assert list(opened["val"]) == DOCUMENTS
    assert len(list(opened["train"])) == 6


def test_folders_of_text(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.py").write_text("pass\n")
    (tmp_path / "a.rst").write_text("words\n")
    (tmp_path / "c.bin").write_bytes(b"\0")
    assert [document.text for document in open_sources(tmp_path)["train"]] == ["words\n", "pass\n"]


def test_nothing_to_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no file that can be read"):
        open_sources(tmp_path)
    for missing in (tmp_path / "none", "./none", "none.jsonl"):
        with pytest.raises(UserError, match=r"none.*: no such file or folder"):
            open_sources(missing)


def test_saved_hugging_face_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(RECORDS)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "validation": rows, "test": rows}).save_to_disk(tmp_path / "three")
    assert {split: list(documents) for split, documents in open_sources(tmp_path / "one", FIELDS).items()} == {
        "train": DOCUMENTS
    }
    assert {split: list(documents) for split, documents in open_sources(tmp_path / "three", FIELDS).items()} == {
        "train": DOCUMENTS,
        "val": DOCUMENTS,
    }


def test_a_name_without_a_dataset_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="nobody/nothing: no file or folder here, and no dataset that the Hub gives"):
        open_sources("nobody/nothing")
