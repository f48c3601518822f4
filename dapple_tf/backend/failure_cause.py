"""Find the cause of a failed step in TensorFlow's error message."""

from __future__ import annotations

import re

# Every failure cancels the op that detects hangs (``distributed.hang_detector``); that is not the cause.
_CANCELLED = "Dequeue operation was cancelled"


def find_cause(message: str) -> str:
    """Return the first root error in TensorFlow's ``message`` that is not a cancellation, without its stack trace.

    Return ``message`` itself where it lists no root errors.
    """
    roots = re.findall(r"^\s*\(\d+\) [A-Z_]+:\s*(.*?)(?=^\s*\(\d+\) [A-Z_]+:|^\d+ successful|\Z)", message, re.M | re.S)
    causes = [root.strip() for root in roots if not root.startswith(_CANCELLED)]
    return causes[0] if causes else message
