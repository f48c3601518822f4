"""Checkpoints: saved values are restored under any plan, and damaged files are detected."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.checkpoint.checkpoints import Checkpoints
from dapple_tf.checkpoint.content import Position, read_value
from dapple_tf.checkpoint.file import open_checkpoint, write_checkpoint
from dapple_tf.errors import CheckpointError, DappleWarning, UsageError
from tests.dapple_tf.builders import X, step_of
from tests.paths import ROOT


def job(width: int = 3, *, name: str = "first", dtype: Any = tf.float32, **options: Any) -> tuple[Any, tf.Variable]:
    """Return a step that was built, and a weight of its model."""
    first = tf.Variable(tf.ones((4, width), dtype), name=name)
    second = tf.Variable(tf.ones((width, 1), dtype), name="second")

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(tf.tanh(tf.cast(x, dtype) @ first) @ second))

    step = step_of(loss, **{"optimizer": keras.optimizers.Adam(0.1), **options})
    step.build(X)
    return step, first


@pytest.fixture(scope="module")
def made() -> tuple[Any, tf.Variable]:
    """A job of which tests need no more than the values."""
    return job()


@pytest.fixture
def saving(tmp_path: Path, made: tuple[Any, tf.Variable]) -> Checkpoints:
    """The checkpoints of that job in an empty folder."""
    return Checkpoints(tmp_path, made[0])


def checkpoints_in(folder: Path) -> list[str]:
    """Return the names of all files except the lock."""
    return sorted(name for name in os.listdir(folder) if name != "lock")


def train(step: Any, count: int) -> list[float]:
    return [float(step(X)) for _ in range(count)]


def read_header(path: Path) -> dict[str, Any]:
    """Return the header as a reader of the safetensors format finds it."""
    data = path.read_bytes()
    content = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert isinstance(content, dict)
    return content


# --- restored values


def test_restored_training_continues_bit_by_bit(tmp_path: Path) -> None:
    whole, weight = job()
    expected = train(whole, 4)

    before, _ = job()
    losses = train(before, 2)
    Checkpoints(tmp_path, before).save(2)
    after, restored = job()
    assert Checkpoints(tmp_path, after).restore() == Position(2, 2)
    losses += train(after, 2)
    assert losses == expected
    np.testing.assert_array_equal(restored, weight)


def test_the_number_of_batches_may_differ_from_the_number_of_steps(saving: Checkpoints) -> None:
    saving.save(2, batches=7)
    assert saving.restore() == Position(2, 7)


def test_a_checkpoint_is_restored_under_another_plan(tmp_path: Path) -> None:
    before, weight = job(stages=2, dtype=tf.float64)
    train(before, 3)
    Checkpoints(tmp_path, before).save(3)
    after, restored = job(stages=3, replicas=[2, 1, 1], micro_batches=4, dtype=tf.float64)
    assert Checkpoints(tmp_path, after).restore() == Position(3, 3)
    np.testing.assert_array_equal(restored, weight)
    np.testing.assert_allclose(train(after, 5), train(before, 5), rtol=1e-12)


def keras_job(**options: Any) -> tuple[Any, keras.Model]:
    """Return a step and its model: two dense layers of one name, batch norm (state) and dropout (a seed)."""
    keras.utils.set_random_seed(3)
    keras.backend.clear_session()

    class Pair(keras.layers.Layer):
        def __init__(self, name: str) -> None:
            super().__init__(name=name)
            self.dense = keras.layers.Dense(4, "tanh", name="dense")
            self.norm = keras.layers.BatchNormalization(name="norm")

        def call(self, x: Any, training: bool = False) -> Any:
            return self.norm(self.dense(x), training=training)

    layers = [Pair("one"), keras.layers.Dropout(0.3, seed=5), Pair("two")]
    model = keras.Sequential([keras.Input((4,)), *layers], name="net")
    step = step_of(
        lambda x: tf.reduce_mean(tf.square(model(x, training=True) - 1)),
        **{"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), **options},
    )
    step.build(X)
    return step, model


def test_variables_have_the_names_that_keras_gives_them() -> None:
    paths = [f"net/{pair}/{name}" for pair in ("one", "two") for name in ("dense/kernel", "dense/bias")]
    norms = [
        f"net/{pair}/norm/{n}" for pair in ("one", "two") for n in ("gamma", "beta", "moving_mean", "moving_variance")
    ]
    step, model = keras_job()
    assert {variable.path for variable in model.variables} >= {*paths, *norms}
    trained = [*paths, *(name for name in norms if "moving" not in name)]
    slots = [f"optimizer/{name.replace('/', '_')}_momentum" for name in trained]
    seeds = {name for name in step.variables if "seed" in name}
    assert len(seeds) == 1
    assert step.variables.keys() == {*paths, *norms, *slots, *seeds, "optimizer/iteration", "optimizer/learning_rate"}
    assert step.variables["net/two/dense/kernel"] is model.get_layer("two").dense.kernel.value


def test_state_and_random_seeds_are_restored(tmp_path: Path) -> None:
    whole, _ = keras_job()
    expected = train(whole, 4)
    before, _ = keras_job()
    losses = train(before, 2)
    Checkpoints(tmp_path, before).save(2)
    after, _ = keras_job()
    for variable in after.variables.values():  # a value that is not restored must show
        variable.assign(tf.cast(tf.fill(variable.shape, 3), variable.dtype))
    Checkpoints(tmp_path, after).restore()
    assert losses + train(after, 2) == expected


def test_variables_of_one_name_are_numbered_in_the_order_of_their_use() -> None:
    x = tf.constant(X)
    weights = [tf.Variable(tf.ones((4, 4)), name="w") for _ in range(3)]

    def loss(batch: Any) -> Any:
        return tf.reduce_mean(tf.tanh(tf.tanh(tf.tanh(batch @ weights[2]) @ weights[0]) @ weights[1]))

    step = step_of(loss, stages=3)
    step.build(x)
    for name, i in (("w", 2), ("w_1", 0), ("w_2", 1)):
        assert step.variables[name] is weights[i]


def test_variables_of_a_custom_optimizer_are_restored(tmp_path: Path) -> None:
    class Counting(keras.optimizers.SGD):
        """Counts updates in a variable that Keras does not know of, and makes smaller updates with time."""

        def __init__(self) -> None:
            super().__init__(0.1)
            self.sum = tf.Variable(1.0, trainable=False, name="sum")

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            self.assign_sub(variable, gradient * learning_rate / tf.cast(self.sum.assign_add(1.0), gradient.dtype))

    whole, _ = job(optimizer=Counting(), stages=1)
    expected = train(whole, 4)
    before, _ = job(optimizer=Counting(), stages=1)
    train(before, 2)
    Checkpoints(tmp_path, before).save(2)
    after, _ = job(optimizer=Counting(), stages=1)
    assert "optimizer/sum" in after.variables
    Checkpoints(tmp_path, after).restore()
    assert train(after, 2) == expected[2:]


@pytest.mark.parametrize(
    ("dtype", "code", "size"),
    [
        ("float16", "F16", 2),
        ("bfloat16", "BF16", 2),
        ("float64", "F64", 8),
        ("complex64", "C64", 8),
        ("bool", "BOOL", 1),
        ("uint32", "U32", 4),
        ("int64", "I64", 8),
    ],
)
def test_values_of_any_dtype_are_restored_bit_by_bit(tmp_path: Path, dtype: str, code: str, size: int) -> None:
    values = tf.cast(tf.constant([[0.1, 1], [2, 0]]), dtype)
    empty, scalar = tf.zeros((0, 2), dtype), tf.cast(1, dtype)
    held = [tf.Variable(value, trainable=False, name=f"held{i}") for i, value in enumerate((values, empty, scalar))]
    weight = tf.Variable(tf.ones((4, 1)), name="weight")

    def loss(x: Any) -> Any:
        extra = tf.add_n([tf.reduce_sum(tf.cast(tf.cast(v, tf.bool), tf.float32)) for v in held])
        return tf.reduce_mean(x @ weight) + 0 * extra

    step = step_of(loss, stages=1)
    step.build(X)
    path = Path(Checkpoints(tmp_path, step).save(1))
    header = read_header(path)
    assert header["held0"]["dtype"] == code
    assert [header[f"held{i}"]["shape"] for i in range(3)] == [[2, 2], [0, 2], []]
    begin, end = header["held0"]["data_offsets"]
    assert end - begin == 4 * size
    for variable in held:
        variable.assign(tf.zeros(variable.shape, dtype))
    Checkpoints(tmp_path, step).restore()
    for variable, value in zip(held, (values, empty, scalar), strict=True):
        np.testing.assert_array_equal(variable.numpy(), value.numpy())


def test_the_file_is_in_the_safetensors_format(tmp_path: Path, made: tuple[Any, tf.Variable]) -> None:
    """Read by the description of the format: length, header, and tensors without gaps."""
    step, weight = made
    path = Path(Checkpoints(tmp_path, step).save(4, 6))
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = read_header(path)
    texts = header.pop("__metadata__")
    assert (texts["format"], texts["steps"], texts["batches"]) == ("dapple-checkpoint/1", "4", "6")
    assert start % 8 == 0
    places = sorted(entry["data_offsets"] for entry in header.values())
    assert [begin for begin, _ in places] == [0, *(end for _, end in places[:-1])]
    assert start + places[-1][1] == len(data)
    begin, end = header["first"]["data_offsets"]
    np.testing.assert_array_equal(np.frombuffer(data[start + begin : start + end], "<f4").reshape(4, 3), weight)


# --- the folder


def test_an_empty_folder_is_a_fresh_start(tmp_path: Path, made: tuple[Any, tf.Variable]) -> None:
    step, weight = made
    before = weight.numpy()
    assert Checkpoints(tmp_path / "new" / "folder", step).restore() == Position(0, 0)
    np.testing.assert_array_equal(weight, before)


def test_the_last_two_checkpoints_are_kept(tmp_path: Path, saving: Checkpoints) -> None:
    paths = [saving.save(n) for n in (1, 9, 10, 11)]
    assert paths[0] == str(tmp_path / "checkpoint-1.safetensors")
    assert checkpoints_in(tmp_path) == ["checkpoint-10.safetensors", "checkpoint-11.safetensors"]
    assert saving.restore().steps == 11


def test_a_run_that_did_not_restore_cannot_save_beside_later_checkpoints(
    tmp_path: Path, made: tuple[Any, tf.Variable]
) -> None:
    Checkpoints(tmp_path, made[0]).save(5)
    with pytest.raises(
        CheckpointError, match=r"already has checkpoint-5\.safetensors, of a later step than 2: restore"
    ) as raised:
        Checkpoints(tmp_path, made[0]).save(2)
    assert not raised.value.lasts, "the next start restores it"
    assert checkpoints_in(tmp_path) == ["checkpoint-5.safetensors"]


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/here"])
def test_a_path_that_cannot_be_a_folder_of_checkpoints_is_refused(
    tmp_path: Path, made: tuple[Any, tf.Variable], place: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match=f"{place} cannot hold checkpoints: (it is a file, not a folder|Not a directory|No such)"
    ):
        Checkpoints(tmp_path / place, made[0])


def test_a_folder_that_cannot_be_written_is_refused(made: tuple[Any, tf.Variable]) -> None:
    with pytest.raises(CheckpointError, match="/proc cannot hold checkpoints: "):
        Checkpoints("/proc", made[0])


def test_a_folder_with_checkpoints_of_tensorflow_is_refused(tmp_path: Path, made: tuple[Any, tf.Variable]) -> None:
    tf.train.Checkpoint(v=tf.Variable(1.0)).save(str(tmp_path / "ckpt"))
    with pytest.raises(
        CheckpointError, match=r"holds checkpoints of tf\.train\.Checkpoint \(ckpt-1\.index\), which have"
    ):
        Checkpoints(tmp_path, made[0])


def test_a_step_that_was_not_built_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing has been built: call the step with a batch first"):
        Checkpoints("folder", step_of(lambda x: x))


def test_a_variable_of_a_dtype_without_a_format_is_refused(tmp_path: Path) -> None:
    weight, text = tf.Variable(tf.ones((4, 1))), tf.Variable("some text", trainable=False, name="title")
    step = step_of(lambda x: tf.reduce_mean(x @ weight) + 0 * tf.cast(tf.strings.length(text), tf.float32), stages=1)
    step.build(X)
    with pytest.raises(CheckpointError, match=r"variable 'title' \(string, shape \(\)\) cannot be saved"):
        Checkpoints(tmp_path, step)


# --- other models


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"name": "fist"},
            r"checkpoint-1\.safetensors is of another model or optimizer: it lacks 'fist' \(nearest: 'first'\)"
            r".* it has 'first' \(nearest: 'fist'\)",
        ),
        ({"optimizer": keras.optimizers.SGD(0.1)}, r"it has 'optimizer/\w*first\w*_momentum'.*and 1 more, which this"),
        ({"width": 5}, r"has 'first' as float32 \[4, 3\], but here it is float32 \[4, 5\]"),
        ({"dtype": tf.float64}, r"has 'first' as float32 \[4, 3\], but here it is float64 \[4, 3\]"),
    ],
    ids=["name", "optimizer", "shape", "dtype"],
)
def test_another_model_is_refused(saving: Checkpoints, tmp_path: Path, options: dict[str, Any], said: str) -> None:
    saving.save(1)
    step, _ = job(**options)
    before = {name: variable.numpy() for name, variable in step.variables.items()}
    with pytest.raises(CheckpointError, match=said):
        Checkpoints(tmp_path, step).restore()
    for name, variable in step.variables.items():
        np.testing.assert_array_equal(variable.numpy(), before[name])


# --- damage


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "text": lambda data: b"this is no checkpoint at all",
    "torn": lambda data: data[: len(data) // 2],
    "last byte missing": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "overwritten": lambda data: data[:-100] + b"x" * 100,
}


def save_and_damage(made: tuple[Any, tf.Variable], folder: Path, damage: Callable[[bytes], bytes]) -> Checkpoints:
    """Save a checkpoint of sevens and a damaged one of eights; the first one is restored."""
    step, weight = made
    saving = Checkpoints(folder, step)
    weight.assign(tf.fill((4, 3), 7.0))
    saving.save(1)
    weight.assign(tf.fill((4, 3), 8.0))
    path = Path(saving.save(2))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(DappleWarning, match=r"checkpoint-2\.safetensors is damaged.* continuing from .*checkpoint-1\."):
        assert saving.restore() == Position(1, 1)
    np.testing.assert_array_equal(weight, np.full((4, 3), 7))
    return saving


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_renamed_and_the_one_before_it_loaded(
    tmp_path: Path, made: tuple[Any, tf.Variable], how: str
) -> None:
    saving = save_and_damage(made, tmp_path, DAMAGE[how])
    assert checkpoints_in(tmp_path) == ["checkpoint-1.safetensors", "checkpoint-2.safetensors.damaged"]
    saving.save(2)
    assert saving.restore() == Position(2, 2)


def sign(header: bytes, body: bytes) -> bytes:
    """Return the file of a header, whose checksum is written as zeros, and of the tensors."""
    zeroed = len(header).to_bytes(8, "little") + header
    return zeroed.replace(b"0" * 64, hashlib.sha256(zeroed + body).hexdigest().encode(), 1) + body


def rewrite(data: bytes, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> bytes:
    """A checkpoint whose header and entry of the first variable were changed, with the checksum that belongs to it.

    The header is what ``change`` returns, if that is not None.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"]["sha256"] = "0" * 64
    changed = change(header, header["first"])
    written = json.dumps(header if changed is None else changed).replace('"NINES"', "9" * 5000)
    return sign(written.encode(), data[end:])


HEADERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "nested": lambda header, entry: entry.update(extra=functools.reduce(lambda inner, _: [inner], range(100), [])),
    "lone surrogate": lambda header, entry: header["__metadata__"].update(sha256="\ud800"),
    "no steps": lambda header, entry: header["__metadata__"].__delitem__("steps"),
    "negative steps": lambda header, entry: header["__metadata__"].update(steps="-1"),
    "long steps": lambda header, entry: header["__metadata__"].update(steps="9" * 5000),
    "long offset": lambda header, entry: entry.update(data_offsets=[entry["data_offsets"][0], "NINES"]),
    "float offsets": lambda header, entry: entry.update(data_offsets=[float(place) for place in entry["data_offsets"]]),
    "boolean offset": lambda header, entry: entry.update(data_offsets=[entry["data_offsets"][0], True]),
    "negative offset": lambda header, entry: entry.update(data_offsets=[-8, entry["data_offsets"][1]]),
    "overlap": lambda header, entry: entry.update(data_offsets=header["second"]["data_offsets"]),
    "float shape": lambda header, entry: entry.update(shape=[4.0, 3.0]),
    "another shape": lambda header, entry: entry.update(shape=[4, 4]),
    "negative dimensions": lambda header, entry: entry.update(shape=[-size for size in entry["shape"]]),
    "boolean dimension": lambda header, entry: entry.update(shape=[True, math.prod(entry["shape"])]),
    "shape of text": lambda header, entry: entry.update(shape="43"),
    "metadata of a list": lambda header, entry: header.update(__metadata__=[]),
    "a list": lambda header, entry: list(header),
}


