"""Local search by simulated annealing of several plans: cuts, devices, stages and micro-batch sizes change together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from dapple_tf.planner.anneal import HALF_SCATTERED, IN_ORDER, SCATTERED
from dapple_tf.planner.device_order import list_devices, order_servers
from dapple_tf.planner.layout_search import LayoutSearch, Run, counts_contention
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.planner.search_space import server_orders

_STARTS, _KEPT = 3, 8
# Shares of the events: of the runs whose placement a rule gives, of those from the candidates, and of those whose
# placement is searched too.
_BY_RULE, _NEAR, _FREE = (weight / 36 for weight in (2, 1, 1))
# The final rounds: how many of the best layouts they have, their share of the events, and the first temperature.
# Reason: a layout's quality shows only after many events, so all get a short run, and the best get longer ones.
_ROUNDS = ((8, 4 / 36, 0.05), (8, 12 / 36, 0.05), (4, 12 / 36, 0.05), (2, 4 / 36, 0.01))
_MOST_SCATTERED = 256  # devices


def refine(
    problem: PlanningProblem,
    candidates: Sequence[Candidate],
    events: int,
    seed: int = 0,
    *,
    may_recompute: bool = False,
) -> list[Candidate]:
    """Return the plan that a local search finds from the fastest ``candidates``: of each origin, and of each size.

    First a rule gives the placement for the replica counts: stages take devices in order, or all stages, or the first
    half of them, are spread over the servers. Then the placement is searched too, and at last with contention (see
    ``counts_contention``), in rounds of 8, 8, 4 and 2 layouts, the fastest of the round before (successive halving).
    The search ends after the second round where all its layouts are equally fast. Threads, one on each core, search the
    layouts of a round. The same problem, number of simulated ``events`` and ``seed`` give the same plan, on any number
    of cores. ``may_recompute``: whether single stages may be re-computed. Empty where only known plans are found,
    without candidates, and for a schedule that is none of the simulated policies.
    """
    search, cluster = LayoutSearch.of(problem, candidates, may_recompute, seed), problem.cluster
    if search is None:
        return []
    starts = search.starts(candidates, _STARTS)
    several = 1 < len(cluster.servers) < cluster.devices <= _MOST_SCATTERED
    rules = (IN_ORDER, SCATTERED, HALF_SCATTERED) if several else (IN_ORDER,)
    orders = dict.fromkeys(list_devices(cluster, o) for o in (*server_orders(cluster), order_servers(cluster)))
    ways = itertools.product(orders, rules, starts)
    by_rule = [Run(search.reorder(start, order), rule) for order, rule, start in ways]
    by_rule = search.run_all(by_rule, int(events * _BY_RULE / 2), 0.2)[: _KEPT * 2]
    by_rule = search.run_all(by_rule, int(events * _BY_RULE / 2), 0.05)
    near = search.run_all([Run(search.copy(start)) for start in starts], int(events * _NEAR), 0.01)
    free = [Run(run.layout) for run in _fastest([*by_rule, *near])]
    free = search.run_all(free, int(events * _FREE), 0.03)
    # Reason: contention makes other layouts the fastest. It counts from here on only, since it takes long to simulate.
    contention = counts_contention(problem)
    layouts = [*(run.layout for run in free), *starts]
    kept = search.run_all([Run(layout) for layout in layouts], 0, 1.0, contention=contention)
    for number, (most, share, first_temperature) in enumerate(_ROUNDS):
        kept = search.run_all(kept[:most], int(events * share), first_temperature, contention=contention)
        # Reason: fewer than all are no evidence, since several short runs often end at the start that they share. Where
        # three were enough, a step on six devices was 22% longer; where the first round could be the last, one on 16
        # devices was 50% longer.
        if number and len(kept) == _KEPT and kept[-1].seconds <= kept[0].seconds * (1 + 1e-9):
            break
    best = kept[0].layout
    search.drop_recompute(best)
    found = search.candidate(best)
    return [] if found is None or _is_known(found, candidates) else [found]


def _is_known(found: Candidate, candidates: Iterable[Candidate]) -> bool:
    """Return whether the stages found are those of a candidate that is as fast."""
    same = [c for c in candidates if (c.stages, c.micro_batch_size) == (found.stages, found.micro_batch_size)]
    return any(c.seconds <= found.seconds * (1 + 1e-9) for c in same)


def _fastest(runs: Iterable[Run]) -> list[Run]:
    """Return the fastest few runs, the best first."""
    return sorted(runs, key=lambda run: run.seconds)[:_KEPT]
