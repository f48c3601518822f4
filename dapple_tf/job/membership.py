"""Joining the Horovod job that a launcher (mpirun, horovodrun) started, and what its ranks tell each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapple_tf.errors import DeviceError
from profiler.detect import job_size

# Horovod looks for work that all ranks have ready once in so many milliseconds (1 by default).
_CYCLE_MILLISECONDS = "0.2"


@dataclass(frozen=True)
class Job:
    """The job of ``size`` processes; this one is ``rank``, and the ``local_rank``-th of its server."""

    size: int
    rank: int
    local_rank: int
    local_size: int

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` (anything that pickles), on every rank."""
        import horovod.tensorflow as hvd

        return hvd.broadcast_object(value, root_rank=0)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank, on every rank."""
        import horovod.tensorflow as hvd

        return list(hvd.allgather_object(value))

    def decide(self, choose: Callable[[], Any]) -> Any:
        """What ``choose`` gives on rank 0, on every rank; an error of ours there is raised everywhere."""
        answer: tuple[Any, Exception | None] = None, None
        if self.rank == 0:
            try:
                answer = choose(), None
            except Exception as raised:  # whatever it is: the other ranks wait for an answer
                answer = None, raised
        value, failure = self.broadcast(answer)
        if failure is not None:
            raise failure
        return value

    def make_process_sets(self, wanted: Iterable[Sequence[int]]) -> dict[tuple[int, ...], Any]:
        """A Horovod process set for each set of ranks; every rank must ask for the same, in any order."""
        import horovod.tensorflow as hvd

        sets: dict[tuple[int, ...], Any] = {tuple(range(self.size)): hvd.global_process_set}
        known = {tuple(ps.ranks): ps for ps in _known_process_sets() if ps.ranks is not None}
        for ranks in sorted({tuple(sorted(ranks)) for ranks in wanted}):
            if ranks not in sets:
                sets[ranks] = known.get(ranks) or hvd.add_process_set(hvd.ProcessSet(list(ranks)))
        return sets


def _known_process_sets() -> list[Any]:
    from horovod.common import process_sets

    return list(getattr(process_sets, "_id_to_process_sets", {}).values())


def join(environment: Mapping[str, str] = os.environ) -> Job | None:
    """The job that the launcher's ``environment`` tells of, joined if it was not yet; None outside of any.

    Raises DeviceError where Horovod is not installed.
    """
    if job_size(environment) < 2:
        return None
    # Stages make their sets when their plan is known; Open MPI and Horovod read these when they start.
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    os.environ.setdefault("HOROVOD_CYCLE_TIME", _CYCLE_MILLISECONDS)
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise DeviceError(
            f"the launcher started {job_size(environment)} processes, but Horovod is not installed here ({error}): run "
            "scripts/install_horovod.sh"
        ) from error
    if not hvd.is_initialized():
        hvd.init()
    return current()


def current() -> Job | None:
    """The job that this process has joined, or None."""
    if "horovod.tensorflow" not in sys.modules:
        return None
    import horovod.tensorflow as hvd

    if not hvd.is_initialized() or hvd.size() < 2:
        return None
    return Job(hvd.size(), hvd.rank(), hvd.local_rank(), hvd.local_size())
