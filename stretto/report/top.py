"""Console monitor of an RL run: throughput, queue lengths, limiting component (``stretto top``)."""

from __future__ import annotations

import time
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stretto.base.numbers import short
from stretto.base.track import wide_console
from stretto.flow.log import RoleRow, RunStatus, read_status

REFRESH_S = 1.0
WIDTH = 80
"""Width of the layout in columns; a wider console gives more room to the curve and the notes."""
_OLD_S = 10.0
"""Seconds without a new status after which the run is shown as dead."""
_BARS = "▁▂▃▄▅▆▇█"
_BUSY = 0.5
"""Least share of the time for which the limiting part is busy."""
_A_ROW = 3
_ROLE_WIDTH = 20
_BESIDE_NOTES = 25
"""Columns of the table of roles beside names and notes."""
SHOWN = (
    ("reward", "reward/mean"),
    ("held-out", "eval/reward"),
    ("entropy", "policy/entropy"),
    ("staleness", "staleness/mean"),
    ("oldest", "staleness/max"),
    ("flips", "routes/flips"),
    ("K3 same", "mismatch/same_k3_mean"),
    ("K3 stale", "mismatch/stale_k3_mean"),
    ("ESS", "policy/ess"),
    ("clipped", "policy/clip_fraction"),
    ("corrected", "policy/correction_fraction"),
    ("at a limit", "samples/truncated"),
    ("tokens/s", "speed/tokens_per_s"),
    ("samples/s", "speed/samples_per_s"),
    ("step s", "time/wall_s"),
    ("trainer idle", "bubble/trainer"),
    ("verifiers idle", "bubble/rewards"),
    ("verdict p95 s", "reward/latency_p95_s"),
)
"""Headings and metrics, three per row; rows without logged metrics are left out."""
_ALIVE = ("in_flight", "ready", "training", "free_slots", "engine_lag")
_ENDED = ("trained", "filtered", "stale", "failed", "cancelled", "expired", "late", "failed_attempts")
_SHARES = ("bubble/", "routes/flips", "policy/clip_fraction", "policy/correction_fraction", "samples/truncated")
_BAD = ("stale", "failed", "expired", "late", "failed_attempts")


def top_command(folder: Path, once: bool = False) -> None:
    """Show the run in ``folder`` until it is done or Ctrl-C; ``once``: print its state and return.

    Raises:
        UserError: ``folder`` is not a run of ``stretto rl``.
    """
    console = wide_console()
    if once or not console.is_terminal:
        console.print(picture(folder, read_status(folder), time.time(), console.width))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            status = read_status(folder)
            live.update(picture(folder, status, time.time(), console.width), refresh=True)
            if status.state == "done":
                break
            time.sleep(REFRESH_S)
    console.print(picture(folder, status, time.time(), console.width))


def picture(folder: Path, status: RunStatus, now_s: float, width: int = WIDTH) -> RenderableType:
    """The whole screen, ``width`` columns wide."""
    parts: list[RenderableType] = [_head(folder, status, now_s, width)]
    if status.rewards:
        parts.append(_curve(status.rewards, width))
    parts += [_numbers(status), _groups(status)]
    if limit := limiting_part(status):
        parts.append(Text(f"limited by     {limit}", style="bold"))
    parts.append(_roles(status, width))
    if status.waits:
        lines = [_cut(Text(line, no_wrap=True), width - 4) for line in status.waits]
        parts.append(Panel(Group(*lines), title="longest waits", title_align="left", width=width, border_style="dim"))
    return Group(*parts)


