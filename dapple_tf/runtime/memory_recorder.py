"""Memory of the steps that a pipeline runs: predicted for what was built, measured while steps are recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from dapple_tf.compiler import PlannedModel
from dapple_tf.distributed.membership import Job
from dapple_tf.memory.meter import MeasuredMemory, MemoryMeter
from dapple_tf.memory.predict import StageMemory, predict_plan_memory
from dapple_tf.memory.report import DeviceMeasurement, Report, make_report
from dapple_tf.timeline.timeline import Timeline
from graph_passes.schedules.policies import build_schedule

# Sampling slows a step down, by a quarter where the heap is in many pieces, and so spoils its times: the first recorded
# step, which also makes what stays, and the second are measured, and then one of many.
_FIRST, _EVERY = 2, 20


class MemoryRecorder:
    """Keeps what the last measured step held, of this process or of all ranks of a ``job``."""

    def __init__(self, job: Job | None) -> None:
        self._job = job
        self._steps = 0
        self._measured: tuple[DeviceMeasurement, ...] = ()
        self._predicted: tuple[PlannedModel, tuple[StageMemory, ...]] | None = None
        self.planned: PlannedModel | None = None  # of the last recorded step

    @contextlib.contextmanager
    def watch(self, planned: PlannedModel, devices: Sequence[str]) -> Iterator[None]:
        """Measure the step that the block runs, if it is its turn; in a job every rank must do so.

        ``devices``: names of those that the plan counts.
        """
        again = self.planned is not None and planned.same(self.planned)
        number, measured = (self._steps + 1, self._measured) if again else (1, ())
        if number > _FIRST and number % _EVERY:
            yield
        else:
            with MemoryMeter(devices) as meter:
                yield
            measured = attribute(meter.measured, devices, self._job)
        self.planned, self._steps, self._measured = planned, number, measured  # not where the step failed

    def report(self, planned: PlannedModel, timeline: Timeline | None) -> Report:
        """The report of what was built; with a ``timeline``, that of the last recorded step, and what it held."""
        schedule = build_schedule(planned.plan.schedule, len(planned.plan.stages), planned.plan.micro_batches)
        # Predicting takes seconds for a large model.
        if self._predicted is None or not planned.same(self._predicted[0]):
            self._predicted = planned, predict_plan_memory(planned, ranks=self._job is not None)
        measured = () if timeline is None else self._measured
        return make_report(planned.plan, schedule, self._predicted[1], timeline, measured)


def attribute(
    measured: Sequence[MeasuredMemory], devices: Sequence[str], job: Job | None
) -> tuple[DeviceMeasurement, ...]:
    """Whose measurements these are; in a job, where every rank must call it, those of all ranks.

    ``devices``: names of those that the plan counts.
    """
    if job is not None:
        return tuple((rank, found) for rank, own in enumerate(job.gather(tuple(measured))) for found in own)
    places = {name.rpartition("device:")[2]: i for i, name in enumerate(devices)}
    # All CPUs are measured together: they belong to the one device that there is, or to no single one.
    only = 0 if len(devices) == 1 else None
    return tuple((places.get(found.device, only), found) for found in measured)
