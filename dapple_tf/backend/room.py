"""Check, before anything is allocated, that a process has the memory for what its stages keep between steps."""

from __future__ import annotations

import resource
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from dapple_tf import variable_values
from dapple_tf.errors import NoFitError
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.ir.names import nodes_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.profiler.units import format_bytes

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Room:
    """The memory, in ``bytes``, that this process may still allocate; ``limit`` describes what restricts it."""

    bytes: int
    limit: str


def check_room(graph: Graph, variables: Mapping[str, tf.Variable], held: Collection[str], where: str) -> None:
    """Raise NoFitError unless the deferred variables called ``held``, and the step's buffers, fit this process.

    ``graph``: the process's pipelined graph. ``where``: the process or rank, for the message. Variables on GPUs are not
    counted. Nothing is checked where no variable is deferred: those that have a value are in memory already.
    """
    deferred = [name for name in held if variable_values.is_deferred(variables[name])]
    if not deferred or tf.config.list_logical_devices("GPU"):
        return
    weights = sum(map(variable_values.variable_bytes, (variables[name] for name in deferred)))
    buffers = sum(map(variable_values.variable_bytes, (variables[name] for name in _buffered(graph))))
    room = find_room()
    needed = weights + buffers
    if room is not None and needed > room.bytes:
        parts = -(-needed // max(1, room.bytes))
        raise NoFitError(
            f"{where} needs {format_bytes(needed)} ({format_bytes(weights)} of weights and of the optimizer's slots, "
            f"{format_bytes(buffers)} of gradients and copies), and may take {format_bytes(room.bytes)} more: "
            f"{room.limit}. In {parts} or more equal parts it would fit: use more stages, each in a process of its own "
            "(mpirun -np N), an optimizer with fewer slots, or a higher limit"
        )


def find_room() -> Room | None:
    """Return the least room that this process has: by its own limits, its control group's, and the machine's memory.

    None where none of them is known.
    """
    return min(_list_rooms(), key=lambda room: room.bytes, default=None)


def _list_rooms() -> Iterator[Room]:
    used = _read_kilobytes(Path("/proc/self/status"))
    for limit, field, name in (
        (resource.RLIMIT_DATA, "VmData", "ulimit -d, the limit on its data"),
        (resource.RLIMIT_AS, "VmSize", "ulimit -v, the limit on its address space"),
    ):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY and field in used:
            yield Room(max(0, most - used[field]), f"{name}, is {format_bytes(most)}")
    machine = _read_kilobytes(Path("/proc/meminfo"))
    if "MemAvailable" in machine:
        yield Room(machine["MemAvailable"], f"the machine has {format_bytes(machine['MemTotal'])} of memory")
    allowed, now = _read_text(_CGROUP / "memory.max").strip(), _read_text(_CGROUP / "memory.current").strip()
    if allowed.isdecimal() and now.isdecimal():
        kept = dict(line.split() for line in _read_text(_CGROUP / "memory.stat").splitlines())
        freed = int(kept.get("file", 0))  # copies of files, which the system drops when memory is short
        yield Room(max(0, int(allowed) - int(now) + freed), f"its control group may use {format_bytes(int(allowed))}")


def _buffered(graph: Graph) -> Iterator[str]:
    """Yield the name of the variable of each buffer: copies, stored versions, and sums of gradients."""
    for op in (OpName.REFRESH, OpName.STORE_VERSION, OpName.GRADIENTS):
        for node in nodes_of(graph, op):
            if op != OpName.GRADIENTS or not node.inputs:
                yield from node.strings("variables")


def _read_kilobytes(path: Path) -> dict[str, int]:
    """Return the bytes of the fields of a file of Linux that gives kilobytes; empty where there is no such file."""
    fields = (line.split(":") for line in _read_text(path).splitlines() if line.endswith(" kB"))
    return {name: 1024 * int(value.split()[0]) for name, value in fields}


def _read_text(path: Path) -> str:
    """Return the text of a file of the system, "" where there is none."""
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
