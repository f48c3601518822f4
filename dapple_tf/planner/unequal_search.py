"""Plans on devices of different kinds whose stages are found by dynamic programs, for planners "best" and "dapple"."""

from __future__ import annotations

from collections.abc import Iterator

from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.unequal_cuts import UnequalStages, unequal_stages
from dapple_tf.planner.unequal_orders import device_orders
from dapple_tf.plans import StagePlan

ORIGIN = "unequal devices"
_MOST = 4  # stages of each number, for one micro-batch size

SizedStages = tuple[int, UnequalStages]
"""A micro-batch size (samples), and stages for it."""


def find_unequal_stages(problem: PlanningProblem) -> list[SizedStages]:
    """Return stages for every micro-batch size, of every number: those whose busiest stage takes the fewest seconds.

    Each stage has devices that follow each other in one of ``device_orders``. Raises ProfileError for a kind without
    costs.
    """
    return [(size, entry) for size in problem.micro_batch_sizes for entry in _stages_of_size(problem, size)]


def _stages_of_size(problem: PlanningProblem, size: int) -> Iterator[UnequalStages]:
    """Yield the best few stages of every number, over all orders of the devices, each once."""
    found: dict[tuple[StagePlan, ...], UnequalStages] = {}
    for order in device_orders(problem.profile, problem.cluster):
        for straight in (False, True):
            for entry in unequal_stages(problem, order, size, straight=straight, transfers=True):
                found.setdefault(entry.stages, entry)
    counts: dict[int, int] = {}
    for entry in sorted(found.values(), key=lambda entry: (entry.seconds, len(entry.stages))):
        counts[len(entry.stages)] = counts.get(len(entry.stages), 0) + 1
        if counts[len(entry.stages)] <= _MOST:
            yield entry
