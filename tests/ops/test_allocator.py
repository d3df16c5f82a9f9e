from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from stretto.ops.allocator import keep_freed_memory

MEASURE = """
import resource, torch
from stretto.ops.allocator import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(4 << 20)  # 16 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = faults()
kept = keep_freed_memory()
for _ in range(8):
    faults()  # the heap grows to what is needed
print(kept, before, faults())
"""


def test_says_whether_it_took_effect() -> None:
    assert keep_freed_memory() is (platform.libc_ver()[0] == "glibc")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    """In a fresh process, since the setting cannot be taken back."""
    output = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True).stdout
    kept, before, after = output.split()
    assert kept == "True"
    assert int(before) > 0, output
    assert int(after) == 0, output
