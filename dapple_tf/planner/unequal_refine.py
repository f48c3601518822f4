"""Local search on devices of different kinds: cuts, devices, stages and micro-batch sizes change together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dapple_tf.planner.anneal import IN_ORDER
from dapple_tf.planner.layout_search import LayoutSearch, Run, counts_contention
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.planner.unequal_orders import device_orders

_STARTS, _KEPT, _KEPT_OF_A_SIZE = 8, 8, 2
_BY_RULE, _NEAR, _FREE = (weight / 36 for weight in (4, 1, 3))  # shares of the events
# The final rounds, with contention: how many of the best layouts go on, their share of the events, and the temperature
# at the beginning (successive halving, as in ``refine``).
_ROUNDS = ((8, 4 / 36, 0.05), (6, 10 / 36, 0.05), (3, 10 / 36, 0.03), (2, 4 / 36, 0.01))


def refine_unequal(
    problem: PlanningProblem,
    candidates: Sequence[Candidate],
    events: int,
    seed: int = 0,
    *,
    may_recompute: bool = False,
) -> list[Candidate]:
    """Return the plans that a local search finds from the fastest ``candidates``: of each origin, and of each size.

    First stages take devices in each of the orders of ``device_orders``; then each device moves on its own, and at last
    with contention. The same problem, number of simulated ``events`` and ``seed`` give the same plans, on any number of
    cores. ``may_recompute``: whether single stages may be re-computed. Empty without candidates, and for a schedule
    that is none of the simulated policies.
    """
    search = LayoutSearch.of(problem, candidates, may_recompute, seed)
    starts = search.starts(candidates, _STARTS) if search else []
    if search is None or not starts:
        return []
    orders = device_orders(problem.profile, problem.cluster)
    by_rule = [Run(search.reorder(start, order), IN_ORDER) for order in orders for start in starts]
    by_rule = search.run_all(by_rule, int(events * _BY_RULE / 2), 0.2)[: _KEPT * 2]
    by_rule = search.run_all(by_rule, int(events * _BY_RULE / 2), 0.05)
    near = search.run_all([Run(search.copy(start)) for start in starts], int(events * _NEAR), 0.01)
    free = search.run_all([Run(run.layout) for run in _choose([*by_rule, *near])], int(events * _FREE), 0.05)
    # Reason: contention makes other layouts the fastest. It counts from here on only, since it takes long to simulate.
    contention = counts_contention(problem)
    layouts = [*(run.layout for run in free), *starts]
    kept = _choose(search.run_all([Run(layout) for layout in layouts], 0, 1.0, contention=contention))
    for most, share, first_temperature in _ROUNDS:
        kept = search.run_all(kept[:most], int(events * share), first_temperature, contention=contention)
    for run in kept:
        search.drop_recompute(run.layout)
    found = [search.candidate(run.layout) for run in kept]
    return [candidate for candidate in found if candidate is not None]


def _choose(runs: Iterable[Run]) -> list[Run]:
    """Return the fastest runs by rising seconds, a few of each micro-batch size: it rarely changes afterwards."""
    chosen: list[Run] = []
    for run in sorted(runs, key=lambda run: run.seconds):
        alike = sum(other.layout.shape[1] == run.layout.shape[1] for other in chosen)
        if len(chosen) < _KEPT and alike < _KEPT_OF_A_SIZE:
            chosen.append(run)
    return chosen
