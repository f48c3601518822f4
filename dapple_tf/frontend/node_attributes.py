"""Convert the attributes of ops between TensorFlow's protocol buffers and the IR."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from dapple_tf.graph_passes.ir.graph import Attr, DType, FunctionRef, Opaque, Shape


def read_attribute(value: attr_value_pb2.AttrValue) -> Attr:
    """Return the IR's form of an attribute; ``Opaque`` where the IR has none (constant tensors, for example)."""
    kind = value.WhichOneof("value")
    if kind in _READERS:
        return _READERS[kind](getattr(value, kind))
    if kind == "func" and not value.func.attr:
        return FunctionRef(value.func.name)
    if kind == "list":
        for name, read in _READERS.items():
            if items := getattr(value.list, name):
                return tuple(map(read, items))
        if value.list.ByteSize() == 0:
            return ()
    return Opaque(value.SerializeToString(deterministic=True))


def write_attribute(proto: attr_value_pb2.AttrValue, value: Attr) -> None:
    """Write an attribute into ``proto``. Raises TypeError for a value that TensorFlow's attributes cannot hold."""
    match value:
        case Shape():
            proto.shape.SetInParent()  # a scalar's shape is present and empty
            _write_shape(proto.shape, value)
        case FunctionRef(name):
            proto.func.name = name
        case Opaque(data):
            proto.MergeFromString(data)
        case tuple():
            _write_list(proto, value)
        case _ if field := _field_of(value):
            setattr(proto, *field)
        case _:
            raise TypeError(f"{value!r} cannot be an attribute of a TensorFlow op")


def called_functions(node: Any) -> list[str]:
    """Return the names of the functions in the attributes of a NodeDef."""
    names = [value.func.name for value in node.attr.values() if value.func.name]
    return names + [function.name for value in node.attr.values() for function in value.list.func]


def dtype_number(dtype: DType) -> int:
    """Return TensorFlow's enum number of a dtype."""
    return int(tf.as_dtype(dtype.name).as_datatype_enum)


def _read_dtype(number: int) -> DType:
    return DType(tf.dtypes.as_dtype(number).name)


def _read_shape(proto: Any) -> Shape:
    if proto.unknown_rank:
        return Shape(None)
    return Shape(tuple(None if dim.size < 0 else int(dim.size) for dim in proto.dim))


# By the field of the protocol buffer, of an attribute or of a list.
_READERS: Mapping[str, Callable[[Any], Attr]] = {
    "s": bytes,
    "i": int,
    "f": float,
    "b": bool,
    "type": _read_dtype,
    "shape": _read_shape,
}


def _field_of(value: Attr) -> tuple[str, Any] | None:
    """Return the field of a protocol buffer for a value that is one number or text, and what it holds; else None."""
    match value:
        case bool():
            return "b", value
        case int():
            return "i", value
        case float():
            return "f", value
        case bytes():
            return "s", value
        case DType():
            return "type", dtype_number(value)
    return None


def _write_list(proto: attr_value_pb2.AttrValue, items: tuple[Attr, ...]) -> None:
    proto.list.SetInParent()
    for item in items:
        if isinstance(item, Shape):
            _write_shape(proto.list.shape.add(), item)
        elif field := _field_of(item):
            getattr(proto.list, field[0]).append(field[1])
        else:
            raise TypeError(f"{item!r} cannot be an item of a list attribute of a TensorFlow op")


def _write_shape(proto: Any, shape: Shape) -> None:
    if shape.dims is None:
        proto.unknown_rank = True
        return
    for dim in shape.dims:
        proto.dim.add(size=-1 if dim is None else dim)
