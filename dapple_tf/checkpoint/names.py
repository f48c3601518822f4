"""Read from the names of checkpoint files how many steps were done, without starting TensorFlow."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

NAME = re.compile(r"checkpoint-(?:0|[1-9][0-9]*)\.safetensors")


def checkpoint_name(steps: int) -> str:
    """Return the name of the checkpoint after ``steps`` steps."""
    return f"checkpoint-{steps}.safetensors"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints in the folder, sorted by steps. Raises OSError as ``os.listdir`` does."""
    return sorted((folder / name for name in os.listdir(folder) if NAME.fullmatch(name)), key=steps_of)


def steps_of(path: Path) -> int:
    """Return the number of steps that the name of a checkpoint gives."""
    return int(path.name.removeprefix("checkpoint-").removesuffix(".safetensors"))


def last_steps(folder: str) -> int:
    """Return the steps in the last checkpoint's name; 0 if there is no checkpoint, or the file is truncated."""
    try:
        found = list_checkpoints(Path(folder))
        return steps_of(found[-1]) if found and _is_whole(found[-1]) else 0
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return 0


def _is_whole(path: Path) -> bool:
    """Return whether a file of safetensors is as long as its head says: its length, the head, then the values."""
    if not path.is_file():  # a pipe would wait for a writer
        return False
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size:  # damaged; a read of such a length would take memory for it
            return False
        head = json.loads(file.read(length))
    end = max(described["data_offsets"][1] for name, described in head.items() if name != "__metadata__")
    return bool(size == 8 + length + end)
