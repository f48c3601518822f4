"""Read and write quantities with units: ``25Gbps``, ``130GB/s``, ``16GiB``, ``5us``.

b is a bit, B a byte; k, M, G, T are powers of 1000, and Ki, Mi, Gi, Ti of 1024. A number without a unit is in bytes,
bytes per second, or seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, DecimalException

from dapple_tf.errors import ClusterError
from dapple_tf.profiler.quote import quote
from dapple_tf.wording import format_count, suggest

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_LONGEST = 1000  # characters of a quantity; those that ``format_quantity`` writes have up to 350
_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_BYTE, _BIT = Decimal(1), Decimal("0.125")

BYTES: Mapping[str, Decimal] = {f"{prefix}B": factor * _BYTE for prefix, factor in _PREFIXES.items()}
BYTES_A_SECOND: Mapping[str, Decimal] = {
    f"{prefix}{unit}": factor * size
    for prefix, factor in _PREFIXES.items()
    for unit, size in (("B/s", _BYTE), ("bps", _BIT), ("b/s", _BIT), ("bit/s", _BIT))
}
SECONDS: Mapping[str, Decimal] = {
    "s": Decimal(1),
    "ms": Decimal("1e-3"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "ns": Decimal("1e-9"),
}


def parse_quantity(value: str | float, units: Mapping[str, Decimal]) -> float:
    """Return a quantity such as ``25Gbps`` in base units: bytes, bytes per second, or seconds.

    Raises ClusterError for text that is no number, or has a unit that is not among ``units``, which it lists.
    """
    text = str(value).strip()
    number = _NUMBER.match(text) if len(text) <= _LONGEST else None
    unit = "" if number is None else text[number.end() :].lstrip()
    if number is None or len(unit.split()) > 1:
        raise ClusterError(f"{quote(value)} is not a number with a unit such as 5{list(units)[-1]}")
    if unit and unit not in units:
        raise ClusterError(
            f"{quote(value)} has the unknown unit {unit!r}{suggest(unit, units)}; known are {', '.join(units)}"
        )
    try:
        return float(Decimal(number.group()) * units.get(unit, Decimal(1)))
    except DecimalException as error:
        raise ClusterError(f"{quote(value)} is too large or too small") from error


def format_quantity(value: float, units: Mapping[str, Decimal]) -> str:
    """Return ``value`` exactly, in the unit that makes it shortest: ``parse_quantity`` returns ``value`` again."""
    exact = Decimal(repr(float(value)))
    texts = [f"{(exact / size).normalize():f}{unit}" for unit, size in units.items()]
    return min((text for text in texts if parse_quantity(text, units) == value), key=len)


def format_samples(count: int) -> str:
    """Return ``1 sample``, ``3 samples``."""
    return format_count(count, "sample")


def format_devices(count: int) -> str:
    """Return ``1 device``, ``3 devices``."""
    return format_count(count, "device")


def format_seconds(seconds: float) -> str:
    """Return ``seconds`` with a unit that suits it, to four significant digits: ``12.3 ms``."""
    factor, unit = scale_time(seconds)
    return f"{seconds * factor:.4g} {unit}"


def format_seconds_fixed(seconds: float, *others: float) -> str:
    """Return ``seconds`` with its unit: to 1 ms from 1 s on, to 0.1 ms from 1 ms on, else to 0.1 µs: ``12.3 ms``.

    With a fixed number of decimals, times that are compared show their difference. The longest of ``others``, with
    which ``seconds`` are compared, chooses the unit if it is longer.
    """
    longest = max(seconds, *others) if others else seconds
    if longest >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.1f} ms" if longest >= 1e-3 or not longest else f"{seconds * 1e6:.1f} µs"


def format_bytes(count: float, digits: int = 3) -> str:
    """Return ``count`` bytes in a decimal unit that suits it, to ``digits`` significant digits: ``15.2 GB``."""
    size, unit = scale_bytes(count)
    return f"{count / size:.{digits}g} {unit}"


def format_megabytes(count: float) -> str:
    """Return bytes in millions, with two to three significant digits: ``0.02``, ``3.1``, ``412``."""
    value = count / 1e6
    if value == 0:
        return "0"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def format_difference(fraction: float) -> str:
    """Return the size of a relative difference: ``1.3%``, or ``less than 0.1%`` where it would be rounded to none."""
    return "less than 0.1%" if 0 < abs(fraction) < 5e-4 else f"{abs(fraction):.1%}"


def format_slower(ratio: float) -> str:
    """Return how much slower it is to take ``ratio`` times as long: ``1.3% slower`` or ``14.5 times as long``."""
    return f"{ratio:.1f} times as long" if ratio >= 2 else f"{format_difference(ratio - 1)} slower"


def scale_time(seconds: float) -> tuple[float, str]:
    """Return the unit in which ``seconds`` reads well: units per second, and the unit's name (s, ms or µs)."""
    if seconds >= 1 or seconds == 0:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def scale_bytes(count: float) -> tuple[float, str]:
    """Return the decimal unit in which ``count`` bytes read well: bytes per unit, and its name (B, kB, MB or GB)."""
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return size, name
    return 1.0, "B"
