"""Teachers and students small enough to be looked at whole: what a step of distillation makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from stretto.base.trajectory import Group, Outcome, Segment, Task, Trajectory, Verdict
from stretto.learning.distillation import DistillObjective, Lesson
from stretto.learning.metrics import StepReport
from stretto.learning.objective import PolicyObjective
from stretto.learning.recipe import DistillConfig, LossConfig, RlRecipe
from stretto.learning.samples import store_group
from stretto.learning.trainer import TrainerRole
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.parallel import Ranks, join
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Transformer
from stretto.ops.logprob import Teacher
from stretto.runtime.store import FolderStore
from stretto.text.tokenizer import Tokenizer, load_tokenizer
from tests.networks import sharpened

FORMS = ("full", "top_k", "tail")
"""Those that see more than the sampled token."""
SOURCES = ("digits", "letters")
WORDS = ("the", "cat", "sat", "mat", "né", "中文", "😀", "12", "345")
SHAPE: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "num_experts": 8, "top_k": 2, "expert_intermediate_size": 8, "num_shared_experts": 1,
}  # fmt: skip


def sampled_gradient(student_CV: Tensor, teacher_CV: Tensor, clip: float) -> Tensor:
    """E over y ~ π of the gradient of −sg[clip(log q(y) − log π(y))]·log π(y) by the logits: every y, weighed by π(y)."""
    logits_CV = student_CV.clone().requires_grad_()
    logp_CV = logits_CV.log_softmax(-1)
    signal_CV = (teacher_CV - logp_CV.detach()).clamp(-clip, clip)
    (grad_CV,) = torch.autograd.grad(-(logp_CV.detach().exp() * signal_CV * logp_CV).sum(), logits_CV)
    return grad_CV


def span_gradient(first_V: Tensor, second_VV: Tensor, teacher_VV: Tensor, by_span: bool = True) -> tuple[Tensor, ...]:
    """The gradient by the student's logits that texts of two tokens make, each weighed by how likely it is: of the objective, where
    ``teacher_VV`` is what a teacher says of each such text as one span. ``by_span`` False: half of it of either token."""
    vocab, leaves = len(first_V), (first_V.clone().requires_grad_(), second_VV.clone().requires_grad_())
    logits_PN = torch.stack([leaves[0].expand(vocab * vocab, -1), leaves[1].repeat_interleave(vocab, 0)], 1)
    targets_N = torch.cartesian_prod(torch.arange(vocab), torch.arange(vocab)).flatten()
    logp_N = logits_PN.detach().flatten(0, 1).log_softmax(-1).gather(-1, targets_N[:, None])[:, 0]
    spans_M = torch.arange(vocab * vocab).repeat_interleave(2)
    streams = dict.fromkeys(("behaviour_BT",), logp_N[None]) | {"advantages_BT": torch.zeros_like(logp_N)[None]}
    streams |= {"weights_BT": logp_N.view(-1, 2).sum(-1).exp().repeat_interleave(2)[None]}
    policy = PolicyObjective(LossConfig(), 1.0, streams | {"samples_BT": spans_M[None]}, logp_N[None])
    said_M = teacher_VV.flatten()[spans_M]
    lesson = Lesson(torch.arange(len(targets_N)), *((said_M, spans_M) if by_span else (said_M / 2,)))
    objective = DistillObjective(DistillConfig(form="sampled", clip=1e9), (lesson,), policy, True)
    loss = objective(logits_PN.flatten(0, 1), torch.eye(vocab, dtype=first_V.dtype), targets_N).loss
    return torch.autograd.grad(loss, leaves)


def span_gradient_reference(first_V: Tensor, second_VV: Tensor, teacher_VV: Tensor) -> tuple[Tensor, ...]:
    """Of KL(π ‖ q) over the texts, by autograd."""
    leaves = first_V.clone().requires_grad_(), second_VV.clone().requires_grad_()
    logp_VV = leaves[0].log_softmax(-1)[:, None] + leaves[1].log_softmax(-1)
    return torch.autograd.grad((logp_VV.exp() * (logp_VV - teacher_VV)).sum(), leaves)


def form_loss_reference(student_CV: Tensor, teacher_CV: Tensor, config: DistillConfig) -> Tensor:
    """The loss of `form_loss`, written down as METHODS has it and left to autograd."""
    probs_CV, taught_CV = student_CV.exp(), teacher_CV.exp()
    terms_CV = probs_CV * (student_CV - teacher_CV)
    loss_C = terms_CV.sum(-1)
    if config.form != "full":
        ids_CK = student_CV.topk(min(config.top_k, student_CV.shape[-1])).indices
        loss_C, probs_C, taught_C = (each.gather(-1, ids_CK).sum(-1) for each in (terms_CV, probs_CV, taught_CV))
        if config.form == "top_k":
            loss_C = loss_C - probs_C + taught_C
        elif ids_CK.shape[-1] < student_CV.shape[-1]:
            loss_C = loss_C + (1 - probs_C) * ((1 - probs_C) / (1 - taught_C)).log()
    if config.entropy_aware is not None:
        is_open_C = -(taught_CV * teacher_CV).sum(-1) > config.entropy_aware
        loss_C = loss_C + is_open_C * (taught_CV * (teacher_CV - student_CV)).sum(-1)
    return loss_C


def taught_loss_reference(
    hidden_ND: Tensor,
    head_VD: Tensor,
    weights_N: Tensor,
    lessons: Sequence[Lesson],
    config: DistillConfig,
) -> Tensor:
    """`taught_loss` by autograd, all logits at once."""
    loss = hidden_ND.new_zeros(())
    for lesson in lessons:
        assert isinstance(lesson.scores, Teacher)
        student_MV = F.linear(hidden_ND[lesson.places_M], head_VD).log_softmax(-1)
        teacher_MV = F.linear(lesson.scores.hidden_ND, lesson.scores.head_VD).log_softmax(-1)
        loss = loss + (weights_N[lesson.places_M] * form_loss_reference(student_MV, teacher_MV, config)).sum()
    return loss


def network(folder: Path, seed: int, tokenizer: Tokenizer | None = None) -> Path:
    """A checkpoint of fresh weights, made as decided as trained ones."""
    own = {} if tokenizer is None else {"vocab_size": tokenizer.vocab_size}
    model = sharpened(ModelConfig(**SHAPE | own), seed, matrices=True)
    words = folder.with_suffix(".words") if tokenizer is not None else None
    if tokenizer is not None and words is not None:
        tokenizer.save(words)
    write_checkpoint(folder, model, model.config, tokenizer_dir=words)
    return folder


def twin(folder: Path, out: Path, seed: int) -> Path:
    """Network and tokenizer of ``folder`` with all ids in another order: another tokenizer, the same distribution over texts."""
    found, words = read_checkpoint(folder), load_tokenizer(folder)
    tree = json.loads(words.rust.to_str())
    order = torch.randperm(found.config.vocab_size, generator=torch.Generator().manual_seed(seed)).tolist()
    tree["model"]["vocab"] = {token: order[number] for token, number in tree["model"]["vocab"].items()}
    tree["added_tokens"] = sorted(
        ({**each, "id": order[each["id"]]} for each in tree["added_tokens"]), key=lambda each: each["id"]
    )
    state = dict(found.model.state_dict())
    for name in state.keys() & {"embedding.weight", "head.weight"}:
        state[name] = torch.empty_like(state[name]).index_copy(0, torch.tensor(order), state[name])
    rust = tokenizers.Tokenizer.from_str(json.dumps(tree))
    Tokenizer(rust, words.eos_token, words.chat_template, words.config).save(out.with_suffix(".words"))
    write_checkpoint(out, state, found.config, tokenizer_dir=out.with_suffix(".words"))
    return out


def told(tokenizer: Tokenizer, teachers: Mapping[str, Tokenizer], num: int = 4, size: int = 3) -> list[Group]:
    """`samples` in words: answers as ``tokenizer`` writes them, and the problem as each of the ``teachers`` reads it."""
    rng, made = np.random.default_rng(0), []
    for group in samples(num, size):
        prompt = " ".join(rng.choice(WORDS, 2))

        def spoken(sample: Trajectory) -> Trajectory:
            said = [prompt, " " + " ".join(rng.choice(WORDS, rng.integers(1, 4)))]  # noqa: B023
            parts = [tokenizer.encode(said[0]), [*tokenizer.encode(said[1]), tokenizer.eos_id]]
            segments = [
                Segment(
                    np.array(ids, np.int32),
                    bool(own),
                    np.full(len(ids), -own, np.float32),
                    np.full(len(ids), own - 1, np.int32),
                )
                for own, ids in enumerate(parts)
            ]
            return replace(sample, segments=tuple(segments))

        prompts = {name: np.array(each.encode(prompt), np.int32) for name, each in teachers.items()}
        made.append(Group(group.task, tuple(map(spoken, group.trajectories)), prompts))
    return made


def samples(num: int = 4, size: int = 3, longest: int = 9) -> list[Group]:
    """Groups of random answers of any length, the sources in turn."""
    rng = np.random.default_rng(0)

    def segment(length: int, is_sampled: bool) -> Segment:
        tokens = rng.integers(0, SHAPE["vocab_size"], length).astype(np.int32)
        logprobs = np.full(length, -np.log(SHAPE["vocab_size"]) * is_sampled, np.float32)
        return Segment(tokens, is_sampled, logprobs, np.full(length, is_sampled - 1, np.int32))

    groups = []
    for ordinal in range(num):
        prompt = segment(int(rng.integers(2, 6)), False)
        answers = [(prompt, segment(int(rng.integers(1, longest + 1)), True)) for _ in range(size)]
        verdicts = [Verdict(float(sample == 0), Outcome.OK, 0.0) for sample in range(size)]
        trajectories = tuple(
            Trajectory(ordinal, sample, 0, segments, None, "stop", verdict)
            for sample, (segments, verdict) in enumerate(zip(answers, verdicts, strict=True))
        )
        groups.append(Group(Task(ordinal, SOURCES[ordinal % 2], ordinal, size, 7, longest), trajectories))
    return groups


def taught(teachers: dict[str, Any], distill: dict[str, Any] | None = None, **train: Any) -> RlRecipe:
    """A run on both sources; ``teachers``: their checkpoints, or their tables."""
    tables = {name: each if isinstance(each, dict) else {"checkpoint": str(each)} for name, each in teachers.items()}
    return RlRecipe.model_validate({
        "sources": {name: {"kind": "strings"} for name in SOURCES},
        "rollout": {"group": 3, "max_tokens": 9},
        "distill": {"top_k": 7, "kl_floor": 0.0, "teachers": tables, **(distill or {})},
        "optim": {"lr": 1e-3, "clip_norm": 1e9},
        "train": {"steps": 6, "prompts": 4, "seq_len": 48, "micro_rows": 2, **train},
        "replay": "off",
    })  # fmt: skip


class Catch(torch.optim.SGD):
    """Keeps the gradients that a step would have applied, and applies nothing."""

    def __init__(self, model: Transformer) -> None:
        super().__init__([{"params": list(model.parameters()), "lr_factor": 1.0}], lr=0.0)
        self.model = model
        self.caught: dict[str, Tensor] = {}

    def step(self, closure: Any = None) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                self.caught[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()


def stepped(
    plan: RlRecipe, start: Path, folder: Path, made: Sequence[Group], ranks: Ranks | None = None
) -> tuple[StepReport, dict[str, Tensor]]:
    """What the first step on ``made`` reports, and its gradient."""
    trainer = TrainerRole(plan, folder / "run", start, ranks=ranks or join("cpu"))
    catch = Catch(trainer._model)
    trainer._optimizers = [catch]
    report = trainer.step([store_group(FolderStore(folder / "groups"), each) for each in made], 0)
    return report, catch.caught


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Norm of the difference of two gradients over the norm of the first, over all parameters."""
    assert one.keys() == other.keys()
    difference = sum(float((grad - other[name]).square().sum()) for name, grad in one.items())
    return (difference / sum(float(grad.square().sum()) for grad in one.values())) ** 0.5


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Of two gradients: the largest, over the largest of their entries."""
    assert one.keys() == other.keys()
    largest = max(float(grad.abs().max()) for grad in one.values())
    return max(float((grad - other[name]).abs().max()) for name, grad in one.items()) / largest
