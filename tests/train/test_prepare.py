"""Text of a new run: which tokenizer it gets."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stretto.base.errors import UserError
from stretto.data.shards import read_manifest
from stretto.text.tokenizer import load_tokenizer
from stretto.train.prepare import TextOptions, prepare_data, tokenise_data


def text(path: Path, num_words: int, num_lines: int) -> str:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=6)) for _ in range(num_words)]
    path.write_text("\n".join(" ".join(draw.choices(words, k=10)) for _ in range(num_lines)))
    return str(path)


def test_a_tokenizer_of_other_text_is_not_used_again(tmp_path: Path) -> None:
    run, few, many = tmp_path / "run", text(tmp_path / "few.txt", 3, 20), text(tmp_path / "many.txt", 400, 500)
    _, first, _ = prepare_data(run, [few], None, 600)
    _, again, _ = prepare_data(run, [few], None, 600)
    assert again == first and load_tokenizer(first).vocab_size < 300
    _, other, _ = prepare_data(run, [many], None, 600)
    assert load_tokenizer(other).vocab_size == 600
    tokenise_data([few], tmp_path / "data", None, 600)
    with pytest.raises(
        UserError, match=r"data/tokenizer: trained on other text, or for another size of the vocabulary"
    ):
        tokenise_data([few], tmp_path / "data", None, 700)


def test_what_is_read_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "run" / "data").mkdir(parents=True)
    own = text(tmp_path / "run" / "data" / "own.txt", 50, 200)
    prepare_data(tmp_path / "run", [own], None, 300)
    with pytest.raises(UserError, match="trained on other text, or for another size"):
        prepare_data(tmp_path / "run", [own], None, 310)
    assert Path(own).exists()


def test_tokens_of_another_tokenizer_are_made_anew_and_what_is_read_stays(tmp_path: Path) -> None:
    run, source = tmp_path / "run", text(tmp_path / "a.txt", 50, 200)
    tokenizers = [prepare_data(tmp_path / f"{size}", [source], None, size)[1] for size in (300, 310)]
    prepare_data(run, [source], tokenizers[0], 400)
    prepare_data(run, [source], tokenizers[1], 400)
    assert read_manifest(run / "data" / "00").settings.tokenizer == load_tokenizer(tokenizers[1]).fingerprint()
    own = Path(text(run / "data" / "00" / "own.txt", 50, 200))
    with pytest.raises(UserError, match=r"data/00: tokenizer: was .* is now"):
        prepare_data(run, [str(own)], tokenizers[0], 400)
    assert own.exists() and read_manifest(run / "data" / "00").num_tokens


def test_appended_text_keeps_the_tokenizer_of_a_data_folder(tmp_path: Path) -> None:
    source = Path(text(tmp_path / "a.txt", 50, 200))
    tokenise_data([str(source)], tmp_path / "data", None, 300)
    tokenizer = (tmp_path / "data" / "tokenizer" / "tokenizer.json").read_bytes()
    source.write_text(source.read_text() + "\nmore text")
    tokenise_data([str(source)], tmp_path / "data", None, 300)
    assert (tmp_path / "data" / "tokenizer" / "tokenizer.json").read_bytes() == tokenizer


def test_a_tokenizer_is_named_by_its_file_or_its_folder(tmp_path: Path) -> None:
    source = text(tmp_path / "a.txt", 50, 200)
    _, folder, _ = prepare_data(tmp_path / "one", [source], None, 400)
    for number, named in enumerate((folder, folder / "tokenizer.json")):
        assert prepare_data(tmp_path / f"other-{number}", [source], named, 400)[1] == folder


def test_a_data_folder_that_one_stands_in_decides_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenise_data([text(tmp_path / "a.txt", 50, 200)], tmp_path / "data", None, 300)
    monkeypatch.chdir(tmp_path / "data")
    _, folder, _ = prepare_data(tmp_path / "run", [text(tmp_path / "b.txt", 40, 200)], None, 300)
    assert folder.is_relative_to(tmp_path / "run")


def test_held_out_text_is_opened_before_a_tokenizer_is_trained(tmp_path: Path) -> None:
    source, out = text(tmp_path / "a.txt", 50, 200), tmp_path / "out"
    options = TextOptions(val=str(tmp_path / "nope.txt"))
    for prepare in (prepare_data, tokenise_data):
        first, second = (out, [source]) if prepare is prepare_data else ([source], out)
        with pytest.raises(UserError, match=r"nope\.txt: no such file"):
            prepare(first, second, None, 400, options)  # type: ignore[operator]
        assert not out.exists()


def test_what_a_refused_text_left_does_not_refuse_other_text(tmp_path: Path) -> None:
    short, out = tmp_path / "hi.txt", tmp_path / "out"
    short.write_text("hi")
    for _ in range(2):
        with pytest.raises(UserError, match=r"hi\.txt: too little text to hold any out"):
            tokenise_data([str(short)], out, None, 400)
    manifest = tokenise_data([text(tmp_path / "a.txt", 50, 200)], out, None, 400)
    assert read_manifest(out) == manifest and not (out / "unfinished").exists()
