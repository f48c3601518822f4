"""Change where the value of a tf.Variable is: put off making it, move it to another device, free its memory.

Relies on internals of TensorFlow's variables, as each function says; ``tests/dapple_tf/test_internals.py`` and
``test_deferred_variables.py`` fail when they change.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import resource_variable_ops

from dapple_tf import internals
from dapple_tf.errors import UsageError

# --- Deferred variables: they have a shape, a dtype and a way to make their first value, but no memory until then


class DeferredVariable(resource_variable_ops.ResourceVariable):  # type: ignore[misc]  # TensorFlow has no types
    """A variable whose first value is made when something asks for its ``handle``; it is then an ordinary variable.

    Relies on ``UninitializedVariable``, on every method of variables that reads or writes to use ``handle``, and on
    Keras's ``in_symbolic_scope``.
    """

    @property
    def handle(self) -> Any:
        """The handle of the resource, which holds a value, except inside of ``without_values``.

        Keras calls a layer of the user's in a scratch graph to learn the shape of its result: that graph never runs.
        """
        if not _without_values.get() and not in_symbolic_scope():
            make_values([self])
        return raw_handle(self)

    @property
    def _handle(self) -> Any:
        """The handle as TensorFlow's fast path of eager ops reads it, which does not use the property ``handle``."""
        self._make_value_if_read_now()
        return raw_handle(self)

    @_handle.setter
    def _handle(self, handle: Any) -> None:
        self.__dict__["_handle"] = handle

    def assign(self, value: Any, *options: Any, **named: Any) -> Any:
        """Assign a value, in place of the first one, which is not made."""
        ordinary = resource_variable_ops.ResourceVariable
        if not context.executing_eagerly():
            return ordinary.assign(self, value, *options, **named)
        with _MAKING_VALUES:
            tensor = tf.convert_to_tensor(value, self.dtype)  # reads it, which may be a deferred variable itself
            with without_values():
                result = ordinary.assign(self, tensor, *options, **named)
            _settle(self)
        return result

    def _read_variable_op(self, *options: Any, **named: Any) -> Any:
        self._make_value_if_read_now()
        return resource_variable_ops.ResourceVariable._read_variable_op(self, *options, **named)

    def sparse_read(self, *options: Any, **named: Any) -> Any:
        self._make_value_if_read_now()
        return resource_variable_ops.ResourceVariable.sparse_read(self, *options, **named)

    def gather_nd(self, *options: Any, **named: Any) -> Any:
        self._make_value_if_read_now()
        return resource_variable_ops.ResourceVariable.gather_nd(self, *options, **named)

    def _make_value_if_read_now(self) -> None:
        """Make the value if it is read now, also while a step is traced: TensorFlow reads an empty tensor otherwise."""
        if context.executing_eagerly():
            make_values([self])

    @property
    def device(self) -> str:
        """The device that the value will be on."""
        return str(raw_handle(self).device)


def raw_handle(variable: tf.Variable) -> Any:
    """Return a variable's handle (``_handle``) as it is: that of a deferred variable may hold no value."""
    return vars(variable)["_handle"]


_MAKING_VALUES = threading.RLock()
"""Held while values are made: another thread that asks for one waits, and finds it."""

_without_values: ContextVar[bool] = ContextVar("without_values", default=False)

_SMALLEST_DEFERRED = 4096  # bytes: making a smaller value costs less than putting it off
_MOST_CONSTANT_BYTES = 1024  # in the graph that makes a value; an array that the user gave is larger


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """In the block, asking for the handle of a deferred variable makes no value: for tracing and moving it.

    A variable made in the block has values of others to be made from: its first value is computed at the trace's end.
    """
    with _set_without_values(True), tf.variable_creator_scope(_create_from_values):
        yield


@contextlib.contextmanager
def _set_without_values(setting: bool) -> Iterator[None]:
    token = _without_values.set(setting)
    try:
        yield
    finally:
        _without_values.reset(token)


def _create_from_values(next_creator: Callable[..., tf.Variable], **settings: Any) -> tf.Variable:
    given = settings.get("initial_value")
    if not callable(given):
        return next_creator(**settings)

    def make() -> Any:
        with _set_without_values(False):
            return given()

    return next_creator(**settings | {"initial_value": make})


