"""Does lm-eval find the same scores through our server as with transformers, on the same folder in fp32?

    python -m bench.lm_eval_equality [--source CHECKPOINT] [--questions N] [--texts N]

lm-eval's own command runs twice on two tasks that are written here (a choice among four continuations, and rolling
perplexity over texts longer than the context): model ``local-completions``, which tokenises and scores at a real
``stretto serve``, and model ``hf``. Compared are the tasks' metrics and the log-likelihood of each request. Then once more
with the server at its smallest preset, which must not pass. Exits with 1 if a difference is larger than the aim, or if
the other Subnet's is not. Needs the package's ``bench`` extra; nothing is downloaded.
"""

from __future__ import annotations

import argparse
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

from bench.common.measure import wide_console
from bench.common.networks import write_network
from bench.common.server import serving
from stretto.base.errors import UserError
from stretto.data.demo_text import demo_documents
from stretto.model.checkpoint import read_config, read_presets
from stretto.model.spec import count, named_subnets

AIM = 1e-3
"""Of metrics, and of a request's log-likelihood in nats."""
CONTEXT = 200
"""Tokens that lm-eval scores at once: less than most texts have, so that they are scored in windows."""
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
    """What one run of lm-eval found. Written by `evaluate`."""

    metrics: dict[tuple[str, str], float]
    """By task and metric."""
    requests: dict[tuple[str, int], list[float]]
    """Log-likelihoods, nats, by task and document; one a choice."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a checkpoint with presets; random weights by default")
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
        # transformers scores as many tokens as it is told, the API client two fewer (its own arithmetic).
        expected = evaluate(folder, "hf", f"pretrained={source},dtype=float32,max_length={CONTEXT - 2}")
        found = {subnet: through_server(folder, source, subnet) for subnet in ("full", smallest)}
    console = wide_console()
    for subnet, scores in found.items():
        console.print(_table(f"server at {subnet} against transformers", expected, scores))
    worst = {subnet: difference(expected, scores) for subnet, scores in found.items()}
    console.print(f"largest difference: {worst['full']:.1e} (aim: at most {AIM:g}); mutant: {worst[smallest]:.1e}")
    if worst["full"] > AIM or worst[smallest] <= AIM:
        sys.exit(1)


def smallest_preset(source: Path) -> str:
    """The one with the fewest active parameters. Raises `UserError` where there is none."""
    config = read_config(source)
    named = named_subnets(config, read_presets(source))
    smallest = min(named, key=lambda name: count(config, named[name]).active_params)
    if named[smallest] == config.full():
        raise UserError(f"{source}: has no preset smaller than the full network; name a checkpoint that has")
    return smallest


def write_tasks(folder: Path, num_questions: int, num_texts: int) -> None:
    """Two tasks over the documentation that every machine has."""
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
        told = f"model={source.name},base_url={server.url}/v1/completions,tokenizer_backend=remote"
        return evaluate(folder, "local-completions", f"{told},num_concurrent=4,max_length={CONTEXT}")


def evaluate(folder: Path, model: str, arguments: str) -> Scores:
    """lm-eval's own command in a process of its own. Raises `UserError` where that fails."""
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
    told = json.loads(results.read_text(encoding="utf-8"))["results"]
    metrics = {(task, name): float(told[task][f"{name},none"]) for task, names in METRICS.items() for name in names}
    requests: dict[tuple[str, int], list[float]] = {}
    for task in TASKS:
        [samples] = out.rglob(f"samples_{task}_*.jsonl")
        for line in samples.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            requests[task, sample["doc_id"]] = [_log_likelihood(answer) for answer in sample["filtered_resps"]]
    return Scores(metrics, requests)


def _log_likelihood(answer: Any) -> float:
    """Of a choice: the log-likelihood and whether it is what greedy decoding would write; of a text: that alone."""
    return float(answer[0] if isinstance(answer, Sequence) and not isinstance(answer, str) else answer)


def difference(expected: Scores, found: Scores) -> float:
    """The largest, over metrics and requests."""
    assert expected.metrics.keys() == found.metrics.keys() and expected.requests.keys() == found.requests.keys()
    metrics = [abs(found.metrics[key] - value) / max(1.0, abs(value)) for key, value in expected.metrics.items()]
    return max(*metrics, *(_worst(expected, found, task) for task in TASKS))


def _worst(expected: Scores, found: Scores, task: str) -> float:
    pairs = ((values, found.requests[key]) for key, values in expected.requests.items() if key[0] == task)
    return max(abs(one - other) for values, others in pairs for one, other in zip(values, others, strict=True))


def _table(title: str, expected: Scores, found: Scores) -> Table:
    table = Table(title=title)
    for name in ("task", "metric", "transformers", "server", "difference"):
        table.add_column(name, justify="left" if name in ("task", "metric") else "right")
    for (task, metric), value in expected.metrics.items():
        other = found.metrics[task, metric]
        table.add_row(task, metric, f"{value:.6f}", f"{other:.6f}", f"{abs(other - value):.1e}")
    for task in TASKS:
        num = sum(len(values) for (name, _), values in expected.requests.items() if name == task)
        table.add_row(task, f"log-likelihood, worst of {num}", "", "", f"{_worst(expected, found, task):.1e}")
    return table


if __name__ == "__main__":
    main()
