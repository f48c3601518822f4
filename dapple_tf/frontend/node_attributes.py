"""Convert the attributes of ops between TensorFlow's protocol buffers and the IR."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from dapple_tf.graph_passes.ir.graph import Attr, DType, FunctionRef, Opaque, Shape


def read_attribute(value: attr_value_pb2.AttrValue) -> Attr:
    """Return the IR's form of an attribute; ``Opaque`` where the IR has none (constant tensors, for example)."""
    match value.WhichOneof("value"):
        case "s":
            return bytes(value.s)
        case "i":
            return int(value.i)
        case "f":
            return float(value.f)
        case "b":
            return bool(value.b)
        case "type":
            return _read_dtype(value.type)
        case "shape":
            return _read_shape(value.shape)
        case "func" if not value.func.attr:
            return FunctionRef(value.func.name)
        case "list":
            return _read_list(value)
    return Opaque(value.SerializeToString(deterministic=True))


def write_attribute(proto: attr_value_pb2.AttrValue, value: Attr) -> None:
    """Write an attribute into ``proto``. Raises TypeError for a value that TensorFlow's attributes cannot hold."""
    match value:
        case bool():
            proto.b = value
        case int():
            proto.i = value
        case float():
            proto.f = value
        case bytes():
            proto.s = value
        case DType():
            proto.type = dtype_number(value)
        case Shape():
            proto.shape.SetInParent()  # a scalar's shape is present and empty
            _write_shape(proto.shape, value)
        case FunctionRef(name):
            proto.func.name = name
        case Opaque(data):
            proto.MergeFromString(data)
        case tuple():
            _write_list(proto, value)
        case _:
            raise TypeError(f"{value!r} cannot be an attribute of a TensorFlow op")


def called_functions(node: Any) -> list[str]:
    """Return the names of the functions in the attributes of a NodeDef."""
    names = [value.func.name for value in node.attr.values() if value.func.name]
    return names + [function.name for value in node.attr.values() for function in value.list.func]


def dtype_number(dtype: DType) -> int:
    """Return TensorFlow's enum number of a dtype."""
    return int(tf.as_dtype(dtype.name).as_datatype_enum)


def _read_list(value: attr_value_pb2.AttrValue) -> Attr:
    items = value.list
    for name, read in _LIST_READERS.items():
        if field := getattr(items, name):
            return tuple(read(item) for item in field)
    return () if items.ByteSize() == 0 else Opaque(value.SerializeToString(deterministic=True))


def _read_dtype(number: int) -> DType:
    return DType(tf.dtypes.as_dtype(number).name)


def _read_shape(proto: Any) -> Shape:
    if proto.unknown_rank:
        return Shape(None)
    return Shape(tuple(None if dim.size < 0 else int(dim.size) for dim in proto.dim))


_LIST_READERS: Mapping[str, Callable[[Any], Attr]] = {
    "s": bytes,
    "i": int,
    "f": float,
    "b": bool,
    "type": _read_dtype,
    "shape": _read_shape,
}


def _write_list(proto: attr_value_pb2.AttrValue, items: tuple[Attr, ...]) -> None:
    proto.list.SetInParent()
    for item in items:
        match item:
            case bool():
                proto.list.b.append(item)
            case int():
                proto.list.i.append(item)
            case float():
                proto.list.f.append(item)
            case bytes():
                proto.list.s.append(item)
            case DType():
                proto.list.type.append(dtype_number(item))
            case Shape():
                _write_shape(proto.list.shape.add(), item)
            case _:
                raise TypeError(f"{item!r} cannot be an item of a list attribute of a TensorFlow op")


def _write_shape(proto: Any, shape: Shape) -> None:
    if shape.dims is None:
        proto.unknown_rank = True
        return
    for dim in shape.dims:
        proto.dim.add(size=-1 if dim is None else dim)
