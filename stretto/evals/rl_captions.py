"""Sentences and the table of an RL report: each is worked out from the numbers it speaks of."""

from __future__ import annotations

from stretto.evals import numbers
from stretto.evals.rl_data import RlData
from stretto.evals.rl_panels import Form, plain, seconds, share, tiny
from stretto.evals.sheet import Cell, Column, Sheet


def headline(data: RlData) -> str:
    """The run in a sentence or two."""
    done = int(max((row["step"] for row in data.rows), default=0))
    text = f"{numbers.counted(done, 'step')}" + ("" if done >= data.num_steps else f" of {data.num_steps:,}")
    held_out = data.values("eval/reward")
    if len(held_out) > 1:
        text += f": held-out reward from {held_out[0]:.3f} to {held_out[-1]:.3f}"
    elif data.has("reward/mean"):
        rewards = data.values("reward/mean")
        text += f": reward from {rewards[0]:.3f} to {rewards[-1]:.3f}"
    text += "."
    if data.has("staleness/max"):
        oldest = max(data.values("staleness/max"))
        text += (
            f" No trained token was older than {numbers.counted(int(oldest), 'version')}; the bound is {data.bound}."
        )
    return text


def summary(data: RlData) -> Sheet:
    """The run's totals."""
    wall_s = data.total("time/wall_s")
    samples = sum(pace * wall for pace, wall in _pairs(data, "speed/samples_per_s", "time/wall_s"))
    tokens = sum(pace * wall for pace, wall in _pairs(data, "speed/tokens_per_s", "time/wall_s"))
    waited = data.total("wait/trainer_s")
    rows = [("time in steps", Cell(numbers.duration(wall_s), wall_s))]
    if wall_s:
        rows += [
            ("samples trained", Cell(f"{samples:,.0f}", round(samples), f"{plain(samples / wall_s)} a second")),
            ("tokens trained", Cell(numbers.si(tokens), round(tokens), f"{plain(tokens / wall_s)} a second")),
            ("the trainer waited", Cell(share(waited / wall_s), waited / wall_s, numbers.duration(waited))),
        ]
    rows += [(name, Cell(form(value), value)) for name, value, form in _known(data)]
    return Sheet(
        "The run",
        (Column("", is_number=False), Column("over the run")),
        tuple((Cell(name), cell) for name, cell in rows),
    )


def _known(data: RlData) -> list[tuple[str, float, Form]]:
    """What was logged, of what the table shows besides."""
    shown: list[tuple[str, float | None, Form]] = [
        ("largest staleness, versions", _most(data, "staleness/max"), plain),
        ("mismatch K3 of the same version, largest mean", _most(data, "mismatch/same_k3_mean"), tiny),
        ("groups trained", data.last("groups/trained"), plain),
        ("groups dropped, all rewards equal", data.last("groups/filtered"), plain),
        ("groups too old, given up", _sum(data, "groups/stale", "groups/failed"), plain),
        ("roles restarted", data.total("failures/restarts") if data.has("failures/restarts") else None, plain),
    ]
    return [(name, value, form) for name, value, form in shown if value is not None]


