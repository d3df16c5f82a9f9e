"""`stretto elasticize` and `pretrain --from` on tiny checkpoints: in place, killed, resumed, refused."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stretto.api import train
from stretto.base.paths import claimed, write_json
from stretto.base.records import Receipt, new_lineage, read_lineage
from stretto.model.checkpoint import read_checkpoint, read_presets, write_checkpoint
from stretto.model.counts import count
from stretto.model.spec import ModelConfig
from stretto.model.transformer import build
from stretto.text.tokenizer import train_tokenizer
from stretto.train.recipe import fixes_routers
from stretto.train.run_folder import RunInfo, read_info
from stretto.train.step import NonFiniteError
from tests.api.conftest import Run, refused
from tests.model.checkpoints import edit_tensors

SHAPE = ModelConfig(
    vocab_size=300, hidden_size=32, num_layers=6, num_heads=2, num_kv_heads=1, head_dim=16, num_experts=4, top_k=2,
    expert_intermediate_size=16, tie_embeddings=True, max_positions=64,
)  # fmt: skip
SMALL = (
    "--set", "train.rows=4", "--set", "train.micro_batches=2", "--set", "train.seq_len=32", "--set", "train.eval_rows=4",
    "--set", "train.snapshot_every=2", "--set", "train.eval_every=4", "--set", "optim.warmup_steps=1", "--steps", "4",
    "--set", "train.dtype=float32",
)  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.mkdir()
    for name, num in (("train", 200), ("val", 40)):
        lines = [f"line {number}: {number * number} is the square of {number}" for number in range(num)]
        (path / f"{name}.txt").write_text("\n\n".join(lines))
    return path


@pytest.fixture
def adopted(tmp_path: Path, text: Path) -> Callable[..., Path]:
    """A run folder as `stretto adopt` leaves it, without text."""

    def make(name: str = "run", config: ModelConfig = SHAPE, seed: int = 0) -> Path:
        run, tokenizer = tmp_path / name, tmp_path / "tokenizer"
        if not tokenizer.exists():
            train_tokenizer([(text / "train.txt").read_text()], 300).save(tokenizer)
        size = count(config, config.full())
        lineage = new_lineage(
            name=name,
            stage="adopt",
            total_params=size.total_params,
            active_params=size.active_params,
            receipt=Receipt(stage="adopt", device="test"),
        )
        model = build(config, seed)
        write_checkpoint(run / "checkpoint", model, config, tokenizer_dir=tokenizer, lineage=lineage)
        info = RunInfo(stage="adopt", tokenizer=run / "checkpoint")
        write_json(run / "run.json", info.model_dump(mode="json"))
        return run

    return make


@pytest.mark.slow
def test_in_place_from_adopted_to_healed(stretto: Run, adopted: Callable[..., Path], text: Path, healing: Path) -> None:
    run = adopted()
    before = (run / "checkpoint" / "model.safetensors").read_bytes()

    def ok(*arguments: object) -> str:
        result = stretto(*arguments)
        assert result.code == 0, result.err
        return result.out

    refused(stretto("search", run), "--data", "adopted without text")
    assert "chosen:" in ok("search", run, "--data", text, "--max-total", 0.9)
    assert "logits differ by" in ok("extract", run, "--subnet", "layers=5", "-o", run / "early")
    told = ok("elasticize", run, "--data", text, *SMALL, "-o", run)  # as without -o
    assert f"next: stretto latency {run}; stretto search {run} --max-total" in told
    assert (run / "adopted" / "model.safetensors").read_bytes() == before
    assert not (run / "elasticized").exists()
    assert set(read_presets(run / "checkpoint")) == {"half", "corner"}
    lineage = read_lineage(run / "checkpoint")
    assert (lineage.stage, [parent.stage for parent in lineage.parents]) == ("elasticize", ["adopt"])
    assert lineage.receipt.flops > 0 and lineage.tokenizer_hash is not None
    refused(stretto("elasticize", run, "--data", text, *SMALL), "holds a run already", "--resume")

    assert "chosen:" in ok("search", run, "--max-total", 0.9)
    ok("extract", run, "--subnet", "corner", "-o", run / "corner")
    ok("heal", run / "corner", "-o", run / "healed", "--data", text, "--recipe", healing)
    assert [stage.stage for stage in read_lineage(run / "healed").parents] == ["extract"]
    assert "corner" in Path(ok("report", run).split("report:")[1].strip()).read_text()
    assert "elasticize" in ok("cost", run)


@pytest.mark.slow
def test_killed_while_it_takes_its_place(
    stretto: Run, adopted: Callable[..., Path], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two renames, and the result is that of a run that nobody killed."""
    whole = adopted("whole")
    assert stretto("elasticize", whole, "--data", text, *SMALL).code == 0
    expected = read_checkpoint(whole / "checkpoint").model.state_dict()
    rename = Path.rename
    for number in (1, 2):
        run = adopted(f"killed-{number}")
        before = (run / "checkpoint" / "model.safetensors").read_bytes()
        seen = 0

        def killing(self: Path, target: Path, at: int = number) -> Path:
            nonlocal seen
            if "checkpoint" in (self.name, Path(target).name):
                seen += 1
                if seen == at:
                    raise KeyboardInterrupt
            return rename(self, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", killing)
            assert stretto("elasticize", run, "--data", text, *SMALL).code == 130
        held = [run / "checkpoint", run / "adopted"]
        kept = [(path / "model.safetensors").read_bytes() for path in held if path.is_dir()]
        assert before in kept, number
        assert stretto("elasticize", run, "--resume", *SMALL).code == 0
        state = read_checkpoint(run / "checkpoint").model.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in expected.items())
        assert (run / "adopted" / "model.safetensors").read_bytes() == before


