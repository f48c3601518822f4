"""Memory of asynchronous windows by hand: what a replica holds at each action, and all stages of a process."""

from __future__ import annotations

import pytest

from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.memory.in_flight import window_states
from dapple_tf.memory.predict import StageMemory
from dapple_tf.memory.process_peak import predict_process_peak
from dapple_tf.timeline.events import Event, StageEvent
from dapple_tf.timeline.timeline import Timeline
from dapple_tf.window_plan import WindowPlan


def test_a_replica_holds_its_own_minibatches_only() -> None:
    window = WindowPlan(6).versions((2, 1)).window
    states = window_states(window, 0)
    assert [str(state.action) for state in states] == ["0F0", "0F2", "0B0", "0F4", "0B2", "0B4"]
    assert [state.in_flight for state in states] == [1, 2, 2, 2, 2, 1]
    # F and B take 1 and 2: stage 1 ends B0 at 4, B1 at 7 and B2 at 10. 0F4 follows the update of 0B1 at 9.
    assert [state.gradients_received for state in states] == [0, 0, 1, 1, 2, 3]
    assert [state.kept for state in states] == [0] * 6


def test_the_gradients_of_a_minibatch_of_2bw_are_kept_until_its_last_micro_batch() -> None:
    window = WindowPlan(2, "2bw", micro_batches=2).versions((1, 1)).window
    states = window_states(window, 1)
    assert [(str(state.action), state.kept) for state in states] == [
        ("1F0", 0),
        ("1B0", 0),
        ("1F1", 1),
        ("1B1", 1),
        ("1F2", 0),
        ("1B2", 0),
        ("1F3", 1),
        ("1B3", 1),
    ]
    assert [state.activations_received for state in states][:2] == [1, 2]


@pytest.mark.parametrize(("versions", "expected"), [(0, 3), (2, 2)])
def test_updates_and_shared_versions_count_in_the_peak_of_a_process(versions: int, expected: int) -> None:
    """One stage, two minibatches: 0F0 0-1, 0B0 1-2, its update 3-4; 0F1 4-5, 0B1 5-6, its update 6-7.

    A backward works on 3 bytes, an update on 2, and a version has 3. A stored version is in the weights' memory:
    version 0 until the update at 3, version 1 from 4 to 6. So what stays between windows is used while backwards run.
    """
    plan = WindowPlan(2).versions((1,))
    memory = StageMemory(
        *(0, 3, 0, 0, 0, 1, (), 0, 0), {"F": 1, "B": 3}, 2, 3, versions=3 * versions, version_count=versions
    )
    times = {"F0": (0, 1), "B0": (1, 2), "F1": (4, 5), "B1": (5, 6)}
    events = [
        Event(Action(0, "F" if text[0] == "F" else "B", int(text[1])), 0, "CPU:0", start, end, int(text[1]))
        for text, (start, end) in times.items()
    ]
    updates = [StageEvent("update", 0, 0, "CPU:0", 3, 4, 0), StageEvent("update", 0, 0, "CPU:0", 6, 7, 1)]
    assert predict_process_peak([memory], Timeline(events, (), updates, window=plan.window)) == expected
