"""What adopting a checkpoint takes that does not fit in memory: peak memory of the process, and speed against copying it.

    python -m bench.adopt_stream SCRATCH                  a checkpoint of about 1 GB, in a minute or two
    python -m bench.adopt_stream SCRATCH --gb 20          the shape of Qwen3-30B-A3B with fewer layers; needs 41 GB of disk

A synthetic qwen3_moe checkpoint is written into SCRATCH, in several files, and removed afterwards. It is adopted as it is (files
are copied), with the orders measured on a few tokens, and from blockwise FP8 to bf16 (every tensor is read, multiplied with its
scales and written). Each beside a plain copy of the same files on the same disk, made right before, both until they are on it; source
files are dropped from the page cache first. Exit code 1: more memory than --most-gb, or slower than half a copy where nothing
is measured.

``--hold`` reads the whole state instead of streaming it, which must fail at 20 GB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pydoc_data
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from bench.common.measure import wide_console
from stretto.model.families import stored_tensors, to_hf
from stretto.model.spec import ModelConfig, count
from stretto.text.tokenizer import train_tokenizer

LARGE = {
    "vocab_size": 151_936, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 4, "head_dim": 128, "num_experts": 128,
    "top_k": 8, "expert_intermediate_size": 768, "router": "softmax", "selection_bias": False, "qk_norm": True,
}  # fmt: skip
SMALL = LARGE | {
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "num_heads": 8,
    "num_experts": 32,
    "expert_intermediate_size": 512,
}
FP8_BLOCK = 128
TEXT = Path(pydoc_data.__file__).parent / "topics.py"
"""To measure on: half a megabyte that every machine has."""
HELD = """
import sys; from stretto.model.checkpoint import read_checkpoint, write_checkpoint
made = read_checkpoint(sys.argv[1]); write_checkpoint(sys.argv[2] + "/checkpoint", made.model, made.config, family=made.family)
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One way to adopt."""

    name: str
    peak_bytes: int
    wall_s: float
    written: int
    copy_speed: float
    """Bytes a second of a plain copy of the same files, made right before."""
    is_measured: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "scratch", type=Path, help="a folder on the disk to be measured; what is written there is removed"
    )
    parser.add_argument("--gb", type=float, default=1.0, help="size of the bf16 checkpoint")
    parser.add_argument("--file-gb", type=float, default=4.0, help="size of its files, at most")
    parser.add_argument("--tokens", type=int, default=2048, help="to measure orders on; 0: not done")
    parser.add_argument("--most-gb", type=float, default=3.0, help="memory that is allowed")
    parser.add_argument("--hold", action="store_true", help="read everything at once")
    arguments = parser.parse_args()
    folder = arguments.scratch / f"adopt-stream-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        sys.exit(_show(arguments, list(_rows(arguments, folder))))
    finally:
        shutil.rmtree(folder)


def _rows(arguments: argparse.Namespace, folder: Path) -> Iterator[Row]:
    shape = LARGE if arguments.gb >= 8 else SMALL
    a_layer, two = (_bytes(shape, layers + 1) - _bytes(shape, layers) for layers in (1, 2))
    assert a_layer == two
    num_layers = max(2, round((arguments.gb * 1e9 - _bytes(shape, 1)) / a_layer) + 1)
    config = ModelConfig(**shape, num_layers=num_layers, max_positions=4096)
    most = min(int(arguments.file_gb * 1e9), int(arguments.gb * 1e9 / 4))
    source, out = folder / "source", folder / "out"
    _synthesise(source, config, most, False)
    yield _adopted("as it is", source, out, ["--order", "none"], arguments.hold)
    if arguments.tokens:
        measured = ["--calibration", str(TEXT), "--calibration-tokens", str(arguments.tokens)]
        yield _adopted(f"with orders, {arguments.tokens} tokens", source, out, measured)
    shutil.rmtree(source)
    _synthesise(source, config, most, True)
    yield _adopted("FP8 to bf16", source, out, ["--order", "none"])


def _bytes(shape: dict[str, object], num_layers: int) -> int:
    config = ModelConfig(**shape, num_layers=num_layers)
    return 2 * count(config, config.full()).total_params


def _synthesise(*arguments: Any) -> None:
    """`_write` in a process of its own: Linux takes for the peak of a child what its parent held when it was started."""
    process = multiprocessing.get_context("spawn").Process(target=_write, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0, f"the checkpoint could not be written: {process.exitcode}"


def _write(folder: Path, config: ModelConfig, most: int, fp8: bool) -> None:
    """Small normal weights, the same block again and again: what they are does not matter, that they are finite does."""
    folder.mkdir()
    block = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
    shards: list[dict[str, Tensor]] = [{}]
    weight_map: dict[str, str] = {}
    size = 0

    def flush() -> None:
        name = f"model-{len(weight_map):06}.safetensors"
        save_file(shards[0], folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shards[0], name))
        shards[0] = {}

    for stored in stored_tensors(config, "qwen3_moe"):
        number = int(torch.tensor(stored.shape).prod())
        tensor = block.repeat(-(-number // block.numel()))[:number].view(stored.shape)
        tensors = {stored.name: tensor.clone()}
        if stored.name.endswith("norm.weight"):
            tensors = {stored.name: torch.ones(stored.shape, dtype=torch.bfloat16)}
        elif fp8 and ".experts." in stored.name:
            rows, columns = (-(-side // FP8_BLOCK) for side in stored.shape)
            scales = torch.full((rows, columns), 1 / 4096)
            tensors = {stored.name: (tensor * 4096).to(torch.float8_e4m3fn), f"{stored.name}_scale_inv": scales}
        num_bytes = sum(each.numel() * each.element_size() for each in tensors.values())
        if shards[0] and size + num_bytes > most:
            flush()
            size = 0
        shards[0] |= tensors
        size += num_bytes
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    tree = to_hf(config, "qwen3_moe", "bfloat16")
    if fp8:
        tree["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    (folder / "config.json").write_text(json.dumps(tree))
    train_tokenizer(iter([TEXT.read_text(encoding="utf-8")]), 2048).save(folder)
    os.sync()


def _forget(folder: Path) -> None:
    """Drop the files below ``folder`` from the page cache, as far as the system follows."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _copied(source: Path, target: Path) -> float:
    """Bytes a second of a plain copy, until it is on the disk; the copy is removed."""
    _forget(source)
    start = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    os.sync()
    wall_s = time.perf_counter() - start
    shutil.rmtree(target)
    return sum(path.stat().st_size for path in source.iterdir()) / wall_s


