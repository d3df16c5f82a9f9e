"""`stretto judge`: train a local judge of writing, say how far to trust one, and serve it."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from hashlib import blake2b
from pathlib import Path

import rich
import torch
from torch import Tensor

from stretto.base.config import validate
from stretto.base.endpoint import served_name
from stretto.base.errors import UserError
from stretto.base.numbers import duration, percent
from stretto.base.paths import checkpoint_folder, remove, replacing
from stretto.base.track import progress, say
from stretto.evals.ranker import (
    FEATURES,
    JUDGE_FILE,
    SCOPE,
    JudgeRecord,
    Reader,
    features,
    open_judge,
    open_reader,
    read_books,
    save_judge,
    train_head,
)
from stretto.evals.scores import Interval
from stretto.model.parallel import join
from stretto.post.calibrate import Trust, calibrate, num_comparisons
from stretto.report.page import Cell, Table
from stretto.server.judge import judge_server
from stretto.server.server import open_socket
from stretto.tasks.judge import EndpointConfig, EndpointJudge, JudgeFailed
from stretto.tasks.task import Problem
from stretto.text.passages import Part, Passage, damaged, passages

_CHUNK = {"cpu": 8, "cuda": 64}
"""Passages whose states are kept in one file: what a kill costs."""
_FEWEST = 16
"""To learn from, or to be tried with."""
_CRITERION = {"criterion": "It continues the text well, and is whole and well written.", "points": 1}


def damaged_passages(
    books: Sequence[tuple[str, str]], part: Part, num: int, seed: int
) -> tuple[list[Passage], list[dict[str, str]]]:
    """Passages of ``part`` and their damages. Raises `UserError`: too few of them, or of one author alone."""
    found, least = passages(books, part, num, seed), min(num, _FEWEST)
    authors = {each.author for each in found}
    if len(found) < least or len(authors) < 2:
        raise UserError(
            f"--data: {len(found)} passages by {len(authors)} authors of the part {part!r}, of {least} and two at least; name more books"
        )
    return found, damaged(found, part, seed)


def passage_states(
    reader: Reader, books: Sequence[tuple[str, str]], part: Part, num: int, kept: Path, seed: int = 0
) -> tuple[list[Passage], list[dict[str, str]], Tensor]:
    """Passages of ``part``, their damages, and the features of all [1 + damages, N, S, F]; what the folder ``kept`` holds is not
    computed again. Raises `UserError`: as `damaged_passages`."""
    found, told = damaged_passages(books, part, num, seed)
    size, parts = _CHUNK[reader.device.type], []
    kept.mkdir(parents=True, exist_ok=True)
    with progress(f"states of passages, {part}", len(found)) as advance:
        for start in range(0, len(found), size):
            some = found[start : start + size], told[start : start + size]
            asked = blake2b(repr((FEATURES, reader.weights, some)).encode(), digest_size=8).hexdigest()
            path = kept / f"{part}-{asked}.pt"
            if not path.is_file():
                with replacing(path) as partial:
                    torch.save(features(reader, *some).half(), partial)
            parts.append(torch.load(path).float())
            advance(parts[-1].shape[1])
    return found, told, torch.cat(parts, 1)


def train_command(
    model: Path, data: Sequence[Path], out: Path, part: Part, num: int, seed: int = 0, device: str = "auto"
) -> JudgeRecord:
    """Train a judge on the states of ``model`` and write it to ``out``. Raises `UserError`: bad input."""
    if out.exists() and not (out / JUDGE_FILE).is_file():
        raise UserError(f"{out}: holds something else than a judge, which stays; name a new folder")
    reader = open_reader(checkpoint_folder(model), join(device).device)
    kept = out.with_name(f"{out.name}.states")
    found, _, read_KNSF = passage_states(reader, read_books(data), part, num, kept, seed)
    head = train_head(read_KNSF[0], read_KNSF[1:])
    record = save_judge(out, reader, head, part, seed, found, read_KNSF[0])
    remove(kept)
    said = f"{out}: judge {record.name}, of {len(found)} passages by {len(record.authors)} authors"
    sys.stdout.write(f"{said}\nA local judge {SCOPE}.\nnext: stretto judge calibrate {out}\n")
    return record


def calibrate_command(
    judge: str, data: Sequence[Path], num: int, name: str | None = None, seed: int = 0, device: str = "auto"
) -> Trust:
    """Print how far to trust ``judge``, a folder or an address, where it is asked about authors that no local judge has learnt from.
    Raises `UserError`: bad input, or a judge that does not answer."""
    found, damages = damaged_passages(read_books(data), "held_out", num, seed)
    if judge.startswith(("http://", "https://")):
        with tempfile.TemporaryDirectory() as folder:  # what is asked for here is not to be had from an earlier time
            told = {"url": judge, "model": name or served_name(judge), "cache": str(Path(folder) / "said")}
            config = validate(EndpointConfig, told, judge)
            with closing(EndpointJudge(config, "calibrate")) as asked:

                def prefer(prompt: str, first: str, second: str) -> float:
                    problem = Problem(0, ({"role": "user", "content": prompt},), "", {"rubric": [_CRITERION]})
                    return asked.prefer(problem, first, second, time.monotonic() + config.verdict_s)

                _announce(prefer, found, config.at_once)
                trust = calibrate(prefer, found, damages, config.at_once)
    else:
        first_wins = open_judge(Path(judge), join(device).device).first_wins
        _announce(first_wins, found)
        trust = calibrate(first_wins, found, damages)
    rich.print(trust_table(trust, judge))
    return trust


def _announce(prefer: Callable[[str, str, str], float], found: Sequence[Passage], at_once: int = 1) -> None:
    """Print the expected time of `calibrate`, from one comparison."""
    start_s = time.perf_counter()
    with suppress(JudgeFailed):  # counted by `calibrate`
        prefer(found[0].prompt, found[0].text, found[0].text)
        num = num_comparisons(len(found))
        say(f"{num:,} comparisons, about {duration((time.perf_counter() - start_s) * num / at_once)}")


def trust_table(trust: Trust, judge: str) -> Table:
    """A row for each thing that a fair judge does."""

    def row(what: str, found: Interval, should: str) -> tuple[Cell, ...]:
        return (
            Cell(what),
            Cell(percent(found.value), found.value, f"{percent(found.low)} … {percent(found.high)}"),
            Cell(should),
        )

    rows = [row(f"whole against {name}", each, "high") for name, each in trust.damages.items()]
    rows += [row(f"{name} against itself", each, "half") for name, each in trust.layouts.items()]
    rows += [
        row("longer against its first half", trust.longer, ""),
        row("itself", trust.itself, "half"),
        row("shown first", trust.position, "half"),
    ]
    note = f"It contradicted itself in {percent(trust.contradicted)} of pairs; {trust.num_infra} comparisons were not made. "
    note += "Detection of damage says nothing about agreement with readers: bench/rated_stories.py measures that."
    return Table(f"How far to trust {judge}", ("What", "Wins", "A fair judge"), tuple(rows), (), note)


def serve_command(judge: Path, host: str, port: int, device: str = "auto") -> None:
    """Serve a local judge until it is told to stop. Raises `UserError`: as `open_judge`, or the port is taken."""
    listening = open_socket(host, port)
    opened = open_judge(judge, join(device).device)
    url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/v1"
    table = f'judge = {{ url = "{url}", model = "{opened.record.name}" }}'
    sys.stdout.write(f"judge serving at {url}\n{table}\nA local judge {SCOPE}.\n")
    sys.stdout.flush()
    judge_server(opened).run(sockets=[listening])
