"""``kill -9`` of random roles, and of whole jobs: what is trained, against an uninterrupted run (figure of the RL system).

    python -m bench.kill_roles [--kills N] [--kills-a-run N] [--seed S] [--exact] [--forget]

A tiny network learns to sort digits, on engines, agents, verifiers and a trainer that are processes of their own. Runs of
the same recipe are killed at random points: an engine, an agent, a verifier, the trainer, the job (continued with
``--resume`` at once, whether its children have noticed or not), or any of its processes at a random moment, also while
roles are being started. Then the journal and the groups' files say what was trained.

Lengths are compared sample by sample: all runs draw each from one seed, under weights that hardly move. ``--forget`` makes
mutants of the agents (`bench.common.forgetful`): samples that were in flight when one dies begin anew. Those are the long ones,
so that answers get shorter, which the lengths must show.

``--exact`` makes staleness 0 and the operators independent of the batch: then every token of every sample must be that of
the uninterrupted run, and the final weights its bits.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from bench.common.killing import GROUP, KINDS, PROMPTS, RECIPE, STEPS, Kill, Killed
from bench.common.measure import table, wide_console
from bench.common.run_account import Account, Key, is_kept, paired_difference, sampled
from stretto.base.track import progress
from stretto.base.trajectory import Trajectory

FORGETFUL = "bench.common.forgetful:Forgetful"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kills-a-run", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="chooses victims and moments")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what to kill, in equal shares")
    parser.add_argument("--exact", action="store_true", help="staleness 0: compare tokens and weights")
    parser.add_argument("--forget", action="store_true", help="agents forget their logs: must fail")
    parser.add_argument("--keep", type=Path, help="work here, and leave it there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        good = _compare(options, folder, random.Random(options.seed))
    raise SystemExit(0 if good else 1)


def _compare(options: argparse.Namespace, folder: Path, rng: random.Random) -> bool:
    recipe = folder / "recipe.toml"
    head = "staleness = 0\nprecision = { batch_invariant = true }\n" if options.exact else "staleness = 2\n"
    # weights that hardly move, or versions would have lengths of their own; those of --exact are to be told apart
    told = RECIPE if options.exact else RECIPE.replace("lr = 3e-5", "lr = 1e-7")
    recipe.write_text(head + (told.replace('"strings"', f'"{FORGETFUL}"') if options.forget else told))
    kinds = [options.kinds[number % len(options.kinds)] for number in range(options.kills)]
    rng.shuffle(kinds)
    with progress("kills", options.kills) as advance:
        whole = Killed(recipe, Account(folder / "whole", folder / "whole-groups"), rng)
        whole.finish([])
        runs: list[Killed] = []
        while kinds:
            name = f"killed-{len(runs)}"
            (folder / name).mkdir()
            shutil.copytree(folder / "whole" / "sft", folder / name / "sft")
            runs.append(Killed(recipe, Account(folder / name, folder / f"{name}-groups"), rng))
            runs[-1].finish(kinds[: options.kills_a_run])
            num = len(runs[-1].kills)
            kinds = kinds[num:]
            advance(num, f"{name}: {num} kills")
    return _report(whole, runs, options.exact)


def _report(whole: Killed, runs: list[Killed], exact: bool) -> bool:
    expected, times = whole.account.samples()
    assert set(times.values()) == {1} and len(times) == STEPS * PROMPTS * GROUP, "the uninterrupted run is none"
    lost = twice = 0
    found: list[dict[Key, Trajectory]] = []
    for run in runs:
        samples, trained = run.account.samples()
        found.append(samples)
        lost += sum((times - trained).values())
        twice += sum((trained - times).values())
        for kill, before in zip(run.kills, run.logs, strict=True):
            kill.num_lost = sum(len(each) for key, each in before.items() if not is_kept(each, samples[key]))
    kills = [kill for run in runs for kill in run.kills]
    lengths = {key: len(sampled(each.segments)) for key, each in expected.items()}
    # of one sample the mean over runs: what made the uninterrupted one's long or short is in each of their differences
    longer = [
        np.mean([len(sampled(samples[key].segments)) - length for samples in found if key in samples])
        for key, length in lengths.items()
    ]
    difference, p = paired_difference(longer)
    console = wide_console()
    console.print(_by_kind(kills, f"kill -9: {len(kills)} kills in {len(runs)} runs of {STEPS} steps"))
    summary = table("against the uninterrupted run", "", "measured", "aim")
    orphans, cut = sum(kill.num_orphans for kill in kills), sum(kill.num_lost for kill in kills)
    summary.add_row("samples lost", str(lost), "0")
    summary.add_row("samples trained twice", str(twice), "0")
    summary.add_row(
        f"tokens a sample, against {np.mean([*lengths.values()]):.1f}", f"{difference:+.2f}, p {p:.2g}", "p > 0.01"
    )
    summary.add_row("tokens in flight lost", f"{cut:,} of {sum(kill.num_tokens for kill in kills):,}", "0")
    summary.add_row("processes left of killed jobs", str(orphans), "0")
    summary.add_row("steps made again", str(sum(run.account.num_rolled_back() for run in runs)), "")
    good = lost == twice == orphans == cut == 0 and p > 0.01
    if exact:
        same = all(_same_tokens(expected, samples) for samples in found)
        bits = {_weights(run) for run in (whole, *runs)}
        summary.add_row("every token and log-probability equal", "yes" if same else "no", "yes")
        summary.add_row("final weights bitwise equal", "yes" if len(bits) == 1 else "no", "yes")
        good = good and same and len(bits) == 1
    console.print(summary)
    return good


def _by_kind(kills: list[Kill], title: str) -> object:
    shown = table(title, "killed", "times", "median s to next step", "longest", "tokens in flight", "lost")
    groups: dict[str, list[Kill]] = defaultdict(list)
    for kill in kills:
        groups[kill.kind].append(kill)
    for kind in (kind for kind in KINDS if kind in groups):
        some = groups[kind]
        waits = sorted(kill.recovered_s for kill in some if kill.recovered_s is not None)
        names = Counter(kill.name.rstrip("0123456789").rstrip("-") for kill in some) if kind == "any" else {}
        detail = f" ({', '.join(f'{num} {name}' for name, num in sorted(names.items()))})" if names else ""
        shown.add_row(
            kind + detail,
            str(len(some)),
            f"{waits[len(waits) // 2]:.1f}" if waits else "–",
            f"{waits[-1]:.1f}" if waits else "–",
            f"{sum(kill.num_tokens for kill in some):,}",
            f"{sum(kill.num_lost for kill in some):,}",
        )
    return shown


def _same_tokens(expected: dict[Key, Trajectory], found: dict[Key, Trajectory]) -> bool:
    return expected.keys() == found.keys() and all(
        np.array_equal(sampled(each.segments), sampled(found[key].segments))
        and all(np.array_equal(a.tokens, b.tokens) for a, b in zip(each.segments, found[key].segments, strict=True))
        for key, each in expected.items()
    )


def _weights(run: Killed) -> str:
    """Name of the last version, which holds its checksum."""
    return max(path.name for path in (run.account.run / "weights").glob("weights-*"))


if __name__ == "__main__":
    main()