@contextlib.contextmanager
def outside_of_functions() -> Iterator[None]:
    """In the block, variables are made as outside of a tf.function, also while one is traced.

    TensorFlow traces a function again that makes variables.
    """
    with tf.init_scope(), tf.variable_creator_scope(_create_now), tf.variable_creator_scope(_create_from_values):
        yield


def _create_now(next_creator: Callable[..., tf.Variable], **settings: Any) -> tf.Variable:
    return resource_variable_ops.ResourceVariable(**settings)


@contextlib.contextmanager
def deferring_variables() -> Iterator[None]:
    """In the block, variables whose first value a function of the user's makes are deferred, if that changes no value.

    Their values are those that eager building gives: the function is traced once, and the trace is run later. Small
    values, and values that come from arrays or other tensors, are computed from the trace at once. If the function
    cannot be traced, or its trace has stateful ops, TensorFlow calls it as usual.
    """
    with tf.variable_creator_scope(_create_deferred):
        yield


def _create_deferred(next_creator: Callable[..., tf.Variable], **settings: Any) -> tf.Variable:
    given = settings.get("initial_value")
    if not callable(given) or settings.get("shape") is not None or not context.executing_eagerly():
        return next_creator(**settings)
    states = random.getstate(), np.random.get_state()
    make = _trace_value(given, settings.get("dtype"))
    if make is None:
        random.setstate(states[0])  # the value is made again, from the same numbers
        np.random.set_state(states[1])
        return next_creator(**settings | {"initial_value": lambda: _make_now(given, settings)})
    if not _is_worth_deferring(make):  # the function is not called again: it may count its calls, or keep a generator
        return next_creator(**settings | {"initial_value": lambda: _make_now(lambda: _run(make), settings)})
    (value,) = make.outputs
    names = ("trainable", "caching_device", "name", "constraint", "synchronization", "aggregation")
    variable = resource_variable_ops.UninitializedVariable(
        shape=value.shape, dtype=value.dtype, **{name: settings[name] for name in names if name in settings}
    )
    variable.__class__ = DeferredVariable
    variable._make_value = make
    return variable


def _trace_value(make: Callable[[], Any], dtype: Any) -> Any:
    """Return a function of TensorFlow that makes the value; None where it would be another one."""
    try:
        found = tf.function(lambda: tf.convert_to_tensor(make(), dtype), autograph=False).get_concrete_function()
    except Exception:  # an error of the user's function: TensorFlow calls it again, and raises it to the user
        return None
    return None if any(op.op_def.is_stateful for op in found.graph.get_operations()) else found


def _make_now(make: Callable[[], Any], settings: Mapping[str, Any]) -> Any:
    """Return the value that ``make`` makes for a variable with these settings.

    Raises UsageError where it uses a tensor that the user's function made, and kept, in the trace for another variable.
    """
    try:
        value = make()
        if not tf.is_symbolic_tensor(value):
            return value
    except (TypeError, ValueError) as error:
        if "out of scope" not in str(error):
            raise
    raise UsageError(
        f"the initialiser of variable {settings.get('name') or 'Variable'!r} keeps a tensor that it made when it was "
        "called for another variable. In dapple.scope() such a tensor has no value, since values are made later: make "
        "the tensor before the scope, keep a NumPy array, or make it anew at every call"
    )


def _is_worth_deferring(make: Any) -> bool:
    """Return whether the value that ``make`` makes is large, and is not kept in memory by ``make`` itself."""
    (value,) = make.outputs
    elements = value.shape.num_elements()
    constants = [op.get_attr("value") for op in make.graph.get_operations() if op.type == "Const"]
    kept = make.graph.captures or sum(len(c.SerializeToString()) for c in constants) > _MOST_CONSTANT_BYTES
    return elements is not None and elements * value.dtype.size >= _SMALLEST_DEFERRED and not kept


def _run(make: Any) -> Any:
    """Return the value that ``make`` makes, equal to that of eager building in every bit."""
    with internals.without_grappler():
        return make()


def is_deferred(variable: tf.Variable) -> bool:
    """Return whether the variable has no value yet, and a way to make one."""
    return isinstance(variable, DeferredVariable)


