"""Suites that other harnesses ask, of a server of ours: started, read, and judged whole.

Each runs in a process of its own, under budgets of turns, tokens and time. What it says of a sample is taken over only where the
model was really asked: a sample in whose log one call of a model failed is an infrastructure error, whatever score stands beside it,
and where more than `MOST_INFRA` of a domain are, or the server is gone, there is no score at all.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import venv
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import httpx
from pydantic import Field

from stretto.base.config import Config
from stretto.base.errors import UserError, nearest
from stretto.base.track import progress
from stretto.evals.scores import MOST_INFRA
from stretto.server.client import SERVING

BFCL: Final = "bfcl-eval==2026.3.23"
# fmt: off
_BFCL_NEEDS: Final = (
    "numpy==1.26.4", "tree_sitter==0.21.3", "tree-sitter-java==0.21.0", "tree-sitter-javascript==0.21.4", "networkx==3.3",
    "mpmath==1.3.0", "filelock==3.20.0", "openai", "pydantic", "python-dotenv", "overrides", "pandas", "requests", "tenacity", "tqdm",
)
# fmt: on
"""Of what it asks for, all that single turns want; the rest is every vendor's client, and torch."""
TAU: Final = ("airline", "retail", "telecom", "banking")


class Budget(Config):
    """What one harness may ask for."""

    limit: int | None = Field(default=None, gt=0)
    """Problems of each domain; None: all."""
    samples: int = Field(default=1, gt=0)
    temperature: float = Field(default=0.0, ge=0)
    at_once: int = Field(default=8, gt=0)
    max_tokens: int = Field(default=512, gt=0)
    """Of one turn, of the simulated user, too."""
    turns: int = Field(default=20, gt=0)
    """Of a conversation: a simulator that never stops is ended there."""
    sample_tokens: int = Field(default=100_000, gt=0)
    sample_s: int = Field(default=900, gt=0)


@dataclass(slots=True)
class Judged:
    """What a harness said of one domain. Written by `ask`."""

    values: dict[str, list[float | None]] = field(default_factory=dict)
    """By problem, of each sample; None: an infrastructure error."""
    failures: list[str] = field(default_factory=list)
    """One of each such sample: why."""
    finishes: Counter[str] = field(default_factory=Counter)
    num_prompt: int = 0
    num_sampled: int = 0

    def add(self, problem: str, value: float | None, why: str = "", finish: str = "") -> None:
        self.values.setdefault(problem, []).append(value)
        if value is None:
            self.failures.append(why)
        else:
            self.finishes[finish] += 1

    def refuse(self, name: str) -> None:
        """Raises `UserError`: too much of it is no answer of the model."""
        num, num_failed = sum(map(len, self.values.values())), len(self.failures)
        if num == 0 or num_failed > MOST_INFRA * num:
            last = f", the last one: {self.failures[-1]}" if self.failures else ""
            problem = f"{num_failed} infrastructure errors in {num} samples{last}"
            raise UserError(f"{name}: no score: {problem}; mend that and evaluate again")


