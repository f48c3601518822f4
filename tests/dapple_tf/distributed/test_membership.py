"""Joining a job, and the calls that its ranks make together: three ranks as threads, without a launcher or Horovod."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from dapple_tf.distributed import membership
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.shared_errors import reporting_rank
from dapple_tf.errors import DeviceError, JobError, PlanError

LAUNCHED = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("SIZE", "2"), ("LOCAL_SIZE", "2"), ("RANK", "1"))}


class FakeHorovod(SimpleNamespace):
    """Horovod's state of a process that is rank 1 of two."""

    def __init__(self) -> None:
        super().__init__(initialized=False, inits=0)

    def init(self) -> None:
        self.inits += 1
        self.initialized = True

    def is_initialized(self) -> bool:
        return bool(self.initialized)

    def size(self) -> int:
        return 2

    local_size = size

    def rank(self) -> int:
        return 1

    local_rank = rank


@pytest.fixture
def horovod(monkeypatch: pytest.MonkeyPatch) -> FakeHorovod:
    fake = FakeHorovod()
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(tensorflow=fake))
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", fake)
    monkeypatch.setattr(membership, "_job", None)
    for name in (
        "HOROVOD_DYNAMIC_PROCESS_SETS",
        "HOROVOD_CYCLE_TIME",
        "HOROVOD_FUSION_THRESHOLD",
        "OMPI_MCA_mpi_yield_when_idle",
        "OMPI_MCA_btl_tcp_flags",
    ):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    return fake


# --- the job of this process


def test_a_process_without_a_launcher_is_alone(horovod: FakeHorovod) -> None:
    assert membership.join({}).is_alone
    assert membership.current().is_alone
    assert horovod.inits == 0


def test_a_rank_that_is_alone_waits_for_nobody_and_raises_what_its_work_raises() -> None:
    job = Job()
    assert (job.size, job.rank, job.local_rank, job.local_size) == (1, 0, 0, 1)
    assert job.broadcast("value") == "value"
    assert job.gather("value") == ["value"]
    assert job.gather_integers("compare the rows of the batch", [3, 4]) == [[3, 4]]
    assert job.agree("batch", 8) == 8
    job.check_call_history()
    error = PlanError("of this process")
    for run in (job.run_on_rank_0, job.run_on_all):
        assert run(lambda: 5) == 5
        with pytest.raises(PlanError) as caught:
            run(lambda: fail(error))
        assert caught.value is error
        assert reporting_rank(error) is None


def fail(error: Exception) -> None:
    raise error


def test_a_process_that_joins_has_one_job_from_then_on(horovod: FakeHorovod) -> None:
    job = membership.join(LAUNCHED)
    assert (job.size, job.rank, job.local_rank, job.local_size) == (2, 1, 1, 2)
    assert membership.join(LAUNCHED) is job
    assert membership.current() is job
    assert horovod.inits == 1


def test_horovod_that_the_user_has_started_is_the_job_too(horovod: FakeHorovod) -> None:
    horovod.init()
    job = membership.current()
    assert membership.join(LAUNCHED) is job
    assert horovod.inits == 1


