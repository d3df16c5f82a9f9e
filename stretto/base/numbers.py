"""Numbers as text: one notation for the console, the reports and their figures."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


def rounded(value: float, digits: int = 3) -> str:
    """A number with ``digits`` significant digits and separated thousands: ``2.30``, ``12,346``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # of the rounded number: 9.996 becomes 10.0
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def trimmed(text: str) -> str:
    """``text`` without trailing zeros of decimals, for ticks of an axis: ``1.50M`` becomes ``1.5M``."""
    return re.sub(r"\.0+(?!\d)|(\.\d*[1-9])0+(?!\d)", r"\1", text)


def short(value: float, digits: int = 3) -> str:
    """A short form of any number: ``2.3``, ``12,346``, ``3.1e−7`` (from 1e6 up and below 1e-3), ``0`` for exactly 0."""
    text = trimmed(rounded(value, digits))
    if value != 0 and math.isfinite(value) and not 1e-3 <= abs(value) < 1e6:
        mantissa, _, power = f"{value:.1e}".partition("e")
        text = f"{trimmed(mantissa)}e{int(power)}"
    return text.replace("-", "−")


def scale_of(value: float) -> tuple[float, str]:
    """Power of 1000 that scales ``value`` to below 999.5, and its SI prefix."""
    power = 0
    while abs(value) / 1000.0**power >= 999.5 and power < len(_PREFIXES) - 1:
        power += 1
    return 1000.0**power, _PREFIXES[power]


def si(value: float, unit: str = "") -> str:
    """Three significant digits with an SI prefix: ``12.3M``; with a unit, ``4.56 GFLOPs``."""
    factor, prefix = scale_of(value)
    return f"{_scaled(value, factor)}{' ' if unit else ''}{prefix}{unit}"


def si_alike(values: Sequence[float], unit: str = "") -> list[str]:
    """The numbers of a column, all with the SI prefix of the smallest above 0: ``2,040 GFLOPs``, ``405 GFLOPs``, ``0``.

    Each has its own prefix if the largest would have more than five digits before the point.
    """
    found = [abs(value) for value in values if value]
    factor, prefix = scale_of(min(found, default=0.0))
    if max(found, default=0.0) >= 99_999.5 * factor:
        return [si(value, unit) if value else "0" for value in values]
    suffix = f"{' ' if unit else ''}{prefix}{unit}"
    return [f"{_scaled(value, factor)}{suffix}" if value else "0" for value in values]


def _scaled(value: float, factor: float) -> str:
    """``value / factor`` in at least three significant digits; a whole number without a prefix in all its digits."""
    return f"{value:,.0f}" if factor == 1 and value == int(value) else rounded(value / factor)


def params(value: float) -> str:
    """A number of parameters: ``3.41M``, ``1.20B``."""
    return si(value).replace("G", "B")


def percent(share: float) -> str:
    """A share of 1 in percent: ``34 %``, with one decimal below 10 %."""
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 9.95 or value == 0 else f"{value:.1f} %"


def loss(nats: float) -> str:
    """A loss in nats, with three decimals and a typographic minus; one that rounds to zero has no sign."""
    return f"{nats:z.3f}".replace("-", "−")


def difference(nats: float) -> str:
    """A difference of losses, signed, with a typographic minus: ``+0.012``, ``−0.003``."""
    text = f"{nats:+.3f}"
    return text.replace("-", "−") if float(text) else "±0.000"


def size_in_bytes(value: float) -> str:
    """A number of bytes in binary units: ``768 B``, ``1.5 KiB``."""
    power = 0
    while value >= 999.5 and power < 4:  # as in `scale_of`
        value, power = value / 1024, power + 1
    return f"{trimmed(rounded(value))} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def duration(seconds: float) -> str:
    """A duration: ``3.20 ms``, ``8.2 s``, ``12 min 05 s``, ``3 h 20 min``."""
    if 0 < seconds < 0.9995:  # the number of milliseconds rounds to less than 1,000
        return f"{rounded(1e3 * seconds)} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def durations_alike(values: Sequence[float]) -> list[str]:
    """Durations of a column (seconds), all in the form of the longest: ``2 min 05 s``, ``0 min 05 s``; below a minute ``24.4 s``."""
    longest = max(values, default=0.0)
    if longest >= 3599.5:
        return [f"{round(value) // 3600:,} h {round(value) // 60 % 60:02d} min" for value in values]
    if longest >= 59.95:
        return [f"{round(value) // 60} min {round(value) % 60:02d} s" for value in values]
    return [f"{value:.1f} s" for value in values] if longest >= 0.9995 else [duration(value) for value in values]


def counted(number: int, noun: str) -> str:
    """A number and its noun: ``1 size``, ``3 sizes``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(items: Sequence[str]) -> str:
    """An enumeration: ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)