def _adopted(name: str, source: Path, out: Path, arguments: list[str], hold: bool = False) -> Row:
    """Copy, then adopt in a process of its own, each until the result is on the disk; both are removed."""
    copy_speed = _copied(source, out)
    _forget(source)
    command = [sys.executable, "-m", "stretto", "adopt", str(source), "-o", str(out), *arguments]
    if hold:
        command = [sys.executable, "-c", HELD, str(source), str(out)]
    start = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    os.sync()
    wall_s = time.perf_counter() - start
    assert status == 0, f"{command} ended with {status}"
    written = sum(path.stat().st_size for path in (out / "checkpoint").rglob("*") if path.is_file())
    shutil.rmtree(out)
    return Row(name, usage.ru_maxrss * 1024, wall_s, written, copy_speed, "--calibration" in arguments)


def _show(arguments: argparse.Namespace, rows: list[Row]) -> int:
    table = Table(title=f"a synthetic qwen3_moe checkpoint of {rows[0].written / 1e9:.1f} GB")
    for column in ("adopted", "peak memory, GB", "written, MB/s", "a copy, MB/s", "share of a copy's speed", "seconds"):
        table.add_column(column)
    failed = False
    for row in rows:
        share = row.written / row.wall_s / row.copy_speed
        failed |= row.peak_bytes > arguments.most_gb * 1e9 or (not row.is_measured and share < 0.5)
        cells = (row.peak_bytes / 1e9, row.written / row.wall_s / 1e6, row.copy_speed / 1e6, share, row.wall_s)
        table.add_row(
            row.name,
            *(
                form.format(cell)
                for form, cell in zip(("{:.2f}", "{:.0f}", "{:.0f}", "{:.0%}", "{:.0f}"), cells, strict=True)
            ),
        )
    wide_console().print(table)
    return int(failed)


if __name__ == "__main__":
    main()
