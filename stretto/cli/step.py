"""The process of one pipeline step: runs one command, and ends when the pipeline's own process ends."""

from __future__ import annotations

import os
import sys
import threading
import time

from stretto.cli.main import main


def run_step(arguments: list[str]) -> None:
    """Run the command in ``arguments``, whose first item after the program is the process id of the pipeline."""
    parent = int(arguments.pop(1))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)  # its folder is then free for the pipeline's next process

    threading.Thread(target=watch, daemon=True).start()
    main()


if __name__ == "__main__":
    run_step(sys.argv)
