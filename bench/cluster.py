"""RL on a Ray cluster of four nodes that share no folder, against the plain synchronous loop on one machine, to the bit.

    python -m bench.cluster [--steps 4]

Each node is a raylet with a ``/tmp`` of its own, in its own mount namespace (this needs root). The driver is on the first node; labels
place trainer, engines, and agents and verifiers on the three others. Each run has a staleness of 0. An audit hook in every Python
process of the three nodes counts attempts to open a file below the driver's folders. The control run has the store ``file``: it must
fail, because no role finds the start checkpoint (a role looks for the file before it would open it, so the count is 0 there too).
Fails (exit code 1) if a run with another store differs from the plain loop or opens a foreign path, or if the control run works.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from bench.common.measure import bench_parser, finish, table
from bench.common.nodes import NODES, RESOURCES, START_S, cluster, in_namespace
from bench.common.s3 import s3_server
from bench.sync_equality import plain_run, recipe, start_of, whole_run
from stretto.base.errors import UserError
from stretto.base.track import wide_console

_DRIVER_FOLDER = "/tmp/driver"
_HOOK = f"""
import os, sys
def hook(event, args):
    if event in ("open", "os.listdir", "os.scandir") and str(args[0]).startswith("{_DRIVER_FOLDER}"):
        with os.fdopen(os.open(os.environ["FOREIGN_LOG"], os.O_APPEND | os.O_CREAT | os.O_WRONLY), "a") as log:
            log.write(f"{{args[0]}}\\n")
sys.addaudithook(hook)
"""


@contextmanager
def audited(base: Path) -> Iterator[str]:
    """Address of the cluster. Its nodes write the names of foreign files into ``foreign.txt``."""
    (base / "hook").mkdir()
    (base / "hook" / "sitecustomize.py").write_text(_HOOK)
    path = f"{base / 'hook'}:{os.environ.get('PYTHONPATH', '')}"
    with cluster(base, {"PYTHONPATH": path, "FOREIGN_LOG": str(base / "foreign.txt")}) as made:
        yield made.address


def drive(address: str, store: str, steps: int, folder: Path, start: Path) -> dict[str, Any]:
    """In the driver's namespace: run, and describe the result as JSON."""
    chosen = recipe(steps, store=store, resources=RESOURCES, runtime={"kind": "ray", "address": address})
    ray.init(address=address, logging_level="error")
    end_s = time.monotonic() + START_S
    while sum(node["Alive"] for node in ray.nodes()) < NODES:
        if time.monotonic() > end_s:
            return {"problem": f"the cluster has {len(ray.nodes())} of {NODES} nodes after {START_S:g} s"}
        time.sleep(0.5)
    try:
        found = whole_run(store, chosen, folder, start, lambda num, status: None)
    except UserError as error:
        return {"problem": str(error)}
    return {"checksum": found.checksum, "wall_s": found.wall_s}


def in_driver(base: Path, *arguments: str) -> dict[str, Any]:
    """Result of `drive` with ``arguments`` in a process on the first node."""
    command = in_namespace(base / "node-0", sys.executable, "-m", "bench.cluster", "--driver", *arguments)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=900)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    if sys.argv[1:2] == ["--driver"]:
        address, store, steps, folder, start = sys.argv[2:]
        print("\n" + json.dumps(drive(address, store, int(steps), Path(folder), Path(start))))
        return
    parser = bench_parser(__doc__)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    made = table(
        "Four nodes without a shared folder",
        "store",
        "weights against the plain loop",
        "foreign opens",
        "aim",
        "wall s",
    )
    failures = list[str]()
    base = Path(tempfile.mkdtemp(prefix="stretto-", dir="/var/tmp"))
    with s3_server() as s3:
        try:
            first = recipe(options.steps)
            start = start_of(first, base / "sft")
            plain = plain_run(first, base / "plain", start, lambda num, status: None)
            with audited(base) as address:
                shutil.copytree(start, base / "node-0" / "driver" / "start")
                for number, (name, store) in enumerate({"ray": "ray", "s3": s3, "file (control)": "file"}.items()):
                    foreign = base / "foreign.txt"
                    foreign.unlink(missing_ok=True)
                    folder = f"{_DRIVER_FOLDER}/run-{number}"
                    found = in_driver(base, address, store, str(options.steps), folder, f"{_DRIVER_FOLDER}/start")
                    num_foreign = len(foreign.read_text().splitlines()) if foreign.exists() else 0
                    is_equal = found.get("checksum") == plain.checksum
                    is_control = store == "file"
                    result = found.get("problem") or ("equal" if is_equal else "differs")
                    aim = "fails" if is_control else "equal, 0"
                    made.add_row(name, result[:90], f"{num_foreign}", aim, f"{found.get('wall_s', 0):.1f}")
                    if is_equal == is_control or num_foreign > 0:
                        failures.append(f"store {name}: {result}, {num_foreign} foreign opens; aim: {aim}")
        finally:
            shutil.rmtree(base)
    wide_console().print(made)
    finish(failures)


if __name__ == "__main__":
    main()