def make_values(variables: Iterable[tf.Variable]) -> None:
    """Make the values of those variables that are deferred, one after the other, each on its device."""
    for variable in variables:
        if not is_deferred(variable):
            continue
        handle = raw_handle(variable)
        with _MAKING_VALUES, tf.init_scope(), tf.device(handle.device):
            if is_deferred(variable):  # no other thread has made it
                if not tf.raw_ops.VarIsInitializedOp(resource=handle):
                    tf.raw_ops.AssignVariableOp(resource=handle, value=_first_value(variable))
                _settle(variable)


def _first_value(variable: DeferredVariable) -> Any:
    """Return the value that a deferred variable is to have: one that a checkpoint has restored in place of its first.

    Keras's optimizers restore slots while they build them, and so while a step is traced.
    """
    if tf.raw_ops.VarIsInitializedOp(resource=raw_handle(variable)):
        return tf.raw_ops.ReadVariableOp(resource=raw_handle(variable), dtype=variable.dtype)
    return _run(variable._make_value)


def _settle(variable: tf.Variable) -> None:
    """Make a deferred variable an ordinary one, once it has a value or needs none."""
    if is_deferred(variable):
        del variable._make_value
        variable.__class__ = resource_variable_ops.ResourceVariable


# --- Borrow values: of many variables without a value here, one at a time has its value while it is used


class _BorrowedVariable(DeferredVariable):
    """A variable whose value ``_borrowing`` makes when it is read, and takes away when the next one is used."""

    def assign(self, value: Any, *options: Any, **named: Any) -> Any:
        tensor = tf.convert_to_tensor(value, self.dtype)  # reads it, which may be a borrowed variable itself
        self._borrowing.use(self)
        result = super().assign(tensor, *options, **named)
        if not context.executing_eagerly():  # a trace: the value is there once the function has run
            return result
        self._borrowing.use(None)  # given back now: the caller may hold this value while it makes the next one
        return self


class _Borrowing:
    """The one variable that has a value now. ``give_back`` gets it before it loses the value."""

    def __init__(self, give_back: Callable[[tf.Variable], None]) -> None:
        self._give_back = give_back
        self._used: tf.Variable | None = None

    def lend(self, variable: tf.Variable, make: Callable[[], Any]) -> None:
        """Have the variable get what ``make`` returns whenever it is read."""

        def make_alone() -> Any:
            self.use(variable)
            return make()

        variable.__class__ = _BorrowedVariable
        variable._make_value, variable._borrowing, variable._make_again = make_alone, self, make

    def use(self, variable: tf.Variable | None) -> None:
        """Take the value away from the variable that has one, before this one gets its own."""
        used, self._used = self._used, variable
        if used is None or used is variable or is_deferred(used):
            return
        self._give_back(used)
        tf.raw_ops.DestroyResourceOp(resource=raw_handle(used), ignore_lookup_error=True)
        self.lend(used, used._make_again)


@contextlib.contextmanager
def borrowing(
    variables: Sequence[tf.Variable], make: Callable[[tf.Variable], Any], give_back: Callable[[tf.Variable], None]
) -> Iterator[None]:
    """In the block, ``variables`` that have been released can be read and assigned: one at a time is in memory.

    ``make`` returns the value of one that is read. ``give_back`` gets each that was read or assigned, before its memory
    is freed: when the next one is used, or at the end of the block. After the block all are released as before.
    """
    held = _Borrowing(give_back)
    kinds = [type(variable) for variable in variables]
    for variable in variables:
        held.lend(variable, functools.partial(make, variable))
    try:
        yield
        held.use(None)
    finally:
        for variable, kind in zip(variables, kinds, strict=True):
            if not is_deferred(variable):  # the block has failed
                tf.raw_ops.DestroyResourceOp(resource=raw_handle(variable), ignore_lookup_error=True)
            for name in ("_make_value", "_borrowing", "_make_again"):
                vars(variable).pop(name, None)
            variable.__class__ = kind


# --- Move variables, and free their memory


