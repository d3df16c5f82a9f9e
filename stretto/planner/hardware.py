"""Hardware table, and the efficiencies that were measured on it. Every other efficiency is an assumption, and says so.

Rates are the vendors' figures for dense products (without sparsity), as their data sheets gave them in November 2026. An efficiency
is the share of such a rate that Stretto reached in an entry of the experiment log, which its source names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stretto.base.errors import UserError, nearest

Dtype = Literal["float32", "bfloat16"]

DATED = "November 2026"
"""Date of the rates in `HARDWARE`."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A number with its origin."""

    value: float
    source: str
    """Title of the entry in docs/log; empty: nobody measured it."""

    @property
    def is_measured(self) -> bool:
        return bool(self.source)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator and its links. Sizes in bytes, rates per second."""

    name: str
    memory: float
    flops: Mapping[Dtype, float]
    """Rate of matrix products."""
    bandwidth: float
    """Of the accelerator's own memory."""
    link: float
    """Bytes per second that one accelerator sends to others of its node."""
    network: float
    """Bytes per second that one accelerator sends to other nodes."""
    per_node: int
    """Accelerators of a node."""
    share: Mapping[Dtype, Measured]
    """Share of `flops` that the forward and backward passes of a training step reach."""
    layer_s: Measured
    """Time of one layer in a decoding step for launching kernels, in seconds."""
    slot_s: Measured
    """Additional time of one layer in a decoding step for each sequence, in seconds."""
    reserved: float = 0.06
    """Share of the memory that context, libraries and fragmentation take (assumed)."""


GB, TB, TFLOPS = 1e9, 1e12, 1e12
H100_STEP = "Second GPU run: numbers agree with the CPU, FP8 trains slower than fp32, bitwise resume open"
H200_DECODE = "SmolLM2 on an H200: worlds and calls learnt, bitwise resume, decoding with CUDA graphs"
CPU_STEP = "Training speed against transformers (aim missed)"
CPU_DECODE = "Equality and speed benches after the rewrite, on the smaller demo network: one aim missed"

# The H100's step took 1.116 s in fp32 and 0.227 s in bf16 for 41.3 TFLOP, of which the optimiser's 95 GB at 3.35 TB/s are 0.028 s.
_H100_SHARE: dict[Dtype, Measured] = {"float32": Measured(0.567, H100_STEP), "bfloat16": Measured(0.210, H100_STEP)}
# 12 layers: 1.89 ms a step at batch 1, 2.81 ms at batch 64
_H200_LAYER, _H200_SLOT = Measured(158e-6, H200_DECODE), Measured(1.2e-6, H200_DECODE)


def _unmeasured(known: Measured) -> Measured:
    return Measured(known.value, "")


def _gpu(
    name: str,
    memory_gb: float,
    tflops: tuple[float, float],
    bandwidth_tb: float,
    link_gb: float,
    share: Mapping[Dtype, Measured] | None = None,
    decode: tuple[Measured, Measured] | None = None,
    network_gb: float = 50.0,
) -> Hardware:
    """A data-centre GPU in nodes of eight, each GPU with its own network card of 400 Gb/s (unless ``network_gb`` says otherwise)."""
    fp32, bf16 = tflops
    unmeasured: dict[Dtype, Measured] = {
        "float32": _unmeasured(_H100_SHARE["float32"]),
        "bfloat16": _unmeasured(_H100_SHARE["bfloat16"]),
    }
    layer_s, slot_s = decode or (_unmeasured(_H200_LAYER), _unmeasured(_H200_SLOT))
    return Hardware(
        name=name,
        memory=memory_gb * GB,
        flops={"float32": fp32 * TFLOPS, "bfloat16": bf16 * TFLOPS},
        bandwidth=bandwidth_tb * TB,
        link=link_gb * GB,
        network=network_gb * GB,
        per_node=8,
        share=share or unmeasured,
        layer_s=layer_s,
        slot_s=slot_s,
    )


HARDWARE: Mapping[str, Hardware] = {
    each.name: each
    for each in (
        _gpu("A100", 80, (19.5, 312), 2.04, 300, network_gb=25),
        _gpu("H100", 80, (67, 989), 3.35, 450, share=_H100_SHARE),
        _gpu("H200", 141, (67, 989), 4.8, 450, decode=(_H200_LAYER, _H200_SLOT)),
        _gpu("B200", 180, (75, 2250), 7.7, 900),
        _gpu("MI300X", 192, (163, 1307), 5.3, 448),
        _gpu("L40S", 48, (91.6, 362), 0.864, 32, network_gb=25),
        Hardware(  # one core of a machine as docs/log/machines.md lists them
            name="cpu",
            memory=12 * GB,
            flops={"float32": 67e9, "bfloat16": 188e9},
            bandwidth=15.9 * GB,
            link=2 * GB,
            network=1.25 * GB,
            per_node=2,
            share={"float32": Measured(0.54, CPU_STEP), "bfloat16": Measured(0.2, "")},
            layer_s=Measured(23e-6, CPU_DECODE),
            slot_s=Measured(8e-6, ""),
            reserved=0.03,
        ),
    )
}

LINK_SHARE = Measured(0.7, "")
"""Share of a link's rate that collectives reach. No run of Stretto ever used NCCL or a network."""
LATENCY_S = Measured(20e-6, "")
"""Time of a collective for each doubling of its ranks, whatever its size."""
DECODE_SHARE = Measured(0.5, "")
"""Share of the memory bandwidth at which an engine reads weights and caches: vLLM's and SGLang's at batch 1 on an H100, as published."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """``num`` accelerators of one kind."""

    num: int
    hardware: Hardware

    def __str__(self) -> str:
        return f"{self.num}x{self.hardware.name}"


def parse_cluster(text: str) -> Cluster:
    """The cluster of ``64xH100``. Raises `UserError`: another form, or hardware that the table lacks."""
    known = ", ".join(HARDWARE)
    found = re.fullmatch(r"(\d+)\s*[x×*]\s*(\S+)", text.strip())
    if found is None or int(found[1]) < 1:
        raise UserError(f"--gpus {text}: give a number and a kind, for example 64xH100; kinds: {known}")
    by_name = {name.lower(): each for name, each in HARDWARE.items()}
    name = found[2].lower()
    if name not in by_name:
        close = nearest(found[2].upper(), HARDWARE)
        raise UserError(f"--gpus {text}: unknown hardware {found[2]!r}{close}; kinds: {known}")
    return Cluster(int(found[1]), by_name[name])
