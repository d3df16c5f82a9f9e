"""Output of a run while it runs: progress bars, console lines, and metrics on disk, in TensorBoard and in W&B.

Reports read ``metrics.jsonl`` in the run folder: one JSON object per line, with ``step`` and scalars. Lines are appended, so a
kill can leave a partial last line, which readers drop.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Protocol, Self

import rich
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stretto.base.errors import UserError
from stretto.base.numbers import short, size_in_bytes
from stretto.base.paths import remove, write_text, writing

METRICS_FILE = "metrics.jsonl"
PAUSES_S = (5.0, 10.0, 20.0, 30.0)
"""Seconds between the lines of `progress` outside a terminal; the last value repeats. At most half a minute, so that users and CI
see that the run is alive."""
PIPE_COLUMNS = 120
"""Width of the output outside a terminal, where nothing says how wide it is."""


class Advance(Protocol):
    """Function that advances a progress bar; also a ``Callable[[int], None]``."""

    def __call__(self, num: int = 1, status: str | None = None, /) -> None: ...


@contextmanager
def progress(
    description: str,
    total: int | None = None,
    unit: str = "",
    console: Console | None = None,
    pauses_s: Sequence[float] = PAUSES_S,
    is_shown: bool = True,
) -> Iterator[Advance]:
    """Show a progress bar for ``total`` units of work (None: unknown); yields the function that advances it.

    ``unit`` is the plural of what is counted; numbers of ``bytes`` are shown as ``1.5 KiB``.
    ``advance(num, status)`` may be called from any thread; ``status`` is a short text after the bar. Bars may nest. Outside a
    terminal (CI, a pipe), lines are printed instead: at the start, at the end, and after each of ``pauses_s``, also without progress.
    Nothing is shown or printed without ``is_shown``, as on all ranks but the first.
    """
    if not is_shown:
        yield lambda num=1, status=None, /: None
        return
    console = console or wide_console()
    start = time.perf_counter()
    num_done, last_status = 0, ""

    def amount() -> str:
        if total is None and not num_done:
            return ""  # what cannot be counted
        shown = [size_in_bytes(num) if unit == "bytes" else f"{num:,}" for num in (num_done, total) if num is not None]
        return " of ".join(shown) + (f" {unit}" if unit != "bytes" and unit else "")

    def count(num: int = 1, status: str | None = None, /) -> None:
        nonlocal num_done, last_status
        num_done += num
        last_status = last_status if status is None else status

    if console.is_terminal:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[amount]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}", markup=False),  # may contain brackets
        )
        with Progress(*columns, console=console) as bars:
            task = bars.add_task(description, total=total, status="", amount=amount())

            def advance(num: int = 1, status: str | None = None, /) -> None:
                count(num, status)
                bars.update(task, completed=num_done, amount=amount(), status=last_status)

            yield advance
            return
    ending = "stopped"

    def print_line(ending: str, *status: str) -> None:
        counted = ", ".join(filter(None, [ending, amount()]))
        took = " in ".join(filter(None, [counted, f"{time.perf_counter() - start:.1f} s"]))
        say(", ".join([f"{description}: {took}", *status]), console)

    say(f"{description} …", console)
    try:
        with _ticking(lambda: print_line("", *filter(None, [last_status])), pauses_s):
            yield count
        ending = "done"
    finally:
        print_line(ending)  # after the last tick


@contextmanager
def _ticking(action: Callable[[], None], pauses_s: Sequence[float]) -> Iterator[None]:
    """Call ``action`` from a thread after each of ``pauses_s``, whose last value repeats, until the context ends."""
    ended = threading.Event()

    def tick() -> None:
        for pause_s in chain(pauses_s, repeat(pauses_s[-1])):
            if ended.wait(pause_s):
                return
            action()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Tracker:
    """Writer of a run's scalars to ``metrics.jsonl``, TensorBoard, W&B (optional) and the console. A context manager, used on
    rank 0 only.
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
        """Open all outputs; ``folder``, the run folder, is created if necessary.

        Args:
            first_step: rows of this step and later ones, from an interrupted attempt, are dropped; 0: all rows.
            config: the recipe, shown in W&B.

        Raises:
            UserError: W&B is requested and not installed, or an existing ``metrics.jsonl`` is damaged.
        """
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._console = console or wide_console()
        self._wandb = _open_wandb(wandb_project, self.folder, first_step, config) if wandb_project else None
        path = self.folder / METRICS_FILE
        kept = [row for row in _read_rows(path) if row["step"] < first_step] if first_step and path.exists() else []
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard: Any = None
        if tensorboard:
            # A late import: this room must import in a fraction of a second, without torch.
            from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined]

            if not first_step:
                remove(self.folder / "tensorboard")
            self._tensorboard = SummaryWriter(str(self.folder / "tensorboard"), purge_step=first_step or None)

    def log(self, step: int, scalars: Mapping[str, float], line: bool = True) -> None:
        """Write the scalars of ``step``, and print them if ``line``.

        Names are paths (``loss/full``), which TensorBoard groups by their first part. A value that is not finite becomes null in
        ``metrics.jsonl``, because NaN is not JSON.
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
        say(text, self._console)

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
        with suppress(*(() if error is None else (UserError,))):  # an error of the run itself has precedence
            self.close()


def read_metrics(folder: Path | str) -> list[dict[str, float]]:
    """Rows of a run's ``metrics.jsonl`` in the order of writing; each has ``step``, and null becomes NaN.

    Raises UserError: there is no such file, or a line other than the last is damaged.
    """
    path = Path(folder) / METRICS_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; {folder} is not the folder of a run that has started")
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in _read_rows(path)]


def _summary(values: Mapping[str, float]) -> Any:
    """All scalars of a step as one TensorBoard event; one event per scalar would dominate the time of logging."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])


def _read_rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # text after the last newline is a partial line
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(f"{path}: line {number}: not a row of metrics; the file is damaged, use a new run folder")
        rows.append(row)
    return rows


def require_wandb(project: str | None) -> None:
    """Raises `UserError` if a W&B project is named and W&B is not installed. Stages call it before they write anything."""
    if project is not None and find_spec("wandb") is None:
        raise UserError(f"--wandb {project}: W&B is not installed; pip install 'stretto[wandb]', or leave --wandb out")


def _open_wandb(project: str, folder: Path, first_step: int, config: Mapping[str, Any] | None) -> Any:
    require_wandb(project)
    import wandb  # optional, and slow to import

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


def say(text: str, console: Console | None = None, style: str | None = None) -> None:
    """Print plain lines, above any progress bar. None is broken at the width of the console, so that paths and addresses stay whole."""
    (console or wide_console()).print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def wide_console() -> Console:
    """The console of this process. In a file or a pipe it has 120 columns, so that wide tables stay whole, or ``COLUMNS``."""
    console = rich.get_console()
    if not (console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ):
        console.width = PIPE_COLUMNS
    return console
