"""Find and load the C++ library of the simulator and the planner.

It is compiled when the package is installed. Where that copy is missing or older than its sources (a checkout that was
never installed), it is compiled at its first use, into the user's cache. This file imports nothing outside Python's
standard library, because setup.py runs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "planner.cc"
HEADERS = tuple(sorted(FOLDER.glob("*.h")))
# Reason for -ffp-contract=off: a fused multiply-add rounds once, so the same plan would take other seconds on another
# processor, and the search would end elsewhere.
COMPILE_OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off")
LINK_OPTIONS = ("-pthread",)
DIGEST_MACRO = "DAPPLE_SOURCE_DIGEST"
_NOTICE = "compiles the planner's C++ search, once (about 10 seconds) ..."


def source_digest() -> str:
    """Return a digest of the library's sources and compiler options, which the compiled library repeats."""
    digest = hashlib.sha256(" ".join(COMPILE_OPTIONS).encode())
    for path in (SOURCE, *HEADERS):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def load_library() -> ctypes.CDLL | None:
    """Return the library; None where it is neither installed nor can be compiled, for want of a compiler."""
    digest = source_digest()
    for path in _places(digest):
        with contextlib.suppress(OSError):
            if path.exists() and (library := _open(path, digest)) is not None:
                return library
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++")
    if compiler is None:
        return None
    logging.getLogger("dapple_tf").info(_NOTICE)  # setup.py runs this file without dapple_tf.messages
    with contextlib.suppress(OSError):
        if (library := _compile(compiler, _user_cache(digest), digest)) is not None:
            return library
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix="dapple_tf-") as folder:
        return _compile(compiler, Path(folder) / SOURCE.stem, digest)  # once loaded, it needs no file
    return None


def address(array: Any) -> ctypes.c_void_p:
    """Return the address of a contiguous NumPy array, which must live until the call has returned."""
    return ctypes.c_void_p(array.ctypes.data)


def _places(digest: str) -> Iterator[Path]:
    """Yield the paths where the compiled library may be."""
    yield from (FOLDER / f"planner{suffix}" for suffix in EXTENSION_SUFFIXES)
    yield _user_cache(digest)


def _user_cache(digest: str) -> Path:
    """Return the path of the compiled library in the user's cache."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return folder / "dapple_tf" / f"planner-{digest}.so"


def _compile(compiler: str, path: Path, digest: str) -> ctypes.CDLL | None:
    """Compile the library into ``path``, which appears when it is complete; return it, or None if that failed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        options = (*COMPILE_OPTIONS, *LINK_OPTIONS, f'-D{DIGEST_MACRO}="{digest}"', "-fPIC", "-shared")
        command = [compiler, *options, str(SOURCE), "-o", str(made)]
        if subprocess.run(command, capture_output=True, text=True, check=False).returncode:
            return None
        made.replace(path)
    return _open(path, digest)


def _open(path: Path, digest: str) -> ctypes.CDLL | None:
    """Return the library at ``path``; None if it cannot be loaded or is of other sources."""
    try:
        library = ctypes.CDLL(str(path))
        found = library.dapple_source_digest
    except (OSError, AttributeError):
        return None
    found.restype = ctypes.c_char_p
    return library if found() == digest.encode() else None
