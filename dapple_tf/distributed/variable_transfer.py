"""Send values of variables from the ranks that hold them to those that need them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from dapple_tf import internals, variable_values
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.variable_locations import Ranks

# Bytes of one message. Small variables share a message; a large one is sent in parts, without a second copy of it.
# Horovod and TensorFlow hold up to three copies of a message.
_MESSAGE_BYTES = 4 * 2**20

_ALIGNMENT = 64  # bytes, of TensorFlow's tensors

T = TypeVar("T")
Described: TypeAlias = Any
"""An object that has the dtype and the shape of a value: a tf.Variable or a tf.TensorSpec."""


@dataclass(frozen=True)
class Transfer:
    """Send the value of ``variable`` from the rank ``source`` to the other ``receivers``."""

    variable: tf.Variable
    source: int
    receivers: Ranks


def share_variables(job: Job, variables: Iterable[tf.Variable], source: int | None = None) -> None:
    """Give every rank the value of each variable on rank ``source``, by default the trained one, until the next step.

    Every rank must call this, with the same variables in the same order, and with memory for all of them.
    """
    locations, all_ranks = job.variable_locations, frozenset(range(job.size))
    distinct = list({id(variable): variable for variable in variables}.values())
    sources = [locations.source(variable) if source is None else source for variable in distinct]
    send_values(job, [Transfer(*each, all_ranks) for each in zip(distinct, sources, strict=True)])
    for variable in distinct:
        locations.set_ranks(variable, all_ranks)
    locations.placed_for = None


def send_values(job: Job, transfers: Sequence[Transfer]) -> None:
    """Carry out the transfers, bit by bit, of any dtype; every rank must call this with the same transfers."""
    for source in range(job.size):
        from_source = [transfer for transfer in transfers if transfer.source == source]
        for group in _group_by_bytes(from_source, lambda transfer: transfer.variable):
            variables = [transfer.variable for transfer in group]
            if job.rank == source:
                variable_values.make_values(variables)
            own = list(map(internals.view_value, variables)) if job.rank == source else None
            receives = own is None and any(job.rank in transfer.receivers for transfer in group)
            values = _broadcast_values(job, variables, source, own, keep=receives)
            for transfer, value in zip(group, values, strict=True):
                if receives and job.rank in transfer.receivers:
                    transfer.variable.assign(internals.as_tensor(value))


def gather_arrays(job: Job, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays (NumPy) of all ranks by name, on every rank; if several have a name, the first rank's counts.

    ``own``: the arrays of this rank. Every rank must call this.
    """
    described = job.gather({name: (array.dtype.name, array.shape) for name, array in own.items()})
    found: dict[str, Any] = {}
    for source, types in enumerate(described):
        specs = [(name, tf.TensorSpec(shape, dtype)) for name, (dtype, shape) in types.items() if name not in found]
        for group in _group_by_bytes(specs, lambda item: item[1]):
            values = [own[name] for name, _ in group] if job.rank == source else None
            arrays = _broadcast_values(job, [spec for _, spec in group], source, values, keep=True)
            found |= {name: array for (name, _), array in zip(group, arrays, strict=True)}
    return found


def stream_values(job: Job, variables: Sequence[tf.Variable]) -> Iterator[Any]:
    """Yield the trained value (NumPy) of each variable in turn on rank 0, and None for each on the other ranks.

    A rank holds at most one message, or one larger value, at a time. Every rank must iterate to the end, over the same
    variables.
    """
    for source, from_source in itertools.groupby(variables, job.variable_locations.source):
        if source == 0:
            yield from (internals.view_value(variable) if job.rank == 0 else None for variable in from_source)
            continue
        for group in _group_by_bytes(from_source, lambda variable: variable):
            own = list(map(internals.view_value, group)) if job.rank == source else None
            yield from _broadcast_values(job, group, source, own, keep=job.rank == 0)


