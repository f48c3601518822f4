"""Find and load the compiled library of exchange ops. ``build`` compiles it."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

COMMAND = "python -m dapple_tf.distributed.native.build"
"""The command that compiles the library."""

_FOLDER = "dapple_tf_exchange"
_LONGEST_TEXT = 16384  # bytes
_SOURCE_SUFFIXES = (".cc", ".h")


@dataclass(frozen=True)
class ExchangeLibrary:
    """The loaded library. ``ops``: its TensorFlow ops (``dapple_send``, ``dapple_receive``).

    All ops of a process use the same connections to its peers.
    """

    ops: Any
    _functions: ctypes.CDLL

    def connect(self, peer: int, descriptor: int) -> bool:
        """Give a connected socket to the library, which will close it; return False if ``peer`` has one already."""
        return bool(self._functions.dapple_exchange_connect(peer, descriptor))

    def take_peak_bytes(self) -> int:
        """Return the most bytes of messages in flight at one time since the last call.

        A message is in flight while it is queued for sending, and from the time that its header is received until an
        op takes it.
        """
        return int(self._functions.dapple_exchange_take_peak())

    def find_waits(self, seconds: float) -> dict[int, list[str]]:
        """Return the exchanges that ops have waited for longer than ``seconds``, by the ranks that they wait for."""
        text = ctypes.create_string_buffer(_LONGEST_TEXT)
        self._functions.dapple_exchange_describe_waits(ctypes.c_double(seconds), text, ctypes.c_int64(len(text)))
        found: dict[int, list[str]] = {}
        for line in text.value.decode(errors="replace").splitlines():
            peer, _, exchange = line.partition(" ")
            found.setdefault(int(peer), []).append(exchange)
        return found

    def has_cancelled_waits(self, seconds: float) -> bool:
        """Return whether an op waits whose step was cancelled more than ``seconds`` ago: the step has failed."""
        return bool(self._functions.dapple_exchange_has_cancelled_waits(ctypes.c_double(seconds)))

    def abort(self) -> None:
        """End all waits of ops at this moment: their step has failed, and the ops ignore its cancellation."""
        self._functions.dapple_exchange_abort()

    def close_in_child(self) -> None:
        """Close the connections in a forked child, which would keep them open when its parent dies."""
        self._functions.dapple_exchange_close_in_child()


def source_files() -> Sequence[Path]:
    """Return the C++ files of the library."""
    return sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in _SOURCE_SUFFIXES)


def source_digest() -> str:
    """Return a digest of the library's source and of the TensorFlow that it is compiled for."""
    digest = hashlib.sha256(" ".join([tf.__version__, *tf.sysconfig.get_compile_flags()[1:]]).encode())
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def library_path() -> Path:
    """Return where the library of this source, for this TensorFlow, is or would be: beside TensorFlow's package."""
    return Path(tf.__file__).parents[1] / _FOLDER / f"exchange-{source_digest()}.so"


def find_obstacle() -> str:
    """Return why the library cannot be loaded, or "" if nothing is known to prevent it."""
    if library_path().exists():
        return ""
    return f"its library is not built ({COMMAND})"


def load_library() -> ExchangeLibrary:
    """Load the library; a second call returns the same library.

    Raises OSError or tf.errors.NotFoundError if it is missing or was compiled for another TensorFlow.
    """
    path = str(library_path())
    ops = tf.load_op_library(path)
    functions = ctypes.CDLL(path)
    functions.dapple_exchange_take_peak.restype = ctypes.c_int64
    return ExchangeLibrary(ops, functions)
