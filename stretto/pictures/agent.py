"""A conversation about a picture: every turn changes the ledger, the ledger becomes a prompt, the picture is held against the ledger.

Nothing is remembered but ledgers and versions. A turn that contradicts what stands is answered with a question and changes nothing;
a turn that takes back shows the picture of then. A picture that shows something else than was asked is painted again, until one is
right or the budget of the turn is spent; then the one with the fewest faults is shown, and they are told. Where the backend can change a
part of a picture, what is right in it stays, in the picture of the turn before too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from PIL import Image
from pydantic import Field

from stretto.base.config import Config
from stretto.pictures.backend import Backend, PaintRequest
from stretto.pictures.verify import Verdict, Verifier
from stretto.tasks.shapes.ledger import Ledger, describe
from stretto.tasks.shapes.turns import Conversation, tell

_MARGIN = 2
"""Pixels around what stays, so that nothing new touches it."""


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
    picture: Image.Image
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
        return Reply(replace(dialogue, conversation=told.conversation), " ".join(told.questions), is_question=True)
    after = replace(dialogue, conversation=told.conversation)
    done = "; ".join(told.notes)
    if not (told.conversation.now.things or told.conversation.now.texts):
        return Reply(after, f"{done}: nothing is asked for")
    if after.shown is None:
        now = told.conversation.now
        width, height = now.size or (options.width, options.height)
        order = PaintRequest(write(now), width, height, options.seed)
        before = None if dialogue.shown is None else dialogue.shown.picture
        made = painted(now, order, backend, verifier, options.images, progress, before)
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
    before: Image.Image | None = None,
) -> Version:
    """The first picture of an ``order`` that shows what is asked for, or of so many, with a seed each, the one with the fewest faults.
    Where a backend fails behind the first, so many were all, and that is told. Raises as `respond`.

    Args:
        before: what was shown until now. It, and then the best so far, is changed where it is wrong, if the backend can and
            something in it is right; after a change that mended nothing a new picture is painted.
    """
    best: Version | None = None
    base: tuple[Image.Image, Verdict] | None = None
    if before is not None and backend.edits and before.size == (order.width, order.height):
        base = before, verifier.judge(ledger, before)
        if not base[1].faults and not base[1].unchecked:
            return Version(ledger, order.prompt, before, base[1], 0)
    for attempt in range(images):
        request = replace(order, seed=order.seed + attempt)
        mask = None
        if base is not None and backend.edits and (mask := _wrong_part(*base, backend.multiple)) is not None:
            request = replace(request, base=base[0], mask=mask)
        try:
            picture = backend.paint(request, _part(progress, attempt, images))
        except RuntimeError as error:
            if best is None:
                raise
            troubles = (*best.verdict.troubles, f"no further picture could be painted: {error}")
            return replace(best, num_images=attempt, verdict=replace(best.verdict, troubles=troubles))
        verdict = verifier.judge(ledger, picture)
        is_mended = base is None or len(verdict.faults) < len(base[1].faults)
        if best is None or len(verdict.faults) < len(best.verdict.faults):
            best = Version(ledger, order.prompt, picture, verdict, attempt + 1)
        if not verdict.faults:
            break
        base = (best.picture, best.verdict) if mask is None or is_mended else None
    assert best is not None
    return replace(best, num_images=attempt + 1)


def _wrong_part(picture: Image.Image, verdict: Verdict, multiple: int) -> Image.Image | None:
    """White but for what is right, whole squares of ``multiple`` pixels; None: nothing is right, or nowhere is room."""
    width, height = picture.size
    mask = Image.new("L", (width, height), 255)
    for left, top, right, bottom in verdict.right:
        low_x, low_y = (int(each - _MARGIN) // multiple * multiple for each in (left * width, top * height))
        high_x, high_y = (-(int(each + _MARGIN) // -multiple) * multiple for each in (right * width, bottom * height))
        mask.paste(0, (max(0, low_x), max(0, low_y), high_x, high_y))
    return mask if verdict.right and mask.getbbox() else None


def _part(progress: Callable[[float], None], at: int, num: int) -> Callable[[float], None]:
    return lambda done: progress((at + done) / num)
