"""Settings for every test: one thread a process, no network, the same examples each time."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter

# Before torch, tokenizers and the hub client read them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
# Without a GPU, Triton's kernels run in its interpreter, which they ask for when they are imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's background job ignores SIGINT, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import settings

# A shared machine may stall for seconds, so no deadline; the same examples everywhere, so that CI repeats.
settings.register_profile("house", deadline=None, derandomize=True, max_examples=50, print_blob=True)
settings.load_profile("house")

REMEDIES = {
    "bubblewrap": "make test-deps",
    "browser": "make test-deps",
    "compiler": "make test-deps",
    "g++": "make test-deps",
    "LibreOffice": "apt-get install libreoffice-calc",
    "smollm2": "make smollm2",
    "llama_cpp": "pip install 'stretto[bench]'",
    "mergekit": "pip install mergekit",
    "nltk": "pip install nltk",
    "package verifiers": "pip install 'stretto[verifiers]'",
    "package inspect_ai": "pip install 'stretto[eval]'",
    "could not import": "pip install -c constraints.txt -e '.[dev]'",
}
"""The command that installs what a skipped test needs, by a word of the reason; the first that fits."""


def pytest_collection_finish() -> None:
    """Take what importing all tests has made out of garbage collection, whose full passes took longer with every test."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Load the compiled kernels of training, which a process does once, before a test that sets STRETTO_NATIVE=0 asks for them."""
    from stretto.ops.native import training

    training.library()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """In one line what this machine left untested, and how to get it."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ").split(";")[0] for report in skipped)
    said = []
    for reason, num in reasons.most_common():
        remedy = next((remedy for word, remedy in REMEDIES.items() if word in reason), "")
        said.append(f"{num} ({reason}{': ' * bool(remedy)}{remedy})")
    if said:
        terminalreporter.write_line(f"untested here: {', '.join(said)}")
