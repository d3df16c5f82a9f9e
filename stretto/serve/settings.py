"""What a server is told before it starts, and what it serves. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import Field, SecretStr

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.model.spec import ModelConfig, SubnetChoice
from stretto.serve.elastic import ElasticPolicy
from stretto.text.tokenizer import Tokenizer

ENVIRONMENT = {"ERNIE_ELASTIC_LAYERS": "layers", "ERNIE_ELASTIC_EXPERTS": "experts", "ERNIE_ELASTIC_TOPK": "top_k"}
"""Environment variable -> axis of the default Subnet."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ServeSettings(Config):
    """Limits and doors of a server."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0: any free one."""
    api_keys: tuple[SecretStr, ...] = ()
    """None: whoever reaches the port may ask."""
    admin_key: SecretStr | None = None
    """Opens /admin; without one there is no such path."""
    allowed_hosts: tuple[str, ...] | None = None
    """Host headers answered. None: the loopback names where that is what is bound (a web page that a browser was led
    to must not reach it under a name of its own, DNS rebinding), else all."""
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = Field(default=4 << 20, gt=0)
    max_choices: int = Field(default=64, gt=0)
    """Completions of one HTTP request: its prompts times n."""
    max_open: int = Field(default=2048, gt=0)
    """Generating HTTP requests open at once; a further one is told to come back."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """For a body to arrive."""
    send_timeout_s: float = Field(default=30.0, gt=0)
    """For a client to take what was sent; then its request is aborted."""
    drain_timeout_s: float = Field(default=60.0, gt=0)
    """For open requests to finish after SIGTERM."""
    floor: str | None = None
    """Smallest Subnet under load: a preset or ``layers=…,experts=…,top_k=…``. None: no elasticity under load."""
    elastic: ElasticPolicy = ElasticPolicy()

    def hosts(self) -> tuple[str, ...] | None:
        """Host names answered (without port), or None for all."""
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        return (*_LOOPBACK, "[::1]") if self.host in _LOOPBACK else None


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """The network behind a server. Written by whoever starts it."""

    name: str
    """Under which it is asked for; presets are ``name:preset``."""
    config: ModelConfig
    presets: Mapping[str, SubnetChoice]
    tokenizer: Tokenizer | None
    """None: only token ids go in and out."""
    max_len: int
    """Prompt and completion together, tokens; the engine's."""
    default: SubnetChoice = field(default_factory=SubnetChoice)
    """What a request gets that asks for none, while there is no load."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end an answer beside the tokenizer's own (``eos_token_id`` of generation_config.json)."""
    weight_bytes: int = 4
    """Bytes of one weight and of one cache element in the engine's dtype."""
    min_depth: int = 1
    """Fewest layers the network was trained to run with."""

    def choices(self) -> dict[str, SubnetChoice]:
        """Every preset by name; ``full`` is always one."""
        return {"full": SubnetChoice(), **self.presets}


def environment_subnet(environ: Mapping[str, str], config: ModelConfig) -> SubnetChoice | None:
    """The default Subnet that the environment sets; None where it sets no axis.

    Raises:
        UserError: not a whole number, or a Subnet the network does not have.
    """
    axes: dict[str, int] = {}
    for variable, axis in ENVIRONMENT.items():
        text = environ.get(variable, "").strip()
        if not text:
            continue
        if not (text.isascii() and text.isdecimal()) or int(text) < 1:
            raise UserError(f"{variable}: {text!r} is not a whole number above 0; unset it or set one")
        axes[axis] = int(text)
    if not axes:
        return None
    choice = SubnetChoice(**axes)
    try:
        choice.of(config)
    except UserError as error:
        named = ", ".join(f"{variable}={axes[axis]}" for variable, axis in ENVIRONMENT.items() if axis in axes)
        raise UserError(f"{named}: {error}; set what this network has") from None
    return choice
