"""Planner "best": the plan with the shortest simulated step of those that simulated annealing finds and simple ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from dapple_tf.errors import PlanError, warn_user
from dapple_tf.planner.baselines import leading_baselines
from dapple_tf.planner.memory_fit import fit_memory, may_bind
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.registration import REGISTERED, planner
from dapple_tf.planner.search.annealer import ANY_WARM_UP, Annealer
from dapple_tf.planner.search.chunk_search import plan_chunked
from dapple_tf.planner.search.searched_order import plan_searched
from dapple_tf.planner.step_simulation import POLICIES
from dapple_tf.planner.systems.even import plan_even
from dapple_tf.planner.systems.straight import plan_gpipe
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.profile import Profile
from dapple_tf.simulator.arrays import Floats

# The work of each search on up to 16 devices (a tenth of a second on one core), and the work that each further device
# adds.
_WORK, _WORK_OF_A_DEVICE = 14_000_000, 800_000
# Each search has other random numbers: the plan that a search finds depends on chance, more so where devices, links or
# the sizes of servers differ. On up to _FEW_DEVICES all searches together take a fifth of a second, so there are more.
# On more than _MANY_DEVICES a search takes seconds, so there is only one. More searches follow as long as the last one
# has found a faster layout (simulator/native/planner.cc).
_SEARCHES, _SEARCHES_ON_FEW, _MORE_SEARCHES = 4, 6, 12
_FEW_DEVICES, _MANY_DEVICES = 8, 128
_MORE_WORK = 3  # the factor of the work where devices, links or the sizes of servers differ
_MOST_WORK = 60_000_000
# With fewer blocks times devices than _SMALL the work shrinks in proportion; with more blocks than _MANY_BLOCKS it
# grows with the square root of their number.
_SMALL, _MANY_BLOCKS = 128, 64
# In a search for a given schedule K_i is slope (S - 1 - i) + 1, at most M. With the slope of gpipe it is always M.
_SLOPES = {"auto": ANY_WARM_UP, "dapple-a": 1, "dapple-b": 2, "gpipe": 1 << 20}
_REFINED = 3  # candidates that ``move_singly`` improves
_MOVES = 40  # plans that ``move_singly`` simulates, under schedules that the search does not simulate
_NO_COMPILER = (
    "planner 'best' chooses among the plans of the other planners: its search is written in C++, and there is no "
    "C++ compiler: install g++ (or set CXX), then plan again"
)


@planner("best", unequal=True, shares_devices=True)
def plan_best(problem: PlanningProblem, *, chunks: Sequence[int] = (2, 4)) -> PlannerResult | None:
    """Return the fastest plan in the simulator; None if nothing fits the memory.

    ``chunks``: numbers of stages per device. If the schedule is "auto", plans with each of these numbers are considered
    under interleaved 1F1B, in addition to those with one stage per device. Any other schedule says itself which stages
    share devices. Raises PlanError for
    ``chunks`` below 2. Warns where there is no compiler for the search.
    """
    if problem.searches_order:
        return plan_searched(problem, plan_best)
    if problem.shares_devices:
        chunked = plan_chunked(problem) if problem.cluster.is_uniform else _plan_chunked_unequal(problem)
        return faster_with_even_layers(problem, chunked)
    if min(chunks, default=2) < 2:
        raise PlanError(f"chunks={list(chunks)}: one stage per device is always considered, so give numbers from 2 on")
    candidates = leading_baselines(problem) or _fitting_candidate(problem)
    auto = problem.schedule == "auto"
    annealer = Annealer.of(
        problem,
        chunks=chunks if auto else (),
        stages=None if auto else problem.spec.stages,
        may_recompute=may_bind(problem),
        slope=_SLOPES.get(problem.schedule, _SLOPES["dapple-a"]),
    )
    if annealer is None:
        warn_user(_NO_COMPILER)
        candidates += comparator_candidates(problem, chunks if auto else ())
    else:
        candidates += _annealed(problem, annealer)
    if problem.schedule not in (*POLICIES, "auto"):
        candidates += [move_singly(problem, candidate, _MOVES) for candidate in _fastest_few(candidates)]
    return PlannerResult.ranked(candidates)


def _annealed(problem: PlanningProblem, annealer: Annealer) -> list[Candidate]:
    """Return the fastest plan that the search finds."""
    cluster, blocks = problem.cluster, len(problem.chain.parameter_bytes)
    work = _WORK + max(0, cluster.devices - 16) * _WORK_OF_A_DEVICE
    factor = min(1.0, blocks * cluster.devices / _SMALL) * max(1.0, blocks / _MANY_BLOCKS) ** 0.5
    alike = cluster.is_uniform and not cluster.links and len({server.devices for server in cluster.servers}) == 1
    if not alike:
        work *= _MORE_WORK
    searches = _SEARCHES_ON_FEW if cluster.devices <= _FEW_DEVICES else _SEARCHES
    if not alike:
        searches = _MORE_SEARCHES
    if cluster.devices > _MANY_DEVICES:
        searches = 1
    for layout in annealer.search(min(int(work * factor), _MOST_WORK), searches=searches):
        schedule = layout.schedule if problem.schedule == "auto" else None
        candidate = problem.evaluate(layout.stages, layout.micro_batch_size, "local search", schedule, layout.recompute)
        if candidate is not None:  # a given schedule may need more memory than the K_i of the search
            return [candidate]
    return []


def _fitting_candidate(problem: PlanningProblem) -> list[Candidate]:
    """Return the plan of the fewest devices that fits the memory, for when stages of equal compute do not fit."""
    stages = fit_memory(problem)
    if stages is None or sum(stage.replicas for stage in stages) > problem.cluster.devices:
        return []
    found = problem.evaluate(stages, problem.micro_batch_sizes[0], "straight")
    return [found] if found else []


def _plan_chunked_unequal(problem: PlanningProblem) -> PlannerResult | None:
    """Return the faster one of two plans: with even stages, and with stages whose cuts were searched.

    The search for cuts treats all devices as equal. Both plans are then simulated on the devices as they are.
    """
    found = [plan_chunked(problem), plan_gpipe(problem)]
    return PlannerResult.ranked(c for result in found if result for c in (result.chosen, *result.runners_up))


def _fastest_few(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the fastest candidates, at most three, no two of which have the same replica counts."""
    by_replicas: dict[tuple[int, ...], Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.seconds):
        by_replicas.setdefault(tuple(stage.replicas for stage in candidate.stages), candidate)
    return list(by_replicas.values())[:_REFINED]


