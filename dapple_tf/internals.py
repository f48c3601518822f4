"""Everything that uses internals of TensorFlow and Keras.

Each function says which internals it relies on; ``tests/dapple_tf/test_internals.py`` fails when they change.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from keras.src.saving import saving_lib
from tensorflow.core.framework import function_pb2, op_def_pb2
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.eager import cancellation, context
from tensorflow.python.framework import function_def_to_graph, op_def_registry, ops, tensor_util
from tensorflow.python.ops import gradients_util, handle_data_util, resource_variable_ops
from tensorflow.python.ops.ragged import row_partition, segment_id_ops
from tensorflow.python.util import nest_util

# Keys of ``experimental_attributes``: calls of the function are not inlined; and no automatic control dependencies,
# so that only explicit control edges order the function's ops.
NO_INLINE = "_noinline"
NO_AUTOMATIC_CONTROL = "_disable_acd"

CALL_OPS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
"""Types of the ops that call a function."""
CONDITION_OPS = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
"""Types of the ops that call one of several functions; their first input says which."""
LOOP_OPS = frozenset({"While", "StatelessWhile"})
"""Types of the ops that call a function again and again."""
CALLING_OPS = CALL_OPS | CONDITION_OPS | LOOP_OPS
"""Types of all ops that call functions."""


@contextlib.contextmanager
def _replaced(owner: Any, **others: Any) -> Iterator[None]:
    """In the block, a class, a module or an object has ``others`` in place of its attributes of these names."""
    originals = {name: getattr(owner, name) for name in others}
    for name, other in others.items():
        setattr(owner, name, other)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


def tensorflow_has_started() -> bool:
    """Return whether TensorFlow has made its devices and threads in this process; does not start it.

    Relies on the eager context of the module ``context`` and its mark of being initialized.
    """
    return context._context is not None and context._context._initialized


def read_op_runs(path: str) -> list[tuple[str, float, float]]:
    """Return the runs of ops in a file of TensorFlow's profiler: ``name:type``, start and end in seconds.

    Where GPUs ran ops, only those are returned, a kernel each, by the GPUs' clocks, which the profiler has shifted to
    that of the system. Times are those of the system's clock. Relies on the message ``XSpace`` of TensorFlow's wheel,
    on the planes ``/device:GPU:0`` ..., whose kernels have the op in the statistic ``tf_op``, and ``/host:CPU``, with
    events named ``name:type``, and on the profile's start in the plane ``Task Environment``.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2  # few steps need it

    space = xplane_pb2.XSpace()
    with open(path, "rb") as stream:
        space.ParseFromString(stream.read())
    planes = {plane.name: plane for plane in space.planes}
    environment = planes["Task Environment"]
    names = environment.stat_metadata
    began = next(s.uint64_value for s in environment.stats if names[s.metadata_id].name == "profile_start_time")

    def read(plane: Any) -> Iterator[tuple[str, float, float]]:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                if plane.name != "/host:CPU":
                    kinds = {plane.stat_metadata[stat.metadata_id].name: stat for stat in event.stats}
                    name = plane.stat_metadata[kinds["tf_op"].ref_value].name if "tf_op" in kinds else ""
                if ":" in name.lstrip(":") and "::" not in name:
                    start = (began + line.timestamp_ns + event.offset_ps * 1e-3) * 1e-9
                    yield name, start, start + event.duration_ps * 1e-12

    on_gpus = [run for name, plane in planes.items() if name.startswith("/device:GPU:") for run in read(plane)]
    return on_gpus or list(read(planes["/host:CPU"]))


def clone_function(function: Any) -> Any:
    """Return a new tf.function of the same Python function and options, without traces (``Function._clone``)."""
    return function._clone(None)


def is_tf_function(function: Any) -> bool:
    """Return whether ``function`` is a tf.function (which have no public class)."""
    return hasattr(function, "get_concrete_function") and hasattr(function, "python_function")


def python_function_of(function: Any) -> Any:
    """Return the Python function of a tf.function; any other function itself."""
    return function.python_function if is_tf_function(function) else function


@contextlib.contextmanager
def inline_functions() -> Iterator[None]:
    """Let the tf.functions that this thread calls while it traces another one add their ops to that trace.

    AutoGraph converts their code where it would do so otherwise. Replaces and restores ``Function.__call__``. Relies on
    ``Function._autograph``, ``autograph.core.ag_ctx`` and ``tf.__internal__.autograph.tf_convert``.
    """
    kind, thread = type(tf.function(lambda: None)), threading.get_ident()
    original = kind.__call__

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if threading.get_ident() != thread or not tf.compat.v1.get_default_graph().building_function:
            return original(self, *args, **options)
        if not self._autograph:
            with ag_ctx.ControlStatusCtx(ag_ctx.Status.DISABLED):
                return self.python_function(*args, **options)
        converts = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
        return tf.__internal__.autograph.tf_convert(self.python_function, converts)(*args, **options)

    with _replaced(kind, __call__=tf.autograph.experimental.do_not_convert(call)):
        yield


