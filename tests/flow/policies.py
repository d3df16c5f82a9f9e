"""A tiny policy, its checkpoint, and groups that it sampled itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stretto.base.trajectory import Group, Trajectory
from stretto.learning.recipe import RlRecipe
from stretto.model.checkpoint import write_checkpoint
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, Recorder, Transformer
from tests.flow.samples import VOCAB, group
from tests.networks import sharpened

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "num_experts": 8, "top_k": 2, "expert_intermediate_size": 8, "num_shared_experts": 1, "dense_layers": (0,),
    "dense_intermediate_size": 16,
}  # fmt: skip
ROUTES = (2, 2, 8)
"""MoE layers, slots and experts of it."""


def network(seed: int = 0, scale: float = 3.0) -> Transformer:
    """``scale`` makes fresh weights as decided as trained ones."""
    return sharpened(ModelConfig(**SHAPE), seed, scale, matrices=True)


def checkpoint(folder: Path, seed: int = 0) -> Path:
    model = network(seed)
    write_checkpoint(folder, model, model.config)
    return folder


def recipe(**changes: Any) -> RlRecipe:
    """Dotted names as ``loss__policy``."""
    tree: dict[str, Any] = {
        "sources": {"digits": {"kind": "strings"}},
        "rollout": {"group": 4, "max_tokens": 18},
        "loss": {},
        "optim": {"lr": 1e-2},
        "train": {"steps": 6, "prompts": 4, "seq_len": 48, "micro_rows": 2, "keep_snapshots": 3},
    }
    for name, value in changes.items():
        table, _, field = name.partition("__")
        if field:
            tree.setdefault(table, {})[field] = value
        else:
            tree[table] = value
    return RlRecipe.model_validate(tree)


@torch.no_grad()
def recorded(model: Transformer, sample: Trajectory, temperature: float = 1.0, noise: float = 0.0) -> Trajectory:
    """``sample`` with log-probabilities and routes as ``model`` gives them, ``noise`` added to the former."""
    tokens = torch.from_numpy(np.concatenate([part.tokens for part in sample.segments])).long()[None]
    ids = tokens[:, :-1]
    recorder = Recorder(model.config, ids)
    output = model(ids, model.config.full(), replace(Context.plain(ids), routing=recorder))
    logits_TV = (output.hidden_BTD @ model.head_VD.T)[0] / temperature
    logp_T = logits_TV.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    logp_T = torch.cat([torch.zeros(1), logp_T]).numpy()
    rng = np.random.default_rng(sample.ordinal * 100 + sample.sample)
    segments, at = [], 0
    for part in sample.segments:
        own = logp_T[at : at + len(part.tokens)] + noise * rng.standard_normal(len(part.tokens))
        segments.append(replace(part, logprobs=(own * part.is_sampled).astype(np.float32)))
        at += len(part.tokens)
    routes = recorder.own_BTLK[0].numpy().astype(np.uint8)
    return replace(sample, segments=tuple(segments), routes=routes)


def groups(
    model: Transformer | None,
    num: int = 4,
    seed: int = 0,
    rewards: Sequence[float] = (1.0, 0.0, 0.0, 0.5),
    versions: Sequence[int] = (0,),
    **how: float,
) -> list[Group]:
    """Groups as ``model`` would have sampled them; None: random log-probabilities and routes."""
    rng = np.random.default_rng(seed)
    made = [group(rng, rewards, ordinal=index, versions=versions, routes=ROUTES) for index in range(num)]
    if model is None:
        return made
    return [
        replace(each, trajectories=tuple(recorded(model, one, **how) for one in each.trajectories)) for each in made
    ]
