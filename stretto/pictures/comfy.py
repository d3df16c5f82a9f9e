"""Backend that paints with a ComfyUI server, over HTTP.

Every request has an id that is computed from its graph. Before a graph is sent, the server is asked whether it has this id already: in its
queue, in its history, or as a saved picture, which outlives the server. A lost reply, a killed server or a killed client therefore costs no second
picture. The websocket reports progress only. It can stall, so the server is also polled: ``/queue`` first and ``/history`` after it, because a
prompt moves from one to the other, and because ``/history/{id}`` is ``{}`` for a running prompt as well as for an unknown one.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import httpx
from PIL import Image
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from stretto.base.errors import UserError
from stretto.pictures.backend import PaintRequest, check_request, png
from stretto.pictures.comfy_faults import refuse, repair
from stretto.pictures.comfy_graph import choose, fit
from stretto.pictures.comfy_kinds import Graph, Kinds, read_kinds

_NAMESPACE: Final = uuid.UUID("8f6b1c9e-6f63-4f8e-9a57-0d3b6b6f5a11")
_SENDS: Final = 5
"""Number of times that a graph is sent to a server that loses it. After that, the graph is taken for the reason why the server dies."""
_REPAIRS: Final = 3
_ENDED: Final = ("execution_success", "execution_error", "execution_interrupted")
_T = TypeVar("_T")
_OPTIONS: Final = ("template", "checkpoint", "queue")


@dataclass(frozen=True, slots=True)
class Patience:
    """Time-outs, in seconds."""

    request_s: float = 30.0
    """For one reply of the server."""
    away_s: float = 60.0
    """For a server that stopped answering while it painted."""
    poll_s: float = 1.0
    """Between two polls, while the websocket is silent."""


@dataclass(slots=True)
class _Job:
    """A graph that is being painted, and how often it was sent and repaired."""

    graph: Graph
    sends: int = 0
    repairs: int = 0


class Away(RuntimeError):  # noqa: N818 - a state of the server, not a bug
    """The server did not answer, or a proxy answered in its place."""


class Comfy:
    """The backend ``comfy:URL``; ``URL`` may end in ``?template=…&checkpoint=…&queue=…``."""

    multiple = 16
    """Largest factor by which the latents of a supported model are smaller than its pictures."""
    edits = False

    def __init__(self, url: str, patience: Patience = Patience()) -> None:
        """
        Raises:
            UserError: The URL is not valid, or has an unknown option.
        """
        try:
            address = httpx.URL(url)
        except httpx.InvalidURL:
            address = httpx.URL()
        if address.scheme not in ("http", "https") or not address.host:
            raise UserError(
                f"--backend comfy:{url}: this is not the address of a server; write comfy:http://127.0.0.1:8188"
            )
        options = dict(address.params)
        if unknown := sorted(options.keys() - set(_OPTIONS)):
            raise UserError(
                f"--backend comfy:{url}: {unknown[0]}: unknown option; the options are {', '.join(_OPTIONS)}"
            )
        if not options.get("queue", "8").isdecimal():
            raise UserError(
                f"--backend comfy:{url}: queue: {options['queue']!r} is not a number of requests; write queue=8"
            )
        self._base = str(address.copy_with(query=None, fragment=None)).rstrip("/")
        self._template, self._checkpoint = options.get("template", ""), options.get("checkpoint", "")
        self._most_waiting = int(options.get("queue", "8"))
        self._patience = patience
        self._client_id = uuid.uuid4().hex
        self._client = httpx.Client(base_url=self._base, timeout=patience.request_s, trust_env=False)
        self._open = ExitStack()
        self._socket: ClientConnection | None = None
        self._has_answered = False

    @property
    def name(self) -> str:
        return f"comfy:{self._base}"

    def close(self) -> None:
        self._open.close()
        self._client.close()

    def paint(self, request: PaintRequest, tell: Callable[[float], None] = lambda done: None) -> Image.Image:
        """As `Backend.paint`. Equal requests to one server give one picture, from any number of clients."""
        check_request(self, request)
        return self.run(self._patiently(lambda: self.graph(request)), tell)

    def graph(self, request: PaintRequest) -> Graph:
        """The checked graph for ``request``. Uploads its reference pictures. Raises as `paint`."""
        kinds = self._kinds()
        _, base = choose(kinds, self._template, self._checkpoint, self.name)
        for control in request.controls:
            _readable(control.image, f"{self.name}: control {control.kind}")
        names = [self._upload(control.image) for control in request.controls]
        graph = fit(base, kinds, request, names, self.name)
        refuse(graph, kinds, self.name)
        self._refuse_foreign_loras(graph)
        return graph

    # --- one graph, from the first poll to its picture ---

    def run(self, graph: Graph, tell: Callable[[float], None] = lambda done: None) -> Image.Image:
        """The picture of a checked graph. Raises as `paint`."""
        job, picture = _Job(graph), None
        while picture is None:
            picture = self._patiently(lambda: self._step(job, tell))
        return picture

    def _step(self, job: _Job, tell: Callable[[float], None]) -> Image.Image | None:
        """Ask the server for the state of the job, and do the next thing: follow, fetch, send or repair. None: not painted yet."""
        key = job_id(job.graph)
        queue = self._get("/queue")
        if any(item[1] == key for part in ("queue_running", "queue_pending") for item in queue.get(part, [])):
            self._follow(key, tell)
            return None
        entry = self._get(f"/history/{key}").get(key)
        is_done = entry is not None and entry.get("status", {}).get("status_str") == "success"
        if is_done and (picture := self._fetch(entry)) is not None:
            self._post("/queue", {"delete": [key]})  # a request whose reply was lost may still have arrived
            return picture
        if entry is not None and not is_done and job.sends:
            raise RuntimeError(f"{self.name}: {_failure(entry)}")
        if entry is not None:  # from an earlier run: its file is gone, or it failed and may succeed now
            self._post("/history", {"delete": [key]})
        elif (picture := self._saved(key)) is not None:
            return picture
        if job.sends == _SENDS:
            raise RuntimeError(
                f"{self.name}: the server lost the request {job.sends} times; the request seems to crash it"
            )
        refusal = self._send(job.graph, key)
        if refusal is None:
            job.sends += 1
        else:
            job.repairs += 1
            job.graph = self._mend(job.graph, refusal, job.repairs)
        return None

    def _send(self, graph: Graph, key: str) -> Mapping[str, Any] | None:
        """Send a graph. Returns the server's refusal; None: accepted."""
        queue = self._get("/queue")
        waiting = sum(len(queue.get(part, [])) for part in ("queue_running", "queue_pending"))
        if waiting >= self._most_waiting:
            problem = f"the queue is full: {waiting} requests wait, {self._most_waiting} are allowed"
            raise UserError(f"{self.name}: {problem}; try later, or allow more with ?queue={waiting + 1}")
        body = {"prompt": _named(graph, key), "client_id": self._client_id, "prompt_id": key}
        reply = self._reply(lambda: self._client.post("/prompt", json=body))
        if reply.status_code == 400:
            return _json(reply)
        answer = _json(reply)
        if answer.get("prompt_id") != key:
            self._post("/queue", {"delete": [answer.get("prompt_id")]})
            raise UserError(
                f"{self.name}: the server ignores the ids of requests, so their pictures could not be found again; update ComfyUI"
            )
        if answer.get("node_errors"):  # the server would run the graph without these nodes
            self._post("/queue", {"delete": [key]})
            return answer
        return None

    def _mend(self, graph: Graph, refusal: Mapping[str, Any], attempt: int) -> Graph:
        mended, notes = repair(graph, refusal.get("node_errors") or {})
        if not notes or attempt > _REPAIRS:
            raise UserError(f"{self.name}: the server refuses the graph: {_refusal(refusal)}; choose another template")
        refuse(mended, self._kinds(), self.name)
        return mended

    def _follow(self, key: str, tell: Callable[[float], None]) -> None:
        """Listen to the websocket until the prompt ended, at most for `Patience.poll_s`."""
        until = time.monotonic() + self._patience.poll_s
        try:
            if self._socket is None:
                address = f"ws{self._base.removeprefix('http')}/ws?clientId={self._client_id}"
                socket = connect(address, open_timeout=self._patience.poll_s, max_size=None, proxy=None)
                self._socket = self._open.enter_context(socket)
            while (left_s := until - time.monotonic()) > 0:
                message = self._socket.recv(timeout=left_s)
                if isinstance(message, bytes):  # a preview picture
                    continue
                event = json.loads(message)
                data = event.get("data") or {}
                if data.get("prompt_id") != key:
                    continue
                if event["type"] == "progress" and data.get("max"):
                    tell(min(1.0, data["value"] / data["max"]))
                elif event["type"] in _ENDED or (event["type"] == "executing" and data.get("node") is None):
                    return
        except TimeoutError:
            return
        except (OSError, WebSocketException, ValueError):
            self._socket = None
            self._open.close()
            time.sleep(max(0.0, until - time.monotonic()))

    # --- pictures and files ---

    def _fetch(self, entry: Mapping[str, Any]) -> Image.Image | None:
        """The picture of a history entry; None: its file is gone."""
        files = [file for output in entry.get("outputs", {}).values() for file in output.get("images", [])]
        saved = [file for file in files if file.get("type") == "output"]
        return self._view(saved[0]) if saved else None

    def _saved(self, key: str) -> Image.Image | None:
        """The picture that a server saved before it was killed; None: there is none."""
        return self._view({"filename": f"{key}_00001_.png", "subfolder": "stretto", "type": "output"})

    def _view(self, file: Mapping[str, str]) -> Image.Image | None:
        reply = self._reply(lambda: self._client.get("/view", params=dict(file)))
        if not reply.is_success:
            return None
        try:
            return Image.open(io.BytesIO(reply.content)).convert("RGB")
        except OSError:  # the server was killed while it wrote the file
            return None

    def _upload(self, image: Image.Image) -> str:
        content = png(image.convert("RGB"))
        name = f"stretto-{hashlib.sha256(content).hexdigest()[:16]}.png"
        files = {"image": (name, content, "image/png")}
        reply = self._reply(lambda: self._client.post("/upload/image", files=files, data={"overwrite": "true"}))
        answer = _json(reply)
        return f"{answer['subfolder']}/{answer['name']}" if answer.get("subfolder") else str(answer["name"])

    def _refuse_foreign_loras(self, graph: Graph) -> None:
        """Raises `UserError` for an adapter of another architecture. The server would load it and skip all of its weights without an error."""
        own = [self._architecture("checkpoints", node, "ckpt_name") for node in graph.values()]
        own += [self._architecture("diffusion_models", node, "unet_name") for node in graph.values()]
        model = next((architecture for architecture in own if architecture), None)
        for node in graph.values():
            lora = self._architecture("loras", node, "lora_name")
            if model and lora and lora.removesuffix("/lora") != model:
                name = node["inputs"]["lora_name"]
                raise UserError(
                    f"{self.name}: lora {name}: this adapter is for {lora.removesuffix('/lora')}, the model is {model}; choose another"
                )

    def _architecture(self, folder: str, node: Mapping[str, Any], field: str) -> str | None:
        if field not in node["inputs"]:
            return None
        # ComfyUI answers 500 for a truncated file. The failure of the node that loads it says more than a refusal here.
        reply = self._reply(
            lambda: self._client.get(f"/view_metadata/{folder}", params={"filename": node["inputs"][field]}), {500}
        )
        return _json(reply).get("modelspec.architecture") if reply.is_success else None

    # --- requests ---

    def _patiently(self, ask: Callable[[], _T]) -> _T:
        """The result of ``ask``, which is repeated while a server that answered before does not answer."""
        since: float | None = None
        while True:
            try:
                return ask()
            except Away as error:
                if not self._has_answered:
                    problem = f"not reachable ({error}); start ComfyUI there, or correct --backend"
                    raise UserError(f"{self.name}: {problem}") from None
                since = since or time.monotonic()
                if time.monotonic() - since > self._patience.away_s:
                    hint = "run the same command again to resume"
                    raise RuntimeError(
                        f"{self.name}: no answer for {self._patience.away_s:g} s ({error}); {hint}"
                    ) from None
                time.sleep(self._patience.poll_s)

    def _kinds(self) -> Kinds:
        kinds = read_kinds(self._get("/object_info"), self.name)
        self._has_answered = True  # from now on waits for it: it is a ComfyUI server
        return kinds

    def _get(self, path: str) -> Any:
        return _json(self._reply(lambda: self._client.get(path)))

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        self._reply(lambda: self._client.post(path, json=dict(body)))

    def _reply(self, send: Callable[[], httpx.Response], answers: Collection[int] = ()) -> httpx.Response:
        """The reply to a request. Raises `Away`: no reply, or one that a proxy or an overloaded server gives. ``answers``: statuses that
        are no such reply to this request."""
        try:
            reply = send()
        except httpx.HTTPError as error:
            raise Away(f"{type(error).__name__}: {error}") from None
        if (reply.status_code >= 500 or reply.status_code in (408, 429)) and reply.status_code not in answers:
            raise Away(f"{reply.status_code} {reply.reason_phrase}")
        return reply


