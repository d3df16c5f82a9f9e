"""Worker: TRL's ``GRPOTrainer`` on problems that the bench chose. Its interpreter needs this package too.

Starts as ``python -m bench.peers.trl FILE`` with `Options` as JSON in the file. Each step becomes a row of ``metrics.jsonl`` in the
run folder, under the names of Stretto's own metrics, and a row of ``samples.jsonl`` with rewards and TRL's advantages; the row of the
first step also has its tokens. At the end the worker writes the policy and ``versions.json``.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from stretto.tasks.registry import open_source
from stretto.tasks.task import Answer

METRICS, SAMPLES, VERSIONS, POLICY = "metrics.jsonl", "samples.jsonl", "versions.json", "checkpoint"
CACHES = {"growing cache": None, "static cache": "static"}
"""Caches of transformers' ``generate``; TRL turns compilation off."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a worker. Written by the bench."""

    folder: str
    """Checkpoint of the start in transformers' format."""
    run: str
    """Folder for results."""
    source: str
    kind: str
    args: dict[str, Any]
    """Arguments of the task set."""
    items: tuple[int, ...]
    """Problems of the task set in the order of training, each once."""
    settings: tuple[str, ...]
    """``experts, cache, N threads, R rows``; steps take them in turn. The first gives the rows of a pass."""
    steps: int
    prompts: int
    group: int
    max_tokens: int
    temperature: float
    clip_low: float
    clip_high: float
    lr: float
    beta1: float
    beta2: float
    eps: float
    clip_norm: float
    seed: int


def main() -> None:
    values = json.loads(Path(sys.argv[1]).read_text())
    options = Options(**{field.name: values[field.name] for field in fields(Options)})
    folder = Path(options.run)
    folder.mkdir(parents=True, exist_ok=True)
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    (folder / VERSIONS).write_text(json.dumps(versions))
    with (folder / METRICS).open("w", buffering=1) as metrics, (folder / SAMPLES).open("w", buffering=1) as samples:
        run = Run(options, metrics, samples)
        run.trainer.train()
    run.trainer.save_model(str(folder / POLICY))


class Run:
    """One trainer and its result files."""

    def __init__(self, options: Options, metrics: TextIO, samples: TextIO):
        self.options = options
        self._metrics, self._samples = metrics, samples
        self._source = open_source(options.source, SimpleNamespace(kind=options.kind, args=options.args))
        self._tokenizer = AutoTokenizer.from_pretrained(options.folder, padding_side="left")
        self._begun_s = self._ended_s = self._processor_s = 0.0
        self._generated_s = 0.0
        self._first: dict[str, Any] = {}
        problems = [self._source.problem(item) for item in options.items]
        self._problems = {problem.item: problem for problem in problems}
        rows = [{"prompt": [dict(each) for each in problem.messages], "item": problem.item} for problem in problems]
        self.trainer = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32),
            reward_funcs=self._reward,
            args=_config(options),
            train_dataset=Dataset.from_list(rows),
            processing_class=self._tokenizer,
            callbacks=[_Callback(self)],
        )

    def begins(self, step: int) -> None:
        """Before step ``step``, counted from 0: apply its setting, and start the clock before the first."""
        experts, cache, threads, _ = self.options.settings[step % len(self.options.settings)].split(", ")
        torch.set_num_threads(int(threads.split()[0]))
        self.trainer.model.set_experts_implementation(experts)
        self.trainer.generation_config.cache_implementation = CACHES[cache]
        self._begun_s = time.perf_counter()
        if step == 0:
            self._ended_s, self._processor_s = self._begun_s, time.process_time()

    def logged(self, step: int, logs: dict[str, float]) -> None:
        """After step ``step``, counted from 1: write its rows. The last call of a run has no step."""
        if "reward" not in logs:
            return
        now_s, processor_s = time.perf_counter(), time.process_time()
        row = {
            "step": step,
            "reward/mean": logs["reward"],
            "samples/tokens_mean": logs["completions/mean_length"],
            "samples/truncated": logs["completions/clipped_ratio"],
            "policy/entropy": logs["entropy"],
            "optim/grad_norm": float(logs["grad_norm"]),
            "optim/lr": logs["learning_rate"],
            "time/wall_s": now_s - self._ended_s,
            "time/processor_s": processor_s - self._processor_s,
            "time/generate_s": self._generated_s - self._begun_s,
        }
        self._ended_s, self._processor_s = now_s, processor_s
        logs_kept = self.trainer._logs
        (rewards,) = logs_kept["rewards"].values()
        sample = {"step": step, "rewards": list(rewards), "advantages": list(logs_kept["advantages"])}
        self._samples.write(json.dumps(sample | self._first) + "\n")
        self._first = {}
        self._metrics.write(json.dumps(row) + "\n")

    def _reward(self, completions: list[Any], completion_ids: list[Any], item: list[int], **others: Any) -> list[float]:
        """The task's reward of each answer."""
        self._generated_s = time.perf_counter()
        if others["trainer_state"].global_step == 0:
            template: Any = self._tokenizer.apply_chat_template
            prompts = [template(each, add_generation_prompt=True)["input_ids"] for each in others["prompts"]]
            self._first = {
                "items": item,
                "prompt_ids": prompts,
                "completion_ids": [list(ids) for ids in completion_ids],
            }
        answers = [Answer(completion[-1]["content"]) for completion in completions]
        return [
            self._source.score(self._problems[number], answer).reward
            for number, answer in zip(item, answers, strict=True)
        ]


class _Callback(TrainerCallback):
    def __init__(self, run: Run):
        self.run = run

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.run.begins(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.run.logged(state.global_step, others["logs"])


def _config(options: Options) -> trl.GRPOConfig:
    """Our recipe as TRL's configuration, without reports and snapshots, which cost time."""
    num_samples = options.prompts * options.group
    rows = int(options.settings[0].split(", ")[3].split()[0])
    return trl.GRPOConfig(
        output_dir=f"{options.run}/trl",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=options.steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=num_samples // rows,
        num_generations=options.group,
        max_completion_length=options.max_tokens,
        temperature=options.temperature,
        shuffle_dataset=False,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        epsilon=options.clip_low,
        epsilon_high=options.clip_high,
        num_iterations=1,
        optim="adamw_torch_fused",
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        adam_beta1=options.beta1,
        adam_beta2=options.beta2,
        adam_epsilon=options.eps,
        weight_decay=0.0,
        max_grad_norm=options.clip_norm,
        seed=options.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
