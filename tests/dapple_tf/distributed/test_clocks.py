"""How far clocks are apart, worked by hand."""

from __future__ import annotations

from dapple_tf.runtime.recorder import clock_offsets


def test_ranks_of_a_host_share_its_offset_and_a_late_look_does_not_count() -> None:
    times = [
        [10.0, 20.0, 30.0],
        [10.5, 20.0, 30.0],  # of rank 0's host: whatever it saw, its clock is the same
        [13.0, 23.5, 33.0],  # 3 s ahead, and once half a second late
        [13.2, 23.2, 33.2],
    ]
    assert clock_offsets(["a", "a", "b", "b"], times) == (0.0, 0.0, 3.0, 3.0)
