"""Serving a checkpoint: the server, a chat and a completion on the console, and a load generator."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import rich
import torch

from stretto.apps.choose import fitting_subnet, parse_bytes
from stretto.apps.shape import best_subnet
from stretto.base.config import validate
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder
from stretto.engine.async_engine import AsyncEngine as Service
from stretto.engine.engine import Engine
from stretto.engine.loading import OpenedEngine, cache_within, free_bytes, generation_ends, open_engine
from stretto.engine.request import EngineConfig, Phases, Request, Sampling, SpeculateConfig, TokenEvent
from stretto.evals.numbers import params, size_in_bytes
from stretto.model.count import count
from stretto.model.hub import read_config, read_presets
from stretto.model.parallel import join
from stretto.model.presets import parse_choice, parse_subnet
from stretto.model.spec import Subnet, SubnetChoice, extracted_config
from stretto.serve.server import create_app, open_socket, serve
from stretto.serve.settings import ServedModel, ServeSettings, environment_subnet
from stretto.text.chat import render

AUTO, BEST = "auto", "best"
SERVING = "serving at"
"""Begins the line that tells the address."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `stretto serve`, `chat` and `generate` were asked for."""

    subnet: str | None = None
    """A preset, ``best`` or ``auto`` (both cut out), or ``layers=…,experts=…,top_k=…``; None: the environment's, else full."""
    memory: str | None = None
    latency_ms: float | None = None
    device: str = "auto"
    dtype: str | None = None
    max_batch: int = 64
    max_len: int | None = None
    speculate: bool = False


def serve_command(source: Path, options: ServeOptions, settings: ServeSettings) -> None:
    """Serve ``source`` until stopped."""
    listening = open_socket(settings.host, settings.port)
    try:
        opened, default, presets = _open(source, options)
        engine = opened.engine
        model = ServedModel(
            name=opened.name,
            config=opened.config,
            presets=presets,
            tokenizer=opened.tokenizer,
            max_len=engine.max_len,
            default=default,
            stop_ids=generation_ends(opened.folder, opened.config.vocab_size),
            weight_bytes=engine.model.embedding.weight.element_size(),
            min_depth=_min_depth(opened),
        )
        service = Service(engine).start()
        try:
            app = create_app(service, model, settings)
            host, port = listening.getsockname()[:2]
            _announce(opened, default, f"http://{f'[{host}]' if ':' in host else host}:{port}")
            serve(app, settings, listening)
        finally:
            service.close()
    finally:
        listening.close()


def generate_command(source: Path, prompt: str, options: ServeOptions, sampling: Sampling) -> Iterator[str]:
    """Pieces of the completion of ``prompt`` as they come."""
    opened, default, _ = _open(source, options)
    assert opened.tokenizer is not None
    ids = opened.tokenizer.encode(prompt) or [opened.tokenizer.eos_id]
    yield from _stream(opened.engine, ids, default.of(opened.config), sampling)


def chat_command(source: Path, options: ServeOptions, sampling: Sampling, system: str | None) -> None:
    """A conversation on the console; ends at end of input."""
    folder = checkpoint_folder(source)
    opened, default, _ = _open(source, options)
    tokenizer = opened.tokenizer
    assert tokenizer is not None
    if tokenizer.chat_template is None:
        raise UserError(
            f"{folder}: chat_template: the tokenizer has none; use `stretto generate`, or put a chat_template.jinja there"
        )
    messages = [{"role": "system", "content": system}] if system else []
    rich.print(f"[dim]{opened.name}, {default.of(opened.config).label()}; Ctrl-D ends[/dim]")
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        ids = tokenizer.encode_rendered(render(tokenizer.chat_template, messages, add_generation_prompt=True))
        answer = ""
        for piece in _stream(opened.engine, ids, default.of(opened.config), sampling):
            sys.stdout.write(piece)
            sys.stdout.flush()
            answer += piece
        sys.stdout.write("\n")
        messages.append({"role": "assistant", "content": answer})


def serve_settings(
    host: str,
    port: int,
    api_keys: Sequence[str],
    cors_origins: Sequence[str],
    floor: str | None,
    first_token_s: float = 2.0,
) -> ServeSettings:
    """Settings of the command line; keys and the admin's key also from the environment, where nobody reads them."""
    keys = [*api_keys, *environment_keys()]
    fields = {
        "host": host,
        "port": port,
        "api_keys": keys,
        "admin_key": os.environ.get("STRETTO_ADMIN_KEY") or None,
        "cors_origins": list(cors_origins),
        "floor": floor,
        "elastic": {"first_token_s": first_token_s},
    }
    return validate(ServeSettings, fields, "stretto serve")


