"""Read parsed JSON or YAML into dataclasses; errors name a field by its path, such as ``layers[3].name``.

msgspec checks the types and limits that the dataclass declares. This module adds three things that msgspec does not do
for dataclasses: it refuses unknown fields, it reads null as an absent optional field, and it names the key where the
value of an object with free names is wrong.
"""

from __future__ import annotations

import difflib
import functools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from dapple_tf.profiler.quote import quote

LARGEST_NUMBER = 10**15
"""The largest whole number in a file: sums and products of a few are still short texts."""

_LONGEST_TEXT = 2000  # characters of a name

# Types of fields. The limits hold for files; objects that are made in Python are checked by their own classes.
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_NUMBER)]
Figure = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
Name = Annotated[str, msgspec.Meta(max_length=_LONGEST_TEXT)]

_FIGURE = "a finite number of at least 0"
_EXPECTED = {
    "int": "a whole number of at least 0",
    "float": _FIGURE,
    "str": "a string",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
}
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")  # of a path: a field, or an index

Record = TypeVar("Record")


@dataclass(frozen=True)
class _Reader:
    """Read objects of a file; ``error``: the type of error for a missing, unknown or wrong field."""

    error: type[ValueError]

    def convert(self, data: Any, kind: type[Record], where: str) -> Record:
        """Return ``data`` as an object of the dataclass ``kind``; ``where``: its path in the file."""
        prepared = self._prepare(data, kind, where)
        try:
            return msgspec.convert(prepared, kind)
        except msgspec.ValidationError as found:
            if found.__cause__ is not None:  # the class itself refused the object
                raise found.__cause__ from None
            raise self.error(_explain(str(found), prepared, where)) from found

    def _prepare(self, value: Any, hint: Any, where: str) -> Any:
        """Return ``value`` without optional fields that are null, and with the objects of free names converted."""
        if _is_plain(hint):
            return value
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            for argument in arguments:
                value = self._prepare(value, argument, where)
        elif origin is Literal and isinstance(value, str) and value not in arguments:
            raise self.error(f"{where} is {quote(value)}; known are {', '.join(arguments)}")
        elif origin is tuple and isinstance(value, list):
            return [self._prepare(item, arguments[0], f"{where}[{index}]") for index, item in enumerate(value)]
        elif isinstance(value, dict) and is_dataclass(hint):
            return self._prepare_object(value, hint, where)
        elif isinstance(value, dict) and origin is Mapping:
            for name in value:
                if not isinstance(name, str):  # YAML reads an unquoted 1080 as a number
                    raise self.error(f"{where} has the name {quote(name)}, which is not a string: write it in quotes")
            return {name: self.convert(inner, arguments[1], f"{where}.{name}") for name, inner in value.items()}
        return value

    def _prepare_object(self, value: Mapping[Any, Any], kind: Any, where: str) -> dict[str, Any]:
        hints, optional = _fields_of(kind)
        prefix = f"{where}." if where else ""
        for key in value:
            if key not in hints:
                raise self.error(_describe_unknown(key, list(hints), prefix))
        return {
            key: self._prepare(inner, hints[key], prefix + key)
            for key, inner in value.items()
            if inner is not None or key not in optional
        }


def read_record(
    data: Any, kind: type[Record], error: type[ValueError], where: str = "", *, file_format: str | None = None
) -> Record:
    """Return parsed JSON or YAML as an object of the dataclass ``kind``.

    ``where``: the path of ``data`` in its file. ``file_format``: the required value of the field ``format``, at the top
    of a file. An optional field (one with a default) may be null. Raises ``error`` naming the field that is unknown,
    missing or wrong; errors that ``kind`` raises itself are passed on.
    """
    if file_format is not None:
        if not isinstance(data, dict):
            raise error(f"it holds {quote(data)}, not an object with the field format, {file_format!r}")
        if "format" not in data:
            raise error(f"format is missing; it must be {file_format!r}")
        if (found := data["format"]) != file_format:
            raise error(f"format is {quote(found)}, not {file_format!r}{_describe_source(found, file_format)}")
        data = {key: value for key, value in data.items() if key != "format"}
    return _Reader(error).convert(data, kind, where)


def write_record(record: Any, *, empty: bool = True) -> dict[str, Any]:
    """Return the fields of a dataclass as a file holds them, and of the dataclasses in them.

    Fields that are None are left out, and without ``empty`` those that are empty tuples, lists or dictionaries.
    """

    def is_absent(value: Any) -> bool:
        return value is None or (not empty and isinstance(value, tuple | list | dict) and not value)

    return asdict(record, dict_factory=lambda fields: {name: value for name, value in fields if not is_absent(value)})


_SOURCES = {
    "dapple-plan": "a plan, which `dapple plan profile.json -o plan.json` makes",
    "dapple-profile": "a profile, which `dapple profile MODEL -o profile.json` makes",
}


def _describe_source(found: Any, wanted: str) -> str:
    """Return how to make a file of the ``wanted`` format; "" where only the version differs, or it is not known."""
    name = wanted.partition("/")[0]
    return "" if name not in _SOURCES or str(found).partition("/")[0] == name else f": give {_SOURCES[name]}"


@functools.cache
def _fields_of(kind: Any) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Return the types of a dataclass's fields by name, and the names of those with a default."""
    hints = get_type_hints(kind)
    optional = [f.name for f in fields(kind) if f.default is not MISSING or f.default_factory is not MISSING]
    return {field.name: hints[field.name] for field in fields(kind)}, frozenset(optional)


@functools.cache
def _is_plain(hint: Any) -> bool:
    """Return whether values of this type hold no objects with known fields, and no choice between words."""
    if hint in (int, float, str, bool, NoneType, Any, ...):
        return True
    return get_origin(hint) not in (None, Literal) and all(map(_is_plain, get_args(hint)))


def _describe_unknown(key: object, known: Sequence[str], prefix: str) -> str:
    shown = quote(key).strip("'") if isinstance(key, str) else quote(key)
    near = difflib.get_close_matches(shown, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    return f"{prefix}{shown} is not a field of this file; {hint}"


def _explain(message: str, data: Any, where: str) -> str:
    """Return the error for a message of msgspec, such as ``Expected `int`, got `str` - at `$.layers[3].name```."""
    what, _, path = message.partition(" - at `$")
    value = data
    for field, index in _STEP.findall(path):
        value = value[field] if field else value[int(index)]
    place = f"{where}{path.rstrip('`')}".removeprefix(".")
    quoted = re.findall("`(.+?)`", what)
    if what.startswith("Object missing"):
        return f"{place}.{quoted[0]} is missing".removeprefix(".")
    if " of length <= " in what:
        return f"{place} has {len(value)} characters; at most {what.rpartition(' ')[2]} are read"
    if "`int` <= " in what:
        return f"{place} is {quote(value)}, larger than is plausible ({float(what.rpartition(' ')[2]):g})"
    if " of length " in what:
        return f"{place} is {quote(value)}, not a list of {what.partition(',')[0].rpartition(' ')[2]} values"
    kinds = quoted[0].split(" | ") if quoted else ["float"]  # a whole number larger than any float
    expected = ", or ".join(_EXPECTED[kind] for kind in kinds if kind != "null")
    return f"{place} is {quote(value)}, not {expected}"
