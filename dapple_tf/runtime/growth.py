"""Decide whether an elastic job, which has just saved, is to end and be started again with more ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from dapple_tf.distributed.membership import Job
from dapple_tf.launcher.restart import HostChanges, Offers, is_driven, read_start
from dapple_tf.profiler.units import format_seconds
from dapple_tf.runtime.step import PipelinedStep
from dapple_tf.wording import format_count

_TIMED_STEPS = 50  # the median of the last ones counts


class Growth:
    """The decision of a job of ``step``; ``tell`` prints a line. All ranks must make the same calls.

    More ranks are worth while if the simulator says that they save more time in the steps that are left than a new
    start takes, which is measured: from when the launcher started this job until its first step was done.
    """

    def __init__(self, step: PipelinedStep, job: Job, tell: Callable[[str], None]) -> None:
        self._step, self._job, self._tell = step, job, tell
        self._seconds: list[float] = []
        self._start_seconds: float | None = None
        self._offers = Offers()
        self._changes = HostChanges() if is_driven() and self._job.rank == 0 else None

    def note_step(self, seconds: float) -> None:
        """Note the seconds of a step; those of the first one count as part of the start."""
        if self._start_seconds is None:
            start = read_start()
            self._start_seconds = 0.0 if start is None else max(0.0, time.time() - start.began)
        else:
            self._seconds = [*self._seconds[1 - _TIMED_STEPS :], seconds]

    def wants_more_ranks(self, steps_left: int) -> bool:
        """Return, on every rank, whether the job is to end now, to go on with the ranks that the launcher offers."""
        if read_start() is None:
            return False
        return self._job.run_on_rank_0(lambda: self._decide(steps_left))

    def _decide(self, steps_left: int) -> bool:
        if self._changes is not None:
            if self._changes.noted:
                self._tell(
                    "the hosts have changed: Horovod does not say to how many ranks, so the job goes on with them"
                )
            return self._changes.noted
        hosts = self._offers.read()
        ranks = sum(count for _, count in hosts)
        if ranks <= self._job.size:
            return False
        found = self._step.predict_on(hosts)
        if found is None or not self._seconds or self._start_seconds is None:
            self._tell(
                f"{ranks} ranks are possible: the step time with them is not known, so the job goes on with them"
            )
            return True
        now, then = found
        measured = statistics.median(self._seconds)
        saved = steps_left * measured * (1 - then / now)
        about = (
            f"{ranks} ranks would take {format_seconds(then)} for a step instead of {format_seconds(now)} (simulated), "
            f"which saves {max(0.0, saved):.0f} s over {format_count(steps_left, 'more step')}; a new start takes "
            f"{self._start_seconds:.0f} s"
        )
        wanted = saved > self._start_seconds
        self._tell(f"{about}: the job {'goes on with them' if wanted else 'stays as it is'}")
        return wanted
