"""What the test of waiting ranks runs in each process: rank 0 twice takes longer than a collective may, then fails for a user's
mistake."""

from __future__ import annotations

import sys
import time

from stretto.base.errors import UserError
from stretto.model import parallel

parallel.TIMEOUT_S = 2.0
ranks = parallel.join("cpu")


def work() -> int:
    time.sleep(5.0)
    return 7


def mistake() -> None:
    raise UserError("data: missing")


assert ranks.first(work) == 7
if ranks.is_first:
    work()
ranks.barrier()
try:
    ranks.first(mistake)
except UserError as error:
    sys.stdout.write(f"{error}\n")
