"""The sum of a profile's layers against the whole model, the spread of profiles, and the time that one takes."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import dapple_tf as dapple
from benchmarks.common import Row, available_cores, median, print_rows, run_on_cores

ROUNDS = 3


def run() -> Iterator[Row]:
    """Yield the project's models, at the micro-batch sizes of typical training jobs."""
    for model, size in (("gpt", 8), ("gpt", 64), ("vgg", 8), ("resnet", 8)):
        # A profile limits itself to the cores of one device, so all cores are offered.
        yield from (Row(**row) for row in run_on_cores("benchmarks.profile", available_cores(), model, str(size)))


def measure(model: str, size: int) -> list[Row]:
    """Profile one model several times."""
    from dapple_tf.commands.model_loading import load_workload
    from dapple_tf.profiling.measured import disagreement

    workload = load_workload(f"models/{model}.py:{model}", {"batch_size": size})
    batch: Any = next(iter(workload.dataset))
    off, totals, taken = [], [], []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dapple.errors.DappleWarning)  # the row shows it
            profile = dapple.profile(workload.loss_fn, batch)
        taken.append(time.perf_counter() - begin)
        off.append(disagreement(profile) or 0.0)
        totals.append(sum(layer.forward_seconds + layer.backward_seconds for layer in profile.layers))
    worst = max(off, key=abs)
    spread = max(totals) / min(totals) - 1
    figure = f"{model}, {size} samples: "
    return [
        Row(
            f"{figure}sum over {len(profile.layers)} layers from the whole model, worst of {ROUNDS}",
            "within 10%",
            f"{worst:+.1%} ({median(totals) * 1e3:.0f} ms)",
            abs(worst) <= 0.10,
        ),
        Row(
            f"{figure}largest total of {ROUNDS} profiles over the smallest",
            "at most +10%",
            f"{spread:+.1%}",
            spread <= 0.10,
        ),
        Row(f"{figure}seconds to profile, median", "reported", f"{median(taken):.1f} s", True),
    ]


if __name__ == "__main__":
    dapple.init(8)
    print_rows(measure(sys.argv[1], int(sys.argv[2])))
