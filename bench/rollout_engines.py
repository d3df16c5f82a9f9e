"""RL with engines at an address beside the same run with engines in process: our own server, and vLLM on a CPU.

    python -m bench.rollout_engines                                  # `stretto serve --rollout`: equal to the bit
    python -m bench.rollout_engines --vllm PYTHON [--smol RUN]       # and vLLM 0.32, in the environment of PYTHON
    stretto adopt smollm2 --out RUN                                  # makes RUN, from a Python package

With vLLM the bench trains tiny networks on digits (dense, with a tied head, with experts) and plants wrong updates. vLLM loads the last two
networks wrongly without the worker extension `bench.peers.vllm_cpu`. Fails (exit code 1) if an aim is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common.measure import table, wide_console
from bench.common.server import serving, serving_vllm
from bench.sync_equality import Outcome, recipe, start_of, whole_run
from stretto.base.errors import UserError
from stretto.base.track import read_metrics
from stretto.flow.rollout_remote import RemoteEngineRole
from stretto.learning.recipe import RlRecipe
from stretto.learning.trainer import TrainerRole
from stretto.learning.weights import fetch, publish

_SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 128, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "qk_norm": True,
    "max_positions": 128, "selection_bias": False, "num_experts": 1, "top_k": 1, "expert_intermediate_size": 1,
    "dense_layers": [0, 1, 2], "dense_intermediate_size": 256,
}  # fmt: skip
NETWORKS = {
    "dense": _SHAPE,
    "tied head": _SHAPE | {"tie_embeddings": True},
    "experts": _SHAPE
    | {"dense_layers": [], "num_experts": 8, "top_k": 2, "expert_intermediate_size": 64, "router": "softmax"},
}
REPACKED = ("--worker-extension-cls", "bench.peers.vllm_cpu.Repacked")
VLLM = {"engine": "vllm", "start_s": 120.0}
Make = Callable[..., RlRecipe]
Row = tuple[str, str, str, bool]
"""Case, result, aim, and whether the aim is met."""


def run(name: str, chosen: RlRecipe, folder: Path, start: Path) -> Outcome:
    print(f"{name} …", flush=True)
    return whole_run(name, chosen, folder, start, lambda num, status: None)


def held_out(folder: Path) -> str:
    first, *_, last = [row["eval/reward"] for row in read_metrics(folder) if "eval/reward" in row]
    return f"{first:.3f} → {last:.3f}"


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


def on_vllm(name: str, start: Path, url: str, folder: Path, make: Make, own: Outcome) -> list[Row]:
    """The run of ``own`` with vLLM at ``url``."""
    other = run(f"{name}, vLLM", make(VLLM | {"address": url}), folder / "vllm", start)
    ours, theirs = (max(float(np.mean(each.mismatch)), 1e-12) for each in (own, other))
    rewards = f"{held_out(folder / 'vllm')} (ours {held_out(folder / 'own')})"
    k3 = f"{np.mean(other.mismatch):.1e} (ours {np.mean(own.mismatch):.1e})"
    return [
        (f"{name}, vLLM: held-out reward", rewards, "rises as ours", True),
        (f"{name}, vLLM: mean K3", k3, "≤ 2 × ours, or < 1e-12", theirs <= 2 * ours),
    ]


def refused(name: str, start: Path, url: str, folder: Path, make: Make) -> Row:
    """A run whose server loads wrong weights must end by the canary."""
    try:
        run(f"{name}, vLLM as it is", make(VLLM | {"address": url}), folder / "refused", start)
        found = "not noticed"
    except UserError as error:
        found = str(error).partition("canary: ")[2].partition(";")[0] or str(error)
    return f"{name}, vLLM without the extension", found, "caught by the canary", "differ from the trainer's" in found


def planted(start: Path, url: str, folder: Path, make: Make) -> list[Row]:
    """Updates with other weights than the trainer's, on the server at ``url``."""
    chosen = make(VLLM | {"address": url})
    trainer = TrainerRole(chosen, folder / "trainer", start)

    async def work() -> list[Row]:
        role = RemoteEngineRole(chosen, url, start, folder / "engine")
        trainer.copy_weights()
        first = await trainer.publish()
        with torch.no_grad():  # as large as a step of Adam at the bench's learning rate
            for parameter in trainer._model.parameters():
                parameter.add_(1e-3 * torch.randn_like(parameter).sign())
        trainer.copy_weights()
        second = await trainer.publish()
        assert first is not None and second is not None
        state = dict(fetch(second))
        state["blocks.1.attention.out.weight"] = torch.zeros_like(state["blocks.1.attention.out.weight"])
        zeros = replace(publish(folder / "planted", 1, state), canary=second.canary)
        second = replace(second, number=1)  # the engine ignores older versions
        stale = replace(second, location=first.location, checksum=first.checksum)
        await role.activate(first)
        rows = []
        for name, wrong in (("weights of the version before", stale), ("one matrix of zeros", zeros)):
            try:
                await role.activate(wrong)
                found = "not noticed"
            except UserError as error:
                found = str(error).partition("differ from the trainer's by ")[2]
            rows.append((f"planted: {name}", found, "caught, old version stays", "version 0 is active again" in found))
        await role.activate(second)
        rows.append(("planted: then the right weights", f"version {role.version}", "version 1", role.version == 1))
        await role.close()
        return rows

    return asyncio.run(work())


