"""DualPipe-V: forwards of one micro-batch beside backwards of another, with two stages per worker in the shape of a V.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1, and the DualPipe repository's "cut-in-half" of it. In
the steady state a worker runs the forward on one of its stages and the backward on the other as a pair, so that one's
communication can pass behind the other's computation. Here a pair is two actions, one after the other, and costs their
sum.

With M >= 2 p, t_I <= t_F, and results that leave when their own action ends, the bubble is (p - 1) (t_F + t_B - 2
t_W), where t_B = t_I + t_W. The repository gives (p - 1) (t_FB + t_B - 3 t_W), where the results of a pair leave when
all of it ends, after t_FB; with t_F = t_I and t_FB = t_F + t_B that is longer by (p - 1) t_I. At most 2 p + 1 stashes.
"""

from __future__ import annotations

from graph_passes.schedules.call_sequence import CallSequence
from graph_passes.schedules.schedule import Action, Schedule
from graph_passes.schedules.v_shaped import v_shaped


def dualpipe_v(workers: int, micro_batches: int) -> Schedule:
    """Return the schedule of ``workers`` devices with two stages each.

    Of fewer than 2 p micro-batches the order is that of 2 p, without those that are missing.
    """
    return v_shaped(workers, micro_batches, 2 * workers, _row)


def _row(workers: int, worker: int, stages: tuple[int, ...], micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of a worker with the stages ``down`` the V and ``up`` again, for M >= 2 p."""
    down, up = stages
    after = workers - worker - 1  # the workers behind this one, to the last, at which the V turns
    calls = CallSequence()
    calls.repeat(2 * after, (down, "F"))
    calls.repeat(worker + 1, (down, "F"), (up, "F"))
    calls.repeat(after, (up, "I"), (up, "W"), (up, "F"))
    calls.repeat(micro_batches - 2 * workers + worker + 1, (down, "F"), (up, "B"), (up, "F"), (down, "B"))
    calls.repeat(after, (up, "B"), (up, "F"), (down, "B"))
    # The second half of these backwards leaves its weights for the end, where the worker would wait.
    for index, stage in enumerate([up, down] * (worker + 1)):
        calls.repeat(1, (stage, "I" if index > worker else "B"))
    for _ in range(after):
        calls.append_oldest_weights()
        calls.repeat(1, (down, "I"))
    calls.append_remaining_weights()
    return tuple(calls.actions)
