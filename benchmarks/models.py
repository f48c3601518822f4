"""The example models at tiny scale: how long they take to build, and a step as two ranks beside one rank.

Each runs with two stages: one process that has both on one core, and two ranks with a core each.
"""

from __future__ import annotations

import sys

from benchmarks.own_core import run_on_own_core

if __name__ == "__main__":  # before any library counts the cores
    run_on_own_core("OMPI_COMM_WORLD_LOCAL_RANK")

import time
from collections.abc import Iterator
from typing import Any

from benchmarks.common import Row, available_cores, median, print_on_rank_0, run_on_cores, run_ranks

MODELS = ("amoebanet", "bert", "gnmt", "gpt", "gpt2", "llama", "moe", "resnet", "t5", "vgg", "vit", "xlnet")
SCALED = frozenset(MODELS) - {"gpt"}
STAGES, MICRO_BATCHES, STEPS = 2, 4, 7
BATCH_SIZE = 256  # so that a micro-batch of these small models takes longer than what surrounds it


def run() -> Iterator[Row]:
    """Yield a row for each model."""
    for name in MODELS:
        alone = run_on_cores("benchmarks.models", available_cores()[:1], name, "alone")
        ranks = run_ranks("benchmarks.models", STAGES, name, "ranks")
        loss = abs(ranks["loss"] / alone["loss"] - 1)
        yield Row(
            f"{name}, {alone['parameters'] / 1e6:.2f} M parameters",
            "-",
            f"CPU seconds: trace {alone['trace']:.1f}, passes {alone['passes']:.1f}, the build with its first run "
            f"{alone['build']:.1f}; two ranks over one {alone['step'] / ranks['step']:.2f}x "
            f"({1e3 * ranks['step']:.0f} ms, {1e3 * alone['step']:.0f} ms); losses within {loss:.0e}",
            loss < 1e-3,  # float32; the tests compare in float64
        )


def measure(name: str) -> dict[str, Any]:
    """Return what this process, or this job, takes to build the model, and seconds of a step."""
    import dapple_tf as dapple
    from dapple_tf import examples
    from dapple_tf.commands.model_loading import load_workload

    options = {"batch_size": BATCH_SIZE, **({"scale": "tiny"} if name in SCALED else {})}
    workload = load_workload(f"{examples.__name__}:{name}", options)
    batch = next(iter(workload.dataset))
    step = dapple.pipeline(
        workload.loss_fn, optimizer=workload.optimizer, stages=STAGES, micro_batches=MICRO_BATCHES, inexact="allow"
    )
    loss = float(step(*batch))
    taken = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step(*batch)
        taken.append(time.perf_counter() - begin)
    times = step.build_cpu_times
    return {
        "parameters": sum(v.shape.num_elements() for v in step.model(batch).model_variables.values() if v.trainable),
        "trace": times["trace"],
        "passes": times["passes"],
        "build": sum(times.values()),
        "step": median(taken),
        "loss": loss,
    }


if __name__ == "__main__":
    import dapple_tf as dapple

    dapple.init(None if sys.argv[2] == "ranks" else STAGES)
    print_on_rank_0(measure(sys.argv[1]))
