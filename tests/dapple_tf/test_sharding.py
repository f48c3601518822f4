"""Variables are shared out to replicas by their bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.sharding import share_out


def test_the_largest_variable_goes_first_each_to_the_replica_with_fewest_bytes() -> None:
    sizes = {"bias": 1, "first": 8, "second": 8, "table": 20, "third": 4}
    assert share_out(sizes, 2, {}) == {"bias": 0, "first": 1, "second": 1, "table": 0, "third": 1}


def test_a_variable_that_has_a_replica_keeps_it() -> None:
    assert share_out({"a": 4, "b": 4, "c": 4}, 2, {"c": 0, "other": 1}) == {"a": 1, "b": 0, "c": 0}


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 4))
def test_no_replica_has_more_than_an_equal_share_and_one_variable(sizes: list[int], replicas: int) -> None:
    found = share_out({str(i): size for i, size in enumerate(sizes)}, replicas, {})
    held = [sum(sizes[int(name)] for name, of in found.items() if of == replica) for replica in range(replicas)]
    assert sum(held) == sum(sizes)
    assert max(held) <= sum(sizes) / replicas + max(sizes, default=0)
