"""What the test of waiting ranks runs in each process: rank 0 twice takes longer than a collective may, then fails for a user's
mistake, and last cannot write the checkpoint of a finished stage."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest import mock

from stretto.base.errors import UserError
from stretto.base.records import Meter
from stretto.model import parallel
from stretto.model.transformer import build
from stretto.train import finish
from tests.train.test_snapshot import CONFIG

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

meter = Meter("pretrain", "cpu")
full_disk = mock.Mock(side_effect=UserError("run: cannot be written"))
with meter, mock.patch.object(finish, "write_checkpoint", full_disk):
    try:
        finish.write_trained(
            Path("run"), build(CONFIG, 0), meter, ranks, name="run", stage="pretrain", config={}, tokenizer_dir=None
        )
    except UserError as error:
        sys.stdout.write(f"{error}\n")
