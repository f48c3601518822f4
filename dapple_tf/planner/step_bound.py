"""A lower bound of the step of given stages, found in less time than their costs and a simulation take."""

from __future__ import annotations

from collections.abc import Sequence

from dapple_tf.plans import StagePlan
from dapple_tf.simulator.costs import CostModel


def least_step_seconds(
    costs: CostModel, stages: Sequence[StagePlan], samples: int, micro_batches: int, *, splits: bool, overlap: bool
) -> float:
    """Return a lower bound (seconds) of the step of ``stages``, on micro-batches of ``samples`` each.

    A device computes for all micro-batches. Before its first action the stages before it have run a forward; after its
    last backward, which is of the first of its stages, they run a backward, and this stage its AllReduce. Weight
    gradients that are actions of their own (``splits``) may come later than that, so then only the device's own seconds
    count. With ``overlap`` AllReduce does not count. Transfers, re-computation and contention are left out.
    """
    busy = dict[tuple[int, ...], float]()  # seconds of the device's stages for one micro-batch
    around = dict[tuple[int, ...], float]()  # seconds before and after all of its actions
    before, worker = 0.0, None
    for stage in stages:
        if stage.worker != worker:  # the first stage of another pipeline
            before, worker = 0.0, stage.worker
        own = costs.replicas.compute_seconds(costs.in_rows(stage, samples), samples)
        if stage.devices not in busy:
            busy[stage.devices] = 0.0
            around[stage.devices] = 0.0 if splits else max(before, 0.0 if overlap else costs.allreduce_seconds(stage))
        busy[stage.devices] += own
        before += own
    return max(around[devices] + micro_batches * seconds for devices, seconds in busy.items())
