"""Shared by the tests of comparators: all cuts, and the fastest way to run stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from dapple_tf.errors import ScheduleError
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.simulator.simulate import simulate


def all_bounds(blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield the bounds of every division of ``blocks`` blocks into contiguous stages: 0, ..., blocks."""
    for cuts in itertools.combinations(range(1, blocks), stages - 1):
        yield (0, *cuts, blocks)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write ``total`` as a sum of ``parts`` whole numbers from 1 on, in order."""
    for ends in all_bounds(total, parts):
        yield tuple(b - a for a, b in itertools.pairwise(ends))


def limited_step(problem: PlanningProblem, stages: Sequence[StagePlan], size: int, schedule: str) -> float:
    """Return the seconds of a step under ``schedule``; of a policy with the largest D that fits; infinity if none."""
    if max(stage.replicas for stage in stages) > size:
        return float("inf")
    m = problem.global_batch_size // size
    limits = [f"{schedule}:D={limit}" for limit in range(m, 0, -1)] if schedule == "dapple-a" else []
    for name in (schedule, *limits):
        plan = Plan(
            model=problem.profile.model,
            planner="test",
            global_batch_size=problem.global_batch_size,
            micro_batch_size=size,
            micro_batches=m,
            schedule=name,
            recompute=problem.recompute,
            stages=tuple(stages),
            overlap=problem.overlap,
        )
        try:
            timeline = simulate(plan, problem.profile, problem.cluster, optimizer_slots=problem.optimizer_slots)
        except ScheduleError:  # not for this number of micro-batches
            continue
        if all(timeline.fits):
            return timeline.step_seconds
    return float("inf")
