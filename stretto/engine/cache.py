"""Page table of the cache: owners of pages and reuse of full pages. Counts only; the runner holds the tensors.

A page is in exactly one of three states:

    free                 nobody's, contents meaningless
    cached, unreferenced nobody's, but full and findable by its hash; taken (least recently used first) when free runs out
    referenced           in the table of one or more sequences; findable too once it is sealed

A referenced page that is sealed is full and final, so sharing needs no copy: nobody writes to it again. The hash of a
page covers everything its keys and values depend on: the pages before it (by their hash), its tokens, and a salt for
the weights and the Subnets. 32 bytes of BLAKE2b: equal hashes are taken for equal contents.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import repeat

ROOT = bytes(32)
"""Hash that the first page of a sequence follows."""


def chain_hash(previous_hash: bytes, tokens: Sequence[int], salt: bytes) -> bytes:
    """Hash of a page. The salt comes last, so for pages of one size no two inputs are the same bytes."""
    return hashlib.blake2b(previous_hash + array("q", tokens).tobytes() + salt, digest_size=32).digest()


class PageAllocator:
    """Hands out ``num_pages`` pages of ``page_size`` tokens each, and finds full ones again by their contents."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 0 and page_size > 0, f"{num_pages} pages of {page_size} tokens"
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and unreferenced, least recently used first
        self._num_references = [0] * num_pages
        self._page_by_hash: dict[bytes, int] = {}
        self._hash_by_page: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could give now: the free and the cached, unreferenced ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Pages that `match` could find, in use or not."""
        return len(self._page_by_hash)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens``."""
        return -(-num_tokens // self.page_size)

    def match(self, tokens: Sequence[int], salt: bytes | Iterable[bytes]) -> list[int]:
        """The longest cached chain of full pages that leaves at least one of ``tokens`` out; takes a reference on each.

        Args:
            tokens: from position 0; the last one is always left to compute, since its logits are wanted.
            salt: one for all pages, or one for each page in turn (where they end, the search ends).
        """
        size, pages, previous = self.page_size, [], ROOT
        salts = repeat(salt) if isinstance(salt, bytes) else salt
        for number, page_salt in zip(range((len(tokens) - 1) // size), salts, strict=False):
            previous = chain_hash(previous, tokens[number * size : (number + 1) * size], page_salt)
            page = self._page_by_hash.get(previous)
            if page is None:
                break
            pages.append(page)
        for page in pages:
            if self._num_references[page] == 0:
                del self._idle[page]
            self._num_references[page] += 1
        return pages

    def allocate(self, num: int) -> list[int] | None:
        """``num`` pages with one reference each, or None, with nothing taken, where there are not so many."""
        assert num >= 0, f"{num} pages asked for"
        if num > self.num_free:
            return None
        pages = []
        for _ in range(num):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                del self._page_by_hash[self._hash_by_page.pop(page)]
            self._num_references[page] = 1
            pages.append(page)
        return pages

    def seal(self, page: int, previous_hash: bytes, tokens: Sequence[int], salt: bytes) -> bytes:
        """Offer a full, final page for reuse; returns its chain hash. Where another page holds the same, that one stays.

        Args:
            page: referenced by the caller, and never written again.
            previous_hash: what sealing the page before it returned; `ROOT` for the first.
            tokens: all ``page_size`` of the page.
            salt: what else its contents depend on.
        """
        assert len(tokens) == self.page_size, f"{len(tokens)} tokens in a page of {self.page_size}"
        assert self._num_references[page] > 0, f"page {page} is nobody's"
        digest = chain_hash(previous_hash, tokens, salt)
        if digest not in self._page_by_hash:
            assert page not in self._hash_by_page, f"page {page} is sealed with other contents"
            self._page_by_hash[digest] = page
            self._hash_by_page[page] = digest
        return digest

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference on each of a sequence's ``pages``; sealed ones stay findable until they are needed."""
        # From the end: a chain loses its last page first, since the rest could not be found without the first.
        for page in reversed(pages):
            assert self._num_references[page] > 0, f"page {page} is released more often than taken"
            self._num_references[page] -= 1
            if self._num_references[page] == 0:
                if page in self._hash_by_page:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def hashes(self, pages: Sequence[int]) -> list[bytes]:
        """Chain hashes of pages that `match` has just returned."""
        return [self._hash_by_page[page] for page in pages]

    def unseal(self, pages: Sequence[int]) -> None:
        """Let none of ``pages``, which the caller holds, be found any more."""
        for page in pages:
            assert self._num_references[page] > 0, f"page {page} is nobody's"
            if (digest := self._hash_by_page.pop(page, None)) is not None:
                del self._page_by_hash[digest]

    def forget(self) -> None:
        """Let no page be found any more (weights changed). Pages in use stay with those who use them."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._page_by_hash.clear()
        self._hash_by_page.clear()

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Assert that every page is in exactly one state, and, where all ``tables`` are given, referenced by just those."""
        referenced = [page for page, num in enumerate(self._num_references) if num > 0]
        assert min(self._num_references) >= 0, f"negative references: {self._num_references}"
        everything = Counter([*self._free, *self._idle, *referenced])
        assert everything == Counter(range(self.num_pages)), f"lost or doubled: {everything}"
        assert {page: digest for digest, page in self._page_by_hash.items()} == self._hash_by_page, "hashes disagree"
        assert all(page in self._hash_by_page for page in self._idle), "an unreferenced page without a hash is not free"
        assert not any(page in self._hash_by_page for page in self._free), "a free page has a hash"
        if tables is not None:
            held = Counter(page for table in tables for page in table)
            counts = {page: self._num_references[page] for page in referenced}
            assert counts == dict(held), f"references {counts}, tables hold {dict(held)}"
