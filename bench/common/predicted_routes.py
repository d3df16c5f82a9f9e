"""Predicted routes (PR², 2606.00395), a control of routing replay.

Every router gets a second matrix, zero at first, that predicts from the router's input how its logits change during the updates on a
batch. The pass before the updates chooses experts by the predicted logits, and the updates replay these routes, as R2 replays routes
that were not predicted. The matrix learns to minimise KL(router during the update ‖ predicted router). As in the authors' code
(radixark/miles, pull request 1362), the engine samples with its own routes.

Shape letters: N tokens, D hidden, E experts, K chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.base.trajectory import Group, GroupRef
from stretto.data.pack import PADDING
from stretto.learning.metrics import StepReport
from stretto.learning.passes import Pass
from stretto.learning.trainer import TrainerRole
from stretto.model.transformer import MoeLayer
from stretto.ops.operators import Operators
from stretto.train.step import StepResult

PREDICTED_KL, BEFORE_KL = "routes/predicted_kl", "routes/before_kl"
"""Scalars of a step: KL(router during the update ‖ predicted router) and ‖ the router before the updates, in nats."""
RATE = 1e-4
"""Learning rate of the matrices, the authors': 100 times 1e-6, that of their policy."""


@dataclass(frozen=True, slots=True, eq=False)
class _Prediction:
    """What a router computed before the updates."""

    x_ND: Tensor
    logits_NE: Tensor
    matrix_ED: Tensor

    @property
    def logits(self) -> Tensor:
        """Predicted logits [N, E]."""
        return self.logits_NE + self.x_ND @ self.matrix_ED.T


class PredictedRoutes(Operators):
    """The ordinary operators for passes of one batch by a network with sigmoid routers: without gradients the routers choose by
    predicted logits. All passes record their logits."""

    def __init__(self, matrices: Mapping[Tensor, Tensor]) -> None:
        """``matrices``: the second matrix of each router by its first one."""
        self.predictions: list[_Prediction] = []
        self.later: list[Tensor] = []
        """Logits [N, E] in passes with gradients, in the order of the routers."""
        self._matrices = matrices
        self._change_NE: Tensor | None = None

    def router_logits(self, x_ND: Tensor, gate_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
        logits_NE = super().router_logits(x_ND, gate_ED, bias_E)
        if torch.is_grad_enabled():
            self.later.append(logits_NE.detach())
            self._change_NE = None
        else:
            self.predictions.append(_Prediction(x_ND, logits_NE, self._matrices[gate_ED]))
            self._change_NE = self.predictions[-1].logits.sigmoid() - logits_NE.sigmoid()
        return logits_NE

    def highest(self, choice_NE: Tensor, top_k: int) -> Tensor:
        return super().highest(choice_NE if self._change_NE is None else choice_NE + self._change_NE, top_k)


class PredictingTrainer(TrainerRole):
    """A trainer with PR². Its recipe has ``replay = "r2"``, which replays the routes of the pass before the updates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self._recipe.replay == "r2", "predicted routes are replayed by R2"
        gates = [layer.gate for layer in self._model.modules() if isinstance(layer, MoeLayer)]
        self._matrices: dict[Tensor, Tensor] = {gate: torch.zeros_like(gate, requires_grad=True) for gate in gates}
        self._predictor = torch.optim.Adam(self._matrices.values(), lr=RATE)
        self._kls: list[tuple[float, float]] = []
        """`PREDICTED_KL` and `BEFORE_KL` of the step's updates."""

    def step(self, refs: Sequence[GroupRef], step: int) -> StepReport:
        self._kls.clear()
        report = super().step(refs, step)
        predicted, before = np.mean(self._kls, axis=0)
        return replace(report, scalars={**report.scalars, PREDICTED_KL: predicted, BEFORE_KL: before})

    def _plan(self, groups: Sequence[Group]) -> list[Any]:
        updates = super()._plan(groups)
        for update in updates:
            for micro in update.passes:
                micro.ctx = replace(micro.ctx, operators=PredictedRoutes(self._matrices))
        return updates

    def _update(self, update: Sequence[Pass]) -> StepResult:
        result = super()._update(update)
        pairs = [pair for micro in update for pair in _recorded(micro)]
        with torch.no_grad():
            before = _kl([(later_NE, prediction.logits_NE) for prediction, later_NE in pairs])
        self._predictor.zero_grad()
        predicted = _kl([(later_NE, prediction.logits) for prediction, later_NE in pairs])
        predicted.backward()
        self._predictor.step()
        self._kls.append((predicted.item(), before.item()))
        return result


def _recorded(micro: Pass) -> list[tuple[_Prediction, Tensor]]:
    """What each router predicted for the tokens of a pass, and its logits in the update."""
    operators = micro.ctx.operators
    assert isinstance(operators, PredictedRoutes)
    is_token_N = (micro.mine["documents_BT"] != PADDING).flatten()
    return [
        (replace(each, x_ND=each.x_ND[is_token_N], logits_NE=each.logits_NE[is_token_N]), later_NE[is_token_N])
        for each, later_NE in zip(operators.predictions, operators.later, strict=True)
    ]


def _kl(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """KL(first ‖ second) of routers' logits, the mean over all tokens and routers, in nats."""
    logs = [(target_NE.log_softmax(-1), own_NE.log_softmax(-1)) for target_NE, own_NE in pairs]
    return torch.cat([(target_NE.exp() * (target_NE - own_NE)).sum(-1) for target_NE, own_NE in logs]).mean()
