"""The first step of a BERT of keras_hub: CPU seconds and peak memory, plain Keras beside a pipeline of two stages.

Each is measured in a process of its own. CPU seconds (user and system, all threads) are least disturbed by other work
on the machine. Building is all that happens before a step can run, and the first step is part of both sides.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import Row, available_cores, run_on_cores

STAGES, MICRO_BATCHES, SAMPLES, HEAD_WIDTH = 2, (1, 8, 32), 32, 64
MOST_CPU_RATIO, MOST_CPU_RATIO_AUTO, MOST_MEMORY_RATIO = 1.5, 2.5, 1.3
TIMEOUT_SECONDS = 3600.0
PLAIN, AUTO = "plain", "auto"


@dataclass(frozen=True)
class Size:
    """The size of a BERT. The default has 24 layers and 91 million parameters."""

    layers: int = 24
    width: int = 512
    words: int = 30522
    length: int = 16


@dataclass(frozen=True)
class Cost:
    """``seconds`` of CPU by phase, peak ``memory`` of the process in bytes, and CPU seconds of a later ``step``."""

    seconds: Mapping[str, float]
    memory: int
    step: float

    @property
    def total(self) -> float:
        """CPU seconds of all phases."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items())
        return f"{self.total:.1f} s ({phases}), {self.memory / 1e9:.2f} GB, later steps {self.step:.1f} s"


def run() -> Iterator[Row]:
    """Yield the figures of plain Keras, of two stages with each M, and of ``stages="auto"``."""
    plain = measure_in_process(PLAIN, 1)
    yield Row("plain Keras: trace and first step", "", str(plain), ok=True)
    for m in MICRO_BATCHES:
        yield compare(f"S = {STAGES}, M = {m}", measure_in_process(str(STAGES), m), plain, MOST_CPU_RATIO)
    yield compare(f'stages="auto", M = {MICRO_BATCHES[1]}', measure_in_process(AUTO, 8), plain, MOST_CPU_RATIO_AUTO)


def compare(figure: str, cost: Cost, plain: Cost, most: float) -> Row:
    """Return the row of ``cost`` over that of plain Keras, which may need ``most`` times the seconds."""
    seconds, memory = cost.total / plain.total, cost.memory / plain.memory
    return Row(
        f"{figure}: build and first step, over plain",
        f"CPU at most {most}x, memory at most {MOST_MEMORY_RATIO}x",
        f"CPU {seconds:.2f}x, memory {memory:.2f}x: {cost}",
        seconds <= most and memory <= MOST_MEMORY_RATIO,
    )


def measure_in_process(stages: str, micro_batches: int, size: Size | None = None) -> Cost:
    """Return the cost of one first step, in a process of its own; for ``stages`` see ``measure``."""
    arguments = [stages, str(micro_batches), json.dumps(asdict(size or Size()))]
    found = run_on_cores("benchmarks.first_step", available_cores(), *arguments, timeout=TIMEOUT_SECONDS)
    return Cost(**found)


def measure(stages: str, micro_batches: int, size: Size) -> Cost:
    """Return the cost of a first step in this process. ``stages``: a number, "auto", or "plain" for plain Keras."""
    import dapple_tf as dapple

    dapple.init(STAGES)
    loss_fn, optimizer, batch = make_training(size)
    begin = time.process_time()
    if stages == PLAIN:
        step, phases = trace_plain(loss_fn, optimizer, batch)
        step(*batch).numpy()
        seconds = {**phases, "first run": time.process_time() - begin - sum(phases.values())}
    else:
        count = stages if stages == AUTO else int(stages)
        step = dapple.pipeline(loss_fn, optimizer=optimizer, stages=count, micro_batches=micro_batches)
        float(step(*batch))
        phases = step.build_cpu_times
        seconds = {**phases, "rest": time.process_time() - begin - sum(phases.values())}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Cost(seconds, memory, time_later_step(lambda: float(step(*batch))))


def make_training(size: Size) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """Return the loss, the optimizer and a batch of a classifier with keras_hub's BERT as its backbone."""
    import keras
    import keras_hub
    import numpy as np
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=size.words,
        num_layers=size.layers,
        num_heads=size.width // HEAD_WIDTH,
        hidden_dim=size.width,
        intermediate_dim=4 * size.width,
        max_sequence_length=size.length,
    )
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=None)
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss_fn(words: Any, segments: Any, mask: Any, labels: Any) -> Any:
        inputs = {"token_ids": words, "segment_ids": segments, "padding_mask": mask}
        return crossentropy(labels, model(inputs, training=True))

    random = np.random.default_rng(0)
    shape = (SAMPLES, size.length)
    words = tf.constant(random.integers(1, size.words, shape), tf.int32)
    labels = tf.constant(random.integers(0, 2, SAMPLES))
    return loss_fn, keras.optimizers.AdamW(1e-4), (words, tf.zeros(shape, tf.int32), tf.ones(shape, tf.int32), labels)


def trace_plain(
    loss_fn: Callable[..., Any], optimizer: Any, batch: tuple[Any, ...]
) -> tuple[Callable[..., Any], dict[str, float]]:
    """Return a step of plain Keras, and the CPU seconds of tracing it."""
    import tensorflow as tf

    begin = time.process_time()

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow is not typed
    def step(*tensors: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(*tensors)
        variables = tape.watched_variables()
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    step.get_concrete_function(*batch)
    return step, {"trace": time.process_time() - begin}


def time_later_step(step: Callable[[], Any]) -> float:
    """Return the least CPU seconds of three further steps."""
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        step()
        seconds.append(time.process_time() - begin)
    return min(seconds)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    stages, micro_batches, size = sys.argv[1:]
    print(json.dumps(asdict(measure(stages, int(micro_batches), Size(**json.loads(size))))))
