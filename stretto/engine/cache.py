"""Allocator of cache pages, and reuse of full pages by their hash. The runner holds the tensors.

A page is in exactly one of three states:

    free                 in no sequence, contents meaningless
    cached, unreferenced in no sequence, but full and found by its hash; reused (least recently used first) if none is free
    referenced           in the table of one or more sequences; found by its hash once it is sealed

A sealed page is full and never written again, so sequences share it without a copy. The hash of a
page covers everything that its keys and values depend on: the pages before it (by their hash), its tokens, and a salt for
the weights and the Subnets. It is 32 bytes of BLAKE2b; equal hashes are taken to mean equal contents.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

ROOT = bytes(32)
"""Hash before the first page of a sequence."""


def chain_hash(previous_hash: bytes, tokens: Sequence[int], salt: bytes) -> bytes:
    """Hash of a page. The salt comes last, so different inputs are different bytes for pages of one size."""
    return hashlib.blake2b(previous_hash + array("q", tokens).tobytes() + salt, digest_size=32).digest()


class PageAllocator:
    """Allocates ``num_pages`` pages of ``page_size`` tokens each, and finds full pages by their contents."""

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
        """Number of pages that `allocate` can return now: free pages, and cached, unreferenced ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Number of pages that `match` can find, in use or not."""
        return len(self._page_by_hash)

    def pages_for(self, num_tokens: int) -> int:
        """Number of pages for ``num_tokens``."""
        return -(-num_tokens // self.page_size)

    def match(self, tokens: Sequence[int], salts: Iterable[bytes]) -> list[int]:
        """The longest cached chain of full pages for ``tokens`` without the last one; adds a reference to each page.

        Args:
            tokens: tokens from position 0. The last one is always computed, since its logits are needed.
            salts: salt of each page in order; the search ends where they end.
        """
        size, pages, previous = self.page_size, [], ROOT
        for number, salt in zip(range((len(tokens) - 1) // size), salts, strict=False):
            previous = chain_hash(previous, tokens[number * size : (number + 1) * size], salt)
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
        """``num`` pages with one reference each; None, without allocating any, if there are fewer."""
        assert num >= 0, f"allocation of {num} pages"
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
        """Make a full page available for reuse, and return its chain hash. If another page has equal contents, that page is kept.

        Args:
            page: referenced by the caller, and never written again.
            previous_hash: chain hash of the page before it; `ROOT` for the first page.
            tokens: all ``page_size`` tokens of the page.
            salt: everything else that the contents depend on.
        """
        assert len(tokens) == self.page_size, f"{len(tokens)} tokens in a page of {self.page_size}"
        assert self._num_references[page] > 0, f"page {page} has no reference"
        digest = chain_hash(previous_hash, tokens, salt)
        if digest not in self._page_by_hash:
            assert page not in self._hash_by_page, f"page {page} is sealed with other contents"
            self._page_by_hash[digest] = page
            self._hash_by_page[page] = digest
        return digest

    def release(self, pages: Sequence[int]) -> None:
        """Remove one reference from each of a sequence's ``pages``; sealed pages can still be found until they are reused."""
        # From the end, so a chain loses its last page first: pages after a lost one could not be found.
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
        """Make ``pages``, which the caller references, unavailable for reuse."""
        for page in pages:
            assert self._num_references[page] > 0, f"page {page} has no reference"
            if (digest := self._hash_by_page.pop(page, None)) is not None:
                del self._page_by_hash[digest]

    def forget(self) -> None:
        """Make all pages unavailable for reuse (after a change of weights). Pages in use stay allocated."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._page_by_hash.clear()
        self._hash_by_page.clear()
