"""Tensors of a micro-batch that a stage holds between its actions, and how long it holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dapple_tf.graph_passes.ir.graph import Port, Value
from dapple_tf.memory.liveness import allocates, buffer_value
from dapple_tf.memory.sizes import FunctionSizes

Origin = Literal["previous stage", "F", "B", "I", "next stage"]
"""The origin of a tensor: a neighbouring stage, or an action of the stage itself."""

_Key = tuple[str, str]
"""Role and name of the port by which the functions of a stage know a tensor."""

_ORIGINS: Mapping[str, Origin] = {"F": "F", "B": "B", "I": "I", "W": "I"}
"""The origin of a tensor that a function of each kind of action computes."""

_SENDERS: Mapping[str, Origin] = {"boundary": "previous stage", "gradient": "next stage"}
"""The neighbour that sends a port's tensor, by the port's role."""


@dataclass(frozen=True)
class StashedTensor:
    """A tensor that a stage holds of each micro-batch in flight.

    ``origin``: "previous stage" or "next stage" where a neighbour computes it, and it exists from the end of the
    neighbour's action; "F", "B" or "I" where the stage's own action does, and it exists from that action's start.
    ``last_use``: the kind of the last action that reads it (F, B, I or W), at whose end it is freed. ``name``: the
    boundary tensor that shares its memory, or "".
    """

    origin: Origin
    last_use: str
    bytes: int
    name: str = ""

    @property
    def is_activation(self) -> bool:
        """Whether it is an activation, and not a gradient (which may have the same name)."""
        return self.origin in ("previous stage", "F")


def find_stashed_tensors(functions: Mapping[str, FunctionSizes]) -> tuple[StashedTensor, ...]:
    """Return the tensors that a stage holds of a micro-batch between its actions.

    ``functions``: the stage's functions by kind of action, in the order in which they run: F and B, or F, I and W. Each
    block of memory counts once, even where several ports name it. Batch arguments (views of the caller's batch),
    variables and constants count nothing.
    """
    stashed: dict[tuple[str, _Key], StashedTensor] = {}
    memory: dict[_Key, tuple[str, _Key] | None] = {}  # port -> its block: the origin, and its key there
    for kind, sizes in functions.items():
        graph, inputs = sizes.function.graph, dict(zip(sizes.function.graph.inputs, sizes.function.inputs, strict=True))
        for name, port in inputs.items():
            key = port.role, port.name
            if port.role in _SENDERS and key not in memory:
                sender = _SENDERS[port.role]
                memory[key] = (sender, key)
                stashed[sender, key] = StashedTensor(sender, kind, sizes.bytes_of(Value(name)), port.name)
            block = memory.get(key)
            if block in stashed:
                stashed[block] = replace(stashed[block], last_use=kind)
        for port, value in zip(sizes.function.outputs, graph.outputs, strict=True):
            if not _is_used_later(port, kind, functions):
                continue
            buffer = buffer_value(graph, value, sizes.bytes_of)
            source = inputs.get(buffer.node)
            if source is not None:
                block = memory.get((source.role, source.name))
            else:
                block = (kind, ("", str(buffer))) if allocates(graph.node(buffer.node)) else None
            memory[port.role, port.name] = block
            if block is not None and block not in stashed:
                boundary = _boundary_name(sizes, buffer, graph.outputs)
                stashed[block] = StashedTensor(_ORIGINS[kind], kind, sizes.bytes_of(buffer), boundary)
    return tuple(stashed.values())


def transfer_bytes(functions: Mapping[str, FunctionSizes], stashed: Sequence[StashedTensor]) -> int:
    """Return the bytes that a rank's messages of a micro-batch take beside ``stashed``.

    A function's results stay until they are sent, and count unless they are stashed. The larger of activations and
    gradients counts once more: for the message that is being received, or for the block from which Horovod's alltoall
    copies tensors.
    """
    stashed_keys = {("boundary" if tensor.is_activation else "gradient", tensor.name) for tensor in stashed}
    received, sent = [0], 0
    for sizes in functions.values():
        inputs = [(p, Value(n)) for p, n in zip(sizes.function.inputs, sizes.function.graph.inputs, strict=True)]
        received.append(sum(sizes.bytes_of(value) for port, value in inputs if port.role == "gradient"))
        received.append(sum(sizes.bytes_of(value) for port, value in inputs if port.role == "boundary"))
        outputs = zip(sizes.function.outputs, sizes.function.graph.outputs, strict=True)
        sent += sum(
            sizes.bytes_of(value)
            for port, value in outputs
            if port.role in _SENDERS and (port.role, port.name) not in stashed_keys
        )
    return max(received) + sent


def _is_used_later(port: Port, kind: str, functions: Mapping[str, FunctionSizes]) -> bool:
    """Return whether a later function of the stage takes the output ``port`` of the ``kind``'s function.

    A tensor sent to a neighbour that the stage also keeps has a second port (a skip connection's gradient is sent back
    under the skip's name), so ports to neighbours are not used later.
    """
    if port.role in _SENDERS:
        return False
    kinds = list(functions)
    later = kinds[kinds.index(kind) + 1 :]
    used = {(p.role, p.name) for other in later for p in functions[other].function.inputs}
    return (port.role, port.name) in used


def _boundary_name(sizes: FunctionSizes, buffer: Value, outputs: Sequence[Value]) -> str:
    """Return the name of the boundary tensor (or its gradient) sent to a neighbour from ``buffer``'s memory, or ""."""
    for port, value in zip(sizes.function.outputs, outputs, strict=True):
        if port.role in _SENDERS and buffer_value(sizes.function.graph, value, sizes.bytes_of) == buffer:
            return port.name
    return ""
