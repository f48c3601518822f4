"""The only place that reaches into TensorFlow's and Keras's internals.

Each function says what it relies on; ``tests/dapple_tf/test_internals.py`` fails loudly when that moves.
"""

from __future__ import annotations

import contextlib
import gc
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import func_graph, op_def_registry
from tensorflow.python.ops import gradients_util

NO_INLINE = "_noinline"  # keeps a function's calls whole (an allowed ``experimental_attributes`` key)
CALL_OPS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
NO_AUTOMATIC_CONTROL = "_disable_acd"  # only the edges we make order a function's ops


def clone_function(function: Any) -> Any:
    """A new tf.function of the same python function and options, sharing no trace (``Function._clone``)."""
    return function._clone(None)


def is_tf_function(function: Any) -> bool:
    """Whether ``function`` is a tf.function (they share no public class)."""
    return hasattr(function, "get_concrete_function") and hasattr(function, "python_function")


def input_signature(function: Any) -> Any:
    """The signature a tf.function was declared with, or None."""
    return function.input_signature


@contextlib.contextmanager
def record_layers(on_call: Callable[[keras.Layer, bool], None]) -> Iterator[None]:
    """While open, ``on_call(layer, True)`` runs before and ``on_call(layer, False)`` after each Keras layer's call.

    Keras names its scopes with a counter that cannot be told from a layer's own number, so the calls
    themselves are watched (``keras.Layer.__call__`` is replaced, and restored).
    """
    original = keras.Layer.__call__

    def call(self: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        on_call(self, True)
        try:
            return original(self, *args, **kwargs)
        finally:
            on_call(self, False)

    keras.Layer.__call__ = call
    try:
        yield
    finally:
        keras.Layer.__call__ = original


def move_variables(moves: Sequence[tuple[tf.Variable, str]]) -> None:
    """Move variables to other devices in place; whoever holds the tf.Variable, or traced it, sees the new home.

    ``moves`` pairs each variable with its new device.
    """
    handles = []
    for variable, device in moves:
        with tf.init_scope(), tf.device(device):
            new = tf.Variable(variable.read_value(), trainable=variable.trainable, name=variable.name.split(":")[0])
        handles.append((variable, new._handle))
    _replace_handles(handles)


def release_variables(variables: Sequence[tf.Variable], advice: str) -> None:
    """Free the variables' memory; to read one is an error (FailedPreconditionError), which quotes the ``advice``.

    Functions traced before see the same. A value assigned to a variable makes it again, until it is released again.

    The resource behind an eager variable lives as long as its handle, and cannot be destroyed. So each handle is
    replaced by one to a resource that has a name, the advice among its words, and that is not there (``VarHandleOp``
    with a ``shared_name``). That one can be destroyed (``DestroyResourceOp``), and is when its handle dies.
    """
    with tf.init_scope():
        for variable in variables:
            tf.raw_ops.DestroyResourceOp(resource=variable.handle, ignore_lookup_error=True)
        there = [variable for variable in variables if bool(variable.is_initialized())]
        _replace_handles([(variable, _make_named_handle(variable, advice)) for variable in there])


def make_releaser(variables: Sequence[tf.Variable]) -> Callable[[], None]:
    """A function that frees what has been assigned to these variables since ``release_variables``; some us for each."""
    handles = [variable.handle for variable in variables]

    def release() -> None:
        for handle in handles:
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

    traced = tf.function(release, autograph=False).get_concrete_function()
    return lambda: traced() and None


def _make_named_handle(variable: tf.Variable, advice: str) -> Any:
    old = variable._handle
    name = f"{variable.name.split(':')[0]} ({advice}) {uuid.uuid4().hex}"  # known to the whole process
    options = {"dtype": variable.dtype, "shape": variable.shape, "shared_name": name}
    with tf.device(old.device):
        handle, other = (tf.raw_ops.VarHandleOp(**options) for _ in range(2))
    for name in ("_handle_data", "_parent_trackable", "_name", "_unique_id"):  # of what tf.Variable gives its handle
        setattr(handle, name, getattr(old, name))
    weakref.finalize(handle, _destroy, other).atexit = False
    return handle


def _destroy(handle: Any) -> None:
    with context.eager_mode():  # a collection may come while a graph is made
        tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)


