"""Timelines of recorded steps. Recording copies the time stamps; timelines are made when they are asked for."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf.distributed.membership import Job
from dapple_tf.errors import UsageError
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.ir.names import at
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.schedules.schedule import Schedule
from dapple_tf.graph_passes.schedules.weight_versions import Versions
from dapple_tf.plans import Plan
from dapple_tf.runtime.op_profile import Runs, attribute_ops, times_by_ops
from dapple_tf.simulator.execution import execute
from dapple_tf.simulator.order import encode
from dapple_tf.simulator.simulated_step import execution_events
from dapple_tf.simulator.simulated_window import window_events
from dapple_tf.simulator.window_costs import uniform_costs
from dapple_tf.simulator.window_execution import execute_window
from dapple_tf.timeline.events import MemoryCurve, OpRun, StageEventKind, StepEvents
from dapple_tf.timeline.figures import EarlierStep
from dapple_tf.timeline.recording import BY_PROFILE, BY_TIMES, Prediction, Recording, plan_title, planned_seconds
from dapple_tf.timeline.stage_costs import StageCosts, measure_stage_costs
from dapple_tf.timeline.stamps import Stamp, fill_stamps, first_start, make_timeline, name_stamps
from dapple_tf.timeline.timeline import PhasesTimeline, Timeline

_KEPT = 8  # recorded steps: a trace has all, a description the last

# The seconds that the two time stamps of a node add to a step; measured on steps of 3 and of 13 ms.
_SECONDS_PER_NODE = 8e-6


@dataclass(frozen=True)
class _RecordedStep:
    """A recorded step: for each process the timed nodes, and their times.

    ``simulated``: the timeline that was simulated when the plan was made, or None. ``note``: see ``Timeline``.
    ``memory``: see ``MemoryRecorder.curves``.
    """

    stamps: Sequence[Sequence[Stamp]]
    times: Sequence[Any]
    plan: Plan
    simulated: Timeline | None
    note: str
    memory: Sequence[MemoryCurve]
    ops: Sequence[OpRun]

    def filled(self) -> list[Stamp]:
        """Return the nodes of all processes with their times."""
        processes = zip(self.stamps, self.times, strict=True)
        return [stamp for named, times in processes for stamp in fill_stamps(named, times)]

    def make_timeline(self, earlier: Sequence[_RecordedStep] = ()) -> Timeline:
        """Return the timeline of the step, with the steps that were recorded ``earlier``."""
        stamps, plan = self.filled(), self.plan
        begin = first_start(stamps)
        return make_timeline(
            stamps,
            title=plan_title(plan),
            note=self.note,
            together=plan.spec.together,
            versions=None if plan.window is None else plan.versions,
            earlier=[EarlierStep(begin - first_start(step.filled()), step.make_timeline()) for step in earlier],
            memory_curves=[_placed(curve, stamps, begin) for curve in self.memory],
            ops=self.ops,
        )


def _placed(curve: MemoryCurve, stamps: Sequence[Stamp], begin: float) -> MemoryCurve:
    """Return the curve of a process, whose times are fractions of its run, with seconds since ``begin``.

    The rehearsal that was measured took longer than the recorded step, so it is drawn as long as that.
    """
    own = [stamp for stamp in stamps if stamp.device == curve.device] or stamps
    first, last = first_start(own), max(stamp.end for stamp in own)
    return replace(curve, times=tuple(first - begin + time * (last - first) for time in curve.times))


class Recorder:
    """Keeps the last recorded steps of all ranks of a ``job``.

    ``cost_seconds``: about how many seconds recording has added to this step.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._clocks = Clocks(job)
        self._stamps: list[tuple[Graph, Sequence[Sequence[Stamp]]]] = []
        self._steps: deque[_RecordedStep] = deque(maxlen=_KEPT)
        self._timeline: Timeline | None = None
        self.cost_seconds = 0.0

    def keep(
        self,
        graph: Graph,
        times: Any,
        plan: Plan,
        simulated: Timeline | None = None,
        *,
        note: str = "",
        memory: Sequence[MemoryCurve] = (),
        runs: Runs | None = None,
    ) -> None:
        """Keep the ``times`` of a step of ``graph`` that has just run under ``plan``; every rank of a job must call it.

        ``simulated``: the timeline that was simulated when the plan was made, if there is one. ``note``: see
        ``Timeline``. ``memory``: see ``MemoryRecorder.curves``. ``runs``: of the ops of this process, if they were
        profiled.
        """
        begin = time.perf_counter()
        own = times.numpy()
        if runs is not None and tf.config.list_logical_devices("GPU"):
            filled = times_by_ops(graph, fill_stamps(self._name_own(graph), own), runs)
            own = np.array([time for stamp in filled for time in (stamp.start, stamp.end)])
        stamps = self._name_stamps(graph)
        gathered = self._clocks.gather(own)
        self._steps.append(_RecordedStep(stamps, gathered, plan, simulated, note, memory, self._ops(graph, own, runs)))
        self._timeline = None
        self.cost_seconds = time.perf_counter() - begin + _SECONDS_PER_NODE * len(own) / 2

    def _ops(self, graph: Graph, times: Any, runs: Runs | None) -> Sequence[OpRun]:
        """Return the ops of all processes, from the ``runs`` and ``times`` of this one; nothing without ``runs``."""
        if runs is None:
            return ()
        own = attribute_ops(graph, fill_stamps(self._name_own(graph), times), runs)
        return [op for ops in self._job.gather(own) for op in ops]

    def _name_own(self, graph: Graph) -> tuple[Stamp, ...]:
        return name_stamps(graph, None if self._job.is_alone else f"rank:{self._job.rank}")

    def _name_stamps(self, graph: Graph) -> Sequence[Sequence[Stamp]]:
        """Return the timed nodes of each process; the ranks of a job exchange them once for each graph."""
        for known, stamps in self._stamps:
            if known is graph:
                return stamps
        own = self._name_own(graph)
        stamps = self._job.gather(own)
        self._stamps.append((graph, stamps))
        return stamps

    @property
    def timeline(self) -> Timeline:
        """The timeline of the last recorded step, and those of the seven before; UsageError where there is none."""
        if self._timeline is None:
            self._timeline = self._recorded_step().make_timeline(list(self._steps)[:-1])
        return self._timeline

    @property
    def begin(self) -> float:
        """The time of the first action of the last recorded step, in seconds by rank 0's clock."""
        return first_start(self._recorded_step().filled())

    @property
    def recording(self) -> Recording:
        """The last recorded step beside its prediction; raises UsageError where there is none."""
        last = self._recorded_step()
        return pair_with_prediction(self.timeline, last.plan, last.simulated)

    def _recorded_step(self) -> _RecordedStep:
        if not self._steps:
            raise UsageError("no step was recorded: call step.record with a batch first")
        return self._steps[-1]


