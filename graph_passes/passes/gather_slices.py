"""Gather the slices of sparse gradients from all micro-batches, replicas and stages, as one device would have them.

The gradient of a variable whose rows are looked up (an embedding) consists of *slices*, the gradients of rows, and
*indices*, the numbers of these rows. A row that was looked up several times has several slices, and an optimizer may
treat each of them by itself (Keras squares and clips them one by one). So slices are not added but concatenated. The
lookups (*uses*) of a variable are in the order of one device's tape; the slices of a use are in sample order
(micro-batch by micro-batch, replica by replica).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.analysis.variable_use import find_variables
from dapple_tf.graph_passes.ir.graph import OTHER, DType, Function, Graph, Node, Shape, TensorType, Value, make_node
from dapple_tf.graph_passes.ir.names import Site, at, micro_batch_count, nodes_of, replica_counts, weight_gradient_op
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract

Combine = Literal["concat", "sum", "merge"]
"""The way to join the slices of one use, from all micro-batches and replicas, into those of the whole batch.

``concat``: they are concatenated; each belongs to a sample. ``sum``: slices at the same position are added; the indices
do not depend on the batch (position embeddings), and one device looks each of them up once. ``merge``: slices of equal
indices are added, in order of first occurrence; the model looks each index up once (``tf.unique``).
"""


@dataclass(frozen=True)
class SparsePart:
    """The slices and indices that one stage returns for one use of a variable.

    ``rows``: how many rows the variable has. ``position``: the position of the use among the uses of the variable when
    the model runs on one device. Parts with the same position belong to stages that look up the same rows, which do not
    depend on the batch. ``stage``: the number after that of the last stage stands for the loss head. ``pair``: the
    position of the slices and indices among the pairs that the stage's function returns.
    """

    variable: str
    rows: int
    position: int
    stage: int
    pair: int
    combine: Combine


@dataclass(frozen=True)
class GatherSlices(BuiltInPass):
    """Add a ``gather_slices`` for each variable whose gradient is sparse; ``parts``: its uses, in order.

    ``shares``: see ``Variables``.
    """

    parts: tuple[SparsePart, ...]
    shares: tuple[tuple[str, int], ...] = ()
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        forbids=frozenset({OpName.GATHER_SLICES, OpName.BARRIER}),
        may_produce=frozenset({OpName.GATHER_SLICES}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with a ``gather_slices`` for each variable of ``parts``, on the device that keeps it.

        Raises GraphError if a stage gives slices that no part names, or if a part names slices that no stage gives.
        """
        of_variable: dict[str, list[SparsePart]] = {}
        for part in self.parts:
            of_variable.setdefault(part.variable, []).append(part)
        _check_parts(graph, [part for own in of_variable.values() for part in own])
        variables = find_variables(graph, self.shares)
        added = []
        for name, own in of_variable.items():
            home = variables.home(name)
            node = at(home.stage, what=f"{OpName.GATHER_SLICES}/{name}")
            added.append(gather_node(graph, node, home, own, lambda part: _pieces(graph, part)))
        return graph.replace(nodes=(*graph.nodes, *added)).sorted()


def slice_ports(function: Function) -> tuple[tuple[int, int], ...]:
    """Return the outputs that carry slices and their indices, a pair for each use of a variable."""
    slices, indices = function.output_ports("slices"), function.output_ports("indices")
    return tuple((i, j) for (i, _), (j, _) in zip(slices, indices, strict=True))


def dense_type(gathered: Node) -> TensorType:
    """Return the type of the dense gradient of the variable whose slices ``gathered``, a ``gather_slices``, gives."""
    slices = gathered.outputs[0]
    return TensorType(slices.dtype, Shape((gathered.integer("rows"), *(slices.shape.dims or ())[1:])))


def _check_parts(graph: Graph, parts: Sequence[SparsePart]) -> None:
    given = sorted((part.stage, part.pair, part.variable) for part in parts)
    found = []
    for stage in range(len(replica_counts(graph))):
        function = graph.function(at(stage, what=weight_gradient_op(graph, stage, 0)))
        found += [(stage, pair, function.outputs[i].name) for pair, (i, _) in enumerate(slice_ports(function))]
    for call in nodes_of(graph, OpName.LOSS_HEAD):
        function, stage = graph.function(call.string("function")), len(replica_counts(graph))
        found += [(stage, pair, function.outputs[i].name) for pair, (i, _) in enumerate(slice_ports(function))]
    if given != found:
        raise GraphError(f"the stages give slices {found} (stage, pair, variable), but the pass gathers {given}")


Pieces = Callable[[SparsePart], Sequence[tuple[Value, Value]]]
"""Returns the slices and indices of a use, from each of the calls that give them, in sample order."""


def gather_node(graph: Graph, name: str, site: Site, parts: Sequence[SparsePart], pieces_of: Pieces) -> Node:
    """Return the node called ``name`` that gathers the slices of one variable at a site; ``parts``: its uses.

    Raises GraphError where several stages look up the same rows and do not add them.
    """
    uses: dict[int, list[SparsePart]] = {}
    for part in sorted(parts, key=lambda part: part.position):
        uses.setdefault(part.position, []).append(part)
    for same in uses.values():
        if len(same) > 1 and any(part.combine != "sum" for part in same):
            stages = [part.stage for part in same]
            raise GraphError(f"stages {stages} look up the same rows of {same[0].variable!r}, but do not add them")
    pieces = [[piece for part in same for piece in pieces_of(part)] for same in uses.values()]
    slices, indices = (graph.type_of(value) for value in pieces[0][0])
    index_types = {graph.type_of(piece[0][1]).dtype for piece in pieces}
    index_type = indices.dtype if len(index_types) == 1 else DType("int64")  # as TensorFlow concatenates them
    row = (slices.shape.dims or ())[1:]
    return make_node(
        name,
        OpName.GATHER_SLICES,
        (value for use in pieces for piece in use for value in piece),
        (TensorType(slices.dtype, Shape((OTHER, *row))), TensorType(index_type, Shape((OTHER,)))),
        **site.attrs,
        pieces=tuple(map(len, pieces)),
        rows=parts[0].rows,
        uses=tuple(str(same[0].combine) for same in uses.values()),
        variable=parts[0].variable,
    )


def _pieces(graph: Graph, part: SparsePart) -> list[tuple[Value, Value]]:
    """Return the slices and indices of a part from each micro-batch and replica, in sample order."""
    if part.stage == len(replica_counts(graph)):  # the loss head
        (call,) = nodes_of(graph, OpName.LOSS_HEAD)
        slices, indices = slice_ports(graph.function(call.string("function")))[part.pair]
        return [(call.values()[slices], call.values()[indices])]
    pieces = []
    for m in range(micro_batch_count(graph)):
        op = weight_gradient_op(graph, part.stage, m)
        slices, indices = slice_ports(graph.function(at(part.stage, what=op)))[part.pair]
        calls = [at(part.stage, replica, m, op) for replica in range(replica_counts(graph)[part.stage])]
        pieces += [(Value(call, slices), Value(call, indices)) for call in calls]
    return pieces
