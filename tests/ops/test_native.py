"""The compiled kernels against the model's own forward pass, which knows no pages, no steps and no C++; and the tokens they
choose, against torch and against the distributions they must follow.

Shape letters: B rows, T positions, L layers, P pages, Z page size, K experts a token, V vocabulary, M rows of logits.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.engine.forward_cpu import NativeForward
from stretto.engine.forward_torch import KvPool
from stretto.engine.request import Sampling
from stretto.engine.sampling import Row, process, sample
from stretto.engine.sequence import Chunk, SubnetTable
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import MoeLayer, Transformer, build
from stretto.ops.native import choose_tokens as choose
from stretto.ops.native import load
from tests.engine.engines import SWITCHES

TABLE = SubnetTable()
PAGE = 4
NO_EXPERT = 255

BASE = ModelConfig(
    vocab_size=53,
    hidden_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=6,
    top_k=3,
    expert_intermediate_size=24,
    max_positions=64,
)
CONFIGS = {
    "plain": BASE,
    "qk norm, softmax, no bias": BASE.replace(
        qk_norm=True, router="softmax", selection_bias=False, tie_embeddings=True
    ),
    "attention bias, partial rotary": BASE.replace(attention_bias=True, rotary_fraction=0.5, num_kv_heads=4),
    "dense layer, shared experts": BASE.replace(dense_layers=(0,), dense_intermediate_size=40, num_shared_experts=2),
    "raw gates, scaled": BASE.replace(normalize_gates=False, routed_scaling=2.5, num_kv_heads=1),
    # nothing is a multiple of the vector length, heads do not pair up
    "odd sizes": BASE.replace(hidden_size=44, head_dim=14, num_heads=3, num_kv_heads=1, expert_intermediate_size=20),
    "widths": BASE.replace(widths=(6, 4), num_branches=2, num_layers=4),
    **{name: BASE.replace(**switches) for name, switches in SWITCHES.items()},
}


def network(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    """Random weights large enough that routers decide clearly and biases and norms matter."""
    model = build(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.empty(tensor.shape).normal_(0, 0.3, generator=generator)
            if name.endswith(("bias", "bias_WE", "sinks")):
                tensor.copy_(noise)
            elif name.endswith(("norm.weight", "_norm")):
                tensor.copy_(1 + noise)
            else:
                tensor.mul_(4)
    biases = {name: tensor for name, tensor in model.named_buffers() if name.endswith("bias_WE")}
    model = model.to(dtype)
    for name, bias_WE in biases.items():
        model.get_submodule(name.rpartition(".")[0]).bias_WE = bias_WE.float()
    return model


class Pools:
    """A pool, and page tables out of order for as many sequences as asked."""

    def __init__(self, library: ctypes.CDLL, model: Transformer, num_sequences: int, length: int):
        config = model.config
        per_sequence = -(-length // PAGE)
        num_pages = num_sequences * per_sequence + 1
        shape = (config.num_layers, num_pages, PAGE, config.num_kv_heads, config.head_dim)
        dtype = model.embedding.weight.dtype
        self.keys_LPZGC = torch.full(shape, float("nan"), dtype=dtype)
        self.values_LPZGC = torch.full(shape, float("nan"), dtype=dtype)
        self.routes_PZLK = torch.full((num_pages, PAGE, config.num_moe_layers, config.top_k), 77, dtype=torch.uint8)
        shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(3)).tolist()
        self.tables = [tuple(shuffled[i * per_sequence : (i + 1) * per_sequence]) for i in range(num_sequences)]
        pool = KvPool(self.keys_LPZGC, self.values_LPZGC, self.routes_PZLK)
        self.native = NativeForward(library, model, TABLE, pool)

    def chunk(self, sequence: int, ids: list[int], start: int, end: int, subnet: Subnet) -> Chunk:
        pages = self.tables[sequence][: -(-end // PAGE)]
        return Chunk(tuple(ids[start:end]), start, pages, TABLE.number(subnet), num_logits=end - start)

    def routes(self, sequence: int, length: int) -> Tensor:
        return self.routes_PZLK[list(self.tables[sequence])].flatten(0, 1)[:length]


def subnets(config: ModelConfig) -> list[Subnet]:
    few = 3 if config.expert_groups == 1 else 4
    return [config.full(), config.subnet(config.num_layers - 1, 4, 2), config.subnet(None, few, 1)]


def ids_of(config: ModelConfig, num: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(4)
    return rng.integers(0, config.vocab_size, (num, length)).tolist()


def tolerance(model: Transformer, dtype: torch.dtype) -> float:
    """Rounding of a sum of D terms grows as √D; each layer adds a few such sums to the stream. Relative to the largest logit."""
    config = model.config
    return 16 * config.num_layers * config.hidden_size**0.5 * torch.finfo(dtype).eps


@torch.no_grad()
def run_mixed(pools: Pools, ids: list[list[int]], kinds: list[Subnet]) -> list[Tensor]:
    """Every sequence in pieces of its own sizes, all in the same steps; returns each one's logits [T, V]."""
    length, done = len(ids[0]), [0] * len(ids)
    logits: list[list[Tensor]] = [[] for _ in ids]
    turn = 0
    while min(done) < length:
        chunks, whose = [], []
        for sequence, start in enumerate(done):
            end = min(length, start + (1, 3, 7)[(sequence + turn) % 3])
            if start < end:
                chunks.append(pools.chunk(sequence, ids[sequence], start, end, kinds[sequence]))
                whose.append(sequence)
        out_MV = pools.native.forward(chunks, want_routes=True)
        for sequence, chunk, part in zip(
            whose, chunks, out_MV.split([len(chunk.tokens) for chunk in chunks]), strict=True
        ):
            logits[sequence].append(part)
            done[sequence] = chunk.end
        turn += 1
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_equals_the_models_own_forward(library: ctypes.CDLL, name: str) -> None:
    config = CONFIGS[name]
    model = network(config)
    ids = ids_of(config, num=6, length=19)
    kinds = subnets(config) * 2
    pools = Pools(library, model, num_sequences=6, length=19)
    for row, subnet, got_TV in zip(ids, kinds, run_mixed(pools, ids, kinds), strict=True):
        want_TV = model.logits(torch.tensor([row]), subnet)[0]
        atol = tolerance(model, torch.float32) * float(want_TV.abs().max())
        torch.testing.assert_close(got_TV, want_TV, rtol=0, atol=atol)


