"""Kernels of a training step by their share of the time, as torch's profiler sees them: bf16, plain and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.profiler import ProfilerActivity, profile

from bench.common.gpu_part import Case, Outcome, Setting, network, training_step, wait

SHOWN = 25
"""Number of kernels that are listed."""
NAME_CHARS = 70


def cases(setting: Setting) -> Iterator[Case]:
    def profiled(is_compiled: bool) -> Outcome:
        model = network(setting.config, setting.device)
        if is_compiled:
            for block in model.blocks:
                block.compile()
        return Outcome(shares(training_step(model, setting), setting))

    rows, length = setting.rows
    for kind in ("plain", "compiled"):
        yield Case(
            f"{setting.size}, {rows * length:,} tokens, bf16, {kind}", lambda kind=kind: profiled(kind != "plain")
        )


def shares(work: Callable[[], object], setting: Setting, num: int = 3) -> dict[str, float | str]:
    """Share of each kernel in the time of all kernels (of all operators on a CPU), in percent, and their sum in ms per call."""
    for _ in range(num):
        work()
    wait(setting.device)
    is_cuda = setting.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(num):
            work()
        wait(setting.device)
    times_us: dict[str, float] = {}
    for each in profiler.key_averages():
        spent_us = each.self_device_time_total if is_cuda else each.self_cpu_time_total
        times_us[each.key[:NAME_CHARS]] = times_us.get(each.key[:NAME_CHARS], 0.0) + spent_us
    total_us = sum(times_us.values())
    highest = sorted(times_us, key=lambda name: -times_us[name])[:SHOWN]
    listed: dict[str, float | str] = {f"% {name}": round(100 * times_us[name] / total_us, 2) for name in highest}
    return {"ms per step": total_us / num / 1e3} | listed
