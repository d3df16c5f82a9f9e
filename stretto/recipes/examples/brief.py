"""A reward of one's own, on problems that exist: ``kind = "recipes/examples/brief.py:Brief"`` in a table of sources."""

from dataclasses import replace

from stretto.tasks.strings import StringsSource


class Brief(StringsSource):
    """Digits to reverse, sort or complement; what is longer than the answer costs up to half of the reward."""

    def score(self, problem, answer):
        score = super().score(problem, answer)
        excess = max(0, len(answer.text.strip()) - len(problem.gold))
        penalty = min(0.5, 0.05 * excess)
        return replace(score, reward=score.reward - penalty, parts={**score.parts, "penalty": penalty})
