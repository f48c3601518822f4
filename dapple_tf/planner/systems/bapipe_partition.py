"""BaPipe's balanced partition over unequal accelerators (BaPipe, section 3.3).

Letters: N accelerators in a daisy chain, of which accelerator n takes T_n for a micro-batch of the whole network of L
layers; T the ideal time of a stage; a the bytes of the features that cross a cut.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.compiled import compiled

Cuts = tuple[int, ...]
"""The first layer of each stage, and the number of layers."""


class Accelerators(NamedTuple):
    """``seconds`` [N, L + 1]: prefix sums of each layer's forward and backward of a micro-batch, on each accelerator.

    ``memory`` [N]: bytes. ``fixed_bytes``, ``stash_bytes`` [L + 1]: prefix sums of what a stage has of its layers once
    (weights, gradients, slots), and of each micro-batch in flight. ``working_bytes`` [L]: of each layer, of which the
    largest counts. ``in_flight`` [N]: the micro-batches that each stage holds.
    """

    seconds: Floats
    memory: Floats
    fixed_bytes: Floats
    stash_bytes: Floats
    working_bytes: Floats
    in_flight: Integers


def ideal_seconds(whole: Floats) -> float:
    """Return T (formula 1), in seconds; ``whole`` [N]: T_n. 0 where some accelerator takes no time."""
    return float(1 / (1 / whole).sum()) if (whole > 0).all() else 0.0


def partition_by_ideal(seconds: Floats) -> Cuts:
    """Return the partition according to T: each cut where the accelerators before it have had T each, or nearly.

    ``seconds``: see ``Accelerators``. A cut is at the layer nearest to where the stage reaches T on its accelerator;
    each stage has at least one layer.
    """
    count, layers = seconds.shape[0], seconds.shape[1] - 1
    ideal = ideal_seconds(seconds[:, -1])
    cuts = [0]
    for n in range(count - 1):
        first, most = cuts[-1], layers - (count - 1 - n)
        reached = seconds[n] - seconds[n, first]
        nearest = first + 1 + int(np.argmin(np.abs(reached[first + 1 : most + 1] - ideal)))
        cuts.append(nearest)
    return (*cuts, layers)


def balance(accelerators: Accelerators, *, by_memory: bool) -> Cuts | None:
    """Return the inter-layer partition with the least slowest stage; ``by_memory``: of those that fit the memory.

    The paper iterates "to load balancing" from the partition according to T, and tunes that "finely" where memory is
    short, without saying how: here the slowest stage is the least possible, by dynamic programming over layers and
    accelerators. The partition according to T is taken if no other has a faster slowest stage. None if nothing fits.
    """
    ideal = partition_by_ideal(accelerators.seconds)
    if by_memory and not fits(accelerators, ideal):
        least, cuts = _balance(accelerators, np.inf, True)
    else:
        least, cuts = _balance(accelerators, slowest(accelerators, ideal), by_memory)
        if not np.isfinite(least):
            return ideal
    return tuple(cuts.tolist()) if np.isfinite(least) else None


def slowest(accelerators: Accelerators, cuts: Cuts) -> float:
    """Return the seconds of the slowest stage."""
    pairs = enumerate(itertools.pairwise(cuts))
    return float(max(accelerators.seconds[n, end] - accelerators.seconds[n, first] for n, (first, end) in pairs))


def fits(accelerators: Accelerators, cuts: Cuts) -> bool:
    """Return whether each stage fits the memory of its accelerator."""
    pairs = enumerate(itertools.pairwise(cuts))
    return all(
        _needed_bytes(accelerators, n, first, end, accelerators.working_bytes[first:end].max())
        <= accelerators.memory[n]
        for n, (first, end) in pairs
    )


def feature_threshold(seconds: float, bandwidth: float, latency: float) -> float:
    """Return a_th (section 3.3.3): the bytes that are sent within ``seconds``; below 0 where latency takes longer."""
    return (seconds - latency) * bandwidth


def coarse_cuts(crossing_bytes: Floats, threshold: float) -> NDArray[np.int64]:
    """Return the cuts of the coarse-grained network: those that at most a_th bytes cross.

    ``crossing_bytes`` [L - 1]: a of the cut before layers 1, 2 ..., for a micro-batch.
    """
    return np.flatnonzero(crossing_bytes <= threshold) + 1


def intra_layer_seconds(seconds: Floats) -> float:
    """Return the seconds of each stage where layers are divided between neighbours (section 3.3.2).

    Each accelerator then takes as long: the T of formula 1 for layers that are not uniform. ``seconds``: see
    ``Accelerators``. What dividing a layer adds to communication is left out.
    """
    low, high = 0.0, float(seconds[:, -1].min())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _reach(seconds, middle) >= seconds.shape[1] - 1:
            high = middle
        else:
            low = middle
    return high


_HALVINGS = 60  # to the last digits of a double


def _reach(seconds: Floats, limit: float) -> float:
    """Return how many layers, a fraction of the last one included, accelerators finish that take ``limit`` each."""
    layers = np.arange(seconds.shape[1], dtype=np.float64)
    finished = 0.0  # layers
    for row in seconds:
        until = float(np.interp(finished, layers, row)) + limit
        last = int(np.searchsorted(row, until, side="right")) - 1  # behind layers that take no time, too
        if last >= len(row) - 1:
            return float(len(row) - 1)
        finished = last + (until - row[last]) / (row[last + 1] - row[last])
    return finished


@compiled
def _needed_bytes(a: Accelerators, n: int, first: int, end: int, working: float) -> float:
    """Return the bytes that a stage needs; ``working``: the largest of its layers."""
    stash = a.stash_bytes[end] - a.stash_bytes[first]
    return float(a.fixed_bytes[end] - a.fixed_bytes[first] + a.in_flight[n] * stash + working)


@compiled
def _balance(a: Accelerators, below: float, by_memory: bool) -> tuple[float, NDArray[np.int64]]:
    """Return the least slowest stage among partitions in which it is under ``below`` (else infinite), and the cuts."""
    count, layers = a.seconds.shape[0], a.seconds.shape[1] - 1
    best = np.full((count + 1, layers + 1), np.inf)
    before = np.zeros((count + 1, layers + 1), np.int64)
    best[0, 0] = 0.0
    for n in range(count):
        for end in range(n + 1, layers - (count - 1 - n) + 1):
            working = 0.0
            for first in range(end - 1, n - 1, -1):
                own = a.seconds[n, end] - a.seconds[n, first]
                if own >= min(below, best[n + 1, end]):
                    break  # the more layers, the longer
                if by_memory:
                    working = max(working, a.working_bytes[first])
                    if _needed_bytes(a, n, first, end, working) > a.memory[n]:
                        break  # the more layers, the more bytes
                longest = max(own, best[n, first])
                if longest < best[n + 1, end]:
                    best[n + 1, end], before[n + 1, end] = longest, first
    cuts = np.zeros(count + 1, np.int64)
    cuts[count] = layers
    for n in range(count, 0, -1):
        cuts[n - 1] = before[n, cuts[n]]
    return best[count, layers], cuts
