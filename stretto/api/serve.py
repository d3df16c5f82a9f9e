"""Serving a checkpoint: the HTTP server, chat and completion on the console, the choice of a Subnet by ``--subnet auto``, load tests."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from socket import socket
from typing import Any

import httpx
import torch
import typer
from rich.table import Table
from starlette.applications import Starlette

from stretto.api.search import BEST, best_subnet, read_search
from stretto.base.config import validate_options
from stretto.base.errors import UserError, check_text
from stretto.base.numbers import params, size_in_bytes
from stretto.base.paths import checkpoint_folder
from stretto.base.records import history
from stretto.base.track import progress, say, wide_console
from stretto.engine.async_engine import AsyncEngine
from stretto.engine.engine import Engine, stream
from stretto.engine.loading import DTYPES, OpenedEngine, held_bytes, held_integers, least_bytes, open_engine, read_part
from stretto.engine.request import CONSOLE_PENALTY, EngineConfig, Sampling
from stretto.flow.rollout import EngineRole, open_recording_engine
from stretto.flow.rollout_server import create_rollout_app
from stretto.harness.suites import serving
from stretto.model.checkpoint import read_checkpoint, read_config, read_presets
from stretto.model.counts import count
from stretto.model.elastic import slice_integers
from stretto.model.parallel import join
from stretto.model.spec import (
    ModelConfig,
    Subnet,
    SubnetChoice,
    extracted_config,
    fixed_layers,
    named_subnets,
    parse_choice,
    parse_subnet,
)
from stretto.ops.memory import free_bytes
from stretto.ops.native import load
from stretto.ops.tuning import ROUGH_WIDTH, fastest_threads, multiplies_bf16, thread_counts
from stretto.pictures.door import open_door
from stretto.pictures.enhance import Wording, default_wording, is_enhancer
from stretto.runtime.runtime import to_end
from stretto.server.calls.dialect import Piece, Thought
from stretto.server.client import PERCENTILES, SERVING, ApiFailure, Client, Load, LoadResult, run_load
from stretto.server.elastic import Least, ServedModel, environment_subnet
from stretto.server.messages import Message, Prompts
from stretto.server.server import ServeSettings, create_app, make_server, open_socket
from stretto.subnets.latency import engine_seconds, serving_dtype, usual_workloads
from stretto.text.chat import tool_form

AUTO = "auto"
_ROLLOUT_PAGE = 8
"""Tokens per cache page with ``--rollout``, as in RL recipes."""
_TEXT_STAGES = {"pretrain", "extract", "heal"}
"""Stages that train on running text (not on conversations) or do not train."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `stretto serve`, `chat` and `generate`."""

    subnet: str | None = None
    """A preset, ``best`` or ``auto`` (both extracted), or ``layers=…,experts=…,top_k=…``; None: the environment's choice, else full."""
    memory: str | None = None
    """Memory limit for weights and cache, such as ``8GB``; None: the free memory."""
    cache_memory: str | None = None
    """Memory of the key-value cache; None: a share of what the weights leave free."""
    latency_ms: float | None = None
    device: str = "auto"
    dtype: str | None = None
    max_batch: int = 64
    max_len: int | None = None
    max_wait_s: float | None = None
    max_step_s: float = 600.0
    fast_prefill: bool = False
    tp: int = 1
    """Ranks of tensor parallelism."""
    writer: str | None = None
    """Author of the prompts for pictures: ``suffix`` or ``model``; None: the checkpoint's default."""


def serve_command(source: Path, options: ServeOptions, settings: ServeSettings) -> None:
    """Serve ``source`` until stopped."""
    wording = Wording.of(options.writer)
    with closing(open_socket(settings.host, settings.port)) as listening:
        opened, model = _open(source, options)
        with closing(AsyncEngine(opened.engine).start()) as service:
            app = create_app(service, model, settings)
            open_door(app, wording or default_wording(model.is_enhancer))
            if warning := settings.exposure():
                _warn(warning)
            _announce(opened, model)
            _run_server(app, listening, service)


