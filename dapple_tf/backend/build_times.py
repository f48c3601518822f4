"""Measure the phases of building a step, and show what a long build is doing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from dapple_tf.messages import LOGGER

PHASES = {
    "trace": "traces and classifies the loss",
    "layers": "finds the layers",
    "profile": "makes the plan",
    "differentiate": "differentiates the stages",
    "passes": "rewrites the graph",
    "emit": "emits the TensorFlow function",
    "first run": "runs the step for the first time, for which TensorFlow optimizes it",
}
"""The phases of building a step in their order, each with what it does."""


class BuildTimes:
    """Seconds that the phases of building steps took, over all builds.

    A build's seconds are counted from the last first run on. Once they exceed ``quiet_seconds``, a line on stderr names
    the present phase, and each later one as it begins, unless ``silent``.
    """

    def __init__(self, *, quiet_seconds: float = 3.0, silent: bool = False) -> None:
        self._quiet_seconds = quiet_seconds
        self._silent = silent
        self._seconds: dict[str, float] = {}
        self._cpu_seconds: dict[str, float] = {}
        self._this_build = 0.0

    def note(self, text: str) -> None:
        """Print a line about what was built on stderr, unless silent."""
        if not self._silent:
            LOGGER.info(text)

    @property
    def seconds(self) -> dict[str, float]:
        """Wall seconds by phase, in the order of ``PHASES``; phases that have not run are left out."""
        return {phase: self._seconds[phase] for phase in PHASES if phase in self._seconds}

    @property
    def cpu_seconds(self) -> dict[str, float]:
        """CPU seconds of the process, all threads, by phase, in the same order."""
        return {phase: self._cpu_seconds[phase] for phase in PHASES if phase in self._cpu_seconds}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the phase of this name, which lasts as long as this context."""
        begin, cpu_begin = time.perf_counter(), time.process_time()
        timer = threading.Timer(max(0.0, self._quiet_seconds - self._this_build), LOGGER.info, [f"{PHASES[name]} ..."])
        timer.daemon = True
        if not self._silent:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            seconds = time.perf_counter() - begin
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            LOGGER.debug("%s took %.2f s", PHASES[name], seconds)
            self._cpu_seconds[name] = self._cpu_seconds.get(name, 0.0) + time.process_time() - cpu_begin
            self._this_build = 0.0 if name == "first run" else self._this_build + seconds
