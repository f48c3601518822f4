"""PipeDream's objective on one level, for other costs of AllReduce than the printed one, and for given replicas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dapple_tf.profiler.linearise import Chain

Floats = npt.NDArray[np.float64]
# Seconds per minibatch of one stage: of its seconds of computing, its parameter bytes, B, and its replicas.
StageTime = Callable[[Floats, Floats, float, int], Floats]


def printed(compute: Floats, parameters: Floats, bandwidth: float, m: int) -> Floats:
    """Return T(i -> j, m) as printed in section 3.1."""
    return np.maximum(compute, 2 * (m - 1) * parameters / bandwidth) / m


def by_profiler(compute: Floats, parameters: Floats, bandwidth: float, m: int) -> Floats:
    """Return T with the AllReduce of the text on the profiler: (m - 1) / m of the bytes sent, and as many received."""
    return np.maximum(compute, 2 * (m - 1) / m * parameters / bandwidth) / m


def one_after_the_other(compute: Floats, parameters: Floats, bandwidth: float, m: int) -> Floats:
    """Return T with that AllReduce after computing, instead of beside it."""
    return (compute + 2 * (m - 1) / m * parameters / bandwidth) / m


@dataclass(frozen=True, eq=False)
class OneLevel:
    """All ``devices`` at one ``bandwidth``, and a chain's costs of a minibatch of ``minibatch`` samples."""

    chain: Chain
    minibatch: int
    devices: int
    bandwidth: float

    @cached_property
    def send(self) -> Floats:
        """2 a_s / B of the cut before each block but the first."""
        return 2 * self.chain.crossing_bytes * (self.minibatch / self.chain.batch_size) / self.bandwidth

    @cached_property
    def _sums(self) -> tuple[Floats, Floats]:
        """Prefix sums of the blocks' seconds of computing, and of their parameter bytes."""
        forward, backward = self.chain.block_seconds(self.minibatch)
        columns = (forward + backward, self.chain.parameter_bytes)
        compute, parameters = (np.concatenate([[0.0], np.cumsum(column)]) for column in columns)
        return compute, parameters

    def stage(self, stage_time: StageTime, end: int, m: int) -> Floats:
        """Return the seconds of the stages of blocks s to ``end`` - 1, for every s below ``end``."""
        compute, parameters = (sums[end] - sums[:end] for sums in self._sums)
        return stage_time(compute, parameters, self.bandwidth, m)

    def search(self, stage_time: StageTime) -> tuple[float, tuple[int, ...]]:
        """Return the least seconds of any pipeline on all devices, and its replicas; of ties as planner "pipedream"."""
        blocks = len(self.chain.parameter_bytes)
        best = np.full((blocks + 1, self.devices + 1), np.inf)
        chosen: dict[tuple[int, int], tuple[int, int]] = {}  # first block and replicas of the last stage
        for end, m in itertools.product(range(1, blocks + 1), range(1, self.devices + 1)):
            best[end, m], chosen[end, m] = self.stage(stage_time, end, m)[0], (0, m)
            for last in range(1, m):
                cuts = np.arange(end - 1, 0, -1)
                stages = self.stage(stage_time, end, last)[cuts]
                found = np.maximum(np.maximum(best[cuts, m - last], self.send[cuts - 1]), stages)
                if len(cuts) and found.min() < best[end, m]:
                    best[end, m], chosen[end, m] = found.min(), (int(cuts[found.argmin()]), last)
        replicas, end, left = list[int](), blocks, self.devices
        while end:
            start, last = chosen[end, left]
            replicas.insert(0, last)
            end, left = start, left - last
        return float(best[blocks, self.devices]), tuple(replicas)

    def best_cuts(self, replicas: Sequence[int], stage_time: StageTime) -> float:
        """Return the least seconds of a pipeline with these replicas; infinity for more stages than blocks."""
        return self.find_cuts(replicas, stage_time)[0]

    def find_cuts(self, replicas: Sequence[int], stage_time: StageTime) -> tuple[float, list[int]]:
        """Return the least seconds of a pipeline with these replicas, and the block that starts each later stage."""
        blocks = len(self.chain.parameter_bytes)
        best = np.full((len(replicas) + 1, blocks + 1), np.inf)
        best[0, 0] = 0.0
        starts = np.zeros(best.shape, np.int64)
        for index, m in enumerate(replicas):
            for end in range(1, blocks + 1):
                send = np.concatenate([[0.0], self.send])[:end]
                stages = self.stage(stage_time, end, m)
                seconds = np.maximum(np.maximum(best[index, :end], send), stages)
                starts[index + 1, end] = seconds.argmin()
                best[index + 1, end] = seconds.min()
        cuts, end = list[int](), blocks
        for index in range(len(replicas), 1, -1):
            end = int(starts[index, end])
            cuts.insert(0, end)
        return float(best[-1, -1]), cuts