@torch.no_grad()
def test_a_token_does_not_depend_on_the_batch_to_the_bit(library: ctypes.CDLL) -> None:
    config = CONFIGS["dense layer, shared experts"]
    model = network(config)
    ids = ids_of(config, num=6, length=19)
    kinds = subnets(config) * 2
    together = run_mixed(Pools(library, model, num_sequences=6, length=19), ids, kinds)
    for sequence, subnet in enumerate(kinds):
        pools = Pools(library, model, num_sequences=6, length=19)
        steps = [pools.chunk(sequence, ids[sequence], at, at + 1, subnet) for at in range(19)]
        alone_TV = torch.cat([pools.native.forward([chunk], want_routes=False) for chunk in steps])
        assert torch.equal(alone_TV, together[sequence])


@pytest.mark.parametrize(
    "name", ["plain", "qk norm, softmax, no bias", "dense layer, shared experts", "widths", "scale, groups", "biases"]
)
@torch.no_grad()
def test_routes_are_the_models(library: ctypes.CDLL, name: str) -> None:
    config = CONFIGS[name]
    model = network(config)
    ids = ids_of(config, num=3, length=19)
    kinds = subnets(config)
    pools = Pools(library, model, num_sequences=3, length=19)
    run_mixed(pools, ids, kinds)
    for sequence, subnet in enumerate(kinds):
        want_TLK = torch.full((19, config.num_moe_layers, config.top_k), NO_EXPERT, dtype=torch.uint8)
        kept = [row for row, layer in enumerate(config.moe_layers) if layer in subnet.layers]
        chosen = _chosen(model, ids[sequence], subnet)
        for row, chosen_TK in zip(kept, chosen, strict=True):
            want_TLK[:, row, : chosen_TK.shape[1]] = chosen_TK.to(torch.uint8)
        assert torch.equal(pools.routes(sequence, 19), want_TLK)


