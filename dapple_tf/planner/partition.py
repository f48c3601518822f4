"""Cut a chain of blocks into stages by dynamic programming: one program for the planners of all systems.

Systems differ in the states and in the costs. A *state* is what the stages so far use: a number of stages or of
devices, or both. A *way* is one more stage, which leads from one state to another. It says which row of a table has the
seconds of the stage on its devices, what its AllReduce costs, and over which link its input comes. The least value of a
state with the first j blocks is

    min over its ways and over first blocks i < j of
        combine(value of the way's state before, with i blocks; seconds of the input's transfer at i;
                seconds of a stage of the blocks i to j)

where ``combine`` is the largest of the three (the busiest stage or link) or their sum.

``partition`` runs in C++ (``simulator/native/partition.h``) where that library is there, else in NumPy; the tests hold
both equal.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.simulator.arrays import Floats, Integers, runs
from dapple_tf.simulator.native.library import address, load_library

_FREE = (0.0, 0.0)


class Way(NamedTuple):
    """A stage that leads from state ``before`` to ``state``; states are numbered so that ``before`` is the smaller.

    ``row``: the stage's row in the table of seconds. ``link``: latency (seconds) and seconds per byte of the transfer
    to the stage; ``ring``: those of its AllReduce. ``alike``: whether the stage may begin at any cut, since it has as
    many replicas as the stage before; else it begins only where stages with different replica counts can meet.
    """

    state: int
    before: int
    row: int = 0
    link: tuple[float, float] = _FREE
    ring: tuple[float, float] = _FREE
    alike: bool = True


class Stage(NamedTuple):
    """Blocks ``first`` to ``end`` (exclusive) as a stage, and the index of its way."""

    first: int
    end: int
    way: int


@dataclass(frozen=True, eq=False)
class Partition:
    """The least ``values`` [states, N + 1] of each state with the first 0, 1 ... N blocks; infinite where none exists.

    ``ways`` and ``firsts`` [states, N + 1]: the way of the last stage, and its first block. ``state``, ``before``: the
    fields of each way.
    """

    values: Floats
    ways: Integers
    firsts: Integers
    state: Integers
    before: Integers

    def stages(self, state: int, blocks: int | None = None) -> tuple[Stage, ...]:
        """Return the stages of a state's least value with the first ``blocks`` blocks, by default with all."""
        found, end = list[Stage](), self.values.shape[1] - 1 if blocks is None else blocks
        while state:
            way, first = int(self.ways[state, end]), int(self.firsts[state, end])
            found.append(Stage(first, end, way))
            state, end = int(self.before[way]), first
        return tuple(reversed(found))

    def bounds(self, state: int, blocks: int | None = None) -> tuple[int, ...]:
        """Return the first block of each of these stages, and the number of blocks."""
        return (0, *(stage.end for stage in self.stages(state, blocks)))


@dataclass(frozen=True, eq=False)
class Ways:
    """Ways as arrays [W] (``link`` and ``ring``: [W, 2]), by rising state."""

    states: int
    state: Integers
    before: Integers
    row: Integers
    link: Floats
    ring: Floats
    alike: Integers

    @staticmethod
    def of_arrays(
        states: int,
        state: Integers,
        before: Integers,
        row: Integers,
        link: Floats | None = None,
        ring: Floats | None = None,
        alike: Integers | None = None,
    ) -> Ways:
        """Return the ways with these fields, sorted by state; those of one state keep their order."""
        order, free = np.argsort(state, kind="stable"), np.zeros((len(state), 2))
        same = np.ones(len(state)) if alike is None else alike
        fields = (state, before, row, free if link is None else link, free if ring is None else ring, same)
        types = (np.int32, np.int32, np.int32, np.float64, np.float64, np.uint8)
        arrays: list[NDArray[Any]] = [np.ascontiguousarray(f[order], t) for f, t in zip(fields, types, strict=True)]
        return Ways(states, *arrays)

    @staticmethod
    def of(states: int, ways: Sequence[Way]) -> Ways:
        """Return the ``ways``, sorted by state; those of one state keep their order."""
        return Ways.of_arrays(states, *map(np.array, zip(*ways, strict=True)))

    @staticmethod
    def in_turn(rows: Sequence[int]) -> Ways:
        """Return the ways of a plain chain of stages: state n is n stages, of which stage i has the row ``rows[i]``."""
        stage = np.arange(len(rows))
        return Ways.of_arrays(len(rows) + 1, stage + 1, stage, np.array(rows))


def from_the_end(stages: Floats) -> Floats:
    """Return the array [..., N, N + 1] with blocks numbered from the last, for programs that begin there."""
    behind = np.full((*stages.shape[:-2], 1, stages.shape[-1]), np.inf)  # the block behind the last begins no stage
    square = np.concatenate([stages, behind], axis=-2)
    return np.swapaxes(square[..., ::-1, ::-1], -1, -2)[..., :-1, :]


