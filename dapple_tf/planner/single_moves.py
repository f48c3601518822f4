"""Move single cuts or devices, for schedules that the local search does not simulate, or if it omits contention."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.plans import StagePlan


def move_singly(problem: PlanningProblem, candidate: Candidate, moves: int) -> Candidate:
    """Return the candidate after moving cuts, and devices between neighbouring stages, while its step gets shorter.

    Each move is one cut by one block, or one device. At most ``moves`` plans are simulated. The micro-batch size stays.
    """
    best = candidate
    improved = True
    while improved:
        improved = False
        for stages in _neighbours(problem, best):
            if moves == 0:
                return best
            moves -= 1
            found = problem.evaluate(stages, best.micro_batch_size, candidate.origin)
            if found is not None and found.seconds < best.seconds * (1 - 1e-9):
                best, improved = found, True
                break
    return best


def _neighbours(problem: PlanningProblem, candidate: Candidate) -> Iterator[tuple[StagePlan, ...]]:
    """Yield the plans one move away: one cut a block further, or one device on the other side of a boundary."""
    stages, positions = candidate.stages, problem.chain.positions
    index_of = {position: index for index, position in enumerate(positions)}
    unsplittable = set(problem.profile.unsplittable)
    for index, (left, right) in enumerate(pairwise(stages)):
        cut, joined, own = index_of[right.first_layer], left.devices + right.devices, left.replicas
        firsts = [
            first for first in (positions[cut - 1], positions[cut + 1]) if left.first_layer < first <= right.last_layer
        ]
        counts = [count for count in (own - 1, own + 1) if 0 < count < len(joined)]
        for first, count in [(first, own) for first in firsts] + [(right.first_layer, count) for count in counts]:
            moved = (
                StagePlan(left.first_layer, first - 1, joined[:count]),
                StagePlan(first, right.last_layer, joined[count:]),
            )
            changed = (*stages[:index], *moved, *stages[index + 2 :])
            if _can_split(changed, unsplittable):
                yield changed


def _can_split(stages: tuple[StagePlan, ...], unsplittable: set[int]) -> bool:
    """Return whether stages of unequal replica counts meet only at cuts whose tensors can be split."""
    return not any(a.replicas != b.replicas and b.first_layer in unsplittable for a, b in pairwise(stages))