# --- Move single cuts or devices, for schedules that the local search does not simulate


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
    """Yield the plans that one move leads to: a cut moves by a block, or a device to a neighbouring stage."""
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


# --- Where the search of planner "best" cannot be compiled, it chooses among the plans of other systems' planners


_MOST_DEVICES = 64  # with more, the dynamic programs take long
_SPP_LIMIT = 3200  # blocks times devices; with more, SPP's dynamic program takes longer than all others together


def comparator_candidates(problem: PlanningProblem, chunks: Sequence[int] = ()) -> list[Candidate]:
    """Return the plans of planner "even" and of each planner that is a candidate (see ``Planner``).

    Each plan is there twice: as its planner made it, and with the same stages under the fastest policy.

    ``chunks``: the numbers of stages per device that planner "even" tries in addition to one. On more than 64 devices
    there are no candidates. Left out are planners that refuse the cluster, and SPP where blocks times devices exceed
    3200.
    """
    if problem.cluster.devices > _MOST_DEVICES:
        return []
    uniform = problem.cluster.is_uniform
    small = len(problem.chain.parameter_bytes) * problem.cluster.devices <= _SPP_LIMIT
    plans: list[Callable[[PlanningProblem], PlannerResult | None]] = [partial(plan_even, chunks=(1, *chunks))]
    for _, entry in sorted(REGISTERED.items()):  # of equally fast plans the first is taken, whatever was imported first
        if entry.candidate and not entry.native and (uniform or entry.unequal) and (small or entry.name != "spp"):
            plans.append(entry.plan)
    found = list[Candidate]()
    for plan in plans:
        with contextlib.suppress(PlanError):
            result = plan(problem)
            if result is not None and result.chosen.stages[0].worker is None:  # virtual workers cannot be run
                found += _with_fastest_policy(problem, result.chosen)
    return found


def faster_with_even_layers(problem: PlanningProblem, result: PlannerResult | None) -> PlannerResult | None:
    """Return ``result``, or the plan of planner "even" if that is faster, with the plan of ``result`` as runner-up."""
    even = plan_even(problem) if problem.cluster.devices <= _MOST_DEVICES else None
    if even is None or (result is not None and even.chosen.seconds >= result.chosen.seconds * (1 - 1e-9)):
        return result
    return PlannerResult(even.chosen, () if result is None else (result.chosen,))


