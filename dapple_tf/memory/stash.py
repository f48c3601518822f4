"""What a stage keeps of a micro-batch between its actions, and for how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dapple_tf.memory.liveness import allocates, root_of
from dapple_tf.memory.sizes import Sizes
from graph_passes.ir.graph import Port, Value

Birth = Literal["sent forward", "F", "B", "sent back"]
Key = tuple[str, str]
"""Role and name under which the functions of a stage know a tensor."""

_ARRIVES: Mapping[str, Birth] = {"boundary": "sent forward", "gradient": "sent back"}


@dataclass(frozen=True)
class Kept:
    """A tensor that a stage keeps of each micro-batch.

    It is there from when the neighbour has made it ("sent forward", "sent back"), or from the start of the stage's own
    action ("F", "B"), to the end of the last action that takes it (``until``: "F", "B" or "W"). ``name``: that of the
    boundary tensor that it is or holds, "" for others.
    """

    birth: Birth
    until: str
    bytes: int
    name: str = ""

    @property
    def forward(self) -> bool:
        """Whether it is an activation, not a gradient (of the same name)."""
        return self.birth in ("sent forward", "F")


def find_kept(functions: Mapping[str, Sizes]) -> tuple[Kept, ...]:
    """What a stage of these functions (by kind of action, in the order in which they run) keeps of a micro-batch.

    Each piece of memory counts once, whatever the names under which it is taken. Batch arguments, which are views of
    the caller's batch, variables and constants count nothing.
    """
    kept: dict[tuple[str, Key], Kept] = {}
    homes: dict[Key, tuple[str, Key] | None] = {}  # by key, the memory in which it lies: made by which action, as what
    for kind, sizes in functions.items():
        graph, inputs = sizes.function.graph, dict(zip(sizes.function.graph.inputs, sizes.function.inputs, strict=True))
        for name, port in inputs.items():
            key = port.role, port.name
            if port.role in _ARRIVES and key not in homes:
                birth = _ARRIVES[port.role]
                homes[key] = (birth, key)
                kept[birth, key] = Kept(birth, kind, sizes(Value(name)), port.name)
            home = homes.get(key)
            if home in kept:
                kept[home] = replace(kept[home], until=kind)
        for port, value in zip(sizes.function.outputs, graph.outputs, strict=True):
            if not _stays(port, kind, functions):
                continue
            root = root_of(graph, value, sizes)
            source = inputs.get(root.node)
            if source is not None:
                home = homes.get((source.role, source.name))
            else:
                home = (kind, ("", str(root))) if allocates(graph.node(root.node)) else None
            homes[port.role, port.name] = home
            if home is not None and home not in kept:
                boundary = _boundary_in(sizes, root, graph.outputs)
                kept[home] = Kept("F" if kind == "F" else "B", kind, sizes(root), boundary)
    return tuple(kept.values())


def find_transit(functions: Mapping[str, Sizes], kept: Sequence[Kept]) -> int:
    """Bytes of what a rank sends of a micro-batch and does not keep, and of a copy of what it receives.

    A function's results are there until they are sent; what comes is one block, which is copied into tensors.
    """
    stay = {("boundary" if piece.forward else "gradient", piece.name) for piece in kept}
    coming, going = [0], 0
    for sizes in functions.values():
        taken = [(p, Value(n)) for p, n in zip(sizes.function.inputs, sizes.function.graph.inputs, strict=True)]
        coming.append(sum(sizes(value) for port, value in taken if port.role == "gradient"))
        coming.append(sum(sizes(value) for port, value in taken if port.role == "boundary"))
        given = zip(sizes.function.outputs, sizes.function.graph.outputs, strict=True)
        going += sum(
            sizes(value) for port, value in given if port.role in _ARRIVES and (port.role, port.name) not in stay
        )
    return max(coming) + going


def _stays(port: Port, kind: str, functions: Mapping[str, Sizes]) -> bool:
    """Whether a later function of the stage takes the output ``port`` of the ``kind``'s function.

    (What goes to a neighbour has a name of its own where the stage keeps it too: a skip is sent back under its name.)
    """
    if port.role in _ARRIVES:
        return False
    kinds = list(functions)
    later = kinds[kinds.index(kind) + 1 :]
    wanted = {(p.role, p.name) for other in later for p in functions[other].function.inputs}
    return (port.role, port.name) in wanted


def _boundary_in(sizes: Sizes, root: Value, outputs: Sequence[Value]) -> str:
    """The name of the boundary tensor, or gradient of one, that is sent to a neighbour and lies in ``root``; or ""."""
    for port, value in zip(sizes.function.outputs, outputs, strict=True):
        if port.role in _ARRIVES and root_of(sizes.function.graph, value, sizes) == root:
            return port.name
    return ""