def reward_caption(data: RlData) -> str:
    rewards = data.values("reward/mean")
    part = max(1, len(rewards) // 10)
    first, last = sum(rewards[:part]) / part, sum(rewards[-part:]) / part
    text = f"Mean reward of the trained samples: {first:.3f} in the first tenth of the run, {last:.3f} in the last."
    held_out = data.values("eval/reward")
    if held_out:
        text += f" On held-out problems, best {max(held_out):.3f} and last {held_out[-1]:.3f}."
    return text + " Groups whose rewards are all equal are not trained on where the recipe drops them."


def timeline_caption(data: RlData) -> str:
    groups = [work for work in data.works if work.role == "agents"]
    if not groups:
        return "No group was drawn."
    times = sorted(work.finished_s - work.started_s for work in groups)
    text = (
        f"{numbers.counted(len(groups), 'group')} were drawn; one took {seconds(times[len(times) // 2])} in the median"
    )
    return text + f" and {seconds(times[-1])} at most. trace.json in the run folder holds every one of them."


def staleness_caption(data: RlData) -> str:
    means, oldest = data.values("staleness/mean"), max(data.values("staleness/max"))
    return (
        f"The trained tokens were {plain(sum(means) / len(means))} versions old on average and {oldest:.0f} at most; "
        f"the bound is {data.bound}."
    )


def mismatch_caption(data: RlData) -> str:
    parts = []
    for kind, words in (("same", "of the version that is trained"), ("stale", "of older ones")):
        values = data.values(f"mismatch/{kind}_k3_mean")
        if values:
            worst = max(data.values(f"mismatch/{kind}_k3_max"))
            parts.append(f"over tokens {words}, mean {tiny(sum(values) / len(values))}, largest {tiny(worst)}")
    text = f"K3 between the trainer's probabilities and the engine's: {'; '.join(parts)}."
    alike = data.values("mismatch/same_share")
    return text + (
        f" {share(sum(alike) / len(alike))} of the tokens were of the version that was trained." if alike else ""
    )


def policy_caption(data: RlData) -> str:
    parts = []
    for metric, words in (
        ("policy/clip_fraction", "clipped by the trust region"),
        ("policy/correction_fraction", "cut off or left out by the correction"),
    ):
        values = data.values(metric)
        if values:
            parts.append(f"{share(sum(values) / len(values))} of the tokens were {words}")
    ess = data.values("policy/ess")
    text = f"The least effective share of samples was {min(ess):.3f}. " if ess else ""
    return text + (f"On average {numbers.listed(parts)}." if parts else "")


def health_caption(data: RlData) -> str:
    entropy = data.values("policy/entropy")
    text = f"Entropy went from {plain(entropy[0])} to {plain(entropy[-1])} nats per token."
    flips = data.values("routes/flips")
    if flips:
        text += f" {share(sum(flips) / len(flips))} of the experts that the trainer's own router would have chosen differ from the engine's."
    return text


def samples_caption(data: RlData) -> str:
    means, cut = data.values("samples/tokens_mean"), data.values("samples/truncated")
    text = f"A sample had {plain(sum(means) / len(means))} tokens on average; {share(sum(cut) / len(cut))} ran into a limit."
    slow = data.values("reward/latency_p95_s")
    if slow:
        text += f" The slowest twentieth of a step's verdicts took {seconds(sorted(slow)[len(slow) // 2])} or more in the median step."
    return text


def waits_caption(data: RlData) -> str:
    wall_s = data.total("time/wall_s")
    text = f"The trainer waited for groups during {share(data.total('wait/trainer_s') / wall_s)} of the time."
    for name in data.named("bubble/"):
        if name != "trainer":
            values = data.values(f"bubble/{name}")
            text += f" {name}: nothing to do for {share(sum(values) / len(values))}."
    return text


def queues_caption(data: RlData) -> str:
    ready, slots = data.values("groups/ready"), data.values("groups/free_slots")
    text = f"On average {plain(sum(ready) / len(ready))} groups were ready when a step ended"
    return text + (f", and {plain(sum(slots) / len(slots))} slots were free." if slots else ".")


def endings_caption(data: RlData) -> str:
    parts = [
        f"{value:,.0f} {words}"
        for key, words in (
            ("trained", "trained"),
            ("filtered", "dropped because all rewards were equal"),
            ("stale", "too old"),
            ("failed", "given up"),
        )
        if (value := data.last(f"groups/{key}"))
    ]
    return f"Groups: {numbers.listed(parts)}." if parts else "No group has ended."


def throughput_caption(data: RlData) -> str:
    wall = sorted(data.values("time/wall_s"))
    return f"A step took {seconds(wall[len(wall) // 2])} in the median, from one report to the next."


def _pairs(data: RlData, first: str, second: str) -> list[tuple[float, float]]:
    return [(row[first], row[second]) for row in data.rows if first in row and second in row]


def _most(data: RlData, metric: str) -> float | None:
    return max(data.values(metric), default=None)


def _sum(data: RlData, *metrics: str) -> float | None:
    known = [value for metric in metrics if (value := data.last(metric)) is not None]
    return sum(known) if known else None
