"""Read and check the fields of parsed JSON or YAML; errors name a field by its path, such as ``layers[3].name``."""

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
    """The fields of one object of a file.

    ``where``: the object's path in the file. ``error``: the type that all methods raise for a missing or wrong field.
    """

    data: Mapping[str, Any]
    error: type[ValueError]
    where: str = ""

    @staticmethod
    def of(
        value: Any, error: type[ValueError], *, known: Sequence[str], where: str = "", file_format: str | None = None
    ) -> Fields:
        """Return the fields of ``value``; unknown fields are errors.

        ``file_format``: the required value of the field ``format``, at the top of a file.
        """
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
                raise error(f"{prefix}{key} is not a field of this file; {hint}")
        return Fields(value, error, prefix)

    def has(self, key: str) -> bool:
        """Return whether an optional field is present and not null."""
        return self.data.get(key) is not None

    def text(self, key: str) -> str:
        """Return a string."""
        value = self._get(key)
        if not isinstance(value, str):
            raise self.error(f"{self.where}{key} is {value!r}, not a string")
        return value

    def integer(self, key: str) -> int:
        """Return a whole number of at least 0."""
        return self._integer(self._get(key), key)

    def number(self, key: str) -> float:
        """Return a finite number of at least 0."""
        return self._number(self._get(key), key)

    def scalar(self, key: str) -> str | float:
        """Return a string, or a finite number of at least 0: a quantity with or without its unit."""
        value = self._get(key)
        return value if isinstance(value, str) else self._number(value, key)

    def flag(self, key: str) -> bool:
        """Return true or false."""
        value = self._get(key)
        if not isinstance(value, bool):
            raise self.error(f"{self.where}{key} is {value!r}, not true or false")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return an object with any fields."""
        value = self._get(key)
        if not isinstance(value, dict):
            raise self.error(f"{self.where}{key} is {value!r}, not an object")
        return value

    def inner(self, key: str, known: Sequence[str]) -> Fields:
        """Return the fields of an object."""
        return Fields.of(self._get(key), self.error, known=known, where=self.where + key)

    def each(self, key: str, known: Sequence[str]) -> tuple[Fields, ...]:
        """Return the fields of every object of a list."""
        return tuple(
            Fields.of(item, self.error, known=known, where=f"{self.where}{key}[{index}]")
            for index, item in enumerate(self.items(key))
        )

    def items(self, key: str) -> list[Any]:
        """Return a list of any values."""
        value = self._get(key)
        if not isinstance(value, list):
            raise self.error(f"{self.where}{key} is {value!r}, not a list")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        for index, item in enumerate(self.items(key)):
            if not isinstance(item, str):
                raise self.error(f"{self.where}{key}[{index}] is {item!r}, not a string")
        return tuple(self.items(key))

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of whole numbers of at least 0."""
        return tuple(self._integer(item, f"{key}[{index}]") for index, item in enumerate(self.items(key)))

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers of at least 0."""
        return tuple(self._number(item, f"{key}[{index}]") for index, item in enumerate(self.items(key)))

    def pairs(self, key: str) -> tuple[tuple[int, int], ...]:
        """Return a list of pairs of whole numbers of at least 0."""
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
            raise self.error(f"{self.where}{key} is {value!r}, not a whole number of at least 0")
        return value

    def _number(self, value: Any, key: str) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # a whole number larger than any float
                if math.isfinite(value) and value >= 0:
                    return float(value)
        raise self.error(f"{self.where}{key} is {value!r}, not a finite number of at least 0")


@contextlib.contextmanager
def naming_file(path: str | os.PathLike[str], error: type[ValueError]) -> Iterator[None]:
    """Prefix errors of type ``error`` raised inside the block with ``path``."""
    try:
        yield
    except error as found:
        raise error(f"{os.fspath(path)}: {found}") from found


def read_text(path: str | os.PathLike[str], error: type[ValueError], kind: str = "text") -> str:
    """Return the text of a file of ``kind``, in UTF-8. Raises ``error`` if it does not exist or is not text."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as found:
        raise error(f"not a readable {kind} file: {found.strerror}") from found
    except ValueError as found:
        raise error(f"not a readable {kind} file: {found}") from found


def read_json(path: str | os.PathLike[str], error: type[ValueError]) -> Any:
    """Return the data of a JSON file. Raises ``error`` for other files, for NaN, Infinity and repeated fields."""
    text = read_text(path, error, "JSON")
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeats)
    except (ValueError, RecursionError) as found:
        raise error(f"not a readable JSON file: {found}") from found


def read_yaml(path: str | os.PathLike[str], error: type[ValueError]) -> Any:
    """Return the data of a YAML (or JSON) file; nothing in it is executed. Raises ``error`` for other files."""
    text = read_text(path, error, "YAML")
    try:
        return yaml.load(text, _PlainLoader)
    except (ValueError, RecursionError, yaml.YAMLError) as found:
        raise error(f"not a readable YAML file: {found}") from found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the field {key!r} is given twice in one object")
    return data


class _PlainLoader(yaml.SafeLoader):
    """yaml.SafeLoader that rejects a repeated field, as the JSON reader does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ValueError(
                    f"line {key.start_mark.line + 1}: the field {key.value!r} is given twice in one object"
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
