"""Trace the update of a Keras optimizer, once, for all variables."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from dapple_tf import internals, variable_values
from dapple_tf.errors import PlanError
from dapple_tf.frontend.conditions import open_conditions
from dapple_tf.frontend.names import unique_name
from dapple_tf.frontend.read_graph import read_graph
from dapple_tf.frontend.trace_inputs import TraceInputs
from dapple_tf.graph_passes.ir.graph import Attr, Graph, Node, Role, attributes


@dataclass(frozen=True)
class TracedUpdate:
    """An optimizer's update as a graph.

    ``graph``: takes one ``arg`` per trained variable, its gradient, whose port has the variable's name (for a sparse
    gradient two: slices and indices). ``variables``: the model's and the optimizer's, by the name of their node.
    ``constants``: by the name of their ``capture`` node. ``trained``: the variables as the optimizer knows them (Keras
    variables, where there are any). ``global_clipnorm``: the optimizer's option, which ``graph`` does not apply; None
    where it has none, or applies it itself. ``func_graph``: the TensorFlow graph that ``graph`` was read from.
    ``counter``: the name of the step counter, ``optimizer.iterations``; "" where the update does not use it. ``own``:
    the names of the optimizer's own variables among ``variables``.
    """

    graph: Graph
    variables: dict[str, tf.Variable]
    constants: dict[str, tf.Tensor]
    trained: tuple[Any, ...]
    global_clipnorm: float | None
    func_graph: Any
    counter: str
    own: frozenset[str]


@dataclass(frozen=True)
class _Argument:
    """A tensor that the traced update takes: a dense gradient of ``variable``, or its slices or indices (``role``)."""

    variable: str
    role: Role
    spec: tf.TensorSpec


def trace_update(
    optimizer: Any,
    names: Sequence[str],
    variables: Mapping[str, tf.Variable],
    sparse: Mapping[str, str] = MappingProxyType({}),
) -> TracedUpdate:
    """Trace ``optimizer.apply_gradients``, as Keras calls it, for the ``variables`` called ``names``.

    The optimizer is built if it is not. It gets the variables in the order for which it was built, and None as the
    gradient of others that it was built for. ``sparse``: the variables whose gradients are IndexedSlices, with the
    dtype of the indices. Clipping by the global norm is left out, since the pipelined graph clips over all stages;
    Keras clips dense tensors, so the update takes dense gradients then. The update keeps the clipping if a method of
    the optimizer changes the gradients before Keras clips them. Conditions that write variables are opened (see
    ``conditions``). Raises PlanError for an object that is not a Keras optimizer, and for an optimizer that was built
    for other variables, or cannot take these gradients.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise PlanError(f"optimizer is a {type(optimizer).__name__}, not a keras.optimizers.Optimizer")
    if internals.has_strategy(optimizer):
        raise PlanError(
            f"{type(optimizer).__name__} was made under a tf.distribute strategy: make it without, and give "
            "replicas=[...] for data parallelism"
        )
    trained = tuple(internals.keras_variables([variables[name] for name in names]))
    build_optimizer(optimizer, trained)
    places = {id(internals.as_tf_variable(variable)): i for i, variable in enumerate(trained)}
    known = [v for v in internals.built_for(optimizer) if v.trainable or id(internals.as_tf_variable(v)) in places]
    given = [v for v in known if id(internals.as_tf_variable(v)) not in places]
    given = known if len(known) - len(given) == len(trained) else [*trained, *given]

    with _without_global_clip(optimizer) as clip:
        arguments = _arguments(names, variables, {} if clip else sparse)

        def update(*tensors: Any) -> None:
            gradients = _pack(arguments, tensors, variables)
            found = [places.get(id(internals.as_tf_variable(variable))) for variable in given]
            with tf.name_scope("optimizer"):  # so that no op has the name of a variable
                optimizer.apply_gradients(
                    zip([None if i is None else gradients[names[i]] for i in found], given, strict=True)
                )

        with _errors_of_update(optimizer, sparse):
            specs = [argument.spec for argument in arguments]
            func_graph = tf.function(update, autograph=False).get_concrete_function(*specs).graph
    inputs = _read_inputs(func_graph, optimizer, arguments, variables)
    graph = open_conditions(read_graph(func_graph, inputs.nodes, "optimizer"), func_graph)
    steps = getattr(optimizer.iterations, "value", None)  # a tensor where gradients are accumulated over steps
    counter = next((name for name, v in inputs.variables.items() if v is steps), "")
    handles = {id(variable.value.handle) for variable in optimizer.variables}
    own = frozenset(name for name, variable in inputs.variables.items() if id(variable.handle) in handles)
    return TracedUpdate(graph, inputs.variables, inputs.constants, trained, clip, func_graph, counter, own)


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Build the optimizer where it is not built, as its first update of all ``variables`` does in Keras.

    A class of the user's may build it for some of them, in ``apply_gradients`` or ``apply``: the update is traced for
    that, and not run. Raises PlanError where it cannot be traced.
    """
    build_before_update(optimizer, variables)
    if optimizer.built:
        return
    with tf.init_scope():

        def update(*gradients: Any) -> None:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        with _errors_of_update(optimizer, {}):
            specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
            tf.function(update, autograph=False).get_concrete_function(*specs)


def build_before_update(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Build an optimizer for ``variables`` as its first update does; return whether it was built."""
    names = ("apply_gradients", "apply")
    own = [name for name in names if internals.overrides(optimizer, keras.optimizers.Optimizer, name)]
    if optimizer.built or not all(internals.is_of_keras(getattr(optimizer, name)) for name in own):
        return False
    # The optimizer's name is part of the paths of its variables.
    name_scope = keras.name_scope(optimizer.name, caller=optimizer)
    with variable_values.outside_of_functions(), name_scope, variable_values.deferring_variables():
        optimizer.build(list(variables))
    optimizer.built = True
    return True


