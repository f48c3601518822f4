"""What was decided: which layers and devices make a stage, how many micro-batches, which schedule.

File format ``dapple-plan/1`` (JSON).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dapple_tf.errors import PlanError
from dapple_tf.files import write_atomically

FORMAT = "dapple-plan/1"


@dataclass(frozen=True)
class StagePlan:
    """Layers ``first_layer`` to ``last_layer`` (inclusive) on ``devices``, one replica each."""

    first_layer: int
    last_layer: int
    devices: tuple[int, ...]

    @property
    def replicas(self) -> int:
        """r: the number of devices that share each micro-batch."""
        return len(self.devices)


@dataclass(frozen=True)
class Plan:
    """A plan. Batch sizes are samples; ``predicted`` holds what a simulator said, if one was asked."""

    model: str
    planner: str
    global_batch_size: int
    micro_batch_size: int
    micro_batches: int
    schedule: str
    recompute: bool
    stages: tuple[StagePlan, ...]
    predicted: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("a plan needs at least one stage")
        if self.micro_batches < 1:
            raise PlanError(f"micro_batches is {self.micro_batches}; it must be at least 1")
        expected = 0
        for index, stage in enumerate(self.stages):
            if stage.first_layer != expected or stage.last_layer < stage.first_layer:
                raise PlanError(
                    f"stages[{index}] holds layers {stage.first_layer} to {stage.last_layer}, but must start at "
                    f"{expected}"
                )
            distinct = {device for device in stage.devices if device >= 0}
            if not distinct or len(distinct) != len(stage.devices):
                raise PlanError(
                    f"stages[{index}].devices is {list(stage.devices)}: name at least one device, each once, from 0"
                )
            expected = stage.last_layer + 1

    @property
    def starts(self) -> tuple[int, ...]:
        """The first layer of every stage but the first."""
        return tuple(stage.first_layer for stage in self.stages[1:])

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path`` as JSON, all or nothing."""
        data = {"format": FORMAT, **asdict(self)}
        try:
            write_atomically(Path(path), json.dumps(data, indent=2) + "\n")
        except OSError as error:
            raise PlanError(f"{path}: the plan cannot be written: {error.strerror}") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan; PlanError names the file and the field that is wrong."""
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise PlanError(f"{path}: not a readable JSON file: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise PlanError(f"{path}: format is {found!r}, not {FORMAT!r}")
        try:
            stages = tuple(
                StagePlan(
                    _integer(stage, "first_layer", f"stages[{i}]."),
                    _integer(stage, "last_layer", f"stages[{i}]."),
                    _integers(stage, "devices", f"stages[{i}]."),
                )
                for i, stage in enumerate(_list(data, "stages"))
            )
            return Plan(
                model=_text(data, "model"),
                planner=_text(data, "planner"),
                global_batch_size=_integer(data, "global_batch_size"),
                micro_batch_size=_integer(data, "micro_batch_size"),
                micro_batches=_integer(data, "micro_batches"),
                schedule=_text(data, "schedule"),
                recompute=_flag(data, "recompute"),
                stages=stages,
                predicted=_mapping(data, "predicted"),
            )
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error


def _field(data: Any, key: str, where: str) -> Any:
    if not isinstance(data, dict) or key not in data:
        raise PlanError(f"{where}{key} is missing")
    return data[key]


def _integer(data: Any, key: str, where: str = "") -> int:
    value = _field(data, key, where)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise PlanError(f"{where}{key} is {value!r}, not a whole number")
    return value


def _text(data: Any, key: str) -> str:
    value = _field(data, key, "")
    if not isinstance(value, str):
        raise PlanError(f"{key} is {value!r}, not a text")
    return value


def _flag(data: Any, key: str) -> bool:
    value = data.get(key, False)
    if not isinstance(value, bool):
        raise PlanError(f"{key} is {value!r}, not true or false")
    return value


def _mapping(data: Any, key: str) -> Mapping[str, Any] | None:
    value = data.get(key)
    if value is not None and not isinstance(value, dict):
        raise PlanError(f"{key} is {value!r}, not an object")
    return value


def _list(data: Any, key: str, where: str = "") -> list[Any]:
    value = _field(data, key, where)
    if not isinstance(value, list):
        raise PlanError(f"{where}{key} is {value!r}, not a list")
    return value


def _integers(data: Any, key: str, where: str) -> tuple[int, ...]:
    items = _list(data, key, where)
    return tuple(_integer({key: item}, key, where) for item in items)
