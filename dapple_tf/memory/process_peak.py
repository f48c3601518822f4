"""The most that all stages of one process hold at the same time, by when their actions really ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dapple_tf.memory.predict import StageMemory
from dapple_tf.memory.stash import Kept
from dapple_tf.timeline.timeline import Timeline

Times = dict[tuple[int, int, str, int], tuple[float, float]]
"""By stage, replica, kind of action and micro-batch: its start and end."""


def predict_together(stages: Sequence[StageMemory], timeline: Timeline) -> int:
    """Bytes beyond what is always there, all stages together, with the actions of ``timeline``.

    Peaks of stages need not coincide, so it is at most the sum of these. Where a tensor is passed between devices that
    share their memory, as logical CPU devices do, it counts once.
    """
    times: Times = {
        (e.action.stage, e.replica, e.action.kind, e.action.micro_batch): (e.start, e.end) for e in timeline.events
    }
    changes = sorted(
        change
        for start, end, taken in _intervals(stages, times)
        if end > start
        for change in ((start, 1, taken), (end, 0, -taken))  # at one time what ends comes first
    )
    held = most = 0
    for _, _, taken in changes:
        held += taken
        most = max(most, held)
    replicas = {key[:2] for key in times}
    return max(most, sum(stages[stage].update for stage, replica in replicas if replica == 0))


def _intervals(stages: Sequence[StageMemory], times: Times) -> Iterator[tuple[float, float, int]]:
    """Start, end and bytes of everything that any stage holds."""
    for (stage, replica, kind, m), (start, end) in times.items():
        yield start, end, stages[stage].working[kind]
        if kind == "F":
            for piece in stages[stage].kept:
                begin, until = _life(piece, stage, replica, m, times)
                yield max(begin, _end_before(stages, piece, stage, replica, m, times)), until, piece.bytes


def _life(piece: Kept, stage: int, replica: int, m: int, times: Times) -> tuple[float, float]:
    """When ``piece`` of a micro-batch is there."""
    until = times[stage, replica, piece.until, m][1]
    match piece.birth:
        case "sent forward":
            return _made(stage - 1, "F", m, times), until
        case "sent back":
            return _made(stage + 1, "B", m, times), until
    return times[stage, replica, piece.birth, m][0], until


def _made(stage: int, kind: str, m: int, times: Times) -> float:
    """When the first replica of ``stage`` has made what it sends."""
    return min(end for (s, _, k, n), (_, end) in times.items() if (s, k, n) == (stage, kind, m))


def _end_before(stages: Sequence[StageMemory], piece: Kept, stage: int, replica: int, m: int, times: Times) -> float:
    """Until when a neighbour holds the same memory, and it counts there."""
    neighbour = {"sent forward": stage - 1, "sent back": stage + 1}.get(piece.birth)
    if neighbour is None or (neighbour, replica, "F", m) not in times:
        return float("-inf")
    same = [other for other in stages[neighbour].kept if (other.name, other.forward) == (piece.name, piece.forward)]
    return max((_life(other, neighbour, replica, m, times)[1] for other in same), default=float("-inf"))
