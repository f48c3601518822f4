"""Names of tensors, variables and ops."""

from __future__ import annotations

from collections.abc import Container

from dapple_tf.graph_passes.ir.graph import Value


def tensor_name(value: Value) -> str:
    """Return the name of a value's tensor in TensorFlow: ``node:index``."""
    return f"{value.node}:{value.index}"


def unique_name(name: str, taken: Container[str]) -> str:
    """Return ``name``, or the first of ``name_1``, ``name_2`` ... that is not ``taken``."""
    candidate, count = name, 0
    while candidate in taken:
        count += 1
        candidate = f"{name}_{count}"
    return candidate


def name_set(text: str) -> frozenset[str]:
    """Return the names in ``text``, where they are separated by spaces."""
    return frozenset(text.split())
