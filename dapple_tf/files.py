"""Files that are never half written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place to write the file in; it becomes ``path`` when all went well, else ``path`` stays as it was."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a crash leaves the old file or the new one, never a part."""
    with replacing(path) as part:
        part.write_text(text)
