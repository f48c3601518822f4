"""The cost of whole training steps: a plain loss given as a step beside ``dapple.pipeline``, and a GAN in two ways.

The GAN is trained by one step of two losses, whose forward runs once (as TensorFlow's DCGAN tutorial has it), by a step
of two phases (critic, then generator), by two pipelines of a loss each, which users would write by hand, and on one
device. Each is measured in a process of its own; seconds are CPU seconds (user and system, all threads), which other
work on the machine disturbs less than wall time. The picture of the step of two phases is saved beside.

On two ranks the layers of a generator and of a critic sleep in place of computing, so that cores do not matter: there
the step of two phases is compared by its wall time with two pipelines, which run in turn, and with the simulator.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.common import Row, available_cores, median, run_on_cores, run_ranks

STAGES, MICRO_BATCHES, SAMPLES, WIDTH = 2, 8, 512, 512
MOST_BUILD_RATIO, MOST_STEP_RATIO, MOST_SHARED_RATIO = 1.10, 1.05, 0.85
LOSS_KINDS, GAN_KINDS = ("pipeline", "step"), ("one device", "two pipelines", "two phases", "one forward")
ROUNDS, TURNS, TIMEOUT_SECONDS = 9, 7, 1800.0
PICTURE, PICTURE_OF_RANKS = "out/train_step_phases.png", "out/train_step_ranks.png"
# A step of these waits takes 0.53 s where its phases run in turn, and 0.49 s where they overlap.
# Seconds of a forward and of a backward.
GENERATOR, CRITIC, WAITING_MICRO_BATCHES = (0.04, 0.04), (0.02, 0.02), 4
MOST_OVERLAPPED_RATIO, MOST_OVER_SIMULATED = 0.95, 1.05


def run() -> Iterator[Row]:
    """Yield the rows: build and step of a plain loss, medians of several turns, then the steps of the GAN."""
    turns = [{kind: measure_in_process("loss", kind) for kind in LOSS_KINDS} for _ in range(TURNS)]
    plain = {
        kind: {name: median([turn[kind][name] for turn in turns]) for name in turns[0][kind]} for kind in LOSS_KINDS
    }
    yield compare(
        "a plain loss: build as a step, over dapple.pipeline",
        plain["step"],
        plain["pipeline"],
        "build",
        MOST_BUILD_RATIO,
    )
    yield compare(
        "a plain loss: later steps as a step, over dapple.pipeline",
        plain["step"],
        plain["pipeline"],
        "step",
        MOST_STEP_RATIO,
    )
    gan = {kind: measure_in_process("gan", kind) for kind in GAN_KINDS}
    yield compare(
        "a GAN: one forward, over two phases", gan["one forward"], gan["two phases"], "step", MOST_SHARED_RATIO
    )
    yield compare(
        "a GAN: two phases, over two pipelines by hand",
        gan["two phases"],
        gan["two pipelines"],
        "step",
        MOST_STEP_RATIO,
    )
    for kind, found in gan.items():
        measured = f"{1e3 * found['wall']:.0f} ms, CPU {1e3 * found['step']:.0f} ms"
        yield Row(f"a GAN, {kind}: seconds of a step", "", measured, ok=True)
    yield from compare_waits()


def compare_waits() -> Iterator[Row]:
    """Yield the rows of a generator and a critic that wait, on two ranks."""
    kinds = "two pipelines", "two phases"
    pipelines, phases = (
        run_ranks("benchmarks.train_step", STAGES, "waits", kind, timeout=TIMEOUT_SECONDS) for kind in kinds
    )
    yield compare(
        "a GAN that waits, on two ranks: two phases, over two pipelines (wall time)",
        phases,
        pipelines,
        "wall",
        MOST_OVERLAPPED_RATIO,
    )
    yield compare(
        "a GAN that waits, on two ranks: two phases, over the simulated step (wall time)",
        phases,
        {"wall": phases["simulated"]},
        "wall",
        MOST_OVER_SIMULATED,
    )


def compare(figure: str, found: dict[str, float], base: dict[str, float], key: str, most: float) -> Row:
    """Return the row of the seconds ``key`` of ``found`` over those of ``base``."""
    ratio = found[key] / base[key]
    measured = f"{ratio:.2f}x ({found[key]:.3f} s, {base[key]:.3f} s)"
    return Row(figure, f"at most {most:.2f}x", measured, ratio <= most)


def measure_in_process(what: str, kind: str) -> dict[str, float]:
    """Return CPU seconds of ``build`` and of a ``step``, and its ``wall`` seconds, in a process of its own."""
    found = run_on_cores("benchmarks.train_step", available_cores(), what, kind, timeout=TIMEOUT_SECONDS)
    return {name: float(value) for name, value in found.items()}


def measure(what: str, kind: str) -> dict[str, float]:
    """Return what ``measure_in_process`` does, in this process."""
    import dapple_tf as dapple

    dapple.init(STAGES)
    step, batch, recorded = _make_loss(kind) if what == "loss" else _make_gan(kind)
    begin = time.process_time()
    step(*batch)
    build = time.process_time() - begin
    cpu, wall = [], []
    for _ in range(ROUNDS):
        first, start = time.process_time(), time.perf_counter()
        step(*batch)
        cpu.append(time.process_time() - first)
        wall.append(time.perf_counter() - start)
    if recorded is not None:
        recorded.record(*batch)
        os.makedirs(os.path.dirname(PICTURE), exist_ok=True)
        recorded.timeline.save(PICTURE)
    return {"build": build, "step": min(cpu), "wall": min(wall)}


def measure_waits(kind: str) -> None:
    """Measure a GAN that waits, as a rank; rank 0 prints the median ``wall`` seconds of a step, as JSON.

    Of a step of two phases also the ``simulated`` seconds.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    import dapple_tf as dapple
    from benchmarks.waits import pause, start_waiting

    class Wait(keras.layers.Layer):
        """``x * weight`` of four columns, with a sleep in forward, and one in backward where there is any.

        What sleeps is the weight, which has no rows: so it is known that each row is computed by itself.
        """

        def __init__(self, seconds: tuple[float, float], name: str) -> None:
            super().__init__(name=name)
            self.seconds, self.turn = seconds, threading.Lock()
            self.weight = self.add_weight(shape=(4,), initializer="ones")

        def call(self, x: Any) -> Any:
            forward, backward = self.seconds

            @tf.custom_gradient
            def multiply(x: Any, weight: Any) -> Any:
                def differentiate(dy: Any) -> tuple[Any, Any]:
                    later = pause(weight, backward, self.turn)
                    return dy * later, tf.reduce_sum(dy * x, 0) + 0 * later

                return x * pause(weight, forward, self.turn), differentiate

            return multiply(x, tf.convert_to_tensor(self.weight))

    start_waiting(STAGES)
    generator, critic = Wait(GENERATOR, "generator"), Wait(CRITIC, "critic")

    def of_critic(real: Any, noise: Any) -> Any:
        return tf.reduce_mean(tf.square(critic(generator(noise)) - real))

    def of_generator(noise: Any) -> Any:
        return tf.reduce_mean(tf.square(critic(generator(noise)) - 1))

    def descend(tape: Any, loss: Any, weight: Any) -> None:
        weight.assign_sub(0.01 * tape.gradient(loss, weight))

    def two_phases(real: Any, noise: Any) -> Any:
        with tf.GradientTape() as tape:
            critic_loss = of_critic(real, noise)
        descend(tape, critic_loss, critic.weight)
        with tf.GradientTape() as tape:
            generator_loss = of_generator(noise)
        descend(tape, generator_loss, generator.weight)
        return critic_loss, generator_loss

    def alone(loss_of: Callable[..., Any], weight: Any) -> Callable[..., Any]:
        def train_step(*batch: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(*batch)
            descend(tape, loss, weight)
            return loss

        return train_step

    options: dict[str, Any] = {"stages": ["critic"], "micro_batches": WAITING_MICRO_BATCHES, "inexact": "allow"}
    random = np.random.default_rng(0)
    real, noise = (tf.constant(random.normal(size=(64, 4)), tf.float32) for _ in range(2))
    if kind == "two phases":
        step = dapple.train_step(two_phases, **options)
        wall = _median_wall(lambda: step(real, noise))
        step.record(real, noise)
        found = {"wall": wall, "simulated": step.timeline.simulated_seconds}
        if dapple.rank() == 0:
            os.makedirs(os.path.dirname(PICTURE_OF_RANKS), exist_ok=True)
            step.timeline.save(PICTURE_OF_RANKS)
    else:
        first = dapple.train_step(alone(of_critic, critic.weight), **options)
        second = dapple.train_step(alone(of_generator, generator.weight), **options)
        found = {"wall": _median_wall(lambda: (first(real, noise), second(noise)))}
    if dapple.rank() == 0:
        print(json.dumps(found))


def _median_wall(step: Callable[[], Any]) -> float:
    step()
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


def _mlp(inputs: int, outputs: int) -> Any:
    import keras

    layers = [keras.layers.Dense(WIDTH, "relu") for _ in range(6)]
    return keras.Sequential([keras.Input([inputs]), *layers, keras.layers.Dense(outputs)])


def _make_loss(kind: str) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """Return a step of a plain loss, a batch, and None."""
    import keras
    import numpy as np
    import tensorflow as tf

    import dapple_tf as dapple

    keras.utils.set_random_seed(0)
    model, optimizer = _mlp(64, 1), keras.optimizers.Adam(1e-3)

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(y - model(x, training=True)))

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(x, y)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    options: dict[str, Any] = {"stages": STAGES, "micro_batches": MICRO_BATCHES}
    step: Any
    if kind == "step":
        step = dapple.train_step(train_step, **options)
    else:
        step = dapple.pipeline(loss_fn, optimizer=optimizer, **options)
    random = np.random.default_rng(0)
    batch = tuple(tf.constant(random.normal(size=(SAMPLES, width)), tf.float32) for width in (64, 1))
    return step, batch, None


