"""Checkpoints read by several ranks, in real gloo processes: the same weights, and each rank reads its share only."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.elastic import with_branch_rows
from stretto.model.parallel import full_state, join, read_placed, spread, stored
from stretto.model.transformer import MoeLayer
from stretto.model.weight_files import TensorFiles
from stretto.train.teacher import hash_state
from tests.model.checkpoints import NETWORKS, network

ROOT = Path(__file__).resolve().parents[2]


def worker(folder: Path, ep: int) -> None:
    """Compare the sharded way of reading with the unsharded one, and print the bytes that the former reads."""
    ranks = join("cpu", ep)
    expected = full_state(spread(read_checkpoint(folder, dtype=torch.float32).model, ranks))
    sizes: list[int] = []

    def raw(self: TensorFiles, name: str, part: tuple[int | slice, ...] = ()) -> torch.Tensor:
        tensor = read(self, name, part)
        sizes.append(tensor.nbytes)
        return tensor

    read, TensorFiles.raw = TensorFiles.raw, raw  # type: ignore[method-assign]
    model = read_placed(folder, ranks).model
    num_bytes = sum(sizes)
    assert all(isinstance(block.mlp.gate_up, DTensor) for block in model.blocks if isinstance(block.mlp, MoeLayer))
    found = full_state(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    whole = read_checkpoint(folder, dtype=torch.float32).model
    assert hash_state(model, torch.bfloat16) == hash_state(whole, torch.bfloat16)
    widths = tuple(sorted({*whole.config.widths, 3}, reverse=True))
    wider = whole.config.replace(widths=widths, num_branches=max(len(widths), whole.config.num_branches))
    found = full_state(stored(folder).place(wider, ranks, torch.bfloat16, torch.float32))
    rows = with_branch_rows(whole.config, wider, whole.state_dict().items())
    assert all(torch.equal(found[name], tensor) for name, tensor in rows if found)
    sys.stdout.write(json.dumps({"bytes": num_bytes}))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ep"), [("qwen", 1), ("qwen", 2), ("glm elastic", 1), ("ernie", 2)])
def test_a_rank_reads_its_share_of_a_checkpoint(tmp_path: Path, name: str, ep: int) -> None:
    family, changes = NETWORKS[name]
    model = network(**changes)
    write_checkpoint(tmp_path, model, model.config, family=family)
    whole = (tmp_path / "model.safetensors").stat().st_size
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": ROOT}
        environment = {**os.environ, **{key: str(value) for key, value in place.items()}}
        command = [sys.executable, __file__, str(tmp_path), str(ep)]
        processes.append(subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE))
    for process in processes:
        out, _ = process.communicate(timeout=250)
        assert process.returncode == 0, out
        # half of the matrices; norms, biases and routers on every rank; checks of constants on the first
        assert json.loads(out)["bytes"] < 0.75 * whole, (out, whole)


if __name__ == "__main__":
    worker(Path(sys.argv[1]), int(sys.argv[2]))
