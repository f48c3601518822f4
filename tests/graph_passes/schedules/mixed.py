"""Schedules that run some backwards whole and others as two actions, drawn at random."""

from __future__ import annotations

from hypothesis import strategies as st

from dapple_tf.graph_passes.schedules.schedule import Action, Schedule

_LATEST = 6  # actions from I to its W


@st.composite
def mixed(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """``schedule`` with B, or I and a W at most ``_LATEST`` actions later on the worker, for each of its backwards.

    W needs its own I only, so no order of this kind deadlocks where ``schedule`` does not.
    """
    workers = []
    for actions in schedule.workers:
        whole = [Action(a.stage, "B" if a.kind == "I" else a.kind, a.micro_batch) for a in actions if a.kind != "W"]
        count = sum(action.kind == "B" for action in whole)
        delays = draw(st.lists(st.integers(0, _LATEST), min_size=count, max_size=count))  # 0: not split
        workers.append(_with_delays(whole, delays))
    return Schedule(tuple(workers))


def _with_delays(whole: list[Action], delays: list[int]) -> tuple[Action, ...]:
    """The actions, where W of each backward that is split comes ``delay - 1`` other actions after its I."""
    actions, backwards = list(whole), [action for action in whole if action.kind == "B"]
    for action, delay in zip(backwards, delays, strict=True):
        if delay:
            position = actions.index(action)
            actions[position] = Action(action.stage, "I", action.micro_batch)
            actions.insert(position + delay, Action(action.stage, "W", action.micro_batch))
    return tuple(actions)
