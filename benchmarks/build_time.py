"""CPU seconds of building a step of BERT, a GPT, ResNet-50 and chains of many micro-batches, beside an earlier one.

``python -m benchmarks build_time --against COMMIT [--turns N] [--models NAME ...]``: each build is a process of its
own, or a job of two ranks, of which rank 0 is measured. The builds of the two commits, whose files are checked out into
a temporary folder, take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import Row

MOST_RATIO = 1.03
_ROOT = Path(__file__).parents[1]
_TIMEOUT_SECONDS = 1800.0
Training = tuple[Callable[..., Any], Any, tuple[Any, ...]]


class Build(NamedTuple):
    """The CPU ``seconds`` of a build with its first run, the process's peak of memory, and the ops of its graph."""

    seconds: float
    megabytes: float
    ops: int


def run() -> Iterator[Row]:
    """Yield the seconds of each model, built once at the present commit."""
    for model in MODELS:
        yield Row(f"{model}: building a step", "", f"{measure_in_process(model, _ROOT).seconds:.1f} s of CPU", ok=True)


def compare(commit: str, turns: int, models: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each model: the median over ``turns`` of its CPU seconds here, divided by those of ``commit``."""
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        subprocess.run(["git", "-C", str(_ROOT), "worktree", "add", "--detach", str(other), commit], check=True)
        try:
            for model in models:
                pairs = [_measure_pair(model, other, turn) for turn in range(turns)]
                now, then = (_median_of(builds) for builds in zip(*pairs, strict=True))
                ratio = statistics.median(one.seconds / two.seconds for one, two in pairs)
                found = (
                    f"{ratio:.3f}x: {now.seconds:.1f} s and {then.seconds:.1f} s of CPU, {now.megabytes:.0f} and "
                    f"{then.megabytes:.0f} MB, {now.ops} and {then.ops} ops, medians of {turns} turns"
                )
                yield Row(
                    f"{model}: building a step, over {commit}", f"at most {MOST_RATIO}x", found, ratio <= MOST_RATIO
                )
        finally:
            subprocess.run(["git", "-C", str(_ROOT), "worktree", "remove", "--force", str(other)], check=True)


def _median_of(builds: Sequence[Build]) -> Build:
    seconds, megabytes, ops = (statistics.median(values) for values in zip(*builds, strict=True))
    return Build(seconds, megabytes, round(ops))


def _measure_pair(model: str, other: Path, turn: int) -> tuple[Build, Build]:
    """Return a build here and one in ``other``; each goes first in every other turn."""
    roots = (_ROOT, other) if turn % 2 == 0 else (other, _ROOT)
    builds = {root: measure_in_process(model, root) for root in roots}
    return builds[_ROOT], builds[other]


def measure_in_process(model: str, root: Path) -> Build:
    """Return a build of a step of the model with the files in ``root``."""
    from benchmarks.common import run_for_json  # not at the top: the process that builds may have an earlier commit's

    ranks = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(MODELS[model].stages)]
    command = [*(["mpirun", *ranks] if MODELS[model].ranks else []), sys.executable, __file__, model]
    variables = {"PYTHONPATH": str(root)}
    return Build(*run_for_json(command, variables=variables, folder=root, timeout=_TIMEOUT_SECONDS))


def build(model: Model) -> Build:
    """Build a step of the model in this process, or as one of its ranks, and run it."""
    import dapple_tf as dapple

    dapple.init(None if model.ranks else model.stages)
    loss_fn, optimizer, batch = model.make()
    step = dapple.pipeline(loss_fn, optimizer=optimizer, stages=model.stages, micro_batches=model.micro_batches)
    step(*batch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    graph = step.graph_def
    ops = len(graph.node) + sum(len(function.node_def) for function in graph.library.function)
    return Build(sum(step.build_cpu_times.values()), peak, ops)


def _bert() -> Training:
    from benchmarks.first_step import Size, make_training

    return make_training(Size(layers=12))


def _gpt() -> Training:
    from dapple_tf.examples.gpt import gpt

    return _of_workload(gpt(batch_size=16))


def _resnet() -> Training:
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)
    crossentropy = keras.losses.SparseCategoricalCrossentropy()
    batch = tf.random.stateless_uniform([16, 64, 64, 3], [1, 2]), tf.range(16) % 10
    return lambda x, y: crossentropy(y, model(x, training=False)), keras.optimizers.SGD(0.1), batch


def _chain() -> Training:
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(32, activation="tanh") for _ in range(8)]
    model = keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dense(1)])
    error = keras.losses.MeanSquaredError()
    batch = tf.random.stateless_uniform([1024, 32], [1, 2]), tf.random.stateless_uniform([1024, 1], [3, 4])
    return lambda x, y: error(y, model(x)), keras.optimizers.Adam(), batch


def _of_workload(workload: Any) -> Training:
    return workload.loss_fn, workload.optimizer, tuple(next(iter(workload.dataset)))


class Model(NamedTuple):
    """A model to build: ``make`` returns its loss, optimizer and batch. ``ranks``: each stage is a rank of a job."""

    make: Callable[[], Training]
    stages: int
    micro_batches: int
    ranks: bool = False


MODELS: Mapping[str, Model] = {
    "BERT": Model(_bert, 2, 8),
    "gpt": Model(_gpt, 2, 8),
    "ResNet-50": Model(_resnet, 2, 8),
    **{f"chain-{m}": Model(_chain, 4, m) for m in (16, 128, 1024)},
    **{f"chain-{m} on ranks": Model(_chain, 2, m, ranks=True) for m in (16, 128, 1024)},
}


def main(arguments: Sequence[str]) -> int:
    """Print the table of ``compare``; return 1 where a build takes longer than it may."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks build_time", description=__doc__)
    parser.add_argument("--against", metavar="COMMIT", required=True, help="the earlier commit")
    parser.add_argument("--turns", type=int, default=5, help="builds of each model at each commit (default 5)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all")
    options = parser.parse_args(arguments)
    from benchmarks.common import print_table  # not in the earlier commits, with whose files this module is run too

    return 1 if print_table(compare(options.against, options.turns, options.models)) else 0


if __name__ == "__main__":
    made = build(MODELS[sys.argv[1]])
    if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        print(json.dumps(made))
