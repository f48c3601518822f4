"""Text as windows of bytes or words; by default the sources of Python's standard library, which every machine has."""

from __future__ import annotations

import dataclasses
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.examples.transformer import cross_entropy

BYTE_VALUES = 256
"""The size of the vocabulary where a token is a byte."""

PAD, UNKNOWN, CLASSIFY, SEPARATOR, MASK, FIRST_WORD = range(6)
"""Where a token is a word: five tokens that are no words, and the most frequent word."""

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text to train on: `data` has its tokens, uint8 bytes or int32 words; `source` is its file or folder."""

    source: Path
    data: np.ndarray
    unit: str = "bytes"


def read_corpus(path: str | os.PathLike[str] | None = None, *, max_bytes: int = 4_000_000) -> Corpus:
    """Read the first `max_bytes` bytes of a text.

    `path`: a file, or a folder whose files are all read, but for hidden ones; None means the standard library's `.py`
    files, without its tests and installed packages. Files are read in the order of their names, with a newline between
    them.

    Raises ValueError if `path` does not exist or holds no text.
    """
    if path is None:
        source = Path(sysconfig.get_path("stdlib"))
        files = _library_files(source)
    else:
        source = Path(path).expanduser()
        files = _all_files(source)

    text = bytearray()
    for file in files:
        if text:
            text += b"\n"
        with file.open("rb") as stream:
            text += stream.read(max_bytes - len(text))
        if len(text) >= max_bytes:
            break
    if not text.strip():
        raise ValueError(f"the corpus {source} holds no text: name a file or folder that does with corpus=PATH")
    return Corpus(source, np.frombuffer(bytes(text), np.uint8))


def words(corpus: Corpus, vocabulary: int) -> Corpus:
    """Return a text of bytes as one of words and punctuation marks, numbered by falling frequency from FIRST_WORD.

    Those that the vocabulary has no room for are UNKNOWN. The same text gives the same numbers.
    """
    found = re.findall(rb"\w+|[^\w\s]", corpus.data.tobytes())
    counts = Counter(found)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - FIRST_WORD]
    numbers = {word: number for number, word in enumerate(ranked, FIRST_WORD)}
    tokens = np.fromiter((numbers.get(word, UNKNOWN) for word in found), np.int32, len(found))
    return Corpus(corpus.source, tokens, "words")


def count_starts(corpus: Corpus, context: int) -> int:
    """Return the number of positions at which a window of `context` + 1 tokens may start.

    Raises ValueError if there is none.
    """
    starts = len(corpus.data) - context
    if starts < 1:
        raise ValueError(
            f"the corpus {corpus.source} has {len(corpus.data)} {corpus.unit}, but a context of {context} needs "
            f"{context + 1} or more: use a smaller context, or a longer text with corpus=PATH"
        )
    return starts


def windows(corpus: Corpus, *, context: int, batch_size: int, seed: int = 0) -> tf.data.Dataset:
    """Return an endless data set of random windows; iterating again gives the same batches again.

    Each element is (x, y), both int32 [batch_size, context]; y is x shifted by one token.

    Raises ValueError if the corpus is shorter than one window of `context + 1` tokens.
    """
    starts = count_starts(corpus, context)
    data = tf.constant(corpus.data)
    offsets = tf.range(context + 1, dtype=tf.int64)

    def cut(draws: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        positions = tf.expand_dims(draws % starts, 1) + offsets
        window = tf.cast(tf.gather(data, positions), tf.int32)
        return window[:, :-1], window[:, 1:]

    draws = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=False)
    return draws.batch(batch_size, drop_remainder=True).map(cut).prefetch(2)


def _library_files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)
        yield from (Path(parent, name) for name in sorted(names) if name.endswith(".py"))


def _all_files(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise ValueError(f"there is no corpus at {path}: name an existing file or folder with corpus=PATH")
    if path.is_file():
        yield path
        return
    for parent, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def text_workload(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    corpus: Corpus,
    *,
    context: int,
    batch_size: int,
    seed: int,
) -> dapple.Workload:
    """Return a model that predicts the next tokens, tokens in and logits out, with its optimizer and `windows`.

    The loss is the mean cross entropy over all positions, in nats, plus the losses of the model's layers.
    """

    def loss_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        loss = cross_entropy(y, model(x, training=True))
        return loss + tf.add_n(model.losses) if model.losses else loss

    return dapple.Workload(loss_fn, optimizer, windows(corpus, context=context, batch_size=batch_size, seed=seed))
