"""Interleaved zero bubble: interleaved 1F1B whose gradients of weights fill idle time, as in ZB-H1.

Each of p workers holds v chunks of the model, looped (Narayanan et al., 2021, section 2.2), and computes gradients of
weights later than those of inputs (Qi et al., "Zero Bubble Pipeline Parallelism", 2023). With M a multiple of p, and
chunks whose halves of backward take t_i >= t_f and t_w = t_f, the bubble is (p - 1) (t_f + t_i - t_w): 1/v of ZB-H1's.
"""

from __future__ import annotations

from graph_passes.schedules.interleaved import micro_batch_groups, order_calls
from graph_passes.schedules.schedule import Action, Schedule, check
from graph_passes.schedules.worker_map import WorkerMap


def interleaved_zero_bubble(workers: int, chunks: int, micro_batches: int) -> Schedule:
    """Return the schedule of ``workers`` devices with ``chunks`` stages each.

    Worker w starts w forwards less than worker 0 (interleaved 1F1B: 2 w less) and runs each W after the I of w calls
    later, so all workers hold as many stashes as worker 0.
    """
    groups = micro_batch_groups(workers, micro_batches)
    forwards = order_calls(groups, range(chunks))
    backwards = order_calls(groups, range(chunks - 1, -1, -1))
    rows = []
    for worker, stages in enumerate(WorkerMap.looped(workers, chunks).stages_of):
        ahead = workers - worker + (chunks - 1) * max(map(len, groups))
        actions = [Action(stages[chunk], "F", m) for chunk, m in forwards[:ahead]]
        weights = [Action(stages[chunk], "W", m) for chunk, m in backwards]
        for index, (chunk, m) in enumerate(backwards):
            actions.append(Action(stages[chunk], "I", m))
            if index >= worker:
                actions.append(weights[index - worker])
            if ahead + index < len(forwards):
                following, n = forwards[ahead + index]
                actions.append(Action(stages[following], "F", n))
        rows.append((*actions, *weights[max(0, len(weights) - worker) :]))
    schedule = Schedule(tuple(rows))
    check(schedule)
    return schedule
