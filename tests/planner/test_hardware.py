"""The hardware table, and the text form of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.base.errors import UserError
from stretto.planner.hardware import HARDWARE, Cluster, parse_cluster

LOG = Path(__file__).parents[2] / "docs" / "log"


def test_a_cluster_is_a_number_and_a_kind() -> None:
    assert parse_cluster("64xH100") == Cluster(64, HARDWARE["H100"])
    assert parse_cluster("2 x CPU") == Cluster(2, HARDWARE["cpu"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("64", "for example 64xH100"),
        ("xH100", "for example 64xH100"),
        ("0xH100", "for example 64xH100"),
        ("64xH10", "did you mean 'H100'?"),
        ("64xmi300", "did you mean 'MI300X'?"),
        ("64xTPU", "unknown hardware 'TPU'"),
    ],
)
def test_other_texts_are_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match="--gpus") as refused:
        parse_cluster(text)
    assert words in str(refused.value)


def test_every_measured_efficiency_names_an_entry_of_the_log() -> None:
    headings = {
        line.removeprefix("## ").strip()
        for page in LOG.glob("*.md")
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("## ")
    }
    numbers = [value for each in HARDWARE.values() for value in (*each.share.values(), each.layer_s)]
    sources = {each.source for each in numbers if each.source}
    assert sources and sources <= headings
