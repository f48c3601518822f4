"""What a rank says when it ends because of a failure, its own or another's."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

from dapple_tf.distributed.progress import Standing


def say(text: str) -> None:
    """Write a line to stderr past all buffers: the process is about to end."""
    os.write(2, f"dapple: {text}\n".encode())


def describe_failure(me: int, own: Standing, rank: int, standing: Standing, what: str) -> str:
    """Rank ``me`` stops because rank ``rank`` (possibly itself) has failed: ``what`` happened to it, and where."""
    if rank == me:
        return f"{name(me, own)} stops {own.when}: it {what}; the last exchange it completed: {own.completed}."
    return (
        f"{name(me, own)} stops: {name(rank, standing)}, {standing.when}, {what}; the last exchange it completed, by "
        f"its last report: {standing.completed}. {name(me, own)} was {own.when}; the last exchange it completed: "
        f"{own.completed}. All processes end; restart from the last checkpoint."
    )


def describe_difference(me: int, own: Standing, what: str) -> str:
    """Rank ``me`` stops because the ranks differ in what they begin."""
    return (
        f"{name(me, own)} stops {own.when}, because the ranks make different calls: {what}. Every rank must be called "
        f"with the same batches, and make the same calls in the same order. The last exchange it completed: "
        f"{own.completed}. All processes end; restart from the last checkpoint."
    )


def describe_end(me: int, own: Standing, seconds: float) -> str:
    """Rank ``me`` has reported an error and did not end by itself."""
    return (
        f"{name(me, own)} ends now: it has gone on for {seconds:g} s after the error above, but a step that fails ends "
        "the job. Restart from the last checkpoint."
    )


def name(rank: int, standing: Standing) -> str:
    """``rank 1 (stage 0)``, as far as the stage is known."""
    return f"rank {rank}" + ("" if standing.stage is None else f" (stage {standing.stage})")


def flush_output() -> None:
    """Write out what was printed, waiting a moment at most: a thread may hold a lock on it."""
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(0.2)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or replaced by anything
            stream.flush()
