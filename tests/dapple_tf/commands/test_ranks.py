"""Printing and checking on the ranks of a job, and in one process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dapple_tf.commands.ranks import Ranks
from dapple_tf.distributed.membership import Job


def job(rank: int) -> Any:
    def run_on_all(work: Callable[[], Any]) -> Any:
        return work()

    return SimpleNamespace(rank=rank, run_on_all=run_on_all)


@pytest.mark.parametrize(
    ("ranks", "printed"), [(Ranks(Job()), "text\n"), (Ranks(job(0)), "text\n"), (Ranks(job(1)), "")]
)
def test_the_first_rank_prints_and_writes_files(ranks: Ranks, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.print_result("text")
    assert capsys.readouterr().out == printed
    assert ranks.run_on_first(lambda: "written") == ("written" if printed else None)
    assert ranks.job.run_on_all(lambda: "done") == "done"
