"""Texts that a rank prints when it ends because of a failure, its own or another rank's."""

from __future__ import annotations

from dapple_tf.distributed.progress import RankStatus

_ADVICE = "All processes end; restart from the last checkpoint."


def describe_failure(rank: int, status: RankStatus, failed: int, failed_status: RankStatus, what: str) -> str:
    """Return why ``rank`` stops: ``what`` happened to the rank ``failed``, which may be the same."""
    name = name_rank(rank, status)
    if failed == rank:
        return f"{name} stops {status.when}: it {what}; the last exchange it completed: {status.last_exchange}."
    return (
        f"{name} stops: {name_rank(failed, failed_status)}, {failed_status.when}, {what}; the last exchange it "
        f"completed, by its last report: {failed_status.last_exchange}. {name} was {status.when}; the last exchange it "
        f"completed: {status.last_exchange}. {_ADVICE}"
    )


def describe_call_mismatch(rank: int, status: RankStatus, what: str) -> str:
    """Return why ``rank`` stops: the ranks make different calls; ``what`` says which rank makes which."""
    return (
        f"{name_rank(rank, status)} stops {status.when}, because the ranks make different calls: {what}. Every rank "
        "must be called with the same batches, and make the same calls in the same order. The last exchange it "
        f"completed: {status.last_exchange}. {_ADVICE}"
    )


def describe_forced_exit(rank: int, status: RankStatus, seconds: float) -> str:
    """Return why ``rank`` is ended: it has reported an error and did not end by itself."""
    return (
        f"{name_rank(rank, status)} is ended: it still runs {seconds:g} s after the error above, but a step that fails "
        "ends the job. Restart from the last checkpoint."
    )


def name_rank(rank: int, status: RankStatus) -> str:
    """Return ``rank 1 (stage 0)``, ``rank 1 (stages 0, 2)``, or without the stages where they are not known."""
    if not status.stages:
        return f"rank {rank}"
    return f"rank {rank} (stage{'s' * (len(status.stages) > 1)} {', '.join(map(str, status.stages))})"
