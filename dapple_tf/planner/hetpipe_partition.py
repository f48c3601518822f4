"""HetPipe's partition of layers over the devices of a virtual worker (Park et al., USENIX ATC 2020, section 7)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.compiled import compiled


class StageTables(NamedTuple):
    """Costs of a worker's k stages, of which each is some of N blocks, for a micro-batch.

    ``seconds`` [k, N + 1]: of the first 0 to N blocks on the stage's device. ``received_forward`` and
    ``received_backward`` [k, N + 1]: of receiving activations where the stage begins, and gradients where it ends.
    ``fixed_bytes`` and ``stash_bytes`` [N + 1]: of the first blocks. ``input_bytes`` [N + 1]: before each block.
    ``working_bytes`` [N]. ``held`` [k]: micro-batches in flight. ``memory_bytes`` [k]. ``recompute``: stages stash only
    their inputs.
    """

    seconds: Floats
    received_forward: Floats
    received_backward: Floats
    fixed_bytes: Floats
    stash_bytes: Floats
    input_bytes: Floats
    working_bytes: Floats
    held: Floats
    memory_bytes: Floats
    recompute: bool


def partition(tables: StageTables) -> tuple[float, tuple[int, ...]] | None:
    """Return the least largest time of a stage, and the k + 1 bounds of the stages in blocks; None if nothing fits.

    Every stage has at least one block. Of equal times the earlier stages have as few blocks as possible.
    """
    best, begin = _fill(tables)
    stages, blocks = len(tables.held), len(tables.working_bytes)
    if not np.isfinite(best[stages, blocks]):
        return None
    bounds = [blocks]
    for stage in range(stages, 0, -1):
        bounds.append(int(begin[stage, bounds[-1]]))
    return float(best[stages, blocks]), tuple(reversed(bounds))


@compiled
def _fill(t: StageTables) -> tuple[Floats, Integers]:
    """Return the least largest time of the first s stages with the first j blocks, and where the last begins."""
    stages, blocks = len(t.held), len(t.working_bytes)
    best = np.full((stages + 1, blocks + 1), np.inf)
    begin = np.zeros((stages + 1, blocks + 1), np.int64)
    best[0, 0] = 0.0
    for s in range(1, stages + 1):
        for j in range(s, blocks - (stages - s) + 1):
            working = 0.0
            for i in range(j - 1, s - 2, -1):
                working = max(working, t.working_bytes[i])
                stash = t.stash_bytes[j] - t.stash_bytes[i]
                held = t.held[s - 1] * (t.input_bytes[i] if t.recompute else stash)
                more = stash if t.recompute else 0.0
                if t.fixed_bytes[j] - t.fixed_bytes[i] + working + held + more > t.memory_bytes[s - 1]:
                    if t.recompute:
                        continue  # a longer stage may have smaller inputs
                    break
                seconds = t.seconds[s - 1, j] - t.seconds[s - 1, i]
                seconds += t.received_forward[s - 1, i] + t.received_backward[s - 1, j]
                largest = max(best[s - 1, i], seconds)
                if largest < best[s, j]:
                    best[s, j], begin[s, j] = largest, i
    return best, begin
