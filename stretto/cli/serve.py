"""The commands that run a model: serve, chat, agent, generate, bench-serve. They import the engine late."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from stretto.cli.options import Device, Source

Model = Annotated[Path | None, Option(help="Run or checkpoint to load in this process.")]
Server = Annotated[str | None, Option(help="URL of a running server to use instead of --model.")]
ServedSubnet = Annotated[
    str | None,
    Option(
        "--subnet",
        help="Size: a preset, best (the search's choice), auto (the best that fits), or layers=…,experts=…,top_k=….",
    ),
]
Memory = Annotated[str | None, Option(help="Memory for weights and cache, for example 8GB. Default: what is free.")]
Temperature = Annotated[float, Option(help="Sampling temperature; 0: greedy decoding.")]
MaxTokens = Annotated[int, Option(help="Largest number of tokens to generate.")]
Seed = Annotated[int | None, Option(help="Random seed. Default: a new one each time.")]
PromptWriter = Annotated[
    str | None,
    Option(
        "--writer",
        help="Who words prompts for pictures: suffix (neutral fixed phrases) or model. Default: suffix, or model for one trained on shapes.",
    ),
]
ServedDtype = Annotated[
    str | None,
    Option(
        "--dtype", help="Data type of the weights: float32 or bfloat16. Default: float32 on a CPU, bfloat16 elsewhere."
    ),
]


def serve(
    source: Source,
    subnet: ServedSubnet = None,
    memory: Memory = None,
    cache_memory: Annotated[
        str | None,
        Option(
            help="Memory for the key-value cache, for example 4GB. Default: what --memory leaves, or a share of what is free."
        ),
    ] = None,
    latency_ms: Annotated[
        float | None, Option(help="With --subnet auto: most milliseconds per token at batch size 1.")
    ] = None,
    floor: Annotated[
        str | None,
        Option(help="Smallest size that requests may be reduced to under load. Default: sizes are never reduced."),
    ] = None,
    first_token_s: Annotated[
        float,
        Option(
            help="With --floor: target seconds to the first token; above it, sizes are reduced, then requests are refused."
        ),
    ] = 2.0,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port; 0: any free port.")] = 8000,
    max_batch: Annotated[int, Option(help="Largest batch size, in sequences.")] = 64,
    max_len: Annotated[
        int | None,
        Option(help="Longest prompt and completion together, in tokens. Default: what network and cache allow."),
    ] = None,
    max_wait_s: Annotated[
        float,
        Option(help="Longest wait for a place in the batch, in seconds; then the request fails with status 503."),
    ] = 120.0,
    max_step_s: Annotated[
        float,
        Option(
            help="Longest time for one step of the engine, in seconds; then the engine counts as hung and the server ends."
        ),
    ] = 600.0,
    tool_chars: Annotated[
        int | None,
        Option(
            help="Largest number of characters of a tool result that the model sees; a longer one loses its middle. Default: no limit."
        ),
    ] = None,
    fast_prefill: Annotated[
        bool,
        Option(
            "--fast-prefill",
            help="On a CPU: process long prompts of large networks faster in fp32; results then depend on the batch.",
        ),
    ] = False,
    tp: Annotated[
        int,
        Option(
            help="Ranks of tensor parallelism: GPUs, or processes on a CPU, that divide heads and widths of the network. "
            "Memory options then apply to each rank."
        ),
    ] = 1,
    api_key: Annotated[
        list[str],
        Option(
            help="API key that clients must send. Also read from STRETTO_API_KEYS, separated by commas.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    cors: Annotated[list[str], Option(help="Web origin allowed to call the API (CORS).", show_default=False)] = [],  # noqa: B006
    allowed_host: Annotated[
        list[str],
        Option(
            help="Host name to answer, beside localhost. Default: with a loopback --host only localhost, else any name.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    writer: PromptWriter = None,
    rollout: Annotated[
        bool,
        Option(
            "--rollout",
            help="Serve as an engine of `stretto rl` (rollout.engine = stretto), with endpoints that load weights. For private addresses only.",
        ),
    ] = False,
    device: Device = "auto",
    dtype: ServedDtype = None,
) -> None:
    """Serve a checkpoint at every size, chosen per request: OpenAI-compatible API, web page, Prometheus metrics."""
    values = locals()
    from stretto.api.serve import ServeOptions, serve_command, serve_rollout_command, serve_settings

    options = ServeOptions(**{each.name: values[each.name] for each in fields(ServeOptions)})
    limits = {"floor": floor, "first_token_s": first_token_s, "max_wait_s": max_wait_s, "tool_chars": tool_chars}
    exposed = {"host": host, "port": port, "cors_origins": cors, "allowed_hosts": allowed_host}
    settings = serve_settings(api_key, **exposed, **limits)
    (serve_rollout_command if rollout else serve_command)(source, options, settings)


def chat(
    source: Source,
    subnet: ServedSubnet = None,
    system: Annotated[str | None, Option(help="System message.")] = None,
    temperature: Temperature = 0.7,
    max_tokens: MaxTokens = 512,
    seed: Seed = None,
    device: Device = "auto",
    dtype: ServedDtype = None,
) -> None:
    """Chat with a checkpoint on the console."""
    from stretto.api.serve import ServeOptions, chat_command, console_sampling

    options = ServeOptions(subnet=subnet, device=device, dtype=dtype, max_batch=1)
    chat_command(source, options, console_sampling(temperature, max_tokens, seed), system)


def agent(
    question: Annotated[str, Argument(help="Question to answer.", show_default=False)],
    model: Model = None,
    server: Server = None,
    tools: Annotated[str, Option(help="Tools, separated by commas: search=FOLDER, python, calculator.")] = "",
    budget_turns: Annotated[int, Option(help="Largest number of turns, the answer included.")] = 16,
    budget_tokens: Annotated[int, Option(help="Largest number of tokens to generate over all turns.")] = 4096,
    votes: Annotated[
        int, Option(help="Number of runs for a majority vote over answers; needs a temperature above 0.")
    ] = 1,
    temperature: Temperature = 0.0,
    think: Annotated[str | None, Option(help="Size that calls tools, a preset. Default: the full network.")] = None,
    answer: Annotated[
        str | None, Option(help="Size that writes the answer, a preset. Default: the full network.")
    ] = None,
    plan: Annotated[bool, Option("--plan", help="Ask for a plan before the first tool call.")] = False,
    must_search: Annotated[
        bool | None,
        Option(
            "--must-search/--no-must-search",
            help="Search for the question before the model's first turn. Default: on with a search tool.",
        ),
    ] = None,
    require_source: Annotated[
        bool, Option("--require-source", help="End with exit code 2 when no document was opened.")
    ] = False,
    out: Annotated[
        Path | None, Option("-o", "--out", help="File to write the transcript to: .json for JSON, else HTML.")
    ] = None,
    seed: Annotated[int, Option(help="Random seed of the first run; later runs count up.")] = 0,
    device: Device = "auto",
    dtype: ServedDtype = None,
) -> None:
    """Answer a question with tools (search, read, cite, compute) within a budget.

    Prints the answer with its sources, or that no source was opened; writes a transcript with --out.
    """
    from stretto.api.agent import AgentOptions, agent_command
    from stretto.api.serve import ServeOptions
    from stretto.base.config import validate

    values = {"turns": budget_turns, "tokens": budget_tokens, "votes": votes, "temperature": temperature, "seed": seed}
    others = {"think": think, "answer": answer, "must_search": must_search, "require_source": require_source}
    options = validate(AgentOptions, values | others, "stretto agent: --budget-*, --votes")
    serving = ServeOptions(device=device, dtype=dtype, max_batch=max(1, votes))
    agent_command(question, model, server, tools, options, plan=plan, out=out, serving=serving)


def generate(
    source: Source,
    prompt: Annotated[str, Option(help="Text to continue; empty: a new document.")],
    subnet: ServedSubnet = None,
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = 128,
    seed: Seed = None,
    device: Device = "auto",
    dtype: ServedDtype = None,
) -> None:
    """Continue a text and print the continuation as it is generated."""
    from stretto.api.serve import ServeOptions, console_sampling, generate_command

    options = ServeOptions(subnet=subnet, device=device, dtype=dtype, max_batch=1)
    generate_command(source, prompt, options, console_sampling(temperature, max_tokens, seed))


def bench_serve(
    source: Annotated[Path | None, Argument(help="Run or checkpoint to start a server for.")] = None,
    url: Annotated[str | None, Option(help="URL of a running server to measure instead.")] = None,
    subnet: ServedSubnet = None,
    requests: Annotated[int, Option(help="Number of requests.")] = 64,
    concurrency: Annotated[int, Option(help="Number of requests in flight.")] = 16,
    rate: Annotated[float | None, Option(help="Arrivals per second (Poisson) instead of --concurrency.")] = None,
    prompt_tokens: Annotated[int, Option(help="Length of a prompt, in tokens.")] = 64,
    max_tokens: MaxTokens = 64,
    seed: Annotated[int, Option(help="Random seed of prompts and arrivals.")] = 0,
) -> None:
    """Send many requests to a server at once. Reports tokens per second, time to first token, and time between tokens."""
    from stretto.api.serve import LoadOptions, bench_serve_command

    bench_serve_command(source, url, subnet, LoadOptions(requests, concurrency, rate, prompt_tokens, max_tokens, seed))
