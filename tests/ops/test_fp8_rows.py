"""Rowwise FP8: the quantiser, products and their gradients against dequantised operands, and a network that trains with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, build
from stretto.ops import fp8_rows, matmul
from stretto.ops.fp8_rows import Fp8Operators, Rows
from stretto.ops.grouped import Experts
from stretto.ops.matmul import Arithmetic
from stretto.ops.operators import ORDINARY, Operators, Routes
from stretto.train.step import MicroBatch, forward_backward

N, D, F_OUT, E, K, WIDTH = 24, 32, 48, 4, 2, 16


def _random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_a_row_is_within_half_a_unit_of_its_bytes() -> None:
    x_ND = _random(N, D).float() * torch.logspace(-6, 6, N)[:, None]
    x_ND[3] = 0.0
    rows = Rows.of(x_ND)
    assert (rows.bytes_ND.float().abs().amax(-1)[[0, 1, 2]] == 448).all() and (rows.scale_N[3] == 1.0)
    # E4M3 has 3 bits after the leading one, and multiples of 2⁻⁹ below 2⁻⁶
    allowed_ND = torch.maximum(x_ND.abs() * 2**-4, rows.scale_N[:, None] * 2**-10) * (1 + 2**-20)
    assert ((rows.dequantise() - x_ND).abs() <= allowed_ND).all()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_kernel_quantises_to_the_same_numbers(is_transposed: bool) -> None:
    pytest.importorskip("triton")
    from stretto.ops.kernels.quantise_rows import quantise_rows  # the interpreter must be chosen before

    x_END = _random(2, 70, 90) * torch.logspace(-5, 5, 70)[:, None].bfloat16()
    x_END[1, 4] = 0.0
    x_END = x_END.transpose(1, 2) if is_transposed else x_END
    bytes_END, scale_EN = quantise_rows(x_END)
    wanted = Rows.of(x_END)
    assert torch.equal(scale_EN, wanted.scale_N) and torch.equal(bytes_END.float(), wanted.bytes_ND.float())


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1])
def test_nan_stays_nan(bits: int) -> None:
    """CUDA's arithmetic returns 0x7fffffff, to which rounding would carry beyond the sign."""
    pytest.importorskip("triton")
    from stretto.ops.kernels.quantise_rows import quantise_rows

    x_END = _random(1, 2, 90).float()
    x_END.view(torch.int32)[0, 1, 7] = bits
    for bytes_END, scale_EN in (quantise_rows(x_END), ((rows := Rows.of(x_END)).bytes_ND, rows.scale_N)):
        is_nan_ND = (bytes_END.float() * scale_EN[..., None]).isnan()[0]
        assert is_nan_ND[1, 7] and not is_nan_ND[0].any()


def test_numbers_whose_scale_would_be_0_become_0() -> None:
    pytest.importorskip("triton")
    from stretto.ops.kernels.quantise_rows import quantise_rows

    x_END = torch.zeros(1, 2, 128)
    x_END[0, 0, 5], x_END[0, 1] = 1e-44, 1.0
    for bytes_END, scale_EN in (quantise_rows(x_END), ((rows := Rows.of(x_END)).bytes_ND, rows.scale_N)):
        assert torch.equal(scale_EN, torch.tensor([[1.0, torch.tensor(1.0) / 448]]))
        assert torch.equal(bytes_END.float(), torch.stack([torch.zeros(128), torch.full((128,), 448.0)])[None])


def test_products_and_gradients_are_those_of_the_quantised_operands() -> None:
    x_ND, weight_FD = (each.requires_grad_() for each in (_random(N, D), _random(F_OUT, D, seed=1)))
    grad_NF = _random(N, F_OUT, seed=2)
    y_NF = Fp8Operators().linear(x_ND, weight_FD)
    y_NF.backward(grad_NF)

    def seen(x: Tensor) -> Tensor:
        return Rows.of(x).dequantise()

    assert torch.equal(y_NF, (seen(x_ND) @ seen(weight_FD).t()).bfloat16())
    assert x_ND.grad is not None and weight_FD.grad is not None
    assert torch.equal(x_ND.grad, (seen(grad_NF) @ seen(weight_FD.t()).t()).bfloat16())
    assert torch.equal(weight_FD.grad, grad_NF.t() @ x_ND)


