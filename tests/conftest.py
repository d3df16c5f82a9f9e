"""Settings for every test: one thread a process, no network, the same examples each time."""

from __future__ import annotations

import os

# Before torch, tokenizers and the hub client read them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

from hypothesis import settings

# A shared machine may stall for seconds, so no deadline; the same examples everywhere, so that CI repeats.
settings.register_profile("house", deadline=None, derandomize=True, max_examples=50, print_blob=True)
settings.load_profile("house")
