"""Devices: which there are, their names, and when ``dapple.init`` can configure them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.devices import home_device, init, list_devices
from dapple_tf.distributed import membership
from dapple_tf.distributed.membership import Job
from dapple_tf.errors import DappleWarning, DeviceError, UsageError

EIGHT = tuple(f"/device:CPU:{i}" for i in range(8))


def test_without_gpus_the_logical_cpus_are_the_devices() -> None:
    assert list_devices() == EIGHT
    assert home_device() == EIGHT[0]


@pytest.mark.parametrize(
    "name", ["CPU:3", "cpu:3", "/CPU:3", "/device:CPU:3", "/job:localhost/replica:0/task:0/device:CPU:3", 3]
)
def test_a_device_can_be_given_in_any_spelling_or_by_index(name: str | int) -> None:
    assert list_devices([name, "CPU:0"]) == ("/device:CPU:3", "/device:CPU:0")


def test_the_device_of_a_variable_is_a_valid_name() -> None:
    with tf.device("CPU:5"):
        variable = tf.Variable(1.0)
    assert list_devices([variable.device]) == ("/device:CPU:5",)


@pytest.mark.parametrize("name", ["CPU:8", "GPU:0", "PU:1", "1", "CPU", "", 8, -1, None, 1.5])
def test_a_device_that_does_not_exist_is_named_with_those_that_do(name: Any) -> None:
    with pytest.raises(DeviceError, match=rf"there is no device {name!r}; there are {', '.join(EIGHT)}$"):
        list_devices(["CPU:0", name])


@pytest.mark.parametrize("wanted", ["CPU:0", 2])
def test_devices_must_be_a_list(wanted: Any) -> None:
    with pytest.raises(DeviceError, match=rf"devices={wanted!r}: give a list of names or indices, such as \['CPU:0',"):
        list_devices(wanted)


@pytest.mark.parametrize("devices", [8, None])
def test_a_second_init_with_the_same_number_or_none_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, devices: int | None
) -> None:
    configured: list[object] = []
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", lambda *call: configured.append(call))
    init(devices)
    assert configured == []
    assert list_devices() == EIGHT


@pytest.mark.parametrize("devices", [0, -1])
def test_init_needs_at_least_one_device(devices: int) -> None:
    with pytest.raises(DeviceError, match=f"devices={devices}: at least one is needed"):
        init(devices)


def test_init_with_another_number_comes_too_late() -> None:
    with pytest.raises(
        UsageError, match=r"started with 8 devices: call dapple.init\(devices=3\) before any tensor, var"
    ):
        init(3)


# --- processes that have not started TensorFlow


@dataclass
class Configured:
    """What ``dapple.init`` has configured: number of devices, and threads."""

    devices: int = 0
    intra_op_threads: int = 0
    inter_op_threads: int = 0


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Configured:
    """TensorFlow as it is before it starts, on a machine of two cores."""
    found = Configured()
    threading = SimpleNamespace(
        get_intra_op_parallelism_threads=lambda: found.intra_op_threads,
        set_intra_op_parallelism_threads=lambda count: setattr(found, "intra_op_threads", count),
        get_inter_op_parallelism_threads=lambda: found.inter_op_threads,
        set_inter_op_parallelism_threads=lambda count: setattr(found, "inter_op_threads", count),
    )
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda cpu: None)
    monkeypatch.setattr(
        tf.config, "set_logical_device_configuration", lambda cpu, made: setattr(found, "devices", len(made))
    )
    monkeypatch.setattr(tf.config, "threading", threading)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    return found


@pytest.mark.parametrize(("devices", "count"), [(None, 8), (3, 3), (1, 1)])
def test_init_divides_the_cpu_into_logical_devices(fresh: Configured, devices: int | None, count: int) -> None:
    init(devices)
    assert fresh.devices == count


@pytest.mark.parametrize(("devices", "threads"), [(1, 0), (2, 1), (8, 1)])
def test_ops_run_on_one_core_where_there_is_a_device_for_every_core(
    fresh: Configured, devices: int, threads: int
) -> None:
    init(devices)
    assert (fresh.intra_op_threads, fresh.inter_op_threads) == (threads, 0)


def test_threads_that_the_user_has_set_stay(fresh: Configured) -> None:
    fresh.intra_op_threads = 4
    init(8)
    assert fresh.intra_op_threads == 4


def join_a_job(monkeypatch: pytest.MonkeyPatch, cores: set[int], rank: int = 0) -> None:
    """Make this process a rank of a job of two, on these cores."""
    monkeypatch.setattr(membership, "join", lambda: Job(2, rank, rank, 2))
    monkeypatch.setattr("dapple_tf.devices.start_exit_reporting", lambda job: None)
    monkeypatch.setattr("dapple_tf.devices.start_exchanges", lambda job: None)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: cores)


@pytest.mark.parametrize(("cores", "user", "threads"), [({0}, 0, 2), ({0}, 5, 5), ({0, 1}, 0, 0)])
def test_a_rank_of_one_core_has_a_thread_for_exchanges_unless_the_user_chose(
    fresh: Configured, monkeypatch: pytest.MonkeyPatch, cores: set[int], user: int, threads: int
) -> None:
    join_a_job(monkeypatch, cores)
    fresh.inter_op_threads = user
    init()
    assert fresh.inter_op_threads == threads


def test_a_rank_has_a_device_and_one_that_detects_failed_steps(
    fresh: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    join_a_job(monkeypatch, {0, 1})
    init()
    assert fresh.devices == 2


# --- GPUs


def fake_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    names = [SimpleNamespace(name=f"/device:GPU:{i}") for i in range(count)]
    cpu = [SimpleNamespace(name="/device:CPU:0")]

    def found(kind: str | None = None) -> Sequence[Any]:
        return {"GPU": names, "CPU": cpu, None: [*cpu, *names]}[kind]

    monkeypatch.setattr(tf.config, "list_physical_devices", found)
    monkeypatch.setattr(tf.config, "list_logical_devices", found)


def test_the_gpus_are_the_devices_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 2)
    init()
    init(2)
    assert list_devices() == ("/device:GPU:0", "/device:GPU:1")
    assert list_devices([1, "CPU:0"]) == ("/device:GPU:1", "/device:CPU:0")
    assert home_device() == "/device:CPU:0"


def test_more_devices_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 2)
    with pytest.raises(DeviceError, match="devices=3, but this machine has 2 GPUs"):
        init(3)


def test_a_rank_on_a_machine_with_gpus_uses_the_one_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 2)
    join_a_job(monkeypatch, {0, 1}, rank=1)
    visible: list[str] = []
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda device, kind: visible.append(device.name))
    init()
    assert visible == ["/device:GPU:1"]


def test_ranks_share_a_gpu_where_there_are_fewer_and_let_its_memory_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 1)
    join_a_job(monkeypatch, {0, 1}, rank=1)
    calls: list[Any] = []
    configured: list[Any] = [None, [tf.config.LogicalDeviceConfiguration(memory_limit=1024)]]
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda device, kind: calls.append(device.name))
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: configured.pop(0))
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, grows: calls.append(grows))
    init()
    assert calls == ["/device:GPU:0", True]
    init()  # the user has limited the memory
    assert calls == ["/device:GPU:0", True, "/device:GPU:0"]


def test_variables_created_in_a_scope_are_on_the_host() -> None:
    with tf.device("CPU:3"), dapple.scope():
        variable = tf.Variable(1.0)
    assert variable.device.endswith(home_device())


def test_a_scope_that_is_entered_after_the_model_was_made_says_that_it_changes_nothing() -> None:
    variable = tf.Variable(tf.ones((64, 64)))
    with (
        pytest.warns(
            DappleWarning, match=r"no variable was created in dapple\.scope\(\): those .* Make the model inside"
        ),
        dapple.scope(),
    ):
        variable.assign_add(variable)
    assert variable.numpy().sum() == 2 * 64 * 64


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="module 'dapple_tf' has no attribute 'pipelines'"):
        _ = dapple.pipelines


@pytest.mark.parametrize("name", dapple.__all__)
def test_the_package_has_every_name_it_promises(name: str) -> None:
    assert getattr(dapple, name) is getattr(dapple, name)
