"""Pages are neither lost nor shared wrongly, and what was computed once is found again."""

from __future__ import annotations

from itertools import repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.engine.cache import ROOT, PageAllocator
from tests.engine.scheduler_loop import check_pages

SALT = b"weights 0"


def fill(allocator: PageAllocator, tokens: list[int], salt: bytes = SALT) -> list[int]:
    """Compute ``tokens`` as a sequence of its own would: match, allocate the rest, seal what is full."""
    pages = allocator.match(tokens, repeat(salt))
    digests = allocator.hashes(pages)
    fresh = allocator.allocate(allocator.pages_for(len(tokens)) - len(pages))
    assert fresh is not None
    pages += fresh
    size = allocator.page_size
    for number in range(len(digests), len(tokens) // size):
        previous = digests[-1] if digests else ROOT
        digests.append(allocator.seal(pages[number], previous, tokens[number * size : (number + 1) * size], salt))
    return pages


def test_a_prompt_is_found_again_but_for_its_last_token() -> None:
    allocator = PageAllocator(8, 4)
    tokens = list(range(12))
    pages = fill(allocator, tokens)
    assert allocator.num_cached == 3 and allocator.num_free == 8 - 3
    assert allocator.match(tokens, repeat(SALT)) == pages[:2]  # the third page ends with the last token
    assert allocator.match([*tokens, 99], repeat(SALT)) == pages
    assert allocator.match(tokens[:4], repeat(SALT)) == []
    check_pages(allocator, [pages, pages[:2], pages])


def test_a_page_is_found_only_after_the_same_pages_under_the_same_salt() -> None:
    allocator = PageAllocator(8, 2)
    pages = fill(allocator, [1, 2, 3, 4, 5])
    assert allocator.match([3, 4, 5], repeat(SALT)) == []
    assert allocator.match([1, 2, 3, 4, 5], repeat(b"weights 1")) == []
    assert allocator.match([1, 2, 3, 4, 5], [SALT, b"weights 1"]) == pages[:1]
    assert allocator.match([1, 2, 3, 4, 5], iter([SALT])) == pages[:1]
    assert allocator.match([2, 1, 3, 4, 5], repeat(SALT)) == []


def test_pages_of_one_content_are_registered_once() -> None:
    allocator = PageAllocator(4, 2)
    first, second = allocator.allocate(1), allocator.allocate(1)
    assert first is not None and second is not None
    digest = allocator.seal(first[0], ROOT, [1, 2], SALT)
    assert allocator.seal(first[0], ROOT, [1, 2], SALT) == digest
    assert allocator.seal(second[0], ROOT, [1, 2], SALT) == digest
    assert allocator.num_cached == 1
    assert allocator.match([1, 2, 3], repeat(SALT)) == first
    allocator.release(second)
    allocator.release(first * 2)
    check_pages(allocator, [])
    assert allocator.num_free == 4 and allocator.num_cached == 1


def test_the_end_of_the_chain_used_longest_ago_goes_first() -> None:
    allocator = PageAllocator(4, 2)
    old, new = fill(allocator, [1, 2, 3, 4]), fill(allocator, [5, 6, 7, 8])
    allocator.release(old)
    allocator.release(new)
    assert allocator.num_free == 4 and allocator.num_cached == 4
    assert allocator.allocate(1) == old[1:]
    found = allocator.match([1, 2, 3, 4, 9], repeat(SALT))
    assert found == old[:1]
    allocator.release(found)  # used again, so the other chain is the older one now
    assert allocator.allocate(2) == [new[1], new[0]]
    assert allocator.match([1, 2, 9], repeat(SALT)) == old[:1]
    assert allocator.allocate(1) is None


def test_what_is_not_there_is_not_taken() -> None:
    allocator = PageAllocator(3, 2)
    pages = allocator.allocate(2)
    assert pages is not None
    assert allocator.allocate(2) is None
    assert allocator.num_free == 1
    assert PageAllocator(1, 1).allocate(1) is not None
    with pytest.raises(AssertionError, match="-1 pages"):
        allocator.allocate(-1)
    check_pages(allocator, [pages])


def test_nothing_is_found_after_forgetting_and_pages_in_use_stay() -> None:
    allocator = PageAllocator(6, 2)
    idle, used = fill(allocator, [1, 2, 3]), fill(allocator, [4, 5, 6])
    allocator.release(idle)
    allocator.forget()
    assert allocator.num_cached == 0 and allocator.num_free == 6 - 2
    assert allocator.match([4, 5, 6], repeat(SALT)) == []
    check_pages(allocator, [used])
    allocator.release(used)
    check_pages(allocator, [])
    assert allocator.num_free == 6


def test_misuse_is_noticed() -> None:
    allocator = PageAllocator(2, 2)
    pages = allocator.allocate(1)
    assert pages is not None
    with pytest.raises(AssertionError, match="1 tokens in a page of 2"):
        allocator.seal(pages[0], ROOT, [1], SALT)
    with pytest.raises(AssertionError, match="in tables"):
        check_pages(allocator, [])
    allocator.release(pages)
    with pytest.raises(AssertionError, match="more often than taken"):
        allocator.release(pages)
    with pytest.raises(AssertionError, match="no reference"):
        allocator.seal(pages[0], ROOT, [1, 2], SALT)


Operation = tuple[str, list[int], int]
operations = st.lists(
    st.tuples(
        st.sampled_from(["fill", "fill", "fill", "release", "forget"]),
        st.lists(st.integers(0, 1), min_size=1, max_size=9),
        st.integers(0, 9),
    ),
    max_size=40,
)


@given(operations, st.integers(2, 10), st.integers(1, 3))
def test_any_use_keeps_pages_and_contents_in_order(steps: list[Operation], num_pages: int, page_size: int) -> None:
    allocator = PageAllocator(num_pages, page_size)
    contents: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end
    tables: list[list[int]] = []
    for name, tokens, which in steps:
        if name == "fill":
            free_before = allocator.num_free
            found = allocator.match(tokens, repeat(SALT))
            assert len(found) * page_size < len(tokens)
            for number, page in enumerate(found):
                assert contents[page] == tuple(tokens[: (number + 1) * page_size])
            allocator.release(found)
            assert allocator.num_free == free_before
            if allocator.pages_for(len(tokens)) <= allocator.num_free:
                pages = fill(allocator, tokens)
                assert pages[: len(found)] == found
                tables.append(pages)
                for number, page in enumerate(pages):
                    contents[page] = tuple(tokens[: (number + 1) * page_size])
        elif name == "release" and tables:
            allocator.release(tables.pop(which % len(tables)))
        elif name == "forget":
            allocator.forget()
            assert allocator.match(tokens, repeat(SALT)) == []
        check_pages(allocator, tables)
    for table in tables:
        allocator.release(table)
    check_pages(allocator, [])
    assert allocator.num_free == num_pages
