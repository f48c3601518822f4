"""Profiles: validation, files, times for any number of samples, and bytes that cross a cut."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import ProfileError
from dapple_tf.profiler.profile import LayerCost, Profile, Timing, WholeModel
from tests.profiler.builders import make_layer, make_profile, profiles

VALID: dict[str, Any] = {
    "format": "dapple-profile/1",
    "model": "net",
    "batch_size": 8,
    "device": "V100",
    "layers": [
        {
            "name": name,
            "forward_seconds": 0.25,
            "backward_seconds": 0.5,
            "activation_bytes": 100,
            "stash_bytes": 300,
            "parameter_bytes": 40,
        }
        for name in ("embed", "dense", "head")
    ],
    "edges": [[0, 1], [0, 2], [1, 2]],
}
EVERYTHING = {
    **VALID,
    "timings": [{"batch_size": 4, "forward_seconds": [0.1, 0.2, 0.2], "backward_seconds": [0.1, 0.2, 0.25]}],
    "uncuttable": [1],
    "unsplittable": [1, 2],
    "whole": {"forward_seconds": 0.75, "backward_seconds": 1.5},
    "error": 0.03,
}


def written(folder: Path, data: Any) -> Path:
    path = folder / "profile.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_profile_file_is_read_field_by_field(tmp_path: Path) -> None:
    assert Profile.load(written(tmp_path, EVERYTHING)) == Profile(
        model="net",
        batch_size=8,
        device="V100",
        layers=tuple(LayerCost(name, 0.25, 0.5, 100, 300, 40) for name in ("embed", "dense", "head")),
        edges=((0, 1), (0, 2), (1, 2)),
        timings=(Timing(4, (0.1, 0.2, 0.2), (0.1, 0.2, 0.25)),),
        uncuttable=(1,),
        unsplittable=(1, 2),
        whole=WholeModel(0.75, 1.5),
        error=0.03,
    )


MEASURED = {**VALID, "layers": [{**layer, "weights_seconds": 0.125} for layer in VALID["layers"]]}


@pytest.mark.parametrize("data", [VALID, EVERYTHING, MEASURED, {k: v for k, v in VALID.items() if k != "edges"}])
def test_a_profile_is_saved_in_the_documented_format(tmp_path: Path, data: Any) -> None:
    Profile.load(written(tmp_path, data)).save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == data


def test_a_profile_whose_figures_are_numpy_numbers_is_saved(tmp_path: Path) -> None:
    layers = (LayerCost("a", *np.full(5, 0.5)),)
    profile = Profile("net", 8, "V100", layers, whole=WholeModel(*np.full(2, 0.5)), error=np.float64(0.25))
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


@given(profile=profiles())
def test_every_profile_can_be_saved_and_loaded(tmp_path_factory: pytest.TempPathFactory, profile: Profile) -> None:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile


def change_layer(**change: Any) -> dict[str, Any]:
    return {"layers": [VALID["layers"][0], {**VALID["layers"][1], **change}, VALID["layers"][2]]}


def change_timing(**change: Any) -> dict[str, Any]:
    return {"timings": [{**EVERYTHING["timings"][0], **change}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"format": "dapple-plan/1"},
            "format is 'dapple-plan/1', not 'dapple-profile/1': give a profile, which `dapple profile MODEL -o",
        ),
        ({"format": "dapple-profile/2"}, "format is 'dapple-profile/2', not 'dapple-profile/1'$"),
        ({"batch_sise": 8}, "batch_sise is not a field of this file; did you mean 'batch_size'?"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"layers": []}, "layers is empty"),
        (change_layer(name=""), r"layers\[1\].name is empty"),
        (change_layer(name="embed"), r"layers\[1\].name is 'embed', which is the name of layers\[0\]"),
        (change_layer(forward_second=1), r"layers\[1\].forward_second is not a field.*mean 'forward_seconds'"),
        (
            change_layer(weights_seconds=0.75),
            r"layers\[1\].weights_seconds \(dense\) is 0.75, more than its backward_seconds 0.5, which includes it",
        ),
        (change_layer(stash_bytes=10**400), r"layers\[1\].stash_bytes is 10*\.\.\.0*, not a finite number"),
        ({"edges": [[0, 1], [1, 3]]}, r"edges\[1\] is \[1, 3\], but the layers are numbered 0 to 2"),
        ({"edges": [[0, 1, 2]]}, r"edges\[0\] is \[0, 1, 2\], not a list of 2 values"),
        ({"edges": [[0, 0]]}, r"edges\[0\] joins layer 0 \(embed\) to itself"),
        ({"edges": [[0, 1], [0, 1]]}, r"edges\[1\] repeats \[0, 1\]"),
        ({"edges": [[0, 1]]}, r"layer 2 \(head\) is not connected to the rest: the graph has 2 parts"),
        ({"edges": []}, r"layer 0 \(embed\) is not connected to the rest: the graph has 3 parts"),
        ({"edges": [[1, 0], [1, 2]]}, r"edges\[0\]: layer 0 \(embed\) reads layer 1 \(dense\), which comes after it"),
        ({"edges": [[0, 1], [1, 2], [2, 1]]}, r"in a cycle: 1 \(dense\) -> 2 \(head\) -> 1 \(dense\)"),
        (change_timing(batch_size=8), r"timings\[0\].batch_size is 8; .* none the profile's own 8"),
        (change_timing(batch_size=0), r"timings\[0\].batch_size is 0; timings must be at ascending sizes from 1"),
        ({"timings": EVERYTHING["timings"] * 2}, r"timings\[1\].batch_size is 4; timings must be at ascending sizes"),
        (change_timing(forward_seconds=[1]), r"timings\[0\].forward_seconds has 1 value, but there are 3 layers"),
        ({"uncuttable": [3]}, r"uncuttable\[0\] is 3, but the positions between two layers are 1 to 2"),
        ({"unsplittable": [1, 0]}, r"unsplittable\[1\] is 0, but the positions between"),
        ({"whole": {"forward_seconds": 1}}, "whole.backward_seconds is missing"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = written(tmp_path, {**VALID, **change})
    with pytest.raises(ProfileError, match=f"^{path}: .*{message}"):
        Profile.load(path)


@pytest.mark.parametrize("field", ["model", "batch_size", "device", "layers", *VALID["layers"][0]])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    layer = {key: value for key, value in VALID["layers"][0].items() if key != field}
    data = {key: value for key, value in {**VALID, "layers": [layer]}.items() if key != field}
    where = field if field in VALID else rf"layers\[0\].{field}"
    path = written(tmp_path, data)
    with pytest.raises(ProfileError, match=f"^{path}: {where} is missing"):
        Profile.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a readable JSON file: "),
        (json.dumps(VALID)[:-30], "not a readable JSON file: "),
        (json.dumps({**VALID, "error": math.nan}), "not a readable JSON file: NaN is not a number"),
        (json.dumps({**VALID, "error": math.inf}), "not a readable JSON file: Infinity is not a number"),
        (json.dumps({**VALID, "error": 9}).replace("9", "1e999"), "error is inf, not a finite number of at least 0"),
        ('{"model": "a", "model": "b"}', "the field 'model' is given twice in one object"),
        ("[" * 100_000, "not a readable JSON file: "),
    ],
)
def test_a_file_that_is_not_json_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        Profile.load(written(tmp_path, text))


def test_a_folder_or_a_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=f"^{tmp_path}: not a readable JSON file: Is a directory"):
        Profile.load(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="bytes: not a readable JSON file: 'utf-8' codec"):
        Profile.load(tmp_path / "bytes")


def test_a_path_that_cannot_be_written_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"absent/p.json: the profile cannot be written: No such file"):
        make_profile(make_layer()).save(tmp_path / "absent" / "p.json")
    (tmp_path / "p.json").mkdir()
    with pytest.raises(ProfileError, match=r"p.json: the profile cannot be written: Is a directory"):
        make_profile(make_layer()).save(tmp_path / "p.json")
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_profile_made_in_python_is_checked_too(value: float) -> None:
    with pytest.raises(ProfileError, match=r"layers\[0\].parameter_bytes \(a\) is "):
        make_profile(make_layer(parameter_bytes=value))


def seconds_at(samples: float, **by_size: float) -> float:
    """Forward seconds of one layer measured at batch 8 (``s8``) and others."""
    sizes = {int(key[1:]): value for key, value in by_size.items()}
    profile = make_profile(
        make_layer(forward_seconds=sizes.pop(8)),
        timings=tuple(Timing(size, (value,), (0.0,)) for size, value in sizes.items()),
    )
    (seconds,) = profile.forward_seconds(samples)
    return float(seconds)


@pytest.mark.parametrize(
    ("samples", "measured", "seconds"),
    [
        (2, {"s8": 4.0}, 1.0),  # one size: proportional
        (12, {"s8": 4.0}, 6.0),
        (8, {"s4": 3.0, "s8": 4.0, "s16": 8.0}, 4.0),  # at a measured size
        (6, {"s4": 3.0, "s8": 4.0, "s16": 8.0}, 3.5),  # between two
        (10, {"s4": 3.0, "s8": 4.0, "s16": 8.0}, 5.0),
        (32, {"s4": 3.0, "s8": 4.0, "s16": 8.0}, 16.0),  # above: on through 8 and 16
        (2, {"s4": 3.0, "s8": 4.0, "s16": 8.0}, 2.5),  # below: on through 4 and 8, which is 2 at no samples
        (2, {"s4": 1.0, "s8": 4.0}, 0.5),  # below, where that line is -2 at no samples: proportional
        (8, {"s4": 3.0, "s8": 2.0, "s16": 8.0}, 3.0),  # noise: 8 samples do not take less than 4
        (12, {"s4": 3.0, "s8": 2.0, "s16": 8.0}, 5.5),
    ],
)
def test_time_for_a_number_of_samples(samples: float, measured: dict[str, float], seconds: float) -> None:
    assert seconds_at(samples, **measured) == seconds


def test_the_share_of_weight_gradients_in_backward() -> None:
    """One half with parameters where it was not measured, none without; the same at any batch size."""
    layers = (
        LayerCost("plain", 1, 4, 1, 1, 8),
        LayerCost("view", 1, 4, 1, 1, 0),
        LayerCost("measured", 1, 4, 1, 1, 8, weights_seconds=1),
        LayerCost("nothing", 0, 0, 1, 1, 8, weights_seconds=0),
    )
    profile = Profile("net", 4, "test", layers, timings=(Timing(8, (2, 2, 2, 0), (12, 8, 12, 0)),))
    assert profile.weights_seconds(4).tolist() == [2, 0, 1, 0]
    assert profile.weights_seconds(8).tolist() == [6, 0, 3, 0]


def test_backward_has_its_own_times() -> None:
    profile = make_profile(
        make_layer("a", forward_seconds=1.0, backward_seconds=2.0),
        make_layer("b", forward_seconds=3.0, backward_seconds=4.0),
        timings=(Timing(16, (2.0, 6.0), (6.0, 4.0)),),
    )
    assert profile.backward_seconds(12).tolist() == [4.0, 4.0]
    assert profile.forward_seconds(12).tolist() == [1.5, 4.5]


@given(profile=profiles(), samples=st.lists(st.floats(0, 300), min_size=2).map(sorted))
def test_time_never_falls_as_samples_grow(profile: Profile, samples: list[float]) -> None:
    for seconds in (profile.forward_seconds, profile.backward_seconds):
        rows = np.array([seconds(count) for count in samples])
        assert (rows >= 0).all()
        assert (np.diff(rows, axis=0) >= 0).all()


@given(profile=profiles())
def test_time_at_a_measured_size_is_the_measured_or_that_of_a_smaller_one(profile: Profile) -> None:
    measured = {timing.batch_size: timing.forward_seconds for timing in profile.timings}
    measured[profile.batch_size] = tuple(layer.forward_seconds for layer in profile.layers)
    for size in measured:
        so_far = [seconds for other, seconds in measured.items() if other <= size]
        assert profile.forward_seconds(size).tolist() == [max(column) for column in zip(*so_far, strict=True)]


@pytest.mark.parametrize("samples", [-1.0, math.nan, math.inf])
def test_negative_and_infinite_samples_are_refused(samples: float) -> None:
    with pytest.raises(ProfileError, match=r"samples is .*, not a finite number of at least 0"):
        make_profile(make_layer()).forward_seconds(samples)


def test_in_a_chain_the_output_of_the_layer_before_crosses_a_cut() -> None:
    profile = make_profile(*(make_layer(f"l{i}", activation_bytes=10.0**i) for i in range(4)))
    assert profile.crossing_bytes().tolist() == [1, 10, 100]


def test_a_skip_connection_crosses_every_cut_between_once() -> None:
    layers = [make_layer(f"l{i}", activation_bytes=10.0**i) for i in range(5)]
    profile = make_profile(*layers, edges=((0, 1), (0, 2), (0, 3), (1, 2), (2, 3), (2, 4)))
    assert profile.crossing_bytes().tolist() == [1, 11, 101, 100]


@given(profile=profiles())
def test_crossing_bytes_equal_a_count_at_each_cut(profile: Profile) -> None:
    edges = profile.edges or tuple((i, i + 1) for i in range(len(profile.layers) - 1))
    expected = [
        sum(profile.layers[source].activation_bytes for source in {a for a, b in edges if a < cut <= b})
        for cut in range(1, len(profile.layers))
    ]
    assert profile.crossing_bytes().tolist() == expected


def test_positions_are_the_layers_that_may_start_a_stage() -> None:
    profile = make_profile(*(make_layer(f"l{i}") for i in range(5)), uncuttable=(4, 2))
    assert profile.positions() == (1, 3)
    assert make_profile(make_layer()).positions() == ()