def _chosen(model: Transformer, ids: list[int], subnet: Subnet) -> list[Tensor]:
    found: list[Tensor] = []

    def keep(layer: MoeLayer, args: tuple, output: object) -> None:
        found.append(layer.route(*args)[0].chosen_NK)

    hooks = [block.mlp.register_forward_hook(keep) for block in model.blocks if isinstance(block.mlp, MoeLayer)]
    model.logits(torch.tensor([ids]), subnet)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def test_equal_scores_go_to_the_lowest_expert(library: ctypes.CDLL) -> None:
    config = BASE.replace(selection_bias=False)
    model = network(config)
    for block in model.blocks:
        block.mlp.gate.zero_()
    pools = Pools(library, model, num_sequences=1, length=5)
    pools.native.forward([pools.chunk(0, [1, 2, 3, 4, 5], 0, 5, config.full())], want_routes=True)
    assert (pools.routes(0, 5) == torch.arange(config.top_k, dtype=torch.uint8)).all()


@torch.no_grad()
def test_bfloat16_weights_and_cache(library: ctypes.CDLL) -> None:
    """As near to the fp32 network of the same weights as rounding the cache, and what products are given, allows."""
    config = CONFIGS["dense layer, shared experts"].replace(attention_bias=True, qk_norm=True)
    half = network(config, torch.bfloat16)
    wide = Transformer(config)
    wide.load_state_dict(half.state_dict())
    ids = ids_of(config, num=1, length=19)
    pools = Pools(library, half, num_sequences=1, length=19)
    got_TV = run_mixed(pools, ids, [config.full()])[0]
    want_TV = wide.logits(torch.tensor(ids), config.full())[0]
    # a layer rounds six times, by half of bf16's relative spacing of 2^-8 at most: keys, values, and where the processor
    # multiplies bf16, what each of its four products is given
    atol = config.num_layers * 6 * 2**-9 * float(want_TV.abs().max())
    torch.testing.assert_close(got_TV, want_TV, rtol=0, atol=atol)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [48, 44, 200])
def test_products_of_any_number_of_tokens(library: ctypes.CDLL, width: int, dtype: torch.dtype) -> None:
    """A network whose layers add nothing is a norm and one product, known to the last rounding; 1 to 40 tokens fill tiles of the
    matrix unit in every way, and neither ``width`` nor the vocabulary of 53 does.
    """
    config = BASE.replace(hidden_size=width, max_positions=256)
    model = network(config, dtype)
    for block in model.blocks:
        block.attention.out.weight.zero_()
        block.mlp.down.zero_()
    x_VD = model.embedding.weight.double()
    x_VD = x_VD * (x_VD.square().mean(1, keepdim=True) + config.norm_eps).rsqrt() * model.norm.weight.double()
    if dtype == torch.bfloat16 and library.stretto_has_tiles():
        x_VD = x_VD.float().bfloat16().double()
    want_VV = x_VD @ model.head_VD.double().T
    ids = ids_of(config, num=1, length=40)[0]
    for num in (1, 2, 15, 16, 17, 31, 33, 40):
        pools = Pools(library, model, num_sequences=1, length=num)
        got_MV = pools.native.forward([pools.chunk(0, ids[:num], 0, num, config.full())], want_routes=False)
        # fp32 sums of `width` products; a norm that lies between two bf16 numbers may go to the other one
        atol = float(want_VV.abs().max()) * width * torch.finfo(torch.float32).eps
        near = (got_MV.double() - want_VV[ids[:num]]).abs() < atol
        assert near.double().mean() > 0.99, f"{num} tokens: {near.double().mean():.3f} of the logits as they must be"


@torch.no_grad()
@pytest.mark.parametrize("name", ["odd sizes", "dense layer, shared experts", "widths"])
def test_bits_do_not_depend_on_the_number_of_tokens(library: ctypes.CDLL, name: str) -> None:
    config = CONFIGS[name]
    for dtype in (torch.float32, torch.bfloat16):
        model, ids = network(config, dtype), ids_of(config, num=1, length=60)[0]
        results = []
        for size in (1, 2, 15, 16, 17, 33, 60):
            pools = Pools(library, model, num_sequences=1, length=60)
            pieces = [pools.chunk(0, ids, at, min(60, at + size), config.full()) for at in range(0, 60, size)]
            results.append(torch.cat([pools.native.forward([piece], want_routes=True) for piece in pieces]))
        assert all(torch.equal(results[0], each) for each in results[1:])


