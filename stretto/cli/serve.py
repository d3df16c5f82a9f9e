"""The commands that run a model: serve, chat, agent, generate, bench-serve. They import the engine late."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from stretto.base.errors import UserError, check_text
from stretto.cli.options import Device, OptionalOut, Source, check_ending, check_exists

Model = Annotated[Path | None, Option(help="Run or checkpoint to load in this process.")]
Server = Annotated[str | None, Option(help="URL of a running server to use instead of --model.")]
ServedSubnet = Annotated[
    str | None,
    Option(
        "--subnet",
        help="Size: a preset, best (the search's choice), auto (the best that fits), or layers=…,experts=…,top_k=….",
    ),
]
Temperature = Annotated[float, Option(help="Sampling temperature; 0: greedy decoding.")]
RepetitionPenalty = Annotated[
    float,
    Option(help="Above 1: tokens of the prompt and of the answer become less likely to come again; 1: no penalty."),
]
MaxTokens = Annotated[int, Option(help="Largest number of tokens to generate.")]
Seed = Annotated[int | None, Option(help="Random seed. Default: a new one each time.")]
PromptWriter = Annotated[
    str | None,
    Option(
        "--writer",
        help="Writer of picture prompts: suffix (neutral fixed phrases) or model. Default: model if it was trained on shapes, otherwise suffix.",
    ),
]
ServedDtype = Annotated[
    str | None,
    Option(
        "--dtype",
        help="Data type of the weights: float32, bfloat16 or float16. Default: float32 on a CPU, bfloat16 elsewhere.",
    ),
]


def serve(
    source: Source,
    subnet: ServedSubnet = None,
    memory: str | None = None,
    cache_memory: str | None = None,
    latency_ms: float | None = None,
    floor: str | None = None,
    first_token_s: float = 2.0,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_batch: int = 64,
    max_len: int | None = None,
    max_wait_s: float = 120.0,
    max_step_s: float = 600.0,
    tool_chars: int | None = None,
    fast_prefill: bool = False,
    tp: int = 1,
    api_key: list[str] = [],
    cors: list[str] = [],
    allowed_host: list[str] = [],
    access_log: bool = True,
    writer: PromptWriter = None,
    rollout: bool = False,
    device: Device = "auto",
    dtype: ServedDtype = None,
) -> None:
    """Serve a checkpoint at every size, chosen per request: OpenAI-compatible API, web page, Prometheus metrics.

    Args:
        memory: Memory for weights and cache, for example 8GB. Default: what is free.
        cache_memory: Memory for the key-value cache, for example 4GB. Default: what --memory leaves, or a share of what is free.
        latency_ms: With --subnet auto: most milliseconds per token at batch size 1.
        floor: Smallest size that requests may be reduced to under load. Default: sizes are never reduced.
        first_token_s: With --floor: target seconds to the first token; above it, sizes are reduced, then requests are refused.
        host: Address to listen on.
        port: Port; 0: any free port.
        max_batch: Largest batch size, in sequences.
        max_len: Longest prompt and completion together, in tokens. Default: what network and cache allow.
        max_wait_s: Longest wait for a place in the batch, in seconds; then the request fails with status 503.
        max_step_s: Longest time for one step of the engine, in seconds; then the engine counts as hung and the server ends.
        tool_chars: Largest number of characters of a tool result that the model sees; a longer one loses its middle. Default:
            no limit.
        fast_prefill: On a CPU: process long prompts of large networks faster in fp32; results then depend on the batch.
        tp: Ranks of tensor parallelism: GPUs, or processes on a CPU, that divide heads and widths of the network. Memory
            options then apply to each rank.
        api_key: API key that clients must send. Also read from STRETTO_API_KEYS, separated by commas.
        cors: Web origin allowed to call the API (CORS).
        allowed_host: Host name to answer, beside localhost. Default: with a loopback --host only localhost, else any name.
        access_log: Write a line to stderr at the end of each request: client, path, status, size, tokens and times.
        rollout: Serve as an engine of `stretto rl` (rollout.engine = stretto), with endpoints that load weights. For private
            addresses only.
    """
    values = locals()
    check_exists(source)
    from stretto.api.serve import ServeOptions, serve_command, serve_rollout_command, serve_settings

    options = ServeOptions(**{each.name: values[each.name] for each in fields(ServeOptions)})
    limits = {"floor": floor, "first_token_s": first_token_s, "max_wait_s": max_wait_s, "tool_chars": tool_chars}
    exposed = {
        "host": host,
        "port": port,
        "cors_origins": cors,
        "allowed_hosts": allowed_host,
        "access_log": access_log,
    }
    settings = serve_settings(api_key, **exposed, **limits)
    (serve_rollout_command if rollout else serve_command)(source, options, settings)


def chat(
    source: Source,
    subnet: ServedSubnet = None,
    system: str | None = None,
    temperature: Temperature = 0.7,
    repetition_penalty: RepetitionPenalty = 1.1,
    max_tokens: MaxTokens = 512,
    seed: Seed = None,
    device: Device = "auto",
    dtype: ServedDtype = None,
) -> None:
    """Chat with a checkpoint on the console.

    Args:
        system: System message.
    """
    check_exists(source)
    from stretto.api.serve import ServeOptions, chat_command, console_sampling

    options = ServeOptions(subnet=subnet, device=device, dtype=dtype, max_batch=1)
    chat_command(source, options, console_sampling(temperature, max_tokens, seed, repetition_penalty), system)


def agent(
    question: str,
    model: Model = None,
    server: Server = None,
    tools: str = "",
    budget_turns: int = 16,
    budget_tokens: int = 4096,
    votes: int = 1,
    temperature: Temperature = 0.0,
    think: str | None = None,
    answer: str | None = None,
    plan: bool = False,
    must_search: bool | None = None,
    require_source: bool = False,
    out: OptionalOut = None,
    seed: int = 0,
    device: Device = "auto",
    dtype: ServedDtype = None,
) -> None:
    """Answer a question with tools (search, read, cite, compute) within a budget.

    Prints the answer with its sources, or that no source was opened; writes a transcript with --out.

    Args:
        question: Question to answer.
        tools: Tools, separated by commas: search=FOLDER, python, calculator.
        budget_turns: Largest number of turns, the answer included.
        budget_tokens: Largest number of tokens to generate over all turns.
        votes: Number of runs for a majority vote over answers; needs a temperature above 0.
        think: Size that calls tools, a preset. Default: the server's default size, usually the full network.
        answer: Size that writes the answer, a preset. Default: that of --think.
        plan: Ask for a plan before the first tool call.
        must_search: Search for the question before the model's first turn. Default: on with a search tool.
        require_source: End with exit code 2 when no document was opened.
        out: File to write the transcript to: a page (.html) or a record (.json).
        seed: Random seed of the first run; later runs count up.
    """
    check_text(question, "the question")
    if not question.strip():
        raise UserError("agent: the question is empty; write one")
    if out is not None:
        check_ending(out, ".html", ".json")
    if model is not None:
        check_exists(model)
    from stretto.api.agent import AgentOptions, agent_command
    from stretto.api.serve import ServeOptions
    from stretto.base.config import validate_options

    values = {"turns": budget_turns, "tokens": budget_tokens, "votes": votes, "temperature": temperature, "seed": seed}
    others = {"think": think, "answer": answer, "must_search": must_search, "require_source": require_source}
    names = {"turns": "--budget-turns", "tokens": "--budget-tokens"}
    options = validate_options(AgentOptions, values | others, names)
    serving = ServeOptions(device=device, dtype=dtype, max_batch=max(1, votes))
    agent_command(question, model, server, tools, options, plan=plan, out=out, serving=serving)


def generate(
    source: Source,
    prompt: Annotated[str, Option()],
    subnet: ServedSubnet = None,
    temperature: Temperature = 0.0,
    repetition_penalty: RepetitionPenalty = 1.1,
    max_tokens: MaxTokens = 128,
    seed: Seed = None,
    device: Device = "auto",
    dtype: ServedDtype = None,
) -> None:
    """Continue a text and print the continuation as it is generated.

    Args:
        prompt: Text to continue; empty: a new document.
    """
    check_exists(source)
    from stretto.api.serve import ServeOptions, console_sampling, generate_command

    options = ServeOptions(subnet=subnet, device=device, dtype=dtype, max_batch=1)
    generate_command(source, prompt, options, console_sampling(temperature, max_tokens, seed, repetition_penalty))


def bench_serve(
    source: Annotated[Path | None, Argument()] = None,
    url: str | None = None,
    subnet: ServedSubnet = None,
    requests: int = 64,
    concurrency: int = 16,
    rate: float | None = None,
    prompt_tokens: int = 64,
    max_tokens: MaxTokens = 64,
    seed: int = 0,
) -> None:
    """Send many requests to a server at once. Reports tokens per second, time to first token, and time between tokens.

    The time between tokens is that of a request: the time after its first token, divided by the number of its other tokens.

    Args:
        source: Run or checkpoint to start a server for.
        url: URL of a running server to measure instead.
        requests: Number of requests.
        concurrency: Number of requests in flight.
        rate: Arrivals per second (Poisson) instead of --concurrency.
        prompt_tokens: Length of a prompt, in tokens.
        seed: Random seed of prompts and arrivals.
    """
    if source is not None:
        check_exists(source)
    from stretto.api.serve import LoadOptions, bench_serve_command

    bench_serve_command(source, url, subnet, LoadOptions(requests, concurrency, rate, prompt_tokens, max_tokens, seed))
