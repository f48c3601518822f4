"""The version of a stage's weights that each forward and backward of an asynchronous window uses.

Version v of a stage's weights is their value after v updates of this stage in the window; version 0 is the value at
the beginning. With *weight stashing* a backward uses the version that its forward used (PipeDream, section 3.3), so a
replica keeps several versions at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.graph_passes.schedules.window import Window

WeightPolicy = Literal["stash", "vertical-sync", "2bw", "latest"]
"""The weights that a forward and its backward use.

``stash``: both use the newest weights at the time of the forward. ``vertical-sync``: both use the version that stage 0
had when the minibatch entered. ``2bw``: both use the weights before the update of the previous minibatch, so that two
versions are enough. ``latest``: each uses the newest weights at its own time; then the backward does not compute the
gradient of any loss.
"""

POLICIES: tuple[str, ...] = get_args(WeightPolicy)
"""The names of all policies."""


@dataclass(frozen=True)
class Versions:
    """The versions of the weights in a window. ``used``: the version that each forward and backward (Action) uses.

    ``slots``: how many versions a replica of each stage keeps at once; 0 where every action uses the newest one.
    """

    window: Window
    policy: WeightPolicy
    used: Mapping[Action, int]
    slots: tuple[int, ...]


def weight_versions(window: Window, policy: WeightPolicy) -> Versions:
    """Return the versions that ``policy`` gives each action of ``window``.

    On a stage with r_s replicas that take minibatches in turn, the newest version at the forward of micro-batch m is
    max(0, floor(m / r_s) - K_s + 1), the number of updates that the forward waits for. Raises ScheduleError for an
    unknown policy, and where a replica would need a version that does not exist yet.
    """
    if policy not in POLICIES:
        raise ScheduleError(f"weights={policy!r}: give one of {', '.join(map(repr, POLICIES))}")
    if policy == "vertical-sync" and len(set(window.replicas)) > 1:
        raise ScheduleError(
            f"weights='vertical-sync' with {list(window.replicas)} replicas: stages with unequal replicas count "
            "different updates, so no version is the same on all; use equal replicas, or weights='stash'"
        )
    if (policy == "2bw") == window.in_turn:
        raise ScheduleError(
            f"weights={policy!r}: replicas share each micro-batch under '2bw', and take whole minibatches in turn "
            "under the other policies, but this window is made for the opposite"
        )
    newest = dict(_newest(window))
    used: dict[Action, int] = {}
    for action, version in newest.items():
        forward = Action(action.stage, "F", action.micro_batch)
        match policy:
            case "stash":
                used[action] = newest[forward]
            case "vertical-sync":
                used[action] = newest[Action(0, "F", action.micro_batch)]
            case "2bw":
                used[action] = max(0, window.update_of(action.stage, action.micro_batch) - 1)
            case "latest":
                used[action] = version
    for action, version in used.items():
        if version > newest[action]:
            raise ScheduleError(
                f"{action} uses version {version} of the weights, but only {newest[action]} updates are done before it"
            )
    return Versions(window, policy, used, tuple(_count_slots(window, used, newest, s) for s in range(window.stages)))


def _newest(window: Window) -> Iterator[tuple[Action, int]]:
    """Yield each action with the number of updates of its stage that precede it.

    These are the updates that take gradients of earlier backwards on its replica. A forward waits for them, and under
    ``latest`` a backward does too.
    """
    for actions in window.rows.values():
        done = 0
        for action in actions:
            yield action, done
            done += window.ends_update(action)


def _count_slots(window: Window, used: Mapping[Action, int], newest: Mapping[Action, int], stage: int) -> int:
    """Return how many versions a replica of ``stage`` must keep at once, if each is stored as soon as it exists.

    0 where the stage has one replica and every action uses the newest version: the replica uses its weights themselves.
    """
    rows = [actions for (of, _), actions in window.rows.items() if of == stage]
    if len(rows) == 1 and all(used[action] == newest[action] for action in rows[0]):
        return 0
    most = 1
    for actions in rows:
        versions = [used[action] for action in actions]
        # The oldest version that each action, or a later one, uses.
        oldest = [*itertools.accumulate(reversed(versions), min)][::-1]
        for action, needed in zip(actions, oldest, strict=True):
            most = max(most, min(newest[action], versions[-1]) - needed + 1)
    return most
