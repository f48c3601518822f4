"""Predicted memory of a device that runs several stages, from the memory of each and the order of its actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dapple_tf.memory.in_flight import stage_states
from dapple_tf.memory.predict import StageMemory, held_bytes
from graph_passes.schedules.schedule import Schedule


@dataclass(frozen=True)
class WorkerMemory:
    """Predicted bytes of one device of a worker: ``fixed`` between steps, and at most ``in_step`` more during one.

    ``stages``: those that it runs. ``stashes``: the most that it holds at once, one for each stage and micro-batch in
    flight.
    """

    stages: tuple[int, ...]
    stashes: int
    fixed: int
    in_step: int

    @property
    def peak(self) -> int:
        """Peak bytes."""
        return self.fixed + self.in_step


def predict_workers(stages: Sequence[StageMemory], schedule: Schedule) -> tuple[WorkerMemory, ...]:
    """Return the memory of one device of each worker; ``stages``: of each stage, under ``schedule``.

    A worker runs one action at a time. Its memory then is what its stages hold of micro-batches, the tensors of that
    action, and the largest messages (``transit``) of one of its stages. Weights are updated after all actions.
    """
    found = []
    for own, stashes in zip(schedule.worker_map.stages_of, schedule.stashes, strict=True):
        memories = [stages[stage] for stage in own]
        update = sum(memory.update for memory in memories)
        in_step = max(update, *(memory.in_step for memory in memories))
        transit = max(memory.transit for memory in memories)
        for states in zip(*(stage_states(schedule, stage) for stage in own), strict=True):
            action = states[0].action
            held = sum(held_bytes(s, memory.stashed, memory.slices) for s, memory in zip(states, memories, strict=True))
            in_step = max(in_step, held + transit + stages[action.stage].working[action.kind])
        found.append(WorkerMemory(own, stashes, sum(memory.fixed for memory in memories), in_step))
    return tuple(found)
