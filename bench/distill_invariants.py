"""Figure 1 of distillation: what must hold whatever is distilled, each beside a change that breaks it.

    python -m bench.distill_invariants [--seed 0]

Losses by themselves, in fp64 and without sampling noise: at teacher = student every form's loss and gradient are zero; the
sampled form's gradient, over every token of a small vocabulary as often as it would be sampled, is that of the reverse KL.
The trainer, in fp32: one teacher under two names is one; the order of teachers, the layout of samples in passes and rows, and
the number of ranks (two processes on this machine, gloo) change the gradient by no more than another order of a sum does:
a random walk of a rounding for each of n targets, of what a difference of two log-probabilities is rounded by, and these are
of the size of the negative log-likelihood: √n·ε·(1 + nll) of the largest entry. Mutants must fail: a top-k sum without its
correction, log π − log q as a loss, the k3 estimate as a loss; and of a teacher with another tokenizer: half of what it says of
two tokens of each, tokens paired by their places, its ids taken for the student's. Exits with 1 where something does not come out as it should.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from bench.common.lessons import (
    FORMS,
    WORDS,
    difference,
    network,
    sampled_gradient,
    samples,
    span_gradient,
    span_gradient_reference,
    stepped,
    taught,
    told,
    twin,
)
from bench.common.measure import table, wide_console
from stretto.base.track import progress
from stretto.learning.distillation import Lesson, form_loss, taught_loss
from stretto.learning.metrics import StepReport
from stretto.learning.recipe import DistillConfig
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.parallel import join
from stretto.ops.logprob import Teacher
from stretto.text.spans import Spelling, Translation
from stretto.text.tokenizer import load_tokenizer, train_tokenizer

EXACT = 1e-12
"""Of fp64 sums over a vocabulary of a few dozen."""
APART = 1e-3
"""A mutant differs by more."""
CHANGES: dict[str, dict[str, Any]] = {
    "one row a pass": {"micro_rows": 1},
    "all rows in a pass": {"micro_rows": 8},
    "long rows": {"seq_len": 200},
    "short rows": {"seq_len": 15, "micro_rows": 3},
}
"""Ways to lay the same samples out."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the figure."""

    what: str
    form: str
    found: float
    limit: float
    is_mutant: bool = False

    @property
    def holds(self) -> bool:
        """A mutant must not be below its limit."""
        return (self.found <= self.limit) != self.is_mutant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    with tempfile.TemporaryDirectory() as temporary, progress("invariants", None) as advance:
        found = []
        for each in chain(
            of_losses(options.seed),
            of_refusals(),
            of_the_trainer(Path(temporary), options.seed),
            of_spans(Path(temporary), options.seed),
        ):
            found.append(each)
            advance(1)
    made = table("Distillation: invariants and mutants", "what", "form", "found", "limit", "")
    for each in found:
        limit = f"> {each.limit:.1e}" if each.is_mutant else f"≤ {each.limit:.1e}"
        verdict = ("fails, as it must" if each.is_mutant else "holds") if each.holds else "NOT AS IT SHOULD"
        made.add_row(each.what, each.form, f"{each.found:.1e}", limit, verdict)
    wide_console().print(made)
    sys.exit(not all(each.holds for each in found))


