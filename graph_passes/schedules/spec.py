"""Read the text that names a schedule in options and files: a policy and its option, K_i of each stage, or all actions.

The text also determines which stages share a worker: the policies in ``CHUNKED`` put several stages on each worker, the
other policies one. All actions are written as ``0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1``, with a line for each worker, or
semicolons between workers; ``0F0+`` stands for an action whose result travels with the result of the next action.
"""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.chunked import (
    dualpipe_v,
    hanayo,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_breadth_first,
    zero_bubble_v,
)
from dapple_tf.graph_passes.schedules.schedule import (
    CALL_OF_KIND,
    Action,
    Kind,
    Schedule,
    alternate,
    checked_schedule,
    name_input_halves,
    of_stage,
)
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from dapple_tf.graph_passes.schedules.zero_bubble import ZERO_BUBBLE_AUTO, zero_bubble, zero_bubble_auto
from dapple_tf.wording import format_count, suggest

HANDCRAFTED_ZERO_BUBBLE = ("zb-h1", "zb-h2")
"""The handcrafted schedules of the Zero Bubble paper: one stage per worker, and actions for gradients of weights."""

_MOST_CHUNKS = 1024  # stages of a worker
LONGEST_NUMBER = 9
"""The most digits of a number in the text or name of a schedule."""

_ACTION = re.compile(rf"(\d{{1,{LONGEST_NUMBER}}})([FBIW])(\d{{1,{LONGEST_NUMBER}}})(\+?)")
_KINDS: dict[str, Kind] = {kind: kind for kind in CALL_OF_KIND}
_COUNT = rf"\d{{1,{LONGEST_NUMBER}}}"
_POLICY = re.compile(rf"([a-z0-9][a-z0-9-]*)(?::([A-Za-z])=({_COUNT}))?")
_EXPLICIT = re.compile(rf"K=({_COUNT}(?:,{_COUNT})*)")


@dataclass(frozen=True)
class ChunkedPolicy:
    """A policy that determines how many stages each worker holds.

    ``option``: the letter of the option that sets the number of stages per worker, in units of ``unit`` stages;
    ``default``: its value where it is not given. Without a letter the number cannot be set. ``build`` takes the number
    of workers, the option's value and the number of micro-batches, and returns the schedule. ``worker_map`` takes the
    numbers of workers and of stages per worker, and returns the worker map. ``splits``: whether gradients of weights
    are actions of their own.
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
"""The policies that put several stages on each worker, by name."""

_UNCHUNKED = ("gpipe", "dapple-a", "1f1b", "dapple-b", "1f1b-so", "1f1b-sno", *HANDCRAFTED_ZERO_BUBBLE)

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
"""The forms that the text of a schedule may have, with their meaning."""


def warm_up(policy: str, stages: int, micro_batches: int, limit: int | None = None) -> tuple[int, ...]:
    """Return K_i of each stage (DAPPLE, section V.C; BaPipe, Table 2, whose stages count from 1).

    K_i = M for ``gpipe``; min(S - i, D) for ``dapple-a``, which is also called ``1f1b``, and ``1f1b-sno`` in BaPipe,
    and for ``zb-h1`` (see ``zero_bubble``); min(2 (S - i) - 1, D) for ``dapple-b`` and ``zb-h2``; min(2 (S - i), D) for
    BaPipe's ``1f1b-so``, which holds one micro-batch more. Each K_i is at most M.

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
        f"no schedule is called {policy[:200]!r}{suggest(policy, (*_UNCHUNKED, *CHUNKED))}; there are gpipe, dapple-a "
        f"(1f1b), dapple-b, zb-h1, zb-h2, 1f1b-sno, 1f1b-so (and :D=n), {', '.join(map(_form, CHUNKED))}, K=3,2,1, and "
        "the actions of every worker: 0F0 0B0; 1F0 1B0"
    )


def early_backward(warm: Sequence[int], micro_batches: int) -> Schedule:
    """Return the schedule of K_i forwards, then one backward and one forward alternately, then the other backwards.

    See DAPPLE, section III.B. With K_i = M it is GPipe's schedule. Raises ScheduleError for a K_i out of range.
    """
    _check_range(warm, micro_batches)
    return checked_schedule(
        alternate(of_stage(stage, "F", micro_batches), of_stage(stage, "B", micro_batches), k)
        for stage, k in enumerate(warm)
    )


