"""`stretto eval` and `stretto compare` as a user calls them, on a network with random weights."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from stretto.base.errors import UserError
from stretto.post.pipeline import COMPARISON_FILE
from stretto.post.suite import RESULT_FILE
from stretto.report.comparison import compare, comparison_table, read_comparison
from tests.api.conftest import Run, refused
from tests.report.test_evals import evaluation

SUITE = """
[small]
problems = 6
max_tokens = 5
[small.sources.sort]
kind = "strings"
args = { operation = "sort", length = 2 }
[small.sources.flip]
kind = "strings"
args = { operation = "complement", length = 2 }
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SUITE)
    return path


def test_eval_then_compare(served_run: Path, suite: Path, tmp_path: Path, stretto: Run) -> None:
    out = tmp_path / "full"
    done = stretto("eval", served_run, "--suite", suite, "--samples", 2, "-o", out)
    assert done.code == 0, done.err
    for words in ("Scores", "Trivial baseline", "Cost", "report.html"):
        assert words in done.out, words
    found = json.loads((out / "eval.json").read_text())
    assert found["name"] == "tiny"
    assert list(found["domains"]) == ["sort", "flip"]
    assert (out / "report/report.html").is_file()
    refused(
        stretto("compare", out, f"{served_run}:corner", "--battle", "--suite", suite, "-o", tmp_path / "fight"),
        "--battle: no suite has a judged source",
    )
    assert not (tmp_path / "fight").exists()
    # the smaller size has not been evaluated: it is, the other one is read
    both = tmp_path / "both"
    done = stretto("compare", out, f"{served_run}:corner", "--suite", suite, "--samples", 2, "-o", both)
    assert done.code == 0, done.err
    assert "Scores by domain" in done.out
    compared = json.loads((both / "comparison.json").read_text())
    assert compared["models"] == ["tiny", "tiny:corner"]
    assert compared["active_params"][1] < compared["active_params"][0]
    assert len(list((both / "evals").iterdir())) == 1
    taught = stretto(
        "compare", out, both / "evals" / next((both / "evals").iterdir()).name, "-o", both, "--teacher", f"sort={out}"
    )
    assert taught.code == 0
    assert "there is no gain" in " ".join(taught.out.split())
    # a teacher answers what it teaches, no more
    done = stretto("compare", out, "-o", both, "--teacher", f"sort={served_run}", "--suite", suite, "--samples", 2)
    assert done.code == 0, done.err
    folder = next(path for path in (both / "evals").iterdir() if not path.name.endswith("corner"))
    assert list(json.loads((folder / "eval.json").read_text())["domains"]) == ["sort"]


@pytest.mark.slow
def test_score_over_size(served_run: Path, suite: Path, tmp_path: Path, stretto: Run) -> None:
    done = stretto("eval", served_run, "--suite", suite, "--samples", 1, "--presets", "-o", tmp_path / "all")
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "all/comparison.json").read_text())
    assert found["models"][0] == "tiny" and "tiny:corner" in found["models"]
    assert len(set(found["flops_per_task"])) == len(found["models"]) > 1
    assert (tmp_path / "all/report/cost.png").stat().st_size > 5000
    refused(
        stretto("eval", served_run, "--suite", suite, "--presets", "--subnet", "corner", "-o", tmp_path), "--subnet"
    )


