"""Schedules by name: a policy (with its option), a K_i for each stage, or the text of all actions.

The name also says which stages share a worker: policies of ``CHUNKED`` say how many each worker has, the others
give it one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from graph_passes.errors import ScheduleError
from graph_passes.schedules.interleaved import interleaved_1f1b, interleaved_zero_bubble, looped_breadth_first
from graph_passes.schedules.schedule import Action, Schedule, check
from graph_passes.schedules.text import LONGEST_NUMBER, is_text, parse_schedule
from graph_passes.schedules.v_shaped import dualpipe_v, hanayo, zero_bubble_v
from graph_passes.schedules.worker_map import WorkerMap
from graph_passes.schedules.zero_bubble import ZERO_BUBBLE_AUTO, zero_bubble, zero_bubble_auto

HANDCRAFTED_ZERO_BUBBLE = ("zb-h1", "zb-h2")
"""The handcrafted schedules of the Zero Bubble paper: one stage per worker, and weight gradients as own actions."""

_MOST_CHUNKS = 1024  # stages of a worker
_COUNT = rf"\d{{1,{LONGEST_NUMBER}}}"
_POLICY = re.compile(rf"([a-z0-9][a-z0-9-]*)(?::([A-Za-z])=({_COUNT}))?")
_EXPLICIT = re.compile(rf"K=({_COUNT}(?:,{_COUNT})*)")


@dataclass(frozen=True)
class ChunkedPolicy:
    """A policy that says how many stages each worker holds.

    ``option``: the letter of the option that gives the number of stages per worker, in units of ``unit`` stages, and
    its ``default``; without a letter the number is always the same. ``build`` takes the number of workers, the option's
    value and the number of micro-batches, and returns the schedule. ``worker_map`` takes the numbers of workers and of
    stages per worker, and returns the worker map. ``splits``: whether gradients of weights are actions of their own.
    """

    option: str | None
    default: int
    worker_map: Callable[[int, int], WorkerMap]
    build: Callable[[int, int, int], Schedule]
    unit: int = 1
    splits: bool = False


CHUNKED: Mapping[str, ChunkedPolicy] = MappingProxyType(
    {
        "interleaved-1f1b": ChunkedPolicy("v", 2, WorkerMap.looped, interleaved_1f1b),
        "interleaved-zb": ChunkedPolicy("v", 2, WorkerMap.looped, interleaved_zero_bubble, splits=True),
        "looped-bfs": ChunkedPolicy("v", 2, WorkerMap.looped, looped_breadth_first),
        "zb-v": ChunkedPolicy(None, 1, WorkerMap.waves, lambda p, _, m: zero_bubble_v(p, m), unit=2, splits=True),
        "dualpipe-v": ChunkedPolicy(None, 1, WorkerMap.waves, lambda p, _, m: dualpipe_v(p, m), unit=2, splits=True),
        "hanayo": ChunkedPolicy("w", 1, WorkerMap.waves, hanayo, unit=2),
        ZERO_BUBBLE_AUTO: ChunkedPolicy("v", 1, WorkerMap.waves, zero_bubble_auto, splits=True),
    }
)
"""Policies with several stages per worker, by name."""

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "gpipe": "all forwards, then all backwards",
        "dapple-a": "1F1B, early backward: K_i = min(S - i, D); the same as 1f1b and 1f1b-sno",
        "dapple-b": "K_i = min(2 (S - i) - 1, D), which hides transfers",
        "1f1b-so": "K_i = min(2 (S - i), D)",
        "zb-h1": "zero bubble: weight gradients (W) fill idle time, at the memory of dapple-a",
        "zb-h2": "zero bubble with up to 2 S - 1 micro-batches in flight",
        "interleaved-1f1b:v=2": "1F1B with v stages per worker, looped",
        "looped-bfs:v=2": "breadth first with v stages per worker, looped",
        "interleaved-zb:v=2": "zero bubble with v stages per worker, looped",
        "zb-v": "zero bubble with two stages per worker, V-shaped, at the memory of dapple-a",
        "dualpipe-v": "forwards paired with backwards of other micro-batches, two stages per worker, V-shaped",
        "zb-auto:v=1": "the fastest order found for the stages' seconds and the devices' memory",
        "hanayo:w=1": "w waves over the workers and back: 2 w stages per worker",
        "K=3,2,1": "the warm-up of each stage",
        "0F0 0B0; 1F0 1B0": "the actions of each worker",
    }
)
"""The forms that a schedule's name may have, with their meaning."""


