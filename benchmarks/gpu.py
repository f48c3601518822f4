"""Measure a pipelined gpt on a machine with GPUs, in one table: equality, memory, timelines, bubble and speed.

``python -m benchmarks gpu [--stages N] [--size tiny|small|large]``. Stages run in one process, on one GPU each or as
logical GPUs of fewer, and as ranks of a job. Without GPUs everything that needs none runs on logical CPU devices, and
the table says what was left out and why. Each part is a process, or a job, of its own.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import (
    Row,
    available_cores,
    median,
    print_rows,
    print_table,
    run_on_cores,
    run_ranks,
    time_interleaved,
)
from benchmarks.needs import find_missing_for_native_exchanges, find_missing_for_ranks

MODULE, PART_SECONDS = "benchmarks.gpu", 240.0
STEPS, RECORDED, MOST_MEMORY_ERROR, MOST_TIME_ERROR = 15, 3, 0.1, 0.1
_LOGICAL_MEGABYTES = 4096  # of each logical GPU, where one card has several


@dataclass(frozen=True)
class Size:
    """The gpt, and how it is cut: ``samples`` of a batch, into ``micro_batches``, over ``stages``."""

    layers: int
    width: int
    heads: int
    context: int
    samples: int
    micro_batches: int = 8
    stages: int = 2


SIZES = {
    "tiny": Size(layers=2, width=16, heads=2, context=8, samples=8, micro_batches=4),
    "small": Size(layers=4, width=128, heads=4, context=96, samples=64),  # for CPUs
    "large": Size(layers=16, width=1024, heads=16, context=512, samples=64),  # for GPUs
}


def run(size: str | None = None, stages: int | None = None) -> Iterator[Row]:
    """Yield all rows.

    ``size``: one of ``SIZES``, by default one that suits the machine. ``stages``: by default one for each GPU, at least
    two.
    """
    gpus = run_on_cores(MODULE, available_cores(), "count", "{}")
    found = SIZES[size or ("large" if gpus else "small")]
    wanted = dataclasses.replace(found, stages=stages or max(found.stages, min(gpus, found.layers)))
    devices = describe_devices(gpus, wanted.stages)
    yield Row("devices", "-", devices, ok=True)
    for question in find_questions():
        yield Row(f"{question}: asks for GPUs", "-", "yes" if gpus else "no", ok=True)
    for part in PARTS:
        yield from run_part(f"one process, {part}", functools.partial(_run_process, part, wanted))
    for way, missing in list_ways(gpus, wanted.stages).items():
        for part in ("equality", "recorded"):
            figure = f"{wanted.stages} ranks, {way} exchanges, {part}"
            if missing is not None:
                yield skip(figure, missing)
            else:
                yield from run_part(figure, functools.partial(_run_job, part, wanted, way))


def skip(figure: str, why: str) -> Row:
    """Return the row of what was left out."""
    return Row(figure, "-", f"left out: {why}", ok=True)


def describe_devices(gpus: int, stages: int) -> str:
    """Return where the stages of one process run."""
    if not gpus:
        return f"left out: this machine has no GPU; {stages} logical CPU devices in their place"
    return f"{gpus} GPUs, {stages} stages" + (", several logical GPUs a card" if gpus < stages else ", a card each")


def list_ways(gpus: int, ranks: int) -> Mapping[str, str | None]:
    """Return why a job cannot exchange tensors natively, or by Horovod, on this machine; None where it can."""
    horovod = find_missing_for_ranks()
    if horovod is None and gpus:
        import horovod.tensorflow as hvd

        if not hvd.nccl_built():
            horovod = "Horovod is built without NCCL: HOROVOD_GPU_OPERATIONS=NCCL, then make horovod"
        elif gpus < ranks:
            horovod = f"NCCL needs a GPU for each rank: there are {gpus} for {ranks}"
    return {"native": find_missing_for_native_exchanges(), "horovod": horovod}


def run_part(figure: str, measure: Callable[[], Any]) -> Iterator[Row]:
    """Yield the rows of a part, or a row that says how it failed: the others run all the same."""
    try:
        for row in measure():
            yield Row(**{**row, "figure": f"{figure}: {row['figure']}"})
    except Exception as error:  # whatever a driver or a library raises
        yield Row(figure, "runs", f"failed: {' '.join(str(error).split())[-300:]}", ok=False)


def _run_process(part: str, size: Size) -> Any:
    return run_on_cores(MODULE, available_cores(), part, json.dumps(asdict(size)), timeout=PART_SECONDS)


def _run_job(part: str, size: Size, way: str) -> Any:
    arguments = part, json.dumps(asdict(size))
    return run_ranks(MODULE, size.stages, *arguments, timeout=PART_SECONDS, variables={"DAPPLE_EXCHANGE": way})


# --- The places in the source that ask for GPUs


@dataclass(frozen=True)
class Question:
    """A place that asks whether there are GPUs, or whether Horovod has NCCL for them: a function of a module."""

    module: str
    function: str

    def __str__(self) -> str:
        return f"{self.module}.{self.function}"


def find_questions(root: Path = Path(__file__).parents[1] / "dapple_tf") -> tuple[Question, ...]:
    """Return the functions that hold the text "GPU", a kind of device, or ask ``nccl_built``, in a package's files."""
    found = []
    files = (Path(at, name) for at, _, names in os.walk(root, followlinks=True) for name in names)
    for path in sorted(path for path in files if path.suffix == ".py"):
        module = ".".join((root.name, *path.relative_to(root).with_suffix("").parts))
        text = path.read_text(encoding="utf-8")
        for function in ast.walk(ast.parse(text)) if "GPU" in text or "nccl_built" in text else ():
            if isinstance(function, ast.FunctionDef) and any(map(_asks, ast.walk(function))):
                found.append(Question(module, function.name))
    return tuple(found)