def test_a_forked_child_is_alone(horovod: FakeHorovod) -> None:
    assert not membership.join(LAUNCHED).is_alone
    child = os.fork()
    if not child:
        os._exit(0 if membership.current().is_alone else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not membership.current().is_alone


def test_joining_sets_what_the_user_has_not(horovod: FakeHorovod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "3")
    membership.join(LAUNCHED)
    settings = {
        "HOROVOD_CYCLE_TIME": "3",
        "HOROVOD_FUSION_THRESHOLD": "16777216",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_btl_tcp_flags": "send,inplace",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    }
    assert {name: os.environ[name] for name in settings} == settings


def test_without_horovod_the_error_says_how_to_install_it(
    horovod: FakeHorovod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)  # importing it fails
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(
        DeviceError, match=r"started 2 processes, but Horovod is not.*run python -m dapple_tf\.distributed\.horovod"
    ):
        membership.join(LAUNCHED)


# --- calls of all ranks


class Exchange:
    """Gathers a value from each of ``size`` threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait(10)
        values = list(self._values)
        self._barrier.wait(10)
        return values


class ThreadJob(Job):
    """A rank that is a thread."""

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        super().__init__(size, rank, rank, size)
        self._exchange = exchange

    def gather(self, value: Any) -> list[Any]:
        self.announce_call("gather")
        return self._exchange.gather(self.rank, value)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return self.gather(value)[source]


def on_three_ranks(call: Callable[[ThreadJob], Any]) -> list[Any]:
    """Return what ``call`` returns, or the error that it raises, on each of three ranks."""
    exchange = Exchange(3)

    def run(rank: int) -> Any:
        try:
            return call(ThreadJob(rank, 3, exchange))
        except Exception as error:  # of any type: the test examines it
            return error

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(run, range(3)))


def texts_of(errors: list[Any]) -> list[str]:
    return [f"{type(error).__name__}: {error}" for error in errors]


def test_rank_0s_result_is_returned_everywhere_and_only_rank_0_works() -> None:
    worked = []

    def work() -> str:
        worked.append(threading.get_ident())
        return "result"

    assert on_three_ranks(lambda job: job.run_on_rank_0(work)) == ["result"] * 3
    assert len(worked) == 1


def test_rank_0s_error_is_raised_everywhere_and_rank_0_prints_it() -> None:
    def work() -> None:
        raise ValueError("no plan")

    errors = on_three_ranks(lambda job: job.run_on_rank_0(work))
    assert texts_of(errors) == ["ValueError: no plan"] * 3
    assert [reporting_rank(error) for error in errors] == [0, 0, 0]


class TwoArgumentsError(Exception):
    """An error that pickle cannot restore: it would call the class with one argument."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


def test_an_error_that_cannot_be_pickled_becomes_a_job_error_with_its_text() -> None:
    def work() -> None:
        raise TwoArgumentsError("no plan", "the air")

    errors = on_three_ranks(lambda job: job.run_on_rank_0(work))
    assert texts_of(errors) == ["JobError: rank 0 failed with TwoArgumentsError: no plan in the air"] * 3


def test_work_on_all_ranks_returns_each_ranks_own_result() -> None:
    assert on_three_ranks(lambda job: job.run_on_all(lambda: job.rank * 10)) == [0, 10, 20]


def test_a_rank_that_fails_raises_its_error_and_the_others_name_it() -> None:
    def work(rank: int) -> int:
        if rank == 2:
            raise KeyError("layer")
        return rank

    errors = on_three_ranks(lambda job: job.run_on_all(lambda: work(job.rank)))
    assert texts_of(errors) == ["JobError: rank 2 failed with KeyError: 'layer'"] * 2 + ["KeyError: 'layer'"]
    assert [reporting_rank(error) for error in errors] == [2, 2, 2]


@pytest.mark.parametrize(("raised", "lasts"), [(PlanError("no plan"), True), (OSError("away"), False)])
def test_the_others_know_whether_another_start_fails_in_the_same_way(raised: Exception, lasts: bool) -> None:
    def work(rank: int) -> None:
        if rank == 2:
            raise raised

    errors = on_three_ranks(lambda job: job.run_on_all(lambda: work(job.rank)))
    assert [error.lasts for error in errors[:2]] == [lasts] * 2


def test_ranks_that_fail_alike_raise_their_errors_and_the_first_prints_it() -> None:
    def work(rank: int) -> int:
        if rank:
            raise KeyError("layer")
        return rank

    errors = on_three_ranks(lambda job: job.run_on_all(lambda: work(job.rank)))
    assert isinstance(errors[0], JobError)
    assert "rank 1 failed with KeyError: 'layer'; rank 2 failed with" in str(errors[0])
    assert [reporting_rank(error) for error in errors] == [1, 1, 1]


def test_a_rank_that_fails_before_a_nested_call_is_named_there() -> None:
    """The others wait in the nested call, not in the outer one."""

    def work(job: ThreadJob) -> Any:
        if job.rank == 1:
            raise KeyError("layer")
        job.agree("layers", 3)
        return "not reached"

    errors = on_three_ranks(lambda job: job.run_on_all(lambda: work(job)))
    assert [type(error) for error in errors] == [JobError, KeyError, JobError]


def test_values_on_which_all_ranks_agree_are_returned() -> None:
    assert on_three_ranks(lambda job: job.agree("batch", 8)) == [8] * 3


@pytest.mark.parametrize(
    ("call", "third"),
    [
        (lambda job: job.agree("batch", 8 if job.rank < 2 else 6), "6"),
        (lambda job: job.agree("batch" if job.rank < 2 else "plan", 8), "nothing"),
        (lambda job: job.agree("batch", 8) if job.rank < 2 else job.run_on_all(lambda: None), "nothing"),
    ],
)
def test_values_that_differ_are_named_with_their_ranks(call: Callable[[ThreadJob], Any], third: str) -> None:
    """A rank that compares another value, or waits for the others' work, has nothing to compare."""
    errors = on_three_ranks(call)
    text = f"the ranks differ in their batch: ranks [0, 1] have 8, rank 2 has {third}. Start the same script"
    assert all(isinstance(error, JobError) and str(error).startswith(text) for error in errors)


def test_values_that_differ_come_with_the_advice_for_them() -> None:
    for error in on_three_ranks(lambda job: job.agree("batch", job.rank, "Seed the data.")):
        assert str(error) == "the ranks differ in their batch: rank 0 has 0, rank 1 has 1, rank 2 has 2. Seed the data."


def test_a_long_value_is_quoted_around_the_first_difference() -> None:
    errors = on_three_ranks(lambda job: job.agree("text", "a" * 900 + "xyz"[job.rank] + "b" * 900))
    for error in errors:
        assert "rank 0 has ... aaa" in str(error)
        assert "aaaxbbb" in str(error)
        assert "bbb ..., rank 1 has" in str(error)
        assert len(str(error)) < 1200


def test_different_histories_of_calls_are_found() -> None:
    def call(job: ThreadJob) -> None:
        job.announce_call("run step 1" if job.rank else "save")
        job.check_call_history()

    errors = on_three_ranks(call)
    assert all("the ranks differ in their batches or calls until now: rank 0 has " in str(error) for error in errors)
