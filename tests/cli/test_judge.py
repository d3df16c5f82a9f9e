"""`stretto judge`, `recipes/writing.toml` and `stretto eval --judge`, as a user calls them, on networks that can say next to nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.common.server import in_thread
from stretto.base.config import read_recipe
from stretto.base.paths import RECIPES
from stretto.evals.ranker import open_judge
from stretto.learning.recipe import RlRecipe
from stretto.server.judge import judge_server
from tests.api.conftest import Run, refused
from tests.evals.judges import network
from tests.text.books import books


@contextmanager
def serving(judge: Path) -> Iterator[tuple[str, str]]:
    """Address and name."""
    local = open_judge(judge)
    with in_thread(judge_server(local)) as url:
        yield f"{url}/v1", local.record.name


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("books") / "books.jsonl"
    path.write_text("".join(f"{json.dumps({'author': author, 'text': text})}\n" for author, text in books()))
    return path


def test_the_shipped_recipe_is_sound() -> None:
    recipe = read_recipe(RECIPES / "writing.toml", RlRecipe)
    assert recipe.rewards["writing"].diversity and recipe.rewards["writing"].length_budget and recipe.loss.kl_weight > 0
    assert {source.kind for source in recipe.sources.values()} == {"judged", "briefs", "arithmetic"}


def test_what_is_refused(stretto: Run, library: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text(library.read_text().partition("\n")[0])
    model, out = network(tmp_path), tmp_path / "judge"
    needed = "at least 16 passages by two authors are needed; name more books"
    refused(stretto("judge", "train", model, "--data", few, "-o", out), "--data: ", "passages by", needed)
    refused(stretto("judge", "train", model, "--data", library, "-o", out, "--part", "all"), "--part all: unknown")
    for both in ((), ("--data", library, "--rated", library)):
        refused(stretto("judge", "train", model, "-o", out, *both), "either --data", "or --rated")
    refused(stretto("judge", "train", model, "--rated", library, "-o", out), "record 1: needs 'text', 'author'")
    for data in (library, few):
        refused(stretto("judge", "calibrate", tmp_path, "--data", data), "judge.json: no such file")
    (tmp_path / "judges" / "another").mkdir(parents=True)
    told = ("judge", "train", model, "--data", library, "-o")
    for folder in (tmp_path / "judges", "."):
        refused(stretto(*told, folder), "holds something else than a judge, which stays")
    refused(stretto(*told, out, "--passages", "-1"), "--passages")
    refused(stretto("judge", "calibrate", "http://h:port/v1", "--name", "x", "--data", library), "Invalid port")
    gone = "http://127.0.0.1:9/v1"
    for data in (library, few):
        refused(stretto("judge", "calibrate", gone, "--data", data), gone, "cannot list its models")
    refused(
        stretto("eval", model, "--suite", "writing", "--judge", gone, "-o", tmp_path / "e"), "cannot list its models"
    )
    wrong = "sources.writing.args.judge.model=evaluation-1"
    refused(
        stretto("online", RECIPES / "writing.toml", "--model", model, "--out", tmp_path / "run", "--set", wrong),
        "evaluation-1 was trained for evaluation",
    )
    assert not out.exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("judge", "warning"),
    [
        ("reward-1", "do not follow readers' ratings"),
        ("reward-rated-1", "on other kinds of text its scores may contradict readers"),
        ("qwen", None),
    ],
)
def test_a_local_judge_as_a_reward_is_warned_of(stretto: Run, tmp_path: Path, judge: str, warning: str | None) -> None:
    settings = ("--set", f"sources.writing.args.judge.model={judge}", "--set", "loss.advantage=no_module:name")
    recipe, model = RECIPES / "writing.toml", network(tmp_path)
    done = stretto("online", recipe, "--model", model, "--out", tmp_path / "run", *settings)
    refused(done, "loss.advantage")
    said = " ".join(done.out.split())
    assert "warning: sources.writing: judge:" not in said if warning is None else warning in said, done.out


@pytest.mark.slow
def test_a_judge_of_ratings_says_what_it_was_trained_on_and_is_served(
    stretto: Run, library: Path, tmp_path: Path
) -> None:
    texts = [text.split() for _, text in books(8)]
    passages = [" ".join(text[at : at + 30]) for text in texts for at in range(0, 600, 30)]
    rated = tmp_path / "rated.jsonl"
    records = [{"text": each, "author": f"a{at % 9}", "rating": at % 5} for at, each in enumerate(passages)]
    rated.write_text("".join(f"{json.dumps(each)}\n" for each in records))
    done = stretto("judge", "train", network(tmp_path), "--rated", rated, "-o", tmp_path / "judge")
    said = " ".join(done.out.split())
    assert (
        done.code == 0 and f"of {len(set(passages))} rated texts by 9 authors; above the number of words by" in said
    ), done.err
    # the ratings are the places in a list, so nothing can be learnt of them
    assert "does not follow the ratings of rated.jsonl more closely than length and compression do" in said, said
    with serving(tmp_path / "judge") as (_, name):
        assert name.startswith("reward-rated-")


@pytest.mark.slow
def test_train_calibrate_reward_and_be_refused_as_a_judge(
    stretto: Run, library: Path, finished: Path, tmp_path: Path
) -> None:
    model = network(tmp_path)
    for part in ("reward", "evaluation"):
        done = stretto(
            "judge", "train", model, "--data", library, "-o", tmp_path / part, "--part", part, "--passages", 16
        )
        assert done.code == 0 and f"judge {part}-" in done.out, done.err
        assert "do not follow readers' ratings" in " ".join(done.out.split()), done.out
    assert not (tmp_path / "reward.states").exists()
    done = stretto("judge", "calibrate", tmp_path / "reward", "--data", library, "--passages", 4)
    assert done.code == 0 and "whole against shuffled" in " ".join(done.out.split()), done.err
    assert "80 comparisons, about " in done.out + done.err, done
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f"{json.dumps({'prompt': f'the {word} watched'})}\n" for word in "abcdefgh"))
    run = tmp_path / "run"
    with serving(tmp_path / "reward") as (url, name):
        judge = f"sources.writing.args.judge={{url='{url}', model='{name}', cache='{tmp_path / 'cache'}'}}"
        small = (
            "train.steps=2", "train.prompts=2", "train.eval_prompts=2", "rollout.group=4", "rollout.max_tokens=12", "train.seq_len=240",
            "runtime.isolate=none", "runtime.rewards.max=1", "loss.drop_uniform=false", f"sources.writing.args.path='{prompts}'", judge,
        )  # fmt: skip
        settings = [part for each in small for part in ("--set", each)]
        done = stretto(
            "online", RECIPES / "writing.toml", "--model", finished / "sft", "--out", run, "--device", "cpu", *settings
        )
        assert done.code == 0, done.err
        told = ("eval", run, "--suite", f"writing={prompts}", "--samples", 2, "--limit", 2, "-o", tmp_path / "eval")
        refused(stretto(*told, "--judge", url), f"{name} was trained to reward")
    with serving(tmp_path / "evaluation") as (url, _):
        done = stretto(*told, "--judge", url, "--human", library)
        assert done.code == 0 and "distinct-k" in done.out, done.err
    assert json.loads((tmp_path / "eval/panel.json").read_text())[0]["domain"] == "writing"
