"""What every rank of a launch runs: each way in which ranks may differ at the start, one after the other.

It prints a line of JSON for each: the error's type and text, and the seconds that it took. Given the name of one, it
lets the error end the process.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import keras
import numpy as np

import dapple_tf as dapple

dapple.init()

import horovod.tensorflow as hvd  # noqa: E402
import tensorflow as tf  # noqa: E402

from dapple_tf.distributed import membership  # noqa: E402
from dapple_tf.plan import Plan, StagePlan  # noqa: E402
from tests.equality.small_models import chain, data, sgd, weights  # noqa: E402

LAYERS = 10  # of chain(weights(3)): two of each matrix, and four of the loss
LAST = hvd.rank() == hvd.size() - 1


def train(loss_fn: Any = None, batch: Any = None, **options: Any) -> None:
    options = {"stages": 2, "micro_batches": 2, **options}
    dapple.pipeline(loss_fn or chain(weights(3)), optimizer=sgd(), **options)(*(batch or data(8)))


def plan_of(micro_batches: int, *devices: tuple[int, ...]) -> Plan:
    cuts = [0, 5, LAYERS] if len(devices) == 2 else [0, LAYERS]
    stages = tuple(StagePlan(a, b - 1, d) for a, b, d in zip(cuts, cuts[1:], devices, strict=False))
    return Plan("loss_fn", "by hand", 8, 8 // micro_batches, micro_batches, "dapple-a", False, stages)


def other_code() -> None:
    matrices = weights(3)

    def loss_fn(x: Any, y: Any) -> Any:
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                x = tf.sin(x @ matrix) if LAST else tf.cos(x @ matrix)
        return tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1))

    train(loss_fn)


def other_branch() -> None:
    """They differ inside of a branch only, which TensorFlow keeps in a function of its own."""
    matrices = weights(3)

    def loss_fn(x: Any, y: Any) -> Any:
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ matrix)
        x = tf.cond(tf.reduce_max(x) > 100.0, lambda: x * (2.0 if LAST else 3.0), lambda: x)
        return tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1))

    train(loss_fn)


def other_constant() -> None:
    scale, matrices = tf.constant(np.float64(1 + LAST)), weights(3)
    plain = chain(matrices)
    train(lambda x, y: plain(x * scale, y))


def other_tensorflow() -> None:
    version = tf.__version__
    tf.__version__ = "9.9.9" if LAST else version
    try:
        train()
    finally:
        tf.__version__ = version


class UnpicklableError(Exception):
    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


def cannot_decide() -> None:
    def choose() -> Any:
        raise UnpicklableError("no plan", "the air")

    job().run_on_rank_0(choose)


def job() -> Any:
    found = membership.current()
    assert found is not None
    return found


def fails_alone() -> None:
    plain = chain(weights(3))

    def loss_fn(x: Any, y: Any) -> Any:
        if LAST:
            raise KeyError("no such layer")
        return plain(x, y)

    train(loss_fn)


CASES: dict[str, Any] = {
    "too few stages": lambda: train(stages=1),
    "too many stages": lambda: train(stages=3),
    "a plan for fewer ranks": lambda: train(stages="auto", plan=plan_of(2, (0,))),
    "a plan for other devices": lambda: train(stages="auto", plan=plan_of(2, (0,), (2,))),
    "other plans": lambda: train(stages="auto", plan=plan_of(4 if LAST else 2, (0,), (1,))),
    "a plan on one rank only": lambda: train(**({"stages": "auto", "plan": plan_of(2, (0,), (1,))} if LAST else {})),
    "other requests": lambda: train(micro_batches=4 if LAST else 2),
    "other batch sizes": lambda: train(batch=data(6 if LAST else 8)),
    "other dtypes": lambda: train(
        chain_of_any_dtype(), batch=[tf.cast(t, "float32" if LAST else "float64") for t in data(8)]
    ),
    "other layers": lambda: train(chain(weights(4 if LAST else 3))),
    "other code": other_code,
    "other branches": other_branch,
    "other constants": other_constant,
    "other TensorFlow": other_tensorflow,
    "one rank fails": fails_alone,
    "rank 0 cannot decide": cannot_decide,
    "long facts": lambda: job().compare({"text": "a" * 900 + ("one" if LAST else "another") + "b" * 900}),
    "a batch too small for the replicas": lambda: train_then_one_sample(),
    "gradients": lambda: dapple.pipeline(chain(weights(3)), optimizer=sgd(), stages=2).run_exposed(*data(8)),
}


def chain_of_any_dtype() -> Any:
    plain = chain(weights(3))
    return lambda x, y: plain(tf.cast(x, tf.float64), tf.cast(y, tf.float64))


def train_then_one_sample() -> None:
    options = {"stages": 1, "replicas": [2], "micro_batches": 2}
    step = dapple.pipeline(chain(weights(3)), optimizer=keras.optimizers.SGD(0.1), **options)
    step(*data(8))
    step(*data(1))


if __name__ == "__main__":
    if sys.argv[1:]:
        CASES[sys.argv[1]]()
    for name, case in CASES.items():
        start = time.monotonic()
        try:
            case()
            told = "nothing was raised"
        except Exception as error:  # which one it was is what the test looks at
            told = f"{type(error).__name__}: {error}"
        print(json.dumps({"case": name, "told": told, "seconds": time.monotonic() - start}), flush=True)
    train()  # after all this they can still train together
    print("trained", flush=True)
    hvd.allreduce(tf.zeros([1]), name="end")  # a rank that leaves early ends Horovod for all
