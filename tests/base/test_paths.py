"""Files appear whole or not at all."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import pytest

from stretto.base import paths
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder, claimed, read_json, replacing, require_new, write_json, write_text


def test_a_file_takes_its_place_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "a.json", {"key": "é"})
    write_json(tmp_path / "new" / "a.json", {"key": 2})
    assert read_json(tmp_path / "new" / "a.json") == {"key": 2}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_a_folder_replaces_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with replacing(tmp_path / "out") as temporary:
            temporary.mkdir()
            (temporary / text).write_text(text)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "second"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_there_at_every_moment_of_its_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    """A kill between two renames would leave none; where the system cannot exchange two folders, two renames it is."""
    rename, moments = Path.rename, []

    def watched(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        moments.append((tmp_path / "out").exists())
        return moved

    monkeypatch.setattr(Path, "rename", watched)
    if not can_exchange:
        monkeypatch.setattr(paths, "_exchange", lambda first, second: False)
    test_a_folder_replaces_a_folder_that_is_not_empty(tmp_path)
    # the first rename of a folder that is new does not count
    assert moments == ([] if can_exchange else [False, True])


def test_a_claim_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom stretto.base.paths import replacing\n"
        "with replacing(sys.argv[1]) as partial:\n    partial.mkdir()\n    (partial / 'big').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = tmp_path / "run"
    for path in (run / "snapshots" / "1", run / "search" / "2", run / "3"):
        subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    (run / ".mine.partial").write_text("of the user")
    (run / "search" / ".lock").write_text("another process may write here")
    left = sorted(run.rglob("*.partial"))
    assert len(left) == 4
    with claimed(run):
        assert sorted(run.rglob("*.partial")) == left, "not a run folder"
    write_json(run / "run.json", {})
    with claimed(run):
        kept = [run / ".mine.partial", *(run / "search").glob(".2.*.partial")]
        assert sorted(run.rglob("*.partial")) == sorted(kept)


def test_a_claim_without_a_result_leaves_no_lock(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("of the user")
    with claimed(tmp_path), claimed(tmp_path / "a" / "b"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_claim_is_refused_whose_lock_file_was_removed_while_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_made_again: bool
) -> None:
    lock, flock = tmp_path / ".lock", fcntl.flock

    def flock_too_late(file: TextIO, how: int) -> None:
        lock.rename(tmp_path / "removed")
        if is_made_again:
            lock.write_text("process 1 on another host")
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock_too_late)
    with pytest.raises(UserError, match="is running in it; wait for its end"), claimed(tmp_path):
        pass


@pytest.mark.parametrize("name", ["run.json", "recipe.json"])
def test_a_run_that_was_copied_without_its_lock_file_keeps_the_new_one(tmp_path: Path, name: str) -> None:
    """Readers of text leave out a folder with both."""
    write_json(tmp_path / name, {})
    with claimed(tmp_path):
        pass
    assert (tmp_path / ".lock").is_file()


def test_the_files_of_a_healing_are_no_checkpoint(tmp_path: Path) -> None:
    for path in ("healed/config.json", "healed.run/run.json", "other.run/run.json"):
        write_json(tmp_path / path, {})
    with pytest.raises(UserError, match=r"healed.run: .* whose checkpoint is .*/healed; name that$"):
        checkpoint_folder(tmp_path / "healed.run")
    with pytest.raises(UserError, match=r"other.run: .* none yet; finish it with --resume$"):
        checkpoint_folder(tmp_path / "other.run")


@pytest.mark.parametrize("name", [".", "/"])
def test_a_folder_without_a_name_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"config.json: no such file; name a run or a Hugging Face checkpoint folder$"):
        checkpoint_folder(Path(name))


def test_two_writers_of_one_process_id_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    """As in two containers over one folder; here it is the same process."""
    with replacing(tmp_path / "a") as first:
        first.write_text("first")
        write_text(tmp_path / "a", "second")
        assert (tmp_path / "a").read_text() == "second" and first.read_text() == "first"
    assert (tmp_path / "a").read_text() == "first"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_a_failed_attempt_leaves_the_older_result(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a") as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert (tmp_path / "a").read_text() == "old"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_a_folder_that_cannot_be_made_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"a.json: cannot be written: File exists; choose another folder"):
        write_json(tmp_path / "file" / "a.json", 1)


def test_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(UserError, match="a: cannot be written: a folder is not replaced by a file"):
        write_text(tmp_path / "a", "x")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b"]


def test_a_missing_input_is_not_reported_as_the_output(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "out") as temporary:
        temporary.write_text((tmp_path / "input").read_text())


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    # A limit on the size of files stops a write in its middle, as a full disk does. It cannot be lifted, hence the child.
    code = (
        "import resource, sys\n"
        "from stretto.base.errors import UserError\n"
        "from stretto.base.paths import write_text\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "try:\n    write_text(sys.argv[1], 'x' * 1_000_000)\n"
        "except UserError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True, check=True)
    assert "a: cannot be written" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_permission_to_write_is_named_before_any_work(tmp_path: Path) -> None:
    # The superuser may write everywhere, hence the child, which becomes somebody else.
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from stretto.base.errors import UserError\n"
        "from stretto.base.paths import require_writable, write_text\n"
        "os.chdir(sys.argv[1])\n"
        "if os.getuid() == 0:\n    os.setuid(65534)\n"
        "for attempt in (lambda: write_text('a', 'x'), lambda: require_writable(Path('runs/demo'))):\n"
        "    try:\n        attempt()\n"
        "    except UserError as error:\n        print(error)"
    )
    tmp_path.chmod(0o555)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    remedy = "cannot be written: Permission denied; choose a folder that you may write to"
    assert done.stdout.splitlines() == [f"a: {remedy}", f"runs/demo: {remedy}"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"9" * 5000])
def test_damaged_json_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.json: not readable as JSON"):
        read_json(tmp_path / "a.json")


def test_missing_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.json: no such file"):
        read_json(tmp_path / "a.json")


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from stretto.base.paths import claimed\n"
        "with claimed(Path(sys.argv[1])): print('in', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"in\n"
        with (
            pytest.raises(UserError, match=rf"run: process {other.pid} on .* is running in it"),
            claimed(tmp_path / "run"),
        ):
            raise AssertionError("claimed twice")
        other.kill()
        other.wait()
    with claimed(tmp_path / "run"):
        pass
    with pytest.raises(UserError, match="refused"), claimed(tmp_path / "new"):
        raise UserError("refused before anything began")
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError), claimed(tmp_path / "runs" / "new"):
        raise UserError("refused before anything began")
    assert not (tmp_path / "runs").exists(), "nor folders above it, which the claim made"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError), claimed(tmp_path / "empty"):
        raise UserError("refused before anything began")
    assert not any((tmp_path / "empty").iterdir())
    with claimed(tmp_path / "empty"):
        (tmp_path / "empty" / "result").touch()
    assert (tmp_path / "empty" / ".lock").is_file()


def test_the_end_of_a_claim_keeps_the_lock_file_of_the_next(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old")
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(claimed(out))
        with replacing(out) as new:
            new.mkdir()
            (new / "config.json").write_text("new")
        second.enter_context(claimed(out))  # the lock file of the first went with the old folder
        first.close()
        with pytest.raises(UserError, match="is running in it"), claimed(out):
            raise AssertionError("claimed twice")
    with claimed(out):
        out.rename(tmp_path / "moved")
        out.write_text("a file")


def test_a_folder_with_a_lock_file_alone_is_new(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    require_new(tmp_path, force=False)
    (tmp_path / "result").touch()
    with pytest.raises(UserError, match="exists already"):
        require_new(tmp_path, force=False)


@pytest.mark.parametrize("block", ["claimed(out)", "replacing(out)", "claimed(out), replacing(out / 'file')"])
def test_sigterm_keeps_its_action(tmp_path: Path, block: str) -> None:
    """A role and a worker of a pool must end, or the process that started them takes the signal for an error of its work."""
    code = f"""
import signal, sys
from pathlib import Path
from stretto.base.paths import claimed, replacing
out = Path(sys.argv[1]) / "out"
with {block}:
    try:
        signal.raise_signal(signal.SIGTERM)
    except BaseException as error:
        sys.exit(f"{{error!r}}")
"""
    assert subprocess.run([sys.executable, "-c", code, tmp_path], check=False).returncode == -signal.SIGTERM
