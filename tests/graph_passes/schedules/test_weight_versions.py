"""The version of the weights that each forward and backward uses, in tables by hand, and how many are kept."""

from __future__ import annotations

import pytest
from hypothesis import given

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.graph_passes.schedules.weight_versions import WeightPolicy, weight_versions
from dapple_tf.graph_passes.schedules.window import Window, round_robin_warm_up
from tests.graph_passes.builders import refused
from tests.graph_passes.windows import WindowKind, window_kinds

STRAIGHT = Window(6, (1, 1, 1), (3, 2, 1))
"""Stage 0 runs ``F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5``, stage 1 ``F0 F1 B0 F2 ...``, stage 2 ``F0 B0 F1 B1 ...``."""

SHARED = Window(3, (1, 1, 1), (3, 2, 1), 3, in_turn=False)
"""Three minibatches of three micro-batches."""

FIGURE_8 = Window(8, (2, 1), (2, 1))


def used(window: Window, policy: WeightPolicy, kind: str) -> list[str]:
    """The versions of the forwards or backwards, stage by stage, one digit for each micro-batch."""
    found = weight_versions(window, policy).used
    stages = range(window.stages)
    return ["".join(str(found[Action(s, kind, m)]) for m in range(window.size)) for s in stages]  # type: ignore[arg-type]  # F or B


@pytest.mark.parametrize(
    ("window", "policy", "forwards", "backwards"),
    [
        (STRAIGHT, "stash", ["000123", "001234", "012345"], ["000123", "001234", "012345"]),
        (STRAIGHT, "vertical-sync", ["000123"] * 3, ["000123"] * 3),
        (STRAIGHT, "latest", ["000123", "001234", "012345"], ["012345"] * 3),
        (SHARED, "2bw", ["000000111"] * 3, ["000000111"] * 3),
        # An update of stage 0 has two minibatches: 2 and 3 use what 0 and 1 do, which are in flight.
        (FIGURE_8, "stash", ["00001122", "01234567"], ["00001122", "01234567"]),
        (FIGURE_8, "latest", ["00001122", "01234567"], ["00112233", "01234567"]),
        (Window(4, (2, 2), (2, 1)), "vertical-sync", ["0000", "0000"], ["0000", "0000"]),
        (Window(8, (2, 2), (2, 1)), "vertical-sync", ["00001122"] * 2, ["00001122"] * 2),
    ],
)
def test_versions_by_hand(window: Window, policy: WeightPolicy, forwards: list[str], backwards: list[str]) -> None:
    assert used(window, policy, "F") == forwards
    assert used(window, policy, "B") == backwards


def test_figure_9_the_same_minibatch_uses_older_weights_on_earlier_stages() -> None:
    """Minibatch 5 (here 4) of Fig. 9 uses updates from minibatch 1 on machine 1, and from 2 on machine 2."""
    found = weight_versions(Window(8, (1, 1, 1, 1), (4, 3, 2, 1)), "stash").used
    assert [found[Action(stage, "F", 4)] for stage in range(4)] == [1, 2, 3, 4]
    assert [found[Action(stage, "B", 4)] for stage in range(4)] == [1, 2, 3, 4]


def test_vertical_sync_uses_the_first_stage_s_version_on_all_stages() -> None:
    """Section 3.3: minibatch 5 (here 4) uses parameters updated by minibatch 1 on all workers."""
    found = weight_versions(Window(8, (1, 1, 1, 1), (4, 3, 2, 1)), "vertical-sync").used
    assert [found[Action(stage, kind, 4)] for stage in range(4) for kind in ("F", "B")] == [1] * 8


@pytest.mark.parametrize(
    ("window", "policy", "slots"),
    [
        # As many as minibatches in flight; the last stage's backward follows its forward, so it uses its weights.
        (STRAIGHT, "stash", (3, 2, 0)),
        (STRAIGHT, "vertical-sync", (3, 3, 3)),
        (STRAIGHT, "latest", (0, 0, 0)),
        (SHARED, "2bw", (2, 2, 2)),
        (FIGURE_8, "stash", (2, 0)),
        (FIGURE_8, "latest", (1, 0)),  # the second replica has no weights of its own but those that it stores
        (Window(2, (2,), (1,)), "stash", (1,)),
        # All minibatches enter before the first update, but 0B1 comes after it: the weights of the beginning are kept.
        (Window(2, (1, 1, 1), (3, 2, 1)), "stash", (1, 1, 0)),
        (Window(2, (1, 1, 1), (3, 2, 1)), "vertical-sync", (1, 1, 1)),
        (Window(1, (1, 1, 1), (3, 2, 1)), "stash", (0, 0, 0)),
        (Window(2, (1, 1), (2, 1), 2, in_turn=False), "2bw", (1, 1)),
        (Window(1, (1, 1), (2, 1), 2, in_turn=False), "2bw", (0, 0)),
        (Window(13, (1, 1, 1, 1), (7, 5, 3, 1)), "stash", (7, 5, 3, 0)),  # depth 7 of Fig. 18
    ],
)
def test_versions_that_are_kept_at_once(window: Window, policy: WeightPolicy, slots: tuple[int, ...]) -> None:
    assert weight_versions(window, policy).slots == slots


@given(window_kinds())
def test_a_version_is_in_its_slot_until_its_last_use(kind: WindowKind) -> None:
    """Each version is stored once it exists, or once the slot is free: then no later one may be needed before that."""
    versions = kind.versions
    for (stage, _), actions in kind.window.rows.items():
        slots = versions.slots[stage]
        last = {versions.used[action]: i for i, action in enumerate(actions)}
        first = {versions.used[action]: i for i, action in reversed(list(enumerate(actions)))}
        for version in last if slots else ():
            for earlier in (v for v in last if v < version and v % slots == version % slots):
                assert last[earlier] < first[version]
        done = 0
        for action in actions:
            assert versions.used[action] <= done
            assert slots or versions.used[action] == done
            done += kind.window.ends_update(action)


def test_an_unknown_policy_is_refused() -> None:
    with refused(ScheduleError, "weights='newest': give one of 'stash', 'vertical-sync', '2bw', 'latest'"):
        weight_versions(STRAIGHT, "newest")  # type: ignore[arg-type]  # that is the point


def test_vertical_sync_needs_equal_replicas() -> None:
    said = "weights='vertical-sync' with [2, 1] replicas: stages with unequal replicas count different updates"
    with refused(ScheduleError, said, "use equal replicas, or weights='stash'"):
        weight_versions(FIGURE_8, "vertical-sync")


@pytest.mark.parametrize(
    ("window", "policy"), [(STRAIGHT, "2bw"), (SHARED, "stash"), (SHARED, "vertical-sync"), (SHARED, "latest")]
)
def test_only_2bw_has_micro_batches(window: Window, policy: WeightPolicy) -> None:
    with refused(ScheduleError, f"weights={policy!r}: replicas share each micro-batch under '2bw'"):
        weight_versions(window, policy)


def test_2bw_needs_as_many_micro_batches_as_stage_0_has_in_flight() -> None:
    """With minibatches of one micro-batch the third one enters before any update, so version 1 does not exist."""
    window = Window(3, (1, 1, 1), round_robin_warm_up((1, 1, 1)), 1, in_turn=False)
    with refused(ScheduleError, "0F2 uses version 1 of the weights, but only 0 updates are done before it"):
        weight_versions(window, "2bw")
