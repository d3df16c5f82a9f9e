"""Conversations about a picture: a turn changes the ledger, the ledger becomes a prompt, and the painted picture is checked against the ledger.

The state of a dialogue is its ledgers and pictures. A turn that contradicts the ledger leads to a question and changes nothing; undo shows the
earlier picture again. A picture with faults is painted again, until one has none or the budget of the turn is spent; then the picture with the fewest
faults is shown, and its faults are reported. Where the backend can repaint a part of a picture, parts that are right stay, also those of the
previous turn's picture.
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
"""Margin in pixels around parts that stay, so that new objects do not touch them."""


class PaintOptions(Config):
    """Options for painting the pictures of a conversation."""

    width: int = Field(default=512, gt=0)
    """Pixels. A size named in the conversation takes precedence, for the height too."""
    height: int = Field(default=512, gt=0)
    images: int = Field(default=4, gt=0)
    """Largest number of pictures per turn."""
    seed: int = 0
    """Seed of the first picture of every turn, so that unchanged parts look alike; further pictures get the following numbers."""


@dataclass(frozen=True, slots=True)
class Version:
    """A picture that was shown to the user. Written by `respond`."""

    ledger: Ledger
    prompt: str
    picture: Image.Image
    verdict: Verdict
    num_images: int
    """Number of pictures that were painted for this version."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """State of a dialogue."""

    conversation: Conversation = field(default_factory=Conversation)
    versions: tuple[Version, ...] = ()

    @property
    def shown(self) -> Version | None:
        """The newest version that was painted for the current ledger; None: there is none."""
        return next((each for each in reversed(self.versions) if each.ledger == self.conversation.now), None)


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of a turn."""

    dialogue: Dialogue
    message: str
    """Message to the user: what was done, a question, or the faults of the picture."""
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
        write: Writes the prompt of a ledger.
        progress: Called with the share of the budget that is spent, 0 to 1.

    Raises:
        UserError: The turn is empty, in another language or undoes too much, or the backend refuses. The caller's dialogue is unchanged.
            Errors of ``backend`` and ``verifier`` pass through.
    """
    result = tell(dialogue.conversation, text)
    if result.questions:
        return Reply(replace(dialogue, conversation=result.conversation), " ".join(result.questions), is_question=True)
    after = replace(dialogue, conversation=result.conversation)
    done = "; ".join(result.notes)
    if not (result.conversation.now.things or result.conversation.now.texts):
        return Reply(after, f"{done}: the picture has no content yet")
    if after.shown is None:
        now = result.conversation.now
        width, height = now.size or (options.width, options.height)
        request = PaintRequest(write(now), width, height, options.seed)
        before = None if dialogue.shown is None else dialogue.shown.picture
        version = painted(now, request, backend, verifier, options.images, progress, before)
        after = replace(after, versions=(*after.versions, version))
    shown = after.shown
    assert shown is not None
    faults = "; ".join(fault.says for fault in shown.verdict.faults)
    if faults:
        done += f". Not right yet after {shown.num_images} pictures: {faults}"
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
    """The first picture without faults, or the one with the fewest of ``images`` pictures with consecutive seeds.

    If the backend fails after the first picture, the best one so far is returned, and the verdict reports the failure. Raises as `respond`.

    Args:
        before: Picture that was shown until now. If the backend supports edits, this picture, and then the best one so far, is changed where
            it has faults; after a change that removed no fault, a new picture is painted.
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
    """Mask of an edit: black over the parts that are right, in squares of ``multiple`` pixels. None: no part is right, or no room is left."""
    width, height = picture.size
    mask = Image.new("L", (width, height), 255)
    for left, top, right, bottom in verdict.right:
        low_x, low_y = (int(each - _MARGIN) // multiple * multiple for each in (left * width, top * height))
        high_x, high_y = (-(int(each + _MARGIN) // -multiple) * multiple for each in (right * width, bottom * height))
        mask.paste(0, (max(0, low_x), max(0, low_y), high_x, high_y))
    return mask if verdict.right and mask.getbbox() else None


def _part(progress: Callable[[float], None], at: int, num: int) -> Callable[[float], None]:
    """Progress of picture ``at`` of ``num`` as progress of the turn."""
    return lambda done: progress((at + done) / num)
