"""What tests of teachers share: two sources, networks that teach them, and what a step makes of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.base.trajectory import Group
from stretto.model.parallel import Ranks, join
from stretto.model.transformer import Transformer
from stretto.rl.log import StepReport
from stretto.rl.recipe import RlRecipe
from stretto.rl.samples import store_group
from stretto.rl.trainer import TrainerRole
from tests.rl.policies import Catch, groups, network, recipe

FORMS = ("full", "top_k", "tail")
"""Those that see more than the sampled token."""
SOURCES = ("digits", "letters")


def sampled_gradient(student_CV: Tensor, teacher_CV: Tensor, clip: float) -> Tensor:
    """E over y ~ π of the gradient of −sg[clip(log q(y) − log π(y))]·log π(y) by the logits: every y, weighed by π(y)."""
    logits_CV = student_CV.clone().requires_grad_()
    logp_CV = logits_CV.log_softmax(-1)
    signal_CV = (teacher_CV - logp_CV.detach()).clamp(-clip, clip)
    (grad_CV,) = torch.autograd.grad(-(logp_CV.detach().exp() * signal_CV * logp_CV).sum(), logits_CV)
    return grad_CV


def taught(teachers: dict[str, Any], distill: dict[str, Any] | None = None, **changes: Any) -> RlRecipe:
    """A run on both sources; ``teachers``: their checkpoints, or their tables."""
    tables = {name: each if isinstance(each, dict) else {"checkpoint": str(each)} for name, each in teachers.items()}
    sources = {name: {"kind": "strings"} for name in SOURCES}
    table = {"top_k": 7, "teachers": tables, **(distill or {})}
    return recipe(sources=sources, distill=table, optim__clip_norm=1e9, **changes)


def two_sources(seed: int = 0, model: Transformer | None = None) -> list[Group]:
    """Four groups, the sources in turn, all as the student sampled them."""
    made = groups(model or network(), seed=seed)
    return [replace(each, task=replace(each.task, source=SOURCES[number % 2])) for number, each in enumerate(made)]


def stepped(
    plan: RlRecipe, start: Path, folder: Path, made: Sequence[Group], ranks: Ranks | None = None
) -> tuple[StepReport, dict[str, Tensor]]:
    """What the first step on ``made`` reports, and its gradient."""
    trainer = TrainerRole(plan, folder / "run", start, ranks=ranks or join("cpu"))
    catch = Catch(trainer._model)
    trainer._optimizers = [catch]
    report = trainer.step([store_group(folder / "groups", each) for each in made], 0)
    return report, catch.caught


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Of two gradients: the largest, over the largest of their entries."""
    assert one.keys() == other.keys()
    largest = max(float(grad.abs().max()) for grad in one.values())
    return max(float((grad - other[name]).abs().max()) for name, grad in one.items()) / largest
