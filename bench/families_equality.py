"""Logits of random checkpoints against transformers, for every family and every field of its configuration class, in fp32.

    python -m bench.families_equality [--families llama,…] [--each N] [--seed S] [--mutant NAME]

transformers makes and saves random tiny checkpoints: in shards, with fused experts, in the spelling of transformers 4, or quantised by
`bench.common.quantiser` (transformers then reads a dequantised copy). Stretto reads each one; logits are compared at positions beyond
every sliding window and RoPE border. Then Stretto writes the network in the same family, and both read that again. A difference is the
largest one of any logit, divided by the standard deviation of transformers' logits.

exact     within the aim, both ways. After a larger difference two other texts are tried: routers may break near-ties differently
refused   refused because of the field that must be refused
wrong     a larger difference, a refusal of a supported checkpoint or for another reason, or no refusal

Fails (exit code 1) unless all checkpoints are exact or refused. ``--mutant`` breaks Stretto's reading; exit code 1 if that is not
detected.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from bench.common.foreign import LENGTH, Draw, draw, make
from bench.common.measure import bench_parser, table
from stretto.base.errors import UserError
from stretto.base.track import progress, wide_console
from stretto.model import checkpoint, quantised, stored
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.families import FAMILIES, Family, parse_family
from stretto.model.headers import STRETTO_FILE
from stretto.model.spec import ModelConfig

AIM = 1e-4
TEXTS = 3
VERDICTS = ("exact", "refused", "wrong", "crashed")
_EXTRA = ("share refused", "max difference", "router ties")


@dataclass(frozen=True, slots=True)
class Judged:
    """Result of one draw."""

    verdict: str
    """One of `VERDICTS`."""
    reason: str = ""
    """The error message, or the difference."""
    difference: float = 0.0
    """In standard deviations of transformers' logits."""
    num_ties: int = 0
    """Texts with a larger difference before one within the aim."""


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--each", type=int, default=20, help="checkpoints per family")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first checkpoint of each family")
    parser.add_argument("--mutant", choices=MUTANTS)
    options = parser.parse_args()
    quiet()
    families = [parse_family(name, "--families") for name in options.families.split(",")]
    draws = [draw(family, options.seed + index) for family in families for index in range(options.each)]
    judged: list[tuple[Draw, Judged]] = []
    with MUTANTS.get(options.mutant, nullcontext)(), progress("checkpoints", total=len(draws)) as advance:
        for drawn in draws:
            judged.append((drawn, judge(drawn)))
            advance(1)
    console = wide_console()
    console.print(_table(families, judged))
    failures = [(drawn, found) for drawn, found in judged if found.verdict in ("wrong", "crashed")]
    for drawn, found in failures[:20]:
        console.print(f"{found.verdict}: {drawn.label()}: {found.reason}", markup=False)
    if options.mutant is not None:
        console.print(f"mutant {options.mutant}: {'detected' if failures else 'NOT detected'}")
    sys.exit(bool(failures) == (options.mutant is None))


def quiet() -> None:
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


