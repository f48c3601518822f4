"""Values of variables from the ranks that hold them to those that want them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from dapple_tf.compiler import StagedModel
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.progress import progress
from dapple_tf.distributed.variable_locations import Ranks, holdings

# Bytes that travel together: small variables share a message, large ones do not need a whole copy on the way.
_GROUP_BYTES = 64 * 2**20

T = TypeVar("T")


@dataclass(frozen=True)
class Transfer:
    """The value of ``variable`` goes from the rank ``source`` to those of ``receivers`` that are others."""

    variable: tf.Variable
    source: int
    receivers: Ranks


def gather_variables(job: Job, models: Iterable[StagedModel]) -> None:
    """Give every rank the trained values of all variables of ``models``, the optimizer's included.

    They stay until the next step. Every rank must call this, with models traced in the same order.
    """
    known, everybody = holdings(), frozenset(range(job.size))
    variables = {id(variable): variable for model in models for variable in model.variables.values()}
    send_values(job, [Transfer(variable, known.source(variable), everybody) for variable in variables.values()])
    for variable in variables.values():
        known.put(variable, everybody)
    known.needs = None


def send_values(job: Job, transfers: Sequence[Transfer]) -> None:
    """Carry out the transfers, bit by bit and of any dtype; every rank must call this with the same."""
    for source in range(job.size):
        of_source = [transfer for transfer in transfers if transfer.source == source]
        for group in _groups(of_source, lambda transfer: transfer.variable):
            variables = [transfer.variable for transfer in group]
            own = [variable.numpy() for variable in variables] if job.rank == source else None
            receives = own is None and any(job.rank in transfer.receivers for transfer in group)
            values = _broadcast_values(job, variables, source, own, keep=receives)
            for transfer, value in zip(group, values, strict=True):
                if receives and job.rank in transfer.receivers:
                    transfer.variable.assign(value)


def stream_values(job: Job | None, variables: Sequence[tf.Variable]) -> Iterator[Any]:
    """The trained value (NumPy) of one variable after the other, on rank 0; on other ranks None for each.

    No rank holds more than a few of them at a time. Every rank must go through all of it, with the same variables.
    """
    if job is None:
        yield from (variable.numpy() for variable in variables)
        return
    for source, found in itertools.groupby(variables, holdings().source):
        if source == 0:
            yield from (variable.numpy() if job.rank == 0 else None for variable in found)
            continue
        for group in _groups(found, lambda variable: variable):
            own = [variable.numpy() for variable in group] if job.rank == source else None
            yield from _broadcast_values(job, group, source, own, keep=job.rank == 0)


def load_values(job: Job, variables: Mapping[str, tf.Variable], read: Callable[[str], Any]) -> None:
    """Give the variables the values that ``read`` finds by name on rank 0, on the ranks that hold them.

    What ``read`` raises is raised on every rank. Every rank must call this, with variables in the same order.
    """
    for group in _groups(variables.items(), lambda item: item[1]):
        own: list[Any] = []
        job.run_on_rank_0(partial(_read_into, own, read, [name for name, _ in group]))
        variables_of_group = [variable for _, variable in group]
        values = _broadcast_values(job, variables_of_group, 0, own if job.rank == 0 else None, keep=True)
        for (_, variable), value in zip(group, values, strict=True):
            held = holdings().of(variable)
            if held is None or job.rank in held:
                variable.assign(value)


def _read_into(found: list[Any], read: Callable[[str], Any], names: Sequence[str]) -> None:
    """Keep the values on the rank that reads them."""
    found.extend(map(read, names))


def to_bytes(value: Any) -> Any:
    """The value (NumPy) as a flat array of bytes."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def from_bytes(data: Any, variable: tf.Variable) -> Any:
    """The value, of the dtype and shape of ``variable``, that these bytes hold."""
    return np.ascontiguousarray(data).view(variable.dtype.as_numpy_dtype).reshape(variable.shape)


def _broadcast_values(
    job: Job, variables: Sequence[tf.Variable], source: int, own: Sequence[Any] | None, *, keep: bool
) -> list[Any]:
    """The values of the variables, of which rank ``source`` gives its ``own``, on the ranks that ``keep`` them.

    A rank that does not gets None for each, and holds no more than a message of them.
    """
    sizes = [_size(variable) for variable in variables]
    total = sum(sizes)
    if own is not None:
        data = np.concatenate([to_bytes(value) for value in own]) if len(own) != 1 else to_bytes(own[0])
    else:
        data = np.zeros(total if keep else min(total, _GROUP_BYTES), np.uint8)
    with progress().meeting():
        for begin in range(0, total, _GROUP_BYTES):
            length = min(_GROUP_BYTES, total - begin)
            first = begin if keep or own is not None else 0
            message = _broadcast(data[first : first + length], source)
            if own is None and keep:
                data[first : first + length] = message
    if not keep:
        return [None] * len(variables)
    parts = np.split(data, np.cumsum(sizes)[:-1])
    return [from_bytes(part, variable) for variable, part in zip(variables, parts, strict=True)]


def _broadcast(message: Any, source: int) -> Any:
    import horovod.tensorflow as hvd

    # Horovod remembers the shape that goes with a name.
    return hvd.broadcast(message, source, name=f"values/{source}/{len(message)}").numpy()


def _groups(items: Iterable[T], variable_of: Callable[[T], tf.Variable]) -> Iterator[list[T]]:
    group: list[T] = []
    size = 0
    for item in items:
        more = _size(variable_of(item))
        if group and size + more > _GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(item)
        size += more
    if group:
        yield group


def _size(variable: tf.Variable) -> int:
    return int(variable.shape.num_elements() * variable.dtype.size)
