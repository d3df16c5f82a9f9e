"""Training runs: they learn, stop, go on bit for bit, and refuse what they cannot go on from."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stretto.base.errors import UserError
from stretto.base.track import Tracker, read_metrics
from stretto.data.loader import Loader
from stretto.data.shards import TokenSet, tokenise
from stretto.data.sources import Document
from stretto.model.elastic import extract
from stretto.model.parallel import in_memory, join
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, Transformer, build
from stretto.ops.logprob import head_loss
from stretto.train import loop
from stretto.train.loop import Job, Trained
from stretto.train.recipe import HealRecipe
from stretto.train.sampler import Sampler
from stretto.train.snapshot import Snapshots, read_meta
from stretto.train.stages import heal
from tests.train.conftest import Bytes

Same = Callable[[Trained, Trained], None]


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def ctrl_c_in_forward(number: int) -> Iterator[None]:
    """Ctrl-C in the middle of the pass of that number, counted over all networks from now on."""
    seen = 0

    def hook(module: nn.Module, *_: object) -> None:
        nonlocal seen
        if isinstance(module, Transformer):
            seen += 1
            if seen == number:
                press_ctrl_c()

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_the_loss_falls_and_the_mixture_is_logged(run: Any) -> None:
    trained = run(log=True, train__steps=30)
    rows = read_metrics(run.folder)
    losses = [row["loss/train"] for row in rows]
    assert len(rows) == 30 and losses[0] == pytest.approx(5.55, abs=0.4) and losses[-1] < losses[0] - 1.0
    last = rows[-1]
    drawn = {name.removeprefix("mixture/"): value for name, value in last.items() if name.startswith("mixture/")}
    narrow = drawn.pop("narrow_rows")
    assert 0 <= narrow <= 1 and sum(drawn.values()) == pytest.approx(1)
    total = sum(trained.tokens_by_kind.values())
    assert drawn == {kind: pytest.approx(num / total) for kind, num in trained.tokens_by_kind.items()}
    assert set(drawn) == {"corner", "depth", "top_k", "full"}
    assert trained.meter.receipt().tokens == total and trained.meter.receipt().flops > 0
    assert last["experts/max_overload"] >= last["experts/mean_overload"] >= 1
    assert run.steps() == [28, 30], "the newest two, the last step among them"


def test_nothing_reduced_is_the_plain_trainer_bit_for_bit(make_run: Any, assert_same: Same) -> None:
    zero = {
        "elastic__anchors": {}, "elastic__anchor_share": 0, "elastic__depth_share": 0, "elastic__top_k_share": 0,
        "elastic__width_share": 0, "model__widths": (8, 4),
    }  # fmt: skip
    plain = make_run("off")(elastic__sampler="off", train__steps=6, **zero)
    reduced = make_run("anchored")(elastic__sampler="anchored", train__steps=6, **zero)
    assert_same(plain, reduced)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="anchored"),
        pytest.param({"elastic__sampler": "ernie", "model__widths": (8, 4)}, id="ernie", marks=pytest.mark.slow),
        pytest.param({"elastic__ramp_fraction": 0.5}, id="ramp", marks=pytest.mark.slow),
        pytest.param({"optim__name": "muon"}, id="muon", marks=pytest.mark.slow),
        pytest.param(
            {"train__recompute": True, "elastic__anchor_ce_weight": 1.0}, id="recompute", marks=pytest.mark.slow
        ),
        pytest.param(
            {"model__router": "softmax", "model__tie_embeddings": False}, id="softmax", marks=pytest.mark.slow
        ),
        pytest.param(
            {"elastic__anchor_share": 1.0, "elastic__depth_share": 0, "elastic__top_k_share": 0},
            id="unused layers",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_resumed_run_is_an_uninterrupted_one(changes: dict[str, Any], make_run: Any, assert_same: Same) -> None:
    reference = make_run("whole")(**changes)
    stopped = make_run("stopped")
    stopped(**changes)
    for path in sorted((stopped.folder / "snapshots").glob("step-*"))[1:]:
        shutil.rmtree(path)
    assert stopped.steps() == [8]
    assert_same(reference, stopped(resume=True, **changes))


COMPACT: list[dict[str, Any]] = [
    {"optim__moments": "int8"},
    {"optim__moments": "bf16", "optim__master": "split"},
    {"optim__moments": "int8", "optim__master": "bf16_stochastic", "optim__in_backward": True, "train__micro_batches": 1},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("changes", COMPACT)
def test_runs_with_small_states_resume_to_the_bit_and_end_in_fp32(
    changes: dict[str, Any], make_run: Any, assert_same: Same
) -> None:
    changes = {"train__dtype": "bfloat16", "train__steps": 5, "elastic__depth_share": 0.5, **changes}
    whole = make_run("whole")(**changes)
    assert all(parameter.dtype == torch.float32 for parameter in whole.model.parameters())
    stopped = make_run("stopped")
    with ctrl_c_in_forward(4), pytest.raises(KeyboardInterrupt):
        stopped(**changes)
    assert 0 < stopped.steps()[-1] < 5
    assert_same(whole, stopped(resume=True, **changes))


@pytest.mark.slow
def test_steps_are_deterministic_where_the_recipe_asks_for_it(
    run: Any, make_run: Any, assert_same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, step = list[bool](), loop.optimisation_step

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return step(*args, **kwargs)

    monkeypatch.setattr(loop, "optimisation_step", watched)
    assert_same(run(), make_run("asked")(train__deterministic=True))
    half = len(seen) // 2
    assert seen == [False] * half + [True] * half and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("forward", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 9)), 2])
def test_ctrl_c_in_a_step_ends_the_step_and_goes_on_later(
    forward: int, make_run: Any, reference: Trained, assert_same: Same
) -> None:
    stopped = make_run("stopped")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), ctrl_c_in_forward(forward):
        stopped()
    assert signal.getsignal(signal.SIGINT) is before
    (*_, step) = stopped.steps()
    assert 1 <= step < 12
    meta = read_meta(stopped.folder / "snapshots" / f"step-{step:07d}")
    assert meta.step == step and meta.loader["position"] == 4 * step, "weights and data belong together"
    assert_same(reference, stopped(resume=True))


@pytest.mark.slow
def test_ctrl_c_again_and_again(make_run: Any, reference: Trained, assert_same: Same) -> None:
    stopped = make_run("stopped")
    for attempt in range(5):
        with pytest.raises(KeyboardInterrupt), ctrl_c_in_forward(2 + attempt):
            stopped(resume=attempt > 0)
    trained = stopped(resume=True)
    assert_same(reference, trained)
    assert read_meta(stopped.folder / "snapshots" / "step-0000012").run_id == trained.run_id


@pytest.mark.slow
def test_ctrl_c_while_observing(make_run: Any, reference: Trained, assert_same: Same) -> None:
    """What follows a step belongs to it: the observation is logged, and the log has no gap afterwards."""

    def observe(model: Transformer, step: int) -> dict[str, float]:
        if step == 6 and 6 not in stopped.steps():
            press_ctrl_c()
        return {"full": float(step)}

    stopped = make_run("stopped")
    with pytest.raises(KeyboardInterrupt):
        stopped(observe=observe, log=True)
    assert stopped.steps() == [4, 6]
    assert_same(reference, stopped(observe=observe, log=True, resume=True))
    rows = read_metrics(stopped.folder)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["loss/full"] for row in rows if "loss/full" in row] == [3, 6, 9, 12]


def test_a_second_ctrl_c_is_not_held_back(run: Any) -> None:
    def observe(model: Transformer, step: int) -> dict[str, float]:
        press_ctrl_c()
        press_ctrl_c()
        raise AssertionError("still running")

    with pytest.raises(KeyboardInterrupt):
        run(observe=observe)
    assert run.steps() == [], "stopped at step 3, before the first snapshot"


def test_the_watchdog_asks_whether_a_step_waits_for_a_snapshot(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    questions: list[Callable[[], bool]] = []
    answers: list[bool] = []

    @contextmanager
    def watched(*arguments: Any) -> Iterator[Callable[..., None]]:
        questions.append(arguments[-1])
        yield lambda *_: None

    def write(*arguments: Any) -> None:
        answers.append(questions[0]())
        original(*arguments)

    original = Snapshots.write
    monkeypatch.setattr(loop, "watched", watched)
    monkeypatch.setattr(Snapshots, "write", write)
    run(train__snapshot_writes="blocking")
    assert answers and all(answers) and not questions[0]()


@pytest.mark.slow
def test_the_layer_order_is_measured_and_comes_back(make_run: Any, assert_same: Same) -> None:
    asked: list[int] = []
    orders = [(0, 1, 4, 5, 3, 2), (0, 1, 4, 5, 2, 3)]

    def measure(model: Transformer) -> tuple[int, ...]:
        asked.append(len(asked))
        # as a real measurement would, follow from the weights: the sign of one number picks the order
        return orders[int(model.embedding.weight.detach().flatten()[0] > 0)]

    changes = {"elastic__rank_layers_at": (0.25, 0.5)}
    reference = make_run("whole")(rank_layers=measure, **changes)
    assert len(asked) == 2 and reference.model.config.layer_order in orders
    stopped = make_run("stopped")

    def interrupted(model: Transformer) -> tuple[int, ...]:
        press_ctrl_c()  # while it measures: the step is done, its order is not
        return measure(model)

    with pytest.raises(KeyboardInterrupt):
        stopped(rank_layers=interrupted, **changes)
    assert stopped.steps() == [3]
    assert read_meta(stopped.folder / "snapshots" / "step-0000003").layer_order in orders
    assert_same(reference, stopped(resume=True, rank_layers=measure, **changes))
    # the order in force is the one that depths are drawn by
    config, recipe = reference.model.config, stopped.recipe(**changes)
    plans = [plan for step in range(12) for plan in Sampler(config, recipe.elastic, 2, 2, 12, 0).draw(step)]
    last = config.layer_ranking[-1]
    assert all(last not in plan.subnet.layers for plan in plans if len(plan.subnet.layers) < 6)


@pytest.mark.slow
def test_smaller_sizes_learn_the_experts_that_are_ranked_first(make_run: Any, assert_same: Same) -> None:
    orders, asked = ((7, 6, 5, 4, 3, 2, 1, 0),) * 5, list[tuple[tuple[int, ...], ...] | None]()

    def measure(model: Transformer) -> tuple[tuple[int, ...], ...]:
        asked.append(model.config.expert_order)
        return orders

    changes = {"elastic__starts_at": 0.5, "elastic__rank_experts_at": (0.5,), "train__steps": 8}
    reference = make_run("whole")(rank_experts=measure, **changes)
    assert asked == [None] and reference.model.config.expert_order == orders
    # the corner's branch balances the experts 4 to 7: of the others it has no load
    biases = torch.stack([block.mlp.bias_WE[1] for block in reference.model.blocks[1:]])
    assert biases[:, 4:].any() and not biases[:, :4].any()
    stopped = make_run("stopped")

    def interrupted(model: Transformer) -> tuple[tuple[int, ...], ...]:
        press_ctrl_c()
        return measure(model)

    with pytest.raises(KeyboardInterrupt):
        stopped(rank_experts=interrupted, **changes)
    assert read_meta(stopped.folder / "snapshots" / "step-0000004").expert_order == orders
    assert_same(reference, stopped(resume=True, rank_experts=measure, **changes))
    assert len(asked) == 2


@pytest.mark.slow
def test_joint_the_full_network_learns_every_token(run: Any) -> None:
    changes = {"elastic__joint": True, "elastic__starts_at": 0.5, "elastic__width_share": 0.0}
    trained = run(**changes)
    passes, tokens = trained.tokens_by_kind, trained.meter.receipt().tokens
    assert passes["full"] == tokens
    assert 0 < sum(passes.values()) - passes["full"] < 0.5 * tokens, "smaller Subnets come in the second half only"


@pytest.mark.slow
def test_joint_narrowed_rows_at_full_depth_are_learnt_in_full_too(run: Any) -> None:
    changes = {"elastic__joint": True, "elastic__anchor_share": 0.0, "elastic__anchors": {}, "model__widths": [8, 4]}
    trained = run(**changes, elastic__depth_share=0.0, elastic__top_k_share=0.0, elastic__width_share=0.5)
    passes, tokens = trained.tokens_by_kind, trained.meter.receipt().tokens
    assert 1.3 * tokens < passes["full"] < 1.7 * tokens, "half of the rows are narrowed, and learnt again without that"


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_snapshot_begins_again(
    run: Any, reference: Trained, assert_same: Same, capsys: pytest.CaptureFixture[str]
) -> None:
    def observe(model: Transformer, step: int) -> dict[str, float]:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        run(observe=observe, train__snapshot_every=1000)
    (run.folder / "snapshots" / ".step-0000001.partial").mkdir(parents=True)  # a snapshot was being written
    assert_same(reference, run(resume=True))
    assert "pretrain: no snapshot yet; begins with the first step" in capsys.readouterr().out


@pytest.mark.slow
def test_a_finished_run_resumes_to_its_end(run: Any, assert_same: Same) -> None:
    assert_same(run(), run(resume=True))


def test_what_cannot_be_resumed_is_refused(run: Any, make_tokens: Callable[[int], TokenSet]) -> None:
    run()
    before = sorted((run.folder / "snapshots").rglob("*"))
    for changes, message in {
        "optim__weight_decay": (
            0.2,
            r"optim\.weight_decay: was 0\.1 when this run started, is 0\.2 now; change it back",
        ),
        "elastic__anchors": ({"corner": {"layers": 5}}, r"elastic\.anchors\.corner\.experts: was 4 .* is not set now"),
        "train__steps": (11, r"train\.steps: 11 is less than the 12 steps that are done; raise it"),
        "train__rows": (8, r"train\.rows: was 4"),
        "model__num_layers": (7, r"model\.num_layers: was 6"),
    }.items():
        with pytest.raises(UserError, match=message[1]) as caught:
            run(resume=True, **{changes: message[0]})
        assert "\n" not in str(caught.value) and str(run.folder) in str(caught.value)
    with pytest.raises(UserError, match=r"data: changed since this run started; use the same data"):
        run(resume=True, data=make_tokens(1))
    assert sorted((run.folder / "snapshots").rglob("*")) == before


@pytest.mark.slow
def test_a_resume_may_steer_and_tells_of_it(run: Any, reference: Trained) -> None:
    run()
    trained = run(resume=True, optim__lr=1e-3, train__steps=14)
    told = [(change.step, change.field, change.before, change.after) for change in trained.changes]
    assert told == [(12, "optim.lr", 5e-3, 1e-3), (12, "train.steps", 12, 14)]
    assert not torch.equal(trained.model.embedding.weight, reference.model.embedding.weight)
    again = run(resume=True, optim__lr=1e-3, train__steps=15, train__log_every=5)
    told = [(change.step, change.field, change.after) for change in again.changes[2:]]
    assert told == [(14, "train.log_every", 5), (14, "train.steps", 15)], "changes add up"
    assert read_meta(run.folder / "snapshots" / "step-0000015").changes == again.changes


@pytest.mark.slow
def test_a_skipped_step_reads_its_rows_and_trains_on_none(make_run: Any, reference: Trained, assert_same: Same) -> None:
    skipping = make_run("skipping")
    trained = skipping(train__skip_steps=[3])
    meta = read_meta(skipping.folder / "snapshots" / "step-0000012")
    assert meta.loader["position"] == 12 * 4, "the rows after it are those of the plain run"
    assert trained.meter.receipt().tokens < reference.meter.receipt().tokens
    stopped = make_run(
        "stopped"
    )  # what the message of an infinite loss advises: go on from before it, then pass it over
    stopped(train__steps=2)
    assert_same(trained, stopped(resume=True, train__skip_steps=[3]))


@pytest.mark.slow
def test_a_step_without_a_target_is_skipped(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text in pieces of exactly a row: with its end, each document leaves a piece of one token, which has no target."""
    seq_len = 16
    tokenise({"train": [Document(f"{number:0{seq_len}}") for number in range(40)]}, Bytes(), tmp_path / "data")
    settings = {"train__rows": 1, "train__micro_batches": 1, "train__seq_len": seq_len, "train__steps": 43}
    trained = run(data=TokenSet(tmp_path / "data"), **settings)
    assert trained.meter.receipt().tokens == 40 * seq_len, "40 rows of targets; three rows of pieces without"
    assert read_meta(run.folder / "snapshots" / "step-0000043").loader["position"] == 43


