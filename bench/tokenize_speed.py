"""Tokenising: our shards against ``datasets.map`` with the same tokenizer, speed and peak memory.

    python -m bench.tokenize_speed [--data FOLDER --tokenizer FILE] [--megabytes N] [--rounds R]

Each measurement is a fresh process; the two take turns. Memory is the sum over the process tree of what cannot be
dropped (anonymous and shared pages, each counted once), sampled, so that memory-mapped files count for neither.
``datasets`` is timed twice: ``map`` alone, after it has copied the text into its own format, and with that copy. Its
function calls the Rust tokenizer directly, which is faster than going through transformers. Ours reads the JSONL.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from bench.common.measure import wide_console
from stretto.data.demo_text import demo_documents
from stretto.data.shards import tokenise
from stretto.data.sources import Document, open_source, read_files
from stretto.text.tokenizer import load_tokenizer, train_tokenizer

SAMPLE_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="text to tokenise; default: the interpreter's standard library")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; default: one trained on the text")
    parser.add_argument("--megabytes", type=float, default=40, help="how much text to take")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each; the median is shown")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--worker", choices=("ours", "datasets"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run = _run_ours if options.worker == "ours" else _run_datasets
        print(json.dumps(run(options.folder, options.tokenizer, options.processes)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        _compare(Path(temporary), options)


def _compare(folder: Path, options: argparse.Namespace) -> None:
    documents = open_source(options.data).read("train") if options.data else demo_documents(1 << 30, 0)
    num_bytes = _write(documents, folder / "whole", options.megabytes * 1e6)
    _write(read_files([folder / "whole" / "text.jsonl"]), folder / "quarter", num_bytes / 4)
    tokenizer = options.tokenizer
    if tokenizer is None:
        texts = (document.text for document in read_files([folder / "quarter" / "text.jsonl"]))
        train_tokenizer(texts, 4096).save(folder / "tokenizer")
        tokenizer = folder / "tokenizer" / "tokenizer.json"
    results: dict[str, list[dict[str, Any]]] = {"ours": [], "datasets": [], "quarter": []}
    for _ in range(options.rounds):
        for name in results:
            text, worker = ("quarter", "ours") if name == "quarter" else ("whole", name)
            results[name].append(_measure(worker, folder / text, tokenizer, options.processes))
            print(name, results[name][-1], flush=True)
    ours, theirs = results["ours"][0], results["datasets"][0]
    assert ours["num_tokens"] == theirs["num_tokens"], f"{ours['num_tokens']} tokens, {theirs['num_tokens']} theirs"
    _show(num_bytes, {name: _medians(runs) for name, runs in results.items()}, options)


def _show(num_bytes: int, results: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    ours, theirs, quarter = results["ours"], results["datasets"], results["quarter"]
    size = num_bytes / 1e6
    table = Table(title=f"{size:.0f} MB of text, {options.processes} processes, median of {options.rounds}")
    for heading in ("", "MB/s", "seconds", "peak MB"):
        table.add_column(heading, justify="right" if heading else "left")
    rows = [
        ("stretto, from JSONL to shards", size, ours["wall_s"], f"{ours['peak_mb']:.0f}"),
        ("stretto, a quarter of the text", size / 4, quarter["wall_s"], f"{quarter['peak_mb']:.0f}"),
        ("datasets.map alone", size, theirs["map_s"], f"{theirs['peak_mb']:.0f}"),
        ("datasets, load and map", size, theirs["wall_s"], f"{theirs['peak_mb']:.0f}"),
    ]
    for name, megabytes, seconds, peak in rows:
        table.add_row(name, f"{megabytes / seconds:.2f}", f"{seconds:.1f}", peak)
    console = wide_console()
    console.print(table)
    console.print(
        f"speed, ours over datasets.map alone: {theirs['map_s'] / ours['wall_s']:.2f}x; "
        f"over load and map: {theirs['wall_s'] / ours['wall_s']:.2f}x"
    )
    console.print(
        f"peak memory, ours over theirs: {ours['peak_mb'] / theirs['peak_mb']:.2f}x; "
        f"ours, whole over a quarter: {ours['peak_mb'] / quarter['peak_mb']:.2f}x"
    )


def _write(documents: Iterator[Document], folder: Path, limit: float) -> int:
    """Write documents as one JSONL file until ``limit`` bytes of text; return the bytes.

    Empty ones are left out: ours skips them, and ``datasets`` would give each a lone end of text.
    """
    folder.mkdir()
    num_bytes = 0
    with (folder / "text.jsonl").open("w", encoding="utf-8") as handle:
        for document in filter(lambda document: document.text, documents):
            handle.write(json.dumps({"text": document.text}, ensure_ascii=False) + "\n")
            num_bytes += len(document.text.encode())
            if num_bytes >= limit:
                break
    return num_bytes


def _run_ours(folder: Path, tokenizer_path: Path, processes: int) -> dict[str, float]:
    tokenizer = load_tokenizer(tokenizer_path)
    with tempfile.TemporaryDirectory(dir=folder) as out:
        start = time.perf_counter()
        documents = read_files([folder / "text.jsonl"])
        manifest = tokenise({"train": documents}, tokenizer, Path(out) / "shards", processes=processes)
        return {"wall_s": time.perf_counter() - start, "num_tokens": manifest.num_tokens}


def _run_datasets(folder: Path, tokenizer_path: Path, processes: int) -> dict[str, float]:
    import datasets
    import tokenizers

    rust = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    eos_id = load_tokenizer(tokenizer_path).eos_id

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        rust.encode_special_tokens = True  # as ours; set here because pickling to a process loses it
        coded = rust.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"tokens": [[*document.ids, eos_id] for document in coded]}

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        start = time.perf_counter()
        loaded = datasets.load_dataset("json", data_files=str(folder / "text.jsonl"), split="train", cache_dir=cache)
        map_start = time.perf_counter()
        coded = loaded.map(encode, batched=True, num_proc=processes, remove_columns=["text"])
        end = time.perf_counter()
        num_tokens = sum(len(row) for batch in coded.with_format("arrow").iter(64) for row in batch["tokens"])
    return {"wall_s": end - start, "map_s": end - map_start, "num_tokens": num_tokens}


def _measure(worker: str, folder: Path, tokenizer: Path, processes: int) -> dict[str, Any]:
    """Run one worker in a fresh process; its result, with the peak memory of its process tree."""
    command = [sys.executable, "-m", "bench.tokenize_speed", "--worker", worker, "--folder", str(folder)]
    command += ["--tokenizer", str(tokenizer), "--processes", str(processes)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    peak = 0
    while process.poll() is None:
        peak = max(peak, _tree_bytes(process.pid))
        time.sleep(SAMPLE_S)
    output = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise SystemExit(f"{worker}: exit code {process.returncode}")
    return {**json.loads(output.strip().splitlines()[-1]), "peak_mb": peak / 1e6}


def _tree_bytes(root: int) -> int:
    """Anonymous and shared bytes of a process and its descendants, shared pages divided by their sharers (Linux)."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        stat = _read(folder / "stat")
        if stat:
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    tree, total = {root}, 0
    while grown := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= grown
    for pid in tree:
        for line in _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1]) * 1024
    return total


def _read(path: Path) -> str:
    """Text of a /proc file, empty where the process has ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {name: median(run[name] for run in runs) for name in runs[0]}


if __name__ == "__main__":
    main()
