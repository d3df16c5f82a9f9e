"""A strict double of ComfyUI's server: its documented routes and messages, in a process that can be killed.

    python -m tests.pictures.comfy_double FOLDER --port 8188 [--step-s S] [--mute] [--lose-replies N] [--full N] [--own-ids]

Written from docs.comfy.org (routes, messages, API examples, built-in nodes); it shares no code with what it is held against, nor with
ComfyUI. As there, queue and history live in memory and die with the process, ``/history/{id}`` of a running prompt is ``{}`` as that of an
unknown one, an id that is sent twice is run twice, and pictures stay in FOLDER/output. ``FOLDER/models.json`` says which files it has, and may be
changed meanwhile. What it does is appended to ``FOLDER/journal.jsonl``, which no kill takes away.
"""

from __future__ import annotations

import argparse
import asyncio
import email
import hashlib
import json
import math
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

MODELS = {
    "checkpoints": ["sd_xl_base_1.0.safetensors", "sd3.5_large_fp8_scaled.safetensors"],
    "diffusion_models": ["ernie-image.safetensors", "flux1-krea-dev_fp8_scaled.safetensors", "z_image_turbo_bf16.safetensors"],
    "text_encoders": ["ministral-3-3b.safetensors", "clip_l.safetensors", "t5xxl_fp16.safetensors", "qwen_3_4b.safetensors"],
    "vae": ["flux2-vae.safetensors", "ae.safetensors"],
    "loras": ["styles/ink.safetensors", "wide.safetensors"],
    "controlnet": ["sdxl-canny.safetensors", "sdxl-depth.safetensors"],
    "metadata": {"wide.safetensors": {"modelspec.architecture": "stable-diffusion-v1/lora"}},
}  # fmt: skip
"""Files by folder, as ``models.json`` holds them, and what a few say of themselves."""
_SAMPLERS = ["euler", "euler_ancestral", "dpmpp_2m", "lcm", "res_multistep"]
_SCHEDULERS = ["simple", "sgm_uniform", "karras", "normal", "beta"]
_SEED_MOST = 2**64 - 1


def _int(default: int, least: int, most: int, step: int = 1, **more: Any) -> list[Any]:
    return ["INT", {"default": default, "min": least, "max": most, "step": step, **more}]


def _float(default: float, least: float, most: float) -> list[Any]:
    return ["FLOAT", {"default": default, "min": least, "max": most, "step": 0.01}]


