"""ZB-H1 and ZB-H2: weight gradients fill the bubble (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).

Stage i sends the gradients of its inputs as soon as it can, and computes the gradients of its weights up to d_i
micro-batches later. A stage near the end has a short warm-up and holds few micro-batches, so it may delay more
gradients of weights. It computes them when it would otherwise wait for the last backwards. Suppose that all stages take
equally long, M is large enough, T_W <= T_F and T_W <= T_I. Then a stage, which is idle for (S - 1) (T_F + T_I + T_W) in
a step of 1F1B, is idle for

* (S - 1) (T_F + T_I - T_W) with ZB-H1, which holds S micro-batches as 1F1B does: K_i = S - i, d_i = i;
* (S - 1) (T_F + T_I - 2 T_W) with ZB-H2, which holds 2 S - 1: K_i = 2 (S - i) - 1, d_i = 2 i.

(The paper calls the gradients of inputs B; here they are I, and B is the whole backward.)
"""

from __future__ import annotations

from collections.abc import Sequence

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.list_schedule import ListRule, list_equal_stages
from dapple_tf.graph_passes.schedules.schedule import Schedule, alternate, checked_schedule, of_stage
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap


def zero_bubble(warm: Sequence[int], delays: Sequence[int], micro_batches: int, most: int) -> Schedule:
    """Return the schedule in which stage i delays each W by d_i micro-batches.

    A stage runs K_i forwards. Then it runs in turn the I of a micro-batch, the W of the micro-batch d_i earlier, and
    one F, and in the end the W that are left. ``warm``: K_i. ``delays``: d_i; the delay is D - K_i where that is less.
    ``most``: D, the most micro-batches whose F has run and whose W has not. Raises ScheduleError for a K_i out of range
    or above D.
    """
    stages = []
    for stage, k in enumerate(warm):
        if not 1 <= k <= min(micro_batches, most):
            raise ScheduleError(f"K_{stage} = {k} is not between 1 and M = {micro_batches} and D = {most}")
        forwards, inputs = of_stage(stage, "F", micro_batches), of_stage(stage, "I", micro_batches)
        weights, delay = of_stage(stage, "W", micro_batches), min(delays[stage], most - k)
        stages.append(alternate(forwards, inputs, k, weights, delay))
    return checked_schedule(stages)


# --- ``zb-auto`` where nothing is known about the stages: list scheduling of stages that take equally long
# Where the seconds and bytes of the stages are known, a search finds a better order (Qi et al., "Zero Bubble Pipeline
# Parallelism", 2023, section 4), and the plan contains the actions of this order as text.


ZERO_BUBBLE_AUTO = "zb-auto"
"""The name of the policy."""


def zero_bubble_auto(workers: int, chunks: int, micro_batches: int) -> Schedule:
    """Return the schedule of ``workers`` devices with ``chunks`` stages each, in waves (see ``WorkerMap.waves``).

    A worker holds at most (2 p - 1) ``chunks`` stashes, as many as under ZB-H2.
    """
    worker_map = WorkerMap.waves(workers, chunks)
    rule = ListRule(split=True, most=((2 * workers - 1) * chunks,) * workers)
    return list_equal_stages(worker_map, micro_batches, rule)
