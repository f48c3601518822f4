"""Start training on ranks that do not match, in one way after the other; the last rank is the one that differs.

``python -m tests.dapple_tf.distributed.programs.mismatched_ranks CASE`` lets the error of one case end the process.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.distributed.membership import Job, current
from dapple_tf.plans import Plan, StagePlan
from tests.equality.small_models import chain, data, sgd, weights

LAYERS = 10  # of chain(weights(3)): two of each matrix, and four of the loss


def run() -> dict[str, str]:
    """Return by case the error that this rank got, as type and text; then train, which must still work."""
    errors = {}
    for name, case in CASES.items():
        try:
            case()
            errors[name] = "nothing was raised"
        except Exception as error:  # of any type: the test examines it
            errors[name] = f"{type(error).__name__}: {error}"
    train()
    return errors


def job() -> Job:
    found = current()
    assert not found.is_alone, "start it with mpirun"
    return found


def is_last() -> bool:
    return job().rank == job().size - 1


def train(loss_fn: Any = None, batch: Any = None, **options: Any) -> None:
    options = {"stages": 2, "micro_batches": 2, **options}
    dapple.pipeline(loss_fn or chain(weights(3)), optimizer=sgd(), **options)(*(batch or data(8)))


def plan_of(micro_batches: int, *devices: tuple[int, ...]) -> Plan:
    cuts = [0, 5, LAYERS] if len(devices) == 2 else [0, LAYERS]
    stages = tuple(StagePlan(a, b - 1, d) for a, b, d in zip(cuts, cuts[1:], devices, strict=False))
    return Plan("loss_fn", "by hand", 8, 8 // micro_batches, micro_batches, "dapple-a", False, stages)


def plan_on_the_last_rank_only() -> None:
    train(**({"stages": "auto", "plan": plan_of(2, (0,), (1,))} if is_last() else {}))


def other_code() -> None:
    matrices = weights(3)

    def loss_fn(x: Any, y: Any) -> Any:
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                x = tf.sin(x @ matrix) if is_last() else tf.cos(x @ matrix)
        return tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1))

    train(loss_fn)


def other_branch() -> None:
    """The codes differ inside of a branch only, which TensorFlow keeps in a function of its own."""
    matrices = weights(3)

    def loss_fn(x: Any, y: Any) -> Any:
        largest = tf.reduce_max(x)
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ matrix)
        x = tf.cond(largest > 100.0, lambda: x * (2.0 if is_last() else 3.0), lambda: x)
        return tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1))

    train(loss_fn)


def other_constant() -> None:
    scale, matrices = tf.constant(np.float64(1 + is_last())), weights(3)
    plain = chain(matrices)
    train(lambda x, y: plain(x * scale, y))


def other_tensorflow() -> None:
    version = tf.__version__
    tf.__version__ = "9.9.9" if is_last() else version
    try:
        train()
    finally:
        tf.__version__ = version


def other_dtypes() -> None:
    plain = chain(weights(3))
    dtype = "float32" if is_last() else "float64"
    train(
        lambda x, y: plain(tf.cast(x, tf.float64), tf.cast(y, tf.float64)),
        batch=[tf.cast(t, dtype) for t in data(8)],
    )


class UnpicklableError(Exception):
    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


def error_that_cannot_be_pickled() -> None:
    def fail() -> Any:
        raise UnpicklableError("no plan", "the air")

    job().run_on_rank_0(fail)


def result_that_cannot_be_pickled() -> None:
    job().run_on_rank_0(threading.Lock)


def one_rank_fails() -> None:
    plain = chain(weights(3))

    def loss_fn(x: Any, y: Any) -> Any:
        if is_last():
            raise KeyError("no such layer")
        return plain(x, y)

    train(loss_fn)


def batch_too_small_for_the_replicas() -> None:
    options = {"stages": 1, "replicas": [2], "micro_batches": 2}
    step = dapple.pipeline(chain(weights(3)), optimizer=keras.optimizers.SGD(0.1), **options)
    step(*data(8))
    step(*data(1))


def long_texts() -> None:
    job().agree("text", "a" * 900 + ("one" if is_last() else "another") + "b" * 900)


CASES: Mapping[str, Callable[[], None]] = {
    "too few stages": lambda: train(stages=1),
    "too many stages": lambda: train(stages=3),
    "a plan for fewer ranks": lambda: train(stages="auto", plan=plan_of(2, (0,))),
    "a plan for other devices": lambda: train(stages="auto", plan=plan_of(2, (0,), (2,))),
    "different plans": lambda: train(stages="auto", plan=plan_of(4 if is_last() else 2, (0,), (1,))),
    "a plan on one rank only": plan_on_the_last_rank_only,
    "different options": lambda: train(micro_batches=4 if is_last() else 2),
    "different batch sizes": lambda: train(batch=data(6 if is_last() else 8)),
    "different dtypes": other_dtypes,
    "different numbers of layers": lambda: train(chain(weights(4 if is_last() else 3))),
    "different code": other_code,
    "different branches": other_branch,
    "different constants": other_constant,
    "different TensorFlow versions": other_tensorflow,
    "one rank fails": one_rank_fails,
    "an error that cannot be pickled": error_that_cannot_be_pickled,
    "a result that cannot be pickled": result_that_cannot_be_pickled,
    "long texts": long_texts,
    "a batch too small for the replicas": batch_too_small_for_the_replicas,
}


if __name__ == "__main__":
    dapple.init()
    CASES[sys.argv[1]]()
