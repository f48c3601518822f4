"""Runs of simulated annealing from several layouts, in threads: what local searches on any devices consist of."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.planner.anneal import FREE, anneal
from dapple_tf.planner.layout import (
    IDLE,
    Layout,
    LayoutTables,
    MoveTables,
    copy_layout,
    make_layout,
    make_layout_tables,
    make_workspace,
)
from dapple_tf.planner.layout_simulation import AnyWorkspace, Tables
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.planner.threads import map_in_threads
from dapple_tf.planner.unequal_layout import make_unequal_tables, make_unequal_workspace
from dapple_tf.plans import StagePlan
from dapple_tf.simulator.compiled import Integers
from dapple_tf.simulator.interrupts import check_stop, stop_flag
from profiler.cores import count_cores

_SEED = 88172645463325252
_LAST_TEMPERATURE = 0.0005  # the temperature at the end of a run
_MOST_THREADS = 8
_MOST_CONTENDING = 128  # devices; on more, one simulation with contention takes milliseconds
_MOST_ARRIVALS = 4_000_000  # numbers of a workspace: micro-batches times stages


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


class Run(NamedTuple):
    """A layout to anneal, the rule that assigns devices to its stages (see ``anneal``), and the seconds of its step.

    The seconds are those of ``anneal``, which leaves out GPipe where other policies are allowed.
    """

    layout: Layout
    rule: int = FREE
    seconds: float = math.inf


@dataclasses.dataclass(frozen=True)
class LayoutSearch:
    """The tables and workspaces of all runs of one local search.

    ``workspaces``: one for each thread. ``seeds``: draws the seed of each run.
    """

    problem: PlanningProblem
    tables: Tables
    moves: MoveTables
    workspaces: tuple[AnyWorkspace, ...]
    most_stages: int
    seeds: np.random.Generator

    @staticmethod
    def of(
        problem: PlanningProblem, candidates: Iterable[Candidate], may_recompute: bool, seed: int = 0
    ) -> LayoutSearch | None:
        """Return the search for a problem, or None where there is nothing to start from.

        So it is without a candidate of a usable micro-batch size, and for a schedule that is none of the simulated
        policies. Runs with another ``seed`` have other random numbers.
        """
        devices, uniform = problem.cluster.devices, problem.cluster.is_uniform
        most_stages = min(devices, len(problem.chain.parameter_bytes))
        most_m = _MOST_ARRIVALS // most_stages
        sizes = [b for b in problem.micro_batch_sizes if problem.global_batch_size // b <= most_m]
        sizes = sizes or list(problem.micro_batch_sizes[-1:])
        if not any(c.micro_batch_size in sizes for c in candidates):
            return None
        tables: Tables = (make_layout_tables if uniform else make_unequal_tables)(
            problem, np.array(sizes, np.int64), may_recompute
        )
        common = tables if isinstance(tables, LayoutTables) else tables.layout
        if not len(common.policies):
            return None
        most, make = int(common.micro_batches.max()), make_workspace if uniform else make_unequal_workspace
        workspaces = tuple(make(most_stages, devices, most) for _ in range(min(_MOST_THREADS, count_cores())))
        return LayoutSearch(problem, tables, common.moves, workspaces, most_stages, np.random.default_rng(_SEED + seed))

    def starts(self, candidates: Iterable[Candidate], most: int) -> list[Layout]:
        """Return layouts of the fastest candidates that differ in origin, then in micro-batch size, fastest first."""
        sizes = self.moves.sizes
        one_each = (c for c in candidates if sum(stage.replicas for stage in c.stages) == c.device_count)
        usable = sorted((c for c in one_each if c.micro_batch_size in sizes), key=lambda c: c.seconds)
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
        self, runs: Sequence[Run], events: int, first_temperature: float, *, contention: bool = False
    ) -> list[Run]:
        """Improve layouts, each by its rule and with an equal share of the events; return them, the fastest first.

        Without events, layouts without a rule stay as they are, and their seconds are simulated.
        """

        def improve(seeded: tuple[Run, np.uint64], workspace: AnyWorkspace) -> Run:
            (layout, rule, _), seed = seeded
            share = events // len(runs)
            seconds = self._anneal(layout, workspace, rule, share, first_temperature, contention, True, seed)
            return Run(layout, rule, seconds)

        seeds = self.seeds.integers(1, 2**63, len(runs), np.uint64)
        done = map_in_threads(improve, list(zip(runs, seeds, strict=True)), self.workspaces)
        return sorted(done, key=lambda run: run.seconds)

    def seconds(self, layout: Layout, *, contention: bool) -> float:
        """Return the seconds of a layout's step."""
        return self._anneal(layout, self.workspaces[0], FREE, 0, 1.0, contention, False, np.uint64(1))

    def _anneal(
        self,
        layout: Layout,
        workspace: AnyWorkspace,
        rule: int,
        events: int,
        first_temperature: float,
        contention: bool,
        extrapolate: bool,
        seed: np.uint64,
    ) -> float:
        """Improve a layout, and return its seconds. All go this way: Numba compiles the simulation for each caller."""
        random, temperatures = np.array([seed], np.uint64), (first_temperature, _LAST_TEMPERATURE)
        common = self.tables, self.moves, layout, workspace
        seconds = anneal(*common, rule, events, *temperatures, extrapolate, contention, random, stop_flag())
        check_stop()
        return seconds

    def drop_recompute(self, layout: Layout) -> None:
        """Stop re-computing every stage, one after the other, where that does not make the step longer."""
        recomputed = np.flatnonzero(layout.recompute[: layout.shape[0]])
        if not self.moves.may_recompute or not len(recomputed):
            return
        contention = counts_contention(self.problem)
        seconds = self.seconds(layout, contention=contention)
        for stage in recomputed:
            layout.recompute[stage] = False
            without = self.seconds(layout, contention=contention)
            if without > seconds * (1 + 1e-12):
                layout.recompute[stage] = True
            else:
                seconds = without

    def candidate(self, layout: Layout) -> Candidate | None:
        """Return the layout as a candidate; equal devices of a server are taken in rising order."""
        problem, count = self.problem, int(layout.shape[0])
        devices: list[list[int]] = [[] for _ in range(count)]
        unused = _devices_by_group(self.moves.homes)
        for owner, device in zip(layout.owner.tolist(), layout.device_at.tolist(), strict=True):
            if owner != IDLE:
                devices[owner].append(next(unused[self.moves.homes[device]]))
        bounds = [problem.chain.positions[block] for block in layout.starts[: count + 1]]
        stages = [StagePlan(a, b - 1, tuple(d)) for (a, b), d in zip(itertools.pairwise(bounds), devices, strict=True)]
        again = [layer for s in np.flatnonzero(layout.recompute[:count]) for layer in range(bounds[s], bounds[s + 1])]
        recompute = len(again) == len(problem.profile.layers) or (tuple(again) if again else False)
        size = int(self.moves.sizes[layout.shape[1]])
        return problem.evaluate(stages, size, "local search", recompute=recompute)


def _devices_by_group(groups: Integers) -> list[Iterator[int]]:
    """Return the devices of each group, in rising order; ``groups``: the group of each device."""
    return [iter(np.flatnonzero(groups == group).tolist()) for group in range(groups.max() + 1)]
