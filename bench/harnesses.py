"""Do other people's harnesses get through, against a real `stretto serve`, and what does knowing nothing score in each?

    python -m bench.harnesses --source CHECKPOINT [--limit 5] [--only tau,bfcl] [--verifiers ENVIRONMENT/bin/python] [--out FOLDER]
    python -m bench.harnesses --rules --limit 0 --out FOLDER    # the rules alone, on all there is
    python -m bench.harnesses --source CHECKPOINT --kill        # what comes of a server that dies, and of a simulator that never stops

tau2 (four domains), PersistBench (three), BFCL v4 (four categories), lm-eval (choice, perplexity, generation) and vf-eval over sources
of ours. Beside each score stand those of rules that know nothing, asked by the same harness (`bench/common/scripted.py`): who says
nothing, who hands every customer on, an empty call, a call filled by regular expressions; of lm-eval, whose choices are scored and not
said, a constant letter and the most frequent one, worked out from its questions. PersistBench's judge is a rule, too, which counts
words: that it completes is shown, not how good the model is; ``--judge`` names the address of a real one.

Exits with 1 where a harness did not complete, an answer was lost on the way, a sample ended as an infrastructure error, or, with
``--limit 0``, who says nothing scores other than `NOTHING`. ``--limit 0`` asks all there is: hours on two cores for a real model, a
quarter of an hour of processor time for one rule (tau2 writes its data bases into its log). With ``--out`` what was asked is kept, and
the next call goes on from there.

``--kill`` ends the server with SIGKILL in the middle of a suite, once under our provider and once under inspect's own for such servers, which
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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import httpx

from bench.common.measure import table, wide_console
from bench.common.server import Server, serving
from bench.lm_eval_equality import METRICS, evaluate, write_tasks
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder
from stretto.harness.suites import SERVING, TAU, Budget, Judged, ask, ask_bfcl, ask_inspect, ask_tau

HARNESSES = ("tau", "persist", "bfcl", "lm-eval", "vf")
MODEL = "model"
RULES = {
    "tau": ("nothing", "transfer"),
    "persist": ("nothing",),
    "bfcl": ("nothing", "empty-call", "regex"),
    "vf": ("nothing", "empty-call"),
}
"""Which are asked beside the model."""
NOTHING = {"tau2_airline": "38 %", "tau2_retail": "6 %", "tau2_telecom": "0 %", "tau2_banking": "0 %"}
"""What who says nothing scores, of all tasks."""
PERSIST = ("cross_domain", "sycophancy", "beneficial_memory")
CONTEXT = 512
"""Tokens that lm-eval scores at once."""
KINDS = {"tools": "tools", "service": "service"}
"""Sources that vf-eval asks: calls, and sessions with a customer."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one domain of a harness came to. Written by `judged` and `lm_eval`."""

    num: int
    num_infra: int
    score: str
    why: str = ""
    num_lost: int = 0
    """Answers of the server that were its own failure, of the whole harness. Written by `rows`."""


