"""Pipelines of known costs, whose stages sleep instead of computing: the step under each policy.

A case is built twice: as a model of ``benchmarks.waits`` that runs, and as a profile for the simulator and the planner.
(A measured profile would be of no use: it subtracts the time in which the process does not compute, which is all.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dapple_tf.autoplan.schedule_auto import ScheduleChoice, choose_schedule
from dapple_tf.planner.api import make_problem
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.cluster import Cluster, Link, Server
from dapple_tf.profiler.profile import LayerCost, Profile
from dapple_tf.simulator.simulate import simulate
from dapple_tf.timeline.timeline import Timeline

POLICIES = ("dapple-a", "dapple-b")
ROWS = 8  # samples of a micro-batch


@dataclass(frozen=True)
class Case:
    """A pipeline: the number of layers of each stage, all of which sleep ``forward`` and ``backward`` seconds.

    The seconds are of a micro-batch of ``rows`` samples, and in proportion of fewer. ``link``: between the devices'
    hosts. ``ratio``: the ACR (DAPPLE, section V.C) that the bytes of a boundary are chosen for, as far as the link's
    latency allows. ``replicas``: of each stage; empty for one each.
    """

    layer_counts: tuple[int, ...]
    forward: float
    backward: float
    micro_batches: int
    link: Link
    ratio: float = 0.0
    replicas: tuple[int, ...] = ()
    rows: int = ROWS

    @property
    def width(self) -> int:
        """Columns (float32) with which a boundary's two transfers take ``ratio`` of a stage's mean compute."""
        compute = (self.forward + self.backward) * sum(self.layer_counts) / len(self.layer_counts)
        seconds = self.ratio * compute / 2 - self.link.latency
        return max(1, round(seconds * self.link.bandwidth / (4 * self.rows)))

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """The stages, on devices in order."""
        counts, replicas = self.layer_counts, self.replicas or (1,) * len(self.layer_counts)
        ends, used = (list(itertools.accumulate(each)) for each in (counts, replicas))
        each = zip(ends, counts, used, replicas, strict=True)
        return tuple(StagePlan(end - count, end - 1, tuple(range(to - own, to))) for end, count, to, own in each)

    @property
    def problem(self) -> PlanningProblem:
        """The planning problem with the known costs: sleeps, bytes of the boundaries, and the link."""
        sent = 4.0 * self.rows * self.width
        count = sum(self.layer_counts)
        layers = tuple(
            LayerCost(f"wait_{i}", self.forward, self.backward, sent, sent, 4.0 * self.width) for i in range(count)
        )
        servers = tuple(Server(f"host{i}", 1) for i in range(sum(stage.replicas for stage in self.stages)))
        cluster = Cluster(servers, 8e9, self.link, self.link)
        profile = Profile("waits", self.rows, "waiting", layers)
        batch = self.rows * self.micro_batches
        return make_problem(profile, cluster, global_batch_size=batch, micro_batch_size=self.rows)

    def predict(self, policy: str) -> Timeline:
        """Return the simulated step under a policy."""
        problem = self.problem
        return simulate(problem.make_plan(self.stages, self.rows, policy, "policies"), problem.profile, problem.cluster)

    def choose(self) -> ScheduleChoice:
        """Return what ``schedule="auto"`` chooses for these stages, from the known costs in place of a profile."""
        costs = {self.micro_batches: self.predict(POLICIES[0]).costs}
        return choose_schedule(costs, self.problem.cluster.least_memory, measured=True)

    def make_steps(self) -> dict[str, Callable[[bool], Timeline | None]]:
        """Return a function for each policy that runs one step, and returns its timeline if called with True."""
        return {policy: self._make_step(policy) for policy in POLICIES}

    def _make_step(self, policy: str) -> Callable[[bool], Timeline | None]:
        from benchmarks.waits import stage_names, waits

        count = sum(self.layer_counts)
        # Backward consists of the gradient of the inputs only, so the tensor to send back is ready when it ends.
        timed = waits(
            count,
            forward=self.forward,
            inputs=self.backward,
            weights=0.0,
            width=self.width,
            batch_size=self.rows * self.micro_batches,
            devices=(0,) * count if self.replicas else None,  # in a job of one rank a device: one at a time
            samples=self.rows,
        )
        names = ["wait_0", *stage_names(count)]
        step = timed.pipeline(
            stages=[names[stage.first_layer] for stage in self.stages[1:]],
            replicas=self.replicas or None,
            micro_batches=self.micro_batches,
            schedule=policy,
            inexact="allow",  # that Python code treats samples one by one is not known
        )

        def run(record: bool) -> Timeline | None:
            if record:
                step.record(*timed.batch)
                found: Timeline = step.timeline
                return found
            float(step(*timed.batch))
            return None

        return run


def overlapped_share(timeline: Timeline) -> float:
    """Return the part of the transfers' time during which both ends run an action."""
    total = both = 0.0
    for transfer in timeline.transfers:
        total += transfer.end - transfer.start
        source, target = (_busy(timeline, stage) for stage in (transfer.source, transfer.target))
        for first in source:
            for second in target:
                start, end = max(transfer.start, first[0], second[0]), min(transfer.end, first[1], second[1])
                both += max(0.0, end - start)
    return both / total if total else 0.0


def _busy(timeline: Timeline, stage: int) -> Sequence[tuple[float, float]]:
    return [(event.start, event.end) for event in timeline.events if event.action.stage == stage]
