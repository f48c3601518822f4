"""Memory report of a step: predicted bytes of every device, and measured bytes where a step was recorded."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapple_tf.drawing.table import format_table
from dapple_tf.graph_passes.schedules.schedule import FREEING, Schedule, most_in_flight
from dapple_tf.memory.in_flight import stage_states
from dapple_tf.memory.meter import MeasuredMemory
from dapple_tf.memory.predict import StageMemory, held_bytes
from dapple_tf.memory.process_peak import predict_process_peak
from dapple_tf.plans import Plan
from dapple_tf.profiler.units import format_megabytes
from dapple_tf.timeline.timeline import Timeline

DeviceMeasurement = tuple[int | None, MeasuredMemory]
"""A device of the plan and its measured memory; None where all devices of the process are measured together."""

_FIXED = ("weights", "gradients", "slots", "copies")
_HEAD = (
    *("stage", *_FIXED, "K", "seen", "stash", "K x stash", "V", "V x weights"),
    *("waiting", "transit", "arriving", "working", "slices", "in step", "peak", "measured"),
)
_WORKER_HEAD = ("stages", "stashes", "between steps", "in step", "peak")
_JSON_FIELDS = (
    *_FIXED,
    *("in_flight", "stash", "waiting", "transit", "arriving", "working", "slices"),
    *("tail", "update", "in_step", "peak", "loops"),
)
"""The fields of StageMemory that are in the JSON values of a report."""


@dataclass(frozen=True)
class StageReport:
    """Memory of one stage.

    ``predicted``: for one of its devices. ``seen``: the most micro-batches in flight in the recorded step, by time
    stamps; None before a step was recorded. ``measured``: for the stage's device with the highest peak, with all stages
    that the device runs; None where devices are not measured one by one.
    """

    predicted: StageMemory
    seen: int | None = None
    measured: MeasuredMemory | None = None


@dataclass(frozen=True)
class Report:
    """Memory of a step of ``plan``, in bytes; ``str`` prints a table.

    ``predicted``: the peak of all stages together, beyond what they hold between steps, with the actions at the times
    of the recorded step. ``measured``: the same, measured. Both are None where devices are measured one by one; they
    are set where the devices share one allocator (logical CPU devices). ``workers``: the predicted memory of a device
    of each worker, with all stages that it runs. ``bases``: of each rank of a job, what its process held before any
    model; empty before a step was recorded.
    """

    plan: Plan
    stages: tuple[StageReport, ...]
    workers: tuple[_WorkerMemory, ...]
    predicted: int | None = None
    measured: MeasuredMemory | None = None
    bases: tuple[int, ...] = ()

    def __str__(self) -> str:
        rows = [self._row(stage) for stage in self.stages]
        header, rows = _without_empty_columns(_HEAD, rows)
        lines = [_describe_plan(self.plan), *format_table(header, rows)]
        if self.plan.worker_map.is_chunked:
            lines += ["devices that run several stages, with all of these:"]
            lines += format_table(_WORKER_HEAD, list(map(_worker_row, self.workers)))
        looping = [str(stage.predicted.stage) for stage in self.stages if stage.predicted.loops]
        if looping:
            lines.append(f"not counted: tensors of each iteration of the While loops of stage {', '.join(looping)}")
        for memory in (stage.predicted for stage in self.stages if stage.predicted.tail):
            lines.append(
                f"the loss runs once, on the rows of all micro-batches: {format_megabytes(memory.tail)} MB on stage "
                f"{memory.stage}, while all micro-batches are stashed (batch_loss)"
            )
        if any(self.bases):
            each = ", ".join(f"{format_megabytes(size)} MB (rank {rank})" for rank, size in enumerate(self.bases))
            lines.append(f"each process held before any model, beside the above: {each}")
        if self.measured is not None and self.predicted is not None:
            ratio = self.predicted / max(1, self.measured.above_start)
            lines.append(
                f"all stages in the recorded step: {format_megabytes(self.measured.above_start)} MB measured "
                f"({self.measured.source}), {format_megabytes(self.predicted)} MB predicted ({ratio - 1:+.0%})"
            )
        return "\n".join(lines)

    def _row(self, stage: StageReport) -> list[str]:
        memory, workers = stage.predicted, self.plan.worker_map
        fixed = [format_megabytes(getattr(memory, name)) for name in _FIXED]
        stashes = [format_megabytes(size) for size in (memory.stash, memory.in_flight * memory.stash)]
        versions = [str(memory.version_count), format_megabytes(memory.versions)]
        working = max(memory.working.values(), default=0)
        sizes = (memory.waiting, memory.transit, memory.arriving, working, memory.slices, memory.in_step, memory.peak)
        in_flight = [str(memory.in_flight), "-" if stage.seen is None else str(stage.seen)]
        measured = "-" if stage.measured is None else f"{format_megabytes(stage.measured.above_start)} in step"
        together = workers.stages_of[workers.worker_of[memory.stage]]
        if stage.measured is not None and len(together) > 1:
            measured += f" of stages {', '.join(map(str, together))}"
        return [str(memory.stage), *fixed, *in_flight, *stashes, *versions, *map(format_megabytes, sizes), measured]

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values (``dapple train --json`` prints them as ``memory``)."""
        versions = () if self.plan.window is None else ("version_count", "versions")
        return {
            "stages": [
                {
                    **{
                        "most_held" if name == "in_flight" else name: getattr(stage.predicted, name)
                        for name in (*_JSON_FIELDS, *versions)
                    },
                    "seen": stage.seen,
                    "measured": _measured_json(stage.measured),
                }
                for stage in self.stages
            ],
            "workers": [{**dataclasses.asdict(worker), "peak": worker.peak} for worker in self.workers],
            "before_model": list(self.bases),
            "together": self.predicted,
            "measured": _measured_json(self.measured),
        }