def _head(folder: Path, status: RunStatus, now_s: float, width: int) -> Panel:
    age_s = now_s - status.updated_s
    is_fresh = status.state == "done" or age_s < _OLD_S
    state = status.state if is_fresh else f"{status.state}; no update for {age_s:,.0f} s"
    style = "red" if not is_fresh else "green" if status.state in ("done", "training") else "yellow"
    head = Table.grid(padding=(0, 2), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(overflow="fold", justify="right", max_width=width // 2)
    head.add_row(
        Text(f"step {status.step:,} of {status.num_steps:,}", style="bold"),
        ProgressBar(total=status.num_steps, completed=status.step),
        Text(state, style=style),
    )
    return Panel(head, title=Text(str(folder)), title_align="left", width=width, border_style="dim")


def _curve(rewards: list[float], width: int) -> Text:
    """Reward of the run so far as bars, with the smallest and the largest value."""
    label = "reward by step "
    means = binned(rewards, width - len(label) - 18)
    bars = sparkline(means, len(means))
    line = Text(label, style="dim", no_wrap=True)
    line.append(bars, style="cyan")
    return line.append(f"  {short(min(means))} to {short(max(means))}", style="dim")


def _numbers(status: RunStatus) -> Table:
    grid = Table.grid(padding=(0, 0, 0, 1), expand=False)
    for _ in range(_A_ROW):
        grid.add_column(style="dim", min_width=14, no_wrap=True)
        grid.add_column(style="bold", min_width=11, no_wrap=True)
    for start in range(0, len(SHOWN), _A_ROW):
        row = SHOWN[start : start + _A_ROW]
        if any(name in status.metrics for _, name in row):
            grid.add_row(*(text for heading, name in row for text in (heading, _value(status, name))))
    return grid


def _value(status: RunStatus, name: str) -> str:
    if name not in status.metrics:
        return "–"
    value = status.metrics[name]
    return f"{value:.1%}" if name.startswith(_SHARES) else short(value)


def _groups(status: RunStatus) -> Table:
    """Two lines: groups by state and groups by outcome; outcomes with a count of 0 are left out."""
    grid = Table.grid(padding=(0, 0, 0, 1))
    grid.add_column(style="dim", min_width=14, no_wrap=True)
    grid.add_column(overflow="fold")
    for heading, names, is_sparse in (("groups now", _ALIVE, False), ("groups ended", _ENDED, True)):
        line = Text()
        for name in names:
            value = status.counts.get(name)
            if value is not None and (value or not is_sparse):
                line.append(f"{value:,.0f}", style="bold red" if name in _BAD else "bold")
                line.append(f" {name.replace('_', ' ')}   ")
        grid.add_row(heading, line if line.plain else Text("–"))
    return grid


def limiting_part(status: RunStatus) -> str:
    """The part of the run that was busy for the largest share of the last step, with that share; empty before the first step. If no
    part was busy for half of the time, the groups in flight are too few to keep one busy, or wait for tools."""
    engines = [idle for name, idle in status.metrics.items() if name.startswith("bubble/engine-")]
    idle = {
        "the trainer": status.metrics.get("bubble/trainer"),
        "the engines": sum(engines) / len(engines) if engines else None,
        "the verifiers": status.metrics.get("bubble/rewards"),
    }
    busy = {name: 1.0 - share for name, share in idle.items() if share is not None}
    if "the trainer" not in busy:
        return ""
    name = max(busy, key=lambda name: busy[name])
    if busy[name] < _BUSY:
        return f"the number of groups in flight, or their tools: {name}, most busy, worked {busy[name]:.0%} of the time"
    return f"{name}: busy {busy[name]:.0%} of the last step"


def _roles(status: RunStatus, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=False, pad_edge=True, padding=(0, 1))
    # a long note is truncated before the other columns are
    longest = max((len(row.name) for row in status.roles), default=0)
    table.add_column("role", no_wrap=True, min_width=min(longest, _ROLE_WIDTH))
    table.add_column("running", justify="right", no_wrap=True, min_width=7)
    table.add_column("waiting", justify="right", no_wrap=True, min_width=7)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    room = width - min(longest, _ROLE_WIDTH) - _BESIDE_NOTES
    for row in status.roles:
        style = "" if row.state == "alive" else "red"
        table.add_row(Text(row.name, style=style), f"{row.load:,.0f}", f"{row.waiting:,.0f}", _cut(_note(row), room))
    return table


def _cut(text: Text, room: int) -> Text:
    """``text`` in ``room`` columns, ended behind a word: a number is never cut."""
    if text.cell_len > room:
        kept = text[: text.plain.rfind(" ", 0, room - 1)]
        kept.rstrip()
        return kept.append(" …")
    return text


def _note(row: RoleRow) -> Text:
    """Note of a role. Problems come first, because the end may be truncated."""
    text = Text()
    if row.state != "alive":
        text.append(f"{row.state}  ", style="red")
    if row.restarts:
        text.append(f"{row.restarts:,} restart{'' if row.restarts == 1 else 's'}  ", style="yellow")
    return text.append(f"{row.note}, on {row.node}" if row.node else row.note, style="dim")


def sparkline(values: list[float], width: int) -> str:
    """``values`` as bars, averaged down to at most ``width`` of them."""
    means = binned(values, width)
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int((mean - low) / span * len(_BARS)))] for mean in means)


def binned(values: list[float], width: int) -> list[float]:
    """``values`` averaged down to at most ``width``, in order."""
    num = min(max(1, width), len(values))
    bins = [values[len(values) * index // num : len(values) * (index + 1) // num] for index in range(num)]
    return [sum(each) / len(each) for each in bins]
