"""How stateless draws use the counter: known answers of Philox, and every op and dtype started at any element."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.frontend.draw_layouts import (
    DRAW_INPUTS,
    SEED_TO_COUNTER,
    advance,
    advance_zero_low,
    counter_layout,
)
from dapple_tf.graph_passes.ir.graph import DType

LAST = 2**64 - 1
COUNTERS = ((0, 7), (LAST, 7), (LAST - 3, LAST), (LAST - 20_000, 5), (12345, 6))
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int32", "uint32", "int64", "uint64")
LAYOUTS = [
    *(("StatelessRandomUniformV2", dtype) for dtype in FLOATS),
    *(("StatelessRandomNormalV2", dtype) for dtype in FLOATS),
    *(("StatelessTruncatedNormalV2", dtype) for dtype in FLOATS),
    *(("StatelessRandomUniformFullIntV2", dtype) for dtype in INTEGERS),
    *(("StatelessRandomUniformIntV2", dtype) for dtype in ("int32", "int64")),
    *(("StatelessRandomGammaV3", dtype) for dtype in ("float16", "float32", "float64")),
]


def flat_draw(op: str, dtype: str, size: int, counter: tf.Tensor) -> bytes:
    options = {"dtype": tf.as_dtype(dtype)}
    if op == "StatelessRandomUniformIntV2":
        options = {"minval": tf.constant(-5, dtype), "maxval": tf.constant(1_000_003, dtype)}
    if op == "StatelessRandomGammaV3":
        options = {"alpha": tf.constant(0.7, dtype)}
    key = tf.constant([0x123456789ABCDEF1], tf.uint64)
    return getattr(tf.raw_ops, op)(shape=[size], key=key, counter=counter, alg=1, **options).numpy().tobytes()


def test_philox_gives_the_known_answers_of_its_authors() -> None:
    def samples(low: int, high: int, key: int) -> list[str]:
        drawn = tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[4],
            key=tf.constant([key], tf.uint64),
            counter=tf.constant([low, high], tf.uint64),
            alg=1,
            dtype=tf.uint32,
        )
        return [f"{number:08x}" for number in drawn.numpy()]

    assert samples(0, 0, 0) == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    assert samples(LAST, LAST, LAST) == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


@pytest.mark.parametrize(("op", "dtype"), LAYOUTS)
@pytest.mark.parametrize("counter", COUNTERS)
def test_a_draw_starts_at_any_block_with_an_advanced_counter(op: str, dtype: str, counter: tuple[int, int]) -> None:
    layout, size = counter_layout(op, DType(dtype)), 50_001
    assert layout is not None
    start = tf.constant(counter, tf.uint64)
    whole = flat_draw(op, dtype, size, start)
    width = len(whole) // size
    for block in (0, 1, 3, 100, 49_999 // layout.block):
        first = block * layout.block
        rest = flat_draw(op, dtype, size - first, advance(start, tf.constant(block * layout.counters, tf.int64)))
        assert rest == whole[first * width :], f"TensorFlow's {op} of {dtype} uses the counter otherwise than {layout}"


@pytest.mark.parametrize(
    ("counter", "count", "expected"),
    [
        ((0, 0), 5, (5, 0)),
        ((LAST, 0), 0, (LAST, 0)),
        ((LAST, 0), 1, (0, 1)),
        ((LAST - 1, 9), 2**40, (2**40 - 2, 10)),
        ((LAST, LAST), 1, (0, 0)),
    ],
)
def test_advancing_carries_into_the_high_half(counter: tuple[int, int], count: int, expected: tuple[int, int]) -> None:
    advanced = advance(tf.constant(counter, tf.uint64), tf.constant(count, tf.int64))
    np.testing.assert_array_equal(advanced, np.array(expected, np.uint64))


@pytest.mark.parametrize("seed", [(0, 0), (1, 2), (-1, -1), (2**31 - 1, -(2**31)), (123456789, 987654321)])
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_the_counter_of_a_seed_is_0_in_its_low_half(seed: tuple[int, int], dtype: tf.DType) -> None:
    _, counter = getattr(tf.raw_ops, SEED_TO_COUNTER)(seed=tf.constant(seed, dtype))
    assert (counter[0].numpy(), counter.shape) == (0, (2,))
    far = tf.constant(2**62 + 5, tf.int64)
    np.testing.assert_array_equal(advance_zero_low(counter, far), advance(counter, far))


def test_draws_from_a_seed_have_no_counter_to_advance() -> None:
    seeded = [op for op, inputs in DRAW_INPUTS.items() if "counter" not in inputs]
    assert len(seeded) == 10
    assert all(counter_layout(op, DType("float32")) is None for op in seeded)
