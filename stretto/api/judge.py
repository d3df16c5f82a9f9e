"""`stretto judge`: training, calibration and serving of local judges, which detect damaged text or predict readers' ratings."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from stretto.base.config import validate, validate_options
from stretto.base.endpoint import served_name
from stretto.base.errors import UserError
from stretto.base.numbers import counted, duration, percent
from stretto.base.paths import checkpoint_folder, quoted, remove, replacing
from stretto.base.table import Cell, Table
from stretto.base.track import progress, say, wide_console
from stretto.evals.ranker import (
    FEATURES,
    JUDGE_FILE,
    JudgeRecord,
    Reader,
    features,
    open_judge,
    open_reader,
    read_books,
    save_judge,
    save_rating_judge,
    train_head,
)
from stretto.evals.rated import measure_ratings, read_rated, signed, train_rating_head
from stretto.evals.scores import Interval
from stretto.model.parallel import join
from stretto.post.calibrate import Trust, calibrate, num_comparisons
from stretto.server.judge import judge_server
from stretto.server.server import ServeSettings, open_socket
from stretto.tasks.judge import EndpointConfig, EndpointJudge, JudgeFailed
from stretto.tasks.task import Problem
from stretto.text.passages import Part, Passage, damaged, passages

_CHUNK = {"cpu": 8, "cuda": 64}
"""Passages whose features are stored in one file. A killed process loses at most one file."""
_MIN_PASSAGES = 16
"""Smallest number of passages for training or calibration."""
_CRITERION = {"criterion": "It continues the text well, and is whole and well written.", "points": 1}


def damaged_passages(
    books: Sequence[tuple[str, str]], part: Part, num: int, seed: int
) -> tuple[list[Passage], list[dict[str, str]]]:
    """Passages of ``part`` and their damaged copies. Raises `UserError`: too few passages, or all by one author."""
    originals, least = passages(books, part, num, seed), min(num, _MIN_PASSAGES)
    authors = {passage.author for passage in originals}
    if len(originals) < least or len(authors) < 2:
        found = f"{counted(len(originals), 'passage')} by {counted(len(authors), 'author')} of the part {part!r}"
        raise UserError(
            f"--data: {found}; at least {counted(least, 'passage')} by two authors are needed; name more books"
        )
    return originals, damaged(originals, part, seed)


def passage_states(
    reader: Reader, books: Sequence[tuple[str, str]], part: Part, num: int, kept: Path, seed: int = 0
) -> tuple[list[Passage], list[dict[str, str]], Tensor]:
    """Passages of ``part``, their damaged copies, and the features of all of them, [1 + damages, N, S, F]. Features in the folder ``kept``
    are not computed again. Raises `UserError` as `damaged_passages`.
    """
    originals, copies = damaged_passages(books, part, num, seed)
    size, parts = _CHUNK[reader.device.type], []
    kept.mkdir(parents=True, exist_ok=True)
    with progress(f"states of passages, {part}", len(originals)) as advance:
        for start in range(0, len(originals), size):
            chunk = originals[start : start + size], copies[start : start + size]
            key = blake2b(repr((FEATURES, reader.weights, chunk)).encode(), digest_size=8).hexdigest()
            path = kept / f"{part}-{key}.pt"
            if not path.is_file():
                with replacing(path) as partial:
                    torch.save(features(reader, *chunk).half(), partial)
            parts.append(torch.load(path).float())
            advance(parts[-1].shape[1])
    return originals, copies, torch.cat(parts, 1)


def train_command(
    model: Path, data: Sequence[Path], out: Path, part: Part, num: int, seed: int = 0, device: str = "auto"
) -> JudgeRecord:
    """Train a judge on the hidden states of ``model`` and write it to ``out``. Raises `UserError`: bad input."""
    _check_new(out)
    reader = open_reader(checkpoint_folder(model), join(device).device)
    kept = out.with_name(f"{out.name}.states")
    originals, _, read_KNSF = passage_states(reader, read_books(data), part, num, kept, seed)
    head = train_head(read_KNSF[0], read_KNSF[1:])
    record = save_judge(out, reader, head, part, seed, originals, read_KNSF[0])
    remove(kept)
    summary = f"{out}: judge {record.name}, of {len(originals)} passages by {len(record.authors)} authors"
    sys.stdout.write(f"{summary}\nA local judge {record.scope}.\nnext: stretto judge calibrate {quoted(out)}\n")
    return record


def train_on_ratings(model: Path, rated: Path, out: Path, part: Part, device: str = "auto") -> JudgeRecord:
    """Train a judge on readers' ratings and the mean hidden states of ``model``, and write it to ``out``. Raises `UserError`: bad input."""
    _check_new(out)
    texts = read_rated(rated)
    reader = open_reader(checkpoint_folder(model), join(device).device)
    size, states = _CHUNK[reader.device.type], []
    with progress("states of rated texts", len(texts)) as advance:
        for start in range(0, len(texts), size):
            states.append(reader.mean_states([each.text for each in texts[start : start + size]]))
            advance(len(states[-1]))
    states_ND = torch.cat(states)
    ratings = measure_ratings(rated, texts, states_ND)
    head = train_rating_head(states_ND, torch.tensor([each.rating for each in texts]))
    record = save_rating_judge(out, reader, head, part, texts, states_ND, ratings)
    above = f"above the number of words by {signed(ratings.above_words)}, above the zlib ratio by {signed(ratings.above_zlib)}"
    summary = (
        f"{out}: judge {record.name}, of {ratings.num_texts} rated texts by {ratings.num_authors} authors; {above}"
    )
    sys.stdout.write(f"{summary}\nThis judge {record.scope}.\nnext: stretto judge serve {quoted(out)}\n")
    return record


