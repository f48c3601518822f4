from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import tensorflow as tf

from dapple_tf.errors import DappleWarning
from dapple_tf.frontend.batch import Nesting
from dapple_tf.runtime.compile_step import MOST_TRACES, Key, TracedShapes


@dataclasses.dataclass(eq=False)
class Trace:
    """A traced model, of which the cache reads only the signature and which lengths it serves."""

    signature: tuple[tf.TensorSpec, ...]
    serves: Any = None

    @property
    def interface(self) -> Trace:
        return self


def key(*lengths: int | None, nesting: str = "()", dtype: Any = tf.int32) -> Key:
    return Nesting(nesting, ()), (tf.TensorSpec([None, *lengths], dtype),)


def traced(key: Key) -> Any:
    """Return a trace that was made for batches of this key."""
    return Trace(key[1])


def filled(keys: list[Key]) -> tuple[TracedShapes, list[Any], list[Any]]:
    """Return the cache after traces for these keys, the traces, and those that were dropped."""
    dropped: list[Any] = []
    cache = TracedShapes()
    traces: list[Any] = [traced(each) for each in keys]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each, trace in zip(keys, traces, strict=True):
            dropped.append(cache.add(each, trace))
    return cache, traces, dropped


def test_a_trace_serves_the_shapes_for_which_it_was_made() -> None:
    cache, (first, second), _ = filled([key(3), key(4)])
    assert (cache.find(key(3)), cache.find(key(4)), cache.find(key(5))) == (first, second, None)


def test_a_trace_with_unknown_lengths_serves_all_of_its_rank_dtype_and_nesting() -> None:
    cache, (trace,), _ = filled([key(None)])
    assert cache.find(key(3)) is cache.find(key(9)) is trace
    others = [key(), key(3, 3), key(3, dtype=tf.int64), key(3, nesting="[]"), (key()[0], key(3)[1] * 2)]
    assert [cache.find(other) for other in others] == [None] * 5


def test_a_trace_with_unknown_lengths_says_itself_which_it_serves() -> None:
    cache = TracedShapes()
    cache.add(key(3), Trace(key(None)[1], lambda specs: specs[0].shape[1] < 5))
    assert cache.find(key(4)) is not None
    assert cache.find(key(5)) is None
    assert cache.alike(key(5)) == [key(None)[1]]


def test_the_trace_that_was_used_longest_ago_is_dropped() -> None:
    keys = [key(n) for n in range(1, MOST_TRACES + 1)]
    cache, traces, dropped = filled(keys)
    assert cache.find(keys[0]) is traces[0]
    assert dropped == [None] * MOST_TRACES
    further = traced(key(99))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cache.add(key(99), further) is traces[1]
    assert len(cache.values()) == MOST_TRACES
    assert cache.find(keys[1]) is None
    assert cache.find(keys[0]) is traces[0]


def test_many_lengths_are_warned_of_once() -> None:
    cache = TracedShapes()
    cache.add(key(1), traced(key(1)))
    cache.add(key(2), traced(key(2)))
    cache.add(key(2, dtype=tf.int64), traced(key(2, dtype=tf.int64)))
    with pytest.warns(
        DappleWarning, match=r"built for 3 inner shapes .*\(None, 3\).*reduce_retracing=True, .*has None"
    ):
        cache.add(key(3), traced(key(3)))
    cache.add(key(4), traced(key(4)))  # a warning would be an error


def test_many_python_values_are_warned_of_once() -> None:
    cache = TracedShapes()
    for rate in (0.1, 0.2):
        cache.add(key(1, nesting=f"(., {rate})"), traced(key(1)))
    with pytest.warns(DappleWarning, match=r"3 sets of Python values .* the last one \(., 0.3\), .*tensor"):
        cache.add(key(1, nesting="(., 0.3)"), traced(key(1)))
    cache.add(key(1, nesting="(., 0.4)"), traced(key(1)))  # a warning would be an error
