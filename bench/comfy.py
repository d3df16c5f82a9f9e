"""ComfyUI over HTTP, against a strict double of it: are graphs right, bad ones stopped, and kills borne?

    python -m bench.comfy [--requests N] [--kills N]

Three counts. Requests (templates, sizes, adapters, controls, steps drawn at random) become graphs, and the double's own validator, which
shares no code with ours, takes or refuses each. Malformed graphs of many kinds are checked before anything is sent: those that pass count as
missed. Last, requests are painted by four clients at once while the server is killed at random moments and started again on the same
folder: each must come back, and the server's journal must have saved each once. The control is a client that does what most do, send and
wait for ``/history``, and sends again when that fails: it is counted the same way.

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from stretto.pictures.comfy_graph import TEMPLATES, Graph, base_graph, choose, faults, fit, read_kinds

_PATIENCE = Patience(request_s=5.0, away_s=60.0, poll_s=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--kills", type=int, default=8, help="of the server, while --requests / 4 are painted")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    info = object_info(MORE, ["r.png"])
    kinds = read_kinds(info, "comfy")
    able = [name for name in TEMPLATES if not faults(base_graph(name, kinds), kinds)]
    graphs, refused = [], 0
    for _ in range(options.requests):
        request = _request(rng)
        try:
            _, base = choose(kinds, rng.choice(able), "", "comfy")
            graphs.append(fit(base, kinds, request, ["r.png"] * len(request.controls), "comfy"))
        except UserError:
            refused += 1
    taken = sum(validate(graph, info) == (None, {}) and not faults(graph, kinds) for graph in graphs)
    sdxl = base_graph(TEMPLATES[-1], kinds)
    base = fit(sdxl, kinds, PaintRequest("x", 512, 512, 0, loras=(Lora("ink"), Lora("wide"))), (), "comfy")
    seen = [kind for kind, spoil in MALFORMED.items() if faults(spoil(json.loads(json.dumps(base))), kinds)]
    by_server = [kind for kind, spoil in MALFORMED.items() if validate(spoil(json.loads(json.dumps(base))), info)[0]]
    shown = table("Figure 9", "what", "result", "beside it")
    shown.add_row(
        "graphs that the validator takes",
        f"{taken} of {options.requests}",
        f"{len(able)} templates, {refused} refused by us",
    )
    shown.add_row(
        "malformed kinds seen before sending",
        f"{len(seen)} of {len(MALFORMED)}",
        f"the validator sees {len(by_server)}",
    )
    num = options.requests // 4
    for name, paint in (("ours", _ours), ("send, wait, send again", _plainly)):
        came, saved, kills = _under_fire(num, options.kills, options.seed, paint)
        twice = sum(count - 1 for count in saved.values())
        shown.add_row(f"server killed {kills} times: {name}", f"{came} of {num} came back", f"{twice} painted twice")
    wide_console().print(shown)


def _request(rng: random.Random) -> PaintRequest:
    side = [512, 768, 1024, 1328]
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


def _ours(url: str, seed: int) -> None:
    Comfy(f"{url}?template=image_sdxl_simple&queue=1000", _PATIENCE).paint(PaintRequest("x", 64, 64, seed, steps=8))


def _plainly(url: str, seed: int) -> None:
    """As the examples of the documentation do, made patient: whatever goes wrong, it is sent again."""
    graph = _graph(seed)
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


def _under_fire(
    num: int, num_kills: int, seed: int, paint: Callable[[str, int], None]
) -> tuple[int, Counter[str], int]:
    """How many came back, how often each was saved by its file's id, and how often the server was killed meanwhile."""
    rng = random.Random(seed)
    kills = 0
    with tempfile.TemporaryDirectory() as folder, DoubleProcess(Path(folder), "--step-s", "0.05") as double:
        came: list[int] = []

        def one(item: int) -> None:
            paint(double.url, item)
            came.append(item)

        with ThreadPoolExecutor(4) as clients, progress(f"{num} requests", num) as advance:
            waits = [clients.submit(one, item) for item in range(num)]
            for wait in waits:
                wait.add_done_callback(lambda _: advance())
            while kills < num_kills and not all(wait.done() for wait in waits):
                threading.Event().wait(rng.uniform(0.3, 1.5))
                double.kill()
                double.start()
                kills += 1
        saved = Counter(path.name.split("_")[0] for path in Path(folder, "output/stretto").iterdir())
    return len(came), saved, kills


if __name__ == "__main__":
    main()