def _replace_handles(handles: Sequence[tuple[tf.Variable, Any]]) -> None:
    """Give each variable (its ``_handle``) another handle, and all that captured the old one.

    Every live ConcreteFunction and FuncGraph that captured the old handle is given the new one
    (``set_external_captures``, ``reset_captures``), so nothing keeps the old memory alive.
    """
    if not handles:
        return
    replaced: dict[int, tuple[Any, Any]] = {}
    for variable, new in handles:
        old = variable._handle
        replaced[id(old)] = (old, new)
        variable._handle = new

    def rebind(captured: Sequence[Any]) -> list[Any] | None:
        if not any(id(handle) in replaced for handle in captured):
            return None
        return [replaced[id(h)][1] if id(h) in replaced else h for h in captured]

    for item in _instances(concrete_function.ConcreteFunction, func_graph.FuncGraph):
        if issubclass(type(item), concrete_function.ConcreteFunction):
            if rebound := rebind(getattr(item, "_captured_inputs", ())):
                item.set_external_captures(rebound)
        elif getattr(item, "_function_captures", None) and (rebound := rebind(item.external_captures)):
            item.function_captures.reset_captures(rebound, item.internal_captures)
            len(item.captures)  # reading them drops a cache that holds the old handles


def keras_variables(variables: Sequence[tf.Variable]) -> list[Any]:
    """For each tf.Variable the live Keras variable that wraps it, if any, else itself.

    Keras variables carry the constraints that an optimizer applies.
    """
    wanted = {id(variable): i for i, variable in enumerate(variables)}
    found: list[Any] = list(variables)
    for item in _instances(keras.Variable):
        value = getattr(item, "_value", None)
        if id(value) in wanted:
            found[wanted[id(value)]] = item
    return found


def _instances(*kinds: type[Any]) -> list[Any]:
    """The live objects of these kinds, which may be half made in another thread.

    Found by ``gc.get_referrers`` of the kinds, in one walk over the process's objects, and not among all objects
    (``gc.get_objects``): holding every object would break other threads that are just building a tuple. It walks
    lists that a collection would change under it (a crash), and some objects allocate when they are visited:
    collections wait.
    """
    classes: list[type[Any]] = list(kinds)
    for kind in classes:  # which grows
        classes += [derived for derived in kind.__subclasses__() if derived not in classes]
    enabled = gc.isenabled()
    gc.disable()
    try:
        return [item for item in gc.get_referrers(*classes) if issubclass(type(item), kinds)]
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def stop_gradients_at_calls(stops: Sequence[Any]) -> Iterator[None]:
    """While open, ``tf.gradients`` does not go through the function calls that made the tensors ``stops``.

    Its own ``stop_gradients`` lets calls of functions pass: it differentiates what ``_IsPartitionedCall``
    (of ``gradients_util``; replaced, and restored) says is one, whether or not it was told to stop there.
    """
    original = gradients_util._IsPartitionedCall
    stopped = {tensor.op.name for tensor in stops}
    gradients_util._IsPartitionedCall = lambda op: op.name not in stopped and original(op)
    try:
        yield
    finally:
        gradients_util._IsPartitionedCall = original


def is_stateful_op(name: str) -> bool:
    """Whether TensorFlow registers the op as stateful (``op_def_registry``)."""
    definition = op_def_registry.get(name)
    return definition is None or bool(definition.is_stateful)


def capture_of(graph: Any, tensor: Any) -> Any:
    """The placeholder by which ``graph`` (a FuncGraph) knows an outside tensor (``FuncGraph.capture``)."""
    return graph.capture(tensor)


@contextlib.contextmanager
def plain_execution() -> Iterator[None]:
    """While open, this thread calls functions without grappler's per-call specialisation of their callees.

    Specialisation gives each of the S x M calls of a stage function a body of its own to optimise and
    instantiate. The option exists for the whole process only (``tf.config.optimizer``); here it is set on
    the thread's call options (``context.function_call_options``).
    """
    options = context.context().function_call_options
    before = options.config_proto_serialized
    config = config_pb2.ConfigProto.FromString(before)
    config.graph_options.rewrite_options.function_optimization = rewriter_config_pb2.RewriterConfig.OFF
    context.context().function_call_options = context.FunctionCallOptions(
        executor_type=options.executor_type, config_proto=config
    )
    try:
        yield
    finally:
        context.context().function_call_options = options
