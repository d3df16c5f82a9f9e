"""Suites of other harnesses (tau2 by inspect_ai, BFCL): run against a server of Stretto, with trivial baselines by the same harness.

Each harness runs in its own process and limits the number of turns as its benchmark does; `Budget` limits the tokens of a turn and the
time. A sample in whose log a request to the model failed is an infrastructure error, whatever score the harness gives. A domain with more
than `MOST_INFRA` such samples has no score, and neither has a suite whose server died.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import venv
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import IO, Final

import httpx
from pydantic import Field

from stretto.base.config import Config
from stretto.base.errors import UserError, nearest
from stretto.base.paths import remove, separated, user_cache
from stretto.base.track import progress, say
from stretto.evals.scores import MOST_INFRA
from stretto.server.client import SERVING

BFCL: Final = "bfcl-eval==2026.3.23"
# fmt: off
_BFCL_NEEDS: Final = (
    "numpy==1.26.4", "tree_sitter==0.21.3", "tree-sitter-java==0.21.0", "tree-sitter-javascript==0.21.4", "networkx==3.3",
    "mpmath==1.3.0", "filelock==3.20.0", "openai", "pydantic", "python-dotenv", "overrides", "pandas", "requests", "tenacity", "tqdm",
)
# fmt: on
"""The part of BFCL's requirements that its single-turn categories need. The rest are clients of model vendors, and torch."""
BASELINES: Final = ("empty", "calls")
CONSOLE_FILE: Final = "console.txt"
"""Output of a harness, in the folder of its results."""
"""Trivial baselines: a model that ends every conversation at once; one that calls the first tool without arguments."""
_STOP: Final = "###STOP###"
"""Text with which tau2's simulated customer ends a conversation. BFCL reads it as an answer without a call."""
TAU: Final = ("airline", "retail", "telecom", "banking")


class Budget(Config):
    """Limits of one run of a harness."""

    limit: int | None = Field(default=None, gt=0)
    """Number of problems of each domain; None: all."""
    samples: int = Field(default=1, gt=0)
    """Number of samples per problem."""
    temperature: float = Field(default=0.0, ge=0)
    at_once: int = Field(default=8, gt=0)
    """Number of samples that run concurrently."""
    max_tokens: int = Field(default=512, gt=0)
    """Largest number of tokens of one turn, also of the simulated user's."""
    sample_s: int = Field(default=3600, gt=0)
    """Time limit of a sample, seconds. It ends conversations that hang; none should reach it."""


@dataclass(slots=True)
class Judged:
    """Scores of one domain by its harness. Written by `ask`."""

    values: dict[str, list[float | None]] = field(default_factory=dict)
    """Score of each sample by problem; None: an infrastructure error."""
    failures: list[str] = field(default_factory=list)
    """Reason of each infrastructure error."""
    finishes: Counter[str] = field(default_factory=Counter)
    """Number of samples by the reason why they ended."""
    num_prompt: int = 0
    """Number of prompt tokens."""
    num_sampled: int = 0
    """Number of generated tokens."""
    baselines: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    """``values`` of trivial baselines, by their names."""

    def add(self, problem: str, value: float | None, why: str = "", finish: str = "stop") -> None:
        self.values.setdefault(problem, []).append(value)
        if value is None:
            self.failures.append(why)
        else:
            self.finishes[finish] += 1

    def refuse(self, name: str) -> None:
        """Raises `UserError` if there are no samples, or too many infrastructure errors."""
        num, num_failed = sum(map(len, self.values.values())), len(self.failures)
        if num == 0 or num_failed > MOST_INFRA * num:
            last = f", the last one: {self.failures[-1]}" if self.failures else ""
            problem = f"{num_failed} infrastructure errors in {num} samples{last}"
            raise UserError(f"{name}: no score: {problem}; mend that and evaluate again")


def harness_names(named: Sequence[str]) -> tuple[list[str], list[str]]:
    """Values of ``--suite``, split into suites of other harnesses and the rest."""
    parts = separated(named)
    return [part for part in parts if part in SUITES], [part for part in parts if part not in SUITES]


