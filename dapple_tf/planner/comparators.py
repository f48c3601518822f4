"""What planner "best" chooses among where its search cannot be compiled: the plans of the planners of other systems.

They are left out on more than 64 devices, and SPP for large problems too, where they take long. Plans with virtual
workers are left out, since they can be simulated but not run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
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

_MOST_DEVICES = 64  # with more, the dynamic programs take long
_SPP_LIMIT = 3200  # blocks times devices; with more, SPP's dynamic program takes longer than all others together
_Planners = tuple[Callable[[PlanningProblem], PlannerResult | None], ...]
_OF_ANY_DEVICES: _Planners = (plan_torchgpipe, plan_hetpipe, plan_bapipe)
_OF_EQUAL_DEVICES: _Planners = (plan_pipedream, plan_alpa_inter, plan_piper, plan_autopipe)


def comparator_candidates(problem: PlanningProblem, chunks: Sequence[int] = ()) -> list[Candidate]:
    """Return what each of these planners chooses, as it is and under the fastest policy.

    ``chunks``: the numbers of stages per device of planner "even", beside one. There are no candidates on more than 64
    devices, none of a planner that refuses the cluster, and none of SPP where blocks times devices exceed 3200.
    """
    if problem.cluster.devices > _MOST_DEVICES:
        return []
    planners: _Planners = (partial(plan_even, chunks=(1, *chunks)), *_OF_ANY_DEVICES)
    planners += _OF_EQUAL_DEVICES if problem.cluster.is_uniform else ()
    if problem.cluster.is_uniform and len(problem.chain.parameter_bytes) * problem.cluster.devices <= _SPP_LIMIT:
        planners += (plan_spp,)
    found = list[Candidate]()
    for planner in planners:
        with contextlib.suppress(PlanError):
            result = planner(problem)
            if result is not None and result.chosen.stages[0].worker is None:  # virtual workers cannot be run
                found += _with_fastest_policy(problem, result.chosen)
    return found


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
