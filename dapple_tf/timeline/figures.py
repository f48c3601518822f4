"""The figures of one training step, recorded or simulated: speed, idle time and order, computed from its events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dapple_tf.drawing.plan import PlanDrawing
from dapple_tf.errors import NotSimulatedError
from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.graph_passes.schedules.window import Window
from dapple_tf.plans import Plan
from dapple_tf.profiler.units import format_seconds
from dapple_tf.timeline.critical_path import Part, critical_stage, find_critical_path
from dapple_tf.timeline.events import Event, MemoryCurve, OpRun, Place, StageEvent, StepEvents, Transfer
from dapple_tf.timeline.simulation import Simulation
from dapple_tf.timeline.stage_costs import StageCosts, measure_stage_costs


@dataclass(frozen=True)
class StageSummary:
    """Figures of one stage. Seconds are for one micro-batch: from the cost model, or medians of a recorded step.

    If micro-batches have different sizes, the cost model's seconds are for the largest.

    ``devices``: their names. ``utilisation``: the fraction of the step in which they compute. ``backward_seconds``: the
    whole backward; ``weights_seconds``: its weight gradients, if they are actions of their own (W), else None.
    ``allreduce_seconds``: the AllReduce of the stage's gradients. ``order``: the actions in the order in which they
    ran; ``other_replicas``: the same for replicas 1, 2 ..., if replicas take minibatches in turn.
    ``peak_memory_bytes``: on one device; None for a recorded step (see ``step.report``).
    """

    stage: int
    devices: tuple[str, ...]
    utilisation: float
    forward_seconds: float
    backward_seconds: float
    weights_seconds: float | None
    allreduce_seconds: float
    order: tuple[Action, ...]
    peak_memory_bytes: float | None = None
    other_replicas: tuple[tuple[Action, ...], ...] = ()

    @property
    def actions(self) -> str:
        """The actions as text: ``0F0 0F1 0B0 ...``."""
        return " ".join(map(str, self.order))

    def to_json(self) -> dict[str, Any]:
        """Return the stage's entry in the JSON of a timeline."""
        return {
            "forward_seconds": self.forward_seconds,
            "backward_seconds": self.backward_seconds,
            **({} if self.weights_seconds is None else {"weights_seconds": self.weights_seconds}),
            "allreduce_seconds": self.allreduce_seconds,
            "actions": self.actions,
            **({"other_replicas": [" ".join(map(str, o)) for o in self.other_replicas]} if self.other_replicas else {}),
        }


@dataclass(frozen=True)
class EarlierStep:
    """A step that was recorded before another one, and the seconds between the first actions of the two."""

    seconds: float
    timeline: StepFigures


