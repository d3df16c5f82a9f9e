"""Foreign words in the graphs that a ComfyUI server holds: words of a template's own example instead of the request's.

    python -m bench.comfy --server URL [--models FOLDER] [--all] [--break]

Every template is fitted to a prompt and a negative prompt and sent by `stretto.pictures.comfy.Comfy`; then the graph is read back from the
server's /history. Texts are all strings of the graph except choices from the server's lists and the name of the picture's file.
``--models`` names the server's models folder: empty files are made there for missing models. Such a graph passes the server's validation and
fails when a model is loaded (state "error"). ``--all`` adds every other template of the installed package that can be fitted to a
request. ``--break`` restores one template's own negative prompt before the graph is sent, which must be reported. Exits with 1 for a
foreign word, a missing prompt, or a template of Stretto's own list whose graph the server does not hold.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path

import httpx

from bench.common.measure import bench_parser
from stretto.base.errors import UserError
from stretto.pictures.backend import PaintRequest
from stretto.pictures.comfy import Comfy
from stretto.pictures.comfy_graph import TEMPLATES, Graph, Kinds, base_graph, fit, read_kinds

PROMPT, NEGATIVE = "a crimson lighthouse above seven teapots", "umbrellas"
FOLDERS = {"ckpt": "checkpoints", "unet": "diffusion_models", "clip": "text_encoders", "vae": "vae", "lora": "loras"}


def texts(graph: Graph, kinds: Kinds) -> Iterator[tuple[str, str, str]]:
    """Node, input and value of all texts of a graph."""
    for key, node in graph.items():
        for name, value in node["inputs"].items():
            field = kinds[node["class_type"]].fields.get(name)
            if isinstance(value, str) and name != "filename_prefix" and (field is None or field.kind != "COMBO"):
                yield key, name, value


def make_models(folder: Path, graph: Graph, kinds: Kinds) -> None:
    for node in graph.values():
        for name, value in node["inputs"].items():
            place = FOLDERS.get(re.sub(r"_name\d*$", "", name))
            if place and isinstance(value, str) and value not in kinds[node["class_type"]].fields[name].options:
                (folder / place / value).parent.mkdir(parents=True, exist_ok=True)
                (folder / place / value).touch()


def request(graph: Graph, kinds: Kinds) -> PaintRequest:
    """A request, with a negative prompt where the template takes one. Raises `UserError`: the template cannot be fitted."""
    if lacking := sorted({node["class_type"] for node in graph.values()} - kinds.keys()):
        raise UserError(f"this server has no node {lacking[0]}")
    asked = PaintRequest(PROMPT, 1024, 1024, random.getrandbits(40))
    fit(graph, kinds, asked, (), "bench")
    try:
        fit(graph, kinds, replace(asked, negative=NEGATIVE), (), "bench")
    except UserError:
        return asked
    return replace(asked, negative=NEGATIVE)


def held_graphs(url: str, name: str, asked: PaintRequest, own: Graph, kinds: Kinds) -> list[tuple[Graph, str]]:
    """The graphs that the server holds after one request, each with its state. The texts of ``own`` replace the request's."""
    before = httpx.get(f"{url}/history").json().keys()
    comfy = Comfy(f"{url}?template={name}")
    try:
        graph = comfy.graph(asked)
        for key, field, text in texts(own, kinds):
            graph[key]["inputs"][field] = text or graph[key]["inputs"][field]
        comfy.run(graph)
    except (UserError, RuntimeError) as error:
        print(f"  {name}: {error}", file=sys.stderr)
    finally:
        comfy.close()
    entries = httpx.get(f"{url}/history").json()
    return [(entries[key]["prompt"][2], entries[key]["status"]["status_str"]) for key in entries.keys() - before]


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--server", required=True)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--break", action="store_true", dest="is_broken")
    options = parser.parse_args()
    folder = resources.files("comfyui_workflow_templates_json") / "templates"
    others = sorted({path.name.removesuffix(".json") for path in folder.iterdir()} - {*TEMPLATES})
    kinds = read_kinds(httpx.get(f"{options.server}/object_info", timeout=60).json(), options.server)
    wanted, known = {}, {*PROMPT.split(), NEGATIVE}
    for name in (*TEMPLATES, *(others if options.all else ())):
        try:
            graph = base_graph(name, kinds)
            wanted[name] = (graph, request(graph, kinds))
        except UserError as error:
            print(f"  {name}: {error}", file=sys.stderr)
            continue
        if options.models:
            make_models(options.models, graph, kinds)
    num_held = num_own = num_wrong = 0
    for name, (base, asked) in wanted.items():
        own = base if options.is_broken and name == TEMPLATES[-1] else {}
        held = held_graphs(options.server, name, asked, own, kinds)
        num_held += bool(held)
        num_own += bool(held) and name in TEMPLATES
        for graph, state in held:
            found = [text for _, _, text in texts(graph, kinds)]
            foreign = [word for text in found for word in re.findall(r"\w+", text) if word not in known]
            lost = [] if PROMPT in found and (not asked.negative or NEGATIVE in found) else ["(a prompt is missing)"]
            num_wrong += len(foreign) + len(lost)
            print(f"{name:44} {state:8} {asked.negative and 'negative':9} {' '.join([*foreign, *lost]) or 0}")
    print(f"{num_held} held, {num_own} of Stretto's {len(TEMPLATES)}; {num_wrong} foreign words or lost prompts")
    sys.exit(num_wrong > 0 or num_own < len(TEMPLATES))


if __name__ == "__main__":
    main()
