"""Scores of lm-eval through our server against lm-eval with transformers, on the same checkpoint in fp32.

    python -m bench.lm_eval_equality [--source CHECKPOINT] [--questions N] [--texts N]

lm-eval's command runs on two tasks that this file writes: a choice among four continuations, and rolling perplexity of texts longer
than the context. It runs with model ``local-completions`` (tokenises and scores through ``stretto serve``) and with model ``hf``. The
metrics of the tasks and the log-likelihood of each request are compared. Fails (exit code 1) if a difference is larger than the aim,
or if the server's smallest preset, as a mutant, is within it. Needs the package's ``bench`` extra; downloads nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.common.measure import bench_parser, finish, refusing, table
from bench.common.networks import write_network
from bench.common.server import serving
from stretto.base.errors import UserError
from stretto.base.track import wide_console
from stretto.data.demo_text import demo_documents
from stretto.model.checkpoint import read_config, read_presets
from stretto.model.counts import count
from stretto.model.spec import named_subnets

AIM = 1e-3
"""Largest difference of a metric, and of a request's log-likelihood in nats."""
CONTEXT = 200
"""Context of lm-eval, tokens: shorter than most texts, which are therefore scored in windows."""
CHOICES = 4
METRICS = {"choice": ("acc", "acc_norm"), "rolling": ("bits_per_byte", "byte_perplexity")}
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
    },
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
}


@dataclass(frozen=True, slots=True)
class Scores:
    """Results of one run of lm-eval. Written by `evaluate`."""

    metrics: dict[tuple[str, str], float]
    """By task and metric."""
    requests: dict[tuple[str, int], list[float]]
    """Log-likelihoods, nats, by task and document; one per choice."""


@refusing()
def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--source", type=Path, help="checkpoint with presets; default: random weights")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--texts", type=int, default=12)
    options = parser.parse_args()
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm-eval is not installed; pip install 'stretto[bench]'")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = options.source or write_network(folder, "demo")
        smallest = smallest_preset(source)
        write_tasks(folder / "tasks", options.questions, options.texts)
        # lm-eval's API client scores two tokens fewer than its max_length, its transformers client exactly max_length
        expected = evaluate(folder, "hf", f"pretrained={source},dtype=float32,max_length={CONTEXT - 2}")
        found = {subnet: through_server(folder, source, subnet) for subnet in ("full", smallest)}
    console = wide_console()
    for subnet, scores in found.items():
        console.print(_table(f"server at {subnet} against transformers", expected, scores))
    worst = {subnet: difference(expected, scores) for subnet, scores in found.items()}
    full, mutant = worst["full"], worst[smallest]
    console.print(f"largest difference: {full:.1e} (aim: at most {AIM:g}); mutant: {mutant:.1e}")
    finish(["the scores differ"] * (full > AIM) + ["the mutant, a smaller size, is not detected"] * (mutant <= AIM))


def smallest_preset(source: Path) -> str:
    """The preset with the fewest active parameters. Raises `UserError` if there is none."""
    config = read_config(source)
    named = named_subnets(config, read_presets(source))
    smallest = min(named, key=lambda name: count(config, named[name]).active_params)
    if named[smallest] == config.full():
        raise UserError(f"{source}: has no preset smaller than the full network; choose a checkpoint that has one")
    return smallest


def write_tasks(folder: Path, num_questions: int, num_texts: int) -> None:
    """Write two tasks on Python's documentation, which every machine has."""
    folder.mkdir()
    rng = random.Random(0)
    texts = [document.text for document in demo_documents(600_000, 0) if len(document.text) > 1500]
    lines = [line.strip() for text in texts for line in text.splitlines() if 30 < len(line.strip()) < 90]
    pairs = rng.sample(list(pairwise(lines)), num_questions)
    questions = []
    for context, right in pairs:
        choices = [right, *rng.sample(lines, CHOICES - 1)]
        rng.shuffle(choices)
        questions.append({"context": context, "choices": choices, "answer": choices.index(right)})
    rows = {"choice": questions, "rolling": [{"text": text[:1500]} for text in rng.sample(texts, num_texts)]}
    for task, fields in TASKS.items():
        data = folder / f"{task}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[task]), encoding="utf-8")
        wanted = [{"metric": metric} for metric in METRICS[task]]
        where = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        # JSON is YAML
        spec = {"task": task, **where, **fields, "metric_list": wanted, "metadata": {"version": 1}}
        (folder / f"{task}.yaml").write_text(json.dumps(spec), encoding="utf-8")


def through_server(folder: Path, source: Path, subnet: str) -> Scores:
    with serving(source, "--subnet", subnet, "--dtype", "float32", "--device", "cpu") as server:
        arguments = f"model={source.name},base_url={server.url}/v1/completions,tokenizer_backend=remote"
        return evaluate(folder, "local-completions", f"{arguments},num_concurrent=4,max_length={CONTEXT}")


def evaluate(folder: Path, model: str, arguments: str) -> Scores:
    """Run lm-eval's command in a process. Raises `UserError` if it fails."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments]
        command += ["--tasks", ",".join(TASKS), "--include_path", str(folder / "tasks")]
        command += ["--output_path", out, "--log_samples", "--batch_size", "1", "--device", "cpu"]
        offline = {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "hub"),
            "NO_PROXY": "*",
            "TOKENIZERS_PARALLELISM": "0",
        }
        done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"lm-eval with {model} failed: {done.stderr[-2000:]}")
        return _read(Path(out))


def _read(out: Path) -> Scores:
    [results] = out.rglob("results_*.json")
    results_by_task = json.loads(results.read_text(encoding="utf-8"))["results"]
    metrics = {
        (task, name): float(results_by_task[task][f"{name},none"]) for task, names in METRICS.items() for name in names
    }
    requests: dict[tuple[str, int], list[float]] = {}
    for task in TASKS:
        [samples] = out.rglob(f"samples_{task}_*.jsonl")
        for line in samples.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            requests[task, sample["doc_id"]] = [_log_likelihood(answer) for answer in sample["filtered_resps"]]
    return Scores(metrics, requests)


def _log_likelihood(answer: Any) -> float:
    """lm-eval stores a pair (log-likelihood, is greedy) for a choice, and a number for a text."""
    return float(answer[0] if isinstance(answer, Sequence) and not isinstance(answer, str) else answer)


def difference(expected: Scores, found: Scores) -> float:
    """Largest difference over metrics (relative above 1) and requests."""
    assert expected.metrics.keys() == found.metrics.keys() and expected.requests.keys() == found.requests.keys()
    metrics = [abs(found.metrics[key] - value) / max(1.0, abs(value)) for key, value in expected.metrics.items()]
    return max(*metrics, *(_worst(expected, found, task) for task in TASKS))


def _worst(expected: Scores, found: Scores, task: str) -> float:
    pairs = ((values, found.requests[key]) for key, values in expected.requests.items() if key[0] == task)
    return max(abs(one - other) for values, others in pairs for one, other in zip(values, others, strict=True))


def _table(title: str, expected: Scores, found: Scores) -> Table:
    shown = table(title, "task, metric", "transformers", "server", "difference")
    for (task, metric), value in expected.metrics.items():
        other = found.metrics[task, metric]
        shown.add_row(f"{task}, {metric}", f"{value:.6f}", f"{other:.6f}", f"{abs(other - value):.1e}")
    for task in TASKS:
        num = sum(len(values) for (name, _), values in expected.requests.items() if name == task)
        shown.add_row(f"{task}, log-likelihood, worst of {num}", "", "", f"{_worst(expected, found, task):.1e}")
    return shown


if __name__ == "__main__":
    main()
