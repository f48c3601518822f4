"""The logger ``dapple_tf``: what the library does while it runs, and what it noticed.

Its messages go to stderr, each as a line "dapple: ...": progress and notices are INFO, what should be acted on is
WARNING, and the seconds of each part of a build are DEBUG. ``logging.getLogger("dapple_tf")`` sets the level, or takes
other handlers.
"""

from __future__ import annotations

import contextlib
import logging
import sys

LOGGER = logging.getLogger("dapple_tf")


class _Stderr(logging.Handler):
    """Writes each message to the stderr of the moment, which programs and tests may exchange."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message as one line, unless the terminal or the reader of a pipe is gone: the work goes on."""
        with contextlib.suppress(OSError):
            print(f"dapple: {record.getMessage()}", file=sys.stderr, flush=True)


if not LOGGER.handlers:
    LOGGER.addHandler(_Stderr())
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # a program that shows its own logs would show these twice
