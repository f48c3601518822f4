"""The gpt as two ranks with one and two stages per rank: equality with one device, crossings, and seconds of a step.

Each rank has one core. With two stages per rank the model's activations cross three boundaries (looped) or two
(V-shaped) instead of one. Of the dense stack, whose products fill a core, ZB-H1 is compared with 1F1B (dapple-a).
"""

from __future__ import annotations

from benchmarks.own_core import run_on_own_core

if __name__ == "__main__":  # before any library counts the cores
    run_on_own_core("OMPI_COMM_WORLD_LOCAL_RANK")

from collections.abc import Iterator
from typing import Any

from benchmarks.common import Row, median, print_on_rank_0, run_ranks, time_interleaved

RANKS, MICRO_BATCHES = 2, 8
CROSSINGS = {"dapple-a": 1, "interleaved-1f1b:v=2": 3, "hanayo:w=1": 2, "zb-v": 2}  # by schedule
STAGES = {name: 2 if name == "dapple-a" else 4 for name in CROSSINGS}
DENSE = ("dapple-a", "zb-h1")
TOLERANCE = 1e-12


def rows_of_ranks() -> Iterator[Row]:
    """Yield equality, crossing boundaries and seconds of each schedule."""
    found = run_ranks("benchmarks.schedule_ranks", RANKS, timeout=600)
    for name, wanted in CROSSINGS.items():
        own = found[name]
        yield Row(
            f"gpt float64, two ranks, {name}: largest difference from one device",
            f"{TOLERANCE:g}",
            f"{own['error']:.1e}",
            own["error"] <= TOLERANCE,
        )
        yield Row(
            f"gpt, two ranks, {name}: boundaries that cross",
            str(wanted),
            str(own["crossing"]),
            own["crossing"] == wanted,
        )
        over = own["seconds"] / found["dapple-a"]["seconds"]
        text = f"{over:.3f} ({own['seconds'] * 1e3:.0f} ms)"
        yield Row(f"gpt, two ranks, a core each, M = {MICRO_BATCHES}: {name} over dapple-a", "-", text, True)
    plain, split = found["dense"]
    bound = (3 * MICRO_BATCHES + 1) / (3 * MICRO_BATCHES + 3)  # two stages whose F, B and W take the same time
    yield Row(
        f"dense layers, two ranks, a core each, M = {MICRO_BATCHES}: {DENSE[1]} over {DENSE[0]}",
        f"below 1; simulated {bound:.3f} for F = B = W",
        f"{split / plain:.3f} ({plain * 1e3:.0f} ms, {split * 1e3:.0f} ms)",
        split < plain,
    )


def measure() -> dict[str, Any]:
    """Return the gpt's error, crossing boundaries and median seconds by schedule, and the dense stack's seconds."""
    import itertools

    import dapple_tf as dapple
    from benchmarks.workloads import dense, small_gpt
    from dapple_tf.examples.gpt import gpt

    found: dict[str, Any] = {}
    calls = {}
    for name, stages in STAGES.items():
        options = {"stages": stages, "micro_batches": MICRO_BATCHES, "schedule": name}
        exact = gpt(layers=4, width=32, context=16, dtype="float64", batch_size=16)
        batch = next(iter(exact.dataset))
        report = dapple.verify(exact.loss_fn, optimizer=exact.optimizer, batch=batch, **options)
        timed = small_gpt()
        step = timed.pipeline(**options)
        calls[name] = lambda step=step, batch=timed.batch: float(step(*batch))
        step(*timed.batch)
        workers = step.plan.worker_map.worker_of
        crossing = sum(here != there for here, there in itertools.pairwise(workers))
        found[name] = {
            "error": max(report.max_loss_error, report.max_gradient_error, report.max_variable_error),
            "crossing": crossing,
        }
    time_interleaved(calls, 2)
    taken = time_interleaved(calls, 9)
    for name in STAGES:
        found[name]["seconds"] = median(taken[name])
    stacks = {}
    for name in DENSE:
        timed = dense()
        loss_fn, optimizer = timed.workload.loss_fn, timed.workload.optimizer
        step = dapple.pipeline(loss_fn, optimizer=optimizer, stages=RANKS, micro_batches=MICRO_BATCHES, schedule=name)
        stacks[name] = lambda step=step, batch=timed.batch: float(step(*batch))
    time_interleaved(stacks, 3)
    found["dense"] = [median(seconds) for seconds in time_interleaved(stacks, 15).values()]
    return found


if __name__ == "__main__":
    import dapple_tf as dapple

    dapple.init()
    print_on_rank_0(measure())
