"""What `recipes/writing.toml` does to a network that writes: quality by another judge, diversity, skills, length (figure 3 of writing).

    python -m bench.writing OUT --model CHECKPOINT --data BOOKS        again: goes on; books are JSONL with text and author
    python -m bench.writing OUT --model SMOLLM2 --data BOOKS --device cuda --set runtime.stop_s=260     long

Two local judges learn from other authors each (those of `bench.judge OUT` are taken where they are), one rewards, the other compares
the result with the start, which is to be a network that follows requests (SFT), on beginnings of books that neither judge nor run has
read. Both judges are the same method on the same network: what one likes the other may like for the same bad reason, which is why
diversity, length and skills stand beside it, and why the winner should be read.

Exits with 1 unless the result wins 60 % of battles, has 100 % of the start's distinct_k and Vendi, 98 % of its skills, and answers within
10 % of its length. ``--set rewards.writing.floor=1.0`` is the control that should lose diversity, ``--set train.steps=1`` the one that should win nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.common.measure import table, wide_console
from bench.common.server import in_thread
from stretto.api.evaluate import eval_command, options
from stretto.api.judge import train_command
from stretto.api.rl import online_command
from stretto.base.config import read_recipe
from stretto.base.endpoint import served_name
from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT, RECIPES, checkpoint_folder
from stretto.evals.ranker import JUDGE_FILE, open_judge, read_books, read_judge
from stretto.learning.recipe import RlRecipe
from stretto.model.checkpoint import read_config
from stretto.post.battle import battle
from stretto.post.panel import PANEL_FILE
from stretto.post.suite import read_evaluation, suites_of
from stretto.server.judge import judge_server
from stretto.text.passages import Part, passages

WON, DIVERSE, SKILLED, LENGTH = 0.60, 1.0, 0.98, 0.10
SIZES = {
    "cpu": {"passages": 64, "prompts": 64, "problems": 24},
    "cuda": {"passages": 600, "prompts": 400, "problems": 60},
}
SETTINGS = {
    "cpu": (),
    "cuda": (
        "rollout.max_batch=128", "rollout.page_size=16", "rollout.cache_bytes=4000000000", "rollout.chunk_tokens=256",
        "train.eval_every=1000", "train.snapshot_every=1000",
    ),
}  # fmt: skip
"""Of the recipe, by device; a step of 64 answers takes several seconds, and held-out ones are asked at the end."""


@contextmanager
def serving(judge: Path, port: int, device: str) -> Iterator[dict[str, Any]]:
    """The table of a recipe for the judge in that folder; who answers at this port by its name already is asked instead."""
    url, name = f"http://127.0.0.1:{port}/v1", read_judge(judge).name
    told = {"url": url, "model": name, "cache": str(judge.with_suffix(".said"))}
    if _serves(url, name):
        yield told
        return
    with in_thread(judge_server(open_judge(judge, device)), port):
        yield told


def _serves(url: str, name: str) -> bool:
    with suppress(UserError):
        return served_name(url) == name
    return False


def write_prompts(path: Path, books: Sequence[tuple[str, str]], part: Part, num: int) -> Path:
    """Beginnings of passages that are to be gone on with."""
    asked = [
        {"prompt": f"Write the next paragraph of this story:\n\n{each.prompt}", "reference": each.text}
        for each in passages(books, part, num, seed=1)
    ]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in asked))
    return path


def evaluated(told: argparse.Namespace, model: Path, name: str, judge: dict[str, Any], prompts: Path) -> Path:
    """The folder of an evaluation: open-ended answers by ``judge``, and skills."""
    sources = {
        "writing": {"kind": "judged", "args": {"path": str(prompts), "judge": judge, "rubric": ["It goes on well"]}},
        "briefs": {"kind": "briefs", "args": {"seed": 9}},
        "sums": {"kind": "arithmetic", "args": {"format": "line"}},
    }
    suite = {"sources": sources, "problems": told.problems, "max_tokens": told.max_tokens}
    out = told.out / f"eval-{name}"
    eval_command(
        model,
        suites_of({"suites": {"panel": suite}}),
        out,
        options(samples=told.samples, baselines=False, max_batch=512 if told.device != "cpu" else 64),
        device=told.device,
    )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--model", type=Path, required=True, help="the start; its hidden states are what the judges read, too"
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--passages", type=int, help="that each judge learns from (64, on a GPU 600)")
    parser.add_argument("--prompts", type=int, help="of the run (64, on a GPU 400)")
    parser.add_argument("--problems", type=int, help="held-out prompts, and problems of each skill (24, on a GPU 60)")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument(
        "--run", default="run", metavar="NAME", help="another way beside the first, with the same judges"
    )
    parser.add_argument("--start-only", action="store_true", help="evaluate the start, beside a run, say")
    parser.add_argument(
        "--ports", type=int, nargs=2, default=(8100, 8101), help="of the judges; served there already, they are asked"
    )
    parser.add_argument("--set", action="append", default=[], dest="settings", help="override a key of the recipe")
    parser.add_argument("--device", default="cpu")
    told = parser.parse_args()
    kind = told.device.partition(":")[0]
    for name, size in SIZES[kind].items():
        setattr(told, name, getattr(told, name) or size)
    dense = () if read_config(checkpoint_folder(told.model)).moe_layers else ("replay=off",)  # it has no routes
    told.out.mkdir(parents=True, exist_ok=True)
    books, run = read_books(told.data), told.out / told.run
    parts: tuple[Part, Part] = ("reward", "evaluation")
    for part in parts:
        if not (told.out / part / JUDGE_FILE).is_file():
            train_command(told.model, told.data, told.out / part, part, told.passages, device=told.device)
    if not (told.start_only or (run / CHECKPOINT).is_dir()):
        prompts = write_prompts(told.out / f"prompts-{told.run}.jsonl", books, "reward", told.prompts)
        with serving(told.out / "reward", told.ports[0], told.device) as judge:
            recipe = read_recipe(RECIPES / "writing.toml", RlRecipe, [*SETTINGS[kind], *dense, *told.settings])
            source = recipe.sources["writing"]
            mixed = {
                **recipe.sources,
                "writing": source.replace(args={**source.args, "path": str(prompts), "judge": judge}),
            }
            online_command(recipe.replace(sources=mixed), run, told.model, self_teacher=True, device=told.device)
    tried = write_prompts(told.out / "tried.jsonl", books, "held_out", told.problems)
    with serving(told.out / "evaluation", told.ports[1], told.device) as judge:
        pair = (("start", checkpoint_folder(told.model)), (told.run, run / CHECKPOINT))
        folders = [
            evaluated(told, model, name, judge, tried) for name, model in (pair[:1] if told.start_only else pair)
        ]
        sys.exit(0 if told.start_only else report(folders))


def report(folders: Sequence[Path]) -> bool:
    """Print the figure; whether an aim is missed. The judge is asked for battles."""
    start, result = (read_evaluation(folder) for folder in folders)
    won = battle([start, result], folders).rates[1][0]
    assert won is not None
    panels = [json.loads((folder / PANEL_FILE).read_text())[0]["measures"] for folder in folders]
    kept = {name: panels[1][name]["value"] / panels[0][name]["value"] for name in ("distinct_k", "vendi", "words")}
    skills = [sum(each.domains[name].score.value for name in ("briefs", "sums")) for each in (start, result)]
    rows = {
        "battles won": (won.value, won.value >= WON),
        "distinct_k kept": (kept["distinct_k"], kept["distinct_k"] >= DIVERSE),
        "Vendi kept": (kept["vendi"], kept["vendi"] >= DIVERSE),
        "skills kept": (
            skills[1] / skills[0] if skills[0] else float(skills[1] >= 0),
            skills[1] >= SKILLED * skills[0],
        ),
        "length": (kept["words"], abs(kept["words"] - 1) <= LENGTH),
    }
    shown = table(f"Figure 3: the result over the start, {won.low:.1%} to {won.high:.1%} of battles", *rows)
    shown.add_row(*(f"{value:.1%}{'' if is_met else '  MISSED'}" for value, is_met in rows.values()))
    wide_console().print(shown)
    return not all(is_met for _, is_met in rows.values())


if __name__ == "__main__":
    main()
