"""Write the report of a reinforcement-learning run: PNG pictures and one page that holds everything it shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from stretto.evals import rl_captions, rl_flow, rl_plots, rl_timeline
from stretto.evals.page import Picture, Shown, draw_all, fill, write_page
from stretto.evals.rl_data import RlData

_TEMPLATE = "rl_report.html"


def write_rl_report(data: RlData, folder: Path | str, advance: Callable[[int], None] | None = None) -> Path:
    """Write ``report/`` in the run folder ``folder``, all of it or nothing, and return its page.

    Args:
        advance: told of each picture.

    Raises:
        UserError: the folder cannot be written.
    """
    shown = draw_all(pictures(), data, advance)
    return write_page(render(data, shown), shown, folder)


def render(data: RlData, shown: list[Shown]) -> str:
    """The page as text."""
    return fill(
        _TEMPLATE, data=data, shown=shown, headline=rl_captions.headline(data), summary=rl_captions.summary(data)
    )


def pictures() -> tuple[Picture[RlData], ...]:
    """All pictures, in the order of the page."""
    return (
        _picture("reward", "Reward", "Mean reward of each step, and of held-out problems, over steps.", "reward/mean", "No step was made."),
        Picture(
            "timeline",
            "Who was busy when",
            "The trainer's time and the groups in flight over the whole run; below, bars for the work of each role in a few steps.",
            lambda data: None if data.works else "No spans were recorded.",
            rl_timeline.timeline,
            rl_captions.timeline_caption,
        ),
        _picture("staleness", "Staleness", "Mean and largest age of the trained tokens, in versions, against the bound.", "staleness/max"),
        _picture("mismatch", "Mismatch", "K3 between engine and trainer, mean, 99th percentile and maximum, on a logarithmic axis.",
                 "mismatch/same_share"),
        _picture("policy", "Off-policy", "Effective samples, chi-squared, clipped and corrected tokens, ratios.", "policy/ess"),
        _picture("health", "Policy", "Entropy, gradient norm, route flips, and the busiest expert.", "policy/entropy"),
        _picture("samples", "Samples", "Tokens a sample, truncations, verdicts and their latency.", "samples/tokens_mean"),
        _picture("waits", "Waits", "Shares of the trainer's time, and the share of time each role had nothing to do.", "time/wall_s"),
        _picture("queues", "Queues", "Groups by state, and requests that wait, over steps.", "groups/ready"),
        _picture("endings", "Endings", "Groups by how they ended, and what was thrown away or done again.", "groups/trained"),
        _picture("throughput", "Throughput", "Tokens and samples a second, and the parts of a step's time.", "speed/tokens_per_s"),
    )  # fmt: skip


def _picture(slug: str, heading: str, alt: str, metric: str, absent: str = "It was not logged.") -> Picture[RlData]:
    """The picture of that name in `rl_plots` or `rl_flow`, where ``metric`` was logged."""
    draw: Callable[[RlData], Figure] = getattr(rl_plots, slug, None) or getattr(rl_flow, slug)
    caption: Callable[[RlData], str] = getattr(rl_captions, f"{slug}_caption")
    return Picture(slug, heading, alt, lambda data: None if data.has(metric) else absent, draw, caption)