def _make_gan(kind: str) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """Return a step of a generator and a critic, a batch, and the step to record, if any."""
    import keras
    import numpy as np
    import tensorflow as tf

    import dapple_tf as dapple

    keras.utils.set_random_seed(0)
    generator, critic = _mlp(64, 256), _mlp(256, 1)
    optimizers = [keras.optimizers.Adam(1e-3) for _ in range(2)]
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def losses(real: Any, noise: Any) -> tuple[Any, Any]:
        made = generator(noise, training=True)
        of_real, of_made = critic(real, training=True), critic(made, training=True)
        of_critic = cross_entropy(tf.ones_like(of_real), of_real) + cross_entropy(tf.zeros_like(of_made), of_made)
        return of_critic, cross_entropy(tf.ones_like(of_made), of_made)

    def update(optimizer: Any, tape: Any, loss: Any, model: Any) -> None:
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def one_forward(real: Any, noise: Any) -> Any:
        with tf.GradientTape() as of_critic, tf.GradientTape() as of_generator:
            critic_loss, generator_loss = losses(real, noise)
        variables = generator.trainable_variables, critic.trainable_variables
        gradients = of_generator.gradient(generator_loss, variables[0]), of_critic.gradient(critic_loss, variables[1])
        for optimizer, own, of in zip(optimizers, gradients, variables, strict=True):
            optimizer.apply_gradients(zip(own, of, strict=True))
        return critic_loss, generator_loss

    def two_phases(real: Any, noise: Any) -> Any:
        with tf.GradientTape() as tape:
            critic_loss, _ = losses(real, noise)
        update(optimizers[1], tape, critic_loss, critic)
        with tf.GradientTape() as tape:
            of_made = critic(generator(noise, training=True), training=True)
            generator_loss = cross_entropy(tf.ones_like(of_made), of_made)
        update(optimizers[0], tape, generator_loss, generator)
        return critic_loss, generator_loss

    options: dict[str, Any] = {"stages": STAGES, "micro_batches": MICRO_BATCHES}
    random = np.random.default_rng(0)
    batch = tuple(tf.constant(random.normal(size=(SAMPLES, width)), tf.float32) for width in (256, 64))
    if kind == "one device":
        return tf.function(two_phases), batch, None
    if kind == "two pipelines":
        return _two_pipelines(generator, critic, optimizers, cross_entropy, losses, options), batch, None
    step = dapple.train_step(one_forward if kind == "one forward" else two_phases, **options)
    return step, batch, step if kind == "two phases" else None


def _two_pipelines(
    generator: Any, critic: Any, optimizers: Any, cross_entropy: Any, losses: Callable[..., Any], options: Any
) -> Callable[..., Any]:
    """Return a step that calls a pipeline for the critic's loss, then one for the generator's."""
    import tensorflow as tf

    import dapple_tf as dapple

    def of_critic(real: Any, noise: Any) -> Any:
        generator.trainable, critic.trainable = False, True
        return losses(real, noise)[0]

    def of_generator(noise: Any) -> Any:
        generator.trainable, critic.trainable = True, False
        of_made = critic(generator(noise, training=True), training=True)
        return cross_entropy(tf.ones_like(of_made), of_made)

    first = dapple.pipeline(of_critic, optimizer=optimizers[1], **options)
    second = dapple.pipeline(of_generator, optimizer=optimizers[0], **options)
    return lambda real, noise: (first(real, noise), second(noise))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if sys.argv[1] == "waits":
        measure_waits(sys.argv[2])
    else:
        print(json.dumps(measure(*sys.argv[1:])))
