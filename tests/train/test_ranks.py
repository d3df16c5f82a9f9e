"""One rank equals several: FSDP2 and expert parallelism with real gloo processes, resharding on resume, failures."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.base.errors import UserError
from stretto.data.shards import tokenise
from stretto.data.sources import Document
from stretto.model.parallel import join
from stretto.train.recipe import Recipe
from stretto.train.snapshot import read_meta
from tests.ranks import ROOT, run_ranks

WORKER = Path(__file__).with_name("rank_worker.py")
STEPS, RESUMED_AT, ROWS, LENGTH = 12, 6, 16, 32
pytestmark = pytest.mark.timeout(900)  # several processes on a shared machine


def tolerance(step: int) -> float:
    """Largest relative difference between two orders of summation after ``step`` steps, in fp32.

    A sum over the step's n tokens carries a relative error of about √n·ε, a random walk of n roundings. AdamW's update
    is free of scale, so it inherits the gradient's relative error; the errors of the steps are independent and add up
    as √steps. That the loss magnifies none of it is measured beside: `test_order_of_rows`.
    A held-out loss before the first step is one sum, too.
    """
    return math.sqrt(ROWS * LENGTH * max(step, 1)) * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Bytes:
    vocab_size: int = 257
    eos_id: int = 256

    def fingerprint(self) -> str:
        return "bytes"

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]


def recipe(
    *,
    steps: int = STEPS,
    rows: int = ROWS,
    tied: bool = True,
    sampler: str = "anchored",
    optim: str = "adamw",
    joint: bool = False,
    rank_layers_at: Sequence[float] = (),
    rank_experts_at: Sequence[float] = (),
    switches: dict[str, Any] | None = None,
    **train: Any,
) -> dict[str, Any]:
    """Everything at once: dense and MoE layers, anchors with distillation, random depth and top-k, narrowed rows."""
    return {
        "model": {
            "vocab_size": 257, "hidden_size": 32, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
            "num_experts": 8, "top_k": 2, "expert_intermediate_size": 16, "num_shared_experts": 1, "qk_norm": True,
            "dense_layers": [0], "dense_intermediate_size": 48, "attention_bias": True, "widths": [8, 4],
            "tie_embeddings": tied, **(switches or {}),
        },
        "elastic": {
            "sampler": sampler, "anchors": {"corner": {"layers": 5, "experts": 4, "top_k": 1}}, "anchor_share": 0.25,
            "depth_share": 0.2, "top_k_share": 0.2, "width_share": 0.25, "joint": joint, "rank_layers_at": rank_layers_at,
            "rank_experts_at": rank_experts_at,
        },
        "optim": {"lr": 3e-3, "warmup_steps": 2, "name": optim},
        "train": {
            "steps": steps, "rows": rows, "seq_len": LENGTH, "micro_batches": 2, "eval_every": 3, "log_every": 1,
            "snapshot_every": RESUMED_AT, "keep_snapshots": 5, "dtype": "float32", **train,
        },
    }  # fmt: skip


class Bench:
    """A folder with token data, in which groups of processes train."""

    def __init__(self, folder: Path):
        self.folder = folder
        words = ("alpha", "beta", "gamma", "delta", "(x)", "return", "import", "def")
        rng = random.Random(0)
        texts = (" ".join(rng.choice(words) for _ in range(rng.randint(3, 20))) for _ in range(600))
        tokenise({"train": map(Document, texts)}, Bytes(), folder / "data", processes=1)

    def case(
        self, name: str, *, start: str | None = None, order_seed: int | None = None, **changes: Any
    ) -> dict[str, Any]:
        """A run ``name``; with ``start`` it goes on from that run's snapshot in the middle."""
        case = {"recipe": recipe(**changes), "run": str(self.folder / name), "data": str(self.folder / "data")}
        if order_seed is not None:
            case["order_seed"] = order_seed
        if start is not None:
            snapshot = Path("snapshots") / f"step-{RESUMED_AT:07d}"
            shutil.copytree(self.folder / start / snapshot, self.folder / name / snapshot)
            case["resume"] = True
        return case

    def launch(self, world: int, cases: list[dict[str, Any]]) -> list[subprocess.CompletedProcess[str]]:
        """Run ``cases`` in ``world`` processes that know of each other as torchrun's do."""
        path = self.folder / f"cases-{len(list(self.folder.glob('cases-*')))}.json"
        path.write_text(json.dumps(cases))
        return run_ranks(world, [sys.executable, str(WORKER), str(path)])

    def train(self, world: int, cases: list[dict[str, Any]]) -> None:
        for done in self.launch(world, cases):
            assert done.returncode == 0, done.stderr
            assert "arning" not in done.stderr, done.stderr

    def metrics(self, run: str) -> dict[int, dict[str, float]]:
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        kept = ("loss/", "train/", "mixture/", "optim/grad_norm", "experts/")
        return {
            line["step"]: {name: value for name, value in line.items() if name.startswith(kept)}
            for line in map(json.loads, lines)
        }

    def weights(self, run: str) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / run / "weights.pt")

    def check_equal(self, one: str, other: str, first_step: int = 0, exactly: bool = False) -> None:
        """``other`` has the losses of ``one`` from ``first_step`` on, and its final weights."""
        expected, found = self.metrics(one), self.metrics(other)
        assert sorted(found) == [step for step in sorted(expected) if step >= first_step]
        for step, values in found.items():
            assert values.keys() == expected[step].keys()
            allowed = 0.0 if exactly else tolerance(step)
            for name, value in values.items():
                # a KL is a difference of terms as large as the loss
                scale = expected[step]["loss/full"] if name.endswith("/kl") else abs(expected[step][name])
                assert abs(value - expected[step][name]) <= allowed * scale, (one, other, step, name)
        assert self.distance(one, other) <= (0.0 if exactly else tolerance(max(found)))

    def flops(self, run: str, step: int) -> int:
        return read_meta(self.folder / run / "snapshots" / f"step-{step:07d}").receipt.flops

    def distance(self, one: str, other: str) -> float:
        """Root mean square difference of the final weights over their root mean square."""
        left, right = self.weights(one), self.weights(other)
        assert {name: (value.shape, value.dtype) for name, value in left.items()} == {
            name: (value.shape, value.dtype) for name, value in right.items()
        }
        square = sum(float((left[name].double() - right[name].double()).square().sum()) for name in left)
        return math.sqrt(square / sum(float(value.double().square().sum()) for value in left.values()))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
