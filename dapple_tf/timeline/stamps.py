"""Make a timeline from the time stamps of an instrumented graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.ir.names import find_minibatch
from dapple_tf.graph_passes.passes.instrument import timed_nodes
from dapple_tf.graph_passes.passes.project import StageExchange, parse_exchange_name
from dapple_tf.graph_passes.schedules.schedule import KIND_OF_CALL, Action
from dapple_tf.graph_passes.schedules.weight_versions import Versions
from dapple_tf.graph_passes.schedules.window import Window
from dapple_tf.timeline.events import Event, MemoryCurve, OpRun, StageEvent, StageEventKind, Transfer
from dapple_tf.timeline.figures import EarlierStep
from dapple_tf.timeline.timeline import Timeline


@dataclass(frozen=True)
class Stamp:
    """The start and end of a node on ``device``, in seconds by the clock of its process."""

    op: str
    name: str
    stage: int | None
    replica: int | None
    micro_batch: int | None
    device: str
    start: float
    end: float


def name_stamps(graph: Graph, device: str | None = None) -> tuple[Stamp, ...]:
    """Return the nodes that an instrumented graph times, with times 0.

    ``device``: the name of the device for all of them; by default each has the device of its node.
    """
    stamps = []
    for node in timed_nodes(graph):
        stage, replica, m = (node.integer(k) if node.has(k) else None for k in ("stage", "replica", "micro_batch"))
        stamps.append(Stamp(node.op, node.name, stage, replica, m, node.device if device is None else device, 0.0, 0.0))
    return tuple(stamps)


def fill_stamps(stamps: Sequence[Stamp], times: Any) -> tuple[Stamp, ...]:
    """Return the stamps with the times that the graph returned: a vector with the start and the end of each node."""
    pairs = zip(stamps, times[::2], times[1::2], strict=True)
    return tuple(dataclasses.replace(stamp, start=float(start), end=float(end)) for stamp, start, end in pairs)


def first_start(stamps: Iterable[Stamp]) -> float:
    """Return when the first action started."""
    return min(stamp.start for stamp in stamps if stamp.op in KIND_OF_CALL)


def make_timeline(
    stamps: Sequence[Stamp],
    *,
    title: str = "",
    note: str = "",
    together: Iterable[Action] = (),
    versions: Versions | None = None,
    earlier: Iterable[EarlierStep] = (),
    memory_curves: Iterable[MemoryCurve] = (),
    ops: Iterable[OpRun] = (),
) -> Timeline:
    """Return the timeline of the stamps of all processes, whose clocks must agree.

    Its times count from the start of the first action. ``versions``: the versions of weights in an asynchronous window.
    The other arguments: see ``Timeline``.
    """
    first = first_start(stamps)
    shifted = [dataclasses.replace(s, start=s.start - first, end=s.end - first) for s in stamps]
    shifted.sort(key=lambda stamp: (stamp.start, stamp.end))
    window, used = (None, {}) if versions is None else (versions.window, versions.used)
    events = tuple(_event(stamp, used) for stamp in shifted if stamp.op in KIND_OF_CALL)
    transfers, stage_events = _transfers(shifted), _stage_events(shifted, window)
    return Timeline(
        events,
        transfers,
        stage_events,
        title=title,
        note=note,
        together=together,
        window=window,
        earlier=earlier,
        memory_curves=memory_curves,
        ops=ops,
    )


def read_timeline(graph: Graph, times: Any) -> Timeline:
    """Return the timeline of an instrumented graph that ran in one process and returned ``times``."""
    return make_timeline(fill_stamps(name_stamps(graph), times))


def _event(stamp: Stamp, versions: Mapping[Action, int]) -> Event:
    assert stamp.stage is not None
    assert stamp.replica is not None
    assert stamp.micro_batch is not None
    action = Action(stamp.stage, KIND_OF_CALL[stamp.op], stamp.micro_batch)
    return Event(action, stamp.replica, stamp.device, stamp.start, stamp.end, versions.get(action))


def _transfers(stamps: Sequence[Stamp]) -> list[Transfer]:
    """Return each exchange once: it starts when the last of its ranks reaches it, and ends when the last leaves it.

    Receivers of different senders do not wait for each other, so an exchange has started at the latest when its first
    receiver leaves it. A sender leaves it when its tensors are queued, at which time the others may not have reached
    it.
    """
    runs = {(stamp.device, stamp.stage) for stamp in stamps if stamp.op in KIND_OF_CALL}
    by_exchange: dict[StageExchange, list[Stamp]] = {}
    for stamp in stamps:
        exchange = parse_exchange_name(stamp.name) if stamp.op == "exchange" else None
        if exchange is not None:
            by_exchange.setdefault(exchange, []).append(stamp)
    transfers = []
    for (source, target, first, last), ranks in by_exchange.items():
        received = [stamp.end for stamp in ranks if (stamp.device, target) in runs]
        start = min([max(stamp.start for stamp in ranks), *received])
        end = max(stamp.end for stamp in ranks)
        transfers.append(Transfer(source, target, last, start, end, count=last - first + 1))
    return sorted(transfers, key=lambda transfer: transfer.start)


def _stage_events(stamps: Iterable[Stamp], window: Window | None) -> list[StageEvent]:
    kinds: dict[str, StageEventKind] = {"allreduce": "allreduce", "reduce": "allreduce", "update": "update"}
    return [
        StageEvent(
            kinds[stamp.op],
            stamp.stage,
            stamp.replica or 0,
            stamp.device,
            stamp.start,
            stamp.end,
            _last_micro_batch(stamp.name, window),
        )
        for stamp in stamps
        if stamp.op in kinds
    ]


def _last_micro_batch(name: str, window: Window | None) -> int | None:
    """Return the last micro-batch of the minibatch in the name of a window's node; None for other nodes."""
    minibatch = find_minibatch(name)
    return None if window is None or minibatch is None else (minibatch + 1) * window.micro_batches - 1
