"""Candidates of planner "best" from the planners of other systems, called comparators, so that none is faster.

The comparators are left out on more than 64 devices, and SPP for large problems too, where they take longer than best's
own search. Plans with virtual workers are left out, since they can be simulated but not run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from dapple_tf.errors import PlanError
from dapple_tf.planner.alpa_inter import plan_alpa_inter
from dapple_tf.planner.autopipe import plan_autopipe
from dapple_tf.planner.bapipe import plan_bapipe
from dapple_tf.planner.even import plan_even
from dapple_tf.planner.hetpipe import plan_hetpipe
from dapple_tf.planner.pipedream import plan_pipedream
from dapple_tf.planner.piper import plan_piper
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.spp import plan_spp
from dapple_tf.planner.torchgpipe import plan_torchgpipe

_MOST_DEVICES = 64  # with more, the dynamic programs take longer than the search beside them
_SPP_LIMIT = 3200  # blocks times devices; with more, SPP's dynamic program takes longer than all others together
_Planners = tuple[Callable[[PlanningProblem], PlannerResult | None], ...]
_OF_ANY_DEVICES: _Planners = (partial(plan_even, chunks=(1,)), plan_torchgpipe, plan_hetpipe, plan_bapipe)
_OF_EQUAL_DEVICES: _Planners = (plan_pipedream, plan_alpa_inter, plan_piper, plan_autopipe)


def comparator_candidates(problem: PlanningProblem, ceiling: float = math.inf) -> list[Candidate]:
    """Return what each comparator chooses if it is below ``ceiling`` seconds, as it is and under the fastest policy.

    Plans of one stage per device. There are none on more than 64 devices, none of a planner that refuses the cluster,
    and none of SPP where blocks times devices exceed 3200. Planners "dp", "gpipe" and "dapple" are not among them: best
    has their plans from ``baseline_candidates`` and ``choose_by_formula``.
    """
    if problem.cluster.devices > _MOST_DEVICES:
        return []
    found, bounded = list[Candidate](), replace(problem, ceiling=ceiling)
    planners = _OF_ANY_DEVICES + (_OF_EQUAL_DEVICES if problem.cluster.is_uniform else ())
    if problem.cluster.is_uniform and len(problem.chain.parameter_bytes) * problem.cluster.devices <= _SPP_LIMIT:
        planners += (plan_spp,)
    for planner in planners:
        with contextlib.suppress(PlanError):
            result = planner(bounded)
            if result is not None and result.chosen.stages[0].worker is None:  # virtual workers cannot be run
                found += _with_fastest_policy(bounded, result.chosen)
    return [candidate for candidate in found if candidate.seconds < ceiling]


def interleaved_comparator_candidates(problem: PlanningProblem, chunks: Sequence[int]) -> list[Candidate]:
    """Return what planner "even" chooses with these ``chunks``, stages per device."""
    if problem.cluster.devices > _MOST_DEVICES:
        return []
    result = plan_even(problem, chunks=chunks)
    return [result.chosen] if result is not None else []


def faster_with_even_layers(problem: PlanningProblem, result: PlannerResult | None) -> PlannerResult | None:
    """Return the faster of ``result`` and that of planner "even"; where "even" is, ``result`` becomes its runner-up."""
    even = plan_even(problem) if problem.cluster.devices <= _MOST_DEVICES else None
    if even is None or (result is not None and even.chosen.seconds >= result.chosen.seconds * (1 - 1e-9)):
        return result
    return PlannerResult(even.chosen, () if result is None else (result.chosen,))


def _with_fastest_policy(problem: PlanningProblem, chosen: Candidate) -> list[Candidate]:
    """Return the candidate, and its stages under the fastest policy."""
    faster = problem.evaluate(chosen.stages, chosen.micro_batch_size, chosen.origin, recompute=chosen.recompute)
    return [chosen] if faster is None else [chosen, faster]