class StepFigures:
    """The figures of one training step, or asynchronous window, that follow from its events.

    All times are seconds since the start of the step's first action. This is the base class of ``Timeline``, which adds
    text and files; functions that describe or draw a step take it. ``title``: the model and the schedule. ``note``: why
    the times of a recorded step are distorted, or how the order of a simulated step was found, or "". ``together`` and
    ``window``: see ``StepEvents``. ``earlier``: the steps that were recorded before this one, the first one first.
    ``memory_curves``: the memory that was measured. ``ops``: those that ran inside of the actions, if they were
    recorded. Traces show these three.
    """

    simulation: Simulation | None = None
    """The simulation of a ``SimulatedTimeline``; None for a recorded step."""

    def __init__(
        self,
        events: Iterable[Event] = (),
        transfers: Iterable[Transfer] = (),
        stage_events: Iterable[StageEvent] = (),
        *,
        title: str = "",
        note: str = "",
        together: Iterable[Action] = (),
        window: Window | None = None,
        earlier: Iterable[EarlierStep] = (),
        memory_curves: Iterable[MemoryCurve] = (),
        ops: Iterable[OpRun] = (),
    ) -> None:
        self.title = title
        self.note = note
        self.earlier = tuple(earlier)
        self.memory_curves = tuple(memory_curves)
        self.ops = tuple(ops)
        self._recorded = StepEvents(tuple(events), tuple(transfers), tuple(stage_events), frozenset(together), window)

    @property
    def plan_drawing(self) -> PlanDrawing | None:
        """The drawing of the plan of a ``SimulatedTimeline``; None for a recorded step."""
        return None

    @cached_property
    def step(self) -> StepEvents:
        """All events of the step."""
        return self._recorded

    @property
    def events(self) -> tuple[Event, ...]:
        """The runs of all actions on all replicas, by start."""
        return self.step.events

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The transfers between stages, by start."""
        return self.step.transfers

    @property
    def stage_events(self) -> tuple[StageEvent, ...]:
        """The AllReduces and weight updates, by start."""
        return self.step.stage_events

    @property
    def _figures(self) -> StepEvents | Simulation:
        """The source of the step's figures: the simulation, if there is one, else the recorded events."""
        return self.step if self.simulation is None else self.simulation

    @cached_property
    def window(self) -> Window | None:
        """The asynchronous window; None for a synchronous step."""
        return self._figures.window

    @property
    def runs_whole_minibatches(self) -> bool:
        """Whether replicas take whole minibatches of a window in turn."""
        return self.window is not None and self.window.in_turn

    @cached_property
    def phases(self) -> WindowPhases | None:
        """The start-up, steady state and drain of an asynchronous window; None for a synchronous step."""
        return None if self.window is None else find_phases(self.step, self.window)

    # --- figures of the step

    @property
    def step_seconds(self) -> float:
        """Seconds from the start of the first action to the end of the last event."""
        return self._figures.step_seconds

    @property
    def seconds(self) -> float:
        """The same as ``step_seconds``."""
        return self.step_seconds

    @property
    def bubble(self) -> float:
        """The idle fraction of device time: 1 less the mean fraction of the step in which a device runs actions."""
        utilisation = self.step.device_utilisation.values()
        return 1 - sum(utilisation) / len(utilisation)

    @cached_property
    def stage_utilisation(self) -> tuple[float, ...]:
        """The fraction of the step in which each stage's devices compute; transfers and AllReduce do not count."""
        return self._figures.stage_utilisation

    @property
    def utilisation(self) -> tuple[float, ...]:
        """The same as ``stage_utilisation``."""
        return self.stage_utilisation

    @cached_property
    def device_utilisation(self) -> Mapping[str, float]:
        """The fraction of the step in which each device runs an action, by the device's name."""
        return self.step.device_utilisation

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Stage, replica and device of everything that runs actions, in that order."""
        return self.step.places

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The devices that run actions, in order of their first action."""
        return self.step.devices

    @cached_property
    def stages(self) -> tuple[StageSummary, ...]:
        """The figures of each stage."""
        return tuple(self._summarise(stage) for stage in range(len(self.costs)))

    def _summarise(self, stage: int) -> StageSummary:
        costs, order = self.costs[stage], self.order(stage)
        in_turn = self.runs_whole_minibatches  # else the replicas are alike
        others = [replica for index, replica, _ in self.places if in_turn and index == stage and replica > 0]
        return StageSummary(
            stage=stage,
            devices=tuple(device for index, _, device in self.places if index == stage),
            utilisation=self.stage_utilisation[stage],
            forward_seconds=costs.forward_seconds,
            backward_seconds=costs.backward_seconds,
            weights_seconds=costs.weights_seconds if any(action.kind == "W" for action in order) else None,
            allreduce_seconds=costs.allreduce_seconds,
            order=order,
            peak_memory_bytes=None if self.simulation is None else self.simulation.peak_memory_bytes[stage],
            other_replicas=tuple(self.order(stage, replica) for replica in others),
        )

    def order(self, stage: int, replica: int = 0) -> tuple[Action, ...]:
        """Return the actions of one replica of ``stage`` in the order in which they ran."""
        return self._figures.order(stage, replica)

    def actions(self, stage: int, replica: int = 0) -> str:
        """Return the actions of a replica of ``stage`` in the order in which they ran, as text: ``0F0 0F1 0B0 ...``."""
        return " ".join(map(str, self.order(stage, replica)))

    @cached_property
    def costs(self) -> tuple[StageCosts, ...]:
        """The costs of each stage: from the cost model, or medians of the recorded step (without bytes)."""
        if self.simulation is not None:
            return self.simulation.costs
        return tuple(measure_stage_costs(self.step, stage) for stage in range(self.step.stages))

    @cached_property
    def critical_path(self) -> tuple[Part, ...]:
        """The parts of the critical path from the start to the end of the step; see ``find_critical_path``."""
        return find_critical_path(self.step)

    @property
    def critical_stage(self) -> int:
        """The stage whose compute fills most of the critical path."""
        return critical_stage(self.critical_path)

    # --- figures of a simulated step

    @property
    def plan(self) -> Plan:
        """The plan that was simulated. This and the properties below raise NotSimulatedError for a recorded step."""
        return self._simulated("plan").plan

    @property
    def speedup(self) -> float:
        """Seconds of one device running the whole batch in the same micro-batches, divided by ``step_seconds``."""
        return self._simulated("speedup").speedup

    @property
    def acr(self) -> float:
        """The activation communication ratio: mean seconds of a boundary's transfers over a stage's mean compute."""
        return self._simulated("acr").acr

    @property
    def peak_memory_bytes(self) -> tuple[float, ...]:
        """The most bytes that one device of each stage holds."""
        return self._simulated("peak_memory_bytes").peak_memory_bytes

    @property
    def fits(self) -> tuple[bool, ...]:
        """Whether each stage's peak is within the device's memory."""
        return self._simulated("fits").fits

    def memory(self, stage: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return times (seconds), and the bytes that one device of ``stage`` holds from each on."""
        return self._simulated("memory").memory(stage)

    def _simulated(self, name: str) -> Simulation:
        if self.simulation is None:
            raise NotSimulatedError(
                f"only the timeline of a simulated step has {name!r}; this step was recorded: see step.plan and "
                "step.report"
            )
        return self.simulation

    @property
    def summary(self) -> str:
        """Step time, bubble and, for a simulated step, speed-up in one line."""
        text = f"{format_seconds(self.step_seconds)}, bubble {self.bubble:.1%}"
        if self.phases is not None:
            text += f", {format_seconds(self.phases.minibatch_seconds)} a minibatch"
        return text


# --- Compute the start-up, the steady state and the drain of an asynchronous window from the times of its events


@dataclass(frozen=True)
class WindowPhases:
    """Seconds of a window.

    ``startup_seconds``: until the first backward of the last stage ends. ``minibatch_seconds``: for each minibatch in
    the steady state, see ``find_phases``. ``drain_seconds``: from the end of the last stage's last backward to the end
    of the last event.
    """

    startup_seconds: float
    minibatch_seconds: float
    drain_seconds: float

    def __str__(self) -> str:
        return (
            f"start-up {format_seconds(self.startup_seconds)} (until the last stage's first backward ends), then "
            f"{format_seconds(self.minibatch_seconds)} a minibatch, drain {format_seconds(self.drain_seconds)}"
        )


def find_phases(step: StepEvents, window: Window) -> WindowPhases:
    """Return the phases of a ``window``; ``step``: its events.

    A minibatch is done when its last backward on the last stage ends. In the steady state the seconds of a minibatch
    are the mean time between the ends of the last minibatches. As many minibatches count as form whole rounds, in which
    all replicas have had their turns. The minibatches that the first stage had in flight at the beginning do not count,
    since their forwards came faster; they count only if no round is left without them. In a window of one round the
    result is the whole window's seconds over its minibatches.
    """
    last = [e for e in step.events if (e.action.stage, e.action.kind) == (window.stages - 1, "B")]
    done = [0.0] * window.minibatches
    for event in last:
        minibatch = event.action.micro_batch // window.micro_batches
        done[minibatch] = max(done[minibatch], event.end)
    done.sort()
    first, seconds = min(event.end for event in last), step.step_seconds
    return WindowPhases(first, _steady_seconds(window, done, seconds), seconds - done[-1])


def _steady_seconds(window: Window, done: list[float], seconds: float) -> float:
    turns = math.lcm(*window.turns)
    in_flight = window.warm_up[0] * window.turns[0]
    ahead = math.ceil(in_flight / window.micro_batches)
    last = window.minibatches - 1
    rounds = max(0, last - ahead) // turns or last // turns
    if rounds < 1:
        return seconds / window.minibatches
    return (done[last] - done[last - rounds * turns]) / (rounds * turns)
