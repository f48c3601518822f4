"""The timeline of one training step, recorded or simulated."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dapple_tf.drawing.plan import PlanDrawing
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.profile import Profile
from dapple_tf.profiler.units import format_seconds
from dapple_tf.timeline.describe import describe_path, describe_stages, timeline_json
from dapple_tf.timeline.events import MemoryCurve, Place, StepEvents
from dapple_tf.timeline.figures import EarlierStep, StepFigures
from dapple_tf.timeline.picture import save_recording
from dapple_tf.timeline.plan_drawing import describe_plan_drawing
from dapple_tf.timeline.recording import BY_PROFILE, Prediction, Recording
from dapple_tf.timeline.simulation import Simulation


class Timeline(StepFigures):
    """One training step, or asynchronous window: when each action, transfer, AllReduce and weight update ran.

    ``dapple.simulate`` returns the timeline of a step predicted under the cost model, ``step.timeline`` returns the one
    of the last recorded step. ``str`` describes it in a few lines. Two timelines are equal if their events are equal.
    See ``StepFigures`` for the arguments and the figures.
    """

    @staticmethod
    def of_step(step: StepEvents, title: str = "") -> Timeline:
        """Return the timeline of these events."""
        return Timeline(
            step.events, step.transfers, step.stage_events, title=title, together=step.together, window=step.window
        )

    def with_earlier(self, count: int) -> Timeline:
        """Return the timeline with at most ``count`` of the steps that were recorded before it."""
        found = copy.copy(self)
        found.earlier = self.earlier[max(0, len(self.earlier) - count) :]
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timeline) and self.step == other.step

    def __hash__(self) -> int:
        return hash(self.step)

    def __str__(self) -> str:
        return describe_path(self)

    def __repr__(self) -> str:
        return f"<recorded timeline {self.title!r}: {self.summary}>"

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values; seconds, bytes, and fractions of the step."""
        return timeline_json(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save a picture (.png), a web page (.html), or a trace for Perfetto and ``dapple timeline`` (.json).

        A trace also has the steps that were recorded before this one, and the measured memory. An existing file is
        replaced; if saving fails, it does not change. Raises OutputError for another suffix or a path that cannot be
        written.
        """
        save_recording(self._as_recording(), path)

    def _as_recording(self) -> Recording:
        return Recording(self.title, measured=self)


@dataclass(frozen=True)
class PhasesTimeline:
    """The timelines of the ``phases`` of one training step. Each begins before the one before has ended.

    ``starts``: for each phase the seconds from the first action of the first phase to its own. ``simulated_seconds``:
    the seconds of the step, simulated with the measured times of all actions; None where it cannot be simulated.
    """

    phases: tuple[Timeline, ...]
    starts: tuple[float, ...]
    simulated_seconds: float | None = None

    @property
    def step_seconds(self) -> float:
        """Seconds from the start of the first phase's first action to the end of the last event of all."""
        return max(start + phase.step_seconds for start, phase in zip(self.starts, self.phases, strict=True))

    @property
    def overlap_seconds(self) -> float:
        """Seconds by which the step is shorter than if each phase began when the one before has ended."""
        return sum(phase.step_seconds for phase in self.phases) - self.step_seconds

    @property
    def bubble(self) -> float:
        """The idle fraction of device time, over the whole step."""
        busy: dict[str, float] = {}
        for phase in self.phases:
            for device, share in phase.device_utilisation.items():
                busy[device] = busy.get(device, 0.0) + share * phase.step_seconds
        return 1 - sum(busy.values()) / (len(busy) * self.step_seconds)

    @property
    def summary(self) -> str:
        """The seconds of the step and the bubble in one line."""
        seconds = format_seconds(self.step_seconds)
        words = [f"{len(self.phases)} phases", seconds, f"bubble {self.bubble:.1%}"]
        if self.simulated_seconds is not None:
            words.append(f"simulated {format_seconds(self.simulated_seconds)}")
        return ", ".join(words)

    def __str__(self) -> str:
        lines = [self.summary]
        for number, (start, phase) in enumerate(zip(self.starts, self.phases, strict=True), 1):
            lines.append(f"phase {number}, from {format_seconds(start)}: {phase}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values; seconds, bytes, and fractions of the step."""
        phases = [{"start": s, **phase.to_json()} for s, phase in zip(self.starts, self.phases, strict=True)]
        simulated = {} if self.simulated_seconds is None else {"simulated_seconds": self.simulated_seconds}
        return {"step_seconds": self.step_seconds, "bubble": self.bubble, **simulated, "phases": phases}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save a picture (.png), a web page (.html), or a trace for Perfetto (.json), with all phases.

        Raises OutputError as ``Timeline.save`` does.
        """
        last = copy.copy(self.phases[-1])
        pairs = zip(self.starts, self.phases[:-1], strict=False)
        last.earlier = tuple(EarlierStep(self.starts[-1] - start, phase.with_earlier(0)) for start, phase in pairs)
        last.memory_curves = self._memory_curves()
        title = f"{last.title} · {self.summary}"
        save_recording(Recording(title, measured=last), path, with_earlier=True)

    def _memory_curves(self) -> tuple[MemoryCurve, ...]:
        """Return the measured memory of the step, with seconds since the last phase's first action.

        Each phase was measured by itself: while several run, the largest counts, as in the report.
        """
        samples: dict[str, list[tuple[float, int, float]]] = {}
        for number, (start, phase) in enumerate(zip(self.starts, self.phases, strict=True)):
            for curve in phase.memory_curves:
                times = [time + start - self.starts[-1] for time in curve.times]
                found = samples.setdefault(curve.device, [])
                found += [(time, number, value) for time, value in zip(times, curve.values, strict=True)]
        return tuple(_largest(device, sorted(found)) for device, found in samples.items())


def _largest(device: str, samples: Sequence[tuple[float, int, float]]) -> MemoryCurve:
    """Return the curve of the largest of the phases' last values, of samples (time, phase, value) by rising time."""
    last: dict[int, float] = {}
    values = []
    for _, number, value in samples:
        last[number] = value
        values.append(max(last.values()))
    return MemoryCurve(device, tuple(time for time, *_ in samples), tuple(values))


class SimulatedTimeline(Timeline):
    """The timeline of a step or window predicted under the cost model.

    The figures need no events; ``simulation`` creates the events when they are first needed. ``profile``, ``cluster``:
    what was simulated, for the drawing of the plan on a web page.
    """

    def __init__(
        self,
        simulation: Simulation,
        *,
        title: str = "",
        note: str = "",
        profile: Profile | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        super().__init__(title=title, note=note)
        self.simulation: Simulation = simulation
        self._profile, self._cluster = profile, cluster

    def with_note(self, note: str) -> SimulatedTimeline:
        """Return the timeline with this note."""
        found = copy.copy(self)
        found.note = note
        return found

    @property
    def plan_drawing(self) -> PlanDrawing:
        """What is drawn of the plan."""
        return describe_plan_drawing(self.simulation.plan, self._cluster, self._profile)

    @cached_property
    def step(self) -> StepEvents:
        """All events of the step."""
        return self.simulation.events_at(self.places)

    @property
    def bubble(self) -> float:
        """The idle fraction of device time: 1 less the mean fraction of the step in which a device runs actions."""
        replicas = self.simulation.plan.replicas
        busy = sum(r * share for r, share in zip(replicas, self.stage_utilisation, strict=True))
        return max(0.0, 1 - busy / self.simulation.plan.device_count)  # a sum may round

    @cached_property
    def device_utilisation(self) -> Mapping[str, float]:
        """The fraction of the step in which each device runs an action, by the device's name."""
        by_device: dict[str, float] = {}
        for stage, _, device in self.places:
            by_device[device] = by_device.get(device, 0.0) + self.stage_utilisation[stage]
        return by_device

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Stage, replica and device of everything that runs actions, in that order."""
        return tuple(
            (stage, replica, f"device:{device}")
            for stage, planned in enumerate(self.simulation.plan.stages)
            for replica, device in enumerate(planned.devices)
        )

    @property
    def summary(self) -> str:
        """Step time, bubble and speed-up in one line."""
        return f"{super().summary}, speed-up {self.simulation.speedup:.2f}"

    def __str__(self) -> str:
        return describe_stages(self, self.simulation)

    def __repr__(self) -> str:
        return f"<simulated timeline {self.title!r}: {self.summary}>"

    def _as_recording(self) -> Recording:
        return Recording(self.title, predicted=Prediction(self, BY_PROFILE))