def start(*arguments: object, ranks: int = 1) -> subprocess.Popen[str]:
    """``stretto ARGUMENTS…`` in processes of their own, one a rank."""
    module = ["-m", "stretto"]
    if ranks > 1:
        module = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *module]
    command = [sys.executable, *module, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def ended(process: subprocess.Popen[str]) -> str:
    """What it said on stderr; it must have ended well."""
    _, said = process.communicate()
    assert process.returncode == 0, said
    return said


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cached", [(), ("--cache-logits", 4)])
def test_kill_9_anywhere_and_on(
    stretto: Run, adopted: Callable[..., Path], text: Path, cached: tuple[object, ...]
) -> None:
    """Three times at random moments of the run; the checkpoint is that of a run that nobody killed, to the bit."""
    told = (*SMALL[:-4], "--steps", 60, *SMALL[-2:], "--data", text, *cached)
    whole, run, rng, num_killed = adopted("whole"), adopted("run"), random.Random(12), 0

    def snapshots() -> list[str]:
        return sorted(path.name for path in (run / "snapshots").glob("step-*"))

    assert stretto("elasticize", whole, *told).code == 0
    for number in range(3):
        before = snapshots()
        running = start("elasticize", run, *told, *(("--resume",) if before else ()))
        while running.poll() is None and (snapshots() == before if number else not (run / "elasticize").is_dir()):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        running.kill()
        running.communicate()
        num_killed += not (run / "adopted").is_dir()
    assert num_killed > 1, "it was over too soon"
    if not (run / "adopted").is_dir():
        ended(start("elasticize", run, *told, *(("--resume",) if snapshots() else ())))
    first, second = (read_lineage(each / "checkpoint") for each in (whole, run))
    assert first.weights_hash == second.weights_hash and first.receipt.tokens == second.receipt.tokens
    assert [path.name for path in run.rglob("*.partial")] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cached", [(), ("--cache-logits", 4)])
def test_two_ranks_equal_one(
    stretto: Run, adopted: Callable[..., Path], text: Path, cached: tuple[object, ...]
) -> None:
    """Whole networks side by side, and experts divided between the two."""
    told, steps = (*SMALL, "--data", text, *cached), 4
    ordered = SHAPE.replace(expert_order=((2, 0, 3, 1),) * 6, layer_order=(0, 1, 4, 5, 3, 2))
    runs = {name: adopted(name, ordered) for name in ("one", "two", "split")}
    assert stretto("elasticize", runs["one"], *told).code == 0
    for name, ep in (("two", 1), ("split", 2)):
        said = ended(start("elasticize", runs[name], *told, "--set", f"train.ep={ep}", ranks=2))
        assert "arning" not in said, said
    one, *others = (read_checkpoint(run / "checkpoint").model for run in runs.values())
    for other in others:
        assert other.config == one.config
        weights = list(zip(one.state_dict().values(), other.state_dict().values(), strict=True))
        difference = sum(float((a.double() - b.double()).square().sum()) for a, b in weights)
        size = sum(float(a.double().square().sum()) for a, _ in weights)
        # as in tests/train/test_ranks.py: sums over a step's tokens in another order, whose errors add up as a random walk
        assert math.sqrt(difference / size) <= math.sqrt(4 * 32 * steps) * torch.finfo(torch.float32).eps


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ep", [1, 2])
def test_orders_that_a_network_does_not_bring_are_measured_on_two_ranks(
    adopted: Callable[..., Path], text: Path, ep: int
) -> None:
    run = adopted()
    said = ended(start("elasticize", run, *SMALL, "--data", text, "--set", f"train.ep={ep}", ranks=2))
    assert "arning" not in said, said
    config = read_checkpoint(run / "checkpoint").config
    assert config.layer_order is not None and config.expert_order is not None


def test_weights_that_are_no_numbers(stretto: Run, adopted: Callable[..., Path], text: Path) -> None:
    """Found in the first step, told in a line; the network that was adopted stays."""
    run = adopted()
    path = run / "checkpoint" / "model.safetensors"
    edit_tensors(path, lambda tensors: tensors["model.norm.weight"].fill_(math.nan))
    before = path.read_bytes()
    done = stretto("elasticize", run, "--data", text, *SMALL)
    assert done.code == NonFiniteError.exit_code and "not finite" in done.err and "Traceback" not in done.err, done
    assert path.read_bytes() == before and not (run / "adopted").exists()


@pytest.mark.slow
def test_stopped_in_the_middle_nothing_has_changed(
    stretto: Run, adopted: Callable[..., Path], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = adopted()
    before = {path: path.read_bytes() for path in (run / "checkpoint").iterdir()}
    with monkeypatch.context() as patched:

        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        patched.setattr(train, "write_trained", interrupted)
        assert stretto("elasticize", run, "--data", text, *SMALL).code == 130
    assert {path: path.read_bytes() for path in (run / "checkpoint").iterdir()} == before
    assert not (run / "adopted").exists()
    with claimed(run):
        refused(stretto("elasticize", run, "--resume", *SMALL), f"process {os.getpid()} on", "running in it")
    changed = ("--set", "kd_weight=0.5")
    refused(stretto("elasticize", run, "--resume", *SMALL, *changed), "kd_weight: was 1.0", "is 0.5 now")
    refused(stretto("elasticize", run, "--resume", *SMALL, "--teacher", adopted("other")), "--teacher", "without")
    assert stretto("elasticize", run, "--resume", *SMALL).code == 0
    more = stretto("elasticize", run, "--resume", *SMALL[:-4], "--steps", 6, *SMALL[-2:])
    assert more.code == 0, more.err
    assert {path.name: path.read_bytes() for path in (run / "adopted").iterdir()} == {
        path.name: content for path, content in before.items()
    }
    assert read_lineage(run / "checkpoint").config["recipe"]["train"]["steps"] == 6


@pytest.mark.slow
def test_into_a_new_folder(stretto: Run, adopted: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    source, out = adopted("source"), tmp_path / "out"
    before = sorted(path.relative_to(source) for path in source.rglob("*"))
    result = stretto("elasticize", source / "checkpoint", "--data", text, "-o", out, *SMALL)
    assert result.code == 0, result.err
    assert sorted(path.relative_to(source) for path in source.rglob("*")) == before
    assert not (out / "adopted").exists() and set(read_presets(out / "checkpoint")) == {"half", "corner"}
    refused(
        stretto("elasticize", out, "--data", text, *SMALL), "made by `stretto elasticize` and is not replaced", "-o"
    )
    refused(stretto("elasticize", source / "checkpoint", "--data", text, *SMALL), "not a run folder", "-o")
    other = adopted("other")
    refused(stretto("elasticize", other, "-o", out, "--resume", *SMALL), "source: was", str(source), "change it back")


@pytest.mark.slow
def test_with_logits_on_disk_and_routers_alone(
    stretto: Run, adopted: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    run, teacher = adopted(), adopted("teacher", seed=1)
    told = (
        "elasticize",
        run,
        "--data",
        text,
        *SMALL,
        "--cache-logits",
        4,
        "--trainable",
        "routers",
        "--teacher",
        teacher,
    )
    refused(stretto(*told[:-5], 301), "cached_logits: 301 exceeds the vocabulary of 300")
    result = stretto(*told)
    assert result.code == 0, result.err
    assert "4 largest log-probabilities of" in result.out and "trainable routers:" in result.out
    assert (run / "teacher" / "teacher.json").is_file()
    states = [read_checkpoint(run / name).model.state_dict() for name in ("adopted", "checkpoint")]
    moved = {name for name, tensor in states[0].items() if not torch.equal(tensor, states[1][name][: len(tensor)])}
    assert moved and all("norm" in name or name.endswith(("mlp.gate", "bias_WE")) for name in moved)
    refused(stretto("elasticize", run, *SMALL, "--resume"), "cached_logits: was 4", "is not set now")


def test_what_does_not_fit_is_refused(stretto: Run, adopted: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    run = adopted()
    before = sorted(path for path in run.rglob("*") if path.name != ".lock")
    refused(stretto("elasticize", run, "--data", text, "--set", "kd_wait=1"), "kd_wait: unknown key", "kd_weight")
    refused(stretto("elasticize", run, "--data", text, "--set", "elastic.joint=true"), "elastic.joint: unknown key")
    refused(stretto("elasticize", run, "--data", text, "--trainable", "some"), "trainable")
    refused(stretto("elasticize", run, "--data", text, *SMALL, "--set", "train.seq_len=128"), "max_positions 64")
    refused(stretto("elasticize", run, *SMALL), "--data")
    other = adopted("other", SHAPE.replace(vocab_size=320))
    refused(stretto("elasticize", run, "--data", text, *SMALL, "--teacher", other), "--teacher", "320", "300")
    tokens = ("tokenize", "--data", text, "--vocab-size", 280, "-o", tmp_path / "tokens")
    assert stretto(*tokens).code == 0
    refused(stretto("elasticize", run, "--data", tmp_path / "tokens", *SMALL), "not the tokenizer that encoded")
    bare = tmp_path / "bare"
    shutil.copytree(run / "checkpoint", bare)
    (bare / "tokenizer.json").unlink()
    refused(stretto("elasticize", bare, "--data", text, *SMALL, "-o", tmp_path / "out"), "no tokenizer.json")
    assert not (tmp_path / "out").exists()
    assert sorted(path for path in run.rglob("*") if path.name != ".lock") == before
    assert json.loads((run / "run.json").read_text())["stage"] == "adopt"


@pytest.mark.slow
def test_routers_that_only_rank_stay_fixed(
    stretto: Run, adopted: Callable[..., Path], recipe: Path, healing: Path, text: Path, tmp_path: Path
) -> None:
    """In a size that was cut from a network of a dense one's parts, of which a token chooses some."""
    source = adopted(config=SHAPE.replace(normalize_gates=False, routed_scaling=2.0)) / "checkpoint"
    before = read_checkpoint(source).model.state_dict()
    small = ("--data", text, "--steps", 2, "--set", "train.dtype=float32")
    further = ("pretrain", recipe, "--from", source, "-o", tmp_path / "further", *small)
    healed = ("heal", source, "--recipe", healing, "-o", tmp_path / "healed", "--set", "ce_weight=1", *small)
    for told, folder in ((further, "further/checkpoint"), (healed, "healed")):
        result = stretto(*told)
        assert result.code == 0, result.err
        assert "the routers stay fixed" in result.out
        after = read_checkpoint(tmp_path / folder).model.state_dict()
        for name in (name for name in before if name.endswith(("mlp.gate", "bias_WE"))):
            assert torch.equal(after[name][: len(before[name])], before[name]), name
        assert not torch.equal(after["blocks.0.mlp.down"], before["blocks.0.mlp.down"])
    run = tmp_path / "healed.run"
    assert fixes_routers(read_checkpoint(source).config, read_info(run).recipe)


@pytest.mark.slow
def test_pretraining_goes_on_from_a_checkpoint(
    stretto: Run, adopted: Callable[..., Path], recipe: Path, text: Path, tmp_path: Path
) -> None:
    source, run = adopted(), tmp_path / "further"
    told = ("pretrain", recipe, "-o", run, "--steps", 2, "--set", "optim.lr=1e-9", "--set", "train.dtype=float32")
    told += ("--set", "elastic.balance_rate=0", "--set", "elastic.balance_final_rate=0")
    refused(stretto(*told, "--data", text, "--from", tmp_path / "none"), "none")
    tokenizer = tmp_path / "tokenizer"
    refused(stretto(*told, "--data", text, "--from", source, "--tokenizer", tokenizer), "--tokenizer", "leave it out")
    result = stretto(*told, "--data", text, "--from", source)
    assert result.code == 0, result.err
    found, before = read_checkpoint(run / "checkpoint"), read_checkpoint(source / "checkpoint")
    assert found.config.num_layers == 6 and found.config.widths == (4, 2), "its network, the recipe's anchors"
    for name, tensor in before.model.state_dict().items():
        rows = [0, 0] if name.endswith("bias_WE") else ...
        assert torch.allclose(found.model.state_dict()[name], tensor[rows], atol=1e-6), name
    lineage = read_lineage(run / "checkpoint")
    assert (lineage.stage, [parent.stage for parent in lineage.parents]) == ("pretrain", ["adopt"])
    assert stretto(*told, "--resume", "--steps", 3).code == 0, "it is known where it came from"
    refused(stretto(*told, "--resume", "--from", adopted("other")), "--from: was", "change it back")
