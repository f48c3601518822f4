"""Profiles with seconds on several kinds of devices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapple_tf.errors import ProfileError
from dapple_tf.profiler.profile import KindSeconds, Profile, Timing
from tests.profiler.builders import make_layer, make_profile

PROFILE = make_profile(
    replace(
        make_layer("a", forward_seconds=4.0, backward_seconds=8.0, parameter_bytes=1.0),
        weights_seconds=2.0,
        kinds={"T4": KindSeconds(6.0, 16.0)},
    ),
    replace(make_layer("b", forward_seconds=1.0), kinds={"T4": KindSeconds(3.0, 2.0), "V100": KindSeconds(0.5, 0.0)}),
    timings=(Timing(2, (1.5, 0.5), (2.0, 0.0)),),
)


def test_a_layer_takes_its_seconds_on_the_kind() -> None:
    on_kind = PROFILE.of_kind("T4", None)
    np.testing.assert_array_equal(on_kind.forward_seconds(8), [6.0, 3.0])
    np.testing.assert_array_equal(on_kind.backward_seconds(8), [16.0, 2.0])


def test_other_batch_sizes_keep_their_ratio_to_the_batch_of_the_profile() -> None:
    on_kind = PROFILE.of_kind("T4", None)
    np.testing.assert_array_equal(on_kind.forward_seconds(2), [1.5 * 6 / 4, 0.5 * 3])
    np.testing.assert_array_equal(on_kind.backward_seconds(2), [2.0 * 2, 2.0 * 2 / 8])  # b had none: by samples


def test_gradients_of_weights_keep_their_share_of_backward() -> None:
    np.testing.assert_array_equal(PROFILE.of_kind("T4", None).weights_seconds(8), [16.0 / 4, 0.0])


def test_a_layer_without_seconds_of_the_kind_takes_its_own_divided_by_the_speed() -> None:
    np.testing.assert_array_equal(PROFILE.of_kind("V100", 2.0).forward_seconds(8), [2.0, 0.5])
    np.testing.assert_array_equal(PROFILE.of_kind("slow", 0.25).backward_seconds(8), [32.0, 0.0])


def test_bytes_are_the_same_on_every_kind() -> None:
    on_kind = PROFILE.of_kind("T4", None)
    np.testing.assert_array_equal(on_kind.parameter_bytes, PROFILE.parameter_bytes)
    assert on_kind.positions() == PROFILE.positions()


def test_the_profile_of_its_own_device_is_itself() -> None:
    assert PROFILE.of_kind(None) is PROFILE
    assert PROFILE.of_kind("equal", 1.0) is PROFILE
    assert PROFILE.of_kind("T4", 1.0) is PROFILE.of_kind("T4", 1.0) is not PROFILE


def test_a_kind_without_costs_is_named() -> None:
    message = (
        r"layers\[0\].kinds \(a\) has no seconds of 'V100', and the cluster gives that kind no speed: add "
        "kinds.V100.speed to the cluster, or the layer's seconds on such a device"
    )
    with pytest.raises(ProfileError, match=message):
        PROFILE.of_kind("V100", None)


def test_kinds_can_be_saved_and_loaded(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == PROFILE
    layers = json.loads((tmp_path / "p.json").read_text())["layers"]
    assert layers[0]["kinds"] == {"T4": {"forward_seconds": 6.0, "backward_seconds": 16.0}}


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({"T4": {"forward_seconds": 1}}, r"layers\[1\].kinds.T4.backward_seconds is missing"),
        (
            {"T4": {"forward_seconds": 1, "backward_seconds": 1e30}},
            r"layers\[1\].kinds.T4.backward_seconds \(b\) is 1e\+30, larger than is plausible",
        ),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, kinds: Any, message: str) -> None:
    path = tmp_path / "p.json"
    PROFILE.save(path)
    data = json.loads(path.read_text())
    data["layers"][1]["kinds"] = kinds
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError, match=f"^{path}: {message}"):
        Profile.load(path)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_speed_is_refused(speed: float) -> None:
    with pytest.raises(ProfileError, match=f"the speed of 'V100' is {speed}, not a finite number above 0"):
        PROFILE.of_kind("V100", speed)
