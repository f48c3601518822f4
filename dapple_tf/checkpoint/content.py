"""The content of a checkpoint: the position of the run, and the variables, which must be those of the model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from dapple_tf.checkpoint.file import CheckpointFile, DamagedError
from dapple_tf.errors import CheckpointError
from dapple_tf.profiler.quote import quote

_COUNT = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class Position:
    """The position of a training run: ``steps`` done, and ``batches`` taken from the start of its data set.

    ``origin``: where it was restored from, in words; "" for a run that begins.
    """

    steps: int
    batches: int
    origin: str = field(default="", compare=False)

    def to_metadata(self) -> dict[str, str]:
        """Return what ``read_position`` reads."""
        return {"steps": str(self.steps), "batches": str(self.batches)}


def read_position(found: CheckpointFile) -> Position:
    """Return the position that a checkpoint was saved at; DamagedError where it is none."""
    counts = {key: found.metadata.get(key, "nothing") for key in ("steps", "batches")}
    for key, text in counts.items():
        if not _COUNT.fullmatch(text):
            raise DamagedError(f"{found.path} is damaged: its {key} is {quote(text)}, not a count")
    return Position(int(counts["steps"]), int(counts["batches"]), str(found.path.parent))


def read_value(found: CheckpointFile, name: str) -> Any:
    """Return the value of a variable; CheckpointError where it cannot be read any more."""
    try:
        return found.read_value(name)
    except (OSError, ValueError) as error:  # the file was complete when it was opened
        raise CheckpointError(
            f"{name!r} cannot be read from {found.path} any more ({error}). SOME VARIABLES HAVE CHANGED, others have "
            "not: restore again, or start from the beginning",
            lasts=False,
        ) from error


def check_variables(found: CheckpointFile, variables: Mapping[str, tf.Variable]) -> None:
    """Raise CheckpointError unless the file has exactly these variables, with their dtypes and shapes."""
    missing = [name for name in variables if name not in found.entries]
    unexpected = [name for name in found.entries if name not in variables]
    if missing or unexpected:
        differences = []
        if missing:
            differences.append(f"it lacks {_list_nearest(missing, unexpected or found.entries)}")
        if unexpected:
            differences.append(f"it has {_list_nearest(unexpected, missing or variables)}, which this model lacks")
        raise CheckpointError(
            f"{found.path} is of another model or optimizer: {', and '.join(differences)}. Give the model and "
            "optimizer that it was saved from, or another folder"
        )
    for name, variable in variables.items():
        entry = found.entries[name]
        here, there = (variable.dtype.name, tuple(variable.shape)), (entry.dtype, entry.shape)
        if here != there:
            raise CheckpointError(
                f"{found.path} has {name!r} as {there[0]} {list(there[1])}, but here it is {here[0]} {list(here[1])}: "
                "give the model the options that it was saved with, or another folder"
            )


def _list_nearest(names: list[str], others: Any, most: int = 3) -> str:
    """Return the first ``most`` of ``names``, each with the most similar of ``others``, as a text."""
    texts = []
    for name in names[:most]:
        near = difflib.get_close_matches(name, list(others), n=1)
        texts.append(repr(name) + (f" (nearest: {near[0]!r})" if near else ""))
    return ", ".join(texts) + (f" and {len(names) - most} more" if len(names) > most else "")
