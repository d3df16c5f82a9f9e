"""A world with tools and a state of its own: ``kind = "recipes/examples/lamps.py:Lamps"`` in a table of sources.

A room has lamps, and some of them are on. The user wants one lamp to be on, and all others off.
"""

import random

from pydantic import Field

from stretto.base.config import Config
from stretto.base.trajectory import Outcome
from stretto.sandbox.outcome import ToolResult
from stretto.tasks.session import SessionSource, calling, recorded
from stretto.tasks.task import Problem, Score, Session, Tool

NOTHING = {"type": "object", "properties": {}}
LAMP = {"type": "object", "properties": {"lamp": {"type": "string"}}, "required": ["lamp"]}


class LampsArgs(Config):  # the recipe's `args`
    lamps: int = Field(default=3, ge=1, le=8)


class Room(Session):  # the state of one sample, and the tools that change it
    def __init__(self, problem):
        self._problem, self._on = problem, set(problem.payload["on"])
        self.tools = (
            Tool("look", "Lamps that are on.", NOTHING, self._look),
            Tool("press", "Press a switch.", LAMP, self._press),
        )

    def _look(self, arguments):
        return ToolResult(self.digest())

    def _press(self, arguments):
        lamp = arguments.get("lamp")
        if lamp not in self._problem.payload["lamps"]:  # the model's mistake: WRONG, never an exception
            return ToolResult(f"error: no lamp {lamp!r}", Outcome.WRONG)
        self._on ^= {lamp}
        return ToolResult("pressed")

    def digest(self):  # the whole state as a text: equal states have equal texts
        return "on: " + " ".join(sorted(self._on))

    def score(self, answer):  # the goal is a state, whatever the answer says
        return Score.of(self._on == {self._problem.payload["wanted"]})


class Lamps(SessionSource):
    args_kind = LampsArgs

    def problem(self, item):  # the same for the same item, on every machine
        rng = random.Random(item)
        wanted, *others = lamps = rng.sample("abcdefgh", self.args.lamps)
        on = [lamp for lamp in others if rng.random() < 0.5]
        messages = ({"role": "user", "content": f"Lamps {' '.join(sorted(lamps))}. Only {wanted} on."},)
        return Problem(item, messages, gold="done", payload={"lamps": lamps, "on": on, "wanted": wanted})

    def open(self, problem, seed=None):
        return Room(problem)

    def demonstration(self, problem):  # the calls of a correct answer; `recorded` makes them and adds their results
        presses = [calling("press", {"lamp": lamp}) for lamp in (*problem.payload["on"], problem.payload["wanted"])]
        turns = [calling("look", {}), *presses, {"role": "assistant", "content": problem.gold}]
        return recorded(self.open(problem), turns)
