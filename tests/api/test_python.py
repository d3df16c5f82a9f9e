"""The Python API: what `import stretto` offers, on small models, and what it says to bad input."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest
import torch
import transformers

import stretto
from stretto.api.arguments import new_folder
from stretto.api.evaluate import Evaluated, _eval_folders, _named
from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.base.records import Receipt, new_lineage, write_lineage
from stretto.base.track import read_metrics
from stretto.cli.main import SECTIONS
from stretto.engine.request import Completion, Sampling
from stretto.server.messages import Prompts
from stretto.tasks.task import Answer, Problem, Score, TaskSource
from stretto.text.tokenizer import load_tokenizer
from tests.api.conftest import HEALING, RECIPE
from tests.starts import llama_like

PROMPT = "line 3: 9"


@pytest.fixture(scope="module")
def model(served_run: Path) -> stretto.Model:
    return stretto.load(served_run, device="cpu")


def test_importing_loads_no_torch_and_every_public_name_is_there() -> None:
    code = "import sys, stretto; print([name for name in ('torch', 'numpy', 'pydantic') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    for name in stretto.__all__:
        assert getattr(stretto, name).__doc__, name
    assert set(stretto.__all__) <= set(dir(stretto))
    with pytest.raises(AttributeError, match="has no attribute 'lod'"):
        stretto.lod  # noqa: B018


def test_a_command_has_the_defaults_of_the_function_of_its_name() -> None:
    def defaults(function: Callable[..., object]) -> dict[str, str]:
        found = {name: each.default for name, each in inspect.signature(function).parameters.items()}
        given = {name: each for name, each in found.items() if each is not inspect.Signature.empty}
        return {name: "none" if each in (None, [], ()) else str(each) for name, each in given.items()}

    commands = {each.__name__: each for functions in SECTIONS.values() for each in functions}
    compared = commands.keys() & set(stretto.__all__) - {"serve"}  # the function serves on any free port
    assert {"pretrain", "adopt", "sft", "rl", "evaluate", "plan"} <= compared
    for name in compared:
        own, function = defaults(commands[name]), defaults(getattr(stretto, name))
        shared = own.keys() & function.keys()
        assert {each: own[each] for each in shared} == {each: function[each] for each in shared}, name


def test_the_sizes_of_a_model(model: stretto.Model) -> None:
    assert list(model.subnets) == ["full", "half", "corner"]
    rows = {row.name: row for row in model.subnets.rows}
    assert (rows["corner"].layers, rows["corner"].experts, rows["corner"].top_k) == (2, "2", "1")
    assert rows["full"].total_params > rows["half"].total_params > rows["corner"].total_params
    assert rows["full"].flops_per_token > rows["corner"].flops_per_token
    assert model.subnets["half"] == model.subnet("half") == model.subnet("layers=3,experts=4,top_k=2")
    assert "corner" in repr(model.subnets) and "<td>corner</td>" in model.subnets._repr_html_()
    assert "corner" in repr(model) and "corner" in model._repr_html_()


def test_generation_is_the_engines_own(model: stretto.Model) -> None:
    done = model.generate(PROMPT, subnet="corner", max_tokens=12)
    assert str(done) == done.text and len(done.token_ids) == len(done.logprobs) <= 12
    assert done.prompt == PROMPT and done.finish_reason in ("length", "stop")
    several = model.generate([PROMPT, "7 is"], subnet="corner", max_tokens=12)
    assert several[0].token_ids == done.token_ids and len(several) == 2
    assert "".join(model.stream(PROMPT, subnet="corner", max_tokens=12)) == done.text
    assert model.generate("", max_tokens=3).token_ids, "an empty prompt begins a new document"
    warm = [model.generate(PROMPT, temperature=1.0, seed=5, max_tokens=8).token_ids for _ in range(2)]
    assert warm[0] == warm[1]


def test_chat_takes_a_message_or_a_conversation(model: stretto.Model) -> None:
    told = [{"role": "user", "content": "hello"}]
    answer = model.chat("hello", max_tokens=4)
    assert answer.token_ids == model.chat(told, max_tokens=4).token_ids
    first = answer.token_ids[0]
    assert model.chat(told, max_tokens=4, stop_ids=(first,)).token_ids == (first,), "the caller's stop ids end it, too"


def test_chat_keeps_reasoning_apart(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = stretto.load(served_run, device="cpu")
    template = "{{ '</think>' if false }}{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    fresh.tokenizer = replace(fresh.tokenizer, chat_template=template)
    asked = []

    def run(prompts: object, subnet: object, sampling: object, visible_ids: frozenset[int]) -> list[Completion]:
        asked.append(visible_ids)
        return [replace(plain, text="hm</think>4")]

    plain = fresh._run([[1]], fresh.subnet(None), Sampling(max_tokens=1))[0]
    monkeypatch.setattr(fresh, "_run", run)
    answer = fresh.chat("2 + 2?")
    assert (answer.text, answer.reasoning) == ("4", "hm")
    assert asked == [Prompts(fresh.tokenizer).visible_ids]


def test_logits_of_one_size_are_those_of_the_module(model: stretto.Model) -> None:
    ids_BT = torch.randint(model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    found = model.logits(ids_BT, subnet="half")
    assert found.shape == (2, 9, model.config.vocab_size) and found.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(found, model.module.logits(ids_BT, model.subnet("half")))
    assert torch.equal(model.logits(ids_BT[0].tolist(), subnet="half")[0], model.logits(ids_BT[:1], subnet="half")[0])


def test_a_score_is_the_sum_of_log_probabilities(model: stretto.Model) -> None:
    text = "line 4: 16 is the square"
    found = model.score([text, "é"], subnet="half")
    ids = model.tokenizer.encode(text)
    logits_TV = model.logits([model.tokenizer.eos_id, *ids[:-1]], subnet="half")[0]
    expected = logits_TV.log_softmax(-1)[range(len(ids)), ids].double().sum()
    # fp32 log-probabilities of magnitude up to ~6, summed in fp64: an error of half an ulp (2⁻²²) each
    assert found[0].log_likelihood == pytest.approx(float(expected), abs=len(ids) * 2**-21)
    assert found[0].num_tokens == len(ids) and found[1].num_bytes == 2
    assert found[0].bits_per_byte == pytest.approx(-float(expected) / len(text) / 0.693147, rel=1e-5)
    assert "bits/byte" in found._repr_html_() and len(found) == 2
    assert model.score(text).bits_per_byte > 0


def test_texts_begin_with_what_the_tokenizer_adds(served_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(served_run, tmp_path / "run") / "checkpoint"
    llama_like(load_tokenizer(folder)).save(folder)
    told = stretto.load(folder, device="cpu")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ids = theirs(PROMPT).input_ids
    assert ids[1:] == told.tokenizer.encode(PROMPT)
    asked = told._run([ids, ids[:1]], told.subnet(None), Sampling(max_tokens=12, temperature=0, repetition_penalty=1.1))
    done = told.generate([PROMPT, ""], max_tokens=12)
    assert [each.token_ids for each in done] == [each.tokens for each in asked]
    assert "".join(told.stream(PROMPT, max_tokens=12)) == asked[0].text
    logits_TV = told.logits(ids[:-1])[0]
    expected = logits_TV.log_softmax(-1)[range(len(ids) - 1), ids[1:]].double().sum()
    [scored] = told.score(PROMPT)
    assert scored.log_likelihood == pytest.approx(float(expected), abs=len(ids) * 2**-21)
    assert scored.num_tokens == len(ids) - 1
    limit = told.config.max_positions
    long = told.score("a" * 3 * limit)  # each piece begins so
    assert long[0].num_tokens == len(told.tokenizer.encode("a" * 3 * limit))


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda m: stretto.load("there/is/none"), "no such folder"),
        (lambda m: stretto.load(m.folder.parent / "tokenizer"), "config.json: no such file"),
        (lambda m: stretto.load("smolm2"), "smolm2: no such folder"),
        (lambda m: stretto.load(m.source, dtype="float8"), "dtype float8: unknown"),
        (lambda m: m.generate("x", subnet="quarter"), "quarter"),
        (lambda m: m.generate("x", subnet="layers=9"), "layers=9"),
        (lambda m: m.generate("x", max_token=3), "max_token: unknown"),
        (lambda m: m.generate("x" * 5000), "256"),
        (lambda m: m.logits([[1, 2], [3]]), "rows of equal length"),
        (lambda m: m.logits([[5000]]), "outside the vocabulary of 320"),
        (lambda m: m.logits([[]]), "at least one token"),
        (lambda m: m.score(""), "one is empty"),
        (lambda m: m.export("x", dtype="int4"), "dtype int4"),
        (lambda m: stretto.pretrain(tomllib.loads(f"{RECIPE}stepz = 3"), "text"), "train.stepz: unknown key"),
        (lambda m: stretto.pretrain("smal", "text"), "did you mean 'small'"),
        (lambda m: stretto.search(m.folder, max_total=34), "for 34 % write 0.34"),
        (
            lambda m: stretto.search(m.folder, max_total=0.5),
            "not a run folder: run.json is missing; name the folder of a run, for example of `stretto pretrain`, `adopt`, `elasticize` or `sft`",
        ),
        (lambda m: stretto.extract(m, "corner", m.folder), "choose another folder"),
        (lambda m: stretto.compare([]), "no models"),
        (lambda m: stretto.merge("average", []), "no models"),
        (lambda m: stretto.rl({"sources": {"x": {"kind": lambda: 0}}}), "defined inside a function"),
        (
            lambda m: stretto.rl({"sources": {"x": {"kind": Ones("x", Config())}}}),
            "an instance of Ones; give the class",
        ),
    ],
)
def test_bad_input_is_one_line_with_the_remedy(model: stretto.Model, work: object, words: str) -> None:
    with pytest.raises(stretto.UserError) as caught:
        work(model)  # type: ignore[operator]
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_what_the_system_refuses_is_a_user_error(model: stretto.Model, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        model.export(tmp_path / "file" / "out")


@pytest.mark.parametrize("stage", ["pretrain", "rl", "sft"])
def test_a_missing_tracker_is_found_before_anything_is_written(
    served_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what an import of a missing package finds
    (tmp_path / "a.txt").write_text("some text")
    asked = {
        "pretrain": lambda out: stretto.pretrain("small", tmp_path / "a.txt", out, wandb="x"),
        "rl": lambda out: stretto.rl("rl_gym", served_run, out, wandb="x"),
        "sft": lambda out: stretto.sft("sft", served_run, tmp_path / "a.txt", out, wandb="x"),
    }
    with pytest.raises(UserError, match=r"^wandb x: W&B is not installed; .*, or leave `wandb` out$"):
        asked[stage](tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_continues_after_a_request_that_fails(served_run: Path) -> None:
    fresh = stretto.load(served_run, device="cpu")
    with pytest.raises(UserError):
        fresh.generate(["x", "x" * 5000])
    assert fresh.generate("x", max_tokens=2).token_ids


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.generate(5), "prompt: needs a text"),
        (lambda model: model.generate(["a", 3]), "prompt: needs a text"),
        (lambda model: model.generate("a", n=2), "generate: n: must be 1, is 2"),
        (lambda model: model.stream("a", n=2), "generate: n: must be 1, is 2"),
        (lambda model: model.chat("a", n=2), "generate: n: must be 1, is 2"),
        (lambda model: model.stream(Path("a")), "prompt: needs a text"),
        (lambda model: model.chat([{"role": "bot", "content": "a"}]), "messages.0: role: must be"),
        (lambda model: model.chat([{"role": "user", "content": None}]), "messages.0: content: missing"),
        (lambda model: model.chat(None), "messages: needs a text, or a list of messages"),
        (lambda model: model.chat({"role": "user", "content": "a"}), "messages: needs a text, or a list of messages"),
        (lambda model: model.chat(["a"]), "messages.0: must be"),
        (lambda model: model.chat("\ud800"), "messages.0: content: character 1 is not UTF-8"),
        (lambda model: model.score([]), "texts: there are none"),
        (lambda model: model.subnet(3), "subnet: 3; needs a name"),
        (lambda model: model.logits([[1.5, 2]]), "token_ids: not a table of integers"),
        (lambda _: stretto.load(3), "source: needs a folder, a file, or a name on the hub, is 3"),
        (lambda _: stretto.load(""), "source: is empty"),
        (lambda model: model.export(""), "out: is empty"),
        (lambda _: stretto.pretrain("small", ""), "data: is empty"),
        (lambda _: stretto.pretrain("small", "a.txt", ""), "out: is empty"),
        (lambda _: stretto.pretrain("small", "a.txt", "o", val=""), "val: is empty"),
        (lambda _: stretto.compare([""]), "model: is empty"),
        (lambda model: stretto.extract(model, "half", "."), "contains the current folder, which cannot be replaced"),
        (lambda model: stretto.heal(model, "a.txt", "."), "contains the current folder, which cannot be replaced"),
        (lambda _: stretto.pretrain("small", "a.txt", "o", settings=5), "settings: needs texts"),
        (
            lambda _: stretto.pretrain("small", "a.txt", "o", settings={"train.rows": None}),
            "settings: train.rows: needs a",
        ),
        (lambda _: stretto.cost([]), "cost: no models; name at least one"),
        (lambda model: stretto.cost(model), "lineage.json"),
        (lambda _: stretto.tokenize(["a.txt", "b.txt"], "o"), "made from one source, 2 were named"),
        (lambda _: stretto.tokenize("a.txt", "o", tokenizer="t", vocab_size=9), "t has a vocabulary already"),
        (lambda model: model.generate("a", subnet="crner"), "^subnet crner: unknown preset"),
        (lambda model: stretto.extract(model, "half", model.source / "run.json"), "replace it with force=True$"),
        (lambda model: stretto.search(model, max_total=2, options=None), "^max_total 2: not a share"),
        (lambda model: stretto.evaluate(model, "gym", "o", samples=3, temperature=0.0), "leave `samples` out"),
        (lambda model: stretto.run("pipeline", model, "o", first="online"), "^first online: no such stage"),
        (lambda model: stretto.run("pipeline", model, "o", price=2), "only the plan of dry_run=True uses it"),
        (
            lambda model: stretto.tokenize(model.source / "run.json", model.source),
            "another output folder with `out`$",
        ),
        (lambda model: stretto.search(model, max_total="0.5"), "^max_total: needs a number, is '0.5'$"),
        (lambda model: stretto.search(model, max_total=True), "^max_total: needs a number, is True$"),
        (lambda model: stretto.search(model, max_latency_ms="3"), "^max_latency_ms: needs a number, is '3'$"),
        (lambda model: stretto.search(model, heal_steps="2"), "^heal_steps: needs a whole number, is '2'$"),
        (lambda model: stretto.extract(model, 3, "o"), r"^subnet: needs the name of a size, .*, is 3$"),
        (lambda model: stretto.extract(model, None, "o"), r"^subnet: needs the name of a size, .*, is None$"),
        (lambda model: stretto.extract(model, "", "o"), "^subnet : unknown preset"),
        (lambda model: stretto.heal(model, 5, "o"), "^data: needs the path of a file or folder, .*, is 5; write text"),
        (lambda _: stretto.tokenize(5, "o"), "^data: needs the path of a file or folder"),
        (lambda _: stretto.tokenize(["a.txt", 5], "o"), "^data: needs a path, is 5$"),
        (lambda _: stretto.tokenize("a.txt", "o", vocab_size="512"), "^vocab_size: needs a whole number, is '512'$"),
        (
            lambda _: stretto.tokenize(pd.DataFrame({"a.txt": ["x"]}), "o"),
            "is of type DataFrame; write .* to a Parquet file",
        ),
        (lambda _: stretto.tokenize("a\nb", "o"), "^data: a b…: is text, and a path is needed; write text to a file"),
        (lambda _: stretto.pretrain("small", ["hello " * 99], "o"), "^data: hello .*: is text, and a path is needed"),
        (lambda _: stretto.pretrain("small", "a.txt", "o", val="a\nb"), "^val: a b…: is text, and a path is needed"),
        (lambda model: stretto.evaluate(model, 5, "o"), "^suites: needs the name or file of a suite, .*, is 5$"),
        (lambda _: stretto.plan("small", gpus=8), "^gpus: needs the number and kind of accelerators, .*, is 8$"),
        (lambda _: stretto.plan(3, "8xH100"), "^recipe: needs a file, the name of a shipped recipe, .*, is 3$"),
        (lambda _: stretto.merge("average", "runs/no", "o"), "^runs/no: config.json: no such file"),
        (lambda model: stretto.merge("average", model, "o"), "^average: takes two or more checkpoints, not 1$"),
        (lambda _: stretto.cost(["", 5]), "^models: is empty"),
        (lambda model: stretto.compare([model, 5]), "^model: needs a path, is 5$"),
        (lambda model: stretto.serve(model, port="x"), "^port: needs a whole number, is 'x'$"),
        (lambda model: model.export("o", gguf="yes"), "^gguf: needs True or False, is 'yes'$"),
    ],
)
def test_arguments_of_other_types_are_one_line(served_run: Path, call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        call(stretto.load(served_run, device="cpu"))
    assert "\n" not in str(caught.value)


def test_an_open_stream_keeps_its_pieces_and_a_closed_one_is_forgotten(served_run: Path) -> None:
    fresh = stretto.load(served_run, device="cpu")
    whole, pieces = fresh.generate(PROMPT, max_tokens=12).text, fresh.stream(PROMPT, max_tokens=12)
    begun = next(pieces)
    for other in (lambda: fresh.generate("x"), lambda: fresh.stream("x")):
        with pytest.raises(UserError, match="read it to its end, or close it"):
            other()
    assert begun + "".join(pieces) == whole
    for _ in fresh.stream(PROMPT, max_tokens=12):
        break
    assert "".join(fresh.stream(PROMPT, max_tokens=12)) == whole


def test_a_model_opened_by_a_relative_path_works_in_another_folder(
    served_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(served_run)
    opened = stretto.load("checkpoint", device="cpu")
    assert repr(opened).startswith("Model('checkpoint'")
    monkeypatch.chdir(tmp_path)
    assert opened.generate(PROMPT, max_tokens=2).token_ids
    small = stretto.extract(opened, "corner", "small")
    assert small.config.num_layers == len(opened.subnet("corner").layers) and small.folder == tmp_path / "small"
    assert opened.run == served_run and os.fspath(opened) == str(served_run / "checkpoint")


def test_of_two_streams_the_second_to_be_read_is_refused(served_run: Path) -> None:
    fresh = stretto.load(served_run, device="cpu")
    first, second = (fresh.stream(PROMPT, max_tokens=12) for _ in range(2))
    begun = next(first)
    with pytest.raises(UserError, match="a stream of this model is open"):
        next(second)
    assert begun + "".join(first) == fresh.generate(PROMPT, max_tokens=12).text


def test_threads_take_turns_at_a_model(served_run: Path) -> None:
    prompts = [f"line {number}: " for number in range(8)]
    alone = [stretto.load(served_run, device="cpu").generate(prompt, max_tokens=6).text for prompt in prompts]
    fresh, together = stretto.load(served_run, device="cpu"), threading.Barrier(8)

    def text(prompt: str) -> str:
        together.wait()
        return [fresh.generate(prompt, max_tokens=6).text for _ in range(4)][-1]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(text, prompts)) == alone


def test_from_text_to_a_small_model(tmp_path: Path, text: Path) -> None:
    """The example of README: recipes as mappings, results handed from stage to stage."""
    recipe = tomllib.loads(RECIPE)
    tokens = stretto.tokenize(text, tmp_path / "tokens", vocab_size=320)
    assert stretto.tokenize(text, tokens, vocab_size=320) == tokens == tmp_path / "tokens"
    made = stretto.pretrain(recipe, tokens, tmp_path / "run", device="cpu")
    assert list(made.subnets) == ["full", "corner"]
    found = stretto.search(made, max_total=0.95, options=None, device="cpu")
    (tmp_path / "run" / "latency.json").write_text("[]")
    assert stretto.search(made, max_total=0.95, device="cpu").best == found.best, "no latency is asked for"
    with pytest.raises(UserError, match="not a latency table"):
        stretto.search(made, max_latency_ms=5.0, device="cpu")
    (tmp_path / "run" / "latency.json").unlink()
    assert found.best.layers and "chosen" in repr(found) and "<table>" in found._repr_html_()
    assert found.plot().figure.axes and found.plot()._repr_png_().startswith(b"\x89PNG")
    assert "best" in made.subnets
    small = stretto.extract(made, found.best)
    assert small.folder == tmp_path / "run-extract" and small.config.num_layers == len(found.best.layers)
    healed = stretto.heal(small, text, recipe=tomllib.loads(HEALING), device="cpu")
    assert healed.folder == tmp_path / "run-extract-heal"
    again = stretto.heal(small, text, healed.folder, recipe=tomllib.loads(HEALING), device="cpu", force=True)
    assert again.folder == healed.folder
    with pytest.raises(UserError, match=r"^val: needs `data`"):
        stretto.search(made, max_total=0.95, val=str(text), device="cpu")
    steps = [row["step"] for row in read_metrics(tmp_path / "run-extract-heal.run") if "loss/full" in row]
    assert steps[0] == 0 < steps[-1], "the loss before the first step is logged too"
    assert healed.lineage is not None and [parent.stage for parent in healed.lineage.parents] == ["extract"]
    out = healed.export(tmp_path / "hf")
    ids = [[1, 2, 3, 4]]
    assert torch.allclose(stretto.load(out, device="cpu").logits(ids), healed.logits(ids), atol=1e-5)
    assert stretto.extract(made, "corner").folder == tmp_path / "run-extract-2", "nothing is overwritten"
    costs = stretto.cost([made, healed, out])
    assert [each.folder for each in costs.models] == [made.source, healed.source], "an exported model is the same model"
    alone = costs.models[1].ledger.alone
    assert costs.family is not None and costs.family.rows[-1].own_flops == alone.flops > 0
    tuned = shutil.copytree(made.folder, tmp_path / "tuned" / "checkpoint")
    assert made.lineage is not None
    receipt, counts = Receipt(stage="sft", device="cpu", flops=9), {"total_params": 1, "active_params": 1}
    write_lineage(tuned, new_lineage(name="tuned", stage="sft", parents=(made.lineage,), receipt=receipt, **counts))
    assert stretto.cost([made, tuned]).family is None, "a network of the parent's shape is no size of it"
    three = stretto.cost([made, tuned, healed])
    assert three.family == costs.family, "nor is it one beside a real size"
    beside = shutil.copytree(healed.folder, tmp_path / "chat" / "checkpoint")
    write_lineage(beside, new_lineage(name="chat", stage="sft", parents=(healed.lineage,), receipt=receipt, **counts))
    with_cut, with_chat = stretto.cost([made, small, healed]).family, stretto.cost([healed, beside, small]).family
    assert with_cut == costs.family, "an extracted model and the healed one are one size"
    assert with_chat is not None and [row.name for row in with_chat.rows][1:] == ["chat"], "nor is SFT of it another"
    assert with_chat.rows[1].own_flops == alone.flops + receipt.flops
    assert costs.models[0].elasticity is not None and costs.models[1].elasticity is None
    assert "Several sizes from one parent" in costs._repr_html_() and costs.plot().figure.axes
    assert "Cost by stage: run-extract-heal" in repr(costs) and "Cost by stage:" not in repr(stretto.cost(healed))
    assert stretto.write_report(made) == tmp_path / "run" / "report" / "report.html"


@pytest.mark.slow
def test_a_served_model_answers(served_run: Path) -> None:
    with stretto.serve(served_run, "--device", "cpu") as server:
        assert httpx.get(f"{server.base_url}/models").json()["data"]


NOTEBOOK = """
import asyncio, random, sys, tomllib
import stretto
from stretto.base.trajectory import Outcome
from stretto.tasks.task import Problem, Score, TaskSource
from tests.api.rl_recipes import TINY