def of_losses(seed: int) -> Iterator[Finding]:
    """In fp64; gradients by the student's logits, the largest entry."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=rng)

    for form in FORMS:
        for entropy_aware in (None, 0.5):
            hidden_ND, head_VD = draw(64, 8).requires_grad_(), draw(29, 8).requires_grad_()
            lesson = Lesson(torch.arange(64), Teacher(hidden_ND.detach(), head_VD.detach()))
            config = DistillConfig(form=form, top_k=5, entropy_aware=entropy_aware)
            targets_N, weights_N = torch.randint(29, (64,), generator=rng), draw(64).abs()
            loss, _ = taught_loss(hidden_ND, head_VD, targets_N, weights_N, [lesson], config)
            grads = torch.autograd.grad(loss, (hidden_ND, head_VD))
            worst = max(abs(loss.item()), *(float(grad.abs().max()) for grad in grads))
            name = form if entropy_aware is None else f"{form}, entropy-aware"
            yield Finding("loss and gradient at teacher = student", name, worst, 0.0)
    student_CV, teacher_CV = draw(64, 29).log_softmax(-1), draw(64, 29).log_softmax(-1)
    yield Finding(
        "loss and gradient at teacher = student",
        "sampled, expectation",
        float(sampled_gradient(student_CV, student_CV, math.inf).abs().max()),
        EXACT,
    )
    logits_CV = student_CV.clone().requires_grad_()
    logp_CV = logits_CV.log_softmax(-1)
    top_CK = logp_CV.topk(5).indices
    plain = (logp_CV.exp() * (logp_CV - logp_CV.detach())).gather(-1, top_CK).sum()
    (grad_CV,) = torch.autograd.grad(plain, logits_CV)
    yield Finding("the same", "top_k, uncorrected", float(grad_CV.abs().max()), APART, is_mutant=True)

    _, whole_CV = form_loss(student_CV, teacher_CV, DistillConfig())
    largest = float(whole_CV.abs().max())

    def apart(grad_CV: Tensor) -> float:
        return float((grad_CV - whole_CV).abs().max()) / largest

    against = "expected gradient against the reverse KL's"
    yield Finding(against, "sampled", apart(sampled_gradient(student_CV, teacher_CV, math.inf)), EXACT)
    logp_CV = (logits_CV := student_CV.clone().requires_grad_()).log_softmax(-1)
    estimates = {
        "k1 as a loss": logp_CV - teacher_CV,
        "k3 as a loss": (teacher_CV - logp_CV).expm1() + logp_CV - teacher_CV,
    }
    for name, estimate_CV in estimates.items():
        (grad_CV,) = torch.autograd.grad((logp_CV.detach().exp() * estimate_CV).sum(), logits_CV, retain_graph=True)
        yield Finding(against, name, apart(grad_CV), APART, is_mutant=True)


def of_spans(folder: Path, seed: int) -> Iterator[Finding]:
    """A teacher with another tokenizer: by itself, over every text of two tokens; and in the trainer, where the other tokenizer is the student's with all
    ids in another order, so that what the teacher says of any text is known."""
    rng = torch.Generator().manual_seed(seed)
    first_V, second_VV, teacher_VV = (torch.randn(shape, generator=rng) for shape in ((7,), (7, 7), (7, 7)))
    teacher_VV = teacher_VV.flatten().log_softmax(-1).view(7, 7)
    own_VV = first_V.log_softmax(-1)[:, None] + second_VV.log_softmax(-1)

    def apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
        return max(float((mine - theirs).abs().max()) for mine, theirs in zip(one, other, strict=True))

    eps, largest_nll = torch.finfo(torch.float32).eps, -float(own_VV.min())
    exact = math.sqrt(2 * own_VV.numel()) * eps * (1.0 + largest_nll)
    whole = span_gradient_reference(first_V, second_VV, teacher_VV)
    against = "expected gradient against that of the reverse KL of spans"
    yield Finding(against, "sampled, spans", apart(span_gradient(first_V, second_VV, teacher_VV), whole), exact)
    halves = span_gradient(first_V, second_VV, teacher_VV, by_span=False)
    yield Finding(against, "half for each token", apart(halves, whole), APART, is_mutant=True)
    found = max(float(each.abs().max()) for each in span_gradient(first_V, second_VV, own_VV))
    yield Finding("gradient at teacher = student", "sampled, spans", found, exact)

    texts = [" ".join(WORDS)] * 20
    fine, coarse = train_tokenizer(iter(texts), 262), train_tokenizer(iter(texts), 330)
    turn = fine.encode(texts[0])
    made, sides = Translation(fine, coarse, (), 0)(turn), (Spelling(fine), Spelling(coarse))

    def unlike(own: Sequence[int], theirs: Sequence[int]) -> float:
        """Spans that are not the same bytes on both sides."""
        spans = [(b"".join(sides[0].bytes_of(token) for token, span in zip(turn, own, strict=False) if span == number),
                  b"".join(sides[1].bytes_of(int(token)) for token, span in zip(made.ids_K, theirs, strict=False) if span == number))
                 for number in range(max(*own, *theirs) + 1)]  # fmt: skip
        return float(sum(mine != other for mine, other in spans))

    split = "spans with other bytes, characters split"
    yield Finding(split, "sampled, spans", unlike(made.own_T.tolist(), made.theirs_K.tolist()), 0.0)
    yield Finding(split, "token by token", unlike(range(len(turn)), range(len(made.ids_K))), 0.5, is_mutant=True)

    start, teacher = network(folder / "spoken", seed, fine), network(folder / "spoken-teacher", seed + 1, fine)
    start_twin, teacher_twin = (twin(each, folder / f"{each.name}-twin", seed) for each in (start, teacher))
    as_told = {True: told(fine, {"one": load_tokenizer(teacher_twin)}), False: told(fine, {})}

    def gradient(name: str, who: Path, **train: Any) -> tuple[StepReport, dict[str, Tensor]]:
        plan = taught({"one": {"checkpoint": str(who), "domains": ["*"]}}, {"form": "sampled"}, **train)
        return stepped(plan, start, folder / name, as_told[who.name.endswith("-twin")])

    report, alike = gradient("alike", teacher)
    num_targets = sum(one.num_sampled for each in as_told[False] for one in each.trajectories)
    limit = math.sqrt(num_targets) * eps * (1.0 + report.scalars["policy/nll"])
    _, spans = gradient("spans", teacher_twin)
    yield Finding("a teacher's twin with other ids", "sampled, spans", difference(alike, spans), limit)
    for name, train in CHANGES.items():
        other = gradient(f"spans, {name}", teacher_twin, **train | {"seq_len": max(32, train.get("seq_len", 48))})[1]
        yield Finding(name, "sampled, spans", difference(spans, other), limit)
    same = max(float(grad.abs().max()) for grad in gradient("same", start_twin)[1].values())
    largest = max(float(grad.abs().max()) for grad in spans.values())
    yield Finding("the student's own twin, over another teacher's", "sampled, spans", same / largest, limit)
    write_checkpoint(
        folder / "mistaken",
        read_checkpoint(teacher_twin).model,
        read_checkpoint(teacher_twin).config,
        tokenizer_dir=start,
    )
    mistaken = gradient("mistaken", folder / "mistaken")[1]
    yield Finding("its ids taken for the student's", "sampled", difference(alike, mistaken), APART, is_mutant=True)


def of_refusals() -> Iterator[Finding]:
    """A source that no recipe has, and one that nobody teaches."""
    for what, domains in (
        ("an unknown source is refused", ["digits", "numbers"]),
        ("an untaught source is refused", ["digits"]),
    ):
        try:
            taught({"one": {"checkpoint": "somewhere", "domains": domains}})
            passed = 1.0
        except ValidationError:
            passed = 0.0
        yield Finding(what, "all", passed, 0.0)


def of_the_trainer(folder: Path, seed: int) -> Iterator[Finding]:
    """Gradients of a step, in fp32; and by two ranks."""
    start, made = network(folder / "start", seed), samples()
    teachers = {name: network(folder / name, seed + 1 + number) for number, name in enumerate(("digits", "letters"))}
    num_targets = sum(one.num_sampled for each in made for one in each.trajectories)
    for form in (*FORMS, "sampled"):
        place = folder / form

        def gradient(name: str, who: dict[str, Any], **train: Any) -> dict[str, Tensor]:
            return stepped(taught(who, {"form": form}, **train), start, place / name, made)[1]  # noqa: B023

        report, whole = stepped(taught(teachers, {"form": form}), start, place / "whole", made)
        eps, size = torch.finfo(torch.float32).eps, 1.0 + report.scalars["policy/nll"]
        limit = math.sqrt(num_targets) * eps * size
        largest = max(float(grad.abs().max()) for grad in whole.values())
        same = gradient("same", dict.fromkeys(("digits", "letters"), start))
        found = max(float(grad.abs().max()) for grad in same.values()) / largest
        yield Finding("teacher = student, over another teacher's", form, found, limit)
        one = {"both": {"checkpoint": str(teachers["digits"]), "domains": ["digits", "letters"]}}
        twice = dict.fromkeys(("digits", "letters"), teachers["digits"])
        yield Finding(
            "a teacher under two names", form, difference(gradient("one", one), gradient("two", twice)), limit
        )
        back = gradient("back", dict(reversed(teachers.items())))
        yield Finding("teachers in another order", form, difference(whole, back), 0.0)
        swapped = {"digits": teachers["letters"], "letters": teachers["digits"]}
        yield Finding(
            "teachers of each other's sources", form, difference(whole, gradient("cross", swapped)), APART, True
        )
        for name, train in CHANGES.items():
            yield Finding(name, form, difference(whole, gradient(name, teachers, **train)), limit)
        job = {"plan": taught(teachers, {"form": form}), "start": start, "made": made, "folder": place / "ranks"}
        yield Finding("two ranks", form, difference(whole, by_two_ranks(job, place)), limit)


def by_two_ranks(job: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """The gradient that two processes find together."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = folder / "job.pickle"
    path.write_bytes(pickle.dumps(job))
    workers = []
    for rank in range(2):
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        command = [sys.executable, "-m", "bench.distill_invariants", "--worker", str(path)]
        workers.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    for worker in workers:
        _, errors = worker.communicate(timeout=280)
        assert worker.returncode == 0, errors
    found: dict[str, Tensor] = torch.load(path.with_suffix(".pt"))
    return found


def work(path: Path) -> None:
    """What each of two ranks does."""
    job, ranks = pickle.loads(path.read_bytes()), join("cpu")
    _, gradient = stepped(job["plan"], job["start"], job["folder"] / f"{ranks.rank}", job["made"], ranks)
    if ranks.is_first:
        torch.save(gradient, path.with_suffix(".pt"))


if __name__ == "__main__":
    main()
