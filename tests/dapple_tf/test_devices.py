"""Which devices there are, what they may be called, and when they can be made."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.devices import home_device, init, list_devices
from dapple_tf.errors import DeviceError, UsageError

EIGHT = tuple(f"/device:CPU:{i}" for i in range(8))


def test_without_gpus_the_logical_cpus_are_the_devices() -> None:
    assert list_devices() == EIGHT
    assert home_device() == EIGHT[0]


@pytest.mark.parametrize(
    "name", ["CPU:3", "cpu:3", "/CPU:3", "/device:CPU:3", "/job:localhost/replica:0/task:0/device:CPU:3", 3]
)
def test_a_device_has_many_names(name: str | int) -> None:
    assert list_devices([name, "CPU:0"]) == ("/device:CPU:3", "/device:CPU:0")


def test_a_variables_device_is_a_name() -> None:
    with tf.device("CPU:5"):
        variable = tf.Variable(1.0)
    assert list_devices([variable.device]) == ("/device:CPU:5",)


@pytest.mark.parametrize("name", ["CPU:8", "GPU:0", "PU:1", "1", "CPU", "", 8, -1, None, 1.5])
def test_a_device_that_does_not_exist_is_named_with_those_that_do(name: Any) -> None:
    with pytest.raises(DeviceError, match=rf"there is no device {name!r}; there are {', '.join(EIGHT)}$"):
        list_devices(["CPU:0", name])


@pytest.mark.parametrize("wanted", ["CPU:0", 2])
def test_devices_are_a_list(wanted: Any) -> None:
    with pytest.raises(DeviceError, match=rf"devices={wanted!r}: give a list of names or indices, such as \['CPU:0',"):
        list_devices(wanted)


def test_init_again_with_the_same_number_is_fine() -> None:
    init(8)
    init()


@pytest.mark.parametrize("devices", [0, -1])
def test_init_wants_at_least_one_device(devices: int) -> None:
    with pytest.raises(DeviceError, match=f"devices={devices}: at least one is needed"):
        init(devices)


def test_init_with_another_number_comes_too_late() -> None:
    with pytest.raises(
        UsageError, match=r"started with 8 devices: call dapple.init\(devices=3\) before any tensor, var"
    ):
        init(3)


def fake_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    names = [SimpleNamespace(name=f"/device:GPU:{i}") for i in range(count)]
    cpu = [SimpleNamespace(name="/device:CPU:0")]

    def found(kind: str | None = None) -> Sequence[Any]:
        return {"GPU": names, "CPU": cpu, None: [*cpu, *names]}[kind]

    monkeypatch.setattr(tf.config, "list_physical_devices", found)
    monkeypatch.setattr(tf.config, "list_logical_devices", found)


def test_gpus_are_the_devices_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 2)
    init()
    init(2)
    assert list_devices() == ("/device:GPU:0", "/device:GPU:1")
    assert list_devices([1, "CPU:0"]) == ("/device:GPU:1", "/device:CPU:0")
    assert home_device() == "/device:CPU:0"


def test_more_devices_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 2)
    with pytest.raises(DeviceError, match="devices=3, but this machine has 2 GPUs"):
        init(3)


def test_variables_made_in_a_scope_live_on_the_host() -> None:
    with tf.device("CPU:3"), dapple.scope():
        variable = tf.Variable(1.0)
    assert variable.device.endswith(home_device())


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="module 'dapple_tf' has no attribute 'pipelines'"):
        _ = dapple.pipelines


@pytest.mark.parametrize("name", dapple.__all__)
def test_the_package_has_every_name_it_promises(name: str) -> None:
    assert getattr(dapple, name) is getattr(dapple, name)
