"""Do other people's harnesses get through, against a real `stretto serve`, and what does knowing nothing score in each?

    python -m bench.harnesses --source CHECKPOINT [--limit 5] [--only tau,bfcl] [--verifiers ENVIRONMENT/bin/python]
    python -m bench.harnesses --source CHECKPOINT --kill        # what comes of a server that dies, and of a simulator that never stops

tau2 (four domains), PersistBench (three, judged by the model itself, so that only their running counts), BFCL v4 (four categories), lm-eval
(choice, perplexity, generation) and vf-eval over a source of ours. Beside each score is the same harness's score of a model that says
nothing, through the same door. Exits with 1 where a harness did not complete, an answer was lost on the way, or a sample ended as an
infrastructure error. `--limit 0` asks all there is: hours on two cores for a real model, half an hour with `--only baselines`.

`--kill` ends the server with SIGKILL in the middle of a suite, once under our provider and once under inspect's own for such servers, which
lets tau2 catch the failure: the mutant, whose log must say success. It exits with 1 if ours gives a score, or the mutant gives none.
Needs `stretto[eval]`; vf-eval an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.table import Table

from bench.common.measure import wide_console
from bench.common.server import SERVING, Server, serving
from bench.lm_eval_equality import METRICS, evaluate, write_tasks
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder
from stretto.harness.suites import Budget, Judged, ask, ask_bfcl, ask_inspect, ask_tau

PERSIST = ("cross_domain", "sycophancy", "beneficial_memory")
CONTEXT = 512
"""Tokens that lm-eval scores at once."""
KINDS = {"tools": "tools", "service": "service"}
"""Sources that vf-eval asks: calls, and sessions with a customer."""
Asked = Callable[[str, Path, Budget], dict[str, Judged]]


@dataclass(frozen=True, slots=True)
class Row:
    """What one domain of a harness came to. Written by `judged` and `lm_eval`."""

    num: int
    num_infra: int
    score: str
    why: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="a run or a checkpoint with a chat template")
    parser.add_argument("--limit", type=int, default=5, help="problems of each domain; 0: all")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--turns", type=int, default=3, help="of a conversation")
    parser.add_argument("--dtype", default="bfloat16", help="of the server")
    parser.add_argument("--only", help="by commas: tau, persist, bfcl, lm-eval, vf, baselines")
    parser.add_argument("--verifiers", type=Path, help="Python of an environment with verifiers and stretto")
    parser.add_argument("--kill", action="store_true", help="end the server in the middle of it instead")
    options = parser.parse_args()
    only = options.only.split(",") if options.only else ["tau", "persist", "bfcl", "lm-eval", "vf", "baselines"]
    budget = Budget(limit=options.limit or None, max_tokens=options.tokens, turns=options.turns, sample_s=600)
    source = checkpoint_folder(options.source)
    with tempfile.TemporaryDirectory() as folder:
        if options.kill:
            sys.exit(not killed(source, Path(folder), budget))
        asked: dict[str, Asked] = {"tau": ask_tau, "persist": ask_persist, "bfcl": ask_bfcl}
        if options.verifiers:
            asked["vf"] = lambda url, out, budget: ask_vf(options.verifiers, url, out, budget)
        chosen = {name: ask for name, ask in asked.items() if name in only or only == ["baselines"]}
        found, errors = {}, {}
        if only != ["baselines"]:
            with serving(source, "--max-batch", "16", "--dtype", options.dtype) as server:
                for name, ask in chosen.items():
                    found |= rows(name, ask, server.url, Path(folder) / "model", budget)
                    errors[name] = lost(server, errors)
                if "lm-eval" in only:
                    found |= lm_eval(source, server.url, Path(folder), options.limit or 40)
                    errors["lm-eval"] = lost(server, errors)
        nothing = {}
        if "baselines" in only:
            for rule in ("nothing", "empty-call"):
                with scripted(rule) as url:
                    for name, ask in chosen.items():
                        if rule == "nothing" or name == "bfcl":
                            told = rows(name, ask, url, Path(folder) / rule, budget)
                            nothing |= {(key, rule): row for key, row in told.items()}
    show(found, nothing, errors)
    if any(row.num_infra or not row.num for row in found.values()) or any(errors.values()):
        sys.exit(1)


def rows(name: str, ask: Asked, url: str, folder: Path, budget: Budget) -> dict[str, Row]:
    """By domain; one row with the reason where the harness gave no score."""
    try:
        found = {domain: judged(one) for domain, one in ask(url, folder / name, budget).items()}
    except UserError as error:
        found = {name: Row(0, 1, "none", str(error)[:200])}
    for domain, row in found.items():
        print(f"{domain}: {row}", file=sys.stderr, flush=True)
    return found


def judged(one: Judged) -> Row:
    values = [value for samples in one.values.values() for value in samples]
    known = [value for value in values if value is not None]
    score = (
        f"{100 * sum(known) / len(known):.0f} %"
        if known and max(known) <= 1
        else f"{sum(known) / max(1, len(known)):.2f}"
    )
    return Row(len(known), len(one.failures), score, one.failures[-1] if one.failures else "")


def lost(server: Server, before: dict[str, int]) -> int:
    """Answers of the server since then that were its own failure."""
    return sum(num for status, num in server.answers_by_status().items() if status >= 500) - sum(before.values())


def ask_persist(url: str, folder: Path, budget: Budget) -> dict[str, Judged]:
    tasks = {f"persistbench_{name}": f"inspect_evals/persistbench_{name}" for name in PERSIST}
    return ask_inspect(url, folder, budget, tasks, "--model-role", f"grader=stretto/{url}")


def ask_vf(python: Path, url: str, folder: Path, budget: Budget) -> dict[str, Judged]:
    """vf-eval in its environment, over sources of ours; its traces are what is read."""
    model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
    found = {}
    for name, kind in KINDS.items():
        told = {
            "env.taskset.kind": kind,
            "model": model,
            "client.base-url": f"{url}/v1",
            "output-dir": str(folder),
            "run.dir": name,
        }
        told |= {"sampling.max-tokens": str(budget.max_tokens), "env.agent.max-turns": str(budget.turns)}
        flags = [part for key, value in told.items() for part in (f"--{key}", value)]
        command = [
            str(python),
            "-m",
            "verifiers.v1.cli.eval.main",
            "stretto_vf",
            *flags,
            "-n",
            str(budget.limit or 100),
        ]
        environ = {**os.environ, "PRIME_API_KEY": "none"}
        code = f"import sys; sys.argv = {[str(python.parent / 'vf-eval'), *command[3:]]!r}; from verifiers.v1.cli.eval.main import main; main()"
        done = subprocess.run(
            [str(python), "-c", code, "--no-push", "--no-rich"],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        traces = folder / name / "traces.jsonl"
        if not traces.is_file():
            raise UserError(f"vf-eval: exit code {done.returncode}: {(done.stderr or done.stdout)[-300:]}")
        one = found[f"vf {name}"] = Judged()
        for number, line in enumerate(traces.read_text(encoding="utf-8").splitlines()):
            for trace in json.loads(line)["traces"]:
                rewards = [each["value"] for each in trace.get("rewards", {}).values() if each]
                error = "; ".join(each["message"] for each in trace.get("errors") or ())
                one.add(str(number), None if error or not rewards else sum(rewards), error or "no reward", "stop")
    return found


def lm_eval(source: Path, url: str, folder: Path, num: int) -> dict[str, Row]:
    """Choice and perplexity by log-probabilities of prompts, generation by chats, each by lm-eval's own command."""
    model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
    write_tasks(folder / "tasks", num, num)
    told = f"model={model},base_url={url}/v1/completions,tokenizer_backend=remote,num_concurrent=4,max_length={CONTEXT}"
    scores = evaluate(folder, "local-completions", told)
    sizes = {task: len([key for key in scores.requests if key[0] == task]) for task in METRICS}
    shown = {task: f"{METRICS[task][0]} {scores.metrics[task, METRICS[task][0]]:.3f}" for task in METRICS}
    return {f"lm-eval {task}": Row(sizes[task], num - sizes[task], shown[task]) for task in METRICS} | generation(
        url, model, folder, num
    )