def _asks(node: ast.AST) -> bool:
    kind = isinstance(node, ast.Constant) and node.value == "GPU"
    return kind or (isinstance(node, ast.Attribute) and node.attr == "nccl_built")


# --- The parts, which a process of its own measures


def start_devices(stages: int) -> None:
    """Make as many devices as there are stages, before TensorFlow starts: GPUs, logical GPUs, or logical CPUs."""
    import tensorflow as tf

    import dapple_tf as dapple

    gpus = tf.config.list_physical_devices("GPU")
    each = -(-stages // max(1, len(gpus)))
    if gpus and each > 1 and dapple.size() == 1:
        for gpu in gpus:
            logical = tf.config.LogicalDeviceConfiguration(memory_limit=_LOGICAL_MEGABYTES)
            tf.config.set_logical_device_configuration(gpu, [logical] * each)
    dapple.init(None if gpus else stages)


def make_gpt(size: Size, dtype: str = "float32") -> tuple[Any, tuple[Any, ...]]:
    """Return the gpt with its optimizer, which scales the loss in float16, and a batch."""
    import keras

    from dapple_tf.examples.gpt import gpt

    made = gpt(
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        context=size.context,
        batch_size=size.samples,
        dtype=dtype,
    )
    if dtype == "mixed_float16":
        made = dataclasses.replace(made, optimizer=keras.optimizers.LossScaleOptimizer(made.optimizer))
    return made, next(iter(made.dataset))


def measure_equality(size: Size) -> Iterator[Row]:
    """Yield the errors of a step against one device: in three precisions, and compiled by XLA."""
    import dapple_tf as dapple

    for dtype, xla in (("float32", False), ("mixed_bfloat16", False), ("mixed_float16", False), ("float32", True)):
        gpt, batch = make_gpt(size, dtype)
        options: Any = {"stages": size.stages, "micro_batches": size.micro_batches, "jit_compile": xla}
        report = dapple.verify(gpt.loss_fn, optimizer=gpt.optimizer, batch=batch, **options)
        tolerance = max(difference.tolerance for difference in report.differences)
        errors = ", ".join(f"{what} {error:.0e}" for what, error in report.plain.errors.items())
        scaled = ", the loss scaled" if dtype == "mixed_float16" else ""
        figure = f"a step of the gpt in {dtype}{scaled}{', by XLA' if xla else ''}, against one device"
        yield Row(figure, f"at most {tolerance:.0e}", errors, report.ok)


def measure_recorded(size: Size) -> Iterator[Row]:
    """Yield memory, timeline and bubble of a recorded step beside what was predicted."""
    import tensorflow as tf

    step, batch = _make_step(size)
    for _ in range(RECORDED):
        step.record(*batch, ops=True)
    yield from compare_memory(step.report)
    timeline, predicted = step.timeline, step.recording.predicted.timeline
    clock = "the devices' clocks" if tf.config.list_logical_devices("GPU") else "the host's clock, which CPUs share"
    plain = median(time_interleaved({"step": lambda: float(step(*batch))}, RECORDED)["step"])
    ratio = timeline.step_seconds / plain
    figure = f"the timeline's step, by {clock}, over a step"
    text = f"{ratio - 1:+.1%} ({timeline.step_seconds * 1e3:.1f} ms, {len(timeline.ops)} ops in its actions)"
    yield Row(figure, "within 10%", text, abs(ratio - 1) <= MOST_TIME_ERROR)
    more = timeline.bubble - predicted.bubble
    text = f"{more:+.1%} of the step ({timeline.bubble:.1%}, {predicted.bubble:.1%})"
    yield Row("the bubble, beyond that of the simulated schedule", "within 10%", text, abs(more) <= MOST_TIME_ERROR)


def compare_memory(report: Any) -> Iterator[Row]:
    """Yield a row for each stage whose device was measured, or one for all that share an allocator."""
    if report.measured is not None:
        yield skip("memory per stage", "logical CPU devices share one allocator")
        yield _memory_row("all stages", report.predicted, report.measured)
    for stage in report.stages:
        if stage.measured is not None:
            yield _memory_row(f"stage {stage.predicted.stage}", stage.predicted.in_step, stage.measured)
    if report.measured is None and all(stage.measured is None for stage in report.stages):
        yield skip("memory per stage", "neither TensorFlow nor the C library counts it")


def _memory_row(what: str, predicted: int, measured: Any) -> Row:
    error = predicted / max(1, measured.above_start) - 1
    text = f"{error:+.0%} ({predicted / 1e6:.0f} MB, {measured.above_start / 1e6:.0f} MB by {measured.source})"
    by_allocator = measured.source == "allocator"
    figure = f"memory of {what} in a step, predicted over measured"
    return Row(figure, "within 10%" if by_allocator else "-", text, not by_allocator or abs(error) <= MOST_MEMORY_ERROR)


def measure_speed(size: Size) -> Iterator[Row]:
    """Yield the seconds of a step, its FLOP/s and their share of the device's peak: one device, and the pipeline."""
    from dapple_tf.commands.training_loop import plain_step
    from dapple_tf.devices import list_devices
    from dapple_tf.profiler.peaks import PEAKS, Peak
    from dapple_tf.profiling.analytic import analytic_profile
    from dapple_tf.profiling.measured import describe_device

    gpt, batch = make_gpt(size)
    counted = analytic_profile(gpt.loss_fn, batch, Peak("operations", 1.0, math.inf, 0.0, 1.0))
    operations = sum(layer.forward_seconds + layer.backward_seconds for layer in counted.layers)
    device = describe_device()
    peak = next((peak for peak in PEAKS if peak.name.lower() in device.lower()), None)
    plain = plain_step(gpt)
    steps: dict[str, Callable[[], Any]] = {"one device": lambda: float(plain(*batch))}
    for name, xla in (("the pipeline", False), ("the pipeline by XLA", True)):
        step, _ = _make_step(size, xla)
        steps[name] = lambda step=step: float(step(*batch))
    time_interleaved(steps, 3)
    taken = time_interleaved(steps, STEPS)
    for name, seconds in taken.items():
        devices = 1 if name == "one device" else min(size.stages, len(list_devices()))
        rate = operations / median(seconds) / devices
        share = "" if peak is None else f", {rate / peak.flops_per_second:.1%} of the peak of a {peak.name}"
        speedup = median([one / own for one, own in zip(taken["one device"], seconds, strict=True)])
        text = f"{median(seconds) * 1e3:.1f} ms, {speedup:.2f}x, {rate / 1e12:.3f} TFLOP/s on each of {devices}{share}"
        yield Row(f"{name}, {operations / 1e12:.3f} TFLOP a step, on {device}", "-", text, ok=True)
    if peak is None:
        known = ", ".join(peak.name for peak in PEAKS)
        yield skip("share of the peak (MFU)", f"the peak of {device} is not known; those of {known} are")


def _make_step(size: Size, xla: bool = False) -> tuple[Any, tuple[Any, ...]]:
    import dapple_tf as dapple

    gpt, batch = make_gpt(size)
    options: Any = {"stages": size.stages, "micro_batches": size.micro_batches, "jit_compile": xla}
    return dapple.pipeline(gpt.loss_fn, optimizer=gpt.optimizer, **options), batch


PARTS: Mapping[str, Callable[[Size], Iterator[Row]]] = {
    "equality": measure_equality,
    "recorded": measure_recorded,
    "speed": measure_speed,
}


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 1 where a figure misses what is wanted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--size", choices=list(SIZES), help="of the gpt (default: large with GPUs, small without)")
    parser.add_argument("--stages", type=int, help="default: as many as there are GPUs, at least two")
    options = parser.parse_args(arguments)
    return 1 if print_table(run(options.size, options.stages)) else 0


if __name__ == "__main__":
    what, given = sys.argv[1:]
    if what == "count":
        import tensorflow as tf

        print(len(tf.config.list_physical_devices("GPU")))
    else:
        import dapple_tf as dapple

        chosen = Size(**json.loads(given))
        start_devices(chosen.stages)
        rows = list(PARTS[what](chosen))
        if dapple.rank() == 0:
            print_rows(rows)
