"""The traced loss of a step, read into the IR, and what a training step says of its phases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.after_gradients import AfterGradients
from dapple_tf.frontend.batch_norms import BatchNormCall
from dapple_tf.frontend.dependence.result import BatchDependence
from dapple_tf.frontend.names import tensor_name
from dapple_tf.frontend.phases import HandOver
from dapple_tf.frontend.read_graph import read_value
from dapple_tf.frontend.rows import ROWS_NAME
from dapple_tf.frontend.trace_inputs import small_constants
from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node, Value

Serves = Callable[[tuple[tf.TensorSpec, ...]], bool]
"""Whether a trace may run batches whose flattened tensors have these specs, with all inner lengths known."""


@dataclass(frozen=True)
class TrainingStep:
    """A function of a batch that trains: it takes gradients with tf.GradientTape and changes variables itself.

    ``certain``: let TensorFlow compute all gradients during the trace, so that it is certain which there are.
    ``rowless``: the numbers of the calls of ``tape.gradient`` that need no rows of the batch, and stay part of the
    trace (see ``tape_calls``). ``phase``: the number of the phase to capture, of a step of several phases;
    ``hand_over``: the variables that the phases share. ``joined``: whether one phase may have several targets (see
    ``phases.join_targets``).
    """

    function: Callable[..., Any]
    certain: bool = False
    rowless: frozenset[int] = frozenset()
    joined: bool = True
    phase: int | None = None
    hand_over: HandOver | None = None


class UnexpectedGradientsError(Exception):
    """Raised if a training step has other gradients than predicted: it must be traced again, with ``certain``."""


class RowlessTargetsError(Exception):
    """Raised if some gradients of a training step need no rows: it must be traced again, with these as ``rowless``."""

    def __init__(self, calls: frozenset[int]) -> None:
        super().__init__(f"the gradients of the calls {sorted(calls)} need no rows of the batch")
        self.calls = calls


class SeveralPhasesError(Exception):
    """Raised where a training step has ``count`` phases, and is to be captured phase by phase.

    ``joined``: see ``TrainingStep``.
    """

    def __init__(self, count: int, *, joined: bool) -> None:
        super().__init__(f"the step has {count} phases")
        self.count = count
        self.joined = joined


@dataclass(frozen=True)
class PhaseOfStep:
    """A captured phase of a training step: its ``number`` of ``count``, and how it fits to others.

    ``trace``: of the whole step, equal for all its phases. ``taken`` and ``given``: the names of the variables through
    which values are handed over to it, and by it to later phases. ``written``: the variables that any phase changes, by
    identity.
    """

    number: int
    count: int
    trace: str
    taken: frozenset[str]
    given: frozenset[str]
    written: frozenset[int]


Traced = Callable[..., Any] | TrainingStep
"""A loss function, or a training step."""


def plain_function(function: Traced) -> Callable[..., Any]:
    """Return the user's own function."""
    return function.function if isinstance(function, TrainingStep) else function


@dataclass(frozen=True)
class Target:
    """A target whose gradients a training step takes: its ``value``, a scalar.

    Several targets are the terms of one loss, their sum. ``gradients``: by the name of a variable, the name of its
    gradient by this target (see ``names.of_target``).
    """

    value: Value
    gradients: Mapping[str, str]


