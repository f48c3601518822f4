"""Measure live memory while something runs: the peak that TensorFlow's and the C library's allocators count.

The resident set is not used: allocators keep freed memory.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tensorflow as tf

_SAMPLING_SECONDS = 0.001

Source = Literal["allocator", "allocator and heap", "heap"]


@dataclass(frozen=True)
class MeasuredMemory:
    """Live bytes of a device at the start of a measurement, and their peak during it.

    ``device``: the logical CPU devices of a process share one allocator and are measured together as ``CPU``.
    ``source``: ``allocator`` is TensorFlow's own statistics. They leave out tensors below 256 KiB, which a CPU's
    allocator takes from the C library; ``allocator and heap`` adds what the C library has allocated since the start,
    Python's objects included. ``heap``: everything that the process has allocated, for any use. Sources with the heap
    are sampled, so a short peak may be missed. ``samples``: pairs of a time (seconds of the system's clock) and the
    bytes beyond those live at the start, each time that a sample found them changed; empty where nothing was sampled.
    ``base_bytes``: in a job, the bytes that the process held before any model (code, libraries, TensorFlow's own); else
    0.
    """

    device: str
    source: Source
    start_bytes: int
    peak_bytes: int
    samples: tuple[tuple[float, int], ...] = field(default=(), repr=False, compare=False)
    base_bytes: int = 0

    @property
    def above_start(self) -> int:
        """Peak bytes beyond those live at the start."""
        return self.peak_bytes - self.start_bytes


class MemoryMeter:
    """Measure the live memory of ``devices`` (names) during a ``with`` block; ``measured`` holds the result.

    TensorFlow keeps statistics for GPUs, and for CPUs with oneDNN; the meter resets their peaks. Where there are
    neither statistics nor glibc 2.33, ``measured`` is empty.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.measured: tuple[MeasuredMemory, ...] = ()
        self._devices = _distinct(devices)
        self._running: list[_AllocatorMeter] = []

    def __enter__(self) -> MemoryMeter:
        meters = [_start_meter(device) for device in self._devices]
        self._running = [meter for meter in meters if meter is not None]
        return self

    def __exit__(self, *_: object) -> None:
        self.measured = tuple(meter.stop() for meter in self._running)


def resident_bytes() -> int:
    """Return the resident set of this process in bytes; 0 where the system has no ``/proc``."""
    return read_kilobytes("/proc/self/status").get("VmRSS", 0)


def read_kilobytes(path: str) -> dict[str, int]:
    """Return, in bytes, the fields that a file of Linux gives in kilobytes; empty where there is no such file."""
    fields = (line.split(":") for line in read_system_file(path).splitlines() if line.endswith(" kB"))
    return {name: 1024 * int(value.split()[0]) for name, value in fields}


def read_system_file(path: str) -> str:
    """Return the text of a file of the system; "" where there is none."""
    try:
        return Path(path).read_text("utf-8")
    except OSError:
        return ""


def has_statistics(device: str) -> bool:
    """Return whether TensorFlow counts the memory allocated on ``device`` (``GPU:1``)."""
    try:
        tf.config.experimental.get_memory_info(device)
    except ValueError:  # a CPU without oneDNN
        return False
    return True


def packs_operands() -> bool:
    """Return whether TensorFlow's matrix products copy their operands: on CPUs without oneDNN.

    Eigen's product does. What oneDNN's takes beside its result depends on its choice of a kernel, and is not predicted.
    """
    return not tf.config.list_logical_devices("GPU") and not has_statistics("CPU:0")


def _distinct(devices: Sequence[str]) -> tuple[str, ...]:
    """Return one device for each allocator, named as in TensorFlow's statistics: ``GPU:1``; ``CPU:0`` for all CPUs."""
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    names = [f"{spec.device_type}:{0 if spec.device_type == 'CPU' else spec.device_index or 0}" for spec in specs]
    return tuple(dict.fromkeys(names))


class _AllocatorMeter:
    """Measures one allocator from its creation to ``stop``.

    ``statistics``: whether TensorFlow keeps statistics for it. ``read``: the figure to sample, in bytes; None where
    the statistics' own peak suffices.
    """

    def __init__(self, device: str, source: Source, statistics: bool, read: Callable[[], int] | None) -> None:
        self._device = device
        self._source = source
        self._statistics = statistics
        if statistics:
            tf.config.experimental.reset_memory_stats(device)
        self._start = _current(device) if statistics else 0
        self._sampler = _Sampler(read) if read is not None else None

    def stop(self) -> MeasuredMemory:
        """End the measurement and return its result."""
        peak = int(tf.config.experimental.get_memory_info(self._device)["peak"]) if self._statistics else 0
        start = self._start
        samples: tuple[tuple[float, int], ...] = ()
        if self._sampler is not None:
            samples = self._sampler.stop()
            above = max(count for _, count in samples)
            start = start if self._statistics else self._sampler.start
            peak = max(peak, start + above)
        return MeasuredMemory("CPU" if self._device == "CPU:0" else self._device, self._source, start, peak, samples)


def _start_meter(device: str) -> _AllocatorMeter | None:
    heap = _find_heap_reader() if device == "CPU:0" else None
    if has_statistics(device):
        if heap is None:
            return _AllocatorMeter(device, "allocator", True, None)
        return _AllocatorMeter(device, "allocator and heap", True, lambda: _current(device) + heap().uordblks)
    if heap is None:
        return None
    return _AllocatorMeter(device, "heap", False, lambda: (now := heap()).uordblks + now.hblkhd)


def _current(device: str) -> int:
    return int(tf.config.experimental.get_memory_info(device)["current"])


class _Sampler:
    """A thread that reads a figure every millisecond and keeps its changes."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._stopped = threading.Event()
        self.start = read()
        self._samples = [(time.time(), 0)]
        self._thread = threading.Thread(target=self._run, name="memory meter", daemon=True)
        self._thread.start()

    def stop(self) -> tuple[tuple[float, int], ...]:
        """End the thread and return times and figures beyond ``start``."""
        self._stopped.set()
        self._thread.join()
        self._sample()
        return tuple(self._samples)

    def _run(self) -> None:
        while not self._stopped.wait(_SAMPLING_SECONDS):
            self._sample()

    def _sample(self) -> None:
        above = self._read() - self.start
        if above != self._samples[-1][1]:
            self._samples.append((time.time(), above))


# --- Bytes that this process has allocated and not freed, as glibc counts them


class _Mallinfo(ctypes.Structure):
    """The result of glibc's ``mallinfo2``: ``uordblks`` counts the small blocks, ``hblkhd`` those mapped one by one."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )
    uordblks: int
    hblkhd: int


def _find_heap_reader() -> Callable[[], _Mallinfo] | None:
    """Return the function of glibc that reads the heap's size, or None where it is older than 2.33 or absent.

    A read visits all free blocks and locks each arena meanwhile: it takes a microsecond in a new process, and 0.3 to
    1 ms in one that has traced a large model.
    """
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    mallinfo.restype = _Mallinfo
    return mallinfo
