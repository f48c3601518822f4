"""The messages that the page of troubles quotes are those of the source."""

from __future__ import annotations

import ast
import re

from tests.docs.pages import read_page
from tests.paths import ROOT

FOLDERS = ("dapple_tf", "graph_passes", "profiler")
OTHERS = {"Killed"}  # the shell says it


def test_every_quoted_message_is_in_the_source() -> None:
    """Of a message the fixed parts are compared: braces and dots stand for what differs from case to case."""
    texts = [text for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") for text in _texts(path.read_text())]
    quoted = re.findall(r"^\| `([^`]+)`", read_page("docs/troubleshooting.md").text, re.MULTILINE)
    assert len(quoted) >= 40
    missing = []
    for message in quoted:
        parts = [part.strip() for part in re.split(r"\{\w+\}|\.\.\.", message)]
        if not all(any(part in text for text in texts) for part in parts if part not in OTHERS):
            missing.append(message)
    assert not missing


def _texts(source: str) -> list[str]:
    """The strings of a module; of an f-string, its fixed parts."""
    return [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
