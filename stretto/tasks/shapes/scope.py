"""Negations, quantifiers, comparisons and alternatives in a request, and places without a second object: written as words that the readers know, or unread.

The readers take every noun for a demand, so an operator that they do not know would turn "at least five ducks" into five ducks. `scoped`
therefore runs before them. It rewrites what has a plain form ("neither a dog nor a cat": no dog, no cat). Of what has none it removes the
words in the operator's scope, and returns the sentence, which then stands beside the ledger in the user's own words.
"""

from __future__ import annotations

import re
from typing import Final

from stretto.tasks.shapes.words import COLOURS, NUMBERS, QUALITIES

_COLOUR: Final = rf"(?:{'|'.join(sorted(COLOURS))})"
_QUALITY: Final = rf"(?:{'|'.join(sorted(COLOURS | QUALITIES))})"
_SMALL: Final = rf"(?:\d+|{'|'.join(word for word in NUMBERS if word not in ('zero', 'single', 'both'))})"
_MANY: Final = r"(?:hundreds?|thousands?|dozens?|twenty|thirty|forty|fifty|\d\d+)"
_TENS: Final = "(?:twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)"
_SIDE: Final = r"(?:(?:far|very|upper|lower|top|bottom)[ -])*(?:left|right|top|bottom|middle|cent(?:er|re)|corner)(?:[ -]hand(?= side))?"
_DETERMINER: Final = rf"(?:either|an?|the|some|any|his|her|their|its|{_SMALL})"
_NOUNS: Final = (  # a second determiner begins another noun: "a dog wearing a hat"
    rf"(?:(?:either )?{_DETERMINER}(?: (?!(?:and|or|with|in|on|at|of|by|to|near|under|over|behind|an?|the|some|any|his|her|their|its)\b)[\w-]+){{1,4}}"
    r"|[\w-]+)"
)
_BE: Final = r"(?:is|are|was|were|be)"
_OBJECT: Final = rf"(?:(?:an?|the) (?:{_QUALITY} )*[\w-]+|(?!one |1 ){_SMALL} (?:{_QUALITY} )*[\w-]+s)"
_COUNTED: Final = rf"{_MANY} (?!(?:years?|dollars?|euros?|percent|km|m|miles?|met(?:er|re)s?|inches|feet)\b)[a-z]"
_REST: Final = r"[^,.;:!?]*"
"""The rest of a clause, which is the scope of an operator without a plain form."""
_PLAIN: Final = (
    (r"\b(is|are|was|were|does|do|did|has|have|had|could|should|would|must)n['’]?t\b", r"\1 not"),
    (r"\b(?:can['’]t|cannot)\b", "can not"),
    (r"\b(?:nobody|no one|no-one)\b", "no people"),
    (r"\bnot (?:an?|any|the)?\s*[\w-]+,? but (?!not\b)(?:rather )?", ""),  # "not black but white"
    (rf"\bthere {_BE} not (?:an?|any)\b", "there is no"),
    (
        r"\b(?:do|does|did|has|have) not (?:(?:hold|have|contain|show|include|wear|carry|got)\s+)?(?:any|an?)\b"
        r"|\bnot (?:wearing|holding|carrying|having|showing|containing)\s+(?:any|an?|the)\b",
        "without any",
    ),
    (
        r"\b(?:minus|sans|devoid of|free (?:of|from)|bare of|void of|empty of|lacking|lacks?|instead of|in place of|rather than|"
        r"(?:but|and),? not(?= (?:an?|the|any)\b)|excluding|omitting|never(?= an?\b))\b",
        "without",
    ),
    (rf"\b(?:exactly|precisely|just|only) (?={_SMALL}\b|an?\b)", ""),
    (r"\bhalf a dozen\b", "six"),
    (r"\b(?:dozens|hundreds|thousands|millions) of\b", "several"),
    (rf"\b(an?(?: {_QUALITY})*) ((?!single|dozen|\d{{4}}){_SMALL}) (?!(?:and|or|to|of|by|more|in|on)\b)(?=[a-z])", r"\1 \2-"),  # "a two story house"
    (rf"\b({_COLOUR})-and-({_COLOUR})\b", r"\1 and \2"),
    (rf",? all (?:of (?:them|which) )?(?={_COLOUR}\s*(?:[,.;]|$))", " that are "),  # "six roses, all red"
    # Behind an object, "over" and "under" are a place: "a lamp over 20 cups". Elsewhere they are an amount: "a box holds over 20 cups".
    (rf"\b({_OBJECT}) over (?={_COUNTED})", r"\1 above "),
    (rf"\b({_OBJECT}) under (?={_COUNTED})", r"\1 below "),
)  # fmt: skip
_UNREAD: Final = (
    (
        rf"\b(?:at least|at most|(?:no|not) (?:more|fewer|less) than|more than|fewer than|less than|up to|about|roughly|approximately|"
        rf"almost|nearly)\s+(?:an?\s+)?(?:{_SMALL}|{_MANY})\b|\b(?:over|around|under)\s+(?:an?\s+)?{_MANY}\b(?: of\b)?",
        "several",
    ),
    (
        rf"\b(?:{_SMALL}|several)[ -]dozen\b|\b(?:an?|{_SMALL}|several)[ -](?:hundred|thousand|million)\b|\b{_TENS}[ -]{_SMALL}\b",
        "several",
    ),
    (rf"\b{_SMALL}\s+(?:or|to)\s+{_SMALL}\b(?=\s+[a-z])|\b\d+\s*[-–]\s*\d+\b(?=\s+[a-z])", "several"),
    (r"\b(?:more|fewer|less) ([\w\s-]+?) than (?=\w+s\b)|\b(?:\w+ )?as (?:many|much) ([\w\s-]+?) as\b", r"some \1\2 and some "),
    # without the bound, a long list that ends in no "or" takes quadratic time
    (rf"\b(?:either )?{_QUALITY}(?:(?:,|,? or) {_QUALITY}){{0,30}},? or {_QUALITY}\b", ""),
    (rf"\bmore or less |\b{_SMALL} by {_SMALL} (?=[a-z])", ""),
    (rf",? ?\b(?:no|without)(?: [\w-]+){{1,3}}(?:, [\w-]+(?: [\w-]+)?){{1,5}},? or\b{_REST}", ""),
    (rf"^(?=.* or )(?!.*\b(?:no|nor|without|whether)\b.* or )(.*?)(?:\b\w+ing )?\b{_NOUNS}(?:, {_NOUNS}){{0,5}},? or \b.*?(?=[.;:!?]|$)", r"\1"),
    (  # places without another object: "on the left", "in the top left corner of the picture"
        rf",? ?\b(?:from left to right|on top(?! of)|(?:in|on|at|to|near|from) (?:the|its|his|her|their) {_SIDE}"
        r"(?: (?:side|half|corner|edge|third))?(?: of the (?:picture|image|photo|frame|scene|canvas))?"
        rf"(?! of)(?=\s*(?:[,.;:!?]|$|(?:and|{_BE}|an?|the|with|one|two|three|[\w-]+ing (?:an?|the|his|her|at|to))\b)))",
        "",
    ),
    (rf"\b(?:half|most|many|few|none|some|all)\s+of\s+(?:the\s+)?({_SMALL} )?([\w-]+s)\s+{_BE}\b{_REST}", r"some \2"),
    (rf"\bthe \w+est of (?:the )?({_SMALL} [\w-]+)\b{_REST}", r"\1"),
    (rf"[,:]?\s*\b(?:only )?(?:{_SMALL}|some|half|most|many|each|none|all|both) of (?:them|which|whom|these|those)\b{_REST}", ""),
    (
        rf"[,:]\s*(?:and )?(?:{_SMALL}|the others?|another|some) (?:{_BE} )?(?:{_COLOUR}|open|closed|broken|empty|full|lit|overturned|[\w-]+ing"
        rf"(?! [\w-]+s\b))(?=\s*(?:[,.;:!?]|$|(?:and|on|in|over|with|at|one|two)\b)){_REST}",
        "",
    ),
    (rf"[,:]\s*one (?=(?:with|in|on|of|has)\b)|\bthe others?\b(?=\s+(?:{_BE}|has|have|with)\b)", " "),
    (rf"\b(?:all|every) (?:the |of the )?([\w-]+) (?:but|except)\b{_REST}", r"some \1"),
    (rf"\bthe (?:[\w-]+ ){{0,2}}ones?\b{_REST}", ""),
    (rf"(?:\b(?:much|far|slightly) )?(?:\b(?:more|less) )?\b[\w-]+ than\b{_REST}|\b(?:twice )?as [\w-]+ as\b{_REST}", ""),
    (
        rf"(?:\b(?:{_BE}|do|does|did|has|have|can|will|would|could|should|must) )?\b(?:not|never|none|nothing|hardly|barely|scarcely|unless|"
        rf"except|neither|nor|nowhere|least|most of|only|half of|each of|fewer|no longer)\b{_REST}",
        "",
    ),
)  # fmt: skip
_NEITHER: Final = re.compile(r"\bneither\s+(.+?)(?=[.;:!?]|$)", re.I)
_PATTERNS: Final = tuple((re.compile(pattern, re.I), plain, False) for pattern, plain in _PLAIN) + tuple(
    (re.compile(pattern, re.I), plain, True) for pattern, plain in _UNREAD
)


def scoped(text: str) -> tuple[str, tuple[str, ...]]:
    """``text`` in words that the readers understand, and the sentences from which words were removed for that."""
    seen, unread = list[str](), list[str]()
    for sentence in re.split(r"(?<=[.;!?])\s+", text):
        plain = _NEITHER.sub(lambda found: "no " + re.sub(r",?\s*\b(?:n?or)\b", ", no", found[1]), sentence)
        plain = re.sub(r"\bno (?:an?|any|the|single)\b", "no", plain, flags=re.I)
        is_whole = True
        for pattern, written, is_unread in _PATTERNS:
            plain, num = pattern.subn(written, plain)
            is_whole &= not (num and is_unread)
        seen.append(plain)
        if not is_whole:
            unread.append(sentence.strip())
    return " ".join(seen), tuple(unread)
