"""Shapes of decoding: a step that was filled up, and copied to where another stood, gives what it gives by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.engine.forward_torch import KvPool, TorchForward
from stretto.engine.graphs import MAX_GRAPHS, DecodeGraphs, rounded_up
from stretto.engine.runner import Runner
from stretto.engine.sequence import Chunk, SubnetTable
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Transformer, build
from stretto.ops.matmul import PLAIN
from tests.engine.test_forward_torch import NETWORKS, PAGE, SHAPE, VOCAB, network, with_noise

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
NUM_PAGES = 40
LENGTHS = (3, 1, 9, 6, 14)
NEW = 9
"""Tokens decoded; sequences pass from one page, and from one number of pages, to the next."""


class Decoder:
    """Some sequences of one Subnet, fed token by token."""

    def __init__(self, model: Transformer, subnet: Subnet, device: str):
        self.model, self.device = model.to(device), torch.device(device)
        table = SubnetTable()
        self.number = table.number(subnet)
        dtype = model.embedding.weight.dtype
        self.pool = KvPool.allocate(model.config, NUM_PAGES + 1, PAGE, dtype, self.device, True)
        self.plain = TorchForward(model, table, self.pool, PLAIN)
        self.graphs = DecodeGraphs(self.plain, self.pool)

    @torch.inference_mode()
    def logits(self, tokens: list[list[int]], *, by_graphs: bool) -> Tensor:
        """[T, B, V] of the last `NEW` tokens of each sequence; of those before, a prompt."""
        for tensor in (self.pool.keys_LPZGC, self.pool.values_LPZGC):
            if tensor is not None:
                tensor[:, :NUM_PAGES] = 0.0
        prompts = [self.chunk(row, 0, len(each) - NEW, each) for row, each in enumerate(tokens)]
        self.plain.forward(prompts, want_routes=True)
        steps = []
        for at in range(-NEW, 0):
            chunks = [self.chunk(row, len(each) + at, 1, each) for row, each in enumerate(tokens)]
            assert self.graphs.takes(chunks) and not self.graphs.takes([*chunks, prompts[2]])
            compute = self.graphs.forward if by_graphs else self.plain.forward
            steps.append(compute(chunks, True))
        return torch.stack(steps)

    def chunk(self, row: int, start: int, num: int, tokens: list[int]) -> Chunk:
        pages = range(8 * row, 8 * row + -(-(start + num) // PAGE))
        return Chunk(tuple(tokens[start : start + num]), start, tuple(pages), self.number, 1)


def sentences(seed: int, num: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length + NEW,), generator=generator).tolist() for length in LENGTHS[:num]]


def corner(config: ModelConfig) -> Subnet:
    few = min(config.experts_by_layer, default=1)
    return config.subnet(depth=2, experts=few, top_k=1) if config.num_moe_layers else config.subnet(depth=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["sigmoid, branches", "softmax with bias", "sinks and windows", "all dense", "latent"])
def test_a_step_in_a_shape_is_the_step(name: str, device: str) -> None:
    name = next(each for each in NETWORKS if each.startswith(name))
    model = with_noise(build(network(name).config, seed=3))
    for subnet in (model.config.full(), corner(model.config)):
        decoder = Decoder(model, subnet, device)
        for seed, num in (
            (0, 5),
            (1, 3),
            (2, 5),
        ):  # 5 and 3 fill shapes of 8 and 4; the third comes to graphs that are there
            tokens = sentences(seed, num)
            wanted = decoder.logits(tokens, by_graphs=False)
            routes = decoder.pool.routes_PZLK
            assert routes is not None
            wanted_routes = routes[:NUM_PAGES].clone()
            seen = decoder.logits(tokens, by_graphs=True)
            assert (seen - wanted).abs().max() <= 1e-5 * wanted.abs().max()
            assert (routes[:NUM_PAGES] == wanted_routes).all()


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_follow_the_weights(device: str) -> None:
    """Routers are copies in fp32, and balance biases stand in rules: both must be those of now."""
    changes: dict[str, Any] = {**NETWORKS["sigmoid, branches"], "hidden_size": 32, "expert_intermediate_size": 16}
    config = ModelConfig(**{**SHAPE, **changes})
    models = [with_noise(build(config, seed)).to(device, torch.bfloat16) for seed in (1, 2)]
    states = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in models]
    runners = [
        Runner(model, SubnetTable(), num_pages=NUM_PAGES, page_size=PAGE, routes=True, cuda_graphs=True)
        for model in models
    ]
    tokens = sentences(0, 4)

    def decoded(runner: Runner) -> Tensor:
        number = runner._subnets.number(corner(config))
        steps = []
        for start in range(6):
            chunks = [
                Chunk((each[start],), start, tuple(range(8 * row, 8 * row + start // PAGE + 1)), number, 1)
                for row, each in enumerate(tokens)
            ]
            steps.append(runner.forward(chunks, want_routes=True))
        return torch.stack(steps)

    before, wanted = (decoded(runner) for runner in runners)
    runners[0].load_weights(states[1])
    after = decoded(runners[0])
    assert torch.equal(after, wanted) and not torch.equal(after, before)
    assert "CUDA graphs" in runners[0].kernels["decode"]


def test_shapes_are_few() -> None:
    assert [rounded_up(num) for num in (1, 2, 3, 8, 9, 32, 33, 64, 65, 100)] == [1, 2, 4, 8, 16, 32, 64, 64, 96, 128]
    model = build(ModelConfig(**{**SHAPE, **NETWORKS["all dense"]}), seed=1)
    decoder = Decoder(model, model.config.full(), "cpu")
    with torch.inference_mode():
        for num in range(1, 9):
            for _ in range(2):
                chunks = [decoder.chunk(row % 4, 0, 1, [row]) for row in range(num)]
                decoder.graphs.forward(chunks, want_routes=False)
    assert len(decoder.graphs._captured) == 4 <= MAX_GRAPHS
