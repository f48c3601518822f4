"""The rows of the batch that each rank of a job uses of each argument of the loss.

A rank uses an argument in one of three ways: not at all; only the rows that its own calls take, its *own* rows; or all
rows, for what is computed from the whole batch (a loss head, statistics that cannot be combined from parts).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.analysis.row_bounds import fit_micro_batches, fit_sizes, replica_bounds
from dapple_tf.graph_passes.ir.graph import Graph, StrEnum
from dapple_tf.graph_passes.ir.names import BATCH_SIZE_NAME, nodes_of, replica_shares
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.wording import format_count

Rows = tuple[tuple[int, int], ...]
"""Ranges of rows, each as its first and its end row."""


class Use(StrEnum):
    """The rows of an argument that a rank uses."""

    NONE = "none"
    OWN = "own"
    """The rows of every micro-batch that the rank's replica takes."""
    ALL = "all"


@dataclass(frozen=True)
class RankInputs:
    """The rows of the batch that a process needs: ``uses`` has an entry for each tensor of the batch, in order.

    The process runs replica number ``replica`` of each of the ``stages``, which have ``replicas`` replicas. ``shares``:
    how many rows each replica takes, as whole numbers in this proportion; empty where all take equally many.
    """

    uses: tuple[Use, ...]
    stages: tuple[int, ...] = (0,)
    replica: int = 0
    replicas: int = 1
    shares: tuple[int, ...] = ()


@dataclass(frozen=True)
class InputNeeds:
    """The rows that this rank needs of each argument of the loss (in one process: all).

    ``arguments``: the paths of the flattened arguments ("0", "1[0]"); ``inputs``: the use of each. ``micro_batches``
    and ``sizes`` are the plan's number of micro-batches and their samples (empty where these are equal).
    ``least_samples``: the fewest samples of a micro-batch with which every replica gets one. ``batch_size``: the
    samples of the batch that was run or built last. ``autoplan.batch_fit.fit_plan`` says how a batch of another size
    than the plan's is cut.
    """

    arguments: tuple[str, ...]
    inputs: RankInputs
    micro_batches: int
    least_samples: int
    batch_size: int
    sizes: tuple[int, ...] = ()

    def rows(self, batch_size: int | None = None) -> dict[str, Rows]:
        """Return the rows of each argument that this rank needs of a batch, by default one of ``self.batch_size``.

        Each is a tuple of ranges (first row, end row), in the order in which a local batch has the rows: that of the
        micro-batches. Empty: the argument is not needed. Raises GraphError for a batch without samples.
        """
        size = self.batch_size if batch_size is None else batch_size
        if size < 1:
            raise GraphError(f"a batch of {size} samples has no rows: give at least 1")
        known: dict[Use, Rows] = {Use.NONE: (), Use.OWN: self._own_rows(size), Use.ALL: ((0, size),)}
        return {name: known[use] for name, use in zip(self.arguments, self.inputs.uses, strict=True)}

    def _own_rows(self, size: int) -> Rows:
        sizes = fit_sizes(size, self.sizes, self.least_samples)
        count = len(sizes) or fit_micro_batches(size, self.micro_batches, self.least_samples)
        place = self.inputs.replica, self.inputs.replicas
        return tuple(replica_bounds(size, m, count, *place, sizes, self.inputs.shares) for m in range(count))

    def __str__(self) -> str:
        samples = format_count(self.batch_size, "sample")
        lines = [f"of a batch of {samples} this rank needs"]
        for name, rows in self.rows().items():
            lines.append(f"  argument {name}: {describe_rows(rows, self.batch_size)}")
        return "\n".join(lines)


def find_inputs(graph: Graph) -> RankInputs:
    """Return what a rank uses of the batch; ``graph``: the rank's (see ``passes.project``)."""
    users = graph.consumers()
    uses = []
    for name in graph.inputs:
        if name != BATCH_SIZE_NAME:
            ops = {node.op for node in users[name]} - {OpName.BATCH_SIZE}
            uses.append(Use.NONE if not ops else Use.OWN if ops == {OpName.SLICE} else Use.ALL)
    calls = nodes_of(graph, OpName.FORWARD)
    stages = tuple(sorted({call.integer("stage") for call in calls}))
    replicas = max((node.integer("replicas") for node in nodes_of(graph, OpName.SLICE)), default=1)
    return RankInputs(tuple(uses), stages, calls[0].integer("replica"), replicas, replica_shares(graph, stages[0]))


def whole_batch(tensors: int) -> RankInputs:
    """Return the use by a process that runs all stages: all rows of each of the ``tensors`` tensors of the batch."""
    return RankInputs((Use.ALL,) * tensors)


def count_rows(rows: Iterable[tuple[int, int]]) -> int:
    """Return how many rows the ranges have together."""
    return sum(end - first for first, end in rows)


def describe_rows(rows: Sequence[tuple[int, int]], batch_size: int) -> str:
    """Return ranges as text, those that follow each other as one: "none", "all 8 rows", "rows 0-1, 4-5"."""
    joined: list[tuple[int, int]] = []
    for first, end in rows:
        if joined and joined[-1][1] == first:
            first = joined.pop()[0]
        if first < end:
            joined.append((first, end))
    if not joined:
        return "none"
    if joined == [(0, batch_size)]:
        return "its row" if batch_size == 1 else f"all {batch_size} rows"
    return "rows " + ", ".join(f"{first}-{end - 1}" if end - first > 1 else f"{first}" for first, end in joined)
