"""Quote values of any size in error messages: the text is short, and only the top levels of the value are read."""

from __future__ import annotations

import reprlib

_CHARACTERS = 120  # of a string or number
_ITEMS = 8  # of a list or object
_LEVELS = 3


def quote(value: object) -> str:
    """Return the ``repr`` of a value that a file holds, or a part of it if the value is long or deeply nested."""
    quoting = reprlib.Repr()
    quoting.maxlevel = _LEVELS
    quoting.maxlist = quoting.maxdict = _ITEMS
    quoting.maxstring = quoting.maxlong = quoting.maxother = _CHARACTERS
    return quoting.repr(value)
