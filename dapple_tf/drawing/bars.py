"""The contents of a comparison's picture: for each planner a bar of the step's parts, and one of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from dapple_tf.drawing.chart import COLOURS

PART_COLOURS: Mapping[str, str] = MappingProxyType(
    {"compute": COLOURS["forward"], "allreduce": COLOURS["allreduce"], "wait": "#b9b9c3"}
)
PART_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "compute": "computing on the busiest device",
        "allreduce": "AllReduce after the last backward",
        "wait": "waiting for other stages and transfers",
    }
)


@dataclass(frozen=True)
class Bar:
    """A row: the seconds of each part (keys of ``PART_LABELS``), and the ``memory`` bytes of the fullest device.

    ``label``: what is written behind the bar. ``note``: a line about it. Without ``parts`` there is no bar: the note
    says why.
    """

    name: str
    label: str
    note: str
    parts: Mapping[str, float] = field(default_factory=dict)
    memory: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of the parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class BarChart:
    """A picture of ``bars``, the fastest first. ``limit``: bytes of a device."""

    title: str
    bars: tuple[Bar, ...]
    limit: float
