"""A short word for what a rank would run: equal where ranks run the same code, whatever each has traced before."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2

from dapple_tf.graphdef import needed_library, write_graph
from graph_passes.ir import Function, Graph
from graph_passes.text import print_graph

# TensorFlow numbers the functions that a process traces: optimizer_cond_true_1234, __forward_body_77_rewritten_8.
_NUMBER = re.compile(r"_\d+(?=_|$)")


def digest_graphs(graphs: Sequence[Graph], library: Mapping[str, bytes]) -> str:
    """The digest of the ranks' graphs, their stage functions and all that these call in ``library``."""
    told = hashlib.sha256()
    functions: dict[str, Function] = {}
    for graph in graphs:
        told.update(print_graph(graph, functions=False).encode())
        functions |= graph.function_by_name
    bodies: dict[str, bytes] = {}
    for name in sorted(functions):
        graph = functions[name].graph
        definition = write_graph(graph)
        for node in definition.node:
            _forget_numbers(node)
        told.update(f"{name} {functions[name].inputs} {functions[name].outputs} {graph.outputs}".encode())
        told.update(definition.SerializeToString(deterministic=True))
        bodies |= dict(needed_library(graph, library))
    for body in sorted(map(_canonical, bodies.values())):
        told.update(body)
    return told.hexdigest()


def digest_constants(constants: Mapping[str, tf.Tensor]) -> str:
    """The digest of the tensors that the model closes over, of those that have a value to compare."""
    told = hashlib.sha256()
    for name in sorted(constants):
        constant = constants[name]
        told.update(f"{_NUMBER.sub('', name)} {constant.dtype.name} {constant.shape}".encode())
        if constant.dtype not in (tf.resource, tf.variant):
            value = constant.numpy()
            told.update(repr(value.tolist()).encode() if value.dtype == object else value.tobytes())
    return told.hexdigest()


def _canonical(body: bytes) -> bytes:
    function = function_pb2.FunctionDef.FromString(body)
    function.attr.clear()  # names its forward and backward, by number
    function.signature.name = _NUMBER.sub("", function.signature.name)
    for node in function.node_def:
        _forget_numbers(node)
    return bytes(function.SerializeToString(deterministic=True))


def _forget_numbers(node: Any) -> None:
    node.ClearField("experimental_debug_info")
    node.attr.pop("_gradient_op_type", None)
    for value in node.attr.values():
        for called in [value.func] * bool(value.func.name) + list(value.list.func):
            called.name = _NUMBER.sub("", called.name)
