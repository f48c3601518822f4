"""The models: they trace with any batch size, learn, depend on their seed only, and refuse wrong options."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.examples import text
from dapple_tf.examples.gpt import build_gpt, gpt
from dapple_tf.examples.images import labelled_images
from dapple_tf.examples.resnet import build_resnet, resnet
from dapple_tf.examples.vgg import build_vgg, vgg
from tests.models.zoo import NAMES, tiny

Build = Callable[..., dapple.Workload]


def tiny_gpt(**options: object) -> dapple.Workload:
    return gpt(**{"layers": 1, "width": 16, "heads": 2, "context": 12, "batch_size": 6, **options})


def tiny_vgg(**options: object) -> dapple.Workload:
    return vgg(**{"scale": "tiny", "batch_size": 6, **options})


def tiny_resnet(**options: object) -> dapple.Workload:
    return resnet(**{"scale": "tiny", "batch_size": 6, **options})


BUILDS = [
    tiny_gpt,
    tiny_vgg,
    tiny_resnet,
    *(pytest.param(functools.partial(tiny, name), id=f"tiny_{name}") for name in NAMES),
]


@dataclass(frozen=True)
class Traced:
    """A workload, and its loss traced with an unknown number of samples."""

    workload: dapple.Workload
    loss: tf.types.experimental.ConcreteFunction


@pytest.fixture(scope="module", params=BUILDS)
def traced(request: pytest.FixtureRequest) -> Traced:
    """Each model, built and traced once for all tests that only read it; float64 shows small differences."""
    workload = request.param(dtype="float64")

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a variable was made while tracing")

    with tf.variable_creator_scope(refuse):
        return Traced(workload, trace(workload))


def test_tracing_makes_no_variable(traced: Traced) -> None:
    assert traced.loss.variables


def test_traced_without_a_batch_size_the_loss_equals_the_eager_one(traced: Traced) -> None:
    check_traced_loss(traced, 1e-12)


@pytest.mark.parametrize("build", [tiny_gpt, tiny_vgg, tiny_resnet])
def test_traced_in_float32_the_loss_equals_the_eager_one(build: Build) -> None:
    workload = build(dtype="float32")
    check_traced_loss(Traced(workload, trace(workload)), 1e-5)


def check_traced_loss(traced: Traced, rtol: float) -> None:
    loss_fn = traced.workload.loss_fn
    first, second = itertools.islice(traced.workload.dataset, 2)
    eager = loss_fn(*first)
    assert eager.shape == []
    assert eager.dtype == traced.loss.outputs[0].dtype
    np.testing.assert_allclose(traced.loss(*first), eager, rtol=rtol)
    half = [tensor[:3] for tensor in second]
    np.testing.assert_allclose(traced.loss(*half), loss_fn(*half), rtol=rtol)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_loss_has_the_dtype_of_the_model(dtype: str) -> None:
    workload = tiny_vgg(dtype=dtype)
    assert workload.loss_fn(*next(iter(workload.dataset))).dtype == dtype


def test_iterating_again_gives_the_same_batches_and_never_ends(traced: Traced) -> None:
    dataset = traced.workload.dataset
    once, again = (list(itertools.islice(dataset, 3)) for _ in range(2))
    for batch, same in zip(once, again, strict=True):
        for tensor, repeated in zip(batch, same, strict=True):
            np.testing.assert_array_equal(tensor, repeated)
    assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY


each_model = pytest.mark.parametrize("build", BUILDS)


@each_model
def test_the_loss_falls(build: Build) -> None:
    losses = train(build(batch_size=16, learning_rate=0.01), steps=20)
    assert np.mean(losses[-3:]) < 0.9 * losses[0]


@each_model
def test_the_seed_decides_weights_and_batches(build: Build) -> None:
    workloads = [build(seed=seed) for seed in (1, 1, 2)]
    one, same, other = (w.loss_fn(*next(iter(w.dataset))) for w in workloads)
    np.testing.assert_allclose(same, one, rtol=1e-6)
    assert not np.allclose(other, one, rtol=1e-6)


def test_the_loss_of_a_gpt_is_a_mean_over_samples() -> None:
    workload = tiny_gpt(dtype="float64")
    x, y = next(iter(workload.dataset))
    parts = [workload.loss_fn(x[i : i + 1], y[i : i + 1]) for i in range(6)]
    np.testing.assert_allclose(np.mean(parts), workload.loss_fn(x, y), rtol=1e-12)


def test_a_gpt_does_not_attend_to_later_positions() -> None:
    model = build_gpt(layers=2, width=16, heads=2, context=8, dropout=0.0, tied=False, dtype="float64", seed=0)
    tokens = np.arange(8)[None]
    changed = tokens.copy()
    changed[0, 5] = 99
    before, after = model(tokens), model(changed)
    np.testing.assert_array_equal(before[0, :5], after[0, :5])
    assert not np.allclose(before[0, 5:], after[0, 5:])


def test_a_tied_head_has_no_variable_of_its_own() -> None:
    untied, tied = (trace(tiny_gpt(tied=tied)).trainable_variables for tied in (False, True))
    assert len(tied) == len(untied) - 1


@pytest.mark.parametrize("tied", [False, True])
def test_the_layers_of_a_gpt_have_the_documented_names(tied: bool) -> None:
    model = build_gpt(layers=2, width=8, heads=2, context=4, dropout=0.0, tied=tied, dtype="float32", seed=0)
    assert [layer.name for layer in model.layers] == ["tokens", "embed", "block_0", "block_1", "norm", "head"]


def test_dropout_makes_the_loss_vary() -> None:
    workload = tiny_gpt(dropout=0.5)
    batch = next(iter(workload.dataset))
    assert float(workload.loss_fn(*batch)) != float(workload.loss_fn(*batch))


@pytest.mark.parametrize(("depth", "weighted"), [(11, 11), (13, 13), (16, 16), (19, 19)])
def test_a_vgg_has_as_many_weighted_layers_as_its_name_says(depth: int, weighted: int) -> None:
    options = {"width": 2, "hidden": 4, "classes": 3, "image_size": 32, "dropout": 0.5}
    model = build_vgg(depth=depth, dtype="float32", seed=0, **options)
    assert sum(bool(layer.trainable_weights) for layer in model.layers) == weighted


@pytest.mark.parametrize("depth", [18, 34, 50, 101])
def test_a_resnet_has_as_many_weighted_layers_as_its_name_says(depth: int) -> None:
    model = build_resnet(depth=depth, width=2, classes=3, image_size=96, dtype="float32", seed=0)
    kernels = [v.path for v in model.trainable_variables if v.name == "kernel" and "projection" not in v.path]
    assert len(kernels) == depth
    assert model.output_shape == (None, 3)


def test_images_of_a_class_are_one_image_plus_noise() -> None:
    images, labels = next(iter(labelled_images(classes=2, image_size=8, batch_size=200, noise=0.1)))
    one = images.numpy()[labels.numpy() == 1]
    assert len(one) > 50
    np.testing.assert_allclose(one.std(axis=0).mean(), 0.1, rtol=0.1)


def test_words_are_numbered_by_their_frequency(tmp_path: Path) -> None:
    corpus = text.read_corpus(write(tmp_path / "words.txt", b"b a, a rare b a one"))
    found = text.words(corpus, text.FIRST_WORD + 3)  # room for a, b and the comma
    a, b, comma = range(text.FIRST_WORD, text.FIRST_WORD + 3)
    assert found.data.tolist() == [b, a, comma, a, text.UNKNOWN, b, a, text.UNKNOWN]
    assert found.data.dtype == np.int32
    with pytest.raises(ValueError, match="has 8 words, but a context of 8 needs 9 or more"):
        text.windows(found, context=8, batch_size=1)


def test_windows_are_text_and_targets_are_shifted_by_one_byte(tmp_path: Path) -> None:
    written = bytes(range(32, 127))
    corpus = text.read_corpus(write(tmp_path / "printable.txt", written))
    x, y = next(iter(text.windows(corpus, context=10, batch_size=4)))
    assert x.dtype == y.dtype == tf.int32
    assert x.shape == y.shape == [4, 10]
    np.testing.assert_array_equal(y, x + 1)
    assert all(bytes(row) in written for row in x.numpy().astype(np.uint8))


def test_the_default_corpus_is_the_standard_library_without_tests() -> None:
    corpus = text.read_corpus(max_bytes=100_000)
    assert len(corpus.data) == 100_000
    assert b"\ndef " in corpus.data.tobytes()
    np.testing.assert_array_equal(corpus.data, text.read_corpus(max_bytes=100_000).data)
    files = set(text._library_files(corpus.source))
    assert corpus.source / "os.py" in files
    assert not any({"site-packages", "test", "tests"} & set(file.relative_to(corpus.source).parts) for file in files)


def test_a_folder_is_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name, content in {"b": b"2", "a": b"1", ".hidden": b"x", "sub/c": b"3", ".git/d": b"x"}.items():
        write(tmp_path / name, content)
    assert text.read_corpus(tmp_path).data.tobytes() == b"1\n2\n3"


def test_a_missing_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no corpus at .*nowhere: .*corpus=PATH"):
        tiny_gpt(corpus=tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b" \n\n"])
def test_an_empty_corpus_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match=r"empty\.txt holds no text: .*corpus=PATH"):
        tiny_gpt(corpus=write(tmp_path / "empty.txt", content))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{tmp_path.name} holds no text"):
        tiny_gpt(corpus=tmp_path)


def test_a_corpus_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    corpus = write(tmp_path / "short.txt", b"twelve bytes")
    with pytest.raises(ValueError, match=r"short\.txt has 12 bytes, but a context of 12 needs 13 or more"):
        tiny_gpt(corpus=corpus, context=12)
    tiny_gpt(corpus=corpus, context=11)


def test_options_of_impossible_models_are_refused() -> None:
    with pytest.raises(ValueError, match="a width of 16 is not a multiple of 3 heads"):
        tiny_gpt(heads=3)
    with pytest.raises(ValueError, match="no VGG of depth 12: choose one of 11, 13, 16, 19"):
        tiny_vgg(depth=12)
    with pytest.raises(ValueError, match="images of 16x16 cannot be halved five times"):
        tiny_vgg(image_size=16)
    with pytest.raises(ValueError, match="no ResNet of depth 20: choose one of 18, 34, 50, 101"):
        tiny_resnet(depth=20)


def trace(workload: dapple.Workload) -> tf.types.experimental.ConcreteFunction:
    """Trace the loss with an unknown number of samples."""
    specs = [tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) for spec in workload.dataset.element_spec]
    return tf.function(workload.loss_fn).get_concrete_function(*specs)


def train(workload: dapple.Workload, *, steps: int) -> list[float]:
    """Train on one device; return the loss of each step."""

    @tf.function
    def step(*batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = workload.loss_fn(*batch)
        variables = tape.watched_variables()
        workload.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    return [float(step(*batch)) for batch in itertools.islice(workload.dataset, steps)]


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path
