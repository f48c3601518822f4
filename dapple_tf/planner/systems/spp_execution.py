"""SPP's pipeline execution scheduler, PE (SPP, section IV.A and Algorithm 1)."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dapple_tf.graph_passes.schedules.schedule import Action, Schedule
from dapple_tf.simulator.arrays import Floats
from dapple_tf.simulator.engine import step_seconds
from dapple_tf.simulator.order import early_backward_order


class StageSeconds(NamedTuple):
    """Seconds of each stage, arrays [|S|]: of a micro-batch's forward and backward, and A_s of the AllReduce.

    ``send`` [|S| - 1]: c^f_{s_n, s_{n+1}}, and as much for c^b_{s_{n+1}, s_n}.
    """

    forward: Floats
    backward: Floats
    send: Floats
    allreduce: Floats


def execution_order(stages: int, micro_batches: int) -> Schedule:
    """Return the execution order queues U_s (Algorithm 1, lines 1 to 8) as a schedule.

    Blocks J = 1 ... 4 |S| - 3 are the computation and communication blocks of a micro-batch, from the first stage's
    forward to its backward; forward and backward of the last stage are one block. Each pass over the blocks pops a
    micro-batch of each queue Q_j that held one when the pass began. (Printed is a loop over the j whose Q_j is not
    empty. Read as one that sees what was pushed in the same pass, it would run one micro-batch after the other; the
    text has "at most one microbatch to be processed by each block" that can run "about simultaneously", as in Fig. 4.)
    """
    last = 2 * (stages - 1)  # the last stage's block; even blocks compute, odd ones communicate
    blocks = 2 * last + 1
    queues: list[deque[int]] = [deque(range(micro_batches)), *(deque[int]() for _ in range(blocks - 1))]
    found: list[list[Action]] = [[] for _ in range(stages)]
    while any(queues):
        for block in [j for j in range(blocks) if queues[j]]:
            micro_batch = queues[block].popleft()
            if block + 1 < blocks:
                queues[block + 1].append(micro_batch)
            if block % 2:
                continue
            if block <= last:
                found[block // 2].append(Action(block // 2, "F", micro_batch))
            if block >= last:
                found[(blocks - 1 - block) // 2].append(Action((blocks - 1 - block) // 2, "B", micro_batch))
    return Schedule(tuple(map(tuple, found)))


@lru_cache(maxsize=4096)
def warm_up_of_queues(stages: int, micro_batches: int) -> tuple[int, ...]:
    """Return K of each stage, of which ``execution_order`` is the early-backward schedule ``K=9,5,1``.

    Queues are first in, first out, so micro-batch m is in block j in pass m + j, however many there are: stage n (from
    1) runs K = min(4 (|S| - n) + 1, M) forwards before its first backward, then a backward and a forward in turn.
    """
    return execution_order(stages, min(micro_batches, 4 * stages - 3)).warm_up  # that of more is the same


def schedule_name(stages: int, micro_batches: int) -> str:
    """Return the name of the schedule that ``execution_order`` returns."""
    return "K=" + ",".join(map(str, warm_up_of_queues(stages, micro_batches)))


def makespan(seconds: StageSeconds, micro_batches: int) -> float:
    """Return T_PE (Algorithm 1, lines 9 to 26), in seconds.

    A stage runs the first action of U_s as soon as it is ready, and its AllReduce once all backwards are done. Each
    communication block is a channel of its own: both directions of a boundary can send at a time.
    """
    warm = np.array(warm_up_of_queues(len(seconds.forward), micro_batches), np.int64)
    order = early_backward_order(warm, micro_batches)
    send, no_weights = np.append(seconds.send, 0.0), np.zeros(0)
    return float(step_seconds(order, seconds.forward, seconds.backward, no_weights, send, send, seconds.allreduce))
