"""The C++ library: found where it was installed or compiled, never of other sources, and planning without it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import dapple_tf as dapple
from dapple_tf.errors import DappleWarning
from dapple_tf.planner.search import annealer
from dapple_tf.simulator.native import library
from tests.dapple_tf.planner.builders import make_cluster, make_profile
from tests.processes import run_python

PROFILE = make_profile(*[(1 + i, 2, 3, 4, 5) for i in range(4)])


def test_a_library_of_other_sources_is_not_used(tmp_path: Path) -> None:
    assert library.load_library() is not None
    (built,) = [path for path in library._places(library.source_digest()) if path.exists()][:1]
    copy = Path(shutil.copy(built, tmp_path / "copy.so"))
    assert library._open(copy, "another digest") is None
    (tmp_path / "text.so").write_text("no library")
    assert library._open(tmp_path / "text.so", library.source_digest()) is None


def test_without_a_compiler_best_chooses_among_simpler_plans_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dapple.plan(PROFILE, make_cluster(2), global_batch_size=8)
    monkeypatch.setattr(annealer, "load_library", lambda: None)
    with pytest.warns(DappleWarning, match=r"its search is written in C\+\+, and there is no C\+\+ compiler: install"):
        plan = dapple.plan(PROFILE, make_cluster(2), global_batch_size=8)
    seconds = [dapple.simulate(each, PROFILE, make_cluster(2)).step_seconds for each in (whole, plan)]
    assert seconds[0] <= seconds[1]


def test_folders_that_cannot_be_written_are_no_error() -> None:
    folders = {"HOME": "/proc/nobody", "XDG_CACHE_HOME": "/proc/nobody/cache"}
    code = "from dapple_tf.simulator.native.library import load_library; print(load_library() is not None)"
    assert run_python("-c", code, variables=folders).stdout == "True\n"
