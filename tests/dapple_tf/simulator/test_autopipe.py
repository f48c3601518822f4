"""AutoPipe, section III.B: the critical path and the master stage, by hand; its figures have no numbers to copy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dapple_tf.simulator.execution import Execution, execute
from dapple_tf.timeline.critical_path import critical_stage
from tests.dapple_tf.simulator.builders import cost, order_of, path_of


def run(loads: Sequence[float], micro_batches: int) -> Execution:
    """1F1B (policy A) of stages whose forwards, and backwards, take ``loads``."""
    return execute(order_of("dapple-a", len(loads), micro_batches), [cost(load, load) for load in loads])


# Fig. 7: the same four loads, elsewhere. (a) Stage 2 has the most. (b) Loads of stages 1 and 2 change places: "forward
# movement of the master stage shortens pipeline iteration time", yet its cooldown has a bubble. (c) What stages 2 and 3
# share is shared out anew, by its inequality (1), and the bubble "vanishes".
@pytest.mark.parametrize(
    ("loads", "master", "seconds", "bubble"),
    [((1, 3, 4, 1), 2, 56, None), ((1, 4, 3, 1), 1, 54, True), ((1, 4, 2, 2), 1, 50, False)],
)
def test_figure_7(loads: tuple[int, ...], master: int, seconds: float, bubble: bool | None) -> None:
    done = run(loads, 6)
    assert done.step_seconds == seconds
    assert critical_stage(path_of(done)) == master
    if bubble is not None:
        last_forward_and_backwards = [done.times.end_forward[1, 5], *done.times.end_backward[1, 3:]]
        # Without a bubble three backwards of 4 s follow the last forward at once.
        assert (last_forward_and_backwards[-1] - last_forward_and_backwards[0] > 3 * 4) == bubble


def test_the_master_stage_of_c_never_pauses() -> None:
    done = run((1, 4, 2, 2), 6)
    assert done.step_seconds == 1 + 6 * (4 + 4) + 1  # a forward to it, its own work, a backward from it


def test_of_several_longest_paths_the_one_closest_to_the_last_stage_is_critical() -> None:
    """Fig. 4: of the paths of equal length through the 1F1B phase, it takes that of the latest stage."""
    path = path_of(run((1, 1, 1), 3))
    assert [str(event) for event in path] == [
        *("0F0", "1F0", "2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "1B2", "0B2"),
    ]
    assert critical_stage(path) == 2


def test_equally_heavy_stages_before_a_light_last_one_have_the_later_as_master() -> None:
    path = path_of(run((1, 2, 2, 1), 6))
    assert critical_stage(path) == 2
