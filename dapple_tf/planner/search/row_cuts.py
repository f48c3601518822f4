"""Whole rows of a micro-batch for each device of a stage, so that forward and backward of its slowest device end early.

The search of planner "best" does the same in C++ (``Evaluator::share_by_kind``); a test holds the steps equal.
"""

from __future__ import annotations

import numpy as np

from dapple_tf.simulator.arrays import Floats, Integers

_SAME = 1e-9  # relative; what differs by less differs by rounding
_HALVINGS = 50


def cut_rows(rows: int, speeds: Floats) -> Integers:
    """Return whole numbers of rows, in all ``rows``, so that the largest of rows / speed is least.

    Of equally good cuts, rows go to the earlier devices. A device may get none; one of speed 0 gets none.
    """
    counts: Integers = (rows * speeds / speeds.sum() * (1 + _SAME)).astype(np.int64)
    for _ in range(rows - counts.sum()):
        chosen, least = 0, np.inf
        for i, speed in enumerate(speeds):
            if speed > 0 and (counts[i] + 1) / speed < least * (1 - _SAME):
                chosen, least = i, (counts[i] + 1) / speed
        counts[chosen] += 1
    return counts


def share_by_kind(rows: int, kinds: Integers, forward: Floats, backward: Floats) -> Integers:
    """Return the rows of each device, in all ``rows``, so that the longest forward and backward together are least.

    ``kinds``: of each device. ``forward``, ``backward`` [kinds]: seconds of the same samples on each kind, to which
    rows are in proportion. Both may be longest on different devices. Of equally good cuts it is that of ``cut_rows``.
    """
    both = forward + backward
    found = cut_rows(rows, np.array([1 / both[k] if both[k] > 0 else 1.0 for k in kinds]))
    counts, proportional = np.zeros(len(forward), np.int64), True
    for k in kinds:
        counts[k] += 1
        if forward[k] <= 0 or backward[k] <= 0:
            return found
        ratio = forward[kinds[0]] * backward[k]
        proportional = proportional and abs(forward[k] * backward[kinds[0]] - ratio) <= _SAME * ratio
    if proportional:
        return found
    least = _longest(found, kinds, forward) + _longest(found, kinds, backward)
    caps, better = np.zeros(len(forward), np.int64), False
    shortest_forward = _longest(cut_rows(rows, 1 / forward[kinds]), kinds, forward)
    shortest_backward = _longest(cut_rows(rows, 1 / backward[kinds]), kinds, backward)
    for p in range(len(forward)):  # the kind whose forward is the longest
        if counts[p] == 0:
            continue
        count = int(np.ceil(shortest_forward / forward[p] * (1 - _SAME)))
        while count * forward[p] + shortest_backward < least * (1 - _SAME):
            most = (count * forward[p] / forward * (1 + _SAME)).astype(np.int64)
            low, high = shortest_backward * (1 - _SAME), least * (1 - _SAME) - count * forward[p]
            if _room(high, most, counts, backward) >= rows:
                for _ in range(_HALVINGS):
                    middle = (low + high) / 2
                    if _room(middle, most, counts, backward) >= rows:
                        high = middle
                    else:
                        low = middle
                least, better = count * forward[p] + high, True
                caps = np.minimum(most, (high / backward * (1 + _SAME)).astype(np.int64))
            count += 1
    return cut_rows(rows, caps[kinds].astype(np.float64)) if better else found


def _longest(rows: Integers, kinds: Integers, seconds: Floats) -> float:
    """Return the seconds of the device that takes longest for its rows."""
    longest = 0.0
    for count, kind in zip(rows, kinds, strict=True):
        longest = max(longest, count * seconds[kind])
    return longest


def _room(backward_seconds: float, most: Integers, counts: Integers, backward: Floats) -> int:
    """Return the rows that all devices take within these seconds, each at most the ``most`` of its kind."""
    rows = 0
    for k, count in enumerate(counts):
        if count:
            rows += count * min(most[k], int(backward_seconds / backward[k] * (1 + _SAME)))
    return rows
