"""The throughput of an asynchronous window: its start-up, its steady state and its drain, from the times of events."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dapple_tf.timeline.events import StepEvents
from graph_passes.schedules.window import Window
from profiler.units import format_seconds


@dataclass(frozen=True)
class WindowPhases:
    """Seconds of a window.

    ``startup_seconds``: until the first backward of the last stage ends. ``minibatch_seconds``: of a minibatch in the
    steady state, see ``find_phases``. ``drain_seconds``: from the end of the last stage's last backward to that of the
    last event.
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
    """Return the phases of a ``window`` whose events these are.

    A minibatch is done when its last backward on the last stage ends. The steady state is the mean time between the
    ends of the last minibatches: as many of them as are whole rounds of the turns of all stages' replicas, without
    those that the first stage had in flight at first, whose forwards came faster. Where the window is too short for
    that, these count too, and in a window of one round it is the whole window's seconds over its minibatches.
    """
    done = [0.0] * window.minibatches
    for event in step.events:
        if event.action.stage == window.stages - 1 and event.action.kind == "B":
            minibatch = event.action.micro_batch // window.micro_batches
            done[minibatch] = max(done[minibatch], event.end)
    done.sort()
    first = _first_backward_end(step, window.stages - 1)
    return WindowPhases(first, _steady_seconds(window, done, step.seconds), step.seconds - done[-1])


def _first_backward_end(step: StepEvents, stage: int) -> float:
    return min(e.end for e in step.events if (e.action.stage, e.action.kind) == (stage, "B"))


def _steady_seconds(window: Window, done: list[float], seconds: float) -> float:
    turns = math.lcm(*window.replicas) if window.in_turn else 1
    in_flight = window.warm_up[0] * (window.replicas[0] if window.in_turn else 1)
    ahead = math.ceil(in_flight / window.micro_batches)
    last = window.minibatches - 1
    rounds = max(0, last - ahead) // turns or last // turns
    if rounds < 1:
        return seconds / window.minibatches
    return (done[last] - done[last - rounds * turns]) / (rounds * turns)
