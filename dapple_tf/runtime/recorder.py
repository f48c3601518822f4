"""Timelines of recorded steps. Recording copies the time stamps; timelines are made when they are asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dapple_tf.distributed.clocks import Clocks
from dapple_tf.distributed.membership import Job
from dapple_tf.errors import UsageError
from dapple_tf.plan import Plan
from dapple_tf.simulator.measured_prediction import predict_from_times, predict_window_from_times
from dapple_tf.timeline.recording import BY_PROFILE, Prediction, Recording, plan_title, planned_seconds
from dapple_tf.timeline.stamps import Stamp, fill_stamps, make_timeline, name_stamps
from dapple_tf.timeline.timeline import Timeline
from graph_passes.ir.graph import Graph
from graph_passes.schedules.policies import actions_together, build_schedule

# Seconds that the two stamps of a node add to a step, measured on steps of 3 and of 13 ms.
_SECONDS_PER_NODE = 8e-6


@dataclass(frozen=True)
class _RecordedStep:
    """The last recorded step: for each process the nodes that were timed, and their times.

    ``simulated``: the timeline that was simulated when the plan was made. ``note``: see ``Timeline``.
    """

    stamps: Sequence[Sequence[Stamp]]
    times: Sequence[Any]
    plan: Plan
    simulated: Timeline | None
    note: str


class Recorder:
    """Keeps the last recorded step of this process, or of all ranks of a ``job``.

    ``cost_seconds``: about how long recording it took.
    """

    def __init__(self, job: Job | None) -> None:
        self._job = job
        self._clocks = None if job is None else Clocks(job)
        self._stamps: list[tuple[Graph, Sequence[Sequence[Stamp]]]] = []
        self._last: _RecordedStep | None = None
        self._timeline: Timeline | None = None
        self.cost_seconds = 0.0

    def keep(self, graph: Graph, times: Any, plan: Plan, simulated: Timeline | None = None, *, note: str = "") -> None:
        """Keep the ``times`` of a step of ``graph`` that has just run under ``plan``; every rank of a job must call it.

        ``simulated``: the timeline that was simulated when the plan was made, if there is one. ``note``: see
        ``Timeline``.
        """
        begin = time.perf_counter()
        own = times.numpy()
        stamps = self._name_stamps(graph)
        gathered = [own] if self._clocks is None else self._clocks.gather(own)
        self._last, self._timeline = _RecordedStep(stamps, gathered, plan, simulated, note), None
        self.cost_seconds = time.perf_counter() - begin + _SECONDS_PER_NODE * len(own) / 2

    def _name_stamps(self, graph: Graph) -> Sequence[Sequence[Stamp]]:
        """Return the nodes that each process times; the ranks of a job exchange them once for each graph."""
        for known, stamps in self._stamps:
            if known is graph:
                return stamps
        own = name_stamps(graph, None if self._job is None else f"rank:{self._job.rank}")
        stamps = [own] if self._job is None else self._job.gather(own)
        self._stamps.append((graph, stamps))
        return stamps

    @property
    def timeline(self) -> Timeline:
        """The timeline of the last recorded step; raises UsageError where there is none."""
        if self._timeline is None:
            last = self._recorded_step()
            processes = zip(last.stamps, last.times, strict=True)
            stamps = [stamp for named, times in processes for stamp in fill_stamps(named, times)]
            plan = last.plan
            self._timeline = make_timeline(
                stamps,
                title=plan_title(plan),
                note=last.note,
                together=actions_together(plan.schedule),
                versions=None if plan.window is None else plan.versions,
            )
        return self._timeline

    @property
    def recording(self) -> Recording:
        """The last recorded step beside its prediction; raises UsageError where there is none."""
        last = self._recorded_step()
        return pair_with_prediction(self.timeline, last.plan, last.simulated)

    def _recorded_step(self) -> _RecordedStep:
        if self._last is None:
            raise UsageError("no step was recorded: call step.record(batch) first")
        return self._last


def pair_with_prediction(measured: Timeline, plan: Plan, simulated: Timeline | None = None) -> Recording:
    """Return a step measured under ``plan`` beside its prediction.

    The prediction is ``simulated``, the timeline that was simulated when the plan was made; without one, the plan's
    schedule simulated with the measured times.
    """
    if simulated is not None and simulated.simulation is not None:
        step = simulated.simulation.events_at(measured.places)
        timeline = Timeline.of_step(step, simulated.title)
        predicted = Prediction(timeline, BY_PROFILE)
    elif plan.window is not None:
        predicted = predict_window_from_times(measured, plan.versions)
    else:
        schedule = build_schedule(plan.schedule, len(plan.stages), plan.micro_batches)
        predicted = predict_from_times(measured, schedule, plan.sizes)
    return Recording(plan_title(plan), measured, predicted, planned_seconds(plan))
