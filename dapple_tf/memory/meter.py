"""Live memory while something runs: the most at one time, by what TensorFlow's and the C library's allocators count.

The resident set is no measure of it: allocators keep what was freed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import tensorflow as tf

from dapple_tf.memory.heap import find_heap

_SAMPLING_SECONDS = 0.001

Source = Literal["allocator", "allocator and heap", "heap"]


@dataclass(frozen=True)
class Measured:
    """Bytes of live memory: at the start, and the most from there on.

    ``device``: whose; the logical CPU devices of a process share one allocator and are ``CPU`` together. ``source``:
    ``allocator``, TensorFlow's own statistics. They leave out what a CPU's allocator takes from the C library, tensors
    below 256 KiB; ``allocator and heap`` adds what that has given since the start, Python's objects included.
    ``heap``: all that the process has allocated, of whatever use. What involves the heap is sampled.
    """

    device: str
    source: Source
    start_bytes: int
    peak_bytes: int

    @property
    def above_start(self) -> int:
        """The most bytes beyond what was there at the start."""
        return self.peak_bytes - self.start_bytes


class MemoryMeter:
    """Measures the live memory of ``devices`` (names) while its block runs; afterwards ``measured`` has each.

    Where TensorFlow keeps statistics (GPUs; CPUs with oneDNN) it resets their peaks. Where it keeps none, and there is
    no glibc to ask, nothing is measured and ``measured`` is empty.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.measured: tuple[Measured, ...] = ()
        self._devices = _distinct(devices)
        self._watches: list[_Watch] = []

    def __enter__(self) -> MemoryMeter:
        found = [_watch(device) for device in self._devices]
        self._watches = [watch for watch in found if watch is not None]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.measured = tuple(watch.stop() for watch in self._watches)


def has_statistics(device: str) -> bool:
    """Whether TensorFlow counts what is allocated on ``device`` (``GPU:1``)."""
    try:
        tf.config.experimental.get_memory_info(device)
    except ValueError:  # a CPU without oneDNN
        return False
    return True


def _distinct(devices: Sequence[str]) -> tuple[str, ...]:
    """One device for each allocator, as TensorFlow's statistics call them: ``GPU:1``, and ``CPU:0`` for all CPUs."""
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    names = [f"{spec.device_type}:{0 if spec.device_type == 'CPU' else spec.device_index or 0}" for spec in specs]
    return tuple(dict.fromkeys(names))


class _Watch:
    """One allocator under watch; ``read``: what is to be sampled, None where the statistics' own peak says it all."""

    def __init__(self, device: str, source: Source, counted: bool, read: Callable[[], int] | None) -> None:
        self._device = device
        self._source = source
        self._counted = counted  # by TensorFlow
        if counted:
            tf.config.experimental.reset_memory_stats(device)
        self._start = _current(device) if counted else 0
        self._sampler = _Sampler(read) if read is not None else None

    def stop(self) -> Measured:
        """End the watch; what it has seen."""
        peak = int(tf.config.experimental.get_memory_info(self._device)["peak"]) if self._counted else 0
        start = self._start
        if self._sampler is not None:
            above = self._sampler.stop() - self._sampler.start
            start = start if self._counted else self._sampler.start
            peak = max(peak, start + above)
        return Measured("CPU" if self._device == "CPU:0" else self._device, self._source, start, peak)


def _watch(device: str) -> _Watch | None:
    heap = find_heap() if device == "CPU:0" else None
    if has_statistics(device):
        if heap is None:
            return _Watch(device, "allocator", True, None)
        return _Watch(device, "allocator and heap", True, lambda: _current(device) + heap().arenas)
    if heap is None:
        return None
    return _Watch(device, "heap", False, lambda: heap().live)


def _current(device: str) -> int:
    return int(tf.config.experimental.get_memory_info(device)["current"])


class _Sampler:
    """A thread that reads a figure again and again, and keeps the largest."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._stopped = threading.Event()
        self.start = self._most = read()
        self._thread = threading.Thread(target=self._run, name="memory meter", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End the thread; the largest figure."""
        self._stopped.set()
        self._thread.join()
        return max(self._most, self._read())

    def _run(self) -> None:
        while not self._stopped.wait(_SAMPLING_SECONDS):
            self._most = max(self._most, self._read())
