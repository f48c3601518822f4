"""Recorded steps: what they cost is a copy of the time stamps; what these say is worked out when it is asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dapple_tf.distributed.clocks import Clocks
from dapple_tf.distributed.membership import Job
from dapple_tf.errors import UsageError
from dapple_tf.plan import Plan
from dapple_tf.simulator.simulate import Timeline as Simulated
from dapple_tf.timeline.recording import Recording, make_recording
from dapple_tf.timeline.timeline import Stamp, Timeline, fill_stamps, make_timeline, name_stamps
from graph_passes.ir.graph import Graph

# What the two stamps of a node add to a step, measured on steps of 3 and of 13 ms.
_SECONDS_A_NODE = 8e-6


@dataclass(frozen=True)
class _Taken:
    """The last recorded step: of each process what was timed, and the times."""

    named: Sequence[Sequence[Stamp]]
    times: Sequence[Any]
    plan: Plan
    simulated: Simulated | None


class Recorder:
    """Keeps the last recorded step of this process, or of all ranks of a ``job``."""

    def __init__(self, job: Job | None) -> None:
        self._job = job
        self._clocks = None if job is None else Clocks(job)
        self._named: list[tuple[Graph, Sequence[Sequence[Stamp]]]] = []
        self._taken: _Taken | None = None
        self._timeline: Timeline | None = None
        self.cost_seconds = 0.0

    def take(self, graph: Graph, stamps: Any, plan: Plan, simulated: Simulated | None = None) -> None:
        """Keep the times of a step of ``graph`` that has just run under ``plan``; in a job every rank must call this.

        ``simulated``: the step as it was predicted when the plan was made. ``cost_seconds`` is then about what the
        recording has cost this step.
        """
        begin = time.perf_counter()
        times = stamps.numpy()
        named = self._name(graph)
        gathered = [times] if self._clocks is None else self._clocks.gather(times)
        self._taken, self._timeline = _Taken(named, gathered, plan, simulated), None
        self.cost_seconds = time.perf_counter() - begin + _SECONDS_A_NODE * len(times) / 2

    def _name(self, graph: Graph) -> Sequence[Sequence[Stamp]]:
        """What each process times; the ranks of a job tell each other once for every graph."""
        for known, named in self._named:
            if known is graph:
                return named
        own = name_stamps(graph, None if self._job is None else f"rank:{self._job.rank}")
        named = [own] if self._job is None else self._job.gather(own)
        self._named.append((graph, named))
        return named

    @property
    def timeline(self) -> Timeline:
        """When everything ran in the last recorded step; UsageError where there is none."""
        if self._timeline is None:
            taken = self._known()
            stamps = [fill_stamps(named, times) for named, times in zip(taken.named, taken.times, strict=True)]
            self._timeline = make_timeline([stamp for found in stamps for stamp in found])
        return self._timeline

    @property
    def recording(self) -> Recording:
        """The last recorded step beside its prediction; UsageError where there is none."""
        taken = self._known()
        return make_recording(taken.plan.model, self.timeline, taken.plan, taken.simulated)

    def _known(self) -> _Taken:
        if self._taken is None:
            raise UsageError("no step was recorded: call step.record(batch) first")
        return self._taken
