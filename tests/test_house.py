"""The house rules that a machine can check: what the documents show against the disk, layers, light imports.

``REWRITE_DOCS=1 pytest tests/test_house.py`` rewrites the generated blocks of docs/ instead of comparing them.
"""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import grimp
import pytest

from stretto.cli import main
from stretto.model.families import TABLES

SIZES = ("num_experts", "top_k", "expert_intermediate_size", "top_groups")
"""Of networks, not of families."""
ROOT = Path(__file__).resolve().parents[1]
COMMANDS, ARCHITECTURE = ROOT / "docs/COMMANDS.md", ROOT / "docs/ARCHITECTURE.md"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

MOST_FILES = 16
"""Python files in a folder: one of more is two rooms, or its ideas were cut."""
# Where an import of our own may hide in a function, besides the command line; each with the reason.
LATE_IMPORTS = {
    "stretto/api/pictures.py": "diffusers is an extra",
    "stretto/api/rl.py": "matplotlib draws the report when the run has ended",
    "stretto/api/search.py": "matplotlib draws a search, and the ranks of a training draw nothing",
    "stretto/engine/decode.py": "Triton is not on every machine",
    "stretto/ops/fp8_rows.py": "Triton is not on every machine",
    "stretto/harness/inspect_entry.py": "every command of inspect_ai loads it, whatever its model is",
    "stretto/flow/launch.py": "torch is imported where a role lives, not where it is described",
    "stretto/flow/files.py": "Ray is an extra",
    "stretto/ops/moe.py": "Triton, which few machines need, takes a second to import",
    "stretto/optim/compact.py": "Triton is not on every machine",
    "stretto/runtime/local.py": "Ray is an extra",
}

