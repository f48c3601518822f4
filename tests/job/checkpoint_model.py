"""A MODEL for ``dapple train`` under mpirun: float64, tied weights, Adam; ranks of it can be killed as if by chance."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple


def chain(kill_rank: int = -1, at_batch: int = -1, in_save: str = "") -> dapple.Workload:
    """Five dense layers on batches whose order changes every round.

    The rank ``kill_rank`` is killed (9) before batch ``at_batch``, or while it writes a file into the folder
    ``in_save``.
    """
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(2)
    weights = [tf.Variable(random.normal(size=(64, 64)) / 8, name=f"w{i}") for i in range(4)]
    data = tf.data.Dataset.from_tensor_slices((random.normal(size=(20, 64)), random.normal(size=(20, 64))))
    data = data.shuffle(20, seed=3).batch(8)  # two batches of 8, then one of 4
    dies = os.environ.get("OMPI_COMM_WORLD_RANK") == str(kill_rank)
    if dies and in_save:
        threading.Thread(target=_die_in_save, args=(Path(in_save),), daemon=True).start()

    def loss(x: Any, y: Any) -> Any:
        for i, weight in enumerate([*weights, weights[0]]):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ weight)
        return tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1))

    return dapple.Workload(loss, keras.optimizers.Adam(0.01, global_clipnorm=1.0), _Stream(data, dies, at_batch))


class _Stream:
    """Goes on through rounds of ``data``; the process may be killed before a batch."""

    def __init__(self, data: Any, dies: bool, at_batch: int) -> None:
        self._data, self._dies, self._at_batch = data, dies, at_batch

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while True:
            for batch in self._data:
                number += 1
                if self._dies and number == self._at_batch:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield batch


def _die_in_save(folder: Path) -> None:
    while not any(folder.glob("*.part")):
        time.sleep(0.0002)
    os.kill(os.getpid(), signal.SIGKILL)
