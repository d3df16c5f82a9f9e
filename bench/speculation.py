"""Self-speculation on a trained elastic network: speed-up at batch 1, acceptance, and whether the tokens are the same.

    python -m bench.speculation --run FOLDER [--draft PRESET] [--prompts N] [--tokens N]

Prompts are beginnings of held-out documents of the run's own data. Two engines on the same weights, one of which drafts
with a Subnet, complete each prompt greedily in turn; they must give the same tokens, or this exits with 1. The first
prompts are not timed: the engine measures meanwhile which draft pays, and how far ahead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from bench.common.measure import measure, ratio, table, times, wide_console
from stretto.base.paths import RUN_FILE
from stretto.base.track import progress
from stretto.engine.loading import OpenedEngine, open_engine
from stretto.engine.request import Completion, EngineConfig, Phases, Request, Sampling, SpeculateConfig
from stretto.model.checkpoint import read_presets
from stretto.model.spec import Subnet
from stretto.train.run_folder import read_info

AIM = 1.5
DEFAULT_RUN = Path("runs/demo")
WARM_UP = 4
"""Prompts before the clock starts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=DEFAULT_RUN, help="a run with its data; default: the demo's")
    parser.add_argument("--draft", help="a preset to draft with; default: the engine chooses by measurement")
    parser.add_argument("--max-draft", type=int, default=4, help="most tokens drafted before a verification")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens made for each prompt")
    parser.add_argument("--threads", type=int, default=0, help="default: all cores")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    options = parser.parse_args()
    console = wide_console()
    if not (options.run / RUN_FILE).is_file():
        console.print(f"{options.run}: no trained run there: make one with `make demo`, or name another with --run")
        return
    if options.threads:
        torch.set_num_threads(options.threads)
    prompts = held_out(options.run, WARM_UP + options.prompts, options.prompt)
    compared = Compared(options, prompts)
    with progress("plain and drafted, in turn", 2 * len(prompts)) as advance:
        samples = measure(compared.steps(), options.prompts, advance, warm_up=WARM_UP)
    found = ratio(samples, "plain", "drafted")
    plain, drafted = compared.done["plain"], compared.done["drafted"]
    same = sum(mine.tokens == theirs.tokens for mine, theirs in zip(plain, drafted, strict=True))
    timed = drafted[WARM_UP:]
    num_drafted, num_accepted = (
        sum(getattr(done.usage, f"{kind}_tokens") for done in timed) for kind in ("drafted", "accepted")
    )
    shown = table(
        f"{options.run.name}: {len(timed)} prompts of {options.prompt} tokens, {options.tokens} tokens each, batch 1",
        *("", "drafted over plain", "aim"),
    )
    shown.add_row("speed, wall", times(found.wall), f"≥ {AIM:.2f}x")
    shown.add_row("speed, processor", times(found.processor), f"≥ {AIM:.2f}x")
    shown.add_row("drafts accepted", f"{num_accepted / num_drafted:.0%}" if num_drafted else "none drafted", "")
    shown.add_row("tokens drafted", f"{num_drafted:,} for {sum(len(done.tokens) for done in timed):,}", "")
    shown.add_row("same tokens", f"{same} of {len(plain)}", "all")
    shown.add_row("quiet rounds", f"{found.num_quiet} of {found.num_rounds}", "")
    console.print(shown)
    if same < len(plain):
        sys.exit(1)


class Compared:
    """The two engines and what they made."""

    def __init__(self, options: argparse.Namespace, prompts: list[tuple[int, ...]]):
        self.prompts = prompts
        self.num_tokens = options.tokens
        draft = self._draft(options)
        self.engines = {
            "plain": self._open(options, None),
            "drafted": self._open(options, SpeculateConfig(draft=draft, max_draft=options.max_draft)),
        }
        self.done: dict[str, list[Completion]] = {name: [] for name in self.engines}

    def steps(self) -> dict[str, Callable[[], None]]:
        """Each completes the next prompt with one of the engines."""
        return {name: self._step(name) for name in self.engines}

    def _step(self, name: str) -> Callable[[], None]:
        opened = self.engines[name]
        sampling = Sampling(temperature=0.0, max_tokens=self.num_tokens, ignore_eos=True)

        def step() -> None:
            number = len(self.done[name])
            request = Request(str(number), self.prompts[number], sampling, Phases(opened.config.full()))
            self.done[name] += opened.engine.generate([request])

        return step

    def _draft(self, options: argparse.Namespace) -> Subnet | None:
        if options.draft is None:
            return None
        opened = self._open(options, None)
        return read_presets(opened.folder)[options.draft].of(opened.config)

    def _open(self, options: argparse.Namespace, speculate: SpeculateConfig | None) -> OpenedEngine:
        config = EngineConfig(max_batch=1, prefix_cache=False, speculate=speculate)
        return open_engine(options.run, config, device=options.device, dtype=getattr(torch, options.dtype))


def held_out(run: Path, num: int, length: int) -> list[tuple[int, ...]]:
    """The first ``length`` tokens of ``num`` held-out documents, of all parts of the run's data in turn."""
    parts = read_info(run).data.open("val")
    found: list[tuple[int, ...]] = []
    for number in range(max(part.num_documents for part in parts)):
        for part in parts:
            if number < part.num_documents and len(part.document(number)) > length:
                found.append(tuple(part.document(number)[:length].tolist()))
        if len(found) >= num:
            break
    assert found, f"{run}: no held-out document has {length} tokens"
    return [found[index % len(found)] for index in range(num)]


if __name__ == "__main__":
    main()
