"""The interface of a simulated step that a timeline reads (implemented by ``simulator.simulated_step``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.plans import Plan
from dapple_tf.timeline.events import Place, StepEvents
from dapple_tf.timeline.stage_costs import StageCosts


class Simulation(Protocol):
    """A simulated step. Its figures need no events, which are created only when ``events_at`` is called."""

    @property
    def plan(self) -> Plan:
        """The plan that was simulated."""

    @property
    def costs(self) -> tuple[StageCosts, ...]:
        """Seconds and bytes of each stage, for the largest micro-batch."""

    @property
    def step_seconds(self) -> float:
        """Seconds until the last event ends."""

    @property
    def speedup(self) -> float:
        """Seconds of one device running the whole batch in the same micro-batches, over ``step_seconds``."""

    @property
    def acr(self) -> float:
        """The activation communication ratio (DAPPLE, Table V)."""

    @property
    def stage_utilisation(self) -> tuple[float, ...]:
        """The fraction of the step in which each stage computes."""

    @property
    def tightest_memory(self) -> tuple[tuple[float, float], ...]:
        """For each stage, the most bytes, and the memory, of the device that would run out of memory first."""

    @property
    def peak_memory_bytes(self) -> tuple[float, ...]:
        """The most bytes that a device of each stage holds; it is the device with the most rows."""

    @property
    def fits(self) -> tuple[bool, ...]:
        """Whether each stage's peak is within the device's memory."""

    def memory(self, stage: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return times (seconds), and the bytes that one device of ``stage`` holds from each on."""

    def order(self, stage: int, replica: int = 0) -> tuple[Action, ...]:
        """Return the actions of a replica of ``stage`` in the order in which they run."""

    def events_at(self, places: Sequence[Place]) -> StepEvents:
        """Return all events; each event of a stage once for each of its ``places`` (stage, replica and device)."""