def move_variables(moves: Sequence[tuple[tf.Variable, str]]) -> None:
    """Move variables to other devices in place: references to a tf.Variable, and traces of it, follow.

    ``moves`` pairs each variable with its new device, on which the value of a deferred one is made.
    """
    handles = []
    with _MAKING_VALUES:
        for variable, device in moves:
            with tf.init_scope(), tf.device(device):
                value = _first_value(variable) if is_deferred(variable) else variable.read_value()
                new = tf.Variable(value, trainable=variable.trainable, name=internals.variable_name(variable))
            handles.append((variable, new._handle))
        _replace_handles(handles)
        for variable, _ in moves:
            _settle(variable)


def variable_bytes(variable: tf.Variable) -> int:
    """Return the bytes of a variable's value, which need not have been made."""
    return int(variable.shape.num_elements() or 0) * int(variable.dtype.size)


def release_variables(variables: Sequence[tf.Variable], advice: str) -> None:
    """Free the variables' memory; reading one then raises FailedPreconditionError, whose message has the ``advice``.

    The values of deferred variables are not made any more.

    The same holds in functions traced before. Assigning a value to a variable allocates it again, until the next
    release.

    The resource of an eager variable lives as long as its handle and cannot be destroyed. So each handle is replaced by
    the handle of a named resource that does not exist (``VarHandleOp`` with a ``shared_name``, which contains the
    advice). A named resource can be destroyed (``DestroyResourceOp``), and is when its handle is garbage.
    """
    with tf.init_scope(), without_values():
        for variable in variables:
            tf.raw_ops.DestroyResourceOp(resource=variable.handle, ignore_lookup_error=True)
        unnamed = [v for v in variables if is_deferred(v) or bool(v.is_initialized())]
        for variable in variables:
            _settle(variable)
        _replace_handles([(variable, _named_handle(variable, advice)) for variable in unnamed])


def make_releaser(variables: Sequence[tf.Variable]) -> Callable[[], None]:
    """Return a function that frees variables assigned since ``release_variables``, in microseconds per variable."""
    handles = [variable.handle for variable in variables]

    def release() -> None:
        for handle in handles:
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

    traced = tf.function(release, autograph=False).get_concrete_function()
    return lambda: traced() and None


def _named_handle(variable: tf.Variable, advice: str) -> Any:
    old = raw_handle(variable)
    name = (
        f"{internals.variable_name(variable)} ({advice}) {uuid.uuid4().hex}"  # shared by the whole process, so unique
    )
    options = {"dtype": variable.dtype, "shape": variable.shape, "shared_name": name}
    with tf.device(old.device):
        handle, other = (tf.raw_ops.VarHandleOp(**options) for _ in range(2))
    for name in ("_handle_data", "_parent_trackable", "_name", "_unique_id"):  # set by tf.Variable on its handle
        setattr(handle, name, getattr(old, name))
    weakref.finalize(handle, _destroy, other).atexit = False
    return handle


def _destroy(handle: Any) -> None:
    with context.eager_mode():  # garbage collection may run while a graph is under construction
        tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)


def _replace_handles(handles: Sequence[tuple[tf.Variable, Any]]) -> None:
    """Give each variable another handle (``_handle``), in every live ConcreteFunction and FuncGraph too.

    Their captures of the old handle are replaced (``set_external_captures``, ``reset_captures``), so that nothing keeps
    the old memory alive.
    """
    if not handles:
        return
    replaced: dict[int, tuple[Any, Any]] = {}
    for variable, new in handles:
        old = raw_handle(variable)
        replaced[id(old)] = (old, new)
        variable._handle = new

    def rebind(captured: Sequence[Any]) -> list[Any] | None:
        if not any(id(handle) in replaced for handle in captured):
            return None
        return [replaced[id(h)][1] if id(h) in replaced else h for h in captured]

    for item in internals.live_instances(concrete_function.ConcreteFunction, func_graph.FuncGraph):
        if issubclass(type(item), concrete_function.ConcreteFunction):
            if rebound := rebind(getattr(item, "_captured_inputs", ())):
                item.set_external_captures(rebound)
        elif getattr(item, "_function_captures", None) and (rebound := rebind(item.external_captures)):
            item.function_captures.reset_captures(rebound, item.internal_captures)
            len(item.captures)  # reading them drops a cache that holds the old handles
