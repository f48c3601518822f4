"""Replace files as a whole: a crash leaves the old file or the new one, and perhaps a file NAME.PID.part beside it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_replacement(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it replaces ``path`` when the block succeeds, and is removed when the block fails.

    It is a new, empty file; a file or a link that already has its name is deleted first.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write a text file (UTF-8) so that a crash leaves either the old file or the new one."""
    with atomic_replacement(path) as part:
        part.write_text(text, encoding="utf-8")


def find_write_problem(path: str | os.PathLike[str]) -> str:
    """Make the folder of ``path``, and return why a file cannot be written there; "" if it can.

    Called before any work whose result would be lost.
    """
    if not os.fspath(path):
        return "the path of the file to write is empty"  # such as a shell variable that is not set
    path = Path(path)
    try:
        if path.is_dir():
            return f"{path} is a folder"
        if path.exists() and not os.access(path, os.W_OK):
            return f"{path} cannot be written"
    except OSError as error:  # a name that is too long, or a folder above that may not be searched
        return f"{path} cannot be written: {error.strerror}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{path}: its folder cannot be made: {error.strerror}"
    return "" if os.access(path.parent, os.W_OK) else f"the folder of {path} cannot be written"
