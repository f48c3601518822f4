"""The memory of unequal devices: which device of a stage is the first to run out, and what that leaves its stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dapple_tf.plans import Plan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.timeline.stage_costs import StageCosts


@dataclass(frozen=True)
class MemoryLimit:
    """The device of a stage that is the first to run out of memory.

    ``memory``: its bytes. ``share``: its rows over those of the device with most rows, whose bytes ``StageCosts`` has.
    ``fixed``: bytes of weights, gradients and optimizer slots, of all stages on the device.
    """

    device: int
    memory: float
    share: float
    fixed: float

    def need(self, peak: float) -> float:
        """Return the bytes that this device holds when the device with most rows holds ``peak`` bytes."""
        return peak if self.share == 1 else self.fixed + (peak - self.fixed) * self.share

    @property
    def room(self) -> float:
        """The bytes that the device with most rows may hold, so that every device of the stage has enough."""
        return self.memory if self.share == 1 else self.fixed + (self.memory - self.fixed) / self.share


def memory_limits(plan: Plan, costs: Sequence[StageCosts], cluster: Cluster) -> tuple[MemoryLimit, ...]:
    """Return the device of each stage that is the first to run out of memory; ``costs``: of each stage."""
    limits: dict[int, MemoryLimit] = {}
    for stages in plan.worker_map.stages_of:
        fixed, stage = sum(costs[s].fixed_bytes for s in stages), plan.stages[stages[0]].in_rows(plan.micro_batch_size)
        most = max(stage.fractions)
        found = [
            MemoryLimit(device, cluster.memory_of(device), fraction / most, fixed)
            for device, fraction in zip(stage.devices, stage.fractions, strict=True)
        ]
        limits |= dict.fromkeys(stages, min(found, key=lambda limit: limit.room))
    return tuple(limits[stage] for stage in range(len(costs)))


def fit_to_one_limit(plan: Plan, costs: Sequence[StageCosts], cluster: Cluster) -> tuple[tuple[StageCosts, ...], float]:
    """Return costs, and the bytes of a device, such that a stage fits this device if and only if it fits its own.

    Where devices or shares are unequal, a stage's fixed bytes grow by what its devices have less than the largest.
    """
    if len(set(cluster.memories)) == 1 and not plan.shares:
        return tuple(costs), cluster.memories[0]
    limits = memory_limits(plan, costs, cluster)
    largest = max(limit.room for limit in limits)
    first = {stages[0] for stages in plan.worker_map.stages_of}  # counted once on each worker
    missing = [largest - limit.room if stage in first else 0.0 for stage, limit in enumerate(limits)]
    padded = [replace(cost, fixed_bytes=cost.fixed_bytes + more) for cost, more in zip(costs, missing, strict=True)]
    return tuple(padded), largest
