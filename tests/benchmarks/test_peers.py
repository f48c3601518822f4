"""The comparison with PyTorch: left out with a reason where it is absent, and a rank that fails is reported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers import MODELS, PAIRS, find_missing_python, main, run_theirs
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec


def test_without_pytorch_the_reason_says_how_to_install_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = tmp_path / "peers" / "bin" / "python"
    wanted = f"it needs PyTorch in an environment of its own: python3 -m venv {tmp_path / 'peers'} && "
    assert str(find_missing_python(python)).startswith(wanted)
    assert main(["--python", str(python)]) == 0
    assert wanted in capsys.readouterr().err


def test_an_environment_without_pytorch_is_refused() -> None:
    assert "install torch" in str(find_missing_python(Path(sys.executable)))


def test_a_rank_that_fails_is_reported_with_the_end_of_its_errors() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)pytorch\.py dense 1F1B failed:.*No module named 'torch'"):
        run_theirs("dense", PAIRS[0], 2, Path(sys.executable))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.ours)
def test_both_schedules_have_as_many_stages_in_a_rank(pair: object) -> None:
    assert isinstance(pair, type(PAIRS[0]))
    for ranks in {ranks for numbers in MODELS.values() for ranks in numbers}:
        built = ScheduleSpec.parse(pair.ours).build(ranks * pair.chunks, 8)
        assert len(built.workers) == ranks