def test_refusals(served_run: Path, suite: Path, tmp_path: Path, stretto: Run) -> None:
    arguments = ("--suite", suite, "-o", tmp_path / "out")
    refused(stretto("eval", tmp_path / "nobody", *arguments), "nobody", "config.json")
    refused(stretto("eval", served_run, "--suite", "gim", "-o", tmp_path / "out"), "--suite gim", "gym")
    refused(stretto("eval", served_run, "--suite", "tua", "-o", tmp_path / "out"), "--suite tua", "did you mean 'tau'")
    refused(stretto("eval", served_run, *arguments, "--subnet", "cornr"), "--subnet cornr", "corner")
    refused(stretto("eval", served_run, *arguments, "--samples", "0"), "samples")
    refused(stretto("eval", served_run, *arguments, "--temperature", "0", "--samples", "4"), "--samples 4")
    refused(stretto("compare", served_run, served_run, "-o", tmp_path / "out"), "--suite")
    refused(stretto("compare", "nosuch", served_run, "--suite", suite, "-o", tmp_path / "out"), "nosuch: config.json")
    refused(stretto("compare", served_run, "nosuch", "--suite", suite, "-o", tmp_path / "out"), "nosuch: config.json")
    refused(
        stretto("compare", served_run, f"{served_run}:quarter", "--suite", suite, "-o", tmp_path / "out"), "quarter"
    )
    assert not (tmp_path / "out" / "evals").exists(), "no model is evaluated before the missing one is refused"
    theirs = ("--suite", "bfcl", "--right", tmp_path / "right.jsonl", "-o", tmp_path / "out")
    refused(stretto("eval", served_run, *theirs), "--right", "other harnesses")
    refused(stretto("compare", served_run, "--battle", "-o", tmp_path / "out"), "alone has no opponent")
    refused(
        stretto("compare", served_run, "-o", tmp_path / "out", "--suite", suite, "--teacher", "x"),
        "--teacher x",
        "DOMAIN=",
    )
    wrong = ("--suite", suite, "--teacher", f"sums={served_run}")
    refused(stretto("compare", served_run, "-o", tmp_path / "out", *wrong), "--teacher sums", "no such domain")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the harness needs Python 3.12 or older, and is refused first")
def test_a_checkpoint_without_a_chat_template_is_refused_before_a_harness_is_installed(
    served_run: Path, tmp_path: Path, stretto: Run
) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    shutil.copytree(served_run / "checkpoint", plain)
    (plain / "chat_template.jinja").unlink()
    refused(stretto("eval", plain, "--suite", "bfcl", "-o", out), "has no chat template", "chat_template.jinja")
    assert not out.exists()


def test_a_suite_that_is_refused_does_not_take_its_folder(
    served_run: Path, suite: Path, tmp_path: Path, stretto: Run
) -> None:
    """Or the mended command would be held to the mistaken one."""
    out = tmp_path / "out"
    refused(stretto("eval", served_run, "--suite", f"mcq={tmp_path / 'none.csv'}", "-o", out), "none.csv: no such file")
    done = stretto("eval", served_run, "--suite", suite, "--limit", 2, "--samples", 1, "-o", out)
    assert done.code == 0, done.err


def test_a_comparison_is_read_as_it_was_written(stretto: Run, tmp_path: Path) -> None:
    models = [evaluation("a", {"sums": [0.0, 0.0, 1.0]}), evaluation("b", {"sums": [1.0, 0.0, 1.0]})]
    for model in models:
        (tmp_path / model.name).mkdir()
        (tmp_path / model.name / RESULT_FILE).write_bytes(msgspec.json.encode(model))
    folders = [tmp_path / "a", tmp_path / "b"]
    assert stretto("compare", *folders, "-o", tmp_path / "c", "--reference", tmp_path / "b").code == 0
    found = read_comparison(tmp_path / "c")
    assert found is not None and found.reference == 1 and math.isnan(found.kept[0].high)  # JSON knows no infinity
    written = [[each.text, each.note] for row in comparison_table(found).rows for each in row]
    expected = comparison_table(compare(models, {}, 0, 1))
    assert written == [[each.text, each.note] for row in expected.rows for each in row]
    assert read_comparison(tmp_path / "a") is None
    older = msgspec.json.decode((tmp_path / "c" / COMPARISON_FILE).read_bytes())
    del older["num_problems"]
    (tmp_path / "c" / COMPARISON_FILE).write_bytes(msgspec.json.encode(older))
    with pytest.raises(
        UserError, match=f"num_problems.*; repeat the stage: `stretto run RECIPE -o {tmp_path} --from evaluate`"
    ):
        read_comparison(tmp_path / "c")
    refused(stretto("compare", *folders, "-o", tmp_path / "d", "--reference", "x"), "--reference x")
