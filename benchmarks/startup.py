"""Start-up time of a rank of a job against one process that runs the same plan; each has one core.

The time is from the start of the process to the end of its first step. A rank also joins the job and agrees with the
other ranks, but it compiles only its own part of the program.
"""

from __future__ import annotations

import os
import sys

from benchmarks.own_core import run_on_own_core

if __name__ == "__main__":  # before any library counts the cores
    run_on_own_core("OMPI_COMM_WORLD_LOCAL_RANK")

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import Row, available_cores, median, run_on_cores, run_ranks

STAGES, MICRO_BATCHES, TURNS = 2, 8, 3
MOST = 1.5


def run() -> Iterator[Row]:
    """Yield the dense stack and the gpt: one process and a job in turn, the median ratio."""
    if len(available_cores()) < STAGES:
        yield Row("a rank's start", f"at most {MOST}x", "this machine has one core", False)
        return
    for model in ("dense", "gpt"):
        pairs = []
        for _ in range(TURNS):
            one = run_on_cores("benchmarks.startup", available_cores()[:1], model)
            pairs.append((one, run_ranks("benchmarks.startup", STAGES, model)))
        ratio = median([sum(job.values()) / sum(one.values()) for one, job in pairs])
        one, job = sorted(pairs, key=lambda pair: sum(pair[1].values()) / sum(pair[0].values()))[TURNS // 2]
        measured = f"{ratio:.2f}x: {describe(job)}; one process {describe(one)}"
        yield Row(
            f"{model}: a rank's start, over one process's, S = {STAGES}", f"at most {MOST}x", measured, ratio <= MOST
        )


def describe(parts: Mapping[str, float]) -> str:
    """Return the sum of the parts and each part, in seconds, as text."""
    return f"{sum(parts.values()):.1f} s ({', '.join(f'{name} {seconds:.1f}' for name, seconds in parts.items())})"


def process_age(stat: Path = Path("/proc/self/stat")) -> float:
    """Return the seconds since this process was started, in units of the system's clock tick."""
    # The command in parentheses may contain anything; the start time, in ticks since boot, is the 22nd field.
    ticks = int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def measure(model: str) -> dict[str, float]:
    """Return the seconds of each part of this process's start, in order."""
    import dapple_tf as dapple

    marks = {"": 0.0}
    import tensorflow  # noqa: F401 - timed

    marks["import"] = process_age()
    dapple.init(STAGES)
    marks["join"] = process_age()
    from benchmarks.workloads import MODELS

    timed = MODELS[model]()
    marks["model"] = process_age()
    step: Any = timed.pipeline(stages=STAGES, micro_batches=MICRO_BATCHES, example_batch=timed.batch)
    marks["agree, rewrite"] = process_age()
    float(step(*timed.batch))
    marks["first step"] = process_age()
    names = list(marks)
    return {name: marks[name] - marks[before] for before, name in itertools.pairwise(names)}


if __name__ == "__main__":
    parts = measure(sys.argv[1])
    from dapple_tf.distributed import membership

    job = membership.current()
    slowest = max(job.gather(parts), key=lambda found: sum(found.values()))
    if job.rank == 0:
        print(json.dumps(slowest))