def _check_new(out: Path) -> None:
    if out.exists() and not (out / JUDGE_FILE).is_file():
        raise UserError(f"{out}: holds something else than a judge, which stays; name a new folder")


def calibrate_command(
    judge: str, data: Sequence[Path], num: int, name: str | None = None, seed: int = 0, device: str = "auto"
) -> Trust:
    """Print the reliability of ``judge``, a folder or a URL, on authors that no local judge was trained on.

    Raises `UserError`: bad input, or the judge does not answer.
    """

    def read() -> tuple[list[Passage], list[dict[str, str]]]:  # after the judge was found
        return damaged_passages(read_books(data), "held_out", num, seed)

    if judge.startswith(("http://", "https://")):
        with tempfile.TemporaryDirectory() as folder:  # an empty cache, so that every comparison is made now
            settings = {"url": judge, "model": name or served_name(judge), "cache": str(Path(folder) / "cache")}
            config = validate(EndpointConfig, settings, judge)
            with closing(EndpointJudge(config, "calibrate")) as endpoint:
                originals, copies = read()

                def prefer(prompt: str, first: str, second: str) -> float:
                    problem = Problem(0, ({"role": "user", "content": prompt},), "", {"rubric": [_CRITERION]})
                    return endpoint.prefer(problem, first, second, time.monotonic() + config.verdict_s)

                _announce(prefer, originals, config.at_once)
                trust = calibrate(prefer, originals, copies, config.at_once)
    else:
        first_wins = open_judge(Path(judge), join(device).device).first_wins
        originals, copies = read()
        _announce(first_wins, originals)
        trust = calibrate(first_wins, originals, copies)
    wide_console().print(trust_table(trust, judge))
    return trust


def _announce(prefer: Callable[[str, str, str], float], originals: Sequence[Passage], at_once: int = 1) -> None:
    """Print the expected time of `calibrate`, from one comparison after a warm-up."""
    num = num_comparisons(len(originals))
    with suppress(JudgeFailed):  # counted by `calibrate`
        for passage in (originals[0], originals[-1]):  # the first one warms up
            start_s = time.perf_counter()
            prefer(passage.prompt, passage.text, passage.text)
        say(f"{num:,} comparisons, about {duration((time.perf_counter() - start_s) * num / at_once)}")


def trust_table(trust: Trust, judge: str) -> Table:
    """One row per measure, beside the value of an unbiased judge."""

    def row(pair: str, wins: Interval, unbiased: str) -> tuple[Cell, ...]:
        share = Cell(percent(wins.value), wins.value, f"{percent(wins.low)} … {percent(wins.high)}")
        return Cell(pair), share, Cell(unbiased)

    rows = [row(f"whole against {name}", wins, "high") for name, wins in trust.damages.items()]
    rows += [row(f"{name} against itself", wins, "half") for name, wins in trust.layouts.items()]
    rows += [
        row("longer against its first half", trust.longer, ""),
        row("itself", trust.itself, "half"),
        row("shown first", trust.position, "half"),
    ]
    note = f"Contradictory verdicts in the two orders: {percent(trust.contradicted)} of pairs. Comparisons without a verdict: {trust.num_infra}. "
    note += "Detection of damage says nothing about agreement with readers: bench/rated_stories.py measures that."
    return Table(f"Reliability of {judge}", ("Pair", "Wins of the first", "Unbiased judge"), tuple(rows), (), note)


def serve_command(judge: Path, host: str, port: int, allowed_hosts: Sequence[str] = (), device: str = "auto") -> None:
    """Serve a local judge until the process is stopped. Raises `UserError` as `open_judge`, or if the port is taken."""
    fields = {"host": host, "port": port, "allowed_hosts": allowed_hosts}
    settings = validate_options(ServeSettings, fields, {"allowed_hosts": "--allowed-host"})
    listening = open_socket(host, port)
    opened = open_judge(judge, join(device).device)
    url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/v1"
    table = f'judge = {{ url = "{url}", model = "{opened.record.name}" }}'
    sys.stdout.write(f"judge serving at {url}\n{table}\nThis judge {opened.record.scope}.\n")
    sys.stdout.flush()
    if settings.exposure():
        problem = "every machine that reaches this port can use the judge, which takes no API key"
        sys.stderr.write(f"stretto: warning: --host {host}: {problem}; use a private network\n")
    judge_server(opened, settings).run(sockets=[listening])
