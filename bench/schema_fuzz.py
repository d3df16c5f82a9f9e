"""Compare /openapi.json with a real server: schemathesis sends bodies that follow the document, and bodies that break it.

    python -m bench.schema_fuzz [--cases N] [--seed S]

The server has a small random network. A difference is a body that follows the document and is refused, a body that breaks the
document and is accepted, or an answer that the document does not describe. A refusal is no difference if its code is one of those that the
document names for conditions that no schema can state: an expression that cannot be compiled, a prompt longer than the context, a tool
that is not offered. Prints cases, such refusals, answers with status 5xx, and differences. Exits with 1 after a 5xx or a difference.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import schemathesis
from schemathesis.engine import Status, events, from_schema
from schemathesis.openapi.checks import RejectedPositiveData

from bench.common.measure import bench_parser, finish, wide_console
from bench.common.networks import write_network
from bench.common.server import serving
from stretto.server.openapi import BEYOND_SCHEMA

KEY = "key"
"""The server's API key and its administrator's key."""


def fuzz(url: str, num_cases: int, seed: int = 0, num_random: int = 60) -> tuple[Counter[str], dict[str, str]]:
    """Send at least ``num_cases`` requests in rounds. A round has cases at the boundaries of each field, and ``num_random`` random cases
    of each endpoint. Returns counts, and a request for each kind of difference."""
    counts, samples = Counter[str](), dict[str, str]()
    key = {"Authorization": f"Bearer {KEY}"}
    generation = {"max-examples": num_random}
    options = {"continue-on-failure": True, "headers": key, "request-timeout": 120.0, "generation": generation}

    def is_difference(context: Any, failure: Any, case: Any, response: Any) -> bool:
        is_refusal = isinstance(failure, RejectedPositiveData) and response.status_code == 400
        return not (is_refusal and response.json()["error"]["code"] in BEYOND_SCHEMA)

    for number in count(seed):
        config = schemathesis.Config.from_dict({"seed": number, **options})
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json", config=config, headers=key)
        schema.hook("filter_failure")(is_difference)
        for event in from_schema(schema).execute():
            if isinstance(event, events.NonFatalError | events.FatalError):
                raise RuntimeError(f"schemathesis failed: {event}")
            if not isinstance(event, events.ScenarioFinished):
                continue
            seen = event.recorder
            statuses = [each.response.status_code if each.response else 599 for each in seen.interactions.values()]
            counts += Counter({"cases": len(statuses), "5xx": sum(status >= 500 for status in statuses)})
            counts["accepted"] += sum(status < 300 for status in statuses)
            counts["refused for conditions beyond a schema"] += len(seen.filtered_failures)
            for check in (each for checks in seen.checks.values() for each in checks):
                if check.failure_info is not None and check.status is Status.FAILURE:
                    counts["differences"] += 1
                    sample = f"{check.failure_info.code_sample}\n{check.failure_info.failure.message}"
                    samples.setdefault(f"{seen.label}: {check.name}", sample)
        if counts["cases"] >= num_cases:
            return counts, samples
    raise AssertionError("count ends")


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--cases", type=int, default=5000, help="least number of requests")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = wide_console()
    with tempfile.TemporaryDirectory() as temporary:
        flags = ("--memory", "64MB", "--api-key", KEY)
        with serving(write_network(Path(temporary), "tiny"), *flags, environ={"STRETTO_ADMIN_KEY": KEY}) as server:
            counts, samples = fuzz(server.url, options.cases, options.seed)
    for name in ("cases", "accepted", "refused for conditions beyond a schema", "5xx", "differences"):
        console.print(f"{name}: {counts[name]:,}")
    finish([f"{name}\n    {request}" for name, request in samples.items()] + ["answers with 5xx"] * (counts["5xx"] > 0))


if __name__ == "__main__":
    main()