def check_installed(suites: Collection[str]) -> None:
    """Raises `UserError` if the harness of one of ``suites`` is not installed and cannot be."""
    if "tau" in suites:
        for package in ("inspect_ai", "inspect_evals", "openai"):
            if importlib.util.find_spec(package) is None:
                raise UserError(f"--suite tau: {package} is not installed; pip install 'stretto[eval]'")
    if "bfcl" in suites and sys.version_info >= (3, 13):
        raise UserError(
            "--suite bfcl: needs numpy 1.26, which no Python after 3.12 has; run this with Python 3.11 or 3.12"
        )


def ask(suite: str, url: str, folder: Path, budget: Budget, has_baselines: bool = True) -> dict[str, Judged]:
    """Run the harness of ``suite`` on the model behind ``url``. The harness writes into ``folder``, which is deleted before: it cannot
    resume. ``has_baselines``: run it on the trivial baselines before, with one sample per problem.

    Returns:
        The scores by domain.

    Raises:
        UserError: no such suite, a harness that is not installed or fails, or a domain without a score.
    """
    if suite not in SUITES:
        raise UserError(f"--suite {suite}: no harness{nearest(suite, SUITES)}; known: {', '.join(SUITES)}")
    marks = (folder, *(folder / f"baseline-{rule}" for rule in BASELINES))
    if folder.exists() and any(folder.iterdir()) and not any((mark / CONSOLE_FILE).is_file() for mark in marks):
        raise UserError(f"{folder}: holds other files; move them, or name another folder with --out")
    remove(folder)
    trivial: dict[str, dict[str, Judged]] = {}
    for rule in BASELINES if has_baselines else ():
        with trivial_server(rule) as address:
            trivial[rule] = SUITES[suite](address, folder / f"baseline-{rule}", budget.replace(samples=1))
    found = SUITES[suite](url, folder, budget)
    for name, judged in found.items():
        judged.refuse(name)
        if (num := judged.finishes.total()) - (num_whole := judged.finishes["stop"]) > MOST_INFRA * num:
            ends = ", ".join(f"{why} {count}" for why, count in judged.finishes.items() if why != "stop")
            say(
                f"{name}: limits ended {num - num_whole} of {num} samples ({ends}); its score may be too low",
                style="yellow",
            )
        judged.baselines = {rule: domains[name].values for rule, domains in trivial.items()}
    try:
        httpx.get(f"{url}/health", timeout=60.0, trust_env=False).raise_for_status()
    except httpx.HTTPError as error:
        raise UserError(f"{suite}: no score: the server died: {error}; evaluate again") from None
    return found


