"""Attributes of ops survive the way to the IR and back."""

from __future__ import annotations

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.core.framework import attr_value_pb2

from dapple_tf.frontend.node_attributes import read_attribute, write_attribute
from dapple_tf.graph_passes.ir.graph import Attr, DType, FunctionRef, Opaque, Shape

integers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(width=32, allow_nan=False)
dtypes = st.sampled_from(["float32", "float64", "bfloat16", "float16", "int8", "uint16", "bool", "complex64", "string",
                          "resource", "variant"]).map(DType)  # fmt: skip
shapes = st.builds(Shape, st.none() | st.lists(st.none() | st.integers(0, 9), max_size=4).map(tuple))
scalars = st.one_of(integers, floats, st.booleans(), st.binary(max_size=9), dtypes, shapes)
lists = st.one_of(*(st.lists(kind, max_size=3).map(tuple) for kind in (integers, floats, st.booleans(), st.binary(
    max_size=9), dtypes, shapes)))  # fmt: skip
functions = st.from_regex(r"[a-z]\w{0,8}", fullmatch=True).map(FunctionRef)


@given(scalars | lists | functions)
def test_an_attribute_written_and_read_is_equal(attribute: Attr) -> None:
    proto = attr_value_pb2.AttrValue()
    write_attribute(proto, attribute)
    back = read_attribute(attr_value_pb2.AttrValue.FromString(proto.SerializeToString()))
    assert back == attribute
    assert type(back) is type(attribute)


@pytest.mark.parametrize(
    "proto",
    [
        attr_value_pb2.AttrValue(tensor=tf.make_tensor_proto([1.0, 2.0])),
        attr_value_pb2.AttrValue(placeholder="T"),
        attr_value_pb2.AttrValue(
            func=attr_value_pb2.NameAttrList(name="f", attr={"T": attr_value_pb2.AttrValue(type=1)})
        ),
        attr_value_pb2.AttrValue(
            list=attr_value_pb2.AttrValue.ListValue(
                func=[attr_value_pb2.NameAttrList(name="f"), attr_value_pb2.NameAttrList(name="g")]
            )
        ),
        attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(tensor=[tf.make_tensor_proto(1)])),
        attr_value_pb2.AttrValue(),
    ],
)
def test_attributes_without_a_form_in_the_ir_are_kept_as_bytes(proto: attr_value_pb2.AttrValue) -> None:
    attribute = read_attribute(proto)
    assert isinstance(attribute, Opaque)
    back = attr_value_pb2.AttrValue()
    write_attribute(back, attribute)
    assert back == proto


def test_a_str_cannot_be_an_attribute() -> None:
    with pytest.raises(TypeError, match="'text' cannot be an attribute of a TensorFlow op"):
        write_attribute(attr_value_pb2.AttrValue(), "text")
    with pytest.raises(TypeError, match="'text' cannot be an item of a list attribute"):
        write_attribute(attr_value_pb2.AttrValue(), (1, "text"))
