"""The versions that the actions of a window use are those that the reference trains with."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.graph_passes.schedules.weight_versions import weight_versions
from dapple_tf.graph_passes.schedules.window import Window
from tests.asynchronous.reference import forward_versions, warm_ups


@given(st.data())
def test_versions_of_replicas_that_take_minibatches_in_turn(data: st.DataObject) -> None:
    weights = data.draw(st.sampled_from(["stash", "latest", "vertical-sync"]))
    replicas = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    if weights == "vertical-sync":
        replicas = [replicas[0]] * len(replicas)
    depth = data.draw(st.one_of(st.none(), st.integers(1, 12))) if set(replicas) == {1} else None
    minibatches = math.lcm(*replicas) * data.draw(st.integers(1, 4))
    wanted = forward_versions(weights, minibatches, replicas, depth)
    window = Window(minibatches, tuple(replicas), tuple(warm_ups(replicas, depth)))
    used = weight_versions(window, weights).used
    for s, r in enumerate(replicas):
        for m in range(minibatches):
            assert used[Action(s, "F", m)] == wanted[s][m]
            assert used[Action(s, "B", m)] == (m // r if weights == "latest" else wanted[s][m])


@given(stages=st.integers(1, 5), more=st.integers(0, 3), minibatches=st.integers(1, 9))
def test_versions_of_2bw(stages: int, more: int, minibatches: int) -> None:
    warm_up = warm_ups([1] * stages)
    k = warm_up[0] + more
    window = Window(minibatches, (1,) * stages, tuple(warm_up), k, in_turn=False)
    used = weight_versions(window, "2bw").used
    wanted = forward_versions("2bw", minibatches, [1] * stages)
    for s in range(stages):
        for i in range(minibatches * k):
            assert used[Action(s, "F", i)] == used[Action(s, "B", i)] == wanted[s][i // k]
