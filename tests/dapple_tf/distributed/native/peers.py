"""Connections of the exchange library for tests: two ends, in one process or in two."""

from __future__ import annotations

import itertools
import shutil
import socket
from dataclasses import dataclass
from typing import Any

import pytest
import tensorflow as tf

from dapple_tf.distributed.native.library import ExchangeLibrary, library_path

needs_library = pytest.mark.skipif(
    not library_path().exists(), reason="the library of native exchanges is not built: make horovod"
)
has_compiler = shutil.which("g++") is not None

_numbers = itertools.count(1000)  # of peers: a process keeps its connections


@dataclass(frozen=True)
class Pair:
    """A connection of this process with itself: what is sent to ``there`` comes from ``here``."""

    library: ExchangeLibrary
    here: int
    there: int

    def send(self, values: Any, exchange: str = "x", numbers: Any = ()) -> Any:
        return self.library.ops.dapple_send(values, numbers, peer=self.there, exchange=exchange)

    def receive(self, types: Any, shapes: Any = None, exchange: str = "x", numbers: Any = ()) -> list[Any]:
        shapes = [None] * len(types) if shapes is None else shapes
        values, _ = self.library.ops.dapple_receive(numbers, T=types, shapes=shapes, peer=self.here, exchange=exchange)
        return list(values)


def connect_pair(library: ExchangeLibrary) -> Pair:
    """Connect this process with itself."""
    first, second = socket.socketpair()
    here, there = next(_numbers), next(_numbers)
    assert library.connect(there, first.detach())
    assert library.connect(here, second.detach())
    return Pair(library, here, there)


def connect_socket(library: ExchangeLibrary) -> tuple[int, socket.socket]:
    """Return a new peer of this process, and the other end of its connection, which the test reads and writes."""
    own, other = socket.socketpair()
    peer = next(_numbers)
    assert library.connect(peer, own.detach())
    return peer, other


DTYPES = (
    *(tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32),
    *(tf.uint32, tf.int64, tf.uint64, tf.complex64, tf.complex128),
)
