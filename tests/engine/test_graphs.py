"""Shapes of decoding: a step that was filled up, and copied to where another stood, gives what it gives by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from stretto.engine.decode import Host, Inputs, shape_of, why_small
from stretto.engine.forward_torch import KvPool, TorchForward
from stretto.engine.graphs import MAX_GRAPHS, DecodeGraphs, rounded_up
from stretto.engine.runner import Runner
from stretto.engine.sequence import Chunk, SubnetTable
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Transformer, build
from stretto.ops.fp8_rows import Fp8Weights
from stretto.ops.int_weights import IntScheme, quantise
from stretto.ops.matmul import PLAIN
from tests.engine.test_forward_torch import NETWORKS, PAGE, SHAPE, VOCAB, network, with_noise

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
NUM_PAGES = 40
LENGTHS = (3, 1, 9, 6, 14)
NEW = 9
"""Tokens decoded; sequences pass from one page, and from one number of pages, to the next."""


class Decoder:
    """Some sequences, whose Subnets take turns, fed token by token."""

    def __init__(self, model: Transformer, subnets: list[Subnet], device: str, **options: Any):
        self.model, self.device = model.to(device), torch.device(device)
        table = SubnetTable()
        self.numbers = [table.number(subnet) for subnet in subnets]
        dtype = model.embedding.weight.dtype
        self.pool = KvPool.allocate(model.config, NUM_PAGES + 1, PAGE, dtype, self.device, True)
        self.plain = TorchForward(model, table, self.pool, PLAIN)
        self.graphs = DecodeGraphs(self.plain, self.pool, model.config, table, **options)

    @torch.inference_mode()
    def logits(self, tokens: list[list[int]], *, by_graphs: bool, new: int = NEW) -> Tensor:
        """[T, B, V] of the last ``new`` tokens of each sequence; of those before, a prompt."""
        for tensor in (self.pool.keys_LPZGC, self.pool.values_LPZGC):
            if tensor is not None:
                tensor[:, :NUM_PAGES] = 0.0
        prompts = [self.chunk(row, 0, len(each) - new, each) for row, each in enumerate(tokens)]
        self.plain.forward(prompts, want_routes=True)
        steps = []
        for at in range(-new, 0):
            chunks = [self.chunk(row, len(each) + at, 1, each) for row, each in enumerate(tokens)]
            assert self.graphs.takes(chunks) and not self.graphs.takes([*chunks, prompts[-1]])
            compute = self.graphs.forward if by_graphs else self.plain.forward
            steps.append(compute(chunks, True))
        return torch.stack(steps)

    def chunk(self, row: int, start: int, num: int, tokens: list[int]) -> Chunk:
        pages = range(8 * row, 8 * row + -(-(start + num) // PAGE))
        return Chunk(tuple(tokens[start : start + num]), start, tuple(pages), self.numbers[row % len(self.numbers)], 1)


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
        decoder = Decoder(model, [subnet], device)
        for seed, num in (
            (0, 5),
            (1, 3),
            (2, 5),
        ):  # 5 and 3 fill shapes of 8 and 4; the third comes to graphs that are there
            tokens = sentences(seed, num)
            same(decoder, tokens, NEW)


def same(decoder: Decoder, tokens: list[list[int]], new: int) -> None:
    """Steps of both kinds give the same logits up to rounding, the same routes, and leave the same cache."""
    wanted = decoder.logits(tokens, by_graphs=False, new=new)
    pools = [pool for pool in (decoder.pool.keys_LPZGC, decoder.pool.values_LPZGC) if pool is not None]
    wanted_pools, routes = [pool[:, :NUM_PAGES].clone() for pool in pools], decoder.pool.routes_PZLK
    assert routes is not None
    wanted_routes = routes[:NUM_PAGES].clone()
    seen = decoder.logits(tokens, by_graphs=True, new=new)
    assert (seen - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert (routes[:NUM_PAGES] == wanted_routes).all()
    for pool, each in zip(pools, wanted_pools, strict=True):
        assert (pool[:, :NUM_PAGES] - each).abs().max() <= 1e-5 * each.abs().max()


def several(config: ModelConfig) -> list[Subnet]:
    """Subnets that differ in layers, experts and top-k."""
    few = min(config.experts_by_layer, default=1)
    return [corner(config), config.subnet(depth=3), config.subnet(experts=few, top_k=1), config.full()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["sigmoid, branches", "uneven layers", "sinks and windows", "latent"])
def test_one_shape_serves_several_subnets(name: str, device: str) -> None:
    name = next(each for each in NETWORKS if each.startswith(name))
    model = with_noise(build(network(name).config, seed=3))
    subnets = several(model.config)
    decoder = Decoder(model, subnets, device)
    same(decoder, sentences(0, 4), 5)
    decoder.numbers.reverse()  # the Subnets change places: another step, the same shape
    before = len(decoder.graphs._captured)
    same(decoder, sentences(0, 4), 5)
    assert len(decoder.graphs._captured) == before
    decoder.numbers = [decoder.numbers[-1], decoder.numbers[-2]]
    same(decoder, sentences(1, 4), 2)
    layers = [shape.layers for shape in decoder.graphs._captured]
    assert layers[-1] == (0, 1, 2) and layers[0] == (0, 1, 2, 3)  # a layer that no sequence runs is not computed


KERNELS = ["sigmoid, branches", "softmax with bias", "sinks and windows", "wide norm", "groups"]


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compute_the_step(name: str) -> None:
    """Triton's kernels in its interpreter, or on a GPU."""
    pytest.importorskip("triton")
    name = next(each for each in NETWORKS if name in each)
    model = with_noise(build(network(name).config, seed=3))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    decoder = Decoder(model, [corner(model.config), model.config.full()], device, with_kernels=True)
    same(decoder, sentences(0, 2), 1)