@torch.no_grad()
def judge(drawn: Draw) -> Judged:
    """Make, read, compare, write and compare again."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, back = Path(temporary) / "theirs", Path(temporary) / "ours"
        plain = make(drawn, folder, Path(temporary) / "meant")
        try:
            read = read_checkpoint(folder)
        except UserError as error:
            is_right = drawn.refused is not None and f": {drawn.refused}" in str(error) and "\n" not in str(error)
            return Judged("refused" if is_right else "wrong", f"refused: {error}")
        except Exception:
            return Judged("crashed", traceback.format_exc(limit=-3))
        if drawn.refused is not None:
            return Judged("wrong", f"{drawn.refused} was not refused")
        try:
            theirs, ours = their_model(plain), read_checkpoint(folder, dtype=torch.float32).model
            read_by, ties = _compared(drawn, theirs, ours.logits)
            if read_by > AIM:
                return Judged("wrong", f"logits differ by {read_by:.1e} after reading", read_by)
            write_checkpoint(back, read.model, read.config, family=read.family)
            (back / STRETTO_FILE).unlink()  # read config.json alone, like other software
            again, theirs_again = read_checkpoint(back, dtype=torch.float32).model, their_model(back)
            written_by, more = _compared(drawn, theirs, again.logits, lambda ids: theirs_again(ids).logits)
        except Exception:
            return Judged("crashed", traceback.format_exc(limit=-3))
        found = max(read_by, written_by)
        return Judged("exact" if found <= AIM else "wrong", f"logits differ by {found:.1e}", found, ties + more)


def _compared(drawn: Draw, theirs: PreTrainedModel, *ours: Callable[[Tensor], Tensor]) -> tuple[float, int]:
    """Largest difference on the first text within the aim, else on the last text; and the number of texts before it."""
    for text in range(TEXTS):
        ids = token_ids(drawn, text)
        expected = theirs(ids).logits
        found = max(difference(logits(ids), expected) for logits in ours)
        if found <= AIM:
            break
    return found, text


def token_ids(drawn: Draw, text: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(drawn.seed + 1_000_000 * text)
    return torch.randint(0, drawn.fields["vocab_size"], (2, LENGTH), generator=generator)


def their_model(folder: Path) -> PreTrainedModel:
    """transformers' network in fp32, with the implementation of experts that accepts every size."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(info.values()), f"transformers found {info}"
    return model.eval()


def difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.std()).item()


def _table(families: list[Family], judged: list[tuple[Draw, Judged]]) -> Table:
    shown = table(
        "random checkpoints of transformers, read and written by Stretto", "family", "checkpoints", *VERDICTS, *_EXTRA
    )
    for family in [*families, None]:
        own = [found for drawn, found in judged if family in (drawn.family, None)]
        counts = [sum(found.verdict == verdict for found in own) for verdict in VERDICTS]
        worst = max((found.difference for found in own if found.verdict == "exact"), default=0.0)
        refused, ties = counts[1] / max(1, len(own)), sum(found.num_ties for found in own)
        row = (family or "all", len(own), *counts, f"{refused:.0%}", f"{worst:.1e}", ties)
        shown.add_row(*(str(cell) for cell in row))
    return shown


# --- mutants ----------------------------------------------------------------------------------------------------------


def _changed(change: Callable[[ModelConfig], dict[str, Any]]) -> Callable[[], Any]:
    """A mutant that changes the configuration after reading config.json."""

    @contextmanager
    def mutant() -> Iterator[None]:
        inner = checkpoint.from_hf

        def from_hf(tree: dict[str, Any], source: str) -> tuple[ModelConfig, Family]:
            config, family = inner(tree, source)
            return config.replace(**change(config)), family

        with mock.patch.object(checkpoint, "from_hf", from_hf):
            yield

    return mutant


def _patched(module: ModuleType, name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(module, name, value)


MUTANTS: dict[str | None, Callable[[], Any]] = {
    "window": _changed(lambda config: {"sliding_window": config.sliding_window and config.sliding_window + 1}),
    "pairs": _patched(stored, "paired", lambda tensor, rows, on_disk: rows),
    "fp8_scale": _patched(quantised, "_as_float", lambda scales: torch.ones_like(scales, dtype=torch.float32)),
    "mxfp4_scale": _patched(quantised, "_E8M0_BIAS", 126),
    "scale": _changed(lambda config: {"attention_scale": None}),
    "rope": _changed(lambda config: {"rope_scaling": None}),
    "latent_eps": _changed(
        lambda config: {"latent": config.latent and config.latent.replace(norm_eps=config.norm_eps)}
    ),
    "groups": _changed(lambda config: {"top_groups": config.expert_groups}),
    "clamp": _changed(lambda config: {"clamped_swiglu": config.clamped_swiglu and {"alpha": 1.702, "limit": 7.0}}),
}


if __name__ == "__main__":
    main()
