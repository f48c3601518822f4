"""Limits of the readers: size, nesting and digits, and text that is no Unicode."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapple_tf.errors import ProfileError
from dapple_tf.profiler.read_files import LARGEST_FILE, read_json, read_text
from tests.quick import at_most


def read(folder: Path, text: str) -> object:
    path = folder / "data.json"
    path.write_text(text)
    return read_json(path, ProfileError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9" * 5000, r"not a readable JSON file: a number of 5000 digits, 9{20}\.\.\.; the longest has 1000"),
        ('{"a": -' + "9" * 5000 + "}", "a number of 5001 digits"),
        ("[" * 33 + "]" * 33, "its lists and objects are nested in more than 32 levels"),
        ('{"a": ' * 40 + "1" + "}" * 40, "nested in more than 32 levels"),
        ('{"a": "\\ud800"}', "surrogates not allowed"),
        ('{"\\udc00": 1}', "surrogates not allowed"),
    ],
)
def test_json_beyond_a_limit_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        read(tmp_path, text)


def test_json_within_the_limits_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, '{"a": "\\ud83d\\ude00"}') == {"a": "\N{GRINNING FACE}"}
    assert read(tmp_path, "[" * 32 + "]" * 32) != []
    assert read(tmp_path, "9" * 1000) == 10**1000 - 1


def test_a_file_without_an_end_is_refused_after_the_largest_size() -> None:
    with at_most(2), pytest.raises(ProfileError, match=f"it has more than {LARGEST_FILE} bytes"):
        read_text("/dev/zero", ProfileError)


def test_line_ends_of_other_systems_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read_text(tmp_path / "a", ProfileError) == "one\ntwo\nthree\n"
