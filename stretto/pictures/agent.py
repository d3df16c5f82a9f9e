"""A conversation about a picture: every turn changes the ledger, the ledger becomes a prompt, the picture is held against the ledger.

Nothing is remembered but ledgers and versions. A turn that contradicts what stands is answered with a question and changes nothing;
a turn that takes back shows the picture of then. A picture that shows something else than was asked is painted again, until one is
right or the budget of the turn is spent; then the one with the fewest faults is shown, and they are told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pydantic import Field

from stretto.base.config import Config
from stretto.pictures.backend import Backend, PaintRequest, Picture
from stretto.pictures.verify import Verdict, Verifier
from stretto.tasks.shapes.ledger import Ledger, describe
from stretto.tasks.shapes.turns import Conversation, tell


class PaintOptions(Config):
    """How pictures of a conversation are painted."""

    width: int = Field(default=512, gt=0)
    """Pixels; a size named in the conversation counts instead. As ``height``."""
    height: int = Field(default=512, gt=0)
    images: int = Field(default=4, gt=0)
    """A turn, at most."""
    seed: int = 0
    """Of the first picture of every turn, so that what is not spoken of stays; each further one has the next."""


@dataclass(frozen=True, slots=True)
class Version:
    """A picture that was shown. Written by `respond`."""

    ledger: Ledger
    prompt: str
    picture: Picture
    verdict: Verdict
    num_images: int
    """Painted for it."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """All that is remembered."""

    conversation: Conversation = field(default_factory=Conversation)
    versions: tuple[Version, ...] = ()

    @property
    def shown(self) -> Version | None:
        """The version of what stands now."""
        return next((each for each in reversed(self.versions) if each.ledger == self.conversation.now), None)

    @property
    def num_images(self) -> int:
        return sum(version.num_images for version in self.versions)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a turn came to."""

    dialogue: Dialogue
    said: str
    """To the user: what was done, what is asked, or what the picture lacks."""
    is_question: bool = False


def respond(
    dialogue: Dialogue,
    text: str,
    backend: Backend,
    verifier: Verifier,
    options: PaintOptions,
    write: Callable[[Ledger], str] = describe,
    progress: Callable[[float], None] = lambda done: None,
) -> Reply:
    """The dialogue after a user's turn.

    Args:
        write: the prompt of a ledger.
        progress: how much of the budget is used, 0 to 1.

    Raises:
        UserError: the turn is empty, in another language or takes back too much, or the backend refuses. The dialogue stands as it
            stood. What ``backend`` and ``verifier`` raise passes.
    """
    told = tell(dialogue.conversation, text)
    if told.questions:
        return Reply(dialogue, " ".join(told.questions), is_question=True)
    after = replace(dialogue, conversation=told.conversation)
    done = "; ".join(told.notes)
    if not told.conversation.now.things:
        return Reply(after, f"{done}: nothing is asked for")
    if after.shown is None:
        now = told.conversation.now
        width, height = now.size or (options.width, options.height)
        order = PaintRequest(write(now), width, height, options.seed)
        made = painted(now, order, backend, verifier, options.images, progress)
        after = replace(after, versions=(*after.versions, made))
    shown = after.shown
    assert shown is not None
    lacking = "; ".join(fault.says for fault in shown.verdict.faults)
    if lacking:
        done += f". Not right yet after {shown.num_images} pictures: {lacking}"
    return Reply(after, ". ".join(filter(None, (done, shown.verdict.unchecked))))


def painted(
    ledger: Ledger,
    order: PaintRequest,
    backend: Backend,
    verifier: Verifier,
    images: int,
    progress: Callable[[float], None] = lambda done: None,
) -> Version:
    """The first picture of an ``order`` that shows what is asked for, or of so many, with a seed each, the one with the fewest faults.
    Raises as `respond`."""
    best: Version | None = None
    for attempt in range(images):
        share = _part(progress, attempt, images)
        picture = backend.paint(replace(order, seed=order.seed + attempt), share)
        verdict = verifier.judge(ledger, picture)
        if best is None or len(verdict.faults) < len(best.verdict.faults):
            best = Version(ledger, order.prompt, picture, verdict, attempt + 1)
        if not verdict.faults:
            break
    assert best is not None
    return replace(best, num_images=attempt + 1)


def _part(progress: Callable[[float], None], at: int, num: int) -> Callable[[float], None]:
    return lambda done: progress((at + done) / num)