def serve_rollout_command(source: Path, options: ServeOptions, settings: ServeSettings) -> None:
    """Serve ``source`` as the engine of an RL run (`stretto.flow.rollout_server`) until stopped."""
    if settings.exposure():  # a client may have the server read files
        raise UserError(
            f"--rollout, --host {settings.host}: other machines can reach it; set --api-key or STRETTO_API_KEYS"
        )
    given: dict[str, Any] = {"--subnet": options.subnet, "--latency-ms": options.latency_ms, "--writer": options.writer}
    given |= {"--memory": options.memory, "--floor": settings.floor, "--cors": settings.cors_origins}
    if unused := [name for name, value in given.items() if value]:
        raise UserError(f"--rollout, {unused[0]}: has no effect on the engine of an RL run; leave it out")
    folder, device = checkpoint_folder(source), join(options.device).device
    dtype = _dtype(options, device)
    if dtype == torch.float16:
        raise UserError("--rollout, --dtype float16: a trainer does not round so; use float32 or bfloat16")
    if options.tp > 1 and dtype != torch.float32:
        raise UserError(
            f"--tp {options.tp}: ranks do not round as a trainer in {str(dtype).removeprefix('torch.')}; add --dtype float32, or leave --tp out"
        )
    config = _engine_config(options).replace(
        page_size=_ROLLOUT_PAGE, precision="fp32" if dtype == torch.float32 else "bf16"
    )
    with closing(open_socket(settings.host, settings.port)) as listening:
        network = read_config(folder)
        opened = partial(open_recording_engine, folder, config, str(device), routes=True)
        with _named_as_options():
            role = EngineRole(opened, name="the server")
        with closing(role):
            app = create_rollout_app(role, network, config.precision, settings)
            _say(f"{folder}: rollout engine in {config.precision}; it waits for weights")
            _run_server(app, listening, role.service)


def _run_server(app: Starlette, listening: socket, service: AsyncEngine) -> None:
    """Print the address, and serve ``app`` until stopped, or until its engine fails."""
    host, port = listening.getsockname()[:2]
    _say(f"{SERVING}http://{f'[{host}]' if ':' in host else host}:{port}")
    make_server(app).run(sockets=[listening])
    if service.error is not None:  # a supervisor such as systemd restarts a process with this exit code
        sys.stderr.write(f"stretto: {service.error}; the server ends\n")
        raise typer.Exit(1)


@contextmanager
def served_here(source: Path, options: ServeOptions) -> Iterator[tuple[Starlette, ServedModel]]:
    """The server's application over an engine in this process, for clients in the same process. Opens no port."""
    wording = Wording.of(options.writer)
    opened, model = _open(source, options)
    with closing(AsyncEngine(opened.engine).start()) as service:
        app = create_app(service, model, ServeSettings())
        open_door(app, wording or default_wording(model.is_enhancer))
        yield app, model


def generate_command(source: Path, prompt: str, options: ServeOptions, sampling: Sampling) -> None:
    """Print the completion of ``prompt`` while it is generated."""
    check_text(prompt, "--prompt")
    opened, model = _open(source, options)
    assert model.tokenizer is not None
    ids = model.tokenizer.document(prompt)
    room = opened.engine.max_len - len(ids)
    if 0 < room < sampling.max_tokens:
        _warn(
            f"--max-tokens {sampling.max_tokens}: a context of {opened.engine.max_len} tokens, of which the prompt has {len(ids)}, "
            f"leaves room for {room}; the continuation ends there"
        )
    for piece in stream(opened.engine, ids, model.default.of(model.config), sampling):
        _say(piece, end="")
    _say("")


