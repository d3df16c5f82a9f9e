"""Checkpoints that transformers made and saved, read and written by us: a small run of `bench.families_equality`."""

from __future__ import annotations

import pytest

from bench.common.foreign import Draw, draw
from bench.families_equality import MUTANTS, judge, quiet
from stretto.model.families import FAMILIES, Family


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet()


def judged(drawn: Draw) -> tuple[str, str]:
    found = judge(drawn)
    return found.verdict, "" if found.verdict in ("exact", "refused") else f"{drawn.label()}: {found.told}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_network_of_transformers_is_computed_alike_and_goes_back(family: Family) -> None:
    assert judged(draw(family, 0, refused=0)) == ("exact", "")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_switch_of_a_family_is_exact_or_refused_by_name(family: Family) -> None:
    for seed in range(1, 16):
        drawn = draw(family, seed)
        assert judged(drawn) == ("exact" if drawn.refused is None else "refused", "")


CAUGHT_BY: dict[str, tuple[Family, ...]] = {}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [name for name in MUTANTS if name is not None])
def test_a_mutant_is_found_out(mutant: str) -> None:
    with MUTANTS[mutant]():
        verdicts = {judge(draw(family, seed, refused=0)).verdict for family in FAMILIES for seed in range(3)}
    assert "wrong" in verdicts
