"""The map from workers to stages. A worker is the group of devices, one or r replicas, that run the same stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dapple_tf.errors import ScheduleError


@dataclass(frozen=True)
class WorkerMap:
    """The stages of each worker, ``stages_of``: ``((0, 2), (1, 3))`` is looped, ``((0, 3), (1, 2))`` V-shaped.

    Raises ScheduleError unless each of the stages from 0 on is on one worker, and each worker has a stage.
    """

    stages_of: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        worker_of: dict[int, int] = {}
        for worker, stages in enumerate(self.stages_of):
            if not stages:
                raise ScheduleError(f"worker {worker} has no stage: give it one, or leave it out")
            for stage in stages:
                if stage in worker_of:
                    raise ScheduleError(
                        f"stage {stage} is on workers {worker_of[stage]} and {worker}: a stage is on one worker"
                    )
                worker_of[stage] = worker
        if not worker_of:
            raise ScheduleError("there is no worker")
        missing = next((stage for stage in range(len(worker_of)) if stage not in worker_of), None)
        if missing is not None:
            last = max(worker_of)
            raise ScheduleError(f"stage {missing} is on no worker, but stage {last} is on worker {worker_of[last]}")

    @staticmethod
    def one_per_stage(stages: int) -> WorkerMap:
        """Return the map of one worker per stage."""
        return WorkerMap(tuple((stage,) for stage in range(stages)))

    @staticmethod
    def looped(workers: int, chunks: int) -> WorkerMap:
        """Return the map of ``chunks`` stages per worker, where stage s is on worker s modulo the number of workers."""
        return WorkerMap(tuple(tuple(range(w, workers * chunks, workers)) for w in range(workers)))

    @staticmethod
    def waves(workers: int, chunks: int) -> WorkerMap:
        """Return the map of ``chunks`` stages per worker, whose stages go to the last worker and back: a V for two."""
        turns = [(range(workers), reversed(range(workers)))[chunk % 2] for chunk in range(chunks)]
        return WorkerMap.of([worker for turn in turns for worker in turn])

    @staticmethod
    def of(worker_of: Sequence[int]) -> WorkerMap:
        """Return the map in which ``worker_of[s]`` is the worker of stage s."""
        stages_of: list[list[int]] = [[] for _ in range(max(worker_of, default=-1) + 1)]
        for stage, worker in enumerate(worker_of):
            stages_of[worker].append(stage)
        return WorkerMap(tuple(map(tuple, stages_of)))

    @property
    def stages(self) -> int:
        """S, the number of stages."""
        return sum(map(len, self.stages_of))

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.stages_of)

    @cached_property
    def worker_of(self) -> tuple[int, ...]:
        """The worker of each stage."""
        found = {stage: worker for worker, stages in enumerate(self.stages_of) for stage in stages}
        return tuple(found[stage] for stage in range(self.stages))

    @property
    def is_chunked(self) -> bool:
        """Whether some worker runs several stages."""
        return self.workers < self.stages

    @property
    def has_one_stage_per_worker(self) -> bool:
        """Whether stage s is alone on worker s."""
        return self.stages_of == tuple((stage,) for stage in range(self.stages))