@pytest.mark.parametrize("how", HEADERS)
def test_a_header_that_makes_no_sense_is_damage_even_with_a_checksum(
    tmp_path: Path, made: tuple[Any, tf.Variable], how: str
) -> None:
    save_and_damage(made, tmp_path, lambda data: rewrite(data, HEADERS[how]))


def test_a_header_that_is_too_deep_is_damage(tmp_path: Path, made: tuple[Any, tf.Variable]) -> None:
    save_and_damage(made, tmp_path, lambda data: sign(b"[" * 100_000, data[8 + int.from_bytes(data[:8], "little") :]))


def test_rewriting_alone_is_no_damage(saving: Checkpoints) -> None:
    path = Path(saving.save(1))
    path.write_bytes(rewrite(path.read_bytes(), lambda header, entry: None))
    assert saving.restore() == Position(1, 1)


@pytest.mark.parametrize("kind", ["pipe", "link to nothing", "link to itself", "socket", "device"])
def test_what_is_no_file_is_renamed_and_the_one_before_it_loaded(
    tmp_path: Path, saving: Checkpoints, kind: str
) -> None:
    saving.save(1)
    path = tmp_path / "checkpoint-2.safetensors"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "link to nothing":
            path.symlink_to("nothing")
        case "link to itself":
            path.symlink_to(path.name)
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(path))
        case "device":
            path.symlink_to("/dev/zero")
    with pytest.warns(DappleWarning, match=r"checkpoint-2\.safetensors (is not a regular file|leads nowhere)"):
        assert saving.restore() == Position(1, 1)
    assert checkpoints_in(tmp_path) == ["checkpoint-1.safetensors", "checkpoint-2.safetensors.damaged"]


