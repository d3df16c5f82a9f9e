from __future__ import annotations

from pathlib import Path

import pytest

from stretto.base.errors import UserError
from stretto.base.plugin import load_named


def test_a_file_is_a_module_of_its_own_and_runs_once(tmp_path: Path) -> None:
    """Two files of one name are two modules; one that is named twice keeps what it remembers."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(
            f"seen = []\ndef where():\n    return {folder!r}\n", encoding="utf-8"
        )
    assert [load_named(f"{tmp_path / folder / 'mine.py'}:where", "it")() for folder in ("a", "b", "a")] == [
        "a",
        "b",
        "a",
    ]
    seen = load_named(f"{tmp_path / 'a' / 'mine.py'}:seen", "it")
    assert load_named(f"{tmp_path / 'a' / 'mine.py'}:seen", "it") is seen
    with pytest.raises(UserError, match=r"^it: .*mine\.py has no 'sean' \(did you mean 'seen'\?\); name"):
        load_named(f"{tmp_path / 'a' / 'mine.py'}:sean", "it")
    assert load_named("json:loads", "it")("[1]") == [1]


@pytest.mark.parametrize(
    ("content", "problem"),
    [("import nowhere_to_be_found", "No module named"), ("x = (", "never closed"), ("1 / 0", "ZeroDivisionError: ")],
)
def test_a_file_that_cannot_be_imported_is_one_line_each_time(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(content, encoding="utf-8")
    for _ in range(2):
        with pytest.raises(UserError, match=problem) as caught:
            load_named(f"{path}:f", "loss.advantage")
        assert str(caught.value).startswith(f"loss.advantage: cannot import '{path}': ") and "\n" not in str(
            caught.value
        )
    path.write_text("def f(): return 7", encoding="utf-8")
    assert load_named(f"{path}:f", "it")() == 7, "mended"
