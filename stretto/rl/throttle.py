"""How many groups may be alive, so that no trained token is older than the user's bound: pure numbers.

Words. P groups are trained in a step; step s trains the weights of version s and makes version s + 1. A group is *alive*
from its first hand-out until it was trained or dropped; those in the batch being trained are. Its staleness is the step
that trains it minus the version of its oldest token. v is the trainer's version, e the oldest version on any engine.

The window W: while a group is alive, at most W − 1 younger ones are trained (W = 1: strictly in order).

The bound. Hand a group out while p others, all older, are alive. Its tokens come from version e or later, because no engine
goes back. Before the step that trains it, at most those p and W − 1 younger groups have been trained since, P in a step: so
that step is at most v + ⌊(p + W − 1) / P⌋. Staleness stays within η if

    v·P + p + W ≤ (e + η + 1)·P                                                                                   (*)

With e = v: (η + 1)·P + 1 − W groups may be alive, the last one included. In whole steps this is the published rule, a slot
limit of (η' + 1)·P and a bound of η' + ⌈(W − 1) / P⌉ (TitanRL after 2605.26494), without its rounding. Engines that trail
the trainer take P slots a version off. At W = 1 this is AReaL's capacity (2505.24298), with the engine's version in it;
what AReaL lacks is the order, without which a slow group is overtaken for ever and no capacity bounds its age.

A group handed out again keeps its place, and (*) still holds for it: with p of the older ones left and o younger ones
trained meanwhile, v·P + p + W − o never grows. Only going back to a snapshot breaks this, because v and e fall and p rises;
so a second hand-out is checked like a first one, and waits for its turn.

Nothing waits for ever if W ≤ η·P + 1. The oldest group alive may always be handed out once the engines have caught up, as
p = 0 and W ≤ (η + 1)·P; and when all that are alive are ready, those are at least P, or another may be handed out.

Which window? A group is always trained within η steps of its hand-out, whatever W is: B + W is constant, so a wider window
is paid for with later hand-outs. On engines that run all B at once this buys nothing: the P groups handed out at version v
must be ready for step v + η at the latest, under any window, and W = 1 asks for nothing more. But where engines hold only C
groups at once, the others wait in line and would lose nothing by being handed out later. So B is what keeps the engines
and the trainer busy, and all the rest is given to the window (`default_window`): the trainer idles no more, and groups are
trained younger than the bound asks for, while a queue of W = 1 with ready groups to spare trains them exactly η old.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stretto.base.errors import UserError


@dataclass(frozen=True, slots=True)
class Gate:
    """The inequality (*)."""

    prompts: int
    """P, groups of a step."""
    staleness: int
    """η, the bound."""
    window: int = 1
    """W."""

    def __post_init__(self) -> None:
        assert self.prompts > 0 and self.staleness >= 0 and self.window > 0, self
        widest = self.staleness * self.prompts + 1
        if self.window > widest:
            raise UserError(
                f"recipe: window: {self.window} with staleness {self.staleness} and {self.prompts} prompts a step leaves "
                f"too few groups for a step; set at most {widest}"
            )

    @property
    def limit(self) -> int:
        """Groups alive at once while all engines have the trainer's weights."""
        return (self.staleness + 1) * self.prompts + 1 - self.window

    def may_dispatch(
        self, num_older: int, trainer_version: int, oldest_engine_version: int, num_overtaken: int = 0
    ) -> bool:
        """Whether a group may be handed out now.

        Args:
            num_older: older groups alive; for a new group these are all.
            oldest_engine_version: of all engines that may run it.
            num_overtaken: younger groups trained since it was first handed out.
        """
        assert num_older >= 0 and 0 <= num_overtaken < self.window, (num_older, num_overtaken, self)
        assert oldest_engine_version <= trainer_version, (oldest_engine_version, trainer_version)
        latest = trainer_version * self.prompts + num_older + self.window - num_overtaken
        return latest <= (oldest_engine_version + self.staleness + 1) * self.prompts


def default_window(prompts: int, staleness: int, capacity: int | None) -> int:
    """The widest window that leaves enough groups alive for nobody to wait: see above.

    Args:
        capacity: groups that are worked on at once, those waiting for tools and verifiers included; None: as many as are
            handed out, or unknown, for too small a number leaves engines without work.
    """
    most = (staleness + 1) * prompts
    # Alive without running: one batch is trained, and up to one more is ready or waits for a straggler.
    needed = most if capacity is None else min(most, max(capacity, 1) + 2 * prompts)
    return most + 1 - max(needed, prompts)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the controller knows of a recipe."""

    prompts: int
    """Groups of a step."""
    staleness: int
    window: int
    """See `default_window`."""
    drop_uniform: bool
    lease_s: float
    max_attempts: int
    num_steps: int | None = None
    """Steps of the run: groups that none of them would train are not handed out. None: endless."""

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change when a run is resumed: the groups alive were handed out under it."""
        names = ("prompts", "staleness", "window", "drop_uniform")
        return {name: value for name, value in asdict(self).items() if name in names}
