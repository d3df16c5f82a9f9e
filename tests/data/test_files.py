from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from stretto.base.errors import UserError
from stretto.data.files import Found, find_files


def make(folder: Path, *names: str, size: int = 10) -> None:
    """Files whose contents differ; ``name=content`` says another."""
    for number, told in enumerate(names):
        name, _, content = told.partition("=")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content or f"{number:>{size}}" if "=" not in told or content else "")


def names(folder: Path, found: Found) -> dict[str, list[str]]:
    return {split: [str(file.relative_to(folder)) for file in files] for split, files in found.splits.items()}


def test_records_split_by_whole_words_of_their_names(tmp_path: Path) -> None:
    make(tmp_path, "train-1.jsonl", "train_0.jsonl", "validation.jsonl.gz", "test-0.jsonl", "c4-val.00000.jsonl")
    make(tmp_path, "testing.csv", "evaluation.parquet", "developers.jsonl", ".hidden.jsonl", size=20)
    found = find_files(tmp_path)
    assert names(tmp_path, found) == {
        "train": ["developers.jsonl", "evaluation.parquet", "testing.csv", "train-1.jsonl", "train_0.jsonl"],
        "val": ["c4-val.00000.jsonl", "validation.jsonl.gz"],
    }
    assert "1 of a test split (test-0.jsonl), 10 B" in str(found.left_out)
    assert "1 hidden (.hidden.jsonl)" in str(found.left_out)


def test_folders_of_runs_are_left_out_unless_they_are_named(tmp_path: Path) -> None:
    make(tmp_path, "a.txt", "own/run.json", "own/b.txt", "runs/x/run.json", "runs/x/report/c.html", "runs/x/.lock")
    make(tmp_path, "runs/rl/recipe.json", "runs/rl/metrics.jsonl", "runs/rl/.lock", size=9000)
    found = find_files(tmp_path)
    assert names(tmp_path, found) == {"train": ["a.txt", "own/b.txt"]}
    assert "2 folders of runs (runs/rl, …)" in str(found.left_out)
    assert names(tmp_path / "runs/x", find_files(tmp_path / "runs/x")) == {"train": ["report/c.html"]}


def test_code_has_no_splits(tmp_path: Path) -> None:
    make(
        tmp_path,
        "train.py",
        "test.py",
        "val.py",
        "tests/test_parser.py",
        "test/dev.c",
        "README",
        "Makefile",
        "src/__init__.py=",
    )
    found = find_files(tmp_path)
    assert list(found.splits) == ["train"] and len(found.splits["train"]) == 7
    assert str(found.left_out) == "1 empty (src/__init__.py)"


def test_text_files_split_where_one_says_train(tmp_path: Path) -> None:
    make(tmp_path / "a", "train.txt", "valid.txt", "test.txt", "test-notes.md")
    assert names(tmp_path / "a", find_files(tmp_path / "a")) == {
        "train": ["test-notes.md", "train.txt"],
        "val": ["valid.txt"],
    }
    make(tmp_path / "b", "testament.txt", "val.txt", "dev.txt")
    assert list(find_files(tmp_path / "b").splits) == ["train"]


def test_folders_split_where_one_is_called_train(tmp_path: Path) -> None:
    make(tmp_path / "a", "train/x/1.txt", "val/2.txt", "test/3.txt")
    assert names(tmp_path / "a", find_files(tmp_path / "a")) == {"train": ["train/x/1.txt"], "val": ["val/2.txt"]}
    make(tmp_path / "b", "x/1.txt", "val/2.txt")
    assert list(find_files(tmp_path / "b").splits) == ["train"]


def test_whichever_has_more_bytes_is_read(tmp_path: Path) -> None:
    make(tmp_path / "set", "data/a.jsonl", "README.md", size=100)
    (tmp_path / "set/README.md").write_text("short")
    found = find_files(tmp_path / "set")
    assert names(tmp_path / "set", found) == {"train": ["data/a.jsonl"]}
    assert str(found.left_out) == (
        "1 text file (README.md), 5 B: the folder has more bytes of JSONL, CSV and Parquet (to read such files too, name them as data)"
    )
    make(tmp_path / "code", "src/a.py", "src/b.rs", "tests/fixture.csv", "package.json", "logo.png", size=100)
    found = find_files(tmp_path / "code")
    assert names(tmp_path / "code", found) == {"train": ["src/a.py", "src/b.rs"]}
    records = "1 file of JSONL, CSV or Parquet (tests/fixture.csv), 100 B: the folder has more bytes of text"
    for told in (f"{records} (to read such files too, name them as data)", "1 .json, 100 B", "1 .png, 100 B"):
        assert told in str(found.left_out)
    make(tmp_path / "only", "c4.json.gz")
    assert names(tmp_path / "only", find_files(tmp_path / "only")) == {"train": ["c4.json.gz"]}


def test_copies_are_read_once(tmp_path: Path) -> None:
    make(tmp_path, "a.txt=same words", "b/copy.txt=same words", "c.txt=other word")
    found = find_files(tmp_path)
    assert names(tmp_path, found) == {"train": ["a.txt", "c.txt"]}
    assert str(found.left_out) == "1 copied (b/copy.txt is a.txt), 10 B"


def test_links_do_not_lead_astray(tmp_path: Path) -> None:
    make(tmp_path / "a", "one.txt", "two.txt=")
    (tmp_path / "a/loop").symlink_to(tmp_path / "a")
    (tmp_path / "a/gone.txt").symlink_to(tmp_path / "nowhere")
    found = find_files(tmp_path / "a")
    assert names(tmp_path / "a", found) == {"train": ["one.txt"]}
    for told in ("1 linked (loop)", "1 not a file (gone.txt)", "1 empty (two.txt)"):
        assert told in str(found.left_out)


def test_nothing_to_train_on_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder; check the path"):
        find_files(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: neither a file nor a folder; save the text"):
        find_files(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty: holds no file that can be read; known are \.jsonl"):
        find_files(tmp_path / "empty")
    make(tmp_path / "held", "test-1.jsonl", "val.jsonl")
    with pytest.raises(UserError, match=r"nothing to train on: left out 1 of a test split \(test-1.jsonl\).*val split"):
        find_files(tmp_path / "held")
    make(tmp_path / "pictures", "a.png", "b=")
    with pytest.raises(UserError, match=r"holds no file that can be read \(left out 1 empty \(b\); 1 .png, 10 B\)"):
        find_files(tmp_path / "pictures")


def test_a_folder_that_may_not_be_looked_into() -> None:
    code = (
        "import os, sys\nfrom stretto.data.files import find_files\n"
        "if os.getuid() == 0: os.setuid(65534)\n"  # to root, every folder is open
        "try: find_files(sys.argv[1])\nexcept ValueError as error: print(error)"
    )
    with TemporaryDirectory() as made:  # pytest's own folders are closed to others
        text = Path(made) / "text"
        make(text, "a.txt", "closed/b.txt")
        Path(made).chmod(0o755)
        (text / "closed").chmod(0)
        command = [sys.executable, "-c", code, str(text)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
        (text / "closed").chmod(0o755)
    assert done.stdout.strip().endswith("closed: cannot be opened: Permission denied; check its permissions"), done