def chat_command(source: Path, options: ServeOptions, sampling: Sampling, system: str | None) -> None:
    """A conversation on the console; ends at /exit, /quit or the end of input. A line that causes an error, or whose
    answer is interrupted with Ctrl-C, is not added to it."""
    check_text(system or "", "--system")
    opened, model = _open(source, options)
    subnet = model.default.of(model.config)
    assert model.tokenizer is not None
    if model.tokenizer.chat_template is None:
        problem = "the tokenizer has none; use `stretto generate`, or put a chat_template.jinja there"
        raise UserError(f"{opened.folder}: chat_template: {problem}")
    prompts = Prompts(model.tokenizer)
    sampling = sampling.replace(stop_ids=prompts.turn_ends)
    messages = [Message(role="system", content=system)] if system else []
    num_first = len(messages)
    say(f"{opened.name}, {subnet.label()}; /clear forgets what was said, /exit or Ctrl-D ends", style="dim")
    if isinstance(sys.stdin, TextIOWrapper):  # bytes that are not UTF-8 end their line, not the session
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if not line.strip():
            continue
        if line.rstrip() in ("/exit", "/quit"):
            return
        if line.rstrip() == "/clear":
            messages = messages[:num_first]
            continue
        if line.startswith("/"):
            _say(
                "commands: /clear forgets what was said, /exit or /quit ends; a line that begins with a space is not a command"
            )
            continue
        conversation = [*messages, Message(role="user", content=line)]
        try:
            check_text(line, "this line")
            answer = _answer(opened.engine, prompts, conversation, subnet, sampling)
        except KeyboardInterrupt:
            _say("\nnot answered: interrupted")
            continue
        except UserError as error:
            remedy = "; /clear forgets what was said" if len(messages) > num_first else ""
            _say(f"not answered: {str(error).removeprefix('request console: ')}{remedy}")
            continue
        messages = [*conversation, answer]


def _answer(
    engine: Engine, prompts: Prompts, messages: Sequence[Message], subnet: Subnet, sampling: Sampling
) -> Message:
    """Print and return the assistant's next message. Reasoning is printed, but kept apart from the content, as in the server."""
    ids = prompts.chat(messages)
    reader = prompts.reader(None, reads_thoughts=True, is_thinking=prompts.thinks(ids))
    pieces: list[Piece] = []
    # closing it, as after an interrupt, leaves the engine idle
    with closing(stream(engine, ids, subnet, sampling, prompts.visible_ids)) as texts:
        for text in texts:
            _say(text, end="")
            pieces += reader.push(text)
    _say("")
    pieces += reader.finish()
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return Message(role="assistant", content=content, reasoning_content=thoughts or None)


def check_url(url: str, option: str) -> None:
    """Raises `UserError` if ``url`` is not an HTTP address."""
    try:
        is_http = httpx.URL(url).scheme in ("http", "https") and bool(httpx.URL(url).host)
    except httpx.InvalidURL:
        is_http = False
    if not is_http:
        raise UserError(f"{option} {url}: not the address of an HTTP server; write for example http://127.0.0.1:8000")


def serve_settings(api_keys: Sequence[str], **asked: Any) -> ServeSettings:
    """Settings of the command line. Keys also come from the environment, where other users' process lists do not show them."""
    if not all(map(str.strip, api_keys)):
        raise UserError("--api-key: empty; write a key, or leave the option out")
    keys = {
        "api_keys": [*map(str.strip, api_keys), *environment_keys()],
        "admin_key": os.environ.get("STRETTO_ADMIN_KEY") or None,
    }
    names = {"api_keys": "--api-key", "cors_origins": "--cors", "allowed_hosts": "--allowed-host"}
    return validate_options(ServeSettings, keys | asked, names)


def environment_keys() -> list[str]:
    """Keys in ``STRETTO_API_KEYS``, separated by commas. A server accepts each of them; a client sends the first."""
    return list(filter(None, map(str.strip, os.environ.get("STRETTO_API_KEYS", "").split(","))))


def console_sampling(
    temperature: float, max_tokens: int, seed: int | None, repetition_penalty: float = CONSOLE_PENALTY
) -> Sampling:
    """Settings of the console's commands. Raises `UserError` for an impossible value."""
    fields = {
        "temperature": temperature,
        "max_tokens": max_tokens,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
    }
    return validate_options(Sampling, fields)


def _dtype(options: ServeOptions, device: torch.device) -> torch.dtype:
    """Data type of the weights. Raises `UserError`: it is unknown."""
    if options.dtype is not None and options.dtype not in DTYPES:
        raise UserError(f"--dtype {options.dtype}: unknown; use {', '.join(DTYPES)}")
    return DTYPES[options.dtype] if options.dtype else serving_dtype(device)


def _engine_config(options: ServeOptions) -> EngineConfig:
    """Sizes of the engine. Raises `UserError` for an impossible one."""
    sizes = {name: getattr(options, name) for name in ("max_batch", "max_len", "max_wait_s", "max_step_s", "tp")}
    return validate_options(EngineConfig, sizes | {"max_step_tokens": max(1024, options.max_batch)}).replace(
        cache_bytes=None if options.cache_memory is None else parse_bytes(options.cache_memory, "--cache-memory"),
        fast_prefill=options.fast_prefill,
    )


