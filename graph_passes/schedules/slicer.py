"""AutoPipe's Slicer: 1F1B whose first micro-batches are run as two halves (AutoPipe, section III.C).

The last stage starts when half a micro-batch has passed the stages before it: the start-up is halved. In the schedule
each half is a micro-batch of its own, with half the samples. The backwards of both halves are consecutive actions,
``2B0+ 2B1``. Their gradients travel together, so they have the effect of one action. The activations of both halves of
a stage's last warm-up forward travel together too: the next stage has a shorter warm-up, and is still busy when the
first half is ready.
"""

from __future__ import annotations

from collections.abc import Sequence

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Action, Schedule, alternate, checked_schedule, of_stage
from dapple_tf.wording import format_count


def sliced_1f1b(stages: int, micro_batches: int, sliced: int) -> Schedule:
    """Return 1F1B (dapple-a) of ``micro_batches`` micro-batches, where the first ``sliced`` ones are two halves each.

    The schedule has ``micro_batches`` + ``sliced`` micro-batches, in the order of the samples: both halves count. Its
    ``together`` are actions on first halves, whose results travel with the results of the second halves. Raises
    ScheduleError if ``sliced`` is negative or larger than the warm-up of stage 0.
    """
    warm_up = min(stages, micro_batches)
    if not 0 <= sliced <= warm_up:
        raise ScheduleError(
            f"slice={sliced}: stage 0 runs {format_count(warm_up, 'micro-batch')} before its first backward, of which "
            f"0 to {warm_up} can be sliced"
        )
    parts = [(2 * m, 2 * m + 1) if m < sliced else (m + sliced,) for m in range(micro_batches)]
    rows = []
    together = {Action(stage, "B", 2 * m) for stage in range(1, stages) for m in range(sliced)}
    for stage in range(stages):
        ahead = min(stages - stage, micro_batches)
        next_ahead = min(stages - stage - 1, micro_batches)
        if 0 < next_ahead < ahead <= sliced:
            together.add(Action(stage, "F", 2 * (ahead - 1)))
        whole = alternate(of_stage(stage, "F", micro_batches), of_stage(stage, "B", micro_batches), ahead)
        rows.append(tuple(Action(stage, action.kind, part) for action in whole for part in parts[action.micro_batch]))
    return checked_schedule(rows, together)


def slice_sizes(sizes: Sequence[int], sliced: int) -> tuple[int, ...]:
    """Return the number of samples of each micro-batch of a sliced schedule; ``sizes``: these numbers before slicing.

    Raises ScheduleError for a micro-batch of fewer than two samples that would be sliced.
    """
    found: list[int] = []
    for m, size in enumerate(sizes):
        if m < sliced and size < 2:
            raise ScheduleError(
                f"slice={sliced}: micro-batch {m} has {size} sample, which cannot be halved: use fewer micro-batches, "
                "or slice fewer"
            )
        found += [size // 2, size - size // 2] if m < sliced else [size]
    return tuple(found)


def count_slices(forward: Sequence[float], backward: Sequence[float], send: float) -> int:
    """Return how many micro-batches to slice (AutoPipe, Algorithm 2); 0 for one or two stages, where nothing is gained.

    ``forward``, ``backward``: seconds of each stage; ``send``: seconds of one transfer. Enough micro-batches are sliced
    when the first whole one, which starts on stage 0 after the last half, still arrives in time at the stage where its
    forward is the first one after a backward. (This follows the paper's text. In the printed algorithm a sign is
    different, and the previous stage's seconds are added to the end of a half.)
    """
    stages = len(forward)
    if stages <= 2:
        return 0
    starts = _starts_behind_first_backward(forward, backward, send)
    ends = [[0.0, 0.0] for _ in range(stages + 1)]  # when both halves of the last sliced micro-batch end on each stage
    for sliced in range(1, stages):
        for stage in range(stages - sliced + 1):
            for half in (0, 1):
                end = ends[stage][1 - half] + forward[stage] / 2
                if stage > 0:
                    end = max(end, ends[stage - 1][half] + forward[stage] / 2)
                if stage + 1 < stages:
                    end += send / 2
                ends[stage][half] = max(end, ends[stage + 1][1 - half])
        latest = starts[sliced - 1] - forward[0] - sum(f + send for f in forward[1 : stages - sliced])
        if latest >= ends[0][1]:
            return sliced
    return stages - 1


def _starts_behind_first_backward(forward: Sequence[float], backward: Sequence[float], send: float) -> list[float]:
    """Return when each stage, the last one first, may start its first forward that follows a backward."""
    now = sum(f + send for f in forward[:-1]) / 2 + forward[-1] / 2
    found = []
    for stage in reversed(range(len(forward))):
        now += backward[stage] + (send if stage else 0.0)
        found.append(now)
    return found
