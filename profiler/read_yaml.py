"""Read YAML as plain data: scalars, lists and objects.

YAML has more than data. Tags (``!!int x``) choose how a value is made, and are refused. An alias (``*a``) stands for a
value given before, so a few lines may stand for billions of values: they are counted as written out before any is made.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

from profiler.quote import quote

LONGEST_YAML = 2**18
"""Bytes of a YAML file; reading them takes about a second. Larger files can be given as JSON."""

_DEEPEST = 32  # levels of nesting
_MOST_VALUES = 100_000  # with aliases written out
_LONGEST_SCALAR = 2000  # characters; Python cannot print whole numbers of over 4300 digits, 3600 in base 16


def load_yaml(text: str) -> Any:
    """Return the data of a YAML text.

    Raises ValueError for text that is not YAML, repeated fields, tags, and more than 100,000 values (aliases counted as
    written out), 32 levels of nesting, or 2000 characters in a value.
    """
    try:
        loader = _PlainLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _count_values(root, {})
        return loader.construct_document(root)
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