def _with_fastest_policy(problem: PlanningProblem, chosen: Candidate) -> list[Candidate]:
    """Return the candidate, and its stages under the fastest policy."""
    faster = problem.evaluate(chosen.stages, chosen.micro_batch_size, chosen.origin, recompute=chosen.recompute)
    return [chosen] if faster is None else [chosen, faster]


# --- A lower bound of the step of every plan: what its devices, and the stage with the largest layer, must compute


def least_plan_seconds(problem: PlanningProblem) -> float:
    """Return a lower bound (seconds) of the step of any plan without virtual workers, under any schedule.

    It is the larger one of two: ``_least_compute_seconds``, and the least of ``_least_layer_seconds`` over the
    micro-batch sizes.
    """
    kinds = list(dict.fromkeys(problem.cluster.device_kinds))
    forward, both = (
        np.array(rows) for rows in zip(*(_least_sample_seconds(problem, kind) for kind in kinds), strict=True)
    )
    of_sizes = [_least_layer_seconds(problem, size, kinds, forward, both) for size in problem.micro_batch_sizes]
    return max(_least_compute_seconds(problem, kinds, both), min(of_sizes))


def _least_compute_seconds(problem: PlanningProblem, kinds: list[str | None], seconds: Floats) -> float:
    """Return a lower bound (seconds) that follows from what all devices compute together.

    ``seconds`` [kinds, layers]: the least seconds of forward and backward for a sample. A device that computes x
    samples of a micro-batch in a layer needs, for each sample, the layer's seconds for x samples divided by x. On equal
    devices the busiest computes at least as long as the mean of all. On devices of several kinds each second of a
    device of kind k is weighted by w_k, where the weights of all devices add up to 1: the step is at least the weighted
    sum of all devices' seconds, and each sample of a layer costs at least the least of w_k times its seconds there. The
    weights are the speeds of the kinds for the whole model.
    """
    speeds = 1 / np.maximum(seconds.sum(axis=1), 1e-300)
    total = sum(speeds[kinds.index(kind)] for kind in problem.cluster.device_kinds)
    weighted = seconds * (speeds / total)[:, None]
    return float(weighted.min(axis=0).sum()) * problem.global_batch_size


def _least_layer_seconds(
    problem: PlanningProblem, size: int, kinds: list[str | None], forward: Floats, both: Floats
) -> float:
    """Return a lower bound (seconds) that follows from a single layer, for micro-batches of ``size`` samples.

    Each layer gives a bound, and the largest one is returned. The layer's stage computes all micro-batches, each on at
    most as many devices as it has rows. Before the stage's first forward, a micro-batch has passed through all layers
    before this one. ``forward``, ``both`` [kinds, layers]: the least seconds of forward, and of forward and backward,
    for a sample.
    """
    replicas = min(problem.cluster.devices, size)
    rows = -(-size // replicas) if problem.whole_rows and problem.cluster.is_uniform else size / replicas
    of_devices = [kinds.index(kind) for kind in problem.cluster.device_kinds]

    def together(seconds: Floats) -> Floats:
        """Return the least seconds of each layer for a micro-batch, which the fastest devices may divide in any way."""
        with np.errstate(divide="ignore", over="ignore"):  # a layer that takes no time, or hardly any
            shared: Floats = rows * replicas / (1 / np.sort(seconds[of_devices], axis=0)[:replicas]).sum(axis=0)
        return shared

    before = np.cumsum(np.append(0.0, together(forward)[:-1]))
    return float((before + together(both) * (problem.global_batch_size // size)).max())


def _least_sample_seconds(problem: PlanningProblem, kind: str | None) -> tuple[Floats, Floats]:
    """Return the least seconds per sample of each layer, over all numbers of samples.

    There are two arrays [layers]: of forward, and of forward and backward.
    """
    profile: Profile = problem.profile.of_kind(kind, problem.cluster.kind_speed(kind))
    # Between measured sizes seconds are linear in the samples x. So seconds / x is least at a measured size or an end.
    least, most = min(problem.micro_batch_sizes) / problem.cluster.devices, float(max(problem.micro_batch_sizes))
    points = [least, most, *(float(size) for size in profile.measured_sizes if least < size < most)]
    forward = np.array([profile.forward_seconds(x) / x for x in points])
    both = forward + np.array([profile.backward_seconds(x) / x for x in points])
    return forward.min(axis=0), both.min(axis=0)