@contextmanager
def trivial_server(rule: str) -> Iterator[str]:
    """A server of OpenAI's chat API that answers by one of `BASELINES`; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(
                {"object": "list", "data": [{"id": rule, "object": "model", "created": 0, "owned_by": "stretto"}]}
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            message: dict[str, object] = {"role": "assistant", "content": _STOP}
            if rule == "calls" and body.get("tools") and body["messages"][-1]["role"] != "tool":
                function = {"name": body["tools"][0]["function"]["name"], "arguments": "{}"}
                message |= {"content": None, "tool_calls": [{"id": "call-0", "type": "function", "function": function}]}
            choice = {
                "index": 0,
                "message": message,
                "finish_reason": "tool_calls" if "tool_calls" in message else "stop",
            }
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            head = {"id": rule, "object": "chat.completion", "created": 0, "model": rule}
            self._answer({**head, "choices": [choice], "usage": usage})

        def _answer(self, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """No line for each request."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def ask_inspect(url: str, folder: Path, budget: Budget, tasks: Mapping[str, str], *flags: str) -> dict[str, Judged]:
    """Run tasks of inspect_ai, given by the names of their domains, with the model provider of `inspect_model`. Raises `UserError` if
    inspect is not installed or writes no log of a task."""
    check_installed(("tau",))
    from inspect_ai.log import list_eval_logs, read_eval_log, read_eval_log_samples
    from inspect_ai.scorer import value_to_float

    settings = {
        "model": f"stretto/{url}",
        "log-dir": str(folder),
        "log-format": "eval",
        "epochs": budget.samples,
        "epochs-reducer": "mean",
        "max-tokens": budget.max_tokens,
        "temperature": budget.temperature,
        "max-samples": budget.at_once,
        "max-tasks": 1,
        "time-limit": budget.sample_s,
        "fail-on-error": MOST_INFRA + 1e-9,  # inspect stops at this share, `Judged.refuse` above it
        "display": "none",
        **({} if budget.limit is None else {"limit": budget.limit}),
    }
    options = ["--no-log-realtime", *(f"--{name}={value}" for name, value in settings.items()), *flags]
    command = [sys.executable, "-m", "inspect_ai", "eval", *tasks.values(), *options]
    _run(command, folder / CONSOLE_FILE, f"inspect: {', '.join(tasks)}")
    paths = list_eval_logs(str(folder), recursive=False)  # folders in it hold those of the baselines
    logs = {(log := read_eval_log(path, header_only=True)).eval.task: log for path in paths}
    missing = [name for name, task in tasks.items() if task not in logs]
    if missing:
        raise UserError(f"{missing[0]}: inspect wrote no log of it; {folder / 'console.txt'} says why")
    as_number, found = value_to_float(), {}
    for name, task in tasks.items():
        log, judged = logs[task], Judged()
        # One at a time: each sample of tau2 holds the whole data base several times.
        samples = read_eval_log_samples(log.location, all_samples_required=False, exclude_fields={"messages", "store"})
        for sample in samples:
            # An agent may have caught the exception and continued, so the score alone does not show the failure.
            failed = [event.error for event in sample.events if event.event == "model" and event.error]
            notes = [str(each.data) for each in sample.events if each.event == "info" and each.source == "stretto"]
            notes = [sample.attachments.get(each.removeprefix("attachment://"), each) for each in notes]
            error = next(iter([*notes, *([sample.error.message] if sample.error else []), *failed]), "")
            scores = list((sample.scores or {}).values())
            value = None if error or not scores else as_number(scores[0].value)
            finish = sample.limit.type if sample.limit else "stop"
            judged.add(str(sample.id), value, error.splitlines()[0][:300] if error else "it was not scored", finish)
            uses = sample.model_usage.values()
            judged.num_prompt += sum(use.input_tokens + (use.input_tokens_cache_read or 0) for use in uses)
            judged.num_sampled += sum(use.output_tokens for use in uses)
        if log.status != "success":
            ended = log.error.message.splitlines()[0][:300] if log.error else log.status
            last = judged.failures[-1] if judged.failures else ended
            counted = f"{len(judged.failures)} infrastructure errors in {sum(map(len, judged.values.values()))} samples"
            raise UserError(f"{name}: no score: {counted}, the last one: {last}; mend that and evaluate again")
        found[name] = judged
    return found


def ask_tau(url: str, folder: Path, budget: Budget, domains: Sequence[str] = TAU) -> dict[str, Judged]:
    """Run tau2 with its own limit on rounds. The model plays both the agent and the customer."""
    tasks = {f"tau2_{name}": f"inspect_evals/tau2_{name}" for name in domains}
    return ask_inspect(url, folder, budget, tasks, "-T", "shuffle=false")