@torch.no_grad()
def test_the_matrix_unit_is_left_as_it_was_found(library: ctypes.CDLL) -> None:
    """torch's own bf16 attention and products keep the unit's shapes on a thread between calls."""
    model, half = network(BASE, torch.bfloat16), {"dtype": torch.bfloat16}
    q_BHTC, x_ND = torch.ones(1, 4, 70, 64, **half), torch.randn(70, 96, **half)

    def torchs() -> Tensor:
        attended_BHTC = torch.nn.functional.scaled_dot_product_attention(q_BHTC, q_BHTC, q_BHTC)
        return torch.cat((attended_BHTC.flatten(), (x_ND @ x_ND.T).flatten()))

    before = torchs()
    for num in (1, 5, 40):
        pools = Pools(library, model, num_sequences=1, length=num)
        pools.native.forward([pools.chunk(0, ids_of(BASE, 1, num)[0], 0, num, BASE.full())], want_routes=False)
        assert torch.equal(torchs(), before)


@torch.no_grad()
def test_weights_changed_in_place_are_seen(library: ctypes.CDLL) -> None:
    model, other = network(BASE), build(BASE, seed=9)
    pools = Pools(library, model, num_sequences=1, length=5)
    chunk = pools.chunk(0, [1, 2, 3, 4, 5], 0, 5, BASE.full())
    pools.native.forward([chunk], want_routes=False)
    model.load_state_dict(other.state_dict())
    want_TV = other.logits(torch.tensor([[1, 2, 3, 4, 5]]))[0]
    atol = tolerance(model, torch.float32) * float(want_TV.abs().max())
    torch.testing.assert_close(pools.native.forward([chunk], want_routes=False), want_TV, rtol=0, atol=atol)


@torch.no_grad()
def test_only_wanted_logits(library: ctypes.CDLL) -> None:
    model = network(BASE)
    pools = Pools(library, model, num_sequences=2, length=6)
    ids = [1, 2, 3, 4, 5, 6]
    all_TV = pools.native.forward([pools.chunk(0, ids, 0, 6, BASE.full())], want_routes=False)
    chunks = [
        replace(pools.chunk(0, ids, 0, 6, BASE.full()), num_logits=2),
        replace(pools.chunk(1, ids, 0, 6, BASE.full()), num_logits=0),
    ]
    assert torch.equal(pools.native.forward(chunks, want_routes=False), all_TV[4:])
    assert pools.native.forward(chunks[1:], want_routes=False).shape == (0, BASE.vocab_size)


def test_the_variable_decides() -> None:
    library = load({"STRETTO_NATIVE": "0"})
    assert library.handle is None and library.reason == "STRETTO_NATIVE=0"
    with pytest.raises(UserError, match="use 0, 1 or auto"):
        load({"STRETTO_NATIVE": "yes"})


def test_without_a_compiler(tmp_path: Path) -> None:
    missing = {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    library = load(missing)
    assert library.handle is None and "no-such-compiler" in library.reason
    with pytest.raises(UserError, match="install a C\\+\\+ compiler"):
        load({**missing, "STRETTO_NATIVE": "1"})


def test_a_compiler_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiler = tmp_path / "broken-compiler"
    compiler.write_text("#!/bin/sh\necho 'decode.cpp:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    library = load({"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert library.handle is None and "error: no such thing" in library.reason
    assert not list((tmp_path / "cache").rglob("*.so"))
    shown = capsys.readouterr()
    assert not shown.out  # a program may read the command's output
    assert "Compiling the CPU kernels for decoding (once)" in shown.err


def test_an_interrupt_ends_all_processes_of_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, started = tmp_path / "slow-compiler", tmp_path / "started"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *" -E "*) exit 1;; esac\nsleep 300 &\necho $! >{started}.new\nmv {started}.new {started}\nwait\n'
    )
    compiler.chmod(0o755)
    communicate = subprocess.Popen.communicate

    def interrupted(process: subprocess.Popen[str], *arguments: object, **options: object) -> object:
        if "-E" in process.args:  # type: ignore[operator]
            return communicate(process, *arguments, **options)  # type: ignore[arg-type]
        while not started.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load({"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")})
    end_s = time.monotonic() + 10
    with suppress(psutil.NoSuchProcess):
        while (
            psutil.Process(int(started.read_text())).status() != psutil.STATUS_ZOMBIE
        ):  # in a container it may stay one
            assert time.monotonic() < end_s
            time.sleep(0.01)
    assert list((tmp_path / "cache" / "stretto" / "native").iterdir()) == []


