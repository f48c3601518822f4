"""How many micro-batches a stage holds, laid out by hand."""

from __future__ import annotations

import pytest

from dapple_tf.memory.in_flight import moments, most_held, nominal_ends
from graph_passes.schedules.policies import build_schedule


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gpipe", [8, 8, 8, 8]),
        ("dapple-a", [4, 3, 2, 1]),
        ("dapple-b", [7, 5, 3, 1]),
        ("dapple-a:D=2", [2, 2, 2, 1]),
        ("K=5,3,3,2", [5, 3, 3, 2]),
        ("zb-h1", [4, 4, 4, 4]),  # until the weights' gradients are made too
    ],
)
def test_the_most_micro_batches_that_a_stage_holds_is_k(name: str, wanted: list[int]) -> None:
    """DAPPLE, section V.C: K_i warm-up forwards, then one backward for each forward."""
    schedule = build_schedule(name, 4, 8)
    assert [most_held(schedule, stage) for stage in range(4)] == wanted


def test_each_moment_of_two_stages() -> None:
    """dapple-a, K = 2, 1: what is held from forward to backward, and what the neighbour has made before it is taken.

    Forward takes 1, backward 2: stage 0 runs F0 to 1, F1 to 2, B0 from 4 to 6, F2 to 7, B1 to 9; stage 1 F0 from 1 to
    2, B0 to 4, F1 to 5, B1 to 7, F2 to 8, B2 to 10.
    """
    schedule = build_schedule("dapple-a", 2, 3)
    first = [(str(m.action), m.held("F", "B"), m.waiting("sent back")) for m in moments(schedule, 0)]
    assert first == [("0F0", 1, 0), ("0F1", 2, 0), ("0B0", 2, 0), ("0F2", 2, 0), ("0B1", 2, 0), ("0B2", 1, 0)]
    second = [(str(m.action), m.held("F", "B"), m.waiting("sent forward")) for m in moments(schedule, 1)]
    assert second == [
        ("1F0", 1, 0),
        ("1B0", 1, 1),  # F1 has come
        ("1F1", 1, 0),
        ("1B1", 1, 0),  # F2 comes as it ends
        ("1F2", 1, 0),
        ("1B2", 1, 0),
    ]


def test_a_boundary_tensor_is_held_from_when_it_comes() -> None:
    schedule = build_schedule("gpipe", 2, 3)
    assert [m.held("sent forward", "F") for m in moments(schedule, 1)][:3] == [1, 1, 1]
    assert [m.held("sent forward", "B") for m in moments(schedule, 1)] == [1, 2, 3, 3, 2, 1]


def test_stages_end_when_their_inputs_allow() -> None:
    ends = nominal_ends(build_schedule("dapple-a", 2, 2))
    assert {str(action): end for action, end in ends.items()} == {
        "0F0": 1,
        "0F1": 2,
        "1F0": 2,
        "1B0": 4,
        "1F1": 5,
        "0B0": 6,
        "1B1": 7,
        "0B1": 9,
    }


def test_the_ends_of_the_pipeline_wait_for_nobody() -> None:
    schedule = build_schedule("dapple-b", 2, 4)
    assert {m.waiting("sent forward") for m in moments(schedule, 0)} == {0}
    assert {m.waiting("sent back") for m in moments(schedule, 1)} == {0}
