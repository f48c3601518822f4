"""Which steps of a training loop are recorded, and what of them is written for TensorBoard."""

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

_SHARE = 0.01  # of a step, that recording may cost when it is left on
_TRIED = 4  # steps that show what it costs; the first also builds
_TRACED = 3  # steps before a picture: the first also builds, the memory of the first two is measured, which slows them


def choose_interval(cost_seconds: float, step_seconds: float) -> int:
    """Record every so many-th step, so that it costs at most 1% of the time: 1 where recording is that cheap."""
    return max(1, math.ceil(cost_seconds / (_SHARE * step_seconds)))


class Observer:
    """Runs the steps of a loop, the first of which is ``first`` and the last ``last``, and records some of them.

    With ``trace`` the last three, of which the last is looked at. With ``curves`` every n-th: a few show at first what
    recording costs, and rank 0's n is that of all ranks of a ``job``. ``scalars`` is where rank 0 writes.
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
        """Run the next step, recorded or not."""
        self._number += 1
        every = self._curves and (self._number - self._first) % self._interval == 0
        self._recorded = every or (self._trace and self._number > self._last - _TRACED)
        return (self._step.record if self._recorded else self._step)(*batch)

    def observe(self, done: StepResult) -> None:
        """Write what a step gave; the first few show what recording costs."""
        begin = time.perf_counter()
        if self._scalars is not None:
            values = step_scalars(done.loss, done.samples / done.seconds)
            if self._recorded:
                values |= recorded_scalars(self._step.timeline)
            self._scalars.write(done.number, values)
        if self._curves and done.number < self._first + _TRIED:
            self._costs.append(self._step.recording_seconds + time.perf_counter() - begin)
            self._seconds.append(done.seconds)
            if len(self._costs) == _TRIED:
                self._decide()

    def _decide(self) -> None:
        cost, seconds = min(self._costs[1:]), statistics.median(self._seconds[1:])
        interval = choose_interval(cost, seconds)
        self._interval = interval if self._job is None else self._job.broadcast(interval)
        if self._interval > 1:
            self._tell(f"one step in {self._interval} is recorded: to record one costs {cost * 1e3:.2g} ms")