def warm_up(policy: str, stages: int, micro_batches: int, limit: int | None = None) -> tuple[int, ...]:
    """Return K_i of each stage (DAPPLE, section V.C; BaPipe, Table 2, whose stages count from 1).

    ``gpipe``: K_i = M. ``dapple-a``, which is also called ``1f1b``, and ``1f1b-sno`` in BaPipe: K_i = min(S - i, D),
    and so is ``zb-h1`` (see ``zero_bubble``). ``dapple-b``: K_i = min(2 (S - i) - 1, D), and so is ``zb-h2``. BaPipe's
    ``1f1b-so`` holds one more: K_i = min(2 (S - i), D). All are at most M.

    Raises ScheduleError for an unknown policy or a D below 1.
    """
    if limit is not None and limit < 1:
        raise ScheduleError(f"D={limit}: a stage must hold at least one micro-batch")
    bound = micro_batches if limit is None else min(limit, micro_batches)
    match policy:
        case "gpipe":
            if bound < micro_batches:
                raise ScheduleError(f"gpipe holds all M={micro_batches} micro-batches, but D={limit}: use dapple-a")
            return (micro_batches,) * stages
        case "dapple-a" | "1f1b" | "1f1b-sno" | "zb-h1":
            return tuple(min(stages - i, bound) for i in range(stages))
        case "dapple-b" | "zb-h2":
            return tuple(min(2 * (stages - i) - 1, bound) for i in range(stages))
        case "1f1b-so":
            return tuple(min(2 * (stages - i), bound) for i in range(stages))
    raise ScheduleError(
        f"no schedule is called {policy[:200]!r}; there are gpipe, dapple-a (1f1b), dapple-b, zb-h1, zb-h2, 1f1b-sno, "
        f"1f1b-so (and :D=n), {', '.join(map(_form, CHUNKED))}, K=3,2,1, and the actions of every worker: 0F0 0B0; "
        "1F0 1B0"
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


def forward_only(workers: WorkerMap, micro_batches: int) -> Schedule:
    """Return the schedule of a pipeline that does not train: each stage runs the forwards in micro-batch order.

    A worker with several stages takes p micro-batches at a time, where there are p workers, and runs this group through
    all of its stages in turn.
    """
    rows = []
    for stages in workers.stages_of:
        actions = [Action(stage, "F", m) for stage in stages for m in range(micro_batches)]
        rows.append(tuple(sorted(actions, key=lambda a: (a.micro_batch // workers.workers, a.stage, a.micro_batch))))
    return Schedule(tuple(rows))


def warm_up_by_name(name: str, stages: int, micro_batches: int) -> tuple[int, ...] | None:
    """Return K_i of each stage, or None for a schedule that K_i alone do not determine, such as a text.

    Raises ScheduleError for an unknown name, and for K_i of another number of stages, out of range, or that deadlock.
    """
    if is_text(name):
        return None
    if explicit := _EXPLICIT.fullmatch(name):
        warm = tuple(map(int, explicit[1].split(",")))
        _check_stages(name, len(warm), stages)
        _check_range(warm, micro_batches)
        # Reason: where no stage holds more than the one before, nothing deadlocks; the check of all actions takes long.
        falls = all(a >= b for a, b in itertools.pairwise(warm))
        return warm if falls else early_backward(warm, micro_batches).warm_up
    if chunked_policy(name):
        return None
    policy, limit = read_policy(name)
    warm = warm_up(policy, stages, micro_batches, limit)
    return None if policy in HANDCRAFTED_ZERO_BUBBLE else warm


def build_schedule(name: str, stages: int, micro_batches: int) -> Schedule:
    """Return the schedule ``name``: a policy (see ``warm_up`` and ``CHUNKED``), ``K=3,2,1``, or a schedule's text.

    Raises ScheduleError for an unknown name, for a schedule that cannot run, for a text of another number of stages or
    micro-batches, and for a number of stages that a policy cannot divide among workers.
    """
    if is_text(name):
        schedule = parse_schedule(name)
        if (len(schedule.stages), schedule.micro_batches) != (stages, micro_batches):
            raise ScheduleError(
                f"the schedule's text is for {len(schedule.stages)} stages x {schedule.micro_batches} micro-batches, "
                f"but there are {stages} x {micro_batches}: write a line for each worker, with each micro-batch from 0 "
                "on, or give a policy's name"
            )
        return schedule
    if chunked := chunked_policy(name):
        chunked_by, chunks = chunked
        return chunked_by.build(_count_workers(name, stages, chunks), chunks // chunked_by.unit, micro_batches)
    warm = warm_up_by_name(name, stages, micro_batches)
    if warm is not None:
        return early_backward(warm, micro_batches)
    policy, limit = read_policy(name)
    step, held = (1, stages) if policy == "zb-h1" else (2, 2 * stages - 1)
    delays = [step * stage for stage in range(stages)]
    most = held if limit is None else limit
    return zero_bubble(warm_up(policy, stages, micro_batches, limit), delays, micro_batches, most)


def check_schedule(name: str, stages: int, micro_batches: int) -> None:
    """Raise ScheduleError where ``build_schedule`` would; the time does not grow with M."""
    if is_text(name):
        build_schedule(name, stages, micro_batches)
    elif chunked := chunked_policy(name):
        _count_workers(name, stages, chunked[1])
        _check_micro_batches(micro_batches)
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


def worker_map_of(name: str, stages: int) -> WorkerMap:
    """Return the worker map of ``stages`` stages under the schedule ``name``, which must be valid.

    Raises ScheduleError for a number of stages that the schedule is not for.
    """
    if is_text(name):
        schedule = parse_schedule(name)
        if len(schedule.stages) != stages:
            raise ScheduleError(
                f"the schedule's text is for {len(schedule.stages)} stages, but there are {stages}: write the actions "
                "of each stage, or give a policy's name"
            )
        return schedule.worker_map
    if chunked := chunked_policy(name):
        policy, chunks = chunked
        return policy.worker_map(_count_workers(name, stages, chunks), chunks)
    return WorkerMap.one_per_stage(stages)


def chunked_policy(name: str) -> tuple[ChunkedPolicy, int] | None:
    """Return the policy of ``CHUNKED`` that ``name`` is, and its stages per worker; None for all other names.

    Raises ScheduleError for an option that the policy does not have, or that gives a worker no stage or more than 1024.
    """
    match = _POLICY.fullmatch(name)
    if match is None or match[1] not in CHUNKED:
        return None
    policy = CHUNKED[match[1]]
    if match[2] not in (None, policy.option):
        has = f"it has {policy.option}, as {_form(match[1])}" if policy.option else "it has none"
        raise ScheduleError(f"{name!r}: {match[1]} has no option {match[2]}; {has}")
    given = policy.default if match[3] is None else int(match[3])
    if not 1 <= given * policy.unit <= _MOST_CHUNKS:
        raise ScheduleError(
            f"{name!r}: {policy.option} is {given}; it must be between 1 and {_MOST_CHUNKS // policy.unit}"
        )
    return policy, given * policy.unit


def _form(policy: str) -> str:
    """Return the form of a chunked policy's name, such as ``interleaved-1f1b:v=2``."""
    chunked = CHUNKED[policy]
    return f"{policy}:{chunked.option}={chunked.default}" if chunked.option else policy


def runs_several_stages(name: str) -> bool:
    """Return whether some worker runs several stages under the schedule ``name``, which must be valid."""
    if is_text(name):
        return parse_schedule(name).worker_map.is_chunked
    chunked = chunked_policy(name)
    return chunked is not None and chunked[1] > 1


def is_searched(name: str) -> bool:
    """Return whether the schedule ``name`` is searched for where the costs of the stages are known (``zb-auto``)."""
    match = _POLICY.fullmatch(name)
    return match is not None and match[1] == ZERO_BUBBLE_AUTO


def _count_workers(name: str, stages: int, chunks: int) -> int:
    if stages < chunks or stages % chunks:
        raise ScheduleError(
            f"{name!r} gives each worker {chunks} stages, but there are {stages} in all: ask for a multiple of {chunks}"
        )
    return stages // chunks


def _check_micro_batches(micro_batches: int) -> None:
    if micro_batches < 1:
        raise ScheduleError(f"M = {micro_batches}: there must be at least one micro-batch")


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
    elif not _EXPLICIT.fullmatch(name) and not chunked_policy(name):
        policy, limit = read_policy(name)
        warm_up(policy, 1, limit or 1, limit)


def count_stages(name: str) -> int | None:
    """Return the number of stages that the schedule ``name`` is for, or None for a policy, which is for many."""
    if is_text(name):
        return len(parse_schedule(name).stages)
    explicit = _EXPLICIT.fullmatch(name)
    return explicit[1].count(",") + 1 if explicit else None


def count_micro_batches(name: str, possible: Collection[int]) -> int | None:
    """Return M of a schedule that is a text, or None for other names and for an M that is not ``possible``."""
    found = parse_schedule(name).micro_batches if is_text(name) else None
    return found if found in possible else None


def splits_backward(name: str) -> bool:
    """Return whether some weight gradients are actions of their own (W) in the valid schedule ``name``."""
    if is_text(name):
        return "W" in name
    policy = name.partition(":")[0]
    return policy in HANDCRAFTED_ZERO_BUBBLE or (policy in CHUNKED and CHUNKED[policy].splits)


def actions_together(name: str) -> frozenset[Action]:
    """Return ``Schedule.together`` of the valid schedule ``name``; only a text has such actions."""
    return parse_schedule(name).together if is_text(name) else frozenset()


def stages_ending_split(name: str, stages: int, micro_batches: int) -> frozenset[int]:
    """Return the stages that run the weight gradients of the last micro-batch as an action of their own (W).

    Raises ScheduleError where ``build_schedule`` would.
    """
    if not splits_backward(name):
        return frozenset()
    split = build_schedule(name, stages, micro_batches).split
    return frozenset(stage for stage in range(stages) if (stage, micro_batches - 1) in split)


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


def read_limit(name: str) -> int | None:
    """Return D of the schedule ``name``, which must be valid; None where the name gives no D."""
    match = _POLICY.fullmatch(name)
    return int(match[3]) if match is not None and match[2] == "D" else None


def read_policy(name: str) -> tuple[str, int | None]:
    """Return the policy and D of a name such as ``dapple-b:D=4``. Raises ScheduleError for a name of another form."""
    match = _POLICY.fullmatch(name)
    if not match or match[2] not in (None, "D"):
        raise ScheduleError(f"{name[:200]!r} is not a schedule such as 'dapple-a', 'dapple-b:D=4' or 'K=3,2,1'")
    return match[1], None if match[3] is None else int(match[3])
