"""Read and check the fields of parsed JSON or YAML; errors name a field by its path, such as ``layers[3].name``."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from profiler.quote import quote

LARGEST_NUMBER = 10**15
"""The largest whole number in a file: sums and products of a few are still short texts."""

_LONGEST_TEXT = 2000  # characters, unless the reader says otherwise: names


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
                raise error(f"format is {quote(found)}, not {file_format!r}")
            known = ("format", *known)
        if not isinstance(value, dict):
            raise error(f"{where} is {quote(value)}, not an object")
        prefix = f"{where}." if where else ""
        for key in value:
            if key not in known:
                shown = quote(key).strip("'") if isinstance(key, str) else quote(key)
                near = difflib.get_close_matches(shown, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
                raise error(f"{prefix}{shown} is not a field of this file; {hint}")
        return Fields(value, error, prefix)

    def has(self, key: str) -> bool:
        """Return whether an optional field is present and not null."""
        return self.data.get(key) is not None

    def text(self, key: str, longest: int = _LONGEST_TEXT) -> str:
        """Return a string of at most ``longest`` characters."""
        return self._text(self._get(key), key, longest)

    def integer(self, key: str) -> int:
        """Return a whole number of at least 0."""
        return self._integer(self._get(key), key)

    def number(self, key: str) -> float:
        """Return a finite number of at least 0."""
        return self._number(self._get(key), key)

    def scalar(self, key: str) -> str | float:
        """Return a string, or a finite number of at least 0: a quantity with or without its unit."""
        value = self._get(key)
        return self._text(value, key) if isinstance(value, str) else self._number(value, key)

    def flag(self, key: str) -> bool:
        """Return true or false."""
        value = self._get(key)
        if not isinstance(value, bool):
            raise self.error(f"{self.where}{key} is {quote(value)}, not true or false")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return an object with any fields."""
        value = self._get(key)
        if not isinstance(value, dict):
            raise self.error(f"{self.where}{key} is {quote(value)}, not an object")
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
            raise self.error(f"{self.where}{key} is {quote(value)}, not a list")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        return tuple(self._text(item, f"{key}[{index}]") for index, item in enumerate(self.items(key)))

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
                raise self.error(f"{self.where}{key}[{index}] is {quote(item)}, not a pair of whole numbers")
            first, second = (self._integer(part, f"{key}[{index}]") for part in item)
            pairs.append((first, second))
        return tuple(pairs)

    def _get(self, key: str) -> Any:
        if key not in self.data:
            raise self.error(f"{self.where}{key} is missing")
        return self.data[key]

    def _text(self, value: Any, key: str, longest: int = _LONGEST_TEXT) -> str:
        if not isinstance(value, str):
            raise self.error(f"{self.where}{key} is {quote(value)}, not a string")
        if len(value) > longest:
            raise self.error(f"{self.where}{key} has {len(value)} characters; at most {longest} are read")
        return value

    def _integer(self, value: Any, key: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(f"{self.where}{key} is {quote(value)}, not a whole number of at least 0")
        if value > LARGEST_NUMBER:
            raise self.error(f"{self.where}{key} is {quote(value)}, larger than is plausible ({LARGEST_NUMBER:g})")
        return value

    def _number(self, value: Any, key: str) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # a whole number larger than any float
                if math.isfinite(value) and value >= 0:
                    return float(value)
        raise self.error(f"{self.where}{key} is {quote(value)}, not a finite number of at least 0")
