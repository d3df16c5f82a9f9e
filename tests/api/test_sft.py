"""``stretto sft`` from a checkpoint and files to a checkpoint: packing changes nothing, a resume goes on to the bit, sizes stay."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stretto.api.post import sft
from stretto.api.report import cost, report_command, write_report
from stretto.api.rl import made_start
from stretto.api.train import ADAPTER
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.paths import RECIPES
from stretto.base.records import read_lineage
from stretto.base.track import read_metrics
from stretto.cli.post import sft as command
from stretto.data.conversations import ConversationForm
from stretto.data.holdout import Holdout
from stretto.data.pack import IGNORED
from stretto.data.shards import TOKENIZER, tokenise
from stretto.data.sources import open_source
from stretto.learning.recipe import RlRecipe
from stretto.model.checkpoint import read_checkpoint, read_presets, write_checkpoint
from stretto.model.parallel import join
from stretto.model.spec import ModelConfig, SubnetChoice
from stretto.model.transformer import Context, build
from stretto.post.sft import open_conversations
from stretto.text.chat import CHATML, ChatEncoder
from stretto.text.tokenizer import load_tokenizer, train_tokenizer
from stretto.train.recipe import SftRecipe
from stretto.train.run_folder import read_info
from stretto.train.step import MicroBatch, forward_backward

MODEL = {
    "vocab_size": 300, "hidden_size": 32, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "num_experts": 4,
    "top_k": 2, "expert_intermediate_size": 16, "max_positions": 512, "widths": (4, 2), "num_branches": 2,
}  # fmt: skip
SMALL = SubnetChoice(experts=2, top_k=1)


def recipe(*told: str) -> SftRecipe:
    usual = (
        "train.steps=6",
        "train.rows=4",
        "train.seq_len=128",
        "train.micro_batches=2",
        "optim.lr=3e-3",
        "optim.warmup_steps=0",
    )
    every = (
        "train.eval_every=3",
        "train.snapshot_every=2",
        "train.log_every=1",
        "train.eval_rows=4",
        "train.dtype=float32",
    )
    return read_recipe(RECIPES / "sft.toml", SftRecipe, [*usual, *every, *told])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tokenizer = train_tokenizer(iter([Path(__file__).read_text()]), 300, CHATML)
    tokenizer.save(folder / "tokenizer")
    config = ModelConfig.model_validate(MODEL)
    presets = {"small": SMALL}
    write_checkpoint(folder / "m", build(config, 0), config, tokenizer_dir=folder / "tokenizer", presets=presets)
    return folder / "m"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    for name, sign in (("sums", "+"), ("products", "*")):
        rows = []
        for number in range(60):
            asked = {"role": "user", "content": f"{number}{sign}{number % 7}?"}
            answer = {
                "role": "assistant",
                "content": f"{number} {sign} {number % 7} is {number + number % 7}." * (1 + number % 3),
            }
            rows.append(
                {"messages": [asked, answer] if number % 2 else [asked, {**answer, "train": False}, asked, answer]}
            )
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def data(base: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The conversations as the command would tokenise them."""
    folder = tmp_path_factory.mktemp("data")
    sources = [open_source(file, ConversationForm(file.stem)) for file in sorted(chats.iterdir())]
    documents = [each for source in sources for each in source.read("train")]
    tokenizer = load_tokenizer(base)
    tokenise({"train": documents}, ChatEncoder(tokenizer), folder, processes=1, holdout=Holdout("documents", 0.1))
    tokenizer.save(folder / TOKENIZER)
    return folder


def run(base: Path, chats: Path | tuple[()], out: Path, *told: str, **given: Any) -> Path:
    return sft(recipe(*told), base, chats, out, device="cpu", **given).folder


