"""Steps of two replicas of a whole model, a core each: gradients summed by native rings beside Horovod's, in turn.

Batches are small, so that the sums are a large part of a step. Both steps are in one job. That by Horovod is built as
in a job without native exchanges, so its barrier and its exchange of outputs are Horovod's too.
"""

from __future__ import annotations

from benchmarks.own_core import run_on_own_core

if __name__ == "__main__":  # before any library counts the cores
    run_on_own_core("OMPI_COMM_WORLD_LOCAL_RANK")

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.common import Row, median, print_on_rank_0, run_ranks, time_interleaved

WAYS = ("native", "horovod")
BATCHES = {"dense": 64, "gpt": 8}
REPLICAS, WARM_UP, STEPS = 2, 5, 60


def run() -> Iterator[Row]:
    """Yield a row for each model: medians of a step's time."""
    for name, native, horovod in run_ranks("benchmarks.all_reduce", REPLICAS, timeout=900):
        yield Row(
            f"{name}, {REPLICAS} replicas of {BATCHES[name] // REPLICAS} samples: native; Horovod",
            "native takes no longer",
            f"{native * 1e3:.1f} ms; {horovod * 1e3:.1f} ms ({native / horovod:.2f})",
            native <= horovod,
        )


def measure() -> list[tuple[str, float, float]]:
    """Return the name of each model, and the median seconds of a step both ways; all ranks call it."""
    from benchmarks.workloads import MODELS
    from dapple_tf.distributed.membership import current

    job = current()
    assert not job.is_alone, "start it with mpirun"
    assert job.exchange_network is not None, "the native exchange is not built: make horovod"
    network = job.exchange_network
    found = []
    for name, batch_size in BATCHES.items():
        calls: dict[str, Callable[[], Any]] = {}
        for way in WAYS:
            job.exchange_network = network if way == "native" else None
            calls[way] = _make_step(MODELS[name](batch_size=batch_size))
        time_interleaved(calls, WARM_UP)
        taken = time_interleaved(calls, STEPS)
        job.exchange_network = network
        found.append((name, *(median(taken[way]) for way in WAYS)))
    return found


def _make_step(timed: Any) -> Callable[[], Any]:
    """Return a function that runs one step."""
    import tensorflow as tf

    import dapple_tf as dapple

    workload, batch = timed.workload, timed.batch
    step = dapple.pipeline(
        workload.loss_fn, optimizer=workload.optimizer, stages=1, replicas=[REPLICAS], micro_batches=1
    )
    step.build(*batch)
    return lambda: float(tf.convert_to_tensor(step(*batch)))


if __name__ == "__main__":
    import dapple_tf as dapple

    dapple.init()
    print_on_rank_0(measure())
