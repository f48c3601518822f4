"""What a step needs on every device, in fields and as text: predicted, and measured where a step was recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dapple_tf.drawing.table import align, format_megabytes
from dapple_tf.memory.in_flight import freeing_kind
from dapple_tf.memory.meter import Measured
from dapple_tf.memory.predict import StageMemory
from dapple_tf.memory.process_peak import predict_together
from dapple_tf.plan import Plan
from dapple_tf.timeline.timeline import Timeline
from graph_passes.schedules.schedule import Schedule

Measurement = tuple[int | None, Measured]
"""A device of the plan, and what was measured there; None: all devices of the process together."""

_FIXED = ("weights", "gradients", "slots", "copies")
_HEAD = (
    "stage",
    *_FIXED,
    "K",
    "seen",
    "stash",
    "K x stash",
    "waiting",
    "transit",
    "working",
    "in step",
    "peak",
    "measured",
)
_FIGURES = (*_FIXED, "most_held", "stash", "waiting", "transit", "working", "update", "in_step", "peak", "loops")


@dataclass(frozen=True)
class StageReport:
    """A stage: what is ``predicted`` of one device; ``seen``, the most micro-batches that a recorded step held at once.

    ``measured``: of its device that held most, where each is measured by itself.
    """

    predicted: StageMemory
    seen: int | None = None
    measured: Measured | None = None


@dataclass(frozen=True)
class Report:
    """What a step of ``plan`` needs; ``str`` prints it. Bytes.

    ``together``: predicted of all stages, beyond what is always there, at the overlap of the recorded step;
    ``measured`` the same. Both only where the devices share one allocator, so that no stage is measured by itself.
    """

    plan: Plan
    stages: tuple[StageReport, ...]
    together: int | None = None
    measured: Measured | None = None

    def __str__(self) -> str:
        lines = [_describe_plan(self.plan), *align([_HEAD, *map(_row, self.stages)])]
        looping = [str(stage.predicted.stage) for stage in self.stages if stage.predicted.loops]
        if looping:
            lines.append(f"not counted: what the While loops of stage {', '.join(looping)} keep of each round")
        if self.measured is not None and self.together is not None:
            ratio = self.together / max(1, self.measured.above_start)
            lines.append(
                f"all stages in the recorded step: {format_megabytes(self.measured.above_start)} MB measured "
                f"({self.measured.source}), {format_megabytes(self.together)} MB predicted ({ratio - 1:+.0%})"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON holds them."""
        return {
            "stages": [
                {
                    **{name: _plain(getattr(stage.predicted, name)) for name in _FIGURES},
                    "seen": stage.seen,
                    "measured": _measured_json(stage.measured),
                }
                for stage in self.stages
            ],
            "together": self.together,
            "measured": _measured_json(self.measured),
        }


def make_report(
    plan: Plan,
    schedule: Schedule,
    predicted: Sequence[StageMemory],
    timeline: Timeline | None = None,
    measured: Sequence[Measurement] = (),
) -> Report:
    """The report of a plan that runs ``schedule``; ``timeline`` and ``measured`` of a recorded step."""
    stages = []
    for stage, memory in enumerate(predicted):
        own = [found for device, found in measured if device in plan.stages[stage].devices]
        most = max(own, key=lambda found: found.above_start, default=None)
        stages.append(StageReport(memory, None if timeline is None else count_seen(timeline, schedule, stage), most))
    shared = next((found for device, found in measured if device is None), None)
    together = predict_together(predicted, timeline) if timeline is not None and shared is not None else None
    return Report(plan, tuple(stages), together, shared)


def count_seen(timeline: Timeline, schedule: Schedule, stage: int) -> int:
    """The most micro-batches that a replica of ``stage`` held at once, by time stamps.

    That is forwards begun less the actions ended that free what they kept.
    """
    last, most = freeing_kind(schedule), 0
    own = [event for event in timeline.events if event.action.stage == stage]
    for replica in {event.replica for event in own}:
        begun = [(e.start, 1, 1) for e in own if e.replica == replica and e.action.kind == "F"]
        ended = [(e.end, 0, -1) for e in own if e.replica == replica and e.action.kind == last]
        held = 0
        for _, _, change in sorted(begun + ended):  # at one time what ends comes first
            held += change
            most = max(most, held)
    return most


def _describe_plan(plan: Plan) -> str:
    replicas = "" if max(plan.replicas) == 1 else f" on {', '.join(map(str, plan.replicas))} devices"
    return (
        f"memory of one device of each of {len(plan.stages)} stages{replicas}, {plan.micro_batches} micro-batches of "
        f"{plan.micro_batch_size} samples, schedule {plan.schedule}; in MB (10^6 bytes)"
    )


def _row(stage: StageReport) -> list[str]:
    memory = stage.predicted
    figures = [
        *(getattr(memory, name) for name in _FIXED),
        *(memory.stash, memory.most_held * memory.stash, memory.waiting, memory.transit),
        *(max(memory.working.values(), default=0), memory.in_step, memory.peak),
    ]
    cells = [format_megabytes(figure) for figure in figures]
    held = [str(memory.most_held), "-" if stage.seen is None else str(stage.seen)]
    above = "-" if stage.measured is None else f"{format_megabytes(stage.measured.above_start)} in step"
    return [str(memory.stage), *cells[:4], *held, *cells[4:], above]


def _plain(value: Any) -> Any:
    return value if isinstance(value, int) else dict(value)


def _measured_json(measured: Measured | None) -> dict[str, Any] | None:
    return None if measured is None else {**dataclasses.asdict(measured), "above_start": measured.above_start}
