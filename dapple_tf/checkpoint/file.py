"""Read and write one checkpoint as one file, which exists completely or not at all.

The file is in the safetensors format, which other tools read too: the length of the header (8 bytes, little-endian),
the header in JSON (dtype, shape and offsets of each tensor, and metadata), then the tensors' bytes. The metadata
includes a SHA-256 checksum of the whole file, computed with zeros in place of its own digits.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from dapple_tf.errors import CheckpointError
from dapple_tf.profiler.files import atomic_replacement
from dapple_tf.profiler.quote import quote
from dapple_tf.profiler.read_files import check_depth

FORMAT = "dapple-checkpoint/1"
_METADATA = "__metadata__"
_CHECKSUM = "sha256"
_NO_CHECKSUM = "0" * 64
_BLOCK_BYTES = 2**24
_LONGEST_HEADER = 100 * 10**6  # bytes, as the format states
_MOST_DIMENSIONS = 254  # TensorFlow's

# The format's names of TensorFlow's dtypes. It has none for complex128: C128 follows its scheme.
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
    """A file whose content is not what was written."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its bytes are those from ``begin`` to ``end``; ``dtype``: TensorFlow's name."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class CheckpointFile:
    """A complete, readable checkpoint; ``entries``: its tensors by the names of their variables."""

    path: Path
    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]

    def read(self) -> Iterator[tuple[str, Any]]:
        """Yield name and value (a NumPy array) of one tensor after the other."""
        for name in self.entries:
            yield name, self.read_value(name)

    def read_value(self, name: str) -> Any:
        """Return the value of one tensor as a NumPy array."""
        entry = self.entries[name]
        with _open_regular(self.path) as stream:
            stream.seek(entry.begin)
            data = np.fromfile(stream, np.uint8, entry.end - entry.begin)
        return data.view(tf.as_dtype(entry.dtype).as_numpy_dtype).reshape(entry.shape)


def can_store(variable: tf.Variable) -> bool:
    """Return whether the format has the variable's dtype, and its shape is fixed."""
    return variable.dtype.name in _DTYPES and variable.shape.is_fully_defined()


def write_checkpoint(
    path: Path,
    variables: Mapping[str, tf.Variable],
    values: Iterable[Any],
    metadata: Mapping[str, str],
    check: Callable[[], None] | None = None,
) -> None:
    """Write the ``values`` (NumPy) of ``variables``, one at a time; a crash leaves the complete file or none.

    ``check`` is called before the file gets its name, and may raise an error to prevent that. Raises OSError if the
    file cannot be written; no part of it is left then.
    """
    header = _make_header(variables, {**metadata, "format": FORMAT, _CHECKSUM: _NO_CHECKSUM})
    # Reason: in a folder that others may write, a link must not choose which file is overwritten.
    with atomic_replacement(path, follow_links=False) as part, part.open("r+b") as stream:
        checksum = hashlib.sha256(header)
        stream.write(header)
        for _, value in zip(variables, values, strict=True):
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
            checksum.update(data)
            stream.write(data)
            del value, data  # before the next value is made
        stream.seek(header.index(_NO_CHECKSUM.encode()))
        stream.write(checksum.hexdigest().encode())
        stream.flush()
        os.fsync(stream.fileno())  # before the file is renamed: the disk might store the new name before the content
        if check is not None:
            check()
    _sync_folder(path.parent)


def open_checkpoint(path: Path) -> CheckpointFile:
    """Read the header of a checkpoint, and check the whole file against its checksum.

    Raises DamagedError for a file that is truncated, changed or not a checkpoint, CheckpointError for one of another
    format version, OSError for one that cannot be read.
    """
    with _open_regular(path) as stream:
        length = int.from_bytes(stream.read(8), "little")
        size = os.fstat(stream.fileno()).st_size
        if not 0 < length <= min(size - 8, _LONGEST_HEADER):
            raise DamagedError(f"{path} is damaged: it is {size} bytes long, with a header of {length}")
        header = stream.read(length)
        try:
            content = json.loads(header.decode())
            check_depth(content)
            metadata = {str(key): str(value) for key, value in content.pop(_METADATA).items()}
            checksum, file_format = metadata[_CHECKSUM].encode(), metadata["format"]
            entries = {name: _read_entry(entry, 8 + length) for name, entry in content.items()}
            end = _check_places(entries.values(), 8 + length)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(
                f"{path} is damaged, or not a checkpoint: its header cannot be read ({quote(str(error))})"
            ) from error
        if size != end:
            raise DamagedError(f"{path} is damaged: it is {size} bytes long, and should be {end}")
        zeroed = header.replace(checksum, _NO_CHECKSUM.encode(), 1)
        if _checksum(length.to_bytes(8, "little") + zeroed, stream).encode() != checksum:
            raise DamagedError(f"{path} is damaged: its content does not match its checksum")
        if file_format != FORMAT:
            raise CheckpointError(
                f"{path} has the format {quote(file_format)}, but this version of dapple reads {FORMAT!r}"
            )
    return CheckpointFile(path, metadata, entries)


def _open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; raise DamagedError for a pipe, a device, or a link to nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for a writer
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError(f"{path} leads nowhere ({error.strerror})") from error
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # links in a circle; a socket
            raise
        raise DamagedError(f"{path} is not a regular file ({error.strerror})") from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise DamagedError(f"{path} is not a regular file")


def _make_header(variables: Mapping[str, tf.Variable], metadata: Mapping[str, str]) -> bytes:
    content: dict[str, Any] = {_METADATA: dict(metadata)}
    offset = 0
    for name, variable in variables.items():
        size = variable.shape.num_elements() * variable.dtype.size
        content[name] = {
            "dtype": _DTYPES[variable.dtype.name],
            "shape": variable.shape.as_list(),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _read_entry(entry: Mapping[str, Any], start: int) -> Entry:
    """Return the entry of a tensor; raise ValueError unless its numbers are whole and fit its dtype and shape."""
    (begin, end), shape = map(_whole_numbers, (entry["data_offsets"], entry["shape"]))
    dtype = _NAMES[entry["dtype"]]
    if end - begin != math.prod(shape) * tf.as_dtype(dtype).size:
        raise ValueError(f"a tensor of {end - begin} bytes, but of shape {quote(list(shape))} and {dtype}")
    return Entry(dtype, shape, start + begin, start + end)


def _whole_numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > _MOST_DIMENSIONS:
        raise ValueError(f"{quote(values)} is not a list of offsets or dimensions")
    for value in values:
        if type(value) is not int or not 0 <= value < 2**63:
            raise ValueError(f"{quote(value)} is not an offset or a dimension")
    return tuple(values)


def _check_places(entries: Iterable[Entry], start: int) -> int:
    """Return where the last tensor ends; raise ValueError unless each begins where the one before ends."""
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != start:
            raise ValueError(f"no tensor begins at byte {start}")
        start = entry.end
    return start


def _checksum(header: bytes, rest: BinaryIO) -> str:
    checksum = hashlib.sha256(header)
    while block := rest.read(_BLOCK_BYTES):
        checksum.update(block)
    return checksum.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Write the names of a folder's files to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
