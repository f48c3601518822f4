"""Predict a recorded step from the measured times of its actions."""

from __future__ import annotations

from dapple_tf.simulator.engine import encode
from dapple_tf.simulator.execution import execute
from dapple_tf.simulator.simulated_step import execution_events
from dapple_tf.timeline.recording import BY_TIMES, Prediction
from dapple_tf.timeline.timeline import Timeline
from graph_passes.schedules.schedule import Schedule


def predict_from_times(measured: Timeline, schedule: Schedule) -> Prediction:
    """Return ``schedule`` executed with the median seconds of each stage's actions, transfers and AllReduce.

    The prediction has the schedule's own waiting, but no contention and no jitter, which the measured step has. Weights
    are updated after the last event, for the measured seconds.
    """
    execution = execute(encode(schedule), measured.costs)
    updates = [event for event in measured.stage_events if event.kind == "update"]
    step = execution_events(execution, measured.places, updates)
    return Prediction(Timeline(step.events, step.transfers, step.stage_events, title=measured.title), BY_TIMES)
