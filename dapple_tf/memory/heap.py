"""What this process has allocated and not freed, as glibc counts it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass


class _Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    )


@dataclass(frozen=True)
class Heap:
    """Live bytes: in the ``arenas``, where small blocks are, and ``mapped``, each large block by itself."""

    arenas: int
    mapped: int

    @property
    def live(self) -> int:
        """All of it."""
        return self.arenas + self.mapped


def find_heap() -> Callable[[], Heap] | None:
    """A function that reads the heap; None without a glibc that tells (2.33 or later).

    It goes through all free blocks, each arena locked meanwhile: a microsecond in a new process, 0.3 to 1 ms in
    one that has traced a large model.
    """
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    mallinfo.restype = _Mallinfo

    def read() -> Heap:
        info = mallinfo()
        return Heap(int(info.uordblks), int(info.hblkhd))

    return read
