"""Compiled code on disk: what is older than the sources is compiled again."""

from __future__ import annotations

import os
from pathlib import Path

from dapple_tf.simulator.compiled import _drop_stale_code


def write(path: Path, text: str, seconds: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (seconds, seconds))
    return path


def test_code_older_than_a_source_of_compiled_functions_is_removed(tmp_path: Path) -> None:
    write(tmp_path / "a" / "source.py", "from dapple_tf.simulator.compiled import compiled", 100)
    write(tmp_path / "b" / "plain.py", "nothing is compiled here", 300)
    old = [write(tmp_path / "b" / "__pycache__" / f"f-1.{end}", "", 99) for end in ("nbi", "1.nbc")]
    new = write(tmp_path / "b" / "__pycache__" / "g-1.nbi", "", 200)
    bytecode = write(tmp_path / "b" / "__pycache__" / "source.cpython-311.pyc", "", 1)
    _drop_stale_code(tmp_path)
    assert [path.exists() for path in (*old, new, bytecode)] == [False, False, True, True]


def test_a_package_without_compiled_functions_is_left_alone(tmp_path: Path) -> None:
    code = write(tmp_path / "__pycache__" / "f-1.nbi", "", 99)
    write(tmp_path / "plain.py", "", 100)
    _drop_stale_code(tmp_path)
    assert code.exists()
