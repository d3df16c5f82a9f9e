"""Checks of the Triton kernels that decode, each against torch's operators, and of a whole step with all of them.

On a GPU with sizes as networks have them; on a CPU, where Triton's interpreter runs them, with small ones. The mutant drops 13 bits of what a
kernel is given, and every check must fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.common.gpu_part import Case, Outcome, Setting, relative_error
from bench.common.networks import random_network
from stretto.engine.forward_torch import KvPool, TorchForward
from stretto.engine.graphs import DecodeGraphs
from stretto.engine.sequence import Chunk, SubnetTable
from stretto.model.spec import ModelConfig
from stretto.ops import kernels, paged
from stretto.ops.grouped import Experts
from stretto.ops.int_weights import IntScheme, quantise
from stretto.ops.matmul import PLAIN
from stretto.ops.operators import MASKED, Routes
from stretto.ops.paged import ExpertWeights, Group, Heads, RouteRule, Spans

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7}
"""Largest ‖kernel − reference‖ / ‖reference‖: sums in another order, or a few roundings to the type, of 2⁻⁹ each."""
PAGE = 16


def cases(setting: Setting) -> Iterator[Case]:
    """A case for each kernel and type; none where Triton cannot run."""
    if kernels.why_not(setting.device):
        return
    make = Checks(setting.device, setting.mutant is not None)
    # the interpreter rounds to bf16 towards zero
    for dtype in LIMITS if setting.device.type == "cuda" else (torch.float32,):
        kind = str(dtype)[6:]
        yield Case(f"kernel: attention over pages, {kind}", partial(make.attention, dtype))
        for num_tokens in (1, 3, 40):
            yield Case(f"kernel: experts, {kind}, {num_tokens} tokens", partial(make.experts, dtype, num_tokens, 16))
        for bits in (8, 4):
            yield Case(f"kernel: experts, int{bits}, {kind}", partial(make.experts, dtype, 3, bits))
            yield Case(f"kernel: linear, int{bits}, {kind}", partial(make.linear, dtype, bits))
        yield Case(f"kernel: residual sum and norm, {kind}", partial(make.add_norm, dtype))
        yield Case(f"kernel: rotation and write to the cache, {kind}", partial(make.rotation, dtype))
    for router in ("softmax", "sigmoid"):
        yield Case(f"kernel: choice of experts, {router}", partial(make.choice, router == "softmax"))
    yield Case("kernels: a step of several Subnets, fp32", make.step)


@dataclass(frozen=True)
class Checks:
    """Checks on one device. References compute in fp32."""

    device: torch.device
    is_mutant: bool

    @property
    def width(self) -> int:
        """Hidden size."""
        return 2048 if self.device.type == "cuda" else 64

    def given(self, x: Tensor) -> Tensor:
        """``x``, or what the mutant makes of it: three bits less than bf16 has."""
        if not self.is_mutant:
            return x
        return ((x.float().view(torch.int32) >> 19) << 19).view(torch.float32).to(x.dtype)

    def random(self, *size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        drawn = torch.randn(*size, generator=torch.Generator().manual_seed(seed + sum(size)))
        return drawn.to(self.device, dtype)

    def pages(self, lengths: list[int]) -> tuple[Tensor, Tensor, int]:
        """Page tables, lengths, and the number of pages."""
        num = -(-max(lengths) // PAGE)
        order = torch.randperm(len(lengths) * num, generator=torch.Generator().manual_seed(1)).int()
        return (
            order.view(len(lengths), num).to(self.device),
            torch.tensor(lengths, dtype=torch.int32, device=self.device),
            len(order),
        )

    def attention(self, dtype: torch.dtype) -> Outcome:
        from stretto.ops.kernels.paged_attention import paged_attention

        lengths = [1, 77, 1000, 513] if self.device.type == "cuda" else [1, 77, 130]
        table_NM, lengths_N, num_pages = self.pages(lengths)
        (N, M), H, G, C, worst = table_NM.shape, 16, 4, 128, 0.0
        q_NHC, sinks_H = self.random(N, H, C, dtype=dtype), self.random(H)
        keys, values = (self.random(num_pages, PAGE, G, C, dtype=dtype, seed=seed) for seed in (1, 2))
        for window, sinks, splits in ((None, None, 1), (None, sinks_H, 4), (70, None, 4), (70, sinks_H, 1)):
            key_NT = torch.arange(M * PAGE, device=self.device)[None]
            first_N1 = torch.zeros_like(lengths_N[:, None]) if window is None else lengths_N[:, None] - window
            is_hidden_NT = (key_NT >= lengths_N[:, None]) | (key_NT < first_N1)
            mask_NT = torch.zeros(is_hidden_NT.shape, device=self.device).masked_fill(is_hidden_NT, float("-inf"))
            group = Group(0, N, 1, table_NM.flatten().long(), mask_NT[:, None, None])
            heads = Heads(None, False, None, None, sinks, False)
            spans = Spans(q_NHC, q_NHC, lengths_N, (group,))
            wanted = paged.attend(q_NHC.float(), keys.float(), values.float(), spans, heads)
            options = {"sinks_H": sinks, "window": window, "splits": splits}
            seen = paged_attention(self.given(q_NHC), keys, self.given(values), table_NM, lengths_N, **options)
            worst = max(worst, relative_error(seen, wanted))
        return Outcome({"relative error": worst}, worst < LIMITS[dtype])

    def experts(self, dtype: torch.dtype, num_tokens: int, bits: int) -> Outcome:
        from stretto.ops.kernels import layer, products

        D, inner, E, K = self.width, self.width // 2, 8, 3
        weights = [self.random(*size, dtype=dtype) / size[-1] ** 0.5 for size in ((E, 2 * inner, D), (E, D, inner))]
        matrices = [products.Matrix(each) for each in weights]
        if bits < 16:
            quantised = [quantise(each, IntScheme(bits, zeros=bits == 4)) for each in weights]
            matrices = [products.Matrix.of(each) for each in quantised]
            weights = [each.dequantise().to(dtype) for each in quantised]
        x_ND, gates_NK = self.random(num_tokens, D, dtype=dtype), self.random(num_tokens, K).sigmoid()
        chosen_NK = self.random(num_tokens, E, seed=5).argsort(1)[:, :K].contiguous()
        if num_tokens > 1:
            chosen_NK[0], chosen_NK[1, 2] = E, E
            gates_NK.masked_fill_(chosen_NK == E, 0.0)
        wide = ExpertWeights.of(Experts(*(each.float() for each in weights)))
        wanted = x_ND.float() + paged.chosen_experts(x_ND.float(), Routes(chosen_NK, gates_NK), wide)
        chosen_NK = chosen_NK.int()
        parts = products.expert_outputs(self.given(x_ND), chosen_NK, gates_NK, *matrices)
        ones_D = torch.ones(D, dtype=dtype, device=self.device)
        seen = layer.add_norm(x_ND, parts, ones_D, 1e-6, chosen_NK=chosen_NK, num_experts=E)[0]
        error = relative_error(seen - x_ND, wanted - x_ND.float())
        return Outcome({"relative error": error}, error < LIMITS[dtype])

    def linear(self, dtype: torch.dtype, bits: int) -> Outcome:
        from stretto.ops.kernels import products

        weight = quantise(self.random(3 * self.width // 2, self.width, dtype=dtype), IntScheme(bits, zeros=bits == 4))
        matrix, worst = products.Matrix.of(weight), 0.0
        for num in (1, 19):
            x_ND = self.random(num, self.width, dtype=dtype)
            wanted = F.linear(x_ND.float(), weight.dequantise().to(dtype).float())
            worst = max(worst, relative_error(products.linear(self.given(x_ND), matrix), wanted))
        return Outcome({"relative error": worst}, worst < LIMITS[dtype])

    def add_norm(self, dtype: torch.dtype) -> Outcome:
        from stretto.ops.kernels import layer

        D = self.width
        x_ND, parts_NKD, weight_D = self.random(3, D), self.random(3, 2, D), self.random(D)
        x_ND, parts_NKD, weight_D = (each.to(dtype) for each in (x_ND, parts_NKD, weight_D))
        stays_N = torch.tensor([1, 0, 1], dtype=torch.uint8, device=self.device)
        wanted = (x_ND.float() + parts_NKD.float().sum(1)).where(stays_N[:, None] > 0, x_ND.float())
        wanted = paged.norm(wanted, weight_D.float(), torch.tensor(1e-5, device=self.device))
        _, seen, _ = layer.add_norm(self.given(x_ND), parts_NKD, weight_D, 1e-5, stays_N=stays_N)
        error = relative_error(seen, wanted)
        return Outcome({"relative error": error}, error < LIMITS[dtype])

    def rotation(self, dtype: torch.dtype) -> Outcome:
        from stretto.ops.kernels import layer

        (table_NM, lengths_N, num_pages), H, G, C, worst = self.pages([1, 77, 130]), 8, 4, 128, 0.0
        qkv_NX, norm_JC = self.random(3, (H + 2 * G) * C, dtype=dtype), self.random(H + G, C, dtype=dtype)
        rotary_P2R, position_N = self.random(256, 2, C, dtype=dtype), lengths_N.long() - 1
        rotary_N2R = rotary_P2R[position_N].float()
        slots_N = table_NM.gather(1, (position_N // PAGE)[:, None]).squeeze(1) * PAGE + position_N % PAGE
        spans, eps = Spans(rotary_N2R[:, :1], rotary_N2R[:, 1:], slots_N, ()), torch.tensor(1e-5, device=self.device)
        for norm, is_wide, clip in ((None, False, 0.7), (norm_JC, False, None), (norm_JC, True, 1.2)):
            seen = [torch.zeros(num_pages, PAGE, G, C, dtype=dtype, device=self.device) for _ in range(2)]
            wanted = [each.float() for each in seen]
            heads = Heads(None if norm is None else norm.float(), is_wide, clip, None, None, False)
            wanted.append(paged.store(qkv_NX.float().clone(), heads, eps, spans, *wanted))
            options = (norm, is_wide, clip, 1e-5, rotary_P2R, table_NM, lengths_N)
            seen.append(layer.rotate_and_store(self.given(qkv_NX), *options, *seen))
            worst = max(worst, *(relative_error(one, other) for one, other in zip(seen, wanted, strict=True)))
        return Outcome({"relative error": worst}, worst < LIMITS[dtype])

    def choice(self, softmax: bool) -> Outcome:
        from stretto.ops.kernels import layer

        N, E, K = 33, 60, 8
        bias_ULE = torch.zeros(2, 1, E, device=self.device)
        bias_ULE[1, 0, ::3] = MASKED
        top_k_UL = torch.tensor([[K], [3]], dtype=torch.int32, device=self.device)
        subnet_N = torch.arange(N, dtype=torch.int32, device=self.device) % 2
        bias_NE = bias_ULE[subnet_N.long(), 0]
        dropped_NK = torch.arange(K, device=self.device) >= top_k_UL[subnet_N.long(), 0][:, None]
        rule = RouteRule(K, softmax, True, 1.5, (1, 1), bias_NE, bias_NE if softmax else None, dropped_NK)
        logits_NE = self.random(N, E)
        wanted = paged.route_tokens(logits_NE, torch.eye(E, device=self.device), rule)
        options = (bias_ULE, top_k_UL, subnet_N, 0, K)
        chosen_NK, gates_NK = layer.choose_experts(
            self.given(logits_NE), *options, softmax=softmax, normalize=True, scaling=1.5
        )
        num = int((chosen_NK != wanted.chosen_NK).any(1).sum())
        error = relative_error(gates_NK, wanted.gates_NK)
        return Outcome(
            {"other choices": num, "relative error of gates": error}, num == 0 and error < LIMITS[torch.float32]
        )

    @torch.inference_mode()
    def step(self) -> Outcome:
        """Logits of a decoding step of three Subnets by graphs, and launched one by one by torch."""
        config = ModelConfig(
            vocab_size=128, hidden_size=self.width, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=8,
            top_k=3, expert_intermediate_size=self.width // 2, num_shared_experts=1, max_positions=64, qk_norm=True,
        )  # fmt: skip
        model, table = random_network(config).to(self.device), SubnetTable()
        pool = KvPool.allocate(config, 9, 4, torch.float32, self.device, True)
        plain = TorchForward(model, table, pool, PLAIN)
        graphs = DecodeGraphs(plain, pool, config, table, with_kernels=True)
        kinds = [config.full(), config.subnet(depth=2, experts=4, top_k=1), config.subnet(top_k=2)]
        chunks = [Chunk((7, 8, 9), 0, (2 * row,), table.number(kind), 1) for row, kind in enumerate(kinds)]
        plain.forward(chunks, want_routes=False)
        chunks = [replace(chunk, tokens=(5,), start=3) for chunk in chunks]
        wanted = plain.forward(chunks, want_routes=False)
        if self.is_mutant:
            chunks[0] = replace(chunks[0], subnet=chunks[1].subnet)
        seen = graphs.forward(chunks, want_routes=False)
        error = relative_error(seen, wanted)
        return Outcome({"relative error": error}, error < LIMITS[torch.float32])