class Guess(TaskSource):
    def problem(self, item):
        return Problem(item, ({"role": "user", "content": "Say a digit."},), gold="7")

    def score(self, problem, answer):
        right = problem.gold in answer.text
        return Score(float(right), Outcome.OK if right else Outcome.WRONG)

    def demonstration(self, problem):
        return [{"role": "assistant", "content": random.Random(problem.item).choice("789")}]


async def notebook():  # which has a running event loop
    recipe = tomllib.loads(TINY)
    recipe["sources"] = {"guess": {"kind": Guess}}
    try:
        stretto.rl(recipe, out=sys.argv[1], settings=["runtime.isolate=all"], device="cpu")
    except stretto.UserError as error:
        print("refused:", error)
    print(stretto.rl(recipe, out=sys.argv[1], device="cpu"))


asyncio.run(notebook())
"""


@pytest.mark.slow
def test_a_task_defined_in_a_notebook(tmp_path: Path) -> None:
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    command = [sys.executable, str(tmp_path / "notebook.py"), str(tmp_path / "run")]
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ | {"PYTHONPATH": root}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "refused: sources.guess.kind: Guess is defined in a notebook" in done.stdout
    assert "%%writefile" in done.stdout and "RlRun(" in done.stdout


@pytest.mark.slow
def test_a_model_is_loaded_without_what_only_training_and_the_hub_need(served_run: Path) -> None:
    slow = (
        "torch._dynamo",
        "torch.distributed.tensor",
        "torch.distributed.checkpoint",
        "sympy",
        "httpx",
        "transformers",
    )
    code = f"""