SOURCES = sorted(path for folder in ("stretto", "bench", "tests") for path in (ROOT / folder).rglob("*.py"))
RECIPES = ROOT / "stretto/recipes"  # files that users name or copy, and no part of the package
PACKAGE = [path for path in SOURCES if path.is_relative_to(ROOT / "stretto") and not path.is_relative_to(RECIPES)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    text, interval = path.read_text(encoding="utf-8"), sys.getswitchinterval()
    # Python 3.11 counts the depth of all syntax trees in the making as one (gh-106905): neither a thread that an earlier
    # test has left nor a finaliser may make another meanwhile.
    gc.disable()
    sys.setswitchinterval(60)
    try:
        return ast.parse(text, filename=str(path))
    finally:
        sys.setswitchinterval(interval)
        gc.enable()


def test_the_architecture_shows_the_rooms() -> None:
    rooms = {name: first_line(ROOT / "stretto" / name / "__init__.py") for name in layers()}
    width = max(map(len, rooms))
    check_block(ARCHITECTURE, "rooms", [f"{name:<{width}}  {line}" for name, line in rooms.items()])


def test_the_reference_shows_every_command() -> None:
    check_block(COMMANDS, "commands", command_lines(), fence="")


def test_help_shows_every_word_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written in the source is what ``--help`` shows: nothing is read as markup, and nothing is cut."""
    monkeypatch.setenv("COLUMNS", "80")
    for usage, command in commands():
        shown = command.get_help(command.make_context(usage, [], resilient_parsing=True))
        assert max(map(len, shown.splitlines())) <= 80, usage
        words = re.sub(r"\s|-", "", shown)  # lines are broken at spaces and hyphens
        for text in (command.help, *(each.help for each in command.params)):
            assert text, usage
            assert re.sub(r"\s|-", "", inspect.cleandoc(text)) in words, (usage, text)


def test_the_architecture_shows_the_files() -> None:
    check_block(ARCHITECTURE, "files", tree_lines())


def test_the_architecture_names_what_exists() -> None:
    for place, name in re.findall(
        r"`([a-z_]+/[a-z_/]*(?:\.py)?)(?::([A-Za-z_.]+))?`", ARCHITECTURE.read_text(encoding="utf-8")
    ):
        assert (ROOT / "stretto" / place).exists() or (ROOT / place).exists(), place
        for part in name.split(".") if name else ():
            assert re.search(rf"(class|def) {part}\b", (ROOT / "stretto" / place).read_text(encoding="utf-8")), (
                place,
                name,
            )


def test_no_room_is_crowded() -> None:
    folders = Counter(name_of(path.parent) for path in PACKAGE if path.name != "__init__.py")
    assert {name: num for name, num in folders.items() if num > MOST_FILES} == {}


def test_imports_form_no_circle() -> None:
    # late imports count: a circle that a function hides is a circle
    graph = grimp.build_graph("stretto", exclude_type_checking_imports=True, cache_dir=None)
    order = TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules})
    order.prepare()  # raises CycleError with the circle


def check_block(path: Path, name: str, lines: Iterable[str], fence: str = "```") -> None:
    """Compare (or rewrite) what stands between the two marks of ``name`` in ``path``."""
    text, expected = path.read_text(encoding="utf-8"), "\n".join([fence, *lines, fence])
    begin, end = f"<!-- {name}: generated -->\n", f"\n<!-- {name}: end -->"
    assert text.count(begin) == text.count(end) == 1, f"{path} needs one block marked {begin.strip()}"
    before, rest = text.split(begin)
    found, after = rest.split(end)
    if os.environ.get("REWRITE_DOCS"):
        path.write_text(before + begin + expected + end + after, encoding="utf-8")
        return
    assert found == expected, f"{path}: {name} is out of date: REWRITE_DOCS=1 pytest tests/test_house.py"


def family_lines() -> Iterator[str]:
    """What each family always has and what it may have, by the names of `ModelConfig`."""
    for family, table in TABLES.items():
        parts = [name for part in table.parts for name in part.ours]
        may = [*parts, *(name for names, _ in table.switches.values() for name in names)]
        may = [name for name in may if name not in SIZES] + ["pads"] * table.pads
        always = [] if table.has_experts else ["no experts"]
        always += [value if name == "router" else name for name, value in table.always.items() if value]
        always += [may.pop(may.index(name)) for name in ("latent", "clamped_swiglu") if name in may]
        told = [f"always {', '.join(always)}"] * bool(always) + [f"may have {', '.join(may)}"] * bool(may)
        yield f"{family:<14} {'; '.join(told)}"


def test_the_formats_show_what_families_hold() -> None:
    check_block(ROOT / "docs/FORMATS.md", "families", family_lines())


def test_the_site_shows_every_page() -> None:
    shown = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in shown if not page.startswith("project/")} == pages, "the navigation of mkdocs.yml"


def test_the_log_links_to_headings_that_exist() -> None:
    """GitHub and MkDocs make the same anchor of a heading unless two hyphens follow each other: MkDocs keeps one of them."""
    links = re.findall(r"\]\((docs/log/[^)]+\.md)#([^)]+)\)", (ROOT / "LOG.md").read_text(encoding="utf-8"))
    assert links
    anchors = {
        page: set(map(anchor_of, re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)))
        for page in {page for page, _ in links}
    }
    assert not [f"{page}#{anchor}" for page, anchor in links if anchor not in anchors[page]]


def anchor_of(heading: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def tree_lines() -> Iterator[str]:
    """The package as a tree, lowest layer first, each file with the first line of its docstring."""
    for package in layers():
        folder = ROOT / "stretto" / package
        files = sorted(path for path in folder.rglob("*.py") if path != folder / "__init__.py")
        yield f"{package}/"
        width = max((len(path.relative_to(folder).as_posix()) for path in files), default=0)
        for path in files:
            yield f"  {path.relative_to(folder).as_posix():<{width}}  {first_line(path)}"


def layers() -> list[str]:
    """Packages from the contract in pyproject.toml, lowest first."""
    contract = PYPROJECT["tool"]["importlinter"]["contracts"][0]
    return [name for layer in reversed(contract["layers"]) for name in re.findall(r"\w+", layer)]


def first_line(path: Path) -> str:
    docstring = ast.get_docstring(parse(path))
    assert docstring, f"{name_of(path)} does not say what it is for"
    return docstring.splitlines()[0].removesuffix(".").replace("``", "`")


def test_every_file_is_in_a_layer() -> None:
    shown = {path for package in layers() for path in (ROOT / "stretto" / package).rglob("*.py")}
    assert (
        sorted(
            map(name_of, set(PACKAGE) - shown - {ROOT / "stretto" / "__init__.py", ROOT / "stretto" / "__main__.py"})
        )
        == []
    )


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by its usage, in the order of ``stretto --help``; those of a group after it."""
    group: Any = main.command
    for name, command in group.commands.items():
        inner = getattr(command, "commands", {})
        yield from ((f"stretto {name} {each}", found) for each, found in inner.items())
        if not inner:
            yield f"stretto {name}", command


def command_lines() -> Iterator[str]:
    """A section for each command: what it does, and a table of its arguments and options."""
    for usage, command in commands():
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        assert command.help, f"{usage} has no help"
        yield from (f"## {usage}", "", *inspect.cleandoc(command.help).splitlines(), "")
        yield from ("| argument or option | meaning | default |", "|---|---|---|")
        for each in command.params:
            name = each.name.upper() if each in arguments else ", ".join([*each.opts, *each.secondary_opts])
            is_shown = each.default is not None and each.default is not False and each.default not in ((), [])
            # a text: the default of an option that is None if it is not given
            named = getattr(each, "show_default", None)
            shown = named if isinstance(named, str) else each.default if is_shown else ""
            default = "required" if each.required else shown
            meaning = " ".join((each.help or "").split()).replace("|", "\\|")
            yield f"| `{name}` | {meaning} | {default if not callable(default) else ''} |"
        yield ""


def test_no_import_of_our_own_hides_in_a_function() -> None:
    # The command line may: late imports keep torch out of `stretto --help`. Elsewhere one would hide an import that goes up.
    hidden = {
        name_of(path)
        for path in PACKAGE
        if not path.is_relative_to(ROOT / "stretto/cli")
        for function in ast.walk(parse(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "stretto")
    }
    assert hidden == set(LATE_IMPORTS)


def test_light_modules_do_not_import_torch() -> None:
    contract = PYPROJECT["tool"]["importlinter"]["contracts"][1]
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for source in contract["source_modules"]
        for path in [ROOT / (source.replace(".", "/") + ".py"), *(ROOT / source.replace(".", "/")).rglob("*.py")]
        if path.exists()
    ]
    assert "stretto.base.track" in modules
    assert heavy_imports(f"import {', '.join(modules)}", ["torch"]) == []


def test_help_does_not_import_torch_or_transformers() -> None:
    code = (
        "import contextlib, sys\n"
        "from stretto.cli.main import main\n"
        "sys.argv = ['stretto', '--help']\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):\n    main()"
    )
    assert heavy_imports(code, ["torch", "transformers", "datasets", "optuna", "matplotlib"]) == []


def test_a_checkpoint_that_does_not_exist_is_refused_before_torch_is_imported() -> None:
    commands = [
        *(["serve", "none"], ["chat", "none"], ["generate", "none", "--prompt", "a"], ["bench-serve", "none"]),
        *(["agent", "a", "--model", "none"], ["extract", "none", "--subnet", "full", "-o", "x"]),
        *(["quantise", "none", "-o", "x"], ["export", "none", "-o", "x"]),
    ]
    code = (
        "import contextlib, io, sys\n"
        "from stretto.cli.main import main\n"
        f"for command in {commands}:\n"
        "    sys.argv, told = ['stretto', *command], io.StringIO()\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(told):\n        main()\n"
        "    assert told.getvalue().startswith('stretto: none: config.json: no such file'), (command, told.getvalue())"
    )
    assert heavy_imports(code, ["torch"]) == []


def test_training_and_the_engine_do_not_import_the_compiler() -> None:
    assert heavy_imports("import stretto.train.loop, stretto.engine.engine", ["torch._dynamo", "triton"]) == []


def heavy_imports(code: str, names: list[str]) -> list[str]:
    """Those of ``names`` that a fresh interpreter has loaded after running ``code``."""
    report = f"\nimport sys; print(*[name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_direct_dependencies_are_pinned() -> None:
    def names(lines: list[str]) -> set[str]:
        found = (re.match(r"[A-Za-z0-9_.-]+", line) for line in lines if not line.startswith("#"))
        return {re.sub(r"[-_.]+", "-", match.group()).lower() for match in found if match}

    project = PYPROJECT["project"]
    wanted = names(
        [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    )
    pinned = names((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())
    assert pinned == wanted - {"torch", "triton"}  # a torch for GPUs asks for its own Triton


def test_the_installed_command_exists() -> None:
    module, _, function = PYPROJECT["project"]["scripts"]["stretto"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
