"""Describe a timeline as text and as JSON, and find its slowest actions."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dapple_tf.drawing.table import format_ranges, format_table
from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.profiler.units import format_bytes, format_seconds
from dapple_tf.timeline.critical_path import PART_LABELS, sum_by_kind
from dapple_tf.timeline.events import Event
from dapple_tf.timeline.figures import StageSummary, StepFigures
from dapple_tf.timeline.simulation import Simulation
from dapple_tf.wording import format_count

_SHOWN = 5e-4  # of the step: shorter parts of the critical path are not listed


@dataclass(frozen=True)
class SlowAction:
    """An action that took ``times`` as long as the median of its stage's actions of the same kind."""

    event: Event
    times: float

    @property
    def seconds(self) -> float:
        """Seconds that it took."""
        return self.event.end - self.event.start

    def __str__(self) -> str:
        return f"{self.event} {format_seconds(self.seconds)} ({self.times:.2g}x the median)"


@dataclass(frozen=True)
class SlowOp:
    """An op of a slow action: the ``seconds`` of its runs there, and the median of those in other actions of the kind.

    ``name`` is "" for the time in which no op of the action ran.
    """

    name: str
    op: str
    seconds: float
    usual: float

    @property
    def lost(self) -> float:
        """Seconds more than usual."""
        return self.seconds - self.usual

    def __str__(self) -> str:
        what = f"{self.op} {self.name}" if self.name else "waiting between ops"
        return f"{what} {format_seconds(self.seconds)} (usually {format_seconds(self.usual)})"


def explain_slow(timeline: StepFigures, slow: SlowAction, count: int = 3) -> tuple[SlowOp, ...]:
    """Return the ops that made an action slow, by their seconds beyond the usual; empty if no ops were recorded."""
    event = slow.event
    others = [e for e in timeline.events if (e.action.stage, e.action.kind) == (event.action.stage, event.action.kind)]
    seconds: dict[tuple[Action, int], dict[tuple[str, str], float]] = {(e.action, e.replica): {} for e in others}
    spans: dict[tuple[Action, int], list[tuple[float, float]]] = defaultdict(list)
    for run in timeline.ops:
        key = run.action, run.replica
        if key in seconds:
            seconds[key][run.name, run.op] = seconds[key].get((run.name, run.op), 0.0) + run.seconds
            spans[key].append((run.start, run.start + run.seconds))
    for e in others:
        key = e.action, e.replica
        seconds[key]["", ""] = max(0.0, e.end - e.start - _covered(spans[key]))
    own = seconds[event.action, event.replica]
    if not spans[event.action, event.replica]:
        return ()
    usual = {op: statistics.median(of.get(op, 0.0) for key, of in seconds.items() if spans[key]) for op in own}
    found = [SlowOp(*op, own[op], usual[op]) for op in own]
    longest = sorted(found, key=lambda op: -op.lost)[:count]
    return tuple(op for op in longest if op.lost > _SHOWN * slow.seconds)


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that the spans cover, those that several cover once."""
    covered = last = 0.0
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, last))
        last = max(last, end)
    return covered


def describe_path(timeline: StepFigures) -> str:
    """Return some lines: step time, bubble, utilisation of stages, and the parts of the critical path."""
    path = timeline.critical_path
    parts = [
        f"{PART_LABELS[kind]} {format_seconds(seconds)} ({seconds / timeline.step_seconds:.0%})"
        for kind, seconds in sum_by_kind(path).items()
        if seconds >= _SHOWN * timeline.step_seconds
    ]
    busy = ", ".join(f"stage {stage} {share:.0%}" for stage, share in enumerate(timeline.stage_utilisation))
    lines = [
        f"{format_seconds(timeline.step_seconds)}, bubble {timeline.bubble:.1%}; busy: {busy}",
        *_describe_phases(timeline),
        f"critical path: {', '.join(parts)}; critical stage {timeline.critical_stage}",
    ]
    waits = [part for part in path if part.kind == "waiting"]
    if waits:
        longest = max(waits, key=lambda part: part.seconds)
        lines[-1] += f"; longest wait {format_seconds(longest.seconds)}, before {longest.item}"
    if timeline.note:
        lines.append(timeline.note)
    return "\n".join(lines)


def _describe_phases(timeline: StepFigures) -> list[str]:
    """Return a line about the window's throughput; none for a synchronous step."""
    if timeline.window is None:
        return []
    return [f"window of {format_count(timeline.window.minibatches, 'minibatch')}: {timeline.phases}"]


