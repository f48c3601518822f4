"""How long a rank of a job takes to start, against one process that runs the same plan; each has one core.

From the start of the process to the end of its first step. A rank also joins the job and agrees with the others, but it
makes only its own part of the program.
"""

from __future__ import annotations

import os
import sys

from benchmarks.own_core import keep_to_own_core

if __name__ == "__main__":  # before any library counts the cores
    keep_to_own_core("OMPI_COMM_WORLD_LOCAL_RANK")

import itertools
import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import Row, cores, median, pinned

STAGES, MICRO_BATCHES, TURNS = 2, 8, 3
MOST = 1.5


def run() -> Iterator[Row]:
    """The dense stack and the gpt; one process and a job in turn, the median ratio."""
    if len(cores()) < STAGES:
        yield Row("a rank's start", f"at most {MOST}x", "this machine has one core", False)
        return
    for model in ("dense", "gpt"):
        pairs = [(pinned("benchmarks.startup", cores()[:1], model), launch(model)) for _ in range(TURNS)]
        ratio = median([sum(job.values()) / sum(one.values()) for one, job in pairs])
        one, job = sorted(pairs, key=lambda pair: sum(pair[1].values()) / sum(pair[0].values()))[TURNS // 2]
        measured = f"{ratio:.2f}x: {describe(job)}; one process {describe(one)}"
        yield Row(
            f"{model}: a rank's start, over one process's, S = {STAGES}", f"at most {MOST}x", measured, ratio <= MOST
        )


def describe(parts: Mapping[str, float]) -> str:
    """The sum, and the parts, in seconds."""
    return f"{sum(parts.values()):.1f} s ({', '.join(f'{name} {seconds:.1f}' for name, seconds in parts.items())})"


def launch(model: str) -> dict[str, float]:
    """Seconds of the parts of the slower rank's start."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(STAGES)]
    command += [sys.executable, "-m", "benchmarks.startup", model]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def process_age(stat: Path = Path("/proc/self/stat")) -> float:
    """Seconds since this process was started, in steps of the system's clock tick."""
    # The command in parentheses may hold anything; the time of the start, in ticks since boot, is the 22nd field.
    ticks = int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def measure(model: str) -> dict[str, float]:
    """Seconds of the parts of this process's start, one after the other."""
    import dapple_tf as dapple

    marks = {"": 0.0}
    import tensorflow  # noqa: F401 - what takes the time

    marks["import"] = process_age()
    dapple.init(STAGES)
    marks["join"] = process_age()
    from benchmarks.workloads import MODELS

    timed = MODELS[model]()
    marks["model"] = process_age()
    step: Any = dapple.pipeline(
        timed.workload.loss_fn,
        optimizer=timed.workload.optimizer,
        stages=STAGES,
        micro_batches=MICRO_BATCHES,
        example_batch=timed.batch,
    )
    marks["agree, rewrite"] = process_age()
    float(step(*timed.batch))
    marks["first step"] = process_age()
    names = list(marks)
    return {name: marks[name] - marks[before] for before, name in itertools.pairwise(names)}


if __name__ == "__main__":
    parts = measure(sys.argv[1])
    from dapple_tf.distributed import membership

    job = membership.current()
    slowest = parts if job is None else max(job.gather(parts), key=lambda found: sum(found.values()))
    if job is None or job.rank == 0:
        print(json.dumps(slowest))
