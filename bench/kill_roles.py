"""``kill -9`` of random roles and whole jobs of RL runs: the trained samples against those of an uninterrupted run.

    python -m bench.kill_roles [--kills N] [--kills-a-run N] [--seed S] [--exact] [--forget]

A tiny network learns to sort digits, with engines, agents, verifiers and a trainer in processes of their own. Runs of one recipe are
killed at random moments: an engine, an agent, a verifier, the trainer, the job (resumed at once, while its children may still run),
or any process of the job, also while roles start. Afterwards the journal and the files of the groups show which samples were trained.

Lengths are compared sample by sample: all runs draw each sample from one seed, under weights that hardly change. ``--forget``
replaces the agents by ones that start a sample in flight anew when they resume a group (`Forgetful`). Samples in flight are mostly
long ones, so answers become shorter, and the comparison of lengths must fail.

``--exact`` sets staleness 0 and operators that do not depend on the batch. Then every token of every sample and the bits of the
final weights must equal those of the uninterrupted run.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.killing import GROUP, KINDS, PROMPTS, RECIPE, STEPS, Kill, Killed
from bench.common.measure import table, wide_console
from bench.common.run_account import Account, Key, is_kept, paired_difference, sampled
from stretto.base.track import progress
from stretto.base.trajectory import Task, Trajectory
from stretto.flow import agent
from stretto.learning.samples import Sample, open_samples, remove_logs
from stretto.runtime.store import Store
from stretto.tasks.strings import StringsSource

FORGETFUL = "bench.kill_roles:Forgetful"
_seed = agent._seed


class Forgetful(StringsSource):
    """The problems of `StringsSource`. The agent process that opens this source resumes only finished samples of a group; it samples
    the others anew, from another seed in each attempt."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        agent.open_samples, agent._seed = _finished_only, _seed_of_attempt


def _finished_only(store: Store, task: Task, attempt: int) -> tuple[Sample, ...]:
    before = open_samples(store, task, attempt)
    remove_logs(store, task.ordinal)
    samples = open_samples(store, task, attempt)
    for old, new in zip(before, samples, strict=True):
        if old.verdict is not None:
            for part in old.parts:
                new.append(part)
            new.close(old.finish_reason, old.verdict)
    return samples


def _seed_of_attempt(sample: Sample) -> int:
    return _seed(sample) ^ sample.attempt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kills-a-run", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random processes and moments")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of process to kill, in equal shares"
    )
    parser.add_argument("--exact", action="store_true", help="staleness 0: compare tokens and weights")
    parser.add_argument("--forget", action="store_true", help="agents that ignore samples in flight: must fail")
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        good = _compare(options, folder, random.Random(options.seed))
    raise SystemExit(0 if good else 1)


def _compare(options: argparse.Namespace, folder: Path, rng: random.Random) -> bool:
    recipe = folder / "recipe.toml"
    head = "staleness = 0\nprecision = { batch_invariant = true }\n" if options.exact else "staleness = 2\n"
    # without --exact weights hardly change, since other weights would give other lengths; with it, weights must differ by step
    text = RECIPE if options.exact else RECIPE.replace("lr = 3e-5", "lr = 1e-7")
    recipe.write_text(head + (text.replace('"strings"', f'"{FORGETFUL}"') if options.forget else text))
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
    assert set(times.values()) == {1} and len(times) == STEPS * PROMPTS * GROUP, (
        "the uninterrupted run lost or repeated samples"
    )
    lost = twice = 0
    samples_of: list[dict[Key, Trajectory]] = []
    for run in runs:
        samples, trained = run.account.samples()
        samples_of.append(samples)
        lost += sum((times - trained).values())
        twice += sum((trained - times).values())
        for kill, before in zip(run.kills, run.logs, strict=True):
            kill.num_lost = sum(len(each) for key, each in before.items() if not is_kept(each, samples[key]))
    kills = [kill for run in runs for kill in run.kills]
    lengths = {key: len(sampled(each.segments)) for key, each in expected.items()}
    # mean over runs for each sample, since all of its differences share the length in the uninterrupted run
    longer = [
        np.mean([len(sampled(samples[key].segments)) - length for samples in samples_of if key in samples])
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
        f"tokens per sample, beside {np.mean([*lengths.values()]):.1f}", f"{difference:+.2f}, p {p:.2g}", "p > 0.01"
    )
    summary.add_row("tokens in flight lost", f"{cut:,} of {sum(kill.num_tokens for kill in kills):,}", "0")
    summary.add_row("processes left by killed jobs", str(orphans), "0")
    summary.add_row("steps repeated", str(sum(run.account.num_rolled_back() for run in runs)), "")
    good = lost == twice == orphans == cut == 0 and p > 0.01
    if exact:
        same = all(_same_tokens(expected, samples) for samples in samples_of)
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


def _same_tokens(expected: dict[Key, Trajectory], samples: dict[Key, Trajectory]) -> bool:
    return expected.keys() == samples.keys() and all(
        np.array_equal(sampled(each.segments), sampled(samples[key].segments))
        and all(np.array_equal(a.tokens, b.tokens) for a, b in zip(each.segments, samples[key].segments, strict=True))
        for key, each in expected.items()
    )


def _weights(run: Killed) -> str:
    """Name of the last version's file, which contains its checksum."""
    return max(path.name for path in (run.account.run / "weights").glob("weights-*"))


if __name__ == "__main__":
    main()
