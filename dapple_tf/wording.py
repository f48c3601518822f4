"""Words of messages and tables: a count with its noun, and the names that a misspelt one may stand for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_HISSING = ("s", "x", "z", "ch", "sh")


def format_count(count: int, noun: str) -> str:
    """Return ``1 stage``, ``3 stages``, ``0 micro-batches`` or ``2 entries``; ``noun``: the singular."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}{'es' if noun.endswith(_HISSING) else 's'}"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'gpipe'?)`` where a ``known`` name is like ``name``, which is not known, else nothing."""
    names = list(known)
    near = [other for other in names if other.lower() == name.lower()] or difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]!r}?)" if near and name not in near else ""
