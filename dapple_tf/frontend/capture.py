"""Trace a tf.function or callable, and read its graph into the IR.

The function is traced anew, and the traces that the user's tf.function already has stay as they are. Axis 0 of every
argument is unknown, so that the same graph serves every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import CaptureError, DappleError, LossError
from dapple_tf.exactness import BatchNorm
from dapple_tf.frontend.additions import read_additions
from dapple_tf.frontend.batch import batch_signature, batch_size
from dapple_tf.frontend.batch_norms import BatchNormRecorder, join_moments
from dapple_tf.frontend.capture_step import error_of_step, read_step
from dapple_tf.frontend.captured import Captured, CapturedTensors, Traced, TrainingStep, plain_function
from dapple_tf.frontend.composite import taking_rows
from dapple_tf.frontend.dependence.custom_gradients import check_read_by_gradients
from dapple_tf.frontend.layer_calls import LayerRecorder
from dapple_tf.frontend.optimizer_update import build_before_update
from dapple_tf.frontend.read_graph import read_graph, read_value, skip_identities
from dapple_tf.frontend.rows import ROWS_NAME, ROWS_OP
from dapple_tf.frontend.tape_calls import TapeCalls
from dapple_tf.frontend.trace_inputs import read_inputs, variables_to_train
from dapple_tf.graph_passes.analysis.layers import written_variables
from dapple_tf.graph_passes.ir.graph import Node


def capture(
    loss_fn: Traced,
    batch: Sequence[Any],
    *,
    batch_norm: BatchNorm = "micro-batch",
    trains: bool = True,
    signature: Sequence[tf.TensorSpec] | None = None,
    sized: bool = False,
    inlined: bool = False,
) -> Captured:
    """Trace ``loss_fn(*batch)`` and read the graph.

    ``batch_norm``: for "deferred", record the calls of batch norm layers in training mode, with what their statistics
    are made of; for "sync", let replicas join these. Without ``trains`` the function is only to run forward: every
    variable that it does not write counts as trainable, so that all that is computed from it stays in the
    micro-batches. ``signature``: of the batch's flattened tensors; by default only axis 0 is unknown. ``sized``: trace
    the function for the size of ``batch`` where it cannot be traced for an unknown one. ``inlined``: trace the
    tf.functions that it calls as parts of it; a training step that takes gradients in such a function is always traced
    so.

    For a training step the result has the graph of its loss. The outputs of this graph are the loss and the values that
    the part after the gradients takes.

    Raises CaptureError when the trace fails for an unknown batch size or the function has nothing to train, and
    LossError when the loss is not a floating-point scalar.
    """
    example = batch_signature(batch)
    specs = example if signature is None else tuple(signature)
    calls = TapeCalls(certain=loss_fn.certain, rowless=loss_fn.rowless) if isinstance(loss_fn, TrainingStep) else None
    user = taking_rows(plain_function(loss_fn), batch)
    function = internals.clone_function(user) if internals.is_tf_function(user) else tf.function(user)
    if not sized:
        _check_signature(function)
    name, norms = _function_name(user), BatchNormRecorder()
    moments: dict[str, internals.Moments] = {"deferred": norms, "sync": join_moments}
    with (
        internals.replace_moments(moments[batch_norm]) if batch_norm in moments else nullcontext(),
        internals.listen_to_tapes(calls) if calls is not None else nullcontext(),
        _building_optimizers() if calls is not None else nullcontext(()) as built,
        internals.inline_functions() if inlined else nullcontext(),
    ):
        try:
            concrete, recorder, specs = _trace(function, name, batch, specs, sized=sized)
        except _OptimizerBuilt:
            concrete = None
        except Exception as error:  # the user's code and AutoGraph raise any type; a training step's gets its line
            if calls is None:
                raise
            if not built and (inlined or not calls.nested):
                raise calls.refused or error_of_step(name, error) from error
            concrete, inlined = None, inlined or not built
    if concrete is None or built:  # also where the user's code caught the end of the trace
        return capture(
            loss_fn, batch, batch_norm=batch_norm, trains=trains, signature=signature, sized=sized, inlined=inlined
        )
    if calls is None:
        captured = _read_loss(concrete, recorder, specs, example, name, user, trains=trains)
    else:
        assert isinstance(loss_fn, TrainingStep), "only for such there are calls"
        captured = read_step(concrete, recorder, specs, example, name, calls.calls, loss_fn)
    return replace(captured, batch_norms=tuple(norms.calls), joined=batch_norm == "sync")


class _OptimizerBuilt(BaseException):
    """Raised to end a trace early, since an optimizer was built during it.

    It is a BaseException, because users' code often catches every Exception.
    """


@contextmanager
def _building_optimizers() -> Iterator[Sequence[Any]]:
    """In the block, build the optimizers of a training step before their first update, and raise ``_OptimizerBuilt``.

    If the first trace of a function makes variables, TensorFlow traces the function again and uses the second trace. So
    here the first trace ends at the first update of an optimizer. In two cases it must go on to its end: it has made
    other variables before, which get their values from TensorFlow only then; or the optimizer has a ``build`` of the
    user's own, whose assignments to variables would be missing in the second trace. Yields the optimizers that were
    built.
    """
    made: list[str] = []
    built: list[Any] = []

    def note(next_creator: Callable[..., tf.Variable], **settings: Any) -> tf.Variable:
        made.append(str(settings.get("name")))
        return next_creator(**settings)

    def build(optimizer: Any, variables: Sequence[Any]) -> None:
        wrapped = getattr(optimizer, "inner_optimizer", optimizer)  # a loss scale's
        builds_as_keras = all(internals.is_of_keras(each.build) for each in (optimizer, wrapped))
        if not made and builds_as_keras and build_before_update(optimizer, variables):
            built.append(optimizer)
            raise _OptimizerBuilt

    with tf.variable_creator_scope(note), internals.before_updates(build):
        yield built


def _read_loss(
    concrete: Any,
    recorder: LayerRecorder,
    specs: tuple[tf.TensorSpec, ...],
    example: tuple[tf.TensorSpec, ...],
    name: str,
    loss_fn: Callable[..., Any],
    *,
    trains: bool,
) -> Captured:
    """Return the captured loss of a trace; see ``capture`` for what it raises."""
    func_graph = concrete.graph
    outputs, aux = _loss_and_aux(concrete, name, _hint_for_model(loss_fn))
    kept = internals.kept_for_gradients(func_graph)  # first: it captures what gradients alone use of the outside
    inputs = read_inputs(func_graph, len(specs), name)
    graph = recorder.mark_layers(read_graph(func_graph, inputs.nodes, name), func_graph)
    values = tuple(read_value(tensor, inputs.nodes) for tensor in outputs)
    graph = read_additions(graph, values).replace(
        inputs=tuple(inputs.nodes[tensor.op.name].name for tensor in func_graph.inputs[: len(specs)]), outputs=values
    )
    check_read_by_gradients(kept, inputs, graph.nodes, name)
    written = {} if trains else written_variables(graph)
    trainable = (
        variables_to_train(inputs, loss_fn) if trains else [name for name in inputs.variables if name not in written]
    )
    if trains and not trainable:
        raise CaptureError(
            f"{name} uses no trainable variable, so there is nothing to train: let it call the model that is to be "
            "trained, and check that the model's weights are trainable"
        )
    return Captured(graph, func_graph, inputs.variables, tuple(trainable), inputs.constants, aux, specs, example)


def read_again(captured: Captured, loss: Any, rows: Any) -> Captured:
    """Return ``captured`` after ops were added to its trace: ``loss`` is its loss, and ``rows`` a further input."""
    tensors = CapturedTensors(captured)
    inputs = {**tensors.inputs, rows.op.name: Node(ROWS_NAME, ROWS_OP)}
    graph = read_graph(captured.func_graph, inputs, captured.graph.name, captured.left_out)
    nodes = tuple(captured.graph.by_name.get(node.name, node) for node in graph.nodes)
    outputs = (read_value(loss, inputs), *captured.graph.outputs[1:])
    graph = graph.replace(nodes=nodes, inputs=captured.graph.inputs, outputs=outputs)
    return replace(captured, graph=graph, rows=rows)


def _trace(
    function: Any, name: str, batch: Sequence[Any], specs: tuple[tf.TensorSpec, ...], *, sized: bool
) -> tuple[Any, LayerRecorder, tuple[tf.TensorSpec, ...]]:
    """Return the trace of a tf.function, the Keras layers recorded meanwhile, and the specs that it was made for.

    Raises CaptureError as ``capture`` does.
    """

    def trace(specs: Sequence[tf.TensorSpec]) -> tuple[Any, LayerRecorder]:
        recorder = LayerRecorder()
        arguments = tf.nest.pack_sequence_as(tuple(batch), list(specs))
        with internals.record_layers(recorder):
            return internals.clone_function(function).get_concrete_function(*arguments), recorder

    try:
        return *trace(specs), specs
    except DappleError:
        raise
    except (TypeError, ValueError) as error:
        known = tuple(tf.TensorSpec((batch_size(batch), *spec.shape[1:]), spec.dtype) for spec in specs)
        try:
            found = *trace(known), known
        except (TypeError, ValueError):
            hint = _hint(batch, error) or _hint_for_model(function)
            raise CaptureError(f"{name} cannot be traced: {error}{hint}") from error
        if sized:
            return found
        raise CaptureError(
            f"{name} cannot be traced with an unknown batch size on axis 0 ({specs}): {error}. Where it uses "
            "x.shape[0], let it use tf.shape(x)[0]; or use micro_batches=1 and one replica of each stage"
        ) from error


def _hint(batch: Sequence[Any], error: Exception) -> str:
    nested = len(batch) == 1 and isinstance(batch[0], tuple | list) and isinstance(error, TypeError)
    return ". The batch is one tuple: give its tensors one by one, step(*batch)" if nested else ""


def _hint_for_model(function: Any) -> str:
    """Return what to give in place of a Keras model or layer as the loss function; "" for another ``function``."""
    if not isinstance(internals.python_function_of(function), keras.Layer):
        return ""
    return (
        ". It is a Keras model, and a loss function is needed, such as lambda x, y: tf.reduce_mean((model(x) - y) ** 2)"
        "; dapple.keras.pipeline(model) takes a compiled model"
    )


def _check_signature(function: Any) -> None:
    signature = internals.input_signature(function)
    for spec in tf.nest.flatten(signature or ()):
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] is not None:
            raise CaptureError(
                f"the function's input_signature fixes axis 0 to {spec.shape[0]}; micro-batches need it to be None"
            )


def _function_name(function: Any) -> str:
    python = internals.python_function_of(function)
    name = getattr(python, "__name__", type(python).__name__)
    return "".join(c if c.isalnum() or c in "_.-" else "_" for c in str(name)).strip("_") or "loss"


def _loss_and_aux(concrete: Any, name: str, hint: str) -> tuple[list[Any], Any]:
    """Return the flattened output tensors of a trace, the loss first, and the nesting of the aux outputs.

    ``hint``: what else to say where there is no loss.
    """
    result = concrete.structured_outputs
    loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(loss, tf.TensorSpec | tf.Tensor):
        raise LossError(
            f"{name} must return a scalar loss, or (loss, aux), but returns {type(loss).__name__}; a whole training "
            f"step, which takes gradients by itself, is for dapple.train_step{hint}"
        )
    if loss.shape.rank != 0:
        raise LossError(
            f"the loss of {name} has shape {loss.shape}, not (): return its mean over the batch (tf.reduce_mean){hint}"
        )
    if not loss.dtype.is_floating:
        raise LossError(f"the loss of {name} is {loss.dtype.name}, not a float")
    tensors = [skip_identities(tensor) for tensor in concrete.graph.outputs]
    if len(tensors) != 1 + len(tf.nest.flatten(aux) if aux is not None else []):
        raise CaptureError(f"every output of {name} must be a tensor")
    return tensors, aux
