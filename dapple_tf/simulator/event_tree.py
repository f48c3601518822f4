"""The next of several events: a tree of minima in an array, for compiled code.

Each flow that is under way has a place, and at most one event to come. ``events[1]`` is the time of the next event,
node i has children 2 i and 2 i + 1, and the second half of the array has the leaves, one for each place. Infinity is no
event.
"""

from __future__ import annotations

import numpy as np

from dapple_tf.simulator.compiled import Floats, compiled, compiled_part


@compiled_part
def make_events(places: int) -> Floats:
    """Return a tree without events."""
    leaves = 1
    while leaves < places:
        leaves *= 2
    return np.full(2 * leaves, np.inf)


@compiled
def set_event(events: Floats, place: int, time: float) -> None:
    """Let the next event of the flow at a place be at ``time``."""
    node = place + len(events) // 2
    events[node] = time
    while node > 1:
        node //= 2
        least = min(events[2 * node], events[2 * node + 1])
        if events[node] == least:
            break
        events[node] = least


@compiled_part
def first_place(events: Floats) -> int:
    """Return the first place of those whose event is the next one."""
    node, leaves = 1, len(events) // 2
    while node < leaves:
        node *= 2
        if events[node] > events[node + 1]:
            node += 1
    return node - leaves
