"""Engines and verifiers behind a runtime, as the agent loop sees them. Imports no torch."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from stretto.base.trajectory import Verdict
from stretto.rl.agent import Clients
from stretto.rl.asking import Generated, GenerateRequest, RewardRequest, Trouble, Unavailable, infra
from stretto.runtime.pool import ElasticPool
from stretto.runtime.runtime import Caller, Handle, RoleDied, RoleError, RuntimeFailure

T = TypeVar("T")

_SLACK_S = 5.0
"""Between the deadline that a role keeps itself and the one by which its caller gives it up: for the way there and back."""


class RemoteEngine:
    """An `EngineRole` behind a handle."""

    def __init__(self, caller: Caller, handle: Handle):
        self.name = handle.name
        self._caller, self._handle = caller, handle

    async def generate(self, request: GenerateRequest) -> Generated:
        # No idempotency key: a call with one is not cancelled in the engine when its agent gives it up.
        deadline_s = request.deadline_s + _SLACK_S
        done: Generated = await _attributed(self._caller.call(self._handle, "generate", request, deadline_s=deadline_s))
        return done


class RemoteRewards:
    """`RewardRole`s behind handles; each request goes to the one with the fewest in flight."""

    def __init__(self, caller: Caller, handles: Sequence[Handle], deadline_s: float):
        """
        Args:
            deadline_s: of one verification, as the roles keep it; a request waits for its turn before.
        """
        assert handles, "a reward needs a verifier"
        self._caller, self._handles, self._deadline_s = caller, tuple(handles), deadline_s
        self._loads = [0] * len(self._handles)

    async def score(self, request: RewardRequest) -> Verdict:
        place = self._loads.index(min(self._loads))
        self._loads[place] += 1
        deadline_s = self._deadline_s * self._loads[place] + _SLACK_S  # those before it may each take all of theirs
        try:
            return await self._caller.call(self._handles[place], "score", request, deadline_s=deadline_s)
        except RuntimeFailure as failure:
            return infra(request, str(failure))
        finally:
            self._loads[place] -= 1


class PooledRewards:
    """`RewardRole`s in pools that live on the agent's own loop."""

    def __init__(self, pools: Mapping[str, ElasticPool], deadline_s: float):
        """
        Args:
            pools: by source.
            deadline_s: of one verification, as the roles keep it.
        """
        self._pools, self._deadline_s = pools, deadline_s

    async def score(self, request: RewardRequest) -> Verdict:
        pool = self._pools[request.source]
        try:
            verdict: Verdict = await pool.call("score", request, deadline_s=self._deadline_s + _SLACK_S)
        except RuntimeFailure as failure:
            return infra(request, str(failure))
        return verdict


Verifiers = tuple[Handle, ...] | Mapping[str, ElasticPool]
"""So many roles, each for all sources; or pools by source, for agents on the driver's loop."""


@dataclass(frozen=True, slots=True)
class Connect:
    """Makes an agent's clients where the agent lives."""

    engines: tuple[Handle, ...]
    rewards: Verifiers
    reward_s: float
    """Deadline of one verification."""

    def __call__(self, caller: Caller | None) -> Clients:
        assert caller is not None, "the runtime gives roles a caller"
        engines = [RemoteEngine(caller, handle) for handle in self.engines]
        if isinstance(self.rewards, Mapping):
            return Clients(engines, PooledRewards(self.rewards, self.reward_s))
        return Clients(engines, RemoteRewards(caller, self.rewards, self.reward_s))


async def _attributed(work: Awaitable[T]) -> T:
    """What the runtime reports as its own or the role's failure is trouble to an agent; a `UserError` passes."""
    try:
        return await work
    except RoleDied as died:
        raise Unavailable(str(died)) from died
    except RuntimeFailure as failure:
        is_absent = isinstance(failure, RoleError) and failure.kind == Unavailable.__name__
        raise (Unavailable if is_absent else Trouble)(str(failure)) from failure