@pytest.fixture
def compiler(tmp_path: Path) -> str:
    """Writes an empty library in a moment."""
    if not (real := shutil.which("g++")):
        pytest.skip("no C++ compiler")
    path = tmp_path / "quick-compiler"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = -std=c++20 ] || exit 1\nfor out; do :; done\n{real} -shared -x c++ /dev/null -o "$out"\n'
    )
    path.chmod(0o755)
    return str(path)


def test_a_cache_that_cannot_be_used_is_no_reason_to_stop(
    compiler: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    for cache, why in ((tmp_path / "file", "Not a directory"), (Path("/proc/nowhere"), "No such file")):
        library = load({"CXX": compiler, "XDG_CACHE_HOME": str(cache)})
        assert library.handle is None and why in library.reason and "XDG_CACHE_HOME" in library.reason
        assert library.reason in caplog.text


def test_only_what_nobody_else_could_write_is_loaded(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"CXX": compiler, "XDG_CACHE_HOME": str(tmp_path)}
    folder = tmp_path / "stretto" / "native"
    old = os.umask(0o002)  # as many systems have it: whatever is made may be written by a group
    try:
        assert load(environment).handle is not None
    finally:
        os.umask(old)
    (path,) = folder.iterdir()  # nothing else is left of the compilation
    modes = [each.stat().st_mode & 0o777 for each in (folder.parent, folder, path)]
    assert modes == [0o755, 0o700, 0o700]
    first = path.stat().st_ino
    assert load(environment).handle is not None and path.stat().st_ino == first  # compiled once
    path.chmod(0o770)
    assert load(environment).handle is not None
    assert path.stat().st_ino != first and path.stat().st_mode & 0o777 == 0o700  # compiled again: it may be anything
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    library = load(environment)
    assert library.handle is None and f"{folder.parent} belongs to user" in library.reason


NUM = 10_000


def logits(num: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, vocab, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("vocab", [1, 12, 256, 1000])
def test_one_token_a_row_as_torch_chooses(library: ctypes.CDLL, vocab: int) -> None:
    """Same random numbers, same distribution: only a sum rounded otherwise can make a draw differ."""
    num = 300
    rows = [Sampling(temperature=(0.0, 0.7, 1.0)[index % 3], seed=index * 7919) for index in range(num)]
    logits_MV, positions = logits(num, vocab), list(range(num))
    logp_MV = process(logits_MV, [Row(row) for row in rows])
    theirs = sample(logp_MV, rows, positions)
    seeds = [row.seed or 0 for row in rows]
    ours = choose(library, logits_MV, positions, [row.temperature for row in rows], seeds)
    ids_M = torch.tensor(ours.ids)
    greedy_M = torch.arange(num) % 3 == 0
    assert torch.equal(ids_M[greedy_M], theirs[greedy_M])
    assert (ids_M == theirs).float().mean() > 0.99
    expected_M = logp_MV.gather(1, ids_M[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(ours.logprobs), expected_M, atol=2e-6, rtol=1e-6)


def test_ties_and_numbers_that_are_none(library: ctypes.CDLL) -> None:
    tied = torch.tensor([[0.0, 3.0, 1.0, 3.0] + [0.0] * 300])
    assert choose(library, tied, [0], [0.0], [0]).ids == [1]
    broken = torch.full((1, 300), math.nan)
    for temperature in (0.0, 1.0):
        found = choose(library, broken, [0], [temperature], [0])
        assert 0 <= found.ids[0] < 300 and math.isnan(found.logprobs[0])


def test_a_row_does_not_depend_on_others(library: ctypes.CDLL) -> None:
    logits_MV, seeds = logits(64, 5000, 3), list(range(64))
    together = choose(library, logits_MV, seeds, [1.0] * 64, seeds)
    for row in range(64):
        alone = choose(library, logits_MV[row : row + 1].contiguous(), [row], [1.0], [row])
        assert (alone.ids[0], alone.logprobs[0]) == (together.ids[row], together.logprobs[row])
