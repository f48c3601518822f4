"""Schedules of workers with several stages each (chunks of the model): looped, or there and back.

*Looped*: with p workers stage s is on worker s mod p. There and back: the model runs from the first worker to the last
and back; one such way is a V, and Hanayo has several.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dapple_tf.graph_passes.schedules.list_schedule import ListRule, list_equal_stages
from dapple_tf.graph_passes.schedules.schedule import Action, Kind, Schedule, alternate, check, checked_schedule
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap

# --- Interleaved 1F1B (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, 2.2)
# Each of p workers holds v chunks of the model, looped. A worker takes the micro-batches in groups: it runs a group's
# forwards on its first chunk, then on its second, and so on. After its warm-up it runs one forward and one backward
# alternately. If M is a multiple of p, and a chunk's forward takes f and its backward b, each worker is idle for
# (p - 1) (f + b) in a step, which is 1/v of its idle time under 1F1B.


def interleaved_1f1b(workers: int, chunks: int, micro_batches: int) -> Schedule:
    """Return the schedule of ``workers`` devices with ``chunks`` stages each.

    In the paper M is a multiple of p, and each group has p micro-batches. For any other M, groups have p to 2 p - 1
    micro-batches, as equal as possible (if M < p, there is one group of M), and the warm-up is as long as the largest
    group needs.
    """
    groups = _group(workers, micro_batches)
    rows = []
    for worker, stages in enumerate(WorkerMap.looped(workers, chunks).stages_of):
        ahead = 2 * (workers - worker - 1) + (chunks - 1) * max(map(len, groups)) + 1
        rows.append(alternate(_in_turn(groups, stages, "F"), _in_turn(groups, stages[::-1], "B"), ahead))
    return checked_schedule(rows)


def _group(workers: int, micro_batches: int) -> list[range]:
    """Return groups of at least ``workers`` micro-batches, as equal as possible; one group where there are fewer."""
    count = max(1, micro_batches // workers)
    bounds = [micro_batches * group // count for group in range(count + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def _in_turn(groups: Sequence[range], stages: Sequence[int], kind: Kind) -> list[Action]:
    """Return the actions of one kind: group by group, on one stage after the other."""
    return [Action(stage, kind, m) for group in groups for stage in stages for m in group]


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
    groups = _group(workers, micro_batches)
    rows = []
    for worker, stages in enumerate(WorkerMap.looped(workers, chunks).stages_of):
        ahead = workers - worker + (chunks - 1) * max(map(len, groups))
        inputs, weights = _in_turn(groups, stages[::-1], "I"), _in_turn(groups, stages[::-1], "W")
        rows.append(alternate(_in_turn(groups, stages, "F"), inputs, ahead, weights, delay=worker))
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
        every = [range(micro_batches)]
        rows.append((*_in_turn(every, stages, "F"), *_in_turn(every, stages[::-1], "B")))
    return checked_schedule(rows)


# --- Schedules in the shape of a V
# ZB-V and DualPipe-V are defined for a smallest number of micro-batches. For fewer, the actions on the other
# micro-batches are left out.


RowOfWorker = Callable[[int, int, tuple[int, ...], int], tuple[Action, ...]]
"""Takes the number of workers, the number of one worker, its two stages, and M; returns this worker's actions."""


def v_shaped(workers: int, micro_batches: int, least: int, row: RowOfWorker) -> Schedule:
    """Return the schedule of ``workers`` devices; ``row`` can be called for ``least`` micro-batches or more.

    For fewer micro-batches the order is the one of ``least``, without the actions of the others. Raises ScheduleError
    if the schedule cannot run.
    """
    planned = max(micro_batches, least)
    stages_of = WorkerMap.waves(workers, 2).stages_of
    rows = tuple(row(workers, worker, stages, planned) for worker, stages in enumerate(stages_of))
    schedule = Schedule(rows).first_micro_batches(micro_batches)
    check(schedule)
    return schedule


# --- ZB-V: no bubble at the memory of 1F1B, with two stages per worker in the shape of a V
# Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (V-ZB), and "Zero Bubble Pipeline Parallelism", 2023,
# section 6. Worker w of p has the stages w and 2 p - 1 - w. If F, I and W of all stages take equally long, and M >=
# 2 p - 1, no worker waits between its first and last action. Each holds 2 p stashes: the stash of p micro-batches on
# all of its layers, as the first worker of 1F1B does.


def zero_bubble_v(workers: int, micro_batches: int) -> Schedule:
    """Return the schedule of ``workers`` devices with two stages each.

    For fewer than 2 p - 1 micro-batches the order is the one of 2 p - 1, without the actions of the others.
    """
    return v_shaped(workers, micro_batches, 2 * workers - 1, _zero_bubble_row)


