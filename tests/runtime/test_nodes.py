"""Places of roles on a cluster: what does not fit is refused before anything starts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto.base.errors import UserError
from stretto.runtime.runtime import Handle, Needs, Placement, Restarts, RoleState
from tests.runtime.roles import Worker
from tests.runtime.stages import persistently, until

ray = pytest.importorskip("ray")

NODE: dict[str, Any] = {
    "NodeID": "a",
    "Alive": True,
    "NodeManagerAddress": "10.0.0.7",
    "Resources": {"CPU": 8.0, "memory": 32e9},
    "Labels": {"ray.io/node-id": "a", "pool": "cpu"},
}
GPU_NODE = NODE | {"NodeManagerAddress": "10.0.0.8", "Resources": {"CPU": 4.0, "GPU": 2.0}, "Labels": {"pool": "gpu"}}


def check(monkeypatch: pytest.MonkeyPatch, needs: Needs, *nodes: dict[str, Any], version: str = "") -> None:
    from stretto.runtime import ray as module

    async def version_of(node: Any) -> str:
        return version or module._version()

    monkeypatch.setattr(ray, "nodes", lambda: list(nodes))
    monkeypatch.setattr(module, "_version_of", version_of)
    asyncio.run(module.RayRuntime(owns_cluster=False).check({"trainer": needs}))


def test_needs_that_one_node_meets_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for needs in (Needs(), Needs(gpus=0.5, labels={"pool": "gpu"}), Needs(cpus=8, memory_bytes=int(30e9))):
        check(monkeypatch, needs, NODE, GPU_NODE)


@pytest.mark.parametrize(
    ("needs", "wanted"),
    [
        (Needs(labels={"pool": "tpu"}), "the label pool=tpu"),
        (Needs(cpus=8, labels={"pool": "gpu"}), "8 CPUs and the label pool=gpu"),
        (Needs(gpus=4), "4 GPUs"),
        (Needs(memory_bytes=int(64e9)), "64 GB of memory"),
    ],
)
def test_needs_that_no_node_meets_are_refused_with_the_nodes(
    needs: Needs, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=f"^resources.trainer: no node has {wanted}; ") as caught:
        check(monkeypatch, needs, NODE, GPU_NODE, NODE | {"Alive": False, "Labels": needs.labels})
    assert "10.0.0.7 has 8 CPUs, 0 GPUs, 32.0 GB, labels: pool=cpu" in str(caught.value)
    assert "ray.io" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_node_with_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^--address: node 10.0.0.7 has stretto 0.0.1, this machine has stretto "):
        check(monkeypatch, Needs(), NODE, GPU_NODE, version="stretto 0.0.1")


def test_a_role_is_given_up_when_ray_says_that_its_actor_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls in flight fail in the same way when Ray starts the actor again, more than once when its drained node ends beside it."""
    from stretto.runtime import ray as module

    answers = [False, False, True]

    async def look(*_: Any) -> bool:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(module, "_BEAT_S", 0.0)
    monkeypatch.setattr(module, "_is_dead", lambda handle: answers.pop(0))
    monkeypatch.setattr(module.RayRuntime, "_look", look)
    role = module._RayRole(Handle("a", "subject", None), Restarts(1), work=None, needs=Needs())
    role.state = RoleState.ALIVE
    runtime = module.RayRuntime(owns_cluster=False)
    runtime._roles["a"] = role
    asyncio.run(runtime._watch(role))
    assert not answers and role.state is RoleState.DEAD


@pytest.mark.slow
def test_a_real_cluster_without_the_label_is_refused_at_once() -> None:
    from stretto.runtime.ray import RayRuntime

    async def run() -> None:
        async with await RayRuntime.open("local") as runtime:
            await runtime.check({"engines": Needs(cpus=1)})
            with pytest.raises(UserError, match=r"^resources.engines: no node has the label pool=gpu"):
                await runtime.check({"engines": Needs(labels={"pool": "gpu"})})

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("cpus", [1, 0])
def test_a_role_leaves_a_node_that_is_about_to_go(cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node stays for two minutes, so that its end is not why the role moves."""
    from ray.cluster_utils import Cluster

    from stretto.runtime.ray import RayRuntime

    async def run(address: str) -> None:
        async with await RayRuntime.open(address) as runtime:
            options: dict[str, Any] = {
                "placement": Placement.PROCESS,
                "needs": Needs(cpus=cpus, labels={"pool": "cpu"}),
                "restarts": 1,
            }
            handle = await runtime.spawn(Worker, name="subject", **options)
            role = runtime._roles[handle.id]
            home, pid = role.node_id, role.pid
            command = ["drain-node", "--address", address, "--node-id", home, "--deadline-remaining-seconds", "120"]
            reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot price"]
            program = str(Path(sys.executable).with_name("ray"))
            await asyncio.to_thread(subprocess.run, [program, *command, *reason], check=True, capture_output=True)
            await until(lambda: role.restarts == 1 and role.state is RoleState.ALIVE)
            assert role.node_id != home and role.pid != pid
            assert role.why == "its node is about to go" or not cpus
            assert (await persistently(runtime, handle, "where"))[0] == role.pid

    monkeypatch.setenv("RAY_worker_niceness", "0")  # Ray's own default leaves roles no time on a busy machine
    options: dict[str, Any] = {"object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **options})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, labels={"pool": "cpu"}, **options)
        asyncio.run(run(cluster.address))
    finally:
        cluster.shutdown()