import sys
import stretto
stretto.load({str(served_run)!r}).logits([[1, 2, 3]])
print([name for name in {slow} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_home_folder_and_other_spellings_of_arguments(
    served_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").symlink_to(served_run)
    model = stretto.Model("~/run", torch.device("cpu"))  # type: ignore[arg-type]
    assert model.source == tmp_path / "run" and list(model.subnets) == ["full", "half", "corner"]
    assert model.export("~/out/hf") == tmp_path / "out/hf" and (tmp_path / "out/hf/config.json").is_file()
    assert stretto.load(model) is model and stretto.load(model, dtype="float32") is model
    assert stretto.load(model, dtype="bfloat16").dtype == torch.bfloat16
    assert stretto.plan("rl_gym", "2xcpu", model=model).network == model.config
    for settings in ("train.rows=0", ["train.rows=0"], {"train.rows": 0}):
        with pytest.raises(UserError, match=r"train.rows: .*from the setting train.rows=0"):
            stretto.pretrain("small", "a.txt", "o", settings=settings)


def test_results_of_a_cached_model_are_not_written_into_the_cache(
    served_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert new_folder(served_run, "heal") == served_run.resolve().with_name(f"{served_run.name}-heal")
    assert new_folder(tmp_path / "stretto/models/tiny-0123", "heal") == Path("runs/tiny-0123-heal")
    snapshot = tmp_path / "huggingface/hub/models--Qwen--Tiny/snapshots/0123"
    assert new_folder(snapshot, "heal") == Path("runs/Tiny-heal")


class Ones(TaskSource):
    def problem(self, item: int) -> Problem:
        return Problem(item, ({"role": "user", "content": f"line {item}:"},), gold=str(item % 7))

    def score(self, problem: Problem, answer: Answer) -> Score:
        return Score.of(answer.text.strip() == problem.gold)


def test_a_suite_may_be_a_mapping_with_a_class(served_run: Path, tmp_path: Path) -> None:
    suites: dict[str, Any] = {"mine": {"sources": {"ones": {"kind": Ones}}, "problems": 2, "max_tokens": 3}}
    found = stretto.evaluate(served_run, suites, tmp_path / "one", samples=1, device="cpu")
    assert isinstance(found, Evaluated) and list(found.scores) == ["ones"]
    assert found.result.asked["suites"]["mine"]["sources"]["ones"]["kind"] == f"{__name__}:Ones"
    more = {"mine": suites["mine"] | {"problems": 3}}
    with pytest.raises(UserError, match=r"mine\.problems \(limit\): was 2 .*, or choose another folder with `out`$"):
        stretto.evaluate(served_run, more, tmp_path / "one", samples=1, device="cpu")
    both = stretto.compare([tmp_path / "one", served_run], tmp_path / "both", suites=suites, samples=1, device="cpu")
    assert both.result.models == ["tiny", "tiny"]
    for tree, said in (
        ({"mine": {"sources": {"ones": {"kind": "strinks"}}}}, "^suites: mine: sources.ones: kind: no kind 'strinks'"),
        ({"mine": {"sources": {"ones": {"kind": Ones}}, "problem": 3}}, "^suites: mine: problem: unknown key"),
        ({"mine": {"sources": {"ones": {"kind": Ones("x", Config())}}}}, "an instance of Ones; give the class"),
        ({}, "^evaluate: no suites; name at least one"),
    ):
        with pytest.raises(UserError, match=said):
            stretto.evaluate(served_run, tree, tmp_path / "none")


def test_one_model_may_be_compared_by_its_name(served_run: Path, tmp_path: Path) -> None:
    suites = {"mine": {"sources": {"ones": {"kind": Ones}}, "problems": 2, "max_tokens": 3}}
    for model in (str(served_run), served_run):
        found = stretto.compare(model, tmp_path / "all", suites=suites, samples=1, device="cpu")
        assert found.result.models == ["tiny"]


def test_a_size_of_a_model_is_evaluated_by_its_object(served_run: Path) -> None:
    model = stretto.load(served_run, device="cpu")
    assert _named(served_run, model.subnet("half")) == "half"
    with pytest.raises(UserError, match=r"no named size of .*; extract it"):
        _named(served_run, model.subnet("layers=2"))


def test_folders_of_compared_models_do_not_collide(tmp_path: Path) -> None:
    texts = [f"{tmp_path}/{name}/runs/model/checkpoint" for name in ("one", "two")]
    found = _eval_folders([*texts, f"{tmp_path}/one/runs/other"], tmp_path)
    assert len(set(found.values())) == 3 and found[f"{tmp_path}/one/runs/other"].name == "one-runs-other"
    assert all(re.fullmatch("runs-model-[0-9a-f]{8}", found[text].name) for text in texts)
    (tmp_path / "eval.json").touch()
    with pytest.raises(UserError, match="contains an evaluation, whose report would be replaced"):
        stretto.compare([tmp_path], tmp_path)


def test_serve_refuses_a_folder_without_a_checkpoint_when_it_is_called(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        stretto.serve(tmp_path)


def test_measures_of_one_open_ended_prompt_are_json(served_run: Path, tmp_path: Path) -> None:
    """Their intervals have no ends."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Write."}\n')
    source = {"kind": "judged", "args": {"path": str(tmp_path / "prompts.jsonl"), "judge": "scripted"}}
    suites = {"s": {"sources": {"tales": source}, "max_tokens": 8}}
    stretto.evaluate(served_run, suites, tmp_path / "out", samples=1, device="cpu")

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    (panel,) = json.loads((tmp_path / "out" / "panel.json").read_text(), parse_constant=refuse)
    assert panel["measures"]["words"]["low"] is None
