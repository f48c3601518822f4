"""Plans on devices of different kinds: candidates of dynamic programs, and local search from the fastest of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dapple_tf.plan import StagePlan
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.planner.unequal_cuts import UnequalStages, unequal_stages
from dapple_tf.planner.unequal_orders import device_orders

ORIGIN = "unequal devices"
_REFINED = 3  # candidates
_EVENTS = 1_000_000  # simulated in all local searches
_MOVES = 900  # tried in all of them
_MOST_EVALUATED = 12  # of the stages found for one micro-batch size


def unequal_candidates(problem: PlanningProblem, most: int | None = None) -> list[Candidate]:
    """Return plans of one stage per device on unequal devices: those of every micro-batch size, and the best refined.

    Each stage has devices that follow each other in one of ``device_orders``, and shares rows by speed. ``most``: how
    many of the fastest plans with different stages are wanted (at least 3 are refined); others may be left out, which
    takes less time. Not proven optimal. Raises ProfileError for a kind without costs.
    """
    candidates: list[Candidate] = []
    for size in problem.micro_batch_sizes:
        candidates += _evaluate(problem, _stages_of_size(problem, size), size, candidates, most)
    fastest = sorted(candidates, key=lambda c: c.seconds)
    distinct = list({candidate.stages: candidate for candidate in reversed(fastest)}.values())[::-1][:_REFINED]
    for found in distinct:
        events = 4 * len(found.stages) * problem.global_batch_size // found.micro_batch_size
        candidates.append(_refine(problem, found, min(_MOVES, _EVENTS // events) // _REFINED))
    return candidates


def _stages_of_size(problem: PlanningProblem, size: int) -> list[UnequalStages]:
    """Return stages of every number in every order, the least seconds of the busiest stage first, each once."""
    found: dict[tuple[StagePlan, ...], UnequalStages] = {}
    for order in device_orders(problem.profile, problem.cluster):
        for straight, transfers in ((False, False), (False, True), (True, True)):
            for entry in unequal_stages(problem, order, size, straight=straight, transfers=transfers):
                found.setdefault(entry.stages, entry)
    return sorted(found.values(), key=lambda entry: (entry.seconds, len(entry.stages)))


def _evaluate(
    problem: PlanningProblem,
    found: Sequence[UnequalStages],
    size: int,
    known: Sequence[Candidate],
    most: int | None,
) -> list[Candidate]:
    """Return the simulated candidates of the first stages ``found``; it ends where none can be the fastest.

    ``most``: see ``unequal_candidates``.
    """
    least, candidates = min((candidate.seconds for candidate in known), default=math.inf), list[Candidate]()
    by_count: dict[int, int] = {}
    for entry in found:
        count = by_count[len(entry.stages)] = by_count.get(len(entry.stages), 0) + 1
        if entry.seconds >= least or count > _MOST_EVALUATED:
            continue
        ceiling = math.inf if most is None else _seconds_of_rank([*known, *candidates], max(most, _REFINED))
        candidate = problem.evaluate(entry.stages, size, ORIGIN, ceiling=ceiling)
        if candidate is not None:
            candidates.append(candidate)
            least = min(least, candidate.seconds)
    return candidates


def _seconds_of_rank(candidates: Sequence[Candidate], rank: int) -> float:
    """Return the seconds of the candidate of this rank (from 1) among those of different stages; infinite if none."""
    least: dict[tuple[StagePlan, ...], float] = {}
    for candidate in candidates:
        least[candidate.stages] = min(candidate.seconds, least.get(candidate.stages, math.inf))
    return sorted(least.values())[rank - 1] if len(least) >= rank else math.inf


def _refine(problem: PlanningProblem, candidate: Candidate, moves: int) -> Candidate:
    """Return the candidate after moves that make its step shorter; at most ``moves`` plans are simulated."""
    best, improved = candidate, True
    while improved:
        improved = False
        for stages in _neighbours(problem, best.stages):
            if moves <= 0:
                return best
            moves -= 1
            found = problem.evaluate(stages, best.micro_batch_size, candidate.origin, ceiling=best.seconds)
            if found is not None and found.seconds < best.seconds * (1 - 1e-9):
                best, improved = found, True
                break
    return best


def _neighbours(problem: PlanningProblem, stages: tuple[StagePlan, ...]) -> Iterator[tuple[StagePlan, ...]]:
    """Yield plans one move away, without shares.

    A move puts a cut one block further, moves a device of a kind to another stage or to none, takes an unused one in,
    or exchanges devices of two kinds between two stages.
    """
    positions = problem.chain.positions
    bare = tuple(replace(stage, shares=None) for stage in stages)
    for index in range(1, len(bare)):
        cut = positions.index(bare[index].first_layer) if bare[index].first_layer in positions else None
        for other in () if cut is None else (cut - 1, cut + 1):
            first = positions[other]
            if bare[index - 1].first_layer < first <= bare[index].last_layer:
                left, right = replace(bare[index - 1], last_layer=first - 1), replace(bare[index], first_layer=first)
                yield (*bare[: index - 1], left, right, *bare[index + 1 :])
    yield from _device_moves(problem, bare)


def _device_moves(problem: PlanningProblem, stages: tuple[StagePlan, ...]) -> Iterator[tuple[StagePlan, ...]]:
    cluster = problem.cluster
    used = {device for stage in stages for device in stage.devices}
    groups = [stage.devices for stage in stages]
    groups.append(tuple(device for device in range(cluster.devices) if device not in used))
    for a, source in enumerate(groups):
        one_of_kind = {cluster.kind_of(device): device for device in source}.values()
        for device in one_of_kind if a == len(stages) or len(source) > 1 else ():
            for b in range(len(groups)):
                if b != a:
                    yield _with_groups(stages, groups, {a: (device, None), b: (None, device)})
        for b in range(a + 1, len(groups)):
            for device in one_of_kind:
                for other in {cluster.kind_of(device): device for device in groups[b]}.values():
                    if cluster.kind_of(device) != cluster.kind_of(other):
                        yield _with_groups(stages, groups, {a: (device, other), b: (other, device)})


def _with_groups(
    stages: tuple[StagePlan, ...],
    groups: Sequence[tuple[int, ...]],
    changes: dict[int, tuple[int | None, int | None]],
) -> tuple[StagePlan, ...]:
    """Return the stages after ``changes``: in some groups one device goes and one comes."""
    changed = list(groups)
    for index, (gone, come) in changes.items():
        kept = [device for device in groups[index] if device != gone]
        changed[index] = tuple(sorted(kept if come is None else [*kept, come]))
    return tuple(replace(stage, devices=devices) for stage, devices in zip(stages, changed, strict=False))
