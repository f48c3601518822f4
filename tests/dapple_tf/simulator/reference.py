"""A slow reference simulator: the longest path to every event in a graph of all events."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import networkx as nx

from dapple_tf.graph_passes.schedules.schedule import Action, Schedule
from dapple_tf.timeline.stage_costs import StageCosts

Name = tuple[str, int, int]  # F, B (or I), W, SF or SB; stage (of a transfer: before the boundary); micro-batch


def longest_paths(schedule: Schedule, costs: Sequence[StageCosts]) -> dict[Name, tuple[float, float]]:
    """Start and end of every event: a worker's actions, and a channel's transfers, follow one another.

    Where a backward is split, its I is called B: either gives the gradients that are sent. A transfer between stages of
    one worker takes no time, and waits for no other.
    """
    graph: nx.DiGraph[Name] = nx.DiGraph()
    last = len(costs) - 1
    worker_of = {a.stage: worker for worker, actions in enumerate(schedule.workers) for a in actions}
    moves = [worker_of[stage] != worker_of[stage + 1] for stage in range(last)]
    for actions in schedule.workers:
        nx.add_path(graph, map(name, actions))
    for stage in range(last + 1):
        actions = tuple(a for a in schedule.workers[worker_of[stage]] if a.stage == stage)
        for a in actions:
            me = name(a)
            if a.kind == "F" and stage < last:
                nx.add_path(graph, [me, ("SF", stage, a.micro_batch), ("F", stage + 1, a.micro_batch)])
            if a.kind in ("B", "I") and stage > 0:
                nx.add_path(graph, [me, ("SB", stage - 1, a.micro_batch), ("B", stage - 1, a.micro_batch)])
        sent = [("SF", stage, a.micro_batch) for a in actions if a.kind == "F" and stage < last]
        returned = [("SB", stage - 1, a.micro_batch) for a in actions if a.kind in ("B", "I") and stage > 0]
        graph.add_edges_from(pairwise(sent) if stage < last and moves[stage] else [])
        graph.add_edges_from(pairwise(returned) if stage and moves[stage - 1] else [])
    times: dict[Name, tuple[float, float]] = {}
    for event in nx.topological_sort(graph):
        kind, stage, m = event
        whole = Action(stage, "B", m) in schedule.workers[worker_of[stage]]
        seconds = {
            "F": costs[stage].forward_seconds,
            "B": costs[stage].backward_seconds - (0.0 if whole else costs[stage].weights_seconds),
            "W": costs[stage].weights_seconds,
            "SF": costs[stage].send_forward_seconds * (stage < last and moves[stage]),
            "SB": costs[stage].send_backward_seconds * (stage < last and moves[stage]),
        }[kind]
        start = max((times[before][1] for before in graph.predecessors(event)), default=0.0)
        times[event] = start, start + seconds
    return times


def name(action: Action) -> Name:
    """The event of an action."""
    return ("B" if action.kind == "I" else action.kind), action.stage, action.micro_batch
