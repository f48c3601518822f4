"""The next of several events: a tree of minima in an array, for compiled code.

Each flow that is under way has a leaf, numbered from 0, and at most one event to come. ``events[1]`` is the time of the
next event. Node i has children 2 i and 2 i + 1, and the second half of the array holds the leaves. Infinity stands for
no event.
"""

from __future__ import annotations

import numpy as np

from dapple_tf.simulator.compiled import Floats, compiled, compiled_part


@compiled_part
def make_events(flows: int) -> Floats:
    """Return a tree without events, for at most this number of flows."""
    leaves = 1
    while leaves < flows:
        leaves *= 2
    return np.full(2 * leaves, np.inf)


@compiled
def set_event(events: Floats, leaf: int, time: float) -> None:
    """Set the time of the next event of the flow at a leaf."""
    node = leaf + len(events) // 2
    events[node] = time
    while node > 1:
        node //= 2
        least = min(events[2 * node], events[2 * node + 1])
        if events[node] == least:
            break
        events[node] = least


@compiled_part
def earliest_leaf(events: Floats) -> int:
    """Return the leaf with the next event, the first one of several."""
    node, leaves = 1, len(events) // 2
    while node < leaves:
        node *= 2
        if events[node] > events[node + 1]:
            node += 1
    return node - leaves