def trace_function(function: Callable[..., Any], signature: Sequence[tf.TensorSpec], key: str) -> Any:
    """Return the ConcreteFunction of a Python function, as it stands, for these inputs; ``key``: see ``NO_INLINE``."""
    attributes = {key: True}
    traced = tf.function(function, autograph=False, input_signature=list(signature), experimental_attributes=attributes)
    return traced.get_concrete_function()


def input_signature(function: Any) -> Any:
    """Return the ``input_signature`` that a tf.function was declared with, or None."""
    return function.input_signature


def reduces_retracing(function: Any) -> bool:
    """Return whether ``function`` is a tf.function with ``reduce_retracing=True`` (``Function._reduce_retracing``)."""
    return bool(is_tf_function(function) and function._reduce_retracing)


def is_compiled_by_xla(function: Any) -> bool:
    """Return whether ``function`` is a tf.function with ``jit_compile=True`` (``Function._jit_compile``)."""
    return bool(is_tf_function(function) and function._jit_compile)


def without_xla(function: Any) -> Any:
    """Return a new tf.function like ``function`` that XLA does not compile (``Function._jit_compile``)."""
    found = clone_function(function)
    found._jit_compile = False
    return found


def find_xla_problem(function: Any, device: str) -> str | None:
    """Return why XLA cannot compile a ConcreteFunction for ``device``, or None where it can; nothing runs.

    All arguments must have known shapes; variables are captured, and on that device. The function is converted to XLA's
    own language (``Context.get_compiler_ir``, which ``tf.function.experimental_get_compiler_ir`` calls too).
    """
    arguments = function.inputs[: len(function.inputs) - len(function.captured_inputs)]
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in arguments]
    try:
        context.context().get_compiler_ir(
            device_name=device,
            platform_name=None,
            function_name=function.name,
            flat_args=specs,
            captured_inputs=function.captured_inputs,
            stage="hlo_serialized",
        )
    except (ValueError, tf.errors.OpError) as error:
        return str(error)
    return None


def constant_value(tensor: Any) -> Any:
    """Return the value (NumPy) that a tensor of a graph always has, or None where TensorFlow cannot tell it.

    Relies on ``tensor_util.try_evaluate_constant``, which knows more than ``tf.get_static_value``, but not ``ShapeN``.
    """
    if tensor.op.type == "ShapeN":
        shape = tensor.op.inputs[tensor.value_index].shape
        return np.array(shape.as_list(), tensor.dtype.as_numpy_dtype) if shape.is_fully_defined() else None
    value = tf.get_static_value(tensor)
    return tensor_util.try_evaluate_constant(tensor) if value is None else value


