"""What knowing nothing scores: trivial policies through the verifiers that judge models, of all shipped suites.

    python -m bench.baselines [--suite gym,service,math=gsm8k.jsonl] [--problems 40] [--mutant]

No model is asked. Of each source so many problems are taken, and judged for them: an empty answer (of a session: doing nothing),
``0``, the most frequent right answer of other problems, one drawn from those, a call of every tool without arguments, the source's
own policies (every letter, always transferring); and as the control its right answers, which must all be accepted.
Exit code 1 where one is not, or where doing nothing scores more than ``--most`` on a suite whose answers are right or wrong. The mutant
is a verifier that accepts everything: it must end so. Suites that need a file (math, aime, mcq, gpqa, mmlu_pro) are asked where one
is named; ``--problems 1000`` is the long run.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import numpy as np
from rich.console import Console

from bench.common.measure import table
from stretto.base.config import read_tree
from stretto.base.trajectory import Outcome
from stretto.evals.scores import Interval, resampled, share_interval
from stretto.flow.clients import RewardRequest
from stretto.flow.launch import SourceTables
from stretto.flow.reward import RewardRole
from stretto.post.suite import SUITES, Domain, SuiteConfig, parse_suites, score_baselines
from stretto.tasks.task import Score, TaskSource

FIRST = 7 << 21
"""Of endless sources: beyond what anything here trains on."""
DONORS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--suite", action="append", default=[], help="as of stretto eval; default: all that need no file"
    )
    parser.add_argument("--problems", type=int, default=40, help="of each source")
    parser.add_argument("--most", type=float, default=0.05, help="that doing nothing may score")
    parser.add_argument("--mutant", action="store_true", help="a verifier that accepts everything")
    options = parser.parse_args()
    named = options.suite or [name for name, told in read_tree(SUITES).items() if "data" not in told]
    made, faults = table("Knowing nothing", "suite", "source", "answer", "score", "95 % range"), []
    for name, suite in parse_suites(named).items():
        for source, scores in asyncio.run(scored(suite, options)).items():
            for kind, (found, is_graded) in scores.items():
                made.add_row(name, source, kind, f"{found.value:.1%}", f"{found.low:.1%} … {found.high:.1%}")
                if not is_graded and (
                    (kind == "right" and found.value < 1) or (kind == "empty" and found.value > options.most)
                ):
                    faults.append(f"{source}: {kind} answers score {found.value:.1%}")
    console = Console()
    console.print(made)
    for fault in faults:
        console.print(f"FAILS: {fault}", style="red")
    sys.exit(1 if faults else 0)


async def scored(suite: SuiteConfig, options: argparse.Namespace) -> dict[str, dict[str, tuple[Interval, bool]]]:
    """By source and kind of answer: its score, and whether answers are better or worse there instead of right or wrong."""
    result = {}
    with SourceTables(suite.sources, suite.sandbox).opened() as sources:
        if options.mutant:
            for source in sources.values():
                source.score = lambda problem, answer: Score.of(True)  # type: ignore[method-assign]
        rewards = RewardRole(lambda: sources)
        for name, source in sources.items():
            domain = planned(source, options.problems)
            kinds = await score_baselines(name, domain, source, rewards, 0)
            if source.is_verifiable:
                answers = [source.right_answer(problem) for problem in domain.asked.values()]
                asked = [
                    RewardRequest(name, item, answer.text, answer.messages)
                    for item, answer in zip(domain.items, answers, strict=True)
                ]
                verdicts = await asyncio.gather(*map(rewards.score, asked))
                kinds["right"] = np.array([float(each.outcome is Outcome.OK) for each in verdicts])
            result[name] = {
                kind: (
                    share_interval(resampled({kind: values_P[None]})[kind][:, 0], len(values_P)),
                    domain.is_graded,
                )
                for kind, values_P in kinds.items()
            }
        await rewards.close()
    return result


def planned(source: TaskSource, num: int) -> Domain:
    size, num = source.num_items, num * source.variants
    items = range(FIRST, FIRST + num) if size is None else range(max(0, size - num), size)
    donors = range(items.stop, items.stop + DONORS) if size is None else range(min(DONORS, items.start))
    return Domain("", source, items, donors or items, {item: source.problem(item) for item in items}, {})


if __name__ == "__main__":
    main()
