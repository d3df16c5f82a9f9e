"""Which sub-model a machine can carry: sizes in words, the order of candidates, and speed only where it matters."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from stretto.api import search as api_search
from stretto.api import stages
from stretto.api.search import SEARCH_FILE, SearchRecord, best_subnet, extract_command
from stretto.api.serve import Fit, ServeOptions, _open, fitting_subnet, parse_bytes
from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT
from stretto.base.records import Receipt, read_lineage
from stretto.engine.loading import least_bytes, open_engine
from stretto.engine.request import EngineConfig
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.counts import count
from stretto.model.elastic import slice_integers
from stretto.model.parallel import join
from stretto.model.spec import ModelConfig, Subnet, SubnetChoice, extracted_config
from stretto.model.transformer import build
from stretto.ops.int_weights import IntScheme
from stretto.ops.native import Library, Panels
from stretto.ops.tuning import threads_kept
from stretto.post.quantise import PARTS, round_to_nearest, schemes_of
from stretto.server.elastic import ServedModel
from stretto.subnets.candidate import Candidate, Limits
from stretto.subnets.latency import measure
from stretto.subnets.search import Correlations, SearchOptions, SearchResult
from stretto.subnets.sensitivity import Sensitivities
from stretto.subnets.space import SearchSpace
from tests.api.conftest import PRESETS, SERVED
from tests.engine.engines import network as random_network

SMALL = PRESETS["corner"].of(SERVED)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5 gib", 3 * 2**29),
        (" 20 kB ", 20_000),
        ("1e9", 10**9),
        ("1e3KB", 10**6),
        ("7B", 7),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text, "--memory") == expected


@pytest.mark.parametrize("text", ["", "GB", "8XB", "0", "0GB", "-1GB", "1..5GB", "nan", "inf", "1e400", "8 GB 2"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match=r"^--memory .*not a size") as caught:
        parse_bytes(text, "--memory")
    assert "\n" not in str(caught.value)


def fit(source: Path, memory: int | None = 10**9, latency_ms: float | None = None) -> Fit:
    return fitting_subnet(source, memory, latency_ms, CPU, torch.float32, EngineConfig())


def needs(subnet: Subnet) -> int:
    return least_bytes(extracted_config(SERVED, subnet), EngineConfig(), torch.float32)


def test_unsearched_it_is_the_most_active_parameters(served_run: Path) -> None:
    best = fit(served_run)
    assert (best.name, best.subnet, best.nll, best.step_ms) == ("full", SERVED.full(), None, None)
    assert best.weight_bytes == 4 * count(SERVED, SERVED.full()).total_params
    assert fit(served_run, needs(best.subnet) - 1).name == "half"


def test_what_is_chosen_can_be_opened(served_run: Path) -> None:
    """With not one byte to spare; one byte less is refused with what is missing."""
    needed = needs(SMALL)
    assert fit(served_run, needed).subnet == SMALL
    opened = open_engine(served_run, memory_bytes=needed, cut=SMALL, library=Library(None, "not needed"))
    assert opened.engine.max_len == SERVED.max_positions and opened.engine.model.config.num_layers == 2
    with pytest.raises(UserError, match=rf"^--memory {needed - 1}: .* needs {needed} bytes"):
        fit(served_run, needed - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "zeros"), [("int8", False), ("int4", True)])
def test_integer_weights_count_as_integers(tmp_path: Path, dtype: str, zeros: bool) -> None:
    """Both in the plan and in the engine, which holds as many bytes as were planned, and not one of fp32 more."""
    network = ModelConfig(
        vocab_size=320, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=8, top_k=2,
        expert_intermediate_size=32, max_positions=64, widths=(8, 4, 2),
    )  # fmt: skip
    model = random_network(3, network)
    schemes = schemes_of(network, "glm4_moe", dict.fromkeys(PARTS, IntScheme(int(dtype[3:]), zeros=zeros)))
    integers = round_to_nearest(model.state_dict(), schemes)
    run = tmp_path / "c"
    write_checkpoint(run, model, network, integers=integers, presets=PRESETS)
    for name in ("full", "corner"):
        subnet = {"full": SubnetChoice(), **PRESETS}[name].of(network)
        needed = least_bytes(
            extracted_config(network, subnet), EngineConfig(), torch.float32, slice_integers(network, subnet, integers)
        )
        found = fit(run, needed)
        assert found.name == name and needed < least_bytes(
            extracted_config(network, subnet), EngineConfig(), torch.float32
        )
        opened = open_engine(run, memory_bytes=needed, cut=found.subnet, with_tokenizer=False)
        assert opened.engine.integers, "no compiled kernels"
        values = [each.nbytes for each in opened.engine.model.parameters() if not each.is_meta]
        panels = [
            each.nbytes
            for panel in opened.engine.integers.values()
            if isinstance(panel, Panels)
            for each in (panel.codes_QJB, panel.scales_QJ16, panel.zeros_QJ16)
            if each is not None
        ]
        assert found.weight_bytes == sum(values) + sum(panels)
        whole = open_engine(run, with_tokenizer=False)
        # a server says as much of a size, cut out or not
        for engine, size in ((opened, opened.engine.network.full()), (whole, subnet)):
            assert ServedModel.of(engine, {}).weight_bytes(size) == found.weight_bytes
        if name == "full":
            assert fit(run, needed - 1).name == "half"
    assert fit(run, latency_ms=60_000.0).step_ms


SEARCHED = 10**9
"""Tokens of a search; an extraction has far fewer."""


def searched(source: Path, folder: Path, losses: dict[Subnet, float | None]) -> Path:
    """A copy of the run ``source`` whose search found ``losses``; None was only predicted."""
    shutil.copytree(source, folder)
    full = count(SERVED, SERVED.full())
    candidates = []
    for subnet, nll in losses.items():
        cost = count(SERVED, subnet)
        candidates.append(
            Candidate(
                subnet=subnet,
                total_params=cost.total_params,
                active_params=cost.active_params,
                total_share=cost.total_params / full.total_params,
                active_share=cost.active_params / full.active_params,
                predicted_nll=9.0,
                nll=nll,
            )
        )
    result = SearchResult(
        limits=Limits(),
        space=SearchSpace(droppable=(1,), experts=(2, 8), top_k=(1, 2)),
        options=SearchOptions(),
        third="active",
        workload=None,
        sensitivities=Sensitivities(full_nll=2.0, drop={}, depth={}, experts={}, top_k={}),
        num_predicted=len(candidates),
        num_tokens=100,
        candidates=tuple(candidates),
        front=(0,),
        chosen=candidates[0],
        correlations=Correlations(predicted_true=None, predicted_true_within=None, before_after_healing=None),
        wall_s=1.0,
    )
    record = SearchRecord(result=result, receipt=Receipt(stage="search", device="cpu", tokens=SEARCHED))
    (folder / SEARCH_FILE).write_text(json.dumps(record.model_dump(mode="json")))
    return folder


def test_searched_it_is_the_lowest_loss_that_fits(served_run: Path, tmp_path: Path) -> None:
    """Loss, not size: here a smaller Subnet was better than the full network, and one was never evaluated."""
    half, shallow = PRESETS["half"].of(SERVED), SERVED.subnet(depth=3)
    run = searched(served_run, tmp_path / "run", {SERVED.full(): 2.5, SMALL: 2.9, half: 2.4, shallow: None})
    assert (fit(run).subnet, fit(run).nll) == (half, 2.4)
    least = fit(run, needs(half) - 1)
    assert (least.subnet, least.nll) == (SMALL, 2.9)
    layers, comma, widths = SMALL.label().partition(",")
    dropped = sorted(set(SERVED.full().layers) - set(SMALL.layers))
    assert least.name == f"{layers} (without {', '.join(map(str, dropped))}){comma}{widths}"


def test_auto_prints_the_size_of_a_name_and_a_size_without_name_once(
    served_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = searched(served_run, tmp_path / "run", {SERVED.full(): 2.5, SMALL: 2.4})
    with threads_kept():
        _open(run, ServeOptions(subnet="auto", device="cpu"))
        assert capsys.readouterr().out.partition("auto: ")[2].count("layers") == 1
        _open(served_run, ServeOptions(subnet="auto", device="cpu"))
    assert f"auto: full ({SERVED.full().label()})" in capsys.readouterr().out


def test_other_weights_than_those_that_were_searched_have_no_best_size(served_run: Path, tmp_path: Path) -> None:
    run = searched(served_run, tmp_path / "run", {SERVED.full(): 2.5, SMALL: 2.9})
    assert best_subnet(run, SERVED) == SERVED.full()
    record = json.loads((run / SEARCH_FILE).read_text())
    (run / SEARCH_FILE).write_text(json.dumps(record | {"weights": "of another network"}))
    with pytest.raises(
        UserError, match="--subnet best: its weights have changed since the search; run `stretto search"
    ):
        best_subnet(run, SERVED)


@pytest.mark.parametrize("is_dense", [False, True])
def test_the_latency_table_covers_the_named_sizes(
    is_dense: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"vocab_size": 300, "hidden_size": 32, "num_layers": 5, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    moe = {"num_experts": 4, "top_k": 2, "expert_intermediate_size": 16}
    dense = {
        "num_experts": 1,
        "top_k": 1,
        "expert_intermediate_size": 16,
        "dense_layers": range(5),
        "dense_intermediate_size": 32,
    }
    config = ModelConfig.model_validate(shape | (dense if is_dense else moe))
    presets = {"corner": SubnetChoice(layers=4) if is_dense else SubnetChoice(layers=4, experts=1, top_k=1)}
    write_checkpoint(tmp_path / "checkpoint", build(config, 0), config, presets=presets)
    monkeypatch.setattr(stages, "measure", partial(measure, num_rounds=2, time_fn=lambda *_: 0.01))
    table = stages.latency(tmp_path, device="cpu")
    corner = presets["corner"].of(config)
    assert table.predict_ms(corner, table.timings[0].workload) > 0


def test_a_latency_table_that_predicts_badly_is_to_be_measured_again(
    served_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = measure(read_checkpoint(served_run / CHECKPOINT).model, [2, 8], [1, 2], time_fn=lambda *_: 0.01)
    decode = made.timings[0]
    prefill = decode.replace(
        workload=decode.workload.replace(phase="prefill"), held_out_error=3.16
    )  # no search uses it
    for error, is_bad in ((0.51, True), (0.49, False)):
        table = made.replace(timings=(decode.replace(held_out_error=error), prefill))
        monkeypatch.setattr(stages, "measure", lambda *_, table=table: table)
        run = shutil.copytree(served_run, tmp_path / str(error))
        assert stages.latency(run, device="cpu") == table and (run / "latency.json").exists()
        said = capsys.readouterr().out
        assert f"at the sizes that were measured to test them, predictions were at most {error:.1%} off" in said
        assert ("measure again when it is quiet" in said) == is_bad
        kept = api_search.kept_table(run, read_checkpoint(run / CHECKPOINT).model, join("cpu"), needed=True)
        said = capsys.readouterr().out
        assert kept == table and ("too far off" in said and "measure again when it is quiet" in said) == is_bad


def test_the_cost_of_a_search_goes_with_the_size_that_it_chose(served_run: Path, tmp_path: Path) -> None:
    """Under each of the names of that size, and with no other size."""
    half = PRESETS["half"].of(SERVED)
    run = searched(served_run, tmp_path / "run", {half: 2.4, SERVED.full(): 2.5})
    (run / "run.json").unlink()
    spec = f"layers={len(half.layers)},experts={half.experts[0]},top_k={half.top_k[0]}"
    for number, (size, is_chosen) in enumerate(
        {"best": True, "half": True, spec: True, half: True, "corner": False}.items()
    ):
        out = tmp_path / str(number)
        extract_command(run, size, out, "cpu")
        assert (read_lineage(out).receipt.tokens >= SEARCHED) == is_chosen, size


def test_speed_is_measured_where_it_is_asked_for(served_run: Path) -> None:
    fast = fit(served_run, latency_ms=60_000.0)
    assert fast.name == "full" and fast.step_ms is not None and fast.step_ms > 0
    with pytest.raises(UserError, match=r"^--latency-ms 1e-06: the fastest .* takes \d+\.\d+ ms a token") as caught:
        fit(served_run, latency_ms=1e-6)
    assert "\n" not in str(caught.value)


def test_serving_takes_the_threads_that_decode_fastest(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {4: 0.4, 2: 0.1, 1: 0.3}
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("stretto.api.serve.engine_seconds", lambda *_: lambda *_: seconds[torch.get_num_threads()])
    with threads_kept():
        torch.set_num_threads(4)
        _open(served_run, ServeOptions(device="cpu"))
        assert torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "4")  # what a user set stands
        torch.set_num_threads(4)
        _open(served_run, ServeOptions(device="cpu"))
        assert torch.get_num_threads() == 4