@contextmanager
def _named_as_options() -> Iterator[None]:
    """Context in which an error of the engine about a field of `ServeOptions` names the option instead: ``--max-len`` for ``max_len``."""
    try:
        yield
    except UserError as error:
        field, _, problem = str(error).partition(": ")
        if field not in ServeOptions.__annotations__:
            raise
        raise UserError(f"--{field.replace('_', '-')}: {problem}") from None


def _open(source: Path, options: ServeOptions) -> tuple[OpenedEngine, ServedModel]:
    folder, device = checkpoint_folder(source), join(options.device).device
    dtype = _dtype(options, device)
    memory = None if options.memory is None else parse_bytes(options.memory, "--memory")
    config = _engine_config(options)
    cut, presets = None, read_presets(folder)
    if options.tp > 1 and options.subnet in (AUTO, BEST):
        raise UserError(
            f"--subnet {options.subnet}: extracts a Subnet, which cannot be read in parts; with --tp {options.tp}, name a preset or "
            "layers=…,experts=…,top_k=…"
        )
    if options.subnet == AUTO:
        fit = fitting_subnet(source, memory, options.latency_ms, device, dtype, config)
        cut, step = fit.subnet, "" if fit.step_ms is None else f", {fit.step_ms:.2f} ms a token alone"
        loss = "" if fit.nll is None else f", held-out loss {fit.nll:.3f}"
        has_name = fit.name == "full" or fit.name in presets  # else the name is a label, with the dropped layers
        name = f"{fit.name} ({cut.label()})" if has_name else fit.name
        _say(f"auto: {name}: {size_in_bytes(fit.weight_bytes)} of weights{step}{loss}")
    elif options.subnet == BEST:
        cut = best_subnet(source, read_config(folder))
    elif options.latency_ms is not None:
        raise UserError("--latency-ms: needs --subnet auto, whose choice it limits; add it")
    if cut is not None:  # an extracted network has no other size
        presets = {}
    with _named_as_options():
        opened = open_engine(source, config, device=device, dtype=dtype, memory_bytes=memory, cut=cut)
    default = SubnetChoice()
    if cut is None and options.subnet is not None:
        parse_subnet(options.subnet, opened.engine.network, presets)  # raises an error if the network has no such size
        default = parse_choice(options.subnet, presets)
    elif cut is None:
        default = environment_subnet(os.environ, opened.engine.network) or default
    if options.tp == 1:
        _take_threads(opened.engine)
    least = least_trained(opened)
    for warning in least.warnings(cut or default.of(opened.engine.network)):
        _warn(warning)
    return opened, ServedModel.of(
        opened,
        presets,
        default=default,
        least=least,
        is_chat_tuned=is_chat_tuned(opened),
        is_enhancer=is_enhancer(opened.lineage),
    )


def _take_threads(engine: Engine) -> None:
    """On a CPU, set the number of threads that decodes a token fastest under the machine's present load."""
    model, device = engine.model, engine.model.embedding.weight.device
    if device.type == "cpu" and len(thread_counts()) > 1:
        seconds, workload = engine_seconds(device, engine.integers), usual_workloads(model.config)[0]
        fastest_threads(lambda: seconds(model, workload))


def least_trained(opened: OpenedEngine) -> Least:
    """The smallest layers, experts and top-k that the network was trained with, from its recipe; no limits without a recipe."""
    recipe = (opened.lineage.config.get("recipe") if opened.lineage else None) or {}
    config, elastic = opened.engine.network, recipe.get("elastic")
    if elastic is None:
        return Least()
    if elastic.get("sampler") == "off":
        return Least(config.num_layers, config.num_experts, config.top_k)
    anchors = opened.presets.values()
    drawn = max(elastic.get("min_depth", 1), len(fixed_layers(config.num_layers)))
    return Least(
        layers=min([drawn, *(len(subnet.layers) for subnet in anchors)]),
        experts=min([*config.widths, *(experts for subnet in anchors for experts in subnet.experts)]),
        top_k=min([elastic.get("min_top_k", 1), *(top_k for subnet in anchors for top_k in subnet.top_k)]),
    )


