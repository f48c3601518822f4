"""The record of a training run, format ``dapple-run/1``: a line of JSON for its start, for each step, and for its end.

A line is written when its step is done, so a run that is killed leaves what it has. A run that is resumed goes on in
the same file. ``dapple report`` reads it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from dapple_tf.errors import PlanError, RunError
from dapple_tf.plans import Plan
from dapple_tf.profiler.read_files import naming_file, parse_json, read_text
from dapple_tf.profiler.records import Count, Figure, Name, read_record, write_record
from dapple_tf.profiler.units import format_seconds
from dapple_tf.wording import format_count

FORMAT = "dapple-run/1"
NAME = "run.jsonl"
"""The file in the folder of a run's checkpoints."""

_LARGEST_FILE = 64 * 2**20  # bytes: about 800,000 steps
_LAST_TIME = 253_402_300_799  # seconds since 1970
_ADVICE = "train with --checkpoint-dir DIR or --record FILE"


@dataclass(frozen=True)
class StageBytes:
    """Predicted bytes of a device of a stage: ``fixed`` between steps, and at most ``in_step`` more during one."""

    fixed: Figure
    in_step: Figure


@dataclass(frozen=True)
class RunRestart:
    """A new start of a run by ``dapple launch``. Less is known where the job before has left no record.

    ``number``: of the start, from 1. ``cause``: why the job before ended. ``lost``: its ranks that were lost with their
    hosts, as stages with their layers, in words. ``seconds``: since it ended, until the state is restored. ``ranks``,
    ``plan``: now, and ``ranks_before``, ``plan_before``; plans in one line. ``origin``: where the state comes from.
    ``done``: the step that the run goes on from. ``repeated``: the steps that the job before had done after that.
    ``predicted_seconds``: of a step; ``step_seconds_before``: the median step before.
    """

    number: Count
    cause: Name
    seconds: Figure
    ranks: Count
    plan: Name
    done: Count
    origin: str = ""
    lost: str = ""
    predicted_seconds: Figure | None = None
    ranks_before: Count | None = None
    plan_before: Name | None = None
    repeated: Count | None = None
    step_seconds_before: Figure | None = None

    def __str__(self) -> str:
        before = "" if self.ranks_before is None else f" ({self.ranks_before} before)"
        origin = f" from {self.origin}" if self.origin else ""
        lines = [
            f"start {self.number + 1} of the job, since the one before ended ({self.cause}): "
            f"{format_count(self.ranks, 'rank')}{before}, back after {self.seconds:.0f} s, goes on from step "
            f"{self.done}{origin}"
        ]
        if self.repeated is not None:
            lines[0] += f", repeats {format_count(self.repeated, 'step')}"
        if self.lost:
            lines.append(f"  lost: {self.lost}")
        if self.plan_before is not None:
            lines.append(f"  plan before: {self.plan_before}; now: {self.plan}")
        known = {"a step before": self.step_seconds_before, "predicted now": self.predicted_seconds}
        times = [f"{what} {format_seconds(seconds)}" for what, seconds in known.items() if seconds is not None]
        if times:
            lines.append(f"  {', '.join(times)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class RunStart:
    """The settings with which a run starts, or resumes after step ``done``.

    ``steps``: the number of the last step. ``time``: seconds since 1970. ``processes``: of the job. ``options``: those
    of the command line that were given. ``memory``: of each stage. ``restart``: where a launcher has started it again.
    """

    model: Name
    steps: Count
    done: Count
    time: Figure
    processes: Count
    versions: Mapping[str, Name]
    options: Mapping[str, Name]
    plan: Any
    layer_names: tuple[Name, ...]
    memory: tuple[StageBytes, ...]
    restart: RunRestart | None = None


@dataclass(frozen=True)
class RunStep:
    """A step: its number from 1, loss, seconds and samples; ``bubble``: of a recorded step.

    A loss that is not finite is None.
    """

    number: Count
    seconds: Figure
    samples: Count
    loss: float | None = None
    bubble: float | None = None


@dataclass(frozen=True)
class RunEnd:
    """Figures from the recorded steps of a run, written at its end.

    ``simulated_bubble``: of the last recorded step. ``measured``: the bytes that a device of each stage held during a
    step, beyond those between steps; None where they were not measured one by one. ``together``: predicted and measured
    bytes of all stages, where these share one allocator.
    """

    simulated_bubble: float | None = None
    measured: tuple[Figure | None, ...] = ()
    together: tuple[Figure, Figure] | None = None


@dataclass(frozen=True)
class _Line:
    """A line of the file: one of the three."""

    start: RunStart | None = None
    step: RunStep | None = None
    end: RunEnd | None = None


@dataclass(frozen=True)
class Run:
    """A run as it was recorded: its last start, all steps in order, and its end, if it came to that.

    ``resumed``: the steps after which it was resumed. ``first_steps``: the first step of each part, which also builds.
    ``restarts``: the new starts by a launcher.
    """

    start: RunStart
    plan: Plan
    steps: tuple[RunStep, ...]
    end: RunEnd = field(default_factory=RunEnd)
    resumed: tuple[int, ...] = ()
    first_steps: tuple[int, ...] = ()
    restarts: tuple[RunRestart, ...] = ()


def describe_restarts(restarts: Sequence[RunRestart]) -> str:
    """Return a line about all restarts of a run; "" for none."""
    if not restarts:
        return ""
    repeated = sum(restart.repeated or 0 for restart in restarts)
    away = sum(restart.seconds for restart in restarts)
    ranks = ", ".join(str(restart.ranks) for restart in restarts)
    times = "once" if len(restarts) == 1 else format_count(len(restarts), "time")
    again = f"started again {times}: with {ranks} ranks; repeated {format_count(repeated, 'step')}"
    return f"{again}, {away:.0f} s without training"


def find_run(path: str | os.PathLike[str]) -> Path:
    """Return the file of a run, which is at ``path`` or in the folder there; RunError where there is none."""
    file = Path(path)
    if file.is_dir():
        file /= NAME
    if not file.exists():
        raise RunError(f"{file}: there is no such record of a run: {_ADVICE}")
    return file


def read_run(path: str | os.PathLike[str]) -> Run:
    """Return the run recorded in the file, or in the folder, at ``path``.

    Steps that a resumed run repeated are those of the repetition. A last line without an end, of a run that was killed
    while writing, is left out. Raises RunError naming the file, the line and the field that is wrong.
    """
    file = find_run(path)
    start, end, steps = None, RunEnd(), dict[int, RunStep]()
    resumed, first_steps, restarts = [], set[int](), []
    with naming_file(file, RunError):
        *lines, _ = read_text(file, RunError, "JSON", _LARGEST_FILE).split("\n")
        for number, text in enumerate(lines, 1):
            with naming_file(f"line {number}", RunError):
                line = _read_line(text, first=number == 1)
            if line.start is not None:
                start, end, plan_line = line.start, RunEnd(), number
                steps = {key: step for key, step in steps.items() if key <= start.done}
                resumed += [start.done] * bool(start.done)
                first_steps.add(start.done + 1)
                restarts += [start.restart] if start.restart is not None else []
            elif line.step is not None:
                steps[line.step.number] = line.step
            elif line.end is not None:
                end = line.end
        if start is None:
            raise RunError(f"it holds no run: {_ADVICE}")
        try:
            plan = Plan.from_json(start.plan)
        except PlanError as error:
            raise RunError(f"line {plan_line}: start.plan: {error}") from error
    return Run(
        start,
        plan,
        tuple(steps[key] for key in sorted(steps)),
        end,
        tuple(resumed),
        tuple(sorted(first_steps)),
        tuple(restarts),
    )


def _read_line(text: str, *, first: bool) -> _Line:
    data = parse_json(text, RunError)
    begins = first or (isinstance(data, dict) and "start" in data)
    line = read_record(data, _Line, RunError, file_format=FORMAT if begins else None)
    if begins and line.start is None:
        raise RunError("start is missing")
    if line.start is not None and line.start.time > _LAST_TIME:
        raise RunError(f"start.time is {line.start.time:g}, beyond the year 9999")
    if (line.start, line.step, line.end).count(None) != 2:
        raise RunError("it has not one of start, step and end")
    return line


class RunFile:
    """Writes the record of a run, or of a part of it that begins with ``start``, to ``path``.

    A run from step 1 replaces the file; one that is resumed, or started again by a launcher, goes on in it. Raises
    RunError where a resumed run finds another file, or it cannot be written. A line that cannot be written later ends
    the record, and so does a file that is too large to be read when a run goes on; ``tell`` says so.
    """

    def __init__(self, path: str | os.PathLike[str], start: RunStart, tell: Callable[[str], None]) -> None:
        self._path = Path(path)
        self._tell = tell
        self._stream: FileIO | None = None
        try:
            goes_on = (bool(start.done) or start.restart is not None) and self._path.exists()
            if goes_on and self._path.stat().st_size > _LARGEST_FILE:
                tell(
                    f"warning: {self._path} has more than {_LARGEST_FILE // 2**20} MiB: the record of the run ends here"
                )
                return
            goes_on = goes_on and not _has_no_line(self._path)
            if goes_on:
                _check_and_mend(self._path)
            self._stream = FileIO(self._path, "a" if goes_on else "w")
        except OSError as error:
            raise RunError(f"{self._path} cannot be written: {error.strerror}") from error
        self._write({"format": FORMAT, "start": write_record(start)})

    def __enter__(self) -> RunFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def add_step(self, step: RunStep) -> None:
        """Write a step that is done."""
        self._write({"step": write_record(step)})

    def end(self, end: RunEnd) -> None:
        """Write the end."""
        self._write({"end": write_record(end)})

    def _write(self, data: Mapping[str, Any]) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(f"{json.dumps(data)}\n".encode())
        except OSError as error:
            self._stream.close()
            self._stream = None
            self._tell(f"warning: {self._path} cannot be written ({error.strerror}): the record of the run ends here")


def finite_or_none(number: float) -> float | None:
    """Return the number, or None where it is NaN or infinite, which JSON has not."""
    return number if math.isfinite(number) else None


def _has_no_line(path: Path) -> bool:
    """Return whether the file is a record whose first line was not written to its end, as on a full disk."""
    begin = json.dumps({"format": FORMAT}).removesuffix("}").encode()
    with path.open("rb") as stream:
        line = stream.readline(_LARGEST_FILE)
    return not line.endswith(b"\n") and line[: len(begin)] == begin[: len(line)]


def _check_and_mend(path: Path) -> None:
    """Raise RunError unless the file is the record of a run; remove a last line that was not written to its end."""
    read_run(path)
    with path.open("rb+") as stream:
        data = stream.read()
        stream.truncate(data.rfind(b"\n") + 1)


def bytes_of_stages(memory: Sequence[Mapping[str, Any]]) -> tuple[StageBytes, ...]:
    """Return the predicted bytes of each stage from the JSON values of ``memory.report.Report``."""
    return tuple(StageBytes(stage["peak"] - stage["in_step"], stage["in_step"]) for stage in memory)
