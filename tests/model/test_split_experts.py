"""Experts divided over ranks compute as on one rank, in every arithmetic, in real gloo processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stretto.model.checkpoint import read_checkpoint
from stretto.model.parallel import Ranks, join, read_placed
from stretto.model.transformer import Context, Replay, Transformer
from stretto.ops.grouped import Experts
from stretto.ops.matmul import Arithmetic, ArithmeticOperators, ExpertMatrices
from tests.flow.policies import SHAPE, checkpoint
from tests.ranks import run_ranks

ROWS, LENGTH, HOT = 4, 12, 7
ARITHMETICS = [
    *(Arithmetic(precision, True) for precision in ("fp32", "bf16", "fp8")),
    *(Arithmetic(precision) for precision in ("fp32", "bf16")),
]


def routes(kind: str) -> Tensor:
    """Routes of all rows [B, T, L, K]. ``hot``: all tokens of the first row, which only the first rank computes, choose expert `HOT`,
    and no other token does. ``idle``: no token chooses an expert of the second half, which other ranks have."""
    few = SHAPE["num_experts"] // 2
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(ROWS, LENGTH, SHAPE["num_layers"] - 1, few - 1, generator=generator)
    chosen_BTLK = scores.argsort(-1)[..., : SHAPE["top_k"]]
    if kind == "hot":
        chosen_BTLK[0, ..., 0] = HOT
    return chosen_BTLK.to(torch.int16)


def passed(model: Transformer, arithmetic: Arithmetic, kind: str, rows: slice) -> Tensor:
    """Hidden states of ``rows``, after a backward pass of a random linear function of them."""
    ids_BT = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)[rows] % SHAPE["vocab_size"]
    positions_BT = torch.arange(LENGTH).expand_as(ids_BT)
    ctx = Context(
        positions_BT,
        torch.zeros_like(ids_BT),
        operators=arithmetic.operators,
        routing=Replay(routes(kind)[rows]),
    )
    hidden_BTD = model(ids_BT, model.config.full(), ctx).hidden_BTD
    weights_BTD = torch.randn(ROWS, *hidden_BTD.shape[1:], generator=torch.Generator().manual_seed(1))
    (hidden_BTD * weights_BTD[rows]).sum().backward()
    return hidden_BTD.detach()


def compare(folder: Path, ranks: Ranks, arithmetic: Arithmetic, kind: str) -> None:
    whole, model = read_checkpoint(folder, dtype=torch.float32).model, read_placed(folder, ranks).model
    expected_BTD = passed(whole, arithmetic, kind, slice(None))
    found_BTD = passed(model, arithmetic, kind, ranks.rows(ROWS))
    mine_BTD = expected_BTD[ranks.rows(ROWS)]
    case = (arithmetic, kind, ranks.world, ranks.ep)
    if arithmetic.batch_invariant:
        assert torch.equal(found_BTD, mine_BTD), case
    else:  # products of other numbers of rows; in bf16 their results are rounded, three times in a layer
        eps = 2.0**-8 if arithmetic.precision == "bf16" else torch.finfo(torch.float32).eps
        assert torch.allclose(found_BTD, mine_BTD, rtol=0, atol=16 * eps * float(mine_BTD.abs().max())), case
    ranks.sum_gradients(model)
    own = dict(model.named_parameters())
    # gradients are rounded to the precision of their products
    limit = 1e-5 if arithmetic.precision == "fp32" else 2e-2
    for name, parameter in whole.named_parameters():
        grad = own[name].grad
        if parameter.grad is None:  # of the head
            continue
        assert grad is not None, (name, case)  # also of an expert without tokens
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        error = float((full - parameter.grad).norm() / (parameter.grad.norm() + 1e-12))
        assert error < limit, (name, error, case)
        if name.endswith(("mlp.gate_up", "mlp.down")) and kind == "idle":
            assert not full[SHAPE["num_experts"] // 2 :].any(), (name, case)


def launch(world: int, ep: int, folder: Path) -> None:
    for done in run_ranks(world, [sys.executable, "-m", "tests.model.test_split_experts", str(folder), str(ep)]):
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(900)  # several processes on a shared machine
@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2)])
def test_split_experts_equal_one_rank(world: int, ep: int, tmp_path: Path) -> None:
    launch(world, ep, checkpoint(tmp_path / "start"))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_experts_without_rows_get_zero_gradients(precision: str, batch_invariant: bool) -> None:
    operators = Arithmetic(precision, batch_invariant).operators  # type: ignore[arg-type]
    operators = operators if isinstance(operators, ArithmeticOperators) else ArithmeticOperators(Arithmetic())
    gate_up_EFD, down_EDI = torch.randn(2, 8, 16, requires_grad=True), torch.randn(2, 16, 4, requires_grad=True)
    x_SD, gates_S1 = torch.zeros(0, 16, requires_grad=True), torch.zeros(0, 1, requires_grad=True)
    matrices = ExpertMatrices(gate_up_EFD.unbind(0), down_EDI.unbind(0))
    y_SD = operators.expert_rows(x_SD, gates_S1, [0, 0], matrices, Experts(gate_up_EFD, down_EDI))
    assert y_SD.shape == (0, 16)
    y_SD.sum().backward()
    for each in (gate_up_EFD, down_EDI, x_SD, gates_S1):  # a missing gradient would let the other ranks wait for ever
        assert each.grad is not None and not each.grad.any()


if __name__ == "__main__":
    own = join("cpu", int(sys.argv[2]))
    for each in ARITHMETICS if own.world == 2 else ARITHMETICS[1:4]:
        for one in ("hot", "idle"):
            compare(Path(sys.argv[1]), own, each, one)
