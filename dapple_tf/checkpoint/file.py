"""One checkpoint in one file, which is there as a whole or not at all.

The file is in the safetensors format, which other tools read too: the length of a header (8 bytes, the lowest first),
the header in JSON (dtype, shape and place of each tensor, and texts about the file), then the tensors' bytes. Among
the texts is a checksum of the whole file, its own digits counted as zeros.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from dapple_tf.errors import CheckpointError
from profiler.files import atomic_replacement

FORMAT = "dapple-checkpoint/1"
_TEXTS = "__metadata__"
_CHECKSUM = "sha256"
_NO_CHECKSUM = "0" * 64
_BLOCK_BYTES = 2**24

# TensorFlow's dtypes as the format calls them (complex128 is not in it, and called in the same way).
_DTYPES = {
    "bfloat16": "BF16",
    "bool": "BOOL",
    "complex128": "C128",
    "complex64": "C64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "int8": "I8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "uint8": "U8",
}
_NAMES = {short: name for name, short in _DTYPES.items()}


class DamagedError(ValueError):
    """A file that is not what was once written."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor is in a file: its bytes from ``begin`` to ``end``; ``dtype`` as TensorFlow calls it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class CheckpointFile:
    """A whole and readable file; ``texts`` are what its writer said of it."""

    path: Path
    texts: Mapping[str, str]
    entries: Mapping[str, Entry]

    def read(self) -> Iterator[tuple[str, Any]]:
        """Name and value (a NumPy array) of one tensor after the other."""
        for name in self.entries:
            yield name, self.read_value(name)

    def read_value(self, name: str) -> Any:
        """The value (a NumPy array) of one tensor."""
        entry = self.entries[name]
        with self.path.open("rb") as stream:
            stream.seek(entry.begin)
            data = np.frombuffer(stream.read(entry.end - entry.begin), np.uint8)
        return data.view(tf.as_dtype(entry.dtype).as_numpy_dtype).reshape(entry.shape)


def can_hold(variable: tf.Variable) -> bool:
    """Whether the format has the variable's dtype, and its shape is known."""
    return variable.dtype.name in _DTYPES and variable.shape.is_fully_defined()


def write_checkpoint(
    path: Path, variables: Mapping[str, tf.Variable], values: Iterable[Any], texts: Mapping[str, str]
) -> None:
    """Write the ``values`` (NumPy) of ``variables``, one at a time, so that a crash leaves all of the file or none.

    Raises OSError where the file cannot be written; nothing of it is left then.
    """
    header = _make_header(variables, {**texts, "format": FORMAT, _CHECKSUM: _NO_CHECKSUM})
    with atomic_replacement(path) as part, part.open("wb") as stream:
        checksum = hashlib.sha256(header)
        stream.write(header)
        for _, value in zip(variables, values, strict=True):
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
            checksum.update(data)
            stream.write(data)
        stream.seek(header.index(_NO_CHECKSUM.encode()))
        stream.write(checksum.hexdigest().encode())
        stream.flush()
        os.fsync(stream.fileno())  # before it gets its name, which the disk may otherwise know first
    _sync_folder(path.parent)


def open_checkpoint(path: Path) -> CheckpointFile:
    """Read what the file holds, having read all of it once.

    Raises DamagedError for a file that is torn, changed or not a checkpoint, CheckpointError for one of another
    version, OSError for one that cannot be read.
    """
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        size = os.fstat(stream.fileno()).st_size
        if not 0 < length <= size - 8:
            raise DamagedError(f"{path} is damaged: it is {size} bytes long, shorter than its header")
        header = stream.read(length)
        try:
            content = json.loads(header)
            texts = content.pop(_TEXTS)
            said, form = str(texts[_CHECKSUM]), texts["format"]
            entries = {name: _read_entry(entry, 8 + length) for name, entry in content.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(
                f"{path} is damaged, or not a checkpoint: its header cannot be read ({error})"
            ) from error
        whole = max((entry.end for entry in entries.values()), default=8 + length)
        if size != whole:
            raise DamagedError(f"{path} is damaged: it is {size} bytes long, and should be {whole}")
        zeroed = header.replace(said.encode(), _NO_CHECKSUM.encode(), 1)
        if _checksum(length.to_bytes(8, "little") + zeroed, stream) != said:
            raise DamagedError(f"{path} is damaged: its content does not have its checksum")
        if form != FORMAT:
            raise CheckpointError(f"{path} is of the format {form!r}, but this version of dapple reads {FORMAT!r}")
    return CheckpointFile(path, texts, entries)


def _make_header(variables: Mapping[str, tf.Variable], texts: Mapping[str, str]) -> bytes:
    content: dict[str, Any] = {_TEXTS: dict(texts)}
    place = 0
    for name, variable in variables.items():
        size = variable.shape.num_elements() * variable.dtype.size
        content[name] = {
            "dtype": _DTYPES[variable.dtype.name],
            "shape": variable.shape.as_list(),
            "data_offsets": [place, place + size],
        }
        place += size
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _read_entry(entry: Mapping[str, Any], start: int) -> Entry:
    begin, end = entry["data_offsets"]
    return Entry(_NAMES[entry["dtype"]], tuple(entry["shape"]), start + begin, start + end)


def _checksum(header: bytes, rest: BinaryIO) -> str:
    checksum = hashlib.sha256(header)
    while block := rest.read(_BLOCK_BYTES):
        checksum.update(block)
    return checksum.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Let the disk know the names of a folder's files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