def generation(url: str, model: str, folder: Path, num: int) -> dict[str, Row]:
    data = folder / "echo.jsonl"
    data.write_text(
        "".join(json.dumps({"q": f"Say the number {each}.", "a": str(each)}) + "\n" for each in range(num)), "utf-8"
    )
    spec = {
        "task": "generation",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 16},
        "filter_list": [
            {
                "name": "number",
                "filter": [{"function": "regex", "regex_pattern": "([0-9]+)"}, {"function": "take_first"}],
            }
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    tasks, out = folder / "generation", folder / "generated"
    tasks.mkdir()
    (tasks / "generation.yaml").write_text(json.dumps(spec), "utf-8")  # JSON is YAML
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-chat-completions", "--tasks", "generation"]
    command += [
        "--model_args",
        f"model={model},base_url={url}/v1/chat/completions,num_concurrent=4,tokenizer_backend=None",
    ]
    command += ["--include_path", str(tasks), "--apply_chat_template", "--output_path", str(out)]
    environ = {**os.environ, "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "NO_PROXY": "*"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    files = list(out.rglob("results*.json"))
    if done.returncode or not files:
        return {"lm-eval generation": Row(0, 1, "none", done.stderr[-200:])}
    result = json.loads(files[0].read_text("utf-8"))
    count, score = result["n-samples"]["generation"]["effective"], result["results"]["generation"]["exact_match,number"]
    return {"lm-eval generation": Row(count, num - count, f"{100 * score:.0f} %")}


@contextmanager
def scripted(rule: str) -> Iterator[str]:
    """The address of a server whose model is a rule."""
    command = [sys.executable, "-m", "bench.common.scripted", rule]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield next(line.split()[-1] for line in process.stdout if line.startswith(SERVING))
        finally:
            process.kill()


def killed(source: Path, folder: Path, budget: Budget) -> bool:
    """Whether a server that is killed, and a customer who never stops, end as they should."""
    console = wide_console()
    airline = {"tau2_airline": "inspect_evals/tau2_airline"}

    def under(name: str, ask: Callable[[str, Path], object]) -> str:
        with serving(source, "--max-batch", "16", "--dtype", "bfloat16") as server:
            threading.Thread(target=kill_in_the_middle, args=(server,), daemon=True).start()
            try:
                ask(server.url, folder / name)
            except UserError as error:
                return f"no score: {error}"
            return "A SCORE"

    ours = {
        "tau, our provider": under(
            "tau", lambda url, out: ask_inspect(url, out, budget, airline, "-T", "message_limit=3")
        ),
        "bfcl": under("bfcl", lambda url, out: ask("bfcl", url, out, budget)),
    }
    told: list[str] = []
    under("mutant", lambda url, out: told.append(swallowing(url, out, budget)))
    start_s = time.perf_counter()
    with scripted("forever") as url:
        one = ask_inspect(url, folder / "forever", budget, airline, "-T", f"message_limit={budget.turns}")[
            "tau2_airline"
        ]
    table = Table("what was done", "what came of it", title="server killed in the middle; a customer who never stops")
    for name, text in ours.items():
        table.add_row(f"killed under {name}", text)
    table.add_row("killed under a provider that lets it be caught", told[0])
    ended = (
        f"{len(one.values)} conversations ended by {budget.turns} turns each in {time.perf_counter() - start_s:.0f} s"
    )
    table.add_row("a customer who never stops", ended)
    console.print(table)
    return all(text.startswith("no score") for text in ours.values()) and told[0].startswith("success")


def kill_in_the_middle(server: Server) -> None:
    """SIGKILL once a few chats are answered."""
    while server.is_alive:
        told = server.metrics().items()
        if sum(num for name, num in told if "http_requests_total{" in name and "chat/completions" in name) >= 3:
            break
        time.sleep(0.5)
    os.kill(server.pid, signal.SIGKILL)


def swallowing(url: str, folder: Path, budget: Budget) -> str:
    """What inspect says of tau2 through its own provider for such servers, that server being killed."""
    from inspect_ai.log import list_eval_logs, read_eval_log

    model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
    command = [
        sys.executable,
        "-m",
        "inspect_ai",
        "eval",
        "inspect_evals/tau2_airline",
        "--model",
        f"openai-api/stretto/{model}",
    ]
    command += [
        "-T",
        "message_limit=3",
        "-T",
        "shuffle=false",
        "--max-retries",
        "0",
        "--display",
        "none",
        "--log-dir",
        str(folder),
    ]
    command += ["--max-tokens", str(budget.max_tokens), *(["--limit", str(budget.limit)] if budget.limit else [])]
    environ = {**os.environ, "STRETTO_BASE_URL": f"{url}/v1", "STRETTO_API_KEY": "none", "NO_PROXY": "*"}
    subprocess.run(command, env=environ, capture_output=True, check=False)
    [log] = map(read_eval_log, list_eval_logs(str(folder)))
    calls = [event for sample in log.samples or () for event in sample.events if event.event == "model"]
    failed = sum(bool(event.error) for event in calls)
    scored = f"{100 * log.results.scores[0].metrics['accuracy'].value:.0f} %" if log.results else "no score"
    return f"{log.status}, {scored}, though {failed} of {len(calls)} calls failed"


def show(found: dict[str, Row], nothing: dict[tuple[str, str], Row], errors: dict[str, int]) -> None:
    table = Table(
        "domain",
        "samples",
        "infrastructure errors",
        "score",
        "says nothing",
        "empty call",
        "why",
        title="harnesses that asked",
    )
    for domain in dict.fromkeys([*found, *(key for key, _ in nothing)]):
        row = found.get(domain, Row(0, 0, ""))
        beside = [
            f"{each.score} of {each.num}" if (each := nothing.get((domain, rule))) else ""
            for rule in ("nothing", "empty-call")
        ]
        table.add_row(domain, str(row.num), str(row.num_infra), row.score, *beside, row.why or "")
    console = wide_console()
    console.print(table)
    console.print("answers 5xx: " + ", ".join(f"{name} {num}" for name, num in errors.items()))


if __name__ == "__main__":
    main()
