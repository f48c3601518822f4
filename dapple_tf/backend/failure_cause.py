"""Find the cause of a failed step in TensorFlow's error message."""

from __future__ import annotations

import re

# Every failure cancels the op that detects hangs (``distributed.hang_detector``); that is not the cause.
_CANCELLED = "Dequeue operation was cancelled"
# Before the error itself: where the graph was built, with the lines of the stack, which are indented.
_PLACES = re.compile(
    r"\A(?:Graph execution error:\s*)?"
    r"(?:Detected at node [^\n]* defined at \(most recent call last\):\n"
    r"(?:<stack traces unavailable>\n|[ \t]+[^\n]*\n)*)+"
)


def find_cause(message: str) -> str:
    """Return the first root error in TensorFlow's ``message`` that is not a cancellation, without its stack trace.

    Where it lists no root errors, return ``message`` without the places at which its graph was built.
    """
    roots = re.findall(r"^\s*\(\d+\) [A-Z_]+:\s*(.*?)(?=^\s*\(\d+\) [A-Z_]+:|^\d+ successful|\Z)", message, re.M | re.S)
    causes = [root.strip() for root in roots if not root.startswith(_CANCELLED)]
    return causes[0] if causes else _PLACES.sub("", message)
