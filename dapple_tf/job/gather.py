"""Values of variables from the rank that has them to all others.

A rank trains the variables of its stage; those of other stages stay as they were when it started, until they are
gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf.compiler import StagedModel
from dapple_tf.job.membership import Job
from dapple_tf.job.progress import progress
from dapple_tf.planner.plan import Plan
from graph_passes.layers import written_variables
from graph_passes.variables import find_variables

# Bytes that travel together: small variables share a message, large ones do not all need a copy at once.
_GROUP_BYTES = 64 * 2**20
# MPI counts the elements of a message, here bytes, in 31 bits.
_PIECE_BYTES = 2**30


def gather_variables(job: Job, plan: Plan, models: Iterable[StagedModel]) -> None:
    """Give every rank the trained values of all variables of ``models``, the optimizer's included.

    They come from the first rank of the stage that writes them; what every rank writes for itself, or none does, from
    rank 0. Every rank must call this, with models traced in the same order.
    """
    sources: dict[int, tuple[tf.Variable, int]] = {}
    for model in models:
        writers = find_writers(model)
        for name, variable in model.variables.items():
            if name in writers:
                sources[id(variable)] = variable, plan.stages[writers[name]].devices[0]
            else:
                sources.setdefault(id(variable), (variable, 0))
    for rank in range(job.size):
        broadcast_values(job, [variable for variable, source in sources.values() if source == rank], rank)


def find_writers(model: StagedModel) -> dict[str, int]:
    """For each variable that one stage alone changes, that stage: by its update, or by forward (state)."""
    use = find_variables(model.graph)
    writers = {name: use.owner(name) for name in use.state}
    for stage, function in model.updates.stages if model.updates is not None else ():
        writers |= dict.fromkeys(written_variables(function.graph), stage)
    return writers


def broadcast_values(job: Job, variables: Sequence[tf.Variable], source: int) -> None:
    """Give the variables on every rank the values they have on rank ``source``; of any dtype, bit by bit."""
    with progress().meeting():
        for number, group in enumerate(_groups(variables)):
            sizes = [_size(variable) for variable in group]
            own = job.rank == source
            data = np.concatenate([to_bytes(v) for v in group]) if own else np.zeros(sum(sizes), np.uint8)
            for begin in range(0, len(data), _PIECE_BYTES):
                piece = slice(begin, begin + _PIECE_BYTES)
                data[piece] = _broadcast(data[piece], source, f"values/{source}/{number}/{begin}")
            if not own:
                for variable, part in zip(group, np.split(data, np.cumsum(sizes)[:-1]), strict=True):
                    variable.assign(from_bytes(part, variable))


def _broadcast(data: Any, source: int, name: str) -> Any:
    import horovod.tensorflow as hvd

    return hvd.broadcast(data, source, name=name).numpy()


def to_bytes(variable: tf.Variable) -> Any:
    """The value as a flat array of bytes."""
    return np.ascontiguousarray(variable.numpy()).reshape(-1).view(np.uint8)


def from_bytes(data: Any, variable: tf.Variable) -> Any:
    """The value, of the dtype and shape of ``variable``, that these bytes hold."""
    return np.ascontiguousarray(data).view(variable.dtype.as_numpy_dtype).reshape(variable.shape)


def _groups(variables: Sequence[tf.Variable]) -> Iterator[list[tf.Variable]]:
    group: list[tf.Variable] = []
    for variable in variables:
        if group and sum(map(_size, group)) + _size(variable) > _GROUP_BYTES:
            yield group
            group = []
        group.append(variable)
    if group:
        yield group


def _size(variable: tf.Variable) -> int:
    return int(variable.shape.num_elements() * variable.dtype.size)