def test_kernels_in_fp32_need_a_gpu_with_much_shared_memory() -> None:
    assert (
        why_small(torch.float32, 101_376) == "fp32 kernels need 151616 bytes of shared memory, and the GPU has 101376"
    )
    assert why_small(torch.bfloat16, 101_376) == why_small(torch.float32, 166_912) == ""


@pytest.mark.slow
def test_kernels_multiply_by_integers() -> None:
    pytest.importorskip("triton")
    model = with_noise(build(ModelConfig(**{**SHAPE, **EVEN, "num_shared_experts": 1}), seed=1))
    integers, state = {}, model.state_dict()
    for name, weight in state.items():
        if weight.ndim > 1 and "norm" not in name and not name.endswith(("gate", "embedding.weight", "bias_WE")):
            integers[name] = quantise(weight, IntScheme(4 if "mlp" in name else 8, group=16))
            weight.copy_(integers[name].dequantise())
    names = {"blocks.1.mlp.down", "blocks.0.attention.qkv.weight", "blocks.0.mlp.shared.gate_up.weight", "head.weight"}
    assert names <= integers.keys()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    decoder = Decoder(model, [model.config.full()], device, quantised=integers, with_kernels=True)
    for (
        tensor
    ) in model.state_dict().values():  # prompts are computed with these values, decoding steps with the integers
        assert torch.isfinite(tensor).all()
    same(decoder, sentences(0, 2), 1)


@pytest.mark.slow
def test_kernels_multiply_by_fp8_and_follow_new_weights() -> None:
    pytest.importorskip("triton")
    shape = {**SHAPE, **EVEN, "num_shared_experts": 1}
    model = with_noise(build(ModelConfig(**shape), seed=1))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    fp8 = Fp8Weights(model.blocks, "blocks.")
    assert {
        "blocks.1.mlp.down",
        "blocks.0.attention.qkv.weight",
        "blocks.0.mlp.shared.gate_up.weight",
    } <= fp8.rows.keys()
    for name, weight in model.state_dict().items():
        is_rounded = name in fp8.rows
        assert torch.equal(weight, before[name]) != is_rounded
        assert torch.allclose(weight, before[name], rtol=2**-4, atol=0.01 if is_rounded else 0.0), name
    decoder = Decoder(model, [model.config.full()], "cpu", quantised=fp8.rows, with_kernels=True)
    same(decoder, sentences(0, 2), 1)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight.copy_(before[name].flip(0))
    fp8.refresh()
    with torch.inference_mode():
        decoder.plain.refresh(TorchForward(model, decoder.plain.planner._subnets, decoder.pool, PLAIN))
        decoder.graphs.refresh()
    same(decoder, sentences(0, 2), 1)


EVEN: dict[str, Any] = {"hidden_size": 32, "expert_intermediate_size": 16, "router": "softmax"}
"""Sizes for which torch has a grouped product."""


@pytest.mark.slow
def test_a_step_asks_nothing_of_the_device() -> None:
    """Fake tensors have no values: a step whose operations depended on one would fail, as it would in a graph."""
    model = build(ModelConfig(**{**SHAPE, **EVEN, "sliding_layers": (1,), "sliding_window": 6}), seed=1)
    model = model.to(torch.bfloat16)  # torch's grouped product takes no fake tensors of another type
    decoder = Decoder(model, several(model.config), "cpu")
    num = 16  # more pairs than a CPU computes one by one
    chunks = [decoder.chunk(row % 4, 8, 1, list(range(20))) for row in range(num)]
    graphs = decoder.graphs
    rows = graphs._rows.rows([chunk.subnet for chunk in chunks])
    shape = shape_of(chunks, num, graphs._rows, graphs._subnets, 4, True)
    flat = Host(shape, NUM_PAGES).write(chunks, rows)

    def step(flat: Tensor) -> Tensor:
        return graphs._steps.compute(Inputs.views(flat, shape), shape)

    assert not shape.is_uniform
    with torch.inference_mode(False), torch.no_grad():
        traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(flat)
        assert torch.equal(traced(flat), step(flat))

        def waiting(flat: Tensor) -> Tensor:
            return step(flat) if flat.sum().item() > 0 else flat

        with pytest.raises(GuardOnDataDependentSymNode):
            make_fx(waiting, tracing_mode="fake", _allow_non_fake_inputs=True)(flat)


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
    decoder = Decoder(model, [model.config.full()], "cpu")
    with torch.inference_mode():
        for num in range(1, 9):
            for _ in range(2):
                chunks = [decoder.chunk(row % 4, 0, 1, [row]) for row in range(num)]
                decoder.graphs.forward(chunks, want_routes=False)
    assert len(decoder.graphs._captured) == 4 <= MAX_GRAPHS
