"""Local search on devices of different kinds: cuts, devices, stages and micro-batch sizes change together."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from dapple_tf.plan import StagePlan
from dapple_tf.planner.anneal import FREE, IN_ORDER
from dapple_tf.planner.layout import IDLE, Layout, copy_layout, make_layout
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.planner.refine import counts_contention, layout_of
from dapple_tf.planner.threads import map_in_threads
from dapple_tf.planner.unequal_anneal import anneal_unequal
from dapple_tf.planner.unequal_layout import (
    UnequalTables,
    UnequalWorkspace,
    make_unequal_tables,
    make_unequal_workspace,
    price_unequal,
)
from dapple_tf.planner.unequal_orders import device_orders
from profiler.cluster import Cluster
from profiler.cores import count_cores

_SEED = 88172645463325252
_STARTS, _KEPT, _KEPT_OF_A_SIZE = 8, 8, 2
_DEALT, _NEAR, _FREE = (weight / 36 for weight in (4, 1, 3))  # shares of the events
# The final rounds, with contention: how many of the best layouts go on, their share of the events, and the temperature
# at the beginning (successive halving, as in ``refine``).
_ROUNDS = ((8, 4 / 36, 0.05), (6, 10 / 36, 0.05), (3, 10 / 36, 0.03), (2, 4 / 36, 0.01))
_COLD = 0.0005  # the temperature at the end of a run
_MOST_THREADS = 8
_MOST_ARRIVALS = 4_000_000  # numbers of a workspace: micro-batches times stages


def refine_unequal(
    problem: PlanningProblem,
    candidates: Sequence[Candidate],
    events: int,
    seed: int = 0,
    *,
    may_recompute: bool = False,
) -> list[Candidate]:
    """Return the plan that a local search finds from the fastest ``candidates``: of each origin, and of each size.

    First stages take devices in each of the orders of ``device_orders``; then each device moves on its own, and at last
    with contention. The same problem, number of simulated ``events`` and ``seed`` give the same plan, on any number of
    cores.
    ``may_recompute``: whether single stages may be re-computed. Empty without candidates, and for a schedule that is
    none of the simulated policies.
    """
    search = _Search.of(problem, may_recompute, seed)
    if search is None:
        return []
    starts = search.starts(candidates)
    if not starts:
        return []
    orders = device_orders(problem.profile, problem.cluster)
    dealt = [(IN_ORDER, search.reorder(start, order)) for order in orders for start in starts]
    dealt = search.run_all(dealt, int(events * _DEALT / 2), 0.2)[: _KEPT * 2]
    dealt = search.run_all(dealt, int(events * _DEALT / 2), 0.05)
    near = search.run_all([(FREE, search.copy(layout)) for layout in starts], int(events * _NEAR), 0.01)
    kept = search.choose([*dealt, *near])
    kept = search.run_all([(FREE, layout) for _, layout in kept], int(events * _FREE), 0.05)
    # Reason: contention makes other layouts the fastest. It counts from here on only, since it takes long to simulate.
    contention = counts_contention(problem)
    kept = search.choose([*kept, *((FREE, layout) for layout in starts)], contention=contention)
    for most, share, hot in _ROUNDS:
        kept = search.run_all(kept[:most], int(events * share), hot, contention=contention)
    found = [search.candidate(layout, contention=contention) for _, layout in kept]
    return [candidate for candidate in found if candidate is not None]


@dataclasses.dataclass(frozen=True)
class _Search:
    """The tables and workspaces (one for each thread) of one local search; ``seeds``: draws those of the runs."""

    problem: PlanningProblem
    tables: UnequalTables
    workspaces: tuple[UnequalWorkspace, ...]
    room: int
    seeds: np.random.Generator

    @staticmethod
    def of(problem: PlanningProblem, may_recompute: bool, seed: int) -> _Search | None:
        """Return the search for a problem, or None if its schedule is none of the simulated policies."""
        cluster = problem.cluster
        room = min(cluster.devices, len(problem.chain.parameter_bytes))
        sizes = [b for b in problem.micro_batch_sizes if room * (problem.global_batch_size // b) <= _MOST_ARRIVALS]
        sizes = sizes or list(problem.micro_batch_sizes[-1:])
        tables = make_unequal_tables(problem, np.array(sizes, np.int64), may_recompute)
        if not len(tables.layout.policies):
            return None
        most = int(tables.layout.micro_batches.max())
        threads = min(_MOST_THREADS, count_cores())
        workspaces = tuple(make_unequal_workspace(room, cluster.devices, most) for _ in range(threads))
        return _Search(problem, tables, workspaces, room, np.random.default_rng(_SEED + seed))

    def starts(self, candidates: Sequence[Candidate]) -> list[Layout]:
        """Return layouts of the fastest candidates that differ in origin, then in micro-batch size, fastest first."""
        sizes = self.tables.layout.moves.sizes
        one_each = [c for c in candidates if sum(stage.replicas for stage in c.stages) == c.device_count]
        usable = sorted((c for c in one_each if c.micro_batch_size in sizes), key=lambda c: c.seconds)
        chosen: dict[object, Candidate] = {}
        for field in ("origin", "micro_batch_size"):
            best: dict[object, Candidate] = {}
            for candidate in usable:
                best.setdefault(getattr(candidate, field), candidate)
            for candidate in list(best.values())[:_STARTS]:
                chosen.setdefault((candidate.stages, candidate.micro_batch_size), candidate)
        ranked = sorted(chosen.values(), key=lambda c: c.seconds)
        return [layout_of(self.problem, sizes, candidate) for candidate in ranked]

    def copy(self, layout: Layout) -> Layout:
        """Return a copy of a layout."""
        same = make_layout(self.room, len(layout.owner))
        copy_layout(layout, same)
        return same

    def reorder(self, layout: Layout, order: Sequence[int]) -> Layout:
        """Return a copy whose places have devices in this order, each of the same stage as before."""
        copy = self.copy(layout)
        copy.device_at[:] = order
        copy.owner[:] = layout.owner[np.argsort(layout.device_at)][list(order)]
        return copy

    def run_all(
        self, runs: Sequence[tuple[int, Layout]], events: int, hot: float, *, contention: bool = False
    ) -> list[tuple[int, Layout]]:
        """Improve layouts in place, each with its placing and an equal share of the events; return the best first."""

        def improve(seeded: tuple[tuple[int, Layout], np.uint64], workspace: UnequalWorkspace) -> float:
            ((placing, layout), seed), share = seeded, events // len(runs)
            random = np.array([seed], np.uint64)
            anneal_unequal(self.tables, layout, workspace, placing, share, hot, _COLD, contention, random)
            return price_unequal(self.tables, layout, workspace, np.inf, False, contention).seconds

        seeds = self.seeds.integers(1, 2**63, len(runs), np.uint64)
        seconds = map_in_threads(improve, list(zip(runs, seeds, strict=True)), self.workspaces)
        return [runs[i] for i in np.argsort(seconds, kind="stable")]

    def choose(self, runs: Sequence[tuple[int, Layout]], *, contention: bool = False) -> list[tuple[int, Layout]]:
        """Return the fastest runs by rising seconds, a few of each micro-batch size: it rarely changes afterwards."""
        chosen: list[tuple[int, Layout]] = []
        for run in sorted(runs, key=lambda run: self._seconds(run[1], contention)):
            alike = sum(other.shape[1] == run[1].shape[1] for _, other in chosen)
            if len(chosen) < _KEPT and alike < _KEPT_OF_A_SIZE:
                chosen.append(run)
        return chosen

    def candidate(self, layout: Layout, *, contention: bool) -> Candidate | None:
        """Return the layout as a candidate, without re-computation that does not make the step shorter."""
        problem, count = self.problem, int(layout.shape[0])
        for stage in np.flatnonzero(layout.recompute[:count]) if self.tables.layout.moves.may_recompute else ():
            before = self._seconds(layout, contention)
            layout.recompute[stage] = False
            if self._seconds(layout, contention) > before * (1 + 1e-12):
                layout.recompute[stage] = True
        devices: list[list[int]] = [[] for _ in range(count)]
        group_of = self.tables.layout.moves.homes
        unused = _devices_by_group(problem.cluster, group_of.tolist())
        for owner, device in zip(layout.owner.tolist(), layout.device_at.tolist(), strict=True):
            if owner != IDLE:
                devices[owner].append(next(unused[group_of[device]]))
        bounds = [problem.chain.positions[block] for block in layout.starts[: count + 1]]
        stages = [StagePlan(a, b - 1, tuple(d)) for (a, b), d in zip(itertools.pairwise(bounds), devices, strict=True)]
        again = [layer for s in np.flatnonzero(layout.recompute[:count]) for layer in range(bounds[s], bounds[s + 1])]
        recompute = len(again) == len(problem.profile.layers) or (tuple(again) if again else False)
        size = int(self.tables.layout.moves.sizes[layout.shape[1]])
        return problem.evaluate(stages, size, "local search", recompute=recompute)

    def _seconds(self, layout: Layout, contention: bool) -> float:
        return price_unequal(self.tables, layout, self.workspaces[0], np.inf, False, contention).seconds


def _devices_by_group(cluster: Cluster, group_of: Sequence[int]) -> list[Iterator[int]]:
    """Return the devices of each group, in rising order."""
    return [iter([d for d in range(cluster.devices) if group_of[d] == group]) for group in range(max(group_of) + 1)]
