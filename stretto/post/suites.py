"""Suites of task sources, as files and names describe them, and the options of an evaluation."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from stretto.base.config import Config, plain_tree, read_tree, validate
from stretto.base.errors import UserError, nearest
from stretto.base.paths import separated
from stretto.flow.prompts import SourceTables
from stretto.learning.recipe import RlRecipe, SourceConfig
from stretto.learning.roles import SandboxConfig
from stretto.tasks.registry import checked_source
from stretto.tasks.task import ScoreTimeoutError, TaskSource

SUITES = Path(__file__).with_name("suites.toml")
DEFAULT_SAMPLES = 4
"""Number of samples per problem where answers are sampled; greedy decoding gives one."""


class SuiteConfig(Config):
    """A table of a suite file."""

    sources: dict[str, SourceConfig] = Field(min_length=1)
    """Sources by name; each is a domain."""
    data: str = ""
    """Content of the file that the suite needs (``--suite NAME=PATH``); empty: none."""
    problems: int = Field(default=100, gt=0)
    """Number of problems per source; all problems of a smaller source."""
    max_tokens: int = Field(default=512, gt=0)
    """Tokens that the model may write per sample, over all turns."""
    max_turns: int = Field(default=1, gt=0)
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0: greedy decoding, as published figures of most benchmarks use it."""
    samples: int | None = Field(default=None, gt=0)
    """Number of samples per problem; None: 1 for greedy decoding, otherwise `DEFAULT_SAMPLES`."""
    sandbox: SandboxConfig = SandboxConfig()


class EvalOptions(Config):
    """Options of `evaluate`."""

    samples: int | None = Field(default=None, gt=0)
    """Number of samples per problem; None: the suite's."""
    limit: int | None = Field(default=None, gt=0)
    """Number of problems per source; None: the suite's."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; None: the suite's."""
    seed: int = 0
    baselines: bool = True
    """Whether to score trivial baselines."""
    threads: int = Field(default=1, gt=0)
    max_batch: int = Field(default=64, gt=0)


def parse_suites(named: Sequence[str] | Mapping[str, Any], beside: Collection[str] = ()) -> dict[str, SuiteConfig]:
    """Suites by name. An element of ``named`` is ``NAME`` or ``NAME=DATA`` of a shipped suite, a TOML or JSON file with tables of suites, or
    an RL recipe (its sources, and as many problems as it holds out), or several of them joined by commas. A mapping has the content of such
    a file; the ``kind`` of a source in it may be a class.

    Args:
        beside: further names that error messages offer.

    Raises:
        UserError: no such suite or file, a suite without its data, a source with a wrong kind or argument, or two suites or two domains
            with the same name.
    """
    if isinstance(named, Mapping):
        return _suites_in(plain_tree(named), "suites", "recipe", None)
    found: dict[str, SuiteConfig] = {}
    for text in separated(named):
        name, _, data = (text, "", "") if os.path.isfile(text) else text.partition("=")
        path = Path(name)
        is_file = path.suffix in (".toml", ".json")
        tree = read_tree(path if is_file else SUITES)
        if not is_file and name not in tree:
            known = [*tree, *beside]
            raise UserError(
                f"--suite {name}: no such suite{nearest(name, known)}; use {', '.join(known)}, or FILE.toml"
            )
        new = _suites_in(tree if is_file else {name: tree[name]}, name, path.stem, data)
        if twice := [key for key, suite in new.items() if found.get(key, suite) != suite]:
            raise UserError(
                f"--suite: two suites are called {twice[0]}; rename one, or evaluate it into another folder"
            )
        found |= new
    _check_names(found, "--suite")
    return found


def _suites_in(tree: Mapping[str, Any], place: str, title: str, data: str | None) -> dict[str, SuiteConfig]:
    """The suites in the tables of ``tree``, or of an RL recipe, whose suite is called ``title``. Messages begin with ``place``.
    ``data``: path of the data of suites that need some; empty: none was named; None: their sources have it."""
    if not tree:
        raise UserError(f"{place}: contains no suite; add a table [NAME.sources.DOMAIN]")
    if "train" in tree:
        recipe = validate(RlRecipe, tree, place)
        limits = {key: getattr(recipe.rollout, key) for key in ("max_tokens", "max_turns", "temperature")}
        num = -(-recipe.train.eval_prompts // len(recipe.sources))
        check_kinds(recipe.sources, place)
        return {title: SuiteConfig(sources=recipe.sources, problems=num, sandbox=recipe.sandbox, **limits)}
    found = {}
    for key in tree:
        suite = validate(SuiteConfig, tree[key], f"{place}: {key}")
        if suite.data and data == "":
            raise UserError(f"--suite {place}: needs its data: {place}=PATH, {suite.data}")
        path_args = {"path": data} if data else {}
        sources = {each: source.replace(args=source.args | path_args) for each, source in suite.sources.items()}
        found[key] = suite.replace(sources=sources)
    _check_names(found, place)
    for key, suite in found.items():
        check_kinds(suite.sources, f"{place}: {key}")
    return found


def check_kinds(sources: Mapping[str, SourceConfig], place: str) -> None:
    """Check kinds and arguments of ``sources``. Raises `UserError`, with a message that starts with ``place``."""
    for name, source in sources.items():
        judge = {"judge": "scripted"} if source.kind == "judged" else {}  # a judge may be named later, with --judge
        with errors_about(place):
            checked_source(name, source.replace(args=judge | source.args))


def _check_names(suites: Mapping[str, SuiteConfig], place: str) -> None:
    names = Counter(name for suite in suites.values() for name in suite.sources)
    if twice := [name for name, num in names.items() if num > 1]:
        raise UserError(f"{place}: {twice[0]}: two sources have this name; rename one")


def samples_at(temperature: float, wanted: int | None, where: str) -> int:
    """Number of samples per problem: ``wanted``, or the default at this temperature. Raises `UserError`: several samples with greedy
    decoding; the message begins with the suite ``where``."""
    num_samples = wanted or (DEFAULT_SAMPLES if temperature > 0 else 1)
    if temperature == 0 and num_samples > 1:
        raise UserError(
            f"--samples {num_samples}: {where} decodes greedily (temperature 0), so all samples of a problem are equal; "
            "leave --samples out, or give a --temperature above 0"
        )
    return num_samples


def suites_of(asked: Mapping[str, Any]) -> dict[str, SuiteConfig]:
    """The suites that an evaluation's settings record."""
    return {name: validate(SuiteConfig, suite, name) for name, suite in asked["suites"].items()}


def only_domains(suites: Mapping[str, SuiteConfig], domains: Collection[str]) -> dict[str, SuiteConfig]:
    """``suites`` with the sources named in ``domains`` only; suites without any are left out."""
    found = {}
    for name, suite in suites.items():
        if sources := {key: source for key, source in suite.sources.items() if key in domains}:
            found[name] = suite.replace(sources=sources)
    return found


@contextmanager
def opened_sources(suites: Mapping[str, SuiteConfig]) -> Iterator[dict[str, TaskSource]]:
    """All sources of ``suites`` by name, open until the context ends."""
    with ExitStack() as stack:
        opened: dict[str, TaskSource] = {}
        for name, suite in suites.items():
            with errors_about(f"suite {name}"):
                opened |= stack.enter_context(SourceTables(suite.sources, suite.sandbox).opened())
        yield opened


@contextmanager
def errors_about(place: str) -> Iterator[None]:
    """Context in which the message of a `UserError` about a source begins with ``place``."""
    try:
        yield
    except ScoreTimeoutError:  # its class keeps the source open
        raise
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
