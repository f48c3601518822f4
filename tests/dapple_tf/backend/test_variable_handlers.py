"""Reading and writing variables and the replicas' copies of them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.backend.operations import HANDLERS
from dapple_tf.graph_passes.ir.ops import OpName
from tests.dapple_tf.backend.builders import NamedVariables, make_context, make_node


def two_replicas() -> NamedVariables:
    """Two variables with a copy for each of two replicas."""
    return NamedVariables(
        owners={"mean": tf.Variable([1.0, 2.0]), "count": tf.Variable(1)},
        replica_copies={
            "mean": [tf.Variable([3.0, 4.0]), tf.Variable([5.0, 8.0])],
            "count": [tf.Variable(5), tf.Variable(7)],
        },
    )


NAMES = ("mean", "count")


def test_refresh_sets_the_copies_of_one_replica_to_the_owners_values() -> None:
    bindings = two_replicas()
    node = make_node(OpName.REFRESH, stage=0, replica=1, variables=NAMES)
    HANDLERS[OpName.REFRESH](make_context(bindings), node, [])
    assert [copy.numpy().tolist() for copy in bindings.copies(node, "mean")] == [[3, 4], [1, 2]]
    assert [copy.numpy() for copy in bindings.copies(node, "count")] == [5, 1]


def test_refresh_takes_the_values_that_other_ranks_send() -> None:
    bindings = two_replicas()
    node = make_node(OpName.REFRESH, stage=0, replica=0, variables=NAMES)
    HANDLERS[OpName.REFRESH](make_context(bindings), node, [tf.constant([9.0, 9.0])])
    assert bindings.copies(node, "mean")[0].numpy().tolist() == [9, 9]
    assert bindings.copies(node, "count")[0].numpy() == 1  # of which nothing was sent: read at the owner


def test_commit_averages_floats_and_takes_other_values_from_the_first_replica() -> None:
    bindings = two_replicas()
    node = make_node(OpName.COMMIT, stage=0, replica=0, replicas=2, variables=NAMES)
    HANDLERS[OpName.COMMIT](make_context(bindings), node, [])
    assert bindings.owners["mean"].numpy().tolist() == [4, 6]
    assert bindings.owners["count"].numpy() == 5


def test_commit_of_what_is_written_once_takes_the_first_replica() -> None:
    bindings = two_replicas()
    node = make_node(OpName.COMMIT, stage=0, replica=0, replicas=1, variables=NAMES)
    HANDLERS[OpName.COMMIT](make_context(bindings), node, [])
    assert bindings.owners["mean"].numpy().tolist() == [3, 4]


def test_commit_stores_averages_that_ranks_have_computed() -> None:
    bindings = two_replicas()
    node = make_node(OpName.COMMIT, stage=0, replica=0, replicas=2, variables=NAMES)
    HANDLERS[OpName.COMMIT](make_context(bindings), node, [tf.constant([0.5, 0.25]), tf.constant(3)])
    assert bindings.owners["mean"].numpy().tolist() == [0.5, 0.25]
    assert bindings.owners["count"].numpy() == 3


@pytest.mark.parametrize("op", [OpName.READ_VARIABLE, OpName.READ_STATE])
def test_reading_gives_the_values_of_the_bound_variables(op: OpName) -> None:
    node = make_node(op, stage=0, replica=1, variables=("count", "mean"))
    (count, mean), _ = HANDLERS[op](make_context(two_replicas()), node, [])
    assert count.numpy() == 7
    np.testing.assert_array_equal(mean.numpy(), [5, 8])


def test_the_flag_says_while_variables_are_being_written() -> None:
    bindings = NamedVariables()
    seen = []
    for updating in (True, False):
        node = make_node(OpName.SET_UPDATING, updating=updating)
        HANDLERS[OpName.SET_UPDATING](make_context(bindings), node, [])
        seen.append(bool(bindings.updating.numpy()))
    assert seen == [True, False]


def test_a_stored_version_keeps_the_weights_as_they_are_now() -> None:
    bindings = two_replicas()
    node = make_node(OpName.STORE_VERSION, stage=0, replica=1, version=0, variables=NAMES)
    HANDLERS[OpName.STORE_VERSION](make_context(bindings), node, [])
    bindings.owners["mean"].assign_add([10.0, 10.0])
    assert [copy.numpy().tolist() for copy in bindings.copies(node, "mean")] == [[3, 4], [1, 2]]
    assert [copy.numpy() for copy in bindings.copies(node, "count")] == [5, 1]


def test_an_update_of_a_stage_is_counted_from_the_steps_before_the_window() -> None:
    """The stage's own counter is set; what the users see stays as it was."""
    own = tf.Variable(0, dtype=tf.int64)
    bindings = NamedVariables({"iteration": tf.Variable(20, dtype=tf.int64)}, {"iteration": [own]})
    for offset in (0, 3, 1):
        node = make_node(OpName.COUNT_UPDATE, stage=1, replica=0, variable="iteration", offset=offset)
        HANDLERS[OpName.COUNT_UPDATE](make_context(bindings), node, [])
        assert own.numpy() == 20 + offset
    assert bindings.owners["iteration"].numpy() == 20


def test_the_steps_of_a_window_are_counted_at_its_end() -> None:
    bindings = NamedVariables({"iteration": tf.Variable(20, dtype=tf.int64)})
    node = make_node(OpName.COUNT_UPDATE, variable="iteration", offset=64)
    HANDLERS[OpName.COUNT_UPDATE](make_context(bindings), node, [])
    assert bindings.owners["iteration"].numpy() == 84
