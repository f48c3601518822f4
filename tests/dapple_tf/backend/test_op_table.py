"""Each op of the op table has a handler, and each handler is that of an op."""

from __future__ import annotations

from dapple_tf.backend.operations import HANDLERS
from graph_passes.ir.ops import OPS, OpName


def test_each_op_but_the_inputs_has_a_handler_and_each_handler_an_op() -> None:
    assert set(HANDLERS) == set(map(OpName, OPS)) - {OpName.INPUT}  # the tensors of the batch are there already
