"""Memory of recorded steps: predicted for the compiled step, and measured while it is rehearsed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dapple_tf.compiler import PlannedModel
from dapple_tf.distributed.membership import Job
from dapple_tf.errors import StepError
from dapple_tf.memory.meter import MeasuredMemory, MemoryMeter, packs_operands
from dapple_tf.memory.predict import StageMemory, predict_plan_memory
from dapple_tf.memory.report import DeviceMeasurement, Report, make_report
from dapple_tf.runtime.compile_step import CompiledStep
from dapple_tf.runtime.rehearsal import rehearse
from dapple_tf.timeline.events import MemoryCurve
from dapple_tf.timeline.timeline import Timeline

# If a step cannot be rehearsed, its first two recorded runs are measured: the first one also allocates memory that
# stays. The timelines of these runs have these notes.
_NOTES = (
    "this was the first run of the step, whose effects (prints, Python code or random draws) cannot be undone, so it "
    "was not rehearsed: the times include TensorFlow's setup and the measurement of memory",
    "memory was measured in this step: its times are longer than without",
)


@dataclass
class _Measured:
    """The memory measured for a planned model, and how many of its real runs were measured."""

    planned: PlannedModel
    measurements: tuple[DeviceMeasurement, ...] = ()
    rehearsed: bool = False
    runs: int = 0


class MemoryRecorder:
    """Keeps the memory of recorded steps of all ranks of a ``job``.

    ``planned``: the model and plan of the last recorded step.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._known: list[_Measured] = []
        self._predicted: tuple[PlannedModel, tuple[StageMemory, ...]] | None = None
        self.planned: PlannedModel | None = None

    def is_measured(self, planned: PlannedModel) -> bool:
        """Return whether the memory of ``planned`` was measured before."""
        known = self._of(planned)
        return known.rehearsed or known.runs > 0

    def keep_rehearsed(self, planned: PlannedModel, measured: tuple[DeviceMeasurement, ...]) -> None:
        """Keep what was measured when a step of ``planned`` was rehearsed."""
        known = self._of(planned)
        known.measurements, known.rehearsed = measured, True

    @contextlib.contextmanager
    def recorded_run(self, planned: PlannedModel, devices: Sequence[str]) -> Iterator[str]:
        """Run a recorded step in this context, and measure its memory if it was not rehearsed.

        Yields the note of its timeline. In a job every rank must enter this.
        """
        known = self._of(planned)
        if known.rehearsed or known.runs >= len(_NOTES):
            yield ""
        else:
            with MemoryMeter(devices) as meter:
                self._job.gather(None)  # no rank sends before all ranks measure, as in ``rehearse``
                yield _NOTES[known.runs]
            # When the first action of this run started is not known yet.
            untimed = [replace(memory, samples=()) for memory in meter.measured]
            known.measurements = attribute(untimed, devices, self._job)
            known.runs += 1
        self.planned = planned  # not reached where the step fails

    def report(self, planned: PlannedModel, timeline: Timeline | None) -> Report:
        """Return the report of ``planned``; with the ``timeline`` of a recorded step, also its measured memory."""
        # Predicting takes seconds for a large model.
        if self._predicted is None or not planned.same(self._predicted[0]):
            memory = predict_plan_memory(planned, ranks=not self._job.is_alone, packs=packs_operands())
            self._predicted = planned, memory
        measured = () if timeline is None else self._of(planned).measurements
        return make_report(planned.plan, self._predicted[1], timeline, measured)

    def curves(self, planned: PlannedModel) -> tuple[MemoryCurve, ...]:
        """Return the memory over time that was measured when a step of ``planned`` was rehearsed, if it was.

        Its times are fractions of the run of the process, which is the device ``rank:1`` in a job.
        """
        return tuple(
            MemoryCurve(memory.device if self._job.is_alone else f"rank:{device}", *zip(*memory.samples, strict=True))
            for device, memory in self._of(planned).measurements
            if memory.samples
        )

    def _of(self, planned: PlannedModel) -> _Measured:
        for known in self._known:
            if known.planned.same(planned):
                return known
        self._known.append(_Measured(planned))
        return self._known[-1]


def rehearse_phases(
    recorders: Sequence[MemoryRecorder],
    compiled: Sequence[CompiledStep],
    batch: Sequence[Any],
    devices: Sequence[str],
    job: Job,
) -> None:
    """Rehearse a step and measure the memory of its phases, unless that was done before; each has one of ``recorders``.

    ``compiled``: the phases. ``batch``: the flattened tensors. ``devices``: names of the plan's devices. In a job every
    rank must call it.
    """
    phases = list(zip(recorders, compiled, strict=True))
    if all(recorder.is_measured(step.planned) for recorder, step in phases):
        return
    try:
        measured = rehearse(compiled[-1].program, batch, devices, job)
    except StepError:
        if not job.is_alone:  # the failure has been reported to the other ranks already
            raise
        return  # the real step fails too, and its error describes the state of the variables
    for (recorder, step), own in zip(phases, measured, strict=True):
        recorder.keep_rehearsed(step.planned, attribute(own, devices, job))


def attribute(measured: Sequence[MeasuredMemory], devices: Sequence[str], job: Job) -> tuple[DeviceMeasurement, ...]:
    """Return each measurement with the index of its device in the plan; in a job, the measurements of all ranks.

    ``devices``: names of the plan's devices. In a job every rank must call this.
    """
    if not job.is_alone:
        found = tuple(replace(memory, base_bytes=job.base_bytes) for memory in measured)
        return tuple((rank, memory) for rank, own in enumerate(job.gather(found)) for memory in own)
    indices = {name.rpartition("device:")[2]: i for i, name in enumerate(devices)}
    # All CPU devices are measured together: the plan has only one, or the memory belongs to no single device.
    only = 0 if len(devices) == 1 else None
    return tuple((indices.get(memory.device, only), memory) for memory in measured)