def make_tiny(steps: int) -> Make:
    """Recipes of the tiny networks, from the fields of ``rollout``."""
    train = {"prompts": 6, "eval_prompts": 64, "eval_every": steps}
    common = {"runtime": {"isolate": "none"}, "replay": "off", "optim": {"lr": 1e-3, "decay_fraction": 0.0}}
    return lambda rollout, **tables: recipe(steps, rollout={"group": 8, **rollout}, train=train, **common, **tables)


def vllm_rows(python: str, folder: Path, steps: int) -> Iterator[Row]:
    """Rows of the tiny networks on vLLM."""
    for name, shape in NETWORKS.items():
        make, place = make_tiny(steps), folder / name.replace(" ", "-")
        start = start_of(make({}, start={"model": shape}), place / "start")
        own = run(f"{name}, own engine", make({}), place / "own", start)
        if name != "dense":
            with serving_vllm(python, start) as url:
                yield refused(name, start, url, place, make)
        with serving_vllm(python, start, *(REPACKED if name != "dense" else ())) as url:
            yield from on_vllm(name, start, url, place, make, own)
            if name == "dense":
                yield from planted(start, url, place, make)


def smol_rows(python: str, run_folder: Path, folder: Path) -> Iterator[Row]:
    """Two steps of SmolLM2-135M-Instruct, whose head is tied."""
    start = run_folder / "checkpoint" if (run_folder / "checkpoint").is_dir() else run_folder

    train = {"prompts": 2, "eval_prompts": 4, "eval_every": 2, "seq_len": 96}
    common = {
        "runtime": {"isolate": "none"},
        "replay": "off",
        "optim": {"lr": 1e-5, "decay_fraction": 0.0},
        "train": train,
    }
    sizes = {"group": 4, "max_batch": 8, "cache_bytes": 1 << 27}

    def make(rollout: Mapping[str, Any]) -> RlRecipe:
        return recipe(2, rollout=sizes | rollout, **common)

    own = run("SmolLM2, own engine", make({}), folder / "own", start)
    with serving_vllm(python, start, *REPACKED) as url:
        yield from on_vllm("SmolLM2-135M", start, url, folder, make, own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vllm-cpu 0.32")
    parser.add_argument("--smol", type=Path, metavar="RUN", help="SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=16, help="RL steps of the tiny networks on vLLM")
    parser.add_argument("--folder", type=Path, help="folder for the runs; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        rows = our_server(folder / "server")
        if options.vllm:
            rows += vllm_rows(options.vllm, folder, options.steps)
        if options.vllm and options.smol:
            rows += smol_rows(options.vllm, options.smol, folder / "smol")
    made = table("Engines at an address", "case", "found", "aim", "met")
    for case, found, aim, is_met in rows:
        made.add_row(case, found, aim, "yes" if is_met else "NO")
    wide_console().print(made)
    sys.exit(not all(row[3] for row in rows))


if __name__ == "__main__":
    main()
