"""Quantities with units, as people write them: ``25Gbps``, ``130GB/s``, ``16GiB``, ``5us``.

A small b is a bit, a capital B a byte; k, M, G, T are powers of 1000, Ki, Mi, Gi, Ti of 1024. A figure without a
unit is bytes, bytes a second, or seconds.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from decimal import Decimal, DecimalException

from profiler.errors import ClusterError

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*")
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
    """The figure in base units (bytes, bytes a second, seconds) that ``25Gbps`` stands for.

    Raises ClusterError for what is no figure, or has a unit that is not among ``units``, which it lists.
    """
    match = _QUANTITY.fullmatch(str(value))
    if not match:
        raise ClusterError(f"{value!r} is not a figure with a unit such as 5{list(units)[-1]}")
    figure, unit = match.groups()
    if unit and unit not in units:
        near = difflib.get_close_matches(unit, units, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ClusterError(f"{value!r} has the unknown unit {unit!r}{hint}; known are {', '.join(units)}")
    try:
        return float(Decimal(figure) * units.get(unit, Decimal(1)))
    except DecimalException as error:
        raise ClusterError(f"{value!r} is too large or too small a figure") from error


def format_quantity(value: float, units: Mapping[str, Decimal]) -> str:
    """``value`` in the unit in which it is shortest, exactly: ``parse_quantity`` gives ``value`` again."""
    exact = Decimal(repr(float(value)))
    texts = [f"{(exact / size).normalize():f}{unit}" for unit, size in units.items()]
    return min((text for text in texts if parse_quantity(text, units) == value), key=len)
