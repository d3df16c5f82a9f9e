"""What computing costs in FLOPs, chunk by chunk, and the engine's running totals."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.engine.sequence import Chunk
from stretto.model.spec import ModelConfig, Subnet, count, executed

_MAX_SUBNETS = 1024


class FlopCounter:
    """Forward FLOPs of chunks. Subnets are told apart by identity: hand in one object for equal ones."""

    def __init__(self, config: ModelConfig):
        self._config = config
        self._head = 2 * config.hidden_size * config.vocab_size
        self._rates: dict[int, tuple[int, int]] = {}
        self._kept: list[Subnet] = []  # alive, so that their identities stay theirs

    def of(self, chunk: Chunk) -> int:
        """FLOPs of ``chunk``: all its tokens through the layers, those with logits through the head too."""
        linear, score = self._rates.get(id(chunk.subnet)) or self._learn(chunk.subnet)
        num, start = len(chunk.tokens), chunk.start
        num_keys = num * start + num * (num + 1) // 2
        return num * linear + num_keys * score + chunk.num_logits * self._head

    def _learn(self, subnet: Subnet) -> tuple[int, int]:
        if len(self._kept) >= _MAX_SUBNETS:
            self._rates.clear()
            self._kept.clear()
        counts = count(self._config, executed(self._config, subnet))
        self._kept.append(subnet)
        self._rates[id(subnet)] = counts.linear_flops - self._head, counts.score_flops
        return self._rates[id(subnet)]


@dataclass(slots=True)
class Totals:
    """Counts since the engine began; what they mean is said in `EngineStats`."""

    num_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