@pytest.mark.slow
def test_sigterm_writes_a_snapshot_and_ends_with_its_usual_code(
    run: Any, reference: Trained, assert_same: Same
) -> None:
    def observe(model: Transformer, step: int) -> dict[str, float]:
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run(observe=observe)
    assert ended.value.code == 143 and run.steps() == [4, 6]
    assert signal.getsignal(signal.SIGTERM) is before
    assert_same(reference, run(resume=True))


@pytest.mark.slow
def test_a_snapshot_is_written_when_its_time_has_passed(
    run: Any, reference: Trained, assert_same: Same, capsys: pytest.CaptureFixture[str]
) -> None:
    def observe(model: Transformer, step: int) -> dict[str, float]:
        if step == 6:
            raise InterruptedError
        return {}

    slow_steps = {"train__snapshot_every": 1000, "train__snapshot_minutes": 1e-6, "train__keep_snapshots": 9}
    with pytest.raises(InterruptedError):
        run(observe=observe, **slow_steps)
    assert run.steps() == [1, 2, 3, 4, 5]
    assert "resumes" not in capsys.readouterr().out
    assert_same(reference, run(resume=True))
    assert "pretrain: resumes after step 5 of 12" in capsys.readouterr().out


def limit_file_size(folder: Path, num_bytes: int) -> Callable[[], None]:
    """The kernel refuses to write any file beyond ``num_bytes``; returns the undoing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_failed_snapshot_leaves_the_older_one(run: Any, reference: Trained, assert_same: Same) -> None:
    undo: list[Callable[[], None]] = []

    def observe(model: Transformer, step: int) -> dict[str, float]:
        if step == 6 and not undo:
            while not (run.folder / "snapshots" / "step-0000004").exists():  # a thread is writing it
                time.sleep(0.01)
            undo.append(limit_file_size(run.folder, 20_000))
        return {}

    try:
        with pytest.raises(UserError, match=r"step-0000008: cannot be written: .*step-0000004.*--resume") as caught:
            run(observe=observe)
    finally:
        undo[0]()
    assert "\n" not in str(caught.value)
    assert [path.name for path in (run.folder / "snapshots").iterdir()] == ["step-0000004"], "nothing half-written"
    assert_same(reference, run(resume=True, observe=observe))


@pytest.mark.slow
def test_a_full_disk_leaves_the_older_snapshot(run: Any, reference: Trained, tmp_path: Path, assert_same: Same) -> None:
    # weights and two moments in fp32, and half as much again: room for one snapshot and not for two
    one_snapshot = 12 * sum(parameter.numel() for parameter in reference.model.parameters())
    run.folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={one_snapshot * 3 // 2}", "none", str(run.folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        with pytest.raises(UserError, match=r"step-0000008: cannot be written: .*step-0000004.*--resume") as caught:
            run()
        assert "\n" not in str(caught.value)
        assert [path.name for path in (run.folder / "snapshots").iterdir()] == ["step-0000004"]
        shutil.copytree(run.folder, tmp_path / "moved")
    finally:
        subprocess.run(["umount", str(run.folder)], check=True)
    run.folder = tmp_path / "moved"
    assert_same(reference, run(resume=True))


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_at_the_last_good_snapshot(
    run: Any, reference: Trained, assert_same: Same
) -> None:
    def observe(model: Transformer, step: int) -> dict[str, float]:
        if step == 6:
            with torch.no_grad():
                model.norm.weight[0] = torch.nan
        return {}

    with pytest.raises(
        UserError, match=r"step \d+: the loss of .* is not finite; .*--resume; .*train\.skip_steps=\[\d+\]"
    ):
        run(observe=observe)
    assert run.steps() == [4]
    assert_same(reference, run(resume=True))


@pytest.mark.slow
def test_training_imports_no_other_arithmetic_than_torchs_own() -> None:
    """In a fresh interpreter: what only replay in another arithmetic needs is not on the plain path."""
    code = (
        "import sys, stretto.train.stages, stretto.api.train\n"
        "print(*(name for name in sys.modules if name in ('stretto.ops.exact', 'stretto.ops.fp8', 'stretto.ops.matmul')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [], found.stdout


@pytest.fixture
def heal_in(tmp_path: Path, tokens: TokenSet, reference: Trained) -> Callable[..., Trained]:
    """Heals the corner of the reference run in the folder of that name."""

    def train(name: str, resume: bool = False, teacher: bool = True, ce_weight: float = 0.5, steps: int = 8) -> Trained:
        recipe = HealRecipe.model_validate(
            {
                "optim": {"lr": 3e-3, "decay_fraction": 1.0},
                "train": {
                    "steps": steps, "rows": 4, "seq_len": 48, "micro_batches": 2, "snapshot_every": 3, "log_every": 1,
                    "dtype": "float32",
                },
                "ce_weight": ce_weight,
            }
        )  # fmt: skip
        config = reference.model.config
        job = Job(
            tmp_path / name,
            Loader([tokens], [1.0], recipe.train.micro_rows, recipe.train.seq_len, 1),
            (),
            tokens.manifest.data_hash,
            join("cpu"),
            tracker=lambda step: Tracker(tmp_path / name, first_step=step and step + 1, tensorboard=False),
            resume=resume,
        )
        student, parent = extract(reference.model, config.subnet(4, 4, 2)), extract(reference.model, config.full())
        return heal(recipe, job, in_memory(student), in_memory(parent) if teacher else None)

    return train


@pytest.mark.slow
def test_the_loss_falls_and_the_teacher_is_paid_for(heal_in: Callable[..., Trained], tmp_path: Path) -> None:
    alone, taught = heal_in("alone", teacher=False, steps=16), heal_in("taught", steps=16)
    for name in ("alone", "taught"):
        losses = [row["loss/train"] for row in read_metrics(tmp_path / name)]
        assert sum(losses[-3:]) < sum(losses[:3]) - 0.3
    assert taught.tokens_by_kind == alone.tokens_by_kind
    assert taught.meter.receipt().flops > alone.meter.receipt().flops
    weights, others = taught.model.state_dict(), alone.model.state_dict()
    assert any(not torch.equal(tensor, others[name]) for name, tensor in weights.items())


@pytest.mark.slow
def test_no_weight_on_the_teacher_is_no_teacher(heal_in: Callable[..., Trained], assert_same: Any) -> None:
    assert_same(heal_in("alone", teacher=False, ce_weight=0.3), heal_in("ignored", ce_weight=1.0))


@pytest.mark.slow
def test_a_resumed_healing_is_an_uninterrupted_one(
    heal_in: Callable[..., Trained], assert_same: Any, tmp_path: Path
) -> None:
    whole = heal_in("whole")
    heal_in("stopped")
    shutil.rmtree(tmp_path / "stopped" / "snapshots" / "step-0000008")
    assert_same(whole, heal_in("stopped", resume=True))
    with pytest.raises(UserError, match=r"ce_weight: was 0\.5 .* is 0\.4 now"):
        heal_in("stopped", resume=True, ce_weight=0.4)


def test_the_parent_is_left_as_it_was(heal_in: Callable[..., Trained], reference: Trained) -> None:
    before = {name: tensor.clone() for name, tensor in reference.model.state_dict().items()}
    heal_in("run")
    assert all(torch.equal(tensor, before[name]) for name, tensor in reference.model.state_dict().items())


CONFIG = ModelConfig(
    vocab_size=48, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    num_experts=4, top_k=2, expert_intermediate_size=8, qk_norm=True,
)  # fmt: skip


def gradients(model: Transformer, ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    hidden_BTD = model(ids_BT, CONFIG.full(), Context.plain(ids_BT)).hidden_BTD
    loss, _ = head_loss(hidden_BTD.flatten(0, 1), model.head_VD, ids_BT.flatten())
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.slow
def test_compiled_blocks_have_the_same_gradients() -> None:
    """fp32 included, in which torch.compile cannot trace the grouped product."""
    ids_BT = torch.randint(0, 48, (3, 12), generator=torch.Generator().manual_seed(0))
    plain, compiled = build(CONFIG, 0), build(CONFIG, 0)
    for block in compiled.blocks:
        block.compile()
    expected, found = gradients(plain, ids_BT), gradients(compiled, ids_BT)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # fused kernels round in another order: a few units of fp32 at the gradient's own scale, over 36 tokens
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max() + 1e-6)), name