def join_timelines(recorders: Sequence[Recorder], models: Sequence[Graph]) -> PhasesTimeline:
    """Return the timelines of the phases of the last recorded step, as they ran together.

    ``recorders``: one for each phase. ``models``: the stage functions of each.
    """
    begins = [recorder.begin for recorder in recorders]
    timelines = tuple(recorder.timeline for recorder in recorders)
    plans = [recorder._recorded_step().plan for recorder in recorders]
    schedules = [_without_idle_backwards(plan.build_schedule(), of) for plan, of in zip(plans, models, strict=True)]
    simulated = predict_phases(timelines, schedules, [plan.sizes for plan in plans])
    return PhasesTimeline(timelines, tuple(begin - begins[0] for begin in begins), simulated)


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
        schedule = plan.build_schedule()
        predicted = predict_from_times(measured, schedule, plan.sizes)
    return Recording(plan_title(plan), measured, predicted, planned_seconds(plan))


# --- Estimate how far the clocks of a job's processes differ


_ROUNDS = 9


class Clocks:
    """The clocks of the ranks of ``job``; every rank must make the same calls."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._boot_ids: tuple[str, ...] = ()

    def gather(self, times: Any) -> list[Any]:
        """Return every rank's ``times`` (an array of seconds, by its own clock), by rank 0's clock, on every rank."""
        return self._job.gather(times - self.offsets()[self._job.rank])

    def offsets(self) -> tuple[float, ...]:
        """Return by how many seconds each rank's clock is ahead of rank 0's.

        Ranks of one host read the same clock. Ranks of different hosts read their clocks right after a barrier, which
        all leave at the same time except for the network's latency; this limits the accuracy. The result is the median
        of nine rounds.
        """
        if not self._boot_ids and not self._job.is_alone:
            self._boot_ids = tuple(self._job.gather(_boot_id()))
        if len(set(self._boot_ids)) <= 1:
            return (0.0,) * self._job.size
        times = []
        for _ in range(_ROUNDS):
            self._job.gather(None)
            times.append(time.time())
        return clock_offsets(self._boot_ids, self._job.gather(times))


def clock_offsets(hosts: Sequence[str], times: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return by how many seconds each rank's clock is ahead of rank 0's.

    ``times[i]``: the seconds that rank i's clock showed at the same moments as those of the other ranks. ``hosts[i]``:
    a name of its host.
    """
    ahead = [statistics.median(a - b for a, b in zip(own, times[0], strict=True)) for own in times]
    # All ranks of a host have the offset of its first rank, for they read one clock.
    return tuple(0.0 if host == hosts[0] else ahead[hosts.index(host)] for host in hosts)


