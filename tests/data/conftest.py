from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stretto.data.shards import TokenSet, tokenise
from stretto.data.sources import Document


@dataclass(frozen=True)
class Bytes:
    """The smallest real tokenizer: a token a byte. Counts nothing, knows nothing, pickles."""

    vocab_size: int = 257
    eos_id: int = 256

    def fingerprint(self) -> str:
        return f"bytes-{self.vocab_size}"

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]


def texts(num: int, salt: str = "") -> Iterator[Document]:
    for index in range(num):
        yield Document(f"{salt}{index} " * (1 + index * 7 % 23), domain=("even", "odd")[index % 2])


@pytest.fixture
def make_set(tmp_path: Path) -> Callable[[str, int], TokenSet]:
    """Makes a small data folder by name and number of documents."""

    def make(name: str, num: int) -> TokenSet:
        tokenise({"train": texts(num, name)}, Bytes(), tmp_path / name, processes=1, shard_bytes=1000)
        return TokenSet(tmp_path / name)

    return make
