"""Start TensorFlow without the messages of its libraries."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator

from dapple_tf.commands.output import showing
from dapple_tf.messages import LOGGER


def start_tensorflow(devices: int | None) -> None:
    """Import TensorFlow and make the devices; see ``dapple.init``."""
    with hide_startup_messages(), showing("starts TensorFlow"):
        from dapple_tf.devices import home_device, init

        init(devices)
        home_device()


@contextlib.contextmanager
def hide_startup_messages() -> Iterator[None]:
    """Keep what libraries write to stderr inside the block, and show it only if the block fails.

    While they start, TensorFlow's libraries print notes about the processor, past Python's ``sys.stderr``. What Python
    writes is shown: in the block ``sys.stderr`` is another stream to the same place, which stays open, since handlers
    of logs may keep it. With --verbose nothing is hidden.
    """
    if LOGGER.isEnabledFor(logging.DEBUG):
        yield
        return
    sys.stderr.flush()
    before, stderr = sys.stderr, os.dup(2)
    # Not closed, so no context manager: see above.
    sys.stderr = open(os.dup(2), "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(stderr, 2)
            hidden.seek(0)
            os.write(2, hidden.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            sys.stderr = before
