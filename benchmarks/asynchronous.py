"""Asynchronous windows: no flush, the throughput of each depth, and two ranks with a core each, beside DAPPLE.

Stages of waits run in one process. A window has 64 minibatches; DAPPLE's steps have M micro-batches of the same size,
as many steps as make 64. The *steady state* is measured on the last stage, from its first backward to its last one.
"""

from __future__ import annotations

import os

from benchmarks.own_core import run_on_own_core

if __name__ == "__main__" and "OMPI_COMM_WORLD_RANK" in os.environ:  # before any library counts the cores
    run_on_own_core("OMPI_COMM_WORLD_LOCAL_RANK")

import sys
from collections.abc import Iterator
from typing import Any

import dapple_tf as dapple
from benchmarks.common import (
    Row,
    available_cores,
    median,
    print_on_rank_0,
    print_rows,
    run_on_cores,
    run_ranks,
    time_interleaved,
)
from benchmarks.needs import find_missing_for_ranks
from benchmarks.waits import stage_names, start_waiting, waits

STAGES, MINIBATCHES = 4, 64
FORWARD, BACKWARD = 0.1, 0.2  # seconds of a stage, of a minibatch
DEPTHS = range(1, 8)
MICRO_BATCHES = (4, 8)  # of DAPPLE's steps
WINDOWS = 2  # recorded
WIDTHS = (96, 384)  # of the gpt on two ranks


def run() -> Iterator[Row]:
    """Yield the rows of two ranks, then those of the stages of waits."""
    lack = find_missing_for_ranks()
    if lack:
        yield Row("two ranks", "-", f"left out: {lack}", True)
    else:
        for width in WIDTHS:
            yield from rows_of_ranks(width)
    yield from (Row(**row) for row in run_on_cores("benchmarks.asynchronous", available_cores(), timeout=3000.0))


def window_step(timed: Any, **options: Any) -> Any:
    """Return a step of windows of the waiting layers."""
    return timed.pipeline(stages=stage_names(STAGES), mode="async", minibatches=MINIBATCHES, **options)


def measure_window(step: Any, batch: Any) -> dict[str, float]:
    """Return seconds of a window, of its start-up and drain, and of a minibatch in the steady state: medians."""
    found: dict[str, list[float]] = {"window": [], "startup": [], "drain": [], "minibatch": []}
    for _ in range(WINDOWS):
        step.record(*batch)
        events = step.timeline.events
        begin, end = min(e.start for e in events), max(e.end for e in events)
        last = sorted(e.end for e in events if e.action.stage == STAGES - 1 and e.action.kind == "B")
        found["window"].append(end - begin)
        found["startup"].append(last[0] - begin)
        found["drain"].append(end - last[-1])
        found["minibatch"].append((last[-1] - last[0]) / (len(last) - 1))
    return {name: median(values) for name, values in found.items()}


def simulate_window(step: Any) -> float:
    """Return the simulated seconds of a window of the waiting layers, without transfers."""
    from dapple_tf.simulator.window_execution import Route, WindowCosts, execute_window
    from dapple_tf.timeline.stage_costs import StageCosts

    free = ("send_forward_seconds", "send_backward_seconds", "allreduce_seconds", "exposed_seconds")
    rest = dict.fromkeys((*free, "fixed_bytes", "stash_bytes", "working_bytes", "weights_seconds"), 0.0)
    cost = StageCosts(forward_seconds=FORWARD, backward_seconds=BACKWARD, **rest)
    routes = {(boundary, 0, 0): Route(0.0) for boundary in range(STAGES - 1)}
    costs = WindowCosts((cost,) * STAGES, routes, routes, (0.0,) * STAGES)
    return execute_window(step.plan.versions, costs).seconds