def test_names_that_only_resemble_those_of_checkpoints_are_left_alone(tmp_path: Path, saving: Checkpoints) -> None:
    others = ["checkpoint-007.safetensors", "checkpoint-\u0663.safetensors", "checkpoint-9.safetensors.bak"]
    for name in others:
        (tmp_path / name).write_text("")
    for number in (1, 2, 7):
        saving.save(number)
    assert checkpoints_in(tmp_path) == sorted(["checkpoint-2.safetensors", "checkpoint-7.safetensors", *others])


def test_a_link_in_place_of_a_part_is_not_followed(tmp_path: Path, made: tuple[Any, tf.Variable]) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep")
    folder = tmp_path / "folder"
    saving = Checkpoints(folder, made[0])
    (folder / f"checkpoint-1.safetensors.{os.getpid()}.part").symlink_to(precious)
    (folder / "checkpoint-1.safetensors").symlink_to(precious)
    saving.save(1)
    assert saving.restore() == Position(1, 1)
    (folder / "checkpoint-9.safetensors.1.part").symlink_to(precious)
    saving = Checkpoints(folder, made[0])
    assert precious.read_text() == "keep"
    assert checkpoints_in(folder) == ["checkpoint-1.safetensors"]


def test_any_flipped_bit_is_detected(tmp_path: Path, saving: Checkpoints) -> None:
    path = Path(saving.save(1))
    good = path.read_bytes()
    random = np.random.default_rng(0)
    header = 8 + int.from_bytes(good[:8], "little")
    places = [*range(8), *random.integers(8, header, 150), *random.integers(header, len(good), 30), len(good) - 1]
    for place in places:
        data = bytearray(good)
        data[place] ^= 1 << int(random.integers(8))
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="is damaged"):
            saving.restore()
    path.write_bytes(good)
    assert saving.restore() == Position(1, 1)


