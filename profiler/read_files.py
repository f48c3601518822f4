"""Read text, JSON and YAML files as data, in time and memory that grow with the file's size alone.

Files come from anywhere, so each kind has limits: bytes, levels of nesting, digits of a number. A file beyond them is
refused with an error that names the limit. Nothing in a file is ever run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

import yaml

from dapple_tf.profiler.quote import quote

LARGEST_FILE = 16 * 2**20
"""Bytes of a file, unless the reader says otherwise: a profile of 50,000 layers."""

_DEEPEST = 32  # levels of nesting; the files of this project have up to 6
_DIGITS = 1000  # of a whole number; the largest float has 309
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE_HALF = re.compile("[\ud800-\udfff]")


@contextlib.contextmanager
def naming_file(path: str | os.PathLike[str], error: type[ValueError]) -> Iterator[None]:
    """Prefix errors of type ``error`` raised inside the block with ``path``."""
    try:
        yield
    except error as found:
        raise error(f"{os.fspath(path)}: {found}") from found


def read_text(
    path: str | os.PathLike[str], error: type[ValueError], kind: str = "text", largest: int = LARGEST_FILE
) -> str:
    """Return the text of a file of ``kind``, in UTF-8.

    Raises ``error`` if it does not exist, is not text or is larger than ``largest`` bytes; no more than that is read of
    a larger file, or of one without an end.
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read(largest + 1)
        if len(data) > largest:
            raise error(f"not a readable {kind} file: it has more than {largest} bytes")
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError as found:
        raise error("there is no such file") from found
    except OSError as found:
        raise error(f"not a readable {kind} file: {found.strerror}") from found
    except UnicodeDecodeError as found:
        raise error(f"not a readable {kind} file: {found}") from found


def read_json(path: str | os.PathLike[str], error: type[ValueError], largest: int = LARGEST_FILE) -> Any:
    """Return the data of a JSON file.

    Raises ``error`` for other files, for NaN, Infinity and repeated fields, for text that is not Unicode (a lone
    surrogate), and beyond the limits of this module.
    """
    return parse_json(read_text(path, error, "JSON", largest), error)


def parse_json(text: str, error: type[ValueError]) -> Any:
    """Return the data of a JSON text; raises ``error`` as ``read_json`` does."""
    if not text.strip():
        raise error("not a readable JSON file: it is empty")
    try:
        data = json.loads(
            text, parse_constant=_refuse_constant, parse_int=_parse_int, object_pairs_hook=_refuse_repeats
        )
        check_depth(data)
        if _SURROGATE.search(text):
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as found:
        raise error(f"not a readable JSON file: {found}") from found
    return data


def read_yaml(path: str | os.PathLike[str], error: type[ValueError]) -> Any:
    """Return the data of a YAML (or JSON) file; nothing in it is executed.

    Raises ``error`` for other files, for repeated fields and tags, and beyond the limits of ``load_yaml``.
    """
    text = read_text(path, error, "YAML", LONGEST_YAML)
    try:
        return load_yaml(text)
    except ValueError as found:
        raise error(f"not a readable YAML file: {found}") from found


def check_depth(data: Any) -> None:
    """Raise ValueError for data whose lists and objects are nested in more than 32 levels."""
    level: list[Any] = [[data]]
    for _ in range(_DEEPEST + 1):
        values = (value for outer in level for value in (outer.values() if isinstance(outer, dict) else outer))
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise ValueError(f"its lists and objects are nested in more than {_DEEPEST} levels")


def _parse_int(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number of {len(digits)} digits, {digits[:20]}...; the longest has {_DIGITS}")
    return int(digits)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the field {key!r} is given twice in one object")
    return data


# --- Read YAML as plain data: scalars, lists and objects
# YAML has more than data. Tags (``!!int x``) choose how a value is made, and are refused. An alias (``*a``) stands for
# a value given before, so a few lines may stand for billions of values: they are counted as written out before any is
# made.


LONGEST_YAML = 2**18
"""Bytes of a YAML file; reading them takes about a second. Larger files can be given as JSON."""

_MOST_VALUES = 100_000  # with aliases written out
_LONGEST_SCALAR = 2000  # characters; Python cannot print whole numbers of over 4300 digits, 3600 in base 16


def load_yaml(text: str) -> Any:
    """Return the data of a YAML text.

    Raises ValueError for text that is not YAML or not Unicode (a lone surrogate), repeated fields, tags, and more than
    100,000 values (aliases counted as written out), 32 levels of nesting, or 2000 characters in a value.
    """
    try:
        loader = _PlainLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise ValueError("it is empty")
        _count_values(root, {})
        return loader.construct_document(root)
    except yaml.MarkedYAMLError as found:
        line = "" if found.problem_mark is None else f"line {found.problem_mark.line + 1}: "
        raise ValueError(f"{line}{', '.join(filter(None, (found.context, found.problem)))}") from found
    except (yaml.YAMLError, ArithmeticError, RecursionError) as found:
        raise ValueError(str(found)) from found


def _count_values(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Return how many values the node holds with its aliases written out; ``known``: those of nodes seen before.

    The nesting is limited, so the recursion is too.
    """
    if node not in known:
        parts = [] if isinstance(node, yaml.ScalarNode) else node.value
        inner = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
        known[node] = 1 + sum(_count_values(part, known) for part in inner)
    if known[node] > _MOST_VALUES:
        raise ValueError(f"line {node.start_mark.line + 1}: with aliases written out, more than {_MOST_VALUES} values")
    return known[node]


class _PlainLoader(yaml.SafeLoader):
    """yaml.SafeLoader that refuses tags, repeated fields and deep nesting."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: set[str] = set()  # anchors of the values that are being read
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # its stub has no types
        line = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self._open:
                raise ValueError(f"{line}: the alias *{quote(event.anchor)} is inside the value that it stands for")
        elif event.tag is not None:
            raise ValueError(f"{line}: the tag {quote(event.tag)}: tags are not read, only plain values")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > _LONGEST_SCALAR:
            raise ValueError(f"{line}: a value of {len(event.value)} characters; at most {_LONGEST_SCALAR} are read")
        if isinstance(event, yaml.ScalarEvent) and _SURROGATE_HALF.search(event.value):
            raise ValueError(f"{line}: {quote(event.value)} is not Unicode text: it has half of a surrogate pair")
        if self._depth > _DEEPEST:
            raise ValueError(f"{line}: lists and objects are nested in more than {_DEEPEST} levels")
        opened = {str(event.anchor)} if isinstance(event, yaml.CollectionStartEvent) and event.anchor else set()
        self._depth += 1
        self._open |= opened
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._open -= opened
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ValueError(
                    f"line {key.start_mark.line + 1}: the field {quote(key.value)} is given twice in one object"
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