Asked = Callable[[str, Path, Budget], dict[str, Row]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a run or a checkpoint with a chat template")
    parser.add_argument("--limit", type=int, default=5, help="problems of each domain; 0: all")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--turns", type=int, default=3, help="of a conversation")
    parser.add_argument("--dtype", default="bfloat16", help="of the server")
    parser.add_argument("--only", default=",".join(HARNESSES), help="by commas; all by default")
    parser.add_argument("--rules", action="store_true", help="ask the rules alone, and no model")
    parser.add_argument(
        "--verifiers", type=Path, help="Python of an environment with verifiers and stretto; else no vf"
    )
    parser.add_argument("--judge", help="address of PersistBench's judge; a rule by default")
    parser.add_argument("--out", type=Path, help="folder to keep what was asked; none by default")
    parser.add_argument("--kill", action="store_true", help="end the server in the middle of it instead")
    options = parser.parse_args()
    if options.source is None and not options.rules:
        raise UserError("--source: missing; name a checkpoint, or ask --rules alone")
    budget = Budget(limit=options.limit or None, max_tokens=options.tokens, turns=options.turns, sample_s=3600)
    with ExitStack() as stack:
        folder = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        if options.kill:
            sys.exit(not killed(checkpoint_folder(options.source), folder, budget))
        asked = harnesses(options, stack)
        found: dict[tuple[str, str], Row] = {}
        if not options.rules:
            flags = ("--max-batch", "16", "--dtype", options.dtype)
            with serving(checkpoint_folder(options.source), *flags) as server:
                for name, ask in asked.items():
                    lost = partial(num_lost, server, num_lost(server))
                    found |= rows(MODEL, name, ask, server.url, folder, budget, lost)
        for rule in dict.fromkeys(rule for rules in RULES.values() for rule in rules):
            with scripted(rule) as url:
                for name, ask in asked.items():
                    if rule in RULES.get(name.partition("_")[0], ()):
                        found |= rows(rule, name, ask, url, folder, budget)
        if "lm-eval" in asked:
            found |= guessed(folder, options.limit or 40)
    is_whole = show(found, is_all=not options.limit)
    sys.exit(not is_whole)


def harnesses(options: argparse.Namespace, stack: ExitStack) -> dict[str, Asked]:
    """Those that are wanted, by name; tau2's domains one by one, so that a call that is ended loses little."""
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(HARNESSES):
        raise UserError(f"--only {unknown.pop()}: no such harness; one of {', '.join(HARNESSES)}")
    found: dict[str, Asked] = {}
    if "tau" in wanted:
        found |= {f"tau_{domain}": judged_by(partial(ask_tau, domains=[domain])) for domain in TAU}
    if "persist" in wanted:
        judge = options.judge or stack.enter_context(scripted("judge"))
        found["persist"] = judged_by(partial(ask_persist, judge=judge))
    if "bfcl" in wanted:
        found["bfcl"] = judged_by(ask_bfcl)
    if "lm-eval" in wanted:
        found["lm-eval"] = lm_eval
    if "vf" in wanted and options.verifiers:
        found["vf"] = judged_by(partial(ask_vf, options.verifiers))
    return found


def rows(
    who: str, name: str, ask: Asked, url: str, folder: Path, budget: Budget, lost: Callable[[], int] = lambda: 0
) -> dict[tuple[str, str], Row]:
    """By domain and who answered; one row with the reason where the harness gave no score. Kept in ``folder``."""
    kept = folder / f"{who}-{name}-{budget.limit or 'all'}.json"
    if not kept.is_file():
        try:
            found = ask(url, folder / f"{who}-{name}-{time.time():.0f}", budget)
        except UserError as error:
            found = {name: Row(0, 1, "none", str(error)[:300])}
        told = {domain: asdict(replace(row, num_lost=lost())) for domain, row in found.items()}
        print(f"{who}: {json.dumps(told)}", file=sys.stderr, flush=True)
        if not all(row["num"] for row in told.values()):
            return {(domain, who): Row(**row) for domain, row in told.items()}
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(told), "utf-8")
    return {(domain, who): Row(**row) for domain, row in json.loads(kept.read_text("utf-8")).items()}


def judged_by(ask: Callable[[str, Path, Budget], dict[str, Judged]]) -> Asked:
    return lambda url, folder, budget: {domain: judged(one) for domain, one in ask(url, folder, budget).items()}


def judged(one: Judged) -> Row:
    values = [value for samples in one.values.values() for value in samples]
    known = [value for value in values if value is not None]
    mean = sum(known) / max(1, len(known))
    score = f"{100 * mean:.0f} %" if max(known, default=0) <= 1 else f"{mean:.2f}"
    return Row(len(known), len(one.failures), score, one.failures[-1] if one.failures else "")


def num_lost(server: Server, before: int = 0) -> int:
    return sum(num for status, num in server.answers_by_status().items() if status >= 500) - before


def ask_persist(url: str, folder: Path, budget: Budget, judge: str) -> dict[str, Judged]:
    tasks = {f"persistbench_{name}": f"inspect_evals/persistbench_{name}" for name in PERSIST}
    return ask_inspect(url, folder, budget, tasks, "--model-role", f"grader=stretto/{judge}")


