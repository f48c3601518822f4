"""Schedules by name: a policy (with D, where memory limits it), a K_i for each stage, or the text of all actions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence

from graph_passes.errors import ScheduleError
from graph_passes.schedules.schedule import Action, Schedule, check
from graph_passes.schedules.text import LONGEST_NUMBER, is_text, parse_schedule
from graph_passes.schedules.zero_bubble import zero_bubble

ZERO_BUBBLE = "zb-h1"
_COUNT = rf"\d{{1,{LONGEST_NUMBER}}}"
_POLICY = re.compile(rf"([a-z0-9][a-z0-9-]*)(?::D=({_COUNT}))?")
_EXPLICIT = re.compile(rf"K=({_COUNT}(?:,{_COUNT})*)")


def warm_up(policy: str, stages: int, micro_batches: int, limit: int | None = None) -> tuple[int, ...]:
    """Return K_i of each stage (DAPPLE, section V.C; BaPipe, Table 2, whose stages count from 1).

    ``gpipe``: K_i = M. ``dapple-a``, which is BaPipe's ``1f1b-sno``: K_i = min(S - i, D), and so is ``zb-h1`` (see
    ``zero_bubble``). ``dapple-b``: K_i = min(2 (S - i) - 1, D). BaPipe's ``1f1b-so`` holds one more:
    K_i = min(2 (S - i), D). All are at most M. Raises ScheduleError for an unknown policy or a D below 1.
    """
    if limit is not None and limit < 1:
        raise ScheduleError(f"D={limit}: a stage must hold at least one micro-batch")
    bound = micro_batches if limit is None else min(limit, micro_batches)
    match policy:
        case "gpipe":
            if bound < micro_batches:
                raise ScheduleError(f"gpipe holds all M={micro_batches} micro-batches, but D={limit}: use dapple-a")
            return (micro_batches,) * stages
        case "dapple-a" | "1f1b-sno" | "zb-h1":
            return tuple(min(stages - i, bound) for i in range(stages))
        case "dapple-b":
            return tuple(min(2 * (stages - i) - 1, bound) for i in range(stages))
        case "1f1b-so":
            return tuple(min(2 * (stages - i), bound) for i in range(stages))
    raise ScheduleError(
        f"no schedule is called {policy[:200]!r}; there are gpipe, dapple-a, dapple-b, zb-h1, 1f1b-sno, 1f1b-so (and "
        ":D=n), K=3,2,1, and the actions of every stage: 0F0 0B0; 1F0 1B0"
    )


def early_backward(warm: Sequence[int], micro_batches: int) -> Schedule:
    """Return the schedule of K_i forwards, then one backward and one forward alternately, then the other backwards.

    DAPPLE, section III.B; with K_i = M it is GPipe's schedule. Raises ScheduleError for a K_i out of range.
    """
    _check_range(warm, micro_batches)
    stages = []
    for stage, k in enumerate(warm):
        actions = [Action(stage, "F", m) for m in range(k)]
        for m in range(micro_batches):
            actions.append(Action(stage, "B", m))
            if k + m < micro_batches:
                actions.append(Action(stage, "F", k + m))
        stages.append(tuple(actions))
    schedule = Schedule(tuple(stages))
    check(schedule)
    return schedule


def forward_only(stages: int, micro_batches: int) -> Schedule:
    """Return the schedule of a pipeline that does not train: each stage runs the forwards in micro-batch order."""
    return Schedule(tuple(tuple(Action(s, "F", m) for m in range(micro_batches)) for s in range(stages)))


def warm_up_by_name(name: str, stages: int, micro_batches: int) -> tuple[int, ...] | None:
    """Return K_i of each stage, or None if more than these defines the schedule ``name`` (``zb-h1`` and texts).

    Raises ScheduleError for an unknown name, and for K_i of another number of stages, out of range, or that deadlock.
    """
    if is_text(name):
        return None
    if explicit := _EXPLICIT.fullmatch(name):
        warm = tuple(map(int, explicit[1].split(",")))
        _check_stages(name, len(warm), stages)
        return early_backward(warm, micro_batches).warm_up
    policy, limit = read_policy(name)
    warm = warm_up(policy, stages, micro_batches, limit)
    return None if policy == ZERO_BUBBLE else warm


def build_schedule(name: str, stages: int, micro_batches: int) -> Schedule:
    """Return the schedule ``name``: a policy (see ``warm_up``), ``K=3,2,1``, or the text of a schedule.

    Raises ScheduleError for an unknown name, for a schedule that cannot run, and for a text of another number of stages
    or micro-batches.
    """
    if is_text(name):
        schedule = parse_schedule(name)
        if (len(schedule.stages), schedule.micro_batches) != (stages, micro_batches):
            raise ScheduleError(
                f"the schedule's text is for {len(schedule.stages)} stages x {schedule.micro_batches} micro-batches, "
                f"but there are {stages} x {micro_batches}: write a line for each stage, with each micro-batch from 0 "
                "on, or give a policy's name"
            )
        return schedule
    warm = warm_up_by_name(name, stages, micro_batches)
    if warm is not None:
        return early_backward(warm, micro_batches)
    policy, limit = read_policy(name)
    return zero_bubble(warm_up(policy, stages, micro_batches, limit), micro_batches, limit)


def check_schedule(name: str, stages: int, micro_batches: int) -> None:
    """Raise ScheduleError where ``build_schedule`` would; the time does not grow with M."""
    if is_text(name):
        build_schedule(name, stages, micro_batches)
    elif explicit := _EXPLICIT.fullmatch(name):
        warm = tuple(map(int, explicit[1].split(",")))
        _check_stages(name, len(warm), stages)
        _check_range(warm, micro_batches)
        for stage, (k, after) in enumerate(itertools.pairwise(warm)):
            if k < after:
                raise ScheduleError(
                    f"the schedule deadlocks: after K_{stage} = {k} forwards stage {stage} waits for a backward, and "
                    f"stage {stage + 1} for K_{stage + 1} = {after} forwards"
                )
    else:
        policy, limit = read_policy(name)
        _check_range(warm_up(policy, stages, micro_batches, limit), micro_batches)


def _check_stages(name: str, given: int, stages: int) -> None:
    if given != stages:
        raise ScheduleError(f"{name[:200]} gives K of {given} stages, but there are {stages}")


def _check_range(warm: Sequence[int], micro_batches: int) -> None:
    for stage, k in enumerate(warm):
        if not 1 <= k <= micro_batches:
            raise ScheduleError(f"K_{stage} = {k} is not between 1 and M = {micro_batches}")


def check_schedule_name(name: str) -> None:
    """Raise ScheduleError unless ``name`` is that of a schedule for some number of stages and micro-batches."""
    if is_text(name):
        parse_schedule(name)
    elif not _EXPLICIT.fullmatch(name):
        policy, limit = read_policy(name)
        warm_up(policy, 1, limit or 1, limit)


def count_stages(name: str) -> int | None:
    """Return the number of stages that the schedule ``name`` is for, or None for a policy, which fits any number."""
    if is_text(name):
        return len(parse_schedule(name).stages)
    explicit = _EXPLICIT.fullmatch(name)
    return explicit[1].count(",") + 1 if explicit else None


def count_micro_batches(name: str, possible: Collection[int]) -> int | None:
    """Return M of a schedule that is a text, or None for other names and for an M that is not ``possible``."""
    found = parse_schedule(name).micro_batches if is_text(name) else None
    return found if found in possible else None


def splits_backward(name: str) -> bool:
    """Return whether weight gradients are actions of their own (W) in the schedule ``name``, which must be valid."""
    return "W" in name if is_text(name) else name.partition(":")[0] == ZERO_BUBBLE


def truncate_schedule(name: str, micro_batches: int) -> str:
    """Return the name of the schedule ``name`` for a batch of fewer micro-batches.

    Each K_i is at most ``micro_batches``; a text keeps its order, without the micro-batches from there on.
    """
    if is_text(name):
        return str(parse_schedule(name).first_micro_batches(micro_batches))
    if explicit := _EXPLICIT.fullmatch(name):
        return "K=" + ",".join(str(min(int(k), micro_batches)) for k in explicit[1].split(","))
    return name


def abbreviate_schedule(name: str) -> str:
    """Return ``name`` for a line of output: of a text only the first actions."""
    words = name.split()
    return f"given ({' '.join(words[:4])} ...)" if is_text(name) and len(words) > 4 else " ".join(words)


def read_policy(name: str) -> tuple[str, int | None]:
    """Return the policy and D of a name such as ``dapple-b:D=4``. Raises ScheduleError for a name of another form."""
    match = _POLICY.fullmatch(name)
    if not match:
        raise ScheduleError(f"{name[:200]!r} is not a schedule such as 'dapple-a', 'dapple-b:D=4' or 'K=3,2,1'")
    return match[1], None if match[2] is None else int(match[2])
