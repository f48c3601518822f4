"""Plans that need no search: one device, data parallelism, and pipelines whose stages have equal replica counts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from dapple_tf.planner.costs import make_stages
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.planner.search.balanced_cuts import even_starts
from dapple_tf.planner.search.fit_cuts import fit_cuts
from dapple_tf.plans import StagePlan


def data_parallel(problem: PlanningProblem, devices: int | None = None) -> tuple[StagePlan, ...]:
    """Return one stage on all devices, or on the first ``devices``."""
    return (StagePlan(0, len(problem.profile.layers) - 1, tuple(range(devices or problem.cluster.devices))),)


def even_pipeline(problem: PlanningProblem, stages: int, replicas: int = 1) -> tuple[StagePlan, ...]:
    """Return ``stages`` stages of nearly equal compute, each on ``replicas`` devices, in the order of the devices."""
    return even_stages(problem, WorkerMap.one_per_stage(stages), replicas)


def even_stages(problem: PlanningProblem, workers: WorkerMap, replicas: int = 1) -> tuple[StagePlan, ...]:
    """Return stages of nearly equal compute; each worker is on ``replicas`` devices, in the order of the devices."""
    forward, backward = problem.chain.block_seconds(problem.profile.batch_size)
    starts = even_starts(forward + backward, workers.stages)
    devices = (range(worker * replicas, (worker + 1) * replicas) for worker in workers.worker_of)
    return make_stages(problem.chain, [*starts, len(forward)], devices)


def baseline_candidates(problem: PlanningProblem) -> list[Candidate]:
    """Return one device, DP, and even pipelines.

    A pipeline has as many stages as possible, or a number of stages that divides the number of devices.
    """
    return [c for stages, origin in baseline_stages(problem) for c in problem.evaluate_all_sizes(stages, origin)]


def leading_baselines(problem: PlanningProblem) -> list[Candidate]:
    """Return the ``baseline_candidates`` that beat all earlier ones of their origin, or of their micro-batch size.

    To save time, the simulation of any other one stops as soon as it is known to be slower.
    """
    found, least = list[Candidate](), dict[str | int, float]()
    for stages, origin in baseline_stages(problem):
        for size in problem.micro_batch_sizes:
            ceiling = max(least.get(size, math.inf), least.get(origin, math.inf))
            candidate = problem.evaluate(stages, size, origin, ceiling=ceiling)
            if candidate is not None:
                found.append(candidate)
                for key in (size, origin):
                    least[key] = min(least.get(key, math.inf), candidate.seconds)
    return found


def fitted_baseline_candidates(problem: PlanningProblem) -> list[Candidate]:
    """Return the pipelines of ``baseline_candidates``, with cuts that allow for AllReduce, transfers and memory."""
    found = []
    for stages, replicas in _even_shapes(problem):
        devices = [range(i * replicas, (i + 1) * replicas) for i in range(stages)]
        for size in problem.micro_batch_sizes:
            if replicas <= size and (fitted := fit_cuts(problem, devices, size)) is not None:
                found.append(problem.evaluate(fitted, size, "straight"))
    return [candidate for candidate in found if candidate is not None]


def baseline_stages(problem: PlanningProblem) -> Iterator[tuple[tuple[StagePlan, ...], str]]:
    """Yield the stages and the origin of every baseline."""
    yield data_parallel(problem), "DP"
    if problem.cluster.devices > 1:
        yield data_parallel(problem, 1), "one device"
    for stages, replicas in _even_shapes(problem):
        yield even_pipeline(problem, stages, replicas), "straight"


def _even_shapes(problem: PlanningProblem) -> list[tuple[int, int]]:
    """Return pairs: the number of stages, and the replicas of each.

    They are the pairs that use every device, and the pair with as many stages as possible.
    """
    total, blocks = problem.cluster.devices, len(problem.chain.parameter_bytes)
    most = min(total, blocks)
    return [(stages, total // stages) for stages in range(2, most + 1) if total % stages == 0 or stages == most]
