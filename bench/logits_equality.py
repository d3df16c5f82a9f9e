"""Do the same weights give the same numbers, wherever they run? Three tables of largest differences, in fp32.

    python -m bench.logits_equality [--subnets N] [--seed S]

Masked: a Subnet running inside the maximum network against the same Subnet cut out. Families: ours against
transformers, on what we export; `bench.families_equality` reads what transformers wrote. GGUF: log-probs against llama.cpp.
Weights are several times larger than an initialisation's, norms are not one and balance biases are not zero, so that
a tensor in the wrong place shows. Exits with 1 if a difference is larger than its aim.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from bench.common.measure import wide_console
from stretto.base.track import progress
from stretto.model.checkpoint import write_checkpoint
from stretto.model.elastic import extract
from stretto.model.families import Family
from stretto.model.gguf import why_not_gguf, write_gguf
from stretto.model.spec import ModelConfig, Subnet, count
from stretto.model.transformer import Transformer, build
from stretto.text.chat import CHATML
from stretto.text.tokenizer import train_tokenizer

try:
    import llama_cpp
except ImportError:
    llama_cpp = None

AIM_MASKED, AIM_FAMILY, AIM_GGUF = 1e-5, 1e-4, 1e-3
BATCH, LENGTH = 4, 64
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_layers": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "top_k": 4,
    "expert_intermediate_size": 16,
}
DENSE: dict[str, Any] = {"dense_layers": (0,), "dense_intermediate_size": 96}
ELASTIC: dict[str, dict[str, Any]] = {
    "sigmoid router": {"router": "sigmoid", "num_shared_experts": 1},
    "softmax router": {"router": "softmax", "num_shared_experts": 1},
    "sigmoid router, dense layer, QK-norm, tied": {
        "router": "sigmoid",
        "qk_norm": True,
        "tie_embeddings": True,
        **DENSE,
    },
}
EXPORTED: dict[str, tuple[Family, dict[str, Any]]] = {
    "default": ("glm4_moe", {"num_shared_experts": 1}),
    "dense layer, half RoPE, scaling": (
        "glm4_moe",
        {"num_shared_experts": 2, "rotary_fraction": 0.5, "routed_scaling": 1.7, **DENSE},
    ),
    "QK-norm, biases, tied, no shared expert": (
        "glm4_moe",
        {"qk_norm": True, "attention_bias": True, "tie_embeddings": True},
    ),
    "padded: a different width in every layer": (
        "glm4_moe",
        {"num_shared_experts": 1, "experts_per_layer": (16, 4, 9, 5, 12, 16, 7, 4)},
    ),
    "untied": ("qwen3_moe", {"router": "softmax", "selection_bias": False, "qk_norm": True}),
    "biases, tied": (
        "qwen3_moe",
        {"router": "softmax", "selection_bias": False, "qk_norm": True, "attention_bias": True, "tie_embeddings": True},
    ),
    "dense layers, gates as they are": (
        "qwen3_moe",
        {"router": "softmax", "selection_bias": False, "qk_norm": True, "normalize_gates": False, **DENSE},
    ),
    "tied, dense layer": (
        "ernie4_5_moe",
        {"router": "softmax", "num_shared_experts": 1, "tie_embeddings": True, **DENSE},
    ),
    "untied, MoE at an interval": (
        "ernie4_5_moe",
        {"router": "softmax", "dense_layers": (0, 2, 4, 6), "dense_intermediate_size": 96},
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    what: str
    num_params: int
    difference: float
    aim: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subnets", type=int, default=50, help="random Subnets, over all elastic networks")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    console = wide_console()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        folder = Path(temporary)
        for title, found in (
            ("masked super-net against extracted network, logits", masked(options.subnets, options.seed)),
            ("ours against transformers, logits", list(exported(folder, options.seed))),
            ("ours against llama.cpp, log-probs", list(ggufs(folder, options.seed, console))),
        ):
            if found:
                console.print(_table(title, found))
            rows += found
    if any(row.difference > row.aim for row in rows):
        sys.exit(1)


def network(seed: int, **changes: Any) -> Transformer:
    """A network of `SHAPE` whose every tensor matters, balance biases of all branches included."""
    model = build(ModelConfig(**{**SHAPE, **changes}), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith(("norm.weight", "q_norm", "k_norm")):
            tensor.add_(0.3 * noise)
        elif name.endswith("bias_WE"):
            tensor.add_((0.1 if model.config.router == "sigmoid" else 0.02) * noise * model.config.selection_bias)
        elif name.endswith("bias"):
            tensor.add_(0.3 * noise)
        else:
            tensor.mul_(2.0)
    return model


def token_ids(seed: int) -> Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def masked(num_subnets: int, seed: int) -> list[Row]:
    """Largest difference over random Subnets of each elastic network."""
    rng = random.Random(seed)
    models = {name: network(seed, widths=(16, 8, 4), num_branches=4, **changes) for name, changes in ELASTIC.items()}
    worst = dict.fromkeys(models, 0.0)
    tried = dict.fromkeys(models, 0)
    with progress("random Subnets", total=num_subnets) as advance:
        for index in range(num_subnets):
            name = list(models)[index % len(models)]
            model, ids = models[name], token_ids(seed + index)
            subnet = random_subnet(model.config, rng)
            difference = (model.logits(ids, subnet) - extract(model, subnet).logits(ids)).abs().max().item()
            worst[name] = max(worst[name], difference)
            tried[name] += 1
            advance(1)
    return [
        Row(f"{name}, {tried[name]} Subnets", _size(model), worst[name], AIM_MASKED)
        for name, model in models.items()
        if tried[name]
    ]


def random_subnet(config: ModelConfig, rng: random.Random) -> Subnet:
    """Any layers, and in every MoE layer its own number of experts and its own k; or nested, as in training."""
    layers = tuple(sorted(rng.sample(range(config.num_layers), rng.randint(1, config.num_layers))))
    num_kept = sum(layer not in config.dense_layers for layer in layers)
    if rng.random() < 0.5:
        width = rng.choice(config.widths)
        return Subnet(layers=layers, experts=(width,) * num_kept, top_k=(rng.randint(1, config.top_k),) * num_kept)
    experts = tuple(rng.randint(1, config.num_experts) for _ in range(num_kept))
    return Subnet(
        layers=layers, experts=experts, top_k=tuple(rng.randint(1, min(config.top_k, width)) for width in experts)
    )


def exported(folder: Path, seed: int) -> Iterator[Row]:
    """Written by us, computed by transformers."""
    ids = token_ids(seed)
    for index, (name, (family, changes)) in enumerate(EXPORTED.items()):
        model = network(seed, **changes)
        write_checkpoint(folder / f"exported{index}", model, model.config, family=family)
        theirs, info = AutoModelForCausalLM.from_pretrained(
            folder / f"exported{index}", dtype=torch.float32, output_loading_info=True
        )
        assert not any(info.values()), f"{family}: transformers found {info}"
        difference = (model.logits(ids) - theirs(ids).logits).abs().max().item()
        yield Row(f"{family}: {name}", _size(model), difference, AIM_FAMILY)


def ggufs(folder: Path, seed: int, console: Console) -> Iterator[Row]:
    """Written by us, computed by llama.cpp with an fp32 cache."""
    if llama_cpp is None:
        console.print(
            "ours against llama.cpp: skipped, llama-cpp-python is not installed (pip install 'stretto\\[bench]')"
        )
        return
    words = [json.dumps(ELASTIC), __doc__ or ""] * 3
    train_tokenizer(iter(words), SHAPE["vocab_size"], CHATML).save(folder / "tokenizer")
    ids = token_ids(seed)[0]
    for index, (name, (family, changes)) in enumerate(EXPORTED.items()):
        model = network(seed, **changes)
        if why_not_gguf(model.config, family) is not None:
            continue
        write_checkpoint(
            folder / f"gguf{index}", model, model.config, family=family, tokenizer_dir=folder / "tokenizer"
        )
        write_gguf(folder / f"gguf{index}", folder / f"{index}.gguf")
        theirs = _llama_log_probs(folder / f"{index}.gguf", ids)
        ours = model.logits(ids[None])[0].log_softmax(-1)
        yield Row(f"{family}: {name}", _size(model), (ours - theirs).abs().max().item(), AIM_GGUF)


def _llama_log_probs(path: Path, ids: Tensor) -> Tensor:
    # its threads wait by spinning, so more than one is slower on a busy machine
    threads = {"n_threads": 1, "n_threads_batch": 1}
    llama = llama_cpp.Llama(str(path), n_ctx=LENGTH, logits_all=True, verbose=False, type_k=0, type_v=0, **threads)
    llama.eval(ids.tolist())
    logits = torch.tensor(np.array(llama.scores[: len(ids)]))
    llama.close()
    return logits.log_softmax(-1)


def _size(model: Transformer) -> int:
    return count(model.config, model.config.full()).total_params


def _table(title: str, rows: list[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("network", "parameters", "max |difference|", "aim", ""):
        table.add_column(column, justify="left" if column == "network" else "right")
    for row in rows:
        verdict = "ok" if row.difference <= row.aim else "TOO LARGE"
        table.add_row(row.what, f"{row.num_params:,}", f"{row.difference:.1e}", f"≤ {row.aim:.0e}", verdict)
    return table


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