def harness_names(named: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of what ``--suite`` was given: the suites of other harnesses, and the rest."""
    parts = [part for each in named for part in each.split(",")]
    return [part for part in parts if part in SUITES], [part for part in parts if part not in SUITES]


def check_installed(suites: Collection[str]) -> None:
    """Raises `UserError`: the harness of one of ``suites`` is not there, and cannot be made."""
    if "tau" in suites:
        for package in ("inspect_ai", "inspect_evals", "openai"):
            if importlib.util.find_spec(package) is None:
                raise UserError(f"--suite tau: {package} is not installed; pip install 'stretto[eval]'")
    if "bfcl" in suites and sys.version_info >= (3, 13):
        raise UserError(
            "--suite bfcl: needs numpy 1.26, which no Python after 3.12 has; run this with Python 3.11 or 3.12"
        )


def ask(suite: str, url: str, folder: Path, budget: Budget) -> dict[str, Judged]:
    """Have the harness of ``suite`` ask the server at ``url``; what it writes goes to ``folder``.

    Raises:
        UserError: no such suite, a harness that is not installed or fails, or a domain that has no score.
    """
    if suite not in SUITES:
        raise UserError(f"--suite {suite}: no harness{nearest(suite, SUITES)}; known: {', '.join(SUITES)}")
    found = SUITES[suite](url, folder, budget)
    for name, judged in found.items():
        judged.refuse(name)
    try:
        httpx.get(f"{url}/health", timeout=60.0, trust_env=False).raise_for_status()
    except httpx.HTTPError as error:
        raise UserError(f"{suite}: no score: the server died under it: {error}; evaluate again") from None
    return found


def ask_inspect(url: str, folder: Path, budget: Budget, tasks: Mapping[str, str], *flags: str) -> dict[str, Judged]:
    """Tasks of inspect_ai by the name of their domain, through our provider. Raises `UserError`: it is not installed, or a task
    gave no log."""
    check_installed(("tau",))
    from inspect_ai.log import list_eval_logs, read_eval_log, read_eval_log_samples
    from inspect_ai.scorer import value_to_float

    told = {
        "model": f"stretto/{url}",
        "log-dir": str(folder),
        "log-format": "eval",
        "epochs": budget.samples,
        "epochs-reducer": "mean",
        "max-tokens": budget.max_tokens,
        "temperature": budget.temperature,
        "max-samples": budget.at_once,
        "max-tasks": 1,
        "token-limit": budget.sample_tokens,
        "time-limit": budget.sample_s,
        "fail-on-error": MOST_INFRA + 1e-9,  # inspect stops at the share, we above it
        "display": "none",
        **({} if budget.limit is None else {"limit": budget.limit}),
    }
    options = ["--no-log-realtime", *(f"--{name}={value}" for name, value in told.items()), *flags]
    command = [sys.executable, "-m", "inspect_ai", "eval", *tasks.values(), *options]
    _run(command, folder / "console.txt", f"inspect: {', '.join(tasks)}")
    logs = {(log := read_eval_log(path, header_only=True)).eval.task: log for path in list_eval_logs(str(folder))}
    missing = [name for name, task in tasks.items() if task not in logs]
    if missing:
        raise UserError(f"{missing[0]}: inspect wrote no log of it; {folder / 'console.txt'} says why")
    as_number, found = value_to_float(), {}
    for name, task in tasks.items():
        log, judged = logs[task], Judged()
        # One at a time: tau2's whole data base is in every one, several times
        samples = read_eval_log_samples(log.location, all_samples_required=False, exclude_fields={"messages", "store"})
        for sample in samples:
            # An agent may have caught it, and gone on as if nothing had been said
            failed = [event.error for event in sample.events if event.event == "model" and event.error]
            whys = [str(each.data) for each in sample.events if each.event == "info" and each.source == "stretto"]
            whys = [sample.attachments.get(each.removeprefix("attachment://"), each) for each in whys]
            error = next(iter([*whys, *([sample.error.message] if sample.error else []), *failed]), "")
            scores = list((sample.scores or {}).values())
            value = None if error or not scores else as_number(scores[0].value)
            finish = sample.limit.type if sample.limit else "stop"
            judged.add(str(sample.id), value, error.splitlines()[0][:300] if error else "it was not scored", finish)
            uses = sample.model_usage.values()
            judged.num_prompt += sum(use.input_tokens + (use.input_tokens_cache_read or 0) for use in uses)
            judged.num_sampled += sum(use.output_tokens for use in uses)
        if log.status != "success":
            ended = log.error.message.splitlines()[0][:300] if log.error else log.status
            why = judged.failures[-1] if judged.failures else ended
            counted = f"{len(judged.failures)} infrastructure errors in {sum(map(len, judged.values.values()))} samples"
            raise UserError(f"{name}: no score: {counted}, the last one: {why}; mend that and evaluate again")
        found[name] = judged
    return found


def ask_tau(url: str, folder: Path, budget: Budget, domains: Sequence[str] = TAU) -> dict[str, Judged]:
    """tau2: the model is the agent, and the customer as well."""
    tasks = {f"tau2_{name}": f"inspect_evals/tau2_{name}" for name in domains}
    return ask_inspect(url, folder, budget, tasks, "-T", f"message_limit={budget.turns}", "-T", "shuffle=false")


def ask_bfcl(url: str, folder: Path, budget: Budget) -> dict[str, Judged]:
    """BFCL v4, single turns, by its own questions and its own checker."""
    categories = ("simple_python", "multiple", "parallel", "irrelevance")
    told = {"url": url, "categories": categories, **budget.model_dump(), "most_infra": MOST_INFRA}
    script = Path(__file__).with_name("bfcl_inside.py")
    lines, found = folder / "bfcl.jsonl", {f"bfcl_{name}": Judged() for name in categories}
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(bfcl_python()), "-I", str(script), json.dumps(told), str(lines)]
    code = _run(command, folder / "console.txt", "bfcl", BFCL_PROJECT_ROOT=str(folder))
    for line in lines.read_text(encoding="utf-8").splitlines() if lines.is_file() else ():
        each = json.loads(line)
        judged = found[f"bfcl_{each['category']}"]
        judged.add(each["id"], each["value"], each["why"], "stop")
        judged.num_prompt, judged.num_sampled = judged.num_prompt + each["prompt"], judged.num_sampled + each["sampled"]
    if code:
        raise UserError(f"bfcl: no score: its harness ended with exit code {code}; {folder / 'console.txt'} says why")
    return found


def bfcl_python() -> Path:
    """The interpreter of BFCL's own environment, which is made where it is missing: it pins a numpy that nothing else here takes.
    Raises `UserError`: this Python is too new for it, or pip fails."""
    check_installed(("bfcl",))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stretto"
    folder = cache / f"{BFCL.replace('==', '-')}-py{sys.version_info.major}{sys.version_info.minor}"
    python, done = folder / "bin" / "python", folder / "whole"
    if not done.is_file():
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for step in ([*install, "--no-deps", BFCL], [*install, *_BFCL_NEEDS]):
            if _run(step, folder / "pip.txt", f"install {BFCL} in {folder}, once"):
                raise UserError(f"bfcl: cannot install it; {folder / 'pip.txt'} says why")
        done.touch()
    return python


SUITES: Final[Mapping[str, Callable[[str, Path, Budget], dict[str, Judged]]]] = {"tau": ask_tau, "bfcl": ask_bfcl}
"""By the name that `stretto eval --suite` takes."""


def _run(command: list[str], log: Path, label: str, **environ: str) -> int:
    """A command to its end, its exit code; it goes with us when we are stopped."""
    log.parent.mkdir(parents=True, exist_ok=True)
    offline = {"HF_HUB_OFFLINE": "1", "NO_PROXY": "*", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("ab") as file, progress(label):
        told = {**os.environ, **offline, **environ}
        return subprocess.run(command, stdout=file, stderr=file, env=told, check=False).returncode


@contextmanager
def serving(
    source: Path,
    *flags: str,
    program: Sequence[str] = ("-m", "stretto"),
    environ: Mapping[str, str] | None = None,
    log: IO[str] | None = None,
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``stretto serve`` on any free port of this machine, until the block ends: its address and its process.

    Args:
        program: what Python runs with the command's arguments.
        environ: set beside what this process has, of which it gets no keys.
        log: takes what the server writes to stderr; None: stderr of this process.

    Raises:
        UserError: it did not start.
    """
    command = [sys.executable, *program, "serve", str(source), "--port", "0", *flags]
    kept = {name: value for name, value in os.environ.items() if name not in ("STRETTO_API_KEYS", "STRETTO_ADMIN_KEY")}
    environment = kept | dict(environ or {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            with progress(f"open {source}"):
                url = next((line.split()[-1] for line in process.stdout if line.startswith(SERVING)), None)
            if url is None:
                raise UserError(f"{source}: its server did not start (exit code {process.wait()}); see above")
            yield url, process
        finally:
            process.terminate()
            try:
                process.wait(timeout=90)
            except subprocess.TimeoutExpired:
                process.kill()
