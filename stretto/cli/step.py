"""The process of one pipeline step: runs one command, and ends when the pipeline's own process ends."""

from __future__ import annotations

import sys

from stretto.base.parent import end_with_parent
from stretto.cli.main import main


def run_step(arguments: list[str]) -> None:
    """Run the command in ``arguments``, whose first item after the program is the process id of the pipeline."""
    end_with_parent(int(arguments.pop(1)))  # its folder is then free for the pipeline's next process
    main()


if __name__ == "__main__":
    run_step(sys.argv)