@dataclass(frozen=True)
class Captured:
    """A traced loss.

    ``graph``: the op-level IR, whose outputs are the loss, then the aux tensors. ``func_graph``: the TensorFlow graph
    that it was read from, in which gradients are built. ``variables``: by the name of their node; ``trainable``: the
    names of those to train. ``constants``: tensors from outside of the function, by the name of their ``capture``
    node. ``aux``: the nesting of the aux outputs, or None. ``signature``: the specs of the flattened arguments;
    ``example``: the same trace with all inner lengths known: those of the batch that it was traced for.

    ``rows``: the placeholder of the micro-batch's first and end row and the batch size, where the trace has one; its
    node is ``ROWS_NAME``. ``dependence``: how micro-batches compute the loss, once that was found out; ``serves``: for
    which inner lengths, None where the trace knows all.

    ``batch_norms``: the calls of batch norm layers in training mode, where these were recorded; ``joined``: whether
    replicas join the statistics of such layers instead; ``dropped``: names of nodes of the trace that the graph no
    longer has.

    ``after``: of a training step, the part after the gradients, or None; ``certain``: whether its gradients are known;
    ``left_out``: names of ops of the trace that are not part of its loss; ``unrecorded``: names of nodes through which
    no gradient passes; ``several``: its targets, where there are several; ``apart``: the number of targets of the whole
    step; ``phase``: of a training step of several phases.
    """

    graph: Graph
    func_graph: Any
    variables: dict[str, tf.Variable]
    trainable: tuple[str, ...]
    constants: dict[str, tf.Tensor]
    aux: Any
    signature: tuple[tf.TensorSpec, ...]
    example: tuple[tf.TensorSpec, ...]
    rows: Any = None
    dependence: BatchDependence | None = None
    serves: Serves | None = None
    batch_norms: tuple[BatchNormCall, ...] = ()
    joined: bool = False
    dropped: frozenset[str] = frozenset()
    after: AfterGradients | None = None
    certain: bool = True
    left_out: frozenset[str] = frozenset()
    unrecorded: frozenset[str] = frozenset()
    several: tuple[Target, ...] = ()
    apart: int = 1
    phase: PhaseOfStep | None = None

    @property
    def targets(self) -> tuple[Target, ...]:
        """The targets whose gradients are computed apart: the loss, or the ``several`` of a training step."""
        return self.several or (Target(self.graph.outputs[0], {name: name for name in self.trainable}),)

    @property
    def decisions(self) -> BatchDependence:
        """The ``dependence``, after it was found out."""
        assert self.dependence is not None, "the analysis comes before what needs its decisions"
        return self.dependence

    @property
    def uncut(self) -> bool:
        """Whether it is only for steps of one micro-batch on one replica."""
        return self.dependence is not None and self.dependence.uncut

    @property
    def needs_uncut(self) -> bool:
        """Whether one micro-batch on one replica computes what one device does only if it is traced for that."""
        python = any(node.op == "EagerPyFunc" for node in self.graph.nodes)  # cut into stages, it has no gradient
        return self.uncut or python or (self.dependence is not None and not self.dependence.exactness.exact_uncut)

    @property
    def stateful(self) -> bool:
        """Whether micro-batches draw from a generator's hidden state or write variables, so that they are not equal."""
        changing = (node for node in self.graph.nodes if node.effect in (Effect.WRITE, Effect.RANDOM))
        return any(not node.has("once") and not node.has("loss_head") for node in changing)


class CapturedTensors:
    """The TensorFlow tensors from which IR values were read.

    ``handles``: the resource placeholders of variables, by name. ``inputs``: as for ``read_graph``.
    """

    def __init__(self, captured: Captured) -> None:
        self.handles: dict[str, Any] = {}
        self.inputs: dict[str, Node] = {}
        self._graph = captured.func_graph
        self._placeholders: dict[str, Any] = {}
        for name, tensor in zip(captured.graph.inputs, self._graph.inputs, strict=False):
            self._add(captured.graph.node(name), tensor)
        for name, variable in captured.variables.items():
            self.handles[name] = internals.capture_of(self._graph, variable.handle)
            self._add(captured.graph.node(name), self.handles[name])
        for name, constant in captured.constants.items():
            self._add(captured.graph.node(name), internals.capture_of(self._graph, constant))
        for name, tensor in small_constants(self._graph):
            if name in captured.graph.by_name:  # gradients may add others
                self._add(captured.graph.node(name), tensor)
        if captured.rows is not None:
            self._add(captured.graph.node(ROWS_NAME), captured.rows)

    def _add(self, node: Node, tensor: Any) -> None:
        self.inputs[tensor.op.name] = node
        self._placeholders[node.name] = tensor

    def __getitem__(self, value: Value) -> Any:
        if value.node in self._placeholders:
            return self._placeholders[value.node]
        return self._graph.get_tensor_by_name(tensor_name(value))

    def value(self, tensor: Any) -> Value:
        """Return the IR value of a tensor of the trace."""
        return read_value(tensor, self.inputs)
