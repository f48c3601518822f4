"""The scripts of ``examples/keras/`` give the same history with and without the one line, in one process and two ranks.

image_classification, text_classification, translation, language_model, fine_tuning.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import keras
import pytest

from tests.paths import ROOT
from tests.processes import needs_horovod, run_ranks
from tests.requirements import needs_keras_hub

# Keras's own, where it builds an image layer or reads weights.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")

PROGRAMS = [
    "image_classification",
    pytest.param("text_classification", marks=needs_keras_hub),
    "translation",
    "language_model",
    "fine_tuning",
]


def history(program: str, *, pipelined: bool) -> dict[str, list[float]]:
    keras.backend.clear_session()
    found: dict[str, list[float]] = runpy.run_path(str(ROOT / "examples" / "keras" / f"{program}.py"))["train"](
        pipelined=pipelined
    )
    return found


def assert_same(found: dict[str, Any], expected: dict[str, list[float]]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert len(values) >= 3
        assert found[name] == pytest.approx(values, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_history_with_the_one_line_is_that_without(program: str) -> None:
    expected = history(program, pipelined=False)
    assert_same(history(program, pipelined=True), expected)
    assert expected["loss"][2] < expected["loss"][0]


@needs_horovod
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_history_of_two_ranks_is_that_without_a_pipeline(program: str, tmp_path: Path) -> None:
    ranks = run_ranks(["-m", "tests.examples.keras_ranks", str(tmp_path), program], 2, timeout_seconds=240)
    expected = history(program, pipelined=False)
    for rank in range(2):
        assert_same(json.loads((tmp_path / f"{rank}.json").read_text("utf-8")), expected)
    assert "Epoch 3/3" in ranks[0].stdout
    assert ranks[1].stdout == ""
