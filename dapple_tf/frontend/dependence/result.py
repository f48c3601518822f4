"""The result of the analysis of a loss: what runs once a step, and how micro-batches add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dapple_tf.exactness import Exactness
from dapple_tf.frontend.dependence.kinds import Kind
from dapple_tf.frontend.row_draws import RowDraw
from dapple_tf.graph_passes.analysis.loss_head import LossHeadInput
from dapple_tf.graph_passes.ir.graph import Value
from dapple_tf.graph_passes.passes.microbatch import MergeKind


@dataclass(frozen=True)
class LengthTerm:
    """The part of a size that depends on an inner length: that of ``axis`` of the input node ``argument``.

    For each unit of the length, the size's ``scale`` and ``offset`` grow by the ``scale`` and ``offset`` given here.
    """

    argument: str
    axis: int
    scale: Any
    offset: Any


@dataclass(frozen=True)
class WholeSize:
    """A size of the whole batch, ``scale`` x batch size + ``offset`` (NumPy arrays), that replaces the micro-batch's.

    In ``BatchDependence.sizes`` it replaces an operand of ``node``, given by its position, or the node's only output
    where ``operand`` is None; in ``BatchDependence.shapes`` it is the output at position ``operand``. ``lengths``:
    terms to add where the trace leaves inner lengths unknown.
    """

    node: str
    operand: int | None
    scale: Any
    offset: Any
    lengths: tuple[LengthTerm, ...] = ()


@dataclass(frozen=True)
class LossHead:
    """The end of a loss that runs once, on the rows ``head_inputs`` of all micro-batches.

    ``nodes``: all nodes of the loss head; ``own``: those of them that micro-batches do not run too.
    """

    nodes: frozenset[str]
    own: frozenset[str]
    head_inputs: tuple[LossHeadInput, ...]


@dataclass(frozen=True)
class BatchDependence:
    """The decisions of ``find_dependence`` about a loss.

    ``loss``: whether the loss is the mean or the sum of the micro-batches'; ``mixed``: it is a sum only after its terms
    were weighted (see ``weigh``); ``grows``: it is a sum that nothing divides. ``aux``: how to merge each aux output,
    None where its type decides. ``adds``: the nodes that add a sum or a mean over samples to a variable; ``mean_adds``:
    those that add a mean, of which each micro-batch adds its share. ``once``: the nodes that run once a step on the
    whole batch. ``draws``: stateless draws that each micro-batch takes its rows from. ``sizes``:
    sizes that the loss computes with, to be replaced by the whole batch's. ``shapes``: shapes of activations (a node,
    and the position of an output) that nodes of ``once`` need. ``sliced``: results of nodes of ``once`` of which each
    micro-batch takes its rows. ``squeezed``: the axes that each Squeeze without axes
    removes from the whole batch; from a single sample it would remove more. ``exactness``: the remaining reasons why a
    step differs from one device's. ``kinds``: of all values. ``loss_head``: the end of the loss that runs once, on the
    rows of all micro-batches, or None. ``partials``: the nodes of ``once`` whose values on disjoint rows can be
    combined, and the operation that does it (see ``graph_passes.passes.combine_statistics``). ``uncut``: the decisions
    hold only where one micro-batch on one replica of each stage is the whole batch: nothing is rewritten.
    ``captured_lists``: the TensorLists that the custom gradient of a node captures, which cannot leave their device.
    """

    loss: Literal["mean", "sum"]
    grows: bool
    aux: tuple[MergeKind | None, ...]
    once: frozenset[str]
    mixed: bool = False
    adds: frozenset[str] = frozenset()
    draws: tuple[RowDraw, ...] = ()
    sizes: tuple[WholeSize, ...] = ()
    shapes: tuple[WholeSize, ...] = ()
    sliced: tuple[Value, ...] = ()
    squeezed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    exactness: Exactness = field(default_factory=Exactness)
    kinds: Mapping[Value, Kind] = field(default_factory=dict, repr=False)
    loss_head: LossHead | None = None
    partials: Mapping[str, str] = field(default_factory=dict)
    uncut: bool = False
    mean_adds: frozenset[str] = frozenset()
    captured_lists: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
