from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from stretto.base.errors import UserError
from stretto.data import sources
from stretto.data.sources import Document, Fields, open_source, read_files

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
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}\n", "line 1: not JSON: Exceeds the limit"),
        (b'{"text": "a"}\n["a"]\n', "line 2: not a JSON object"),
        (
            b'{"txt": "a", "id": 1}\n',
            r"line 1: no field 'text' \(did you mean 'txt'\?\); it has txt, id; name the one that holds the text with --text-field",
        ),
        (b'{"text": 3}\n', "line 1: field 'text': a number, not text"),
        (
            b'{"messages": []}\n',
            "line 1: no field 'text'; it has messages; conversations are read by stretto sft, and by stretto quantise with --chat",
        ),
        (b'{"text": "\\ud800"}\n', "line 1: field 'text': half of a surrogate pair"),
        (b'{"text": "a"}\n{"text": "\xe9"}\n', r"line 2: not UTF-8 \(byte 0xe9\).*; convert it"),
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


def test_a_source_is_read_as_often_as_need_be(tmp_path: Path) -> None:
    for name in ("train-1.jsonl", "validation.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(JSONL) if name.endswith(".gz") else JSONL + b"\n" + JSONL)
    source = open_source(tmp_path, FIELDS)
    assert source.splits == ("train", "val")
    for _ in range(2):
        assert list(source.read("val")) == DOCUMENTS
        assert list(source.read("train")) == DOCUMENTS * 2


def test_what_is_not_text_is_left_out_of_a_folder_and_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("pass\n")
    (tmp_path / "b.py").write_bytes(b"\0\1")
    (tmp_path / "c.c").write_bytes("/* Grüße aus Köln, schön größer */\n".encode("latin-1") * 9)
    (tmp_path / "d.py").write_text(" \n\n")
    source = open_source(tmp_path)
    left_out = source.left_out.copy()
    assert [document.text for document in source.read("train", left_out)] == ["pass\n"]
    assert len(left_out) == 3
    for told in ("1 binary (b.py)", "1 not UTF-8, it looks like cp1252 (c.c)", "1 blank document (d.py)"):
        assert told in str(left_out)
    assert len(source.left_out) == 0  # reading again counts anew
    for name, message in (("b.py", "a NUL byte"), ("c.c", "not UTF-8"), ("d.py", "nothing but blank documents")):
        with pytest.raises(UserError, match=rf"{name}: .*{message}"):
            list(open_source(tmp_path / name).read("train"))


@pytest.mark.parametrize(
    ("text", "encoding", "looks"),
    [
        ("我们在这里写一些中文文本，今天天气很好，大家都去公园散步了。\n", "gb18030", "gb18030"),
        ("我們在這裡寫一些中文文字，今天天氣很好，大家都去公園散步了。\n", "big5", "big5"),
        ("Grüße aus Köln, wo die Bäume blühen.\n", "latin-1", "cp1252"),  # which includes it
        ("これは日本語のテキストです。文字コードの検出を試します。\n", "shift_jis", "shift-jis"),
        ("これは日本語のテキストです。文字コードの検出を試します。\n", "euc_jp", "euc-jp"),
        ("이것은 한국어로 쓴 글입니다. 문자 부호를 알아보는지 시험합니다.\n", "euc_kr", "euc-kr"),
        ("Привет, это русский текст для проверки.\n", "cp1251", "cp1251"),
        ("Привет, это русский текст для проверки.\n", "koi8_r", "koi8-r"),
    ],
)
def test_encodings_are_told_apart(tmp_path: Path, text: str, encoding: str, looks: str) -> None:
    file = tmp_path / "a.txt"
    plain = "plain words first\n" * 99
    file.write_bytes(plain.encode() + text.encode(encoding))
    with pytest.raises(
        UserError, match=rf"a\.txt: line 100: not UTF-8 .*looks like {looks}; convert it: iconv -f {looks} "
    ) as caught:
        list(read_files([file]))
    _run_command(str(caught.value).partition("convert it: ")[2], tmp_path)
    assert [document.text for document in read_files([tmp_path / "NEW.txt"])] == [plain + text]
    file.write_bytes(text.encode())
    assert [document.text for document in read_files([file])] == [text]


def _run_command(command: str, folder: Path) -> None:
    """Run a command that an error message named."""
    subprocess.run(["bash", "-c", command], cwd=folder, check=True)


def test_text_without_lines_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_TEXT_CHARS", 100)
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 7)  # characters of three bytes lie across it
    for name, text in (("words.txt", "word " * 99), ("run.txt", "x" * 450), ("chinese.txt", "汉字汉字汉。" * 60)):
        (tmp_path / name).write_text(text)
        pieces = [document.text for document in read_files([tmp_path / name])]
        assert "".join(pieces) == text
        assert max(map(len, pieces)) <= 100 and len(pieces) <= 8
        assert all(piece.endswith((" ", "。")) for piece in pieces) or name == "run.txt"
    (tmp_path / "late.txt").write_bytes(b"fine \n" * 60 + b"\xe9t\xe9\n")
    with pytest.raises(UserError, match=r"late\.txt: line 61: not UTF-8"):
        list(read_files([tmp_path / "late.txt"], skips=True))  # too late to leave it out: some was read


