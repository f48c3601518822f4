"""Pseudo-random numbers for compiled code, from a state that each run of a local search has for itself (xorshift)."""

from __future__ import annotations

import numpy as np

from dapple_tf.simulator.compiled import Integers, compiled, compiled_part


@compiled
def draw(random: Integers, below: int) -> int:
    """Return a pseudo-random whole number from 0 on, below ``below``; ``random`` is the generator's state, [1]."""
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return int(np.int64((x >> np.uint64(11)) % np.uint64(below)))


@compiled_part
def draw_share(random: Integers) -> float:
    """Return a pseudo-random number from 0 to 1."""
    return draw(random, 1 << 30) / (1 << 30)
