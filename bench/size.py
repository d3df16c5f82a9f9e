"""Measure the size and structure of the code against the limits of the project: lines, files, the largest folder, import circles.

    python -m bench.size

Lines of code leave out blank lines, comments, docstrings and imports. A folder's files are its Python files without ``__init__.py``.
A circle is one between modules of the package, imports inside functions included. Exits with 1 if a limit is exceeded.
"""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

from bench.common.measure import bench_parser, finish, table
from stretto.base.track import wide_console

ROOT = Path(__file__).resolve().parents[1]
MOST_CODE = {"stretto": 35_000}
MOST_LINES = {"bench": 9_000}
MOST_FILES = {"stretto": 16}
"""In one folder."""


def code_lines(text: str) -> int:
    """Lines of ``text`` that are neither blank, comment, docstring nor import."""
    spans = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str))
    ]
    lines = text.splitlines()
    left_out = sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in spans)
    return len(lines) - left_out - sum(not line.strip() or line.strip().startswith("#") for line in lines)


def circle() -> str:
    """The first import circle of the package; empty where there is none."""
    graph = grimp.build_graph("stretto", exclude_type_checking_imports=True, cache_dir=None)
    order = TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules})
    try:
        order.prepare()
    except CycleError as error:
        return " -> ".join(error.args[1])
    return ""


def main() -> None:
    bench_parser(__doc__).parse_args()
    console = wide_console()
    shown = table("size of the code", "", "lines of code", "lines", "files", "largest folder", "limit")
    failures = []
    for name in ("stretto", "tests", "bench"):
        files = sorted((ROOT / name).rglob("*.py"))
        texts = [path.read_text(encoding="utf-8") for path in files]
        num_code, num_lines = sum(map(code_lines, texts)), sum(len(text.splitlines()) for text in texts)
        folders = Counter(path.parent for path in files if path.name != "__init__.py")
        folder, num_files = folders.most_common(1)[0]
        limits = []
        for unit, limit, value in (
            ("lines of code", MOST_CODE.get(name), num_code),
            ("lines", MOST_LINES.get(name), num_lines),
            ("files in a folder", MOST_FILES.get(name), num_files),
        ):
            if limit is not None:
                limits.append(f"{limit:,} {unit}")
                failures += [f"{name}: {value:,} {unit}, at most {limit:,}"] if value > limit else []
        largest = f"{folder.relative_to(ROOT)}: {num_files}"
        shown.add_row(name, f"{num_code:,}", f"{num_lines:,}", f"{len(files):,}", largest, ", ".join(limits))
    console.print(shown)
    modules = circle()
    console.print(f"import circles: {modules or 'none'}")
    finish([*failures, *([f"circle: {modules}"] if modules else [])])


if __name__ == "__main__":
    main()