def _zero_bubble_row(workers: int, worker: int, stages: tuple[int, ...], micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of a worker with the stages ``down`` the V and ``up`` again, for M >= 2 p - 1."""
    down, up = stages
    onwards = workers - worker  # the workers from this one to the last, at which the V turns
    later = micro_batches - workers  # forwards of ``up`` after the first p
    calls = _CallSequence()
    calls.repeat(2 * onwards - 1, (down, "F"))
    calls.repeat(worker, (up, "F"), (down, "F"))
    calls.repeat(onwards, (up, "F"), (up, "I"), (up, "W"))
    whole: tuple[tuple[int, Kind], ...] = (down, "I"), (down, "W"), (up, "F"), (up, "I"), (up, "W")
    calls.repeat(later - onwards + 1, (down, "F"), *whole)
    calls.repeat(onwards - 1, *whole)
    calls.repeat(worker, (down, "I"), (up, "I"))
    calls.repeat(onwards, (down, "I"), (down, "W"))
    calls.append_remaining_weights()
    return tuple(calls.actions)


# --- Hanayo: waves over the workers and back (Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism", 2023)
# With w waves each of p workers has 2 w stages: the model runs from the first worker to the last and back, w times. At
# each turn two stages follow each other on one worker, and nothing is sent. The paper's runtime orders the actions by
# the times at which they start if a forward of a stage takes 1 unit of time and a backward 2. So does this function.
# With M = p and w = 1 a worker is idle for at most 4 (p - 1) units; in 1F1B, where a worker's two stages are one, for 6
# (p - 1).


def hanayo(workers: int, waves: int, micro_batches: int) -> Schedule:
    """Return the schedule of ``workers`` devices with 2 ``waves`` stages each.

    A worker runs forwards and backwards alternately, where both are ready. It holds at most (2 w + 1) p stashes: 2 w p
    for p micro-batches, as many as 1F1B's first worker holds, and p for the wave that has begun.
    """
    worker_map = WorkerMap.waves(workers, 2 * waves)
    rule = ListRule(split=False, most=((2 * waves + 1) * workers,) * workers, alternate=True)
    return list_equal_stages(worker_map, micro_batches, rule)


# --- DualPipe-V: forwards of one micro-batch beside backwards of another, in the shape of a V
# DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1, and the DualPipe repository's "cut-in-half" of it.
# In the steady state a worker runs the forward of one of its stages and the backward of the other as a pair, so that
# each one's communication can overlap the other's computation. Here a pair is two actions, one after the other, and
# takes the sum of their seconds.
#
# If M >= 2 p, t_I <= t_F, and each result leaves when its own action ends, a worker is idle in a step for (p - 1) (t_F
# + t_B - 2 t_W), where t_B = t_I + t_W. The repository says (p - 1) (t_FB + t_B - 3 t_W), since there the results of a
# pair leave when the whole pair ends, after t_FB; with t_F = t_I and t_FB = t_F + t_B that is longer by (p - 1) t_I. A
# worker holds at most 2 p + 1 stashes.


def dualpipe_v(workers: int, micro_batches: int) -> Schedule:
    """Return the schedule of ``workers`` devices with two stages each.

    For fewer than 2 p micro-batches the order is the one of 2 p, without the actions of the others.
    """
    return v_shaped(workers, micro_batches, 2 * workers, _dualpipe_row)


def _dualpipe_row(workers: int, worker: int, stages: tuple[int, ...], micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of a worker with the stages ``down`` the V and ``up`` again, for M >= 2 p."""
    down, up = stages
    after = workers - worker - 1  # the workers after this one, up to the last, at which the V turns
    calls = _CallSequence()
    calls.repeat(2 * after, (down, "F"))
    calls.repeat(worker + 1, (down, "F"), (up, "F"))
    calls.repeat(after, (up, "I"), (up, "W"), (up, "F"))
    calls.repeat(micro_batches - 2 * workers + worker + 1, (down, "F"), (up, "B"), (up, "F"), (down, "B"))
    calls.repeat(after, (up, "B"), (up, "F"), (down, "B"))
    # The second half of these backwards computes the gradients of weights at the end, where the worker would wait.
    for index, stage in enumerate([up, down] * (worker + 1)):
        calls.repeat(1, (stage, "I" if index > worker else "B"))
    for _ in range(after):
        calls.append_oldest_weights()
        calls.repeat(1, (down, "I"))
    calls.append_remaining_weights()
    return tuple(calls.actions)


# --- Collect the actions of one worker without numbering micro-batches: each stage counts its own


@dataclass
class _CallSequence:
    """Collects ``actions``: the n-th F of a stage is on micro-batch n, and so is its n-th B or I, counted together."""

    actions: list[Action] = field(default_factory=list)
    _ran: Counter[tuple[int, str]] = field(default_factory=Counter)
    _waiting: list[Action] = field(default_factory=list)  # the W of each I that has run, the oldest first

    def repeat(self, times: int, *calls: tuple[int, Kind]) -> None:
        """Append the calls, each a stage and a kind, ``times`` times; a W is the oldest that its stage has delayed."""
        for _ in range(times):
            for stage, kind in calls:
                if kind == "W":
                    self._append_weights(next(action for action in self._waiting if action.stage == stage))
                else:
                    self._append(stage, kind)

    def append_oldest_weights(self) -> None:
        """Append the W that waits longest."""
        self._append_weights(self._waiting[0])

    def append_remaining_weights(self) -> None:
        """Append each W that waits, the oldest first."""
        while self._waiting:
            self.append_oldest_weights()

    def _append(self, stage: int, kind: Kind) -> None:
        counted = stage, "forward" if kind == "F" else "backward"
        m = self._ran[counted]
        self._ran[counted] += 1
        self.actions.append(Action(stage, kind, m))
        if kind == "I":
            self._waiting.append(Action(stage, "W", m))

    def _append_weights(self, action: Action) -> None:
        self._waiting.remove(action)
        self.actions.append(action)
