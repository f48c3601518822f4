"""Build the TensorFlow functions of the branches of conditions in a stage function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dapple_tf.backend.stage_function import build_function
from dapple_tf.graph_passes.ir.conditions import BRANCHES, fold_conditions
from dapple_tf.graph_passes.ir.graph import Function, FunctionRef, Node


@dataclass(frozen=True)
class BuiltBranches:
    """A stage function whose conditions are ``If`` nodes that name functions of TensorFlow.

    ``library``: these functions, serialised, by name. ``functions``: the same as ConcreteFunctions; TensorFlow removes
    a function when its ConcreteFunction is garbage.
    """

    function: Function
    library: Mapping[str, bytes]
    functions: tuple[Any, ...]


def build_branches(
    function: Function, constants: Mapping[str, tf.Tensor], library: Mapping[str, bytes]
) -> BuiltBranches:
    """Return ``function`` with its open conditions closed, and the functions of their branches, built.

    ``constants`` and ``library``: see ``build_function``.
    """
    graph = fold_conditions(function.graph)
    defined: dict[str, bytes] = {}
    built: list[Any] = []
    names: dict[str, str] = {}
    for branch in graph.functions:
        inner = build_branches(branch, constants, library)
        concrete = build_function(inner.function, constants, {**library, **inner.library}, whole=False)
        definition = concrete.function_def
        names[branch.name] = definition.signature.name
        defined |= {**inner.library, definition.signature.name: definition.SerializeToString(deterministic=True)}
        built += [*inner.functions, concrete]
    nodes = tuple(_with_names(node, names) for node in graph.nodes)
    closed = dataclasses.replace(function, graph=graph.replace(nodes=nodes, functions=()))
    return BuiltBranches(closed, defined, tuple(built))


def _with_names(node: Node, names: Mapping[str, str]) -> Node:
    """Return the node, an ``If`` with TensorFlow's names of its branches if they are among ``names``."""
    if node.op != "If":
        return node
    references = [node.attr(key) for key in BRANCHES]
    found = [names.get(ref.name) if isinstance(ref, FunctionRef) else None for ref in references]
    if None in found:
        return node
    return node.with_attrs(**{key: FunctionRef(str(name)) for key, name in zip(BRANCHES, found, strict=True)})