def test_if_all_are_damaged_training_does_not_start_anew(tmp_path: Path, saving: Checkpoints) -> None:
    for number in (1, 2):
        path = Path(saving.save(number))
        path.write_bytes(DAMAGE["torn"](path.read_bytes()))
    with pytest.raises(
        CheckpointError, match=r"checkpoint-2.* is damaged.*checkpoint-1.* is damaged.*No good checkpoint"
    ):
        saving.restore()
    assert checkpoints_in(tmp_path) == ["checkpoint-1.safetensors", "checkpoint-2.safetensors"]


def test_a_file_of_a_later_format_version_is_kept(
    tmp_path: Path, saving: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving.save(1)
    with monkeypatch.context() as patch:
        patch.setattr("dapple_tf.checkpoint.file.FORMAT", "dapple-checkpoint/2")
        saving.save(2)
    with pytest.raises(
        CheckpointError, match=r"has the format 'dapple-checkpoint/2', but this version of dapple reads .*/1'"
    ):
        saving.restore()
    assert "checkpoint-2.safetensors" in os.listdir(tmp_path)


def test_a_file_that_cannot_be_read_is_not_treated_as_damaged(tmp_path: Path, saving: Checkpoints) -> None:
    saving.save(1)
    (tmp_path / "checkpoint-2.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"checkpoint-2\.safetensors cannot be read: Is a directory"):
        saving.restore()


def test_a_file_that_changes_while_it_is_loaded_is_reported(tmp_path: Path, made: tuple[Any, tf.Variable]) -> None:
    found = open_checkpoint(Path(Checkpoints(tmp_path, made[0]).save(1)))
    name = next(iter(found.entries))
    found.path.write_bytes(found.path.read_bytes()[: found.entries[name].begin + 1])
    with pytest.raises(CheckpointError, match=rf"{name}.* cannot be read .* SOME VARIABLES HAVE CHANGED"):
        read_value(found, name)
    found.path.unlink()
    with pytest.raises(CheckpointError, match=r"No such file.* SOME VARIABLES HAVE CHANGED"):
        read_value(found, name)
    os.mkfifo(found.path)
    with pytest.raises(CheckpointError, match=r"is not a regular file.* SOME VARIABLES HAVE CHANGED"):
        read_value(found, name)


def test_a_missing_value_leaves_no_file(tmp_path: Path) -> None:
    variables = {name: tf.Variable(1.0) for name in ("a", "b")}
    with pytest.raises(ValueError, match="shorter"):
        write_checkpoint(tmp_path / "c", variables, [np.float32(1)], {})
    assert not os.listdir(tmp_path)


ENDLESS = """
import sys
import dapple_tf as dapple
dapple.init(2)
from dapple_tf.checkpoint.checkpoints import Checkpoints
from tests.dapple_tf.checkpoint.test_checkpoints import job
step, weight = job(width=30000)
saving = Checkpoints(sys.argv[1], step)
for number in range(1, 1000000):
    weight.assign(weight * 0 + number)
    saving.save(number)
    print(number, flush=True)
"""


def python(program: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    step, _ = job(width=64)
    saving = Checkpoints(tmp_path, step)
    saving.save(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"checkpoint-2\.safetensors cannot be written: File too large$"):
            saving.save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints_in(tmp_path) == ["checkpoint-1.safetensors"]


def test_a_kill_during_a_save_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    """The kill may come while a file is written, between files, or while old files are removed."""
    with python(ENDLESS, tmp_path) as process:
        try:
            assert process.stdout is not None
            printed = 0
            while printed < 5:
                printed = int(process.stdout.readline())
            # Wait until a file is being written.
            for _ in range(2000):
                if any(name.endswith(".part") for name in os.listdir(tmp_path)):
                    break
                time.sleep(0.001)
        finally:
            process.kill()
        printed = max([printed, *map(int, process.stdout.read().split())])
    step, weight = job(width=30000)
    found = Checkpoints(tmp_path, step).restore()
    assert found.steps >= printed
    np.testing.assert_array_equal(weight, np.full((4, 30000), found.steps))
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]