@contextlib.contextmanager
def _errors_of_update(optimizer: Any, sparse: Mapping[str, str]) -> Iterator[None]:
    """Raise PlanError in place of the errors of an update that cannot be traced, and silence a warning of Keras.

    It is about gradients that are None; a step warns of these itself. ``sparse``: see ``trace_update``.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Gradients do not exist")
            yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise PlanError(
            f"{type(optimizer).__name__} cannot update these variables: {error}{_hint(optimizer, sparse)}"
        ) from error


def _arguments(
    names: Sequence[str], variables: Mapping[str, tf.Variable], sparse: Mapping[str, str]
) -> tuple[_Argument, ...]:
    """Return what the update takes: one tensor for a dense gradient, two for a sparse one."""
    found: list[_Argument] = []
    for name in names:
        shape, dtype = variables[name].shape, variables[name].dtype
        if name in sparse:
            found.append(_Argument(name, "slices", tf.TensorSpec([None, *shape[1:]], dtype)))
            found.append(_Argument(name, "indices", tf.TensorSpec([None], sparse[name])))
        else:
            found.append(_Argument(name, "gradient", tf.TensorSpec(shape, dtype)))
    return tuple(found)


def _pack(
    arguments: Sequence[_Argument], tensors: Sequence[Any], variables: Mapping[str, tf.Variable]
) -> dict[str, Any]:
    """Return the gradient of each variable: a tensor, or IndexedSlices of the shape that TensorFlow gives them."""
    found: dict[str, Any] = {}
    for argument, tensor in zip(arguments, tensors, strict=True):
        if argument.role == "indices":
            shape = tf.constant(variables[argument.variable].shape.as_list(), tf.int32)
            found[argument.variable] = tf.IndexedSlices(found[argument.variable], tensor, shape)
        else:
            found[argument.variable] = tensor
    return found


def _read_inputs(
    func_graph: Any, optimizer: Any, arguments: Sequence[_Argument], variables: Mapping[str, tf.Variable]
) -> TraceInputs:
    """Return the trace's inputs: gradients, trained variables, the optimizer's own variables, and constants."""
    found = TraceInputs(variables=dict(variables))
    for i, (argument, tensor) in enumerate(zip(arguments, func_graph.inputs, strict=False)):
        role: dict[str, Attr] = {} if argument.role == "gradient" else {"role": argument.role}
        attrs = attributes({"port": argument.variable, **role})
        found.nodes[tensor.op.name] = Node(f"gradient/{i}", "arg", attrs=attrs)
    of_model = {id(variable.handle): name for name, variable in variables.items()}
    others = [*func_graph.variables, *(variable.value for variable in optimizer.variables)]
    by_handle = {id(variable.handle): variable for variable in others}
    for outside, placeholder in func_graph.captures:
        if id(outside) in of_model:
            node = Node(of_model[id(outside)], "variable")
        elif id(outside) in by_handle:
            variable = by_handle[id(outside)]
            node = Node(unique_name(internals.variable_name(variable), found.variables), "variable")
            found.variables[node.name] = variable
        else:
            node = Node(f"optimizer/capture/{len(found.constants)}", "capture")
            found.constants[node.name] = outside
        found.nodes[placeholder.op.name] = node
    return found


@contextlib.contextmanager
def _without_global_clip(optimizer: Any) -> Iterator[float | None]:
    """Unset the optimizer's ``global_clipnorm`` in the block, which gets its value.

    It stays, and None is given, where the optimizer clips something else than the gradients that it gets: their mean
    over several steps, what is left after it has divided them by the scale of the loss, or what a method of the user's
    class makes of them.
    """
    own = [
        name for name in internals.BEFORE_CLIPPING if internals.overrides(optimizer, keras.optimizers.Optimizer, name)
    ]
    if own or optimizer.gradient_accumulation_steps or optimizer.loss_scale_factor is not None:
        yield None
        return
    clip = optimizer.global_clipnorm
    optimizer.global_clipnorm = None
    try:
        yield float(clip) if clip else None
    finally:
        optimizer.global_clipnorm = clip


def _hint(optimizer: Any, sparse: Mapping[str, str]) -> str:
    """Return what to do about an update that cannot be traced, where its sparse gradients may be the reason."""
    if not sparse:
        return ""
    return (
        f". The gradients of {', '.join(sorted(sparse))} are sparse, which Keras's {type(optimizer).__name__} may not "
        'take with these options: give sparse_gradients="dense", or leave the options out'
    )