def rows_of_waits() -> list[Row]:
    """Return the rows of stages of waits: DAPPLE's steps beside windows of the usual depth, then each depth."""
    start_waiting(STAGES)
    halves = {"forward": FORWARD, "inputs": BACKWARD / 2, "weights": BACKWARD / 2}
    timed = waits(STAGES, **halves, batch_size=MINIBATCHES)
    rows = []
    usual = measure_window(window_step(timed), timed.batch)
    share = (FORWARD + BACKWARD) / usual["minibatch"]
    ends = f"start-up {usual['startup']:.2f} s, drain {usual['drain']:.2f} s"
    text = f"{share:.3f} ({usual['minibatch'] * 1e3:.1f} ms a minibatch; {ends})"
    rows.append(Row(f"waits, S = {STAGES}: steady state over one stage's bound", "at least 0.97", text, share >= 0.97))
    for count in MICRO_BATCHES:
        step = timed.pipeline(
            stages=stage_names(STAGES),
            micro_batches=count,
            schedule="dapple-a",
            inexact="allow",  # the stages run Python code, which is not analysed
        )
        batch = tuple(part[:count] for part in timed.batch)
        step(*batch)
        taken = time_interleaved({"step": lambda step=step, batch=batch: float(step(*batch))}, 5)["step"]
        seconds = median(taken) * MINIBATCHES / count
        text = f"{seconds / usual['window']:.3f} ({seconds:.2f} s for {MINIBATCHES} minibatches)"
        rows.append(
            Row(
                f"waits, S = {STAGES}: DAPPLE with M = {count} over a window",
                "above 1",
                text,
                seconds > usual["window"],
            )
        )
    for depth in DEPTHS:
        step = window_step(timed, depth=depth)
        step(*timed.batch)
        seconds = median(time_interleaved({"window": lambda step=step: float(step(*timed.batch))}, 1)["window"])
        over = seconds / simulate_window(step)
        text = f"{over:.3f} ({seconds:.2f} s, {MINIBATCHES / seconds:.2f} minibatches/s)"
        rows.append(
            Row(
                f"waits, S = {STAGES}, depth {depth}: window, measured over simulated",
                "within 10%",
                text,
                abs(over - 1) <= 0.1,
            )
        )
    return rows


def rows_of_ranks(width: int) -> Iterator[Row]:
    """Yield the throughput of two ranks, a core each, which train a gpt of this width."""
    found = run_ranks("benchmarks.asynchronous", 2, str(width), timeout=900)
    name = f"gpt of width {width}, two ranks, a core each"
    window = found["window"]
    for count in MICRO_BATCHES:
        seconds = found[f"dapple {count}"]
        text = f"{seconds / window:.3f} ({seconds:.2f} of {window:.2f} s for {MINIBATCHES} minibatches)"
        yield Row(f"{name}: DAPPLE with M = {count} over a window", "above 1", text, seconds > window)
    share = found["work"] / found["minibatch"]
    parts = f"{found['work'] * 1e3:.1f} ms of the slower rank's work, {found['calls'] * 1e3:.1f} of them F and B"
    text = f"{share:.3f} ({found['minibatch'] * 1e3:.1f} ms a minibatch, {parts})"
    yield Row(f"{name}: steady state over the slower stage's bound", "at least 0.97", text, share >= 0.97)


def measure_ranks(width: int) -> dict[str, float]:
    """Return seconds for 64 minibatches: of a window, and of DAPPLE's steps; and of a minibatch in the steady state.

    ``work``: of the slower rank for one minibatch: its forward and backward (``calls``) and its update.
    """
    from dapple_tf.examples.gpt import gpt

    samples = 4  # of a minibatch, and of a micro-batch
    workload = gpt(layers=4, width=width, context=64, batch_size=MINIBATCHES * samples)
    batch = next(iter(workload.dataset))
    own = {"optimizer": workload.optimizer, "stages": 2}
    window = dapple.pipeline(workload.loss_fn, **own, mode="async", minibatches=MINIBATCHES)
    steps = {n: dapple.pipeline(workload.loss_fn, **own, micro_batches=n, schedule="dapple-a") for n in MICRO_BATCHES}

    def train(count: int) -> None:
        size = count * samples
        for begin in range(0, MINIBATCHES * samples, size):
            float(steps[count](*(part[begin : begin + size] for part in batch)))

    calls = {f"dapple {n}": lambda n=n: train(n) for n in MICRO_BATCHES}
    calls["window"] = lambda: float(window(*batch))
    time_interleaved(calls, 2)
    found = {name: median(values) for name, values in time_interleaved(calls, 5).items()}
    each, work, calls_only = [], [], []
    for _ in range(3):
        window.record(*batch)
        events = window.timeline.events
        last = sorted(e.end for e in events if e.action.stage == 1 and e.action.kind == "B")
        each.append((last[-1] - last[0]) / (len(last) - 1))
        of_stages = []
        for stage in (0, 1):
            own_calls = sum(e.end - e.start for e in events if e.action.stage == stage)
            updates = sum(
                e.end - e.start for e in window.timeline.stage_events if (e.kind, e.stage) == ("update", stage)
            )
            of_stages.append((own_calls + updates, own_calls))
        slower = max(of_stages)
        work.append(slower[0] / MINIBATCHES)
        calls_only.append(slower[1] / MINIBATCHES)
    return {**found, "minibatch": median(each), "work": median(work), "calls": median(calls_only)}


if __name__ == "__main__":
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        dapple.init()
        print_on_rank_0(measure_ranks(int(sys.argv[1])))
    else:
        print_rows(rows_of_waits())