def test_long_records_become_several_documents_and_endless_lines_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "word " * 99, "source": "s"}) + "\n")
    monkeypatch.setattr(sources, "MAX_TEXT_CHARS", 100)
    pieces = list(read_files([file], FIELDS))
    assert "".join(piece.text for piece in pieces) == "word " * 99
    assert len(pieces) == 5 and {piece.domain for piece in pieces} == {"s"}
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 100)
    with pytest.raises(UserError, match=r"a\.jsonl: line 1: longer than .* cut its text"):
        list(read_files([file], FIELDS))


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t"), ("d.csv.gz", ",")])
def test_tables(tmp_path: Path, name: str, mark: str) -> None:
    rows = [["id", "text", "source"], ["1", '"one\ntwo"', "a"], [], ["2", f'"drei {mark} ""é"" 中"', "b"]]
    raw = b"\xef\xbb\xbf" + "\r\n".join(mark.join(row) for row in rows).encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    found = list(read_files([tmp_path / name], FIELDS))
    assert found == [Document("one\ntwo", "a"), Document(f'drei {mark} "é" 中', "b")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", r"line 1: no field 'text'; it has a, b; name the one .* --text-field"),
        ("texts,b\n1,2\n", r"line 1: no field 'text' \(did you mean 'texts'"),
        ("text,b\n1,2,3\n", "line 2: 3 columns, the header has 2; put quotation marks"),
        ("text,b\n1\n", "line 2: 1 column, the header has 2; add the missing ones, or delete the row"),
        ('text,b\n"open,2\n' + "x\n" * 200, "line .*: not readable as CSV: field larger.*quotation mark left open"),
        ('text,b\na,1\n"open,2\nc,3\nd,4\n', "line 3: not readable as CSV: .*is a quotation mark left open"),
        ('text,b\n"Hello," she said.,2\n', "line 2: not readable as CSV: .*or not doubled inside quoted text"),
        ("text,b\n", "empty; remove it"),
    ],
)
def test_bad_tables_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, message: str) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 300)
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(UserError, match=rf"a\.csv: {message}"):
        list(read_files([tmp_path / "a.csv"]))


def test_a_sample_takes_the_beginning_of_every_file(tmp_path: Path) -> None:
    for name, num in (("a", 100), ("b", 300), ("c", 1)):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}{"x" * 99}"}}\n' * num)
    source = open_source(tmp_path)
    taken = [document.text[0] for document in source.sample(20_050)]
    assert taken == ["a"] * 50 + ["b"] * 150 + ["c"]
    assert len(list(source.sample(10**9))) == 401


def test_a_file_that_holds_no_plain_text_is_named(tmp_path: Path) -> None:
    for name, message in (("a.zip", "an archive"), ("b.tar.gz", "an archive"), ("c.pdf", "not plain text")):
        (tmp_path / name).write_bytes(b"something")
        with pytest.raises(UserError, match=rf"{name}: {message}|{name}: .*{message}"):
            open_source(tmp_path / name)
    (tmp_path / "d.json").write_text('[{"text": "one"}]')
    with pytest.raises(UserError, match=r"d\.json: line 1: a JSON array; write one object a line"):
        list(open_source(tmp_path / "d.json").read("train"))
    plain = tmp_path / "e.jsonl"
    plain.with_suffix(".jsonl.gz").write_bytes(gzip.compress(b'[{"text": "one"}]'))
    remedy = f"unpack it, and write one object a line, for example: jq -c '.[]' {plain} > NEW.jsonl"
    with pytest.raises(UserError, match=re.escape(f"{plain}.gz: line 1: a JSON array; {remedy}") + "$"):
        list(open_source(tmp_path / "e.jsonl.gz").read("train"))


def test_saved_hugging_face_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(RECORDS)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "validation": rows, "test": rows}).save_to_disk(tmp_path / "three")
    one, three = (open_source(tmp_path / name, FIELDS) for name in ("one", "three"))
    assert {split: list(one.read(split)) for split in one.splits} == {"train": DOCUMENTS}
    assert {split: list(three.read(split)) for split in three.splits} == {"train": DOCUMENTS, "val": DOCUMENTS}
    assert str(three.left_out) == "1 other split (test)"


def test_a_name_without_a_dataset_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match="nobody/nothing: not a file or folder on this machine, and not a dataset on the Hub"
    ):
        open_source("nobody/nothing")


def test_a_name_without_an_owner_is_no_dataset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "_open_dataset", lambda *_, **__: pytest.fail("the Hub was asked"))
    monkeypatch.chdir(tmp_path)
    for name in ("nosuch", "nosuch:part"):
        with pytest.raises(
            UserError, match=f"^{name}: no such file or folder; check the path.*on the Hub is OWNER/NAME"
        ):
            open_source(name)


def test_the_data_set_that_the_documentation_names_is_looked_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "index.md").read_text(encoding="utf-8")
    assert open_source.__doc__ is not None
    (example,) = set(re.findall(r"`([^`\s]*wikitext[^`\s]*)`", page + open_source.__doc__))
    asked = []
    monkeypatch.setattr(sources, "_open_dataset", lambda name, *_, **__: asked.append(name))
    monkeypatch.chdir(tmp_path)
    open_source(example)
    assert asked == [example]


def test_utf_16_is_named_with_a_command_that_converts_it(tmp_path: Path) -> None:
    path = tmp_path / "my text.txt"
    path.write_bytes("some text".encode("utf-16"))
    command = f"iconv -f utf-16 -t utf-8 '{path}' > NEW.txt"
    with pytest.raises(UserError, match=re.escape(f"{path}: line 1: UTF-16 text; convert it: {command}") + "$"):
        list(read_files([path]))
    _run_command(command, tmp_path)
    assert [document.text for document in read_files([tmp_path / "NEW.txt"])] == ["some text"]


@pytest.mark.parametrize(
    ("value", "kind"),
    [("5", "a number"), ("0.5", "a number"), ("true", "true or false"), ("[1]", "a list"), ("{}", "an object")],
)
def test_a_field_that_is_no_text(tmp_path: Path, value: str, kind: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": {value}}}\n')
    with pytest.raises(UserError, match=rf"line 1: field 'text': {kind}, not text; name the field"):
        list(read_files([path]))
