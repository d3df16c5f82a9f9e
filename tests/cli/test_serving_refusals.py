"""Bad input to the commands that serve: one line, exit code 2, and no address told before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from stretto.server.client import SERVING
from stretto.server.server import open_socket
from tests.api.conftest import Run, refused


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_NATIVE", "0")


@pytest.fixture
def copy(served_run: Path, tmp_path: Path) -> Path:
    """A checkpoint to be damaged."""
    shutil.copytree(served_run / "checkpoint", tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--subnet layers=9", ("--subnet layers=9", "1..4")),
        ("--subnet experts=99", ("--subnet experts=99",)),
        ("--subnet top_k=9", ("--subnet top_k=9",)),
        ("--subnet haf", ("unknown preset", "did you mean 'half'")),
        ("--subnet depth=2", ("unknown axis 'depth'",)),
        ("--subnet best", ("stretto search",)),
        ("--floor tiny", ("floor", "tiny")),
        ("--floor layers=9", ("floor", "1..4")),
        ("--port 70000", ("port", "65535")),
        ("--host 203.0.113.1 --port 0", ("--host 203.0.113.1", "cannot listen")),
        ("--cors notanorigin", ("--cors: ", "'notanorigin' is not an origin", "https://example.org")),
        ("--allowed-host http://a:80", ("--allowed-host: ", "is not a host name", "without scheme and port")),
        ("--dtype int8", ("--dtype int8", "float32, bfloat16, float16")),
        ("--rollout --dtype float16", ("--rollout, --dtype float16", "float32 or bfloat16")),
        ("--device tpu", ("tpu",)),
        ("--max-batch 0", ("--max-batch: must",)),
        ("--max-len 0", ("--max-len: must",)),
        ("--max-wait-s 0", ("--max-wait-s: must",)),
        ("--cache-memory 8XB", ("--cache-memory 8XB", "not a size")),
        ("--cache-memory 1KB", ("cache", "give the cache more")),
        ("--max-len 100000", ("--max-len: 100000 tokens; the network has", "lower it")),
        ("--rollout --max-len 100000", ("--max-len: 100000 tokens; the network has", "lower it")),
        ("--cache-memory 40KB --max-len 200", ("--max-len: ", "holds", "not 200")),
        ("--cache-memory 2MB --memory 1MB", ("memory", "would fit: a cache of")),
        ("--memory 8XB", ("--memory 8XB", "not a size")),
        ("--memory 1KB", ("memory", "--subnet auto")),
        ("--memory 250KB", ("memory", "would fit", "corner")),
        ("--subnet auto --memory 10KB", ("--memory 10000", "smallest sub-model", "needs")),
        ("--subnet auto --latency-ms 0.000001", ("--latency-ms 1e-06", "ms a token here")),
        ("--latency-ms 5", ("--latency-ms", "--subnet auto")),
        ("--rollout --subnet corner", ("--rollout, --subnet", "leave it out")),
        ("--rollout --floor corner", ("--rollout, --floor", "leave it out")),
        ("--rollout --host 0.0.0.0", ("--rollout, --host 0.0.0.0", "set --api-key or STRETTO_API_KEYS")),
    ],
)
def test_options(stretto: Run, served_run: Path, options: str, words: tuple[str, ...]) -> None:
    port = () if "--port" in options else ("--port", 0)
    result = stretto("serve", served_run, *options.split(), *port)
    refused(result, *words)
    assert SERVING not in result.out


def test_the_environment(stretto: Run, served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERNIE_ELASTIC_LAYERS", "9")
    refused(stretto("serve", served_run, "--port", 0), "ERNIE_ELASTIC_LAYERS=9", "1..4")
    refused(stretto("generate", served_run, "--prompt", "x"), "ERNIE_ELASTIC_LAYERS=9")


def test_a_port_in_use(stretto: Run, served_run: Path) -> None:
    taken = open_socket("127.0.0.1", 0)
    try:
        port = taken.getsockname()[1]
        refused(stretto("serve", served_run, "--port", port), f"--port {port}: in use", "choose another")
    finally:
        taken.close()


def test_wrong_folders(stretto: Run, tmp_path: Path, copy: Path) -> None:
    for command in (("serve", "--port", 0), ("chat",), ("generate", "--prompt", "x")):
        refused(stretto(*command, tmp_path), str(tmp_path), "config.json", "run or a Hugging Face checkpoint")
        refused(stretto(*command, tmp_path / "none"), "none")
    (tmp_path / "run.json").write_text("{}")
    refused(stretto("serve", tmp_path), "none yet", "--resume")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    refused(stretto("serve", copy, "--port", 0), "config.json", "llama")
    (copy / "config.json").write_text("{")
    refused(stretto("serve", copy, "--port", 0), "config.json")


@pytest.mark.parametrize("kept", [0, 4, 3000, -100])
def test_a_half_written_checkpoint(stretto: Run, copy: Path, kept: int) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    refused(stretto("serve", copy, "--port", 0), "model.safetensors", "truncated or damaged")
    refused(stretto("serve", copy, "--port", 0, "--subnet", "auto"), "model.safetensors")


def test_what_a_checkpoint_may_lack(stretto: Run, copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    refused(stretto("chat", copy), "chat_template", "stretto generate")
    (copy / "model.safetensors").unlink()
    refused(stretto("serve", copy, "--port", 0), "model.safetensors", "no such file")
    (copy / "tokenizer.json").unlink()
    refused(stretto("generate", copy, "--prompt", "x"), "tokenizer.json")


def test_prompts_and_settings_of_the_console(stretto: Run, served_run: Path) -> None:
    generate = ("generate", served_run, "--prompt")
    refused(stretto(*generate, "steps " * 300), "no room for a completion")
    refused(stretto(*generate, "x", "--temperature", -1), "--temperature")
    refused(stretto(*generate, "x", "--max-tokens", 0), "--max-tokens")
    refused(stretto("chat", served_run, "--temperature", "nan"), "--temperature")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what must be missing")
@pytest.mark.parametrize("command", ["serve --port 0", "chat", "generate --prompt x", "latency", "extract --subnet half -o {out}"])  # fmt: skip
def test_a_device_that_is_not_there(stretto: Run, served_run: Path, tmp_path: Path, command: str) -> None:
    name, *rest = command.format(out=tmp_path / "out").split()
    refused(stretto(name, served_run, *rest, "--device", "cuda"), "--device cuda", "use cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what must be missing")
def test_a_device_to_train_on_that_is_not_there(stretto: Run, recipe: Path, text: Path, tmp_path: Path) -> None:
    command = ("pretrain", recipe, "--data", text, "-o", tmp_path / "run", "--device", "cuda")
    refused(stretto(*command), "--device cuda", "use cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what must be missing")
def test_a_device_to_reinforce_on_that_is_not_there(stretto: Run, tiny: Path, tmp_path: Path) -> None:
    refused(stretto("rl", tiny, "-o", tmp_path / "run", "--device", "cuda"), "--device cuda", "use cpu")


def test_bytes_that_are_no_text(stretto: Run, served_run: Path) -> None:
    """As Python reads them from the command line."""
    refused(stretto("generate", served_run, "--prompt", "a\udcff"), "--prompt", "character 2 is not UTF-8")
    refused(stretto("chat", served_run, "--system", "\udcff"), "--system", "not UTF-8")


def test_loads_that_cannot_be(stretto: Run, served_run: Path) -> None:
    refused(stretto("bench-serve"), "either a run or --url")
    refused(stretto("bench-serve", served_run, "--url", "http://127.0.0.1:1"), "either a run or --url")
    refused(stretto("bench-serve", "--url", "http://127.0.0.1:1"), "no server answers")
    refused(stretto("bench-serve", "--url", "127.0.0.1:1"), "not the address of an HTTP server")
    refused(
        stretto("bench-serve", "--url", "http://127.0.0.1:1", "--subnet", "corner"), "--subnet: for a server that is"
    )
    refused(stretto("serve", served_run, "--api-key", " "), "--api-key: empty")
    refused(stretto("bench-serve", served_run, "--requests", 0), "--requests 0")
    refused(stretto("bench-serve", served_run, "--prompt-tokens", 0), "--prompt-tokens 0")
    refused(stretto("bench-serve", "--url", "http://127.0.0.1:1", "--rate", -1), "--rate -1")


def test_a_server_address_that_is_none(stretto: Run) -> None:
    refused(stretto("agent", "Who?", "--server", "ftp://x"), "--server ftp://x", "not the address of an HTTP server")
    refused(stretto("bench-serve", "--url", "ftp://x"), "--url ftp://x", "not the address of an HTTP server")
    refused(stretto("agent", " ", "--server", "http://127.0.0.1:1"), "agent: the question is empty")