def ask_vf(python: Path, url: str, folder: Path, budget: Budget) -> dict[str, Judged]:
    """vf-eval in its environment, over sources of ours; its traces are what is read."""
    model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
    found = {}
    for name, kind in KINDS.items():
        told = {
            "env.taskset.kind": kind,
            "env.agent.max-turns": budget.turns,
            "model": model,
            "client.base-url": f"{url}/v1",
            "sampling.max-tokens": budget.max_tokens,
            "output-dir": folder,
            "run.dir": name,
        }
        flags = [part for key, value in told.items() for part in (f"--{key}", str(value))]
        command = [str(python.parent / "vf-eval"), "stretto_vf", *flags, "-n", str(budget.limit or 100)]
        command += ["--no-push", "--no-rich"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        traces = folder / name / "traces.jsonl"
        if done.returncode or not traces.is_file():
            raise UserError(f"vf-eval: exit code {done.returncode}: {(done.stderr or done.stdout)[-300:]}")
        one = found[f"vf {name}"] = Judged()
        for number, line in enumerate(traces.read_text(encoding="utf-8").splitlines()):
            for trace in json.loads(line)["traces"]:
                rewards = [each["score"] for each in trace["rewards"].values()]
                error = "; ".join(each["message"] for each in trace["errors"])
                one.add(str(number), None if error or not rewards else sum(rewards), error or "no reward", "stop")
    return found


def lm_eval(url: str, folder: Path, budget: Budget) -> dict[str, Row]:
    """Choice and perplexity by log-probabilities of prompts, generation by chats, each by lm-eval's own command."""
    num, model = budget.limit or 40, httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
    folder.mkdir(parents=True)
    write_tasks(folder / "tasks", num, num)
    told = f"model={model},base_url={url}/v1/completions,tokenizer_backend=remote,num_concurrent=4,max_length={CONTEXT}"
    scores = evaluate(folder, "local-completions", told)
    sizes = {task: len([key for key in scores.requests if key[0] == task]) for task in METRICS}
    shown = {
        "choice": f"{100 * scores.metrics['choice', 'acc']:.0f} %",
        "rolling": f"{scores.metrics['rolling', 'bits_per_byte']:.3f} bits per byte",
    }
    found = {f"lm-eval {task}": Row(sizes[task], num - sizes[task], shown[task]) for task in METRICS}
    return found | generation(url, model, folder, num)


def guessed(folder: Path, num: int) -> dict[tuple[str, str], Row]:
    """What rules score in lm-eval's tasks, from their questions."""
    tasks = Path(tempfile.mkdtemp(dir=folder)) / "tasks"
    write_tasks(tasks, num, num)
    answers = Counter(json.loads(line)["answer"] for line in (tasks / "choice.jsonl").read_text("utf-8").splitlines())
    found = {
        ("lm-eval choice", "constant letter"): f"{100 * answers[0] / num:.0f} %",
        ("lm-eval choice", "most frequent"): f"{100 * answers.most_common(1)[0][1] / num:.0f} %",
        ("lm-eval rolling", "any byte"): "8.000 bits per byte",
        ("lm-eval generation", "most frequent"): f"{100 / num:.0f} %",
    }
    return {key: Row(num, 0, score) for key, score in found.items()}


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
    budget = budget.replace(at_once=2)  # so that some samples are done while others are not
    airline = {"tau2_airline": "inspect_evals/tau2_airline"}
    flags = ("-T", f"message_limit={budget.turns}", "-T", "shuffle=false")

    def under(name: str, num_chats: int, ask: Callable[[str, Path], str]) -> str:
        with serving(source, "--max-batch", "16", "--dtype", "bfloat16") as server:
            threading.Thread(target=kill_in_the_middle, args=(server, num_chats), daemon=True).start()
            try:
                return ask(server.url, folder / name)
            except UserError as error:
                return f"no score: {error}"

    tau = 2 * (2 * budget.turns) + 1  # two of them talk by turns
    told = {
        "tau2, our provider": under(
            "tau", tau, lambda url, out: f"A SCORE: {ask_inspect(url, out, budget, airline, *flags)}"
        ),
        "bfcl": under("bfcl", 5, lambda url, out: f"A SCORE: {ask('bfcl', url, out, budget)}"),
        "tau2, a provider that lets it be caught (mutant)": under(
            "mutant", tau, lambda url, out: swallowing(url, out, budget)
        ),
    }
    ended = []
    for name, least in {"turns": budget, "time": budget.replace(turns=10**6, sample_s=20)}.items():
        with scripted("forever") as url:
            one = ask_tau(url, folder / name, least, ["airline"])["tau2_airline"]
        ended.append(f"by {name}: {dict(one.finishes)}")
    shown = table("server killed in the middle; a customer who never stops", "what was done", "what came of it")
    for name, text in told.items():
        shown.add_row(f"killed under {name}", text)
    shown.add_row("a customer who never stops", "; ".join(ended))
    wide_console().print(shown)
    *ours, mutant = told.values()
    return all(text.startswith("no score") for text in ours) and mutant.startswith("success")


def kill_in_the_middle(server: Server, num_chats: int) -> None:
    """SIGKILL once so many chats are answered."""
    while server.is_alive:
        told = server.metrics().items()
        if sum(num for name, num in told if "http_requests_total{" in name and "chat/completions" in name) >= num_chats:
            os.kill(server.pid, signal.SIGKILL)
            return
        time.sleep(0.2)


def swallowing(url: str, folder: Path, budget: Budget) -> str:
    """What inspect says of tau2 through its own provider for such servers, that server being killed."""
    from inspect_ai.log import list_eval_logs, read_eval_log

    model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
    told = {
        "model": f"openai-api/stretto/{model}",
        "max-retries": 0,
        "max-samples": budget.at_once,
        "max-tokens": budget.max_tokens,
        "display": "none",
        "log-dir": folder,
        **({} if budget.limit is None else {"limit": budget.limit}),
    }
    command = [sys.executable, "-m", "inspect_ai", "eval", "inspect_evals/tau2_airline"]
    command += [f"--{name}={value}" for name, value in told.items()]
    command += ["-T", f"message_limit={budget.turns}", "-T", "shuffle=false"]
    environ = {**os.environ, "STRETTO_BASE_URL": f"{url}/v1", "STRETTO_API_KEY": "none", "NO_PROXY": "*"}
    subprocess.run(command, env=environ, capture_output=True, check=False)
    [log] = map(read_eval_log, list_eval_logs(str(folder)))
    calls = [event for sample in log.samples or () for event in sample.events if event.event == "model"]
    failed = sum(bool(event.error) for event in calls)
    scored = f"{100 * log.results.scores[0].metrics['accuracy'].value:.0f} %" if log.results else "no score"
    return f"{log.status}, {scored} of {len(log.samples or ())} samples, though {failed} of {len(calls)} calls failed"


def show(found: dict[tuple[str, str], Row], is_all: bool) -> bool:
    """Print all of it; whether it is as it should be."""
    shown = table("harnesses that asked", "domain", "who answered", "samples", "infrastructure errors", "5xx", "score")
    wrong = []
    for domain, who in sorted(found, key=lambda key: [name for name, _ in found].index(key[0])):
        row = found[domain, who]
        shown.add_row(domain, who, str(row.num), str(row.num_infra), str(row.num_lost), row.score)
        if row.why:
            wrong.append(f"{domain}, {who}: {row.why}")
        if is_all and who == "nothing" and row.score != NOTHING.get(domain, row.score):
            wrong.append(f"{domain}: who says nothing scores {row.score}, not {NOTHING[domain]}")
    console = wide_console()
    console.print(shown)
    for line in wrong:
        console.print(line, soft_wrap=True)
    return not wrong and all(row.num and not row.num_infra and not row.num_lost for row in found.values())


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
