"""Pictures of what a reinforcement-learning run learnt, and on which tokens. A record in, a Figure out."""

from __future__ import annotations

from matplotlib.figure import Figure

from stretto.evals.canvas import INK, MUTED, SERIES, Label, blank, name_ends, subtitle
from stretto.evals.rl_data import RlData
from stretto.evals.rl_panels import Ends, Line, fine, grid, lines, panel, plain, seconds, share, tiny, whole

BLUE, ORANGE, GREEN, PINK, SKY, SAND = SERIES
_VERDICTS = {"ok": GREEN, "wrong": MUTED, "timeout": SAND, "crash": PINK, "infra": ORANGE}


def reward(data: RlData) -> Figure:
    """Mean reward of what was trained and of held-out problems; of every source where there are several."""
    sources = data.named("reward/source/")
    num = 1 if len(sources) < 2 else 2
    figure = blank(10.0, 1.8 + 3.8 * num)
    places = figure.subplots(num, 1, squeeze=False)[:, 0]
    zero = min(data.values("reward/mean")) >= 0
    axes, labels = panel(places[0], data, "Reward", [Line("reward/mean", "trained on", BLUE)], _reward, zero=zero)
    steps, values = data.series("eval/reward")
    if steps:
        axes.plot(steps, values, "-", color=ORANGE, linewidth=1.4, alpha=0.6, zorder=4)
        axes.plot(steps, values, "D", color=ORANGE, markersize=8.5, markeredgecolor="white", zorder=5, clip_on=False)
        labels.append(Label(steps[-1], values[-1], f"held-out  {_reward(values[-1])}", ORANGE, bold=True))
    subtitle(axes, ["mean of a step, and its running mean", *(["diamonds: held-out problems"] if steps else [])])
    ends = [(axes, labels)]
    if num > 1:
        curves = lines(*((f"reward/source/{name}", name) for name in sources))
        ends.append(panel(places[1], data, "By source", curves, _reward, zero=zero))
    name_ends(*ends)
    return figure


def staleness(data: RlData) -> Figure:
    """Age of the trained tokens against the bound, and under how many versions a sample was written."""
    figure, (left, right) = grid(2)
    ages = [Line("staleness/max", "oldest", ORANGE, is_smooth=False), Line("staleness/mean", "mean", BLUE)]
    left.axhline(data.bound, color=INK, linewidth=1.3, linestyle=(0, (5, 3)), zorder=2)
    versions = [Line("staleness/versions_per_sample", "versions", GREEN)]
    name_ends(
        panel(
            left,
            data,
            "Staleness, versions",
            ages,
            whole,
            ["of the trained tokens", f"dashed: the bound, {data.bound}"],
            top=max(data.bound * 1.12, 1.0),
        ),
        panel(right, data, "Versions a sample", versions, plain, ["weights may change while it is written"], top=1.2),
    )
    return figure


def mismatch(data: RlData) -> Figure:
    """K3 between engine and trainer, of tokens of the version that is trained and of older ones."""
    kinds = [kind for kind in ("same", "stale") if data.has(f"mismatch/{kind}_k3_mean")]
    figure, places = grid(len(kinds))
    titles = {"same": "Mismatch K3, same version", "stale": "Mismatch K3, older versions"}
    notes = {"same": "the two implementations alone", "stale": "and what was learnt since"}
    ends: list[Ends] = []
    for axes, kind in zip(places, kinds, strict=True):
        curves = lines(*((f"mismatch/{kind}_k3_{name}", name) for name in ("mean", "p99", "max")))
        ends.append(panel(axes, data, titles[kind], curves, tiny, [notes[kind]], log=True))
    name_ends(*ends)
    return figure


def policy(data: RlData) -> Figure:
    """How far the trained policy is from the one that sampled, and what was cut off for it."""
    figure, (ess, chi2, cut, ratio) = grid(4)
    fractions = lines(("policy/clip_fraction", "clipped"), ("policy/correction_fraction", "corrected"))
    ratios = [
        Line("policy/ratio_max", "largest", ORANGE, is_smooth=False),
        Line("policy/correction_mean", "correction", GREEN),
    ]
    name_ends(
        panel(
            ess,
            data,
            "Effective samples",
            lines(("policy/ess", "ESS")),
            fine,
            ["share of the tokens"],
            zero=False,
        ),
        panel(
            chi2, data, "χ² to the rollout", lines(("policy/chi2", "χ²")), tiny, ["mean squared ratio − 1"], zero=False
        ),
        panel(cut, data, "Tokens clipped and corrected", fractions, share, ["trust region", "TIS or IcePop"], top=0.01),
        panel(ratio, data, "Ratios", ratios, fine, ["largest of the update", "mean correction"], zero=False),
    )
    return figure


def health(data: RlData) -> Figure:
    """Entropy, gradient, routes and experts."""
    figure, (entropy, gradient, flips, experts) = grid(4)
    surprise = lines(("policy/entropy", "entropy"), ("policy/nll", "surprise"))
    norm, flipped = lines(("optim/grad_norm", "norm")), lines(("routes/flips", "flipped"))
    load = lines(("experts/max_overload", "load"))
    name_ends(
        panel(entropy, data, "Entropy", surprise, plain, ["nats per token", "surprise: of what was sampled"]),
        panel(gradient, data, "Gradient norm", norm, plain, ["before clipping"]),
        panel(flips, data, "Route flips", flipped, share, ["choices unlike the engine's"], top=0.01),
        panel(
            experts,
            data,
            "Busiest expert",
            load,
            lambda value: f"{plain(value)}×",
            ["over an even share"],
            zero=False,
        ),
    )
    return figure


def samples(data: RlData) -> Figure:
    """Lengths, truncations, groups that teach nothing, and how long a verdict took."""
    has_times = data.has("reward/latency_p50_s")
    figure, places = grid(4 if has_times else 3)
    lengths = [
        Line("samples/tokens_max", "longest", ORANGE),
        Line("samples/tokens_p95", "p95", PINK),
        Line("samples/tokens_mean", "mean", BLUE),
    ]
    cut = lines(("samples/truncated", "truncated"), ("groups/uniform_share", "equal rewards"))
    ends = [
        panel(places[0], data, "Tokens a sample", lengths, plain),
        panel(places[1], data, "Truncated, and equal groups", cut, share, ["of samples, of groups"], top=0.02),
    ]
    outcomes = [Line(f"verdicts/{name}", name, colour) for name, colour in _VERDICTS.items()]
    if data.named("verdicts/"):
        ends.append(panel(places[2], data, "Verdicts", outcomes, share, ["of all verifications"]))
    else:
        right = lines(("reward/ok", "right"))
        ends.append(panel(places[2], data, "Right answers", right, share, ["of the trained samples"]))
    if has_times:
        times = lines(("reward/latency_p50_s", "p50"), ("reward/latency_p95_s", "p95"))
        ends.append(panel(places[3], data, "Verdict latency", times, seconds, ["from asking to verdict"], log=True))
    name_ends(*ends)
    return figure


def _reward(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else plain(value)
