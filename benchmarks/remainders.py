"""Plans whose replicas do not divide the rows of a micro-batch: jobs of waits against the simulator.

Each rank is a device that sleeps for the rows that it gets, so that there can be more of them than cores. The simulator
counts the same whole rows; with fractions of rows it would promise too short a step.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.common import Row, median, print_on_rank_0, run_ranks, time_interleaved
from benchmarks.policies import Case
from dapple_tf.profiler.cluster import Link

RANKS, PLANS, SEED = (3, 4, 5, 6), 5, 0  # plans of each number of ranks
STEPS, POLICY = 3, "dapple-b"
CLOSE = 0.05
_FREE = Link(1e12, 0.0)  # what is sent is some bytes
# Seconds of forward and of backward of a layer: a step takes seconds, far more than it costs six ranks on two cores.
_OF_A_ROW = 0.03, 0.06


def run() -> Iterator[Row]:
    """Yield the measured step of each plan over the simulated one, and how many are close."""
    off = []
    for ranks in RANKS:
        measured = run_ranks("benchmarks.remainders", ranks, str(ranks))
        for case, seconds in zip(draw_cases(ranks), measured, strict=True):
            promised = case.predict(POLICY).step_seconds
            off.append(seconds / promised - 1)
            replicas = ":".join(map(str, case.replicas))
            yield Row(
                f"replicas {replicas} of {case.layer_counts} layers, {case.micro_batches} micro-batches of {case.rows}",
                f"within {CLOSE:.0%}",
                f"{off[-1]:+.1%} ({seconds * 1e3:.0f} ms, simulated {promised * 1e3:.0f} ms)",
                abs(off[-1]) <= CLOSE,
            )
    close = sum(abs(each) <= CLOSE for each in off)
    worst = max(off, key=abs)
    yield Row(
        f"plans with remainders within {CLOSE:.0%} of the simulator",
        "all",
        f"{close} of {len(off)}, worst {worst:+.1%}",
        close == len(off),
    )


def draw_cases(ranks: int) -> list[Case]:
    """Return random plans on this many devices; in each some replicas get more rows than others."""
    draw, found = random.Random(SEED + ranks), list[Case]()
    while len(found) < PLANS:
        stages = draw.randint(1 if found else 2, min(3, ranks - 1))
        ends = sorted(draw.sample(range(1, ranks), stages - 1))
        replicas = tuple(b - a for a, b in zip([0, *ends], [*ends, ranks], strict=True))
        rows = draw.randint(max(3, *replicas), 11)
        if all(rows % count == 0 for count in replicas):
            continue
        layers = tuple(draw.randint(1, 2) for _ in replicas)
        forward, backward = (rows * seconds for seconds in _OF_A_ROW)
        found.append(Case(layers, forward, backward, draw.randint(2, 6), _FREE, replicas=replicas, rows=rows))
    return found


def measure(ranks: int) -> list[float]:
    """Return the median seconds of a step of each plan, in a job of this many ranks."""
    found = []
    for case in draw_cases(ranks):
        step = case.make_steps()[POLICY]
        calls = {"step": partial(step, False)}
        time_interleaved(calls, 1)
        found.append(median(time_interleaved(calls, STEPS)["step"]))
    return found


if __name__ == "__main__":
    import dapple_tf as dapple

    dapple.init()
    print_on_rank_0(measure(int(sys.argv[1])))
