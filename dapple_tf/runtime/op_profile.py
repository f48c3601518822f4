"""The ops inside of the actions of a recorded step, from TensorFlow's profiler."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.stage_function import BODY
from dapple_tf.errors import UsageError
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.schedules.schedule import KIND_OF_CALL
from dapple_tf.timeline.events import OpRun
from dapple_tf.timeline.stamps import Stamp

_SHORTEST = 1e-6  # seconds: there are many shorter ones, which explain nothing
_MOST = 0.75  # of the time of an op

Runs = list[tuple[str, float, float]]
"""Name and type of an op, and when a run of it started and ended, by the system's clock."""


@contextlib.contextmanager
def profile_ops() -> Iterator[Runs]:
    """Profile this process; the list that is yielded has the runs of ops after the block.

    Raises UsageError where a profiler runs already: TensorFlow has only one.
    """
    runs: Runs = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            tf.profiler.experimental.start(
                folder, options=tf.profiler.experimental.ProfilerOptions(python_tracer_level=0)
            )
        except tf.errors.AlreadyExistsError as error:
            raise UsageError(
                "the ops of a step cannot be recorded: a profiler of TensorFlow runs already, such as that of "
                "keras.callbacks.TensorBoard(profile_batch=...): stop it first"
            ) from error
        try:
            yield runs
        finally:
            tf.profiler.experimental.stop()
        for path in Path(folder).rglob("*.xplane.pb"):
            runs += internals.read_op_runs(str(path))


def attribute_ops(graph: Graph, stamps: Sequence[Stamp], runs: Runs) -> tuple[OpRun, ...]:
    """Return the runs of ops of stage functions, each in the action that ran it; ``stamps``: of this process.

    An action ran an op if its function has the op, and its time most of the op's: the profiler's clock and that of the
    stamps differ by up to a tenth of a millisecond. Where this is so of several actions, as of replicas of a stage in
    one process, the op is left out, and so are ops that take below a microsecond.
    """
    callers = _callers(graph, KIND_OF_CALL)
    actions = {stamp.name: stamp for stamp in stamps if stamp.op in KIND_OF_CALL}
    found = []
    for text, start, end in runs:
        name, kind = _op_name(text), text.rpartition(":")[2]
        if end - start >= _SHORTEST:
            calls = [actions[call] for call in callers.get(name, ()) if call in actions]
            around = [a for a in calls if min(a.end, end) - max(a.start, start) >= _MOST * (end - start)]
            if len(around) == 1:
                found.append(_op_run(around[0], name, kind, start, end))
    return tuple(sorted(found, key=lambda op: (op.stage, op.replica, op.micro_batch, op.start)))


def times_by_ops(graph: Graph, stamps: Sequence[Stamp], runs: Runs) -> tuple[Stamp, ...]:
    """Return the ``stamps`` of this process with the times at which the ops of each action, or update, ran.

    On a GPU an action has ended for the host once its kernels are queued, so the stamps, which are taken on the host,
    show the queueing; the profiler has the times at which the GPU ran the kernels. The n-th run of an op belongs to the
    n-th action whose function has the op. An op that does not run equally often in all of them (a branch) is left out.
    Where an action has no ops of its own (XLA, replicas of a stage in one process), the stamps are returned unchanged:
    a timeline has one clock.
    """
    timed = {*KIND_OF_CALL, OpName.UPDATE}
    callers = _callers(graph, timed)
    actions = {stamp.name: stamp for stamp in stamps if stamp.op in timed}
    runs_of: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for text, start, end in runs:
        runs_of[_op_name(text)].append((start, end))
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for op, spans in runs_of.items():
        calls = sorted((actions[call] for call in callers.get(op, ()) if call in actions), key=lambda call: call.start)
        replicas = {call.replica for call in calls}
        if len(replicas) == 1 and len(spans) % len(calls) == 0:
            each = len(spans) // len(calls)
            for number, span in enumerate(sorted(spans)):
                found[calls[number // each].name].append(span)
    if set(found) != set(actions):
        return tuple(stamps)
    times = {name: (min(spans)[0], max(end for _, end in spans)) for name, spans in found.items()}
    return tuple(
        dataclasses.replace(stamp, start=times[stamp.name][0], end=times[stamp.name][1])
        if stamp.name in times
        else stamp
        for stamp in stamps
    )


def _callers(graph: Graph, kinds: Container[str]) -> Mapping[str, set[str]]:
    """Return the calls of these ``kinds`` whose function has an op, by the name of the op."""
    functions = {function.name: function for function in graph.functions}
    callers: dict[str, set[str]] = defaultdict(set)
    for node in graph.nodes:
        if node.op in kinds:
            for op in functions[node.string("function")].graph.nodes:
                callers[op.name].add(node.name)
    return callers


def _op_name(text: str) -> str:
    """Return the name of the op in a stage function; ``text``: name and type of a run."""
    return text.rpartition(":")[0].removeprefix(f"{BODY}/")


def _op_run(action: Stamp, name: str, op: str, start: float, end: float) -> OpRun:
    assert action.stage is not None
    assert action.micro_batch is not None
    return OpRun(
        action.stage,
        KIND_OF_CALL[action.op],
        action.micro_batch,
        action.replica or 0,
        name,
        op,
        max(0.0, start - action.start),
        min(end, action.end) - max(start, action.start),
    )