def environment_keys() -> list[str]:
    """Keys that ``STRETTO_API_KEYS`` names: a server asks for one of them, a client shows the first."""
    return list(filter(None, os.environ.get("STRETTO_API_KEYS", "").split(",")))


def console_sampling(temperature: float, max_tokens: int, seed: int | None) -> Sampling:
    """Settings of the console's commands. Raises `UserError` for an impossible value."""
    fields = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed, "repetition_penalty": 1.1}
    return validate(Sampling, fields, "--temperature, --max-tokens")


class _Opened(NamedTuple):
    engine: OpenedEngine
    default: SubnetChoice
    """What a request gets that asks for nothing."""
    presets: dict[str, SubnetChoice]


def _open(source: Path, options: ServeOptions) -> _Opened:
    if options.dtype is not None and options.dtype not in DTYPES:
        raise UserError(f"--dtype {options.dtype}: unknown; use {' or '.join(DTYPES)}")
    folder, device = checkpoint_folder(source), join(options.device).device
    dtype = DTYPES[options.dtype] if options.dtype else torch.float32 if device.type == "cpu" else torch.bfloat16
    memory = None if options.memory is None else parse_bytes(options.memory, "--memory")
    sizes = {"max_batch": options.max_batch, "max_len": options.max_len}
    config = validate(EngineConfig, sizes, "--max-batch, --max-len").replace(
        max_step_tokens=max(1024, options.max_batch), speculate=SpeculateConfig() if options.speculate else None
    )
    network = read_config(folder)
    cut = _cut(source, options, memory, device, dtype, config)
    kept = network if cut is None else extracted_config(network, cut)
    config = cache_within(kept, config, dtype, free_bytes(device) if memory is None else memory)
    opened = open_engine(source, config, device=device, dtype=dtype, memory_bytes=memory, cut=cut)
    if cut is not None:
        return _Opened(opened, SubnetChoice(), {})
    presets = read_presets(folder)
    if options.subnet is not None:
        parse_subnet(options.subnet, opened.config, presets)  # refuses what the network does not have
        return _Opened(opened, parse_choice(options.subnet, presets), presets)
    return _Opened(opened, environment_subnet(os.environ, opened.config) or SubnetChoice(), presets)


def _cut(
    source: Path,
    options: ServeOptions,
    memory: int | None,
    device: torch.device,
    dtype: torch.dtype,
    config: EngineConfig,
) -> Subnet | None:
    """The Subnet to serve as a network of its own; None: the whole network, any size per request."""
    if options.subnet == BEST:
        return best_subnet(source, read_config(checkpoint_folder(source)))
    if options.subnet != AUTO:
        if options.latency_ms is not None:
            raise UserError("--latency-ms: chooses a sub-model, so it goes with --subnet auto; add that")
        return None
    fit = fitting_subnet(source, memory, options.latency_ms, device, dtype, config)
    step = "" if fit.step_ms is None else f", {fit.step_ms:.2f} ms a token alone"
    loss = "" if fit.nll is None else f", held-out loss {fit.nll:.3f}"
    _say(f"auto: {fit.name} ({fit.subnet.label()}): {size_in_bytes(fit.weight_bytes)} of weights{step}{loss}")
    return fit.subnet


def _stream(engine: Engine, ids: list[int], subnet: Subnet, sampling: Sampling) -> Iterator[str]:
    engine.add(Request("console", tuple(ids), sampling, Phases(subnet)))
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                yield event.text
            elif event.error is not None:
                raise UserError(f"the completion failed: {event.error}")


def _min_depth(opened: OpenedEngine) -> int:
    """Fewest layers the network was trained with, as its recipe says; 1 where no recipe is known."""
    recipe = opened.lineage.config.get("recipe") if opened.lineage is not None else None
    elastic = recipe.get("elastic") if isinstance(recipe, dict) else None
    trained = elastic.get("min_depth", 1) if elastic else 1
    return min([trained, *(len(subnet.layers) for subnet in opened.presets.values())])


def _announce(opened: OpenedEngine, default: SubnetChoice, url: str) -> None:
    full, chosen = (count(opened.config, each) for each in (opened.config.full(), default.of(opened.config)))
    kernels = ", ".join(f"{name}: {kind}" for name, kind in sorted(opened.engine.stats().kernels.items()))
    _say(
        f"{opened.name}: {params(full.total_params)} parameters; by default {default.of(opened.config).label()}"
        f" ({params(chosen.active_params)} active)"
    )
    _say(f"presets: {', '.join(f'{opened.name}:{name}' for name in opened.presets)}")
    _say(f"kernels: {kernels}")
    _say(f"{SERVING} {url}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
