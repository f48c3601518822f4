"""A large embedding with sparse gradients and with dense ones: seconds of a step, and bytes beside the weights.

Each run is a process of its own: two stages on two cores, the table in the first. The peak is that of the resident set
during steps (freed blocks are given back at once), above what there was once model and slots were built.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import Row, available_cores, median, run_on_cores

ROWS, WIDTH = 10**6, 64
SAMPLES, IDS, MICRO_BATCHES = 512, 16, 4
WARM_UP, STEPS = 2, 10
# The most that a step may take of one with dense gradients.
OPTIMIZERS = {"SGD": 0.5, "Adam": 1.0}
# glibc keeps freed blocks below these sizes.
_TRIM = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000", "TF_ENABLE_ONEDNN_OPTS": "0"}


def run() -> Iterator[Row]:
    """Yield the time and the peak of sparse gradients against dense ones, for each optimizer."""
    for optimizer, limit in OPTIMIZERS.items():
        sparse, dense = (
            run_on_cores("benchmarks.sparse_gradients", available_cores()[:2], optimizer, choice)
            for choice in ("exact", "dense")
        )
        what = f"{optimizer}, table of {ROWS} x {WIDTH}, batch of {SAMPLES} x {IDS} ids, M = {MICRO_BATCHES}"
        ratio = sparse["seconds"] / dense["seconds"]
        measured = f"{ratio:.0%} ({sparse['seconds'] * 1e3:.0f} ms, {dense['seconds'] * 1e3:.0f} ms)"
        yield Row(f"{what}: step with sparse over dense gradients", f"at most {limit:.0%}", measured, ratio <= limit)
        ratio = sparse["bytes"] / dense["bytes"]
        measured = f"{ratio:.0%} ({sparse['bytes'] / 1e6:.0f} MB, {dense['bytes'] / 1e6:.0f} MB)"
        yield Row(f"{what}: peak beside weights and slots, sparse over dense", "under 100%", measured, ratio < 1)


def measure(optimizer_name: str, choice: str) -> dict[str, Any]:
    """Return the seconds of a step (median), and the peak bytes beside weights and slots."""
    import keras
    import tensorflow as tf

    import dapple_tf as dapple

    dapple.init(2)
    keras.utils.set_random_seed(0)
    table = keras.layers.Embedding(ROWS, WIDTH, name="table")
    head = keras.layers.Dense(WIDTH, name="head")
    table.build()
    head.build((None, WIDTH))

    def loss_fn(ids: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(head(tf.reduce_mean(table(ids), 1)) - y))

    optimizer = getattr(keras.optimizers, optimizer_name)(0.01)
    optimizer.build([*table.trainable_variables, *head.trainable_variables])
    ids = tf.random.uniform([SAMPLES, IDS], maxval=ROWS, dtype=tf.int32, seed=1)
    batch = ids, tf.random.normal([SAMPLES, WIDTH], seed=2)
    before = _resident("VmRSS")
    step = dapple.pipeline(
        loss_fn, optimizer=optimizer, stages=["head"], micro_batches=MICRO_BATCHES, sparse_gradients=choice
    )
    for _ in range(WARM_UP):
        step(*batch)
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    taken = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        float(step(*batch))
        taken.append(time.perf_counter() - begin)
    return {"seconds": median(taken), "bytes": _resident("VmHWM") - before}


def _resident(key: str) -> int:
    """Return bytes from the process's status: VmRSS, the resident set now, or VmHWM, its peak."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in _TRIM.items()):
        command = [sys.executable, "-m", "benchmarks.sparse_gradients", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **_TRIM})
    import json

    print(json.dumps(measure(*sys.argv[1:])))
