"""Execute a schedule whose micro-batches have different sizes, or in which some results travel together.

Planners simulate few such steps (those of AutoPipe's Slicer), and training and drawings must not wait until Numba has
compiled. So where nothing shares network interfaces the times are those of the plain executor, ``time_actions``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dapple_tf.errors import ScheduleError
from dapple_tf.simulator.compiled import Floats
from dapple_tf.simulator.contention import Flows
from dapple_tf.simulator.execution import Execution
from dapple_tf.simulator.order import encode
from dapple_tf.simulator.rings import make_rings
from dapple_tf.simulator.shared_engine import Seconds, run_shared
from dapple_tf.timeline.stage_costs import StageCosts
from graph_passes.schedules.schedule import Action, ActionTimes, Schedule, of_kind, time_actions

_DEADLOCK = "the schedule deadlocks: call graph_passes.schedules.schedule.check(schedule) to see where"


def execute_sizes(
    schedule: Schedule,
    costs: Sequence[StageCosts],
    of_micro_batches: Sequence[Sequence[StageCosts]],
    flows: Flows | None = None,
) -> Execution:
    """Run ``schedule`` where each micro-batch has costs of its own; the result is as that of ``execute``.

    ``costs``: of each stage, for what micro-batches share (AllReduce, weights, the largest working set).
    ``of_micro_batches``: for each micro-batch those of each stage, of which the seconds and the stash count. ``flows``:
    as in ``execute``. Raises ScheduleError for another number of stages or micro-batches, and for a schedule that
    deadlocks.
    """
    stages, micro_batches = len(schedule.stages), schedule.micro_batches
    shape = len(of_micro_batches), {len(costs), *map(len, of_micro_batches)}
    if shape != (micro_batches, {stages}):
        raise ScheduleError(
            f"the schedule has {stages} stages x {micro_batches} micro-batches, but there are costs of "
            f"{len(costs)} stages and {len(of_micro_batches)} micro-batches"
        )

    if flows is not None and flows.directions:
        return _execute_shared(schedule, costs, of_micro_batches, flows)

    def seconds(action: Action) -> float:
        cost = of_micro_batches[action.micro_batch][action.stage]
        return of_kind(action.kind, cost.forward_seconds, cost.backward_seconds, cost.weights_seconds)

    def send_seconds(action: Action) -> float:
        own = of_micro_batches[action.micro_batch]
        if action.kind == "F":
            return own[action.stage].send_forward_seconds
        return own[action.stage - 1].send_backward_seconds

    times = time_actions(schedule, seconds, send_seconds)
    if any(len(done) < len(actions) for done, actions in zip(times, schedule.workers, strict=True)):
        raise ScheduleError(_DEADLOCK)
    arrays = _fill_arrays(schedule, times)
    return Execution(
        encode(schedule),
        tuple(costs),
        *arrays,
        of_micro_batches=tuple(map(tuple, of_micro_batches)),
        together=schedule.together,
    )


def _execute_shared(
    schedule: Schedule, costs: Sequence[StageCosts], of_micro_batches: Sequence[Sequence[StageCosts]], flows: Flows
) -> Execution:
    """Return ``execute_sizes`` where flows share network interfaces."""
    names = ("forward", "backward", "weights", "send_forward", "send_backward")
    arrays = [
        np.array([[getattr(cost, f"{name}_seconds") for cost in own] for own in of_micro_batches], np.float64).T.copy()
        for name in names
    ]
    together = np.zeros((2, len(costs), schedule.micro_batches), np.bool_)
    for action in schedule.together:
        together[int(action.kind != "F"), action.stage, action.micro_batch] = True
    order, splits = encode(schedule), bool(schedule.split)
    (*times, done), ends = run_shared(
        order, Seconds(*arrays, *together), flows, make_rings(costs), splits, True, np.inf, False
    )
    if done < order.size:
        raise ScheduleError(_DEADLOCK)
    return Execution(
        order,
        tuple(costs),
        *times,
        of_micro_batches=tuple(map(tuple, of_micro_batches)),
        together=schedule.together,
        rings_end=ends,
    )


def _fill_arrays(schedule: Schedule, times: Sequence[Sequence[ActionTimes]]) -> list[Floats]:
    """Return the arrays of an ``Execution``: starts and ends of F, of B or I, of W, and of both kinds of transfers."""
    stages = len(schedule.stages)
    rows = [stages] * 4 + [stages * bool(schedule.split)] * 2 + [stages] * 4
    arrays: list[Floats] = [np.full((count, schedule.micro_batches), np.nan) for count in rows]
    for actions, of_worker in zip(schedule.workers, times, strict=True):
        for action, found in zip(actions, of_worker, strict=True):
            stage, kind, m = action.stage, action.kind, action.micro_batch
            first = {"F": 0, "B": 2, "I": 2, "W": 4}[kind]
            arrays[first][stage, m], arrays[first + 1][stage, m] = found.start, found.end
            if kind == "F" and stage + 1 < stages:
                arrays[6][stage, m], arrays[7][stage, m] = found.sent, found.arrived
            elif kind in "BI" and stage > 0:
                arrays[8][stage - 1, m], arrays[9][stage - 1, m] = found.sent, found.arrived
    return arrays
