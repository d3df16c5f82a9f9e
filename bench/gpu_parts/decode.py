"""Decoding: share of the memory's bandwidth, microseconds per layer, several Subnets in one step, integer weights, and FP8 rollouts.

A step is `Runner.forward` with one token per sequence, at a context of `CONTEXT` tokens: planning on the host, the copy of what differs
between steps, and the graph. The bytes of a step are the weights that it reads (of the experts, those that tokens with random routes are
expected to choose) and all keys and values of its sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean

import torch
from torch import Tensor

from bench.common.gpu_part import SHAPES, Case, Outcome, Setting, median_seconds, network
from bench.common.networks import shape
from bench.gpu_parts.profile import shares
from stretto.engine.engine import Engine
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.engine.runner import Runner
from stretto.engine.sequence import Chunk, SubnetTable
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Transformer
from stretto.ops.int_weights import IntScheme, IntWeight, quantise
from stretto.ops.matmul import Precision

PAGE = 16
BATCHES = (1, 16, 64)
NUM_SUBNETS = 8


def cases(setting: Setting) -> Iterator[Case]:
    is_small = setting.size in ("tiny", "small")
    large = setting.size if is_small else "olmoe"
    bench = Bench(setting, SHAPES[large], 64 if is_small else 1024)
    for batch in BATCHES:
        yield Case(f"{large}, bf16, batch {batch}", partial(bench.bandwidth, batch))
        yield Case(f"{large}, bf16, batch {batch}, kernels by time", partial(bench.kernels, batch))
    yield Case(f"{large}, 64 sequences of {NUM_SUBNETS} Subnets", bench.mixed)
    for bits in (8, 4):
        yield Case(f"{large}, int{bits} over bf16", partial(bench.integers, bits))
    narrow = setting.config if is_small else shape("100m")[0]
    little = Bench(setting, narrow, 64)
    for batch in (1, 64):
        name = f"{'small' if is_small else '100m'}, bf16, batch {batch}"
        yield Case(name, partial(little.per_layer, batch))
        yield Case(f"{name}, kernels by time", partial(little.kernels, batch))
    rollouts = "small" if is_small else "3.4b"
    yield Case(f"rollouts of {rollouts}, FP8 over bf16", partial(_rollouts, setting, SHAPES[rollouts]))


@dataclass
class Bench:
    """Decoding steps of one network, which is made for the first case that needs it."""

    setting: Setting
    config: ModelConfig
    context: int
    _model: Transformer | None = field(default=None, init=False)

    def bandwidth(self, batch: int) -> Outcome:
        step = self.step([self.config.full()] * batch)
        seconds = self.seconds(step)
        num_bytes = _step_bytes(self.config, batch, self.context)
        share = num_bytes / seconds / _bandwidth(self.setting.device)
        return Outcome({"tokens/s": batch / seconds, "GB/step": num_bytes / 1e9, "of bandwidth": f"{share:.0%}"})

    def kernels(self, batch: int) -> Outcome:
        return Outcome(shares(self.step([self.config.full()] * batch), self.setting))

    def per_layer(self, batch: int) -> Outcome:
        seconds = self.seconds(self.step([self.config.full()] * batch))
        return Outcome({"µs per layer": seconds / self.config.num_layers * 1e6, "tokens/s": batch / seconds})

    def mixed(self) -> Outcome:
        """One graph for all Subnets; beside it, steps of one Subnet each, and of the full network."""
        config, kinds = self.config, _subnets(self.config)
        runner, table = self.runner({}), [kinds[index % len(kinds)] for index in range(64)]
        together = self.seconds(self.step(table, runner))
        assert runner._graphs is not None
        num_graphs = len(runner._graphs._captured)
        alone = [self.seconds(self.step([kind] * 64, runner)) for kind in kinds]
        return Outcome(
            {
                "over one Subnet after another": mean(alone) / together,
                "over the full network": self.seconds(self.step([config.full()] * 64, runner)) / together,
                "graphs": num_graphs,
            }
        )

    def integers(self, bits: int) -> Outcome:
        """Time in bf16 over that with integers, by batch."""
        integers = {
            name: quantise(weight, IntScheme(bits))
            for name, weight in self.model.state_dict().items()
            if weight.ndim > 1 and weight.shape[-1] % 32 == 0
            if name.split(".")[-1] not in ("gate", "bias_WE") and not name.startswith("embedding")
        }
        plain, narrow = self.runner({}), self.runner(integers)
        values: dict[str, float | str] = {}
        for batch in BATCHES:
            subnets = [self.config.full()] * batch
            values[f"batch {batch}"] = self.seconds(self.step(subnets, plain)) / self.seconds(
                self.step(subnets, narrow)
            )
        return Outcome(values)

    @property
    def model(self) -> Transformer:
        if self._model is None:
            self._model = network(self.config, self.setting.device).to(torch.bfloat16).requires_grad_(False)
        return self._model

    def runner(self, integers: Mapping[str, IntWeight]) -> Runner:
        num_pages = max(BATCHES) * -(-self.context // PAGE)
        return Runner(
            self.model,
            SubnetTable(),
            num_pages=num_pages,
            page_size=PAGE,
            routes=False,
            cuda_graphs=True,
            integers=integers,
        )

    def step(self, subnets: Sequence[Subnet], runner: Runner | None = None) -> partial[Tensor]:
        """The last token of a context for each Subnet, again and again."""
        runner, pages = runner or self.runner({}), -(-self.context // PAGE)
        chunks = [
            Chunk((row + 1,), self.context - 1, tuple(range(row * pages, (row + 1) * pages)),
                  runner._subnets.number(subnet), 1)
            for row, subnet in enumerate(subnets)
        ]  # fmt: skip
        return partial(runner.forward, chunks, False)

    def seconds(self, step: partial[Tensor]) -> float:
        return median_seconds(step, self.setting.device, 10 * self.setting.num_steps)


def _subnets(config: ModelConfig) -> list[Subnet]:
    """Eight Subnets: the full network, and seven that leave out layers, experts and choices."""
    depths = [max(1, config.num_layers * part // 8) for part in (8, 8, 7, 7, 6, 6, 5, 4)]
    experts = [config.num_experts, *[config.num_experts // 2] * (NUM_SUBNETS - 1)]
    top_ks = [config.top_k, config.top_k, *[max(1, config.top_k // 2)] * (NUM_SUBNETS - 2)]
    return [config.subnet(*each) for each in zip(depths, experts, top_ks, strict=True)]


def _step_bytes(config: ModelConfig, batch: int, context: int) -> float:
    """Bytes of bf16 weights, fp32 routers, and keys and values that a step must read."""
    width = config.hidden_size
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    chosen = config.num_experts * (1 - (1 - config.top_k / config.num_experts) ** batch)
    shared = config.num_shared_experts + chosen
    layer = 2 * width * heads + 6 * width * config.expert_intermediate_size * shared + 4 * width * config.num_experts
    keys = 4 * config.num_kv_heads * config.head_dim * context * batch
    return config.num_layers * (layer + keys) + 2 * width * config.vocab_size


def _bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.zeros(2**30 if device.type == "cuda" else 2**25, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device, 10)


def _rollouts(setting: Setting, config: ModelConfig) -> Outcome:
    """Sampled tokens per second of the engine in FP8 products and in bf16, with 64 requests of a prompt of 64 tokens."""
    num_tokens, rates = 16 if setting.size == "tiny" else 64, []
    fp8_dtype = torch.bfloat16 if setting.device.type == "cuda" else torch.float32
    precisions: tuple[tuple[Precision, torch.dtype], ...] = (("fp8", fp8_dtype), ("fp32", torch.bfloat16))
    for precision, dtype in precisions:
        model = network(config, setting.device).to(dtype).requires_grad_(False)
        engine = Engine(model, None, EngineConfig(num_pages=1024, max_batch=64, precision=precision))
        sampling = Sampling(max_tokens=num_tokens, seed=1, ignore_eos=True)

        def generate(engine: Engine = engine, sampling: Sampling = sampling) -> object:
            prompts = [tuple(range(row + 1, row + 65)) for row in range(64)]
            return engine.generate(
                [Request(str(row), prompt, sampling, Phases(config.full())) for row, prompt in enumerate(prompts)]
            )

        rates.append(64 * num_tokens / median_seconds(generate, setting.device, 2, warm_up=1))
    return Outcome({"tokens/s": rates[0], "over bf16": rates[0] / rates[1]})