def nodes(models: Mapping[str, Any], uploads: list[str]) -> dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]]:
    """Required inputs, optional inputs and outputs of each kind, after its page in ComfyUI's documentation."""
    text = ["STRING", {"multiline": True}]
    model, clip, vae, latent, image, cond = (
        [kind, {}] for kind in ("MODEL", "CLIP", "VAE", "LATENT", "IMAGE", "CONDITIONING")
    )
    encoders, types = [models["text_encoders"], {}], [["flux", "flux2", "sd3", "lumina2", "qwen_image"], {}]
    device = {"device": [["default", "cpu"], {"advanced": True}]}
    seed = {"default": 0, "least": 0, "most": _SEED_MOST}
    sampling = {
        "steps": _int(20, 1, 10000),
        "cfg": _float(8.0, 0.0, 100.0),
        "sampler_name": [_SAMPLERS, {}],
        "scheduler": [_SCHEDULERS, {}],
        "positive": cond,
        "negative": cond,
        "latent_image": latent,
    }

    def size(default: int, step: int) -> dict[str, Any]:
        return {
            "width": _int(default, 16, 16384, step),
            "height": _int(default, 16, 16384, step),
            "batch_size": _int(1, 1, 4096),
        }

    return {
        "CheckpointLoaderSimple": ({"ckpt_name": [models["checkpoints"], {}]}, {}, ["MODEL", "CLIP", "VAE"]),
        "UNETLoader": (
            {"unet_name": [models["diffusion_models"], {}], "weight_dtype": ["COMBO", {"options": ["default", "fp8_e4m3fn"]}]},
            {},
            ["MODEL"],
        ),
        "CLIPLoader": ({"clip_name": encoders, "type": types}, device, ["CLIP"]),
        "DualCLIPLoader": ({"clip_name1": encoders, "clip_name2": encoders, "type": types}, device, ["CLIP"]),
        "QuadrupleCLIPLoader": ({f"clip_name{number}": encoders for number in range(1, 5)}, {}, ["CLIP"]),
        "VAELoader": ({"vae_name": [models["vae"], {}]}, {}, ["VAE"]),
        "LoraLoader": (
            {"model": model, "clip": clip, "lora_name": [models["loras"], {}], "strength_model": _float(1, -100, 100),
             "strength_clip": _float(1, -100, 100)}, {}, ["MODEL", "CLIP"],
        ),
        "LoraLoaderModelOnly": (
            {"model": model, "lora_name": [models["loras"], {}], "strength_model": _float(1, -100, 100)}, {}, ["MODEL"],
        ),
        "ModelSamplingAuraFlow": ({"model": model, "shift": _float(1.73, 0, 100)}, {}, ["MODEL"]),
        "ModelSamplingSD3": ({"model": model, "shift": _float(3, 0, 100)}, {}, ["MODEL"]),
        "CLIPTextEncodeFlux": ({"clip": clip, "clip_l": text, "t5xxl": text, "guidance": _float(3.5, 0, 100)}, {}, ["CONDITIONING"]),
        "CLIPTextEncode": ({"text": text, "clip": clip}, {}, ["CONDITIONING"]),
        "ConditioningZeroOut": ({"conditioning": cond}, {}, ["CONDITIONING"]),
        "EmptyLatentImage": (size(512, 8), {}, ["LATENT"]),
        "EmptySD3LatentImage": (size(1024, 16), {}, ["LATENT"]),
        "EmptyFlux2LatentImage": (size(1024, 16), {}, ["LATENT"]),
        "KSampler": (
            {"model": model, "seed": _int(**seed, control_after_generate=True), **sampling, "denoise": _float(1, 0, 1)}, {}, ["LATENT"],
        ),
        "KSamplerAdvanced": (
            {"model": model, "add_noise": [["enable", "disable"], {}], "noise_seed": _int(**seed, control_after_generate=True), **sampling,
             "start_at_step": _int(0, 0, 10000), "end_at_step": _int(10000, 0, 10000),
             "return_with_leftover_noise": [["disable", "enable"], {}]}, {}, ["LATENT"],
        ),
        "VAEDecode": ({"samples": latent, "vae": vae}, {}, ["IMAGE"]),
        "LoadImage": ({"image": [uploads, {"image_upload": True}]}, {}, ["IMAGE", "MASK"]),
        "Canny": ({"image": image, "low_threshold": _float(0.4, 0.01, 0.99), "high_threshold": _float(0.8, 0.01, 0.99)}, {}, ["IMAGE"]),
        "ControlNetLoader": ({"control_net_name": [models["controlnet"], {}]}, {}, ["CONTROL_NET"]),
        "ControlNetApplyAdvanced": (
            {"positive": cond, "negative": cond, "control_net": ["CONTROL_NET", {}], "image": image, "strength": _float(1, 0, 10),
             "start_percent": _float(0, 0, 1), "end_percent": _float(1, 0, 1)}, {"vae": vae}, ["CONDITIONING", "CONDITIONING"],
        ),
        "PrimitiveBoolean": ({"value": ["BOOLEAN", {}]}, {}, ["BOOLEAN"]),
        "PrimitiveInt": ({"value": _int(0, -(2**63), 2**63 - 1, control_after_generate=True)}, {}, ["INT"]),
        "PrimitiveFloat": ({"value": _float(0, -1e9, 1e9)}, {}, ["FLOAT"]),
        "PrimitiveStringMultiline": ({"value": text}, {}, ["STRING"]),
        "StringReplace": ({"string": text, "find": text, "replace": text}, {}, ["STRING"]),
        "ComfySwitchNode": ({"switch": ["BOOLEAN", {}], "on_false": ["*", {}], "on_true": ["*", {}]}, {}, ["*"]),
        "PreviewAny": ({"source": ["*", {}]}, {}, ["STRING"]),
        "SaveImage": ({"images": image, "filename_prefix": ["STRING", {"default": "ComfyUI"}]}, {}, []),
        "PreviewImage": ({"images": image}, {}, []),
    }  # fmt: skip


