"""Shapes at a given batch size: the traced graph has an unknown batch, costs and bytes need a known one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.capture import Captured
from dapple_tf.graphdef import read_shapes, write_graph
from graph_passes.ir import Shape


def infer_shapes(captured: Captured, batch_size: int) -> dict[str, tuple[Shape, ...]]:
    """The output shapes of every node for ``batch_size`` samples, as far as TensorFlow infers them."""
    definition = write_graph(captured.graph)
    found: dict[str, tuple[Shape, ...]] = {}

    def probe(*batch: Any) -> None:
        graph = tf.compat.v1.get_default_graph()
        known = dict(zip(captured.graph.inputs, batch, strict=True))
        known |= {name: internals.capture_of(graph, v.handle) for name, v in captured.variables.items()}
        known |= {name: internals.capture_of(graph, value) for name, value in captured.constants.items()}
        used = {name for name in known if name in captured.graph.by_name}
        tf.graph_util.import_graph_def(definition, input_map={n: known[n] for n in used}, name="probe")
        found.update(read_shapes(graph, "probe/"))  # with placeholders of no shape for the inputs, which are known
        found.update({name: (Shape(tuple(tensor.shape)),) for name, tensor in known.items()})
        found.update({name: (Shape(tuple(variable.shape)),) for name, variable in captured.variables.items()})

    specs = [tf.TensorSpec((batch_size, *spec.shape[1:]), spec.dtype) for spec in captured.signature]
    tf.function(probe, autograph=False, input_signature=specs).get_concrete_function()
    return found