def least_slowest(seconds: Floats) -> tuple[float, tuple[int, ...]]:
    """Return the partition whose slowest stage is as fast as possible: the seconds of this stage, and all bounds.

    ``seconds`` [stages, N, N + 1]: those of the blocks i to j (exclusive) as stage n; infinite if they may not be this
    stage. Return infinity and no bounds if there is no partition. Of equally good partitions the one is taken whose
    earlier stages have as few blocks as possible.
    """
    count = len(seconds)
    found = partition(seconds, Ways.in_turn(range(count)))
    least = float(found.values[count, -1])
    return least, found.bounds(count) if np.isfinite(least) else ()


def partition(
    seconds: Floats,
    ways: Ways,
    *,
    boundary_bytes: Floats | None = None,
    parameter_bytes: Floats | None = None,
    splittable: NDArray[np.bool_] | None = None,
    add: bool = False,
    latest: bool = True,
    begin: int = 0,
    limit: float = np.inf,
) -> Partition:
    """Return the least values; those of state 0, without stages, are 0 at block ``begin`` and infinite elsewhere.

    ``seconds`` [rows, N, N + 1]: of blocks i to j (exclusive) as a stage; infinite if they may not be one.
    ``boundary_bytes`` [N + 1]: those that enter at each block. ``parameter_bytes`` [N + 1]: prefix sums.
    ``splittable`` [N + 1]: of the cut before each block. ``add``: values are sums, not the largest. Of equal values the
    first way is taken, with the ``latest`` first block or the earliest; of ways that differ only in the state before
    and the link, the first way for each first block. ``limit``: stages that take longer are left out.
    """
    blocks = seconds.shape[1]
    nothing = np.zeros(blocks + 1)
    boundary = nothing if boundary_bytes is None else boundary_bytes
    parameters = nothing if parameter_bytes is None else parameter_bytes
    may_split = np.ones(blocks + 1, np.bool_) if splittable is None else splittable
    values = np.full((ways.states, blocks + 1), np.inf)
    values[0, begin] = 0.0
    chosen, firsts = (np.zeros(values.shape, np.int32) for _ in range(2))
    library = load_library()
    if library is None:
        _fill(seconds, ways, boundary, parameters, may_split, add, latest, limit, values, chosen, firsts)
    else:
        arrays: list[NDArray[Any]] = [
            *(np.ascontiguousarray(each, np.float64) for each in (seconds, boundary, parameters)),
            np.ascontiguousarray(may_split, np.uint8),
            *(ways.state, ways.before, ways.row, ways.link, ways.ring, ways.alike),
        ]
        library.dapple_partition(
            blocks,
            ctypes.c_int64(len(ways.state)),
            int(add),
            int(latest),
            ctypes.c_double(limit),
            *map(address, (*arrays, values, chosen, firsts)),
        )
    return Partition(values, chosen, firsts, ways.state, ways.before)


def _fill(
    seconds: Floats,
    ways: Ways,
    boundary: Floats,
    parameters: Floats,
    splittable: NDArray[np.bool_],
    add: bool,
    latest: bool,
    limit: float,
    values: Floats,
    chosen: Integers,
    firsts: Integers,
) -> None:
    """Fill in the values, ways and first blocks as the C++ program does."""
    blocks = seconds.shape[1]
    combine = np.add if add else np.maximum
    starts, ends = np.arange(blocks)[:, None], np.arange(blocks + 1)
    bytes_of = runs(parameters)
    order = np.arange(blocks)[:: -1 if latest else 1]
    for alike in _same_stages(ways):
        sent = ways.link[alike, :1] + ways.link[alike, 1:] * boundary[None, :blocks]
        entering = combine(values[ways.before[alike], :blocks], sent)
        entering[(ways.alike[alike, None] == 0) & ~splittable[None, :blocks]] = np.inf
        first_way = np.argmin(entering, axis=0)
        latency, per_byte = ways.ring[alike.start]
        own = seconds[ways.row[alike.start]] + np.where(bytes_of > 0, latency + per_byte * bytes_of, 0.0)
        found = combine(entering[first_way, np.arange(blocks)][:, None], own)
        found[(ends <= starts) | (own > limit)] = np.inf
        first = order[np.argmin(found[order], axis=0)]
        least, state = found[first, ends], ways.state[alike.start]
        better = least < values[state]
        values[state, better] = least[better]
        chosen[state, better], firsts[state, better] = alike.start + first_way[first[better]], first[better]


def _same_stages(ways: Ways) -> Iterator[slice]:
    """Yield each run of consecutive ways that differ only in the state before and in the link."""
    keys = list(zip(ways.state.tolist(), ways.row.tolist(), *ways.ring.T.tolist(), strict=True))
    for _, alike in groupby(range(len(keys)), keys.__getitem__):
        members = list(alike)
        yield slice(members[0], members[-1] + 1)
