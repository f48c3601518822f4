"""Handlers of the ops that read and write variables and the replicas' copies of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from dapple_tf.backend.handler import Context, Handler, Outcome, assign_variable, read_variable
from graph_passes.ir.graph import Node
from graph_passes.ir.ops import OpName


def _read_variables(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    return [read_variable(context.bindings.variable(node, name)) for name in node.strings("variables")], []


def _refresh(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    names = node.strings("variables")
    summed = node.strings("summed") if node.has("summed") else ()
    owned = [read_variable(context.bindings.owner(name)) for name in names[len(inputs) :]]
    zeroed = [tf.zeros_like(v) if n in summed else v for n, v in zip(names[len(inputs) :], owned, strict=True)]
    values = [*inputs, *zeroed]
    copies = [context.bindings.variable(node, name) for name in names]
    return [], [assign_variable(copy, value) for copy, value in zip(copies, values, strict=True)]


def _store_version(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    names = node.strings("variables")
    values = [read_variable(context.bindings.owner(name)) for name in names]
    stored = [context.bindings.variable(node, name) for name in names]
    return [], [assign_variable(copy, value) for copy, value in zip(stored, values, strict=True)]


def _commit(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    owners = [context.bindings.owner(name) for name in node.strings("variables")]
    values = inputs or [_merge_copies(context, node, name) for name in node.strings("variables")]
    return [], [assign_variable(owner, value) for owner, value in zip(owners, values, strict=True)]


def _merge_copies(context: Context, node: Node, name: str) -> Any:
    """Return the sum of the replicas' copies where it is so marked; else their average, if they are floating-point."""
    values = [read_variable(copy) for copy in context.bindings.copies(node, name)]
    if node.has("summed") and name in node.strings("summed"):
        return tf.add_n(values)
    mean = node.integer("replicas") > 1 and len(values) > 1 and values[0].dtype.is_floating
    return tf.add_n(values) / len(values) if mean else values[0]


def _set_updating(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    return [], [assign_variable(context.bindings.updating, tf.constant(bool(node.attr("updating"))))]


def _count_update(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    name = node.string("variable")
    count = read_variable(context.bindings.owner(name))
    offset = tf.constant(node.integer("offset"), count.dtype)
    return [], [assign_variable(context.bindings.variable(node, name), count + offset)]


HANDLERS: Mapping[OpName, Handler] = MappingProxyType(
    {
        OpName.READ_VARIABLE: _read_variables,
        OpName.READ_STATE: _read_variables,
        OpName.REFRESH: _refresh,
        OpName.STORE_VERSION: _store_version,
        OpName.COMMIT: _commit,
        OpName.SET_UPDATING: _set_updating,
        OpName.COUNT_UPDATE: _count_update,
    }
)
