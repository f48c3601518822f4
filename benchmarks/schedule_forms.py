"""Named schedules against the closed forms of their papers: idle time and stashes of 2 to 16 workers, M to 64.

The idle time is the largest over workers of last end - first start - work, in units of time; the *stagger* of the step
(the first worker's start to the last one's) is not in it. So the bubble of the whole step is printed beside.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.common import Row
from dapple_tf.commands.schedules import Units, time_workers
from dapple_tf.graph_passes.schedules.schedule import Action, dependencies, run_schedule
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec

WORKERS, MOST_MICRO_BATCHES = range(2, 17), 64
HALVES = Units(1, 2, 1)  # F = B / 2, and F = I = W

Form = Callable[[int, int, int], tuple[int, int] | None]
"""Idle time and the first worker's stashes for p workers, v stages each and M; None outside the form's conditions."""


@dataclass(frozen=True)
class ClosedForm:
    """A schedule's ``form`` for each of ``options``, the stages per worker; ``name`` has a place for the option."""

    name: str
    paper: str
    form: Form
    options: tuple[int, ...] = (1,)


def _of(condition: bool, idle: int, stashes: int) -> tuple[int, int] | None:
    """Return idle time and stashes under a form's ``condition``."""
    return (idle, stashes) if condition else None


FORMS = (
    ClosedForm("gpipe", "(p - 1)(F + B); M", lambda p, v, m: _of(True, 3 * (p - 1), m)),
    ClosedForm("dapple-a", "(p - 1)(F + B); p", lambda p, v, m: _of(m >= p, 3 * (p - 1), p)),
    ClosedForm("dapple-b", "(p - 1)(F + B); 2 p - 1", lambda p, v, m: _of(m >= 2 * p, 3 * (p - 1), 2 * p - 1)),
    ClosedForm("zb-h1", "(p - 1)(F + I - W); p", lambda p, v, m: _of(m >= 2 * p, p - 1, p)),
    ClosedForm("zb-h2", "(p - 1)(F + I - 2 W); 2 p - 1", lambda p, v, m: _of(m >= 2 * p, 0, 2 * p - 1)),
    ClosedForm(
        "interleaved-1f1b:v={}",
        "(p - 1)(F + B); p v + p - 1",
        lambda p, v, m: _of(m % p == 0, 3 * (p - 1), min(p * v + p - 1, m * v)),
        (1, 2, 4),
    ),
    ClosedForm("looped-bfs:v={}", "(p - 1)(F + B); M v", lambda p, v, m: _of(m >= p, 3 * (p - 1), m * v), (1, 2, 4)),
    ClosedForm(
        "interleaved-zb:v={}", "(p - 1)(F + I - W); p v", lambda p, v, m: _of(m % p == 0, p - 1, p * v), (1, 2, 4)
    ),
    ClosedForm("zb-v", "0; 2 p", lambda p, v, m: _of(m >= 2 * p - 1, 0, 2 * p), (2,)),
    ClosedForm(
        "dualpipe-v",
        "(p - 1)(F + B - 2 W): pairs as two actions; 2 p + 1",
        lambda p, v, m: _of(m >= 2 * p, p - 1, 2 * p + 1),
        (2,),
    ),
)


def compare_with_papers() -> Iterator[Row]:
    """Yield a row for each closed form: of how many cases idle time and stashes are equal to it."""
    for closed in FORMS:
        right = total = 0
        for p, option, m in itertools.product(WORKERS, closed.options, range(1, MOST_MICRO_BATCHES + 1)):
            wanted = closed.form(p, option, m)
            if wanted is None or p * option * m > 2048:  # a few minutes for all cases
                continue
            workers = time_workers(ScheduleSpec.parse(closed.name.format(option)).build(p * option, m), HALVES)
            right += (max(w.idle for w in workers), max(w.stashes for w in workers)) == wanted
            total += 1
        yield Row(f"{closed.name.format('n')}: {closed.paper}", "the paper's", f"{right} of {total}", right == total)
    yield compare_pairs()
    yield from whole_steps()


def compare_pairs() -> Row:
    """Compare DualPipe-V with its repository's form, where the results of a pair leave when all of it has ended."""
    right = total = 0
    for p in WORKERS:
        for m in (2 * p, 4 * p):
            right += idle_with_whole_pairs(p, m) == 2 * (p - 1)
            total += 1
    return Row(
        "dualpipe-v, pairs as one action: (p - 1)(F&B + B - 3 W), F&B = F + B",
        "the repository's",
        f"{right} of {total}",
        right == total,
    )


def idle_with_whole_pairs(workers: int, micro_batches: int) -> float:
    """Return the largest idle time of DualPipe-V where a forward and the whole backward behind it are one action.

    All results leave when the pair has ended. The first forward on the last stage, whose own backward comes next, is
    no pair.
    """
    schedule = ScheduleSpec.parse("dualpipe-v").build(2 * workers, micro_batches)
    waiting = [_pairs(actions) for actions in schedule.workers]
    ended: dict[tuple[bool, int, int], float] = {}  # by whether it is a forward, stage and micro-batch
    free, begun, work = ([0.0] * workers for _ in range(3))
    worker = 0
    while any(waiting):
        worker = (worker + 1) % workers
        if not waiting[worker]:
            continue
        block = waiting[worker][0]
        needed = [
            (need.kind == "F", need.stage, need.micro_batch)
            for action in block
            if action.kind != "W"
            for need in dependencies(action, 2 * workers)
            if need.kind in "FB"
        ]
        if all(need in ended for need in needed):
            begin = max([free[worker], *(ended[need] for need in needed)])
            seconds = sum(map(HALVES.of, block))
            begun[worker] = begun[worker] if work[worker] else begin
            work[worker] += seconds
            free[worker] = begin + seconds
            ended |= {(a.kind == "F", a.stage, a.micro_batch): free[worker] for a in block if a.kind != "W"}
            del waiting[worker][0]
    return max(end - start - busy for end, start, busy in zip(free, begun, work, strict=True))


def _pairs(actions: Sequence[Action]) -> list[tuple[Action, ...]]:
    """Return the actions with each F and the whole B of another stage behind it as one."""
    rest, found = list(actions), []
    while rest:
        own = rest[:2] if len(rest) > 1 and (rest[0].kind, rest[1].kind) == ("F", "B") else rest[:1]
        if len(own) == 2 and own[0].micro_batch == own[1].micro_batch:
            own = own[:1]
        found.append(tuple(own))
        rest = rest[len(own) :]
    return found


def whole_steps() -> Iterator[Row]:
    """Yield the idle share of the whole step, stagger included, for 4 workers and M = 8."""
    for closed in FORMS:
        option = closed.options[-1] if len(closed.options) > 1 else closed.options[0]
        schedule = ScheduleSpec.parse(closed.name.format(option)).build(4 * option, 8)
        ends = [own[-1] for own in run_schedule(schedule, HALVES.of)]
        busy = sum(HALVES.of(action) for actions in schedule.workers for action in actions)
        bubble = 1 - busy / (max(ends) * len(ends))
        yield Row(
            f"{closed.name.format(option)}: bubble of the whole step, 4 workers, M = 8", "-", f"{bubble:.1%}", True
        )