def describe_stages(timeline: StepFigures, simulation: Simulation) -> str:
    """Return the summary of a simulated step, a table of its stages, and a line for each device that is too small."""
    lines = [f"{timeline.summary}, ACR {simulation.acr:.3f}, critical stage {timeline.critical_stage}"]
    lines += _describe_phases(timeline)
    split = any(stage.weights_seconds is not None for stage in timeline.stages)
    computed = ("F", "B", "of it W") if split else ("F", "B")
    plan = simulation.plan
    in_window = plan.training.describe_order(plan.replicas)
    header = ("stage", "devices", "layers", *computed, "AllReduce", "busy", *in_window, "peak memory")
    rows = [
        _row(stage, simulation, split, [column[stage.stage] for column in in_window.values()])
        for stage in timeline.stages
    ]
    lines += format_table(header, rows, left=len(header))
    for stages in plan.worker_map.stages_of:  # the peak of each stage is the peak of its device
        need, memory = simulation.tightest_memory[stages[0]]
        if not simulation.fits[stages[0]]:
            who = f"stage {stages[0]} does not fit: it lacks"
            if len(stages) > 1:
                who = f"stages {', '.join(map(str, stages))} do not fit on one device: they lack"
            lines.append(f"{who} {format_bytes(need - memory, 4)} of the device's {format_bytes(memory, 4)}")
    lines += [timeline.note] if timeline.note else []
    return "\n".join(lines)


def timeline_json(timeline: StepFigures) -> dict[str, Any]:
    """Return the timeline as JSON values: seconds, bytes, and fractions of the step. An infinite ``acr`` is null."""
    data: dict[str, Any] = {"step_seconds": timeline.step_seconds}
    simulation = timeline.simulation
    if simulation is not None:
        data["speedup"] = simulation.speedup
    data["bubble"] = timeline.bubble
    if timeline.phases is not None:
        data |= asdict(timeline.phases)
    if simulation is not None:
        data |= {
            "peak_memory_bytes": list(simulation.peak_memory_bytes),
            "acr": simulation.acr if math.isfinite(simulation.acr) else None,
            "fits": list(simulation.fits),
        }
    return data | {
        "utilisation": list(timeline.stage_utilisation),
        "critical_stage": timeline.critical_stage,
        "critical_path_seconds": sum_by_kind(timeline.critical_path),
        "critical_path": [str(part) for part in timeline.critical_path],
        "stages": [stage.to_json() for stage in timeline.stages],
    }


def find_slowest(timeline: StepFigures, count: int = 5) -> tuple[SlowAction, ...]:
    """Return the actions that took longest compared with the median of their stage and kind, the slowest first."""
    groups: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in timeline.events:
        groups[event.action.stage, event.action.kind].append(event)
    found = []
    for events in groups.values():
        median = statistics.median(event.end - event.start for event in events)
        found += [SlowAction(event, (event.end - event.start) / median) for event in events if median]
    return tuple(sorted(found, key=lambda slow: -slow.times)[:count])


def _row(stage: StageSummary, simulation: Simulation, split: bool, in_window: Sequence[str]) -> tuple[str, ...]:
    planned = simulation.plan.stages[stage.stage]
    weights = "-" if stage.weights_seconds is None else format_seconds(stage.weights_seconds)
    return (
        str(stage.stage),
        format_ranges(planned.devices),
        f"{planned.first_layer}-{planned.last_layer}",
        format_seconds(stage.forward_seconds),
        format_seconds(stage.backward_seconds),
        *([weights] if split else []),
        format_seconds(stage.allreduce_seconds),
        f"{stage.utilisation:.0%}",
        *in_window,
        format_bytes(simulation.peak_memory_bytes[stage.stage], 4),
    )