@dataclass(frozen=True)
class PhasesReport:
    """Memory of a training step of several ``phases``; ``str`` prints their reports, and the peak of all.

    Between steps a device holds what each phase needs between steps, and every variable once. It begins the actions of
    a phase after those of the phase before. So beside what a phase takes while it runs there may be the update of the
    phase before, and tensors that wait for the next phase.
    """

    phases: tuple[Report, ...]

    @property
    def devices(self) -> tuple[DeviceOfPhases, ...]:
        """The predicted memory of each device that runs a stage."""
        found: dict[int, dict[int, tuple[list[StageMemory], int]]] = {}
        for number, report in enumerate(self.phases):
            for worker, stages in zip(report.workers, report.plan.worker_map.stages_of, strict=True):
                memories = [report.stages[stage].predicted for stage in stages]
                for device in report.plan.stages[stages[0]].devices:
                    found.setdefault(device, {})[number] = memories, worker.in_step
        return tuple(_device_of_phases(device, phases) for device, phases in sorted(found.items()))

    def __str__(self) -> str:
        parts = [f"phase {i} of {len(self.phases)}:\n{report}" for i, report in enumerate(self.phases, 1)]
        rows = [
            [
                str(device.device),
                format_megabytes(device.fixed),
                f"{format_megabytes(device.in_step)} (phase {device.fullest + 1})",
                format_megabytes(device.peak),
            ]
            for device in self.devices
        ]
        header = ("device", "between steps", "most in a phase", "peak")
        return "\n".join([*parts, "all phases, in MB (10^6 bytes):", *format_table(header, rows)])

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {
            "phases": [report.to_json() for report in self.phases],
            "devices": [{**dataclasses.asdict(device), "peak": device.peak} for device in self.devices],
        }


@dataclass(frozen=True)
class DeviceOfPhases:
    """Predicted bytes of a device over all phases of a step: ``fixed`` between steps, and ``in_step`` more during them.

    ``fullest``: the number of the phase that takes most while it runs, counted from 0.
    """

    device: int
    fixed: int
    in_step: int
    fullest: int

    @property
    def peak(self) -> int:
        """Peak bytes."""
        return self.fixed + self.in_step


def _device_of_phases(device: int, phases: Mapping[int, tuple[Sequence[StageMemory], int]]) -> DeviceOfPhases:
    """Return the memory of a device; ``phases``: by number, the memory of its stages, and its bytes in the phase."""
    memories = [memory for own, _ in phases.values() for memory in own]
    held: dict[int, int] = {}
    for memory in memories:
        held |= memory.held
    fixed = sum(held.values()) + sum(memory.gradients + memory.copies for memory in memories)
    in_step: dict[int, int] = {}
    for number, (_, own) in phases.items():
        before, after = (phases.get(neighbour, ((), 0))[0] for neighbour in (number - 1, number + 1))
        in_step[number] = own + sum(memory.update for memory in before) + sum(memory.waiting for memory in after)
    fullest = max(in_step, key=in_step.__getitem__)
    return DeviceOfPhases(device, fixed, in_step[fullest], fullest)


