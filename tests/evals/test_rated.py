"""Judges trained on ratings: what is read, that a planted rating is found on other authors, and what the record says of noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.base.errors import UserError
from stretto.evals.ranker import open_judge, open_reader, save_rating_judge
from stretto.evals.rated import RatedText, Ratings, measure_ratings, read_rated, train_rating_head
from stretto.text.similar import words
from tests.evals.judges import network
from tests.text.books import books

NUM = 300


def written(path: Path, rate: Callable[[int], float]) -> list[RatedText]:
    """``NUM`` texts by 30 authors, rated by their place, in a file and read again."""
    vocabulary = sorted({word for _, text in books(2) for word in text.split()})
    rng = np.random.default_rng(0)
    records = [
        {"text": " ".join(rng.choice(vocabulary, 20 + at % 7)), "author": f"a{at % 30}", "rating": rate(at)}
        for at in range(NUM)
    ]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records))
    return read_rated(path)


def states(seed: int = 0) -> torch.Tensor:
    return torch.randn(NUM, 16, generator=torch.Generator().manual_seed(seed))


def test_ratings_of_a_text_are_averaged_and_a_wrong_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rated.jsonl"
    record = {"prompt": "p", "text": "t", "author": "a", "rating": 1}
    path.write_text(f"{json.dumps(record)}\n{json.dumps(record | {'rating': '4'})}\n")
    assert read_rated(path) == [RatedText("p", "t", "a", 2.5)]
    for wrong in ({"rating": None}, {"rating": "good"}, {"rating": float("nan")}, {"author": ""}):
        path.write_text(f"{json.dumps(record)}\n{json.dumps(record | wrong)}\n")
        with pytest.raises(UserError, match=r"rated.jsonl: record 2: needs 'text', 'author' and a number as 'rating'"):
            read_rated(path)


@pytest.mark.slow
def test_a_planted_rating_is_found_on_other_authors_and_noise_is_not(tmp_path: Path) -> None:
    states_ND = states()
    planted = written(tmp_path / "planted.jsonl", lambda at: 5 + float(states_ND[at, 3]))
    found = measure_ratings(tmp_path / "planted.jsonl", planted, states_ND)
    assert (
        found.correlation.low > 0.9
        and found.is_above
        and "(planted.jsonl: rank correlation with ratings of held-out authors +" in found.scope
    )
    assert (found.num_texts, found.num_authors) == (NUM, 30)
    noise = np.random.default_rng(1).normal(size=NUM)
    found = measure_ratings(
        tmp_path / "planted.jsonl", written(tmp_path / "noise.jsonl", lambda at: noise[at]), states_ND
    )
    # independent ranks of N texts correlate by 1/√N in standard deviation; the folds add little
    assert abs(found.correlation.value) < 4 / NUM**0.5 and not found.is_above and "do not use it" in found.scope


def test_texts_of_one_length_do_not_spoil_a_good_judge(tmp_path: Path) -> None:
    """The number of words then ranks nothing: its correlation counts as 0."""
    states_ND = states()
    longer = written(tmp_path / "r.jsonl", lambda at: 5 + float(states_ND[at, 3]))[:120]
    rated = [replace(each, text=" ".join(words(each.text)[:10])) for each in longer]
    found = measure_ratings(tmp_path / "r.jsonl", rated, states_ND[:120])
    assert found.above_words == found.correlation and found.correlation.low > 0.8
    assert found.is_above and "do not use it" not in found.scope


@pytest.mark.slow
def test_an_authors_own_level_is_no_evidence(tmp_path: Path) -> None:
    """States that name the author and a rating that only the author sets: nothing is learnt of another author."""
    level = np.random.default_rng(2).normal(size=30)
    named_ND = torch.eye(30)[torch.arange(NUM) % 30]
    rated = written(tmp_path / "levels.jsonl", lambda at: float(level[at % 30]))
    found = measure_ratings(tmp_path / "levels.jsonl", rated, named_ND)
    assert found.correlation.low < 0.1 and not found.is_above
    head = train_rating_head(named_ND, torch.tensor([each.rating for each in rated]))
    own = np.corrcoef(head(named_ND).numpy(), [each.rating for each in rated])[0, 1]
    assert own > 0.9, "the head itself has learnt the authors"


def test_too_few_ratings_and_equal_ratings_are_refused(tmp_path: Path) -> None:
    rated, states_ND = written(tmp_path / "r.jsonl", float), states()
    needed = "at least 100 texts by 5 authors are needed"
    with pytest.raises(UserError, match=rf"--rated .*: 99 texts by 30 authors; {needed}"):
        measure_ratings(tmp_path / "r.jsonl", rated[:99], states_ND[:99])
    with pytest.raises(UserError, match="all ratings are equal"):
        train_rating_head(states_ND, torch.ones(NUM))


@pytest.mark.slow
def test_a_judge_of_ratings_reads_the_whole_text_without_layout_and_company(tmp_path: Path) -> None:
    reader = open_reader(network(tmp_path), dtype=torch.float32)
    texts = [text[:1500] for _, text in books(3)] + [""]
    together_ND = reader.mean_states(texts)
    assert torch.equal(together_ND[-1], torch.zeros(together_ND.shape[1]))
    for at, text in enumerate(texts):  # fp32 sums of a few hundred tokens, in another order
        torch.testing.assert_close(reader.mean_states([text])[0], together_ND[at], rtol=1e-4, atol=1e-5)
    longer = reader.mean_states([texts[0] + " " + books(3)[1][1][:3000]])
    assert not torch.allclose(longer[0], together_ND[0], atol=1e-3), "the end of a long text counts"

    rated = written(tmp_path / "r.jsonl", lambda at: float(at % 11))[:120]
    states_ND = reader.mean_states([each.text for each in rated])
    ratings = measure_ratings(tmp_path / "r.jsonl", rated, states_ND)
    head = train_rating_head(states_ND, torch.tensor([each.rating for each in rated]))
    record = save_rating_judge(tmp_path / "judge", reader, head, "reward", rated, states_ND, ratings)
    judge = open_judge(tmp_path / "judge", dtype=torch.float32)
    assert judge.record == record and isinstance(record.ratings, Ratings) and record.name.startswith("reward-rated-")
    asked = [("p", rated[0].text), ("another", f"- {rated[0].text}"), ("p", ""), ("p", "这是一个完全不同的故事")]
    scores_N = judge.scores(asked)
    assert scores_N[0] == pytest.approx(scores_N[1], abs=1e-4) and np.isneginf(scores_N[2:]).all()
    assert scores_N[0] == pytest.approx(float(head(states_ND[:1])), abs=1e-3)
    assert 0 < judge.shares_of(scores_N[:1])[0] < 1
