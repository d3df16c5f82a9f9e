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
GB, TB, TFLOPS = 1e9, 1e12, 1e12


@dataclass(frozen=True, slots=True)
class Efficiency:
    """A number, and the title of the entry in docs/log that measured it on this hardware. No title: the number is assumed."""

    value: float
    source: str = ""


H100_FP32 = "Second GPU run: numbers agree with the CPU, FP8 trains slower than fp32, bitwise resume open"
H100_BF16 = (
    "The kernels run on an H100 for the first time: training at 352 TFLOP/s, decoding at 53 to 89 percent of bandwidth"
)
H200_DECODE = "SmolLM2 on an H200: worlds and calls learnt, bitwise resume, decoding with CUDA graphs"
CPU_STEP = "Training speed against transformers (aim missed)"
CPU_DECODE = "Equality and speed benches after the rewrite, on the smaller demo network: one aim missed"

# An H100's step, not compiled, took 1.116 s in fp32 and 0.167 s in bf16 for 41.3 TFLOP, of which the optimiser's 95 GB at 3.35 TB/s are
# 0.028 s.
FP32_SHARE, BF16_SHARE = 0.567, 0.302
ASSUMED_SHARE: Mapping[Dtype, Efficiency] = {"float32": Efficiency(FP32_SHARE), "bfloat16": Efficiency(BF16_SHARE)}
H100_SHARE: Mapping[Dtype, Efficiency] = {
    "float32": Efficiency(FP32_SHARE, H100_FP32),
    "bfloat16": Efficiency(BF16_SHARE, H100_BF16),
}
# An H200's decoding step of 12 layers took 1.89 ms at batch 1, 2.81 ms at batch 64.
LAYER_S, SLOT_S = 158e-6, 1.2e-6

LINK_SHARE = 0.7
"""Share of a link's rate that collectives reach (assumed): no run of Stretto ever used NCCL or a network."""
LATENCY_S = 20e-6
"""Time of a collective for each doubling of its ranks, whatever its size (assumed)."""
DECODE_SHARE = 0.5
"""Share of the memory bandwidth at which an engine reads weights and caches (assumed for other hardware). On an H100 the engine reached
0.53 at a batch of 1 and 0.86 at 16, with OLMoE's shape (entry `H100_BF16`)."""
HANDOVER = 5 * GB
"""Bytes per second at which weights reach an engine (assumed)."""


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
    share: Mapping[Dtype, Efficiency]
    """Share of `flops` that the forward and backward passes of a training step reach."""
    layer_s: Efficiency = Efficiency(LAYER_S)
    """Time of one layer in a decoding step for launching kernels, in seconds."""
    slot_s: float = SLOT_S
    """Additional time of one layer in a decoding step for each sequence, in seconds."""
    network: float = 50 * GB
    """Bytes per second that one accelerator sends to other nodes; by default through its own network card of 400 Gb/s."""
    per_node: int = 8
    """Accelerators of a node."""
    reserved: float = 0.06
    """Share of the memory that context, libraries and fragmentation take (assumed)."""

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    @property
    def usable(self) -> float:
        """Bytes of the memory that a rank or an engine can fill."""
        return self.memory * (1 - self.reserved)

    def rate(self, dtype: Dtype) -> float:
        """FLOPs per second that the products of a network reach."""
        return self.flops[dtype] * self.share[dtype].value


def _tflops(fp32: float, bf16: float) -> Mapping[Dtype, float]:
    return {"float32": fp32 * TFLOPS, "bfloat16": bf16 * TFLOPS}


HARDWARE: Mapping[str, Hardware] = {
    each.name: each
    for each in (
        Hardware("A100", 80 * GB, _tflops(19.5, 312), 2.04 * TB, 300 * GB, ASSUMED_SHARE, network=25 * GB),
        Hardware("H100", 80 * GB, _tflops(67, 989), 3.35 * TB, 450 * GB, H100_SHARE),
        Hardware(
            "H200", 141 * GB, _tflops(67, 989), 4.8 * TB, 450 * GB, ASSUMED_SHARE, Efficiency(LAYER_S, H200_DECODE)
        ),
        Hardware("B200", 180 * GB, _tflops(75, 2250), 7.7 * TB, 900 * GB, ASSUMED_SHARE),
        Hardware("MI300X", 192 * GB, _tflops(163, 1307), 5.3 * TB, 448 * GB, ASSUMED_SHARE),
        Hardware("L40S", 48 * GB, _tflops(91.6, 362), 0.864 * TB, 32 * GB, ASSUMED_SHARE, network=25 * GB),
        Hardware(  # one core of a machine as docs/log/machines.md lists them
            name="cpu",
            memory=12 * GB,
            flops={"float32": 67e9, "bfloat16": 188e9},
            bandwidth=15.9 * GB,
            link=2 * GB,
            share={"float32": Efficiency(0.54, CPU_STEP), "bfloat16": Efficiency(0.2)},
            layer_s=Efficiency(23e-6, CPU_DECODE),
            slot_s=8e-6,
            network=1.25 * GB,
            per_node=2,
            reserved=0.03,
        ),
    )
}


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
    kinds = {name.lower(): each for name, each in HARDWARE.items()}
    if found[2].lower() not in kinds:
        close = nearest(found[2].upper(), HARDWARE)
        raise UserError(f"--gpus {text}: unknown hardware {found[2]!r}{close}; kinds: {known}")
    return Cluster(int(found[1]), kinds[found[2].lower()])
