"""The time after which a silent rank has failed."""

from __future__ import annotations

from collections.abc import Mapping

from dapple_tf.errors import JobError

TIMEOUT = "DAPPLE_TIMEOUT_SECONDS"
DEFAULT_TIMEOUT = 30.0


def read_timeout(environment: Mapping[str, str]) -> float:
    """Return the seconds of DAPPLE_TIMEOUT_SECONDS (default 30); raise JobError unless it is a number from 1 up."""
    text = environment.get(TIMEOUT, "")
    try:
        timeout = float(text or DEFAULT_TIMEOUT)
    except ValueError:
        timeout = 0.0
    if not 1 <= timeout < float("inf"):
        raise JobError(f"{TIMEOUT}={text!r}: give a number of seconds, 1 or more")
    return timeout
