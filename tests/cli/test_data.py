"""Text in, by the commands: what a new user would name, and what is said of it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from stretto.base.errors import UserError
from stretto.data.shards import TokenSet, read_manifest
from stretto.data.sources import open_source
from stretto.train import prepare as text_in
from stretto.train.prepare import TextOptions, learn_tokenizer, prepare_data, sources_named
from stretto.train.run_folder import read_info
from tests.api.conftest import Run, refused

WORDS = "The quick brown fox jumps over the lazy dog, and the dog sleeps on; it is line {} of many.\n"


def write(path: Path, num: int, words: str = WORDS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(words.format(n) for n in range(num)))
    return path


def test_a_single_file_trains_and_says_what_was_held_out(stretto: Run, recipe: Path, tmp_path: Path) -> None:
    book = write(tmp_path / "book.txt", 400)
    done = stretto("pretrain", recipe, "--data", book, "-o", tmp_path / "run", "--steps", 1)
    assert done.code == 0, done.err
    told = next(line for line in done.out.splitlines() if line.startswith(f"{book}: "))
    assert "1 file, train 1 document" in told and "val 1 document" in told and "the last 10 % of each document" in told
    data = tmp_path / "run/data/00"
    assert TokenSet(data).num_tokens > 5 * TokenSet(data, "val").num_tokens > 100


@pytest.mark.slow
def test_a_run_is_not_written_among_the_text_that_it_reads(stretto: Run, recipe: Path, tmp_path: Path) -> None:
    folder, other = write(tmp_path / "texts/book.txt", 400).parent, write(tmp_path / "other.txt", 400)
    for command in (("pretrain", recipe), ("tokenize",)):
        for data in (folder, folder / "book.txt"):
            refused(stretto(*command, "--data", data, "-o", folder), f"--data {data}: lies in the output folder", "-o")
        val = ("--data", other, "--val", folder / "book.txt")
        refused(stretto(*command, *val, "-o", folder), f"--val {folder / 'book.txt'}: lies in the output folder")
    assert [path.name for path in folder.iterdir()] == ["book.txt"]
    tokens = tmp_path / "run/data/00"  # a run may read its own tokens
    assert not stretto("tokenize", "--data", other, "-o", tokens, "--vocab-size", 320).code
    assert not stretto("pretrain", recipe, "--data", tokens, "-o", tmp_path / "run", "--steps", 1).code
    tokens = tmp_path / "other-run/data"
    assert not stretto("tokenize", "--data", other, "-o", tokens, "--vocab-size", 320).code
    assert not stretto("pretrain", recipe, "--data", tokens, "-o", tokens.parent, "--steps", 1).code


@pytest.mark.slow
def test_a_run_below_its_text_does_not_change_the_text(stretto: Run, recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = [json.dumps({"text": WORDS.format(number)}) for number in range(400)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    for name in ("one", "two"):
        done = stretto("pretrain", recipe, "--data", folder, "-o", folder / "runs" / name, "--steps", 1)
        assert done.code == 0, done.err
    assert "1 folder of runs (runs/one)" in done.out
    assert len({read_info(folder / "runs" / name).data_hash for name in ("one", "two")}) == 1


@pytest.mark.slow
def test_held_out_text_is_named(stretto: Run, recipe: Path, tmp_path: Path) -> None:
    book, other = write(tmp_path / "book.txt", 400), write(tmp_path / "other.txt", 50, "{} other words\n")
    (tmp_path / "more.jsonl").write_text(f'{{"text": "{"one more " * 300}"}}\n{{"text": "{"0 other words " * 9}"}}\n')
    run = tmp_path / "run"
    done = stretto(
        "pretrain",
        recipe,
        "--data",
        f"{book}@3",
        "--data",
        tmp_path / "more.jsonl",
        "--val",
        other,
        "-o",
        run,
        "--steps",
        1,
    )
    assert done.code == 0, done.err
    assert f"{other}: held out: val 1 document" in done.out
    info = read_info(run)
    assert info.data.val == run / "data/val" and info.sources[-1] == f"--val {other}"
    assert [part.split for part in info.data.open("val")] == ["val"]
    assert all(set(read_manifest(part.path).splits) == {"train"} for part in info.data.parts)
    refused(stretto("pretrain", recipe, "--data", book, "--val", book, "-o", tmp_path / "x"), "is also training text")
    shutil.copy(book, tmp_path / "copy.txt")
    same = ("--data", book, "--val", tmp_path / "copy.txt")
    refused(stretto("pretrain", recipe, *same, "-o", tmp_path / "y"), "all of the training text is also held out")
    refused(stretto("tokenize", *same, "-o", tmp_path / "z"), "all of the training text is also held out")
    both = ("--data", book, "--val", other, "--val-fraction", 0.1)
    refused(stretto("tokenize", *both, "-o", tmp_path / "w"), "--val-fraction", "remove one of the two options")
    refused(stretto("tokenize", "--data", book, "--val-fraction", 5, "-o", tmp_path / "w"), "--val-fraction 5", "0.05")
    changed = ("--resume", "--data", f"{book}@3", "--data", tmp_path / "more.jsonl", "--val", tmp_path / "copy.txt")
    refused(stretto("pretrain", recipe, *changed, "-o", run, "--steps", 2), "--data: was", "leave it out")


def test_documents_that_are_held_out_are_not_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"text": WORDS.format(number)}) + "\n" for number in range(40)]
    (tmp_path / "all.jsonl").write_text("".join(lines))
    (tmp_path / "held.jsonl").write_text("".join(lines[:7]))
    options = TextOptions(val=str(tmp_path / "held.jsonl"))
    mixture, _, _ = prepare_data(tmp_path / "run", [str(tmp_path / "all.jsonl")], None, 320, options)
    assert [each.num_documents for each in (*mixture.open(), *mixture.open("val"))] == [33, 7]
    assert "left out 7 documents held out" in capsys.readouterr().out


def test_another_field_and_one_that_is_not_there(stretto: Run, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"content": WORDS.format(n), "id": n}) + "\n" for n in range(50)))
    told = ("tokenize", "--data", file, "--vocab-size", 300, "-o", tmp_path / "tokens")
    refused(stretto(*told, "--text-field", "contents"), "no field 'contents' (did you mean 'content'?)", "--text-field")
    assert stretto(*told, "--text-field", "content").code == 0
    assert TokenSet(tmp_path / "tokens").num_documents + TokenSet(tmp_path / "tokens", "val").num_documents == 50


def test_the_tokenizer_learns_from_all_sources_by_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_in, "TOKENIZER_CHARS", 8_000)
    first = write(tmp_path / "a.jsonl", 900, '{{"text": "aaaa"}}\n')
    second = write(tmp_path / "b.jsonl", 99, '{{"text": "bbbb"}}\n')
    seen: Counter[str] = Counter()

    def watched(documents, vocab_size):  # type: ignore[no-untyped-def]
        def counted():  # type: ignore[no-untyped-def]
            for document in documents:
                seen.update(document.text)
                yield document

        return learn_tokenizer(counted(), vocab_size)

    monkeypatch.setattr(text_in, "learn_tokenizer", watched)
    with pytest.raises(UserError, match="too little text"):  # a word repeated: its copies are on one side
        prepare_data(tmp_path / "run", [f"{first}@1", f"{second}@3"], None, 320)
    assert seen["b"] / seen["a"] == pytest.approx(3, rel=0.01)  # the small one again and again, as in training


def test_a_tokenized_folder_lends_its_tokenizer_to_what_is_named_before_it(stretto: Run, tmp_path: Path) -> None:
    assert (
        stretto("tokenize", "--data", write(tmp_path / "a.txt", 90), "--vocab-size", 300, "-o", tmp_path / "done").code
        == 0
    )
    raw = write(tmp_path / "b.txt", 90, "another {}\n")
    mixture, tokenizer, _ = prepare_data(tmp_path / "run", [str(raw), str(tmp_path / "done")], None, 320)
    assert tokenizer == tmp_path / "done/tokenizer" and len(mixture.open()) == 2


def test_a_tokenizer_larger_than_the_network_is_refused_before_text_is_tokenised(stretto: Run, tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", 90)
    assert stretto("tokenize", "--data", text, "--vocab-size", 300, "-o", tmp_path / "done").code == 0
    with pytest.raises(UserError, match=r"tokenizer: has 300 tokens, more than the network's vocabulary of 299"):
        prepare_data(tmp_path / "run", [str(text)], tmp_path / "done/tokenizer", 299)
    assert not (tmp_path / "run").exists()


def test_somebodys_data_json_is_no_token_data(stretto: Run, tmp_path: Path) -> None:
    write(tmp_path / "text/a.txt", 90)
    (tmp_path / "text/data.json").write_text("{}")
    done = stretto("tokenize", "--data", tmp_path / "text", "--vocab-size", 300, "-o", tmp_path / "out")
    assert done.code == 0 and "left out 1 .json" in done.out, done


def test_a_folder_with_other_files_is_refused_before_a_tokenizer_is_trained(stretto: Run, tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", 90)
    write(tmp_path / "mine/b.txt", 1)
    refused(stretto("tokenize", "--data", text, "--vocab-size", 300, "-o", tmp_path / "mine"), "holds other files")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["b.txt"]


def test_token_data_is_not_tokenised_again(stretto: Run, tmp_path: Path) -> None:
    text, out = write(tmp_path / "a.txt", 90), tmp_path / "out"
    assert not stretto("tokenize", "--data", text, "--vocab-size", 300, "-o", out).code
    refused(stretto("tokenize", "--data", out, "-o", tmp_path / "again"), f"--data {out}: is token data already")


def test_text_shorter_than_a_batch(stretto: Run, recipe: Path, tmp_path: Path) -> None:
    short = write(tmp_path / "short.txt", 4)
    refused(
        stretto("pretrain", recipe, "--data", short, "-o", tmp_path / "run"),
        "training text, a batch is 256",
        "train.rows",
    )
    one = tmp_path / "one.txt"
    one.write_text("word")
    refused(stretto("pretrain", recipe, "--data", one, "-o", tmp_path / "run1"), "too little text to hold any out")


def test_a_folder_in_use_by_another_job_keeps_its_tokenizer(stretto: Run, tmp_path: Path) -> None:
    first = write(tmp_path / "a.txt", 90)
    told = ("tokenize", "--data", first, "-o", tmp_path / "out")
    assert stretto(*told, "--vocab-size", 300).code == 0
    kept = (tmp_path / "out/tokenizer/tokenizer.json").read_bytes()
    assert stretto("tokenize", "--data", first, "--vocab-size", 280, "-o", tmp_path / "other").code == 0
    refused(stretto(*told, "--tokenizer", tmp_path / "other/tokenizer"), "tokenizer: was", "choose a new folder")
    assert (tmp_path / "out/tokenizer/tokenizer.json").read_bytes() == kept


@pytest.mark.slow
def test_a_file_that_may_grow_no_further(tmp_path: Path) -> None:
    """A quota, as `ulimit -f` sets it: one line, nothing half-written, and without it the work goes on."""
    book = write(tmp_path / "book.txt", 3000)
    command = [sys.executable, "-m", "stretto", "tokenize", "--data", book, "--vocab-size", "300"]
    command += ["-o", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    full = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=limited, check=False)
    assert full.returncode == 2, full
    assert len(full.stderr.strip().splitlines()) == 1 and "File too large" in full.stderr, full.stderr
    assert not (tmp_path / "out/data.json").exists()
    assert [path for path in (tmp_path / "out").rglob("*") if path.name.endswith(".partial")] == []
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0 and TokenSet(tmp_path / "out", verify=True).num_documents == 1, done


def test_sources_are_named_alike_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt", 1)
    monkeypatch.chdir(tmp_path)
    named = sources_named(["a.txt@2", "user/set"], TextOptions(val="a.txt", text_field="body"))
    assert named == (f"{tmp_path}/a.txt@2", "user/set@1", f"--val {tmp_path}/a.txt", "--text-field body")


def test_bad_options_are_refused_before_anything_is_read() -> None:
    for fraction in (0.0, -1.0, 0.6, float("nan")):
        with pytest.raises(UserError, match="--val-fraction"):
            TextOptions(val_fraction=fraction)


def test_a_source_says_what_it_leaves_out(stretto: Run, tmp_path: Path) -> None:
    write(tmp_path / "code/src/a.py", 50)
    write(tmp_path / "code/tests/test_a.py", 50, "assert {}\n")
    (tmp_path / "code/src/__init__.py").touch()
    (tmp_path / "code/logo.png").write_bytes(b"\x89PNG\0")
    done = stretto("tokenize", "--data", tmp_path / "code", "--vocab-size", 300, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    assert ": 2 files, train 2 documents" in done.out
    assert "left out 1 empty (src/__init__.py); 1 .png, 5 B" in done.out
    assert len(open_source(tmp_path / "code").files["train"]) == 2
