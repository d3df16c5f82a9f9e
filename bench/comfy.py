"""ComfyUI over HTTP, against a strict double of it: are graphs right, bad ones stopped, and kills borne?

    python -m bench.comfy [--requests N] [--kills N]

Three counts. Requests (templates, sizes, adapters, controls, steps drawn at random) become graphs that the double takes, by a
validator of its own that shares no code with ours, and paints, or refuses. Malformed graphs of many kinds are checked before anything is
sent: those that pass count as missed. Last, requests are painted by four clients at once while the server is killed at random moments and
started again on the same folder: each must come back, and no picture may have been saved twice. The control is a client that does what
most do, send and wait for ``/history``, and sends again when that fails: it is counted the same way.

The double is written from ComfyUI's documentation, by the same hands as the client: that a real server takes the same graphs is not shown.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
from PIL import Image

from bench.common.comfy_double import MODELS, DoubleProcess, object_info, validate
from bench.common.malformed_graphs import MALFORMED, MORE
from bench.common.measure import table, wide_console
from stretto.base.errors import UserError
from stretto.base.track import progress
from stretto.pictures.backend import Control, Lora, PaintRequest
from stretto.pictures.comfy import Comfy, Patience, job_id
from stretto.pictures.comfy_graph import TEMPLATES, Graph, base_graph, faults, fit, read_kinds

_CLIENTS = 4
Paint = Callable[[int], object]
"""Of one client: has the request of a number painted."""
Client = Callable[[str], Paint]
_PATIENCE = Patience(request_s=5.0, away_s=60.0, poll_s=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--kills", type=int, default=8, help="of the server, while --requests / 4 are painted")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    info = object_info(MORE, [])
    kinds = read_kinds(info, "comfy")
    able = [name for name in TEMPLATES if not faults(base_graph(name, kinds), kinds)]
    taken, refused = _painted([(rng.choice(able), _request(rng)) for _ in range(options.requests)])
    sdxl = base_graph(TEMPLATES[-1], kinds)
    base = fit(sdxl, kinds, PaintRequest("x", 512, 512, 0, loras=(Lora("ink"), Lora("wide"))), (), "comfy")
    seen = [kind for kind, spoil in MALFORMED.items() if faults(spoil(json.loads(json.dumps(base))), kinds)]
    by_server = [kind for kind, spoil in MALFORMED.items() if validate(spoil(json.loads(json.dumps(base))), info)[0]]
    shown = table("Figure 9", "what", "result", "beside it")
    beside = f"{len(able)} templates, {refused} graphs refused by it"
    shown.add_row("requests painted by the double", f"{taken} of {options.requests}", beside)
    beside = f"the double would see {len(by_server)}"
    shown.add_row("malformed kinds seen before sending", f"{len(seen)} of {len(MALFORMED)}", beside)
    num = options.requests // 4
    for name, paint in (("ours", _ours), ("send, wait, send again", _plainly)):
        came, saved, kills = _under_fire(num, options.kills, options.seed, paint)
        twice = sum(count - 1 for count in saved.values())
        shown.add_row(f"server killed {kills} times: {name}", f"{came} of {num} came back", f"{twice} painted twice")
    wide_console().print(shown)


def _request(rng: random.Random) -> PaintRequest:
    side = [64, 128, 256, 512]
    blank = Image.new("RGB", (8, 8))
    return PaintRequest(
        prompt=rng.choice(["a red cube", 'a sign that says "open"', "two blue circles left of a green square", "кот"]),
        width=rng.choice(side),
        height=rng.choice(side),
        seed=rng.randrange(2**32),
        steps=rng.choice([None, 4, 30]),
        guidance=rng.choice([None, 1.0, 5.5]),
        loras=tuple(rng.sample([Lora("ink", 0.8), Lora("wide")], rng.randrange(3))),
        controls=tuple(rng.sample([Control("canny", blank), Control("depth", blank, 0.5)], rng.randrange(3))),
    )


def _painted(requests: Sequence[tuple[str, PaintRequest]]) -> tuple[int, int]:
    """How many came back as pictures of the size asked for, and how many graphs the double refused."""
    came = 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "models.json").write_text(json.dumps(MORE))
        with DoubleProcess(Path(folder), "--step-s", "0") as double, progress("requests", len(requests)) as advance:
            for template, request in requests:
                painter = Comfy(f"{double.url}?template={template}", _PATIENCE)
                with suppress(UserError, RuntimeError):
                    came += painter.paint(request).size == (request.width, request.height)
                painter.close()
                advance()
            return came, len(double.events("refused"))


def _ours(url: str) -> Paint:
    painter = Comfy(f"{url}?template=image_sdxl_simple&queue=1000", _PATIENCE)
    painter.graph(PaintRequest("x", 64, 64, 0))  # a server that never answered is not waited for
    return lambda seed: painter.paint(PaintRequest("x", 64, 64, seed, steps=8))


def _plainly(url: str) -> Paint:
    """As the examples of the documentation do, made patient: whatever goes wrong, it is sent again."""
    return lambda seed: _send_again(url, _graph(seed))


def _send_again(url: str, graph: Graph) -> None:
    for _ in range(50):
        try:
            reply = httpx.post(f"{url}/prompt", json={"prompt": graph}, trust_env=False).json()
            for _ in range(300):
                if httpx.get(f"{url}/history/{reply['prompt_id']}", trust_env=False).json():
                    return
                time.sleep(_PATIENCE.poll_s)
        except (httpx.HTTPError, ValueError):
            time.sleep(_PATIENCE.poll_s)
    raise TimeoutError("it never came")


def _graph(seed: int) -> Graph:
    kinds = read_kinds(object_info(MODELS, []), "comfy")
    graph = fit(base_graph("image_sdxl_simple", kinds), kinds, PaintRequest("x", 64, 64, seed, steps=8), (), "comfy")
    key = job_id(graph)
    for node in graph.values():
        if "filename_prefix" in node["inputs"]:
            node["inputs"]["filename_prefix"] = f"stretto/{key}"
    return graph


def _under_fire(num: int, num_kills: int, seed: int, client: Client) -> tuple[int, Counter[str], int]:
    """How many came back, how often each was saved by its file's id, and how often the server was killed meanwhile."""
    rng, came, kills = random.Random(seed), list[int](), 0
    with tempfile.TemporaryDirectory() as folder, DoubleProcess(Path(folder), "--step-s", "0.05") as double:
        ready = threading.Barrier(_CLIENTS + 1)

        def work(items: Sequence[int]) -> None:
            paint = client(double.url)
            ready.wait()
            for item in items:
                try:
                    paint(item)
                    came.append(item)
                except (UserError, RuntimeError, TimeoutError) as error:
                    print(f"{item} is lost: {error}")
                advance()

        with ThreadPoolExecutor(_CLIENTS) as threads, progress(f"{num} requests", num) as advance:
            waits = [threads.submit(work, range(num)[first::_CLIENTS]) for first in range(_CLIENTS)]
            ready.wait()
            while kills < num_kills and not all(wait.done() for wait in waits):
                time.sleep(rng.uniform(0.3, 1.5))
                double.kill()
                double.start()
                kills += 1
        for wait in waits:
            wait.result()
        saved = Counter(path.name.split("_")[0] for path in Path(folder, "output/stretto").iterdir())
    return len(came), saved, kills


if __name__ == "__main__":
    main()
