"""Values of any size in error messages."""

from __future__ import annotations

from typing import Any

import pytest

from dapple_tf.profiler.quote import quote


@pytest.mark.parametrize("value", [None, True, 1.5, "text", [1, "a"], {"a": [1, {"b": 2}]}, 10**100])
def test_a_short_value_is_quoted_as_python_writes_it(value: Any) -> None:
    assert quote(value) == repr(value)


@pytest.mark.parametrize("value", ["x" * 10**6, 10**1000, list(range(10**5)), {str(i): i for i in range(10**5)}])
def test_of_a_long_value_a_part_is_quoted(value: Any) -> None:
    assert len(quote(value)) < 150
    assert "..." in quote(value)


def test_of_a_value_that_repeats_itself_a_part_is_quoted() -> None:
    value: list[Any] = ["x"] * 10
    for _ in range(50):
        value = [value] * 10
    assert len(quote(value)) < 5000