def make_report(
    plan: Plan,
    predicted: Sequence[StageMemory],
    timeline: Timeline | None = None,
    measured: Sequence[DeviceMeasurement] = (),
) -> Report:
    """Return the report of a plan; ``timeline`` and ``measured`` are of a recorded step."""
    stages = []
    for stage, memory in enumerate(predicted):
        own = [found for device, found in measured if device in plan.stages[stage].devices]
        highest = max(own, key=lambda found: found.above_start, default=None)
        seen = None if timeline is None else observed_in_flight(timeline, stage)
        stages.append(StageReport(memory, seen, highest))
    shared = next((found for device, found in measured if device is None), None)
    peak = predict_process_peak(predicted, timeline) if timeline is not None and shared is not None else None
    bases = tuple(found.base_bytes for _, found in measured if found.base_bytes)
    if plan.worker_map.has_one_stage_per_worker:
        workers = tuple(_WorkerMemory((m.stage,), m.in_flight, m.fixed, m.in_step) for m in predicted)
    else:
        workers = _predict_workers(predicted, plan.build_schedule())
    return Report(plan, tuple(stages), workers, peak, shared, bases)


def observed_in_flight(timeline: Timeline, stage: int) -> int:
    """Return the most micro-batches that a replica of ``stage`` had in flight at once, by time stamps.

    A micro-batch is in flight from the start of its forward to the end of the action that frees its stash.
    """
    most = 0
    events = [event for event in timeline.events if event.action.stage == stage]
    for replica in {event.replica for event in events}:
        started = [(e.start, 1, e.action.kind) for e in events if e.replica == replica and e.action.kind == "F"]
        freed = [(e.end, 0, e.action.kind) for e in events if e.replica == replica and e.action.kind in FREEING]
        in_order = sorted(started + freed)  # at equal times, what is freed comes first
        most = max(most, most_in_flight(kind for _, _, kind in in_order))
    return most


def _without_empty_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return a table's columns whose cells are not all 0 or "-"; the first column always stays."""
    kept = [not i or any(row[i] not in ("0", "-") for row in rows) for i in range(len(header))]
    return list(itertools.compress(header, kept)), [list(itertools.compress(row, kept)) for row in rows]


def _describe_plan(plan: Plan) -> str:
    replicas = "" if max(plan.replicas) == 1 else f" on {', '.join(map(str, plan.replicas))} devices"
    order = f"schedule {plan.short_schedule}"
    if plan.window is not None:
        order += f", V versions by weights {plan.window.weights!r}"
    each = f" of each of {len(plan.stages)} stages" if len(plan.stages) > 1 else ""
    return f"memory of one device{each}{replicas}, {plan.describe_micro_batches()}, {order}; in MB (10^6 bytes)"


def _worker_row(worker: _WorkerMemory) -> list[str]:
    sizes = map(format_megabytes, (worker.fixed, worker.in_step, worker.peak))
    return [", ".join(map(str, worker.stages)), str(worker.stashes), *sizes]


def _measured_json(measured: MeasuredMemory | None) -> dict[str, Any] | None:
    if measured is None:
        return None
    figures = {name: getattr(measured, name) for name in ("device", "source", "start_bytes", "peak_bytes")}
    return {**figures, "above_start": measured.above_start}


# --- Predicted memory of a device that runs several stages, from the memory of each and the order of its actions


@dataclass(frozen=True)
class _WorkerMemory:
    """Predicted bytes of one device of a worker: ``fixed`` between steps, and at most ``in_step`` more during one.

    ``stages``: those that it runs. ``stashes``: the most that it holds at once, one for each stage and micro-batch in
    flight.
    """

    stages: tuple[int, ...]
    stashes: int
    fixed: int
    in_step: int

    @property
    def peak(self) -> int:
        """Peak bytes."""
        return self.fixed + self.in_step


def _predict_workers(stages: Sequence[StageMemory], schedule: Schedule) -> tuple[_WorkerMemory, ...]:
    """Return the memory of one device of each worker; ``stages``: the memory of each stage, under ``schedule``.

    A worker runs one action at a time. Its memory then is what its stages hold of micro-batches, the tensors of that
    action, and the largest messages (``transit``) of one of its stages. Weights are updated after all actions.
    """
    found = []
    for own, stashes in zip(schedule.worker_map.stages_of, schedule.stashes, strict=True):
        memories = [stages[stage] for stage in own]
        update = sum(memory.update for memory in memories)
        in_step = max(update, *(memory.in_step for memory in memories))
        transit = max(memory.transit for memory in memories)
        for states in zip(*(stage_states(schedule, stage) for stage in own), strict=True):
            action = states[0].action
            held = sum(
                held_bytes(s, memory.stashed, memory.slices, memory.arriving)
                for s, memory in zip(states, memories, strict=True)
            )
            in_step = max(in_step, held + transit + stages[action.stage].working[action.kind])
        found.append(_WorkerMemory(own, stashes, sum(memory.fixed for memory in memories), in_step))
    return tuple(found)
