"""The server under clients that others wrote: the official ``openai`` package, and lm-eval on arithmetic word problems.

    python -m bench.api_clients [--run FOLDER] [--lm-eval ENVIRONMENT/bin/lm_eval] [--data gsm8k.jsonl] [--limit N]

The calls of the openai client cover chat, streaming, several choices, log-probabilities, a JSON schema, the sizes of the
elastic network, completions, token fields and refusals; each says what it expects of the answer. lm-eval runs its
``local-chat-completions`` on a GSM8K-shaped task, from ``--data`` (questions and answers as in GSM8K's files) or made by
reasoning-gym. What counts is that both complete, not the score. Exits with 1 if a call fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import reasoning_gym
from rich.console import Console

from bench.common.measure import table, wide_console
from bench.common.networks import write_network
from bench.common.server import serving
from stretto.base.paths import checkpoint_folder
from stretto.model.checkpoint import read_config, read_presets

try:
    import openai
except ImportError:
    openai = None  # type: ignore[assignment]

TASK = "word_problems"
TASK_FILE = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "Q: {{{{question}}}}\\nA:"
doc_to_target: "{{{{answer.split('####')[-1].strip()}}}}"
generation_kwargs: {{until: ["Q:"], do_sample: false, max_gen_toks: {tokens}}}
filter_list:
  - name: last-number
    filter:
      - {{function: regex, group_select: -1, regex_pattern: "(-?[0-9.,]+)"}}
      - {{function: take_first}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
SCHEMA = {
    "type": "object",
    "properties": {"done": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["done", "kind"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run or a checkpoint; default: random weights of the demo's shape")
    parser.add_argument("--lm-eval", type=Path, help="its command, in an environment of its own")
    parser.add_argument("--data", type=Path, help="JSONL with question and answer; default: made by reasoning-gym")
    parser.add_argument("--limit", type=int, default=20, help="problems for lm-eval")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer to lm-eval")
    options = parser.parse_args()
    console, failed = wide_console(), False
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = checkpoint_folder(options.run) if options.run else write_network(folder, "demo")
        with serving(source) as server:
            if openai is None:
                console.print("openai: not installed: pip install 'stretto[bench]'")
            else:
                failed |= not _openai(console, server.url, source)
            command = options.lm_eval or shutil.which("lm_eval")
            if command is None:
                console.print(
                    "lm-eval: not installed: pip install 'lm-eval[api]' in an environment of its own, then --lm-eval ENVIRONMENT/bin/lm_eval",
                    soft_wrap=True,
                )
            else:
                failed |= not _lm_eval(console, server.url, folder, Path(command), options)
    if failed:
        sys.exit(1)


def _openai(console: Console, url: str, source: Path) -> bool:
    """Make every call; whether all answers were as expected."""
    calls = Calls(url, source)
    shown, good = table(f"openai {openai.__version__}", "call", "answer"), True
    for name, call in calls.all().items():
        try:
            shown.add_row(name, call())
        except (AssertionError, openai.OpenAIError, KeyError, TypeError, ValueError) as error:
            shown.add_row(name, f"FAILED: {type(error).__name__}: {error}")
            good = False
    console.print(shown)
    return good


class Calls:
    """One method a call: each checks its answer and returns a few words about it."""

    def __init__(self, url: str, source: Path):
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120.0)
        self.model = self.client.models.list().data[0].id
        self.messages = [{"role": "user", "content": "What is two and two?"}]
        self.presets = list(read_presets(source))
        self.config = read_config(source)

    def all(self) -> dict[str, Callable[[], str]]:
        return {
            "models.list": self.models,
            "chat": self.chat,
            "chat, streamed": self.streamed,
            "chat, same seed": self.seeded,
            "chat, n and logprobs": self.choices,
            "chat, JSON schema": self.schema,
            "chat, tools": self.tools,
            "chat, preset as model": self.preset,
            "chat, elastic axes": self.elastic,
            "completions of token ids": self.completion,
            "completions, streamed with stop": self.stopped,
            "refusal: unknown model": self.unknown_model,
            "refusal: Subnet outside": self.outside,
        }

    def models(self) -> str:
        names = [model.id for model in self.client.models.list()]
        assert all(any(name.endswith(f":{preset}") for name in names) for preset in self.presets), names
        return ", ".join(names)

    def chat(self) -> str:
        done = self._chat()
        assert done.usage.completion_tokens <= 16, done.usage
        assert done.choices[0].finish_reason in ("stop", "length"), done.choices[0]
        return f"{done.usage.completion_tokens} tokens, {done.choices[0].finish_reason}"

    def streamed(self) -> str:
        pieces = list(self._chat(stream=True, stream_options={"include_usage": True}, temperature=0))
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        whole = self._chat(temperature=0).choices[0].message.content
        assert text == whole, f"{text!r} streamed, {whole!r} whole"
        assert pieces[-1].usage.completion_tokens > 0
        return f"{len(pieces)} chunks, same text as whole"

    def seeded(self) -> str:
        texts = {self._chat(seed=7, temperature=1.0).choices[0].message.content for _ in range(3)}
        assert len(texts) == 1, texts
        return "three times the same"

    def choices(self) -> str:
        done = self._chat(n=3, logprobs=True, top_logprobs=2, max_tokens=4)
        assert [choice.index for choice in done.choices] == [0, 1, 2]
        entries = [entry for choice in done.choices for entry in choice.logprobs.content]
        assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries)
        return f"{len(done.choices)} choices, {len(entries)} log-probabilities"

    def schema(self) -> str:
        told = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
        text = self._chat(response_format=told, max_tokens=96).choices[0].message.content
        answer = json.loads(text)
        assert set(answer) == {"done", "kind"} and isinstance(answer["done"], bool) and answer["kind"] in "ab", text
        return text.replace("\n", " ")

    def tools(self) -> str:
        told = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}
        done = self._chat(tools=[told], tool_choice="none")
        assert not done.choices[0].message.tool_calls
        forced = {"type": "function", "function": {"name": "add"}}
        calls = self._chat(tools=[told], tool_choice=forced, max_tokens=128).choices[0].message.tool_calls
        assert calls and calls[0].function.name == "add", calls
        return f"add({json.dumps(json.loads(calls[0].function.arguments))})"

    def preset(self) -> str:
        labels = [self._given(model=f"{self.model}:{preset}") for preset in self.presets]
        return "; ".join(labels)

    def elastic(self) -> str:
        layers = max(1, self.config.num_layers - 1)
        given = self._given(extra_body={"elastic": {"layers": layers, "top_k": 1}})
        assert str(layers) in given, given
        return given

    def completion(self) -> str:
        body = {"return_token_ids": True}
        done = self.client.completions.create(
            model=self.model, prompt=[9, 10, 11], max_tokens=5, temperature=0, logprobs=1, extra_body=body
        )
        assert done.usage.prompt_tokens == 3, done.usage
        ids = done.choices[0].model_extra["token_ids"]
        assert len(ids) == done.usage.completion_tokens == len(done.choices[0].logprobs.token_logprobs)
        return f"token ids {ids}"

    def stopped(self) -> str:
        fields = {"model": self.model, "prompt": "One, two, three", "temperature": 0, "max_tokens": 24}
        text = self.client.completions.create(**fields).choices[0].text
        if len(text) < 3:
            return "the answer is too short to stop in"
        stop = text[len(text) // 2 :][:2]
        pieces = list(self.client.completions.create(**fields, stop=[stop], stream=True))
        cut = "".join(piece.choices[0].text for piece in pieces if piece.choices)
        assert cut == text[: text.index(stop)], f"{cut!r} of {text!r} before {stop!r}"
        return f"{len(cut)} of {len(text)} characters"

    def unknown_model(self) -> str:
        try:
            self._chat(model="no-such-model")
        except openai.NotFoundError as error:
            return str(error.body["message"])
        raise AssertionError("it was answered")

    def outside(self) -> str:
        try:
            self._chat(extra_body={"elastic": {"layers": self.config.num_layers + 1}})
        except openai.BadRequestError as error:
            return str(error.body["message"])
        raise AssertionError("it was answered")

    def _chat(self, **fields: object) -> openai.types.chat.ChatCompletion:
        return self.client.chat.completions.create(
            **{"model": self.model, "messages": self.messages, "max_tokens": 16, **fields}
        )

    def _given(self, **fields: object) -> str:
        """The Subnet that an answer says it got."""
        return json.dumps(self._chat(**fields).usage.model_extra["elastic"])


def _lm_eval(console: Console, url: str, folder: Path, command: Path, options: argparse.Namespace) -> bool:
    """Run lm-eval; whether it completed with a score for every problem."""
    data = options.data or _made(folder / "problems.jsonl", options.limit)
    (folder / "tasks").mkdir()
    told = TASK_FILE.format(task=TASK, data=Path(data).resolve(), tokens=options.tokens)
    (folder / "tasks" / f"{TASK}.yaml").write_text(told, encoding="utf-8")
    model = openai.OpenAI(base_url=f"{url}/v1", api_key="none").models.list().data[0].id if openai else "default"
    arguments = f"model={model},base_url={url}/v1/chat/completions,num_concurrent=8,tokenizer_backend=None"
    done = subprocess.run(
        [
            *(command, "run", "--model", "local-chat-completions", "--model_args", arguments),
            *("--tasks", TASK, "--include_path", folder / "tasks", "--apply_chat_template"),
            *("--limit", str(options.limit), "--output_path", folder / "results"),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"},
    )
    files = list((folder / "results").rglob("results*.json"))
    if done.returncode or not files:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        console.print(
            f"lm-eval: exit code {done.returncode}: {lines[-1] if lines else 'no message'}",
            soft_wrap=True,
            markup=False,
        )
        return False
    result = json.loads(files[0].read_text(encoding="utf-8"))
    count, score = result["n-samples"][TASK]["effective"], result["results"][TASK]["exact_match,last-number"]
    console.print(f"lm-eval local-chat-completions: {count} problems answered, exact match {score:.0%}")
    return count == options.limit


def _made(path: Path, num: int) -> Path:
    """Word problems of reasoning-gym in GSM8K's form."""
    problems = reasoning_gym.create_dataset("gsm_symbolic", size=num, seed=5)
    rows = (json.dumps({"question": each["question"], "answer": f"#### {each['answer']}"}) for each in problems)
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