@contextlib.contextmanager
def record_layers(on_call: Callable[[keras.Layer, bool], None]) -> Iterator[None]:
    """Run ``on_call(layer, True)`` before and ``on_call(layer, False)`` after each Keras layer's call in the block.

    Replaces and restores ``keras.Layer.__call__``. Name scopes are not used instead, because Keras adds a counter to
    them that cannot be told from a number in a layer's own name. Each call also notes the layer's variables
    (``_trainable_variables``, ``_non_trainable_variables``) for ``keras_variables``.
    """
    original = keras.Layer.__call__

    def call(self: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        on_call(self, True)
        try:
            result = original(self, *args, **kwargs)
        finally:
            on_call(self, False)
        for wrapper in (*self._trainable_variables, *self._non_trainable_variables):
            _note_wrapper(wrapper)
        return result

    with _replaced(keras.Layer, __call__=call):
        yield


class TapeListener(Protocol):
    """The callbacks that ``listen_to_tapes`` calls for the gradient tapes of one thread."""

    def recording_changed(self, tape: tf.GradientTape, *, records: bool, restarts: bool) -> None:
        """Note that ``tape`` starts or stops recording. ``restarts``: it starts with an empty record."""

    def gradient(
        self, tape: tf.GradientTape, compute: Callable[..., Any], target: Any, sources: Any, options: dict[str, Any]
    ) -> Any:
        """Return the result of ``tape.gradient``. ``compute(target, sources, **options)`` is TensorFlow's method."""

    def jacobian(self, tape: tf.GradientTape, method: str) -> None:
        """Note that ``tape.jacobian`` or ``tape.batch_jacobian`` is about to run."""


@contextlib.contextmanager
def listen_to_tapes(listener: TapeListener) -> Iterator[None]:
    """Call ``listener`` for all that this thread does with ``tf.GradientTape`` in the block.

    Replaces and restores methods of the class. ``_push_tape`` and ``_pop_tape`` run whenever a tape starts or stops
    recording, and ``_tape`` is None when it starts with an empty record.
    """
    kind, thread = tf.GradientTape, threading.get_ident()
    names = ("_push_tape", "_pop_tape", "gradient", "jacobian", "batch_jacobian")
    originals = {name: getattr(kind, name) for name in names}

    def push(self: tf.GradientTape) -> None:
        restarts = self._tape is None
        originals["_push_tape"](self)
        if threading.get_ident() == thread:
            listener.recording_changed(self, records=True, restarts=restarts)

    def pop(self: tf.GradientTape) -> None:
        originals["_pop_tape"](self)
        if threading.get_ident() == thread:
            listener.recording_changed(self, records=False, restarts=False)

    def gradient(self: tf.GradientTape, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
        options |= dict(zip(("output_gradients", "unconnected_gradients"), args, strict=False))
        if threading.get_ident() != thread:
            return originals["gradient"](self, target, sources, **options)
        return listener.gradient(self, functools.partial(originals["gradient"], self), target, sources, options)

    def jacobian_like(method: str) -> Callable[..., Any]:
        def jacobian(self: tf.GradientTape, *args: Any, **options: Any) -> Any:
            if threading.get_ident() == thread:
                listener.jacobian(self, method)
            return originals[method](self, *args, **options)

        return jacobian

    replaced = {"_push_tape": push, "_pop_tape": pop, "gradient": gradient}
    replaced |= {name: jacobian_like(name) for name in ("jacobian", "batch_jacobian")}
    unconverted = {name: tf.autograph.experimental.do_not_convert(function) for name, function in replaced.items()}
    with _replaced(kind, **unconverted):
        yield


@contextlib.contextmanager
def before_updates(build: Callable[[Any, Sequence[Any]], None]) -> Iterator[None]:
    """Call ``build(optimizer, variables)`` before this thread lets a Keras optimizer update variables in the block.

    Replaces and restores ``apply_gradients`` and ``apply`` of the base class of optimizers, which builds them.
    """
    kind = next(kind for kind in keras.optimizers.Optimizer.__mro__ if "apply" in vars(kind))
    thread = threading.get_ident()
    apply_gradients, apply = kind.apply_gradients, kind.apply

    def before_apply_gradients(self: Any, grads_and_vars: Any) -> Any:
        pairs = list(grads_and_vars)
        if threading.get_ident() == thread and pairs:
            build(self, [variable for _, variable in pairs])
        return apply_gradients(self, pairs)

    def before_apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = None if trainable_variables is None else list(trainable_variables)
        if threading.get_ident() == thread and variables:
            build(self, variables)
        return apply(self, grads, variables)

    unconverted = tf.autograph.experimental.do_not_convert
    with _replaced(kind, apply_gradients=unconverted(before_apply_gradients), apply=unconverted(before_apply)):
        yield


def is_persistent(tape: tf.GradientTape) -> bool:
    """Return whether ``tape`` was made with ``persistent=True`` (``GradientTape._persistent``)."""
    return bool(tape._persistent)


def has_gradient(operation: Any) -> bool:
    """Return whether TensorFlow differentiates an op; LookupError where it knows no gradient and no reason for none.

    Relies on ``ops.get_gradient_function``, which knows custom gradients too. Functions that are called have one.
    """
    if operation.type in CALL_OPS | CONDITION_OPS | LOOP_OPS:
        return True
    return ops.get_gradient_function(operation) is not None


def user_place(operation: Any) -> str:
    """Return the file and line of the user's code that made an op of a graph, or "" where TensorFlow does not know it.

    Relies on ``Operation.traceback``, in which AutoGraph's lines are those of the code that it has converted.
    """
    frames = [frame for frame in operation.traceback or () if not _is_library(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def user_place_of_error(error: BaseException) -> str:
    """Return the file and line of the user's code in which an error was raised, "" where that is no file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    found = [frame for frame in frames if "__autograph_generated_file" not in frame.filename]
    return f"{found[-1].filename}:{found[-1].lineno}" if found else ""


_LIBRARIES = tuple(
    str(Path(module.__file__).parent) + "/" for module in (tf, keras) if getattr(module, "__file__", None)
)


def _is_library(file: str) -> bool:
    """Return whether a file of a stack trace is TensorFlow's, Keras's or this package's."""
    own = str(Path(__file__).parent) + "/"
    return file.startswith((own, "<", *_LIBRARIES)) or "tensorflow/python/" in file


def variables_of_handles(handles: Sequence[Any]) -> list[tf.Variable]:
    """Return the live variables that have these handles: of one that a trace only writes, TensorFlow tells no more."""
    wanted = {id(handle) for handle in handles}
    kinds = (resource_variable_ops.BaseResourceVariable,)
    return [v for v in live_instances(*kinds) if id(vars(v).get("_handle")) in wanted] if wanted else []


@contextlib.contextmanager
def replace_batch_norm(call: Callable[..., Any]) -> Iterator[None]:
    """In the block, ``call(original, layer, inputs, training=..., mask=...)`` is what Keras's batch norm computes.

    ``original`` takes the same arguments without itself. Replaces and restores ``BatchNormalization.call``.
    """
    original = keras.layers.BatchNormalization.call

    def replacement(self: keras.Layer, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return call(original, self, inputs, training=training, mask=mask)

    with _replaced(keras.layers.BatchNormalization, call=replacement):
        yield


Moments = Callable[[keras.layers.BatchNormalization, Any, Any, Callable[[], tuple[Any, Any]]], tuple[Any, Any]]
"""Takes a layer, its input (cast for computing), the mask or None, and a function that computes what the layer would.

Returns the mean and the variance, of shape [channels]; Keras squeezes those of one channel where there is a mask.
"""


@contextlib.contextmanager
def replace_moments(moments: Moments) -> Iterator[None]:
    """In the block, Keras's batch norm normalises in training mode by what ``moments`` returns, and writes it.

    Replaces and restores ``BatchNormalization._moments``.
    """
    original = keras.layers.BatchNormalization._moments

    def replacement(self: keras.layers.BatchNormalization, inputs: Any, mask: Any) -> Any:
        return moments(self, inputs, mask, lambda: original(self, inputs, mask))

    with _replaced(keras.layers.BatchNormalization, _moments=replacement):
        yield


def variable_name(variable: tf.Variable) -> str:
    """Return the name that a variable was created with, without the output index that TensorFlow appends (``:0``)."""
    return str(variable.name).split(":")[0]


def view_value(variable: tf.Variable) -> Any:
    """Return a variable's value as a NumPy array. On a CPU it is not copied, so later assignments may change the array.

    Relies on ``_numpy`` of eager tensors.
    """
    return variable.read_value()._numpy()


def as_tensor(array: Any) -> Any:
    """Return a NumPy array as a tensor on a CPU, which uses the array's memory if that is aligned.

    Do not use the array afterwards: an update of a variable may change it. ``tf.convert_to_tensor`` would always copy,
    and need memory for both copies for a moment. Relies on the constructor of ``EagerTensor``.
    """
    context.ensure_initialized()
    array = array if array.flags.writeable else array.copy()
    dtype = tf.as_dtype(array.dtype)
    return ops.EagerTensor(array, device="/device:CPU:0", dtype=dtype.as_datatype_enum)


_WRAPPER = "_dapple_keras_variable"
"""The attribute of a tf.Variable that is a weak reference to the Keras variable that was found around it."""


def keras_variables(variables: Sequence[tf.Variable]) -> list[Any]:
    """Return for each tf.Variable the live Keras variable that wraps it, or the tf.Variable itself if there is none.

    Only Keras variables have the constraints that an optimizer applies. A search walks over all objects of the process,
    so a tf.Variable keeps the Keras variable that was found. That there is none is not kept: there may be one later.
    """
    if any(_known_wrapper(variable) is None for variable in variables):
        for wrapper in live_instances(keras.Variable):
            _note_wrapper(wrapper)
    wrappers = map(_known_wrapper, variables)
    return [variable if wrapper is None else wrapper for variable, wrapper in zip(variables, wrappers, strict=True)]


def _known_wrapper(variable: tf.Variable) -> keras.Variable | None:
    """Return the Keras variable that was found around a tf.Variable, if it is live and still wraps it."""
    wrapper = getattr(variable, _WRAPPER, lambda: None)()
    return wrapper if wrapper is not None and wrapper._value is variable else None


def _note_wrapper(wrapper: keras.Variable) -> None:
    """Store a weak reference to a Keras variable on its tf.Variable, if that was made already."""
    variable = getattr(wrapper, "_value", None)
    if isinstance(variable, tf.Variable):
        setattr(variable, _WRAPPER, weakref.ref(wrapper))


def batch_norm_layers() -> list[keras.layers.BatchNormalization]:
    """Return all live batch norm layers that have their variables (``layer.built``)."""
    return [layer for layer in live_instances(keras.layers.BatchNormalization) if layer.built]


def live_instances(*kinds: type[Any]) -> list[Any]:
    """Return all live objects of these classes; another thread may still be initialising some of them.

    Calls ``gc.get_referrers`` with the classes, since each object refers to its class: one walk over the process's
    objects. ``gc.get_objects`` would hold a reference to every object, which breaks other threads that are building a
    tuple. Garbage collection is off during the walk: a collection would change the lists that are walked and crash the
    process, and visiting an object can start one. Objects frozen by ``gc.freeze`` are unfrozen first, because the walk
    leaves them out.
    """
    gc.unfreeze()
    classes: list[type[Any]] = list(kinds)
    for kind in classes:  # the loop appends to it
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
    """In the block, ``tf.gradients`` does not differentiate the function calls that computed the tensors ``stops``.

    Its own ``stop_gradients`` does not hold for calls of functions, which it recognises by
    ``gradients_util._IsPartitionedCall``: that function is replaced, and restored.
    """
    original = gradients_util._IsPartitionedCall
    stopped = {tensor.op.name for tensor in stops}
    with _replaced(gradients_util, _IsPartitionedCall=lambda op: op.name not in stopped and original(op)):
        yield


def is_op(name: str) -> bool:
    """Return whether TensorFlow has an op of this name (``op_def_registry``)."""
    return op_def_registry.get(name) is not None


def op_definition(name: str) -> Any:
    """Return the definition of an op, an ``OpDef``, or None (``op_def_registry``)."""
    return op_def_registry.get(name)


def op_names() -> list[str]:
    """Return the names of all ops of the installed TensorFlow (``TF_GetAllOpList``)."""
    listed = op_def_pb2.OpList()
    listed.ParseFromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    return [definition.name for definition in listed.op]


def is_stateful_op(name: str) -> bool:
    """Return whether TensorFlow registers the op as stateful (``op_def_registry``); True for an unknown op."""
    definition = op_def_registry.get(name)
    return definition is None or bool(definition.is_stateful)


def function_graph(graph: Any, name: str) -> Any:
    """Return the FuncGraph of a function that ops of the FuncGraph ``graph`` call (``Graph._get_function``).

    A function is read from its definition (``function_def_to_graph``) where it has no FuncGraph of its own (TensorFlow
    defines some by ``Defun``), or where its FuncGraph has changed since: the gradient of a loop adds inputs to the
    FuncGraph of its body, for another function that takes the place of this one.
    """
    function = graph._get_function(name)
    own = getattr(function, "graph", None)
    if own is not None:
        signature = function.cached_definition.signature
        if (len(own.inputs), len(own.outputs)) == (len(signature.input_arg), len(signature.output_arg)):
            return own
    with graph.as_default():
        read = function_def_to_graph.function_def_to_graph(function.definition)
    # Inputs that were added stand behind the others.
    for before, after in zip([] if own is None else own.inputs, read.inputs, strict=False):
        handle_data_util.copy_handle_data(before, after)
    return read


def placeholder_like(tensor: Any, shape: Any) -> Any:
    """Return a placeholder of this shape, which has the handle data of ``tensor`` if that is a resource or variant.

    The handle data (``handle_data_util``) hold the shapes of variables and of the elements of lists.
    """
    result = tf.compat.v1.placeholder(tensor.dtype, shape)
    if tensor.dtype in (tf.resource, tf.variant):
        handle_data_util.copy_handle_data(tensor, result)
    return result


def describe_handle(handle: Any, dtype: str) -> None:
    """Give a variable's handle, a tensor of a graph, the dtype and an unknown shape of the variable, if it has none.

    Some ops take a variable only so. Relies on ``handle_data_util``.
    """
    known = handle_data_util.get_handle_data(handle)
    if known is None or not known.is_set:
        made = handle_data_util.create_handle_data(tf.TensorShape(None), tf.as_dtype(dtype))
        handle_data_util.set_handle_data(handle, made)


def copy_op(graph: Any, op: Any, inputs: Sequence[Any]) -> Any:
    """Return a copy of ``op`` with other inputs, in the FuncGraph ``graph`` (``Graph._create_op_internal``)."""
    return graph._create_op_internal(
        op.type, list(inputs), [output.dtype for output in op.outputs], attrs=dict(op.node_def.attr), op_def=op.op_def
    )


@dataclass(frozen=True)
class TracedGradient:
    """The trace of an op's gradient: a function of the gradients of its outputs, and of ``captured`` tensors.

    ``places``: the inputs of the op for which it gives gradients, in the order of the function's outputs.
    """

    func_graph: Any
    captured: Sequence[Any]
    places: Sequence[int]


def has_library_gradient(graph: Any, name: str) -> bool:
    """Return whether a module of TensorFlow or Keras defines the gradient of an op of a FuncGraph.

    Not where that is a function with a name of its own, such as tf.sign, which anyone may have given. Looks into the
    closures of ``tf.custom_gradient``.
    """
    function = ops.get_gradient_function(graph.get_operation_by_name(name))
    for closed_over in ("tape_grad_fn", "grad_fn"):
        function = inspect.getclosurevars(function).nonlocals.get(closed_over, function)
    return "<locals>" in function.__qualname__ and str(function.__module__).startswith(("tensorflow.", "keras."))


def trace_gradient(graph: Any, name: str) -> TracedGradient:
    """Trace the gradient of the op ``name`` of the FuncGraph ``graph`` (``ops.get_gradient_function``)."""
    op = graph.get_operation_by_name(name)
    places: list[int] = []

    def gradient(*incoming: Any) -> list[Any]:
        found = ops.get_gradient_function(op)(op, *incoming)
        found = found if isinstance(found, list | tuple) else [found]
        places[:] = [i for i, result in enumerate(found) if result is not None]
        return [tf.convert_to_tensor(found[i]) for i in places]

    specs = [tf.TensorSpec(output.shape, output.dtype) for output in op.outputs]
    with graph.as_default():
        traced = tf.function(gradient, autograph=False).get_concrete_function(*specs).graph
    return TracedGradient(traced, [outer for outer, _ in traced.captures], places)


def kept_for_gradients(graph: Any, left_out: Set[str] = frozenset()) -> dict[str, list[Any]]:
    """Return the tensors of the FuncGraph ``graph`` that custom gradients of its ops use, by the name of the op.

    A custom gradient uses them without their being operands of its op; variables and tensors from outside of the graph
    are captured by it. ``left_out``: names of ops that do not count.
    """
    found = {}
    for op in graph.get_operations():
        if op.type == "IdentityN" and "_gradient_op_type" in op.node_def.attr and op.name not in left_out:
            used = trace_gradient(graph, op.name).captured
            with graph.as_default():  # in which the capture makes a constant
                found[op.name] = [t if tf.is_symbolic_tensor(t) else capture_of(graph, t) for t in used]
    return found


def run_within(concrete: Any, arguments: Sequence[Any], seconds: float) -> Any:
    """Return what a ConcreteFunction returns (``CancellationManager``), or cancel it: a loop may never end.

    Raises TimeoutError once more than ``seconds`` have passed and this process has used more than ``seconds`` of
    processor time. Time in which other processes hold this one up does not count, since it differs from rank to rank.
    A function that mostly waits is cancelled after ten times ``seconds``.
    """
    manager, ended = cancellation.CancellationManager(), threading.Event()
    begin, cpu_begin = time.monotonic(), time.process_time()

    def watch() -> None:
        while not ended.wait(seconds / 10):
            passed = time.monotonic() - begin
            if min(passed, time.process_time() - cpu_begin) > seconds or passed > 10 * seconds:
                manager.start_cancel()
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        return manager.get_cancelable_function(concrete)(*arguments)
    except tf.errors.CancelledError as error:
        raise TimeoutError(f"{concrete.name} did not end within {seconds} s") from error
    finally:
        ended.set()


@contextlib.contextmanager
def registered_functions(definitions: Sequence[bytes]) -> Iterator[None]:
    """Let functions that are made in the block call these functions (``Context.add_function_def``).

    ``definitions``: serialised FunctionDefs, whose names nothing else has.
    """
    protos = [function_pb2.FunctionDef.FromString(definition) for definition in definitions]
    for proto in protos:
        context.context().add_function_def(proto)
    try:
        yield
    finally:
        for proto in protos:
            context.context().remove_function(proto.signature.name)


def capture_of(graph: Any, tensor: Any) -> Any:
    """Return the placeholder that stands for an outside tensor in ``graph``, a FuncGraph (``FuncGraph.capture``)."""
    return graph.capture(tensor)


def replace_tensor(tensor: Any, other: Any) -> None:
    """Let every op of a trace that takes ``tensor`` take ``other`` in its place (``Operation._update_input``)."""
    for operation in tensor.consumers():
        for place, taken in enumerate(operation.inputs):
            if taken is tensor:
                operation._update_input(place, other)


@contextlib.contextmanager
def without_specialisation(*, optimise_caller: bool = True) -> Iterator[None]:
    """In the block, this thread calls functions without Grappler's specialisation of their callees for each call.

    Specialisation optimises and instantiates a separate body for each of the S x M calls of a stage function.
    Without ``optimise_caller`` Grappler does not optimise the graph of a function that the thread calls, and optimises
    each function that this one calls once, not twice.
    """
    turned_off = {"disable_meta_optimizer": True} if not optimise_caller else {}
    with _rewriter_options(function_optimization=rewriter_config_pb2.RewriterConfig.OFF, **turned_off):
        yield


@contextlib.contextmanager
def one_grappler_iteration() -> Iterator[None]:
    """In the block, Grappler makes one round, not two, over functions that this thread calls or whose calls it traces.

    The second round costs nearly as much as the first, and finds next to nothing in the graph of a stage.
    """
    with _rewriter_options(meta_optimizer_iterations=rewriter_config_pb2.RewriterConfig.ONE):
        yield


@contextlib.contextmanager
def without_grappler() -> Iterator[None]:
    """In the block, functions that this thread calls run as written: Grappler would replace ``x / 3`` by a product."""
    with _rewriter_options(disable_meta_optimizer=True):
        yield


@contextlib.contextmanager
def _rewriter_options(**changes: Any) -> Iterator[None]:
    """In the block, this thread calls functions with these fields of Grappler's ``RewriterConfig``.

    The public options are for the whole process (``tf.config.optimizer``); this sets the thread's call options
    (``context.function_call_options``).
    """
    options = context.context().function_call_options
    config = config_pb2.ConfigProto.FromString(options.config_proto_serialized)
    for name, value in changes.items():
        setattr(config.graph_options.rewrite_options, name, value)
    context.context().function_call_options = context.FunctionCallOptions(
        executor_type=options.executor_type, config_proto=config
    )
    try:
        yield
    finally:
        context.context().function_call_options = options


@dataclass(frozen=True)
class RaggedPartition:
    """The partition of a ragged tensor's values into rows.

    ``row_ids``: the number of the row of each value; ``lengths``: of each row; ``rows``: how many there are;
    ``longest``: the length to which rows are padded.
    """

    row_ids: Any
    lengths: Any
    rows: Any
    longest: Any


Partitions = dict[int, RaggedPartition]
"""Partitions of ragged tensors, by the ``id`` of their ``row_splits`` tensor."""


@contextlib.contextmanager
def use_ragged_partitions() -> Iterator[Partitions]:
    """In the block, reductions and paddings of ragged tensors use the partitions in the dictionary yielded.

    TensorFlow computes the row of each value from the row splits otherwise, which span samples
    (``segment_id_ops.row_splits_to_segment_ids``), and pads rows to the longest of those that are there
    (``RaggedTensor.to_tensor``).
    """
    known: Partitions = {}
    find_row_ids, to_tensor = segment_id_ops.row_splits_to_segment_ids, tf.RaggedTensor.to_tensor

    def known_row_ids(splits: Any, name: str | None = None, out_type: Any = None) -> Any:
        if id(splits) not in known:
            return find_row_ids(splits, name=name, out_type=out_type)
        found = known[id(splits)].row_ids
        return found if out_type is None else tf.cast(found, out_type)

    def pad(self: Any, default_value: Any = None, name: str | None = None, shape: Any = None) -> Any:
        if shape is None and id(self.row_splits) in known:
            rows = known[id(self.row_splits)]
            inner = tf.cast(tf.shape(self.flat_values)[1:], tf.int64)
            shape = tf.concat([tf.cast(tf.stack([rows.rows, rows.longest]), tf.int64), inner], 0)
        return to_tensor(self, default_value, name, shape)

    with _replaced(segment_id_ops, row_splits_to_segment_ids=known_row_ids), _replaced(tf.RaggedTensor, to_tensor=pad):
        yield known


def ragged_tensor(values: Any, partition: RaggedPartition, known: Partitions) -> tf.RaggedTensor:
    """Return a ragged tensor of ``values`` with this partition, which is added to ``known``.

    TensorFlow's public functions take a part of it and compute the rest (``RowPartition``).
    """
    lengths = tf.cast(partition.lengths, tf.int64)
    splits = tf.concat([tf.zeros([1], tf.int64), tf.cumsum(lengths)], 0)
    known[id(splits)] = partition
    rows = row_partition.RowPartition(
        row_splits=splits,
        row_lengths=lengths,
        value_rowids=partition.row_ids,
        nrows=partition.rows,
        internal=row_partition._row_partition_factory_key,
    )
    return tf.RaggedTensor(values=values, row_partition=rows, internal=True)


def map_items(function: Callable[[Any], Any], nested: Any) -> Any:
    """Return what is nested, of any type that ``tf.nest`` knows, with results of ``function`` in place of its items.

    ``tf.nest.map_structure`` maps the leaves only.
    """
    items = nest_util.yield_value(nest_util.Modality.CORE, nested)
    return nest_util.sequence_like(nested, list(map(function, items)))


def call_model(model: keras.Model, x: Any, *, training: bool) -> Any:
    """Call the model as a step of Keras does: with ``training`` where it takes it (``_call_has_training_arg``)."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def compute_loss(model: keras.Model, x: Any, y: Any, outputs: Any, sample_weight: Any, *, training: bool) -> Any:
    """Return the total loss of a compiled model, by its own ``compute_loss`` if it has one (``_compute_loss``)."""
    return model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=training)


@contextlib.contextmanager
def output_losses(model: keras.Model) -> Iterator[list[Any]]:
    """Collect in the block the loss of each output, where Keras would update a metric of its own with each.

    Those metrics (``CompileLoss._metrics``) are replaced meanwhile, and not updated. There are some only where the
    model has several losses.
    """
    found: list[Any] = []
    compiled = model._compile_loss
    if compiled is None:
        yield found
        return
    original = compiled._metrics

    class Recorder:
        def update_state(self, value: Any, sample_weight: Any = None) -> None:
            found.append(value)

    class Recorders(list[Any]):
        def __len__(self) -> int:
            return len(original)  # the first call makes the metrics

        def __iter__(self) -> Iterator[Recorder]:
            return (Recorder() for _ in original)

    with _replaced(compiled, _metrics=Recorders()):
        yield found


def make_keras_function(model: keras.Model, kind: str) -> Any:
    """Return the function of this ``kind``, test or predict, that Keras makes of the model's step.

    Keras keeps it in the attribute ``test_function`` or ``predict_function``, which stays as it is here.
    """
    name = f"{kind}_function"
    kept = getattr(model, name)
    try:
        getattr(keras.Model, f"make_{name}")(model, force=True)
        return getattr(model, name)
    finally:
        setattr(model, name, kept)


def loss_metrics(model: keras.Model) -> list[Any]:
    """Return the metrics of the losses of several outputs (``_compile_loss``), in their order."""
    return [] if model._compile_loss is None else list(model._compile_loss.metrics)


def loss_tracker(model: keras.Model) -> Any:
    """Return the metric of the total loss (``_loss_tracker``)."""
    return model._loss_tracker


def has_metrics(model: keras.Model) -> bool:
    """Return whether metrics take the outputs: compiled ones (``_compile_metrics``), or the model's own."""
    return model._compile_metrics is not None or overrides(model, keras.Model, "compute_metrics")


def overrides(item: Any, base: type[Any], name: str) -> bool:
    """Return whether the method ``name`` of an object is not that of ``base``: its class or the object has another."""
    own = vars(item).get(name)
    found = getattr(type(item), name, None) if own is None else getattr(own, "__func__", own)
    return found is not getattr(base, name, None)


BEFORE_CLIPPING = (
    "apply_gradients",
    "apply",
    "_filter_empty_gradients",
    "_overwrite_variables_directly_with_gradients",
    "_backend_apply_gradients",
    "_clip_gradients",
)
"""Methods of an optimizer that may change gradients before they are clipped, or clip them."""


def built_for(optimizer: Any) -> list[Any]:
    """Return the variables for which an optimizer was built (``_trainable_variables``), in their order."""
    return list(optimizer._trainable_variables)


def horovod_options(optimizer: Any) -> list[str]:
    """Return the options other than Horovod's defaults of an optimizer in ``hvd.DistributedOptimizer``, by name.

    Relies on its ``_agg_helper`` and ``_local_vars``, and on what the function ``_allreduce_grads`` closes over.
    """
    import horovod.tensorflow as hvd

    function = python_function_of(optimizer._allreduce_grads)
    given = inspect.getclosurevars(function).nonlocals
    found = {
        "backward_passes_per_step": optimizer._agg_helper is not None,
        "compression": given["compression"] is not hvd.Compression.none,
        "sparse_as_dense": bool(given["sparse_as_dense"]),
        "groups": given["groups"] is not None,
        "op": given["op"] != hvd.Average,
        "gradient_predivide_factor": given["prescale_factor"] != 1,
        "process_set": given["process_set"] is not hvd.global_process_set,
        "register_local_var": bool(optimizer._local_vars),
    }
    return [name for name, changed in found.items() if changed]


def as_tf_variable(variable: Any) -> Any:
    """Return the tf.Variable of a Keras variable; a tf.Variable itself."""
    return variable if isinstance(variable, tf.Variable) else variable.value


MAKING_FUNCTIONS = tuple(name for name in ("_make_function", "_autoconvert_optionals") if hasattr(keras.Model, name))
"""Methods of a model by which Keras makes the functions of a batch that ``fit`` and its like call.

The second is there from Keras 3.12 on.
"""


def is_of_keras(function: Any) -> bool:
    """Return whether Keras made a model's function of a batch, in ``make_train_function`` or its like."""
    return str(python_function_of(function).__module__).split(".")[0] == "keras"


def flatten_layers(model: Any) -> list[Any]:
    """Return the layers of a model at all depths, without the model itself (``Layer._flatten_layers``)."""
    return list(model._flatten_layers(include_self=False, recursive=True))


def has_strategy(item: Any) -> bool:
    """Return whether a model or an optimizer was made under a tf.distribute strategy.

    A model has it as ``_distribute_strategy``, or None; an optimizer as ``_distribution_strategy``, or TensorFlow's
    default one (``distribute_lib._DefaultDistributionStrategy``).
    """
    found = getattr(item, "_distribute_strategy", None) or getattr(item, "_distribution_strategy", None)
    return found is not None and not isinstance(found, distribute_lib._DefaultDistributionStrategy)


def keras_mask(tensor: Any) -> Any:
    """Return the mask that Keras keeps with a tensor (``_keras_mask``), or None."""
    return getattr(tensor, "_keras_mask", None)


def set_keras_mask(tensor: Any, mask: Any) -> None:
    """Keep a mask with a tensor, where Keras's losses and metrics find it (``_keras_mask``)."""
    tensor._keras_mask = mask


def global_seed() -> int | None:
    """Return the seed of ``tf.random.set_seed``, or None if it was not called (``context.global_seed``)."""
    seed = context.global_seed()
    return None if seed is None else int(seed)


@contextlib.contextmanager
def saving_through_files() -> Iterator[None]:
    """In the block, Keras writes the weights of a ``.keras`` file to a file beside it first, and not to memory.

    Replaces and restores ``is_memory_sufficient``, by which Keras decides it.
    """
    with _replaced(saving_lib, is_memory_sufficient=lambda model: False):
        yield


def backup_path(callback: keras.callbacks.BackupAndRestore) -> str:
    """Return the path of the weights that the callback writes (``_weights_path``)."""
    return str(callback._weights_path)


def initial_epoch(model: keras.Model) -> int | None:
    """Return the epoch at which ``fit`` is to go on, where a callback has set it (``_initial_epoch``)."""
    epoch: int | None = model._initial_epoch
    return epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Set the epoch at which ``fit`` is to go on (``_initial_epoch``)."""
    model._initial_epoch = epoch


ITERATORS_OF_AN_EPOCH = 2
"""The iterators over a data set of known size that ``fit`` makes in an epoch: a second one after the last batch."""

BACKUP_LOAD, BACKUP_SAVE = "_load_model", "_save_model"
"""Methods of ``BackupAndRestore`` that load and save a backup."""