def test_two_ranks_with_split_experts_equal_one(bench: Bench) -> None:
    """The short version of all the others, and in bf16 as well."""
    alone = {"alone": True}
    bf16 = {"steps": 4, "dtype": "bfloat16", "optim": "muon", "joint": True, "rank_layers_at": [0.5]}
    bench.train(
        2,
        [
            bench.case("short-one", steps=4) | alone,
            bench.case("short-split", steps=4, ep=2),
            bench.case("short-two", steps=4),
            bench.case("ranked-one", steps=4, rank_experts_at=[0.5]) | alone,
            bench.case("ranked-two", steps=4, rank_experts_at=[0.5]),
            bench.case("ranked-split", steps=4, rank_experts_at=[0.5], ep=2),
            bench.case("bf16-one", **bf16) | alone,
            bench.case("bf16-two", **bf16),
            bench.case("bf16-split", **bf16, ep=2),
        ],
    )
    bench.check_equal("short-one", "short-split")
    assert bench.flops("short-one", 4) == bench.flops("short-two", 4) == bench.flops("short-split", 4)
    bench.check_equal("ranked-one", "ranked-two")
    bench.check_equal("ranked-two", "ranked-split")
    assert bench.distance("short-split", "ranked-split") > 1e-4, "the corner learnt other experts"
    one = bench.metrics("bf16-one")
    for other in ("bf16-two", "bf16-split"):
        for step, values in bench.metrics(other).items():
            for name in ("loss/train", "loss/full", "loss/corner"):
                if name in values:
                    # roundings to bf16 of ranks' own sums: of a mean over the tokens they average out, one remains
                    assert abs(values[name] / one[step][name] - 1) <= torch.finfo(torch.bfloat16).eps, (
                        other,
                        step,
                        name,
                    )


@pytest.mark.slow
def test_healing_under_a_teacher_of_whom_a_rank_holds_a_part(bench: Bench) -> None:
    heals = {"heals": True}
    bench.train(
        2,
        [
            bench.case("healed-one", steps=4) | heals | {"alone": True},
            bench.case("healed-two", steps=4) | heals,
            bench.case("healed-split", steps=4, ep=2) | heals,
        ],
    )
    bench.check_equal("healed-one", "healed-two")
    bench.check_equal("healed-one", "healed-split")


SWITCHES: dict[str, dict[str, Any]] = {
    "gpt-oss": {
        "router": "softmax", "selection_bias": False, "router_bias": True, "expert_bias": True, "mlp_bias": True,
        "attention_out_bias": True, "attention_sinks": True, "sliding_window": 6, "sliding_layers": [0, 2, 4],
        "clamped_swiglu": {"limit": 0.5}, "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_positions": 16},
    },
    "deepseek": {
        "qk_norm": False, "num_kv_heads": 4, "expert_groups": 2, "top_groups": 1,
        "latent": {"query_rank": 12, "kv_rank": 10, "rope_dim": 4, "value_dim": 6},
    },
    "olmoe": {"qk_norm": False, "qk_norm_wide": True, "qkv_clip": 0.3},
}  # fmt: skip


@pytest.fixture(scope="module")
def families(bench: Bench) -> Bench:
    """The runs of all families, in two processes: starting these takes longer than a run."""
    cases = []
    for name, switches in SWITCHES.items():
        changes: dict[str, Any] = {"switches": switches, "steps": 6}
        cases.append(bench.case(f"{name}-one", **changes) | {"alone": True})
        cases += [bench.case(f"{name}-two", **changes), bench.case(f"{name}-split", **changes, ep=2)]
    bench.train(2, cases)
    return bench


