"""Text of a new run: which tokenizer it gets."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import transformers

from stretto.base.errors import UserError
from stretto.data import holdout
from stretto.data.loader import Mixture
from stretto.data.shards import MANIFEST, TokenSet, read_manifest
from stretto.data.sources import Document
from stretto.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from stretto.train import prepare
from stretto.train.prepare import TextOptions, prepare_data, tokenise_data
from tests.starts import llama_like


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


def test_the_tokenizer_of_small_sources_reads_one_of_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are repeated to have the share of their weight."""
    learnt: list[str] = []

    def watched(documents: Iterable[Document], vocab_size: int) -> Tokenizer:
        learnt.extend(document.text for document in documents)
        return train_tokenizer(iter(learnt), vocab_size)

    monkeypatch.setattr(prepare, "learn_tokenizer", watched)
    monkeypatch.setattr(prepare, "TOKENIZER_CHARS", 200_000)
    first = records(tmp_path / "a.jsonl", (f"{number:04} a text of the first" for number in range(100)))
    second = records(tmp_path / "b.jsonl", (f"{number:04} the other" for number in range(25)))
    prepare_data(tmp_path / "run", [f"{first}@2", second], None, 300)
    of_first = [text for text in learnt if text.endswith("first")]
    assert len(of_first) == len(set(of_first)) == 100
    num_chars = sum(map(len, learnt)) - sum(map(len, of_first))
    assert num_chars == pytest.approx(sum(map(len, of_first)) / 2, abs=20)


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
    for function in (prepare_data, tokenise_data):
        first, second = (out, [source]) if function is prepare_data else ([source], out)
        with pytest.raises(UserError, match=r"nope\.txt: no such file"):
            function(first, second, None, 400, options)  # type: ignore[operator]
        assert not out.exists()


def test_what_a_refused_text_left_does_not_refuse_other_text(tmp_path: Path) -> None:
    short, out = tmp_path / "hi.txt", tmp_path / "out"
    short.write_text("hi")
    for _ in range(2):
        with pytest.raises(UserError, match=r"hi\.txt: too little text to hold any out"):
            tokenise_data([str(short)], out, None, 400)
    manifest = tokenise_data([text(tmp_path / "a.txt", 50, 200)], out, None, 400)
    assert read_manifest(out) == manifest and not (out / "unfinished").exists()


def documents(folder: Path, split: str = "train") -> list[list[int]]:
    data = TokenSet(folder, split, verify=True)
    return [data.document(number).tolist() for number in range(data.num_documents)]


def test_documents_begin_with_what_the_tokenizer_adds(tmp_path: Path) -> None:
    """As transformers encodes them, in the training and in the held-out part."""
    plain = tmp_path / "plain"
    source = tmp_path / "a.jsonl"
    source.write_text("".join(f'{{"text": "line {number} of text"}}\n' for number in range(300)))
    tokenise_data([str(source)], plain, None, 300)
    own = load_tokenizer(plain / "tokenizer")
    bos = llama_like(own)
    bos.save(tmp_path / "tokenizer")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    mixture, _, _ = prepare_data(tmp_path / "run", [str(source)], tmp_path / "tokenizer", 400)
    folder = mixture.parts[0].path
    assert documents(folder)[0] == [*theirs("line 0 of text").input_ids, bos.eos_id]
    assert all(ids[:1] == list(bos.start) for split in ("train", "val") for ids in documents(folder, split))
    assert [ids[1:] for ids in documents(folder)] == documents(plain), "the rest is the same"
    assert read_manifest(folder).settings.start == bos.start and read_manifest(plain).settings.start == ()


