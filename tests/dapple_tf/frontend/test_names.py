"""Names of tensors and variables."""

from __future__ import annotations

from dapple_tf.frontend.names import tensor_name, unique_name
from dapple_tf.graph_passes.ir.graph import Value


def test_a_tensor_is_named_by_its_node_and_index() -> None:
    assert [tensor_name(Value("a/b")), tensor_name(Value("split", 2))] == ["a/b:0", "split:2"]


def test_a_name_that_is_taken_gets_the_first_free_number() -> None:
    assert unique_name("w", set()) == "w"
    assert unique_name("w", {"w", "w_1", "w_3"}) == "w_2"