def is_chat_tuned(opened: OpenedEngine) -> bool:
    """Whether the network was trained on conversations. The lineage tells for networks that Stretto pre-trained; a foreign network is
    assumed to be trained with the chat template that it ships."""
    stages = {stage.stage for stage in history(opened.lineage)}
    return "pretrain" not in stages or not stages <= _TEXT_STAGES


def _announce(opened: OpenedEngine, model: ServedModel) -> None:
    """Print name, sizes, kernels and context of the model that is served."""
    config, usual = model.config, model.default.of(model.config)
    total, active = count(config, config.full()).total_params, count(config, usual).active_params
    kernels = ", ".join(f"{name}: {kind}" for name, kind in sorted(opened.engine.stats().kernels.items()))
    _say(f"{opened.name}: {params(total)} parameters; by default {usual.label()} ({params(active)} active)")
    _say(f"presets: {', '.join(f'{opened.name}:{name}' for name in opened.presets)}")
    weight = opened.engine.model.embedding.weight
    is_slower = weight.dtype == torch.float32 and config.hidden_size >= ROUGH_WIDTH and multiplies_bf16(weight.device)
    hint = " (--dtype bfloat16 is faster on this processor)" if is_slower else ""
    _say(f"kernels: {kernels}, in {str(weight.dtype).removeprefix('torch.')}{hint}")
    stats, most = opened.engine.stats(), config.max_positions
    if (
        model.tokenizer is not None
        and model.tokenizer.chat_template
        and (note := tool_form(model.tokenizer.chat_template).note())
    ):
        _say(note)
    limit = "" if stats.max_len == most else f" (of {most:,} the network has)"
    _say(f"context: {stats.max_len:,} tokens{limit}; cache: {size_in_bytes(stats.cache_bytes)}")


def _warn(text: str) -> None:
    sys.stderr.write(f"stretto: warning: {text}\n")


