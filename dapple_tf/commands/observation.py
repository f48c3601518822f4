"""Which steps of a training run are recorded, and what of each step is written for TensorBoard."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dapple_tf.commands.tensorboard import recorded_scalars, step_scalars
from dapple_tf.distributed.membership import Job

if TYPE_CHECKING:
    from dapple_tf.commands.tensorboard import Scalars
    from dapple_tf.commands.training_loop import StepResult
    from dapple_tf.runtime.step import PipelinedStep

_MAX_COST = 0.01  # of a step's time, for recording that is always on
_MEASURED_STEPS = 4  # steps that measure the cost of recording; the first costs more than the others


def choose_interval(cost_seconds: float, step_seconds: float) -> int:
    """Return n such that recording every n-th step costs at most 1% of the time."""
    return max(1, math.ceil(cost_seconds / (_MAX_COST * step_seconds)))


class Observer:
    """Runs the steps of a training run, numbered ``first`` to ``last``, and records some of them.

    ``trace``: the last step is recorded. ``curves``: every n-th step is; the first four measure what recording costs,
    and rank 0 chooses n for all ranks of the ``job``. ``scalars``: where rank 0 writes the curves. ``tell``: prints a
    line.
    """

    def __init__(
        self,
        step: PipelinedStep,
        first: int,
        last: int,
        *,
        trace: bool,
        curves: bool,
        scalars: Scalars | None,
        job: Job | None,
        tell: Callable[[str], None],
    ) -> None:
        self._step = step
        self._first, self._last = first, last
        self._trace, self._curves = trace, curves
        self._scalars = scalars
        self._job = job
        self._tell = tell
        self._number = first - 1
        self._recorded = False
        self._interval = 1
        self._costs: list[float] = []
        self._seconds: list[float] = []

    def run(self, *batch: Any) -> Any:
        """Run the next step on a batch, recorded or not, and return its result."""
        self._number += 1
        on_curve = self._curves and (self._number - self._first) % self._interval == 0
        self._recorded = on_curve or (self._trace and self._number == self._last)
        return (self._step.record if self._recorded else self._step)(*batch)

    def observe(self, done: StepResult) -> None:
        """Write the curves' points of a step that is done; after the first four steps choose the interval."""
        begin = time.perf_counter()
        if self._scalars is not None:
            values = step_scalars(done.loss, done.samples / done.seconds)
            if self._recorded:
                values |= recorded_scalars(self._step.timeline)
            self._scalars.write(done.number, values)
        if self._curves and done.number < self._first + _MEASURED_STEPS:
            self._costs.append(self._step.recording_seconds + time.perf_counter() - begin)
            self._seconds.append(done.seconds)
            if len(self._costs) == _MEASURED_STEPS:
                self._choose_interval()

    def _choose_interval(self) -> None:
        cost, seconds = min(self._costs[1:]), statistics.median(self._seconds[1:])
        interval = choose_interval(cost, seconds)
        self._interval = interval if self._job is None else self._job.broadcast(interval)
        if self._interval > 1:
            self._tell(f"one step in {self._interval} is recorded: recording a step takes {cost * 1e3:.2g} ms")
