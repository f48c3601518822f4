"""Record a training step, and read from its timeline what made the step as long as it is.

Run it with ``python examples/read_a_timeline.py [FOLDER]`` (by default FOLDER is ``out``).

It prints the summary of a measured step and of its prediction, the order in which stage 0 ran its actions, the longest
parts of the critical path, and what ``step.report`` says about memory. It writes the step to FOLDER as a picture
(``timeline.png``) and as a trace (``timeline.json``), which https://ui.perfetto.dev and ``dapple timeline`` read.
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple


def main(folder: Path = Path("out")) -> None:
    """Record a step of two stages and eight micro-batches."""
    dapple.init()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(512, "relu", name=f"dense_{i}") for i in range(6)]
    model = keras.Sequential([keras.Input([512]), *layers])

    def loss_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(model(x, training=True) - y))

    numbers = np.random.default_rng(0)
    x, y = (numbers.normal(size=(512, 512)).astype("float32") for _ in range(2))
    step = dapple.pipeline(
        loss_fn, optimizer=keras.optimizers.SGD(0.01), stages=["dense_3"], micro_batches=8, schedule="dapple-a"
    )
    step.record(x, y)  # trains as a call of `step` does, and takes the times

    print(step.recording)  # the measured step, its prediction, and the error of that
    print("stage 0 ran", " ".join(str(action) for action in step.timeline.order(stage=0)))
    for part in sorted(step.timeline.critical_path, key=lambda part: -part.seconds)[:3]:
        print(f"on the critical path: {part}, {part.seconds * 1e3:.2f} ms")
    print(step.report)
    folder.mkdir(parents=True, exist_ok=True)
    step.timeline.save(folder / "timeline.png")
    step.timeline.save(folder / "timeline.json")
    print(f"written to {folder}: timeline.png, timeline.json")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
