"""The plans that need no search: data parallelism, and straight pipelines of even load."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from dapple_tf.plan import StagePlan
from dapple_tf.planner.balanced_cuts import even_starts
from dapple_tf.planner.fit_cuts import fit_cuts
from dapple_tf.planner.planning_problem import Candidate, Task

_MOST_DEVICES = 64  # beyond, there are too many of them


def data_parallel(task: Task, devices: int | None = None) -> tuple[StagePlan, ...]:
    """One stage on all devices (or the first so many)."""
    return (StagePlan(0, len(task.profile.layers) - 1, tuple(range(devices or task.cluster.devices))),)


def even_pipeline(task: Task, stages: int, replicas: int = 1) -> tuple[StagePlan, ...]:
    """So many stages of about equal compute, each on ``replicas`` devices, in the devices' order."""
    forward, backward = task.chain.block_seconds(task.profile.batch_size)
    positions = task.chain.positions
    bounds = [positions[start] for start in even_starts(forward + backward, stages)] + [positions[-1]]
    return tuple(
        StagePlan(first, end - 1, tuple(range(i * replicas, (i + 1) * replicas)))
        for i, (first, end) in enumerate(itertools.pairwise(bounds))
    )


def simple_candidates(task: Task) -> list[Candidate]:
    """One device, DP, and even pipelines of every number of stages that shares the devices evenly."""
    found = task.price_all(data_parallel(task), "DP")
    if task.cluster.devices > 1:
        found += task.price_all(data_parallel(task, 1), "one device")
    for shape in _even_shapes(task):
        found += task.price_all(even_pipeline(task, *shape), "straight")
    return found


def fitted_candidates(task: Task) -> list[Candidate]:
    """The same, cut with an eye on AllReduce, transfers and memory, too."""
    return _fit_shapes(task, _even_shapes(task), task.micro_batch_sizes)


def uneven_candidates(task: Task, sizes: Sequence[int]) -> list[Candidate]:
    """Pipelines of any number of stages of equally many replicas, on all devices or fewer; on up to 64 devices."""
    total, blocks = task.cluster.devices, len(task.chain.parameter_bytes)
    counts = range(1, total + 1) if total <= _MOST_DEVICES else ()
    shapes = [(stages, r) for r in counts for stages in range(2, min(total // r, blocks) + 1)]
    return _fit_shapes(task, shapes, sizes)


def _fit_shapes(task: Task, shapes: Iterable[tuple[int, int]], sizes: Sequence[int]) -> list[Candidate]:
    """Pipelines of so many stages of so many replicas, in the devices' order, cut by ``fit_cuts``."""
    found = []
    for stages, replicas in shapes:
        devices = [range(i * replicas, (i + 1) * replicas) for i in range(stages)]
        for size in sizes:
            if replicas <= size and (fitted := fit_cuts(task, devices, size)) is not None:
                found.append(task.price(fitted, size, "straight"))
    return [candidate for candidate in found if candidate is not None]


def refit(task: Task, candidate: Candidate) -> list[Candidate]:
    """The candidate's devices with cuts fitted anew among all that there are."""
    fitted = fit_cuts(task, [stage.devices for stage in candidate.stages], candidate.micro_batch_size)
    found = fitted and task.price(fitted, candidate.micro_batch_size, candidate.origin)
    return [found] if found else []


def _even_shapes(task: Task) -> list[tuple[int, int]]:
    """Stages and replicas of each."""
    total, blocks = task.cluster.devices, len(task.chain.parameter_bytes)
    most = min(total, blocks)
    return [(stages, total // stages) for stages in range(2, most + 1) if total % stages == 0 or stages == most]
