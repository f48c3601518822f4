"""A number of the optimizer that is set between steps must be set on every rank."""

from __future__ import annotations

import pytest

from tests.processes import RanksError, needs_horovod, run_ranks

PROGRAM = """
import keras, tensorflow as tf, dapple_tf as dapple
dapple.init()
import horovod.tensorflow as hvd
w = tf.Variable([[1.0], [2.0]])
v = tf.Variable([[1.0]])
optimizer = keras.optimizers.SGD(0.5)
loss = lambda x: tf.reduce_mean(tf.square(tf.tanh(x @ w) @ v))
step = dapple.pipeline(loss, optimizer=optimizer, stages=2, micro_batches=2)
step(tf.ones([4, 2]))
assert float(optimizer.learning_rate.numpy()) == 0.5
optimizer.learning_rate = 0.25
step(tf.ones([4, 2]))
if hvd.rank() == {rank}:
    optimizer.learning_rate = 0.125
step(tf.ones([4, 2]))
step.gather()
"""


@needs_horovod
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.always), 1])
def test_a_learning_rate_that_is_set_on_one_rank_ends_all_and_is_named(rank: int) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(["-c", PROGRAM.format(rank=rank)], 2)
    told = "".join(output.stderr for output in caught.value.ranks)
    assert f"rank {rank} is about to run step 3 with 4 samples (program 1), learning_rate set to 0.125" in told