@pytest.mark.slow
@pytest.mark.parametrize("name", SWITCHES)
def test_what_other_families_have_is_spread_like_the_rest(families: Bench, name: str) -> None:
    families.check_equal(f"{name}-one", f"{name}-two")
    families.check_equal(f"{name}-one", f"{name}-split")


@pytest.mark.slow
def test_ranks_wait_for_the_first_longer_than_for_a_collective(bench: Bench) -> None:
    """Tokenising takes hours, a collective's time-out is for ranks that hang. All ranks raise the error of the first."""
    for done in run_ranks(2, [sys.executable, str(WORKER.with_name("first_worker.py"))]):
        assert (done.returncode, done.stdout) == (0, "data: missing\nrun: cannot be written\n"), done.stderr


@pytest.fixture(scope="module")
def trained(bench: Bench) -> Bench:
    """The runs that the slow tests compare."""
    bench.train(
        1,
        [
            bench.case("one"),
            *(bench.case(f"order-{seed}", order_seed=seed) for seed in range(3)),
            bench.case("one-untied", tied=False),
            bench.case("one-ernie", sampler="ernie"),
        ],
    )
    bench.train(
        2,
        [
            bench.case("two"),
            bench.case("split", ep=2),
            bench.case("two-untied", tied=False, recompute=True),
            bench.case("split-ernie", sampler="ernie", ep=2, recompute=True),
        ],
    )
    return bench


@pytest.mark.slow
def test_order_of_rows(trained: Bench) -> None:
    """What the tolerance allows covers what another order of the same rows does on one rank, and not by much luck."""
    spread = [trained.distance("one", f"order-{seed}") for seed in range(3)]
    for seed in range(3):
        trained.check_equal("one", f"order-{seed}")
    assert max(spread) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [("one", "two"), ("one", "split"), ("one-untied", "two-untied"), ("one-ernie", "split-ernie")],
)
def test_ranks_change_nothing(trained: Bench, one: str, other: str) -> None:
    trained.check_equal(one, other)


@pytest.fixture(scope="module")
def resumed(trained: Bench) -> Bench:
    trained.train(1, [trained.case("two-to-one", start="two"), trained.case("split-to-one", start="split")])
    trained.train(
        2,
        [
            trained.case("one-to-two", start="one"),
            trained.case("one-to-split", start="one", ep=2),
            trained.case("two-to-two", start="two"),
            trained.case("split-to-split", start="split", ep=2),
        ],
    )
    trained.train(4, [trained.case("one-to-grid", start="one", ep=2), trained.case("split-to-four", start="split")])
    return trained


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["two-to-one", "split-to-one", "one-to-two", "one-to-split", "one-to-grid", "split-to-four"]
)
def test_a_run_goes_on_with_other_ranks(resumed: Bench, name: str) -> None:
    resumed.check_equal("one", name, first_step=RESUMED_AT + 1)


@pytest.mark.slow
@pytest.mark.parametrize(("whole", "resumed_run"), [("two", "two-to-two"), ("split", "split-to-split")])
def test_a_run_goes_on_bit_for_bit_with_the_same_ranks(resumed: Bench, whole: str, resumed_run: str) -> None:
    resumed.check_equal(whole, resumed_run, first_step=RESUMED_AT + 1, exactly=True)


@pytest.mark.slow
def test_ranks_need_not_divide_the_rows(bench: Bench) -> None:
    """Eight rows of a micro-batch on three ranks, and two, so that one rank has none."""
    cases = [
        bench.case(f"{name}-{world}", steps=6, **changes) | {"eval_rows": 12}
        for world in (1, 3)
        for name, changes in {
            "uneven": {},
            "fewer": {"rows": 4, "joint": True},
            "fewer-ernie": {"rows": 4, "sampler": "ernie"},
        }.items()
    ]
    bench.train(1, cases[:3])
    bench.train(3, cases[3:])
    for name in ("uneven", "fewer", "fewer-ernie"):
        bench.check_equal(f"{name}-1", f"{name}-3")


@pytest.mark.slow
def test_torchrun_starts_and_ends_clean(bench: Bench) -> None:
    path = bench.folder / "torchrun.json"
    path.write_text(json.dumps([bench.case("torchrun", steps=2)]))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(WORKER), str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "arning" not in done.stderr and "rror" not in done.stderr, done.stderr


@pytest.mark.slow
def test_a_failure_on_one_rank_ends_all(bench: Bench) -> None:
    """The last rank is told of data that it does not have; the others must not wait for it for ever."""
    results = bench.launch(2, [bench.case("failing", steps=2) | {"missing_on": 1}])
    assert "UserError" in results[1].stderr
    assert [done.returncode for done in results] == [1, 1]


def test_expert_parallel_ranks_must_divide() -> None:
    with pytest.raises(UserError, match=r"train\.ep: 2 does not divide the number of ranks, 1"):
        join("cpu", ep=2)
    with pytest.raises(ValueError, match=r"train\.ep 3 does not divide the 8 experts"):
        Recipe.model_validate(recipe(ep=3))
