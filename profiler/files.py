"""Replace files as a whole: a crash leaves the old file or the new one, and perhaps a file NAME.PID.part beside it."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LONGEST_NAME = 200  # bytes of NAME in NAME.PID.part, since file systems take names of at most 255 bytes
_NOT_A_FILE = "it is a device or a pipe, not a file"


@contextlib.contextmanager
def atomic_replacement(path: Path, *, follow_links: bool = True) -> Iterator[Path]:
    """Yield a path to write to; it replaces ``path`` when the block succeeds, and is removed when the block fails.

    It is a new, empty file; a file or a link that already has its name is deleted first. Where ``path`` is a symbolic
    link, the file that it points to is replaced, or without ``follow_links`` the link. Raises OSError for a folder, and
    with ``follow_links`` for a device or a pipe, which stay as they are.
    """
    target = _resolve(path) if follow_links else path
    part = _create_part(target)
    try:
        yield part
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write a text file (UTF-8) so that a crash leaves either the old file or the new one. Raises OSError."""
    with atomic_replacement(path) as part:
        part.write_text(text, encoding="utf-8")


def find_write_problem(path: str | os.PathLike[str]) -> str:
    """Return why a file cannot be written at ``path``; "" if it can.

    Called before any work whose result would be lost. An existing file stays as it is. A missing folder is not made:
    its name is probably mistyped.
    """
    if not os.fspath(path):
        return "the path of the file to write is empty"  # such as a shell variable that is not set
    path = Path(path)
    try:
        if path.is_dir():
            return f"{path} is a folder"
        target = _resolve(path)
        if target.exists() and not os.access(target, os.W_OK):
            return f"{path} cannot be written"
    except (OSError, ValueError) as error:  # a name that is too long, a device, or a folder that may not be searched
        return f"{path} cannot be written: {describe_reason(error)}"
    if problem := _find_parent_problem(path):
        return problem
    try:
        _create_part(target).unlink()  # fails where permissions suffice, but the file system is read-only or full
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return ""


def find_folder_problem(path: str | os.PathLike[str]) -> str:
    """Make the folder ``path``, and return why files cannot be written into it; "" if they can."""
    try:
        if Path(path).is_file():
            return "it is a file, not a folder"
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # the only reliable check of whether it can be written
            pass
    except (OSError, ValueError) as error:
        return describe_reason(error)
    return ""


def describe_reason(error: OSError | ValueError) -> str:
    """Return why a path cannot be used: the system's words without the path, or the text of a ValueError."""
    return str(error.strerror if isinstance(error, OSError) else error)


def _find_parent_problem(path: Path) -> str:
    folder = path.parent
    if not folder.exists():
        return f"{path}: its folder is missing: make {folder}, or correct the path"
    if not folder.is_dir():
        return f"{path}: {folder} is a file, not a folder"
    return "" if os.access(folder, os.W_OK) else f"the folder of {path} cannot be written"


def _resolve(path: Path) -> Path:
    """Return ``path`` without symbolic links; OSError where something that is not a file is there."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():  # a link in a loop of links, which has no end
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if target.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, _NOT_A_FILE, str(path))
    return target


def _create_part(target: Path) -> Path:
    """Create the new, empty file that is to replace ``target``, and return its path."""
    name = os.fsencode(target.name)[:_LONGEST_NAME].decode(errors="ignore")
    part = target.with_name(f"{name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    return part
