"""DAPPLE's Fig. 3 and Fig. 4 in time, typed in by hand from what sections III and IV.A say of them.

The text gives the figures no seconds. Fig. 3 here has three stages, five micro-batches, F = 1 and B = 2.
"""

from __future__ import annotations

import pytest

from dapple_tf.simulator.execution import execute
from tests.dapple_tf.simulator.builders import cost, make_timeline, order_of, step_of

EVEN = [cost(1, 2, stash_bytes=1)] * 3

# When each stage starts its forwards, and its backwards. Fig. 3 (a) and (b).
FIGURE_3 = {
    "gpipe": (
        [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [2, 3, 4, 5, 6]],
        [[11, 13, 15, 17, 19], [9, 11, 13, 15, 17], [7, 9, 11, 13, 15]],
    ),
    "dapple-a": (
        [[0, 1, 2, 9, 12], [1, 2, 7, 10, 13], [2, 5, 8, 11, 14]],
        [[7, 10, 13, 16, 19], [5, 8, 11, 14, 17], [3, 6, 9, 12, 15]],
    ),
}


@pytest.mark.parametrize("name", FIGURE_3)
def test_figure_3_in_time(name: str) -> None:
    done = execute(order_of(name, 3, 5), EVEN)
    assert (done.times.start_forward.tolist(), done.times.start_backward.tolist()) == FIGURE_3[name]


@pytest.mark.parametrize("name", ["gpipe", "dapple-a", "dapple-b"])
def test_the_bubble_is_exactly_gpipes(name: str) -> None:
    """III.B: DAPPLE has "the exact same bubble time as GPipe"; of 21 s each stage works 15."""
    timeline = make_timeline(name, 5, EVEN)
    assert timeline.step_seconds == 21
    assert timeline.utilisation == (15 / 21, 15 / 21, 15 / 21)
    assert timeline.bubble == pytest.approx(6 / 21, rel=1e-12)


def test_figure_3_c_the_memory_of_the_first_stage_over_time() -> None:
    """III.B: "the same as GPipe's until K micro-batches are injected, then it reaches the maximum"."""
    assert make_timeline("gpipe", 5, EVEN).memory(0) == (
        (0, 0, 1, 2, 3, 4, 13, 15, 17, 19, 21),
        (0, 1, 2, 3, 4, 5, 4, 3, 2, 1, 0),
    )
    assert make_timeline("dapple-a", 5, EVEN).memory(0) == (
        (0, 0, 1, 2, 9, 9, 12, 12, 15, 18, 21),
        (0, 1, 2, 3, 2, 3, 2, 3, 2, 1, 0),
    )


# Fig. 4: three stages to compute and two networks between them, which IV.A counts as stages; five micro-batches. The
# last stage is the pivot: its five seconds a micro-batch are the most.
FIGURE_4 = [cost(1, 1, 1), cost(1, 2, 1), cost(2, 3)]


def test_figure_4_has_a_warm_up_a_steady_and_an_ending_phase() -> None:
    done = execute(order_of("dapple-b", 3, 5), FIGURE_4)
    # Tw: the forwards of stages and networks up to the pivot's, 1 + 1 + 1 + 1 + 2.
    assert done.times.end_forward[2, 0] == 6
    # Ts: (M - 1) (F_Q + B_Q) = 4 x 5, in which the pivot does not pause.
    assert done.times.start_forward[2].tolist() == [4, 9, 14, 19, 24]
    assert done.times.start_backward[2].tolist() == [6, 11, 16, 21, 26]
    # Te: the last micro-batch's way back, 3 + 1 + 2 + 1 + 1.
    assert done.step_seconds == 26 + 8


@pytest.mark.parametrize(
    ("stage", "ending"),
    [(0, 4 + 8), (1, 4 + 6), (2, 8)],  # formula 2: AR(s) after the backwards from the pivot to s, if that is later
)
def test_figure_4_ends_with_the_latest_allreduce(stage: int, ending: float) -> None:
    costs = list(FIGURE_4)
    costs[stage] = cost(
        costs[stage].forward_seconds,
        costs[stage].backward_seconds,
        costs[stage].send_forward_seconds,
        exposed_seconds=4,
    )
    assert step_of("dapple-b", 5, costs) == 26 + ending


def test_the_pivot_stage_may_wait_which_the_formula_leaves_out() -> None:
    """IV.A: "in some cases [there are] bubbles in stage Q"; and section V.C, which policy has them.

    Two stages and their network, a second each: formula 2 says 3 + 3 x 2 + 3 for four micro-batches. Under policy A the
    last stage has a pause of 2 s, before a forward that waited for a backward.
    """
    costs = [cost(1, 1, 1), cost(1, 1)]
    assert step_of("dapple-b", 4, costs) == 12
    assert step_of("dapple-a", 4, costs) == 14
    done = execute(order_of("dapple-a", 2, 4), costs)
    assert done.times.start_forward[1].tolist() == [2, 4, 8, 10]
    assert done.times.end_backward[1].tolist() == [4, 6, 10, 12]  # from 6 to 8 it pauses
