"""The figures that a simulated step and a simulated window have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapple_tf.plans import Plan
from dapple_tf.simulator.memory import MemoryLimit, usable_bytes
from dapple_tf.timeline.stage_costs import StageCosts


@dataclass(frozen=True, eq=False)
class SimulatedFigures(ABC):
    """Figures of a step or window of ``plan``, executed under the cost model: the ``Simulation`` of a timeline.

    ``one_device_seconds``: seconds of one device running the whole batch. ``device_memory``: bytes of the device that
    has fewest. ``limits``: of each stage, where devices or their shares are unequal; else none.
    """

    plan: Plan
    execution: Any
    one_device_seconds: float
    device_memory: float
    limits: tuple[MemoryLimit, ...] = ()

    @property
    @abstractmethod
    def costs(self) -> tuple[StageCosts, ...]:
        """The costs of each stage."""

    @property
    @abstractmethod
    def step_seconds(self) -> float:
        """Seconds until the last event ends."""

    @property
    @abstractmethod
    def peak_memory_bytes(self) -> tuple[float, ...]:
        """The most bytes that one device of each stage holds."""

    @property
    def acr(self) -> float:
        """The activation communication ratio (DAPPLE, Table V)."""
        return activation_communication_ratio(self.costs)

    @property
    def speedup(self) -> float:
        """``one_device_seconds`` over ``step_seconds``; 1 where nothing takes any time."""
        return self.one_device_seconds / self.step_seconds if self.step_seconds else 1.0

    @property
    def fits(self) -> tuple[bool, ...]:
        """Whether each stage's peak is within the memory of its devices."""
        return tuple(need <= usable_bytes(memory) for need, memory in self.tightest_memory)

    @property
    def tightest_memory(self) -> tuple[tuple[float, float], ...]:
        """Of each stage the device that is first to run out of memory: the most bytes that it holds, and its memory."""
        if not self.limits:
            return tuple((peak, self.device_memory) for peak in self.peak_memory_bytes)
        pairs = zip(self.limits, self.peak_memory_bytes, strict=True)
        return tuple((limit.need(peak), limit.memory) for limit, peak in pairs)


def activation_communication_ratio(costs: Sequence[StageCosts]) -> float:
    """Return the ACR: mean seconds of a boundary's transfers, both directions, over a stage's mean seconds of compute.

    Of one micro-batch (DAPPLE, Table V). 0 for one stage; infinite where only transfers take time.
    """
    sent = [cost.send_forward_seconds + cost.send_backward_seconds for cost in costs[:-1]]
    computed = [cost.forward_seconds + cost.backward_seconds for cost in costs]
    if not any(sent):
        return 0.0
    return float(np.mean(sent) / np.mean(computed)) if any(computed) else float("inf")
