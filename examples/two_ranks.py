"""Train as a job of two processes (ranks), one device each.

Run it with ``mpirun -np 2 python train.py``, where ``train.py`` is this file. Jobs need what ``python -m
dapple_tf.distributed.horovod`` installs. The same script also runs in one process, on logical devices: ``python
train.py``.

Every rank makes the same calls with the same batches, and gets the same loss. Each prints which stage it has, its
losses, and how many of the model's variables it holds before and after ``step.gather()``. In one process the
variables of both stages are always there.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple


def main() -> None:
    """Fit a small network to a sine over two ranks."""
    dapple.init()  # under mpirun: joins the job, and this process has one device
    rank = dapple.rank()
    keras.utils.set_random_seed(0)  # the same initial weights on every rank
    layers = [keras.layers.Dense(32, "tanh", name=f"dense_{i}") for i in range(4)]
    model = keras.Sequential([keras.Input([1]), *layers, keras.layers.Dense(1, name="output")])

    def loss_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(model(x, training=True) - y))

    x = np.linspace(-3, 3, 64, dtype="float32")[:, None]
    y = np.sin(x)
    step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.Adam(0.02), stages=["dense_2"], micro_batches=4)
    losses = [float(step(x, y)) for _ in range(100)]
    print(f"rank {rank}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"rank {rank}: {count_readable(model)} of {len(model.variables)} variables are here")
    step.gather()  # on every rank: brings the trained values of the other stages
    print(f"rank {rank}: after gather {count_readable(model)} of {len(model.variables)}")
    if rank == 0:
        error = float(np.abs(model.predict(x, verbose=0) - y).mean())
        print(f"rank 0: mean error of model.predict {error:.3f}")


def count_readable(model: keras.Model) -> int:
    """Return how many variables of the model this process can read; a rank keeps those of its own stage."""
    count = 0
    for variable in model.variables:
        try:
            variable.numpy()
            count += 1
        except (RuntimeError, tf.errors.OpError):
            pass  # the variable belongs to a stage of another rank
    return count


if __name__ == "__main__":
    main()