def forward_only(workers: WorkerMap, micro_batches: int) -> Schedule:
    """Return the schedule of a pipeline that does not train: each stage runs the forwards in micro-batch order.

    If there are p workers, a worker with several stages takes p micro-batches at a time, and runs this group through
    each of its stages in turn.
    """
    rows = []
    for stages in workers.stages_of:
        actions = [action for stage in stages for action in of_stage(stage, "F", micro_batches)]
        rows.append(tuple(sorted(actions, key=lambda a: (a.micro_batch // workers.workers, a.stage, a.micro_batch))))
    return Schedule(tuple(rows))


class ScheduleSpec(ABC):
    """A schedule that an option or a file names.

    A policy is for any number of micro-batches, and of stages that it can divide among workers. Other schedules are for
    certain numbers. ``ScheduleSpec.parse`` reads the text, and ``str`` gives it back. The kinds are ``PolicySpec``,
    ``WarmUpSpec``, ``ChunkedSpec`` and ``ActionsSpec``.
    """

    @staticmethod
    @lru_cache(maxsize=256)  # one text is read in many places
    def parse(text: str) -> ScheduleSpec:
        """Return the schedule that ``text`` names: a policy, ``K=3,2,1``, or the actions of every worker.

        Raises ScheduleError if the text is wrong; the message says where.
        """
        if is_text(text):
            return ActionsSpec(text, parse_schedule(text))
        if explicit := _EXPLICIT.fullmatch(text):
            return WarmUpSpec(tuple(map(int, explicit[1].split(","))))
        name, colon, option = text.partition(":")
        known = f"{name.lower()}{colon}{option}"  # papers write 1F1B and GPipe
        match = _POLICY.fullmatch(known)
        if match is not None and match[1] in CHUNKED:
            return ChunkedSpec(known, match[1], _read_chunks(text, match[1], match[2], match[3]))
        other = f"{text[:200]!r} is not a schedule such as 'dapple-a', 'dapple-b:D=4' or 'K=3,2,1'"
        if match is None:
            raise ScheduleError(f"{other}{suggest(name.lower(), (*_UNCHUNKED, *CHUNKED))}")
        limit = int(match[3]) if match[2] == "D" else None
        warm_up(match[1], 1, limit or 1, limit)
        if match[2] not in (None, "D"):
            raise ScheduleError(other)
        return PolicySpec(match[1], limit)

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def build(self, stages: int, micro_batches: int) -> Schedule:
        """Return the actions of every worker for this number of stages and of micro-batches.

        Raises ScheduleError if the schedule cannot run, if written actions are for another number of stages or
        micro-batches, and if a policy cannot divide the stages among workers.
        """

    def check(self, stages: int, micro_batches: int) -> None:
        """Raise ScheduleError where ``build`` would; for a policy this takes equally long for any M."""
        self.build(stages, micro_batches)

    def warm_up(self, stages: int, micro_batches: int) -> tuple[int, ...] | None:
        """Return K_i of each stage, or None where these numbers alone do not determine the schedule.

        Raises ScheduleError if K_i are given for another number of stages, are out of range, or lead to a deadlock.
        """
        return None

    def worker_map(self, stages: int) -> WorkerMap:
        """Return which of ``stages`` stages share a worker. Raises ScheduleError if it is for another number."""
        return WorkerMap.one_per_stage(stages)

    def truncate(self, micro_batches: int) -> ScheduleSpec:
        """Return the schedule for a batch of fewer micro-batches: each K_i is at most ``micro_batches``.

        Written actions keep their order; the actions of the micro-batches from ``micro_batches`` on are left out.
        """
        return self

    @property
    def stages(self) -> int | None:
        """The number of stages that it is for; None for a policy, which is for any number."""
        return None

    @property
    def micro_batches(self) -> int | None:
        """The number of micro-batches that it is for; None where it is for any number."""
        return None

    def micro_batches_within(self, possible: Collection[int]) -> int:
        """Return the number of micro-batches that the schedule is for, if it is one of the ``possible`` numbers.

        Otherwise, and for a schedule for any number, return the largest possible number.
        """
        own = self.micro_batches
        return own if own is not None and own in possible else max(possible)

    @property
    def chunks(self) -> int | None:
        """The number of stages of each worker if the policy determines it; else None."""
        return None

    @property
    def runs_several_stages(self) -> bool:
        """Whether some worker runs several stages."""
        return False

    @property
    def is_searched(self) -> bool:
        """Whether the order is searched for where the costs of the stages are known (``zb-auto``)."""
        return False

    @property
    def splits_backward(self) -> bool:
        """Whether some weight gradients are actions of their own (W)."""
        return False

    @property
    def together(self) -> frozenset[Action]:
        """See ``Schedule.together``; empty unless the text has all actions."""
        return frozenset()

    @property
    def limit(self) -> int | None:
        """D, the most micro-batches in flight; None where none is given."""
        return None

    @property
    def short(self) -> str:
        """The text to print within a line: of many actions only the first four."""
        return str(self)

    def ends_split(self, stages: int, micro_batches: int) -> frozenset[int]:
        """Return the stages that run the weight gradients of the last micro-batch as an action of their own (W).

        Raises ScheduleError where ``build`` would.
        """
        if not self.splits_backward:
            return frozenset()
        split = self.build(stages, micro_batches).split
        return frozenset(stage for stage in range(stages) if (stage, micro_batches - 1) in split)


@dataclass(frozen=True)
class PolicySpec(ScheduleSpec):
    """A policy that gives K_i for any number of stages, one on each worker (see the function ``warm_up``)."""

    policy: str
    limit: int | None = None

    def __str__(self) -> str:
        return self.policy if self.limit is None else f"{self.policy}:D={self.limit}"

    @property
    def splits_backward(self) -> bool:
        return self.policy in HANDCRAFTED_ZERO_BUBBLE

    def warm_up(self, stages: int, micro_batches: int) -> tuple[int, ...] | None:
        warm = warm_up(self.policy, stages, micro_batches, self.limit)
        return None if self.splits_backward else warm

    def build(self, stages: int, micro_batches: int) -> Schedule:
        warm = warm_up(self.policy, stages, micro_batches, self.limit)
        if not self.splits_backward:
            return early_backward(warm, micro_batches)
        step, held = (1, stages) if self.policy == "zb-h1" else (2, 2 * stages - 1)
        delays = [step * stage for stage in range(stages)]
        return zero_bubble(warm, delays, micro_batches, held if self.limit is None else self.limit)

    def check(self, stages: int, micro_batches: int) -> None:
        _check_range(warm_up(self.policy, stages, micro_batches, self.limit), micro_batches)


@dataclass(frozen=True)
class WarmUpSpec(ScheduleSpec):
    """K_i of each stage: ``K=3,2,1``."""

    given: tuple[int, ...]

    def __str__(self) -> str:
        return "K=" + ",".join(map(str, self.given))

    @property
    def stages(self) -> int | None:
        return len(self.given)

    def warm_up(self, stages: int, micro_batches: int) -> tuple[int, ...] | None:
        self._check_counts(stages, micro_batches)
        # If no stage holds more than the stage before, nothing deadlocks. To check all actions would take long.
        falls = all(k >= after for k, after in itertools.pairwise(self.given))
        return self.given if falls else early_backward(self.given, micro_batches).warm_up

    def build(self, stages: int, micro_batches: int) -> Schedule:
        self._check_counts(stages, micro_batches)
        return early_backward(self.given, micro_batches)

    def _check_counts(self, stages: int, micro_batches: int) -> None:
        if len(self.given) != stages:
            raise ScheduleError(
                f"{str(self)[:200]} gives K of {format_count(len(self.given), 'stage')}, but there are {stages}"
            )
        _check_range(self.given, micro_batches)

    def check(self, stages: int, micro_batches: int) -> None:
        self._check_counts(stages, micro_batches)
        for stage, (k, after) in enumerate(itertools.pairwise(self.given)):
            if k < after:
                raise ScheduleError(
                    f"the schedule deadlocks: after K_{stage} = {k} forwards stage {stage} waits for a backward, and "
                    f"stage {stage + 1} for K_{stage + 1} = {after} forwards"
                )

    def truncate(self, micro_batches: int) -> ScheduleSpec:
        return WarmUpSpec(tuple(min(k, micro_batches) for k in self.given))


@dataclass(frozen=True)
class ChunkedSpec(ScheduleSpec):
    """A policy of ``CHUNKED`` with its number of stages per worker; ``text``: the option that was given."""

    text: str
    policy: str
    given_chunks: int

    def __str__(self) -> str:
        return self.text

    @property
    def _policy(self) -> ChunkedPolicy:
        return CHUNKED[self.policy]

    @property
    def chunks(self) -> int | None:
        return self.given_chunks

    @property
    def runs_several_stages(self) -> bool:
        return self.given_chunks > 1

    @property
    def is_searched(self) -> bool:
        return self.policy == ZERO_BUBBLE_AUTO

    @property
    def splits_backward(self) -> bool:
        return self._policy.splits

    def worker_map(self, stages: int) -> WorkerMap:
        return self._policy.worker_map(self._count_workers(stages), self.given_chunks)

    def build(self, stages: int, micro_batches: int) -> Schedule:
        return self._policy.build(self._count_workers(stages), self.given_chunks // self._policy.unit, micro_batches)

    def check(self, stages: int, micro_batches: int) -> None:
        self._count_workers(stages)
        if micro_batches < 1:
            raise ScheduleError(f"M = {micro_batches}: there must be at least one micro-batch")

    def _count_workers(self, stages: int) -> int:
        chunks = self.given_chunks
        if stages < chunks or stages % chunks:
            raise ScheduleError(
                f"{self.text!r} gives each worker {format_count(chunks, 'stage')}, but there are {stages} in all: ask "
                f"for a multiple of {chunks}"
            )
        return stages // chunks


@dataclass(frozen=True)
class ActionsSpec(ScheduleSpec):
    """The actions of every worker; ``text``: the text that was given."""

    text: str
    schedule: Schedule

    def __str__(self) -> str:
        return self.text

    @property
    def stages(self) -> int:
        return len(self.schedule.stages)

    @property
    def micro_batches(self) -> int:
        return self.schedule.micro_batches

    @property
    def runs_several_stages(self) -> bool:
        return self.schedule.worker_map.is_chunked

    @property
    def splits_backward(self) -> bool:
        return any(action.kind == "W" for worker in self.schedule.workers for action in worker)

    @property
    def together(self) -> frozenset[Action]:
        return self.schedule.together

    @property
    def short(self) -> str:
        words = self.text.split()
        return f"given ({' '.join(words[:4])} ...)" if len(words) > 4 else " ".join(words)

    def worker_map(self, stages: int) -> WorkerMap:
        if self.stages != stages:
            raise ScheduleError(
                f"the schedule's text is for {format_count(self.stages, 'stage')}, but there are {stages}: write the "
                "actions of each stage, or give a policy's name"
            )
        return self.schedule.worker_map

    def build(self, stages: int, micro_batches: int) -> Schedule:
        if (self.stages, self.micro_batches) != (stages, micro_batches):
            raise ScheduleError(
                f"the schedule's text is for {format_count(self.stages, 'stage')} x "
                f"{format_count(self.micro_batches, 'micro-batch')}, but there are {stages} x {micro_batches}: write a "
                "line for each worker, with each micro-batch from 0 on, or give a policy's name"
            )
        return self.schedule

    def truncate(self, micro_batches: int) -> ScheduleSpec:
        kept = self.schedule.first_micro_batches(micro_batches)
        return ActionsSpec(str(kept), kept)


def is_text(schedule: str) -> bool:
    """Return whether this is the text of actions (perhaps an invalid one), and not a name: it contains an action."""
    return any(_ACTION.fullmatch(word) for word in re.split(r"[\s;]+", schedule))


@lru_cache(maxsize=4)  # one text is read and checked in many places
def parse_schedule(text: str) -> Schedule:
    """Return the schedule that ``str(schedule)`` printed; empty lines are skipped.

    A B beside a W of the same stage and micro-batch is read as I: the zero-bubble paper calls that half B.

    Raises ScheduleError; the message names the word, the stage or the worker that is wrong, or shows the deadlock.
    """
    workers: list[tuple[Action, ...]] = []
    together: set[Action] = set()
    for line in filter(None, map(str.strip, re.split(r"[\n;]", text))):
        actions, marks = [], []
        for word in line.split():
            match = _ACTION.fullmatch(word)
            if not match:
                raise ScheduleError(f"{word[:60]!r} is not an action such as 2F0")
            actions.append(Action(int(match[1]), _KINDS[match[2]], int(match[3])))
            marks.append(match[4])
        workers.append(name_input_halves(actions))
        together.update(itertools.compress(workers[-1], marks))
    return checked_schedule(workers, together)


def _read_chunks(text: str, name: str, letter: str | None, value: str | None) -> int:
    """Return the number of stages per worker. Raises ScheduleError for an unknown option or a value out of range."""
    policy = CHUNKED[name]
    if letter not in (None, policy.option):
        has = f"it has {policy.option}, as in {_form(name)}" if policy.option else "it has none"
        raise ScheduleError(f"{text!r}: {name} has no option {letter}; {has}")
    given = policy.default if value is None else int(value)
    if not 1 <= given * policy.unit <= _MOST_CHUNKS:
        raise ScheduleError(
            f"{text!r}: {policy.option} is {given}; it must be between 1 and {_MOST_CHUNKS // policy.unit}"
        )
    return given * policy.unit


def _form(policy: str) -> str:
    """Return the form of a chunked policy's name, such as ``interleaved-1f1b:v=2``."""
    chunked = CHUNKED[policy]
    return f"{policy}:{chunked.option}={chunked.default}" if chunked.option else policy


def _check_range(warm: Sequence[int], micro_batches: int) -> None:
    for stage, k in enumerate(warm):
        if not 1 <= k <= micro_batches:
            raise ScheduleError(f"K_{stage} = {k} is not between 1 and M = {micro_batches}")
