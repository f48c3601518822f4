"""The README is short, and its programs run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.docs.pages import written

README = written()["README.md"]


def test_the_readme_is_short() -> None:
    assert len(README.text.splitlines()) <= 150


@pytest.mark.parametrize("kind", ["keras.Sequential", "@tf.function"])
def test_the_shortest_examples_run_as_they_stand(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = (block.text for block in README.blocks if block.language == "python" and kind in block.text)
    names: dict[str, Any] = {}
    exec(program, names)
    assert len(names["step"].plan.stages) == 2
    if kind == "@tf.function":
        printed = capsys.readouterr().out
        assert "equal to one device" in printed
        assert "critical path" in printed