def job_id(graph: Graph) -> str:
    """The id of a graph: a hash, so equal graphs have equal ids."""
    return str(uuid.uuid5(_NAMESPACE, json.dumps(graph, sort_keys=True, ensure_ascii=False)))


def _named(graph: Graph, key: str) -> Graph:
    """A copy of ``graph`` that saves its picture under ``key``."""
    named = {name: {**node, "inputs": dict(node["inputs"])} for name, node in graph.items()}
    for node in named.values():
        if "filename_prefix" in node["inputs"]:
            node["inputs"]["filename_prefix"] = f"stretto/{key}"
    return named


def _readable(image: Image.Image, where: str) -> None:
    try:
        image.load()
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{where}: the reference picture is damaged ({error}); give another") from None


def _json(reply: httpx.Response) -> Any:
    try:
        return reply.json()
    except ValueError:
        raise Away(f"{reply.request.url.path} answers {reply.status_code} without JSON") from None


def _failure(entry: Mapping[str, Any]) -> str:
    for kind, about in entry.get("status", {}).get("messages", []):
        if kind == "execution_error":
            return f"it failed at node {about.get('node_id')}: {about.get('exception_type')}: {about.get('exception_message')}".strip()
        if kind == "execution_interrupted":
            return "the request was interrupted on the server"
    return "the server reports a failure without a reason"


def _refusal(refusal: Mapping[str, Any]) -> str:
    for key, report in (refusal.get("node_errors") or {}).items():
        for error in report.get("errors", []):
            return f"node {key}: {error.get('message')} ({error.get('details')})"
    error = refusal.get("error")
    return str(error.get("message") if isinstance(error, Mapping) else error)
