"""How long OpenMP's threads, in which torch computes on a CPU, wait for each other before they sleep."""

from __future__ import annotations

from collections.abc import MutableMapping

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables with which a user sets how OpenMP's threads wait."""


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads sleep after microseconds of waiting for each other, unless a variable of `WAITING` is set.

    A spinning thread occupies the core that the thread it waits for needs: with one of two cores busy, training took 3.1 times as
    long. On a quiet machine this short spin costs nothing; sleeping at once (``OMP_WAIT_POLICY=passive``) cost 7 %. OpenMP reads the
    environment when torch is imported, so later calls change nothing.
    """
    if not any(name in environment for name in WAITING):
        environment.update(GOMP_SPINCOUNT="1000", KMP_BLOCKTIME="1")  # GNU: rounds; LLVM and Intel: milliseconds