def _boot_id() -> str:
    """Return an identifier of the running kernel: it is the same for all processes of a host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# --- Predict a recorded step from the measured times of its actions


def predict_from_times(measured: Timeline, schedule: Schedule, sizes: Sequence[int] = ()) -> Prediction:
    """Return ``schedule`` executed with the median seconds of each stage's actions, transfers and AllReduce.

    ``sizes``: the samples of each micro-batch, if they were given; then medians are taken over the micro-batches of one
    size. The prediction contains the waiting that the schedule causes, but not the contention and jitter of the
    measured step. After the last event weights are updated, for the measured seconds.
    """
    of_micro_batches = _measure_sizes(measured, sizes)
    execution = execute(encode(schedule), measured.costs, of_micro_batches=of_micro_batches, together=schedule.together)
    updates = [event for event in measured.stage_events if event.kind == "update"]
    step = execution_events(execution, measured.places, updates)
    return Prediction(Timeline.of_step(step, measured.title), BY_TIMES)


def predict_phases(
    measured: Sequence[Timeline], schedules: Sequence[Schedule], sizes: Sequence[Sequence[int]]
) -> float | None:
    """Return the seconds of a step of several phases, simulated with the measured times of the actions of each.

    The phases are one schedule, in which each device runs its actions of a phase after those of the phases before, and
    begins them before other devices have ended these. An update takes no time. None where that does not say what the
    step does: the phases run on other workers, or an earlier one sums gradients over replicas. ``sizes``: for each
    phase the samples of each micro-batch, if they were given.
    """
    summed = any(cost.allreduce_seconds for timeline in measured[:-1] for cost in timeline.costs)
    if summed or len({schedule.worker_map for schedule in schedules}) > 1:
        return None
    costs: list[Sequence[StageCosts]] = []
    joined = Schedule(((),) * len(schedules[0].workers))
    for timeline, schedule, given in zip(measured, schedules, sizes, strict=True):
        joined = joined.followed_by(schedule)
        costs += _measure_sizes(timeline, given) or [timeline.costs] * schedule.micro_batches
    found = execute(encode(joined), measured[-1].costs, of_micro_batches=costs, together=joined.together)
    return found.step_seconds


def predict_window_from_times(measured: Timeline, versions: Versions) -> Prediction:
    """Return a window executed with the median seconds of each stage's actions, transfers, AllReduces and updates.

    All pairs of replicas of two neighbouring stages get the median seconds of the boundary's transfers.
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
    """Return the median seconds of a stage's updates or AllReduces, 0 if there are none.

    An AllReduce starts when the last device reaches it.
    """
    seconds: dict[int | None, float] = {}
    for event in step.stage_events:
        if (event.kind, event.stage) == (kind, stage):
            taken = event.end - step.start(event)
            seconds[event.micro_batch] = max(seconds.get(event.micro_batch, 0.0), taken)
    return statistics.median(seconds.values()) if seconds else 0.0


def _without_idle_backwards(schedule: Schedule, model: Graph) -> Schedule:
    """Return the schedule without the backwards that take no gradient, and so do nothing."""
    functions = {function.name: function for function in model.functions}
    idle = {
        stage
        for stage in range(schedule.worker_map.stages)
        if not functions[at(stage, what=OpName.BACKWARD)].input_ports("gradient", "seed")
    }
    rows = (tuple(a for a in actions if a.kind == "F" or a.stage not in idle) for actions in schedule.workers)
    return replace(schedule, workers=tuple(rows))


def _measure_sizes(measured: Timeline, sizes: Sequence[int]) -> list[list[StageCosts]]:
    """Return, for each micro-batch, the costs of each stage for those of its size; nothing without ``sizes``."""
    step, of_size = measured.step, dict[int, list[StageCosts]]()
    for size in set(sizes):
        micro_batches = [m for m, n in enumerate(sizes) if n == size]
        of_size[size] = [measure_stage_costs(step, stage, micro_batches) for stage in range(step.stages)]
    return [of_size[size] for size in sizes]