_OUTPUTS = ("SaveImage", "PreviewImage", "PreviewAny")


def object_info(models: Mapping[str, Any], uploads: list[str]) -> dict[str, Any]:
    return {
        name: {
            "input": {"required": required, "optional": optional},
            "input_order": {"required": list(required), "optional": list(optional)},
            "output": outputs,
            "output_is_list": [False] * len(outputs),
            "output_name": outputs,
            "name": name,
            "display_name": name,
            "description": "",
            "category": "",
            "output_node": name in _OUTPUTS,
        }
        for name, (required, optional, outputs) in nodes(models, uploads).items()
    }


# --- what POST /prompt refuses --------------------------------------------------------------------------------------------------


def _error(kind: str, message: str, details: str = "", **extra: Any) -> dict[str, Any]:
    return {"type": kind, "message": message, "details": details, "extra_info": extra}


def validate(prompt: Any, info: Mapping[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The error of the whole, if there is one, and errors by node."""
    if not isinstance(prompt, dict):
        return _error("invalid_prompt", "the prompt is no object"), {}
    for key, node in prompt.items():
        if not isinstance(node, dict) or "class_type" not in node:
            return _error(
                "invalid_prompt",
                "Cannot execute because a node is missing the class_type property.",
                f"Node ID '#{key}'",
            ), {}
        if node["class_type"] not in info:
            return _error(
                "missing_node_type", f"Node '{node['class_type']}' not found.", f"Node ID '#{key}'", node_id=key
            ), {}
    if not any(info[node["class_type"]]["output_node"] for node in prompt.values()):
        return _error("prompt_no_outputs", "Prompt has no outputs"), {}
    found = {}
    for key, node in prompt.items():
        if errors := [error for error in _input_errors(prompt, info, node) if error]:
            found[key] = {"errors": errors, "dependent_outputs": [], "class_type": node["class_type"]}
    if not found and _has_cycle(prompt):
        return _error("prompt_outputs_failed_validation", "Prompt outputs failed validation", "dependency_cycle"), {}
    return (_error("prompt_outputs_failed_validation", "Prompt outputs failed validation") if found else None), found


def _input_errors(prompt: dict[str, Any], info: Mapping[str, Any], node: dict[str, Any]) -> list[Any]:
    entry = info[node["class_type"]]["input"]
    errors = []
    for part in ("required", "optional"):
        for name, spec in entry[part].items():
            about = {"input_name": name, "input_config": spec}
            if name not in node.get("inputs", {}):
                if part == "required":
                    errors.append(_error("required_input_missing", "Required input is missing", name, **about))
                continue
            value = node["inputs"][name]
            about["received_value"] = value
            problem = _link_error(prompt, info, value, spec) if isinstance(value, list) else _value_error(value, spec)
            if problem:
                errors.append(_error(problem[0], problem[1], f"{name}: {value}", **about))
    return errors


def _link_error(
    prompt: dict[str, Any], info: Mapping[str, Any], value: list[Any], spec: list[Any]
) -> tuple[str, str] | None:
    if len(value) != 2 or not isinstance(value[1], int) or isinstance(value[1], bool):
        return "bad_linked_input", "Bad linked input, must be a length-2 list of [node_id, slot_index]"
    if value[0] not in prompt:
        return "exception_during_inner_validation", "Exception when validating inner node"
    outputs = info[prompt[value[0]]["class_type"]]["output"]
    if not 0 <= value[1] < len(outputs):
        return "exception_during_inner_validation", "tuple index out of range"
    if "*" not in (spec[0], outputs[value[1]]) and outputs[value[1]] != spec[0]:
        return "return_type_mismatch", "Return type mismatch between linked nodes"
    return None


def _value_error(value: Any, spec: list[Any]) -> tuple[str, str] | None:
    kind, config = spec[0], spec[1]
    options = kind if isinstance(kind, list) else config.get("options") if kind == "COMBO" else None
    if options is not None:
        return None if value in options else ("value_not_in_list", "Value not in list")
    if kind in ("INT", "FLOAT"):
        try:
            number = int(value) if kind == "INT" else float(value)
        except (TypeError, ValueError, OverflowError):
            return "invalid_input_type", f"Failed to convert an input value to a {kind} value"
        if number < config["min"] or math.isnan(number):
            return "value_smaller_than_min", f"Value {value} smaller than min of {config['min']}"
        if number > config["max"]:
            return "value_bigger_than_max", f"Value {value} bigger than max of {config['max']}"
    if kind in ("STRING", "BOOLEAN") and not isinstance(value, (str, bool)):
        return "invalid_input_type", f"Failed to convert an input value to a {kind} value"
    return None


def _links(node: Mapping[str, Any]) -> list[str]:
    return [value[0] for value in node.get("inputs", {}).values() if isinstance(value, list) and len(value) == 2]


def _has_cycle(prompt: dict[str, Any]) -> bool:
    done: set[str] = set()
    while more := {key for key, node in prompt.items() if key not in done and done.issuperset(_links(node))}:
        done |= more
    return len(done) < len(prompt)


# --- a process of it ------------------------------------------------------------------------------------------------------------


class DoubleProcess:
    """Started, killed and started again on one port and folder."""

    def __init__(self, folder: Path, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.flags = folder, flags
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.pictures.comfy_double",
            str(self.folder),
            "--port",
            str(self.port),
            *self.flags,
        ]
        self._process = subprocess.Popen(command)
        for _ in range(600):
            try:
                httpx.get(f"{self.url}/queue", trust_env=False)
                return
            except httpx.TransportError:
                assert self._process.poll() is None, f"the double ended with {self._process.returncode}"
                time.sleep(0.05)
        raise TimeoutError("the double did not start")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def events(self, event: str) -> list[str]:
        """Ids of the journal's entries of one kind, in order."""
        path = self.folder / "journal.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line["id"] for line in lines if line["event"] == event]

    def __enter__(self) -> DoubleProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


# --- the server -----------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Double:
    """One server; all of it runs in one event loop."""

    folder: Path
    step_s: float
    is_mute: bool
    lose_every: int
    full_at: int
    own_ids: bool
    number: int = 0
    posts: int = 0
    pending: list[list[Any]] = field(default_factory=list)
    running: list[list[Any]] = field(default_factory=list)
    history: dict[str, Any] = field(default_factory=dict)
    sockets: dict[str, WebSocket] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def info(self) -> dict[str, Any]:
        uploads = sorted(path.name for path in (self.folder / "input").glob("*"))
        return object_info(json.loads((self.folder / "models.json").read_text()), uploads)

    def note(self, event: str, key: str, **more: Any) -> None:
        with (self.folder / "journal.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, "id": key, **more}) + "\n")

    async def say(self, kind: str, **data: Any) -> None:
        for name, listener in list(self.sockets.items()):
            try:
                if not self.is_mute:
                    await listener.send_text(json.dumps({"type": kind, "data": data}))
            except (WebSocketDisconnect, RuntimeError):
                self.sockets.pop(name, None)

    async def say_status(self) -> None:
        await self.say("status", status={"exec_info": {"queue_remaining": len(self.pending) + len(self.running)}})

    async def work(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            while self.pending:
                item = self.pending.pop(0)
                self.running.append(item)
                await self.execute(item)
                self.running.clear()
                await self.say_status()

    async def execute(self, item: list[Any]) -> None:
        key, prompt = item[1], item[2]
        messages = [["execution_start", {"prompt_id": key}]]
        await self.say("execution_start", prompt_id=key)
        outputs: dict[str, Any] = {}
        try:
            for name, node in prompt.items():
                await self.say("executing", node=name, prompt_id=key)
                for step in range(1, node["inputs"].get("steps", 0) + 1):
                    await asyncio.sleep(self.step_s)
                    await self.say("progress", node=name, prompt_id=key, value=step, max=node["inputs"]["steps"])
                if node["class_type"] == "LoadImage":
                    Image.open(self.folder / "input" / node["inputs"]["image"]).load()
                if node["class_type"] == "SaveImage":
                    outputs[name] = {"images": [self.save(key, prompt, node["inputs"]["filename_prefix"])]}
                    await self.say("executed", node=name, prompt_id=key, output=outputs[name])
            status = {"status_str": "success", "completed": True, "messages": messages}
        except OSError as error:
            about = {
                "prompt_id": key,
                "node_id": name,
                "exception_type": type(error).__name__,
                "exception_message": str(error),
            }
            status = {"status_str": "error", "completed": False, "messages": [*messages, ["execution_error", about]]}
        self.history[key] = {"prompt": item, "outputs": outputs, "status": status}
        await (
            self.say("execution_success", prompt_id=key)
            if status["completed"]
            else self.say("execution_error", prompt_id=key)
        )
        await self.say("executing", node=None, prompt_id=key)

    def save(self, key: str, prompt: dict[str, Any], prefix: str) -> dict[str, str]:
        """A picture that says which graph it is of: noise seeded with all of it but the name, of the size asked for."""
        sized = next(node["inputs"] for node in prompt.values() if {"width", "height"} <= node["inputs"].keys())
        text = json.dumps([node for node in prompt.values() if node["class_type"] != "SaveImage"], sort_keys=True)
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))
        pixels = rng.integers(0, 256, (sized["height"] // 8, sized["width"] // 8, 3), dtype=np.uint8)
        picture = Image.fromarray(pixels).resize((sized["width"], sized["height"]), Image.Resampling.NEAREST)
        folder, _, stem = prefix.rpartition("/")
        place = self.folder / "output" / folder
        place.mkdir(parents=True, exist_ok=True)
        taken = [
            int(found[1])
            for path in place.iterdir()
            if (found := re.fullmatch(re.escape(stem) + r"_(\d+)_\.png", path.name))
        ]
        name = f"{stem}_{max(taken, default=0) + 1:05}_.png"
        picture.save(place / name)
        self.note("saved", key, file=name)
        return {"filename": name, "subfolder": folder, "type": "output"}


def routes(double: Double) -> list[Any]:
    async def post_prompt(request: Request) -> Response:
        body = await request.json()
        waiting = len(double.pending) + len(double.running)
        if double.full_at and waiting >= double.full_at:
            return JSONResponse({"error": "too many requests wait"}, 503)
        error, node_errors = validate(body.get("prompt"), double.info())
        double.posts += 1
        if error:
            double.note("refused", str(body.get("prompt_id")), why=error["type"])
            return JSONResponse({"error": error, "node_errors": node_errors}, 400)
        double.number += 1
        key = str(uuid.uuid4() if double.own_ids or not body.get("prompt_id") else body["prompt_id"])
        double.pending.append([double.number, key, body["prompt"], body.get("extra_data", {}), []])
        double.note("accepted", key)
        double.wake.set()
        if double.lose_every and double.posts % double.lose_every == 0:
            return Response(status_code=502)
        return JSONResponse({"prompt_id": key, "number": double.number, "node_errors": {}})

    async def get_queue(_: Request) -> Response:
        return JSONResponse({"queue_running": double.running, "queue_pending": double.pending})

    async def post_queue(request: Request) -> Response:
        gone = set((await request.json()).get("delete", []))
        double.pending[:] = [item for item in double.pending if item[1] not in gone]
        return Response()

    async def get_history(request: Request) -> Response:
        key = request.path_params["key"]
        return JSONResponse({key: double.history[key]} if key in double.history else {})

    async def post_history(request: Request) -> Response:
        for key in (await request.json()).get("delete", []):
            double.history.pop(key, None)
        return Response()

    async def upload(request: Request) -> Response:
        head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
        parts: Any = email.message_from_bytes(head + await request.body()).get_payload()
        part = next(part for part in parts if part.get_param("name", header="content-disposition") == "image")
        name = part.get_filename()
        (double.folder / "input" / name).write_bytes(part.get_payload(decode=True))
        return JSONResponse({"name": name, "subfolder": "", "type": "input"})

    async def view(request: Request) -> Response:
        query = request.query_params
        path = double.folder / query.get("type", "output") / query.get("subfolder", "") / query["filename"]
        return Response(path.read_bytes(), media_type="image/png") if path.is_file() else Response(status_code=404)

    async def metadata(request: Request) -> Response:
        models = json.loads((double.folder / "models.json").read_text())
        found = models["metadata"].get(request.query_params["filename"])
        if found == "truncated":  # the real server's answer to a file that ends within its header
            return Response(status_code=500)
        return JSONResponse(found) if found else Response(status_code=404)

    async def info(request: Request) -> Response:
        return JSONResponse(double.info())

    async def info_of(request: Request) -> Response:
        name = request.path_params["name"]
        known = double.info()
        return JSONResponse({name: known[name]} if name in known else {})

    async def talk(connection: WebSocket) -> None:
        await connection.accept()
        name = connection.query_params.get("clientId") or uuid.uuid4().hex
        double.sockets[name] = connection
        status = {"exec_info": {"queue_remaining": len(double.pending) + len(double.running)}}
        await connection.send_text(json.dumps({"type": "status", "data": {"status": status, "sid": name}}))
        try:
            while True:
                await connection.receive()
        except (WebSocketDisconnect, RuntimeError):
            double.sockets.pop(name, None)

    return [
        Route("/prompt", post_prompt, methods=["POST"]),
        Route("/queue", get_queue),
        Route("/queue", post_queue, methods=["POST"]),
        Route("/history/{key}", get_history),
        Route("/history", post_history, methods=["POST"]),
        Route("/upload/image", upload, methods=["POST"]),
        Route("/view", view),
        Route("/view_metadata/{folder}", metadata),
        Route("/object_info", info),
        Route("/object_info/{name}", info_of),
        WebSocketRoute("/ws", talk),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.002, help="of one step of sampling")
    parser.add_argument("--mute", action="store_true", help="its sockets say nothing after the greeting")
    parser.add_argument(
        "--lose-replies", type=int, default=0, help="every so many accepted prompts are answered with 502"
    )
    parser.add_argument("--full", type=int, default=0, help="503 where so many wait")
    parser.add_argument("--own-ids", action="store_true", help="as before clients could choose them")
    options = parser.parse_args()
    for name in ("input", "output"):
        (options.folder / name).mkdir(parents=True, exist_ok=True)
    if not (options.folder / "models.json").exists():
        (options.folder / "models.json").write_text(json.dumps(MODELS))

    async def serve() -> None:
        double = Double(
            options.folder, options.step_s, options.mute, options.lose_replies, options.full, options.own_ids
        )
        work = asyncio.create_task(double.work())
        config = uvicorn.Config(
            Starlette(routes=routes(double)), port=options.port, log_level="error", ws="websockets-sansio"
        )
        await uvicorn.Server(config).serve()
        work.cancel()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