def test_from_files_to_a_checkpoint_and_its_page(base: Path, chats: Path, tmp_path: Path) -> None:
    made = run(base, chats, tmp_path / "run")
    done = read_checkpoint(made)
    assert done.lineage is not None and done.lineage.stage == "sft" and done.lineage.receipt.tokens > 0
    assert read_presets(made) == {"small": SMALL}
    logged = [row for row in read_metrics(tmp_path / "run") if "loss/full" in row]
    assert [row["step"] for row in logged] == [0, 3, 6] and logged[-1]["loss/full"] < logged[0]["loss/full"] - 0.1
    assert all("loss/small" in row for row in logged)
    assert run(base, (), tmp_path / "run", resume=True) == made  # the data are in the run's record
    page = report_command(tmp_path / "run").read_text()
    assert "small" in page
    for of in (cost, write_report):
        with pytest.raises(UserError, match=r"^controls: only a network .* has a control; leave it out"):
            of(tmp_path / "run", controls=[tmp_path / "nothing"])
        with pytest.raises(UserError, match=r"^controls: only a network"):
            of(tmp_path / "run", controls=str(tmp_path / "nothing"))
        with pytest.raises(UserError, match=r"^controls: needs a folder or an opened model.*, is 5$"):
            of(tmp_path / "run", controls=5)  # type: ignore[arg-type]
    for models in (5, [tmp_path / "run", 5]):
        with pytest.raises(UserError, match=r"^models: needs a folder or an opened model.*, is 5$"):
            cost(models)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="holds a run already; add resume=True"):
        run(base, chats, tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_was_killed_while_its_first_snapshot_was_written_can_be_resumed(
    base: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(state: object, checkpoint_id: Path, **_: object) -> None:
        checkpoint_id.mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("torch.distributed.checkpoint.state_dict_saver.save", killed)
        run(base, chats, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "snapshots").iterdir()] == [".step-0000002.partial"]
    resumed = run(base, chats, tmp_path / "run", resume=True)
    whole = run(base, chats, tmp_path / "whole")
    hashes = [read_lineage(folder).weights_hash for folder in (resumed, whole)]
    assert hashes[0] == hashes[1]


@pytest.mark.slow
def test_packing_changes_no_gradient(base: Path, data: Path, tmp_path: Path) -> None:
    """Rows of several conversations against every conversation alone: the same sum of gradients."""
    run(base, data, tmp_path / "run", "train.steps=1")
    mixture = read_info(tmp_path / "run").mixture
    told = recipe("train.micro_batches=1", "train.rows=6", "train.seq_len=512")
    batch = open_conversations(mixture, told, join("cpu")).next()
    model = read_checkpoint(base, dtype=torch.float32).model

    def gradients(batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        for each in batches:
            forward_backward(model, each, torch.float32)
        return {
            name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
        }

    def micro(rows: list[np.ndarray]) -> MicroBatch:
        ids, targets, documents, positions = (torch.from_numpy(row) for row in rows)
        num = int((targets != IGNORED).sum())
        return MicroBatch("full", ids, targets, Context(positions, documents), model.config.full(), num)

    packed = gradients([micro([batch.tokens_BT, batch.targets_BT, batch.documents_BT, batch.positions_BT])])
    alone = []
    for row in range(len(batch.tokens_BT)):
        for document in range(batch.documents_BT[row].max() + 1):
            here = batch.documents_BT[row] == document
            arrays = (batch.tokens_BT, batch.targets_BT, batch.documents_BT, batch.positions_BT)
            alone.append(micro([array[row, here][None] for array in arrays]))
    assert len(alone) > 2 * len(batch.tokens_BT)
    apart = gradients(alone)
    for name, gradient in packed.items():  # fp32, sums of hundreds of terms in another order
        assert torch.allclose(gradient, apart[name], rtol=0, atol=2e-5 * float(gradient.abs().max()) + 1e-6), name


@pytest.mark.slow
def test_killed_it_goes_on_to_the_bit(base: Path, data: Path, tmp_path: Path) -> None:
    whole = run(base, data, tmp_path / "whole")
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "from tests.api.test_sft import run; run(*map(Path, sys.argv[2:5]), 'train.steps=6', resume=len(sys.argv) > 5)"
    )
    cut = tmp_path / "cut"
    root = str(Path(__file__).parents[2])
    with subprocess.Popen([sys.executable, "-c", code, root, str(base), str(data), str(cut)], cwd=root) as child:
        while child.poll() is None and not list((cut / "snapshots").glob("step-*")):
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
    made = run(base, data, cut, resume=True)
    assert (made / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    told = recipe("long=cut")
    with pytest.raises(UserError, match="long"):
        sft(told, base, data, cut, resume=True, device="cpu")


def test_adapters_are_trained_merged_and_kept(base: Path, data: Path, tmp_path: Path) -> None:
    made = run(base, data, tmp_path / "run", "lora.rank=4", "optim.lr=3e-2", keep_adapter=True)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, made))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("proj" in name for name in moved)
    kept = tmp_path / "run" / ADAPTER
    assert json.loads((kept / "adapter_config.json").read_text())["r"] == 4
    # gone on with, where they were kept: a step of rate zero changes nothing
    again = run(base, data, tmp_path / "again", "train.steps=1", "optim.lr=1e-30", adapter=kept)
    found = load_file(again / "model.safetensors")
    assert all(torch.equal(found[name], after[name]) for name in after)
    with pytest.raises(UserError, match=r"^keep_adapter=True: no adapters are trained; add `lora` 16"):
        run(base, data, tmp_path / "other", keep_adapter=True)


