"""Models of several sizes: each has a table of named sizes, and an option `scale` chooses one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

Size = TypeVar("Size")


def choose_size(scales: Mapping[str, Size], scale: str | int, **changes: Any) -> Size:
    """Return the size named `scale`, with those of the given fields changed that are not None.

    The first name of the table has a second one: "paper". The command line reads `--set scale=48` as a number: it
    stands for the name "48".

    Raises ValueError for a name that the table does not have.
    """
    names = {"paper": next(iter(scales)), **{name: name for name in scales}}
    if str(scale) not in names:
        raise ValueError(f"there is no scale {scale!r}: choose one of {', '.join(names)}")
    given = {field: value for field, value in changes.items() if value is not None}
    return dataclasses.replace(scales[names[str(scale)]], **given)  # type: ignore[type-var]  # sizes are dataclasses
