"""Predicted peak memory of all stages of one process, from the times at which their actions ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dapple_tf.graph_passes.schedules.schedule import FREEING
from dapple_tf.graph_passes.schedules.window import Window
from dapple_tf.memory.predict import StageMemory
from dapple_tf.memory.stash import StashedTensor
from dapple_tf.timeline.timeline import Timeline

Times = dict[tuple[int, int, str, int], tuple[float, float]]
"""Start and end of each action in seconds, by stage, replica, kind of action and micro-batch."""


def predict_process_peak(stages: Sequence[StageMemory], timeline: Timeline) -> int:
    """Return the peak bytes of all stages in one process, beyond what they hold between steps.

    ``timeline`` says when each action ran. Stages need not peak at the same time, so the result is at most the sum of
    their peaks. A tensor that two stages share counts once: logical CPU devices pass tensors without a copy.
    """
    times: Times = {
        (e.action.stage, e.replica, e.action.kind, e.action.micro_batch): (e.start, e.end) for e in timeline.events
    }
    if timeline.window is None:
        updates = _step_updates(stages, times)
    else:
        updates = _window_updates(stages, timeline, timeline.window)
    changes = sorted(
        change
        for start, end, size in [*_allocations(stages, times), *updates]
        if end > start
        for change in ((start, 1, size), (end, 0, -size))  # at equal times, free before allocating
    )
    live = peak = 0
    for _, _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


def _step_updates(stages: Sequence[StageMemory], times: Times) -> Iterator[tuple[float, float, int]]:
    """Yield (start, end, bytes) of the updates after a step, all at one time, and of slices, which wait for them."""
    last = max(end for _, end in times.values())
    for stage in {stage for stage, replica, _, _ in times if replica == 0}:
        yield last, last + 1, stages[stage].update
    for (stage, _, kind, _), (_, end) in times.items():
        if kind in FREEING:  # the action that gives the gradients of variables
            yield end, last, stages[stage].slices


def _window_updates(
    stages: Sequence[StageMemory], timeline: Timeline, window: Window
) -> Iterator[tuple[float, float, int]]:
    """Yield (start, end, bytes) of the updates of a window, and of the gradients that wait for them.

    A stored version shares its memory with the weights until the next update writes them. Weights are counted between
    steps too, so the bytes of that version are subtracted for this time.
    """
    ends: dict[tuple[int, int], float] = {}
    newest = dict.fromkeys(range(window.stages), 0)
    for event in timeline.events:
        stage = event.action.stage
        newest[stage] = max(newest[stage], event.version or 0)
        if event.action.kind == "B":
            key = stage, window.update_of(stage, event.action.micro_batch)
            ends[key] = min(ends.get(key, event.end), event.end)
    shared = dict.fromkeys(newest, 0.0)  # since when the newest version has been stored
    for update in timeline.stage_events:
        if update.kind != "update" or update.stage is None or update.micro_batch is None:
            continue
        memory, number = stages[update.stage], window.update_of(update.stage, update.micro_batch)
        yield ends[update.stage, number], update.start, min(memory.working["B"], memory.update)
        yield update.start, update.end, memory.update
        if memory.version_count and number <= newest[update.stage]:
            yield shared[update.stage], update.start, -memory.versions // memory.version_count
        shared[update.stage] = update.end


def _allocations(stages: Sequence[StageMemory], times: Times) -> Iterator[tuple[float, float, int]]:
    """Yield (start, end, bytes) of every action's working set, and of every stashed tensor."""
    for (stage, replica, kind, m), (start, end) in times.items():
        yield start, end, stages[stage].working[kind]
        if kind == "F":
            for tensor in stages[stage].stashed:
                begin, freed = _lifetime(tensor, stage, replica, m, times)
                yield max(begin, _counted_until(stages, tensor, stage, replica, m, times)), freed, tensor.bytes


def _lifetime(tensor: StashedTensor, stage: int, replica: int, m: int, times: Times) -> tuple[float, float]:
    """Return when the ``tensor`` of micro-batch ``m`` is computed, and when it is freed."""
    whole = times.get((stage, replica, "B", m))  # of a micro-batch whose backward is one action
    freed = times[stage, replica, tensor.last_use, m][1] if tensor.last_use == "F" or not whole else whole[1]
    match tensor.origin:
        case "previous stage":
            return _first_end(stage - 1, "F", m, times), freed
        case "next stage":
            return _first_end(stage + 1, "BI", m, times), freed
    return (times[stage, replica, tensor.origin, m] if tensor.origin == "F" or not whole else whole)[0], freed


def _first_end(stage: int, kinds: str, m: int, times: Times) -> float:
    """Return when the first replica of ``stage`` ends its action of one of these kinds on micro-batch ``m``."""
    return min(end for (s, _, k, n), (_, end) in times.items() if (s, n) == (stage, m) and k in kinds)


def _counted_until(
    stages: Sequence[StageMemory], tensor: StashedTensor, stage: int, replica: int, m: int, times: Times
) -> float:
    """Return until when the neighbour that sent the ``tensor`` stashes it too: until then it counts there."""
    neighbour = {"previous stage": stage - 1, "next stage": stage + 1}.get(tensor.origin)
    if neighbour is None or (neighbour, replica, "F", m) not in times:
        return float("-inf")
    shared = [
        other
        for other in stages[neighbour].stashed
        if (other.name, other.is_activation) == (tensor.name, tensor.is_activation)
    ]
    return max((_lifetime(other, neighbour, replica, m, times)[1] for other in shared), default=float("-inf"))