def ask_bfcl(url: str, folder: Path, budget: Budget) -> dict[str, Judged]:
    """Run the single-turn categories of BFCL v4 with BFCL's own questions and checker."""
    categories = ("simple_python", "multiple", "parallel", "irrelevance")
    settings = {"url": url, "categories": categories, **budget.model_dump(), "most_infra": MOST_INFRA}
    script = Path(__file__).with_name("bfcl_inside.py")
    lines, found = folder / "bfcl.jsonl", {f"bfcl_{name}": Judged() for name in categories}
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(bfcl_python()), "-I", str(script), json.dumps(settings), str(lines)]
    code = _run(command, folder / CONSOLE_FILE, "bfcl", BFCL_PROJECT_ROOT=str(folder))
    for line in lines.read_text(encoding="utf-8").splitlines() if lines.is_file() else ():
        each = json.loads(line)
        judged = found[f"bfcl_{each['category']}"]
        judged.add(each["id"], each["value"], each["why"], "stop")
        judged.num_prompt, judged.num_sampled = judged.num_prompt + each["prompt"], judged.num_sampled + each["sampled"]
    if code:
        raise UserError(f"bfcl: no score: its harness ended with exit code {code}; {folder / 'console.txt'} says why")
    return found


def bfcl_folder() -> Path:
    """Folder of BFCL's own virtual environment; it contains the file ``whole`` once the installation is complete."""
    return user_cache() / f"{BFCL.replace('==', '-')}-py{sys.version_info.major}{sys.version_info.minor}"


def bfcl_python() -> Path:
    """The interpreter of BFCL's own virtual environment, which is created at first use because BFCL pins an old numpy. Raises
    `UserError` if this Python is too new for that numpy, or pip fails."""
    check_installed(("bfcl",))
    folder = bfcl_folder()
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
"""Suites by their names in `stretto eval --suite`."""


def _run(command: list[str], log: Path, label: str, **environ: str) -> int:
    """Run a command to its end and return its exit code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    offline = {"HF_HUB_OFFLINE": "1", "NO_PROXY": "*", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("ab") as file, progress(label):
        environment = {**os.environ, **offline, **environ}
        return subprocess.run(command, stdout=file, stderr=file, env=environment, check=False).returncode


def _copy(lines: IO[str] | None, kept: deque[str]) -> None:
    """Copy ``lines`` to stderr of this process, and the last one to ``kept``. A closed stderr is not a reason to stop: the writer of the lines
    would wait for a reader."""
    for line in lines or ():
        kept.append(line)
        with suppress(OSError, ValueError, AttributeError):  # closed, or None
            sys.stderr.write(line)
            sys.stderr.flush()


@contextmanager
def serving(
    source: Path,
    *flags: str,
    program: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    log: IO[str] | None = None,
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run ``stretto serve`` on a free port of this machine until the block or this process ends; yields its address and its process.

    Args:
        flags: further options. There is no access log without ``--access-log``.
        program: arguments of Python before those of the command; None: Stretto's own.
        environ: environment variables beside those of this process. The server does not inherit the variables of keys.
        log: file for the server's stderr; None: stderr of this process.

    Raises:
        UserError: the server did not start; the message ends with the last line of its stderr, or names ``log``.
    """
    program = ("-m", "stretto.cli.step", str(os.getpid())) if program is None else program
    command = [sys.executable, *program, "serve", str(source), "--port", "0", "--no-access-log", *flags]
    keys = ("STRETTO_API_KEYS", "STRETTO_ADMIN_KEY")
    environment = {name: value for name, value in os.environ.items() if name not in keys} | dict(environ or {})
    kept: deque[str] = deque(maxlen=1)
    stderr = subprocess.PIPE if log is None else log
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace", env=environment
    ) as process:
        copying = Thread(target=_copy, args=(process.stderr, kept), daemon=True)
        copying.start()
        process.stderr = None  # the thread's: at the end, Popen would wait for every process that the server started and that has it open
        try:
            assert process.stdout is not None
            with progress(f"open {source}"):
                url = next((line.split()[-1] for line in process.stdout if line.startswith(SERVING)), None)
                if url is None:
                    code = process.wait()
                    copying.join(timeout=5)  # a process that the server started may hold its stderr open
                    reason = f"{log.name} says why" if log else "".join(kept).removeprefix("stretto: ").strip()
                    raise UserError(
                        f"{source}: its server did not start (exit code {code}){f': {reason}' * bool(reason)}"
                    )
            yield url, process
        finally:
            process.terminate()
            try:
                process.wait(timeout=90)
            except subprocess.TimeoutExpired:
                process.kill()
