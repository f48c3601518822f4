"""Checked fields of parsed JSON or YAML: what is missing or wrong is named by its path, ``layers[3].name``."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Fields:
    """The fields of one object. ``where`` is its path in the file, ``error`` what is raised; all methods raise it."""

    data: Mapping[str, Any]
    error: type[ValueError]
    where: str = ""

    @staticmethod
    def of(
        value: Any, error: type[ValueError], *, known: Sequence[str], where: str = "", file_format: str | None = None
    ) -> Fields:
        """The fields of ``value``, all of them ``known``; ``file_format`` is what its field ``format`` must say."""
        if file_format is not None:
            found = value.get("format") if isinstance(value, dict) else type(value).__name__
            if not isinstance(value, dict) or found != file_format:
                raise error(f"format is {found!r}, not {file_format!r}")
            known = ("format", *known)
        if not isinstance(value, dict):
            raise error(f"{where} is {value!r}, not an object")
        prefix = f"{where}." if where else ""
        for key in value:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
                raise error(f"{prefix}{key} is no field of this file; {hint}")
        return Fields(value, error, prefix)

    def has(self, key: str) -> bool:
        """Whether an optional field is there; null is not."""
        return self.data.get(key) is not None

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            raise self.error(f"{self.where}{key} is {value!r}, not a text")
        return value

    def integer(self, key: str) -> int:
        """A whole number from 0."""
        return self._integer(self._get(key), key)

    def number(self, key: str) -> float:
        """A finite number from 0."""
        return self._number(self._get(key), key)

    def scalar(self, key: str) -> str | float:
        """A text, or a finite number from 0: a quantity with or without its unit."""
        value = self._get(key)
        return value if isinstance(value, str) else self._number(value, key)

    def flag(self, key: str) -> bool:
        value = self._get(key)
        if not isinstance(value, bool):
            raise self.error(f"{self.where}{key} is {value!r}, not true or false")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object whose fields are anyone's."""
        value = self._get(key)
        if not isinstance(value, dict):
            raise self.error(f"{self.where}{key} is {value!r}, not an object")
        return value

    def inner(self, key: str, known: Sequence[str]) -> Fields:
        """An object."""
        return Fields.of(self._get(key), self.error, known=known, where=self.where + key)

    def each(self, key: str, known: Sequence[str]) -> tuple[Fields, ...]:
        """A list of objects."""
        return tuple(
            Fields.of(item, self.error, known=known, where=f"{self.where}{key}[{index}]")
            for index, item in enumerate(self.items(key))
        )

    def items(self, key: str) -> list[Any]:
        """A list of anything."""
        value = self._get(key)
        if not isinstance(value, list):
            raise self.error(f"{self.where}{key} is {value!r}, not a list")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        for index, item in enumerate(self.items(key)):
            if not isinstance(item, str):
                raise self.error(f"{self.where}{key}[{index}] is {item!r}, not a text")
        return tuple(self.items(key))

    def integers(self, key: str) -> tuple[int, ...]:
        return tuple(self._integer(item, f"{key}[{index}]") for index, item in enumerate(self.items(key)))

    def numbers(self, key: str) -> tuple[float, ...]:
        return tuple(self._number(item, f"{key}[{index}]") for index, item in enumerate(self.items(key)))

    def pairs(self, key: str) -> tuple[tuple[int, int], ...]:
        """A list of pairs of whole numbers."""
        pairs = []
        for index, item in enumerate(self.items(key)):
            if not isinstance(item, list) or len(item) != 2:
                raise self.error(f"{self.where}{key}[{index}] is {item!r}, not a pair of whole numbers")
            first, second = (self._integer(part, f"{key}[{index}]") for part in item)
            pairs.append((first, second))
        return tuple(pairs)

    def _get(self, key: str) -> Any:
        if key not in self.data:
            raise self.error(f"{self.where}{key} is missing")
        return self.data[key]

    def _integer(self, value: Any, key: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(f"{self.where}{key} is {value!r}, not a whole number")
        return value

    def _number(self, value: Any, key: str) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # a whole number beyond all floats
                if math.isfinite(value) and value >= 0:
                    return float(value)
        raise self.error(f"{self.where}{key} is {value!r}, not a finite number from 0")


@contextlib.contextmanager
def naming_file(path: str | os.PathLike[str], error: type[ValueError]) -> Iterator[None]:
    """Errors raised inside say which file they are about."""
    try:
        yield
    except error as found:
        raise error(f"{os.fspath(path)}: {found}") from found


def read_text(path: str | os.PathLike[str], error: type[ValueError], kind: str = "text") -> str:
    """A file of ``kind``, in UTF-8. Raises ``error`` for one that is not there or not text."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as found:
        raise error(f"not a readable {kind} file: {found.strerror}") from found
    except ValueError as found:
        raise error(f"not a readable {kind} file: {found}") from found


def read_json(path: str | os.PathLike[str], error: type[ValueError]) -> Any:
    """What a JSON file holds. Raises ``error`` for one that is none; NaN, Infinity and repeated fields are none."""
    text = read_text(path, error, "JSON")
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeats)
    except (ValueError, RecursionError) as found:
        raise error(f"not a readable JSON file: {found}") from found


def read_yaml(path: str | os.PathLike[str], error: type[ValueError]) -> Any:
    """What a YAML (or JSON) file holds, plain data only: nothing in it is run. Raises ``error`` for other files."""
    text = read_text(path, error, "YAML")
    try:
        return yaml.load(text, _PlainLoader)
    except (ValueError, RecursionError, yaml.YAMLError) as found:
        raise error(f"not a readable YAML file: {found}") from found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a figure")


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the field {key!r} is given twice in one object")
    return data


class _PlainLoader(yaml.SafeLoader):
    """yaml.SafeLoader, but a field given twice is an error, as in JSON."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ValueError(
                    f"line {key.start_mark.line + 1}: the field {key.value!r} is given twice in one object"
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
