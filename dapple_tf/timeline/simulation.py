"""A simulated step or window, as a timeline reads it; see ``simulator.simulated_step`` and ``simulated_window``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.graph_passes.schedules.window import Window
from dapple_tf.plans import Plan
from dapple_tf.timeline.events import Place, StepEvents
from dapple_tf.timeline.stage_costs import MemoryLimit, StageCosts, activation_communication_ratio, usable_bytes


@dataclass(frozen=True, eq=False)
class Simulation(ABC):
    """A step or window of ``plan``, executed under the cost model.

    Its figures need no events, which are created only when ``events_at`` is called. ``one_device_seconds``: seconds of
    one device running the whole batch in the same micro-batches. ``device_memory``: bytes of the device that has
    fewest. ``limits``: a limit for each stage, where devices or their shares of rows are unequal; otherwise empty.
    """

    plan: Plan
    execution: Any
    one_device_seconds: float
    device_memory: float
    limits: tuple[MemoryLimit, ...] = ()

    @property
    def window(self) -> Window | None:
        """The asynchronous window; None for a synchronous step."""
        return None

    @property
    @abstractmethod
    def costs(self) -> tuple[StageCosts, ...]:
        """Seconds and bytes of each stage, for the largest micro-batch."""

    @property
    @abstractmethod
    def step_seconds(self) -> float:
        """Seconds until the last event ends."""

    @property
    @abstractmethod
    def stage_utilisation(self) -> tuple[float, ...]:
        """The fraction of the step in which each stage computes."""

    @property
    @abstractmethod
    def peak_memory_bytes(self) -> tuple[float, ...]:
        """The most bytes that a device of each stage holds; it is the device with the most rows."""

    @abstractmethod
    def memory(self, stage: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return times (seconds), and the bytes that one device of ``stage`` holds from each on."""

    @abstractmethod
    def order(self, stage: int, replica: int = 0) -> tuple[Action, ...]:
        """Return the actions of a replica of ``stage`` in the order in which they run."""

    @abstractmethod
    def events_at(self, places: Sequence[Place]) -> StepEvents:
        """Return all events; each event of a stage once for each of its ``places`` (stage, replica and device)."""

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
        """For each stage the most bytes that a device holds, and its memory: the first device to run out of memory."""
        if not self.limits:
            return tuple((peak, self.device_memory) for peak in self.peak_memory_bytes)
        pairs = zip(self.limits, self.peak_memory_bytes, strict=True)
        return tuple((limit.need(peak), limit.memory) for limit, peak in pairs)
