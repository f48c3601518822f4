"""Seconds and bytes of one stage under the cost model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage: seconds of one micro-batch over all replicas, bytes of one device.

    ``backward_seconds`` is the whole backward; ``weights_seconds`` is the part of it that computes gradients of
    weights, where the schedule runs that as an action of its own (W), else 0. ``send_forward_seconds`` and
    ``send_backward_seconds``: the two directions of the boundary to the next stage (0 for the last stage).
    ``allreduce_seconds``: the whole AllReduce; ``exposed_seconds``: the part of it after the last backward.
    ``fixed_bytes``: weights, gradients and optimizer slots. ``stash_bytes``: for each micro-batch in flight.
    ``working_bytes``: the largest working set of a backward. ``rings``: where AllReduce overlaps backward, of each ring
    the seconds between its gradients and the end of the last backward, and the seconds that it takes, in their order.
    """

    forward_seconds: float
    backward_seconds: float
    send_forward_seconds: float
    send_backward_seconds: float
    allreduce_seconds: float
    exposed_seconds: float
    fixed_bytes: float
    stash_bytes: float
    working_bytes: float
    weights_seconds: float = 0.0
    rings: tuple[tuple[float, float], ...] = ()