def lend_values(job: Job, variables: Iterable[tf.Variable], work: Callable[[], Any], *, changes: bool = False) -> None:
    """Call ``work`` on rank 0, where all ``variables`` can be read; raise its error on every rank.

    Of those that rank 0 does not hold, one at a time is in its memory: their ranks send each value when it is read.
    ``changes``: what ``work`` assigns is sent to the ranks that hold the variables. Every rank must call this, with the
    same variables in the same order.
    """
    locations, everyone = job.variable_locations, frozenset(range(job.size))
    holders = {id(variable): locations.ranks_of(variable) or everyone for variable in variables}
    distinct = list({id(variable): variable for variable in variables}.values())
    lent = [variable for variable in distinct if 0 not in holders[id(variable)]]
    numbers = {id(variable): number for number, variable in enumerate(lent)}

    def answer(number: int, returned: bool) -> Any:
        """Return the value (a tensor) that the first holder sends to rank 0; if ``returned``, rank 0 to all holders."""
        variable = lent[number]
        source, receivers = 0, holders[id(variable)]
        if not returned:
            source, receivers = min(receivers), frozenset({0})
        own = [internals.view_value(variable)] if job.rank == source else None
        (value,) = _broadcast_values(job, [variable], source, own, keep=job.rank in receivers)
        if job.rank not in receivers:
            return None
        tensor = internals.as_tensor(value)
        if returned:
            variable.assign(tensor)
        return tensor

    def ask(variable: tf.Variable, *, returned: bool = False) -> Any:
        number = numbers[id(variable)]
        job.broadcast((number, returned))
        return answer(number, returned)

    def give_back(variable: tf.Variable) -> None:
        if changes:
            ask(variable, returned=True)

    failure: Exception | None = None
    if job.rank == 0:
        try:
            with variable_values.borrowing(lent, ask, give_back):
                work()
        except Exception as raised:  # an error of any type: the other ranks wait for the end
            failure = raised
        job.broadcast(None)
    else:
        while (request := job.broadcast(None)) is not None:
            answer(*request)
    job.run_on_rank_0(partial(_raise, failure))
    if changes:
        kept = [variable for variable in distinct if id(variable) not in numbers]
        send_values(job, [Transfer(variable, 0, holders[id(variable)]) for variable in kept])


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def load_values(job: Job, variables: Mapping[str, tf.Variable], read: Callable[[str], Any], source: int = 0) -> None:
    """Assign to the variables, on the ranks that hold them, the values that ``read`` returns by name on a rank.

    ``source``: that rank. An error of ``read`` is raised on every rank. Every rank must call this, with variables in
    the same order.
    """
    for group in _group_by_bytes(variables.items(), lambda item: item[1]):
        _load_group(job, dict(group), read, source)


def _load_group(job: Job, variables: Mapping[str, tf.Variable], read: Callable[[str], Any], source: int) -> None:
    """Load the values of variables whose values are sent in one message; it holds no value afterwards."""
    own: list[Any] = []  # its values stay on this rank: a result of ``run_on`` is sent to all ranks
    job.run_on(source, partial(own.extend, map(read, variables)))
    described = list(variables.values())
    values = _broadcast_values(job, described, source, own if job.rank == source else None, keep=True)
    for variable, value in zip(described, values, strict=True):
        holders = job.variable_locations.ranks_of(variable)
        if holders is None or job.rank in holders:
            variable.assign(internals.as_tensor(value))


def to_bytes(value: Any) -> Any:
    """Return the value (NumPy) as a flat array of bytes (uint8)."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def from_bytes(data: Any, like: Described) -> Any:
    """Return the value in a flat array of bytes; ``like``: has its dtype and shape."""
    return np.ascontiguousarray(data).view(like.dtype.as_numpy_dtype).reshape(like.shape)


def _broadcast_values(
    job: Job, described: Sequence[Described], source: int, own: Sequence[Any] | None, *, keep: bool
) -> list[Any]:
    """Return the ``described`` values, which are ``own`` on rank ``source``, on the ranks that ``keep`` them.

    On the other ranks the result is None for each value, and no more than one message is held at a time.
    """
    if own is not None and job.is_alone:
        return list(own)
    total = sum(map(_byte_size, described))
    if own is not None:
        data = np.concatenate([to_bytes(value) for value in own]) if len(own) != 1 else to_bytes(own[0])
    else:
        data = _aligned(total if keep else min(total, _MESSAGE_BYTES))
    with job.progress.collective_call():
        for begin in range(0, total, _MESSAGE_BYTES):
            length = min(_MESSAGE_BYTES, total - begin)
            first = begin if keep or own is not None else 0
            message = _broadcast(data[first : first + length], source)
            if own is None and keep:
                data[first : first + length] = message
    if not keep:
        return [None] * len(described)
    return split_values(data, described)


def split_values(data: Any, described: Sequence[Described]) -> list[Any]:
    """Return the ``described`` values in a flat array of bytes; several are copied, so that none keeps all of ``data``.

    A variable may take the memory of its value without a copy (``internals.as_tensor``).
    """
    if len(described) == 1:
        return [from_bytes(data, described[0])]
    parts = np.split(data, np.cumsum([_byte_size(one) for one in described])[:-1])
    return [from_bytes(part.copy(), one) for one, part in zip(described, parts, strict=True)]


def _aligned(size: int) -> Any:
    """Return an array of ``size`` bytes, zeros, which TensorFlow can take as a tensor without a copy."""
    data = np.zeros(size + _ALIGNMENT, np.uint8)
    begin = -data.ctypes.data % _ALIGNMENT
    return data[begin : begin + size]


def _broadcast(message: Any, source: int) -> Any:
    import horovod.tensorflow as hvd

    # The name contains the length, since Horovod remembers the shape of each name.
    return hvd.broadcast(message, source, name=f"values/{source}/{len(message)}").numpy()


def _group_by_bytes(items: Iterable[T], described: Callable[[T], Described]) -> Iterator[list[T]]:
    """Yield groups of consecutive items whose values fit into one message; a larger value is a group of its own."""
    group: list[T] = []
    group_bytes = 0
    for item in items:
        item_bytes = _byte_size(described(item))
        if group and group_bytes + item_bytes > _MESSAGE_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(item)
        group_bytes += item_bytes
    if group:
        yield group


def _byte_size(described: Described) -> int:
    return int(described.shape.num_elements() * described.dtype.size)