def test_a_folder_without_the_tokens_before_a_text_stays_without(tmp_path: Path) -> None:
    """One of an older version, whose manifest does not have the field; text is appended to it."""
    source = Path(text(tmp_path / "a.txt", 50, 200))
    tokenise_data([str(source)], tmp_path / "plain", None, 300)
    llama_like(load_tokenizer(tmp_path / "plain" / "tokenizer")).save(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    old = tmp_path / "old"
    shutil.copytree(tmp_path / "plain", old)
    manifest = json.loads((old / MANIFEST).read_text())
    manifest["settings"] |= {"tokenizer": tokenizer.fingerprint()}
    del manifest["settings"]["start"]
    (old / MANIFEST).write_text(json.dumps(manifest))
    mixture, _, _ = prepare_data(tmp_path / "run", [str(old)], tmp_path / "tokenizer", 400)
    before = documents(mixture.parts[0].path)
    assert before == documents(tmp_path / "plain")
    source.write_text(source.read_text() + "\nmore words")
    for _ in range(2):
        again = tokenise_data([str(source)], old, tmp_path / "tokenizer", 400)
        assert again.settings.start == () and documents(old)[0][0] != tokenizer.start[0]


def test_a_plain_prompt_of_a_conversation_begins_as_a_document(tmp_path: Path) -> None:
    told = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(40)]
    (tmp_path / "c.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in told))
    own = train_tokenizer(iter(map(str, told)), 300)
    bos = llama_like(own)
    bos.save(tmp_path / "tokenizer")
    options = TextOptions(is_chat=True, holds_out=False)
    mixture, _, _ = prepare_data(tmp_path / "run", [str(tmp_path / "c.jsonl")], tmp_path / "tokenizer", 400, options)
    expected = [*bos.start, *own.encode("What is 0?"), *own.encode("It is 0."), own.eos_id]
    assert documents(mixture.parts[0].path)[0] == expected
    data = TokenSet(mixture.parts[0].path)
    assert not data.learnt(0)[: len(own.encode("What is 0?")) + 1].any()  # type: ignore[index]


def records(path: Path, texts: Iterable[str]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    return str(path)


def held_and_trained(mixture: Mixture) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """The held-out and the training documents of all parts, without the end-of-text token."""
    held, trained = (
        {tuple(data.document(number)[:-1]) for data in mixture.open(split) for number in range(data.num_documents)}
        for split in ("val", "train")
    )
    return held, trained


def test_what_one_source_holds_out_no_source_trains_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crawl and a selection of it. The crawl is large enough for the usual rule; the selection holds out a larger share."""
    tokenise_data([text(tmp_path / "a.txt", 50, 200)], tmp_path / "tokens", None, 300)
    monkeypatch.setattr(holdout, "VAL_BYTES", 1000)
    lines = [f"{number} {'word ' * 25}" for number in range(1000)]
    data = [records(tmp_path / "web.jsonl", lines), records(tmp_path / "good.jsonl", lines[:100])]
    mixture, _, _ = prepare_data(tmp_path / "run", data, tmp_path / "tokens" / "tokenizer", 400)
    held, trained = held_and_trained(mixture)
    assert not held & trained and len(held | trained) == 1000
    web, good = mixture.open("val")
    assert good.num_documents >= 7 and web.num_documents < 40, "the rule for little text holds for the selection only"
    assert "left out" not in capsys.readouterr().out, "the weights are those of whole sources"


def test_a_document_that_is_cut_is_cut_in_every_source(tmp_path: Path) -> None:
    """A few texts are cut, and many are held out whole; one text is in both."""
    lines = [f"{number} " + "some more words " * 20 for number in range(60)]
    data = [records(tmp_path / "few.jsonl", lines[:5]), records(tmp_path / "many.jsonl", lines)]
    mixture, _, _ = prepare_data(tmp_path / "run", data, None, 300)
    held, trained = held_and_trained(mixture)
    few, many = ([data.document(n)[:-1].tobytes() for n in range(data.num_documents)] for data in mixture.open())
    assert len(few) == 5 and set(few) <= set(many) and not held & trained
    tails = [data.document(n)[:-1].tobytes() for data in mixture.open("val")[:1] for n in range(data.num_documents)]
    assert len(tails) == 5, "each of the few texts is cut"


def test_a_source_with_a_val_split_and_one_without_share_no_held_out_text(tmp_path: Path) -> None:
    lines = [f"{number} " + "some more words " * 20 for number in range(60)]
    records(tmp_path / "split" / "train.jsonl", lines[:40])
    records(tmp_path / "split" / "val.jsonl", lines[40:45])
    data = [str(tmp_path / "split"), records(tmp_path / "all.jsonl", lines)]
    mixture, _, _ = prepare_data(tmp_path / "run", data, None, 300)
    held, trained = held_and_trained(mixture)
    assert not held & trained and len(held) > 5 and len(held | trained) == 60


@pytest.mark.parametrize("has_val", [True, False])
def test_token_data_that_contains_held_out_documents_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has_val: bool
) -> None:
    lines = [f"{number} " + "some more words " * 20 for number in range(60)]
    tokenise_data([records(tmp_path / "all.jsonl", lines)], tmp_path / "tokens", None, 300)
    val = records(tmp_path / "split" / "val.jsonl", lines[:20])
    records(tmp_path / "split" / "train.jsonl", ["other text"])
    options = TextOptions(val=val) if has_val else TextOptions()
    others = [] if has_val else [str(tmp_path / "split")]
    mixture, _, _ = prepare_data(tmp_path / "run", [str(tmp_path / "tokens"), *others], None, 300, options)
    held, trained = held_and_trained(mixture)
    num = len(held & trained)
    out = capsys.readouterr().out
    told = f"{tmp_path / 'tokens'}: trains on {num} of {len(held)} held-out documents; to leave them out, name the text of all token data"
    assert num and f"{told} ({tmp_path / 'tokens'})" in " ".join(out.split()), out
    prepare_data(tmp_path / "alone", [str(tmp_path / "tokens")], None, 300)
    assert "trains on" not in capsys.readouterr().out


def test_text_that_contains_held_out_documents_of_token_data_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the text as the user did, and the token data as what is to be replaced."""
    lines = [f"{number} " + "some more words " * 20 for number in range(60)]
    tokens, text = str(tmp_path / "tokens"), records(tmp_path / "all.jsonl", lines)
    tokenise_data([text], Path(tokens), None, 300)
    mixture, _, _ = prepare_data(tmp_path / "run", [tokens, text], None, 300, TextOptions(val_fraction=0.02))
    held, trained = held_and_trained(mixture)
    told = f"{text}: trains on {len(held & trained)} of {len(held)} held-out documents; to leave them out, name the text of all token data"
    out = " ".join(capsys.readouterr().out.split())
    assert held & trained and f"{told} ({tokens})" in out, out
