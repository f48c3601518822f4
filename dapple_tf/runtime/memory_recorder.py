"""Memory of the steps that a pipeline runs: predicted for what was built, measured while steps are recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dapple_tf.compiler import StagedModel, pipeline_graph
from dapple_tf.distributed.membership import Job
from dapple_tf.frontend.capture import Captured
from dapple_tf.memory.meter import Measured, MemoryMeter
from dapple_tf.memory.predict import StageMemory, predict_memory
from dapple_tf.memory.report import Measurement, Report, make_report
from dapple_tf.plan import Plan
from dapple_tf.timeline.timeline import Timeline
from graph_passes.schedules.policies import make_schedule

# Sampling slows a step down, by a quarter where the heap is in many pieces, and so spoils its times: the first recorded
# step, which also makes what stays, and the second are measured, and then one of many.
_FIRST, _EVERY = 2, 20


@dataclass(frozen=True, eq=False)
class Built:
    """What a step was built from: a traced and cut model, and the plan for a batch of ``batch_size`` samples."""

    captured: Captured
    staged: StagedModel
    plan: Plan
    batch_size: int

    def same(self, other: Built) -> bool:
        """Whether steps built from either are one."""
        return (self.staged is other.staged, self.plan, self.batch_size) == (True, other.plan, other.batch_size)


class MemoryRecorder:
    """Keeps what the last measured step held, of this process or of all ranks of a ``job``."""

    def __init__(self, job: Job | None) -> None:
        self._job = job
        self._steps = 0
        self._measured: tuple[Measurement, ...] = ()
        self._predicted: tuple[Built, tuple[StageMemory, ...]] | None = None
        self.built: Built | None = None  # of the last recorded step

    @contextlib.contextmanager
    def watch(self, built: Built, devices: Sequence[str]) -> Iterator[None]:
        """Measure the step that the block runs, if it is its turn; in a job every rank must do so.

        ``devices``: names of those that the plan counts.
        """
        again = self.built is not None and built.same(self.built)
        number, measured = (self._steps + 1, self._measured) if again else (1, ())
        if number > _FIRST and number % _EVERY:
            yield
        else:
            with MemoryMeter(devices) as meter:
                yield
            measured = attribute(meter.measured, devices, self._job)
        self.built, self._steps, self._measured = built, number, measured  # not where the step failed

    def report(self, built: Built, timeline: Timeline | None) -> Report:
        """The report of what was built; with a ``timeline``, that of the last recorded step, and what it held."""
        schedule = make_schedule(built.plan.schedule, len(built.plan.stages), built.plan.micro_batches)
        if self._predicted is None or not built.same(self._predicted[0]):  # to predict takes seconds for a large model
            self._predicted = built, predict_built(built, ranks=self._job is not None)
        measured = () if timeline is None else self._measured
        return make_report(built.plan, schedule, self._predicted[1], timeline, measured)


def predict_built(built: Built, *, ranks: bool) -> tuple[StageMemory, ...]:
    """The predicted memory of every stage of what was built; ``ranks``: its devices are a job's processes."""
    plan = built.plan
    schedule = make_schedule(plan.schedule, len(plan.stages), plan.micro_batches)
    # The whole job's graph, wherever its devices are: a rank's own says nothing of the other stages.
    devices = [f"device:{i}" for i in range(1 + max(d for stage in plan.stages for d in stage.devices))]
    graph = pipeline_graph(built.staged, built.captured, plan, devices, "home")
    return predict_memory(graph, schedule, built.staged, built.captured.signature, built.batch_size, ranks=ranks)


def attribute(measured: Sequence[Measured], devices: Sequence[str], job: Job | None) -> tuple[Measurement, ...]:
    """Whose measurements these are; in a job, where every rank must call it, those of all ranks.

    ``devices``: names of those that the plan counts.
    """
    if job is not None:
        return tuple((rank, found) for rank, own in enumerate(job.gather(tuple(measured))) for found in own)
    places = {name.rpartition("device:")[2]: i for i, name in enumerate(devices)}
    # All CPUs are measured together: they belong to the one device that there is, or to no single one.
    only = 0 if len(devices) == 1 else None
    return tuple((places.get(found.device, only), found) for found in measured)
