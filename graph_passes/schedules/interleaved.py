"""Schedules of workers that hold several chunks each, looped: interleaved 1F1B, interleaved zero bubble, breadth first.

Interleaved 1F1B is from Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021,
section 2.2. Each of p workers holds v chunks (stages) of the model. They are *looped*: stage s is on worker s mod p. A
worker takes the micro-batches in groups: it runs a group's forwards on its first chunk, then on its second, and so on.
After its warm-up it runs one forward and one backward alternately. If M is a multiple of p, and a chunk's forward takes
f and its backward b, each worker is idle for (p - 1) (f + b) in a step, which is 1/v of its idle time under 1F1B.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dapple_tf.graph_passes.schedules.schedule import Action, Schedule, checked_schedule
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap


def interleaved_1f1b(workers: int, chunks: int, micro_batches: int) -> Schedule:
    """Return the schedule of ``workers`` devices with ``chunks`` stages each.

    In the paper M is a multiple of p, and each group has p micro-batches. For any other M, groups have p to 2 p - 1
    micro-batches, as equal as possible (if M < p, there is one group of M), and the warm-up is as long as the largest
    group needs.
    """
    groups = micro_batch_groups(workers, micro_batches)
    forwards = order_calls(groups, range(chunks))
    backwards = order_calls(groups, range(chunks - 1, -1, -1))
    rows = []
    for worker, stages in enumerate(WorkerMap.looped(workers, chunks).stages_of):
        ahead = 2 * (workers - worker - 1) + (chunks - 1) * max(map(len, groups)) + 1
        rows.append(_alternate(stages, forwards, backwards, min(ahead, len(forwards))))
    return checked_schedule(rows)


def micro_batch_groups(workers: int, micro_batches: int) -> list[range]:
    """Return groups of at least ``workers`` micro-batches, as equal as possible; one group where there are fewer."""
    count = max(1, micro_batches // workers)
    bounds = [micro_batches * group // count for group in range(count + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def order_calls(groups: Sequence[range], chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Return chunk and micro-batch of every call of one kind, in order."""
    return [(chunk, m) for group in groups for chunk in chunks for m in group]


def _alternate(
    stages: Sequence[int], forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], ahead: int
) -> tuple[Action, ...]:
    """Return ``ahead`` forwards, then a backward and a forward alternately, then the other backwards."""
    actions = [Action(stages[chunk], "F", m) for chunk, m in forwards[:ahead]]
    for index, (chunk, m) in enumerate(backwards):
        actions.append(Action(stages[chunk], "B", m))
        if ahead + index < len(forwards):
            following, n = forwards[ahead + index]
            actions.append(Action(stages[following], "F", n))
    return tuple(actions)


# --- Interleaved zero bubble: interleaved 1F1B in which gradients of weights fill idle time, as in ZB-H1
# Each of p workers holds v chunks of the model, looped (Narayanan et al., 2021, section 2.2), and computes the
# gradients of weights later than the gradients of inputs (Qi et al., "Zero Bubble Pipeline Parallelism", 2023). If M is
# a multiple of p, and F, I and W of a chunk take t_f, t_i >= t_f and t_w = t_f, each worker is idle for (p - 1) (t_f +
# t_i - t_w) in a step, which is 1/v of its idle time under ZB-H1.


def interleaved_zero_bubble(workers: int, chunks: int, micro_batches: int) -> Schedule:
    """Return the schedule of ``workers`` devices with ``chunks`` stages each.

    In its warm-up worker w runs w forwards fewer than worker 0 (in interleaved 1F1B, 2 w fewer). It delays each W until
    it has run w further I. So all workers hold as many stashes as worker 0.
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
    return checked_schedule(rows)


# --- Looped breadth-first schedule (Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022, section 4)
# Each of p workers holds v chunks of the model, looped. It runs all forwards of a chunk before the first one of the
# next chunk, and then the backwards in the same way, the last chunk first. AllReduce of a chunk can start when the
# chunk's last backward has ended. If M >= p, and a chunk's forward takes f and its backward b, each worker is idle for
# (p - 1) (f + b) in a step. All M micro-batches are in flight on all chunks.


def looped_breadth_first(workers: int, chunks: int, micro_batches: int) -> Schedule:
    """Return the schedule of ``workers`` devices with ``chunks`` stages each; with one chunk it is GPipe's."""
    rows = []
    for stages in WorkerMap.looped(workers, chunks).stages_of:
        forwards = [Action(stage, "F", m) for stage in stages for m in range(micro_batches)]
        backwards = [Action(stage, "B", m) for stage in reversed(stages) for m in range(micro_batches)]
        rows.append((*forwards, *backwards))
    return checked_schedule(rows)
