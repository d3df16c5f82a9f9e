"""``--launch N``: the ranks of a training command, started and restarted by torchrun.

The ranks run the same command with ``--resume``. torchrun restarts all of them when one fails. It restarts after every exit code but
0, so a rank that ends for good (bad input, a run that diverged, Ctrl-C) records that in a file and exits with 0; the launcher then
prints the message and exits with the code.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from stretto.base.errors import UserError
from stretto.base.paths import read_json, write_json
from stretto.cli.options import say

ENDED = "STRETTO_ENDED"
"""Environment variable of launched ranks: the file in which they record that the run has ended for good."""
NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable of torchrun: 1 gives every restart a new store. In a store that restarts share, ranks read the addresses of
ranks that have died and cannot connect (pytorch issue 135712; seen with torch 2.13: every first restart failed)."""
SHUTDOWN_TIMEOUT, SHUTDOWN_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600"
"""Environment variable of torchrun since torch 2.12 (older versions wait 30 s): seconds after Ctrl-C or SIGTERM until it kills ranks that
still run. They have to end their step and write a snapshot; our value is the timeout of collectives. After the death of a rank
torchrun waits 30 s for the others in all versions."""
OWN_OPTIONS = ("--launch", "--max-restarts", "--resume")
"""Options of the launcher, which the ranks do not get; they always get ``--resume``."""


def launch(num: int, max_restarts: int, device: str, ep: int = 1) -> NoReturn:
    """Run the command of this process in ``num`` ranks, and exit as they do.

    Raises:
        UserError: ``num`` ranks cannot run on this machine, or the ranks ended for a user's mistake.
    """
    if num < 1:
        raise UserError(f"--launch {num}: at least one rank is needed; give the number of ranks on this machine")
    if max_restarts < 0:
        raise UserError(f"--max-restarts {max_restarts}: must be at least 0")
    from stretto.model.parallel import check_ranks

    check_ranks(device, ep, num, num)
    arguments = ranks_arguments(sys.argv[1:])
    command = ["--standalone", f"--nproc-per-node={num}", f"--max-restarts={max_restarts}", "-m", "stretto", *arguments]
    say(f"{NEW_STORE}=1 torchrun {shlex.join(command)}")
    with tempfile.TemporaryDirectory() as folder:
        ended = Path(folder) / "ended.json"
        threads = str(max(1, len(os.sched_getaffinity(0)) // num)) if hasattr(os, "sched_getaffinity") else "1"
        defaults = {"OMP_NUM_THREADS": threads, SHUTDOWN_TIMEOUT: SHUTDOWN_S}
        environment = {**defaults, **os.environ, NEW_STORE: "1", ENDED: str(ended)}
        code = _run([sys.executable, "-m", "torch.distributed.run", *command], environment)
        if ended.is_file():
            end = read_json(ended)
            error = UserError(end["message"])
            error.exit_code = end["code"]
            raise error
    if code == 1:
        error = UserError(
            f"--launch: the ranks ended with errors, after at most {max_restarts} restarts; their output above names the cause, and "
            "the same command continues the run"
        )
        error.exit_code = 1
        raise error
    raise typer.Exit(code)


def without_launch(options: dict[str, Any]) -> dict[str, Any]:
    """The ``options`` of a command without those of the launcher: the arguments of the Python function of the same name."""
    return {name: value for name, value in options.items() if name not in ("ranks", "max_restarts")}


def ranks_arguments(arguments: Sequence[str]) -> list[str]:
    """Arguments of the ranks for the ``arguments`` of the launcher."""
    kept, skips_value = [], False
    for argument in arguments:
        name = argument.partition("=")[0]
        if not skips_value and name not in OWN_OPTIONS:
            kept.append(argument)
        skips_value = argument in OWN_OPTIONS and argument != "--resume"
    return [*kept, "--resume"]


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run torchrun and return its exit code. Ctrl-C and SIGTERM are passed on to it, once: it passes them on to the ranks, which end after
    a snapshot. A second signal kills the ranks."""
    import psutil

    received: list[int] = []
    process = subprocess.Popen(command, env=environment, start_new_session=True)

    def pass_on(number: int, _: object) -> None:
        if not received:
            process.send_signal(number)
        elif process.poll() is None:
            for rank in psutil.Process(process.pid).children():
                rank.kill()
        received.append(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + received[0] if received else code


def end_for_good(message: str, code: int) -> None:
    """In a launched rank, record why the run ends and exit with 0, so that torchrun does not restart it; elsewhere do nothing."""
    if (path := os.environ.get(ENDED)) is not None:
        if not Path(path).exists():
            write_json(path, {"message": message, "code": code})
        sys.exit(0)


def exit_if_ended() -> None:
    """Exit at once if another launched rank has ended for good, and torchrun has restarted this one."""
    if (path := os.environ.get(ENDED)) is not None and Path(path).exists():
        sys.exit(0)