@pytest.mark.slow
def test_killed_adapters_go_on_to_the_bit(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(base, data, tmp_path / "whole", "lora.rank=2")
    steps = iter(range(100))
    import stretto.train.loop as loop

    real = loop.optimisation_step

    def stops(*given: Any, **named: Any) -> Any:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return real(*given, **named)

    monkeypatch.setattr(loop, "optimisation_step", stops)
    with pytest.raises(KeyboardInterrupt):
        run(base, data, tmp_path / "cut", "lora.rank=2")
    made = run(base, data, tmp_path / "cut", "lora.rank=2", resume=True)
    assert (made / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_every_size_is_trained(base: Path, data: Path, tmp_path: Path) -> None:
    plain, elastic = tmp_path / "plain", tmp_path / "elastic"
    long = ("train.steps=30", "train.eval_every=30", "train.snapshot_every=30", "optim.lr=1e-2")
    run(base, data, plain, *long)
    made = run(base, data, elastic, *long, "elastic.anchor_share=0.4")
    assert set(read_presets(made)) == {"small"}
    mixture = read_checkpoint(made).lineage.config["mixture"]  # type: ignore[union-attr]
    assert mixture["small"] > 0 and mixture["full"] > 0
    lost = [[row["loss/small"] for row in read_metrics(folder) if "loss/small" in row] for folder in (elastic, plain)]
    assert lost[0][0] == lost[1][0] and lost[0][-1] < lost[1][-1]


def test_domains_get_their_shares(base: Path, data: Path, tmp_path: Path) -> None:
    told = recipe("train.steps=1", "train.rows=40", "domains.sums=3", "domains.products=1")
    sft(told, base, data, tmp_path / "run", device="cpu")
    mixture = read_info(tmp_path / "run").mixture
    parts = np.concatenate([open_conversations(mixture, told, join("cpu")).next().parts_B for _ in range(2)])
    assert (
        abs(float((parts == 1).mean()) - 0.75) <= 0.08
    )  # within a few rows; domains as the files come: products, sums
    with pytest.raises(UserError, match=r"domains.math: no conversation has this domain; the data has products, sums"):
        open_conversations(mixture, recipe("domains.math=1", "domains.sums=1"), join("cpu"))
    with pytest.raises(UserError, match="domains: products is in the data and has no share"):
        open_conversations(mixture, recipe("domains.sums=1"), join("cpu"))


def test_a_resume_without_data_may_repeat_how_text_is_held_out(base: Path, chats: Path, tmp_path: Path) -> None:
    held_out = chats / "products.jsonl"
    made = run(base, chats / "sums.jsonl", tmp_path / "run", "train.steps=2", val=held_out)
    assert run(base, (), tmp_path / "run", "train.steps=2", val=held_out, resume=True) == made
    with pytest.raises(UserError, match=r"run: val: was .*sums.jsonl@1 .val. .*products.jsonl when .*; leave it out$"):
        run(base, (), tmp_path / "run", "train.steps=2", val=chats / "sums.jsonl", resume=True)
    with pytest.raises(UserError, match=r"run: data: was .*sums.jsonl@1 .val. .*; leave it out$"):
        run(base, chats / "sums.jsonl", tmp_path / "run", "train.steps=2", resume=True)


def test_a_recipe_that_is_complete_with_its_options_is_resumed_without_data(
    base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, out = tmp_path / "own.toml", tmp_path / "run"
    told.write_text("[optim]\nlr = 1e-3\n[train]\nrows = 4\nseq_len = 128\neval_rows = 4\n")
    made = sft(told, base, chats, out, steps=2, device="cpu").folder
    assert sft(told, base, out=out, steps=2, resume=True, device="cpu").folder == made
    command(told, base, out=out, steps=2, resume=True, device="cpu")
    assert f"next: stretto report {out}; stretto " in capsys.readouterr().out


def test_a_mixture_of_fine_tuning_measures_no_orders(
    base: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new run is refused; one that was begun when the keys were accepted stays readable and can be resumed."""
    told = ("train.steps=2", "elastic.sampler=off", "elastic.rank_layers_at=[0.5]")
    with pytest.raises(UserError, match=r"^elastic.rank_layers_at: fine-tuning keeps .* leave it out$"):
        run(base, chats, tmp_path / "run", *told)
    with monkeypatch.context() as before:
        before.setattr("stretto.api.post.check_keeps_orders", lambda *_: None)
        made = run(base, chats, tmp_path / "run", *told)
    assert read_info(tmp_path / "run").stage == "sft"
    assert run(base, chats, tmp_path / "run", *told, resume=True) == made


def test_a_start_of_rl_measures_no_orders(tmp_path: Path) -> None:
    told = read_recipe("rl_gym", RlRecipe, ["start.elastic.rank_experts_at=[0.5]"])
    with pytest.raises(UserError, match=r"^start.elastic.rank_experts_at: fine-tuning keeps .* leave it out$"):
        made_start(told, tmp_path, device="cpu")


def test_what_cannot_be_done_is_refused(base: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data: missing; name the conversations that .*sft.toml trains on"):
        sft("sft", base, out=tmp_path / "file", steps=2)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: is a file, and the run needs a folder"):
        sft("sft", base, data=data, out=tmp_path / "file")
    with pytest.raises(UserError, match=r"train.seq_len: 16 tokens hold all but \d+ of \d+ conversations"):
        run(base, data, tmp_path / "a", "train.seq_len=16")
    with pytest.raises(UserError, match=r"train.seq_len: 4096 exceeds the network's 512 positions"):
        run(base, data, tmp_path / "b", "train.seq_len=4096")
    (tmp_path / "text.txt").write_text("plain text " * 100)
    with pytest.raises(UserError, match=r"text.txt: plain text, but records are needed"):
        run(base, tmp_path / "text.txt", tmp_path / "c")
    with pytest.raises(UserError, match=r"step [23]: the (loss|gradient) of full is not finite"):
        run(
            base,
            data,
            tmp_path / "d",
            "optim.lr=1e30",
            "optim.clip_norm=1e30",
            "train.steps=3",
            "optim.warmup_steps=0",
        )


@pytest.fixture(scope="module")
def bare(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint `base` without a chat template."""
    folder = shutil.copytree(base, tmp_path_factory.mktemp("bare") / "m")
    tokenizer = load_tokenizer(base)
    for path in folder.glob("*token*"):
        path.unlink()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    replace(tokenizer, chat_template=None).save(folder)
    assert load_tokenizer(folder).chat_template is None
    return folder


def test_prompts_and_completions_as_texts_need_no_chat_template(bare: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1=", "completion": f"{number + 1}"} for number in range(40)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    made = run(bare, data, tmp_path / "run")
    assert read_checkpoint(made).lineage is not None


def test_the_first_conversation_that_needs_a_template_is_refused_before_training(bare: Path, tmp_path: Path) -> None:
    turns = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
    data = tmp_path / "mixed.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in [{"prompt": "1+1=", "completion": "2"}, turns] * 20))
    place = re.escape(f"{data}: line 2: chat_template: the tokenizer has none")
    with pytest.raises(UserError, match=f"{place}.*prompt and completion as strings"):
        run(bare, data, tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.slow
def test_the_same_call_succeeds_once_the_chat_template_is_there(bare: Path, tmp_path: Path) -> None:
    model = shutil.copytree(bare, tmp_path / "m")
    texts = [{"prompt": f"{number}+1=", "completion": f"{number + 1}"} for number in range(40)]
    turns = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        for row in texts
    ]
    files = {"texts": texts, "turns": [{"messages": messages} for messages in turns]}
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = [tmp_path / f"{name}.jsonl" for name in files]
    for val in (None, str(data[1])):
        named = data if val is None else data[:1]
        out = tmp_path / f"run-{len(named)}"
        (model / "chat_template.jinja").unlink(missing_ok=True)
        with pytest.raises(UserError, match=r"the tokenizer has none; put a chat_template\.jinja beside"):
            sft(recipe(), model, named, out, val=val, device="cpu")
        (model / "chat_template.jinja").write_text(CHATML)
        made = sft(recipe(), model, named, out, val=val, device="cpu").folder
        assert read_checkpoint(made).lineage is not None
