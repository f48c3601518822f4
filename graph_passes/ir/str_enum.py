"""Enumerations whose members are strings (``enum.StrEnum`` needs Python 3.11)."""

from __future__ import annotations

from enum import Enum


class StrEnum(str, Enum):
    """An enumeration whose members compare, hash and print as their values."""

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return repr(self.value)
