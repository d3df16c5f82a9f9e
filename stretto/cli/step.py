"""The process of a command that another process needs (a pipeline's step, a server under test): it ends when that process ends."""

from __future__ import annotations

import sys

from stretto.base.parent import end_with_parent
from stretto.cli.main import main


def run_step(arguments: list[str]) -> None:
    """Run the command in ``arguments``, whose first item after the program is the id of the process that started this one."""
    end_with_parent(int(arguments.pop(1)))  # the folder of a step is then free for the pipeline's next process
    main()


if __name__ == "__main__":
    run_step(sys.argv)
