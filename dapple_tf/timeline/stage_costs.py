"""Seconds and bytes of a stage: under the cost model, or measured in a recorded step."""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dapple_tf.graph_passes.schedules.schedule import CALL_OF_KIND
from dapple_tf.timeline.events import StepEvents


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage: seconds of one micro-batch over all replicas, bytes of one device.

    ``backward_seconds`` is the whole backward; ``weights_seconds`` is the part of it that computes gradients of
    weights, if the schedule runs this part as an action of its own (W), else 0. ``send_forward_seconds`` and
    ``send_backward_seconds``: a transfer to the next stage, and one from it (0 for the last stage).
    ``allreduce_seconds``: the whole AllReduce; ``exposed_seconds``: the part of it after the last backward.
    ``fixed_bytes``: weights, gradients and optimizer slots. ``stash_bytes``: for each micro-batch in flight.
    ``working_bytes``: the largest working set of a backward. ``rings``: if AllReduce overlaps backward, two numbers for
    each ring, in their order: the seconds from its gradients to the end of the last backward, and the seconds that it
    takes.
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


def usable_bytes(device_memory: float) -> float:
    """Return the bytes of a device's memory, and less than a byte more, since sums of bytes are rounded."""
    return device_memory * (1 + 1e-12)


def activation_communication_ratio(costs: Sequence[StageCosts]) -> float:
    """Return the ACR: mean seconds of a boundary's transfers, both directions, over a stage's mean seconds of compute.

    Both are for one micro-batch (DAPPLE, Table V). 0 for one stage; infinite where only transfers take time.
    """
    sent = [cost.send_forward_seconds + cost.send_backward_seconds for cost in costs[:-1]]
    computed = [cost.forward_seconds + cost.backward_seconds for cost in costs]
    if not any(sent):
        return 0.0
    return float(np.mean(sent) / np.mean(computed)) if any(computed) else float("inf")


def measure_stage_costs(step: StepEvents, stage: int, micro_batches: Container[int] | None = None) -> StageCosts:
    """Return the median seconds of a stage's actions and of the transfers to and from the next stage.

    ``micro_batches``: only their actions and transfers count; None for all. ``allreduce_seconds``: the time in which an
    AllReduce of the stage ran on all its devices; ``exposed_seconds``: from the end of the stage's last action to the
    end of its last AllReduce. A timeline has no bytes: they are 0.
    """
    seconds = {
        kind: _median(
            e.end - e.start
            for e in step.events
            if (e.action.stage, e.action.kind) == (stage, kind)
            and (micro_batches is None or e.action.micro_batch in micro_batches)
        )
        for kind in CALL_OF_KIND
    }
    computed = max(event.end for event in step.events if event.action.stage == stage)
    reductions = [e for e in step.stage_events if (e.kind, e.stage) == ("allreduce", stage)]
    return StageCosts(
        forward_seconds=seconds["F"],
        # If some backwards are whole and others are split, the halves count: so I keeps its measured length.
        backward_seconds=seconds["I"] + seconds["W"] or seconds["B"],
        weights_seconds=seconds["W"],
        send_forward_seconds=_median(_channel_seconds(step, stage, stage + 1, micro_batches)),
        send_backward_seconds=_median(_channel_seconds(step, stage + 1, stage, micro_batches)),
        allreduce_seconds=sum(_seconds_in_order((step.start(e), e.end) for e in reductions)),
        exposed_seconds=max(0.0, max((e.end for e in reductions), default=0.0) - computed),
        fixed_bytes=0.0,
        stash_bytes=0.0,
        working_bytes=0.0,
    )


def _channel_seconds(
    step: StepEvents, source: int, target: int, micro_batches: Container[int] | None
) -> Iterator[float]:
    """Yield the seconds for which each transfer had its channel for itself, for each micro-batch.

    A transfer may start while others still occupy the channel. If it carries the results of several micro-batches, its
    seconds are divided among them.
    """
    transfers = sorted(
        (t for t in step.transfers if (t.source, t.target) == (source, target)), key=lambda transfer: transfer.end
    )
    for transfer, seconds in zip(transfers, _seconds_in_order((t.start, t.end) for t in transfers), strict=True):
        for m in transfer.micro_batches:
            if micro_batches is None or m in micro_batches:
                yield seconds / transfer.count


def _seconds_in_order(spans: Iterable[tuple[float, float]]) -> Iterator[float]:
    """Yield the seconds of each span after the end of the spans that ended before it."""
    free = 0.0
    for start, end in sorted(spans, key=lambda span: span[1]):
        yield end - max(start, free)
        free = end


def _median(seconds: Iterable[float]) -> float:
    values = list(seconds)
    return statistics.median(values) if values else 0.0
