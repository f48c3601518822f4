"""DAPPLE_EXCHANGE: natively where all ranks can, else by Horovod's alltoall, and the reason is said once."""

from __future__ import annotations

import json
import re

import pytest

from dapple_tf.distributed.exchange_network import Offer, combine_offers, prefers_alltoall, read_way
from dapple_tf.errors import UsageError
from tests.dapple_tf.distributed.native.peers import needs_library
from tests.processes import RanksError, needs_horovod, run_ranks


def test_the_default_is_auto() -> None:
    assert read_way({}) == read_way({"DAPPLE_EXCHANGE": ""}) == "auto"
    assert [read_way({"DAPPLE_EXCHANGE": way}) for way in ("native", "horovod")] == ["native", "horovod"]


def test_another_value_is_an_error_that_names_the_values() -> None:
    with pytest.raises(UsageError, match=r"DAPPLE_EXCHANGE='tcp': give one of auto, native, horovod"):
        read_way({"DAPPLE_EXCHANGE": "tcp"})


def test_ranks_with_the_same_library_exchange_natively() -> None:
    assert combine_offers([Offer("", "a"), Offer("", "a")]) == ""


def test_the_ranks_without_the_library_are_named_with_the_reason() -> None:
    assert combine_offers([Offer("", "a"), Offer("it is not built", "a")]) == "on rank 1 it is not built"
    assert combine_offers([Offer("it is not built", "a")] * 2) == "on ranks 0, 1 it is not built"


def test_ranks_with_different_libraries_cannot_exchange_natively() -> None:
    assert "the ranks differ in their library" in combine_offers([Offer("", "a"), Offer("", "b")])


def test_gpus_with_nccl_exchange_by_horovod_and_others_by_the_host() -> None:
    assert prefers_alltoall(1, nccl=True)
    assert not prefers_alltoall(1, nccl=False)
    assert not prefers_alltoall(0, nccl=True)


# --- jobs

PROGRAM = """
import json, os, sys
{setup}
import tensorflow as tf
import dapple_tf as dapple
dapple.init()
dapple.init()
from dapple_tf.distributed.membership import current
from tests.dapple_tf.distributed.programs.tied_model import X, make_model
loss, optimizer, _ = make_model()
step = dapple.pipeline(loss, optimizer=optimizer, stages=["layer2"], micro_batches=2)
losses = [float(step(X)) for _ in range(3)]
def ops(definition):
    for function in definition.library.function:
        yield from (node.op for node in function.node_def)
    yield from (node.op for node in definition.node)
found = sorted({{op for op in ops(step.graph_def) if "Dapple" in op or "Alltoall" in op}})
print(json.dumps([current().exchange_way, losses, found]))
current().gather(None)
"""
HIDE_LIBRARY = """
if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 1:
    from dapple_tf.distributed.native import library
    library.library_path = lambda: library.Path("/absent")
"""


def run(way: str, setup: str = "") -> tuple[list[list[object]], list[str]]:
    """Start a job with this DAPPLE_EXCHANGE; return the results and the errors that its ranks printed."""
    ranks = run_ranks(["-c", PROGRAM.format(setup=setup)], 2, environment={"DAPPLE_EXCHANGE": way})
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in ranks], [rank.stderr for rank in ranks]


@needs_horovod
@needs_library
def test_both_ways_train_to_the_same_values_with_tied_weights() -> None:
    native, errors = run("auto")
    horovod, _ = run("horovod")
    for rank in (0, 1):
        assert native[rank][0] == "native"
        assert native[rank][2] == ["DappleReceive", "DappleSend"]
        assert horovod[rank][0] == "horovod"
        assert horovod[rank][2] == ["HorovodAlltoall"]
        assert native[rank][1] == horovod[rank][1]
        assert "alltoall" not in errors[rank]


@needs_horovod
@needs_library
def test_where_a_rank_lacks_the_library_all_use_horovod_and_rank_0_says_so() -> None:
    results, errors = run("auto", HIDE_LIBRARY)
    assert [result[0] for result in results] == ["horovod"] * 2
    said = r"dapple: the ranks exchange tensors by Horovod's alltoall: on rank 1 its library is not built"
    assert len(re.findall(said, errors[0])) == 1
    assert "alltoall" not in errors[1]


@needs_horovod
@pytest.mark.parametrize(
    ("way", "setup", "message"),
    [
        ("tcp", "", r"UsageError: DAPPLE_EXCHANGE='tcp': give one of auto, native, horovod"),
        (
            "auto",
            'os.environ["DAPPLE_EXCHANGE"] = ["auto", "horovod"][int(os.environ["OMPI_COMM_WORLD_RANK"])]',
            r"JobError: the ranks differ in their DAPPLE_EXCHANGE: rank 0 has auto, rank 1 has horovod",
        ),
        ("native", HIDE_LIBRARY, r"UsageError: DAPPLE_EXCHANGE=native is not possible: on rank 1 its library is not"),
    ],
    ids=["unknown", "different", "not possible"],
)
def test_what_cannot_be_is_an_error_when_the_job_starts(way: str, setup: str, message: str) -> None:
    with pytest.raises(RanksError) as caught:
        run(way, setup)
    assert any(re.search(message, rank.stderr) for rank in caught.value.ranks)
