"""The commands that serve. They import the engine late, so that ``stretto --help`` needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.options import Device

Model = Annotated[Path | None, typer.Option(help="A run or a checkpoint, served in this process.")]
Server = Annotated[str | None, typer.Option(help="Address of a running server instead; its chat API is asked.")]
Source = Annotated[Path, typer.Argument(help="A run or a checkpoint.", show_default=False)]
ServedSubnet = Annotated[
    str | None, typer.Option("--subnet", help="A preset, best, auto, or layers=…,experts=…,top_k=….")
]
Memory = Annotated[str | None, typer.Option(help="What weights and cache may take: 8GB.")]
Speculate = Annotated[bool, typer.Option("--speculate", help="Draft with a sub-model; the same output, sooner.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens written.")]
Seed = Annotated[int | None, typer.Option(help="For the same text again.")]
ServedDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="float32 or bfloat16; fp32 on a CPU by default, where bf16 is faster if it has units for it."
    ),
]


def serve(
    source: Source,
    subnet: ServedSubnet = None,
    memory: Memory = None,
    cache_memory: Annotated[
        str | None,
        typer.Option(help="What the cache may take: 4GB. Default: what --memory leaves, else a share of what is free."),
    ] = None,
    latency_ms: Annotated[float | None, typer.Option(help="With --subnet auto: milliseconds a token, alone.")] = None,
    floor: Annotated[str | None, typer.Option(help="Smallest size under load; without it, none is reduced.")] = None,
    first_token_s: Annotated[
        float,
        typer.Option(help="With --floor: seconds to a first token; slower, sizes shrink, then requests are refused."),
    ] = 2.0,
    speculate: Speculate = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.")] = 8000,
    max_batch: Annotated[int, typer.Option(help="Sequences computed at once.")] = 64,
    max_len: Annotated[
        int | None, typer.Option(help="Prompt and completion together, tokens. Default: what network and cache hold.")
    ] = None,
    max_wait_s: Annotated[
        float, typer.Option(help="Seconds that a request may wait for a place in the batch; then it gets 503.")
    ] = 120.0,
    tool_chars: Annotated[
        int | None, typer.Option(help="Of a tool's result, show so many characters: beginning and end. Default: all.")
    ] = None,
    fast_prefill: Annotated[
        bool,
        typer.Option(
            "--fast-prefill",
            help="On a CPU: long prompts of large networks sooner in fp32; tokens then depend on the batch.",
        ),
    ] = False,
    api_key: Annotated[
        list[str], typer.Option(help="Ask for one of these; also STRETTO_API_KEYS, by commas.", show_default=False)
    ] = [],  # noqa: B006
    cors: Annotated[list[str], typer.Option(help="Web origin that may ask.", show_default=False)] = [],  # noqa: B006
    device: Device = "auto",
    dtype: ServedDtype = None,
) -> None:
    """Serve a checkpoint at any size per request: OpenAI's API, a page to try it, metrics."""
    from stretto.api.serve import ServeOptions, serve_command, serve_settings

    options = ServeOptions(
        subnet=subnet,
        memory=memory,
        cache_memory=cache_memory,
        latency_ms=latency_ms,
        device=device,
        dtype=dtype,
        max_batch=max_batch,
        max_len=max_len,
        max_wait_s=max_wait_s,
        fast_prefill=fast_prefill,
        speculate=speculate,
    )
    limits = {"floor": floor, "first_token_s": first_token_s, "max_wait_s": max_wait_s, "tool_chars": tool_chars}
    settings = serve_settings(api_key, host=host, port=port, cors_origins=cors, **limits)
    serve_command(source, options, settings)


def chat(
    source: Source,
    subnet: ServedSubnet = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Temperature = 0.7,
    max_tokens: MaxTokens = 512,
    seed: Seed = None,
    speculate: Speculate = False,
    device: Device = "auto",
    dtype: ServedDtype = None,
) -> None:
    """Talk to a checkpoint on the console."""
    from stretto.api.serve import ServeOptions, chat_command, console_sampling

    options = ServeOptions(subnet=subnet, device=device, dtype=dtype, max_batch=1, speculate=speculate)
    chat_command(source, options, console_sampling(temperature, max_tokens, seed), system)


def agent(
    question: Annotated[str, typer.Argument(help="What is asked.", show_default=False)],
    model: Model = None,
    server: Server = None,
    tools: Annotated[str, typer.Option(help="By commas: search=FOLDER, python, calculator.")] = "",
    budget_turns: Annotated[int, typer.Option(help="Turns of the model, the answer included.")] = 16,
    budget_tokens: Annotated[int, typer.Option(help="Tokens that it may write in all of them.")] = 4096,
    votes: Annotated[
        int, typer.Option(help="Runs, of which the most frequent answer is given; needs a temperature.")
    ] = 1,
    temperature: Temperature = 0.0,
    think: Annotated[str | None, typer.Option(help="Preset of the turns that call tools.")] = None,
    answer: Annotated[str | None, typer.Option(help="Preset that writes the answer.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Ask for a plan before the first call.")] = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The transcript as a page.")] = None,
    seed: Annotated[int, typer.Option(help="Of the first run; the next have the next.")] = 0,
    device: Device = "auto",
    dtype: ServedDtype = None,
) -> None:
    """Answer a question with tools: search, read, cite, compute; within a budget, with a transcript."""
    from stretto.api.agent import AgentOptions, agent_command
    from stretto.api.serve import ServeOptions
    from stretto.base.config import validate

    told = {"turns": budget_turns, "tokens": budget_tokens, "votes": votes, "temperature": temperature, "seed": seed}
    options = validate(AgentOptions, told | {"think": think, "answer": answer}, "stretto agent: --budget-*, --votes")
    serving = ServeOptions(device=device, dtype=dtype, max_batch=max(1, votes))
    agent_command(question, model, server, tools, options, plan=plan, out=out, serving=serving)


def generate(
    source: Source,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    subnet: ServedSubnet = None,
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = 128,
    seed: Seed = None,
    speculate: Speculate = False,
    device: Device = "auto",
    dtype: ServedDtype = None,
) -> None:
    """Continue a text on the console."""
    from stretto.api.serve import ServeOptions, console_sampling, generate_command

    options = ServeOptions(subnet=subnet, device=device, dtype=dtype, max_batch=1, speculate=speculate)
    generate_command(source, prompt, options, console_sampling(temperature, max_tokens, seed))


def bench_serve(
    source: Annotated[Path | None, typer.Argument(help="A run or checkpoint to serve for this.")] = None,
    url: Annotated[str | None, typer.Option(help="A running server instead.")] = None,
    subnet: ServedSubnet = None,
    requests: Annotated[int, typer.Option(help="How many.")] = 64,
    concurrency: Annotated[int, typer.Option(help="Open at once.")] = 16,
    rate: Annotated[float | None, typer.Option(help="Arrivals a second (Poisson) instead.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens a prompt.")] = 64,
    max_tokens: MaxTokens = 64,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
) -> None:
    """Load a server: throughput, time to first token and between tokens."""
    from stretto.api.serve import LoadOptions, bench_serve_command

    bench_serve_command(source, url, subnet, LoadOptions(requests, concurrency, rate, prompt_tokens, max_tokens, seed))
