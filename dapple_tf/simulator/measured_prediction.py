"""Predict a recorded step from the measured times of its actions."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import replace

from dapple_tf.simulator.execution import execute
from dapple_tf.simulator.given_sizes import execute_sizes
from dapple_tf.simulator.order import encode
from dapple_tf.simulator.simulated_step import execution_events
from dapple_tf.simulator.simulated_window import window_events
from dapple_tf.simulator.window_costs import uniform_costs
from dapple_tf.simulator.window_execution import execute_window
from dapple_tf.timeline.events import StageEventKind, StepEvents
from dapple_tf.timeline.measured_costs import measure_stage_costs
from dapple_tf.timeline.recording import BY_TIMES, Prediction
from dapple_tf.timeline.stage_costs import StageCosts
from dapple_tf.timeline.timeline import Timeline
from graph_passes.schedules.schedule import Schedule
from graph_passes.schedules.weight_versions import Versions


def predict_from_times(measured: Timeline, schedule: Schedule, sizes: Sequence[int] = ()) -> Prediction:
    """Return ``schedule`` executed with the median seconds of each stage's actions, transfers and AllReduce.

    ``sizes``: the given samples of each micro-batch; the medians are then of the micro-batches of one size.

    The prediction has the schedule's own waiting, but no contention and no jitter, which the measured step has. Weights
    are updated after the last event, for the measured seconds.
    """
    if sizes:
        of_size = {size: _measure(measured, [m for m, n in enumerate(sizes) if n == size]) for size in set(sizes)}
        execution = execute_sizes(schedule, measured.costs, [of_size[size] for size in sizes])
    elif schedule.together:
        execution = execute_sizes(schedule, measured.costs, [measured.costs] * schedule.micro_batches)
    else:
        execution = execute(encode(schedule), measured.costs)
    updates = [event for event in measured.stage_events if event.kind == "update"]
    step = execution_events(execution, measured.places, updates)
    return Prediction(Timeline.of_step(step, measured.title), BY_TIMES)


def predict_window_from_times(measured: Timeline, versions: Versions) -> Prediction:
    """Return a window executed with the median seconds of each stage's actions, transfers, AllReduces and updates.

    Every pair of replicas of two neighbouring stages gets the seconds of the boundary's transfers.
    """
    replicas, step = versions.window.replicas, measured.step
    updates = tuple(_median_seconds(step, "update", stage) for stage in range(len(replicas)))
    costs = tuple(
        replace(cost, allreduce_seconds=_median_seconds(step, "allreduce", stage))
        for stage, cost in enumerate(measured.costs)
    )
    execution = execute_window(versions, uniform_costs(costs, replicas, updates))
    events = window_events(execution, measured.places)
    return Prediction(Timeline.of_step(events, measured.title), BY_TIMES)


def _median_seconds(step: StepEvents, kind: StageEventKind, stage: int) -> float:
    """Return the median seconds of a stage's updates, or of their AllReduces on the last device to reach them.

    0 where there are none.
    """
    seconds: dict[int | None, float] = {}
    for event in step.stage_events:
        if (event.kind, event.stage) == (kind, stage):
            taken = event.end - step.start(event)
            seconds[event.micro_batch] = max(seconds.get(event.micro_batch, 0.0), taken)
    return statistics.median(seconds.values()) if seconds else 0.0


def _measure(measured: Timeline, micro_batches: Collection[int]) -> list[StageCosts]:
    """Return the costs of each stage for these micro-batches."""
    step = measured.step
    return [measure_stage_costs(step, stage, micro_batches) for stage in range(step.stages)]
