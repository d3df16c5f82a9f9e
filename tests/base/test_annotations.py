"""Arguments of Python functions are compared with the annotations."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest

from stretto.base.annotations import wrong_argument

Sizes = Annotated[str | Sequence[str], "names of sizes", "write them as a list"]


def _function(
    path: str | os.PathLike[str],
    steps: int | None = None,
    *more: str,
    share: float = 0.5,
    force: bool = False,
    sizes: Sizes = (),
    table: Mapping[str, int] | None = None,
    anything: Any = None,
    **options: int,
) -> None: ...


class Frame:
    columns = ("text",)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("a", 3, "b", "c"), {}),
        ((Path("a"), None), {"share": 1, "force": True}),
        ((), {"path": "a", "steps": np.int64(3), "share": np.float32(0.5)}),
        (("a",), {"sizes": "half"}),
        (("a",), {"sizes": (each for each in "ab")}),
        (("a",), {"sizes": np.array(["a"]), "table": {}, "anything": object(), "unknown": "x"}),
        (("a", 3, 5), {}),  # left to the function
    ],
)
def test_arguments_that_fit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert wrong_argument(_function, args, kwargs) is None


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((3,), {}, "path: needs a path, is 3"),
        ((None,), {}, "path: needs a path, is None"),
        (("a", "3"), {}, "steps: needs a whole number, is '3'"),
        (("a", 3.0), {}, "steps: needs a whole number, is 3.0"),
        (("a", True), {}, "steps: needs a whole number, is True"),
        (("a",), {"share": "0.5"}, "share: needs a number, is '0.5'"),
        (("a",), {"share": True}, "share: needs a number, is True"),
        (("a",), {"share": None}, "share: needs a number, is None"),
        (("a",), {"force": 1}, "force: needs True or False, is 1"),
        (("a",), {"sizes": 5}, "sizes: needs names of sizes, is 5; write them as a list"),
        (("a",), {"sizes": {"half": 1}}, "sizes: needs names of sizes, is {'half': 1}; write them as a list"),
        (("a",), {"sizes": Frame()}, "sizes: needs names of sizes, is of type Frame; write them as a list"),
        (("a",), {"table": ["a"]}, "table: needs a mapping, is ['a']"),
        (("a",), {"table": "a" * 80}, "table: needs a mapping, is of type str"),
    ],
)
def test_an_argument_of_another_type(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    assert wrong_argument(_function, args, kwargs) == message
