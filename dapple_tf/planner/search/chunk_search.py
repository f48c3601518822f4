"""Search for plans in which devices run several stages: find their cuts and their devices by simulation.

The paper's formulas and the bounds of the other searches are for one stage per device, so here every plan is simulated.
The plans start from the placement policies and the balanced cuts of DAPPLE, sections IV.C and IV.D.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.search.chunk_shapes import ChunkShape, list_shapes
from dapple_tf.planner.search.chunk_simulation import CostSource, CutResult, CutSimulator
from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.order import is_interleaved

# The most work of one search: plans simulated to improve the cuts (_MOVES for one shape at one size, _PLANS in all),
# cuts examined (_CUTS), events simulated (_EVENTS), and actions of the schedules that are built (_ACTIONS).
_MOVES, _PLANS, _CUTS, _EVENTS = 150, 1500, 200_000, 100_000_000
_ACTIONS = 400_000
_BOUNDS = 10  # cuts whose lower bound may be computed for each plan that may be simulated
_BYTES_WEIGHTS = (0.25, 0.5, 0.75, 1.0)  # of bytes against seconds, for the cuts tried where memory is lacking
_SIMULATED = 3  # entries, found without contention, that are simulated with it
_ALMOST = 1 - 1e-9  # seconds times this are less by more than a rounding error


@dataclass
class _Entry:
    """A shape at a micro-batch size, with its best cuts so far."""

    simulator: CutSimulator
    starts: Integers
    bound: float
    result: CutResult | None = None  # None: not simulated

    @property
    def lacks_memory(self) -> bool:
        """Whether the cuts have been found not to fit the memory."""
        return self.result is not None and self.result.lacking_bytes > 0


@dataclass
class _Budget:
    """The work that may still be done; the first schedule is built even if it has more actions."""

    plans: int  # simulated to improve cuts, of all entries
    cuts: int  # examined to improve cuts, whether or not they fit the memory, of all entries
    moves: int  # plans simulated to improve the cuts of one entry
    events: int  # simulated
    actions: int = _ACTIONS  # of schedules built

    def builds(self, entry: _Entry) -> bool:
        """Return whether the entry's schedule may be built; if so, count its actions."""
        if entry.result is not None or is_interleaved(ScheduleSpec.parse(entry.simulator.shape.schedule)):
            return True  # it has been built before, or building it takes no time
        actions = 2 * entry.simulator.calls
        if self.actions < _ACTIONS and actions > self.actions:
            return False
        self.actions -= actions
        return True

    def left(self, entry: _Entry) -> int:
        """Return how many plans may be simulated to improve the entry."""
        return max(0, min(self.moves, self.plans, self.events // _events(entry))) if self.cuts > 0 else 0


def _events(entry: _Entry) -> int:
    """Return the events of one simulation: forwards, backwards and a transfer for each."""
    return 4 * entry.simulator.calls


def plan_chunked(problem: PlanningProblem, shapes: Sequence[ChunkShape] | None = None) -> PlannerResult | None:
    """Return the fastest plan under the problem's schedule, which runs several stages on a device; None if none fits.

    The runners-up have other numbers of workers. ``shapes``: by default those of ``list_shapes``. Raises ScheduleError
    where the schedule allows none of the numbers of micro-batches.
    """
    listed = list_shapes(problem) if shapes is None else shapes
    entries = _search(problem, listed, _Budget(_PLANS, _CUTS, _MOVES, _EVENTS))
    of_workers: dict[int, list[_Entry]] = {}
    for entry in entries:
        of_workers.setdefault(entry.simulator.shape.workers.workers, []).append(entry)
    candidates = (_fastest_candidates(problem, own) for own in of_workers.values())
    ranked = sorted((min(few, key=lambda c: c.rank) for few in candidates if few), key=lambda c: c.rank)
    return PlannerResult(ranked[0], tuple(ranked[1:3])) if ranked else None


def _fastest_candidates(problem: PlanningProblem, entries: Sequence[_Entry]) -> list[Candidate]:
    """Return the plans of the fastest few entries, simulated like the plans of all planners."""
    found = []
    for entry in entries[: _SIMULATED if problem.contention else 1]:
        simulator = entry.simulator
        stages, schedule = simulator.stage_plans(entry.starts), simulator.shape.schedule
        if (candidate := problem.evaluate(stages, simulator.size, "chunks", schedule)) is not None:
            found.append(candidate)
    return found


def _search(problem: PlanningProblem, shapes: Iterable[ChunkShape], budget: _Budget) -> list[_Entry]:
    """Return the shapes at each micro-batch size with the best cuts found that fit the memory, the fastest first."""
    entries = sorted(_start(problem, shapes), key=lambda entry: entry.bound)
    fastest = math.inf
    problems, possible = list[ScheduleError](), list[_Entry]()
    for entry in entries:
        if entry.bound < fastest * _ALMOST and budget.events > 0 and budget.builds(entry):
            try:
                entry.result = entry.simulator.simulate(entry.simulator.costs(entry.starts))
            except ScheduleError as error:  # the policy is not for this number of micro-batches
                problems.append(error)
                continue
            fastest = min(fastest, entry.result.seconds)
            budget.events -= _events(entry)
        possible.append(entry)
    if problems and not possible:
        raise problems[0]
    blocks = len(problem.chain.parameter_bytes)
    for entry in sorted(possible, key=_rank):
        if entry.simulator.least_seconds < fastest * _ALMOST and budget.left(entry) and budget.builds(entry):
            with contextlib.suppress(ScheduleError):
                _improve(entry, blocks, fastest, budget)
                fastest = min(fastest, entry.result.seconds if entry.result else math.inf)
    return [entry for entry in sorted(possible, key=_rank) if entry.result and entry.result.seconds < math.inf]


def _rank(entry: _Entry) -> tuple[float, ...]:
    """Return the sort key: plans that fit, then those not simulated, then by the memory that is lacking."""
    if entry.result is None:
        return 1, entry.bound
    return (2, entry.result.lacking_bytes) if entry.result.lacking_bytes else (0, entry.result.seconds)


def _start(problem: PlanningProblem, shapes: Iterable[ChunkShape]) -> Iterator[_Entry]:
    """Yield each shape with each placement and micro-batch size, cut evenly by the seconds of the profile's batch."""
    source, even = CostSource(problem), dict[WorkerMap, Integers]()
    for shape in shapes:
        sizes = [size for size in problem.micro_batch_sizes if size >= shape.replicas]  # each replica needs a sample
        if sizes and shape.workers not in even:
            even[shape.workers] = source.even_starts(shape.workers)
        for devices in source.placements(shape.workers.workers, shape.replicas) if sizes else ():
            links = source.worker_links(shape, devices)
            for size in sizes:
                simulator = CutSimulator(source, shape, devices, links, size)
                starts = even[shape.workers]
                yield _Entry(simulator, starts, simulator.bound(simulator.costs(starts)))


def _improve(entry: _Entry, blocks: int, fastest: float, budget: _Budget) -> None:
    """Try all cuts of an entry, or move single blocks while that makes it faster or lack less memory.

    Raises ScheduleError where the schedule is not for the entry's number of micro-batches.
    """
    simulator = entry.simulator
    if count_cuts(blocks, len(entry.starts)) <= budget.left(entry):
        for starts in all_cuts(blocks, len(entry.starts)):
            _take_if_better(entry, starts, budget, fastest)
        return
    if entry.result is None:
        _take_if_better(entry, entry.starts, budget)
    others = [simulator.even_starts(weight) for weight in _BYTES_WEIGHTS] if entry.lacks_memory else []
    _descend(entry, blocks, budget)
    for starts in others:
        other = _Entry(simulator, starts, entry.bound)
        _take_if_better(other, starts, budget)
        _descend(other, blocks, budget)
        if other.result and entry.result and other.result.beats(entry.result):
            entry.starts, entry.result = other.starts, other.result


def _descend(entry: _Entry, blocks: int, budget: _Budget) -> None:
    """Move single blocks while that makes the plan faster or lack less memory, within the ``budget``."""
    simulator, improved, end = entry.simulator, True, budget.plans - budget.left(entry)
    while improved:
        load = simulator.load(simulator.costs(entry.starts), lacking=entry.lacks_memory)
        improved = False
        for starts in itertools.islice(
            near_cuts(entry.starts, blocks, simulator.shape.workers, load), _BOUNDS * budget.moves
        ):
            if budget.plans <= end or budget.cuts <= 0:
                return
            if _take_if_better(entry, starts, budget):
                improved = True
                break


def _take_if_better(entry: _Entry, starts: Integers, budget: _Budget, ceiling: float = math.inf) -> bool:
    """Give the entry other cuts if they are better, and below ``ceiling`` seconds; return whether they are."""
    simulator, result = entry.simulator, entry.result
    budget.cuts -= 1
    costs = simulator.costs(starts)
    limit = min(ceiling, result.seconds if result else math.inf) * _ALMOST
    if limit < math.inf and simulator.bound(costs) >= limit:
        return False
    found = simulator.simulate(costs)
    if not found.lacking_bytes:
        budget.plans -= 1
        budget.events -= _events(entry)
    if result is not None and not found.beats(result):
        return False
    entry.starts, entry.result = starts, found
    return True


# --- Other cuts of a plan with several stages per device: all of them, or those one or two moves away


_REACH = 4  # stages between the two of a move, at most


def count_cuts(blocks: int, stages: int) -> int:
    """Return in how many ways ``blocks`` can be cut into ``stages``."""
    return math.comb(blocks - 1, stages - 1)


def all_cuts(blocks: int, stages: int) -> Iterator[Integers]:
    """Yield the first block of each stage, for all cuts."""
    for starts in itertools.combinations(range(1, blocks), stages - 1):
        yield np.array((0, *starts), np.int64)


def moved_cuts(starts: Integers, blocks: int, workers: WorkerMap, load: Floats) -> Iterator[Integers]:
    """Yield cuts in which one stage has a block less and another, near it, a block more.

    The stages between them keep their numbers of blocks. ``load``: of each worker; the stages of the worker
    with the largest load are made smaller first.
    """
    stages = len(starts)
    sizes = np.diff(starts, append=blocks)
    by_load = sorted(range(stages), key=lambda stage: -load[workers.worker_of[stage]])
    for distance in range(1, min(_REACH, stages - 1) + 1):
        for less in by_load:
            if sizes[less] < 2:
                continue
            if less + distance < stages:  # the last block of a stage goes to a later one
                moved = starts.copy()
                moved[less + 1 : less + distance + 1] -= 1
                yield moved
            if less >= distance:  # the first block of a stage goes to an earlier one
                moved = starts.copy()
                moved[less - distance + 1 : less + 1] += 1
                yield moved


def near_cuts(starts: Integers, blocks: int, workers: WorkerMap, load: Floats) -> Iterator[Integers]:
    """Yield the cuts one move away (see ``moved_cuts``), then those two moves away."""
    yield from moved_cuts(starts, blocks, workers, load)
    for moved in moved_cuts(starts, blocks, workers, load):
        yield from moved_cuts(moved, blocks, workers, load)
