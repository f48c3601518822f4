"""AutoPipe's Slicer: the start-up of 1F1B with and without slices, and steps against the simulator.

Layers sleep in proportion to their samples, so half a micro-batch takes half as long. The start-up is the time from the
first forward of the step to the first forward of the last stage (AutoPipe, section III.C).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import Row, available_cores, median, print_rows, run_on_cores
from benchmarks.waits import stage_names, start_waiting, waits

DEPTHS, SECONDS, SAMPLES = (4, 8), 0.05, 4  # of a micro-batch's forward; its backward takes twice as long
STEPS = 5


def run() -> Iterator[Row]:
    """Yield the rows of depths 4 and 8, and what is said of depth 2."""
    yield from (Row(**row) for row in run_on_cores("benchmarks.papers.slicer", available_cores(), timeout=600.0))


def measure(depth: int, micro_batches: int, sliced: Any) -> tuple[float, float, float, int]:
    """Return the medians of start-up and step, the simulated step (seconds), and the number of sliced micro-batches."""
    from dapple_tf.graph_passes.schedules.schedule import Action, run_schedule

    timed = waits(
        depth,
        forward=SECONDS,
        inputs=SECONDS,
        weights=SECONDS,
        batch_size=micro_batches * SAMPLES,
        samples=SAMPLES,
    )
    step = timed.pipeline(
        stages=stage_names(depth),
        micro_batches=micro_batches,
        schedule="dapple-a",
        slice=sliced,
        inexact="allow",  # that Python code treats samples one by one is not known
    )
    starts, seconds = [], []
    for _ in range(STEPS + 2):  # the first two build
        step.record(*timed.batch)
        events = step.timeline.events
        first = min(event.start for event in events)
        starts.append(min(e.start for e in events if e.action.stage == depth - 1) - first)
        seconds.append(step.timeline.step_seconds)
    plan = step.plan
    rows = plan.micro_batch_sizes or (SAMPLES,) * micro_batches

    def lasts(action: Action) -> float:
        return (1 if action.kind == "F" else 2) * SECONDS * rows[action.micro_batch] / SAMPLES

    ends = run_schedule(plan.spec.build(depth, plan.micro_batches), lasts)
    return median(starts[2:]), median(seconds[2:]), max(own[-1] for own in ends), plan.micro_batches - micro_batches


def rows_of_waits() -> list[Row]:
    """Return the rows of all depths."""
    import warnings

    from dapple_tf.graph_passes.schedules.slicer import count_slices

    start_waiting(max(DEPTHS))
    rows = []
    for depth in DEPTHS:
        micro_batches, count = 2 * depth, count_slices([SECONDS] * depth, [2 * SECONDS] * depth, 0.0)
        usual, sliced = measure(depth, micro_batches, None), measure(depth, micro_batches, count)
        where = f"{depth} stages, M = {micro_batches}"
        ratio = sliced[0] / usual[0]
        text = f"{ratio:.3f} ({sliced[0] * 1e3:.0f} of {usual[0] * 1e3:.0f} ms; {sliced[3]} sliced)"
        rows.append(Row(f"{where}: start-up, sliced over 1F1B", "0.5 within 10%", text, abs(ratio / 0.5 - 1) <= 0.1))
        for name, found in (("1F1B", usual), ("sliced", sliced)):
            over = found[1] / found[2]
            text = f"{over:.3f} ({found[1] * 1e3:.0f} ms, simulated {found[2] * 1e3:.0f} ms)"
            rows.append(
                Row(f"{where}, {name}: step, measured over simulated", "within 10%", text, abs(over - 1) <= 0.1)
            )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = measure(2, 4, "auto")
    said = next((str(w.message) for w in caught if "unsuited" in str(w.message)), "nothing")
    rows.append(Row("2 stages, slice='auto'", "told to be unsuited", said, found[3] == 0 and said != "nothing"))
    return rows


if __name__ == "__main__":
    print_rows(rows_of_waits())
