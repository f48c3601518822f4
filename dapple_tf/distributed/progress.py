"""How far this process has come: which step it is in, and the last exchange that it completed.

A step runs in TensorFlow and cannot be asked. Each exchange of its graph writes its number into a variable, which any
thread may read meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dapple_tf.distributed.call_order_check import RankCall
from dapple_tf.distributed.hang_detector import Canary


@dataclass(frozen=True)
class Standing:
    """How far a rank had come. ``meetings``: how often it has come to where all ranks must meet."""

    stage: int | None = None
    step: int = 0
    running: bool = False
    exchange: str = ""
    meetings: int = 0

    @property
    def when(self) -> str:
        """Words for the time: in, or after, a step."""
        if not self.step:
            return "before its first step"
        return f"{'in' if self.running else 'after'} step {self.step}"

    @property
    def completed(self) -> str:
        """Words for the last exchange."""
        return self.exchange or f"none{f' of step {self.step}' if self.running else ''}"


@dataclass
class Progress:
    """The standing of this process; steps are counted over all pipelined steps of the process.

    ``begun`` counts what this rank has begun that all must begin, ``history`` is a checksum of it, and ``listener`` is
    told of each. ``programs``: how many this process has built.
    """

    stage: int | None = None
    step: int = 0
    meetings: int = 0
    met: int = 0
    programs: int = 0
    begun: int = 0
    history: int = 0
    listener: Callable[[RankCall], None] | None = None
    canary: Canary = field(default_factory=Canary)
    _running: bool = False
    _names: list[str] = field(default_factory=lambda: [""])
    _done: Any = None

    @property
    def done(self) -> Any:
        """The variable, on the host, that holds the number of the last exchange; 0 for none in this step."""
        if self._done is None:
            import tensorflow as tf

            with tf.init_scope(), tf.device("CPU:0"):
                self._done = tf.Variable(0, dtype=tf.int32, trainable=False)
        return self._done

    def number_of(self, exchange: str) -> int:
        """The number that stands for an exchange in ``done``."""
        if exchange not in self._names:
            self._names.append(exchange)
        return self._names.index(exchange)

    def standing(self) -> Standing:
        """How far it is now; any thread may ask."""
        number = 0 if self._done is None else int(self._done.numpy())
        return Standing(self.stage, self.step, self._running, self._names[number], self.meetings)

    @property
    def waiting(self) -> bool:
        """Whether it is where all ranks must meet."""
        return self.meetings > self.met

    def begin(self, what: str, detail: str = "") -> None:
        """Tell that this rank now begins what all ranks must begin; see ``RankCall``."""
        self.begun += 1
        self.history = zlib.crc32(what.encode(), self.history)
        if self.listener is not None:
            self.listener(RankCall(self.begun, what, detail))

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """While open, this rank waits for all others to come to the same place."""
        self.meetings += 1
        try:
            yield
        finally:
            self.met = self.meetings

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While open, a step runs."""
        self.done.assign(0)
        self.step += 1
        self._running = True
        try:
            with self.meeting(), self.canary.singing():
                yield
        finally:
            self._running = False


@functools.cache
def progress() -> Progress:
    """The progress of this process: there is one, as there is one job."""
    return Progress()
