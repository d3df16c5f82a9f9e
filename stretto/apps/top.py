"""``stretto top``: who works, who waits, and for whom, live on the console."""

from __future__ import annotations

import time
from pathlib import Path

import rich
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stretto.rl.status import RunStatus, read_status

REFRESH_S = 1.0
_OLD_S = 10.0
"""Without a new status for so long, the run is taken for dead."""
_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = (
    ("reward", "reward/mean"),
    ("held-out reward", "eval/reward"),
    ("staleness, mean", "staleness/mean"),
    ("staleness, max", "staleness/max"),
    ("mismatch K3", "mismatch/same_k3_mean"),
    ("effective samples", "policy/ess"),
    ("clipped", "policy/clip_fraction"),
    ("entropy", "policy/entropy"),
    ("trainer waits", "wait/trainer_share"),
    ("tokens/s", "speed/tokens_per_s"),
    ("samples/s", "speed/samples_per_s"),
    ("tokens a sample", "samples/tokens_mean"),
)
"""Heading and scalar, as far as the run logs it."""


def top_command(folder: Path, once: bool = False) -> None:
    """Show the run in ``folder`` until it is done or Ctrl-C; ``once``: print it as it is and return.

    Raises:
        UserError: it is no run of ``stretto rl``.
    """
    console = rich.get_console()
    if once or not console.is_terminal:
        console.print(picture(folder, read_status(folder), time.time()))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            status = read_status(folder)
            live.update(picture(folder, status, time.time()), refresh=True)
            if status.state == "done":
                break
            time.sleep(REFRESH_S)
    console.print(picture(folder, status, time.time()))


def picture(folder: Path, status: RunStatus, now_s: float) -> RenderableType:
    """The whole screen."""
    age_s = now_s - status.updated_s
    state = status.state if status.state == "done" or age_s < _OLD_S else f"{status.state}; silent for {age_s:,.0f} s"
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(f"step {status.step:,} of {status.num_steps:,}", style="bold"),
        ProgressBar(total=status.num_steps, completed=status.step, width=30),
        Text(state, style="green" if status.state == "done" or age_s < _OLD_S else "red"),
    )
    parts: list[RenderableType] = [Panel(head, title=str(folder), title_align="left")]
    parts.append(_groups(status))
    parts.append(_roles(status))
    parts.append(_numbers(status))
    if status.waits:
        parts.append(Panel("\n".join(status.waits), title="waiting longest", title_align="left"))
    return Group(*parts)


def _groups(status: RunStatus) -> Table:
    table = Table(title="groups", title_justify="left", expand=False)
    for name in status.counts:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_row(*(f"{value:,.0f}" for value in status.counts.values()))
    return table


def _roles(status: RunStatus) -> Table:
    table = Table("role", "state", title="roles", title_justify="left")
    for heading in ("in hand", "waiting", "restarts"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in status.roles:
        style = "" if row.state == "alive" else "red"
        table.add_row(
            row.name,
            Text(row.state, style=style),
            f"{row.load:,.0f}",
            f"{row.waiting:,.0f}",
            str(row.restarts),
            row.note,
        )
    return table


def _numbers(status: RunStatus) -> Table:
    grid = Table.grid(padding=(0, 3))
    cells = [
        f"{heading} [bold]{_short(status.metrics[name])}[/bold]" for heading, name in _SHOWN if name in status.metrics
    ]
    for start in range(0, len(cells), 4):
        grid.add_row(*cells[start : start + 4])
    if status.rewards:
        grid.add_row(f"reward by step  {sparkline(status.rewards, 60)}")
    return grid


def sparkline(values: list[float], width: int) -> str:
    """``values`` as bars, averaged down to at most ``width`` of them."""
    num = min(width, len(values))
    bins = [values[len(values) * index // num : len(values) * (index + 1) // num] for index in range(num)]
    means = [sum(each) / len(each) for each in bins]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int((mean - low) / span * len(_BARS)))] for mean in means)


def _short(value: float) -> str:
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.2e}"
    return f"{value:,.3f}".rstrip("0").rstrip(".")
