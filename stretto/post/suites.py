"""Suites of task sources, as files and names describe them, and the options of an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from stretto.base.config import Config, read_tree, validate
from stretto.base.errors import UserError, nearest
from stretto.flow.launch import SourceTables
from stretto.learning.recipe import RlRecipe, SourceConfig
from stretto.learning.roles import SandboxConfig
from stretto.tasks.task import TaskSource

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
    embed: Path | None = None
    """Checkpoint whose hidden states measure the similarity of answers; None: character trigrams."""
    threads: int = Field(default=1, gt=0)
    max_batch: int = Field(default=64, gt=0)


def parse_suites(named: Sequence[str], beside: Collection[str] = ()) -> dict[str, SuiteConfig]:
    """Suites by name. An element of ``named`` is ``NAME`` or ``NAME=DATA`` of a shipped suite, a TOML or JSON file with tables of suites, or
    an RL recipe (its sources, and as many problems as it holds out), or several of them joined by commas.

    Args:
        beside: further names that error messages offer.

    Raises:
        UserError: no such suite or file, a suite without its data, or two suites or two domains with the same name.
    """
    found: dict[str, SuiteConfig] = {}

    def add(key: str, suite: SuiteConfig) -> None:
        if found.setdefault(key, suite) != suite:
            raise UserError(f"--suite: two suites are called {key}; rename one, or evaluate it into another folder")

    for text in ",".join(named).split(",") if named else ():
        name, _, data = text.partition("=")
        path = Path(name)
        is_file = path.suffix in (".toml", ".json")
        tree = read_tree(path if is_file else SUITES)
        if not is_file and name not in tree:
            known = [*tree, *beside]
            raise UserError(
                f"--suite {name}: no such suite{nearest(name, known)}; use {', '.join(known)}, or FILE.toml"
            )
        if not tree:
            raise UserError(f"--suite {name}: contains no suite; add a table [NAME.sources.DOMAIN]")
        if "train" in tree:
            recipe = validate(RlRecipe, tree, str(path))
            limits = {key: getattr(recipe.rollout, key) for key in ("max_tokens", "max_turns", "temperature")}
            num = -(-recipe.train.eval_prompts // len(recipe.sources))
            add(path.stem, SuiteConfig(sources=recipe.sources, problems=num, sandbox=recipe.sandbox, **limits))
            continue
        for key in tree if is_file else [name]:
            suite = validate(SuiteConfig, tree[key], f"{name}: {key}")
            if suite.data and not data:
                raise UserError(f"--suite {name}: needs its data: {name}=PATH, {suite.data}")
            path_args = {"path": data} if data else {}
            sources = {each: source.replace(args=source.args | path_args) for each, source in suite.sources.items()}
            add(key, suite.replace(sources=sources))
    names = Counter(name for suite in found.values() for name in suite.sources)
    if twice := [name for name, num in names.items() if num > 1]:
        raise UserError(f"--suite: {twice[0]}: two sources have this name; rename one")
    return found


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
        tables = [SourceTables(suite.sources, suite.sandbox) for suite in suites.values()]
        yield {name: source for table in tables for name, source in stack.enter_context(table.opened()).items()}
