"""Counter layouts of TensorFlow's stateless random ops, by op and dtype.

The Philox generator makes four 32-bit numbers from each value of a 128-bit counter. So the elements of a draw form
blocks, and a draw can start at any block, with a larger counter; how much larger depends on the distribution. Source:
``FillPhiloxRandomTask`` in TensorFlow's ``random_op_cpu.h`` (``random_op_gpu.h`` counts in the same way), and
``random_distributions.h``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from dapple_tf.frontend.names import name_set
from dapple_tf.graph_passes.ir.graph import DType

_KEYED = ("shape", "key", "counter", "alg")
_SEEDED = ("shape", "seed")

DRAW_INPUTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "StatelessRandomUniformV2": _KEYED,
        "StatelessRandomNormalV2": _KEYED,
        "StatelessTruncatedNormalV2": _KEYED,
        "StatelessRandomUniformFullIntV2": _KEYED,
        "StatelessRandomUniformIntV2": (*_KEYED, "minval", "maxval"),
        "StatelessRandomGammaV3": (*_KEYED, "alpha"),
        "StatelessRandomUniform": _SEEDED,
        "StatelessRandomNormal": _SEEDED,
        "StatelessTruncatedNormal": _SEEDED,
        "StatelessRandomUniformFullInt": _SEEDED,
        "StatelessRandomUniformInt": (*_SEEDED, "minval", "maxval"),
        "StatelessRandomGammaV2": (*_SEEDED, "alpha"),
        "StatelessRandomBinomial": (*_SEEDED, "counts", "probs"),
        "StatelessRandomPoisson": (*_SEEDED, "lam"),
        "StatelessParameterizedTruncatedNormal": (*_SEEDED, "means", "stddevs", "minvals", "maxvals"),
        "StatelessMultinomial": ("logits", "num_samples", "seed"),
    }
)
"""The names of the inputs of each stateless random op whose elements are drawn independently of each other."""

ROW_PARAMETERS = frozenset({"alpha", "counts", "probs", "lam", "means", "stddevs", "minvals", "maxvals", "logits"})
"""The inputs that may have a value for each row of the draw."""


@dataclass(frozen=True)
class CounterLayout:
    """Block i of a flattened draw, of ``block`` elements, uses the counter's values from i * ``counters`` on."""

    block: int
    counters: int


_ONE_SAMPLE_AN_ELEMENT = name_set(
    "StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2"
)


def counter_layout(op: str, dtype: DType) -> CounterLayout | None:
    """Return how the draw ``op`` of elements of type ``dtype`` uses the counter; None where it has no counter input.

    ``StatelessRandomGammaV3`` has this layout where ``alpha`` is one number, or has one for each element.
    """
    block = 2 if dtype.size == 8 else 4
    if op in _ONE_SAMPLE_AN_ELEMENT:
        return CounterLayout(block, 1)
    if op == "StatelessTruncatedNormalV2":
        return CounterLayout(block, 64 * block)  # 256 numbers of 32 bits are reserved for each element
    if op == "StatelessRandomGammaV3":
        return CounterLayout(1, 256)
    return None


SEED_TO_COUNTER = "StatelessRandomGetKeyCounter"
"""The op that makes a counter from a seed, for the draws of Keras. The low half of the counter is 0."""


def advance_zero_low(counter: Any, count: Any) -> Any:
    """Return ``counter`` plus the int64 ``count``, in fewer ops than ``advance``; its low half must be 0."""
    return counter + tf.cast(count * tf.constant([1, 0], tf.int64), tf.uint64)


def advance(counter: Any, count: Any) -> Any:
    """Return ``counter`` plus the int64 ``count``. ``counter``: two uint64, the low half of its 128 bits first."""
    added = tf.cast(count, tf.uint64)
    low, high = tf.unstack(counter, 2)
    total = low + added
    carry = tf.cast(total < added, tf.uint64)
    return tf.stack([total, high + carry])