def _say(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Fit:
    """A Subnet within the limits, from `fitting_subnet`."""

    subnet: Subnet
    name: str
    weight_bytes: int
    step_ms: float | None
    """Measured time per decoded token at batch size 1; None without a latency limit."""
    nll: float | None
    """Held-out loss in nats per token; None if no search evaluated it."""


def parse_bytes(text: str, source: str) -> int:
    """Number of bytes in a text such as ``8GB``, ``512MiB`` or ``1e9``. Raises `UserError` that begins with ``source`` for other text."""
    match = re.fullmatch(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    value = float(match[1]) * _UNITS.get(match[2].upper(), 0) if match else 0.0
    if not 0 < value < float("inf"):
        raise UserError(f"{source} {text}: not a size; write for example 8GB or 512MiB")
    return int(value)


def fitting_subnet(
    source: Path,
    memory_bytes: int | None,
    latency_ms: float | None,
    device: torch.device,
    dtype: torch.dtype,
    config: EngineConfig,
) -> Fit:
    """The best Subnet of ``source`` whose weights and one sequence of full length fit in memory, and that decodes fast enough.

    The best one has the lowest held-out loss if the run was searched, else the most active parameters. Speed is measured at batch
    size 1 on the extracted Subnet. Weights that the engine holds as integers count as integers. Raises `UserError` that names the
    nearest limit that can be met.
    """
    folder = checkpoint_folder(source)
    network = read_config(folder)
    held = held_integers(folder, network, config, device, dtype, load() if device.type == "cpu" else None)
    available = free_bytes(device) if memory_bytes is None else memory_bytes
    ranked = _candidates(source, network, read_presets(folder))
    sizes, fitting = [], []
    for name, subnet, nll in ranked:
        part, cut = extracted_config(network, subnet), slice_integers(network, subnet, held)
        sizes.append(least_bytes(part, config, dtype, cut))
        if sizes[-1] <= available:
            fitting.append(Fit(subnet, name, held_bytes(part, dtype, cut), None, nll))
    if not fitting:
        needs = f"needs {min(sizes)} bytes with one sequence; give it that much"
        raise UserError(f"--memory {available}: the smallest sub-model of {source} {needs}")
    if latency_ms is None:
        return fitting[0]
    checkpoint = read_checkpoint(folder, device=device, dtype=dtype, without=held)
    workload = usual_workloads(network)[0]
    fastest = float("inf")
    with progress("measure sizes", len(fitting)) as advance:
        for fit in fitting:
            model, integers = read_part(checkpoint, fit.subnet, held)
            step_ms = 1e3 * engine_seconds(device, integers)(model, workload)
            advance(1, f"{fit.name}: {step_ms:.2f} ms a token")
            if step_ms <= latency_ms:
                return replace(fit, step_ms=step_ms)
            fastest = min(fastest, step_ms)
    takes = f"takes {fastest:.2f} ms a token here; allow that much"
    raise UserError(f"--latency-ms {latency_ms:g}: the fastest sub-model of {source} that fits {takes}")


def _candidates(
    source: Path, network: ModelConfig, presets: Mapping[str, SubnetChoice]
) -> Sequence[tuple[str, Subnet, float | None]]:
    """Name, Subnet and held-out loss (None if unknown) of each size, the best first."""
    record = read_search(source)
    if record is None:
        found = [(name, subnet, None) for name, subnet in named_subnets(network, presets).items()]
        return sorted(found, key=lambda each: -count(network, each[1]).active_params)
    known = [(each, each.nll) for each in record.result.candidates if each.nll is not None]
    known.sort(key=lambda pair: pair[1])
    return [(each.name or record.result.label(each.subnet), each.subnet, nll) for each, nll in known]


# --- load tests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of `stretto bench-serve`."""

    requests: int
    concurrency: int
    rate: float | None
    prompt_tokens: int
    max_tokens: int
    seed: int


def bench_serve_command(source: Path | None, url: str | None, subnet: str | None, options: LoadOptions) -> None:
    """Send requests to ``url``, or to a server of ``source`` that is started for the test; print latencies and throughput."""
    if (source is None) == (url is None):
        raise UserError("bench-serve: name either a run or --url of a running server")
    if url is not None:
        check_url(url, "--url")
        if subnet is not None:
            raise UserError(
                "--subnet: for a server that is started here; start the one at --url with it, or leave it out"
            )
    for name in ("requests", "concurrency", "prompt_tokens", "max_tokens", "rate"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} {value:g}: needs a number above 0")
    flags = ["--subnet", subnet] if subnet else []
    with serving(source, *flags) if source is not None else nullcontext((str(url), None)) as (started, _):
        _show(to_end(_load(started, options)))


async def _load(url: str, options: LoadOptions) -> LoadResult:
    async with Client(url, next(iter(environment_keys()), None)) as client:
        try:
            info = await client.get("/api/info")
        except httpx.TransportError:
            raise UserError(f"--url {url}: no server answers; start `stretto serve` first") from None
        except ApiFailure as error:
            raise UserError(f"--url {url}: {error}; name a server of `stretto serve` that takes this key") from None
        except ValueError:  # a page, not JSON
            info = None
        if not isinstance(info, Mapping) or "vocab_size" not in info:
            raise UserError(f"--url {url}: no server of `stretto serve` answers there; name one")
        rng = random.Random(options.seed)
        prompts = [rng.choices(range(info["vocab_size"]), k=options.prompt_tokens) for _ in range(options.requests)]
        num_open = options.requests if options.rate else options.concurrency
        load = Load(options.requests, num_open, prompts, options.max_tokens, options.rate, seed=options.seed)
        return await run_load(client, load)


def _show(result: LoadResult) -> None:
    table = Table(title=f"{len(result.seen)} answers in {result.wall_s:.1f} s")
    for column in ("", *(f"p{each}" for each in PERCENTILES)):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("time to first token, ms", *(f"{value:,.2f}" for value in result.first_token_ms()))
    table.add_row("between tokens, ms (mean of a request)", *(f"{value:,.2f}" for value in result.between_tokens_ms()))
    wide_console().print(table)
    say(f"{result.tokens_per_s:,.0f} tokens/s, {result.requests_per_s:,.2f} requests/s")
    for reason, times in sorted(result.errors.items()):
        say(f"{times} x {reason}", style="red")
    if not result.seen:
        raise UserError(f"bench-serve: none of the {sum(result.errors.values())} requests was answered; see above")
