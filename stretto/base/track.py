"""What a run shows while it runs: progress bars, one console line an interval, metrics on disk and in TensorBoard.

``metrics.jsonl`` in the run folder is the record that the report reads: one JSON object a line, ``step`` and scalars.
It is the one file that is appended to instead of replaced, so a kill can tear its last line; readers drop that line.
"""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Protocol, Self

import rich
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stretto.base.errors import UserError
from stretto.base.numbers import short
from stretto.base.paths import remove, write_text, writing

METRICS_FILE = "metrics.jsonl"
PAUSES_S = (5.0, 10.0, 20.0, 30.0)
"""Between the lines of `progress` where the output is no terminal; the last one again and again. Half a minute is as long as
people and CI wait for a sign of life."""


class Advance(Protocol):
    """Moves a progress bar on; fits wherever ``Callable[[int], None]`` is asked for."""

    def __call__(self, num: int = 1, status: str | None = None, /) -> None: ...


@contextmanager
def progress(
    description: str, total: int | None = None, console: Console | None = None, pauses_s: Sequence[float] = PAUSES_S
) -> Iterator[Advance]:
    """Show a bar for ``total`` units of work (None: unknown) and yield the function that advances it.

    ``advance(num, status)`` may be called from any thread; ``status`` is a short text behind the bar. Bars may nest.
    Where the output is no terminal (CI, a pipe), lines are printed instead: at the start, at the end, and with ``pauses_s``
    between them, whether or not anything advances.
    """
    console = console or rich.get_console()
    start = time.perf_counter()
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}", markup=False),  # whose brackets are a model's, or a path's
        )
        with Progress(*columns, console=console) as bars:
            task = bars.add_task(description, total=total, status="")

            def advance(num: int = 1, status: str | None = None, /) -> None:
                if status is None:
                    bars.advance(task, num)
                else:
                    bars.update(task, advance=num, status=status)

            yield advance
            return
    done, doing, ending = 0, "", "stopped"
    of = "" if total is None else f" of {total:,}"

    def count(num: int = 1, status: str | None = None, /) -> None:
        nonlocal done, doing
        done += num
        doing = doing if status is None else f", {status}"

    def tell(what: str) -> None:
        _say(console, f"{description}: {what}{done:,}{of} in {time.perf_counter() - start:.1f} s{doing}")

    _say(console, f"{description} …")
    with _ticking(lambda: tell(""), pauses_s):
        try:
            yield count
            ending = "done"
        finally:
            doing = ""
            tell(f"{ending}, ")


@contextmanager
def _ticking(tell: Callable[[], None], pauses_s: Sequence[float]) -> Iterator[None]:
    """Call ``tell`` after each of ``pauses_s``, and then whenever the last of them is over, from a thread of its own."""
    ended = threading.Event()

    def tick() -> None:
        for pause_s in chain(pauses_s, repeat(pauses_s[-1])):
            if ended.wait(pause_s):
                return
            tell()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Tracker:
    """Writes a run's scalars to ``metrics.jsonl``, TensorBoard and, if asked for, W&B; prints one line an interval.

    Use it as a context manager. Only rank 0 has one.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        first_step: int = 0,
        tensorboard: bool = True,
        wandb_project: str | None = None,
        config: Mapping[str, Any] | None = None,
        console: Console | None = None,
    ) -> None:
        """Open the sinks in the run folder ``folder``, made if need be, and in the W&B project, shown with ``config``.

        What an interrupted attempt logged at ``first_step`` or later is dropped; 0 starts afresh.

        Raises:
            UserError: W&B was asked for and is not installed, or an earlier ``metrics.jsonl`` is damaged.
        """
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._console = console or rich.get_console()
        self._wandb = _open_wandb(wandb_project, self.folder, first_step, config) if wandb_project else None
        path = self.folder / METRICS_FILE
        kept = [row for row in _read_rows(path) if row["step"] < first_step] if first_step and path.exists() else []
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard: Any = None
        if tensorboard:
            # Late: base must import in a fraction of a second, without torch.
            from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined]

            if not first_step:
                remove(self.folder / "tensorboard")
            self._tensorboard = SummaryWriter(str(self.folder / "tensorboard"), purge_step=first_step or None)

    def log(self, step: int, scalars: Mapping[str, float], line: bool = True) -> None:
        """Write the scalars of ``step``; print them if ``line``.

        Names are paths (``loss/full``); TensorBoard groups by the first part. A value that is not finite becomes null
        in ``metrics.jsonl``, because NaN is not JSON.
        """
        values = {name: float(value) for name, value in scalars.items()}
        row = {"step": step, **{name: value if math.isfinite(value) else None for name, value in values.items()}}
        with writing(self.folder):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            if self._tensorboard is not None:
                self._tensorboard.file_writer.add_summary(_summary(values), step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)
        if line:
            shown = "  ".join(f"{name} {short(value, digits=4)}" for name, value in scalars.items())
            self.say(f"step {step:>6,}  {shown}")

    def say(self, text: str) -> None:
        """Print one plain line, above any progress bar."""
        _say(self._console, text)

    def close(self) -> None:
        with writing(self.folder):
            self._file.close()
            if self._tensorboard is not None:
                self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with suppress(*(() if error is None else (UserError,))):  # what came first is to be heard
            self.close()


def read_metrics(folder: Path | str) -> list[dict[str, float]]:
    """Rows of a run's ``metrics.jsonl`` in the order written; each has ``step``, null reads as NaN. Raises `UserError`:
    there is no such file, or a line other than the last is damaged.
    """
    path = Path(folder) / METRICS_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; {folder} is not the folder of a run that has started")
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in _read_rows(path)]


def _summary(values: Mapping[str, float]) -> Any:
    """All scalars of a step as one TensorBoard event: an event each would take longer than all else here."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])


def _read_rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # a whole line ends in a newline; what follows the last is torn
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(
                f"{path}: line {number}: not a row of metrics; the file is damaged, start the run in a new folder"
            )
        rows.append(row)
    return rows


def _open_wandb(project: str, folder: Path, first_step: int, config: Mapping[str, Any] | None) -> Any:
    try:
        import wandb  # optional, and slow to import
    except ImportError:
        raise UserError(
            "wandb_project: W&B is not installed; pip install 'stretto[wandb]' or leave the key out"
        ) from None
    path = folder / "wandb_id"
    if not first_step or not path.exists():
        write_text(path, uuid.uuid4().hex)
    return wandb.init(
        project=project,
        name=folder.name,
        dir=str(folder),
        config=dict(config or {}),
        id=path.read_text(encoding="utf-8"),
        resume="allow",
    )


def say(text: str) -> None:
    """Print one plain line, above any progress bar."""
    _say(rich.get_console(), text)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
