"""The plans that need no search: data parallelism, and straight pipelines of even load."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from dapple_tf.plan import StagePlan
from dapple_tf.planner.balanced_cuts import even_starts
from dapple_tf.planner.fit_cuts import fit_cuts
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem

_MOST_DEVICES = 64  # beyond, there are too many of them


def data_parallel(problem: PlanningProblem, devices: int | None = None) -> tuple[StagePlan, ...]:
    """One stage on all devices (or the first so many)."""
    return (StagePlan(0, len(problem.profile.layers) - 1, tuple(range(devices or problem.cluster.devices))),)


def even_pipeline(problem: PlanningProblem, stages: int, replicas: int = 1) -> tuple[StagePlan, ...]:
    """So many stages of about equal compute, each on ``replicas`` devices, in the devices' order."""
    forward, backward = problem.chain.block_seconds(problem.profile.batch_size)
    positions = problem.chain.positions
    bounds = [positions[start] for start in even_starts(forward + backward, stages)] + [positions[-1]]
    return tuple(
        StagePlan(first, end - 1, tuple(range(i * replicas, (i + 1) * replicas)))
        for i, (first, end) in enumerate(itertools.pairwise(bounds))
    )


def baseline_candidates(problem: PlanningProblem) -> list[Candidate]:
    """One device, DP, and even pipelines of every number of stages that shares the devices evenly."""
    found = problem.evaluate_all_sizes(data_parallel(problem), "DP")
    if problem.cluster.devices > 1:
        found += problem.evaluate_all_sizes(data_parallel(problem, 1), "one device")
    for shape in _even_shapes(problem):
        found += problem.evaluate_all_sizes(even_pipeline(problem, *shape), "straight")
    return found


def fitted_baseline_candidates(problem: PlanningProblem) -> list[Candidate]:
    """The same, cut with an eye on AllReduce, transfers and memory, too."""
    return _fit_shapes(problem, _even_shapes(problem), problem.micro_batch_sizes)


def equal_replica_candidates(problem: PlanningProblem, sizes: Sequence[int]) -> list[Candidate]:
    """Pipelines of any number of stages of equally many replicas, on all devices or fewer; on up to 64 devices."""
    total, blocks = problem.cluster.devices, len(problem.chain.parameter_bytes)
    counts = range(1, total + 1) if total <= _MOST_DEVICES else ()
    shapes = [(stages, r) for r in counts for stages in range(2, min(total // r, blocks) + 1)]
    return _fit_shapes(problem, shapes, sizes)


def _fit_shapes(problem: PlanningProblem, shapes: Iterable[tuple[int, int]], sizes: Sequence[int]) -> list[Candidate]:
    """Pipelines of so many stages of so many replicas, in the devices' order, cut by ``fit_cuts``."""
    found = []
    for stages, replicas in shapes:
        devices = [range(i * replicas, (i + 1) * replicas) for i in range(stages)]
        for size in sizes:
            if replicas <= size and (fitted := fit_cuts(problem, devices, size)) is not None:
                found.append(problem.evaluate(fitted, size, "straight"))
    return [candidate for candidate in found if candidate is not None]


def refit(problem: PlanningProblem, candidate: Candidate) -> list[Candidate]:
    """The candidate's devices with cuts fitted anew among all that there are."""
    fitted = fit_cuts(problem, [stage.devices for stage in candidate.stages], candidate.micro_batch_size)
    found = fitted and problem.evaluate(fitted, candidate.micro_batch_size, candidate.origin)
    return [found] if found else []


def _even_shapes(problem: PlanningProblem) -> list[tuple[int, int]]:
    """Stages and replicas of each."""
    total, blocks = problem.cluster.devices, len(problem.chain.parameter_bytes)
    most = min(total, blocks)
    return [(stages, total // stages) for stages in range(2, most + 1) if total % stages == 0 or stages == most]