def test_odd_widths_are_multiplied_in_bf16() -> None:
    x_ND, weight_FD = _random(N, D), _random(20, D, seed=1)
    assert torch.equal(Fp8Operators().linear(x_ND, weight_FD), ORDINARY.linear(x_ND, weight_FD))


def _routed(operators: Operators) -> list[Tensor]:
    """Output of experts, and gradients of its inputs."""
    x_ND, gate_up_EFD, down_EDI = (
        each.float().requires_grad_()
        for each in (_random(N, D), 0.2 * _random(E, 2 * WIDTH, D, seed=1), 0.2 * _random(E, D, WIDTH, seed=2))
    )
    chosen_NK = torch.rand(N, E, generator=torch.Generator().manual_seed(3)).topk(K).indices
    gates_NK = torch.rand(N, K, generator=torch.Generator().manual_seed(4)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y_ND = operators.experts(x_ND, Routes(chosen_NK, gates_NK), Experts(gate_up_EFD, down_EDI))
    inputs = (x_ND, gates_NK, gate_up_EFD, down_EDI)
    return [y_ND.detach(), *torch.autograd.grad(y_ND, inputs, _random(N, D, seed=5).to(y_ND.dtype))]


def test_experts_are_those_in_bf16_within_the_rounding_of_fp8() -> None:
    for low, wanted in zip(_routed(Fp8Operators()), _routed(ORDINARY), strict=True):
        error = float((low.float() - wanted.float()).norm() / wanted.float().norm())
        # at most three products follow each other, each of two operands with relative errors of at most 2⁻⁴
        assert 1e-3 < error < 6 * 2**-4 / 3**0.5, error


def test_a_network_trains_with_it() -> None:
    config = ModelConfig(
        vocab_size=64, hidden_size=D, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, num_experts=E, top_k=K,
        expert_intermediate_size=WIDTH,
    )  # fmt: skip
    ids_BT = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))
    grads, losses = [], []
    for operators in (ORDINARY, Fp8Operators()):
        model = build(config, 0)
        ctx = Context(Context.plain(ids_BT).positions_BT, operators=operators)
        batch = MicroBatch("full", ids_BT, ids_BT, ctx, config.full(), ids_BT.numel())
        (done,) = forward_backward(model, batch, torch.bfloat16, 1 / ids_BT.numel())
        losses.append(float(done.measured.loss) / ids_BT.numel())
        grads.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
    assert grads[0].shape == grads[1].shape
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], abs=0.02)
    assert torch.cosine_similarity(*grads, dim=0) > 0.98


def test_a_trainer_takes_it_where_tensor_cores_multiply_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = torch.device("cpu")
    assert not isinstance(Arithmetic("fp8").training(device)[0], Fp8Operators)
    monkeypatch.setattr(matmul, "trains_in_bf16", lambda device: True)
    assert not isinstance(Arithmetic("fp8").training(device)[0], Fp8Operators), "emulated: the blocks of the engine"
    Arithmetic("fp8").training(device)
    assert capsys.readouterr().out.count("FP8: on cpu: products are emulated") == 1
    fp8_rows.said_emulated.cache_clear()
    monkeypatch.setattr(fp8_rows, "why_emulated", lambda device: "")
    operators, dtype = Arithmetic("fp8").training(device)
    assert isinstance(operators, Fp8Operators) and dtype == torch.bfloat16
    fp8_rows.said_emulated.cache_clear()
    assert not isinstance(Arithmetic("fp8", batch_invariant=True).training(device)[0], Fp8Operators)
