"""``kill -9`` of random roles and whole jobs of RL runs: trained samples, tokens and final weights beside an uninterrupted run.

    python -m bench.kill_roles [--kills 50] [--kills-a-run 10] [--kinds engine agent reward trainer job] [--seed 0]

A tiny network learns to sort digits, with engines, agents, verifiers and a trainer in processes of their own (`bench.common.killing`).
Runs of one recipe are killed at random moments: an engine, an agent, a verifier, the trainer, or the job, which is resumed at once, while
its children may still run. With a staleness of 0 and operators that do not depend on the batch, every token of every sample and the bits
of the final weights must equal those of the uninterrupted run. Fails (exit code 1) if a sample is lost, trained twice or different, if
the bits differ, or if a killed job leaves a process behind.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

from bench.common.killing import GROUP, HEAD, PROMPTS, RECIPE, STEPS, Kill, Killed
from bench.common.measure import bench_parser, finish, table
from bench.common.run_account import Account, checksum, num_other
from stretto.base.track import progress, wide_console

KINDS = ("engine", "agent", "reward", "trainer", "job")


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kills-a-run", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="processes to kill, in equal shares")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random processes and moments")
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: a temporary one")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    kinds = [options.kinds[number % len(options.kinds)] for number in range(options.kills)]
    rng.shuffle(kinds)
    with tempfile.TemporaryDirectory() as temporary, progress("kills", options.kills) as advance:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        recipe = folder / "recipe.toml"
        recipe.write_text(HEAD + RECIPE)
        whole = Killed(recipe, Account(folder / "whole", folder / "whole-groups"), rng)
        whole.finish([])
        runs: list[Killed] = []
        while kinds:
            run = folder / f"killed-{len(runs)}"
            shutil.copytree(folder / "whole" / "sft", run / "sft")
            runs.append(Killed(recipe, Account(run, folder / f"{run.name}-groups"), rng))
            runs[-1].finish(kinds[: options.kills_a_run])
            num = len(runs[-1].kills)
            kinds = kinds[num:]
            advance(num, f"{run.name}: {num} kills")
        failures = report(whole, runs)
    finish(failures)


def report(whole: Killed, runs: list[Killed]) -> list[str]:
    """Print both tables; returns the aims that were missed."""
    kills = [kill for run in runs for kill in run.kills]
    shown = table(
        f"kill -9: {len(kills)} kills in {len(runs)} runs of {STEPS} steps",
        "killed",
        "times",
        "median s to next step",
        "longest",
    )
    by_kind: dict[str, list[Kill]] = defaultdict(list)
    for kill in kills:
        by_kind[kill.kind].append(kill)
    for kind, some in by_kind.items():
        waits = sorted(kill.recovered_s for kill in some if kill.recovered_s is not None) or [float("nan")]
        shown.add_row(kind, str(len(some)), f"{waits[len(waits) // 2]:.1f}", f"{waits[-1]:.1f}")
    wide_console().print(shown)
    expected, times = whole.account.samples()
    assert set(times.values()) == {1} and len(times) == STEPS * PROMPTS * GROUP, (
        "the uninterrupted run lost or repeated samples"
    )
    found = [run.account.samples() for run in runs]
    bits = [checksum(run.account.run) for run in (whole, *runs)]
    aims = {
        "samples lost": sum(sum((times - trained).values()) for _, trained in found),
        "samples trained twice": sum(sum((trained - times).values()) for _, trained in found),
        "samples with other tokens": sum(num_other(expected, samples) for samples, _ in found),
        "runs whose final weights differ": sum(name != bits[0] for name in bits),
        "processes left by killed jobs": sum(kill.num_orphans for kill in kills),
    }
    summary = table("against the uninterrupted run", "", "measured", "aim")
    for name, num in aims.items():
        summary.add_row(name, str(num), "0")
    summary.add_row("steps repeated", str(sum(run.account.num_rolled_back() for run in runs)), "")
    wide_console().print(summary)
    return [f"{num} {name}" for name, num in aims.items() if num]


if __name__ == "__main__":
    main()
