"""Checkpoints that know nothing of stages or ranks: saved from any plan, loaded into any other.

They hold the variables of the model and the optimizer by name (see ``variable_names``), random seeds among them, how
many steps were done, and how many batches were taken from the data set. A learning rate is one of the optimizer's
variables, so it comes back as it was saved.
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from dapple_tf.checkpoint.file import CheckpointFile, DamagedError, can_hold, open_checkpoint, write_checkpoint
from dapple_tf.checkpoint.lock import FolderLock, lock_folder
from dapple_tf.distributed import membership
from dapple_tf.distributed.variable_transfer import load_values, stream_values
from dapple_tf.errors import CheckpointError, DappleWarning
from dapple_tf.runtime.step import PipelinedStep

_NAME = re.compile(r"checkpoint-\d+\.safetensors")
_PART = re.compile(_NAME.pattern + r"\.\d+\.part")
_KEPT = 2


@dataclass(frozen=True)
class Position:
    """How far a run has come: ``steps`` done, ``batches`` taken from the beginning of its data set."""

    steps: int
    batches: int


class Checkpoints:
    """Saves and restores a training run in a folder, as ``checkpoint-<steps>.safetensors``; the last two are kept.

    In a job rank 0 reads and writes, so only it needs the folder; every rank must make the same calls.
    A run killed at any moment leaves the last good checkpoint: files get their names when they are whole, and older
    ones are removed after that. The folder is this process's as long as there is such an object.

    Raises CheckpointError, on every rank, for a folder that cannot be written, one that another run is using (the
    error names host and process), one that holds other checkpoints, or a variable of a dtype that no checkpoint holds;
    UsageError for a step that has not been built (give it an ``example_batch``).
    """

    def __init__(self, folder: str | os.PathLike[str], step: PipelinedStep) -> None:
        self._folder = Path(folder)
        self._step = step
        self._job = membership.current()
        self._lock: FolderLock | None = None
        strange = [name for name, variable in step.variables.items() if not can_hold(variable)]
        if strange:
            found = step.variables[strange[0]]
            raise CheckpointError(
                f"variable {strange[0]!r} ({found.dtype.name}, shape {found.shape}) cannot be saved: a checkpoint "
                "holds numbers and booleans of fixed shapes; keep it out of the loss"
            )
        self._announce("open a checkpoint folder")
        self._on_rank_0(self._prepare)

    def restore(self) -> Position:
        """Load the last good checkpoint, if there is one; the position it was saved at, (0, 0) without any.

        A damaged file is set aside with a DappleWarning, and the one before it loaded. Raises CheckpointError where
        all are damaged, or the last good one is of another model; nothing has changed then.
        """
        self._announce("restore a checkpoint")
        good: tuple[CheckpointFile, Position] | None = self._on_rank_0(self._find)
        if good is None:
            return Position(0, 0)
        found, position = good
        variables = self._step.variables
        if self._job is not None:
            load_values(self._job, variables, partial(_read_value, found))
        else:
            for name, variable in variables.items():
                variable.assign(_read_value(found, name))
        return position

    def save(self, steps: int, batches: int | None = None) -> str:
        """Save after ``steps`` steps and ``batches`` batches (as many, unless given); the path of the checkpoint.

        In a job rank 0 gets the variables of other stages one after the other, and keeps none. Raises CheckpointError,
        on every rank, where the file cannot be written, or the folder has one of a later step; those before are left.
        """
        self._announce(f"save a checkpoint after step {steps}")
        if self._job is not None:
            self._job.check_call_history()  # what was trained on batches that differ is not kept
        position = Position(steps, steps if batches is None else batches)
        values = stream_values(self._job, list(self._step.variables.values()))
        if self._job is not None and self._job.rank != 0:
            _exhaust(values)
        return str(self._on_rank_0(lambda: self._write(position, values)))

    def _announce(self, what: str) -> None:
        if self._job is not None:
            self._job.announce_call(what)

    # --- on rank 0

    def _on_rank_0(self, act: Callable[[], Any]) -> Any:
        return act() if self._job is None else self._job.run_on_rank_0(act)

    def _prepare(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):  # the only sure way to know that one can write
                pass
            names = os.listdir(self._folder)
            self._refuse_others(names)
            self._lock = lock_folder(self._folder)
            for name in filter(_PART.fullmatch, names):  # left by a run that was killed
                (self._folder / name).unlink()
        except OSError as error:
            raise CheckpointError(f"{self._folder} cannot hold checkpoints: {error.strerror}") from error

    def _refuse_others(self, names: list[str]) -> None:
        others = sorted(name for name in names if re.fullmatch(r"ckpt-\d+\.index", name))
        if others and not any(map(_NAME.fullmatch, names)):
            raise CheckpointError(
                f"{self._folder} holds checkpoints of tf.train.Checkpoint ({others[-1]}), which name no variables: "
                "give another folder"
            )

    def _find(self) -> tuple[CheckpointFile, Position] | None:
        """The last good checkpoint, if there is one; later ones, which are damaged, are set aside."""
        paths = self._files()
        damaged: list[DamagedError] = []
        for path in reversed(paths):
            try:
                found = open_checkpoint(path)
                position = Position(int(found.texts["steps"]), int(found.texts["batches"]))
            except DamagedError as error:
                damaged.append(error)
                continue
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
            _check_fit(found, self._step.variables)
            for damage in damaged:
                warnings.warn(f"{damage}. It is set aside; going on from {path}", DappleWarning, stacklevel=4)
            for later in paths[paths.index(path) + 1 :]:
                os.replace(later, later.with_name(f"{later.name}.damaged"))
            return found, position
        if damaged:
            raise CheckpointError(
                f"{'; '.join(map(str, damaged))}. No good checkpoint is left: give another folder to start anew"
            )
        return None

    def _write(self, position: Position, values: Iterator[Any]) -> Path:
        path = self._folder / f"checkpoint-{position.steps}.safetensors"
        texts = {"steps": str(position.steps), "batches": str(position.batches)}
        try:
            known = sorted({*self._files(), path}, key=_steps_of)
            if known[-1] != path:
                raise CheckpointError(
                    f"{self._folder} has {known[-1].name} already, of a later step than {position.steps}: restore it "
                    "first, or give another folder"
                )
            write_checkpoint(path, self._step.variables, values, texts)
            for old in known[:-_KEPT]:
                old.unlink()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error
        finally:
            _exhaust(values)  # other ranks send all of them
        return path

    def _files(self) -> list[Path]:
        """The checkpoints in the folder, by steps."""
        return sorted(
            (self._folder / name for name in os.listdir(self._folder) if _NAME.fullmatch(name)), key=_steps_of
        )


def _exhaust(values: Iterator[Any]) -> None:
    for _ in values:
        pass


def _read_value(found: CheckpointFile, name: str) -> Any:
    try:
        return found.read_value(name)
    except (OSError, ValueError) as error:  # the file was whole a moment ago
        raise CheckpointError(
            f"{name!r} cannot be read from {found.path} any more ({error}). SOME VARIABLES HAVE CHANGED, others have "
            "not: restore again, or start anew"
        ) from error


def _steps_of(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint-").removesuffix(".safetensors"))


def _check_fit(found: CheckpointFile, variables: Mapping[str, tf.Variable]) -> None:
    """CheckpointError unless the file has exactly these variables, of their dtypes and shapes."""
    missing = [name for name in variables if name not in found.entries]
    unexpected = [name for name in found.entries if name not in variables]
    if missing or unexpected:
        told = []
        if missing:
            told.append(f"it lacks {_list_nearest(missing, unexpected or found.entries)}")
        if unexpected:
            told.append(f"it has {_list_nearest(unexpected, missing or variables)}, which this model lacks")
        raise CheckpointError(
            f"{found.path} is of another model or optimizer: {', and '.join(told)}. Give the model and optimizer that "
            "it was saved from, or another folder"
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
    """The first of ``names``, each with the nearest of ``others``."""
    told = []
    for name in names[:most]:
        near = difflib.get_close_matches(name, list(others), n=1)
        told.append(repr(name) + (f" (nearest: {near[0]!r})" if near else ""))
    return ", ".join(told) + (f" and {len(names) - most} more" if len(names) > most else "")
