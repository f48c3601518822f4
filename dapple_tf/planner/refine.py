"""Local search in the simulator from several starts: cuts, devices, stages, micro-batch sizes change together."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.plan import StagePlan
from dapple_tf.planner.anneal import FREE, HALF_SCATTERED, IN_ORDER, SCATTERED, anneal
from dapple_tf.planner.device_order import list_devices, order_servers
from dapple_tf.planner.layout import (
    IDLE,
    Layout,
    LayoutTables,
    Workspace,
    copy_layout,
    make_layout,
    make_layout_tables,
    make_workspace,
    simulate_layout,
)
from dapple_tf.planner.layout_contention import simulate_with_contention
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.planner.search_space import server_orders
from dapple_tf.planner.threads import map_in_threads
from dapple_tf.simulator.compiled import Integers
from dapple_tf.simulator.interrupts import check_stop, stop_flag
from profiler.cluster import Cluster
from profiler.cores import count_cores

_SEED = 88172645463325252
_STARTS, _KEPT = 3, 8
_BY_RULE, _NEAR, _FREE = (
    weight / 36 for weight in (2, 1, 1)
)  # shares of the events: runs by a rule, from the starts, without a rule
# The final rounds: how many of the best layouts they have, their share of the events, and the first temperature.
# Reason: a layout's quality shows only after many events, so all get a short run, and the best get longer ones.
_ROUNDS = ((8, 4 / 36, 0.05), (8, 12 / 36, 0.05), (4, 12 / 36, 0.05), (2, 4 / 36, 0.01))
_LAST_TEMPERATURE = 0.0005  # the temperature at the end of a run
_MOST_THREADS = 8
_MOST_SCATTERED = 256  # devices
_MOST_CONTENDING = 128  # devices; on more, one simulation with contention takes milliseconds
_MOST_ARRIVALS = 4_000_000  # numbers of a workspace: micro-batches times stages


def refine(
    problem: PlanningProblem, candidates: Sequence[Candidate], events: int, *, may_recompute: bool = False
) -> list[Candidate]:
    """Return the plan that a local search finds from the fastest ``candidates``: of each origin, and of each size.

    First a rule gives the placement for the replica counts: stages take devices in order, or all stages, or the first
    half of them, are spread over the servers. Then the placement is searched too, and at last with contention (see
    ``counts_contention``), in rounds of fewer and fewer layouts, the fastest of the round before (successive halving).
    They end where all layouts are equally fast. Threads, one on each core, search the layouts of a round. The same
    problem and number of simulated ``events`` give the same plan, on any number of cores. ``may_recompute``: whether
    single stages may be re-computed. Empty where only known plans are found, without candidates, and for a schedule
    that is none of the simulated policies.
    """
    search = _Search.of(problem, candidates, may_recompute)
    if search is None:
        return []
    starts = search.starts(candidates, _STARTS)
    ways = itertools.product(search.orders, search.rules, starts)
    by_rule = [_Run(search.reorder(start, order), rule) for order, rule, start in ways]
    by_rule = search.run_all(by_rule, int(events * _BY_RULE / 2), 0.2)[: _KEPT * 2]
    by_rule = search.run_all(by_rule, int(events * _BY_RULE / 2), 0.05)
    near = search.run_all([_Run(search.copy(start)) for start in starts], int(events * _NEAR), 0.01)
    free = [_Run(run.layout) for run in _fastest([*by_rule, *near])]
    free = search.run_all(free, int(events * _FREE), 0.03)
    # Reason: contention makes other layouts the fastest. It counts from here on only, since it takes long to simulate.
    contention = counts_contention(problem)
    layouts = [*(run.layout for run in free), *starts]
    kept = _fastest([_Run(layout, seconds=search.seconds(layout, contention=contention)) for layout in layouts])
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


def counts_contention(problem: PlanningProblem) -> bool:
    """Return whether the last parts of the local search simulate contention: it counts, and the cluster is small."""
    return problem.contention and problem.cluster.devices <= _MOST_CONTENDING


def layout_of(problem: PlanningProblem, sizes: Integers, candidate: Candidate) -> Layout:
    """Return the layout of a candidate, with the devices in the order of their numbers; ``sizes``: of the tables."""
    blocks, devices = len(problem.chain.parameter_bytes), problem.cluster.devices
    layout = make_layout(min(devices, blocks), devices)
    block_of = {position: block for block, position in enumerate(problem.chain.positions)}
    again = candidate.recompute if isinstance(candidate.recompute, tuple) else ()
    for index, stage in enumerate(candidate.stages):
        layout.starts[index] = block_of[stage.first_layer]
        layout.recompute[index] = candidate.recompute is True or stage.first_layer in again
        layout.owner[list(stage.devices)] = index
    layout.starts[len(candidate.stages)] = blocks
    layout.shape[:] = len(candidate.stages), np.searchsorted(sizes, candidate.micro_batch_size)
    return layout


class _Run(NamedTuple):
    """A layout to anneal, the rule that assigns devices to its stages (see ``anneal``), and the seconds of its step."""

    layout: Layout
    rule: int = FREE
    seconds: float = math.inf


def _fastest(runs: Iterable[_Run]) -> list[_Run]:
    """Return the fastest runs, the best first."""
    return sorted(runs, key=lambda run: run.seconds)[:_KEPT]


@dataclasses.dataclass(frozen=True)
class _Search:
    """The tables and workspaces of all runs of one local search.

    ``workspaces``: one for each thread. ``orders``: of devices. ``rules``: those that assign devices to
    stages (see ``anneal``). ``seeds``: draws the seed of each run.
    """

    problem: PlanningProblem
    tables: LayoutTables
    workspaces: tuple[Workspace, ...]
    orders: tuple[tuple[int, ...], ...]
    rules: tuple[int, ...]
    most_stages: int
    seeds: np.random.Generator

    @staticmethod
    def of(problem: PlanningProblem, candidates: Sequence[Candidate], may_recompute: bool) -> _Search | None:
        """Return the search for a problem, or None if there is nothing to start from."""
        cluster = problem.cluster
        most_stages = min(cluster.devices, len(problem.chain.parameter_bytes))
        most_m = _MOST_ARRIVALS // most_stages
        sizes = [b for b in problem.micro_batch_sizes if problem.global_batch_size // b <= most_m]
        sizes = sizes or list(problem.micro_batch_sizes[-1:])
        if not any(c.micro_batch_size in sizes for c in candidates):
            return None
        tables = make_layout_tables(problem, np.array(sizes, np.int64), may_recompute)
        if not len(tables.policies):
            return None
        threads = min(_MOST_THREADS, count_cores())
        most = int(tables.micro_batches.max())
        workspaces = tuple(make_workspace(most_stages, cluster.devices, most) for _ in range(threads))
        orders = dict.fromkeys(list_devices(cluster, o) for o in (*server_orders(cluster), order_servers(cluster)))
        several = 1 < len(cluster.servers) < cluster.devices <= _MOST_SCATTERED
        rules = (IN_ORDER, SCATTERED, HALF_SCATTERED) if several else (IN_ORDER,)
        return _Search(problem, tables, workspaces, tuple(orders), rules, most_stages, np.random.default_rng(_SEED))

    def starts(self, candidates: Iterable[Candidate], most: int) -> list[Layout]:
        """Return layouts of the fastest candidates that differ in origin, then in micro-batch size, fastest first."""
        sizes = self.tables.moves.sizes
        usable = sorted((c for c in candidates if c.micro_batch_size in sizes), key=lambda c: c.seconds)
        chosen: dict[object, Candidate] = {}
        for field in ("origin", "micro_batch_size"):
            best: dict[object, Candidate] = {}
            for candidate in usable:
                best.setdefault(getattr(candidate, field), candidate)
            for candidate in list(best.values())[:most]:
                chosen.setdefault((candidate.stages, candidate.micro_batch_size), candidate)
        ranked = sorted(chosen.values(), key=lambda c: c.seconds)
        return [layout_of(self.problem, sizes, candidate) for candidate in ranked]

    def copy(self, layout: Layout) -> Layout:
        """Return a copy of a layout."""
        same = make_layout(self.most_stages, len(layout.owner))
        copy_layout(layout, same)
        return same

    def reorder(self, layout: Layout, order: Sequence[int]) -> Layout:
        """Return a copy with the devices in this order, each with the same owner as before."""
        copy = self.copy(layout)
        copy.device_at[:] = order
        copy.owner[:] = layout.owner[np.argsort(layout.device_at)][list(order)]
        return copy

    def run_all(
        self, runs: Sequence[_Run], events: int, first_temperature: float, *, contention: bool = False
    ) -> list[_Run]:
        """Improve layouts, each by its rule and with an equal share of the events; return them, the fastest first."""

        def improve(seeded: tuple[_Run, np.uint64], workspace: Workspace) -> _Run:
            (layout, rule, _), seed = seeded
            random, share = np.array([seed], np.uint64), events // len(runs)
            # ``extrapolate`` is an argument of ``anneal``: for a constant, Numba would compile the simulation again.
            temperatures = first_temperature, _LAST_TEMPERATURE
            anneal(self.tables, layout, workspace, rule, share, *temperatures, True, contention, random, stop)
            check_stop()
            return _Run(layout, rule, self._simulate(layout, workspace, contention))

        stop, seeds = stop_flag(), self.seeds.integers(1, 2**63, len(runs), np.uint64)
        done = map_in_threads(improve, list(zip(runs, seeds, strict=True)), self.workspaces)
        return sorted(done, key=lambda run: run.seconds)

    def seconds(self, layout: Layout, *, contention: bool) -> float:
        """Return the seconds of a layout's step."""
        return self._simulate(layout, self.workspaces[0], contention)

    def _simulate(self, layout: Layout, workspace: Workspace, contention: bool) -> float:
        simulate = simulate_with_contention if contention else simulate_layout
        return simulate(self.tables, layout, workspace, np.inf, False).seconds

    def drop_recompute(self, layout: Layout) -> None:
        """Stop re-computing every stage, one after the other, where that does not make the step longer."""
        contention = counts_contention(self.problem)
        for stage in np.flatnonzero(layout.recompute[: layout.shape[0]]) if self.tables.moves.may_recompute else ():
            before = self.seconds(layout, contention=contention)
            layout.recompute[stage] = False
            if self.seconds(layout, contention=contention) > before * (1 + 1e-12):
                layout.recompute[stage] = True

    def candidate(self, layout: Layout) -> Candidate | None:
        """Return the layout as a candidate; the devices of a server are taken in rising order."""
        problem, count = self.problem, int(layout.shape[0])
        devices: list[list[int]] = [[] for _ in range(count)]
        unused = _devices_by_server(problem.cluster)
        for owner, device in zip(layout.owner.tolist(), layout.device_at.tolist(), strict=True):
            if owner != IDLE:
                devices[owner].append(next(unused[problem.cluster.homes[device]]))
        bounds = [problem.chain.positions[block] for block in layout.starts[: count + 1]]
        stages = [StagePlan(a, b - 1, tuple(d)) for (a, b), d in zip(itertools.pairwise(bounds), devices, strict=True)]
        again = [layer for s in np.flatnonzero(layout.recompute[:count]) for layer in range(bounds[s], bounds[s + 1])]
        recompute = len(again) == len(problem.profile.layers) or (tuple(again) if again else False)
        size = int(self.tables.moves.sizes[layout.shape[1]])
        return problem.evaluate(stages, size, "local search", recompute=recompute)


def _devices_by_server(cluster: Cluster) -> list[Iterator[int]]:
    """Return the devices of each server, in rising order."""
    first = itertools.accumulate((server.devices for server in cluster.servers), initial=0)
    return [iter(range(a, b)) for a, b in itertools.pairwise(first)]
