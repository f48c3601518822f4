"""Hash the ranks' graphs, without the numbers that TensorFlow adds to names, so that processes can compare them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2

from dapple_tf.frontend.write_graph import needed_library, write_graph
from dapple_tf.graph_passes.ir.graph import Function, Graph
from dapple_tf.graph_passes.ir.text import print_graph

# TensorFlow numbers the functions that a process traces: optimizer_cond_true_1234, __forward_body_77_rewritten_8.
_NUMBER = re.compile(r"_\d+(?=_|$)")


def digest_graphs(graphs: Sequence[Graph], library: Mapping[str, bytes]) -> str:
    """Return a digest of the ranks' graphs, their stage functions, and the functions of ``library`` that they call."""
    digest = hashlib.sha256()
    functions: dict[str, Function] = {}
    for graph in graphs:
        digest.update(print_graph(graph, functions=False).encode())
        functions |= graph.function_by_name
    bodies: dict[str, bytes] = {}
    for name in sorted(functions):
        graph = functions[name].graph
        definition = write_graph(graph)
        for node in definition.node:
            _remove_numbers(node)
        digest.update(f"{name} {functions[name].inputs} {functions[name].outputs} {graph.outputs}".encode())
        digest.update(definition.SerializeToString(deterministic=True))
        bodies |= dict(needed_library(graph, library))
    for body in sorted(map(_canonical, bodies.values())):
        digest.update(body)
    return digest.hexdigest()


def digest_tensors(tensors: Mapping[str, Any]) -> str:
    """Return a digest of tensors or arrays: names, dtypes, shapes and values; resources and variants have no value."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        for part in tf.nest.flatten(tensors[name], expand_composites=True):
            tensor = tf.convert_to_tensor(part)
            digest.update(f"{_NUMBER.sub('', name)} {tensor.dtype.name} {tensor.shape}".encode())
            if tensor.dtype not in (tf.resource, tf.variant):
                value = tensor.numpy()
                # An array of strings contains their addresses, which differ from rank to rank.
                digest.update(repr(value.tolist()).encode() if value.dtype == object else value.tobytes())
    return digest.hexdigest()


def _canonical(body: bytes) -> bytes:
    """Return the function without numbered names: its arguments, nodes and results are named by position."""
    function = function_pb2.FunctionDef.FromString(body)
    function.attr.clear()  # the attributes contain the numbered names of the forward and backward functions
    function.signature.name = _NUMBER.sub("", function.signature.name)
    names = {argument.name: f"argument{i}" for i, argument in enumerate(function.signature.input_arg)}
    names |= {node.name: f"node{i}" for i, node in enumerate(function.node_def)}
    results = [(result.name, function.ret[result.name]) for result in function.signature.output_arg]
    control_ends = [function.control_ret[name] for name in function.signature.control_output]
    for map_of_names in (function.ret, function.control_ret):
        map_of_names.clear()
    for i, (argument, (_, value)) in enumerate(zip(function.signature.output_arg, results, strict=True)):
        argument.name = f"result{i}"
        function.ret[argument.name] = _rename(value, names)
    del function.signature.control_output[:]
    for i, node in enumerate(sorted(names.get(end, end) for end in control_ends)):
        function.control_ret[f"end{i}"] = node
    for argument in function.signature.input_arg:
        argument.name = names[argument.name]
    for node in function.node_def:
        node.name = names[node.name]
        node.input[:] = [_rename(source, names) for source in node.input]
        _remove_numbers(node)
    return bytes(function.SerializeToString(deterministic=True))


def _rename(source: str, names: Mapping[str, str]) -> str:
    """Return an input of a node (``x``, ``node:out:0`` or ``^node``) under its new name."""
    control, rest = source.startswith("^"), source.removeprefix("^")
    name, colon, place = rest.partition(":")
    return "^" * control + names.get(name, name) + colon + place


def _remove_numbers(node: Any) -> None:
    node.ClearField("experimental_debug_info")
    node.attr.pop("_gradient_op_type", None)
    for value in node.attr.values():
        for called in [value.func] * bool(value.func.name) + list(value.list.func):
            called.name = _NUMBER.sub("", called.name)
