"""Numbers as people read them: one notation for the console, the page and the pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


def rounded(value: float, digits: int = 3) -> str:
    """``digits`` significant digits, thousands with separators: ``2.30``, ``12,346``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    # of the rounded number: 9.996 has two decimals no longer
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def trimmed(text: str) -> str:
    """Without the zeros that only show precision: for ticks, ``1.50M`` becomes ``1.5M``."""
    return re.sub(r"\.0+(?!\d)|(\.\d*[1-9])0+(?!\d)", r"\1", text)


def short(value: float, digits: int = 3) -> str:
    """Any number, as briefly as it can be read: ``2.3``, ``12,346``, and ``3.1e−7`` beyond five powers of ten; ``0`` is exact."""
    text = trimmed(rounded(value, digits))
    if value != 0 and math.isfinite(value) and not 1e-3 <= abs(value) < 1e6:
        mantissa, _, power = f"{value:.1e}".partition("e")
        text = f"{trimmed(mantissa)}e{int(power)}"
    return text.replace("-", "−")


def scale_of(value: float) -> tuple[float, str]:
    """Power of a thousand that brings ``value`` to 1..999.5, and its SI prefix."""
    power = 0
    while abs(value) / 1000.0**power >= 999.5 and power < len(_PREFIXES) - 1:
        power += 1
    return 1000.0**power, _PREFIXES[power]


def si(value: float, unit: str = "") -> str:
    """Three significant digits with an SI prefix: ``12.3M``; with a unit, ``4.56 GFLOPs``."""
    factor, prefix = scale_of(value)
    digits = f"{value:g}" if factor == 1 and value == int(value) else rounded(value / factor)
    return f"{digits}{' ' if unit else ''}{prefix}{unit}"


def si_alike(values: Sequence[float], unit: str = "") -> list[str]:
    """Each of ``values`` with the prefix of the largest, as the numbers of one column: ``2.04 TFLOPs``, ``0.405 TFLOPs``, ``0``.

    One that would begin with three zeros behind its point keeps its own prefix.
    """
    factor, prefix = scale_of(max(map(abs, values), default=0.0))
    suffix = f"{' ' if unit else ''}{prefix}{unit}"
    is_near = [abs(value) >= 1e-3 * factor for value in values]
    return [
        f"{rounded(value / factor)}{suffix}" if near else si(value, unit) if value else "0"
        for value, near in zip(values, is_near, strict=True)
    ]


def params(value: float) -> str:
    """A number of parameters: ``3.41M``, ``1.20B``."""
    return si(value).replace("G", "B")


def percent(share: float) -> str:
    """``34 %``, and one decimal below ten."""
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 9.95 or value == 0 else f"{value:.1f} %"


def loss(nats: float) -> str:
    return f"{nats:.3f}"


def difference(nats: float) -> str:
    """Signed, with a real minus sign: ``+0.012``, ``−0.003``."""
    text = f"{nats:+.3f}"
    return text.replace("-", "−") if float(text) else "±0.000"


def size_in_bytes(value: float) -> str:
    """Binary units: ``768 B``, ``1.5 KiB``."""
    power = 0
    while value >= 1000 and power < 4:
        value, power = value / 1024, power + 1
    return f"{trimmed(rounded(value))} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def duration(seconds: float) -> str:
    """``3.20 ms``, ``8.2 s``, ``12 min 05 s``, ``3 h 20 min``."""
    if 0 < seconds < 1:
        return f"{rounded(1e3 * seconds)} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def durations_alike(values: Sequence[float]) -> list[str]:
    """Each of ``values``, in seconds, in the form of the longest: ``2 min 05 s``, ``0 min 05 s``; below a minute ``24.4 s``."""
    longest = max(values, default=0.0)
    if longest >= 3600:
        return [f"{round(value) // 3600:,} h {round(value) // 60 % 60:02d} min" for value in values]
    if longest >= 59.95:
        return [f"{round(value) // 60} min {round(value) % 60:02d} s" for value in values]
    return [f"{value:.1f} s" for value in values] if longest >= 1 else [duration(value) for value in values]


def counted(number: int, noun: str) -> str:
    """``1 size``, ``3 sizes``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(items: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)
