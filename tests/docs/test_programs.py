"""Programs and commands of the pages run as printed, each as a whole, and print what the page shows.

A block of Python is a program. A block of text that begins with ``$ dapple`` is a command with its output; a YAML block
with a title is a file that it reads. Output shown under the title "prints" is that of the program above it. In shown
output a line ``...`` stands for any lines, and ``...`` in a line for any text.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest

from dapple_tf.planner import registration
from tests.docs.pages import Block, Page, written
from tests.paths import ROOT

ELSEWHERE = {"README.md"}  # other tests run its programs


def _from_examples(block: Block) -> bool:
    """Whether the block is a file of ``examples/``, or a part of one, which the tests of the examples run."""
    return re.match(r"--8<--\nexamples/", block.text) is not None


def _programs() -> Iterator[Any]:
    for page in written().values():
        blocks = page.blocks
        for number, block in enumerate(blocks):
            if block.language == "python" and page.path not in ELSEWHERE and not _from_examples(block):
                after = blocks[number + 1] if number + 1 < len(blocks) else None
                prints = after.text if after is not None and after.title == "prints" else None
                yield pytest.param(page, block.text, prints, id=f"{page.path}-{number}")


def _commands(page: Page) -> list[tuple[str, str]]:
    """The commands of a page, each with the output that is shown."""
    found = []
    for block in page.blocks:
        if block.language == "text" and block.text.startswith("$ dapple"):
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, output = re.sub(r"\\\n\s*", "", part).split("\n", 1)
                found.append((command, output))
    return found


WITH_COMMANDS = [page for page in written().values() if _commands(page)]


# Keras's own warning, where it reads weights.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")
@pytest.mark.parametrize(("page", "program", "prints"), list(_programs()))
def test_a_program_runs_as_printed(
    page: Page, program: str, prints: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registration, "REGISTERED", dict(registration.REGISTERED))  # a page registers a planner
    write_files(page, tmp_path)
    (tmp_path / "program.py").write_text(program, encoding="utf-8")  # a file: TensorFlow reads the source of functions
    keras.backend.clear_session()
    policy = keras.config.dtype_policy()
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            runpy.run_path("program.py", run_name="__main__")
    finally:
        keras.config.set_dtype_policy(policy)
    if prints is not None:
        assert_shown(output.getvalue(), prints)


@pytest.mark.timeout(1200)  # many commands
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.path)
def test_commands_print_what_the_page_shows(page: Page, tmp_path: Path) -> None:
    for folder in ("models", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    write_files(page, tmp_path)
    for command, shown in _commands(page):
        done = subprocess.run(
            [sys.executable, "-m", "dapple_tf", *shlex.split(command)[1:]],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        errors = [line for line in done.stderr.splitlines() if not line.startswith("dapple: ")]  # a terminal's spinner
        assert_shown(done.stdout or "\n".join(errors), shown)


@pytest.mark.parametrize("page", list(written().values()), ids=lambda page: page.path)
def test_every_picture_says_measured_or_simulated(page: Page) -> None:
    """In its description, or in the paragraph after it."""
    for match in re.finditer(r"!\[([^\]]*)\]\([^)]+\)\s*(.*?)(?:\n\n|\Z)", page.text, re.DOTALL):
        assert re.search(r"\b(measured|simulated)\b", match[1] + match[2], re.IGNORECASE), match[0]


def write_files(page: Page, folder: Path) -> None:
    """Write the files that the page shows."""
    for name, text in page.files.items():
        (folder / name).write_text(text, encoding="utf-8")


def assert_shown(printed: str, shown: str) -> None:
    """Check that ``shown`` is what was printed, but for what its dots stand for."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n"
        for line in shown.rstrip().splitlines()
    )
    assert re.fullmatch(pattern + r"\s*", printed.rstrip() + "\n"), f"{printed}\nis not what is shown:\n{shown}"
