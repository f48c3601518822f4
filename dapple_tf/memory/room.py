"""Check, before anything is allocated, that a process has the memory for its stages."""

from __future__ import annotations

import resource
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from dapple_tf import variable_values
from dapple_tf.compiler import PlannedModel
from dapple_tf.errors import NoFitError
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.ir.names import nodes_of, without_target
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.memory.meter import packs_operands, read_kilobytes, read_system_file
from dapple_tf.memory.predict import predict_plan_memory
from dapple_tf.memory.report import make_report
from dapple_tf.profiler.units import format_bytes
from dapple_tf.wording import format_count

_CGROUP = "/sys/fs/cgroup"

# To predict what a step needs beside what it keeps takes seconds for a large model. It is left out where a process has
# this many times as much memory as the step keeps.
_AMPLE = 4


@dataclass(frozen=True)
class Room:
    """The memory, in ``bytes``, that this process may still allocate; ``limit`` describes what restricts it.

    ``shared``: whether all processes of the host share this memory.
    """

    bytes: int
    limit: str
    shared: bool = False


@dataclass(frozen=True)
class Need:
    """The bytes that a process has yet to allocate; ``where`` names it: the process or rank, with its stages.

    ``weights``: deferred variables, those of the optimizer among them. ``buffers``: sums of gradients, and copies.
    ``in_step``: what a step holds beside these, as predicted; 0 where there is ample memory.
    """

    where: str
    weights: int
    buffers: int
    in_step: int = 0

    @property
    def bytes(self) -> int:
        """The sum of the three."""
        return self.weights + self.buffers + self.in_step

    def __str__(self) -> str:
        step = f", {format_bytes(self.in_step)} in a step" if self.in_step else ""
        return (
            f"{format_bytes(self.bytes)} ({format_bytes(self.weights)} of weights and of the optimizer's slots, "
            f"{format_bytes(self.buffers)} of gradients and copies{step})"
        )


def find_need(
    graph: Graph,
    variables: Mapping[str, tf.Variable],
    held: Collection[str],
    where: str,
    predict_step: Callable[[], int],
    processes: int = 1,
) -> Need | None:
    """Return what this process has yet to allocate to run ``graph``, its pipelined graph; None on GPUs.

    ``held``: names of the ``variables`` that it will hold. ``predict_step`` returns the bytes that a step needs beside
    weights and buffers. ``processes``: the number of processes of the job on this host.
    """
    if tf.config.list_logical_devices("GPU"):
        return None
    deferred = [variables[name] for name in held if variable_values.is_deferred(variables[name])]
    weights = sum(map(variable_values.variable_bytes, deferred))
    buffers = sum(map(variable_values.variable_bytes, (variables[name] for name in _buffered(graph))))
    room = find_room()
    ample = room is None or (weights + buffers) * processes * _AMPLE <= room.bytes
    return Need(where, weights, buffers, 0 if ample else predict_step())


def predict_rank_step(planned: PlannedModel, stages: Collection[int]) -> int:
    """Return the predicted bytes of a step, beside what is always there, in a rank that runs these ``stages``."""
    workers = make_report(planned.plan, predict_plan_memory(planned, ranks=True, packs=packs_operands())).workers
    return max((worker.in_step for worker in workers if set(worker.stages) & set(stages)), default=0)


def predict_process_step(planned: PlannedModel) -> int:
    """Return the predicted bytes of a step, beside what is always there, in one process that runs all stages.

    Each stage holds as many stashes as it ever does, and one of them has its working set.
    """
    stages = predict_plan_memory(planned, ranks=False, packs=packs_operands())
    working = max(max([*memory.working.values(), memory.update]) for memory in stages)
    return working + sum(memory.in_flight * memory.stash for memory in stages)


def check_room(need: Need | None, others: Sequence[Need | None] = ()) -> None:
    """Raise NoFitError unless this process may allocate what it needs.

    ``others``: the needs of the other processes of the job on this host, with which it shares the machine's memory.
    """
    if need is None:
        return
    together = [need, *(other for other in others if other is not None)]
    for room in _list_rooms():
        needed = sum(each.bytes for each in together) if room.shared else need.bytes
        if needed <= room.bytes:
            continue
        text = f"{need.where} needs {need}"
        if needed > need.bytes:
            text += (
                f", and with the {format_count(len(together) - 1, 'other rank')} of this host {format_bytes(needed)}"
            )
        raise NoFitError(
            f"{text}. That is {format_bytes(needed - room.bytes)} too much: it may take {format_bytes(room.bytes)} "
            f"more, since {room.limit}. In {-(-needed // max(1, room.bytes))} or more equal parts it would fit: use "
            f"more stages, each in a process of its own (mpirun -np N){' on more hosts' * room.shared}, an optimizer "
            f"with fewer slots, {'' if not need.in_step else 'smaller micro-batches, re-computation, '}or a higher "
            "limit",
            lasts=False,  # other processes may have ended by the next start, and it may have other hosts
        )


def find_room() -> Room | None:
    """Return the least room that this process has: by its own limits, its control group's, and the machine's memory.

    None where none of them is known.
    """
    return min(_list_rooms(), key=lambda room: room.bytes, default=None)


def _list_rooms() -> Iterator[Room]:
    used = read_kilobytes("/proc/self/status")
    for limit, field, name in (
        (resource.RLIMIT_DATA, "VmData", "ulimit -d, the limit on its data"),
        (resource.RLIMIT_AS, "VmSize", "ulimit -v, the limit on its address space"),
    ):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY and field in used:
            yield Room(max(0, most - used[field]), f"{name}, is {format_bytes(most)}")
    machine = read_kilobytes("/proc/meminfo")
    if "MemAvailable" in machine:
        text = f"the machine has {format_bytes(machine['MemTotal'])} of memory"
        yield Room(machine["MemAvailable"], text, shared=True)
    allowed, now = (read_system_file(f"{_CGROUP}/memory.{name}").strip() for name in ("max", "current"))
    if allowed.isdecimal() and now.isdecimal():
        kept = dict(line.split() for line in read_system_file(f"{_CGROUP}/memory.stat").splitlines())
        freed = int(kept.get("file", 0))  # copies of files, which the system drops when memory is short
        text = f"its control group may use {format_bytes(int(allowed))}"
        yield Room(max(0, int(allowed) - int(now) + freed), text, shared=True)


def _buffered(graph: Graph) -> Iterator[str]:
    """Yield the name of the variable of each buffer: copies, stored versions, and sums of gradients."""
    for op in (OpName.REFRESH, OpName.STORE_VERSION, OpName.GRADIENTS):
        for node in nodes_of(graph, op):
            if op != OpName.GRADIENTS or not node.inputs:
                yield from map(without_target, node.strings("variables"))
