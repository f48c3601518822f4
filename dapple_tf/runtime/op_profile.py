"""The ops inside of the actions of a recorded step, from TensorFlow's profiler."""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.stage_function import BODY
from dapple_tf.errors import UsageError
from dapple_tf.graph_passes.ir.graph import Graph
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

    Raises UsageError where a profiler runs already, of which TensorFlow has one.
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
    functions = {function.name: function for function in graph.functions}
    callers: dict[str, set[str]] = defaultdict(set)  # the calls whose function has an op of this name
    for node in graph.nodes:
        if node.op in KIND_OF_CALL:
            for op in functions[node.string("function")].graph.nodes:
                callers[op.name].add(node.name)
    actions = {stamp.name: stamp for stamp in stamps if stamp.op in KIND_OF_CALL}
    found = []
    for text, start, end in runs:
        scoped, _, kind = text.rpartition(":")
        name = scoped.removeprefix(f"{BODY}/")
        if end - start >= _SHORTEST:
            calls = [actions[call] for call in callers.get(name, ()) if call in actions]
            around = [a for a in calls if min(a.end, end) - max(a.start, start) >= _MOST * (end - start)]
            if len(around) == 1:
                found.append(_op_run(around[0], name, kind, start, end))
    return tuple(sorted(found, key=lambda op: (op.stage, op.replica, op.micro_batch, op.start)))


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
