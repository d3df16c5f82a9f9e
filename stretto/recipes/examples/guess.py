"""An environment of one's own: guess a digit, with hints between. ``kind = "recipes/examples/guess.py:Guess"``."""

import random

from stretto.base.trajectory import Outcome, StepReward
from stretto.tasks.task import Problem, Score, TaskSource


class Guess(TaskSource):
    def problem(self, item):
        secret = random.Random(item).choice("0123456789")
        return Problem(item, ({"role": "user", "content": "Guess my digit."},), gold=secret)

    def reply(self, problem, messages):  # what the model reads next; None: the episode is over
        guess = messages[-1]["content"].strip()
        return None if guess == problem.gold else "higher" if guess < problem.gold else "lower"

    def score(self, problem, answer):
        turns = [message["content"] for message in answer.messages if message["role"] == "assistant"] or [answer.text]
        guesses = [turn.strip() for turn in turns]
        right = guesses[-1] == problem.gold
        # each wrong guess costs something, at its own turn
        steps = tuple(StepReward(turn, -0.1) for turn, guess in enumerate(guesses) if guess != problem.gold)
        return Score(float(right), Outcome.OK if right else Outcome.WRONG, {"guesses": len(guesses)}, steps=steps)

    def demonstration(self, problem):  # halving, for supervised training
        low, high, turns = 0, 9, []
        while not turns or turns[-1]["content"] != problem.gold:
            guess = (low + high) // 2
            turns.append({"role": "assistant", "content": str(guess)})
            if guess != int(problem.gold):
                turns.append({"role": "user", "content": "higher" if guess < int(problem.gold) else "lower"})
            low, high = (guess + 1, high) if guess < int(problem.gold) else (low, guess - 1)
        return turns
